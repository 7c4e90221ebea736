// Attention on a grid, forward and backward.

#pragma once

#include "../threads.h"
#include "everything_pass.h"
#include "window_pass.h"

namespace {

// Where the gradients of tables go, of one of `heads` heads `size` numbers.
struct TableGradient {
    double* to;
    int64_t heads, size;

    std::vector<double> room(int64_t tasks) const { return std::vector<double>(to ? tasks * size : 0); }
    double* of(std::vector<double>& room, int64_t task) const { return to ? room.data() + task * size : nullptr; }
    void add(std::vector<double>& room, int64_t task, int64_t head, double scale) const {
        for (int64_t i = 0; to && i < size; i++) to[head % heads * size + i] += scale * room[task * size + i];
    }
};

template <class Pass> int run(const Arguments& call, const Layout& layout, const TableGradient& spatial) {
    const TableGradient pose{call.grad_pose, call.pose_heads, call.num_poses * call.key_poses * call.channels};
    // Every part of a batch has gradients of tables of its own, which are added in order: whatever the threads did
    // first, the result is the same.
    const int64_t tasks = call.heads * call.parts;
    std::vector<double> of_spatial = spatial.room(tasks), of_pose = pose.room(tasks);
    const auto make = [&] { return Pass(call, layout); };
    const bool done = share(tasks, call.threads, make, [&](Pass& pass, int64_t task) {
        const int64_t head = task / call.parts, part = task % call.parts;
        const int64_t first = part * call.images / call.parts, last = (part + 1) * call.images / call.parts;
        for (int64_t image = first, vectors = 0; image < last; image++) {
            pass.work(head, image);
            vectors += layout.vectors;
            if (vectors < SPAN && image + 1 < last) continue;
            pass.take_gradients(spatial.of(of_spatial, task), pose.of(of_pose, task));
            vectors = 0;
        }
    });
    for (int64_t task = 0; task < tasks; task++) {
        spatial.add(of_spatial, task, task / call.parts, call.scale);
        pose.add(of_pose, task, task / call.parts, call.scale);
    }
    return !done;
}

template <class T> int run(const Arguments& call) {
    try {
        const Layout layout(call, WIDTH<T>, sizeof(T));
        if (call.everything)
            return run<EverythingPass<T>>(
                call, layout, {call.grad_waves, call.wave_heads, call.num_poses * layout.positions * call.num_waves});
        return run<WindowPass<T>>(
            call, layout, {call.grad_spatial, call.spatial_heads, call.num_poses * call.offsets * call.channels});
    } catch (const std::bad_alloc&) {
        return 1;
    }
}

}  // namespace
