"""The loops of :mod:`~escnn_attention.functional.grid.triton` where every output pose sums over the query poses.

A thread has one position, with all channels of some poses in its registers, and goes over the window; of many channels
it shares them with others of its warp. Axes are ordered such that positions lie side by side in memory and in threads:
every access is one stretch, sums over poses stay inside a thread and sums over channels inside a warp, and no warp
waits for another.

A thread has a tile of RH output poses by RJ query poses: products of queries with keys serve all RH of them, and
probabilities are added up before their product with the values.

Names: ``n`` are positions of the grid, ``o`` an offset of the window, ``t`` a pair of an output pose h and a query pose
j, ``j · H + h``, one of T. An *image* is one head of one image. ``known`` has the products of the
queries with the K rows of the tables, first L of the offsets, then P of the poses. Scores are in units of log 2.
"""

import triton
import triton.language as tl

_LN2 = tl.constexpr(0.6931471805599453)

# Knowing that memory is aligned, Triton would give a thread neighbouring positions for some accesses, and exchange them
# between threads in every round.
_VECTORS = ["q", "k", "v", "known", "out", "sums", "grad", "means", "grad_q", "grad_k", "grad_v", "grad_known"]


@triton.jit
def _block(num_positions: tl.constexpr, BN: tl.constexpr):
    """The image of a program, its positions, and which of them there are."""
    blocks = tl.cdiv(num_positions, BN)
    n = tl.program_id(0) % blocks * BN + tl.arange(0, BN)
    return (tl.program_id(0) // blocks).to(tl.int64), n, n < num_positions


@triton.jit
def _around(x, n: tl.constexpr, TORUS: tl.constexpr):
    """The coordinate of a position along an axis of n, both ends of which meet on a torus."""
    return (x + n) % n if TORUS else x


@triton.jit
def _neighbours(
    steps, o, n, n0: tl.constexpr, n1: tl.constexpr, n2: tl.constexpr, TORUS: tl.constexpr, SIGN: tl.constexpr
):
    """The positions an offset away, and which of them are on the grid. From axis TORUS on, both ends meet."""
    x0, x1, x2 = n // (n1 * n2), n // n2 % n1, n % n2
    x0 += SIGN * tl.load(steps + 4 * o)
    x1 += SIGN * tl.load(steps + 4 * o + 1)
    x2 += SIGN * tl.load(steps + 4 * o + 2)
    x0, x1, x2 = _around(x0, n0, TORUS <= 0), _around(x1, n1, TORUS <= 1), _around(x2, n2, TORUS <= 2)
    seen = (n < n0 * n1 * n2) & (x0 >= 0) & (x0 < n0) & (x1 >= 0) & (x1 < n1) & (x2 >= 0) & (x2 < n2)
    return (x0 * n1 + x1) * n2 + x2 if TORUS < 3 else n + SIGN * tl.load(steps + 4 * o + 3), seen


@triton.jit
def _vectors(x, poses, n, seen, num_positions: tl.constexpr, C: tl.constexpr, CP: tl.constexpr):
    """The vectors of some poses, ``(poses, CP, BN)``, of an image."""
    c = tl.arange(0, CP)
    at = (poses[:, None, None] * C + c[None, :, None]) * num_positions + n[None, None, :]
    return tl.load(x + at, mask=(c < C)[None, :, None] & seen[None, None, :], other=0.0)


@triton.jit
def _vector(x, pose, n, seen, num_positions: tl.constexpr, C: tl.constexpr, CP: tl.constexpr):
    """The vectors of one pose, ``(CP, BN)``."""
    c = tl.arange(0, CP)
    at = (pose * C + c[:, None]) * num_positions + n[None, :]
    return tl.load(x + at, mask=(c < C)[:, None] & seen[None, :], other=0.0)


@triton.jit
def _of_pairs(x, t, n, seen, num_positions: tl.constexpr):
    """A number of every pair of poses, ``(RH, RJ, BN)``."""
    return tl.load(x + t * num_positions + n[None, None, :], mask=seen[None, None, :], other=0.0)


@triton.jit
def _of_offset(
    known,
    rows,
    n,
    seen,
    num_positions: tl.constexpr,
    RH: tl.constexpr,
    RJ: tl.constexpr,
    BN: tl.constexpr,
    SPATIAL: tl.constexpr,
):
    """What the queries of pairs know of an offset."""
    if SPATIAL:
        return _of_pairs(known, rows, n, seen, num_positions)
    else:
        return tl.zeros([RH, RJ, BN], known.dtype.element_ty)


@triton.jit
def _scores(
    queries,
    keys,
    of_offset,
    known,
    rows,
    n,
    seen,
    num_positions: tl.constexpr,
    POSE: tl.constexpr,
):
    """The scores of queries with keys, added up in the same order everywhere; ``rows`` are those of the key poses."""
    scores = tl.sum(queries * keys, axis=1)[None] + of_offset
    if POSE:
        scores += _of_pairs(known, rows, n, seen, num_positions)
    return scores


@triton.jit
def _probability(score, logarithm, seen):
    """The exponential of a score over the sum of those of all.

    A score is put together in the same order in every pass, so that one that is by far the largest, and its own
    logarithm, gives exactly 1.
    """
    return tl.exp2(tl.where(seen[None, None, :], score - logarithm, -float("inf")))


@triton.jit
def _drop(x, seed, n, key, t, image, RATE: tl.constexpr):
    """Dropout of what belongs to pairs of queries and keys, by numbers drawn from a counter: the same in every pass."""
    n = n[None, None, :]
    zero = (t + key + n) * 0
    image = zero + image.to(tl.int32)
    # Seven rounds pass all tests of randomness that ten do.
    random, _, _, _ = tl.philox(tl.load(seed), zero + n, zero + key, zero + t, image, n_rounds=7)
    return tl.where(tl.uint_to_uniform_float(random) < RATE, 0.0, x * (1 / (1 - RATE)))


@triton.jit
def _store_vectors(x, poses, n, here, vectors, num_positions: tl.constexpr, C: tl.constexpr, CP: tl.constexpr):
    """The opposite of reading them."""
    c = tl.arange(0, CP)
    at = (poses[:, None, None] * C + c[None, :, None]) * num_positions + n[None, None, :]
    tl.store(x + at, vectors, mask=(c < C)[None, :, None] & here[None, None, :])


@triton.jit(do_not_specialize=["first"], do_not_specialize_on_alignment=_VECTORS)
def forward(
    q, k, v, known, steps, seed,  # (images, J, C, N), (images, P, C, N) twice, (images, T, K, N), (L, 4), (1,)
    out, sums,  # filled: (images, H, C, N), (images, T, N)
    first,  # the number of the first image
    n0: tl.constexpr, n1: tl.constexpr, n2: tl.constexpr, TORUS: tl.constexpr, num_positions: tl.constexpr,
    J: tl.constexpr, P: tl.constexpr, H: tl.constexpr, L: tl.constexpr, T: tl.constexpr, K: tl.constexpr,
    C: tl.constexpr, CP: tl.constexpr, BN: tl.constexpr, RH: tl.constexpr, RJ: tl.constexpr,
    SPATIAL: tl.constexpr, POSE: tl.constexpr, RATE: tl.constexpr,
):  # fmt: skip
    """The output, and the logarithms of the sums of exponentials."""
    image, n, here = _block(num_positions, BN)
    vectors, pairs = image * C * num_positions, image * T * num_positions
    q, out = q + J * vectors, out + H * vectors
    k, v = k + P * vectors, v + P * vectors
    sums, known = sums + pairs, known + K * pairs
    h = tl.program_id(1) * RH + tl.arange(0, RH)
    total = tl.zeros([RH, CP, BN], q.dtype.element_ty)
    for first_j in range(0, J, RJ):
        j = first_j + tl.arange(0, RJ)
        t = j[None, :, None] * H + h[:, None, None]
        queries = _vectors(q, j, n, here, num_positions, C, CP)
        most = tl.full([RH, RJ, BN], -1e30, q.dtype.element_ty)
        norm = tl.zeros([RH, RJ, BN], q.dtype.element_ty)
        for o in range(L):
            other, seen = _neighbours(steps, o, n, n0, n1, n2, TORUS, 1)
            bias = _of_offset(known, t * K + o, n, here, num_positions, RH, RJ, BN, SPATIAL)
            for p in range(P):
                key = _vector(k, p, other, seen, num_positions, C, CP)
                score = _scores(queries, key[None], bias, known, t * K + K - P + p, n, here, num_positions, POSE)
                score = tl.where(seen[None, None, :], score, -float("inf"))
                more = tl.maximum(most, score)
                norm = norm * tl.exp2(most - more) + tl.exp2(score - more)
                most = more
        logarithm = most + tl.log2(tl.where(here[None, None, :], norm, 1.0))
        tl.store(sums + t * num_positions + n[None, None, :], logarithm, mask=here[None, None, :])
        for o in range(L):
            other, seen = _neighbours(steps, o, n, n0, n1, n2, TORUS, 1)
            bias = _of_offset(known, t * K + o, n, here, num_positions, RH, RJ, BN, SPATIAL)
            for p in range(P):
                key = _vector(k, p, other, seen, num_positions, C, CP)
                score = _scores(queries, key[None], bias, known, t * K + K - P + p, n, here, num_positions, POSE)
                probability = _probability(score, logarithm, seen)
                if RATE > 0:
                    probability = _drop(probability, seed, n, o * P + p, t, first + image, RATE)
                value = _vector(v, p, other, seen, num_positions, C, CP)
                total += tl.sum(probability, axis=1)[:, None, :] * value[None]
    _store_vectors(out, h, n, here, total, num_positions, C, CP)


@triton.jit
def _mean_change(
    queries, grads, logarithm, k, v, known, steps, seed, t, n, here, image,
    n0: tl.constexpr, n1: tl.constexpr, n2: tl.constexpr, TORUS: tl.constexpr, num_positions: tl.constexpr,
    P: tl.constexpr, L: tl.constexpr, K: tl.constexpr, C: tl.constexpr, CP: tl.constexpr,
    BN: tl.constexpr, RH: tl.constexpr, RJ: tl.constexpr,
    SPATIAL: tl.constexpr, POSE: tl.constexpr, RATE: tl.constexpr,
):  # fmt: skip
    """The means of the gradients of the probabilities of summed pairs, ``(RH, RJ, BN)``."""
    mean = tl.zeros([RH, RJ, BN], queries.dtype)
    for o in range(L):
        other, seen = _neighbours(steps, o, n, n0, n1, n2, TORUS, 1)
        bias = _of_offset(known, t * K + o, n, here, num_positions, RH, RJ, BN, SPATIAL)
        for p in range(P):
            key = _vector(k, p, other, seen, num_positions, C, CP)
            score = _scores(queries, key[None], bias, known, t * K + K - P + p, n, here, num_positions, POSE)
            value = _vector(v, p, other, seen, num_positions, C, CP)
            change = tl.sum(grads * value[None], axis=1)[:, None, :]
            if RATE > 0:
                change = _drop(change, seed, n, o * P + p, t, image, RATE)
            mean += _probability(score, logarithm, seen) * change
    return mean


@triton.jit(do_not_specialize=["first"], do_not_specialize_on_alignment=_VECTORS)
def backward_queries(
    q, k, v, known, steps, seed, out, sums, grad,  # as in the forward pass, with grad as out
    grad_q, means, grad_known,  # filled: as q, as sums, and as known, where its last rows, of the poses, are zeros
    first,
    n0: tl.constexpr, n1: tl.constexpr, n2: tl.constexpr, TORUS: tl.constexpr, num_positions: tl.constexpr,
    J: tl.constexpr, P: tl.constexpr, H: tl.constexpr, L: tl.constexpr, T: tl.constexpr, K: tl.constexpr,
    C: tl.constexpr, CP: tl.constexpr, BN: tl.constexpr, RH: tl.constexpr, RJ: tl.constexpr,
    SPATIAL: tl.constexpr, POSE: tl.constexpr, RATE: tl.constexpr,
):  # fmt: skip
    """The gradients of what a query has, and the means of the gradients of its probabilities."""
    image, n, here = _block(num_positions, BN)
    vectors, pairs = image * C * num_positions, image * T * num_positions
    q, grad_q = q + J * vectors, grad_q + J * vectors
    k, v = k + P * vectors, v + P * vectors
    out, grad = out + H * vectors, grad + H * vectors
    sums, means = sums + pairs, means + pairs
    known, grad_known = known + K * pairs, grad_known + K * pairs
    j = tl.program_id(1) * RJ + tl.arange(0, RJ)
    queries = _vectors(q, j, n, here, num_positions, C, CP)
    grad_queries = tl.zeros([RJ, CP, BN], q.dtype.element_ty)
    for first_h in range(0, H, RH):
        h = first_h + tl.arange(0, RH)
        t = j[None, :, None] * H + h[:, None, None]
        grads = _vectors(grad, h, n, here, num_positions, C, CP)
        logarithm = _of_pairs(sums, t, n, here, num_positions)
        # Of the sum over the query poses there is an output, of each of them there is none.
        mean = _mean_change(
            *(queries, grads, logarithm, k, v, known, steps, seed, t, n, here, first + image),
            *(n0, n1, n2, TORUS, num_positions, P, L, K, C, CP, BN, RH, RJ, SPATIAL, POSE, RATE),
        )
        tl.store(means + t * num_positions + n[None, None, :], mean, mask=here[None, None, :])
        for o in range(L):
            other, seen = _neighbours(steps, o, n, n0, n1, n2, TORUS, 1)
            bias = _of_offset(known, t * K + o, n, here, num_positions, RH, RJ, BN, SPATIAL)
            grad_bias = tl.zeros([RH, RJ, BN], q.dtype.element_ty)
            for p in range(P):
                key = _vector(k, p, other, seen, num_positions, C, CP)
                score = _scores(queries, key[None], bias, known, t * K + K - P + p, n, here, num_positions, POSE)
                probability = _probability(score, logarithm, seen)
                value = _vector(v, p, other, seen, num_positions, C, CP)
                change = tl.sum(grads * value[None], axis=1)[:, None, :]
                if RATE > 0:
                    change = _drop(change, seed, n, o * P + p, t, first + image, RATE)
                grad_score = _LN2 * probability * (change - mean)
                grad_bias += grad_score
                if POSE:
                    # No other thread adds to these numbers; the thread itself does so for every offset, and here does
                    # not wait for what it has added.
                    at = (t * K + K - P + p) * num_positions + n[None, None, :]
                    tl.atomic_add(grad_known + at, grad_score, mask=here[None, None, :], sem="relaxed")
                grad_queries += tl.sum(grad_score, axis=0)[:, None, :] * key[None]
            if SPATIAL:
                at = (t * K + o) * num_positions + n[None, None, :]
                tl.store(grad_known + at, grad_bias, mask=here[None, None, :])
    _store_vectors(grad_q, j, n, here, grad_queries, num_positions, C, CP)


@triton.jit(do_not_specialize=["first"], do_not_specialize_on_alignment=_VECTORS)
def backward_keys(
    q, k, v, known, steps, seed, sums, means, grad,
    grad_k, grad_v,  # filled: as k and v
    first,
    n0: tl.constexpr, n1: tl.constexpr, n2: tl.constexpr, TORUS: tl.constexpr, num_positions: tl.constexpr,
    J: tl.constexpr, P: tl.constexpr, H: tl.constexpr, L: tl.constexpr, T: tl.constexpr, K: tl.constexpr,
    C: tl.constexpr, CP: tl.constexpr, BN: tl.constexpr, RH: tl.constexpr, RJ: tl.constexpr,
    SPATIAL: tl.constexpr, POSE: tl.constexpr, RATE: tl.constexpr,
):  # fmt: skip
    """The gradients of keys and values: a thread has a pose of a position, and goes over the queries that see it."""
    image, n, here = _block(num_positions, BN)
    vectors, pairs = image * C * num_positions, image * T * num_positions
    q, grad = q + J * vectors, grad + H * vectors
    k, grad_k = k + P * vectors, grad_k + P * vectors
    v, grad_v = v + P * vectors, grad_v + P * vectors
    sums, means, known = sums + pairs, means + pairs, known + K * pairs
    p = tl.program_id(1) + tl.arange(0, 1)
    keys = _vectors(k, p, n, here, num_positions, C, CP)
    values = _vectors(v, p, n, here, num_positions, C, CP)
    grad_keys = tl.zeros([1, CP, BN], q.dtype.element_ty)
    grad_values = tl.zeros([1, CP, BN], q.dtype.element_ty)
    for o in range(L):
        other, seen = _neighbours(steps, o, n, n0, n1, n2, TORUS, -1)
        for first_j in range(0, J, RJ):
            j = first_j + tl.arange(0, RJ)
            for first_h in range(0, H, RH):
                h = first_h + tl.arange(0, RH)
                t = j[None, :, None] * H + h[:, None, None]
                queries = _vectors(q, j, other, seen, num_positions, C, CP)
                grads = _vectors(grad, h, other, seen, num_positions, C, CP)
                bias = _of_offset(known, t * K + o, other, seen, num_positions, RH, RJ, BN, SPATIAL)
                rows = t * K + K - P + p[:, None, None]
                score = _scores(queries, keys, bias, known, rows, other, seen, num_positions, POSE)
                probability = _probability(score, _of_pairs(sums, t, other, seen, num_positions), seen)
                change = tl.sum(grads * values, axis=1)[:, None, :]
                dropped = probability
                if RATE > 0:
                    pair = o * P + p[:, None, None]
                    change = _drop(change, seed, other, pair, t, first + image, RATE)
                    dropped = _drop(probability, seed, other, pair, t, first + image, RATE)
                mean = _of_pairs(means, t, other, seen, num_positions)
                grad_score = _LN2 * probability * (change - mean)
                grad_keys += tl.sum(tl.sum(grad_score, axis=0)[:, None, :] * queries, axis=0)[None]
                grad_values += tl.sum(tl.sum(dropped, axis=1)[:, None, :] * grads, axis=0)[None]
    _store_vectors(grad_k, p, n, here, grad_keys, num_positions, C, CP)
    _store_vectors(grad_v, p, n, here, grad_values, num_positions, C, CP)


@triton.jit
def sum_tables(
    x, spatial, pose, images, numbers, heads, spatial_heads, pose_heads, L, P, C,
    FACTOR: tl.constexpr, BI: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """The sums of tables ``(heads, images, H, L + P, C)`` over images, and over heads where there is one for all."""
    e, m, i = tl.program_id(0) * BE + tl.arange(0, BE), tl.program_id(1), tl.arange(0, BI)[:, None]
    h, k, c = e // (C * (L + P)), e // C % (L + P), e % C
    made = tl.where(k < L, spatial_heads, pose_heads)
    here = (e < numbers) & (m < made)
    count = tl.where(here, heads // made * images, 0)
    x += (m * count).to(tl.int64) * numbers + e
    total = tl.zeros((BI, BE), tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32)
    for first in range(0, tl.max(count, axis=0), BI):
        rows = first + i
        total += tl.load(x + rows.to(tl.int64) * numbers, mask=rows < count, other=0.0).to(total.dtype)
    found = tl.sum(total, axis=0) * FACTOR
    at = m * (numbers // (L + P)) + h * C
    tl.store(spatial + at * L + k * C + c, found.to(spatial.dtype.element_ty), mask=here & (k < L))
    tl.store(pose + at * P + (k - L) * C + c, found.to(pose.dtype.element_ty), mask=here & (k >= L))
