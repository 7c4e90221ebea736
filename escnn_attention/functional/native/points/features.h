// Scores of location: what features of a query and a key are worth to what the query reads of them. They are given, or
// made here: the SiLU of a linear map of what the query sees of the key.

#pragma once

#include <vector>

#include "matmul.h"
#include "task.h"

namespace {

// One row (keys) for every row of scores of all heads. In the backward pass the gradients of the scores take its place.
template <class T> struct FeatureScores {
    using W = V<T>;
    static constexpr int width = WIDTH<T>;
    static constexpr int64_t chunk = 4 * width;  // keys whose features are made at once

    explicit FeatureScores(const Layout<T>& layout) : layout(layout), call(layout.call) {
        // A vector more, which the last stretch of a ring reaches; and rows that do not all take the same lines of the
        // cache.
        const int64_t more = layout.padded_keys + LINE / int64_t(sizeof(T));
        if (call.reads) rows = Rows<T>(layout.slots * call.heads * layout.score_rows, more);
        if (!call.relation) return;
        const int64_t stride = (more + chunk - 1) / chunk * chunk;
        seen = Rows<T>(call.coordinates, stride), made = Rows<T>(call.num_features, stride);
        if (!has_layer_gradients()) return;
        slopes = Rows<T>(call.num_features, stride);
        totals = Buffer<W>(call.num_features * (call.coordinates + 1));
    }

    T* row(const ScoreRow& of, int64_t head) const { return row(of.slot, head, of.index); }
    bool needs_gradients() const { return call.grad_reads || call.grad_features || has_layer_gradients(); }

    void forward(const Task<T>& task) {
        each_table<false>(task, [&](const Table& table) {
            int64_t key = 0;
            for (; key + width < task.num_keys; key += 2 * width)
                each_block([&](auto number, const Reader* block) { multiply<number, 2>(block, table, key); });
            if (key < task.num_keys)
                each_block([&](auto number, const Reader* block) { multiply<number, 1>(block, table, key); });
        });
    }
    // Gradients of the layer, (F, D) and (F), are added to these.
    void backward(const Task<T>& task, T* grad_layer, T* grad_shift) {
        each_table<true>(task, [&](const Table& table) {
            if (call.grad_reads)
                each_block([&](auto number, const Reader* block) {
                    for (int64_t f = 0; f < call.num_features; f += BLOCK) add_to_reads<number>(task, block, table, f);
                });
            if (!call.grad_features && !has_layer_gradients()) return;
            int64_t key = 0;
            for (; key + width < task.num_keys; key += 2 * width) write_features<2>(task, table, key);
            if (key < task.num_keys) write_features<1>(task, table, key);
            if (call.relation) add_to_layer(task);
        });
        if (!has_layer_gradients()) return;
        const W* total = totals.data;
        for (int64_t f = 0; f < call.num_features; f++, total++) {
            for (int64_t i = 0; i < call.coordinates; i++, total++)
                if (grad_layer) grad_layer[f * call.coordinates + i] += sum<T>(*total);
            if (grad_shift) grad_shift[f] += sum<T>(*total);
        }
        totals.clear();
    }

  private:
    // The features (F, keys) of a query seen from an output pose.
    struct Table {
        const T* features;
        int64_t stride, offset;  // from one feature to the next, and of the first in all features
    };
    // A row of scores that reads them.
    struct Reader {
        const T* reads;
        T *grad_reads, *row;
    };

    bool has_layer_gradients() const { return call.grad_layer || call.grad_shift; }
    // One, or as many as heads.
    int64_t num_tables() const { return call.relation ? 1 : call.feature_heads; }
    T* row(int64_t slot, int64_t head, int64_t index) const {
        return rows[(slot * call.heads + head) * layout.score_rows + index];
    }

    // Calls f for all tables; `readers` are then those that read it.
    template <bool BACKWARD, class F> void each_table(const Task<T>& task, F f) {
        const int64_t slots = task.members.size(), step = call.ring ? slots : 1;
        for (int64_t head = 0; head < num_tables(); head++)
            for (int64_t slot = 0; slot < slots; slot += step)
                for (int64_t pose = 0; pose < call.num_poses; pose++) {
                    const Table table = call.relation ? make_table(task, slot, pose, BACKWARD && has_layer_gradients())
                                                      : find_table(task, head, slot, pose);
                    readers.clear();
                    for (int64_t i = 0; i < step; i++) add_readers(task, head, slot + i, pose);
                    f(table);
                }
    }
    void add_readers(const Task<T>& task, int64_t table_head, int64_t slot, int64_t pose) {
        const bool shared = num_tables() == 1;
        for (int64_t head = shared ? 0 : table_head; head < (shared ? call.heads : table_head + 1); head++)
            for (int64_t i = 0; i < layout.summed_poses; i++) {
                const int64_t query_pose = call.sum_query_poses ? i : layout.own_query_pose(pose);
                const int64_t query = task.query(slot, head) * call.query_poses + query_pose;
                const int64_t offset = query * call.num_features;
                readers.push_back({as<T>(call.reads) + offset,
                                   call.grad_reads ? as<T>(call.grad_reads) + offset : nullptr,
                                   row(slot, head, pose * layout.summed_poses + i)});
            }
    }
    // Whole vectors can be read from a table: the last of all is copied.
    Table find_table(const Task<T>& task, int64_t head, int64_t slot, int64_t pose) {
        const int64_t stride = layout.features_stride(), features = call.num_features;
        const int64_t first = (head * call.num_poses + pose) * features;
        const int64_t offset = first * stride + layout.features_offset(task.group, task.members[slot]);
        const T* start = as<T>(call.features) + offset;
        const int64_t size = call.feature_heads * call.num_poses * features * stride;
        if (offset + (features - 1) * stride + layout.padded_keys <= size) return {start, stride, offset};
        if (copied.numbers.size == 0) copied = Rows<T>(features, layout.padded_keys);
        for (int64_t f = 0; f < features; f++) std::copy_n(start + f * stride, task.num_keys, copied[f]);
        return {copied[0], copied.stride, offset};
    }
    // A table of features that are made here, on demand with the derivatives of the SiLU.
    Table make_table(const Task<T>& task, int64_t slot, int64_t pose, bool slopes_too) const {
        const int64_t stride = layout.features_stride(), coordinates = call.coordinates;
        const int64_t offset = layout.features_offset(task.group, task.members[slot]);
        const T *start = as<T>(call.relation) + pose * coordinates * stride + offset;
        for (int64_t i = 0; i < coordinates; i++) {
            std::copy_n(start + i * stride, task.num_keys, seen[i]);
            std::fill(seen[i] + task.num_keys, seen[i] + seen.stride, T(0));
        }
        const T *layer = as<T>(call.layer), *shift = as<T>(call.shift);
        for (int64_t f = 0; f < call.num_features; f++, layer += coordinates)
            for (int64_t key = 0; key < task.num_keys; key += chunk)
                dispatch((std::min(chunk, task.num_keys - key) + width - 1) / width, [&](auto number) {
                    constexpr int N = number;
                    W y[N], s[N];
                    for (int v = 0; v < N; v++) y[v] = all(shift[f]);
                    for (int64_t i = 0; i < coordinates; i++)
                        for (int v = 0; v < N; v++) y[v] += layer[i] * load(seen[i] + key + v * width);
                    sigmoid<T, N>(y, s);
                    for (int v = 0; v < N; v++) y[v] *= s[v], store(made[f] + key + v * width, y[v]);
                    for (int v = 0; slopes_too && v < N; v++)
                        store(slopes[f] + key + v * width, s[v] + y[v] * (T(1) - s[v]));
                });
        return {made[0], made.stride, 0};
    }
    // To the gradients of the layer, by those of what goes into the SiLU, which `slopes` has then.
    void add_to_layer(const Task<T>& task) const {
        W* to = totals.data;
        for (int64_t f = 0; f < call.num_features; f++) {
            const T* grad = slopes[f];
            for (int64_t i = 0; i < call.coordinates; i++, to++)
                for (int64_t key = 0; key < task.num_keys; key += width) *to += load(grad + key) * load(seen[i] + key);
            for (int64_t key = 0; key < task.num_keys; key += width) *to += load(grad + key);
            to++;
        }
    }
    // Calls f(number, readers), several at a time.
    template <class F> void each_block(F f) const {
        const int64_t all = readers.size();
        for (int64_t first = 0; first < all; first += GROUP)
            dispatch(std::min<int64_t>(GROUP, all - first), [&](auto number) { f(number, readers.data() + first); });
    }

    template <int R, int B> inline void multiply(const Reader* block, const Table& table, int64_t key) const {
        W y[R][B];
        clear(y);
        const int64_t features = call.num_features;
        for (int64_t f = 0; f < features; f++) {
            W x[B];
            for (int b = 0; b < B; b++) x[b] = in_register<T>(load(table.features + f * table.stride + key + b * width));
            for (int i = 0; i < R; i++)
                for (int b = 0; b < B; b++) y[i][b] += block[i].reads[f] * x[b];
        }
        for (int i = 0; i < R; i++)
            for (int b = 0; b < B; b++) store(block[i].row + key + b * width, y[i][b]);
    }
    // To the gradients of what is read of some features.
    template <int R>
    inline void add_to_reads(const Task<T>& task, const Reader* block, const Table& table, int64_t first) const {
        const T* feature[BLOCK];
        for (int b = 0; b < BLOCK; b++)
            feature[b] = table.features + std::min(first + b, call.num_features - 1) * table.stride;
        W y[GROUP * BLOCK];
        clear(y);
        for (int64_t key = 0; key < task.num_keys; key += width) {
            W x[BLOCK];
            for (int b = 0; b < BLOCK; b++) x[b] = load(feature[b] + key);
            // What follows the last key belongs to another query, and may be no number.
            if (key + width > task.num_keys)
                for (int b = 0; b < BLOCK; b++) x[b] = task.last ? x[b] : W{};
            for (int b = 0; b < BLOCK; b++) x[b] = in_register<T>(x[b]);
            for (int i = 0; i < R; i++) {
                const W grad = in_register<T>(load(block[i].row + key));
                for (int b = 0; b < BLOCK; b++) y[i * BLOCK + b] += grad * x[b];
            }
        }
        T total[GROUP * BLOCK];
        sum_lanes<T>(y, total);
        for (int i = 0; i < R; i++)
            for (int64_t b = 0; b < std::min<int64_t>(BLOCK, call.num_features - first); b++)
                block[i].grad_reads[first + b] += total[i * BLOCK + b];
    }
    // The gradients of features at B vectors of keys, from all readers. Those of several tasks are added.
    template <int B> void write_features(const Task<T>& task, const Table& table, int64_t key) const {
        int64_t first = 0;
        for (; first + BLOCK < call.num_features; first += 2 * BLOCK)
            write_features<B, 2 * BLOCK>(task, table, first, key);
        if (first < call.num_features) write_features<B, BLOCK>(task, table, first, key);
    }
    template <int B, int F>
    void write_features(const Task<T>& task, const Table& table, int64_t first, int64_t key) const {
        W y[F][B];
        clear(y);
        int64_t feature[F];
        for (int i = 0; i < F; i++) feature[i] = std::min(first + i, call.num_features - 1);
        for (const Reader& reader : readers) {
            W grad[B];
            for (int b = 0; b < B; b++) grad[b] = in_register<T>(load(reader.row + key + b * width));
            for (int i = 0; i < F; i++)
                for (int b = 0; b < B; b++) y[i][b] += reader.reads[feature[i]] * grad[b];
        }
        if (call.relation) {
            for (int i = 0; i < std::min<int64_t>(F, call.num_features - first); i++)
                for (int b = 0; b < B; b++) {
                    T* at = slopes[first + i] + key + b * width;
                    store(at, load(at) * y[i][b]);
                }
            return;
        }
        const bool adds = layout.repeats > 1 || call.ring;
        T* to = as<T>(call.grad_features) + table.offset + first * layout.features_stride() + key;
        for (int i = 0; i < std::min<int64_t>(F, call.num_features - first); i++, to += layout.features_stride())
            for (int b = 0; b < B; b++) {
                const int64_t left = task.num_keys - key - b * width;
                T* at = to + b * width;
                if (left >= width)
                    store(at, adds ? load(at) + y[i][b] : y[i][b]);
                else
                    for (int64_t j = 0; j < left; j++) at[j] = adds ? at[j] + y[i][b][j] : y[i][b][j];
            }
    }

    const Layout<T>& layout;
    const Arguments& call;
    Rows<T> rows, copied;
    Rows<T> seen, made, slopes;  // (D, keys) and (F, keys) of a query
    Buffer<W> totals;            // (F, D + 1)
    std::vector<Reader> readers;
};

}  // namespace
