// Keys with lanes of a vector side by side.

#pragma once

#include "task.h"

namespace {

// The keys of the group, of (points, P, C), as (C, keys of all poses).
template <class T> void pack(const Task<T>& task, const T* from, const Rows<T>& to) {
    constexpr int width = WIDTH<T>;
    const int64_t numbers = task.layout.key_numbers, channels = task.call.channels, num_keys = task.num_keys;
    for (int64_t entry = 0; entry < numbers; entry += width) {
        // What there is too much of the last keys of a pose is written over with the first of the next.
        for (int64_t key = (num_keys - 1) / width * width; key >= 0; key -= width) {
            V<T> x[width];
            for (int i = 0; i < width; i++) {
                x[i] = V<T>{};
                if (key + i >= num_keys) continue;
                const T* row = from + task.keys[key + i] * numbers + entry;
                if (entry + width <= numbers)
                    x[i] = load(row);
                else
                    std::memcpy(&x[i], row, (numbers - entry) * sizeof(T));
            }
            transpose<T>(x);
            int64_t pose = entry / channels, channel = entry % channels;
            for (int64_t i = 0; i < std::min<int64_t>(width, numbers - entry); i++) {
                store(to[channel] + pose * num_keys + key, x[i]);
                if (++channel == channels) channel = 0, pose++;
            }
        }
    }
    for (int64_t channel = 0; channel < channels; channel++)
        std::fill(to[channel] + task.length, to[channel] + task.padded, T(0));
}

}  // namespace
