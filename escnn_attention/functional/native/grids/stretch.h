// Keys that all queries see: a stretch of positions, read where they lie in memory.

#pragma once

#include "products.h"

namespace {

// Its places are positions; or, where nothing is added that key poses share, it is one place and its keys are the poses
// of that: more keys then share the loads of a query. Numbers are (positions, key poses, channels).
template <class T> struct Stretch {
    int64_t at(int64_t number) const { return (first_key + number * key_poses) * channels; }
    V<T> load(const T* key, int64_t c, int64_t pose) const { return all(key[pose * channels + c]); }
    int64_t num_keys() const { return places * key_poses; }

    int64_t channels, key_poses, places;
    int64_t first_key, first_position, positions;
};

// Channels in whole vectors.
template <class T> int64_t padded(int64_t channels) { return (channels + WIDTH<T> - 1) / WIDTH<T> * WIDTH<T>; }

// Queries (channels, G), with the channels in the lanes instead: (blocks of channels, G, queries).
template <class T, int G> void transpose_queries(const V<T>* x, int64_t channels, V<T>* to) {
    constexpr int width = WIDTH<T>;
    for (int64_t c = 0; c < channels; c += width)
        for (int g = 0; g < G; g++, to += width) {
            for (int lane = 0; lane < width; lane++) to[lane] = c + lane < channels ? x[(c + lane) * G + g] : V<T>{};
            transpose<T>(to);
        }
}

// K keys: see distribute.
template <class T, int G, int K>
inline void distribute_block(const V<T>* weight, int64_t step, const V<T>* x, T* to, int64_t stride) {
    constexpr int width = WIDTH<T>;
    V<T> y[K] = {};
    UNROLL for (int g = 0; g < G; g++)
        for (int query = 0; query < width; query++)
            UNROLL for (int r = 0; r < K; r++) y[r] += weight[r * step + g][query] * x[g * width + query];
    UNROLL for (int r = 0; r < K; r++) store(to + r * stride, load(to + r * stride) + y[r]);
}
// The transpose of combine_keys: the weights of each of some keys, G at a distance of `step` from those of the next,
// times transposed queries, G of the GROUP that each block has, summed over these and added to (keys, padded channels).
template <class T, int G>
void distribute(const V<T>* weight, int64_t step, int64_t keys, const V<T>* x, int64_t group, int64_t channels, T* to) {
    constexpr int width = WIDTH<T>, K = 2 * BLOCK;
    const int64_t stride = padded<T>(channels);
    for (int64_t block = 0; block < stride; block += width, x += group * width, to += width) {
        int64_t n = 0;
        for (; n + K <= keys; n += K) distribute_block<T, G, K>(weight + n * step, step, x, to + n * stride, stride);
        for (; n < keys; n++) distribute_block<T, G, 1>(weight + n * step, step, x, to + n * stride, stride);
    }
}

}  // namespace
