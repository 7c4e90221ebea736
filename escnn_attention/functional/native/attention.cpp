// Attention over the windows of a grid, forward and backward: what native.py calls.
//
// Lanes of a vector are queries side by side. A band of rows of an image is laid out with the positions as the last
// axis, `pad` places of nothing after every row, and each pose and channel by itself. Then the key of a query at a
// given offset is a load at a given distance from the query, for all lanes alike, at the borders too: what lies there
// is masked. The scores of as many queries as a vector has lanes exist at a time, in a buffer in the cache.
//
// Names and orders of axes are those of native.py: poses of queries j, of keys p, frames h, offsets l, channels c.
// Tables of scores have the query poses, in groups of up to four, as their last axis: that many share the loads of a
// key.

#include "buffer.h"
#include "dropout.h"
#include "grids/arguments.h"
#include "simd.h"
#include "threads.h"

namespace {

// An image with all but its first axis padded, in bands of rows of the first.
struct Layout {
    Layout(const Arguments& a, int width, int size) : N(1), inner(1), pad(a.pad), rows(a.rows), num_rows(a.shape[0]) {
        std::vector<int64_t> stride(a.dim, 1);
        for (int64_t i = a.dim - 2; i >= 0; i--) stride[i] = stride[i + 1] * (a.shape[i + 1] + pad);
        row = stride[0];
        int64_t last = 0;
        for (int64_t i = 0; i < a.dim; i++) {
            N *= a.shape[i], start += pad * stride[i];
            if (i) inner *= a.shape[i], last += (a.shape[i] - 1) * stride[i];
        }
        run = a.dim > 1 ? a.shape[a.dim - 1] : 1;
        for (int64_t n = 0; n < inner; n += run) {
            int64_t flat = 0;
            for (int64_t i = a.dim - 1, rest = n; i > 0; i--) flat += rest % a.shape[i] * stride[i], rest /= a.shape[i];
            runs.push_back(flat);
        }
        vectors = ((rows - 1) * row + last + width) / width;
        queries = odd(vectors * width, LINE / size);
        keys = odd(2 * start + vectors * width, LINE / size);
        for (int64_t l = 0; l < a.offsets; l++) {
            int64_t flat = 0;
            for (int64_t i = 0; i < a.dim; i++) flat += a.steps[l * a.dim + i] * stride[i];
            offset.push_back(flat);
        }
    }
    // Whole lines of the cache, an odd number of them: rows at a distance of a power of two would evict each other.
    static int64_t odd(int64_t n, int64_t line) { return ((n + line - 1) / line | 1) * line; }

    // Calls f(position, place, length) for the runs of positions of the rows from first on, counted from the band's.
    template <class F> void each(int64_t band, int64_t first, int64_t last, F f) const {
        for (int64_t y = std::max<int64_t>(first, -band); y < std::min(last, num_rows - band); y++)
            for (size_t r = 0; r < runs.size(); r++) f((band + y) * inner + int64_t(r) * run, y * row + runs[r], run);
    }

    int64_t N, inner, pad, rows, num_rows, row, run, start = 0, vectors, queries, keys;
    std::vector<int64_t> runs, offset;
};

// What one thread works with.
template <class T> struct Worker {
    using W = V<T>;
    static constexpr int width = WIDTH<T>;

    Worker(const Arguments& a, const Layout& s)
            : a(a),
              s(s),
              J(a.query_poses),
              P(a.key_poses),
              H(a.summed ? a.frames : 1),
              O(a.frames),
              L(a.offsets),
              C(a.channels),
              S(L * P),
              dropout(a.dropout),
              backward(a.grad != nullptr) {
        mask = Buffer<T>(s.keys);
        near.resize(L);
        q = Buffer<T>(s.queries * J * C), k = Buffer<T>(s.keys * P * C), v = Buffer<T>(s.keys * P * C);
        out = Buffer<T>(s.queries * O * C);
        sums = Buffer<T>(s.queries * H * J);
        of_offsets = Buffer<W>(L * GROUP), of_poses = Buffer<W>(P * GROUP);
        here = Buffer<W>(C * J), there = Buffer<W>(C * O);
        scores = Buffer<W>(S * GROUP);
        if (a.summed) content = Buffer<W>(S * J), summed = Buffer<W>(S * GROUP);
        if (!backward) return;
        grad_q = Buffer<T>(s.queries * J * C), grad_k = Buffer<T>(s.keys * P * C), grad_v = Buffer<T>(s.keys * P * C);
        grad_here = Buffer<W>(C * J), grads = Buffer<W>(S * GROUP);
        if (a.summed) total = Buffer<W>(S * J), of_values = Buffer<W>(S * GROUP);
        if (a.spatial) grad_spatial = Buffer<W>(O * L * C);
        if (a.pose) grad_pose = Buffer<W>(O * P * C);
    }

    // One head of one image.
    void work(int64_t m, int64_t b) {
        spatial = a.spatial ? static_cast<const T*>(a.spatial) + m % a.spatial_heads * O * L * C : nullptr;
        pose = a.pose ? static_cast<const T*>(a.pose) + m % a.pose_heads * O * P * C : nullptr;
        const int64_t image = m * a.images + b, N = s.N;
        key = Dropout<T>::mix(uint32_t(a.seed) ^ Dropout<T>::mix(uint32_t(a.seed >> 32) + uint32_t(image)));
        for (int64_t band = 0; band < s.num_rows; band += s.rows) {
            first = uint32_t(band * s.row);
            unmask(band);
            pack(static_cast<const T*>(a.q) + image * N * J * C, J, band, q, false);
            pack(static_cast<const T*>(a.k) + image * N * P * C, P, band, k, true);
            pack(static_cast<const T*>(a.v) + image * N * P * C, P, band, v, true);
            T* logs = static_cast<T*>(a.sums) + image * H * J * N;
            if (!backward) {
                for (int64_t i = 0; i < s.vectors; i++) a.summed ? forward_all(i * width) : forward_own(i * width);
                unpack(out, O, band, static_cast<T*>(a.out) + image * N * O * C, false);
                rows(band, [&](T* place, T* number, int64_t n) { std::copy_n(place, n, number); }, logs);
                continue;
            }
            sums.clear();
            rows(band, [&](T* place, T* number, int64_t n) { std::copy_n(number, n, place); }, logs);
            pack(static_cast<const T*>(a.grad) + image * N * O * C, O, band, out, false);
            grad_k.clear(), grad_v.clear();
            for (int64_t i = 0; i < s.vectors; i++) a.summed ? backward_all(i * width) : backward_own(i * width);
            unpack(grad_q, J, band, static_cast<T*>(a.grad_q) + image * N * J * C, false, T(a.unit));
            unpack(grad_k, P, band, static_cast<T*>(a.grad_k) + image * N * P * C, true, T(a.unit));
            unpack(grad_v, P, band, static_cast<T*>(a.grad_v) + image * N * P * C, true);
        }
    }

    // What the tables of the heads and images since the last call have as gradients.
    void take_tables(double* of_spatial, double* of_pose) {
        for (int64_t i = 0; i < grad_spatial.size; i++) of_spatial[i] = sum<T>(grad_spatial[i]);
        for (int64_t i = 0; i < grad_pose.size; i++) of_pose[i] = sum<T>(grad_pose[i]);
        grad_spatial.clear(), grad_pose.clear();
    }

  private:
    void unmask(int64_t band) {
        std::fill_n(mask.data, s.keys, T(sizeof(T) == 4 ? -1e30 : -1e300));
        s.each(band, -s.pad, s.rows + s.pad,
               [&](int64_t, int64_t place, int64_t n) { std::fill_n(mask.data + s.start + place, n, T(0)); });
    }

    // Positions (N, poses, C) to (C, poses, places).
    void pack(const T* from, int64_t poses, int64_t band, Buffer<T>& to, bool halo) {
        const int64_t length = halo ? s.keys : s.queries, margin = halo ? s.pad : 0;
        to.clear();
        s.each(band, -margin, s.rows + margin, [&](int64_t position, int64_t place, int64_t n) {
            const T* in = from + position * poses * C;
            T* at = to.data + place + (halo ? s.start : 0);
            for (int64_t i = 0; i < n; i++)
                for (int64_t p = 0; p < poses; p++)
                    for (int64_t c = 0; c < C; c++) at[(c * poses + p) * length + i] = *in++;
        });
    }

    // And back; with a halo they are added, since bands share it.
    void unpack(const Buffer<T>& from, int64_t poses, int64_t band, T* to, bool halo, T unit = 1) const {
        const int64_t length = halo ? s.keys : s.queries, margin = halo ? s.pad : 0;
        s.each(band, -margin, s.rows + margin, [&](int64_t position, int64_t place, int64_t n) {
            T* in = to + position * poses * C;
            const T* at = from.data + place + (halo ? s.start : 0);
            for (int64_t i = 0; i < n; i++)
                for (int64_t p = 0; p < poses; p++)
                    for (int64_t c = 0; c < C; c++, in++) {
                        const T x = unit * at[(c * poses + p) * length + i];
                        *in = halo ? *in + x : x;
                    }
        });
    }

    template <class F> void rows(int64_t band, F copy, T* logs) {
        for (int64_t r = 0; r < H * J; r++)
            s.each(band, 0, s.rows, [&](int64_t position, int64_t place, int64_t n) {
                copy(sums.data + r * s.queries + place, logs + r * s.N + position, n);
            });
    }

    // The channels of a group of poses, (C, G).
    template <int G> void gather(const Buffer<T>& from, int64_t poses, int64_t first_pose, int64_t i, W* to) const {
        for (int64_t c = 0; c < C; c++)
            for (int g = 0; g < G; g++) to[c * G + g] = load(from.data + (c * poses + first_pose + g) * s.queries + i);
    }

    // Products of queries (C, G) with all keys of the window: (S, G). They start from what offsets and poses add.
    template <int G>
    void products(const W* x, const Buffer<T>& keys, int64_t i, const W* by_offset, const W* by_pose, W* to) const {
        for (int64_t l = 0; l < num_near; l++) {
            const T* at = keys.data + s.start + i + s.offset[near[l]];
            int64_t p = 0;
            for (; p + BLOCK <= P; p += BLOCK) products<G, BLOCK>(x, at, p, by_offset, by_pose, l, to);
            for (; p < P; p++) products<G, 1>(x, at, p, by_offset, by_pose, l, to);
        }
    }
    template <int G, int K> inline void products(const W* x, const T* at, int64_t p, const W* by_offset,
                                                 const W* by_pose, int64_t l, W* to) const {
        W y[K][G];
        for (int r = 0; r < K; r++)
            for (int g = 0; g < G; g++) {
                y[r][g] = by_offset ? by_offset[l * G + g] : W{};
                if (by_pose) y[r][g] += by_pose[(p + r) * G + g];
            }
        for (int64_t c = 0; c < C; c++) {
            W key[K];
            for (int r = 0; r < K; r++) key[r] = load(at + (c * P + p + r) * s.keys);
            for (int r = 0; r < K; r++)
                for (int g = 0; g < G; g++) y[r][g] += key[r] * x[c * G + g];
        }
        for (int r = 0; r < K; r++)
            for (int g = 0; g < G; g++) to[(l * P + p + r) * G + g] = y[r][g];
    }

    // The sum over the window of weights (S, G) times the values, added to (C, G).
    template <int G> void combine(const W* weight, const Buffer<T>& values, int64_t i, W* to) const {
        int64_t c = 0;
        for (; c + BLOCK <= C; c += BLOCK) combine<G, BLOCK>(weight, values, i, c, to);
        for (; c + 2 <= C; c += 2) combine<G, 2>(weight, values, i, c, to);
        for (; c < C; c++) combine<G, 1>(weight, values, i, c, to);
    }
    template <int G, int K>
    inline void combine(const W* weight, const Buffer<T>& values, int64_t i, int64_t c, W* to) const {
        W y[K][G];
        for (int r = 0; r < K; r++)
            for (int g = 0; g < G; g++) y[r][g] = to[(c + r) * G + g];
        for (int64_t l = 0; l < num_near; l++) {
            const T* at = values.data + s.start + i + s.offset[near[l]] + c * P * s.keys;
            for (int64_t p = 0; p < P; p++, weight += G)
                for (int r = 0; r < K; r++) {
                    const W value = load(at + (r * P + p) * s.keys);
                    for (int g = 0; g < G; g++) y[r][g] += value * weight[g];
                }
        }
        for (int r = 0; r < K; r++)
            for (int g = 0; g < G; g++) to[(c + r) * G + g] = y[r][g];
    }

    // Its transpose: weights (S, G) times (C, G), summed over the group, added to the window.
    template <int G> void spread(const W* weight, const W* x, Buffer<T>& to, int64_t i) const {
        for (int64_t l = 0; l < num_near; l++) {
            T* at = to.data + s.start + i + s.offset[near[l]];
            int64_t p = 0;
            for (; p + BLOCK <= P; p += BLOCK) spread<G, BLOCK>(weight + (l * P + p) * G, x, at, p);
            for (; p < P; p++) spread<G, 1>(weight + (l * P + p) * G, x, at, p);
        }
    }
    template <int G, int K> inline void spread(const W* weight, const W* x, T* at, int64_t p) const {
        W w[K][G];
        for (int r = 0; r < K; r++)
            for (int g = 0; g < G; g++) w[r][g] = weight[r * G + g];
        for (int64_t c = 0; c < C; c++)
            for (int r = 0; r < K; r++) {
                T* place = at + (c * P + p + r) * s.keys;
                W y = load(place);
                for (int g = 0; g < G; g++) y += w[r][g] * x[c * G + g];
                store(place, y);
            }
    }

    // Products of queries (C, G) with rows of a table, one table for each pose of the group at this distance, or one
    // for all: n rows, the first or those that are named.
    template <int G>
    void tabulate(const W* x, const T* table, int64_t distance, int64_t n, const int64_t* rows, W* to) const {
        for (int64_t r = 0; r < n; r++) {
            const T* row = table + (rows ? rows[r] : r) * C;
            W y[G] = {};
            for (int64_t c = 0; c < C; c++)
                for (int g = 0; g < G; g++) y[g] += x[c * G + g] * row[g * distance + c];
            for (int g = 0; g < G; g++) to[r * G + g] = y[g];
        }
    }
    // Back from gradients (n, G), to the queries and the table.
    template <int G> void tabulate_backward(const W* x, const T* table, int64_t distance, int64_t n,
                                            const int64_t* rows, const W* grad, W* grad_x, W* grad_table) const {
        for (int64_t r = 0; r < n; r++) {
            const int64_t start = (rows ? rows[r] : r) * C;
            W y[G];
            for (int g = 0; g < G; g++) y[g] = grad[r * G + g];
            for (int64_t c = 0; c < C; c++) {
                if (distance == 0) {
                    W z = grad_table[start + c];
                    for (int g = 0; g < G; g++) z += y[g] * x[c * G + g];
                    grad_table[start + c] = z;
                } else {
                    for (int g = 0; g < G; g++) grad_table[g * distance + start + c] += y[g] * x[c * G + g];
                }
                for (int g = 0; g < G; g++) grad_x[c * G + g] += y[g] * table[g * distance + start + c];
            }
        }
    }

    uint32_t row_key(int64_t h, int64_t j) const { return Dropout<T>::mix(key + uint32_t(h * J + j)); }
    W kept(uint32_t row, int64_t n, int64_t i) const {
        const uint32_t place = uint32_t(near[n / P] * P + n % P);
        return dropout.mask(Dropout<T>::mix(row + place), first + uint32_t(i));
    }

    // What offsets and poses add to the scores of a group from j on, seen from frame h, or each from its own.
    template <int G> void terms(const W* x, int64_t h, int64_t j, bool own) {
        const int64_t frame = own ? j : h;
        if (spatial) tabulate<G>(x, spatial + frame * L * C, own ? L * C : 0, num_near, near.data(), of_offsets.data);
        if (pose) tabulate<G>(x, pose + frame * P * C, own ? P * C : 0, P, nullptr, of_poses.data);
    }
    template <int G> void terms_backward(const W* x, int64_t h, int64_t j, bool own, W* grad_x) {
        const int64_t frame = own ? j : h;
        if (spatial)
            tabulate_backward<G>(x, spatial + frame * L * C, own ? L * C : 0, num_near, near.data(), of_offsets.data,
                                 grad_x, grad_spatial.data + frame * L * C);
        if (pose)
            tabulate_backward<G>(x, pose + frame * P * C, own ? P * C : 0, P, nullptr, of_poses.data, grad_x,
                                 grad_pose.data + frame * P * C);
    }
    // Offsets at which no query of the vector at i has a key are left out.
    void look(int64_t i) {
        num_near = 0;
        for (int64_t l = 0; l < L; l++) {
            const T* at = mask.data + s.start + i + s.offset[l];
            if (std::any_of(at, at + width, [](T x) { return x == 0; })) near[num_near++] = l;
        }
        num_keys = num_near * P;
    }
    template <int G> void add_mask(int64_t i) {
        for (int64_t l = 0; l < num_near; l++) {
            const W m = load(mask.data + s.start + i + s.offset[near[l]]);
            for (int g = 0; g < G; g++) of_offsets[l * G + g] = spatial ? of_offsets[l * G + g] + m : m;
        }
    }

    // Exponentials of scores (S, G) in place, their sums, and the logarithms of those.
    template <int G> void exponentials(W* x, W* total_of, T* logs, int64_t stride) const {
        W most[G];
        for (int g = 0; g < G; g++) most[g] = x[g], total_of[g] = W{};
        for (int64_t n = 1; n < num_keys; n++)
            for (int g = 0; g < G; g++) most[g] = larger<T>(most[g], x[n * G + g]);
        for (int64_t n = 0; n < num_keys; n++)
            for (int g = 0; g < G; g++) total_of[g] += x[n * G + g] = exp2<T>(x[n * G + g] - most[g]);
        for (int g = 0; g < G; g++)
            for (int lane = 0; lane < width; lane++)
                logs[g * stride + lane] = most[g][lane] + std::log2(total_of[g][lane]);
    }

    template <class F> void by_group(F f) {
        for (int64_t j = 0; j < J; j += GROUP) dispatch(std::min<int64_t>(GROUP, J - j), [&](auto g) { f(g, j); });
    }

    void forward_own(int64_t i) {
        look(i);
        by_group([&](auto size, int64_t j) {
            constexpr int G = size;
            gather<G>(q, J, j, i, here.data);
            terms<G>(here.data, 0, j, true);
            add_mask<G>(i);
            products<G>(here.data, k, i, of_offsets.data, pose ? of_poses.data : nullptr, scores.data);
            W total_of[G];
            exponentials<G>(scores.data, total_of, sums.data + j * s.queries + i, s.queries);
            drop<G>(0, j, i, scores.data);
            std::fill_n(there.data, C * G, W{});
            combine<G>(scores.data, v, i, there.data);
            for (int g = 0; g < G; g++) {
                const W share = T(1) / total_of[g];
                for (int64_t c = 0; c < C; c++)
                    store(out.data + (c * O + j + g) * s.queries + i, there[c * G + g] * share);
            }
        });
    }

    template <int G> void drop(int64_t h, int64_t j, int64_t i, W* x) const {
        if (!dropout.on) return;
        for (int g = 0; g < G; g++) {
            const uint32_t row = row_key(h, j + g);
            for (int64_t n = 0; n < num_keys; n++) x[n * G + g] *= kept(row, n, i);
        }
    }

    void backward_own(int64_t i) {
        look(i);
        by_group([&](auto size, int64_t j) {
            constexpr int G = size;
            gather<G>(q, J, j, i, here.data);
            gather<G>(out, O, j, i, there.data);
            terms<G>(here.data, 0, j, true);
            add_mask<G>(i);
            products<G>(here.data, k, i, of_offsets.data, pose ? of_poses.data : nullptr, scores.data);
            products<G>(there.data, v, i, nullptr, nullptr, grads.data);
            const T* logs = sums.data + j * s.queries + i;
            W inner[G] = {};
            for (int64_t n = 0; n < num_keys; n++)
                for (int g = 0; g < G; g++) scores[n * G + g] = exp2<T>(scores[n * G + g] - load(logs + g * s.queries));
            if (dropout.on) std::copy_n(scores.data, num_keys * G, probabilities().data), drop<G>(0, j, i, scores.data);
            const W* p = dropout.on ? undropped.data : scores.data;
            for (int64_t n = 0; n < num_keys; n++)
                for (int g = 0; g < G; g++) inner[g] += scores[n * G + g] * grads[n * G + g];
            for (int64_t n = 0; n < num_keys; n++)
                for (int g = 0; g < G; g++)
                    grads[n * G + g] = scores[n * G + g] * grads[n * G + g] - p[n * G + g] * inner[g];
            W* grad_x = grad_here.data;
            std::fill_n(grad_x, C * G, W{});
            sum_terms<G>(grads.data);
            terms_backward<G>(here.data, 0, j, true, grad_x);
            combine<G>(grads.data, k, i, grad_x);
            for (int64_t c = 0; c < C; c++)
                for (int g = 0; g < G; g++) store(grad_q.data + (c * J + j + g) * s.queries + i, grad_x[c * G + g]);
            spread<G>(grads.data, here.data, grad_k, i);
            spread<G>(scores.data, there.data, grad_v, i);
        });
    }

    // The gradients of what offsets and poses add: sums of those of the scores, (S, G).
    template <int G> void sum_terms(const W* grad) {
        if (pose) std::fill_n(of_poses.data, P * G, W{});
        for (int64_t l = 0; l < num_near; l++) {
            W by_offset[G] = {};
            for (int64_t p = 0; p < P; p++)
                for (int g = 0; g < G; g++) {
                    by_offset[g] += grad[(l * P + p) * G + g];
                    if (pose) of_poses[p * G + g] += grad[(l * P + p) * G + g];
                }
            for (int g = 0; g < G; g++) of_offsets[l * G + g] = by_offset[g];
        }
    }

    Buffer<W>& probabilities() {
        if (undropped.size == 0) undropped = Buffer<W>(S * GROUP);
        return undropped;
    }

    // The scores without the terms of a frame, for all query poses: group by group, (S, G) each.
    void make_content(int64_t i) {
        look(i);
        by_group([&](auto size, int64_t j) {
            constexpr int G = size;
            gather<G>(q, J, j, i, here.data + C * j);
            for (int64_t l = 0; l < num_near; l++) {
                const W m = load(mask.data + s.start + i + s.offset[near[l]]);
                for (int g = 0; g < G; g++) of_offsets[l * G + g] = m;
            }
            products<G>(here.data + C * j, k, i, of_offsets.data, nullptr, content.data + S * j);
        });
    }
    template <int G> void add_terms(int64_t h, int64_t j, W* to) {
        terms<G>(here.data + C * j, h, j, false);
        const W* from = content.data + S * j;
        for (int64_t l = 0; l < num_near; l++)
            for (int64_t p = 0; p < P; p++)
                for (int g = 0; g < G; g++) {
                    const int64_t n = (l * P + p) * G + g;
                    to[n] = from[n];
                    if (spatial) to[n] += of_offsets[l * G + g];
                    if (pose) to[n] += of_poses[p * G + g];
                }
    }

    template <class F> void by_frames(F f) {
        for (int64_t h = 0; h < O; h += GROUP) dispatch(std::min<int64_t>(GROUP, O - h), [&](auto g) { f(g, h); });
    }

    void forward_all(int64_t i) {
        make_content(i);
        by_frames([&](auto frames, int64_t h) {
            constexpr int F = frames;
            std::fill_n(summed.data, num_keys * F, W{});
            for (int f = 0; f < F; f++)
                by_group([&](auto size, int64_t j) {
                    constexpr int G = size;
                    add_terms<G>(h + f, j, scores.data);
                    W total_of[G];
                    exponentials<G>(scores.data, total_of, sums.data + ((h + f) * J + j) * s.queries + i, s.queries);
                    drop<G>(h + f, j, i, scores.data);
                    for (int g = 0; g < G; g++) total_of[g] = T(1) / total_of[g];
                    for (int64_t n = 0; n < num_keys; n++)
                        for (int g = 0; g < G; g++) summed[n * F + f] += scores[n * G + g] * total_of[g];
                });
            std::fill_n(there.data, C * F, W{});
            combine<F>(summed.data, v, i, there.data);
            for (int64_t c = 0; c < C; c++)
                for (int f = 0; f < F; f++) store(out.data + (c * O + h + f) * s.queries + i, there[c * F + f]);
        });
    }

    void backward_all(int64_t i) {
        make_content(i);
        std::fill_n(total.data, S * J, W{});
        std::fill_n(grad_here.data, C * J, W{});
        by_frames([&](auto frames, int64_t h) {
            constexpr int F = frames;
            gather<F>(out, O, h, i, there.data);
            products<F>(there.data, v, i, nullptr, nullptr, of_values.data);
            std::fill_n(summed.data, num_keys * F, W{});
            for (int f = 0; f < F; f++)
                by_group([&](auto size, int64_t j) {
                    constexpr int G = size;
                    add_terms<G>(h + f, j, scores.data);
                    const T* logs = sums.data + ((h + f) * J + j) * s.queries + i;
                    W inner[G] = {}, log[G];
                    uint32_t row[G];
                    for (int g = 0; g < G; g++) log[g] = load(logs + g * s.queries), row[g] = row_key(h + f, j + g);
                    for (int64_t n = 0; n < num_keys; n++) {
                        const W value = of_values[n * F + f];
                        W together = summed[n * F + f];
                        for (int g = 0; g < G; g++) {
                            const W p = exp2<T>(scores[n * G + g] - log[g]);
                            const W left = dropout.on ? p * kept(row[g], n, i) : p;
                            const W grad = left * value;
                            inner[g] += grad, together += left;
                            scores[n * G + g] = p, grads[n * G + g] = grad;
                        }
                        summed[n * F + f] = together;
                    }
                    W* sum_of = total.data + S * j;
                    for (int64_t n = 0; n < num_keys; n++)
                        for (int g = 0; g < G; g++) {
                            const W grad = grads[n * G + g] - scores[n * G + g] * inner[g];
                            grads[n * G + g] = grad, sum_of[n * G + g] += grad;
                        }
                    sum_terms<G>(grads.data);
                    terms_backward<G>(here.data + C * j, h + f, j, false, grad_here.data + C * j);
                });
            spread<F>(summed.data, there.data, grad_v, i);
        });
        by_group([&](auto size, int64_t j) {
            constexpr int G = size;
            W* grad_x = grad_here.data + C * j;
            combine<G>(total.data + S * j, k, i, grad_x);
            for (int64_t c = 0; c < C; c++)
                for (int g = 0; g < G; g++) store(grad_q.data + (c * J + j + g) * s.queries + i, grad_x[c * G + g]);
            spread<G>(total.data + S * j, here.data + C * j, grad_k, i);
        });
    }

    const Arguments& a;
    const Layout& s;
    const int64_t J, P, H, O, L, C, S;   // S: the most keys that a query has
    std::vector<int64_t> near;           // the offsets at which any of the queries of a vector has a key,
    int64_t num_near = 0, num_keys = 0;  // how many these are, and how many keys that makes
    const Dropout<T> dropout;
    const bool backward;
    uint32_t key = 0, first = 0;
    const T *spatial = nullptr, *pose = nullptr;
    Buffer<T> mask, q, k, v, out, sums, grad_q, grad_k, grad_v;
    Buffer<W> of_offsets, of_poses, here, there, scores, content, summed;
    Buffer<W> grad_here, grads, total, of_values, undropped, grad_spatial, grad_pose;
};

template <class T> int run(const Arguments& a) {
    try {
        const Layout layout(a, WIDTH<T>, sizeof(T));
        // Every part of a batch has gradients of tables of its own, which are added in order: whatever the threads did
        // first, the result is the same.
        const int64_t tasks = a.heads * a.parts;
        const int64_t of_spatial = a.grad_spatial ? a.frames * a.offsets * a.channels : 0;
        const int64_t of_pose = a.grad_pose ? a.frames * a.key_poses * a.channels : 0;
        std::vector<double> spatial(tasks * of_spatial), pose(tasks * of_pose);
        const auto make = [&] { return Worker<T>(a, layout); };
        const bool done = share(tasks, a.threads, make, [&](Worker<T>& worker, int64_t task) {
            const int64_t part = task % a.parts;
            for (int64_t b = part * a.images / a.parts; b < (part + 1) * a.images / a.parts; b++)
                worker.work(task / a.parts, b);
            worker.take_tables(spatial.data() + task * of_spatial, pose.data() + task * of_pose);
        });
        for (int64_t task = 0; task < tasks; task++) {
            const int64_t m = task / a.parts;
            double* to_spatial = a.grad_spatial + m % a.spatial_heads * of_spatial;
            double* to_pose = a.grad_pose + m % a.pose_heads * of_pose;
            for (int64_t i = 0; i < of_spatial; i++) to_spatial[i] += a.unit * spatial[task * of_spatial + i];
            for (int64_t i = 0; i < of_pose; i++) to_pose[i] += a.unit * pose[task * of_pose + i];
        }
        return !done;
    } catch (const std::bad_alloc&) {
        return 1;
    }
}

}  // namespace

// 0, or 1 where there was not enough memory. NUMBER is the type of all numbers but the gradients of the tables.
extern "C" int escnn_attention(const Arguments* a) { return run<NUMBER>(*a); }
