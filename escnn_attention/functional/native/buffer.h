// Memory that starts at a line of the cache.

#pragma once

#include <cstdint>
#include <cstring>
#include <new>
#include <utility>

namespace {

constexpr int LINE = 64;

template <class T> struct Buffer {
    Buffer() = default;
    explicit Buffer(int64_t n, bool zero = true)
            : size(n), data(static_cast<T*>(::operator new((n * sizeof(T) / LINE + 1) * LINE, std::align_val_t(LINE)))) {
        if (zero) clear();
    }
    Buffer(Buffer&& other) noexcept : size(other.size), data(other.data) { other.data = nullptr; }
    Buffer& operator=(Buffer&& other) noexcept {
        std::swap(size, other.size), std::swap(data, other.data);
        return *this;
    }
    ~Buffer() { ::operator delete(data, std::align_val_t(LINE)); }
    void clear() const {
        if (size) std::memset(static_cast<void*>(data), 0, size * sizeof(T));
    }
    T& operator[](int64_t i) const { return data[i]; }
    int64_t size = 0;
    T* data = nullptr;
};

}  // namespace
