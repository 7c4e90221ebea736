// Attention of points to their neighbours, forward and backward: what functional/points/native.py calls.
//
// Queries come in groups that see the same keys. Lanes of a vector are keys side by side: those of all poses in a row,
// n = p * K + k. A row of scores belongs to a query, an output pose h and a query pose j, which in the own mode is that
// of the output. The backward pass has two parts: for each query the gradients of its scores, and what the query gets
// from them; then for each key, in one head and a few channels, the sum over all queries that see it. Where no two
// groups have keys in common, the second follows the first group by group, and weights stay in the cache. No two threads
// ever add to the same place, and the result is the same for any number of them.

#include <limits>

#include "buffer.h"
#include "dropout.h"
#include "simd.h"
#include "threads.h"

namespace {

extern "C" struct Arguments {
    const void *q, *k, *v;             // (M, G * A, J, C) or null, (M, points, P, C) twice
    const int64_t *queries, *keys;     // (G, A), (G, K): points; -1 at the end of a row fills up
    const void *reads, *features;      // (M, G * A, J, F) with (X, H, F, G, A, K), or null; X is M or 1
    const void* pose;                  // (Y, H, C, poses) or null; Y is M or 1, and poses whole vectors that hold P
    const void* extra;                 // (M, S, P | 1, G, A, K) or null; S is H, or H * J where all poses contribute
    const void* log_measure;           // (points, P) or null
    void *out, *sums;                  // (M, G * A, H, C), (M, G * A, S)
    const void* grad;                  // (M, G * A, H, C); null in the forward pass
    void *grad_q, *grad_k, *grad_v;    // as q, k, v, and zero at first; any may be null
    void *grad_reads, *grad_features;  // as those; the first zero at first, the second where anything fills up
    void *grad_pose, *grad_extra;      // as those; the first zero at first, the second where anything fills up
    void *weights, *grad_scores;       // (M, G * A, H, row), (M, G * A, H or J, row): room for the backward pass, unless
                                       // groups have no keys in common
    int64_t heads, points, groups, group_queries, group_keys, frames, query_poses, key_poses, channels;
    int64_t num_features, feature_heads, pose_heads, poses, extra_poses, summed, counted, disjoint, threads, seed;
    int64_t row;  // at least of P * K and one vector more
    double dropout;
};

template <class T> struct Shape {
    static constexpr int width = WIDTH<T>;
    explicit Shape(const Arguments& a)
            : N(a.points),
              A(a.group_queries),
              K(a.group_keys),
              rows(a.groups * a.group_queries),
              H(a.frames),
              J(a.query_poses),
              P(a.key_poses),
              C(a.channels),
              F(a.num_features),
              S(a.summed ? a.frames * a.query_poses : a.frames),
              D(a.summed ? a.query_poses : a.frames),
              chunk(a.disjoint ? A : std::min({A, fitting(a), std::max<int64_t>(8, A * a.groups / 32 / GROUP * GROUP)})),
              chunks((A + chunk - 1) / chunk) {}
    int64_t padded() const { return (K + width - 1) / width * width; }
    // Queries of a group that are taken at once, where it is not taken whole: so many for any number of threads.
    int64_t fitting(const Arguments& a) const {
        return std::max<int64_t>(1, (int64_t(1) << 20) / (a.heads * S * padded()));
    }
    // The pose of the query of a frame in the own mode; features without poses have one.
    int64_t own(int64_t h) const { return J == 1 ? 0 : h; }
    // How many keys a group has.
    static int64_t count(const int64_t* index, int64_t n) {
        while (n > 0 && index[n - 1] < 0) n--;
        return n;
    }
    const int64_t N, A, K, rows, H, J, P, C, F, S, D, chunk, chunks;  // S, D: scores and their gradients of a query
};

// The second part: the keys, in one head and as many poses and channels as a vector has lanes.
template <class T> struct Keys {
    using W = V<T>;
    static constexpr int width = WIDTH<T>;

    explicit Keys(const Arguments& a) : a(a), s(a), entries(s.P * s.C), tiles((entries + width - 1) / width) {}

    int64_t tasks() const { return a.heads * tiles; }

    void work(int64_t task) const {
        const int64_t m = task / tiles, queries = s.A * a.row;
        for (int64_t g = 0; g < a.groups; g++) {
            const int64_t first = (m * a.groups + g) * queries;
            work(m, g, task % tiles, static_cast<const T*>(a.weights) + first * s.H,
                 static_cast<const T*>(a.grad_scores) + first * s.D);
        }
    }
    // All of a group in one head, of whose queries the weights are these, and the gradients of scores.
    void work(int64_t m, int64_t g, const T* weights, const T* grad_scores) const {
        for (int64_t tile = 0; tile < tiles; tile++) work(m, g, tile, weights, grad_scores);
    }

  private:
    void work(int64_t m, int64_t g, int64_t tile, const T* weights, const T* grad_scores) const {
        const int64_t *keys = a.keys + g * s.K, K = s.count(keys, s.K);
        int64_t k = 0;
        for (; k + width < K; k += 2 * width) work<2>(m, g, tile * width, keys, K, k, weights, grad_scores);
        if (k < K) work<1>(m, g, tile * width, keys, K, k, weights, grad_scores);
    }
    // Poses and channels from the first on, of B vectors of keys.
    template <int B> void work(int64_t m, int64_t g, int64_t first, const int64_t* keys, int64_t K, int64_t k,
                               const T* weights, const T* grad_scores) const {
        const int64_t some = std::min<int64_t>(width, entries - first), place = m * s.rows + g * s.A;
        const int64_t offset = m * s.N * entries + first;
        const auto sum_up = [&](T* to, int64_t each, const T* weights, auto numbers) {
            W sums[B][width] = {};
            by_row(g, each, [&](auto size, const int64_t* row) {
                constexpr int R = size;
                const T *weight[R], *x[R];
                for (int r = 0; r < R; r++) weight[r] = weights + row[r] * a.row + k, x[r] = numbers(row[r]);
                spread<R, B>(weight, x, first, some, K, sums);
            });
            for (int b = 0; b < B; b++) add(sums[b], keys + k + b * width, K - k - b * width, to + offset, some);
        };
        if (a.grad_k)
            sum_up(static_cast<T*>(a.grad_k), s.D, grad_scores, [&](int64_t row) {
                const int64_t d = row % s.D, j = a.summed ? d : s.own(d);
                return static_cast<const T*>(a.q) + ((place + row / s.D) * s.J + j) * s.C;
            });
        if (a.grad_v)
            sum_up(static_cast<T*>(a.grad_v), s.H, weights,
                   [&](int64_t row) { return static_cast<const T*>(a.grad) + (place * s.H + row) * s.C; });
    }

    // Calls f(number of rows, rows) for `each` rows of every query of a group, in groups.
    template <class F> void by_row(int64_t g, int64_t each, F f) const {
        int64_t row[GROUP];
        int n = 0;
        for (int64_t i = 0; i < s.A; i++) {
            if (a.queries[g * s.A + i] < 0) continue;
            for (int64_t e = 0; e < each; e++) {
                row[n++] = i * each + e;
                if (n == GROUP) f(std::integral_constant<int, GROUP>(), row), n = 0;
            }
        }
        for (int r = 0; r < n; r++) f(std::integral_constant<int, 1>(), row + r);
    }
    // Weights at the keys times numbers of a query, R such, added to (poses and channels, keys).
    template <int R, int B> void spread(const T* const* weight, const T* const* x, int64_t first, int64_t some,
                                        int64_t K, W (*to)[width]) const {
        int64_t p = first / s.C, c = first % s.C;
        for (int64_t e = 0; e < some; p++, c = 0) {
            W w[R][B];
            for (int r = 0; r < R; r++)
                for (int b = 0; b < B; b++) w[r][b] = load(weight[r] + p * K + b * width);
            for (; c < s.C && e < some; c++, e++)
                for (int b = 0; b < B; b++) {
                    W y = to[b][e];
                    for (int r = 0; r < R; r++) y += x[r][c] * w[r][b];
                    to[b][e] = y;
                }
        }
    }
    void add(W* x, const int64_t* keys, int64_t number, T* to, int64_t some) const {
        transpose<T>(x);
        for (int64_t i = 0; i < std::min<int64_t>(width, number); i++) {
            T* row = to + keys[i] * entries;
            if (some == width)
                store(row, load(row) + x[i]);
            else
                for (int64_t e = 0; e < some; e++) row[e] += x[i][e];
        }
    }

    const Arguments& a;
    const Shape<T> s;
    const int64_t entries, tiles;
};

// The first part: queries and what they see.
template <class T> struct Queries {
    using W = V<T>;
    static constexpr int width = WIDTH<T>;
    static constexpr T nothing = sizeof(T) == 4 ? T(-1e30) : T(-1e300);

    explicit Queries(const Arguments& a)
            : a(a),
              s(a),
              of_keys(a),
              dropout(a.dropout),
              kt(s.C * a.row),
              vt(s.C * a.row),
              measure(a.row),
              base(GROUP * a.row),
              scores(GROUP * a.row),
              values(GROUP * a.row),
              kept(GROUP * a.row),
              by_pose(GROUP * (a.poses + width)),
              zeros(a.row) {
        if (a.grad && a.disjoint) own_weights = Buffer<T>(s.A * s.H * a.row), own_grads = Buffer<T>(s.A * s.D * a.row);
        if (a.features) located = Buffer<T>(s.chunk * a.heads * s.S * s.padded());
    }

    // The gradient of the table of poses is added to `of_table`.
    void work(int64_t item, T* of_table) {
        grad_table = of_table;
        g = item / s.chunks;
        keys = a.keys + g * s.K;
        K = s.count(keys, s.K), n = s.P * K, vectors = (n + width - 1) / width;
        if (K == 0) return;
        there.clear();
        for (int i = 0; i < width; i++) last[i] = i < (K - 1) % width + 1 ? -1 : 0;
        const int64_t from = item % s.chunks * s.chunk;
        for (int64_t i = from; i < std::min(s.A, from + s.chunk); i++)
            if (a.queries[g * s.A + i] >= 0) there.push_back(i);
        if (there.empty()) return;
        measured();
        if (a.features) locate();
        for (m = 0; m < a.heads; m++) {
            if (a.q) pack(as<const T>(a.k) + m * s.N * s.P * s.C, kt);
            pack(as<const T>(a.v) + m * s.N * s.P * s.C, vt);
            if (a.summed)
                for (int64_t i = 0; i < int64_t(there.size()); i++) a.grad ? backward_all(i) : forward_all(i);
            else
                own();
            if (a.grad && a.disjoint) of_keys.work(m, g, own_weights.data, own_grads.data);
        }
        if (a.grad_reads || a.grad_features) locate_backward();
    }

  private:
    void own() {
        const int64_t frames = there.size() * s.H;
        for (int64_t f = 0; f < frames; f += GROUP)
            dispatch(std::min<int64_t>(GROUP, frames - f), [&](auto size) {
                constexpr int G = size;
                Row block[G];
                for (int r = 0; r < G; r++) {
                    const int64_t at = (f + r) / s.H, h = (f + r) % s.H;
                    block[r] = Row{at, there[at], h, s.own(h), h, h};
                }
                a.grad ? backward_own<G>(block) : forward_own<G>(block);
            });
    }
    // Where weights and gradients of scores go, of the queries of the group in this head.
    T* weights_of(int64_t i) const {
        return (a.disjoint ? own_weights.data : as<T>(a.weights) + (m * s.rows + g * s.A) * s.H * a.row) + i * s.H * a.row;
    }
    T* grad_scores_of(int64_t i) const {
        T* group = a.disjoint ? own_grads.data : as<T>(a.grad_scores) + (m * s.rows + g * s.A) * s.D * a.row;
        return group + i * s.D * a.row;
    }
    struct Row {
        int64_t at, i, h, j, pair, d;  // the query here and in its group, poses, which scores and gradients of them
    };
    template <class U> static U* as(const void* p) { return static_cast<U*>(p); }
    template <class U> static U* as(void* p) { return static_cast<U*>(p); }

    int64_t place(const Row& r) const { return m * s.rows + g * s.A + r.i; }  // of a query in (M, G * A)
    const T* query(const Row& r) const { return as<const T>(a.q) + (place(r) * s.J + r.j) * s.C; }

    // The measure of the keys: logarithms to be added, or shares of the whole to be multiplied with.
    void measured() {
        const T* log = as<const T>(a.log_measure);
        T total = 0;
        for (int64_t p = 0; p < s.P; p++)
            for (int64_t k = 0; k < K; k++) {
                const T x = log ? log[keys[k] * s.P + p] : T(0);
                measure[p * K + k] = a.counted ? std::exp(x) : x;
                total += measure[p * K + k];
            }
        total = std::max(total, std::numeric_limits<T>::min());
        if (a.counted)
            for (int64_t i = 0; i < n; i++) measure[i] /= total;
        std::fill(measure.data + n, measure.data + vectors * width, a.counted ? T(0) : nothing);
    }

    // The keys of the group, (points, P, C), as (C, n).
    void pack(const T* from, Buffer<T>& to) const {
        const int64_t entries = s.P * s.C;
        for (int64_t e = 0; e < entries; e += width) {
            // What there is too much of the last keys of a pose is written over with the first of the next.
            for (int64_t k = (K - 1) / width * width; k >= 0; k -= width) {
                W x[width];
                for (int i = 0; i < width; i++) {
                    x[i] = W{};
                    if (k + i >= K) continue;
                    const T* row = from + keys[k + i] * entries + e;
                    if (e + width <= entries)
                        x[i] = load(row);
                    else
                        std::memcpy(&x[i], row, (entries - e) * sizeof(T));
                }
                transpose<T>(x);
                int64_t p = e / s.C, c = e % s.C;
                for (int64_t i = 0; i < std::min<int64_t>(width, entries - e); i++) {
                    store(to.data + c * a.row + p * K + k, x[i]);
                    if (++c == s.C) c = 0, p++;
                }
            }
        }
        for (int64_t c = 0; c < s.C; c++) std::fill(to.data + c * a.row + n, to.data + c * a.row + vectors * width, T(0));
    }

    // What the functions of the location are worth to all rows, each (K).
    void locate() {
        by_function([&](const Functions& of) {
            by_rows([&](auto size, const Location* row) {
                constexpr int R = size;
                int64_t k = 0;
                for (; k + width < K; k += 2 * width) locate<R, 2>(row, of, k);
                if (k < K) locate<R, 1>(row, of, k);
            });
        });
    }
    struct Functions {
        const T* start;
        int64_t step, first;  // from one function to the next, and where all begin in their gradients
    };
    struct Location {
        const T* read;
        T *grad, *sum;  // of what is read, and the row
    };
    template <int R, int B> inline void locate(const Location* row, const Functions& of, int64_t k) const {
        W y[R][B] = {};
        for (int64_t f = 0; f < s.F; f++) {
            W x[B];
            for (int b = 0; b < B; b++) x[b] = load(of.start + f * of.step + k + b * width);
            for (int i = 0; i < R; i++)
                for (int b = 0; b < B; b++) y[i][b] += row[i].read[f] * x[b];
        }
        for (int i = 0; i < R; i++)
            for (int b = 0; b < B; b++) store(row[i].sum + k + b * width, y[i][b]);
    }
    // Calls f(number of rows, rows, functions) for the rows that read the same functions, in groups.
    template <class F> void by_function(F f) {
        for (int64_t x = 0; x < a.feature_heads; x++)
            for (int64_t at = 0; at < int64_t(there.size()); at++)
                for (int64_t h = 0; h < s.H; h++) {
                    const Functions of = functions(x, h, there[at]);
                    rows.clear();
                    const bool shared = a.feature_heads == 1;
                    for (int64_t m = shared ? 0 : x; m < (shared ? a.heads : x + 1); m++)
                        for (int64_t j = 0; j < s.S / s.H; j++) {
                            const int64_t query = m * s.rows + g * s.A + there[at];
                            const int64_t place = (query * s.J + (a.summed ? j : s.own(h))) * s.F;
                            rows.push_back({as<const T>(a.reads) + place,
                                            a.grad_reads ? as<T>(a.grad_reads) + place : nullptr,
                                            located_at(at, m, h * (s.S / s.H) + j)});
                        }
                    f(of);
                }
    }
    template <class F> void by_rows(F f) {
        const int64_t n = rows.size();
        for (int64_t i = 0; i < n; i += GROUP)
            dispatch(std::min<int64_t>(GROUP, n - i), [&](auto size) { f(size, rows.data() + i); });
    }
    T* located_at(int64_t at, int64_t m, int64_t pair) const {
        return located.data + ((at * a.heads + m) * s.S + pair) * s.padded();
    }
    // The functions of a query, from where whole vectors can be read: the last of all are copied.
    Functions functions(int64_t x, int64_t h, int64_t i) {
        const int64_t step = s.rows * s.K, first = (x * s.H + h) * s.F * step + (g * s.A + i) * s.K;
        const T* start = as<const T>(a.features) + first;
        if (first + (s.F - 1) * step + s.padded() <= a.feature_heads * s.H * s.F * step) return {start, step, first};
        if (copied.size == 0) copied = Buffer<T>(s.F * s.padded());
        for (int64_t f = 0; f < s.F; f++) std::copy_n(start + f * step, K, copied.data + f * s.padded());
        return {copied.data, s.padded(), first};
    }
    // Back, from gradients that are where the rows were.
    void locate_backward() {
        by_function([&](const Functions& of) {
            if (a.grad_reads)
                by_rows([&](auto size, const Location* row) {
                    constexpr int R = size;
                    for (int64_t f = 0; f < s.F; f += 4) of_reads<R>(row, of, f);
                });
            if (a.grad_features)
                for (int64_t f = 0; f < s.F; f += 4)
                    for (int64_t k = 0; k < K; k += width) of_functions(of, f, k);
        });
    }
    template <int R> inline void of_reads(const Location* row, const Functions& of, int64_t f) const {
        const T* at[4];
        for (int b = 0; b < 4; b++) at[b] = of.start + std::min(f + b, s.F - 1) * of.step;
        W y[16] = {};
        for (int64_t k = 0; k < K; k += width) {
            W x[4];
            for (int b = 0; b < 4; b++) x[b] = load(at[b] + k);
            // What follows the last key belongs to another query, and may be no number.
            if (k + width > K)
                for (int b = 0; b < 4; b++) x[b] = last ? x[b] : W{};
            for (int i = 0; i < R; i++) {
                const W w = load(row[i].sum + k);
                for (int b = 0; b < 4; b++) y[i * 4 + b] += w * x[b];
            }
        }
        T total[16];
        sums(y, total);
        for (int i = 0; i < R; i++)
            for (int64_t b = 0; b < std::min<int64_t>(4, s.F - f); b++) row[i].grad[f + b] += total[i * 4 + b];
    }
    void of_functions(const Functions& of, int64_t f, int64_t k) const {
        W y[4] = {};
        int64_t next[4];
        for (int b = 0; b < 4; b++) next[b] = std::min(f + b, s.F - 1);
        for (const Location& row : rows) {
            const W d = load(row.sum + k);
            for (int b = 0; b < 4; b++) y[b] += row.read[next[b]] * d;
        }
        T* to = as<T>(a.grad_features) + of.first + f * s.rows * s.K + k;
        for (int64_t b = 0; b < std::min<int64_t>(4, s.F - f); b++, to += s.rows * s.K) {
            if (k + width <= K)
                store(to, y[b]);
            else
                for (int64_t i = 0; i < K - k; i++) to[i] = y[b][i];
        }
    }
    static W until(const T* p, const T* end) {
        if (p + width <= end) return load(p);
        W x{};
        std::memcpy(&x, p, (end - p) * sizeof(T));
        return x;
    }
    int64_t extra(const Row& r) const {  // of the first pose
        return (((m * s.S + r.pair) * a.extra_poses * a.groups + g) * s.A + r.i) * s.K;
    }
    int64_t extra_step() const { return a.extra_poses == 1 ? 0 : a.groups * s.A * s.K; }

    const T* table(const Row& r) const {
        return as<const T>(a.pose) + ((a.pose_heads == 1 ? 0 : m) * s.H + r.h) * s.C * a.poses;
    }
    // What every pose of a key is worth to a query.
    void add_poses(const Row& r, T* to) const {
        const T *x = query(r), *at = table(r);
        for (int64_t p = 0; p < a.poses; p += width) {
            W y{};
            for (int64_t c = 0; c < s.C; c++) y += x[c] * load(at + c * a.poses + p);
            store(to + p, y);
        }
    }

    // The scores of G rows, (G, n).
    template <int G> void score(const Row* r) {
        const T *start[G], *x[G];
        for (int i = 0; i < G; i++) {
            start[i] = a.counted ? zeros.data : measure.data;
            if (!a.features && !a.pose && !a.extra) continue;
            T* to = base.data + i * a.row;
            const T *at = a.features ? located_at(r[i].at, m, r[i].pair) : zeros.data;
            const T* more = a.extra ? as<const T>(a.extra) + extra(r[i]) : nullptr;
            const T* end = as<const T>(a.extra) + a.heads * s.S * a.extra_poses * s.rows * s.K;
            if (a.pose) add_poses(r[i], by_pose.data);
            // Of a row the last vector is too long: the next row is written over it.
            for (int64_t p = 0; p < s.P; p++)
                for (int64_t k = 0; k < K; k += width) {
                    W y = load(at + k);
                    if (a.pose) y += by_pose[p];
                    if (more) y += until(more + p * extra_step() + k, end);
                    store(to + p * K + k, y);
                }
            std::fill(to + n, to + vectors * width, T(0));
            if (!a.counted)
                for (int64_t v = 0; v < vectors * width; v += width)
                    store(to + v, load(to + v) + load(measure.data + v));
            start[i] = to;
        }
        for (int i = 0; i < G; i++) x[i] = a.q ? query(r[i]) : nullptr;
        products<G>(x, a.q ? s.C : 0, kt, start, scores);
    }

    // G rows of numbers times (C, n), from `start` on.
    template <int G>
    void products(const T* const* x, int64_t channels, const Buffer<T>& keys, const T* const* start, Buffer<T>& to) {
        int64_t v = 0;
        for (; v + 2 <= vectors; v += 2) products<G, 2>(x, channels, keys, start, v * width, to);
        if (v < vectors) products<G, 1>(x, channels, keys, start, v * width, to);
    }
    template <int G, int B> inline void products(const T* const* x, int64_t channels, const Buffer<T>& keys,
                                                 const T* const* start, int64_t n, Buffer<T>& to) {
        W y[G][B];
        for (int i = 0; i < G; i++)
            for (int b = 0; b < B; b++) y[i][b] = load(start[i] + n + b * width);
        for (int64_t c = 0; c < channels; c++) {
            W key[B];
            for (int b = 0; b < B; b++) key[b] = load(keys.data + c * a.row + n + b * width);
            for (int i = 0; i < G; i++)
                for (int b = 0; b < B; b++) y[i][b] += x[i][c] * key[b];
        }
        for (int i = 0; i < G; i++)
            for (int b = 0; b < B; b++) store(to.data + i * a.row + n + b * width, y[i][b]);
    }

    // G rows of weights (G, n) times (C, n), each times a factor, added to rows of numbers.
    template <int G> void combine(const T* const* weight, const Buffer<T>& keys, const T* factor, T* const* to) const {
        for (int64_t c = 0; c < s.C; c += 4) {
            const int64_t some = std::min<int64_t>(4, s.C - c);
            W y[4 * 4] = {};
            for (int64_t v = 0; v < vectors * width; v += width) {
                W w[G];
                for (int i = 0; i < G; i++) w[i] = load(weight[i] + v);
                for (int b = 0; b < 4; b++) {
                    const W x = load(keys.data + std::min(c + b, s.C - 1) * a.row + v);
                    for (int i = 0; i < G; i++) y[b * 4 + i] += w[i] * x;
                }
            }
            T total[4][4];
            sums(y, total[0]);
            for (int i = 0; i < G; i++)
                for (int64_t b = 0; b < some; b++) to[i][c + b] += factor[i] * total[b][i];
        }
    }
    static void sums(const W* x, T* to) {  // of 16 vectors
        constexpr int N = width < 16 ? width : 16;
        for (int i = 0; i < 16; i += N) {
            const W y = reduce<T, N>(x + i, [](W a, W b) { return a + b; });
            std::memcpy(to + i, &y, N * sizeof(T));
        }
    }
    template <int G, class F> static void of_each(const W* x, T* to, F f) {
        constexpr int N = width < 4 ? width : 4;
        for (int i = 0; i < 4; i += N) {
            W y[N];
            for (int b = 0; b < N; b++) y[b] = x[std::min(i + b, G - 1)];
            const W z = reduce<T, N>(y, f);
            std::memcpy(to + i, &z, N * sizeof(T));
        }
    }

    // Scores to weights that are not divided by their sum yet: by what they are to be multiplied, and logarithms.
    template <int G> void exponentials(const Row* r, T* factor) {
        if (a.counted) {
            for (int i = 0; i < G; i++) {
                factor[i] = 1;
                T* x = scores.data + i * a.row;
                for (int64_t v = 0; v < vectors * width; v += width) store(x + v, load(x + v) * load(measure.data + v));
            }
            return;
        }
        W most[G], total[G] = {};
        for (int i = 0; i < G; i++) most[i] = load(scores.data + i * a.row);
        for (int64_t v = width; v < vectors * width; v += width)
            for (int i = 0; i < G; i++) most[i] = larger<T>(most[i], load(scores.data + i * a.row + v));
        T top[4], sum_of[4];
        of_each<G>(most, top, [](W a, W b) { return larger<T>(a, b); });
        for (int64_t v = 0; v < vectors * width; v += width)
            for (int i = 0; i < G; i++) {
                T* x = scores.data + i * a.row + v;
                const W e = exp2<T>((load(x) - top[i]) * LOG2E<T>);
                total[i] += e;
                store(x, e);
            }
        of_each<G>(total, sum_of, [](W a, W b) { return a + b; });
        for (int i = 0; i < G; i++) {
            factor[i] = 1 / sum_of[i];
            as<T>(a.sums)[place(r[i]) * s.S + r[i].pair] = top[i] + std::log(sum_of[i]);
        }
    }
    // Scores to weights, by logarithms of a forward pass.
    template <int G> void weights(const Row* r) {
        for (int i = 0; i < G; i++) {
            T* x = scores.data + i * a.row;
            const T log = as<const T>(a.sums)[place(r[i]) * s.S + r[i].pair];
            for (int64_t v = 0; v < vectors * width; v += width)
                store(x + v, a.counted ? load(x + v) * load(measure.data + v) : exp2<T>((load(x + v) - log) * LOG2E<T>));
        }
    }
    W mask(const Row& r, int64_t v) const {
        const uint32_t key = Dropout<T>::mix(uint32_t(a.seed) + uint32_t(m));
        const uint32_t row = Dropout<T>::mix(key ^ uint32_t(place(r) - m * s.rows));
        return dropout.mask(Dropout<T>::mix(row + uint32_t(a.seed >> 32) + uint32_t(r.pair)), uint32_t(v));
    }
    template <int G> void drop(const Row* r) {
        if (!dropout.on) return;
        for (int i = 0; i < G; i++)
            for (int64_t v = 0; v < vectors * width; v += width) {
                T* x = scores.data + i * a.row + v;
                store(x, load(x) * mask(r[i], v));
            }
    }

    template <int G> void forward_own(const Row* r) {
        score<G>(r);
        T factor[G], *to[G];
        exponentials<G>(r, factor);
        drop<G>(r);
        const T* weight[G];
        for (int i = 0; i < G; i++) {
            weight[i] = scores.data + i * a.row;
            to[i] = as<T>(a.out) + (place(r[i]) * s.H + r[i].h) * s.C;
        }
        combine<G>(weight, vt, factor, to);
    }

    void forward_all(int64_t at) {
        const int64_t first = m * s.rows + g * s.A + there[at];
        for (int64_t h = 0; h < s.H; h++) {
            std::fill_n(values.data, vectors * width, T(0));
            by_group(at, h, [&](auto size, const Row* r) {
                constexpr int G = size;
                score<G>(r);
                T factor[G];
                exponentials<G>(r, factor);
                drop<G>(r);
                for (int64_t v = 0; v < vectors * width; v += width) {
                    W x = load(values.data + v);
                    for (int b = 0; b < G; b++) x += factor[b] * load(scores.data + b * a.row + v);
                    store(values.data + v, x);
                }
            });
            const T* weight = values.data;
            const T one = 1;
            T* to = as<T>(a.out) + (first * s.H + h) * s.C;
            combine<1>(&weight, vt, &one, &to);
        }
    }
    // All query poses for one of the output, in groups.
    template <class F> void by_group(int64_t at, int64_t h, F f) {
        for (int64_t j = 0; j < s.J; j += GROUP)
            dispatch(std::min<int64_t>(GROUP, s.J - j), [&](auto size) {
                constexpr int G = size;
                Row block[G];
                for (int b = 0; b < G; b++) block[b] = Row{at, there[at], h, j + b, h * s.J + j + b, j + b};
                f(size, block);
            });
    }

    // From scores and the gradients of weights, (G, n) with the one of a frame, to weights after dropout in `kept` and
    // the gradients of scores in `scores`.
    template <int G> void differentiate(const Row* r, const T* const* of_weights) {
        weights<G>(r);
        W inner[G] = {};
        for (int i = 0; i < G; i++) {
            const T* x = scores.data + i * a.row;
            T* to = kept.data + i * a.row;
            for (int64_t v = 0; v < vectors * width; v += width) {
                const W p = dropout.on ? load(x + v) * mask(r[i], v) : load(x + v);
                store(to + v, p);
                inner[i] += p * load(of_weights[i] + v);
            }
        }
        T total[4] = {};
        if (!a.counted) of_each<G>(inner, total, [](W a, W b) { return a + b; });
        for (int i = 0; i < G; i++) {
            T* x = scores.data + i * a.row;
            for (int64_t v = 0; v < vectors * width; v += width) {
                const W gradient = load(of_weights[i] + v);
                W y;
                if (a.counted)
                    y = gradient * load(measure.data + v) * (dropout.on ? mask(r[i], v) : all<T>(1));
                else
                    y = load(kept.data + i * a.row + v) * gradient - load(x + v) * total[i];
                store(x + v, y);
            }
        }
        of_terms<G>(r);
    }

    // The gradients of what is added to the products, from those of the scores.
    template <int G> void of_terms(const Row* r) {
        for (int i = 0; i < G; i++) {
            const T* x = scores.data + i * a.row;
            if (a.grad_extra) {
                T* to = as<T>(a.grad_extra) + extra(r[i]);
                for (int64_t p = 0; p < s.P; p++) {
                    if (p == 0 || a.extra_poses > 1)
                        std::memcpy(to + p * extra_step(), x + p * K, K * sizeof(T));
                    else
                        for (int64_t k = 0; k < K; k++) to[k] += x[p * K + k];
                }
            }
        }
        if (of_every_pose() || a.grad_reads || a.grad_features) of_sums<G>(r);
    }
    // The query has a part in what poses are worth to it, whether or not their table has a gradient.
    bool of_every_pose() const { return a.pose && (a.grad_pose || a.grad_q); }
    // Those of what all keys of a pose, and all poses of a key, have together.
    template <int G> void of_sums(const Row* r) {
        T* sum_of[G];
        const bool keep = a.grad_reads || a.grad_features;
        for (int i = 0; i < G; i++) sum_of[i] = keep ? located_at(r[i].at, m, r[i].pair) : nullptr;
        for (int64_t p = 0; p < s.P; p++) {
            W total[G] = {};
            for (int64_t k = 0; k < K; k += width)
                for (int i = 0; i < G; i++) {
                    W y = load(scores.data + i * a.row + p * K + k);
                    if (k + width > K) y = last ? y : W{};
                    total[i] += y;
                    if (keep) store(sum_of[i] + k, p ? load(sum_of[i] + k) + y : y);
                }
            if (!of_every_pose()) continue;
            T number[4];
            of_each<G>(total, number, [](W a, W b) { return a + b; });
            for (int i = 0; i < G; i++) by_pose[i * (a.poses + width) + p] = number[i];
        }
        if (of_every_pose())
            for (int i = 0; i < G; i++) of_poses(r[i], by_pose.data + i * (a.poses + width));
    }
    void of_poses(const Row& r, T* grad) {
        std::fill(grad + s.P, grad + a.poses, T(0));
        const T *x = query(r), *from = table(r);
        T* to = a.grad_pose ? grad_table + (from - as<const T>(a.pose)) : nullptr;
        T* of_query = a.grad_q ? as<T>(a.grad_q) + (x - as<const T>(a.q)) : nullptr;
        constexpr int B = width < 8 ? width : 8;
        for (int64_t c = 0; c < s.C; c += B) {
            W y[B] = {};
            const int64_t some = std::min<int64_t>(B, s.C - c);
            for (int64_t p = 0; p < a.poses; p += width) {
                const W d = load(grad + p);
                for (int64_t b = 0; b < some; b++) {
                    const int64_t i = (c + b) * a.poses + p;
                    y[b] += d * load(from + i);
                    if (to) store(to + i, load(to + i) + x[c + b] * d);
                }
            }
            const W total = reduce<T, B>(y, [](W a, W b) { return a + b; });
            for (int64_t b = 0; of_query && b < some; b++) of_query[c + b] += total[b];
        }
    }

    template <int G> void values_of(const T* const* grad) {
        const T* start[G];
        for (int i = 0; i < G; i++) start[i] = zeros.data;
        products<G>(grad, s.C, vt, start, values);
    }

    template <int G> void backward_own(const Row* r) {
        const T *grad[G], *of_weights[G];
        for (int i = 0; i < G; i++) {
            grad[i] = as<const T>(a.grad) + (place(r[i]) * s.H + r[i].h) * s.C;
            of_weights[i] = values.data + i * a.row;
        }
        values_of<G>(grad);
        score<G>(r);
        differentiate<G>(r, of_weights);
        const T* weight[G];
        T one[G], *to[G];
        for (int i = 0; i < G; i++) {
            std::copy_n(kept.data + i * a.row, vectors * width, weights_of(r[i].i) + r[i].h * a.row);
            std::copy_n(scores.data + i * a.row, vectors * width, grad_scores_of(r[i].i) + r[i].d * a.row);
            weight[i] = scores.data + i * a.row, one[i] = 1;
            if (a.grad_q) to[i] = as<T>(a.grad_q) + (query(r[i]) - as<const T>(a.q));
        }
        if (a.grad_q) combine<G>(weight, kt, one, to);
    }

    void backward_all(int64_t at) {
        const int64_t first = m * s.rows + g * s.A + there[at];
        T* of_scores = grad_scores_of(there[at]);
        std::fill_n(of_scores, s.D * a.row, T(0));
        for (int64_t h = 0; h < s.H; h++) {
            const T* grad = as<const T>(a.grad) + (first * s.H + h) * s.C;
            T* whole = weights_of(there[at]) + h * a.row;
            std::fill_n(whole, vectors * width, T(0));
            values_of<1>(&grad);
            by_group(at, h, [&](auto size, const Row* r) {
                constexpr int G = size;
                const T* of_weights[G];
                for (int b = 0; b < G; b++) of_weights[b] = values.data;
                score<G>(r);
                differentiate<G>(r, of_weights);
                for (int b = 0; b < G; b++)
                    for (int64_t v = 0; v < vectors * width; v += width) {
                        T* to = of_scores + r[b].d * a.row + v;
                        store(to, load(to) + load(scores.data + b * a.row + v));
                        store(whole + v, load(whole + v) + load(kept.data + b * a.row + v));
                    }
            });
        }
        if (!a.grad_q) return;
        by_group(at, 0, [&](auto size, const Row* r) {
            constexpr int G = size;
            const T* weight[G];
            T one[G], *to[G];
            for (int b = 0; b < G; b++) {
                weight[b] = of_scores + r[b].d * a.row, one[b] = 1;
                to[b] = as<T>(a.grad_q) + (query(r[b]) - as<const T>(a.q));
            }
            combine<G>(weight, kt, one, to);
        });
    }

    const Arguments& a;
    const Shape<T> s;
    const Keys<T> of_keys;
    const Dropout<T> dropout;
    int64_t g = 0, m = 0, K = 0, n = 0, vectors = 0;  // of the group at work: keys, with poses, in vectors
    const int64_t* keys = nullptr;
    std::vector<int64_t> there;
    std::vector<Location> rows;  // that read the same functions
    T* grad_table = nullptr;
    typename Lanes<T>::I last;  // which lanes of the last vector of a pose are keys
    Buffer<T> kt, vt, measure, base, scores, values, kept, by_pose, zeros, located, copied;
    Buffer<T> own_weights, own_grads;
};

template <class T> int run(const Arguments& a) {
    try {
        const Shape<T> s(a);
        const int64_t items = a.groups * s.chunks, tasks = std::min<int64_t>(items, a.grad_pose ? 32 : 256);
        // Every task has a gradient of the table of its own, and they are added in order.
        const int64_t table = a.grad_pose ? a.pose_heads * s.H * s.C * a.poses : 0;
        std::vector<T> tables(tasks * table);
        bool done = share(tasks, a.threads, [&] { return Queries<T>(a); }, [&](Queries<T>& worker, int64_t task) {
            for (int64_t i = task * items / tasks; i < (task + 1) * items / tasks; i++)
                worker.work(i, tables.data() + task * table);
        });
        for (int64_t i = 0; i < tasks * table; i++) static_cast<T*>(a.grad_pose)[i % table] += tables[i];
        if (done && !a.disjoint && (a.grad_k || a.grad_v)) {
            const Keys<T> keys(a);
            done = share(keys.tasks(), a.threads, [] { return 0; }, [&](int, int64_t task) { keys.work(task); });
        }
        return !done;
    } catch (const std::bad_alloc&) {
        return 1;
    }
}

}  // namespace

// 0, or 1 where there was not enough memory. NUMBER is the type of all numbers.
extern "C" int escnn_attention(const Arguments* a) { return run<NUMBER>(*a); }
