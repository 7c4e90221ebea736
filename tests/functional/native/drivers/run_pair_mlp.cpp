// Networks at every pair of points, forward and backward, on memory of exactly the size that a call needs: a program
// for sanitizers. It fails where a gradient is not finite.
//
// g++ -std=c++17 -g -O1 -pthread -fsanitize=address,undefined -DNUMBER=float -I escnn_attention/functional/native
//     tests/functional/native/drivers/run_pair_mlp.cpp

#include <cmath>
#include <cstdio>
#include <memory>
#include <random>

#include "pair_mlp.cpp"

namespace {

// Whether all gradients are finite, and the call found the memory that it needed.
bool run_sizes(int64_t rows, int64_t hidden, int64_t second_hidden, bool frozen) {
    std::mt19937 generator(0);
    std::vector<std::pair<std::unique_ptr<NUMBER[]>, int64_t>> memory;
    const auto room = [&](int64_t size) {
        memory.emplace_back(new NUMBER[size](), size);
        return memory.back().first.get();
    };
    const auto random = [&](int64_t size) {
        NUMBER* numbers = room(size);
        for (int64_t i = 0; i < size; i++) numbers[i] = std::normal_distribution<NUMBER>()(generator);
        return numbers;
    };
    Arguments a{};
    a.heads = 2, a.inputs = 3, a.hidden = hidden, a.second_hidden = second_hidden;
    a.blocks = 2, a.repeats = 3, a.rows = rows, a.threads = 3;
    const int64_t biases = a.heads * hidden * a.blocks * a.repeats, out = a.heads * a.blocks * a.repeats * rows;
    const int64_t first = a.heads * hidden * a.inputs, second = a.heads * second_hidden * hidden;
    a.x = random(a.blocks * a.inputs * rows), a.bias = random(biases);
    a.first = random(first), a.second = random(second), a.last = random(a.heads * second_hidden);
    a.out = room(out);
    if (escnn_attention(&a)) return false;
    a.grad = random(out);
    if (!frozen) a.grad_bias = room(biases), a.grad_first = room(first);
    a.grad_second = room(second), a.grad_last = room(a.heads * second_hidden);
    if (escnn_attention(&a)) return false;
    for (const auto& [numbers, size] : memory)
        for (int64_t i = 0; i < size; i++)
            if (!std::isfinite(numbers[i])) return false;
    return true;
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
