// Attention on a grid, forward and backward: what backends/native.py calls.

#include "grids/window_pass.h"
#include "threads.h"

namespace {

template <class T> int run(const Arguments& call) {
    try {
        const Layout layout(call, WIDTH<T>, sizeof(T));
        // Every part of a batch has gradients of tables of its own, which are added in order: whatever the threads did
        // first, the result is the same.
        const int64_t tasks = call.heads * call.parts;
        const int64_t of_spatial = call.grad_spatial ? call.frames * call.offsets * call.channels : 0;
        const int64_t of_pose = call.grad_pose ? call.frames * call.key_poses * call.channels : 0;
        std::vector<double> spatial(tasks * of_spatial), pose(tasks * of_pose);
        const auto make = [&] { return WindowPass<T>(call, layout); };
        const bool done = share(tasks, call.threads, make, [&](WindowPass<T>& pass, int64_t task) {
            const int64_t part = task % call.parts;
            for (int64_t image = part * call.images / call.parts; image < (part + 1) * call.images / call.parts; image++)
                pass.work(task / call.parts, image);
            pass.tables().take(spatial.data() + task * of_spatial, pose.data() + task * of_pose);
        });
        for (int64_t task = 0; task < tasks; task++) {
            const int64_t head = task / call.parts;
            double* to_spatial = call.grad_spatial + head % call.spatial_heads * of_spatial;
            double* to_pose = call.grad_pose + head % call.pose_heads * of_pose;
            for (int64_t i = 0; i < of_spatial; i++) to_spatial[i] += call.unit * spatial[task * of_spatial + i];
            for (int64_t i = 0; i < of_pose; i++) to_pose[i] += call.unit * pose[task * of_pose + i];
        }
        return !done;
    } catch (const std::bad_alloc&) {
        return 1;
    }
}

}  // namespace

// 0, or 1 where there was not enough memory. NUMBER is the type of all numbers but the gradients of the tables.
extern "C" int escnn_attention(const Arguments* call) { return run<NUMBER>(*call); }
