// Memory that starts at a line of the cache.

#pragma once

#include <sys/mman.h>

#include <cstdint>
#include <cstring>
#include <new>
#include <utility>

namespace {

constexpr int LINE = 64;
constexpr uintptr_t PAGE = 4096;
constexpr int64_t LARGE = int64_t(1) << 22;  // bytes

// Large memory comes in pages of 4 kB, each of which costs an interrupt at its first use, unless Linux is asked for
// larger ones.
inline void ask_for_large_pages([[maybe_unused]] void* data, [[maybe_unused]] int64_t bytes) {
#ifdef MADV_HUGEPAGE
    if (bytes < LARGE) return;
    const uintptr_t first = (uintptr_t(data) + PAGE - 1) / PAGE * PAGE, last = (uintptr_t(data) + bytes) / PAGE * PAGE;
    madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}

template <class T> struct Buffer {
    Buffer() = default;
    explicit Buffer(int64_t n, bool zero = true)
            : size(n), data(static_cast<T*>(::operator new((n * sizeof(T) / LINE + 1) * LINE, std::align_val_t(LINE)))) {
        ask_for_large_pages(data, n * sizeof(T));
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
