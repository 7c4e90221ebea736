// Products of a group of up to four queries, each in the lanes of a vector, that share the loads of what they meet.
//
// Vectors of a group have the queries as their last axis: (channels, G), (keys, G), (rows, G). What they meet is told by
// functions that give the vector of a channel of one of K keys, or of a key in one of K channels.

#pragma once

#include "../simd.h"

namespace {

// Adds to K products (K, G) those of queries (channels, G) with the keys.
template <class T, int G, int K, class Key>
inline void add_scores(const V<T>* queries, int64_t channels, Key key, V<T> (&to)[K][G]) {
    for (int64_t c = 0; c < channels; c++) {
        V<T> of_key[K];
        for (int r = 0; r < K; r++) of_key[r] = key(c, r);
        for (int r = 0; r < K; r++)
            for (int g = 0; g < G; g++) to[r][g] += of_key[r] * queries[c * G + g];
    }
}

// Adds to K channels (K, G) those of a key, weighted.
template <class T, int G, int K, class Value>
inline void add_weighted(const V<T>* weight, Value value, V<T> (&to)[K][G]) {
    for (int r = 0; r < K; r++) {
        const V<T> of_channel = value(r);
        for (int g = 0; g < G; g++) to[r][g] += of_channel * weight[g];
    }
}

// Its transpose for K keys: weights (K, G) times (channels, G), summed over the group, added to what is at the places.
template <class T, int G, int K, class Place>
inline void add_outer(const V<T>* weight, const V<T>* x, int64_t channels, Place place) {
    V<T> w[K][G];
    for (int r = 0; r < K; r++)
        for (int g = 0; g < G; g++) w[r][g] = weight[r * G + g];
    for (int64_t c = 0; c < channels; c++)
        for (int r = 0; r < K; r++) {
            T* at = place(c, r);
            V<T> y = load(at);
            for (int g = 0; g < G; g++) y += w[r][g] * x[c * G + g];
            store(at, y);
        }
}

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
            for (int g = 0; g < G; g++) y[g] += x[c * G + g] * row[g * table.distance + c];
        for (int g = 0; g < G; g++) to[r * G + g] = y[g];
    }
}
// From gradients of the products to those of the queries and of the tables, each number of these in the lanes of a
// vector.
template <class T, int G>
void multiply_backward(const V<T>* x, const Table<T>& table, const V<T>* grad, V<T>* grad_x, V<T>* grad_table) {
    for (int64_t r = 0; r < table.number; r++) {
        const T* row = table.row(r);
        V<T>* grad_row = grad_table + table.index(r) * table.channels;
        V<T> y[G];
        for (int g = 0; g < G; g++) y[g] = grad[r * G + g];
        for (int64_t c = 0; c < table.channels; c++) {
            if (table.distance == 0) {
                V<T> z = grad_row[c];
                for (int g = 0; g < G; g++) z += y[g] * x[c * G + g];
                grad_row[c] = z;
            } else {
                for (int g = 0; g < G; g++) grad_row[g * table.distance + c] += y[g] * x[c * G + g];
            }
            for (int g = 0; g < G; g++) grad_x[c * G + g] += y[g] * row[g * table.distance + c];
        }
    }
}

}  // namespace
