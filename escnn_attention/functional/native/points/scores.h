// Rows of scores as sums: of queries with keys, features, poses, numbers by themselves, and the measure.

#pragma once

#include "features.h"
#include "matmul.h"
#include "pose_table.h"

namespace {

template <class T> struct Scores {
    using W = V<T>;
    static constexpr int width = WIDTH<T>;

    explicit Scores(const Layout<T>& layout)
            : features(layout),
              zeros(layout.row_stride),
              layout(layout),
              call(layout.call),
              poses(layout),
              has_biases(call.reads || call.pose || call.extra),
              biases(GROUP, layout.row_stride),
              shared(layout.shared_query ? 1 : 0, layout.row_stride),
              by_pose(GROUP, call.padded_key_poses + width) {}

    // Rows (R, padded) with keys (C, padded), each with a row of numbers that is added to it, or null.
    template <int R> void forward(const Task<T>& task, const ScoreRow* rows, const Rows<T>& keys,
                                  const T* const* added, const Rows<T>& to) {
        const T *start[R], *query[R];
        const bool multiplies = call.q && !layout.shared_query;
        for (int i = 0; i < R; i++) {
            start[i] = added[i] ? added[i] : zeros.data;
            query[i] = call.q ? as<T>(call.q) + layout.query_offset(rows[i]) : nullptr;
            if (call.q && layout.shared_query) {
                // Output poses of a query follow each other.
                if (shared_by != rows[i].query) matmul<T, 1>(query + i, call.channels, keys, start + i, task.padded, shared);
                shared_by = rows[i].query;
                start[i] = shared[0];
            }
            if (multiplies && !has_biases) continue;
            T* biased = multiplies ? biases[i] : to[i];
            has_biases ? add_biases(task, rows[i], start[i], biased) : void(std::copy_n(start[i], task.padded, biased));
            start[i] = biased;
        }
        if (multiplies) matmul<T, R>(query, call.channels, keys, start, task.padded, to);
    }
    // Other keys follow, or other numbers are added.
    void begin() { shared_by = -1; }

    // From gradients of rows to those of all that is added to the products with keys; those of tables of poses are
    // added to `grad_tables`, and those of features wait until all rows have theirs.
    template <int R>
    void backward(const Task<T>& task, const ScoreRow* rows, const Rows<T>& grad, T* grad_tables) const {
        if (call.grad_extra)
            for (int i = 0; i < R; i++) write_extra(task, rows[i], grad[i]);
        if (features.needs_gradients()) sum_poses<R>(task, rows, grad);
        if (!poses.needs_gradients()) return;
        sum_keys<R>(task, grad);
        for (int i = 0; i < R; i++) poses.backward(rows[i], task.head, by_pose[i], grad_tables);
    }

    FeatureScores<T> features;
    const Buffer<T> zeros;

  private:
    static W load_until(const T* p, const T* end) {
        if (p + width <= end) return load(p);
        W x{};
        std::memcpy(&x, p, (end - p) * sizeof(T));
        return x;
    }
    void add_biases(const Task<T>& task, const ScoreRow& row, const T* added, T* to) const {
        const T* located = call.reads ? features.row(row, task.head) : zeros.data;
        const T* extra = call.extra ? as<T>(call.extra) + layout.extra_offset(row, task.head, task.group) : nullptr;
        const T* end = as<T>(call.extra) + layout.extra_size();
        const int64_t num_keys = task.num_keys;
        T* of_pose = by_pose[0];
        if (call.pose) poses.forward(row, task.head, of_pose);
        // The last vector of a stretch is too long: the next is written over it.
        for (int64_t pose = 0; pose < call.key_poses; pose++)
            task.each_stretch(call.reads ? task.turn(row.slot) : 0, [&](int64_t first, int64_t from, int64_t number) {
                for (int64_t key = 0; key < number; key += width) {
                    const int64_t at = pose * num_keys + first + key;
                    W y = load(located + from + key);
                    if (call.pose) y += of_pose[pose];
                    if (extra) y += load_until(extra + pose * layout.extra_step() + first + key, end);
                    store(to + at, y + load(added + at));
                }
            });
        std::copy(added + task.length, added + task.padded, to + task.length);
    }

    void write_extra(const Task<T>& task, const ScoreRow& row, const T* grad) const {
        const int64_t num_keys = task.num_keys;
        T* to = as<T>(call.grad_extra) + layout.extra_offset(row, task.head, task.group);
        for (int64_t pose = 0; pose < call.key_poses; pose++) {
            if (pose == 0 || call.extra_poses > 1)
                std::memcpy(to + pose * layout.extra_step(), grad + pose * num_keys, num_keys * sizeof(T));
            else
                for (int64_t key = 0; key < num_keys; key++) to[key] += grad[pose * num_keys + key];
        }
    }
    // Over the poses of every key, for the features.
    template <int R> void sum_poses(const Task<T>& task, const ScoreRow* rows, const Rows<T>& grad) const {
        for (int i = 0; i < R; i++) {
            T* to = features.row(rows[i], task.head);
            const int64_t turn = task.turn(rows[i].slot);
            task.each_stretch(turn ? call.ring - turn : 0, [&](int64_t first, int64_t from, int64_t number) {
                for (int64_t key = 0; key < number; key += width) {
                    W y{};
                    for (int64_t pose = 0; pose < call.key_poses; pose++)
                        y += load(grad[i] + pose * task.num_keys + from + key);
                    store(to + first + key, y);
                }
            });
            std::fill(to + task.num_keys, to + layout.padded_keys, T(0));
        }
    }
    // Over the keys of every pose, to `by_pose`.
    template <int R> void sum_keys(const Task<T>& task, const Rows<T>& grad) const {
        const int64_t num_keys = task.num_keys;
        for (int64_t pose = 0; pose < call.key_poses; pose++) {
            W total[R] = {};
            for (int64_t key = 0; key < num_keys; key += width)
                for (int i = 0; i < R; i++) {
                    const W y = load(grad[i] + pose * num_keys + key);
                    total[i] += key + width > num_keys ? W(task.last ? y : W{}) : y;
                }
            T number[4];
            reduce_lanes<T, R>(total, number, plus<T>);
            for (int i = 0; i < R; i++) by_pose[i][pose] = number[i];
        }
    }

    const Layout<T>& layout;
    const Arguments& call;
    const PoseTable<T> poses;
    const bool has_biases;
    const Rows<T> biases, shared, by_pose;
    int64_t shared_by = -1;  // the query whose products with keys are `shared`
};

}  // namespace
