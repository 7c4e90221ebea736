// Vectors of the processor: arithmetic, exponentials, sums and transposes in registers.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__AVX512F__) || defined(__FMA__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int BYTES = 64;
#elif defined(__AVX__)
constexpr int BYTES = 32;
#else
constexpr int BYTES = 16;
#endif
// Results that are kept in registers: 4 by 4 where there are 32 of them, else 4 by 2.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int BLOCK = 4, MOST_CHANNELS = 6;
#else
constexpr int BLOCK = 2, MOST_CHANNELS = 2;
#endif
constexpr int GROUP = 4;
// In front of a loop over so many registers: one that is unrolled late leaves its arrays in memory.
#define UNROLL _Pragma("GCC unroll 16")
// About how many numbers are added one after the other: longer sums are sums of such sums, whose errors are smaller.
constexpr int SPAN = 128;

template <class T> struct Lanes;
template <> struct Lanes<float> {
    typedef float V __attribute__((vector_size(BYTES)));
    typedef int32_t I __attribute__((vector_size(BYTES)));
    typedef uint32_t U __attribute__((vector_size(BYTES)));
    static constexpr int mantissa = 23;
    // 1.5 * 2^23 and the bias of exponents: added, it rounds to whole numbers, whose lower bits are the exponent.
    static constexpr float shift = 12582912.0f + 127.0f;
    static constexpr float series[] = {1.0f,
                                       0.69314720573411693f,
                                       0.24022646892137519f,
                                       0.055503287816242565f,
                                       0.0096184887724145873f,
                                       0.0013399929977324746f,
                                       0.00015345864015140133f};
    static constexpr float least = -126;
};
template <> struct Lanes<double> {
    typedef double V __attribute__((vector_size(BYTES)));
    typedef int64_t I __attribute__((vector_size(BYTES)));
    typedef uint64_t U __attribute__((vector_size(BYTES)));
    static constexpr int mantissa = 52;
    static constexpr double shift = 6755399441055744.0 + 1023.0;
    static constexpr double series[] = {1.0,
                                        0.69314718055994533,
                                        0.24022650695910156,
                                        0.055504108664819922,
                                        0.0096181291075883456,
                                        0.0013333558146789777,
                                        0.00015403530462501698,
                                        1.5252733490108937e-05,
                                        1.3215433095891532e-06,
                                        1.0178197976954746e-07,
                                        7.0741045737538093e-09,
                                        4.4352888650675365e-10};
    static constexpr double least = -1022;
};

template <class T> using V = typename Lanes<T>::V;
template <class T> constexpr int WIDTH = BYTES / int(sizeof(T));

template <class T> inline V<T> load(const T* p) {
    V<T> x;
    std::memcpy(&x, p, sizeof x);
    return x;
}
// Zeros in registers. GCC makes a slow instruction for memory of `= {}` of many vectors.
template <class W, int N> inline void clear(W (&x)[N]) {
    UNROLL for (int i = 0; i < N; i++) x[i] = W{};
}
template <class W, int M, int N> inline void clear(W (&x)[M][N]) {
    UNROLL for (int i = 0; i < M; i++) clear(x[i]);
}
// A vector that stays in a register while it is an operand of several products. GCC would load it for each of them, and
// two loads take as long as two products.
template <class T> inline V<T> in_register(V<T> x) {
#if defined(__x86_64__)
    asm("" : "+v"(x));
#elif defined(__aarch64__)
    asm("" : "+w"(x));
#endif
    return x;
}
template <class T> inline void store(T* p, V<T> x) { std::memcpy(p, &x, sizeof x); }
// Less zero it is the number itself, whichever its sign: nothing is computed.
template <class T> inline V<T> all(T x) { return x - V<T>{}; }
template <class T> inline T sum(V<T> x) {
    T total = 0;
    for (int i = 0; i < WIDTH<T>; i++) total += x[i];
    return total;
}

// 2^(unit x) of N vectors, by the polynomial of the least largest error around the nearest whole number, with relative
// errors of 2e-9 in single and 3e-18 in double precision, where that is a normal number. What is not a number stays so.
// Each operation waits for the one before: several vectors side by side take less time than one after the other.
template <class T, int N> inline void normal_exp2(const V<T> (&x)[N], T unit, V<T> (&y)[N], V<T> (&rounded)[N]) {
    using L = Lanes<T>;
    constexpr int degree = sizeof(L::series) / sizeof(T) - 1;
    V<T> f[N];
    UNROLL for (int i = 0; i < N; i++) rounded[i] = x[i] * unit + L::shift;
    UNROLL for (int i = 0; i < N; i++) f[i] = x[i] * unit - (rounded[i] - L::shift);
    UNROLL for (int i = 0; i < N; i++) y[i] = all<T>(L::series[degree]);
    UNROLL for (int k = degree - 1; k >= 0; k--)
        UNROLL for (int i = 0; i < N; i++) y[i] = y[i] * f[i] + L::series[k];
    UNROLL for (int i = 0; i < N; i++) {
        typename L::I whole;
        std::memcpy(&whole, &rounded[i], sizeof whole);
        whole <<= L::mantissa;
        V<T> power;
        std::memcpy(&power, &whole, sizeof power);
        y[i] *= power;
    }
}
// 2^(unit (x - most)) of N vectors, for all differences of at most 127 or 1023 by unit: 0 where it is hardly more than
// the smallest normal number. y may be x.
template <class T, int N> inline void exp2(const V<T>* x, const V<T> (&most)[N], T unit, V<T>* y) {
    V<T> less[N], power[N], rounded[N];
    UNROLL for (int i = 0; i < N; i++) less[i] = x[i] - most[i];
    normal_exp2<T>(less, unit, power, rounded);
    UNROLL for (int i = 0; i < N; i++)
        y[i] = rounded[i] <= Lanes<T>::shift + Lanes<T>::least ? V<T>{} : power[i];
}

// 1 / x, of normal numbers whose inverse is one, to about two units in the last place.
template <class T> inline V<T> reciprocal(V<T> x) {
#if defined(__AVX512F__)
    // An approximation of 14 bits and a step of Newton's method; a division takes several times as long.
    if constexpr (sizeof(T) == 4) {
        const V<T> y = V<T>(_mm512_rcp14_ps(__m512(x)));
        return y * (T(2) - x * y);
    }
#endif
    return T(1) / x;
}

template <class T> constexpr T LOG2E = T(1.4426950408889634);
// A score of nothing: less than any other, and finite, so that differences are numbers.
template <class T> constexpr T MASKED = sizeof(T) == 4 ? T(-1e30) : T(-1e300);

// The second where one is not a number. GCC makes two instructions of each comparison.
template <class T> inline V<T> larger(V<T> a, V<T> b) {
#if defined(__AVX512F__)
    if constexpr (sizeof(T) == 4) return V<T>(_mm512_max_ps(__m512(a), __m512(b)));
    if constexpr (sizeof(T) == 8) return V<T>(_mm512_max_pd(__m512d(a), __m512d(b)));
#elif defined(__FMA__)
    if constexpr (sizeof(T) == 4) return V<T>(_mm256_max_ps(__m256(a), __m256(b)));
    if constexpr (sizeof(T) == 8) return V<T>(_mm256_max_pd(__m256d(a), __m256d(b)));
#endif
    return a > b ? a : b;
}
template <class T> inline V<T> smaller(V<T> a, V<T> b) {
#if defined(__AVX512F__)
    if constexpr (sizeof(T) == 4) return V<T>(_mm512_min_ps(__m512(a), __m512(b)));
    if constexpr (sizeof(T) == 8) return V<T>(_mm512_min_pd(__m512d(a), __m512d(b)));
#elif defined(__FMA__)
    if constexpr (sizeof(T) == 4) return V<T>(_mm256_min_ps(__m256(a), __m256(b)));
    if constexpr (sizeof(T) == 8) return V<T>(_mm256_min_pd(__m256d(a), __m256d(b)));
#endif
    return a < b ? a : b;
}
template <class T> inline V<T> plus(V<T> a, V<T> b) { return a + b; }
// a b + c, rounded as in loops with several such sums. In a loop with a single one GCC rounds the product too, for some
// processors.
template <class T> inline V<T> add_product(V<T> a, V<T> b, V<T> c) {
#if defined(__AVX512F__)
    if constexpr (sizeof(T) == 4) return V<T>(_mm512_fmadd_ps(__m512(a), __m512(b), __m512(c)));
    if constexpr (sizeof(T) == 8) return V<T>(_mm512_fmadd_pd(__m512d(a), __m512d(b), __m512d(c)));
#elif defined(__FMA__)
    if constexpr (sizeof(T) == 4) return V<T>(_mm256_fmadd_ps(__m256(a), __m256(b), __m256(c)));
    if constexpr (sizeof(T) == 8) return V<T>(_mm256_fmadd_pd(__m256d(a), __m256d(b), __m256d(c)));
#endif
    return a * b + c;
}

// 1 / (1 + e^-x) of N vectors. At the bounds of x it is hardly more than 0, or 1; what is not a number stays so in
// products with x.
template <class T, int N> inline void sigmoid(const V<T>* x, V<T>* to) {
    constexpr T most = sizeof(T) == 4 ? 87 : 700;
    V<T> bounded[N], power[N], rounded[N];
    UNROLL for (int i = 0; i < N; i++) bounded[i] = smaller<T>(all<T>(most), larger<T>(all<T>(-most), x[i]));
    normal_exp2<T>(bounded, -LOG2E<T>, power, rounded);
    UNROLL for (int i = 0; i < N; i++) to[i] = reciprocal<T>(power[i] + T(1));
}

// The first of two vectors in blocks of S lanes, each followed by the same block of the second; of all even blocks, or
// of all odd ones.
template <class T, int S, int... i> inline V<T> blocks(V<T> a, V<T> b, bool odd, std::integer_sequence<int, i...>) {
#if defined(__clang__)
    return odd ? __builtin_shufflevector(a, b, (i % (2 * S) < S ? i + S : i + WIDTH<T>)...)
               : __builtin_shufflevector(a, b, (i % (2 * S) < S ? i : i - S + WIDTH<T>)...);
#else
    using I = typename Lanes<T>::I;
    return odd ? __builtin_shuffle(a, b, I{(i % (2 * S) < S ? i + S : i + WIDTH<T>)...})
               : __builtin_shuffle(a, b, I{(i % (2 * S) < S ? i : i - S + WIDTH<T>)...});
#endif
}
template <class T, int S> inline V<T> blocks(V<T> a, V<T> b, bool odd) {
    return blocks<T, S>(a, b, odd, std::make_integer_sequence<int, WIDTH<T>>());
}

// N vectors, a power of two, each to a number: lane i has that of the vector i % N. f takes two vectors to one.
template <class T, int N, int S = 1, class F> inline V<T> reduce(const V<T>* x, F f) {
    if constexpr (S == WIDTH<T>) {
        return x[0];
    } else if constexpr (N == 1) {
        const V<T> y = f(blocks<T, S>(x[0], x[0], false), blocks<T, S>(x[0], x[0], true));
        return reduce<T, 1, 2 * S>(&y, f);
    } else {
        V<T> y[N / 2];
        for (int i = 0; i < N / 2; i++)
            y[i] = f(blocks<T, S>(x[2 * i], x[2 * i + 1], false), blocks<T, S>(x[2 * i], x[2 * i + 1], true));
        return reduce<T, N / 2, 2 * S>(y, f);
    }
}

// The sums of the lanes of N vectors, a power of two.
template <class T, int N> inline void sum_lanes(const V<T> (&x)[N], T* to) {
    constexpr int number = WIDTH<T> < N ? WIDTH<T> : N;
    for (int i = 0; i < N; i += number) {
        const V<T> y = reduce<T, number>(x + i, plus<T>);
        std::memcpy(to + i, &y, number * sizeof(T));
    }
}
// R vectors, each to one number, of which `to` has room for 4.
template <class T, int R, class F> inline void reduce_lanes(const V<T>* x, T* to, F f) {
    constexpr int number = WIDTH<T> < 4 ? WIDTH<T> : 4;
    for (int i = 0; i < 4; i += number) {
        V<T> y[number];
        for (int b = 0; b < number; b++) y[b] = x[std::min(i + b, R - 1)];
        const V<T> z = reduce<T, number>(y, f);
        std::memcpy(to + i, &z, number * sizeof(T));
    }
}

// Calls f with a number from 1 to MOST that compilers see.
template <int MOST = 4, class F> void dispatch(int64_t n, F f) {
    if (n == MOST) f(std::integral_constant<int, MOST>());
    if constexpr (MOST > 1) dispatch<MOST - 1>(n, f);
}

// N vectors, a power of two, in place: blocks of N lanes become their transposes.
template <class T, int N = WIDTH<T>, int S = 1> inline void transpose(V<T>* x) {
    if constexpr (S < N) {
        for (int i = 0; i < N; i++)
            if (!(i & S)) {
                const V<T> a = x[i], b = x[i + S];
                x[i] = blocks<T, S>(a, b, false), x[i + S] = blocks<T, S>(a, b, true);
            }
        transpose<T, N, 2 * S>(x);
    }
}

}  // namespace
