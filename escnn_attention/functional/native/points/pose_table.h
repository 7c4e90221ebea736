// Scores of poses: what every pose of a key is worth to a query, by a table (C, P) of each output pose.

#pragma once

#include "matmul.h"
#include "task.h"

namespace {

template <class T> struct PoseTable {
    using W = V<T>;
    static constexpr int width = WIDTH<T>;

    explicit PoseTable(const Layout<T>& layout) : layout(layout), call(layout.call) {}

    // A query has a part in its scores, whether or not the table has a gradient.
    bool needs_gradients() const { return call.pose && (call.grad_pose || call.grad_q); }

    // The scores (padded_key_poses) of a query.
    void forward(const ScoreRow& row, int64_t head, T* to) const {
        const T *query = as<T>(call.q) + layout.query_offset(row), *table = as<T>(call.pose) + offset(row, head);
        const int64_t channels = call.channels, poses = call.padded_key_poses;
        for (int64_t pose = 0; pose < call.key_poses; pose += width) {
            W y{};
            for (int64_t c = 0; c < channels; c++) y += query[c] * load(table + c * poses + pose);
            store(to + pose, y);
        }
    }
    // From the gradients of those scores to those of the query and of the table, which are added up in `grad_tables`.
    void backward(const ScoreRow& row, int64_t head, T* grad, T* grad_tables) const {
        std::fill(grad + call.key_poses, grad + call.padded_key_poses, T(0));
        const int64_t at = layout.query_offset(row), channels = call.channels, poses = call.padded_key_poses;
        const T *query = as<T>(call.q) + at, *table = as<T>(call.pose) + offset(row, head);
        T* grad_table = call.grad_pose ? grad_tables + offset(row, head) : nullptr;
        T* grad_query = call.grad_q ? as<T>(call.grad_q) + at : nullptr;
        constexpr int B = width < 8 ? width : 8;
        for (int64_t first = 0; first < channels; first += B) {
            W y[B];
            clear(y);
            const int64_t some = std::min<int64_t>(B, channels - first);
            for (int64_t pose = 0; pose < call.key_poses; pose += width) {
                const W d = load(grad + pose);
                for (int64_t b = 0; b < some; b++) {
                    const int64_t i = (first + b) * poses + pose;
                    y[b] += d * load(table + i);
                    if (grad_table) store(grad_table + i, load(grad_table + i) + query[first + b] * d);
                }
            }
            const W total = reduce<T, B>(y, plus<T>);
            for (int64_t b = 0; grad_query && b < some; b++) grad_query[first + b] += total[b];
        }
    }

  private:
    int64_t offset(const ScoreRow& row, int64_t head) const {
        const int64_t table = (call.pose_heads == 1 ? 0 : head) * call.num_poses + row.pose;
        return table * call.channels * call.padded_key_poses;
    }

    const Layout<T>& layout;
    const Arguments& call;
};

}  // namespace
