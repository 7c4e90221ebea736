// The numbers of a band of an image, with the positions as the last axis, and back.

#pragma once

#include "../simd.h"
#include "layout.h"

namespace {

template <class T> struct Packing {
    // Numbers of positions to (slots, channels, poses, places): of queries, or of keys, which have the rows around the
    // band too. They come as (N, poses, channels), or as (poses, channels, N). Behind a run there are zeros until the
    // next is written.
    void pack(const T* from, int64_t poses, int64_t channels, int64_t band, bool keys, const Buffer<T>& to) const {
        if (!layout.whole) to.clear();
        each_block(poses, channels, band, keys, [&](int64_t first, int64_t step, int64_t n, const int64_t* places,
                                                    int64_t place, int64_t number) {
            const T* in = from + first;
            T* at = to.data + place;
            if (step == 1) return copy(in, n, at + places[0], T(1));
            if (number < width) {
                for (int64_t i = 0; i < n; i++)
                    for (int64_t j = 0; j < number; j++) at[places[j] + i] = in[i * step + j];
                return;
            }
            V<T> x[width];
            for (int i = 0; i < width; i++) x[i] = i < n ? load(in + i * step) : V<T>{};
            transpose<T>(x);
            for (int j = 0; j < width; j++) store(at + places[j], x[j]);
        });
    }

    // From there to positions, times a factor. Numbers of keys are added where bands share keys, or where a key of a
    // torus lies at several places.
    void unpack(const Buffer<T>& from, int64_t poses, int64_t channels, int64_t band, bool keys, T* to,
                T factor = 1) const {
        const bool adds = keys && !layout.keys_once;
        each_block(poses, channels, band, keys, [&](int64_t first, int64_t step, int64_t n, const int64_t* places,
                                                    int64_t place, int64_t number) {
            T* in = to + first;
            const T* at = from.data + place;
            if (step == 1) {
                at += places[0];
                if (!adds) return copy(at, n, in, factor);
                for (int64_t i = 0; i < n; i++) in[i] += factor * at[i];
                return;
            }
            if (number < width) {
                for (int64_t i = 0; i < n; i++)
                    for (int64_t j = 0; j < number; j++) {
                        const T x = factor * at[places[j] + i];
                        in[i * step + j] = adds ? in[i * step + j] + x : x;
                    }
                return;
            }
            V<T> x[width];
            for (int j = 0; j < width; j++) x[j] = factor * load(at + places[j]);
            transpose<T>(x);
            for (int i = 0; i < n; i++) store(in + i * step, adds ? load(in + i * step) + x[i] : x[i]);
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
        const int64_t row = layout.queries;
        const T* at = from.data + pose * row + place;
        for (int64_t c = 0; c < channels; c++, at += poses * row)
            UNROLL for (int g = 0; g < G; g++) to[c * G + g] = load(at + g * row);
    }
    template <int G>
    void scatter(const V<T>* from, int64_t poses, int64_t channels, int64_t pose, int64_t place,
                 const Buffer<T>& to) const {
        const int64_t row = layout.queries;
        T* at = to.data + pose * row + place;
        for (int64_t c = 0; c < channels; c++, at += poses * row)
            UNROLL for (int g = 0; g < G; g++) store(at + g * row, from[c * G + g]);
    }

    const Layout& layout;
    const int64_t heads;  // of each position's image side by side, where positions follow each other; else 0
    int64_t images = 1;   // of those side by side, how many there are
    int64_t between = 1;  // images of a number that follow each other in memory, or 1 where each has all its numbers so

  private:
    static constexpr int width = WIDTH<T>;

    // Numbers side by side, times a factor. The last vector overlaps the one before it.
    static void copy(const T* from, int64_t n, T* to, T factor) {
        if (n < width) {
            for (int64_t i = 0; i < n; i++) to[i] = factor * from[i];
            return;
        }
        for (int64_t i = 0; i < n - width; i += width) store(to + i, factor * load(from + i));
        store(to + n - width, factor * load(from + n - width));
    }

    // Calls f(first, step, n, places, place, number) for blocks of at most a vector of neighbouring places, and as many
    // numbers that lie side by side in memory, which go to places of their own: the first number, from one place to the
    // next so many, how many places, those of the numbers, where they are counted from, how many numbers. With a step
    // of 1 it is one number of any neighbouring places.
    template <class F> void each_block(int64_t poses, int64_t channels, int64_t band, bool keys, F f) const {
        const int64_t length = keys ? layout.keys : layout.queries, before = keys ? layout.start : 0;
        const Side& side = keys ? layout.of_keys : layout.of_queries;
        const int64_t size = poses * channels;
        std::vector<int64_t> rows;
        for (int64_t p = 0; p < poses; p++)
            for (int64_t c = 0; c < channels; c++) rows.push_back((c * poses + p) * length);
        if (!heads) {
            const int64_t step = size * (layout.together == 1 ? side.step : side.positions);
            return layout.each_run(band, keys, [&](int64_t slot, int64_t position, int64_t place, int64_t n) {
                n = there(n);
                for (int64_t i = 0; i < n; i += width)
                    for (int64_t j = 0; j < size; j += width)
                        f(position * size + i * step + j, step, std::min<int64_t>(width, n - i), rows.data() + j,
                          slot * size * length + before + place + i, std::min<int64_t>(width, size - j));
            });
        }
        if (layout.together == 1) {
            struct Run { int64_t position, place, length; };
            std::vector<Run> runs;
            layout.each_run(band, keys, [&](int64_t slot, int64_t position, int64_t place, int64_t n) {
                runs.push_back({position, slot * size * length + before + place, n});
            });
            for (int64_t j = 0; j < size; j++)  // as numbers follow each other in memory
                for (const Run& run : runs)
                    f(j * between * side.positions + run.position, side.step, run.length, &none, run.place + rows[j], 1);
            return;
        }
        // Images side by side: positions that follow each other go to places of their own.
        std::vector<int64_t> positions, places;
        layout.each_run(band, keys, [&](int64_t slot, int64_t position, int64_t place, int64_t) {
            positions.push_back(position), places.push_back(slot * size * length + before + place);
        });
        const int64_t step = heads * size * side.positions, number = positions.size();
        for (int64_t a = 0, b; a < number; a = b) {
            for (b = a + 1; b < number && b - a < width && positions[b] == positions[b - 1] + 1;) b++;
            for (int64_t j = 0; j < size; j++)
                for (int64_t i = 0; i < images; i += width)
                    f(j * side.positions + positions[a] + i * step, step, std::min<int64_t>(width, images - i),
                      places.data() + a, rows[j] + i, b - a);
        }
    }
    int64_t there(int64_t n) const { return layout.together == 1 ? n : images; }
    static constexpr int64_t none = 0;
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
