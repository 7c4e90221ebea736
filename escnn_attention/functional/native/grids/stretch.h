// Keys that all queries see: a stretch of positions.

#pragma once

#include "products.h"

namespace {

// Its places are positions; or, where nothing is added that key poses share, it is one place and its keys are positions
// of one pose: more keys then share the loads of a query. Numbers are (channels, key poses, places).
template <class T> struct Stretch {
    int64_t at(int64_t number) const { return start + number; }
    V<T> load(const T* key, int64_t c, int64_t pose) const { return all(key[c * of_channel + pose * of_pose]); }
    int64_t num_keys() const { return places * key_poses; }

    int64_t start, of_channel, of_pose;  // the first number, and how far it is to the next channel and the next pose
    int64_t key_poses, places;
    int64_t first_key, first_position, positions;
};

// Channels in whole vectors.
template <class T> int64_t padded(int64_t channels) { return (channels + WIDTH<T> - 1) / WIDTH<T> * WIDTH<T>; }
// How many neighbouring lanes share a channel, each for other queries, where channels do not fill half a vector. Pairs
// of numbers are moved as one of double precision.
template <class T> int lanes_of_channel(int64_t channels) { return sizeof(T) == 4 && 2 * channels <= WIDTH<T> ? 2 : 1; }

// Queries (channels, G), with the channels in the lanes instead: (blocks of channels, G, queries or pairs of them).
template <class T, int G> void transpose_queries(const V<T>* x, int64_t channels, V<T>* to) {
    constexpr int width = WIDTH<T>;
    if (lanes_of_channel<T>(channels) == 2) {
        for (int g = 0; g < G; g++, to += width / 2) {
            V<double> pairs[WIDTH<double>];
            for (int c = 0; c < width / 2; c++) {
                const V<T> y = c < channels ? x[c * G + g] : V<T>{};
                std::memcpy(pairs + c, &y, sizeof y);
            }
            transpose<double>(pairs);
            std::memcpy(static_cast<void*>(to), pairs, sizeof pairs);
        }
        return;
    }
    for (int64_t c = 0; c < channels; c += width)
        for (int g = 0; g < G; g++, to += width) {
            for (int lane = 0; lane < width; lane++) to[lane] = c + lane < channels ? x[(c + lane) * G + g] : V<T>{};
            transpose<T>(to);
        }
}

// One of the weights of a vector of queries, or two of them by turns, in all lanes.
template <class T, int shared> inline V<T> spread(const V<T>* weight, int query) {
    if constexpr (shared == 1) return all((*weight)[query]);
    double pair;
    std::memcpy(&pair, reinterpret_cast<const char*>(weight) + query * sizeof pair, sizeof pair);
    const V<double> pairs = all(pair);
    V<T> y;
    std::memcpy(&y, &pairs, sizeof y);
    return y;
}
// K keys: see distribute.
template <class T, int G, int K, int shared>
inline void distribute_block(const V<T>* weight, int64_t step, const V<T>* x, T* to, int64_t stride) {
    constexpr int number = WIDTH<T> / shared;
    V<T> y[K] = {};
    UNROLL for (int g = 0; g < G; g++)
        for (int query = 0; query < number; query++) {
            const V<T> of_query = in_register<T>(x[g * number + query]);
            UNROLL for (int r = 0; r < K; r++) y[r] += spread<T, shared>(weight + r * step + g, query) * of_query;
        }
    UNROLL for (int r = 0; r < K; r++) store(to + r * stride, load(to + r * stride) + y[r]);
}
// The transpose of combine_keys: the weights of each of some keys, G at a distance of `step` from those of the next,
// times transposed queries, G of the `group` that each block has, summed over these and added to (keys, padded channels).
template <class T, int G, int shared>
void distribute(const V<T>* weight, int64_t step, int64_t keys, const V<T>* x, int64_t group, int64_t channels, T* to) {
    constexpr int width = WIDTH<T>, K = 8;  // sums in registers, as many as hide the time of a product
    const int64_t stride = padded<T>(channels);
    for (int64_t block = 0; block < stride; block += width, x += group * (width / shared), to += width) {
        int64_t n = 0;
        for (; n + K <= keys; n += K)
            distribute_block<T, G, K, shared>(weight + n * step, step, x, to + n * stride, stride);
        for (; n < keys; n++)
            distribute_block<T, G, 1, shared>(weight + n * step, step, x, to + n * stride, stride);
    }
}
template <class T, int G>
void distribute(const V<T>* weight, int64_t step, int64_t keys, const V<T>* x, int64_t group, int64_t channels, T* to) {
    if constexpr (sizeof(T) == 4)
        if (lanes_of_channel<T>(channels) == 2) return distribute<T, G, 2>(weight, step, keys, x, group, channels, to);
    distribute<T, G, 1>(weight, step, keys, x, group, channels, to);
}

}  // namespace
