// Maps in irreps, their transposes and gradients, on memory of exactly the size that a call needs: a program for
// sanitizers. It fails where a result is not finite.

#include <cstdio>
#include <vector>

#include "irreps.cpp"
#include "room.h"

namespace {

// Poses are the transform of a regular field with an irrep of one component and one of two.
struct Case {
    int64_t images, number, groups, parts, channels;
    bool positions_inside, frozen;

    static constexpr int64_t order = 3, fields_of_features = 7, size = order * fields_of_features;
    int64_t fields() const { return groups * parts * channels; }

    // Blocks of sparse matrices: a row of numbers for all columns, and two rows for two of them.
    static void add_matrix(std::vector<int64_t>& to) {
        for (int64_t i : {2, /**/ 1, 3, 0, 0, 1, 2, /**/ 2, 2, 1, 2, 0, 2}) to.push_back(i);
    }
    static constexpr int64_t of_matrix = 7;
    int64_t* strides(Room& room) const {
        auto* to = room.zeros<int64_t>(40);
        const int64_t rows = order * channels;
        for (int i = 0; i < 2; i++) {
            const int64_t features[] = {number * size, positions_inside ? 1 : size, positions_inside ? number : 1};
            std::copy_n(features, 3, to + 5 * i);
        }
        for (int i = 0; i < 6; i++) {
            const int64_t all = groups * rows * number;
            const int64_t inside[] = {all, 1, rows * number, number, order * number};
            const int64_t outside[] = {all, groups * rows, rows, channels, 1};
            std::copy_n(positions_inside ? inside : outside, 5, to + 10 + 5 * i);
        }
        return to;
    }
    bool run() const {
        Room room;
        std::vector<int64_t> tables = {order, fields(), 2, 1, 1, fields_of_features, 1, 2, 2 * fields_of_features};
        for (int i = 0; i < 2; i++) tables.push_back(2), add_matrix(tables), add_matrix(tables);
        for (int64_t i : {int64_t(1), fields_of_features, order}) tables.push_back(i);
        for (int64_t i = 0; i < 2 * size; i++) tables.push_back(i % size);
        for (int i = 0; i < 2; i++) tables.push_back(1), add_matrix(tables);
        auto* whole = room.zeros<int64_t>(tables.size());
        std::copy_n(tables.begin(), tables.size() - missing, whole);
        Arguments a{};
        a.tables = whole, a.values = room.random(6 * of_matrix), a.strides = strides(room);
        a.images = images, a.number = number, a.groups = groups * parts, a.parts = parts, a.threads = 3;
        a.num_weights = fields() * fields_of_features * 5, a.weights = room.random(a.num_weights);
        a.num_biases = fields(), a.bias = room.random(a.num_biases), a.bias_of_fields = 1;
        const int64_t of_features = images * number * size, of_fields = images * number * groups * order * channels;
        NUMBER* parts_of_fields[3] = {};
        for (int64_t p = 0; p < parts; p++) parts_of_fields[p] = room.zeros(of_fields);
        auto* features = room.random(of_features);
        a.features = features;
        a.made_first = parts_of_fields[0], a.made_second = parts_of_fields[1], a.made_third = parts_of_fields[2];
        if (escnn_attention(&a)) return false;
        a.first = a.made_first, a.second = a.made_second, a.third = a.made_third;
        a.made_first = a.made_second = a.made_third = nullptr, a.bias = nullptr;
        a.made_features = room.zeros(of_features);
        if (!frozen) a.grad_weights = room.zeros(a.num_weights), a.grad_bias = room.zeros(a.num_biases);
        if (escnn_attention(&a)) return false;
        if (parts > 1) return room.is_finite();
        a.num_biases = fields_of_features, a.bias_of_fields = 0;
        if (!frozen) a.grad_bias = room.zeros(a.num_biases);
        a.made_first = parts_of_fields[0], a.first = room.random(of_fields), a.made_features = nullptr;
        if (escnn_attention(&a)) return false;
        a.features = nullptr, a.grad_weights = a.grad_bias = a.made_first = nullptr;
        a.made_features = features, a.bias = room.random(a.num_biases);
        return !escnn_attention(&a) && room.is_finite();
    }
};

}  // namespace

int main() {
    for (int64_t images : {1, 3})
        for (int64_t number : {0, 1, 64, 77, 300})
            for (int64_t parts : {1, 3})
                for (int64_t channels : {1, 5, 8})
                    for (bool inside : {false, true})
                        for (bool frozen : {false, true})
                            if (!Case{images, number, 2, parts, channels, inside, frozen}.run())
                                return std::printf("failed: %d images of %d positions, %d parts, %d channels\n",
                                                   int(images), int(number), int(parts), int(channels)),
                                       1;
}
