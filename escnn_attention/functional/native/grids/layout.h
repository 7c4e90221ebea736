// Where the positions of an image lie in memory, for loops whose lanes are queries side by side.
//
// A band of rows of an image is laid out with the positions as the last axis, `pad` places of nothing after every row.
// Then the key of a query at a given offset lies at a given distance from the query, for all lanes alike, at the
// borders too.

#pragma once

#include <algorithm>
#include <vector>

#include "../buffer.h"
#include "arguments.h"

namespace {

// An image with all but its first axis padded, in bands of rows of the first.
struct Layout {
    // Vectors have `width` numbers of `size` bytes each.
    Layout(const Arguments& call, int width, int size) : pad(call.pad), rows(call.rows), num_rows(call.shape[0]) {
        std::vector<int64_t> stride(call.dim, 1);
        for (int64_t i = call.dim - 2; i >= 0; i--) stride[i] = stride[i + 1] * (call.shape[i + 1] + pad);
        row = stride[0];
        int64_t last = 0;
        for (int64_t i = 0; i < call.dim; i++) {
            positions *= call.shape[i], start += pad * stride[i];
            if (i) positions_of_row *= call.shape[i], last += (call.shape[i] - 1) * stride[i];
        }
        run = call.dim > 1 ? call.shape[call.dim - 1] : 1;
        for (int64_t n = 0; n < positions_of_row; n += run) {
            int64_t flat = 0;
            for (int64_t i = call.dim - 1, rest = n; i > 0; i--)
                flat += rest % call.shape[i] * stride[i], rest /= call.shape[i];
            runs.push_back(flat);
        }
        vectors = ((rows - 1) * row + last + width) / width;
        queries = whole_lines(vectors * width, LINE / size);
        keys = whole_lines(2 * start + vectors * width, LINE / size);
        for (int64_t offset = 0; offset < call.offsets; offset++) {
            int64_t flat = 0;
            for (int64_t i = 0; i < call.dim; i++) flat += call.steps[offset * call.dim + i] * stride[i];
            distance.push_back(flat);
        }
    }

    // Calls f(position, place, length) for the runs of positions of the rows from first on, counted from the band's.
    template <class F> void each_run(int64_t band, int64_t first, int64_t last, F f) const {
        for (int64_t y = std::max<int64_t>(first, -band); y < std::min(last, num_rows - band); y++)
            for (size_t r = 0; r < runs.size(); r++)
                f((band + y) * positions_of_row + int64_t(r) * run, y * row + runs[r], run);
    }

    const int64_t pad, rows, num_rows;            // places after every row; rows of a band and of the image
    int64_t positions = 1, positions_of_row = 1;  // of the image, and of a row of its first axis
    int64_t row, run;                             // places of a row, and how many positions lie side by side
    int64_t start = 0;                            // the place of the first query among those of the keys
    int64_t vectors, queries, keys;               // vectors of queries; places for queries, and for keys
    std::vector<int64_t> runs;                    // the places at which the runs of a row start
    std::vector<int64_t> distance;                // from a query to its key at each offset

  private:
    // An odd number of lines of the cache: rows at a distance of a power of two would evict each other.
    static int64_t whole_lines(int64_t n, int64_t line) { return ((n + line - 1) / line | 1) * line; }
};

}  // namespace
