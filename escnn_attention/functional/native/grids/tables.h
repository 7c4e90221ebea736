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

// Products of queries (channels, G) with the rows: (rows, G).
template <class T, int G> void multiply(const V<T>* x, const Table<T>& table, V<T>* to) {
    for (int64_t r = 0; r < table.number; r++) {
        const T* row = table.row(r);
        V<T> y[G] = {};
        for (int64_t c = 0; c < table.channels; c++)
            UNROLL for (int g = 0; g < G; g++) y[g] += x[c * G + g] * row[g * table.distance + c];
        UNROLL for (int g = 0; g < G; g++) to[r * G + g] = y[g];
    }
}
// The sum of the rows, weighted (rows, G), added to (channels, G).
template <class T, int G, int K>
inline void combine_rows_block(const Table<T>& table, int64_t first, int64_t last, int64_t c, const V<T>* weight,
                               V<T>* to) {
    V<T> y[K][G] = {};
    for (int64_t n = first; n < last; n++) {
        const T* row = table.row(n) + c;
        UNROLL for (int r = 0; r < K; r++)
            UNROLL for (int g = 0; g < G; g++) y[r][g] += weight[n * G + g] * row[g * table.distance + r];
    }
    UNROLL for (int r = 0; r < K; r++)
        UNROLL for (int g = 0; g < G; g++) to[(c + r) * G + g] += y[r][g];
}
template <class T, int G> void combine_rows(const Table<T>& table, const V<T>* weight, V<T>* to) {
    each_span(table.number, 1, [&](int64_t first, int64_t last) {
        int64_t c = 0;
        for (; c + BLOCK <= table.channels; c += BLOCK)
            combine_rows_block<T, G, BLOCK>(table, first, last, c, weight, to);
        for (; c < table.channels; c++) combine_rows_block<T, G, 1>(table, first, last, c, weight, to);
    });
}
// From gradients of the products to those of the queries and of the tables, each number of these in the lanes of a
// vector.
template <class T, int G>
void multiply_backward(const V<T>* x, const Table<T>& table, const V<T>* grad, V<T>* grad_x, V<T>* grad_table) {
    combine_rows<T, G>(table, grad, grad_x);
    for (int64_t r = 0; r < table.number; r++) {
        V<T>* grad_row = grad_table + table.index(r) * table.channels;
        V<T> y[G];
        UNROLL for (int g = 0; g < G; g++) y[g] = grad[r * G + g];
        for (int64_t c = 0; c < table.channels; c++) {
            if (table.distance == 0) {
                V<T> z{};
                UNROLL for (int g = 0; g < G; g++) z += y[g] * x[c * G + g];
                grad_row[c] += z;
            } else {
                UNROLL for (int g = 0; g < G; g++) grad_row[g * table.distance + c] += y[g] * x[c * G + g];
            }
        }
    }
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
