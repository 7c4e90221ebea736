// What Python gives the loop, made of the list in functional/native/fields.py: changes here are lost.

#pragma once

#include <cstdint>

// Sizes: M heads, B images of N positions, H output poses, J query poses, P key poses, C channels, L offsets, F cosines
// and sines.
extern "C" struct Arguments {
    const void* q;  // (M, B, N, J, C)
    const void* k;  // (M, B, N, P, C)
    const void* v;  // as k
    const void* spatial;  // (M or 1, H, L, C), or null
    const void* pose;  // (M or 1, H, P, C), or null
    const void* waves;  // (M or 1, H, N, F), only of everything, or null
    const void* amplitudes;  // (M, B, N, J, F), of the queries; there with waves, or null
    void* out;  // (M, B, N, H, C)
    void* sums;  // (M, B, 2, H or 1, J, N): the largest scores, and what makes sums of exponentials 1
    const void* grad;  // as out, in the backward pass, or null
    void* grad_q;  // as q, or null
    void* grad_k;  // as k, zero at first, or null
    void* grad_v;  // as v, zero at first, or null
    void* grad_amplitudes;  // as amplitudes, or null
    double* grad_waves;  // as waves, zero at first, or null
    double* grad_spatial;  // as spatial, zero at first, or null
    double* grad_pose;  // as pose, zero at first, or null
    const int64_t* shape;  // (dim)
    const int64_t* steps;  // (L, dim), in positions
    int64_t dim;  // axes of the grid
    int64_t heads;  // M
    int64_t images;  // B
    int64_t query_poses;  // J
    int64_t key_poses;  // P
    int64_t num_poses;  // H
    int64_t offsets;  // L
    int64_t channels;  // C
    int64_t num_waves;  // F
    int64_t spatial_heads;  // M or 1
    int64_t pose_heads;  // M or 1
    int64_t wave_heads;  // M or 1
    int64_t key_positions;  // of everything, where queries may have another number of them
    int64_t everything;  // whether queries see all keys, without a table; of one axis then
    int64_t pad;  // places of nothing after every row
    int64_t rows;  // of a band
    int64_t parts;  // of a batch, in each of which the gradients of tables are added up
    int64_t threads;  // how many
    int64_t seed;  // of dropout
    int64_t sum_query_poses;  // whether every output pose has all query poses
    double dropout;  // the probability
    double scale;  // by which scores are multiplied
};

extern "C" int64_t escnn_attention_size() { return sizeof(Arguments); }
