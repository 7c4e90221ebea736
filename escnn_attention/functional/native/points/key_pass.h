// The pass over the keys: for each, in one head, the sum over all queries that see it, which gives the gradients of
// keys and values. A tile has as many of the poses and channels of a key as a vector has lanes.

#pragma once

#include "layout.h"

namespace {

template <class T> struct KeyPass {
    using W = V<T>;
    static constexpr int width = WIDTH<T>;

    explicit KeyPass(const Layout<T>& layout)
            : layout(layout), call(layout.call), tiles((layout.key_numbers + width - 1) / width) {}

    // A task is one tile of all groups in a head: no two add to the same place.
    int64_t tasks() const { return call.heads * tiles; }
    void work(int64_t task) const {
        const int64_t head = task / tiles, stride = call.group_queries * layout.row_stride;
        for (int64_t group = 0; group < call.groups; group++) {
            const int64_t first = (head * call.groups + group) * stride;
            work(Tile{head, group, task % tiles * width, 0, call.group_queries,
                      layout.weights.data + first * call.num_poses, layout.grad_scores.data + first * layout.grad_rows,
                      as<T>(call.grad_k), as<T>(call.grad_v)});
        }
    }
    // All tiles of some members of a group in a head, with their `weights` and `grad_scores`, added to these gradients.
    void work(int64_t head, int64_t group, int64_t begin, int64_t end, const T* weights, const T* grad_scores,
              T* grad_k, T* grad_v) const {
        for (int64_t tile = 0; tile < tiles; tile++)
            work(Tile{head, group, tile * width, begin, end, weights, grad_scores, grad_k, grad_v});
    }

  private:
    struct Tile {
        int64_t head, group, first;  // of the poses and channels of a key
        int64_t begin, end;          // of the members of the group
        const T *weights, *grad_scores;
        T *grad_k, *grad_v;
    };

    void work(const Tile& tile) const {
        const int64_t* keys = call.keys + tile.group * call.group_keys;
        const int64_t num_keys = layout.num_keys(keys);
        int64_t key = 0;
        for (; key + width < num_keys; key += 2 * width) work<2>(tile, keys, num_keys, key);
        if (key < num_keys) work<1>(tile, keys, num_keys, key);
    }
    // At B vectors of keys.
    template <int B> void work(const Tile& tile, const int64_t* keys, int64_t num_keys, int64_t key) const {
        const int64_t query = tile.head * layout.num_queries + tile.group * call.group_queries + tile.begin;
        if (call.grad_k)
            sum_queries<B>(tile, keys, num_keys, key, tile.grad_k, tile.grad_scores, layout.grad_rows,
                           [&](int64_t row) {
                               const int64_t index = row % layout.grad_rows;
                               const int64_t query_pose = call.sum_query_poses ? index : layout.own_query_pose(index);
                               const int64_t asking = (query + row / layout.grad_rows) * call.query_poses + query_pose;
                               return as<T>(call.q) + asking * call.channels;
                           });
        if (call.grad_v)
            sum_queries<B>(tile, keys, num_keys, key, tile.grad_v, tile.weights, call.num_poses,
                           [&](int64_t row) {
                               return as<T>(call.grad) + (query * call.num_poses + row) * call.channels;
                           });
    }
    // Adds to the keys what rows of weights, so many for each query, have at them, times the channels of the row.
    template <int B, class Channels>
    void sum_queries(const Tile& tile, const int64_t* keys, int64_t num_keys, int64_t key, T* to, const T* weights,
                     int64_t query_rows, Channels channels_of) const {
        const int64_t some = std::min<int64_t>(width, layout.key_numbers - tile.first);
        W sums[B][width], total[B][width];
        clear(sums), clear(total);
        int64_t blocks = 0;
        each_block(tile, query_rows, [&](auto number, const int64_t* rows) {
            constexpr int R = number;
            if (++blocks % (SPAN / GROUP) == 0) add_sums<B>(sums, total, some);
            const T *weight[R], *x[R];
            for (int i = 0; i < R; i++) {
                weight[i] = weights + rows[i] * layout.row_stride + key;
                x[i] = channels_of(rows[i]);
            }
            add_outer_products<R, B>(weight, x, tile.first, some, num_keys, sums);
        });
        add_sums<B>(sums, total, some);
        to += tile.head * call.points * layout.key_numbers + tile.first;
        for (int b = 0; b < B; b++) {
            const int64_t at = key + b * width;
            some > width / 2 ? add_to_keys<width>(total[b], keys + at, num_keys - at, to, some)
                             : add_to_keys<width / 2>(total[b], keys + at, num_keys - at, to, some);
        }
    }

    // Adds to the total what starts from zero again.
    template <int B> void add_sums(W (*sums)[width], W (*total)[width], int64_t some) const {
        for (int b = 0; b < B; b++)
            for (int64_t entry = 0; entry < some; entry++) total[b][entry] += sums[b][entry], sums[b][entry] = W{};
    }

    // Calls f(number, rows) for the rows of all queries, several at a time.
    template <class F> void each_block(const Tile& tile, int64_t query_rows, F f) const {
        int64_t block[GROUP];
        int number = 0;
        for (int64_t member = tile.begin; member < tile.end; member++) {
            if (call.queries[tile.group * call.group_queries + member] < 0) continue;
            for (int64_t i = 0; i < query_rows; i++) {
                block[number++] = (member - tile.begin) * query_rows + i;
                if (number == GROUP) f(std::integral_constant<int, GROUP>(), block), number = 0;
            }
        }
        for (int i = 0; i < number; i++) f(std::integral_constant<int, 1>(), block + i);
    }
    // Channels times weights at B vectors of keys, summed over R rows: (poses and channels, keys).
    template <int R, int B> void add_outer_products(const T* const* weight, const T* const* x, int64_t first,
                                                    int64_t some, int64_t num_keys, W (*to)[width]) const {
        const int64_t channels = call.channels;
        int64_t pose = first / channels, channel = first % channels;
        for (int64_t entry = 0; entry < some; pose++, channel = 0) {
            W w[R][B];
            for (int i = 0; i < R; i++)
                for (int b = 0; b < B; b++) w[i][b] = load(weight[i] + pose * num_keys + b * width);
            for (; channel < channels && entry < some; channel++, entry++) {
                W y[B];
                for (int b = 0; b < B; b++) y[b] = to[b][entry];
                for (int i = 0; i < R; i++) {
                    const W of_query = all(x[i][channel]);
                    for (int b = 0; b < B; b++) y[b] += of_query * w[i][b];
                }
                for (int b = 0; b < B; b++) to[b][entry] = y[b];
            }
        }
    }
    // Adds N numbers, of which there are some, to each of so many keys.
    template <int N> void add_to_keys(W* sums, const int64_t* keys, int64_t number, T* to, int64_t some) const {
        transpose<T, N>(sums);
        for (int64_t i = 0; i < std::min<int64_t>(width, number); i++) {
            T of_key[width];
            store(of_key, sums[i % N]);
            T *row = to + keys[i] * layout.key_numbers, *sum = of_key + i / N * N;
            if (some == N)
                for (int entry = 0; entry < N; entry++) row[entry] += sum[entry];
            else
                for (int64_t entry = 0; entry < some; entry++) row[entry] += sum[entry];
        }
    }

    const Layout<T>& layout;
    const Arguments& call;
    const int64_t tiles;
};

}  // namespace
