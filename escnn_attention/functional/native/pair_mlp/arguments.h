// Arguments of the loop, made of the lists in escnn_attention.functional.points.pair_mlp. To write it again:
//     python -m escnn_attention.functional.native.arguments

#pragma once

#include <cstdint>

// Sizes without a comment are those of the arrays, or 0 where there is none.
extern "C" struct Arguments {
    const void* bias;  // (heads, hidden, blocks, repeats)
    const void* first;  // (heads, hidden, inputs)
    const void* second;  // (heads, second_hidden, hidden)
    const void* last;  // (heads, second_hidden)
    const void* x;  // (blocks, inputs, rows)
    void* out;  // (heads, blocks * repeats, rows), or null
    void* grad;  // (as out), in the backward pass, or null
    void* grad_bias;  // as bias, or null
    void* grad_first;  // as first, or null
    void* grad_second;  // as second, or null
    void* grad_last;  // as last, or null
    int64_t heads;
    int64_t hidden;
    int64_t blocks;
    int64_t repeats;
    int64_t inputs;
    int64_t second_hidden;
    int64_t rows;
    int64_t threads;
};

extern "C" int64_t escnn_attention_size() { return sizeof(Arguments); }
