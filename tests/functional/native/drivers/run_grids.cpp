// Attention on grids in all its modes, forward and backward, on memory of exactly the size that a call needs: a program
// for sanitizers. It fails where a result is not finite.

#include <cstdio>
#include <cstdlib>

#include "grids.cpp"
#include "room.h"

namespace {

struct Modes {
    bool everything, sum_query_poses, table, pose, shared;  // table: of offsets, or waves where queries see everything
    double dropout;
    int64_t torus_from;  // the first axis of which both ends meet; more than there are for none
    bool pair;           // whether keys lie on another grid: each cell has 2 queries along an axis, and 3 keys
};

class Call {
  public:
    Call(const Modes& modes, const std::vector<int64_t>& cells, int64_t query_poses, int64_t chunk)
            : modes(modes), shape(cells) {
        key_shape = shape;
        for (auto& n : shape) n = modes.pair ? 2 * n - 1 : n, positions *= n;
        for (auto& n : key_shape) n *= modes.pair ? 3 : 1, key_positions *= n;
        a.heads = 3, a.images = 5, a.query_poses = query_poses, a.key_poses = 3, a.channels = 7;
        a.num_poses = modes.sum_query_poses ? 4 : query_poses;
        a.sum_query_poses = modes.sum_query_poses, a.dropout = modes.dropout, a.seed = modes.dropout ? &seed : nullptr, a.scale = 0.4;
        a.parts = 2, a.threads = 3, a.everything = modes.everything, a.in_window = !modes.everything;
        a.by_position = modes.everything && modes.torus_from == 1;
        a.positions = positions, a.key_positions = key_positions;
        a.wave_positions = positions + (modes.pair ? key_positions : 0);
        a.queries_of_cell = modes.pair && !modes.everything ? 2 : 1;
        a.keys_of_cell = modes.pair && !modes.everything ? 3 : 1, a.chunk = chunk;
        if (modes.everything) {
            shape = {positions}, key_shape = {key_positions}, starts = {0, 0};
            a.num_waves = modes.table ? 6 : 0;
        } else {
            window();
        }
        a.dim = int64_t(shape.size()), a.torus_from = std::min(modes.torus_from, a.dim);
        a.shape = shape.data(), a.key_shape = key_shape.data(), a.steps = steps.data(), a.starts = starts.data();
        a.spatial_heads = a.pose_heads = a.wave_heads = modes.shared ? 1 : a.heads;
    }

    // Whether all results are finite, and the call found the memory that it needed.
    bool run() {
        const int64_t places = a.heads * a.images * positions, of_keys = a.heads * a.images * key_positions;
        const int64_t of_q = places * a.query_poses * a.channels, of_k = of_keys * a.key_poses * a.channels;
        const int64_t of_out = places * a.num_poses * a.channels, of_amplitudes = places * a.query_poses * a.num_waves;
        const int64_t tables = a.pose_heads * a.num_poses;
        const int64_t of_spatial = tables * a.offsets * a.channels, of_waves = tables * a.wave_positions * a.num_waves;
        const int64_t of_pose = tables * a.key_poses * a.channels;
        const bool spatial = modes.table && !modes.everything, waves = modes.table && modes.everything;
        a.q = room.random(of_q), a.k = room.random(of_k), a.v = room.random(of_k);
        if (spatial) a.spatial = room.random(of_spatial);
        if (waves) a.waves = room.random(of_waves), a.amplitudes = room.random(of_amplitudes);
        if (modes.pose) a.pose = room.random(of_pose);
        const int64_t rows = a.query_poses * (modes.sum_query_poses ? a.num_poses : 1);
        a.out = room.zeros(of_out), a.sums = room.zeros(places * rows * 2);
        if (escnn_attention(&a)) return false;
        a.grad = room.random(of_out);
        a.grad_q = room.zeros(of_q), a.grad_k = room.zeros(of_k), a.grad_v = room.zeros(of_k);
        if (spatial) a.grad_spatial = room.zeros<double>(of_spatial);
        if (waves) a.grad_waves = room.zeros<double>(of_waves), a.grad_amplitudes = room.zeros(of_amplitudes);
        if (modes.pose) a.grad_pose = room.zeros<double>(of_pose);
        return !escnn_attention(&a) && room.is_finite();
    }

  private:
    // Offsets of at most one cell along each axis, to a key of each cell.
    void window() {
        int64_t each = 1, slots = 1, key_slots = 1;
        for (size_t axis = 0; axis < shape.size(); axis++)
            each *= 3, slots *= a.queries_of_cell, key_slots *= a.keys_of_cell;
        for (int64_t slot = 0; slot < slots; slot++)
            for (int64_t offset = 0; offset < each; offset++, a.offsets++) {
                for (int64_t axis = 0, rest = offset; axis < int64_t(shape.size()); axis++, rest /= 3)
                    steps.push_back(rest % 3 - 1);
                steps.push_back(a.offsets % key_slots), steps.push_back(a.offsets);
            }
        a.neighbours = a.offsets;
        for (int64_t slot = 0; slot <= slots; slot++) starts.push_back(slot * each);
    }

    const Modes modes;
    const int64_t seed = 1234567890123;
    Arguments a{};
    int64_t positions = 1, key_positions = 1;
    std::vector<int64_t> shape, key_shape, steps, starts;
    Room room;
};

}  // namespace

// Of every so many modes one, if a number is given, from the mode of a second number on.
int main(int number, char** arguments) {
    const int every = number > 1 ? std::atoi(arguments[1]) : 1, first = number > 2 ? std::atoi(arguments[2]) : 0;
    for (int bits = first; bits < 256; bits += every) {
        const auto bit = [&](int i) { return bool(bits >> i & 1); };
        const Modes modes{bit(0), bit(1), bit(2), bit(3), bit(4), bit(5) ? 0.25 : 0.0, bits / 64 % 3 ? bits / 64 - 1 : 9, bits >= 192};
        for (const auto& shape : {std::vector<int64_t>{1}, {37}, {3, 5}, {2, 3, 4}}) {
            // Queries that see everything know of no axes: of so many pairs none is new.
            if (modes.everything && modes.pair && shape.size() == 3) continue;
            for (int64_t query_poses : {1, 5})
                for (int64_t chunk : {1, 1 << 20})  // bands of an image, and images side by side
                    if (!Call(modes, shape, query_poses, chunk).run())
                        return std::printf("failed: modes %d, %d axes, %d query poses, chunk %d\n", bits,
                                           int(shape.size()), int(query_poses), int(chunk)),
                               1;
        }
    }
}
