// Arguments of the loop, made of the lists in escnn_attention.functional.grid.native. To write it again:
//     python -m escnn_attention.functional.native.arguments

#pragma once

#include <cstdint>

// Sizes without a comment are those of the arrays, or 0 where there is none.
extern "C" struct Arguments {
    const void* q;  // (heads, images, positions, query_poses, channels)
    const void* k;  // (heads, images, key_positions, key_poses, channels)
    const void* v;  // (heads, images, key_positions, key_poses, channels)
    const void* spatial;  // (spatial_heads, num_poses, offsets, channels), or null
    const void* pose;  // (pose_heads, num_poses, key_poses, channels), or null
    const void* waves;  // (wave_heads, num_poses, wave_positions, num_waves), cosines and sines, of the queries and behind them of keys elsewhere, or null
    const void* amplitudes;  // (heads, images, positions, query_poses, num_waves), of the queries, or null
    const int64_t* shape;  // (dim), of the grid of the queries
    const int64_t* key_shape;  // (dim), of that of the keys
    const int64_t* steps;  // (neighbours, dim + 2), cells to a key along each axis, its slot, the row of its offset
    const int64_t* starts;  // (slots + 1), of the neighbours of the queries of each slot, and their end
    const int64_t* seed;  // (1), of dropout, or null
    void* out;  // (heads, images, positions, num_poses, channels), or null
    void* sums;  // (heads, images, 2, num_poses or 1, query_poses, positions), the largest scores, and what makes sums 1, or null
    void* grad;  // (as out), in the backward pass, or null
    void* grad_q;  // as q, or null
    void* grad_k;  // as k, or null
    void* grad_v;  // as v, or null
    double* grad_spatial;  // as spatial, or null
    double* grad_pose;  // as pose, or null
    double* grad_waves;  // as waves, or null
    void* grad_amplitudes;  // as amplitudes, or null
    int64_t num_poses;  // of the output
    int64_t everything;  // whether queries see all keys, without a table; the grid has one axis then
    int64_t by_position;  // whether vectors lie in memory as their axes say, where queries see everything
    int64_t in_window;  // whether queries see the keys of a window
    int64_t queries_of_cell;  // along an axis
    int64_t keys_of_cell;  // along an axis
    int64_t torus_from;  // the first axis of which both ends meet, as those of all behind it do; dim for none
    int64_t chunk;  // how many numbers are laid out at once
    int64_t parts;  // of a batch, in each of which the gradients of tables are added up
    int64_t sum_query_poses;  // whether every output pose sums over the query poses
    int64_t heads;
    int64_t images;
    int64_t positions;
    int64_t query_poses;
    int64_t channels;
    int64_t key_positions;
    int64_t key_poses;
    int64_t dim;
    int64_t neighbours;
    int64_t spatial_heads;
    int64_t offsets;
    int64_t pose_heads;
    int64_t wave_heads;
    int64_t wave_positions;
    int64_t num_waves;
    int64_t threads;
    double dropout;  // the probability
    double scale;  // by which scores are multiplied
};

extern "C" int64_t escnn_attention_size() { return sizeof(Arguments); }
