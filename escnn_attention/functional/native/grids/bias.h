// What offsets and poses add to the scores of a window: products of the queries with tables, and their gradients.

#pragma once

#include "tables.h"
#include "window.h"

namespace {

template <class T> struct Bias {
    using W = V<T>;

    Bias(const Arguments& call, int64_t places, bool backward)
            : key_poses(call.key_poses),
              spatial(call.spatial, call.spatial_heads, call.num_poses, call.offsets, call.channels, backward),
              pose(call.pose, call.pose_heads, call.num_poses, call.key_poses, call.channels, backward),
              by_offset(places * GROUP),
              by_pose(call.key_poses * GROUP) {}

    void begin(int64_t head) { spatial.begin(head), pose.begin(head); }

    // Of queries (C, G), each seen from its own output pose, `out_pose` and those that follow, or all from that one: to
    // `by_offset` and `by_pose`.
    template <int G> void forward(const W* x, const Window<T>& window, int64_t out_pose, bool own) const {
        if (spatial) multiply<T, G>(x, offsets(window, out_pose, own), by_offset.data);
        if (pose) multiply<T, G>(x, pose.of(out_pose, own, key_poses, nullptr), by_pose.data);
    }
    // A score of nothing for keys that are not on the grid, beside or without what offsets add.
    template <int G> void add_mask(const Window<T>& window, const Buffer<T>& mask, bool beside) const {
        for (int64_t l = 0; l < window.places; l++) {
            const W m = load(mask.data + window.mask_at(l));
            for (int g = 0; g < G; g++) by_offset[l * G + g] = beside ? by_offset[l * G + g] + m : m;
        }
    }
    W* of_poses() const { return pose ? by_pose.data : nullptr; }

    // From the sums of gradients of scores over the poses, in `by_offset`, and over the places, in `by_pose`, what the
    // queries and the tables have of theirs.
    template <int G>
    void backward(const W* x, const Window<T>& window, int64_t out_pose, bool own, W* grad_x) const {
        if (spatial)
            multiply_backward<T, G>(x, offsets(window, out_pose, own), by_offset.data, grad_x,
                                    spatial.gradient(out_pose));
        if (pose)
            multiply_backward<T, G>(x, pose.of(out_pose, own, key_poses, nullptr), by_pose.data, grad_x,
                                    pose.gradient(out_pose));
    }

    const int64_t key_poses;
    Tables<T> spatial, pose;
    const Buffer<W> by_offset, by_pose;

  private:
    Table<T> offsets(const Window<T>& window, int64_t out_pose, bool own) const {
        return spatial.of(out_pose, own, window.places, window.rows.data());
    }
};

}  // namespace
