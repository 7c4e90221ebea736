// What Python gives the loop, made of the list in functional/native/fields.py: changes here are lost.

#pragma once

#include <cstdint>

// Sizes: M heads, G groups of A queries that see the same K keys, H output poses, J query poses, P key poses, C
// channels, F features, and S rows of scores of a query: H, or H * J where all query poses contribute to every output
// pose.
extern "C" struct Arguments {
    const void* q;  // (M, G * A, J, C), or null
    const void* k;  // (M, points, P, C); there with q, or null
    const void* v;  // (M, points, P, C)
    const void* reads;  // (M, G * A, J, F), or null
    const void* features;  // (feature_heads, H, F, G, A, K); there with reads, or null
    const void* pose;  // (pose_heads, H, C, padded_key_poses), or null
    const void* extra;  // (M, S, extra_poses, G, A, K), or null
    const void* factors;  // (M, G, A, K), which multiply weights, or null
    const int64_t* queries;  // (G, A), points; -1 at the end of a row fills up
    const int64_t* keys;  // (G, K), points; -1 at the end of a row fills up
    const void* log_measure;  // (points, P), or null
    void* out;  // (M, G * A, H, C), in the forward pass, or null
    void* sums;  // (M, G * A, S, 2): the largest scores, and what makes sums of exponentials 1
    const void* grad;  // as out, in the backward pass, or null
    void* grad_q;  // as q, zero at first, or null
    void* grad_k;  // as k, zero at first, or null
    void* grad_v;  // as v, zero at first, or null
    void* grad_reads;  // as reads, zero at first, or null
    void* grad_features;  // as features, zero at first where anything fills up, or null
    void* grad_pose;  // as pose, zero at first, or null
    void* grad_extra;  // as extra, zero at first where anything fills up, or null
    void* grad_factors;  // as factors, zero at first, or null
    void* weights;  // (M, G * A, H, row_stride); not group by group, or null
    void* grad_scores;  // (M, G * A, H or J, row_stride); not group by group, or null
    int64_t heads;  // M
    int64_t points;  // how many
    int64_t groups;  // G
    int64_t group_queries;  // A
    int64_t group_keys;  // K
    int64_t num_poses;  // H
    int64_t query_poses;  // J
    int64_t key_poses;  // P
    int64_t channels;  // C
    int64_t num_features;  // F
    int64_t feature_heads;  // M or 1
    int64_t pose_heads;  // M or 1
    int64_t padded_key_poses;  // whole vectors that hold P
    int64_t extra_poses;  // P or 1
    int64_t sum_query_poses;  // whether all query poses contribute to every output pose
    int64_t normalize_by_count;  // whether scores are divided by the measure of the keys
    int64_t group_by_group;  // whether the keys of a group, which no other has, follow its queries
    int64_t threads;  // how many
    int64_t seed;  // of dropout
    int64_t row_stride;  // of a row of scores: P * K and one vector more at least, in whole lines of the cache
    double dropout;  // the probability
};

extern "C" int64_t escnn_attention_size() { return sizeof(Arguments); }
