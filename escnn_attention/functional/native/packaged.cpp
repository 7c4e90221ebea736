// Attention on a grid in a package that AOTInductor compiles, forward only: what packaged.py has the package link.
//
// The package calls it through PyTorch's C interface, which changes neither with its version nor with the compiler.

#define PASTED(name, number) name##_##number
#define NAMED(name, number) PASTED(name, number)
// One package may hold loops for both types of numbers, whose functions need names of their own.
#define escnn_attention_size NAMED(escnn_attention_size, NUMBER)

#include "grids/attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/c/shim.h>

namespace {

struct Refused {};

void must(AOTITorchError error) {
    if (error != AOTI_TORCH_SUCCESS) throw Refused();
}

// The arguments from the members of the structure in their order: pointers, whole numbers, numbers. All are as wide.
Arguments arguments_of(const AtenTensorHandle** tensors, int64_t num_tensors, const int64_t* integers,
                       int64_t num_integers, const double* numbers, int64_t num_numbers) {
    static_assert(sizeof(void*) == sizeof(int64_t) && sizeof(double) == sizeof(int64_t));
    if ((num_tensors + num_integers + num_numbers) * int64_t(sizeof(int64_t)) != int64_t(sizeof(Arguments)))
        throw Refused();
    std::vector<void*> pointers(num_tensors);
    for (int64_t i = 0; i < num_tensors; i++) {
        bool contiguous = true;
        if (!tensors[i]) continue;
        must(aoti_torch_is_contiguous(*tensors[i], &contiguous));
        if (!contiguous) throw Refused();
        must(aoti_torch_get_data_ptr(*tensors[i], &pointers[i]));
    }
    Arguments call;
    char* to = reinterpret_cast<char*>(&call);
    std::memcpy(to, pointers.data(), num_tensors * sizeof(void*)), to += num_tensors * sizeof(void*);
    std::memcpy(to, integers, num_integers * sizeof(int64_t)), to += num_integers * sizeof(int64_t);
    std::memcpy(to, numbers, num_numbers * sizeof(double));
    uint32_t threads = 1;
    must(torch_get_num_threads(&threads));
    call.threads = threads;
    return call;
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

// The output of all positions of one head of one image is `size` numbers.
struct Sizes {
    explicit Sizes(const Arguments& call)
            : images(call.heads * call.images),
              positions(std::accumulate(call.shape, call.shape + call.dim, int64_t(1), std::multiplies<int64_t>())),
              of_output(call.num_poses * call.channels),
              of_sums((call.sum_query_poses ? call.num_poses : 1) * call.query_poses) {}
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
extern "C" AOTITorchError NAMED(aoti_torch_cpu_attention_on_grids, NUMBER)(
        const AtenTensorHandle** tensors, int64_t num_tensors, const int64_t* integers, int64_t num_integers,
        const double* numbers, int64_t num_numbers, int32_t in_windows, AtenTensorHandle* out) {
    try {
        const Arguments call = arguments_of(tensors, num_tensors, integers, num_integers, numbers, num_numbers);
        const int64_t c = call.channels, h = call.num_poses * c, n = Sizes(call).positions * h;
        const int64_t shape[] = {call.heads, call.images, n / h, call.num_poses, c};
        const int64_t strides[] = {call.images * n, n, h, c, 1};
        int32_t dtype;
        void* to;
        must(aoti_torch_get_dtype(*tensors[0], &dtype));
        must(aoti_torch_empty_strided(5, shape, strides, dtype, aoti_torch_device_type_cpu(), 0, out));
        must(aoti_torch_get_data_ptr(*out, &to));
        if (call.images) (in_windows ? attend_in_windows<NUMBER> : attend<NUMBER>)(call, static_cast<NUMBER*>(to));
        return AOTI_TORCH_SUCCESS;
    } catch (const Refused&) {
        return AOTI_TORCH_FAILURE;
    } catch (const std::bad_alloc&) {
        return AOTI_TORCH_FAILURE;
    }
}
