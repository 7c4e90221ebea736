// What Python gives the loop, made of the list in functional/native/fields.py: changes here are lost.

#pragma once

#include <cstdint>

// Sizes: B blocks of R rows with I inputs, M heads whose networks have F and S hidden units, and Q biases for each
// block, whose rows are repeated with every one.
extern "C" struct Arguments {
    const void* x;  // (B, I, R)
    const void* bias;  // (M, F, B * Q)
    const void* first;  // (M, F, I)
    const void* second;  // (M, S, F)
    const void* last;  // (M, S)
    void* out;  // (M, B * Q, R), in the forward pass, or null
    const void* grad;  // as out, in the backward pass, or null
    void* grad_bias;  // as bias, zero at first, or null
    void* grad_first;  // as first, zero at first, or null
    void* grad_second;  // as second, zero at first, or null
    void* grad_last;  // as last, zero at first, or null
    int64_t heads;  // M
    int64_t inputs;  // I
    int64_t hidden;  // F
    int64_t second_hidden;  // S
    int64_t blocks;  // B
    int64_t repeats;  // Q
    int64_t rows;  // R
    int64_t threads;  // how many
};

extern "C" int64_t escnn_attention_size() { return sizeof(Arguments); }
