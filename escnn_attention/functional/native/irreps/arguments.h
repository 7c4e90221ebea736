// Arguments of the loop, made of the lists in escnn_attention.functional.irreps. To write it again:
//     python -m escnn_attention.functional.native.arguments

#pragma once

#include <cstdint>

// Sizes without a comment are those of the arrays, or 0 where there is none.
extern "C" struct Arguments {
    const int64_t* tables;  // (table of transforms)
    const void* values;  // (numbers of transforms)
    const int64_t* strides;  // (8, 5)
    const void* weights;  // (num_weights), of each irrep (d, F, K)
    const void* bias;  // (num_biases), of the trivial irrep, or null
    const void* features;  // (as its strides say), or null
    const void* first;  // (as its strides say), regular fields, or null
    const void* second;  // (as its strides say), or null
    const void* third;  // (as its strides say), or null
    void* made_features;  // (as its strides say), or null
    void* made_first;  // (as its strides say), regular fields, or null
    void* made_second;  // (as its strides say), or null
    void* made_third;  // (as its strides say), or null
    void* grad_weights;  // as weights, or null
    void* grad_bias;  // as bias, or null
    int64_t images;  // of features and fields
    int64_t number;  // positions of an image
    int64_t groups;  // of regular fields, in all parts
    int64_t parts;  // of the groups
    int64_t num_weights;  // of all irreps
    int64_t num_biases;  // of the trivial irrep
    int64_t bias_of_fields;  // or of the features
    int64_t threads;
};

extern "C" int64_t escnn_attention_size() { return sizeof(Arguments); }
