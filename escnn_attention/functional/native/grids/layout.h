// Where the positions of an image lie in memory, for loops whose lanes are queries side by side.
//
// A band of rows of an image is laid out with the positions as the last axis, `pad` places of nothing after every row.
// Then the key of a query at a given offset lies at a given distance from the query, for all lanes alike, at the
// borders too. On a torus the keys across an edge lie in these places again: `pad` has room for those of both edges.

#pragma once

#include <algorithm>
#include <vector>

#include "../buffer.h"
#include "arguments.h"

namespace {

// Positions of a row of the first axis that lie side by side: of the first of them its number and its place.
struct Run {
    int64_t position, place, length;
};

// An image with all but its first axis padded, in bands of rows of the first.
struct Layout {
    // Vectors have `width` numbers of `size` bytes each.
    Layout(const Arguments& call, int width, int size)
            : pad(call.pad), reach(call.reach), rows(call.rows), num_rows(call.shape[0]), wraps(call.torus_from == 0) {
        std::vector<int64_t> stride(call.dim, 1);
        for (int64_t i = call.dim - 2; i >= 0; i--) stride[i] = stride[i + 1] * (call.shape[i + 1] + pad);
        row = stride[0];
        int64_t last = 0;
        for (int64_t i = 0; i < call.dim; i++) {
            positions *= call.shape[i], start += reach * stride[i];
            if (i) positions_of_row *= call.shape[i], last += (call.shape[i] - 1) * stride[i];
        }
        add_runs(call, stride, 0, runs);
        add_runs(call, stride, call.torus_from < call.dim ? reach : 0, key_runs);
        vectors = ((rows - 1) * row + last + width) / width;
        queries = whole_lines(vectors * width, LINE / size);
        keys = whole_lines(2 * start + vectors * width, LINE / size);
        for (int64_t offset = 0; offset < call.offsets; offset++) {
            int64_t flat = 0;
            for (int64_t i = 0; i < call.dim; i++) flat += call.steps[offset * call.dim + i] * stride[i];
            distance.push_back(flat);
        }
    }

    // Calls f(position, place, length) for the runs of positions of a band of queries, or of their keys, which lie in
    // the rows around it, too. Places are counted from the first query. On a torus a key may lie at several places.
    template <class F> void each_run(int64_t band, bool of_keys, F f) const {
        const std::vector<Run>& some = of_keys ? key_runs : runs;
        const int64_t margin = of_keys ? reach : 0, left = num_rows - band;
        const int64_t first = wraps ? -margin : std::max(-margin, -band);
        const int64_t last = wraps ? std::min(rows, left) + margin : std::min(rows + margin, left);
        for (int64_t y = first; y < last; y++) {
            const int64_t from = modulo(band + y, num_rows) * positions_of_row;
            for (const Run& run : some) f(from + run.position, y * row + run.place, run.length);
        }
    }

    const int64_t pad, reach, rows, num_rows;     // places after every row; rows around a band, of it and of the image
    const bool wraps;                             // whether the last row of the image lies beside the first
    int64_t positions = 1, positions_of_row = 1;  // of the image, and of a row of its first axis
    int64_t row;                                  // places of a row
    int64_t start = 0;                            // the place of the first query among those of the keys
    int64_t vectors, queries, keys;               // vectors of queries; places for queries, and for keys
    std::vector<Run> runs, key_runs;              // of a row, for queries and for keys
    std::vector<int64_t> distance;                // from a query to its key at each offset

  private:
    static int64_t modulo(int64_t n, int64_t m) { return (n % m + m) % m; }

    // The runs of a row, with so many positions across the edges of all axes but the first.
    static void add_runs(const Arguments& call, const std::vector<int64_t>& stride, int64_t margin,
                         std::vector<Run>& to) {
        if (call.dim == 1) return to.push_back({0, 0, 1});
        std::vector<Run> lines = {{0, 0, 1}};  // the positions of all axes between the first and the last
        for (int64_t i = 1; i < call.dim - 1; i++) {
            std::vector<Run> longer;
            for (const Run& line : lines)
                for (int64_t x = -margin; x < call.shape[i] + margin; x++)
                    longer.push_back({line.position * call.shape[i] + modulo(x, call.shape[i]),
                                      line.place + x * stride[i], 1});
            lines = longer;
        }
        const int64_t side = call.shape[call.dim - 1];
        for (const Run& line : lines)
            for (int64_t x = -margin, length; x < side + margin; x += length) {
                const int64_t at = modulo(x, side);
                length = std::min(side - at, side + margin - x);
                to.push_back({line.position * side + at, line.place + x, length});
            }
    }

    // An odd number of lines of the cache: rows at a distance of a power of two would evict each other.
    static int64_t whole_lines(int64_t n, int64_t line) { return ((n + line - 1) / line | 1) * line; }
};

}  // namespace
