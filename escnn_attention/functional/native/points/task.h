// Some queries of a group and the keys that they see, in one head after the other.

#pragma once

#include <vector>

#include "layout.h"

namespace {

template <class T> struct Task {
    static constexpr int width = WIDTH<T>;

    explicit Task(const Layout<T>& layout) : layout(layout), call(layout.call) {}

    // The task of this number. False where no query sees a key.
    bool begin(int64_t number) {
        group = number / layout.group_tasks;
        keys = call.keys + group * call.group_keys;
        num_keys = layout.num_keys(keys);
        length = call.key_poses * num_keys;
        padded = (length + width - 1) / width * width;
        members.clear();
        if (num_keys == 0) return false;
        for (int lane = 0; lane < width; lane++) last[lane] = lane < (num_keys - 1) % width + 1 ? -1 : 0;
        first = number % layout.group_tasks * layout.slots;
        end = std::min(call.group_queries, first + layout.slots);
        for (int64_t member = first; member < end; member++)
            if (call.queries[group * call.group_queries + member] >= 0) members.push_back(member);
        return !members.empty();
    }

    // By how many places a query is ahead of the first of its ring.
    int64_t turn(int64_t slot) const {
        return call.ring ? call.queries[group * call.group_queries + members[slot]] % call.ring : 0;
    }
    // Calls f(to, from, number) for the stretches of a row of keys, in order, whose rings are turned by so many places.
    template <class F> void each_stretch(int64_t turn, F f) const {
        if (turn == 0) return f(0, 0, num_keys);
        for (int64_t first = 0; first < num_keys; first += call.ring) {
            f(first, first + call.ring - turn, turn);
            f(first + turn, first, call.ring - turn);
        }
    }

    int64_t query(int64_t slot, int64_t head) const {
        return head * layout.num_queries + group * call.group_queries + members[slot];
    }
    ScoreRow row(int64_t slot, int64_t pose, int64_t query_pose) const {
        const int64_t index = call.sum_query_poses ? pose * call.query_poses + query_pose : pose;
        const int64_t grad_index = call.sum_query_poses || layout.shared_query ? query_pose : pose;
        return {query(slot, head), members[slot], slot, pose, query_pose, index, grad_index};
    }

    // Calls f(number, rows) for all rows of scores, several at a time, where query poses are not summed over.
    template <class F> void each_own(F f) const {
        const int64_t rows = int64_t(members.size()) * call.num_poses;
        for (int64_t first = 0; first < rows; first += GROUP)
            dispatch(std::min<int64_t>(GROUP, rows - first), [&](auto number) {
                ScoreRow block[number];
                for (int i = 0; i < number; i++) {
                    const int64_t slot = (first + i) / call.num_poses, pose = (first + i) % call.num_poses;
                    block[i] = row(slot, pose, layout.own_query_pose(pose));
                }
                f(number, block);
            });
    }
    // Calls f(number, rows) for the single query pose of all queries, several at a time.
    template <class F> void each_query(F f) const {
        const int64_t queries = members.size();
        for (int64_t first = 0; first < queries; first += GROUP)
            dispatch(std::min<int64_t>(GROUP, queries - first), [&](auto number) {
                ScoreRow block[number];
                for (int i = 0; i < number; i++) block[i] = row(first + i, 0, 0);
                f(number, block);
            });
    }
    // Calls f(number, rows) for all query poses of a query seen from an output pose, several at a time.
    template <class F> void each_query_pose(int64_t slot, int64_t pose, F f) const {
        for (int64_t first = 0; first < call.query_poses; first += GROUP)
            dispatch(std::min<int64_t>(GROUP, call.query_poses - first), [&](auto number) {
                ScoreRow block[number];
                for (int i = 0; i < number; i++) block[i] = row(slot, pose, first + i);
                f(number, block);
            });
    }

    const Layout<T>& layout;
    const Arguments& call;
    int64_t group = 0, head = 0, first = 0, end = 0;  // the members from the first on are taken at once
    const int64_t* keys = nullptr;
    int64_t num_keys = 0, length = 0, padded = 0;  // keys; with their poses; in whole vectors
    typename Lanes<T>::I last;                     // which lanes of the last vector of a pose are keys
    std::vector<int64_t> members;                  // of the group, that are no filling
};

}  // namespace
