// Attention of points to their neighbours, forward and backward.
//
// Queries come in groups that see the same keys. Lanes of a vector are keys side by side, those of all poses in a row.
// The backward pass has two parts: for each query the gradients of its scores, and what the query gets from them; then
// for each key the sum over all queries that see it. Where no two groups have keys in common, the second follows the
// first group by group, and weights stay in the cache. No two threads ever add to the same place, and the result is the
// same for any number of them.

#pragma once

#include "../threads.h"
#include "query_pass.h"

namespace {

// False where there was not enough memory.
template <class T> bool run(const Arguments& call) {
    const Layout<T> layout(call);
    const int64_t tasks = call.groups * layout.group_tasks;
    // Groups that share features add to the same gradients, one after the other.
    const int64_t step = call.grad_features ? layout.repeats * layout.group_tasks : 1, steps = tasks / step;
    // Parts of the tasks have gradients of the tables of poses of their own, which are added in order.
    const int64_t parts = std::min<int64_t>(steps, call.grad_pose ? 32 : 256);
    const int64_t size =
        call.grad_pose ? call.pose_heads * call.num_poses * call.channels * call.padded_key_poses : 0;
    std::vector<T> grad_tables(parts * size);
    const auto make = [&] { return QueryPass<T>(layout); };
    bool done = share(parts, call.threads, make, [&](QueryPass<T>& pass, int64_t part) {
        for (int64_t task = part * steps / parts * step; task < (part + 1) * steps / parts * step; task++)
            pass.work(task, grad_tables.data() + part * size);
    });
    for (int64_t i = 0; i < parts * size; i++) as<T>(call.grad_pose)[i % size] += grad_tables[i];
    if (done && !layout.group_by_group && (call.grad_k || call.grad_v)) {
        const KeyPass<T> pass(layout);
        done = share(pass.tasks(), call.threads, [] { return 0; }, [&](int, int64_t task) { pass.work(task); });
    }
    return done;
}

}  // namespace
