// What the weights of a query and a key are multiplied by, of all poses alike.

#pragma once

#include "task.h"

namespace {

template <class T> struct Factors {
    explicit Factors(const Layout<T>& layout) : layout(layout), call(layout.call) {}

    // A row times the factors of its query; `to` may be the row itself.
    void multiply(const Task<T>& task, const ScoreRow& row, const T* from, T* to) const {
        const T* factor = as<T>(call.factors) + row.query * call.group_keys;
        for (int64_t pose = 0; pose < call.key_poses; pose++)
            for (int64_t key = 0; key < task.num_keys; key++) {
                const int64_t at = pose * task.num_keys + key;
                to[at] = factor[key] * from[at];
            }
        std::fill(to + task.length, to + task.padded, T(0));
    }
    // Adds the gradients of the factors, of the weights and of the gradients of what they have become.
    void backward(const Task<T>& task, const ScoreRow& row, const T* weights, const T* grad) const {
        T* to = as<T>(call.grad_factors) + row.query * call.group_keys;
        for (int64_t pose = 0; pose < call.key_poses; pose++)
            for (int64_t key = 0; key < task.num_keys; key++) {
                const int64_t at = pose * task.num_keys + key;
                to[key] += weights[at] * grad[at];
            }
    }

    const Layout<T>& layout;
    const Arguments& call;
};

}  // namespace
