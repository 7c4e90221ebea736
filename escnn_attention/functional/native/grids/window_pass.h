// Attention over the windows of a grid: the passes over the queries of one head, of one image or of those that lie side
// by side, forward and backward.
//
// Lanes of a vector are queries side by side, and the scores of as many queries as a vector has lanes exist at a time,
// in a buffer in the cache. Query poses are taken in groups of up to four, which share the loads of a key.
//
// A query contributes to the output of its own pose; or all query poses contribute to every output pose, from which each
// of them is seen: then the products of queries and keys are those of all output poses, and weights are summed over the query
// poses before they meet the values.

#pragma once

#include "../dropout.h"
#include "bias.h"
#include "packing.h"

namespace {

template <class T> struct WindowPass {
    using W = V<T>;
    static constexpr int width = WIDTH<T>;
    static constexpr int64_t IN_CACHE = 1 << 21;  // bytes, of the second level

    WindowPass(const Arguments& call, const Layout& layout)
            : call(call),
              layout(layout),
              packing{layout, call.heads},
              window(layout, call.key_poses, call.channels),
              bias(call, layout.most_neighbours, call.grad),
              dropout(call.dropout),
              unit(T(call.scale) * LOG2E<T>),
              channels(call.channels),
              query_poses(call.query_poses),
              key_poses(call.key_poses),
              num_poses(call.num_poses),
              most_keys(layout.most_neighbours * call.key_poses),
              group(std::clamp<int64_t>(IN_CACHE / (1 + 2 * most_keys * int64_t(sizeof(W))), 1, GROUP)) {
        const int64_t places = layout.queries * layout.slots, num_keys = layout.keys * layout.of_keys.slots;
        const int64_t of_q = places * query_poses * channels, of_k = num_keys * key_poses * channels;
        mask = Buffer<T>(num_keys);
        q = Buffer<T>(of_q), k = Buffer<T>(of_k), v = Buffer<T>(of_k);
        out = Buffer<T>(places * num_poses * channels), sums = Buffer<T>(places * 2 * rows());
        query_group = Buffer<W>(channels * query_poses), out_group = Buffer<W>(channels * GROUP);
        scores = Buffer<W>(most_keys * GROUP);
        if (call.sum_query_poses)
            content = Buffer<W>(most_keys * query_poses), weight_sums = Buffer<W>(most_keys * GROUP);
        if (!call.grad) return;
        grad_q = Buffer<T>(of_q), grad_k = Buffer<T>(of_k), grad_v = Buffer<T>(of_k);
        grad_query_group = Buffer<W>(channels * query_poses), grads = Buffer<W>(most_keys * GROUP);
        pose_sums = Buffer<W>(2 * key_poses * GROUP);
        if (dropout.on && !call.sum_query_poses) kept = Buffer<W>(most_keys * GROUP);
        if (call.sum_query_poses)
            grad_content = Buffer<W>(most_keys * query_poses), of_values = Buffer<W>(most_keys * GROUP);
    }

    // One head of one group of images.
    void work(int64_t head, int64_t number) {
        bias.begin(head);
        const int64_t first_image = number * layout.together, image = head * call.images + first_image;
        packing.images = std::min(layout.together, call.images - first_image);
        const int64_t block = first_image * call.heads + head;
        const int64_t of_q = block * layout.positions * query_poses * channels;
        const int64_t per_image = layout.of_keys.positions * key_poses * channels, of_k = block * per_image;
        const int64_t of_out = block * layout.positions * num_poses * channels;
        T* sums_of_image = static_cast<T*>(call.sums) + image * layout.positions * 2 * rows();
        key = Dropout<T>::key(call.seed, image);
        T *const to_k = static_cast<T*>(call.grad_k) + of_k, *const to_v = static_cast<T*>(call.grad_v) + of_k;
        for (int64_t i = 0; call.grad && !layout.keys_once && i < packing.images; i++)
            for (T* to : {to_k, to_v}) std::fill_n(to + i * call.heads * per_image, per_image, T(0));
        for (int64_t band = 0; band < layout.num_rows; band += layout.rows) {
            first = uint32_t(band * layout.row);
            if (band != masked) packing.pack_mask(band, mask), masked = band;
            packing.pack(static_cast<const T*>(call.q) + of_q, query_poses, channels, band, false, q);
            packing.pack(static_cast<const T*>(call.k) + of_k, key_poses, channels, band, true, k);
            packing.pack(static_cast<const T*>(call.v) + of_k, key_poses, channels, band, true, v);
            if (!call.grad) {
                each_vector([&] { call.sum_query_poses ? forward_all() : forward_own(); });
                packing.unpack(out, num_poses, channels, band, false, static_cast<T*>(call.out) + of_out);
                packing.unpack_rows(sums, 2 * rows(), band, sums_of_image);
                continue;
            }
            packing.pack_rows(sums_of_image, 2 * rows(), band, sums);
            packing.pack(static_cast<const T*>(call.grad) + of_out, num_poses, channels, band, false, out);
            grad_k.clear(), grad_v.clear();
            each_vector([&] { call.sum_query_poses ? backward_all() : backward_own(); });
            const T scale = T(call.scale);
            packing.unpack(grad_q, query_poses, channels, band, false, static_cast<T*>(call.grad_q) + of_q,
                           scale);
            packing.unpack(grad_k, key_poses, channels, band, true, to_k, scale);
            packing.unpack(grad_v, key_poses, channels, band, true, to_v);
        }
    }

    // Adds the gradients of the tables since the last call.
    void take_gradients(double* of_spatial, double* of_pose) const {
        bias.spatial.take(of_spatial), bias.pose.take(of_pose);
    }

  private:
    // Rows of scores of a query: those of a query pose, and of an output pose where all contribute to each.
    int64_t rows() const { return query_poses * (call.sum_query_poses ? num_poses : 1); }
    // The largest score of a row, and what its exponentials are multiplied by: apart, since the rounding error of one
    // number for both grows with the scores.
    T* most_of(int64_t row) const { return sums.data + row * layout.queries + place_of(2 * rows()); }
    T* factor_of(int64_t row) const { return most_of(rows() + row); }

    template <class F> void each_vector(F f) {
        for (size_t vector = 0; vector < layout.places.size(); vector++)
            for (slot = 0; slot < layout.slots; slot++) {
                place = layout.places[vector];
                window.move(vector, slot, mask);
                f();
            }
    }
    // Where the vector begins in an array of so many numbers for every query.
    int64_t place_of(int64_t numbers) const { return slot * numbers * layout.queries + place; }
    // Exponentials of the scores (keys, G) of rows, in place, and what makes their sums 1.
    template <int G> void exponentials(W* x, int64_t row, W* factor) const {
        const T unit = this->unit;  // in a register, whatever is written to memory
        W most[G], total[G] = {};
        UNROLL for (int g = 0; g < G; g++) most[g] = x[g];
        for (int64_t n = 1; n < window.num_keys; n++)
            UNROLL for (int g = 0; g < G; g++) most[g] = larger<T>(most[g], x[n * G + g]);
        each_span(window.num_keys, 1, [&](int64_t first, int64_t last) {
            W part[G] = {};
            for (int64_t n = first; n < last; n++) {
                exp2<T>(x + n * G, most, unit, x + n * G);
                UNROLL for (int g = 0; g < G; g++) part[g] += x[n * G + g];
            }
            UNROLL for (int g = 0; g < G; g++) total[g] += part[g];
        });
        UNROLL for (int g = 0; g < G; g++) {
            factor[g] = T(1) / total[g];
            store(most_of(row + g), most[g]), store(factor_of(row + g), factor[g]);
        }
    }

    uint32_t row_key(int64_t row) const { return Dropout<T>::mix(key + uint32_t(slot * rows() + row)); }
    W kept_of(uint32_t row, int64_t n) const {
        return dropout.mask(Dropout<T>::mix(row + uint32_t(window.key(n))), first + uint32_t(place));
    }
    template <int G> void drop(int64_t row, W* x) const {
        if (!dropout.on) return;
        UNROLL for (int g = 0; g < G; g++) {
            const uint32_t of_row = row_key(row + g);
            for (int64_t n = 0; n < window.num_keys; n++) x[n * G + g] *= kept_of(of_row, n);
        }
    }

    // The scores of queries of their own poses, `query_group` to `scores`.
    template <int G> void scores_own(int64_t pose) {
        packing.template gather<G>(q, query_poses, channels, pose, place_of(query_poses * channels), query_group.data);
        bias.template forward<G>(query_group.data, window, pose, true);
        bias.template add_mask<G>(window, mask, bool(bias.spatial));
        multiply_keys<T, G>(window, k.data, channels, query_group.data, bias.by_offset.data, bias.of_poses(),
                            scores.data);
    }

    void forward_own() {
        each_group(query_poses, [&](auto size, int64_t pose) {
            constexpr int G = size;
            scores_own<G>(pose);
            W factor[G];
            exponentials<G>(scores.data, pose, factor);
            drop<G>(pose, scores.data);
            std::fill_n(out_group.data, channels * G, W{});
            combine_keys<T, G>(window, v.data, channels, scores.data, out_group.data);
            for (int64_t c = 0; c < channels; c++)
                UNROLL for (int g = 0; g < G; g++) out_group[c * G + g] *= factor[g];
            packing.template scatter<G>(out_group.data, num_poses, channels, pose, place_of(num_poses * channels), out);
        });
    }

    void backward_own() {
        each_group(query_poses, [&](auto size, int64_t pose) {
            constexpr int G = size;
            scores_own<G>(pose);
            packing.template gather<G>(out, num_poses, channels, pose, place_of(num_poses * channels), out_group.data);
            multiply_keys<T, G>(window, v.data, channels, out_group.data, nullptr, nullptr, grads.data);
            const W* weights = dropout.on ? kept.data : scores.data;
            dropout.on ? differentiate_own<G, true>(pose) : differentiate_own<G, false>(pose);
            W* grad_x = grad_query_group.data;
            std::fill_n(grad_x, channels * G, W{});
            bias.template backward<G>(query_group.data, window, pose, true, grad_x);
            combine_keys<T, G>(window, k.data, channels, grads.data, grad_x);
            packing.template scatter<G>(grad_x, query_poses, channels, pose, place_of(query_poses * channels), grad_q);
            window.template distribute<G>(grads.data, query_group.data, channels, grad_k);
            window.template distribute<G>(weights, out_group.data, channels, grad_v);
        }, group);
    }

    // From scores and gradients of weights to weights and gradients of scores, in place; weights that are left after
    // dropout to `kept`.
    template <int G, bool DROPS> void differentiate_own(int64_t pose) {
        const T unit = this->unit;
        W most[G], factor[G], inner[G];
        uint32_t of_row[G];
        UNROLL for (int g = 0; g < G; g++) {
            most[g] = load(most_of(pose + g)), factor[g] = load(factor_of(pose + g)), of_row[g] = row_key(pose + g);
        }
        sum_in_spans<G>(inner, [&](int64_t first, int64_t last, W* part) {
            for (int64_t n = first * key_poses; n < last * key_poses; n++) {
                W power[G];
                exp2<T>(&scores[n * G], most, unit, power);
                UNROLL for (int g = 0; g < G; g++) {
                    const W p = factor[g] * power[g];
                    const W grad = (DROPS ? p * kept_of(of_row[g], n) : p) * grads[n * G + g];
                    if (DROPS) kept[n * G + g] = p * kept_of(of_row[g], n);
                    scores[n * G + g] = p, grads[n * G + g] = grad, part[g] += grad;
                }
            }
        });
        sum_gradients<G>([&](int64_t first, int64_t last, auto add) {
            for (int64_t l = first; l < last; l++)
                for (int64_t p = 0, n = l * key_poses; p < key_poses; p++, n++) {
                    W grad[G];
                    UNROLL for (int g = 0; g < G; g++)
                        grads[n * G + g] = grad[g] = grads[n * G + g] - scores[n * G + g] * inner[g];
                    add(l, p, grad);
                }
        });
    }
    // The sums of gradients of scores over the poses and over the places, to what offsets and poses gave:
    // f(first, last, add) calls add(place, key pose, gradients) for the keys of these places.
    template <int G, class F> void sum_gradients(F f) const {
        W *of_poses = pose_sums.data, *of_span = of_poses + key_poses * G;
        std::fill_n(of_poses, key_poses * G, W{});
        each_span(window.places, key_poses, [&](int64_t first, int64_t last) {
            W of_place[G];
            std::fill_n(of_span, key_poses * G, W{});
            f(first, last, [&](int64_t place, int64_t pose, const W* grad) {
                UNROLL for (int g = 0; g < G; g++) {
                    if (bias.pose) of_span[pose * G + g] += grad[g];
                    of_place[g] = pose ? of_place[g] + grad[g] : grad[g];
                }
                if (pose == key_poses - 1)
                    UNROLL for (int g = 0; g < G; g++) bias.by_offset[place * G + g] = of_place[g];
            });
            for (int64_t i = 0; i < key_poses * G; i++) of_poses[i] += of_span[i];
        });
        std::copy_n(of_poses, key_poses * G, bias.by_pose.data);
    }
    // In stretches of places, the sum of what f(first, last, sums) adds to in each of them.
    template <int G, class F> void sum_in_spans(W* total, F f) const {
        UNROLL for (int g = 0; g < G; g++) total[g] = W{};
        each_span(window.places, key_poses, [&](int64_t first, int64_t last) {
            W part[G] = {};
            f(first, last, part);
            UNROLL for (int g = 0; g < G; g++) total[g] += part[g];
        });
    }

    // A score is a sum of what the content, offsets and poses give, and its exponential the product of theirs: those of
    // the content serve all output poses. Each is at most 1. Where a query's largest terms do not meet in one key all
    // products may be too small: then they are made from the scores.
    static constexpr T SMALL = sizeof(T) == 4 ? T(0x1p-40) : T(0x1p-400);

    // The exponentials of numbers (n, G), divided by the largest, in place.
    template <int G> void exponentiate(W* x, int64_t n) const {
        const T unit = this->unit;
        W most[G];
        UNROLL for (int g = 0; g < G; g++) most[g] = x[g];
        for (int64_t i = 1; i < n; i++)
            UNROLL for (int g = 0; g < G; g++) most[g] = larger<T>(most[g], x[i * G + g]);
        for (int64_t i = 0; i < n; i++) exp2<T>(x + i * G, most, unit, x + i * G);
    }
    // The exponentials of the products of all query poses with the keys: group by group, (keys, G) each.
    void make_content() {
        each_group(query_poses, [&](auto size, int64_t pose) {
            constexpr int G = size;
            W *x = query_group.data + channels * pose, *to = content.data + most_keys * pose;
            packing.template gather<G>(q, query_poses, channels, pose, place_of(query_poses * channels), x);
            bias.template add_mask<G>(window, mask, false);
            multiply_keys<T, G>(window, k.data, channels, x, bias.by_offset.data, nullptr, to);
            exponentiate<G>(to, window.num_keys);
        });
    }
    // The exponentials of what offsets and poses give to a group of query poses seen from an output pose.
    template <int G> void make_bias(int64_t out_pose, int64_t pose) {
        bias.template forward<G>(query_group.data + channels * pose, window, out_pose, false);
        if (bias.spatial) exponentiate<G>(bias.by_offset.data, window.places);
        if (bias.pose) exponentiate<G>(bias.by_pose.data, key_poses);
    }
    // Calls f(place, key pose, key, weights) for the keys of some places: products of exponentials, of the query poses of
    // a group, times a factor of each; or what is STORED in `scores`, times that.
    template <int G, bool STORED, class F>
    void each_weight(int64_t pose, const W* factor, int64_t first, int64_t last, F f) const {
        const W* from = STORED ? scores.data : content.data + most_keys * pose;
        for (int64_t l = first; l < last; l++) {
            W of_place[G];
            UNROLL for (int g = 0; g < G; g++)
                of_place[g] = !STORED && bias.spatial ? factor[g] * bias.by_offset[l * G + g] : factor[g];
            for (int64_t p = 0, n = l * key_poses; p < key_poses; p++, n++) {
                W y[G];
                UNROLL for (int g = 0; g < G; g++) {
                    y[g] = from[n * G + g] * of_place[g];
                    if (!STORED && bias.pose) y[g] *= bias.by_pose[p * G + g];
                }
                f(l, p, n, y);
            }
        }
    }
    // Their scores, to `scores`.
    template <int G> void scores_all(int64_t out_pose, int64_t pose) {
        const W* x = query_group.data + channels * pose;
        bias.template forward<G>(x, window, out_pose, false);
        bias.template add_mask<G>(window, mask, bool(bias.spatial));
        multiply_keys<T, G>(window, k.data, channels, x, bias.by_offset.data, bias.of_poses(), scores.data);
    }
    // What makes the sums of exponentials 1, stored with the sign - where they are made from the scores: then they are in
    // `scores`, and the result is true.
    template <int G> bool normalise_all(int64_t out_pose, int64_t pose, int64_t row, W* factor) {
        make_bias<G>(out_pose, pose);
        W total[G], one[G];
        UNROLL for (int g = 0; g < G; g++) one[g] = all(T(1));
        sum_in_spans<G>(total, [&](int64_t first, int64_t last, W* part) {
            each_weight<G, false>(pose, one, first, last, [&](int64_t, int64_t, int64_t, const W* y) {
                UNROLL for (int g = 0; g < G; g++) part[g] += y[g];
            });
        });
        bool large = true;
        for (int g = 0; g < G; g++)
            for (int lane = 0; lane < width; lane++) large &= total[g][lane] >= SMALL;
        UNROLL for (int g = 0; g < G; g++) factor[g] = T(1) / total[g];
        if (!large) scores_all<G>(out_pose, pose), exponentials<G>(scores.data, row, factor);
        UNROLL for (int g = 0; g < G; g++) store(factor_of(row + g), large ? factor[g] : -factor[g]);
        return !large;
    }
    // The same again, from what is stored.
    template <int G> bool normalise_again(int64_t out_pose, int64_t pose, int64_t row, W* factor) {
        bool large = true;
        for (int g = 0; g < G; g++) {
            factor[g] = load(factor_of(row + g));
            for (int lane = 0; lane < width; lane++) large &= !(factor[g][lane] < 0);
        }
        if (large) {
            make_bias<G>(out_pose, pose);
            return false;
        }
        W most[G];
        scores_all<G>(out_pose, pose);
        const T unit = this->unit;
        UNROLL for (int g = 0; g < G; g++) most[g] = load(most_of(row + g)), factor[g] = -factor[g];
        for (int64_t n = 0; n < window.num_keys; n++) exp2<T>(&scores[n * G], most, unit, &scores[n * G]);
        return true;
    }

    // Adds the weights of a group of query poses to those of the others, of one of `number` output poses.
    template <int G, bool STORED, bool DROPS>
    void add_weights(int64_t out_pose, int64_t number, int64_t row, int64_t pose, const W* factor) const {
        uint32_t of_row[G];
        UNROLL for (int g = 0; g < G; g++) of_row[g] = row_key(row + g);
        each_weight<G, STORED>(pose, factor, 0, window.places, [&](int64_t, int64_t, int64_t n, const W* y) {
            W& to = weight_sums[n * number + out_pose];
            W together = to;
            UNROLL for (int g = 0; g < G; g++) together += DROPS ? y[g] * kept_of(of_row[g], n) : y[g];
            to = together;
        });
    }

    void forward_all() {
        make_content();
        each_group(num_poses, [&](auto number, int64_t first_out_pose) {
            constexpr int F = number;
            std::fill_n(weight_sums.data, window.num_keys * F, W{});
            for (int f = 0; f < F; f++)
                each_group(query_poses, [&](auto size, int64_t pose) {
                    constexpr int G = size;
                    const int64_t row = (first_out_pose + f) * query_poses + pose;
                    W factor[G];
                    const bool stored = normalise_all<G>(first_out_pose + f, pose, row, factor);
                    if (dropout.on) stored ? add_weights<G, true, true>(f, F, row, pose, factor)
                                           : add_weights<G, false, true>(f, F, row, pose, factor);
                    else stored ? add_weights<G, true, false>(f, F, row, pose, factor)
                                : add_weights<G, false, false>(f, F, row, pose, factor);
                });
            std::fill_n(out_group.data, channels * F, W{});
            combine_keys<T, F>(window, v.data, channels, weight_sums.data, out_group.data);
            packing.template scatter<F>(out_group.data, num_poses, channels, first_out_pose, place_of(num_poses * channels), out);
        });
    }

    void backward_all() {
        make_content();
        std::fill_n(grad_content.data, most_keys * query_poses, W{});
        std::fill_n(grad_query_group.data, channels * query_poses, W{});
        each_group(num_poses, [&](auto number, int64_t first_out_pose) {
            constexpr int F = number;
            packing.template gather<F>(out, num_poses, channels, first_out_pose, place_of(num_poses * channels), out_group.data);
            multiply_keys<T, F>(window, v.data, channels, out_group.data, nullptr, nullptr, of_values.data);
            std::fill_n(weight_sums.data, window.num_keys * F, W{});
            for (int f = 0; f < F; f++)
                each_group(query_poses, [&](auto size, int64_t pose) {
                    constexpr int G = size;
                    const int64_t row = (first_out_pose + f) * query_poses + pose;
                    W factor[G];
                    const bool stored = normalise_again<G>(first_out_pose + f, pose, row, factor);
                    if (dropout.on) stored ? differentiate_all<G, true, true>(f, F, row, pose, factor)
                                           : differentiate_all<G, false, true>(f, F, row, pose, factor);
                    else stored ? differentiate_all<G, true, false>(f, F, row, pose, factor)
                                : differentiate_all<G, false, false>(f, F, row, pose, factor);
                    bias.template backward<G>(query_group.data + channels * pose, window, first_out_pose + f, false,
                                              grad_query_group.data + channels * pose);
                });
            window.template distribute<F>(weight_sums.data, out_group.data, channels, grad_v);
        });
        each_group(query_poses, [&](auto size, int64_t pose) {
            constexpr int G = size;
            W* grad_x = grad_query_group.data + channels * pose;
            combine_keys<T, G>(window, k.data, channels, grad_content.data + most_keys * pose, grad_x);
            packing.template scatter<G>(grad_x, query_poses, channels, pose, place_of(query_poses * channels), grad_q);
            window.template distribute<G>(grad_content.data + most_keys * pose, query_group.data + channels * pose,
                                          channels, grad_k);
        });
    }
    // From gradients of weights to gradients of scores, which are added to those of the content; their sums over poses and
    // places are those of what offsets and poses give. Weights are added to those of the other query poses.
    template <int G, bool STORED, bool DROPS>
    void differentiate_all(int64_t out_pose, int64_t number, int64_t row, int64_t pose, const W* factor) {
        W inner[G];
        uint32_t of_row[G];
        UNROLL for (int g = 0; g < G; g++) of_row[g] = row_key(row + g);
        sum_in_spans<G>(inner, [&](int64_t first, int64_t last, W* part) {
            each_weight<G, STORED>(pose, factor, first, last, [&](int64_t, int64_t, int64_t n, const W* y) {
                const W value = of_values[n * number + out_pose];
                W together = weight_sums[n * number + out_pose];
                UNROLL for (int g = 0; g < G; g++) {
                    const W left = DROPS ? y[g] * kept_of(of_row[g], n) : y[g];
                    part[g] += left * value, together += left;
                    if (DROPS) grads[n * G + g] = left * value;
                }
                weight_sums[n * number + out_pose] = together;
            });
        });
        W* to = grad_content.data + most_keys * pose;
        sum_gradients<G>([&](int64_t first, int64_t last, auto add) {
            each_weight<G, STORED>(pose, factor, first, last, [&](int64_t l, int64_t p, int64_t n, const W* y) {
                const W value = of_values[n * number + out_pose];
                W grad[G];
                UNROLL for (int g = 0; g < G; g++) {
                    grad[g] = DROPS ? grads[n * G + g] - y[g] * inner[g] : y[g] * (value - inner[g]);
                    to[n * G + g] += grad[g];
                }
                add(l, p, grad);
            });
        });
    }

    const Arguments& call;
    const Layout& layout;
    Packing<T> packing;
    Window<T> window;
    Bias<T> bias;
    const Dropout<T> dropout;
    const T unit;  // a score of 1, in powers of 2
    const int64_t channels, query_poses, key_poses, num_poses, most_keys;
    const int64_t group;  // of query poses: scores and their gradients stay in the cache
    uint32_t key = 0, first = 0;  // of dropout: the image's number, and the place of the band's first query
    int64_t masked = -1;          // the band of the mask
    int64_t place = 0, slot = 0;  // of the first query of the vector in the band, and of all its queries
    Buffer<T> mask, q, k, v, out, sums, grad_q, grad_k, grad_v;                   // of the band
    Buffer<W> query_group, out_group, scores, content, weight_sums;                        // of the vector
    Buffer<W> grad_query_group, grads, kept, grad_content, of_values, pose_sums;
};

}  // namespace
