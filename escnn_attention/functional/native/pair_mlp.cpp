// Networks of two hidden layers at every pair of points, forward and backward, for functional/points/pair_mlp.py.
//
// Lanes of a vector are pairs side by side, and what is hidden exists for a few vectors at a time. The backward pass
// makes it again, and adds up the gradients of the weights in parts of the pairs whose number does not depend on that
// of the threads: nor does the result.

#include <vector>

#include "pair_mlp/network.h"
#include "threads.h"

namespace {

// Adds the sums of parts (parts, size) to numbers (size), which may be null.
template <class T> void add_parts(const double* from, int64_t parts, int64_t stride, int64_t size, T* to) {
    for (int64_t i = 0; to && i < size; i++) {
        double total = 0;
        for (int64_t part = 0; part < parts; part++) total += from[part * stride + i];
        to[i] += T(total);
    }
}

template <class T> bool run(const Arguments& call) {
    const int64_t chunks = Network<T>::chunks(call);
    const int64_t parts = std::min<int64_t>(chunks, std::max<int64_t>(1, 32 / call.heads));
    const int64_t num_weights = call.grad ? Network<T>::num_weights(call) : 0;
    const int64_t num_biases = call.grad ? Network<T>::num_biases(call) : 0;
    std::vector<double> weights(call.heads * parts * num_weights), biases(call.heads * parts * num_biases);
    const auto make = [&] { return Network<T>(call); };
    const bool done = share(call.heads * parts, call.threads, make, [&](Network<T>& network, int64_t task) {
        const int64_t part = task % parts;
        network.work(task / parts, part * chunks / parts, (part + 1) * chunks / parts,
                     weights.data() + task * num_weights, biases.data() + task * num_biases);
    });
    const auto add = [&](int64_t head, const double* from, int64_t stride, int64_t size, void* to) {
        add_parts(from, parts, stride, size, to ? static_cast<T*>(to) + head * size : nullptr);
    };
    for (int64_t head = 0; call.grad && head < call.heads; head++) {
        const double* from = weights.data() + head * parts * num_weights;
        const int64_t first = call.hidden * call.inputs, second = call.second_hidden * call.hidden;
        add(head, from, num_weights, first, call.grad_first);
        add(head, from + first, num_weights, second, call.grad_second);
        add(head, from + first + second, num_weights, call.second_hidden, call.grad_last);
        add(head, biases.data() + head * parts * num_biases, num_biases, num_biases, call.grad_bias);
    }
    return done;
}

}  // namespace

// NUMBER is the type of all numbers.
extern "C" int escnn_attention(const Arguments* call) {
    return status_of([&] { return run<NUMBER>(*call); });
}
