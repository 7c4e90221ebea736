// Attention on a grid, forward and backward.

#pragma once

#include <limits>
#include <numeric>

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

// False where there was not enough memory, as those below.
template <class Pass> bool run(const Arguments& call, const Layout& layout, const TableGradient& spatial) {
    const TableGradient pose{call.grad_pose, call.pose_heads, call.num_poses * call.key_poses * call.channels};
    // Every part of a batch has gradients of tables of its own, which are added in order: whatever the threads did
    // first, the result is the same.
    const int64_t tasks = call.heads * call.parts;
    std::vector<double> of_spatial = spatial.room(tasks), of_pose = pose.room(tasks);
    const auto make = [&] { return Pass(call, layout); };
    const int64_t groups = layout.groups(call.images);
    const bool done = share(tasks, call.threads, make, [&](Pass& pass, int64_t task) {
        const int64_t head = task / call.parts, part = task % call.parts;
        const int64_t first = part * groups / call.parts, last = (part + 1) * groups / call.parts;
        for (int64_t group = first, vectors = 0; group < last; group++) {
            pass.work(head, group);
            vectors += int64_t(layout.places.size()) * layout.slots;
            if (vectors < SPAN && group + 1 < last) continue;
            pass.take_gradients(spatial.of(of_spatial, task), pose.of(of_pose, task));
            vectors = 0;
        }
    });
    for (int64_t task = 0; task < tasks; task++) {
        spatial.add(of_spatial, task, task / call.parts, call.scale);
        pose.add(of_pose, task, task / call.parts, call.scale);
    }
    return done;
}

template <class T> bool attend(const Arguments& call) {
    if (call.everything)
        return run<EverythingPass<T>>(
            call, Layout(call, WIDTH<T>, sizeof(T)),
            {call.grad_waves, call.wave_heads, call.num_poses * call.wave_positions * call.num_waves});
    return run<WindowPass<T>>(
        call, Layout::best(call, WIDTH<T>, sizeof(T)),
        {call.grad_spatial, call.spatial_heads, call.num_poses * call.offsets * call.channels});
}

template <class T> bool all_finite(const T* x, int64_t size) {
    constexpr int64_t LANES = 64;  // sums side by side, which a compiler keeps in vectors
    T sums[LANES] = {};
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES)
        for (int64_t lane = 0; lane < LANES; lane++) sums[lane] += 0 * x[i + lane];
    for (; i < size; i++) sums[0] += 0 * x[i];
    return std::accumulate(sums, sums + LANES, T(0)) == 0;
}

// The forward pass, where a key or value that is not finite makes the output of the queries that see it NaN, and changes
// no other: a masked key has the weight 0, and 0 * NaN is NaN. Attention with equal weights finds these queries.
template <class T> bool attend_isolated(Arguments call) {
    if (!attend<T>(call)) return false;
    const int64_t blocks = call.heads * call.images, size = call.num_poses * call.channels;
    const int64_t positions = call.positions, of_keys = call.key_positions, numbers = call.key_poses * call.channels;
    T* out = static_cast<T*>(call.out);
    // What is not finite leaves a trace, or no query has met it.
    if (!call.in_window || all_finite(out, blocks * positions * size)) return true;
    const T *k = static_cast<const T*>(call.k), *v = static_cast<const T*>(call.v);
    std::vector<T> keys(k, k + blocks * of_keys * numbers), values(v, v + blocks * of_keys * numbers);
    std::vector<T> spoilt(blocks * of_keys), zero(blocks * std::max(positions, of_keys));
    std::vector<T> reached(blocks * positions), sums(2 * reached.size());
    const auto each_number = [&](auto f) {
        for (int64_t i = 0; i < blocks * numbers * of_keys; i++)
            f(spoilt[i / (numbers * of_keys) * of_keys + i % of_keys], keys[i], values[i]);
    };
    each_number([](T& mark, T key, T value) { mark = std::isfinite(key) && std::isfinite(value) ? mark : T(1); });
    each_number([](T mark, T& key, T& value) { key = mark ? T(0) : key, value = mark ? T(0) : value; });
    Arguments even = call;
    even.q = even.k = zero.data(), even.v = spoilt.data(), even.out = reached.data(), even.sums = sums.data();
    even.spatial = even.pose = nullptr;
    even.num_poses = even.query_poses = even.key_poses = even.channels = 1;
    even.sum_query_poses = 0, even.dropout = 0;
    call.k = keys.data(), call.v = values.data();
    if (!attend<T>(even) || !attend<T>(call)) return false;
    for (int64_t i = 0; i < blocks * size * positions; i++)
        if (reached[i / (size * positions) * positions + i % positions] > 0)
            out[i] = std::numeric_limits<T>::quiet_NaN();
    return true;
}

template <class T> bool run(const Arguments& call) {
    return call.grad ? attend<T>(call) : attend_isolated<T>(call);
}

}  // namespace
