// Tables whose products with the queries are added to scores.

#pragma once

#include "../buffer.h"
#include "products.h"

namespace {

// A table of each query of a group, or one of all: (rows, channels), of which those are taken that are named, or the
// first.
template <class T> struct Table {
    const T* row(int64_t r) const { return data + index(r) * channels; }
    int64_t index(int64_t r) const { return rows ? rows[r] : r; }
    const T* data;
    int64_t distance;  // from the table of a query to that of the next; 0 where they share it
    int64_t channels, number;
    const int64_t* rows;
};

// Calls f(how many, whether all queries share the table, the first row or channel) for rows or channels in blocks.
template <class T, class F> inline void each_table_block(const Table<T>& table, int64_t number, F f) {
    const auto blocks = [&](auto shared) {
        int64_t i = 0;
        for (; i + BLOCK <= number; i += BLOCK) f(std::integral_constant<int, BLOCK>(), shared, i);
        for (; i < number; i++) f(std::integral_constant<int, 1>(), shared, i);
    };
    table.distance == 0 ? blocks(std::true_type()) : blocks(std::false_type());
}

// Products of queries (channels, G) with the rows: (rows, G).
template <class T, int G> void multiply(const V<T>* x, const Table<T>& table, V<T>* to) {
    each_table_block(table, table.number, [&](auto number, auto shared, int64_t first) {
        constexpr int K = number;
        const T* row[K];
        V<T> y[K][G], value[K];
        clear(y);
        UNROLL for (int r = 0; r < K; r++) row[r] = table.row(first + r);
        for (int64_t c = 0; c < table.channels; c++) {
            UNROLL for (int r = 0; r < K; r++) value[r] = all(row[r][c]);
            UNROLL for (int g = 0; g < G; g++) {
                const V<T> of_query = in_register<T>(x[c * G + g]);
                UNROLL for (int r = 0; r < K; r++)
                    y[r][g] += of_query * (shared ? value[r] : all(row[r][g * table.distance + c]));
            }
        }
        UNROLL for (int r = 0; r < K; r++)
            UNROLL for (int g = 0; g < G; g++) to[(first + r) * G + g] = y[r][g];
    });
}
// The sum of the rows, weighted (rows, G), added to (channels, G).
template <class T, int G> void combine_rows(const Table<T>& table, const V<T>* weight, V<T>* to) {
    each_span(table.number, 1, [&](int64_t first, int64_t last) {
        each_table_block(table, table.channels, [&](auto number, auto shared, int64_t c) {
            constexpr int K = number;
            V<T> y[K][G], value[K];
            clear(y);
            for (int64_t n = first; n < last; n++) {
                const T* row = table.row(n) + c;
                UNROLL for (int r = 0; r < K; r++) value[r] = all(row[r]);
                UNROLL for (int g = 0; g < G; g++) {
                    const V<T> of_query = in_register<T>(weight[n * G + g]);
                    UNROLL for (int r = 0; r < K; r++)
                        y[r][g] += of_query * (shared ? value[r] : all(row[g * table.distance + r]));
                }
            }
            UNROLL for (int r = 0; r < K; r++)
                UNROLL for (int g = 0; g < G; g++) to[(c + r) * G + g] += y[r][g];
        });
    });
}
// From gradients of the products to those of the queries and of the tables, each number of these in the lanes of a
// vector.
template <class T, int G>
void multiply_backward(const V<T>* x, const Table<T>& table, const V<T>* grad, V<T>* grad_x, V<T>* grad_table) {
    combine_rows<T, G>(table, grad, grad_x);
    each_table_block(table, table.number, [&](auto number, auto shared, int64_t first) {
        constexpr int K = number;
        V<T>* grad_row[K];
        V<T> y[K][G];
        UNROLL for (int r = 0; r < K; r++) {
            grad_row[r] = grad_table + table.index(first + r) * table.channels;
            UNROLL for (int g = 0; g < G; g++) y[r][g] = grad[(first + r) * G + g];
        }
        for (int64_t c = 0; c < table.channels; c++) {
            V<T> z[K];
            clear(z);
            UNROLL for (int g = 0; g < G; g++) {
                const V<T> of_query = in_register<T>(x[c * G + g]);
                UNROLL for (int r = 0; r < K; r++) {
                    if (shared)
                        z[r] += y[r][g] * of_query;
                    else
                        grad_row[r][g * table.distance + c] += y[r][g] * of_query;
                }
            }
            if (shared)
                UNROLL for (int r = 0; r < K; r++) grad_row[r][c] += z[r];
        }
    });
}

// The tables of one head, one for every output pose from which it is seen: (H, size, channels), and their gradients.
template <class T> struct Tables {
    using W = V<T>;

    Tables(const void* all, int64_t heads, int64_t num_poses, int64_t size, int64_t channels, bool backward)
            : all(static_cast<const T*>(all)), heads(heads), num_poses(num_poses), size(size), channels(channels) {
        if (backward && all) grad = Buffer<W>(num_poses * size * channels);
    }
    explicit operator bool() const { return all; }

    void begin(int64_t head) {
        if (all) data = all + head % heads * num_poses * size * channels;
    }
    // The tables of queries that are each seen from its own pose, `out_pose` and those that follow, or the one table of
    // all; of them `number` rows, the first or those that are named.
    Table<T> of(int64_t out_pose, bool own, int64_t number, const int64_t* rows) const {
        return {data + out_pose * size * channels, own ? size * channels : 0, channels, number, rows};
    }
    W* gradient(int64_t out_pose) const { return grad.data + out_pose * size * channels; }

    // Adds the gradients since the last call, the lanes summed.
    void take(double* to) const {
        for (int64_t i = 0; i < grad.size; i++) to[i] += sum<T>(grad[i]);
        grad.clear();
    }

  private:
    const T *all, *data = nullptr;
    const int64_t heads, num_poses, size, channels;
    Buffer<W> grad;
};

}  // namespace
