// Networks of two hidden layers at every pair of points, forward and backward: what functional/points/pair_mlp.py calls.
//
// Lanes of a vector are pairs side by side, and what is hidden exists for a few vectors at a time. The backward pass
// makes it again, and adds up the gradients of the weights in parts of the pairs whose number does not depend on that of
// the threads: nor does the result.

#include "buffer.h"
#include "simd.h"
#include "threads.h"

namespace {

constexpr int CHUNK = 8;  // vectors
constexpr int BLOCKS = 4;  // of outputs, and of vectors

extern "C" struct Arguments {
    const void *x, *bias, *first, *second, *last;        // (B, I, R), (M, F, B * Q), (M, F, I), (M, S, F), (M, S)
    void* out;                                           // (M, B * Q, R)
    const void* grad;                                    // as that; null in the forward pass
    void *grad_bias, *grad_first, *grad_second, *grad_last;  // as those, zero at first
    int64_t heads, inputs, hidden, second_hidden, blocks, repeats, rows, threads;
};

template <class T> struct Network {
    using W = V<T>;
    static constexpr int width = WIDTH<T>;

    explicit Network(const Arguments& a)
            : a(a),
              I(a.inputs),
              F(a.hidden),
              S(a.second_hidden),
              rows(a.blocks * a.repeats),
              chunks((a.rows + CHUNK * width - 1) / (CHUNK * width)),
              x(I * CHUNK),
              active(F * CHUNK),
              grad_out(CHUNK),
              out(CHUNK) {
        if (!a.grad) return;
        slope = Buffer<W>(F * CHUNK), grad_second_in = Buffer<W>(S * CHUNK);
        of_first = Buffer<W>(F * I), of_second = Buffer<W>(S * F), of_last = Buffer<W>(S);
    }

    // Chunks of all rows.
    static int64_t units(const Arguments& a) {
        return a.blocks * a.repeats * ((a.rows + CHUNK * width - 1) / (CHUNK * width));
    }

    // Units from one to another, of one head. Gradients of all but the bias are added to `sums`, (F * I, S * F, S).
    void work(int64_t m, int64_t from, int64_t to, double* sums, double* of_bias) {
        first = static_cast<const T*>(a.first) + m * F * I, second = static_cast<const T*>(a.second) + m * S * F;
        last = static_cast<const T*>(a.last) + m * S;
        for (int64_t unit = from; unit < to; unit++) {
            const int64_t row = unit / chunks, start = unit % chunks * CHUNK * width;
            const int64_t number = std::min<int64_t>(CHUNK * width, a.rows - start);
            for (int64_t i = 0; i < I; i++)
                read(static_cast<const T*>(a.x) + (row / a.repeats * I + i) * a.rows + start, number,
                     x.data + i * CHUNK);
            if (!a.grad) {
                forward(m, row);
                T* at = static_cast<T*>(a.out) + (m * rows + row) * a.rows + start;
                std::memcpy(at, out.data, number * sizeof(T));
            } else {
                read(static_cast<const T*>(a.grad) + (m * rows + row) * a.rows + start, number, grad_out.data);
                backward(m, row, of_bias);
            }
        }
        if (!a.grad) return;
        for (int64_t i = 0; i < F * I; i++) *sums++ = sum<T>(of_first[i]);
        for (int64_t i = 0; i < S * F; i++) *sums++ = sum<T>(of_second[i]);
        for (int64_t i = 0; i < S; i++) *sums++ = sum<T>(of_last[i]);
        of_first.clear(), of_second.clear(), of_last.clear();
    }

  private:
    static void read(const T* from, int64_t number, W* to) {
        if (number < CHUNK * width) std::fill_n(to, CHUNK, W{});
        std::memcpy(to, from, number * sizeof(T));
    }
    // Of four vectors, by a single division: of denominators that are at most 2^30, or 2^250, each. Beyond it is 0.
    static void sigmoids(const W* z, W* to) {
        constexpr T most = sizeof(T) == 4 ? 30 : 250;
        W y[4], x[4];
        for (int i = 0; i < 4; i++) {
            y[i] = z[i] * -LOG2E<T>;
            // What is not a number is left to the product with it: here it would spoil the others.
            x[i] = exp2<T>(y[i] < most ? y[i] : all<T>(most)) + T(1);
        }
        const W a = x[0] * x[1], b = x[2] * x[3], inverse = T(1) / (a * b), of_a = inverse * b, of_b = inverse * a;
        to[0] = of_a * x[1], to[1] = of_a * x[0], to[2] = of_b * x[3], to[3] = of_b * x[2];
        for (int i = 0; i < 4; i++) to[i] = y[i] > most ? W{} : to[i];
    }

    void first_layer(int64_t m, int64_t row) {
        for (int64_t f = 0; f < F; f++) {
            W y[CHUNK];
            const T bias = static_cast<const T*>(a.bias)[(m * F + f) * rows + row];
            for (int v = 0; v < CHUNK; v++) y[v] = all<T>(bias);
            for (int64_t i = 0; i < I; i++)
                for (int v = 0; v < CHUNK; v++) y[v] += first[f * I + i] * x[i * CHUNK + v];
            W s[CHUNK];
            for (int v = 0; v < CHUNK; v += 4) sigmoids(y + v, s + v);
            W* to = active.data + f * CHUNK;
            for (int v = 0; v < CHUNK; v++) y[v] *= s[v];
            for (int v = 0; v < CHUNK; v++) to[v] = y[v];
            if (!a.grad) continue;
            to = slope.data + f * CHUNK;
            for (int v = 0; v < CHUNK; v++) to[v] = s[v] + y[v] * (T(1) - s[v]);
        }
    }
    // What B outputs of the second layer are before their function, for half a chunk.
    template <int B> inline void second_layer(int64_t o, int half, W y[B][BLOCKS]) const {
        for (int b = 0; b < B; b++)
            for (int v = 0; v < BLOCKS; v++) y[b][v] = W{};
        for (int64_t f = 0; f < F; f++)
            for (int b = 0; b < B; b++)
                for (int v = 0; v < BLOCKS; v++)
                    y[b][v] += second[(o + b) * F + f] * active[f * CHUNK + half * BLOCKS + v];
    }
    template <class G> void by_block(int64_t n, G g) const {
        int64_t o = 0;
        for (; o + BLOCKS <= n; o += BLOCKS) g(std::integral_constant<int, BLOCKS>(), o);
        for (; o < n; o++) g(std::integral_constant<int, 1>(), o);
    }

    // Calls g(output of the second layer, half of the chunk, what it is before its function, the sigmoid of that).
    template <class G> void by_output(G g) const {
        by_block(S, [&](auto size, int64_t o) {
            constexpr int B = size;
            for (int half = 0; half < CHUNK / BLOCKS; half++) {
                W y[B][BLOCKS], s[BLOCKS];
                second_layer<B>(o, half, y);
                for (int b = 0; b < B; b++) sigmoids(y[b], s), g(o + b, half, y[b], s);
            }
        });
    }

    void forward(int64_t m, int64_t row) {
        first_layer(m, row);
        std::fill_n(out.data, CHUNK, W{});
        by_output([&](int64_t o, int half, const W* z, const W* s) {
            for (int v = 0; v < BLOCKS; v++) out[half * BLOCKS + v] += last[o] * (z[v] * s[v]);
        });
    }

    void backward(int64_t m, int64_t row, double* of_bias) {
        first_layer(m, row);
        by_output([&](int64_t o, int half, const W* z, const W* s) {
            const T weight = last[o];
            W* to = grad_second_in.data + o * CHUNK + half * BLOCKS;
            W total{};
            for (int v = 0; v < BLOCKS; v++) {
                const W gradient = grad_out[half * BLOCKS + v], active = z[v] * s[v];
                total += gradient * active;
                to[v] = weight * gradient * (s[v] + active * (T(1) - s[v]));
            }
            of_last[o] += total;
        });
        by_block(S, [&](auto size, int64_t o) {
            constexpr int B = size;
            by_block(F, [&](auto columns, int64_t f) {
                constexpr int D = columns;
                W y[B][D];
                for (int b = 0; b < B; b++)
                    for (int d = 0; d < D; d++) y[b][d] = of_second[(o + b) * F + f + d];
                for (int v = 0; v < CHUNK; v++)
                    for (int b = 0; b < B; b++)
                        for (int d = 0; d < D; d++)
                            y[b][d] += grad_second_in[(o + b) * CHUNK + v] * active[(f + d) * CHUNK + v];
                for (int b = 0; b < B; b++)
                    for (int d = 0; d < D; d++) of_second[(o + b) * F + f + d] = y[b][d];
            });
        });
        by_block(F, [&](auto size, int64_t f) {
            constexpr int B = size;
            for (int half = 0; half < CHUNK / BLOCKS; half++) {
                W y[B][BLOCKS];
                for (int b = 0; b < B; b++)
                    for (int v = 0; v < BLOCKS; v++) y[b][v] = W{};
                for (int64_t o = 0; o < S; o++)
                    for (int b = 0; b < B; b++)
                        for (int v = 0; v < BLOCKS; v++)
                            y[b][v] += second[o * F + f + b] * grad_second_in[o * CHUNK + half * BLOCKS + v];
                // From here on `slope` holds the gradients before the function.
                for (int b = 0; b < B; b++)
                    for (int v = 0; v < BLOCKS; v++) slope[(f + b) * CHUNK + half * BLOCKS + v] *= y[b][v];
            }
        });
        for (int64_t f = 0; f < F; f++) {
            W total{};
            for (int v = 0; v < CHUNK; v++) total += slope[f * CHUNK + v];
            of_bias[f * rows + row] += sum<T>(total);
            for (int64_t i = 0; i < I; i++) {
                W y = of_first[f * I + i];
                for (int v = 0; v < CHUNK; v++) y += slope[f * CHUNK + v] * x[i * CHUNK + v];
                of_first[f * I + i] = y;
            }
        }
    }

    const Arguments& a;
    const int64_t I, F, S, rows, chunks;
    const T *first = nullptr, *second = nullptr, *last = nullptr;
    Buffer<W> x, active, grad_out, out, slope, grad_second_in, of_first, of_second, of_last;
};

template <class T> int run(const Arguments& a) {
    try {
        const int64_t F = a.hidden, S = a.second_hidden, rows = a.blocks * a.repeats;
        const int64_t units = Network<T>::units(a), parts = std::min<int64_t>(units, std::max<int64_t>(1, 32 / a.heads));
        const int64_t numbers = a.grad ? F * a.inputs + S * F + S : 0, biases = a.grad ? F * rows : 0;
        std::vector<double> sums(a.heads * parts * numbers), of_bias(a.heads * parts * biases);
        const bool done = share(a.heads * parts, a.threads, [&] { return Network<T>(a); },
                                [&](Network<T>& worker, int64_t task) {
                                    const int64_t part = task % parts;
                                    worker.work(task / parts, part * units / parts, (part + 1) * units / parts,
                                                sums.data() + task * numbers, of_bias.data() + task * biases);
                                });
        const auto add = [&](void* to, int64_t m, int64_t n, const double* from) {
            for (int64_t i = 0; to && i < n; i++) static_cast<T*>(to)[m * n + i] += T(from[i]);
        };
        for (int64_t m = 0; m < a.heads; m++) {
            std::vector<double> whole(numbers), bias(biases);
            for (int64_t part = 0; part < parts; part++) {
                for (int64_t i = 0; i < numbers; i++) whole[i] += sums[(m * parts + part) * numbers + i];
                for (int64_t i = 0; i < biases; i++) bias[i] += of_bias[(m * parts + part) * biases + i];
            }
            if (!a.grad) break;
            add(a.grad_first, m, F * a.inputs, whole.data());
            add(a.grad_second, m, S * F, whole.data() + F * a.inputs);
            add(a.grad_last, m, S, whole.data() + F * a.inputs + S * F);
            add(a.grad_bias, m, biases, bias.data());
        }
        return !done;
    } catch (const std::bad_alloc&) {
        return 1;
    }
}

}  // namespace

// 0, or 1 where there was not enough memory. NUMBER is the type of all numbers.
extern "C" int escnn_attention(const Arguments* a) { return run<NUMBER>(*a); }
