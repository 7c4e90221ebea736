// Where the positions of queries and of their keys lie in memory, for loops whose lanes are queries side by side.
//
// Both grids share cells: along every axis some neighbouring queries and some neighbouring keys lie in each, one of both
// where they are on one grid. Positions at the same place of their cells, of one slot, are laid out as an image of cells:
// a band of rows, with the cells as the last axis and places of nothing after every row. Then the key of a query at a
// given offset lies at a given distance from the query, for all lanes alike, at the borders too. On a torus the keys
// across an edge lie in these places again, which have room for those of both edges.
//
// On small grids the same position of several images lies side by side, if that leaves fewer pairs of vectors and keys.
// Where these images fill a vector, the keys of each vector are listed one by one, and there are no other places.

#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "../buffer.h"
#include "arguments.h"

namespace {

// Positions of one slot in a row of the first axis that lie side by side: of the first its number and its place.
struct Run {
    int64_t position, place, length;
};

// A key of a query: its distance in places, its slot, and the row of the table for its offset.
struct Neighbour {
    int64_t distance, slot, row;
};

// The positions of queries or of keys.
struct Side {
    Side(const int64_t* shape, int64_t dim, int64_t step) : shape(shape), dim(dim), step(step) {
        for (int64_t i = 0; i < dim; i++) {
            positions *= shape[i], slots *= step;
            if (i) positions_of_row *= shape[i], slots_of_row *= step;
        }
    }

    int64_t cells(int64_t axis) const { return count(axis, 0); }
    // How many positions a slot has along an axis, where it is the number `at` in a cell.
    int64_t count(int64_t axis, int64_t at) const { return (shape[axis] - at + step - 1) / step; }

    // Finds the runs of a row, with some cells across the edges of all axes but the first: from the lowest to the
    // highest step.
    void find_runs(const std::vector<int64_t>& stride, const std::vector<int64_t>& low,
                   const std::vector<int64_t>& high) {
        for (int64_t slot = 0; slot < slots; slot++) {
            std::vector<Run> lines = {{0, 0, 1}};  // the positions of all axes between the first and the last
            for (int64_t i = 1, unit = slots_of_row; i < dim; i++) {
                std::vector<Run> longer;
                unit /= step;
                const int64_t at = slot / unit % step, number = count(i, at);
                for (const Run& line : lines)
                    for (int64_t x = low[i], length; x < number + high[i]; x += length) {
                        const int64_t cell = modulo(x, number);
                        length = i < dim - 1 ? 1 : std::min(number - cell, number + high[i] - x);
                        longer.push_back({line.position * shape[i] + cell * step + at, line.place + x * stride[i],
                                          length});
                    }
                lines = longer;
            }
            runs.push_back(lines);
        }
    }

    // Calls f(position, place, length) for the runs of a slot in the rows of cells from `first` to `last`; `origin` is
    // the row whose places are counted from 0.
    template <class F>
    void each_run(int64_t slot, int64_t first, int64_t last, int64_t origin, int64_t row, F f) const {
        const int64_t at = slot / slots_of_row, number = count(0, at);
        for (int64_t y = first, length; y < last; y += length) {
            const int64_t position = modulo(y, number) * step + at;
            length = dim > 1 ? 1 : std::min(number - modulo(y, number), last - y);
            for (const Run& run : runs[slot])
                f(position * positions_of_row + run.position, (y - origin) * row + run.place,
                  dim > 1 ? run.length : length);
        }
    }

    const int64_t* shape;
    int64_t dim, step;                            // step: positions of a cell along an axis
    int64_t positions = 1, positions_of_row = 1;  // of all, and of a row of the first axis
    int64_t slots = 1, slots_of_row = 1;          // of a cell, and of those along all axes but the first
    std::vector<std::vector<Run>> runs;           // of a row, for each slot

  private:
    static int64_t modulo(int64_t n, int64_t m) { return (n % m + m) % m; }
};

// Two grids in cells, of which all axes but the first are padded, in bands of rows of the first.
struct Layout {
    // Vectors have `width` numbers of `size` bytes each, and so many images lie side by side.
    Layout(const Arguments& call, int width, int size, int64_t together = 1)
            : together(together),
              of_queries(call.shape, call.dim, call.queries_of_cell),
              of_keys(call.key_shape, call.dim, call.keys_of_cell),
              num_rows(of_queries.cells(0)),
              compact(together > 1 && together == width),
              wraps(call.torus_from == 0 && !compact),
              slots(of_queries.slots),
              positions(of_queries.positions) {
        const int64_t dim = call.dim, numbers = dim + 2;
        std::vector<int64_t> stride(dim, together), least(dim), most(dim), none(dim);
        for (int64_t n = 0; n < call.neighbours && !compact; n++)
            for (int64_t i = 0; i < dim; i++) {
                least[i] = std::min(least[i], call.steps[n * numbers + i]);
                most[i] = std::max(most[i], call.steps[n * numbers + i]);
            }
        for (int64_t i = dim - 1; i > 0; i--) {
            const int64_t pad = i < call.torus_from ? std::max(most[i], -least[i]) : most[i] - least[i];
            stride[i - 1] = stride[i] * (std::max(of_queries.cells(i), of_keys.cells(i)) + pad);
        }
        const bool apart = compact || call.everything;  // no key has a place relative to a query
        row = stride[0], low = least[0], high = apart ? std::max<int64_t>(0, of_keys.cells(0) - num_rows) : most[0];
        int64_t end = 0;
        for (int64_t i = 0; i < dim; i++) start -= least[i] * stride[i], end += most[i] * stride[i];
        of_queries.find_runs(stride, none, none);
        const bool torus = call.torus_from < dim && !compact;
        of_keys.find_runs(stride, torus ? least : none, torus ? most : none);
        rows = rows_of_band(call, width);
        whole = together == 1 && rows == num_rows;
        int64_t number = 0;
        each_run(0, true, [&](int64_t, int64_t, int64_t, int64_t n) { number += n; });
        keys_once = rows == num_rows && !torus && number == of_keys.positions * together;
        // Vectors begin at positions, and not in the places between.
        for (int64_t y = 0, next = 0; y < rows; y++)
            for (const Run& run : of_queries.runs[0]) {
                const int64_t first = y * row + run.place;
                for (int64_t x = std::max(first, next); x < first + run.length * together; x = next)
                    places.push_back(x), next = x + width;
            }
        // Packing writes a vector more.
        queries = whole_lines(places.back() + 2 * width, LINE / size);
        const int64_t behind = apart ? (num_rows + high) * row : start + places.back() + end;
        keys = whole_lines(behind + 2 * width, LINE / size);
        for (int64_t slot = 0; slot < slots && call.neighbours; slot++) {
            const int64_t first = call.starts[slot], last = call.starts[slot + 1];
            std::vector<Neighbour> seen;
            for (const int64_t* step = call.steps + first * numbers; step < call.steps + last * numbers;
                 step += numbers) {
                int64_t distance = 0;
                for (int64_t i = 0; i < dim; i++) distance += step[i] * stride[i];
                seen.push_back({distance, step[dim], step[dim + 1]});
            }
            most_neighbours = std::max(most_neighbours, last - first);
            neighbours.push_back(seen);
        }
        if (call.neighbours && rows == num_rows && int64_t(places.size()) * slots * most_neighbours <= MOST_SEEN)
            compact ? find_seen_singly(call, size) : find_seen(width);
    }

    // The layout of as many images side by side as fit and fill a vector, if its vectors see fewer keys than those of one
    // image. It leaves threads at least 8 tasks. With dropout it is always that of one image, whose places tell which
    // keys are dropped.
    static Layout best(const Arguments& call, int width, int size) {
        Layout alone(call, width, size);
        if (call.dropout || alone.seen.empty()) return alone;
        int64_t groups = (call.images + width - 1) / width;
        const bool filled = groups * call.heads >= 8 && 2 * (groups * width - call.images) <= width;
        groups = std::max(groups, 8 / call.heads);
        for (int64_t together = filled ? width : 0; together != 1; groups *= 2) {
            if (together) {
                Layout several(call, width, size, together);
                const double fewer = double(several.seen.size()) * several.groups(call.images);
                if (fewer > 0 && fewer < 0.9 * alone.seen.size() * call.images) return several;
            }
            together = (call.images + groups - 1) / groups;
        }
        return alone;
    }

    int64_t groups(int64_t images) const { return (images + together - 1) / together; }

    // Calls f(slot, position, place, length) for the runs of positions of a band of queries, or of their keys, which lie
    // in the rows around it, too. Places are counted from the first query. On a torus a key may lie at several places.
    template <class F> void each_run(int64_t band, bool keys, F f) const {
        const Side& side = keys ? of_keys : of_queries;
        for (int64_t slot = 0; slot < side.slots; slot++) {
            int64_t first = band + (keys ? low : 0), last = std::min(band + rows, num_rows) + (keys ? high : 0);
            if (!wraps || !keys)
                first = std::max<int64_t>(0, first),
                last = std::min(last, side.count(0, slot / side.slots_of_row));
            side.each_run(slot, first, last, band, row, [&](int64_t position, int64_t place, int64_t n) {
                if (together == 1) return f(slot, position, place, n);
                for (int64_t i = 0; i < n; i++) f(slot, position + i * side.step, place + i * together, together);
            });
        }
    }

    const int64_t together;            // images that lie side by side
    Side of_queries, of_keys;
    const int64_t num_rows;            // rows of cells of the queries
    const bool compact;                // whether places are those of positions, and vectors of single ones
    const bool wraps;                  // whether the last row of the image lies beside the first
    const int64_t slots, positions;    // of the queries
    int64_t row, rows;                 // places of a row; rows of a band
    bool whole;                        // whether a band is one whole image: its empty places are always the same
    bool keys_once;                    // whether each key lies at one place of one band
    int64_t low, high;                 // the rows in front of a band and behind it, the first of them negative
    int64_t start = 0;                 // the place of the first query among those of the keys
    int64_t queries, keys;             // places for queries, and for keys
    std::vector<int64_t> places;       // of the first query of each vector of a band
    int64_t most_neighbours = 0;       // of a query
    std::vector<std::vector<Neighbour>> neighbours;  // of the queries of each slot
    // Of a band that is the whole image: the neighbours of which any query of a vector has a key, with the first place of
    // the keys as the distance; and where those of each vector of each slot begin, and their end.
    std::vector<Neighbour> seen;
    std::vector<int64_t> first_seen;

  private:
    static constexpr int64_t MOST_SEEN = 1 << 18;

    void find_seen(int width) {
        std::vector<uint8_t> is_query(slots * queries), is_key(of_keys.slots * keys);
        each_run(0, false, [&](int64_t slot, int64_t, int64_t place, int64_t n) {
            std::fill_n(&is_query[slot * queries + place], n, 1);
        });
        each_run(0, true, [&](int64_t slot, int64_t, int64_t place, int64_t n) {
            std::fill_n(&is_key[slot * keys + start + place], n, 1);
        });
        for (const int64_t place : places)
            for (int64_t slot = 0; slot < slots; slot++) {
                first_seen.push_back(seen.size());
                for (const Neighbour& n : neighbours[slot]) {
                    const int64_t at = start + place + n.distance;
                    const uint8_t *query = &is_query[slot * queries + place], *key = &is_key[n.slot * keys + at];
                    bool any = false;
                    for (int lane = 0; lane < width; lane++) any |= query[lane] & key[lane];
                    if (any) seen.push_back({at, n.slot, n.row});
                }
            }
        first_seen.push_back(seen.size());
    }
    // The same of single positions, whose keys lie elsewhere here.
    void find_seen_singly(const Arguments& call, int size) {
        const Layout single(call, 1, size);
        std::vector<int64_t> position_at(of_keys.slots * single.keys), place_of(of_keys.positions);
        single.each_run(0, true, [&](int64_t slot, int64_t position, int64_t place, int64_t n) {
            int64_t* at = &position_at[slot * single.keys + single.start + place];
            for (int64_t i = 0; i < n; i++) at[i] = position + i * of_keys.step;
        });
        each_run(0, true, [&](int64_t, int64_t position, int64_t place, int64_t) { place_of[position] = place; });
        for (const Neighbour& n : single.seen)
            seen.push_back({place_of[position_at[n.slot * single.keys + n.distance]], n.slot, n.row});
        first_seen = single.first_seen;
    }
    // As many as the chunk allows for, and not many fewer than the rows of keys that a band has besides.
    int64_t rows_of_band(const Arguments& call, int width) const {
        if (call.everything) return num_rows;
        const int64_t pairs = call.num_poses * (call.sum_query_poses ? call.query_poses : 1);
        const int64_t of_query = slots * ((2 * call.query_poses + call.num_poses) * call.channels + pairs);
        const int64_t of_key = of_keys.slots * 4 * call.key_poses * call.channels, around = high - low;
        const int64_t fit = (call.chunk / row - around * of_key) / (of_query + of_key);
        return std::min(num_rows, std::max({fit, around / 4, (4 * width + row - 1) / row}));
    }

    // An odd number of lines of the cache: rows at a distance of a power of two would evict each other.
    static int64_t whole_lines(int64_t n, int64_t line) { return ((n + line - 1) / line | 1) * line; }
};

}  // namespace
