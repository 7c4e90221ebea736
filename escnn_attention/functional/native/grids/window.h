// Products with the keys and values of a window, which lie at the same distances from every query.

#pragma once

#include "layout.h"
#include "products.h"

namespace {

// The window of the queries of one vector. Keys of all poses at an offset follow each other.
template <class T> struct Window {
    using W = V<T>;
    static constexpr int width = WIDTH<T>;

    Window(const Layout& layout, int64_t key_poses, int64_t channels)
            : layout(layout), key_poses(key_poses), channels(channels), near(layout.distance.size()) {}

    // The queries from `place` on. Offsets at which none of them has a key are left out.
    void move(int64_t place, const Buffer<T>& mask) {
        first = layout.start + place;
        num_near = 0;
        for (size_t offset = 0; offset < near.size(); offset++) {
            const T* at = mask.data + first + layout.distance[offset];
            if (std::any_of(at, at + width, [](T x) { return x == 0; })) near[num_near++] = int64_t(offset);
        }
        num_keys = num_near * key_poses;
    }
    // The distance of the queries' keys at the offset of this number.
    int64_t at(int64_t number) const { return first + layout.distance[near[number]]; }
    // The number of a key among all of a query, whichever are left out.
    int64_t key(int64_t n) const { return near[n / key_poses] * key_poses + n % key_poses; }

    // Products of queries (C, G) with all keys: (keys, G). They start from what offsets and poses add, if anything.
    template <int G>
    void scores(const W* x, const Buffer<T>& keys, const W* by_offset, const W* by_pose, W* to) const {
        for (int64_t number = 0; number < num_near; number++) {
            const T* key = keys.data + at(number);
            int64_t pose = 0;
            for (; pose + BLOCK <= key_poses; pose += BLOCK)
                scores<G, BLOCK>(x, key, number, pose, by_offset, by_pose, to);
            for (; pose < key_poses; pose++) scores<G, 1>(x, key, number, pose, by_offset, by_pose, to);
        }
    }

    // The sum of weights (keys, G) times the values, added to (C, G).
    template <int G> void combine(const W* weight, const Buffer<T>& values, W* to) const {
        int64_t c = 0;
        for (; c + BLOCK <= channels; c += BLOCK) combine<G, BLOCK>(weight, values, c, to);
        for (; c + 2 <= channels; c += 2) combine<G, 2>(weight, values, c, to);
        for (; c < channels; c++) combine<G, 1>(weight, values, c, to);
    }

    // Its transpose: weights (keys, G) times (C, G), summed over the group, added to the window.
    template <int G> void distribute(const W* weight, const W* x, const Buffer<T>& to) const {
        for (int64_t number = 0; number < num_near; number++, weight += key_poses * G) {
            T* key = to.data + at(number);
            int64_t pose = 0;
            for (; pose + BLOCK <= key_poses; pose += BLOCK)
                add_outer<T, G, BLOCK>(weight + pose * G, x, channels, places(key, pose));
            for (; pose < key_poses; pose++)
                add_outer<T, G, 1>(weight + pose * G, x, channels, places(key, pose));
        }
    }

    const Layout& layout;
    const int64_t key_poses, channels;
    int64_t num_near = 0, num_keys = 0;  // how many offsets are not left out, and how many keys that makes
    std::vector<int64_t> near;           // those offsets

  private:
    // Of the keys at `key` and their poses from `pose` on.
    template <class Number> auto places(Number* key, int64_t pose) const {
        return [=, this_poses = key_poses, stride = layout.keys](int64_t c, int r) {
            return key + (c * this_poses + pose + r) * stride;
        };
    }
    template <int G, int K> inline void scores(const W* x, const T* key, int64_t number, int64_t pose,
                                               const W* by_offset, const W* by_pose, W* to) const {
        W y[K][G];
        for (int r = 0; r < K; r++)
            for (int g = 0; g < G; g++) {
                y[r][g] = by_offset ? by_offset[number * G + g] : W{};
                if (by_pose) y[r][g] += by_pose[(pose + r) * G + g];
            }
        const auto place = places(key, pose);
        add_scores<T, G, K>(x, channels, [&](int64_t c, int r) { return load(place(c, r)); }, y);
        for (int r = 0; r < K; r++)
            for (int g = 0; g < G; g++) to[(number * key_poses + pose + r) * G + g] = y[r][g];
    }
    template <int G, int K> inline void combine(const W* weight, const Buffer<T>& values, int64_t c, W* to) const {
        W y[K][G];
        for (int r = 0; r < K; r++)
            for (int g = 0; g < G; g++) y[r][g] = to[(c + r) * G + g];
        for (int64_t number = 0; number < num_near; number++) {
            const T* value = values.data + at(number) + c * key_poses * layout.keys;
            for (int64_t pose = 0; pose < key_poses; pose++, weight += G)
                add_weighted<T, G, K>(
                    weight, [&](int r) { return load(value + (r * key_poses + pose) * layout.keys); }, y);
        }
        for (int r = 0; r < K; r++)
            for (int g = 0; g < G; g++) to[(c + r) * G + g] = y[r][g];
    }

    int64_t first = 0;  // the place of the first query among those of the keys
};

}  // namespace
