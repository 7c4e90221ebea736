// Keys with lanes of a vector side by side.

#pragma once

#include "task.h"

namespace {

// N numbers of each key from `entry` on, of `end` in all that can be read: a whole vector of them, or some.
template <class T, int N, bool WHOLE>
inline void pack_block(const Task<T>& task, const T* from, const T* end, int64_t entry, const Rows<T>& to) {
    constexpr int width = WIDTH<T>;
    const int64_t numbers = task.layout.key_numbers, channels = task.call.channels, num_keys = task.num_keys;
    const int64_t some = std::min<int64_t>(N, numbers - entry);
    const int64_t* keys = task.keys;
    // Lanes beyond the numbers of a key are not used.
    const auto row = [&](int64_t key) {
        V<T> x{};
        const T* start = from + keys[key < num_keys ? key : 0] * numbers + entry;
        if (WHOLE || start + width <= end)
            x = load(start);
        else
            std::memcpy(&x, start, some * sizeof(T));
        return x;
    };
    T* at[N];
    for (int i = 0; i < some; i++) at[i] = to[(entry + i) % channels] + (entry + i) / channels * num_keys;
    // What there is too much of the last keys of a pose is written over with the first of the next.
    for (int64_t key = (num_keys - 1) / width * width; key >= 0; key -= width) {
        V<T> x[N];
        for (int i = 0; i < N; i++) x[i] = N < width ? blocks<T, N>(row(key + i), row(key + i + N), false) : row(key + i);
        transpose<T, N>(x);
        UNROLL for (int i = 0; i < N; i++)
            if (WHOLE || i < some) store(at[i] + key, x[i]);
    }
}

// The keys of the group in a head, of (heads, points, P, C), as (C, keys of all poses).
template <class T> void pack(const Task<T>& task, const T* from, const Rows<T>& to) {
    constexpr int width = WIDTH<T>;
    const int64_t numbers = task.layout.key_numbers, size = task.call.points * numbers;
    const T *start = from + task.head * size, *end = from + task.call.heads * size;
    for (int64_t entry = 0; entry < numbers; entry += width)
        numbers - entry >= width      ? pack_block<T, width, true>(task, start, end, entry, to)
        : numbers - entry > width / 2 ? pack_block<T, width, false>(task, start, end, entry, to)
                                      : pack_block<T, width / 2, false>(task, start, end, entry, to);
    for (int64_t channel = 0; channel < task.call.channels; channel++)
        std::fill(to[channel] + task.length, to[channel] + task.padded, T(0));
}

}  // namespace
