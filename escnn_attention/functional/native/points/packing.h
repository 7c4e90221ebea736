// Keys with lanes of a vector side by side.

#pragma once

#include "task.h"

namespace {

// N numbers of each key from `entry` on, of `end` in all that can be read.
template <class T, int N>
inline void pack_block(const Task<T>& task, const T* from, const T* end, int64_t entry, const Rows<T>& to) {
    constexpr int width = WIDTH<T>;
    const int64_t numbers = task.layout.key_numbers, channels = task.call.channels, num_keys = task.num_keys;
    const int64_t some = std::min<int64_t>(N, numbers - entry);
    // Lanes beyond the numbers of a key are not used.
    const auto row = [&](int64_t key) {
        V<T> x{};
        const T* start = from + task.keys[key < num_keys ? key : 0] * numbers + entry;
        if (start + width <= end)
            x = load(start);
        else
            std::memcpy(&x, start, some * sizeof(T));
        return x;
    };
    // What there is too much of the last keys of a pose is written over with the first of the next.
    for (int64_t key = (num_keys - 1) / width * width; key >= 0; key -= width) {
        V<T> x[N];
        for (int i = 0; i < N; i++) x[i] = N < width ? blocks<T, N>(row(key + i), row(key + i + N), false) : row(key + i);
        transpose<T, N>(x);
        int64_t pose = entry / channels, channel = entry % channels;
        for (int64_t i = 0; i < some; i++) {
            store(to[channel] + pose * num_keys + key, x[i]);
            if (++channel == channels) channel = 0, pose++;
        }
    }
}

// The keys of the group in a head, of (heads, points, P, C), as (C, keys of all poses).
template <class T> void pack(const Task<T>& task, const T* from, const Rows<T>& to) {
    constexpr int width = WIDTH<T>;
    const int64_t numbers = task.layout.key_numbers, size = task.call.points * numbers;
    const T *start = from + task.head * size, *end = from + task.call.heads * size;
    for (int64_t entry = 0; entry < numbers; entry += width)
        numbers - entry > width / 2 ? pack_block<T, width>(task, start, end, entry, to)
                                    : pack_block<T, width / 2>(task, start, end, entry, to);
    for (int64_t channel = 0; channel < task.call.channels; channel++)
        std::fill(to[channel] + task.length, to[channel] + task.padded, T(0));
}

}  // namespace
