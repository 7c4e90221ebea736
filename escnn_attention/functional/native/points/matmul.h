// Matrix products of up to GROUP rows with packed keys.

#pragma once

#include "layout.h"

namespace {

// Rows of numbers (R, channels) times keys (channels, length), added to the rows `start`: at B vectors from `key` on.
template <class T, int R, int B> inline void matmul_block(const T* const* x, int64_t channels, const Rows<T>& keys,
                                                          const T* const* start, int64_t key, const Rows<T>& to) {
    constexpr int width = WIDTH<T>;
    V<T> y[R][B];
    for (int i = 0; i < R; i++)
        for (int b = 0; b < B; b++) y[i][b] = load(start[i] + key + b * width);
    for (int64_t channel = 0; channel < channels; channel++) {
        V<T> at[B];
        for (int b = 0; b < B; b++) at[b] = in_register<T>(load(keys[channel] + key + b * width));
        for (int i = 0; i < R; i++)
            for (int b = 0; b < B; b++) y[i][b] += x[i][channel] * at[b];
    }
    for (int i = 0; i < R; i++)
        for (int b = 0; b < B; b++) store(to[i] + key + b * width, y[i][b]);
}
// At all keys, whose length is one of whole vectors.
template <class T, int R> void matmul(const T* const* x, int64_t channels, const Rows<T>& keys, const T* const* start,
                                      int64_t length, const Rows<T>& to) {
    constexpr int width = WIDTH<T>;
    int64_t key = 0;
    for (; key + 2 * width <= length; key += 2 * width) matmul_block<T, R, 2>(x, channels, keys, start, key, to);
    if (key < length) matmul_block<T, R, 1>(x, channels, keys, start, key, to);
}

// Rows of weights (R, length) times the transpose of keys (channels, length), each times a factor, added to the rows
// `to` (R, channels).
template <class T, int R> void matmul_transposed(const T* const* weight, const T* factor, const Rows<T>& keys,
                                                 int64_t channels, int64_t length, T* const* to) {
    constexpr int width = WIDTH<T>;
    for (int64_t channel = 0; channel < channels; channel += BLOCK) {
        const int64_t some = std::min<int64_t>(BLOCK, channels - channel);
        const T* row[BLOCK];
        for (int b = 0; b < BLOCK; b++) row[b] = keys[std::min(channel + b, channels - 1)];
        V<T> y[BLOCK * GROUP];
        clear(y);
        for (int64_t key = 0; key < length; key += width) {
            V<T> w[R];
            for (int i = 0; i < R; i++) w[i] = in_register<T>(load(weight[i] + key));
            for (int b = 0; b < BLOCK; b++) {
                const V<T> x = in_register<T>(load(row[b] + key));
                for (int i = 0; i < R; i++) y[b * GROUP + i] += w[i] * x;
            }
        }
        T total[BLOCK][GROUP];
        sum_lanes<T>(y, total[0]);
        for (int i = 0; i < R; i++)
            for (int64_t b = 0; b < some; b++) to[i][channel + b] += factor[i] * total[b][i];
    }
}

}  // namespace
