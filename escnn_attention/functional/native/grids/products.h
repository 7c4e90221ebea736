// Products of a group of up to four queries, each in the lanes of a vector, that share the loads of what they meet.
//
// Vectors of a group have the queries as their last axis: (channels, G), (keys, G), (rows, G). Keys, and values, are
// told by what has `places` where a query has keys, `key_poses` of them at each, and
//
//     at(number): where the keys of a place start in their numbers,
//     load(key, c, pose): the channel of a key from there on, for all lanes.

#pragma once

#include "../simd.h"

namespace {

// Calls f(how many, the first) for poses in groups of at most so many.
template <class F> void each_group(int64_t poses, F f, int64_t most = GROUP) {
    for (int64_t pose = 0; pose < poses; pose += most)
        dispatch(std::min<int64_t>(most, poses - pose), [&](auto size) { f(size, pose); });
}

// K keys of a place, from a pose on: see multiply_keys.
template <class T, int G, int K, class Keys>
inline void multiply_block(const Keys& keys, const T* key, int64_t channels, int64_t pose, const V<T>* x,
                           const V<T>* by_place, const V<T>* by_pose, V<T>* to) {
    V<T> y[K][G];
    UNROLL for (int r = 0; r < K; r++)
        UNROLL for (int g = 0; g < G; g++) {
            y[r][g] = by_place ? by_place[g] : V<T>{};
            if (by_pose) y[r][g] += by_pose[(pose + r) * G + g];
        }
    for (int64_t c = 0; c < channels; c++) {
        V<T> of_key[K];
        UNROLL for (int r = 0; r < K; r++) of_key[r] = in_register<T>(keys.load(key, c, pose + r));
        UNROLL for (int g = 0; g < G; g++) {
            const V<T> of_query = in_register<T>(x[c * G + g]);
            UNROLL for (int r = 0; r < K; r++) y[r][g] += of_key[r] * of_query;
        }
    }
    UNROLL for (int r = 0; r < K; r++)
        UNROLL for (int g = 0; g < G; g++) to[(pose + r) * G + g] = y[r][g];
}
// Products of queries (channels, G) with all keys: (keys, G). They start from what places and poses add, if anything:
// (places, G) and (key poses, G).
template <class T, int G, class Keys>
void multiply_keys(const Keys& keys, const T* numbers, int64_t channels, const V<T>* x, const V<T>* by_place,
                   const V<T>* by_pose, V<T>* to) {
    for (int64_t number = 0; number < keys.places; number++, to += keys.key_poses * G) {
        const T* key = numbers + keys.at(number);
        const V<T>* start = by_place ? by_place + number * G : nullptr;
        int64_t pose = 0;
        for (; pose + BLOCK <= keys.key_poses; pose += BLOCK)
            multiply_block<T, G, BLOCK>(keys, key, channels, pose, x, start, by_pose, to);
        for (; pose < keys.key_poses; pose++)
            multiply_block<T, G, 1>(keys, key, channels, pose, x, start, by_pose, to);
    }
}

// Calls f(first, last) for stretches of places, so that each has some SPAN of keys, so many at a place.
template <class F> inline void each_span(int64_t places, int64_t keys, F f) {
    const int64_t spans = std::clamp<int64_t>(places * keys / SPAN, 1, places);
    for (int64_t i = 0; i < spans; i++) f(i * places / spans, (i + 1) * places / spans);
}

// K channels: see combine_keys.
template <class T, int G, int K, class Keys>
inline void combine_block(const Keys& keys, int64_t first, int64_t last, const T* numbers, int64_t c,
                          const V<T>* weight, V<T>* to) {
    V<T> y[K][G] = {};
    for (int64_t number = first; number < last; number++) {
        const T* key = numbers + keys.at(number);
        for (int64_t pose = 0; pose < keys.key_poses; pose++, weight += G) {
            V<T> value[K];
            UNROLL for (int r = 0; r < K; r++) value[r] = in_register<T>(keys.load(key, c + r, pose));
            UNROLL for (int g = 0; g < G; g++) {
                const V<T> of_query = in_register<T>(weight[g]);
                UNROLL for (int r = 0; r < K; r++) y[r][g] += value[r] * of_query;
            }
        }
    }
    UNROLL for (int r = 0; r < K; r++)
        UNROLL for (int g = 0; g < G; g++) to[(c + r) * G + g] += y[r][g];
}
// The sum of weights (keys, G) times the values, added to (channels, G).
template <class T, int G, class Keys>
void combine_keys(const Keys& keys, const T* numbers, int64_t channels, const V<T>* weight, V<T>* to) {
    each_span(keys.places, keys.key_poses, [&](int64_t first, int64_t last) {
        const V<T>* start = weight + first * keys.key_poses * G;
        int64_t size, left = (channels + MOST_CHANNELS - 1) / MOST_CHANNELS;  // blocks of about the same size
        for (int64_t c = 0; c < channels; c += size, left--) {
            size = (channels - c + left - 1) / left;
            dispatch<MOST_CHANNELS>(size, [&](auto number) {
                combine_block<T, G, number>(keys, first, last, numbers, c, start, to);
            });
        }
    });
}

// The sums of gradients of scores (places, key poses, G) over the poses and, if there is room for it, over the places.
template <class T, int G> void sum_scores(const V<T>* grad, int64_t places, int64_t key_poses, V<T>* by_place,
                                          V<T>* by_pose) {
    for (int64_t l = 0; l < places; l++) {
        V<T> total[G] = {};
        for (int64_t p = 0; p < key_poses; p++)
            UNROLL for (int g = 0; g < G; g++) total[g] += grad[(l * key_poses + p) * G + g];
        UNROLL for (int g = 0; g < G; g++) by_place[l * G + g] = total[g];
    }
    if (!by_pose) return;
    std::fill_n(by_pose, key_poses * G, V<T>{});
    each_span(places, 1, [&](int64_t first, int64_t last) {
        for (int64_t p = 0; p < key_poses; p++) {
            V<T> total[G] = {};
            for (int64_t l = first; l < last; l++)
                UNROLL for (int g = 0; g < G; g++) total[g] += grad[(l * key_poses + p) * G + g];
            UNROLL for (int g = 0; g < G; g++) by_pose[p * G + g] += total[g];
        }
    });
}

}  // namespace
