// From scores to the weights of values: a softmax, or shares of a measure; with dropout.

#pragma once

#include <cmath>
#include <limits>

#include "../dropout.h"
#include "matmul.h"
#include "task.h"

namespace {

template <class T> struct Normalization {
    using W = V<T>;
    static constexpr int width = WIDTH<T>;

    explicit Normalization(const Layout<T>& layout)
            : layout(layout),
              call(layout.call),
              dropout(call.dropout),
              measure(layout.row_stride),
              enveloped(call.envelope ? layout.slots : 0, layout.row_stride) {}

    // The measure of the keys: logarithms to be added to scores, or shares of the whole to be multiplied with them.
    void begin(const Task<T>& task) {
        const T* log = as<T>(call.log_measure);
        T total = 0;
        for (int64_t pose = 0; pose < call.key_poses; pose++)
            for (int64_t key = 0; key < task.num_keys; key++) {
                const T x = log ? log[task.keys[key] * call.key_poses + pose] : T(0);
                T& number = measure[pose * task.num_keys + key];
                number = call.normalize_by_count ? std::exp(x) : x;
                total += number;
            }
        total = std::max(total, std::numeric_limits<T>::min());
        if (call.normalize_by_count)
            for (int64_t i = 0; i < task.length; i++) measure[i] /= total;
        std::fill(measure.data + task.length, measure.data + task.padded, call.normalize_by_count ? T(0) : MASKED<T>);
        for (int64_t slot = 0; call.envelope && slot < int64_t(task.members.size()); slot++) multiply(task, slot);
    }
    // What is added to a row of scores, or null.
    const T* added(const ScoreRow& row) const { return call.normalize_by_count ? nullptr : measure_of(row); }
    // After all heads: from gradients of the logarithm of the envelope to those of the envelope.
    void finish(const Task<T>& task) const {
        for (int64_t member : task.members) {
            const T* u = as<T>(call.envelope) + layout.pairs_offset(task.group, member);
            T* to = as<T>(call.grad_envelope) + layout.pairs_offset(task.group, member);
            for (int64_t key = 0; key < task.num_keys; key++)
                to[key] = u[key] < std::numeric_limits<T>::min() ? T(0) : to[key] / u[key];
        }
    }

    // Scores to weights, each row without a factor.
    template <int R> void forward(const Task<T>& task, const ScoreRow* rows, const Rows<T>& scores, T* factor) const {
        if (call.normalize_by_count) {
            for (int i = 0; i < R; i++) factor[i] = 1, weigh(measure_of(rows[i]), scores[i], task.padded);
        } else {
            softmax<R>(task, rows, scores, factor);
        }
        if (!dropout.on) return;
        for (int i = 0; i < R; i++) {
            const uint32_t key = dropout_key(task, rows[i]);
            T* x = scores[i];
            for (int64_t at = 0; at < task.padded; at += width)
                store(x + at, load(x + at) * dropout.mask(key, uint32_t(at)));
        }
    }

    // From scores, and the gradients of weights, to the weights in `weights` and the gradients of scores in `scores`.
    template <int R> void backward(const Task<T>& task, const ScoreRow* rows, const Rows<T>& scores,
                                   T* const* weights, const T* const* grad_weights) const {
        recompute<R>(task, rows, scores);
        W inner[R] = {};
        for (int i = 0; i < R; i++) {
            const uint32_t key = dropout.on ? dropout_key(task, rows[i]) : 0;
            const T *x = scores[i], *grad = grad_weights[i];
            T* to = weights[i];
            for (int64_t at = 0; at < task.padded; at += width) {
                const W p = dropout.on ? load(x + at) * dropout.mask(key, uint32_t(at)) : load(x + at);
                store(to + at, p);
                inner[i] += p * load(grad + at);
            }
        }
        if (call.normalize_by_count && !call.grad_envelope)
            return backward_by_count<R>(task, rows, scores, grad_weights);
        T total[4];
        reduce_lanes<T, R>(inner, total, plus<T>);
        if (call.normalize_by_count) {
            for (int i = 0; i < R; i++) {
                const T *kept = weights[i], *grad = grad_weights[i], *share = measure_of(rows[i]);
                add_to_envelope(task, rows[i], [&](int64_t at) { return kept[at] * grad[at] - share[at] * total[i]; });
            }
            return backward_by_count<R>(task, rows, scores, grad_weights);
        }
        for (int i = 0; i < R; i++) {
            const T *kept = weights[i], *grad = grad_weights[i];
            T* x = scores[i];
            for (int64_t at = 0; at < task.padded; at += width)
                store(x + at, load(kept + at) * load(grad + at) - load(x + at) * total[i]);
            if (call.grad_envelope) add_to_envelope(task, rows[i], [&](int64_t at) { return x[at]; });
        }
    }

  private:
    // The measure of the keys of a query, times its envelope.
    void multiply(const Task<T>& task, int64_t slot) const {
        const T* u = as<T>(call.envelope) + layout.pairs_offset(task.group, task.members[slot]);
        T* to = enveloped[slot];
        const int64_t num_keys = task.num_keys;
        T total = 0;
        for (int64_t key = 0; key < num_keys; key++) {
            const bool none = u[key] < std::numeric_limits<T>::min();
            const T log = call.normalize_by_count || none ? T(0) : std::log(u[key]);
            for (int64_t at = key; at < task.length; at += num_keys) {
                to[at] = call.normalize_by_count ? measure[at] * u[key] : none ? MASKED<T> : measure[at] + log;
                total += call.normalize_by_count ? to[at] : T(0);
            }
        }
        total = std::max(total, std::numeric_limits<T>::min());
        if (call.normalize_by_count)
            for (int64_t i = 0; i < task.length; i++) to[i] /= total;
        std::copy(measure.data + task.length, measure.data + task.padded, to + task.length);
    }
    const T* measure_of(const ScoreRow& row) const { return call.envelope ? enveloped[row.slot] : measure.data; }
    // Adds gradients of the logarithm of the envelope, over the poses of every key.
    template <class F> void add_to_envelope(const Task<T>& task, const ScoreRow& row, F grad) const {
        T* to = as<T>(call.grad_envelope) + layout.pairs_offset(task.group, row.member);
        for (int64_t pose = 0; pose < call.key_poses; pose++)
            for (int64_t key = 0; key < task.num_keys; key++) to[key] += grad(pose * task.num_keys + key);
    }

    void weigh(const T* share, T* x, int64_t length) const {
        for (int64_t at = 0; at < length; at += width) store(x + at, load(x + at) * load(share + at));
    }

    // Exponentials and the factors that make their sums 1. The largest score is kept beside the factor for the backward
    // pass: the rounding error of one number for both would grow with the scores.
    template <int R> void softmax(const Task<T>& task, const ScoreRow* rows, const Rows<T>& scores, T* factor) const {
        W most[R], total[R] = {};
        for (int i = 0; i < R; i++) most[i] = load(scores[i]);
        for (int64_t at = width; at < task.padded; at += width)
            for (int i = 0; i < R; i++) most[i] = larger<T>(most[i], load(scores[i] + at));
        T top[4], sum_of[4];
        reduce_lanes<T, R>(most, top, larger<T>);
        for (int i = 0; i < R; i++) most[i] = all(top[i]);
        for (int64_t at = 0; at < task.padded; at += width) {
            W e[R];
            for (int i = 0; i < R; i++) e[i] = load(scores[i] + at);
            exp2<T>(e, most, LOG2E<T>, e);
            for (int i = 0; i < R; i++) total[i] += e[i], store(scores[i] + at, e[i]);
        }
        reduce_lanes<T, R>(total, sum_of, plus<T>);
        for (int i = 0; i < R; i++) {
            // Where all envelopes are 0 there is nothing to normalise.
            factor[i] = call.envelope && top[i] <= MASKED<T> / 2 ? T(0) : 1 / sum_of[i];
            T* kept = as<T>(call.sums) + layout.sums_offset(rows[i]);
            kept[0] = top[i], kept[1] = factor[i];
        }
    }
    // Scores to weights before dropout, by what a forward pass kept.
    template <int R> void recompute(const Task<T>& task, const ScoreRow* rows, const Rows<T>& scores) const {
        if (call.normalize_by_count) {
            for (int i = 0; i < R; i++) weigh(measure_of(rows[i]), scores[i], task.padded);
            return;
        }
        W top[R], factor[R];
        for (int i = 0; i < R; i++) {
            const T* kept = as<T>(call.sums) + layout.sums_offset(rows[i]);
            top[i] = all(kept[0]), factor[i] = all(kept[1]);
        }
        for (int64_t at = 0; at < task.padded; at += width) {
            W e[R];
            for (int i = 0; i < R; i++) e[i] = load(scores[i] + at);
            exp2<T>(e, top, LOG2E<T>, e);
            for (int i = 0; i < R; i++) store(scores[i] + at, factor[i] * e[i]);
        }
    }
    template <int R> void backward_by_count(const Task<T>& task, const ScoreRow* rows, const Rows<T>& scores,
                                            const T* const* grad_weights) const {
        for (int i = 0; i < R; i++) {
            const uint32_t key = dropout.on ? dropout_key(task, rows[i]) : 0;
            const T* share = measure_of(rows[i]);
            for (int64_t at = 0; at < task.padded; at += width) {
                const W kept = dropout.on ? dropout.mask(key, uint32_t(at)) : all<T>(1);
                store(scores[i] + at, load(grad_weights[i] + at) * load(share + at) * kept);
            }
        }
    }
    uint32_t dropout_key(const Task<T>& task, const ScoreRow& row) const {
        const uint32_t head = Dropout<T>::mix(uint32_t(*call.seed) + uint32_t(task.head));
        const uint32_t query = Dropout<T>::mix(head ^ uint32_t(row.query - task.head * layout.num_queries));
        return Dropout<T>::mix(query + uint32_t(*call.seed >> 32) + uint32_t(row.index));
    }

    const Layout<T>& layout;
    const Arguments& call;
    const Dropout<T> dropout;
    Buffer<T> measure;
    const Rows<T> enveloped;  // the measure of the queries that are taken at once, where there is an envelope
};

}  // namespace
