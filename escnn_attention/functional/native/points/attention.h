// Attention of points to their neighbours, forward and backward.
//
// Queries come in groups that see the same keys. Lanes of a vector are keys side by side, those of all poses in a row.
// The backward pass has two parts: for each query the gradients of its scores, and what the query gets from them; then
// for each key the sum over all queries that see it. Where no two groups have keys in common, or many queries see the
// same keys, the second follows the first task by task, and weights stay in the cache. No two threads ever add to the
// same place, and the result is the same for any number of them.

#pragma once

#include "../threads.h"
#include "query_pass.h"

namespace {

// A gradient of so many numbers to which parts of the tasks add: the copies of all parts are added in order.
template <class T> struct Summed {
    Summed(void* to, int64_t size, int64_t parts, bool copied)
            : to(as<T>(to)), size(to ? size : 0), copies(to && copied && parts > 1 ? parts * size : 0) {}
    T* part(int64_t number) const { return copies.size ? copies.data + number * size : to; }
    void add() const {
        for (int64_t i = 0; i < copies.size; i += size)
            for (int64_t j = 0; j < size; j++) to[j] += copies[i + j];
    }
    T* to;
    int64_t size;
    Buffer<T> copies;
};

// False where there was not enough memory.
template <class T> bool run(const Arguments& call) {
    const Layout<T> layout(call);
    const int64_t tasks = call.groups * layout.group_tasks;
    // Groups that share features, and members that do, add to the same gradients, one after the other.
    const bool shared = call.grad_features && (layout.repeats > 1 || call.ring);
    const int64_t step = shared ? layout.repeats * layout.group_tasks : 1, steps = tasks / step;
    const bool copied = call.grad_pose || call.grad_layer || call.grad_shift;
    const int64_t parts = std::min(steps, call.grad && layout.copies ? layout.copies : copied ? MOST_COPIES : 256);
    const int64_t poses = call.pose_heads * call.num_poses * call.channels * call.padded_key_poses;
    const Summed<T> of_poses(call.grad_pose, poses, parts, true);
    const Summed<T> of_layer(call.grad_layer, call.num_features * call.coordinates, parts, true);
    const Summed<T> of_shift(call.grad_shift, call.num_features, parts, true);
    const Summed<T> of_keys(call.grad_k, layout.keys_size(), parts, layout.copies);
    const Summed<T> of_values(call.grad_v, layout.keys_size(), parts, layout.copies);
    const auto make = [&] { return QueryPass<T>(layout); };
    bool done = share(parts, call.threads, make, [&](QueryPass<T>& pass, int64_t part) {
        for (int64_t task = part * steps / parts * step; task < (part + 1) * steps / parts * step; task++)
            pass.work(task, {of_poses.part(part), of_layer.part(part), of_shift.part(part), of_keys.part(part),
                             of_values.part(part)});
    });
    of_poses.add(), of_layer.add(), of_shift.add(), of_keys.add(), of_values.add();
    if (done && !layout.keys_at_once() && (call.grad_k || call.grad_v)) {
        const KeyPass<T> pass(layout);
        done = share(pass.tasks(), call.threads, [] { return 0; }, [&](int, int64_t task) { pass.work(task); });
    }
    return done;
}

}  // namespace
