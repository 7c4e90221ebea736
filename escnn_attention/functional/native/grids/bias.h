// What offsets and poses add to the scores of one head: products of the queries with tables, and their gradients.

#pragma once

#include "window.h"

namespace {

// Tables belong to an output pose, from which they are seen.
template <class T> struct Bias {
    using W = V<T>;

    Bias(const Arguments& call, bool backward)
            : call(call),
              of_spatial(call.offsets * call.channels),
              of_pose(call.key_poses * call.channels),
              by_offset(call.offsets * GROUP),
              by_pose(call.key_poses * GROUP) {
        if (backward && call.spatial) grad_spatial = Buffer<W>(call.frames * of_spatial);
        if (backward && call.pose) grad_pose = Buffer<W>(call.frames * of_pose);
    }

    void begin(int64_t head) {
        const auto table = [&](const void* tables, int64_t heads, int64_t size) {
            return tables ? static_cast<const T*>(tables) + head % heads * call.frames * size : nullptr;
        };
        spatial = table(call.spatial, call.spatial_heads, of_spatial);
        pose = table(call.pose, call.pose_heads, of_pose);
    }

    // Of queries (C, G), each seen from its own output pose, `frame` and those that follow, or all from that one: to
    // `by_offset` and `by_pose`.
    template <int G> void forward(const W* x, const Window<T>& window, int64_t frame, bool own) const {
        if (spatial) multiply<T, G>(x, offsets(window, frame, own), by_offset.data);
        if (pose) multiply<T, G>(x, poses(frame, own), by_pose.data);
    }
    // A score of nothing for keys that are not on the grid, beside or without what offsets add.
    template <int G> void add_mask(const Window<T>& window, const Buffer<T>& mask, bool beside) const {
        for (int64_t l = 0; l < window.num_near; l++) {
            const W m = load(mask.data + window.at(l));
            for (int g = 0; g < G; g++) by_offset[l * G + g] = beside ? by_offset[l * G + g] + m : m;
        }
    }
    const W* of_poses() const { return pose ? by_pose.data : nullptr; }

    // From gradients of scores (keys, G), what the queries and the tables have of theirs; it overwrites what forward
    // gave.
    template <int G> void backward(const W* x, const Window<T>& window, int64_t frame, bool own, const W* grad,
                                   W* grad_x) const {
        sum_keys<G>(window, grad);
        if (spatial)
            multiply_backward<T, G>(x, offsets(window, frame, own), by_offset.data, grad_x,
                                    grad_spatial.data + frame * of_spatial);
        if (pose)
            multiply_backward<T, G>(x, poses(frame, own), by_pose.data, grad_x, grad_pose.data + frame * of_pose);
    }

    // The gradients of the tables since the last call, the lanes summed.
    void take(double* to_spatial, double* to_pose) const {
        for (int64_t i = 0; i < grad_spatial.size; i++) to_spatial[i] = sum<T>(grad_spatial[i]);
        for (int64_t i = 0; i < grad_pose.size; i++) to_pose[i] = sum<T>(grad_pose[i]);
        grad_spatial.clear(), grad_pose.clear();
    }

    const Arguments& call;
    const int64_t of_spatial, of_pose;  // numbers of the tables of an output pose
    const Buffer<W> by_offset, by_pose;
    const T *spatial = nullptr, *pose = nullptr;

  private:
    Table<T> offsets(const Window<T>& window, int64_t frame, bool own) const {
        return {spatial + frame * of_spatial, own ? of_spatial : 0, call.channels, window.num_near,
                window.near.data()};
    }
    Table<T> poses(int64_t frame, bool own) const {
        return {pose + frame * of_pose, own ? of_pose : 0, call.channels, call.key_poses, nullptr};
    }
    template <int G> void sum_keys(const Window<T>& window, const W* grad) const {
        const int64_t key_poses = call.key_poses;
        if (pose) std::fill_n(by_pose.data, key_poses * G, W{});
        for (int64_t l = 0; l < window.num_near; l++) {
            W total[G] = {};
            for (int64_t p = 0; p < key_poses; p++)
                for (int g = 0; g < G; g++) {
                    total[g] += grad[(l * key_poses + p) * G + g];
                    if (pose) by_pose[p * G + g] += grad[(l * key_poses + p) * G + g];
                }
            for (int g = 0; g < G; g++) by_offset[l * G + g] = total[g];
        }
    }

    Buffer<W> grad_spatial, grad_pose;
};

}  // namespace
