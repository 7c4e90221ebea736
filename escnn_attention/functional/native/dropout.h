// Dropout by numbers of a counter: the same in both passes, whatever the threads do first.

#pragma once

#include "simd.h"

namespace {

// Whether a probability is kept: numbers of a counter, well mixed, against the rate.
template <class T> struct Dropout {
    typedef typename Lanes<T>::U U;
    bool on;
    uint32_t rate;
    T scale;

    Dropout(double p) : on(p > 0), rate(uint32_t(std::min(p * 4294967296.0, 4294967295.0))), scale(T(1 / (1 - p))) {
        if (p >= 1) scale = 0;
    }
    // Where the numbers of an image start. There is no seed without dropout.
    static uint32_t key(const int64_t* seed, int64_t image) {
        return seed ? mix(uint32_t(*seed) ^ mix(uint32_t(*seed >> 32) + uint32_t(image))) : 0;
    }
    static uint32_t mix(uint32_t x) {
        x = (x ^ (x >> 16)) * 0x7feb352du;
        x = (x ^ (x >> 15)) * 0x846ca68bu;
        return x ^ (x >> 16);
    }
    V<T> mask(uint32_t key, uint32_t first) const {
        U x;
        for (int i = 0; i < WIDTH<T>; i++) x[i] = first + i;
        const U low = U{} + 0xffffffffu;
        x = (x * 0x9e3779b1u + key) & low;
        x = ((x ^ (x >> 16)) * 0x7feb352du) & low;
        x = ((x ^ (x >> 15)) * 0x846ca68bu) & low;
        x = x ^ (x >> 16);
        return x >= U{} + rate ? all<T>(scale) : V<T>{};
    }
};

}  // namespace
