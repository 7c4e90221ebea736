// Networks at every pair of points, forward and backward, on memory of exactly the size that a call needs: a program
// for sanitizers. It fails where a gradient is not finite.

#include <cstdio>

#include "pair_mlp.cpp"
#include "room.h"

namespace {

// Whether all gradients are finite, and the call found the memory that it needed.
bool run_sizes(int64_t rows, int64_t hidden, int64_t second_hidden, bool frozen) {
    Room room;
    Arguments a{};
    a.heads = 2, a.inputs = 3, a.hidden = hidden, a.second_hidden = second_hidden;
    a.blocks = 2, a.repeats = 3, a.rows = rows, a.threads = 3;
    const int64_t biases = a.heads * hidden * a.blocks * a.repeats, out = a.heads * a.blocks * a.repeats * rows;
    const int64_t first = a.heads * hidden * a.inputs, second = a.heads * second_hidden * hidden;
    a.x = room.random(a.blocks * a.inputs * rows), a.bias = room.random(biases);
    a.first = room.random(first), a.second = room.random(second), a.last = room.random(a.heads * second_hidden);
    a.out = room.zeros(out);
    if (escnn_attention(&a)) return false;
    a.grad = room.random(out);
    if (!frozen) a.grad_bias = room.zeros(biases), a.grad_first = room.zeros(first);
    a.grad_second = room.zeros(second), a.grad_last = room.zeros(a.heads * second_hidden);
    return !escnn_attention(&a) && room.is_finite();
}

}  // namespace

int main() {
    for (int64_t rows : {1, 15, 64, 200})
        for (int64_t hidden : {1, 4, 7})
            for (int64_t second_hidden : {1, 4, 6})
                for (bool frozen : {false, true})
                    if (!run_sizes(rows, hidden, second_hidden, frozen))
                        return std::printf("failed: %d rows, %d and %d hidden\n", int(rows), int(hidden),
                                           int(second_hidden)),
                               1;
}
