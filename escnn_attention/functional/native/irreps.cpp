// Maps between features and regular fields in irreps, and their gradients, for functional/irreps.py.
//
// A worker makes everything of a tile of positions, the lanes of vectors, while it is in the cache: the irreps of what
// it reads, a product of matrices for each irrep, and what it writes. Gradients of weights are added up in parts of the
// tiles, whose number does not depend on that of the threads: nor does the result.

#include "irreps/map.h"
#include "threads.h"

namespace {

// Tiles of a part: each part has gradients of all weights, which are added up in the end.
constexpr int64_t TILES = 4, MOST_PARTS_OF_SUMS = 32, MOST_SUMS = int64_t(1) << 22, STRETCH = 4096;

template <class T> bool run(const Arguments& call) {
    const Plan<T> plan(call);
    const int64_t weights = call.grad_weights ? call.num_weights : 0, biases = call.grad_bias ? call.num_biases : 0;
    const int64_t size = weights + biases;
    const int64_t tiles = plan.images * plan.tiles_of_image;
    int64_t parts = (tiles + TILES - 1) / TILES;
    if (size) parts = std::min({parts, MOST_PARTS_OF_SUMS, std::max<int64_t>(1, MOST_SUMS / size)});
    const Buffer<T> sums(parts * size, false);
    const auto make = [&] { return Map<T>(plan); };
    bool done = share(parts, call.threads, make, [&](Map<T>& map, int64_t part) {
        map.sums = sums.data + part * size;
        std::fill_n(map.sums, size, T(0));
        for (int64_t i = part * tiles / parts; i < (part + 1) * tiles / parts; i++) map.work(i);
    });
    const auto nothing = [] { return 0; };
    done &= share((size + STRETCH - 1) / STRETCH, call.threads, nothing, [&](int, int64_t task) {
        const int64_t from = task * STRETCH, to = std::min(size, from + STRETCH);
        for (int64_t part = 1; part < parts; part++)
            for (int64_t i = from; i < to; i++) sums[i] += sums[part * size + i];
        for (int64_t i = from; i < to; i++) {
            void* out = i < weights ? call.grad_weights : call.grad_bias;
            static_cast<T*>(out)[i < weights ? i : i - weights] = parts ? sums[i] : T(0);
        }
    });
    return done;
}

}  // namespace

// NUMBER is the type of all numbers.
extern "C" int escnn_attention(const Arguments* call) {
    return status_of([&] { return run<NUMBER>(*call); });
}
