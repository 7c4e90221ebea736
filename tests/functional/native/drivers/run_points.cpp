// Attention between points in all its modes, forward and backward, on memory of exactly the size that a call needs: a
// program for sanitizers. It fails where a gradient is not finite.

#include <cstdio>
#include <cstdlib>

#include "points.cpp"
#include "room.h"

namespace {

struct Modes {
    bool sum_query_poses, normalize_by_count, exclusive_keys, content, features, pose, extra, shared, envelope, ring;
    double dropout;
};

// One call and its memory.
class Call {
  public:
    explicit Call(const Modes& modes, int64_t keys) : modes(modes) {
        const int64_t line = 64 / sizeof(NUMBER);
        a.heads = 2, a.groups = 9, a.group_queries = modes.ring ? 6 : 3, a.group_keys = keys, a.points = a.groups * keys;
        a.num_poses = a.query_poses = 5, a.key_poses = 3;
        // With few channels parts of the queries have gradients of keys of their own.
        a.channels = modes.ring ? 2 : 7;
        a.num_features = modes.features ? 6 : 0, a.feature_heads = modes.features ? heads() : 0;
        a.feature_groups = modes.features ? a.groups : 0;
        a.feature_queries = !modes.features ? 0 : modes.ring ? 1 : a.group_queries,
        a.ring = !modes.ring ? 0 : keys % 3 ? keys : 3;
        a.pose_heads = modes.pose ? heads() : 0, a.padded_key_poses = modes.pose ? line : 0;
        a.extra_poses = !modes.extra ? 0 : modes.shared ? 1 : a.key_poses;
        a.sum_query_poses = modes.sum_query_poses, a.normalize_by_count = modes.normalize_by_count;
        a.exclusive_keys = modes.exclusive_keys, a.threads = 3, a.dropout = modes.dropout;
        a.seed = modes.dropout ? &seed : nullptr;
        queries = a.heads * a.groups * a.group_queries;
        score_rows = a.num_poses * (a.sum_query_poses ? a.query_poses : 1);
        index();
    }

    // Whether all gradients are finite, and the call found the memory that it needed.
    bool run() {
        inputs();
        a.out = room.zeros(queries * a.num_poses * a.channels);
        a.sums = room.zeros(queries * score_rows * 2);
        if (escnn_attention(&a)) return false;
        a.grad = room.random(queries * a.num_poses * a.channels);
        gradients();
        return !escnn_attention(&a) && room.is_finite();
    }

  private:
    int64_t heads() const { return modes.shared ? 1 : a.heads; }
    // Queries and keys, of which every other group has fewer, but of whole rings, and one has no keys.
    void index() {
        for (int64_t group = 0; group < a.groups; group++) {
            const int64_t keys = group == 4 ? 0 : a.group_keys - (modes.ring ? 0 : group % 2 * (a.group_keys / 2));
            for (int64_t i = 0; i < a.group_queries; i++) asking.push_back(i < a.group_queries - group % 2 ? i : -1);
            for (int64_t i = 0; i < a.group_keys; i++) seen.push_back(i < keys ? group * a.group_keys + i : -1);
        }
        a.queries = asking.data(), a.keys = seen.data();
    }
    int64_t size_q() const { return queries * a.query_poses * a.channels; }
    int64_t size_k() const { return a.heads * a.points * a.key_poses * a.channels; }
    int64_t size_reads() const { return queries * a.query_poses * a.num_features; }
    int64_t size_features() const {
        return a.feature_heads * a.num_poses * a.num_features * a.groups * a.feature_queries * a.group_keys;
    }
    int64_t size_pose() const { return a.pose_heads * a.num_poses * a.channels * a.padded_key_poses; }
    int64_t size_pairs() const { return a.groups * a.group_queries * a.group_keys; }
    int64_t size_extra() const { return score_rows * a.extra_poses * queries * a.group_keys; }

    void inputs() {
        if (modes.content) a.q = room.random(size_q()), a.k = room.random(size_k());
        a.v = room.random(size_k());
        if (modes.features) a.reads = room.random(size_reads()), a.features = room.random(size_features());
        if (modes.pose) a.pose = room.random(size_pose());
        if (modes.extra) a.extra = room.random(size_extra());
        if (modes.envelope) {
            NUMBER* envelope = room.random(size_pairs());
            for (int64_t i = 0; i < size_pairs() - missing; i++) envelope[i] = std::max(envelope[i], NUMBER(0));
            a.envelope = envelope;
        }
        a.log_measure = room.random(a.points * a.key_poses);
    }
    void gradients() {
        if (modes.content) a.grad_q = room.zeros(size_q()), a.grad_k = room.zeros(size_k());
        a.grad_v = room.zeros(size_k());
        if (modes.features) a.grad_reads = room.zeros(size_reads()), a.grad_features = room.zeros(size_features());
        if (modes.pose) a.grad_pose = room.zeros(size_pose());
        if (modes.envelope) a.grad_envelope = room.zeros(size_pairs());
        if (modes.extra) a.grad_extra = room.zeros(size_extra());
    }

    const Modes modes;
    const int64_t seed = 1234567890123;
    Arguments a{};
    int64_t queries, score_rows;
    std::vector<int64_t> asking, seen;
    Room room;
};

}  // namespace

// Of every so many modes one, if a number is given, from the mode of a second number on.
int main(int number, char** arguments) {
    const int every = number > 1 ? std::atoi(arguments[1]) : 1, first = number > 2 ? std::atoi(arguments[2]) : 0;
    for (int bits = first; bits < 256; bits += every) {
        const auto bit = [&](int i) { return bool(bits >> i & 1); };
        const bool content = bit(3) || bit(5) || !bit(6);
        const bool envelope = bit(0) != bit(4);
        const bool ring = bit(4) && bit(3);
        const double dropout = bit(7) ? 0.25 : 0.0;
        const Modes modes{bit(0), bit(1), bit(2), content, bit(4), bit(5), bit(6), bit(7), envelope, ring, dropout};
        for (int64_t keys : {1, 6, 17})
            if (!Call(modes, keys).run()) return std::printf("failed: modes %d, %d keys\n", bits, int(keys)), 1;
    }
}
