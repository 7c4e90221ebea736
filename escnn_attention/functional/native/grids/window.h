// The keys of a window, which lie at the same distances from every query.

#pragma once

#include "layout.h"
#include "products.h"

namespace {

// The window of the queries of one vector: its places are the offsets at which any of them has keys.
template <class T> struct Window {
    Window(const Layout& layout, int64_t key_poses)
            : layout(layout), key_poses(key_poses), near(layout.distance.size()) {}

    // The queries from `place` on.
    void move(int64_t place, const Buffer<T>& mask) {
        first = layout.start + place;
        places = 0;
        for (size_t offset = 0; offset < near.size(); offset++) {
            const T* at = mask.data + first + layout.distance[offset];
            if (std::any_of(at, at + WIDTH<T>, [](T x) { return x == 0; })) near[places++] = int64_t(offset);
        }
        num_keys = places * key_poses;
    }
    int64_t at(int64_t number) const { return first + layout.distance[near[number]]; }
    V<T> load(const T* key, int64_t c, int64_t pose) const {
        return ::load(key + (c * key_poses + pose) * layout.keys);
    }

    // The number of a key among all of a query, whichever are left out.
    int64_t key(int64_t n) const { return near[n / key_poses] * key_poses + n % key_poses; }

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

    const Layout& layout;
    const int64_t key_poses;
    int64_t places = 0, num_keys = 0;
    std::vector<int64_t> near;  // the offsets of the places

  private:
    template <int G, int K>
    void distribute(const V<T>* weight, const V<T>* x, int64_t channels, T* key, int64_t pose) const {
        V<T> w[K][G];
        for (int r = 0; r < K; r++)
            for (int g = 0; g < G; g++) w[r][g] = weight[r * G + g];
        for (int64_t c = 0; c < channels; c++)
            for (int r = 0; r < K; r++) {
                T* place = key + (c * key_poses + pose + r) * layout.keys;
                V<T> y{};
                for (int g = 0; g < G; g++) y += w[r][g] * x[c * G + g];
                store(place, ::load(place) + y);
            }
    }

    int64_t first = 0;  // the place of the first query among those of the keys
};

}  // namespace
