// The pass over the queries: their outputs, or the gradients of their scores and what they get from them.

#pragma once

#include "factors.h"
#include "key_pass.h"
#include "normalization.h"
#include "packing.h"
#include "scores.h"

namespace {

// Gradients that a part of the tasks adds to, or null: of tables of poses, of the layer of the features, of keys and of
// values.
template <class T> struct PartGradients {
    T *poses, *layer, *shift, *keys, *values;
};

template <class T> struct QueryPass {
    static constexpr int width = WIDTH<T>;

    explicit QueryPass(const Layout<T>& layout)
            : layout(layout),
              call(layout.call),
              task(layout),
              normalization(layout),
              scores(layout),
              factors(layout),
              key_pass(layout),
              score_rows(GROUP, layout.row_stride),
              weight_rows(GROUP, layout.row_stride),
              grad_weight_rows(GROUP, layout.row_stride),
              grad_factored_rows(call.factors ? GROUP : 0, layout.row_stride) {
        for (int64_t head = 0; head < (keeps_keys() ? call.heads : 1); head++) {
            packed_keys.emplace_back(call.q ? call.channels : 0, layout.row_stride);
            packed_values.emplace_back(call.channels, layout.row_stride);
        }
        if (!call.grad || !layout.keys_at_once()) return;
        task_weights = Rows<T>(layout.slots * call.num_poses, layout.row_stride);
        task_grad_scores = Rows<T>(layout.slots * layout.grad_rows, layout.row_stride);
    }

    void work(int64_t number, const PartGradients<T>& grads) {
        if (!task.begin(number)) return;
        normalization.begin(task);
        if (call.reads) scores.features.forward(task);
        const int64_t* end = task.keys + call.group_keys;
        const bool packed = keeps_keys() && std::equal(task.keys, end, last_keys.begin(), last_keys.end());
        if (keeps_keys()) last_keys.assign(task.keys, end);
        for (task.head = 0; task.head < call.heads; task.head++) {
            if (!packed && call.q) pack(task, as<T>(call.k), keys());
            if (!packed) pack(task, as<T>(call.v), values());
            scores.begin();
            call.grad ? backward(grads.poses) : forward();
            if (call.grad && layout.keys_at_once())
                key_pass.work(task.head, task.group, task.first, task.end, task_weights[0], task_grad_scores[0],
                              grads.keys, grads.values);
        }
        if (scores.features.needs_gradients()) scores.features.backward(task, grads.layer, grads.shift);
        if (call.grad_envelope) normalization.finish(task);
    }

  private:
    // Whether keys and values of all heads stay packed, since tasks with the same keys follow each other.
    bool keeps_keys() const { return layout.group_tasks > 1; }
    const Rows<T>& keys() const { return packed_keys[keeps_keys() ? task.head : 0]; }
    const Rows<T>& values() const { return packed_values[keeps_keys() ? task.head : 0]; }

    void forward() {
        if (!call.sum_query_poses)
            return task.each_own([&](auto number, const ScoreRow* rows) {
                constexpr int R = number;
                T factor[R];
                weigh<R>(rows, factor);
                for (int i = 0; call.factors && i < R; i++) factors.multiply(task, rows[i], score_rows[i], score_rows[i]);
                add_values<R>(rows, score_rows, factor);
            });
        for (int64_t slot = 0; slot < int64_t(task.members.size()); slot++)
            for (int64_t pose = 0; pose < call.num_poses; pose++) {
                T *summed = weight_rows[0], one = 1;
                std::fill_n(summed, task.padded, T(0));
                task.each_query_pose(slot, pose, [&](auto number, const ScoreRow* rows) {
                    constexpr int R = number;
                    T factor[R];
                    weigh<R>(rows, factor);
                    for (int64_t at = 0; at < task.padded; at += width) {
                        V<T> x = load(summed + at);
                        for (int i = 0; i < R; i++) x += factor[i] * load(score_rows[i] + at);
                        store(summed + at, x);
                    }
                });
                const ScoreRow row = task.row(slot, pose, 0);
                if (call.factors) factors.multiply(task, row, summed, summed);
                add_values<1>(&row, weight_rows, &one);
            }
    }
    template <int R> void make_scores(const ScoreRow* rows) {
        const T* added[R];
        for (int i = 0; i < R; i++) added[i] = normalization.added(rows[i]);
        scores.template forward<R>(task, rows, keys(), added, score_rows);
    }
    // The weights of values, in `score_rows`, without a factor.
    template <int R> void weigh(const ScoreRow* rows, T* factor) {
        make_scores<R>(rows);
        normalization.template forward<R>(task, rows, score_rows, factor);
    }
    template <int R> void add_values(const ScoreRow* rows, const Rows<T>& weights, const T* factor) const {
        const T* weight[R];
        T* to[R];
        for (int i = 0; i < R; i++) weight[i] = weights[i], to[i] = as<T>(call.out) + layout.out_offset(rows[i]);
        matmul_transposed<T, R>(weight, factor, values(), call.channels, task.padded, to);
    }

    void backward(T* grad_tables) {
        const auto find_queries = [&](auto number, const ScoreRow* rows) { add_to_queries<number>(rows); };
        if (!call.sum_query_poses) {
            task.each_own([&](auto number, const ScoreRow* rows) {
                constexpr int R = number;
                find_grad_weights<R>(rows);
                const T *of_factored[R], *grad_weights[R];
                for (int i = 0; i < R; i++) {
                    of_factored[i] = grad_weight_rows[i];
                    grad_weights[i] = without_factors(rows[i], i);
                }
                differentiate<R>(rows, of_factored, grad_weights, grad_tables);
                if (call.grad_q && !layout.shared_query) find_queries(number, rows);
            });
            if (call.grad_q && layout.shared_query) task.each_query(find_queries);
            return;
        }
        for (int64_t slot = 0; slot < int64_t(task.members.size()); slot++) {
            for (int64_t pose = 0; pose < call.num_poses; pose++) {
                const ScoreRow row = task.row(slot, pose, 0);
                find_grad_weights<1>(&row);
                const T* without = without_factors(row, 0);
                task.each_query_pose(slot, pose, [&](auto number, const ScoreRow* rows) {
                    const T *of_factored[number], *grad_weights[number];
                    for (int i = 0; i < number; i++) of_factored[i] = grad_weight_rows[0], grad_weights[i] = without;
                    differentiate<number>(rows, of_factored, grad_weights, grad_tables);
                });
            }
            if (call.grad_q) task.each_query_pose(slot, 0, find_queries);
        }
    }
    // The gradients of weights, of outputs of their own: products with the values.
    template <int R> void find_grad_weights(const ScoreRow* rows) const {
        const T *grad[R], *start[R];
        for (int i = 0; i < R; i++) {
            grad[i] = as<T>(call.grad) + layout.out_offset(rows[i]);
            start[i] = scores.zeros.data;
        }
        matmul<T, R>(grad, call.channels, values(), start, task.padded, grad_weight_rows);
    }
    // From the gradient of weights that are multiplied by factors to that of weights, in row i.
    const T* without_factors(const ScoreRow& row, int i) const {
        if (!call.factors) return grad_weight_rows[i];
        factors.multiply(task, row, grad_weight_rows[i], grad_factored_rows[i]);
        return grad_factored_rows[i];
    }
    // `of_factored` are the gradients of weights that are multiplied by factors.
    template <int R>
    void differentiate(const ScoreRow* rows, const T* const* of_factored, const T* const* grad_weights,
                       T* grad_tables) {
        T* weights[R];
        for (int i = 0; i < R; i++) weights[i] = call.sum_query_poses ? weight_rows[i] : weights_of(rows[i]);
        make_scores<R>(rows);
        normalization.template backward<R>(task, rows, score_rows, weights, grad_weights);
        scores.template backward<R>(task, rows, score_rows, grad_tables);
        for (int i = 0; i < R; i++) {
            if (call.grad_factors) factors.backward(task, rows[i], weights[i], of_factored[i]);
            if (call.factors) factors.multiply(task, rows[i], weights[i], weights[i]);
            if (call.sum_query_poses) put(weights[i], weights_of(rows[i]), rows[i].query_pose > 0);
            const bool adds = (call.sum_query_poses || layout.shared_query) && rows[i].pose > 0;
            put(score_rows[i], grad_scores_of(rows[i]), adds);
        }
    }
    // The first of a sum is copied, and others are added.
    void put(const T* from, T* to, bool add) const {
        if (!add)
            std::copy_n(from, task.padded, to);
        else
            for (int64_t at = 0; at < task.padded; at += width) store(to + at, load(to + at) + load(from + at));
    }
    template <int R> void add_to_queries(const ScoreRow* rows) const {
        const T* grad_scores[R];
        T one[R], *to[R];
        for (int i = 0; i < R; i++) {
            grad_scores[i] = grad_scores_of(rows[i]), one[i] = 1;
            to[i] = as<T>(call.grad_q) + layout.query_offset(rows[i]);
        }
        matmul_transposed<T, R>(grad_scores, one, keys(), call.channels, task.padded, to);
    }
    // Where the pass over the keys reads: of an output pose, and of a row of gradients.
    T* weights_of(const ScoreRow& row) const {
        if (layout.keys_at_once()) return task_weights[(row.member - task.first) * call.num_poses + row.pose];
        return layout.weights.data + (row.query * call.num_poses + row.pose) * layout.row_stride;
    }
    T* grad_scores_of(const ScoreRow& row) const {
        if (layout.keys_at_once())
            return task_grad_scores[(row.member - task.first) * layout.grad_rows + row.grad_index];
        return layout.grad_scores.data + (row.query * layout.grad_rows + row.grad_index) * layout.row_stride;
    }

    const Layout<T>& layout;
    const Arguments& call;
    Task<T> task;
    Normalization<T> normalization;
    Scores<T> scores;
    const Factors<T> factors;
    const KeyPass<T> key_pass;
    std::vector<Rows<T>> packed_keys, packed_values;
    std::vector<int64_t> last_keys;  // of the group
    const Rows<T> score_rows, weight_rows, grad_weight_rows, grad_factored_rows;  // of up to GROUP rows
    Rows<T> task_weights, task_grad_scores;
};

}  // namespace
