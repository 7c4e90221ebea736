// What waves add to the scores of global attention, and their gradients.
//
// A function of the offset that is a sum of waves factorises: with the phases a query has where it is, its amplitudes
// become a vector whose products with the cosines and sines of the keys' phases are the function
// (functional/grid/widen.py has the formula).

#pragma once

#include "layout.h"
#include "stretch.h"
#include "tables.h"

namespace {

constexpr int64_t MOST_KEYS = 128;  // of a stretch, or those of one position if these are more

template <class T> struct Waves {
    using W = V<T>;
    static constexpr int width = WIDTH<T>;

    Waves(const Arguments& call, const Layout& layout)
            : call(call),
              queries(layout.queries),
              positions(layout.positions),
              first_key(call.wave_positions - call.key_positions),
              number(call.num_waves),
              half(call.num_waves / 2),
              shared(lanes_of_channel<T>(number)),
              table(call.waves, call.wave_heads, call.num_poses, call.wave_positions, number, false),
              by_position(GROUP * MOST_KEYS),
              wide(GROUP * number),
              grad_wide(GROUP * number),
              transposed(GROUP * padded<T>(number)) {
        if (!call.waves) return;
        phases = Buffer<T>(call.num_poses * number * queries);
        if (!call.grad) return;
        grad_phases = Buffer<T>(call.num_poses * number * queries);
        grad_keys = Buffer<T>(call.num_poses * call.key_positions * padded<T>(number));
    }
    explicit operator bool() const { return call.waves; }

    void begin(int64_t head) {
        if (!call.waves) return;
        table.begin(head);
        for (int64_t out_pose = 0; out_pose < call.num_poses; out_pose++) {
            const T* row = table.of(out_pose, false, 0, nullptr).data;
            for (int64_t n = 0; n < positions; n++)
                for (int64_t f = 0; f < number; f++) phases[(out_pose * number + f) * queries + n] = *row++;
        }
    }

    // The vectors of queries of amplitudes (number, G), each seen from its own output pose, `out_pose` and those that
    // follow, or all from that one: to `wide`, and their products with the keys of a stretch to `by_position`.
    template <int G>
    void forward(const W* amplitudes, int64_t place, const Stretch<T>& stretch, int64_t out_pose, bool own) const {
        for (int64_t f = 0; f < half; f++)
            UNROLL for (int g = 0; g < G; g++) {
                const W a = amplitudes[f * G + g], b = amplitudes[(half + f) * G + g];
                const W cos = phase(out_pose + own * g, f, place), sin = phase(out_pose + own * g, half + f, place);
                wide[f * G + g] = a * cos - b * sin, wide[(half + f) * G + g] = a * sin + b * cos;
            }
        multiply<T, G>(wide.data, rows(stretch, out_pose, own), by_position.data);
    }

    // From the gradients of those products, in `by_position`, to those of the amplitudes and of the waves.
    template <int G> void backward(const W* amplitudes, int64_t place, const Stretch<T>& stretch, int64_t out_pose,
                                   bool own, W* grad_amplitudes) const {
        std::fill_n(grad_wide.data, number * G, W{});
        combine_rows<T, G>(rows(stretch, out_pose, own), by_position.data, grad_wide.data);
        for (int64_t f = 0; f < half; f++)
            UNROLL for (int g = 0; g < G; g++) {
                const W a = amplitudes[f * G + g], b = amplitudes[(half + f) * G + g];
                const W of_cos = grad_wide[f * G + g], of_sin = grad_wide[(half + f) * G + g];
                const W cos = phase(out_pose + own * g, f, place), sin = phase(out_pose + own * g, half + f, place);
                add(out_pose + own * g, f, place, of_cos * a + of_sin * b);
                add(out_pose + own * g, half + f, place, of_sin * a - of_cos * b);
                grad_amplitudes[f * G + g] += of_cos * cos + of_sin * sin;
                grad_amplitudes[(half + f) * G + g] += of_sin * cos - of_cos * sin;
            }
        transpose_queries<T, G>(wide.data, number, transposed.data);
        if (!own)
            return distribute<T, G>(by_position.data, G, stretch.positions, transposed.data, G, number,
                                    keys(stretch, out_pose));
        UNROLL for (int g = 0; g < G; g++)
            distribute<T, 1>(by_position.data + g, G, stretch.positions, transposed.data + g * (width / shared), G,
                             number, keys(stretch, out_pose + g));
    }

    // Adds the gradients of the waves since the last call.
    void take(double* to) const {
        for (int64_t out_pose = 0; out_pose < call.num_poses && grad_keys.size; out_pose++)
            for (int64_t n = 0; n < call.wave_positions; n++)
                for (int64_t f = 0; f < number; f++, to++) {
                    const int64_t key = out_pose * call.key_positions + n - first_key;
                    for (int lane = 0; n >= first_key && lane < shared; lane++)
                        *to += double(grad_keys[key * padded<T>(number) + f * shared + lane]);
                    if (n < positions) *to += grad_phases[(out_pose * number + f) * queries + n];
                }
        grad_keys.clear(), grad_phases.clear();
    }

    const Arguments& call;
    // Places for queries; the rows of the table that are those of queries, the first of the keys, which may be the
    // same; cosines and sines, and each of them.
    const int64_t queries, positions, first_key, number, half;
    const int shared;  // lanes of a wave

  private:
    W phase(int64_t out_pose, int64_t f, int64_t place) const {
        return load(phases.data + (out_pose * number + f) * queries + place);
    }
    void add(int64_t out_pose, int64_t f, int64_t place, W x) const {
        T* at = grad_phases.data + (out_pose * number + f) * queries + place;
        store(at, load(at) + x);
    }
    Table<T> rows(const Stretch<T>& stretch, int64_t out_pose, bool own) const {
        Table<T> all = table.of(out_pose, own, stretch.positions, nullptr);
        all.data += (first_key + stretch.first_position) * number;
        return all;
    }
    T* keys(const Stretch<T>& stretch, int64_t out_pose) const {
        return grad_keys.data + (out_pose * call.key_positions + stretch.first_position) * padded<T>(number);
    }

    Tables<T> table;

  public:
    const Buffer<W> by_position;

  private:
    const Buffer<W> wide, grad_wide, transposed;
    Buffer<T> phases;                  // of the queries: (H, number, places)
    Buffer<T> grad_phases, grad_keys;  // as they are, and (H, N, padded number)
};

}  // namespace
