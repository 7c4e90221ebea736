// A network of two hidden layers, w . SiLU(W' SiLU(W x + b)), at some rows at a time, forward and backward.

#pragma once

#include <algorithm>

#include "../buffer.h"
#include "../simd.h"
#include "arguments.h"

namespace {

template <class T> struct Network {
    using W = V<T>;
    static constexpr int width = WIDTH<T>;
    static constexpr int chunk = 8;             // vectors of rows that are taken at once
    static constexpr int tile = 4;              // vectors whose results are kept in registers, for BLOCK units
    static constexpr int size = chunk * width;  // rows of a chunk

    explicit Network(const Arguments& call)
            : call(call),
              inputs(call.inputs),
              hidden(call.hidden),
              second_hidden(call.second_hidden),
              repeats(call.blocks * call.repeats),
              x(inputs * chunk),
              active(hidden * chunk),
              out(chunk) {
        if (!call.grad) return;
        grad_out = Buffer<W>(chunk), slope = Buffer<W>(hidden * chunk);
        grad_second_in = Buffer<W>(second_hidden * chunk);
        grad_first = Buffer<W>(hidden * inputs), grad_second = Buffer<W>(second_hidden * hidden);
        grad_last = Buffer<W>(second_hidden);
    }

    // How many chunks of rows a head has, and how many numbers the gradients of its weights and of its biases have.
    static int64_t chunks(const Arguments& call) {
        return call.blocks * call.repeats * ((call.rows + size - 1) / size);
    }
    static int64_t num_weights(const Arguments& call) {
        return call.hidden * call.inputs + call.second_hidden * call.hidden + call.second_hidden;
    }
    static int64_t num_biases(const Arguments& call) { return call.hidden * call.blocks * call.repeats; }

    // Chunks of a head. Their gradients are added to `biases` and written to `weights`: (F, I), (S, F) and (S).
    void work(int64_t head, int64_t from, int64_t to, double* weights, double* biases) {
        first = static_cast<const T*>(call.first) + head * hidden * inputs;
        second = static_cast<const T*>(call.second) + head * second_hidden * hidden;
        last = static_cast<const T*>(call.last) + head * second_hidden;
        bias = static_cast<const T*>(call.bias) + head * hidden * repeats;
        const int64_t chunks_of_rows = (call.rows + size - 1) / size;
        for (int64_t at = from; at < to; at++) {
            const int64_t repeat = at / chunks_of_rows, start = at % chunks_of_rows * size;
            const int64_t number = std::min<int64_t>(size, call.rows - start);
            const T* rows = static_cast<const T*>(call.x) + repeat / call.repeats * inputs * call.rows + start;
            for (int64_t i = 0; i < inputs; i++) read(rows + i * call.rows, number, x.data + i * chunk);
            const int64_t offset = (head * repeats + repeat) * call.rows + start;
            if (!call.grad) {
                forward(repeat);
                std::memcpy(static_cast<T*>(call.out) + offset, out.data, number * sizeof(T));
            } else {
                read(static_cast<const T*>(call.grad) + offset, number, grad_out.data);
                backward(repeat, biases);
            }
        }
        if (call.grad) take(grad_last, take(grad_second, take(grad_first, weights)));
    }

  private:
    static void read(const T* from, int64_t number, W* to) {
        if (number < size) std::fill_n(to, chunk, W{});
        std::memcpy(to, from, number * sizeof(T));
    }
    static double* take(Buffer<W>& grad, double* to) {
        for (int64_t i = 0; i < grad.size; i++) *to++ = sum<T>(grad[i]);
        grad.clear();
        return to;
    }

    // Calls f(number, unit) for all units, in tiles.
    template <int MOST = BLOCK, class F> void each_tile(int64_t units, F f) const {
        int64_t unit = 0;
        for (; unit + MOST <= units; unit += MOST) f(std::integral_constant<int, MOST>(), unit);
        for (; unit < units; unit++) f(std::integral_constant<int, 1>(), unit);
    }

    // The products of some numbers with vectors that are `step` apart.
    template <int B, int N> static void add_products(const W (&x)[B], const W* vectors, W (&y)[B][N], int step = 1) {
        W of_x[B];
        for (int b = 0; b < B; b++) of_x[b] = in_register<T>(x[b]);
        for (int v = 0; v < N; v++) {
            const W of_vector = in_register<T>(vectors[v * step]);
            for (int b = 0; b < B; b++) y[b][v] += of_x[b] * of_vector;
        }
    }

    // The sums over i of weights, `row` apart from unit to unit and `step` from one to the next, times vectors. A function
    // of its own, whose sums have all registers: constants of sigmoids would take them.
    template <int B> [[gnu::noinline]] static void multiply(const T* weights, int64_t row, int64_t step,
                                                            const W* vectors, int64_t count, W (&to)[B][tile]) {
        W y[B][tile];
        clear(y);
        for (int64_t i = 0; i < count; i++, weights += step, vectors += chunk) {
            W weight[B];
            for (int b = 0; b < B; b++) weight[b] = all(weights[b * row]);
            add_products(weight, vectors, y);
        }
        for (int b = 0; b < B; b++)
            for (int v = 0; v < tile; v++) to[b][v] = y[b][v];
    }

    // The first layer: its outputs in `active`, and in a backward pass the derivatives of SiLU in `slope`.
    void first_layer(int64_t repeat) {
        for (int64_t unit = 0; unit < hidden; unit++) {
            W y[chunk], s[chunk];
            for (int v = 0; v < chunk; v++) y[v] = all<T>(bias[unit * repeats + repeat]);
            for (int64_t i = 0; i < inputs; i++)
                for (int v = 0; v < chunk; v++) y[v] += first[unit * inputs + i] * x[i * chunk + v];
            for (int v = 0; v < chunk; v += tile) sigmoid<T, tile>(y + v, s + v);
            W* to = active.data + unit * chunk;
            for (int v = 0; v < chunk; v++) y[v] *= s[v];
            for (int v = 0; v < chunk; v++) to[v] = y[v];
            if (!call.grad) continue;
            to = slope.data + unit * chunk;
            for (int v = 0; v < chunk; v++) to[v] = s[v] + y[v] * (T(1) - s[v]);
        }
    }
    // The second layer: calls f(unit, first vector, what goes into SiLU, its sigmoid) for `tile` vectors at a time.
    template <class F> void second_layer(F f) const {
        each_tile(second_hidden, [&](auto number, int64_t unit) {
            constexpr int B = number;
            for (int start = 0; start < chunk; start += tile) {
                W y[B][tile], s[tile];
                multiply<B>(second + unit * hidden, hidden, 1, &active[start], hidden, y);
                for (int b = 0; b < B; b++) {
                    sigmoid<T, tile>(y[b], s);
                    f(unit + b, start, y[b], s);
                }
            }
        });
    }

    void forward(int64_t repeat) {
        first_layer(repeat);
        // What is not finite makes an output that is no number; between the bounds of sigmoids it could become -infinity.
        std::fill_n(out.data, chunk, W{});
        for (int64_t i = 0; i < inputs; i++)
            for (int v = 0; v < chunk; v++) out[v] += x[i * chunk + v] - x[i * chunk + v];
        second_layer([&](int64_t unit, int start, const W* z, const W* s) {
            for (int v = 0; v < tile; v++) out[start + v] += last[unit] * (z[v] * s[v]);
        });
    }

    void backward(int64_t repeat, double* biases) {
        first_layer(repeat);
        second_layer([&](int64_t unit, int start, const W* z, const W* s) {
            const T weight = last[unit];
            W* to = grad_second_in.data + unit * chunk + start;
            W total{};
            for (int v = 0; v < tile; v++) {
                const W grad = grad_out[start + v], y = z[v] * s[v];
                total += grad * y;
                to[v] = weight * grad * (s[v] + y * (T(1) - s[v]));
            }
            grad_last[unit] += total;
        });
        add_to_second();
        leave_second();
        add_to_first(repeat, biases);
    }
    // The gradients of the second weights.
    void add_to_second() {
        each_tile(second_hidden, [&](auto rows, int64_t unit) {
            each_tile<tile>(hidden, [&](auto columns, int64_t from) {
                constexpr int B = rows, D = columns;
                W y[B][D];
                for (int b = 0; b < B; b++)
                    for (int d = 0; d < D; d++) y[b][d] = grad_second[(unit + b) * hidden + from + d];
                for (int v = 0; v < chunk; v++) {
                    W grad[B];
                    for (int b = 0; b < B; b++) grad[b] = grad_second_in[(unit + b) * chunk + v];
                    add_products(grad, &active[from * chunk + v], y, chunk);
                }
                for (int b = 0; b < B; b++)
                    for (int d = 0; d < D; d++) grad_second[(unit + b) * hidden + from + d] = y[b][d];
            });
        });
    }
    // From the second layer to the first: `slope` then holds the gradients of what goes into its SiLU.
    void leave_second() {
        each_tile(hidden, [&](auto number, int64_t unit) {
            constexpr int B = number;
            for (int start = 0; start < chunk; start += tile) {
                W y[B][tile];
                multiply<B>(second + unit, 1, hidden, &grad_second_in[start], second_hidden, y);
                for (int b = 0; b < B; b++)
                    for (int v = 0; v < tile; v++) slope[(unit + b) * chunk + start + v] *= y[b][v];
            }
        });
    }
    // The gradients of the first weights and of the bias.
    void add_to_first(int64_t repeat, double* biases) {
        for (int64_t unit = 0; unit < hidden; unit++) {
            const W* grad = slope.data + unit * chunk;
            W total{};
            for (int v = 0; v < chunk; v++) total += grad[v];
            biases[unit * repeats + repeat] += sum<T>(total);
            for (int64_t i = 0; i < inputs; i++) {
                W y = grad_first[unit * inputs + i];
                for (int v = 0; v < chunk; v++) y += grad[v] * x[i * chunk + v];
                grad_first[unit * inputs + i] = y;
            }
        }
    }

    const Arguments& call;
    const int64_t inputs, hidden, second_hidden, repeats;  // the last of all blocks
    const T *first = nullptr, *second = nullptr, *last = nullptr, *bias = nullptr;  // of a head
    Buffer<W> x, active, out, grad_out, slope, grad_second_in;                      // of a chunk, (units, chunk)
    Buffer<W> grad_first, grad_second, grad_last;
};

}  // namespace
