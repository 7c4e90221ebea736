// A map of a tile of positions in irreps, its transpose, and the gradients of its weights.

#pragma once

#include <algorithm>

#include "plan.h"

namespace {

template <class T> struct Map {
    using W = V<T>;
    static constexpr int width = WIDTH<T>, vectors = Plan<T>::vectors;
    static constexpr int64_t tile = Plan<T>::tile;
    // Results in registers: so many rows of products, and vectors of each.
    static constexpr int ROWS = 6, SPREAD = BLOCK;

    explicit Map(const Plan<T>& plan)
            : plan(plan),
              call(plan.call),
              features(plan.size * tile, false),
              sent(plan.size * tile, false),
              fields(plan.part_fields * plan.order * tile, false),
              packed(std::max(plan.size, plan.part_fields * plan.order) * tile, false),
              between(plan.largest * tile, false),
              turned(call.grad_weights ? plan.turned : 0, false),
              from(plan.largest),
              to(plan.largest),
              middle(plan.largest) {
        for (int64_t i = 0; i < plan.largest; i++) middle[i] = between.data + i * tile;
    }

    void work(int64_t index) {
        image = index / plan.tiles_of_image, start = index % plan.tiles_of_image * tile;
        number = std::min(tile, plan.number - start), spread = int((number + width - 1) / width);
        const bool reads = plan.features.data, sends = plan.made_features.data;
        if (reads) read_features();
        if (reads && call.grad_weights) turn();
        for (int64_t part = 0; part < plan.parts; part++) {
            if (plan.regular[part].data) {
                read_fields(part);
                if (reads) differentiate(part);
                if (sends) map_back(part);
            }
            if (plan.made_regular[part].data) map(part), write_fields(part);
        }
        if (sends) write_features();
    }

    T* sums = nullptr;  // gradients of the weights, then those of the biases

  private:
    // Rows of a tile: in memory, where whole vectors of positions are, or copied.
    template <class U> struct Rows {
        U* data;
        const int64_t* offsets;
        U* operator[](int64_t i) const { return data + (offsets ? offsets[i] : i * tile); }
    };
    template <class U> bool is_direct(const Place<U>& place) const {
        return place.position == 1 && number % width == 0;
    }
    template <class U> U* base(const Place<U>& place) const {
        return place.data + image * place.image + start * place.position;
    }
    template <class U> Rows<U> rows(const Place<U>& place) const {
        if (is_direct(place)) return {base(place), place.offsets.data()};
        return {packed.data, nullptr};
    }

    // Calls f(rows, true) for as many rows as a vector has numbers, if they are side by side in memory, or f(row, false).
    template <class U, class F> static void each_block(const Place<U>& place, F f) {
        const auto& order = place.order;
        for (size_t i = 0; i < order.size();) {
            bool together = i + width <= order.size();
            for (int r = 1; together && r < width; r++) together = order[i + r].first == order[i].first + r;
            f(&order[i], together);
            i += together ? width : 1;
        }
    }
    // Copies what is read to where lanes are positions, or what is written from there.
    void pack(const Place<const T>& place) {
        if (is_direct(place)) return;
        const T* data = base(place);
        each_block(place, [&](const std::pair<int64_t, int64_t>* row, bool together) {
            for (int64_t n = 0; n < spread * width; n += width) {
                const int64_t here = std::min<int64_t>(width, number - n);
                const T* x = data + row->first + n * place.position;
                if (together) {
                    W y[width];
                    clear(y);
                    for (int l = 0; l < here; l++) y[l] = load(x + l * place.position);
                    transpose<T>(y);
                    for (int r = 0; r < width; r++) store(packed.data + row[r].second * tile + n, y[r]);
                } else {
                    T* y = packed.data + row->second * tile + n;
                    for (int l = 0; l < width; l++) y[l] = l < here ? x[l * place.position] : T(0);
                }
            }
        });
    }
    void unpack(const Place<T>& place) {
        if (is_direct(place)) return;
        T* data = base(place);
        each_block(place, [&](const std::pair<int64_t, int64_t>* row, bool together) {
            for (int64_t n = 0; n < number; n += width) {
                const int64_t here = std::min<int64_t>(width, number - n);
                T* y = data + row->first + n * place.position;
                if (together) {
                    W x[width];
                    UNROLL for (int r = 0; r < width; r++) x[r] = load(packed.data + row[r].second * tile + n);
                    transpose<T>(x);
                    for (int l = 0; l < here; l++) store(y + l * place.position, x[l]);
                } else {
                    const T* x = packed.data + row->second * tile + n;
                    for (int l = 0; l < here; l++) y[l * place.position] = x[l];
                }
            }
        });
    }

    // The rows y of a product with the rows x.
    void multiply(const Sparse<T>& matrix, const T* const* x, T* const* y) const {
        for (const auto& block : matrix)
            each_row<ROWS>(block.rows, [&](auto rows, int64_t row) {
                constexpr int R = rows, most = R > 2 ? SPREAD : std::min(vectors, 2 * SPREAD);
                each_row<most>(spread, [&](auto number, int64_t first) {
                    constexpr int N = number;
                    const T* value = block.value + row * block.columns;
                    W sum[R][N];
                    clear(sum);
                    for (int64_t i = 0; i < block.columns; i++) {
                        const T* from = x[block.column[i]] + first * width;
                        W in[N];
                        UNROLL for (int v = 0; v < N; v++) in[v] = load(from + v * width);
                        UNROLL for (int r = 0; r < R; r++) {
                            const W factor = all<T>(value[r * block.columns + i]);
                            UNROLL for (int v = 0; v < N; v++) sum[r][v] += factor * in[v];
                        }
                    }
                    for (int r = 0; r < R; r++) {
                        T* to = y[block.row[row + r]] + first * width;
                        for (int v = 0; v < N; v++) store(to + v * width, sum[r][v]);
                    }
                });
            });
    }
    // From the rows `from` to the rows `to`.
    void transform(const Product<T>& product) {
        const bool two = product.size() > 1;
        if (two) multiply(product[0], from.data(), middle.data());
        multiply(product.back(), two ? middle.data() : from.data(), to.data());
    }

    void read_features() {
        pack(plan.features);
        const Rows<const T> x = rows(plan.features);
        for (const auto& segment : plan.segments)
            for (int64_t field = 0; field < segment.number; field++) {
                for (int64_t i = 0; i < segment.size; i++) {
                    from[i] = x[segment.channels[field * segment.size + i]];
                    to[i] = features.data + segment.rows[i * segment.number + field] * tile;
                }
                transform(segment.read);
            }
    }
    void write_features() {
        if (call.bias)
            for (int64_t i = 0; i < plan.irreps[0].number; i++) add(sent.data + i * tile, i);
        const Rows<T> y = rows(plan.made_features);
        for (const auto& segment : plan.segments)
            for (int64_t field = 0; field < segment.number; field++) {
                for (int64_t i = 0; i < segment.size; i++) {
                    from[i] = sent.data + segment.rows[i * segment.number + field] * tile;
                    to[i] = y[segment.channels[field * segment.size + i]];
                }
                transform(segment.write);
            }
        unpack(plan.made_features);
    }
    void read_fields(int64_t part) {
        pack(plan.regular[part]);
        const Rows<const T> x = rows(plan.regular[part]);
        for (int64_t field = 0; field < plan.part_fields; field++) {
            for (int64_t i = 0; i < plan.order; i++) {
                from[i] = x[field * plan.order + i];
                to[i] = fields.data + (i * plan.part_fields + field) * tile;
            }
            transform(plan.to_irreps);
        }
    }
    void write_fields(int64_t part) {
        if (call.bias)
            for (int64_t i = 0; i < plan.part_fields; i++) add(fields.data + i * tile, part * plan.part_fields + i);
        const Rows<T> y = rows(plan.made_regular[part]);
        for (int64_t field = 0; field < plan.part_fields; field++) {
            for (int64_t i = 0; i < plan.order; i++) {
                from[i] = fields.data + (i * plan.part_fields + field) * tile;
                to[i] = y[field * plan.order + i];
            }
            transform(plan.from_irreps);
        }
        unpack(plan.made_regular[part]);
    }
    void add(T* row, int64_t number) const {
        const W bias = all<T>(static_cast<const T*>(call.bias)[number]);
        for (int v = 0; v < spread; v++) store(row + v * width, load(row + v * width) + bias);
    }

    // Calls f(weights, rows of features, rows of fields) for each copy in a field of each component of each irrep.
    template <class F> void each_copy(int64_t part, F f) const {
        for (const auto& irrep : plan.irreps)
            for (int64_t copy = 0; copy < irrep.copies; copy++)
                for (int64_t component = 0; component < irrep.components; component++)
                    f(irrep, irrep.weights + (copy * plan.fields + part * plan.part_fields) * irrep.number,
                      features.data + (irrep.features + component * irrep.number) * tile,
                      fields.data + (irrep.fields + component * irrep.copies + copy) * plan.part_fields * tile);
    }
    // Calls f(number, first) for so many rows, in blocks.
    template <int MOST, class F> static void each_row(int64_t rows, F f) {
        int64_t row = 0;
        for (; row + MOST <= rows; row += MOST) f(std::integral_constant<int, MOST>(), row);
        dispatch<MOST>(rows - row, [&](auto number) { f(number, row); });
    }

    // R rows, the sums over i of the rows x of weights, `step` apart.
    template <int R>
    void multiply(const T* weights, int64_t row, int64_t step, const T* x, int64_t count, T* y, bool more) const {
        each_row<SPREAD>(spread, [&](auto number, int64_t first) {
            constexpr int N = number;
            const T* from = x + first * width;
            T* to = y + first * width;
            W sum[R][N];
            clear(sum);
            if (more)
                for (int r = 0; r < R; r++)
                    for (int v = 0; v < N; v++) sum[r][v] = load(to + r * tile + v * width);
            for (int64_t i = 0; i < count; i++) {
                W in[N];
                UNROLL for (int v = 0; v < N; v++) in[v] = load(from + i * tile + v * width);
                UNROLL for (int r = 0; r < R; r++) {
                    const W weight = all<T>(weights[r * row + i * step]);
                    UNROLL for (int v = 0; v < N; v++) sum[r][v] += weight * in[v];
                }
            }
            for (int r = 0; r < R; r++)
                for (int v = 0; v < N; v++) store(to + r * tile + v * width, sum[r][v]);
        });
    }
    void map(int64_t part) {
        const T* weights = static_cast<const T*>(call.weights);
        each_copy(part, [&](const Irrep& irrep, int64_t at, const T* x, T* y) {
            each_row<ROWS>(plan.part_fields, [&](auto rows, int64_t row) {
                const T* of_row = weights + at + row * irrep.number;
                multiply<rows>(of_row, irrep.number, 1, x, irrep.number, y + row * tile, false);
            });
        });
    }
    void map_back(int64_t part) {
        const T* weights = static_cast<const T*>(call.weights);
        each_copy(part, [&](const Irrep& irrep, int64_t at, const T* x, const T* y) {
            T* to = sent.data + (x - features.data);
            const bool more = part || at != irrep.weights + part * plan.part_fields * irrep.number;
            each_row<ROWS>(irrep.number, [&](auto rows, int64_t row) {
                multiply<rows>(weights + at + row, 1, irrep.number, y, plan.part_fields, to + row * tile, more);
            });
        });
    }

    void differentiate(int64_t part) {
        if (call.grad_weights)
            for (const auto& irrep : plan.irreps)
                for (int64_t copy = 0; copy < irrep.copies; copy++) {
                    T* to = sums + irrep.weights + (copy * plan.fields + part * plan.part_fields) * irrep.number;
                    const T* y = fields.data + (irrep.fields + copy) * plan.part_fields * tile;
                    const int64_t blocks = (irrep.number + width - 1) / width;
                    each_row<ROWS>(plan.part_fields, [&](auto rows, int64_t row) {
                        each_row<SPREAD>(blocks, [&](auto columns, int64_t block) {
                            add_products<rows, columns>(irrep, block * width, y + row * tile, to + row * irrep.number);
                        });
                    });
                }
        if (call.grad_bias) {
            T* to = sums + (call.grad_weights ? call.num_weights : 0);
            if (call.bias_of_fields)
                add_rows(fields.data, plan.part_fields, to + part * plan.part_fields);
            else
                add_rows(features.data, plan.irreps[0].number, to);
        }
    }
    // The irreps of features position by position, (number, K) for each component.
    void turn() {
        T* to = turned.data;
        for (const auto& irrep : plan.irreps)
            for (int64_t component = 0; component < irrep.components; component++, to += tile * padded(irrep.number)) {
                const T* x = features.data + (irrep.features + component * irrep.number) * tile;
                for (int64_t k = 0; k < irrep.number; k += width)
                    for (int64_t n = 0; n < spread * width; n += width) {
                        W y[width];
                        UNROLL for (int l = 0; l < width; l++)
                            y[l] = k + l < irrep.number ? load(x + (k + l) * tile + n) : W{};
                        transpose<T>(y);
                        UNROLL for (int l = 0; l < width; l++) store(to + (n + l) * padded(irrep.number) + k, y[l]);
                    }
            }
    }
    static int64_t padded(int64_t number) { return (number + width - 1) / width * width; }
    // The products of rows of fields with C vectors of the features' copies, summed over positions and components.
    template <int R, int C> void add_products(const Irrep& irrep, int64_t first, const T* y, T* to) const {
        const int64_t step = padded(irrep.number);
        W sum[R][C];
        clear(sum);
        const T* x = turned.data + irrep.turned + first;
        for (int64_t component = 0; component < irrep.components; component++) {
            for (int64_t n = 0; n < number; n++) {
                W in[C];
                UNROLL for (int c = 0; c < C; c++) in[c] = load(x + n * step + c * width);
                UNROLL for (int r = 0; r < R; r++) {
                    const W factor = all<T>(y[r * tile + n]);
                    UNROLL for (int c = 0; c < C; c++) sum[r][c] += factor * in[c];
                }
            }
            x += tile * step, y += irrep.copies * plan.part_fields * tile;
        }
        for (int r = 0; r < R; r++)
            for (int c = 0; c < C; c++) {
                T* row = to + r * irrep.number + first + c * width;
                const int64_t here = irrep.number - first - c * width;
                if (here >= width)
                    store(row, load(row) + sum[r][c]);
                else
                    for (int64_t l = 0; l < here; l++) row[l] += sum[r][c][l];
            }
    }
    void add_rows(const T* rows, int64_t count, T* to) const {
        for (int64_t i = 0; i < count; i++) {
            W total{};
            for (int v = 0; v < spread; v++) total += load(rows + i * tile + v * width);
            to[i] += sum<T>(total);
        }
    }

    const Plan<T>& plan;
    const Arguments& call;
    int64_t image = 0, start = 0, number = 0;
    int spread = 0;                                             // vectors of positions
    Buffer<T> features, sent, fields, packed, between, turned;  // (rows, tile), but for the last
    std::vector<const T*> from;
    std::vector<T*> to, middle;
};

}  // namespace
