// What all workers read: the sizes, the transforms, and where features and fields lie.

#pragma once

#include <array>
#include <vector>

#include "../buffer.h"
#include "../simd.h"
#include "arguments.h"

namespace {

// Rows of a sparse matrix that have numbers in the same columns.
template <class T> struct Block {
    int64_t rows, columns;
    const int64_t *row, *column;
    const T* value;  // (rows, columns)
};
template <class T> using Sparse = std::vector<Block<T>>;
// A product of one or two matrices, of which the first is applied first.
template <class T> using Product = std::vector<Sparse<T>>;

struct Irrep {
    int64_t components, copies, number;  // m over its algebra, d in a regular field, K in the features
    int64_t features, fields;            // which rows are the first
    int64_t weights, turned;             // where its weights begin, and its features position by position
};
template <class T> struct Segment {
    int64_t number, size;            // of fields
    const int64_t *channels, *rows;  // of a field (number, size); of what is read (size, number)
    Product<T> read, write;
};

// Where the numbers of a position are in memory. Some are side by side: in that order.
template <class T> struct Place {
    T* data = nullptr;
    int64_t image = 0, position = 0;
    std::vector<int64_t> offsets;                    // of every row
    std::vector<std::pair<int64_t, int64_t>> order;  // offsets, and which rows have them
};

constexpr int MOST_PARTS = 3;

template <class T> struct Plan {
    static constexpr int vectors = 256 / BYTES < 8 ? 256 / BYTES : 8, width = WIDTH<T>;
    static constexpr int64_t tile = vectors * width;  // positions

    explicit Plan(const Arguments& call) : call(call), at(call.tables), value(static_cast<const T*>(call.values)) {
        order = next(), fields = next(), parts = call.parts, part_fields = fields / std::max<int64_t>(1, parts);
        int64_t features = 0, copies = 0, weights = 0;
        irreps.resize(next());
        for (auto& irrep : irreps) {
            irrep.components = next(), irrep.copies = next(), irrep.number = next();
            irrep.features = features, irrep.fields = copies, irrep.weights = weights, irrep.turned = turned;
            features += irrep.components * irrep.number, copies += irrep.components * irrep.copies;
            weights += irrep.copies * fields * irrep.number;
            turned += irrep.components * tile * ((irrep.number + width - 1) / width * width);
        }
        size = features, largest = order;
        to_irreps = product(), from_irreps = product();
        segments.resize(next());
        for (auto& segment : segments) {
            segment.number = next(), segment.size = next();
            segment.channels = take(segment.number * segment.size), segment.rows = take(segment.number * segment.size);
            largest = std::max(largest, segment.size);
            segment.read = product(), segment.write = product();
        }
        place();
    }

    const Arguments& call;
    int64_t order, fields, parts, part_fields, size, largest, turned = 0, images, number, tiles_of_image;
    std::vector<Irrep> irreps;
    Product<T> to_irreps, from_irreps;
    std::vector<Segment<T>> segments;
    Place<const T> features;
    Place<T> made_features;
    std::array<Place<const T>, MOST_PARTS> regular;
    std::array<Place<T>, MOST_PARTS> made_regular;

  private:
    int64_t next() { return *at++; }
    const int64_t* take(int64_t n) { return std::exchange(at, at + n); }
    Product<T> product() {
        Product<T> found(next());
        for (auto& matrix : found) {
            matrix.resize(next());
            for (auto& block : matrix) {
                block.rows = next(), block.columns = next();
                block.row = take(block.rows), block.column = take(block.columns);
                block.value = std::exchange(value, value + block.rows * block.columns);
            }
        }
        return found;
    }

    // Strides (8, 5) are those of images and positions, then of channels, or of groups, poses and fields in a group.
    void place() {
        const int64_t* strides = call.strides;
        images = call.images, number = call.number;
        const int64_t groups = call.groups / std::max<int64_t>(1, parts), channels = part_fields / groups;
        features_at(features, call.features, strides), features_at(made_features, call.made_features, strides + 5);
        const void* given[] = {call.first, call.second, call.third};
        void* made[] = {call.made_first, call.made_second, call.made_third};
        for (int64_t p = 0; p < parts; p++) {
            fields_at(regular[p], given[p], strides + 10 + 5 * p, groups, channels);
            fields_at(made_regular[p], made[p], strides + 25 + 5 * p, groups, channels);
        }
        tiles_of_image = (number + tile - 1) / tile;
    }
    template <class U, class Data> void features_at(Place<U>& place, Data* data, const int64_t* stride) {
        if (!(place.data = static_cast<U*>(data))) return;
        begin(place, stride, size);
        for (int64_t i = 0; i < size; i++) add(place, stride[2] * i, i);
    }
    // Rows are fields, and in them poses.
    template <class U, class Data>
    void fields_at(Place<U>& place, Data* data, const int64_t* stride, int64_t groups, int64_t channels) {
        if (!(place.data = static_cast<U*>(data))) return;
        begin(place, stride, part_fields * order);
        const bool poses_inside = stride[3] < stride[4];
        for (int64_t g = 0; g < groups; g++)
            for (int64_t i = 0; i < (poses_inside ? channels : order); i++)
                for (int64_t j = 0; j < (poses_inside ? order : channels); j++) {
                    const int64_t c = poses_inside ? i : j, h = poses_inside ? j : i;
                    add(place, stride[2] * g + stride[3] * h + stride[4] * c, (g * channels + c) * order + h);
                }
    }
    template <class U> static void begin(Place<U>& place, const int64_t* stride, int64_t rows) {
        place.image = stride[0], place.position = stride[1];
        place.offsets.resize(rows), place.order.reserve(rows);
    }
    template <class U> static void add(Place<U>& place, int64_t offset, int64_t row) {
        place.offsets[row] = offset;
        place.order.emplace_back(offset, row);
    }

    const int64_t* at;
    const T* value;
};

}  // namespace
