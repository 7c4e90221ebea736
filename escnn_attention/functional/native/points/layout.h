// Attention between points: how large a call is, and where its numbers lie.

#pragma once

#include <algorithm>

#include "../buffer.h"
#include "../simd.h"
#include "arguments.h"

namespace {

// A row of scores belongs to a query, an output pose and a query pose. It has the keys of all poses side by side, at
// pose * (how many keys the group has) + key.
struct ScoreRow {
    int64_t query;             // in (M, G * A)
    int64_t member;            // of its group
    int64_t slot;              // of the queries that are taken at once
    int64_t pose, query_pose;  // where query poses are not summed over, the second is that of the output
    int64_t index;             // of the S rows of scores of the query
    int64_t grad_index;        // of its rows of gradients of scores, summed over output poses that share them
};

constexpr int64_t FEWEST_GROUPS = 8;                   // to be shared among threads, whatever their number
constexpr int64_t FEWEST_COPIES = 8, MOST_COPIES = 32;  // of gradients that all tasks share
constexpr int64_t CACHED_NUMBERS = int64_t(1) << 19;  // of a group whose scores stay in the cache

template <class T> T* as(void* p) { return static_cast<T*>(p); }
template <class T> const T* as(const void* p) { return static_cast<const T*>(p); }

template <class T> struct Layout {
    static constexpr int width = WIDTH<T>;

    explicit Layout(const Arguments& call)
            : call(call),
              num_queries(call.groups * call.group_queries),
              key_numbers(call.key_poses * call.channels),
              summed_poses(call.sum_query_poses ? call.query_poses : 1),
              score_rows(call.num_poses * summed_poses),
              shared_query(!call.sum_query_poses && call.query_poses == 1 && call.num_poses > 1),
              grad_rows(call.sum_query_poses || shared_query ? call.query_poses : call.num_poses),
              repeats(call.reads ? call.groups / call.feature_groups : 1),
              padded_keys((call.group_keys + width - 1) / width * width),
              row_stride(((call.key_poses * call.group_keys + line - 1) / line + 1) * line),
              whole_groups(call.exclusive_keys && call.groups >= FEWEST_GROUPS && group_size() <= CACHED_NUMBERS),
              copies(whole_groups ? 0 : affordable_copies()),
              slots(whole_groups ? call.group_queries : std::min({call.group_queries, most_slots(), even_slots()})),
              group_tasks((call.group_queries + slots - 1) / slots) {
        if (!call.grad || keys_at_once()) return;
        weights = Buffer<T>(call.heads * num_queries * call.num_poses * row_stride, false);
        grad_scores = Buffer<T>(call.heads * num_queries * grad_rows * row_stride, false);
    }

    // Whether keys get their gradients right after the queries of a task, whose weights stay in the cache.
    bool keys_at_once() const { return whole_groups || copies > 0; }
    int64_t keys_size() const { return call.heads * call.points * key_numbers; }

    // What a query without a pose, or with that of the output, has for a query pose.
    int64_t own_query_pose(int64_t pose) const { return call.query_poses == 1 ? 0 : pose; }

    // How many keys a group has: what fills up is behind them.
    int64_t num_keys(const int64_t* keys) const {
        return std::partition_point(keys, keys + call.group_keys, [](int64_t key) { return key >= 0; }) - keys;
    }

    int64_t query_offset(const ScoreRow& row) const {
        return (row.query * call.query_poses + row.query_pose) * call.channels;
    }
    int64_t out_offset(const ScoreRow& row) const { return (row.query * call.num_poses + row.pose) * call.channels; }
    int64_t sums_offset(const ScoreRow& row) const { return (row.query * score_rows + row.index) * 2; }
    // Of the first pose of the keys: one in extra_step() from the next.
    int64_t extra_offset(const ScoreRow& row, int64_t head, int64_t group) const {
        const int64_t table = (head * score_rows + row.index) * call.extra_poses * call.groups + group;
        return (table * call.group_queries + row.member) * call.group_keys;
    }
    // Of the features of a query, in those of one function: groups that follow each other share them, and on rings all
    // queries of a group.
    int64_t features_offset(int64_t group, int64_t member) const {
        return (group / repeats * call.feature_queries + (call.ring ? 0 : member)) * call.group_keys;
    }
    int64_t features_stride() const { return call.feature_groups * call.feature_queries * call.group_keys; }
    // Of numbers of a group, a query and a key.
    int64_t pairs_offset(int64_t group, int64_t member) const {
        return (group * call.group_queries + member) * call.group_keys;
    }
    int64_t extra_step() const { return call.extra_poses == 1 ? 0 : num_queries * call.group_keys; }
    int64_t extra_size() const { return call.heads * score_rows * call.extra_poses * num_queries * call.group_keys; }

    const Arguments& call;
    const int64_t num_queries, key_numbers;  // G * A, P * C
    const int64_t summed_poses;              // query poses that contribute to an output pose
    const int64_t score_rows;                // of a query
    const bool shared_query;                 // whether all output poses of a query share its products with keys
    const int64_t grad_rows;                 // of a query: rows of gradients of scores
    const int64_t repeats;                   // groups, one after the other, that have the same features
    const int64_t padded_keys;               // K in whole vectors
    const int64_t row_stride;  // of a row of scores: one vector more, since that at the end of a pose reaches beyond it
    // Whether a task is a group: no two groups have keys in common, there are several for each thread, and the scores of
    // one fit into the cache.
    const bool whole_groups;
    // The number of copies of the gradients of keys, one for each part of the tasks. Together they hold no more numbers
    // than the weights of all queries. 0 where the weights are kept instead, for a pass over the keys.
    const int64_t copies;
    const int64_t slots, group_tasks;        // queries of a group that are taken at once, and how often that is

    // Of all queries and output poses, and of all queries and rows of gradients, for a pass over the keys.
    Buffer<T> weights, grad_scores;

  private:
    static constexpr int64_t line = LINE / sizeof(T);
    // The numbers that a group holds.
    int64_t group_size() const {
        const int64_t rows = (call.num_poses + grad_rows) * row_stride, scores = call.heads * score_rows;
        return call.group_queries * std::max(rows, scores * call.group_keys);
    }
    // For any number of threads the same: a result depends on what is added up at once.
    int64_t affordable_copies() const {
        const int64_t rows = num_queries * (call.num_poses + grad_rows);
        const int64_t number = rows * call.group_keys / std::max<int64_t>(1, 2 * call.channels * call.points);
        return number < FEWEST_COPIES ? 0 : std::min(number, MOST_COPIES);
    }
    int64_t most_slots() const {
        return std::max<int64_t>(1, CACHED_NUMBERS / 2 / (call.heads * score_rows * padded_keys));
    }
    int64_t even_slots() const { return std::max<int64_t>(8, num_queries / 32 / GROUP * GROUP); }
};

// Rows of numbers, a given distance apart.
template <class T> struct Rows {
    Rows() = default;
    Rows(int64_t number, int64_t stride) : stride(stride), numbers(number * stride) {}
    T* operator[](int64_t row) const { return numbers.data + row * stride; }
    int64_t stride = 0;
    Buffer<T> numbers;
};

}  // namespace
