// The numbers of a band of an image, with the positions as the last axis, and back.

#pragma once

#include "../simd.h"
#include "layout.h"

namespace {

template <class T> struct Packing {
    // Positions (N, poses, channels) to (slots, channels, poses, places): of queries, or of keys, which have the rows
    // around the band too. Behind a run there are zeros until the next is written.
    void pack(const T* from, int64_t poses, int64_t channels, int64_t band, bool keys, const Buffer<T>& to) const {
        to.clear();
        each_block(poses, channels, band, keys, [&](int64_t number, int64_t step, int64_t n, const int64_t* rows,
                                                    int64_t place, int64_t numbers) {
            const T* in = from + number;
            T* at = to.data + place;
            if (numbers < width) {
                for (int64_t i = 0; i < n; i++)
                    for (int64_t j = 0; j < numbers; j++) at[rows[j] + i] = in[i * step + j];
                return;
            }
            V<T> x[width];
            for (int i = 0; i < width; i++) x[i] = i < n ? load(in + i * step) : V<T>{};
            transpose<T>(x);
            for (int j = 0; j < width; j++) store(at + rows[j], x[j]);
        });
    }

    // From there to positions, times a factor. Those of keys are added, since bands share them, and a key of a torus may
    // lie at several places.
    void unpack(const Buffer<T>& from, int64_t poses, int64_t channels, int64_t band, bool keys, T* to,
                T factor = 1) const {
        each_block(poses, channels, band, keys, [&](int64_t number, int64_t step, int64_t n, const int64_t* rows,
                                                    int64_t place, int64_t numbers) {
            T* in = to + number;
            const T* at = from.data + place;
            if (numbers < width) {
                for (int64_t i = 0; i < n; i++)
                    for (int64_t j = 0; j < numbers; j++) {
                        const T x = factor * at[rows[j] + i];
                        in[i * step + j] = keys ? in[i * step + j] + x : x;
                    }
                return;
            }
            V<T> x[width];
            for (int j = 0; j < width; j++) x[j] = factor * load(at + rows[j]);
            transpose<T>(x);
            for (int i = 0; i < n; i++) store(in + i * step, keys ? load(in + i * step) + x[i] : x[i]);
        });
    }

    // Rows of one number for every query: (number, N) to (slots, number, places), and back.
    void pack_rows(const T* from, int64_t number, int64_t band, const Buffer<T>& to) const {
        to.clear();
        each_number(number, band, [&](int64_t place, int64_t position) { to[place] = from[position]; });
    }
    void unpack_rows(const Buffer<T>& from, int64_t number, int64_t band, T* to) const {
        each_number(number, band, [&](int64_t place, int64_t position) { to[position] = from[place]; });
    }

    // What is added to scores, (slots, places): 0 on the grid, and a score of nothing beyond it.
    void pack_mask(int64_t band, const Buffer<T>& mask) const {
        std::fill_n(mask.data, mask.size, MASKED<T>);
        layout.each_run(band, true, [&](int64_t slot, int64_t, int64_t place, int64_t n) {
            std::fill_n(mask.data + slot * layout.keys + layout.start + place, n, T(0));
        });
    }

    // The channels of a group of poses of the queries from a place on, (channels, G), and back; `place` counts from the
    // first slot.
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
    int64_t images = 1;  // of those side by side, how many there are

  private:
    static constexpr int width = WIDTH<T>;

    // Calls f(number, step, n, rows, place, numbers) for blocks of at most a vector of positions, and as many of their
    // numbers: the first number, from one position to the next so many, how many positions, the rows of places of the
    // numbers, where the first place lies in them, how many numbers.
    template <class F>
    void each_block(int64_t poses, int64_t channels, int64_t band, bool keys, F f) const {
        const int64_t length = keys ? layout.keys : layout.queries, before = keys ? layout.start : 0;
        const Side& side = keys ? layout.of_keys : layout.of_queries;
        const int64_t size = poses * channels, step = size * (layout.together == 1 ? side.step : side.positions);
        std::vector<int64_t> rows;
        for (int64_t p = 0; p < poses; p++)
            for (int64_t c = 0; c < channels; c++) rows.push_back((c * poses + p) * length);
        layout.each_run(band, keys, [&](int64_t slot, int64_t position, int64_t place, int64_t n) {
            n = there(n);
            for (int64_t i = 0; i < n; i += width)
                for (int64_t j = 0; j < size; j += width)
                    f(position * size + i * step + j, step, std::min<int64_t>(width, n - i), rows.data() + j,
                      slot * size * length + before + place + i, std::min<int64_t>(width, size - j));
        });
    }
    int64_t there(int64_t n) const { return layout.together == 1 ? n : images; }
    template <class F> void each_number(int64_t number, int64_t band, F f) const {
        const int64_t step = layout.together == 1 ? layout.of_queries.step : number * layout.positions;
        layout.each_run(band, false, [&](int64_t slot, int64_t position, int64_t place, int64_t n) {
            n = there(n);
            for (int64_t row = 0; row < number; row++)
                for (int64_t i = 0; i < n; i++)
                    f((slot * number + row) * layout.queries + place + i, row * layout.positions + position + i * step);
        });
    }
};

}  // namespace
