// Attention on a grid in a package that AOTInductor compiles, forward only.

#include "packaged.h"

#define escnn_attention_size NAMED(escnn_attention_size_of_grids)

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>

#include "grids/attention.h"

namespace {

template <class T> bool all_finite(const T* x, int64_t size) {
    constexpr int64_t LANES = 64;  // sums side by side, which a compiler keeps in vectors
    T sums[LANES] = {};
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES)
        for (int64_t lane = 0; lane < LANES; lane++) sums[lane] += 0 * x[i + lane];
    for (; i < size; i++) sums[0] += 0 * x[i];
    return std::accumulate(sums, sums + LANES, T(0)) == 0;
}

// The output of all positions of one head of one image is `size` numbers.
struct Sizes {
    explicit Sizes(const Arguments& call)
            : images(call.heads * call.images),
              positions(std::accumulate(call.shape, call.shape + call.dim, int64_t(1), std::multiplies<int64_t>())),
              of_output(call.num_poses * call.channels),
              of_sums(2 * (call.sum_query_poses ? call.num_poses : 1) * call.query_poses) {}
    int64_t images, positions, of_output, of_sums;
};

template <class T> void attend(Arguments call, T* out) {
    const Sizes sizes(call);
    std::unique_ptr<T[]> sums(new T[sizes.images * sizes.positions * sizes.of_sums]);
    call.out = out, call.sums = sums.get();
    if (run<T>(call)) throw std::bad_alloc();
}

// A value that is not finite spoils the queries that see it and no others: isolating_nonfinite of
// backends/grid_loop.py. Whom it reaches is what an attention of equal weights brings something of it.
template <class T> void attend_in_windows(Arguments call, T* out) {
    attend(call, out);
    const Sizes sizes(call);
    const int64_t places = sizes.images * sizes.positions, size = sizes.of_output;
    if (all_finite(out, places * size)) return;
    const int64_t vectors = places * call.key_poses, channels = call.channels;
    const T *k = static_cast<const T*>(call.k), *v = static_cast<const T*>(call.v);
    std::vector<T> keys(k, k + vectors * channels), values(v, v + vectors * channels);
    std::vector<T> spoilt(places), zero(places), reached(places);
    for (int64_t i = 0; i < vectors; i++) {
        T *key = &keys[i * channels], *value = &values[i * channels];
        if (all_finite(key, channels) && all_finite(value, channels)) continue;
        spoilt[i / call.key_poses] = 1;
        std::fill(key, key + channels, T(0)), std::fill(value, value + channels, T(0));
    }
    Arguments even = call;
    even.q = even.k = zero.data(), even.v = spoilt.data();
    even.spatial = even.pose = nullptr;
    even.num_poses = even.query_poses = even.key_poses = even.channels = 1;
    even.spatial_heads = even.pose_heads = 1, even.sum_query_poses = 0;
    attend(even, reached.data());
    call.k = keys.data(), call.v = values.data();
    attend(call, out);
    for (int64_t i = 0; i < places; i++)
        if (reached[i] > 0) std::fill(out + i * size, out + (i + 1) * size, std::numeric_limits<T>::quiet_NaN());
}

}  // namespace

// The output (M, B, N, H, C) of all members of Arguments: of those that it fills, and of gradients, there are none.
extern "C" AOTITorchError NAMED(aoti_torch_cpu_attention_on_grids)(
        const AtenTensorHandle** tensors, int64_t num_tensors, const int64_t* integers, int64_t num_integers,
        const double* numbers, int64_t num_numbers, int32_t in_windows, AtenTensorHandle* out) {
    return told([&] {
        const Arguments call =
            arguments_of<Arguments>(tensors, num_tensors, integers, num_integers, numbers, num_numbers);
        NUMBER* to =
            room<NUMBER>({call.heads, call.images, Sizes(call).positions, call.num_poses, call.channels}, out);
        if (call.images) (in_windows ? attend_in_windows<NUMBER> : attend<NUMBER>)(call, to);
    });
}
