// Attention of every position to every other: the passes over the queries of one head of one image, forward and
// backward.
//
// As in window_pass.h, lanes of a vector are queries side by side, but they share the keys, which are read one by one,
// a stretch of some at a time: the scores of a stretch stay in the cache. The forward pass corrects what it has of a
// query where a later stretch has a larger score; the backward pass knows the sums of all.
//
// A block of vectors is taken at a time: all poses of a place, or, where no term depends on either, any vectors.

#pragma once

#include "../dropout.h"
#include "packing.h"
#include "waves.h"

namespace {

template <class T> struct EverythingPass {
    using W = V<T>;
    static constexpr int width = WIDTH<T>;

    EverythingPass(const Arguments& call, const Layout& layout)
            : call(call),
              packing{layout, call.by_position ? 0 : call.heads, 1, call.images},
              waves(call, layout),
              pose_tables(call.pose, call.pose_heads, call.num_poses, call.key_poses, call.channels, call.grad),
              dropout(call.dropout),
              unit(T(call.scale) * LOG2E<T>),
              own(!call.sum_query_poses),
              any(own && !call.waves && !call.pose),
              alike(any || call.key_poses == 1),
              channels(call.channels),
              query_poses(call.query_poses),
              num_poses(call.num_poses),
              rows(query_poses * (own ? 1 : num_poses)),
              num_queries(layout.positions),
              num_keys(call.key_positions * call.key_poses),
              most_keys(std::max(MOST_KEYS, call.key_poses)) {
        const int64_t places = layout.queries, per_key = padded<T>(channels);
        for (int64_t pose = 0; any && pose < query_poses; pose++)
            for (const int64_t start : layout.places) starts.push_back(pose * places + start);
        const int64_t in_block = any ? GROUP : query_poses, rows_of_block = any ? GROUP : rows;
        q = Buffer<T>(places * query_poses * channels);
        k = Buffer<T>(layout.keys * call.key_poses * channels), v = Buffer<T>(k.size);
        out = Buffer<T>(places * num_poses * channels);
        sums = Buffer<T>(places * 2 * rows);
        if (waves) amplitudes = Buffer<T>(places * query_poses * call.num_waves);
        queries = Buffer<W>(channels * in_block), waves_of_queries = Buffer<W>(call.num_waves * query_poses);
        by_pose = Buffer<W>(call.key_poses * GROUP), scores = Buffer<W>(most_keys * GROUP);
        if (!own) content = Buffer<W>(most_keys * query_poses);
        most = Buffer<W>(rows_of_block), total = Buffer<W>(rows_of_block), outputs = Buffer<W>(channels * rows_of_block);
        if (!call.grad) return;
        finished = Buffer<T>(places * num_poses * channels);
        grad_q = Buffer<T>(q.size), grad_amplitudes = Buffer<T>(amplitudes.size);
        grad_k = Buffer<T>(k.size), grad_v = Buffer<T>(v.size);
        sums_k = Buffer<T>(num_keys * per_key), sums_v = Buffer<T>(num_keys * per_key);
        const int64_t out_in_block = any ? GROUP : num_poses;
        grad_out = Buffer<W>(channels * out_in_block), inner = Buffer<W>(rows_of_block);
        transposed_queries = Buffer<W>(per_key * in_block), transposed_grad = Buffer<W>(per_key * out_in_block);
        grads = Buffer<W>(most_keys * GROUP), weights = Buffer<W>(most_keys * GROUP);
        grad_queries = Buffer<W>(queries.size), grad_waves_of_queries = Buffer<W>(waves_of_queries.size);
        if (!own) grad_content = Buffer<W>(content.size), of_values = Buffer<W>(most_keys * GROUP);
    }

    // One head of one image.
    void work(int64_t head, int64_t number) {
        waves.begin(head), pose_tables.begin(head);
        const int64_t image = head * call.images + number;
        const int64_t of_q = first_number(head, number, num_queries, query_poses * channels);
        const int64_t of_k = first_number(head, number, call.key_positions, call.key_poses * channels);
        const int64_t of_out = first_number(head, number, num_queries, num_poses * channels);
        const int64_t of_waves = first_number(head, number, num_queries, query_poses * call.num_waves);
        T* sums_of_image = static_cast<T*>(call.sums) + image * num_queries * 2 * rows;
        key = Dropout<T>::key(call.seed, image);
        pack(static_cast<const T*>(call.q) + of_q, query_poses, channels, q);
        packing.pack(static_cast<const T*>(call.k) + of_k, call.key_poses, channels, 0, true, k);
        packing.pack(static_cast<const T*>(call.v) + of_k, call.key_poses, channels, 0, true, v);
        if (waves)
            pack(static_cast<const T*>(call.amplitudes) + of_waves, query_poses, call.num_waves, amplitudes);
        T* outputs_of_image = static_cast<T*>(call.out) + of_out;
        if (!call.grad) {
            each_block([&] { forward(); });
            packing.unpack(out, num_poses, channels, 0, false, outputs_of_image);
            return packing.unpack_rows(sums, 2 * rows, 0, sums_of_image);
        }
        packing.pack_rows(sums_of_image, 2 * rows, 0, sums);
        pack(outputs_of_image, num_poses, channels, finished);
        pack(static_cast<const T*>(call.grad) + of_out, num_poses, channels, out);
        const T scale = T(call.scale);
        grad_k.clear(), grad_v.clear();
        int64_t blocks = 0;
        each_block([&] {
            backward();
            if (++blocks % SPAN == 0) add_keys(sums_k, grad_k), add_keys(sums_v, grad_v);
        });
        add_keys(sums_k, grad_k), add_keys(sums_v, grad_v);
        packing.unpack(grad_k, call.key_poses, channels, 0, true, static_cast<T*>(call.grad_k) + of_k, scale);
        packing.unpack(grad_v, call.key_poses, channels, 0, true, static_cast<T*>(call.grad_v) + of_k);
        packing.unpack(grad_q, query_poses, channels, 0, false, static_cast<T*>(call.grad_q) + of_q,
                       scale);
        if (waves)
            packing.unpack(grad_amplitudes, query_poses, call.num_waves, 0, false,
                           static_cast<T*>(call.grad_amplitudes) + of_waves, scale);
    }

    // Adds the gradients of the tables since the last call.
    void take_gradients(double* of_waves, double* of_pose) const { waves.take(of_waves), pose_tables.take(of_pose); }

  private:
    // Where the first of so many numbers of the positions of a head of an image lies.
    int64_t first_number(int64_t head, int64_t number, int64_t positions, int64_t numbers) const {
        const int64_t step = call.by_position ? positions * numbers : positions;
        return head * call.images * positions * numbers + number * step;
    }
    void pack(const T* from, int64_t poses, int64_t size, const Buffer<T>& to) const {
        packing.pack(from, poses, size, 0, false, to);
    }
    // Adds what the keys have got so far, (keys, lanes), to (channels, poses, places), and starts from zero again.
    void add_keys(const Buffer<T>& from, const Buffer<T>& to) const {
        const int64_t number = call.key_positions, lanes = padded<T>(channels), row = packing.layout.keys;
        const int shared = lanes_of_channel<T>(channels);
        for (int64_t pose = 0; pose < call.key_poses; pose++)
            for (int64_t n = 0; n < number; n += width)
                for (int64_t lane = 0; lane < lanes; lane += width) {
                    W x[width];
                    for (int i = 0; i < width; i++) {
                        const int64_t at = std::min(n + i, number - 1);
                        x[i] = load(from.data + (alike ? pose * number + at : at * call.key_poses + pose) * lanes + lane);
                    }
                    transpose<T>(x);
                    for (int64_t c = lane / shared, i = 0; c < channels && i < width; c++, i += shared) {
                        T* sum = to.data + (c * call.key_poses + pose) * row + n;
                        store(sum, load(sum) + (shared == 2 ? x[i] + x[i + 1] : x[i]));
                    }
                }
        from.clear();
    }
    // The place of a row of the block in an image of rows, or of poses.
    int64_t at(int64_t row) const { return any ? starts[first + row] : row * packing.layout.queries + place; }
    // As those of a window pass.
    T* most_of(int64_t row) const { return sums.data + at(row); }
    T* factor_of(int64_t row) const { return most_of(row) + rows * packing.layout.queries; }
    // The channels of a group of rows of an image of so many, (channels, G), and back.
    template <int G> void gather(const Buffer<T>& from, int64_t number, int64_t size, int64_t row, W* to) const {
        UNROLL for (int g = 0; g < G; g++) {
            const T* x = from.data + at(row + g);
            for (int64_t c = 0; c < size; c++) to[c * G + g] = load(x + c * number * packing.layout.queries);
        }
    }
    template <int G> void scatter(const W* from, int64_t number, int64_t size, int64_t row, const Buffer<T>& to) const {
        UNROLL for (int g = 0; g < G; g++) {
            T* x = to.data + at(row + g);
            for (int64_t c = 0; c < size; c++) store(x + c * number * packing.layout.queries, from[c * G + g]);
        }
    }

    template <class F> void each_block(F f) {
        const int64_t step = any ? GROUP : 1, blocks = any ? starts.size() : packing.layout.places.size();
        for (first = 0; first < blocks; first += step) {
            in_block = any ? std::min(step, blocks - first) : query_poses, place = first * width;
            each_group(in_block, [&](auto size, int64_t row) {
                gather<size>(q, query_poses, channels, row, queries.data + channels * row);
                if (waves)
                    gather<size>(amplitudes, query_poses, call.num_waves, row,
                                 waves_of_queries.data + call.num_waves * row);
            });
            f();
        }
    }
    template <class F> void each_stretch(F f) {
        const int64_t poses = alike ? 1 : call.key_poses, all = call.key_positions, row = packing.layout.keys;
        // Scores and their gradients fit into the first level of the cache, unless more keys share what is added.
        const int64_t most = alike ? MOST_KEYS / 2 : MOST_KEYS, of_channel = call.key_poses * row;
        const int64_t step = std::max<int64_t>(1, most / poses);
        for (int64_t pose = 0; pose < (alike ? call.key_poses : 1); pose++)
            for (int64_t first = 0; first < all; first += step) {
                const int64_t n = std::min(step, all - first);
                stretch = {pose * row + first, of_channel, alike ? 1 : row, alike ? n : poses, alike ? 1 : n,
                           (pose * all + first) * poses, first, n};
                f();
            }
    }
    // Calls f(how many, output pose, query pose, row) for rows of scores in groups. Each query is seen from its own
    // pose, or a group from that one.
    template <class F> void each_row(F f) {
        for (int64_t out_pose = 0; out_pose < (own ? 1 : num_poses); out_pose++)
            each_group(in_block, [&](auto size, int64_t pose) {
                f(size, own ? pose : out_pose, pose, out_pose * query_poses + pose);
            });
    }

    // What all keys of a position, and all positions of a key pose, have added to their scores.
    W* by_place() const { return waves && !alike ? waves.by_position.data : nullptr; }
    W* by_key_pose() const {
        if (alike) return waves ? waves.by_position.data : nullptr;
        return pose_tables ? by_pose.data : nullptr;
    }

    // The products of all query poses with the keys, which all output poses share: group by group, (keys, G) each.
    void make_content() {
        each_group(query_poses, [&](auto size, int64_t pose) {
            multiply_keys<T, size>(stretch, k.data, channels, queries.data + channels * pose, nullptr, nullptr,
                                   content.data + most_keys * pose);
        });
    }
    template <int G> void make_scores(int64_t out_pose, int64_t pose) {
        const W* x = queries.data + channels * pose;
        if (waves)
            waves.template forward<G>(waves_of_queries.data + call.num_waves * pose, place, stretch, out_pose, own);
        if (pose_tables && !alike)
            multiply<T, G>(x, pose_tables.of(out_pose, own, call.key_poses, nullptr), by_pose.data);
        const W *of_place = by_place(), *of_pose = by_key_pose();
        if (own) return multiply_keys<T, G>(stretch, k.data, channels, x, of_place, of_pose, scores.data);
        const W* from = content.data + most_keys * pose;
        W* to = scores.data;
        for (int64_t l = 0; l < stretch.places; l++)
            for (int64_t p = 0; p < stretch.key_poses; p++, from += G, to += G)
                UNROLL for (int g = 0; g < G; g++) {
                    W y = from[g];
                    if (of_place) y += of_place[l * G + g];
                    if (of_pose) y += of_pose[p * G + g];
                    to[g] = y;
                }
    }
    // From gradients of scores, in `grads`, to those of waves and poses and what queries have by them.
    template <int G> void differentiate_bias(int64_t out_pose, int64_t pose) {
        if (!waves && (!pose_tables || alike)) return;
        if (alike)
            std::copy_n(grads.data, stretch.num_keys() * G, waves.by_position.data);
        else
            sum_scores<T, G>(grads.data, stretch.places, stretch.key_poses, waves.by_position.data,
                             pose_tables ? by_pose.data : nullptr);
        if (waves)
            waves.template backward<G>(waves_of_queries.data + call.num_waves * pose, place, stretch, out_pose, own,
                                       grad_waves_of_queries.data + call.num_waves * pose);
        if (pose_tables && !alike)
            multiply_backward<T, G>(queries.data + channels * pose,
                                    pose_tables.of(out_pose, own, call.key_poses, nullptr), by_pose.data,
                                    grad_queries.data + channels * pose, pose_tables.gradient(out_pose));
    }

    W kept_of(int64_t row, int64_t n) const {
        const uint32_t of_row = Dropout<T>::mix(key + uint32_t(row));
        return dropout.mask(Dropout<T>::mix(of_row + uint32_t(stretch.first_key + n)), uint32_t(place));
    }

    void forward() {
        std::fill_n(most.data, most.size, all(MASKED<T>)), total.clear(), outputs.clear();
        each_stretch([&] {
            if (!own) make_content();
            each_row([&](auto size, int64_t out_pose, int64_t pose, int64_t row) {
                constexpr int G = size;
                make_scores<G>(out_pose, pose);
                add_exponentials<G>(row);
                combine_keys<T, G>(stretch, v.data, channels, scores.data, outputs.data + channels * row);
            });
        });
        for (int64_t row = 0; row < (own ? in_block : rows); row++) {
            total[row] = T(1) / total[row];
            store(most_of(row), most[row]), store(factor_of(row), total[row]);
        }
        write_outputs();
    }
    // From scores to exponentials, with which the sum of a row and its outputs are brought in line.
    template <int G> void add_exponentials(int64_t row) {
        W* x = scores.data;
        const T unit = this->unit;  // in a register, whatever is written to memory
        W largest[G], part[G] = {}, shrink[G];
        UNROLL for (int g = 0; g < G; g++) largest[g] = most[row + g];
        for (int64_t n = 0; n < stretch.num_keys(); n++)
            UNROLL for (int g = 0; g < G; g++) largest[g] = larger<T>(largest[g], x[n * G + g]);
        exp2<T>(&most[row], largest, unit, shrink);
        UNROLL for (int g = 0; g < G; g++) most[row + g] = largest[g];
        for (int64_t n = 0; n < stretch.num_keys(); n++) {
            exp2<T>(x + n * G, largest, unit, x + n * G);
            UNROLL for (int g = 0; g < G; g++) part[g] += x[n * G + g];
        }
        UNROLL for (int g = 0; g < G; g++) total[row + g] = total[row + g] * shrink[g] + part[g];
        for (int64_t c = 0; c < channels; c++)
            UNROLL for (int g = 0; g < G; g++) outputs[channels * row + c * G + g] *= shrink[g];
        if (!dropout.on) return;
        for (int64_t n = 0; n < stretch.num_keys(); n++)
            UNROLL for (int g = 0; g < G; g++) x[n * G + g] *= kept_of(row + g, n);
    }
    // Of each row, or their sums over the query poses.
    void write_outputs() {
        each_row([&](auto size, int64_t out_pose, int64_t pose, int64_t row) {
            constexpr int G = size;
            W* of_row = outputs.data + channels * row;
            for (int64_t c = 0; c < channels; c++)
                UNROLL for (int g = 0; g < G; g++) of_row[c * G + g] *= total[row + g];
            if (own) return scatter<G>(of_row, num_poses, channels, pose, out);
            for (int64_t c = 0; c < channels; c++) {
                T* at = out.data + (c * num_poses + out_pose) * packing.layout.queries + place;
                W y = pose ? load(at) : W{};
                UNROLL for (int g = 0; g < G; g++) y += of_row[c * G + g];
                store(at, y);
            }
        });
    }

    void backward() {
        grad_queries.clear(), grad_waves_of_queries.clear();
        each_group(own ? in_block : num_poses, [&](auto size, int64_t out_pose) {
            W* of_group = grad_out.data + channels * out_pose;
            gather<size>(out, num_poses, channels, out_pose, of_group);
            transpose_queries<T, size>(of_group, channels, transposed_grad.data + padded<T>(channels) * out_pose);
        });
        each_group(in_block, [&](auto size, int64_t pose) {
            transpose_queries<T, size>(queries.data + channels * pose, channels,
                                       transposed_queries.data + padded<T>(channels) * pose);
        });
        own ? backward_own() : backward_all();
        each_group(in_block, [&](auto size, int64_t pose) {
            scatter<size>(grad_queries.data + channels * pose, query_poses, channels, pose, grad_q);
            if (waves)
                scatter<size>(grad_waves_of_queries.data + call.num_waves * pose, query_poses, call.num_waves, pose,
                              grad_amplitudes);
        });
    }
    // Probabilities from scores, in place.
    template <int G, bool NORMALIZED = true> void normalize(int64_t row) {
        const T unit = this->unit;
        W most[G], factor[G];
        UNROLL for (int g = 0; g < G; g++) most[g] = load(most_of(row + g)), factor[g] = load(factor_of(row + g));
        for (int64_t n = 0; n < stretch.num_keys(); n++) {
            W power[G];
            exp2<T>(&scores[n * G], most, unit, power);
            UNROLL for (int g = 0; g < G; g++) scores[n * G + g] = NORMALIZED ? factor[g] * power[g] : power[g];
        }
    }
    // Of weights (keys, G), what the keys have by the queries of a group, or the values by the gradients of outputs.
    template <int G> void add_to_keys(const W* weight, const Buffer<W>& transposed, int64_t pose, const Buffer<T>& to) {
        const int64_t size = padded<T>(channels);
        distribute<T, G>(weight, G, stretch.num_keys(), transposed.data + size * pose, G, channels,
                         to.data + stretch.first_key * size);
    }

    void backward_own() {
        // The sum of probabilities times their gradients is the product of the output with its gradient. Of a key with all
        // the probability it is that of the value, digit by digit, so that the gradient of the score vanishes.
        for (int64_t pose = 0; pose < in_block; pose++) {
            W total{};
            for (int64_t c = 0; c < channels; c++) {
                const int64_t x = c * num_poses * packing.layout.queries + at(pose);
                total = add_product<T>(load(out.data + x), load(finished.data + x), total);
            }
            inner[pose] = total;
        }
        each_stretch([&] {
            each_row([&](auto size, int64_t out_pose, int64_t pose, int64_t row) {
                constexpr int G = size;
                make_scores<G>(out_pose, pose);
                normalize<G>(row);
                multiply_keys<T, G>(stretch, v.data, channels, grad_out.data + channels * pose, nullptr, nullptr,
                                    grads.data);
                for (int64_t n = 0; n < stretch.num_keys(); n++)
                    UNROLL for (int g = 0; g < G; g++) {
                        const W p = scores[n * G + g], weight = kept(p, row + g, n);
                        if (dropout.on) weights[n * G + g] = weight;
                        grads[n * G + g] = weight * grads[n * G + g] - p * inner[row + g];
                    }
                add_to_keys<G>(dropout.on ? weights.data : scores.data, transposed_grad, pose, sums_v);
                differentiate_bias<G>(out_pose, pose);
                combine_keys<T, G>(stretch, k.data, channels, grads.data, grad_queries.data + channels * pose);
                add_to_keys<G>(grads.data, transposed_queries, pose, sums_k);
            });
        });
    }

    // Calls f(how many output poses, which of them, how many query poses, output pose, query pose) with probabilities
    // in `scores` and the gradients of weights, (keys, F), in `of_values`; and `after` all of a group of output poses.
    template <bool NORMALIZED, class F, class After> void each_frame(F f, After after) {
        make_content();
        each_group(num_poses, [&](auto number, int64_t first_out_pose) {
            multiply_keys<T, number>(stretch, v.data, channels, grad_out.data + channels * first_out_pose, nullptr, nullptr,
                                     of_values.data);
            weights.clear();
            for (int64_t i = 0; i < number; i++)
                each_group(query_poses, [&](auto size, int64_t pose) {
                    make_scores<size>(first_out_pose + i, pose);
                    normalize<size, NORMALIZED>((first_out_pose + i) * query_poses + pose);
                    f(number, i, size, first_out_pose + i, pose);
                });
            after(number, first_out_pose);
        });
    }
    void backward_all() {
        inner.clear();
        each_stretch([&] {
            each_frame<false>(
                [&](auto number, int64_t i, auto size, int64_t out_pose, int64_t pose) {
                    constexpr int F = number, G = size;
                    const int64_t row = out_pose * query_poses + pose;
                    W sums[G] = {};
                    for (int64_t n = 0; n < stretch.num_keys(); n++)
                        UNROLL for (int g = 0; g < G; g++)
                            sums[g] += kept(scores[n * G + g], row + g, n) * of_values[n * F + i];
                    UNROLL for (int g = 0; g < G; g++) inner[row + g] += load(factor_of(row + g)) * sums[g];
                },
                [](auto, int64_t) {});
        });
        each_stretch([&] {
            grad_content.clear();
            each_frame<true>(
                [&](auto number, int64_t i, auto size, int64_t out_pose, int64_t pose) {
                    constexpr int F = number, G = size;
                    const int64_t row = out_pose * query_poses + pose;
                    W* of_content = grad_content.data + most_keys * pose;
                    for (int64_t n = 0; n < stretch.num_keys(); n++) {
                        W summed = weights[n * F + i];
                        UNROLL for (int g = 0; g < G; g++) {
                            const W p = scores[n * G + g], weight = kept(p, row + g, n);
                            const W grad = weight * of_values[n * F + i] - p * inner[row + g];
                            summed += weight, grads[n * G + g] = grad, of_content[n * G + g] += grad;
                        }
                        weights[n * F + i] = summed;
                    }
                    differentiate_bias<G>(out_pose, pose);
                },
                [&](auto number, int64_t out_pose) {
                    add_to_keys<number>(weights.data, transposed_grad, out_pose, sums_v);
                });
            each_group(query_poses, [&](auto size, int64_t pose) {
                const W* grad = grad_content.data + most_keys * pose;
                combine_keys<T, size>(stretch, k.data, channels, grad, grad_queries.data + channels * pose);
                add_to_keys<size>(grad, transposed_queries, pose, sums_k);
            });
        });
    }
    W kept(W probability, int64_t row, int64_t n) const {
        return dropout.on ? probability * kept_of(row, n) : probability;
    }

    const Arguments& call;
    const Packing<T> packing;
    Waves<T> waves;
    Tables<T> pose_tables;
    const Dropout<T> dropout;
    const T unit;           // a score of 1, in powers of 2
    // any: no term depends on the pose or the place of a query; alike: all keys, of whatever poses
    const bool own, any, alike;
    const int64_t channels, query_poses, num_poses, rows, num_queries, num_keys, most_keys;
    std::vector<int64_t> starts;        // of any vectors: their places in an image of poses
    uint32_t key = 0;                   // of dropout
    int64_t first = 0, in_block = 0;    // the first vector of the block, and how many it has, of all query poses or any
    int64_t place = 0;                  // of the block: of its queries, if it has all poses of some
    Stretch<T> stretch{};
    Buffer<T> q, k, v, amplitudes, out, finished, sums, grad_q, grad_amplitudes, grad_k, grad_v;  // of the image
    Buffer<T> sums_k, sums_v;                                                                     // (keys, lanes)
    Buffer<W> queries, waves_of_queries, by_pose, scores, content, most, total, outputs;        // of the block
    Buffer<W> grad_out, inner, transposed_queries, transposed_grad, grads, weights;
    Buffer<W> grad_queries, grad_waves_of_queries, grad_content, of_values;
};

}  // namespace
