// Arguments of the loop, made of the lists in escnn_attention.functional.points.native. To write it again:
//     python -m escnn_attention.functional.native.arguments

#pragma once

#include <cstdint>

// Sizes without a comment are those of the arrays, or 0 where there is none.
extern "C" struct Arguments {
    const void* q;  // (heads, groups * group_queries, query_poses, channels), scaled, or null
    const void* k;  // (heads, points, key_poses, channels), or null
    const void* v;  // (heads, points, key_poses, channels)
    const void* reads;  // (heads, groups * group_queries, query_poses, num_features), or null
    const void* features;  // (feature_heads, num_poses, num_features, feature_groups, feature_queries, group_keys), or null
    const void* pose;  // (pose_heads, num_poses, channels, padded_key_poses), or null
    const void* extra;  // (heads, rows of scores, extra_poses, groups, group_queries, group_keys), or null
    const void* factors;  // (heads, groups, group_queries, group_keys), or null
    const void* envelope;  // (groups, group_queries, group_keys), or null
    const void* layer;  // (num_features, coordinates), or null
    const void* shift;  // (num_features), or null
    const void* relation;  // (num_poses, coordinates, feature_groups, feature_queries, group_keys), or null
    const int64_t* queries;  // (groups, group_queries), -1 fills up
    const int64_t* keys;  // (groups, group_keys), -1 fills up
    const void* log_measure;  // (points, key_poses), or null
    const int64_t* seed;  // (1), of dropout, or null
    void* out;  // (heads, groups * group_queries, num_poses, channels), or null
    void* sums;  // (heads, groups * group_queries, rows of scores, 2), the largest scores, and what makes sums 1, or null
    void* grad;  // (as out), in the backward pass, or null
    void* grad_q;  // as q, or null
    void* grad_k;  // as k, or null
    void* grad_v;  // as v, or null
    void* grad_reads;  // as reads, or null
    void* grad_features;  // as features, or null
    void* grad_pose;  // as pose, or null
    void* grad_extra;  // as extra, or null
    void* grad_factors;  // as factors, or null
    void* grad_envelope;  // as envelope, or null
    void* grad_layer;  // as layer, or null
    void* grad_shift;  // as shift, or null
    int64_t num_poses;  // of the output
    int64_t query_poses;  // of the queries
    int64_t exclusive_keys;  // whether no two groups have keys in common
    int64_t ring;  // points of a ring, whose features are those of its first, turned; 0 without rings
    int64_t sum_query_poses;  // whether all query poses contribute to every output pose
    int64_t normalize_by_count;  // whether scores are divided by the measure of the keys, instead of a softmax
    int64_t heads;
    int64_t points;
    int64_t key_poses;
    int64_t channels;
    int64_t groups;
    int64_t group_queries;
    int64_t group_keys;
    int64_t num_features;
    int64_t feature_heads;
    int64_t feature_groups;
    int64_t feature_queries;
    int64_t pose_heads;
    int64_t padded_key_poses;
    int64_t extra_poses;
    int64_t coordinates;
    int64_t threads;
    double dropout;  // the probability
};

extern "C" int64_t escnn_attention_size() { return sizeof(Arguments); }
