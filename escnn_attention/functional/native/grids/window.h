// The keys of a window, which lie at the same distances from every query of a slot.

#pragma once

#include "layout.h"
#include "products.h"

namespace {

// The window of the queries of one vector: its places are the neighbours of which any of them has a key.
template <class T> struct Window {
    Window(const Layout& layout, int64_t key_poses, int64_t channels)
            : rows(layout.most_neighbours),
              layout(layout),
              key_poses(key_poses),
              of_slot(key_poses * channels * layout.keys),
              keys(layout.most_neighbours),
              masks(layout.most_neighbours) {}

    // The queries of a slot in a vector of the layout.
    void move(int64_t vector, int64_t slot, const Buffer<T>& mask) {
        places = 0;
        if (!layout.seen.empty()) {
            const int64_t* first = &layout.first_seen[vector * layout.slots + slot];
            for (int64_t i = first[0]; i < first[1]; i++) {
                const Neighbour& n = layout.seen[i];
                add(n, n.distance);
            }
        } else {
            const int64_t first = layout.start + layout.places[vector];
            for (const Neighbour& n : layout.neighbours[slot]) {
                const T* lanes = mask.data + n.slot * layout.keys + first + n.distance;
                if (std::any_of(lanes, lanes + WIDTH<T>, [](T x) { return x == 0; })) add(n, first + n.distance);
            }
        }
        num_keys = places * key_poses;
    }
    int64_t at(int64_t number) const { return keys[number]; }
    int64_t mask_at(int64_t number) const { return masks[number]; }
    V<T> load(const T* key, int64_t c, int64_t pose) const {
        return ::load(key + (c * key_poses + pose) * layout.keys);
    }

    // The number of a key among all of a query, whichever are left out.
    int64_t key(int64_t n) const { return rows[n / key_poses] * key_poses + n % key_poses; }

    // The transpose of combine_keys: weights (keys, G) times (channels, G), summed over the group, added to the keys.
    template <int G>
    void distribute(const V<T>* weight, const V<T>* x, int64_t channels, const Buffer<T>& numbers) const {
        for (int64_t number = 0; number < places; number++, weight += key_poses * G) {
            T* key = numbers.data + at(number);
            int64_t pose = 0;
            for (; pose + BLOCK <= key_poses; pose += BLOCK)
                distribute<G, BLOCK>(weight + pose * G, x, channels, key, pose);
            for (; pose < key_poses; pose++) distribute<G, 1>(weight + pose * G, x, channels, key, pose);
        }
    }

    int64_t places = 0, num_keys = 0;
    std::vector<int64_t> rows;  // of the table, for the places

  private:
    void add(const Neighbour& n, int64_t at) {
        rows[places] = n.row, keys[places] = n.slot * of_slot + at, masks[places++] = n.slot * layout.keys + at;
    }
    template <int G, int K>
    void distribute(const V<T>* weight, const V<T>* x, int64_t channels, T* key, int64_t pose) const {
        V<T> w[K][G];
        UNROLL for (int r = 0; r < K; r++)
            UNROLL for (int g = 0; g < G; g++) w[r][g] = weight[r * G + g];
        const int64_t row = layout.keys, step = key_poses * row;
        key += pose * row;
        for (int64_t c = 0; c < channels; c++, key += step, x += G) {
            V<T> y[K] = {};
            UNROLL for (int g = 0; g < G; g++) {
                const V<T> of_query = in_register<T>(x[g]);
                UNROLL for (int r = 0; r < K; r++) y[r] += w[r][g] * of_query;
            }
            UNROLL for (int r = 0; r < K; r++) store(key + r * row, ::load(key + r * row) + y[r]);
        }
    }

    const Layout& layout;

  public:
    const int64_t key_poses;

  private:
    const int64_t of_slot;             // numbers of all keys of a slot
    std::vector<int64_t> keys, masks;  // where those of the first query begin, and what is added to its score
};

}  // namespace
