// The numbers of a band of an image, with the positions as the last axis, and back.

#pragma once

#include "../simd.h"
#include "layout.h"

namespace {

template <class T> struct Packing {
    // Positions (N, poses, channels) to (channels, poses, places): of queries, or of keys, which have the rows around
    // the band too.
    void pack(const T* from, int64_t poses, int64_t channels, int64_t band, bool keys, const Buffer<T>& to) const {
        const int64_t length = keys ? layout.keys : layout.queries;
        to.clear();
        layout.each_run(band, keys, [&](int64_t position, int64_t place, int64_t n) {
            const T* in = from + position * poses * channels;
            T* at = to.data + place + (keys ? layout.start : 0);
            for (int64_t i = 0; i < n; i++)
                for (int64_t p = 0; p < poses; p++)
                    for (int64_t c = 0; c < channels; c++) at[(c * poses + p) * length + i] = *in++;
        });
    }

    // From there to positions, times a factor. Those of keys are added, since bands share them, and a key of a torus may
    // lie at several places.
    void unpack(const Buffer<T>& from, int64_t poses, int64_t channels, int64_t band, bool keys, T* to,
                T factor = 1) const {
        const int64_t length = keys ? layout.keys : layout.queries;
        layout.each_run(band, keys, [&](int64_t position, int64_t place, int64_t n) {
            T* in = to + position * poses * channels;
            const T* at = from.data + place + (keys ? layout.start : 0);
            for (int64_t i = 0; i < n; i++)
                for (int64_t p = 0; p < poses; p++)
                    for (int64_t c = 0; c < channels; c++, in++) {
                        const T x = factor * at[(c * poses + p) * length + i];
                        *in = keys ? *in + x : x;
                    }
        });
    }

    // Rows of one number for every query: (number, N) to (number, places), and back.
    void pack_rows(const T* from, int64_t number, int64_t band, const Buffer<T>& to) const {
        to.clear();
        each_row(number, band, [&](int64_t place, int64_t position, int64_t n) {
            std::copy_n(from + position, n, to.data + place);
        });
    }
    void unpack_rows(const Buffer<T>& from, int64_t number, int64_t band, T* to) const {
        each_row(number, band, [&](int64_t place, int64_t position, int64_t n) {
            std::copy_n(from.data + place, n, to + position);
        });
    }

    // What is added to scores: 0 on the grid, and a score of nothing beyond it.
    void pack_mask(int64_t band, const Buffer<T>& mask) const {
        std::fill_n(mask.data, layout.keys, MASKED<T>);
        layout.each_run(band, true, [&](int64_t, int64_t place, int64_t n) {
            std::fill_n(mask.data + layout.start + place, n, T(0));
        });
    }

    // The channels of a group of poses of the queries from a place on, (channels, G), and back.
    template <int G>
    void gather(const Buffer<T>& from, int64_t poses, int64_t channels, int64_t pose, int64_t place, V<T>* to) const {
        for (int64_t c = 0; c < channels; c++)
            for (int g = 0; g < G; g++)
                to[c * G + g] = load(from.data + (c * poses + pose + g) * layout.queries + place);
    }
    template <int G>
    void scatter(const V<T>* from, int64_t poses, int64_t channels, int64_t pose, int64_t place,
                 const Buffer<T>& to) const {
        for (int64_t c = 0; c < channels; c++)
            for (int g = 0; g < G; g++)
                store(to.data + (c * poses + pose + g) * layout.queries + place, from[c * G + g]);
    }

    const Layout& layout;

  private:
    template <class F> void each_row(int64_t number, int64_t band, F f) const {
        for (int64_t row = 0; row < number; row++)
            layout.each_run(band, false, [&](int64_t position, int64_t place, int64_t n) {
                f(row * layout.queries + place, row * layout.positions + position, n);
            });
    }
};

}  // namespace
