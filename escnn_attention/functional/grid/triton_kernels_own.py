"""The loops of :mod:`~escnn_attention.functional.grid.triton_own`, for Triton to compile.

A thread has one position and R poses, and goes over the window. A vector is a tuple of its channels: each is a tensor
``(R, 1, BN)`` of R poses and BN positions, which lie side by side in memory and in threads. All addresses of a vector
are one pointer and constants.

Only stores are masked: instead of a key beyond the edge of the grid a thread reads the one of its own position, and its
score becomes minus infinity. The query sees its own key anyway: what is not finite there reaches no other query.

Names: ``n`` are positions of the grid, ``m`` heads, ``b`` images, ``h`` query poses, which are those of the output,
``p`` key poses, ``o`` an offset of the window. Vectors of a head of an image are ``(poses, C, N)``, with strides of
heads and of images; ``image`` counts both, and tables of pairs have rows for each of a stretch of them. Scores are in
units of log 2, by SCALE. It is a constant, as numbers that vary come in single precision.
"""

# ruff: noqa: RUF005  (the language of Triton has no stars in tuples)

import triton
import triton.language as tl

from escnn_attention.functional.vectors_kernels import add, dot, scaled

_LN2 = tl.constexpr(0.6931471805599453)

_VECTORS = ["q", "k", "v", "out", "grad", "grad_q", "grad_k", "grad_v"]

# These vary from call to call.
_SIZES = [
    "first",
    "total",
    "batch",
    "table_head",
    "pose_head",
    *(f"{name}_{stride}" for name in _VECTORS for stride in ("head", "image")),
]

# Knowing that memory is aligned, Triton would give a thread neighbouring positions for some accesses, and exchange them
# between threads in every round.
_MEMORY = [*_VECTORS, "table", "pose", "known", "sums", "means", "change"]


@triton.jit
def _place(first, total, batch, N: tl.constexpr, BN: tl.constexpr):
    """The image of each thread in the stretch, its head and its number in the batch, its position, if it has one."""
    g = tl.program_id(0) * BN + tl.arange(0, BN)
    here = g < total
    g = tl.minimum(g, total - 1)
    image = g // N
    m, b = (first + image) // batch, (first + image) % batch
    return image.to(tl.int64), m.to(tl.int64), b.to(tl.int64), tl.max_contiguous(g - image * N, BN), here


@triton.jit
def _neighbours(
    steps, o, n, n0: tl.constexpr, n1: tl.constexpr, n2: tl.constexpr, TORUS: tl.constexpr, SIGN: tl.constexpr
):
    """The positions an offset away, the own ones instead of those beyond the grid, and which of them are on it.

    From axis TORUS on, both ends meet.
    """
    x2, seen2 = _along(n % n2, SIGN * tl.load(steps + 4 * o + 2), n2, TORUS <= 2)
    other, seen = n + SIGN * tl.load(steps + 4 * o + 3), seen2
    x1, x0 = n * 0, n * 0
    if n1 > 1:
        x1, seen1 = _along(n // n2 % n1, SIGN * tl.load(steps + 4 * o + 1), n1, TORUS <= 1)
        seen = seen & seen1
    if n0 > 1:
        x0, seen0 = _along(n // (n1 * n2), SIGN * tl.load(steps + 4 * o), n0, TORUS <= 0)
        seen = seen & seen0
    if TORUS < 3:
        other = (x0 * n1 + x1) * n2 + x2
    other = tl.where(seen, other, n)
    return tl.max_contiguous(other, n.shape[0]), seen


@triton.jit
def _along(x, step, n: tl.constexpr, TORUS: tl.constexpr):
    """The coordinate a step along an axis of n, and whether it is on the grid, whose ends meet on a torus."""
    x += step
    if TORUS:
        x = (x + n) % n
    return x, (x >= 0) & (x < n)


@triton.jit
def _lanes(base, n, BN: tl.constexpr):
    """Offsets of threads, ``(1, 1, BN)``, said to lie side by side: of what a function is given this is not known."""
    return tl.max_contiguous(base + n, BN)[None, None, :]


@triton.jit
def _vector(x, C: tl.constexpr, STEP: tl.constexpr):
    """Read the channels of vectors, which lie STEP apart."""
    v = ()
    for i in tl.static_range(C):
        v = v + (tl.load(x + i * STEP),)
    return v


@triton.jit
def _store(x, v, factor, here, C: tl.constexpr, STEP: tl.constexpr):
    """Write multiples of vectors."""
    for i in tl.static_range(C):
        tl.store(x + i * STEP, v[i] * factor, mask=here[None, None, :])


@triton.jit
def _zeros(x, R: tl.constexpr, BN: tl.constexpr):
    """Zeros for R vectors like x."""
    v = ()
    for i in tl.static_range(len(x)):
        v = v + (tl.zeros([R, 1, BN], x[i].dtype),)
    return v


@triton.jit
def _drop(x, seed, n, key, h, image, RATE: tl.constexpr):
    """Dropout of what belongs to pairs of queries and keys, by numbers drawn from a counter: the same in every pass."""
    n = n[None, None, :]
    zero = (h + key + n) * 0
    image = zero + image.to(tl.int32)[None, None, :]
    # Seven rounds pass all tests of randomness that ten do.
    random, _, _, _ = tl.philox(tl.load(seed), zero + n, zero + key, zero + h, image, n_rounds=7)
    return tl.where(tl.uint_to_uniform_float(random) < RATE, 0.0, x * (1 / (1 - RATE)))


@triton.jit
def _know_poses(known, queries, pose, C: tl.constexpr, P: tl.constexpr, N: tl.constexpr):
    """Write the products of queries with the table of poses. Threads without a position write what another writes."""
    for p in range(P):
        tl.store(known + p * N, dot(queries, _vector(pose + p * C, C, 1)))


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_MEMORY)
def forward(
    q, k, v, table, pose, steps, seed,  # vectors; (M or 1, H, L, C), (M or 1, H, P, C), (L, 4), (1,)
    out, known, sums,  # filled: vectors, (images, H, P, N), (M · B, H, N)
    q_head, q_image, k_head, k_image, v_head, v_image, out_head, out_image, table_head, pose_head,  # strides
    first, total, batch,  # the first image, how many positions all images have, how many images a head
    n0: tl.constexpr, n1: tl.constexpr, n2: tl.constexpr, TORUS: tl.constexpr,
    N: tl.constexpr, H: tl.constexpr, P: tl.constexpr,
    L: tl.constexpr, C: tl.constexpr, BN: tl.constexpr, R: tl.constexpr,
    PU: tl.constexpr, SPATIAL: tl.constexpr, POSE: tl.constexpr, RATE: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """The output, and the logarithms of the sums of exponentials. PU key poses share one change of the maximum."""
    image, m, b, n, here = _place(first, total, batch, N, BN)
    h0, h = tl.program_id(1) * R, tl.arange(0, R)[:, None, None]
    queries = _vector(q + _lanes(m * q_head + b * q_image + h0 * (C * N), n, BN) + h * (C * N), C, N)
    queries = scaled(queries, SCALE)
    table += _lanes(m * table_head, n * 0 + h0 * (C * L), BN) + h * (C * L)
    pose += _lanes(m * pose_head, n * 0 + h0 * (C * P), BN) + h * (C * P)
    known += _lanes((image * H + h0) * (P * N), n, BN) + h * (P * N)
    if POSE:
        _know_poses(known, queries, pose, C, P, N)
    most = tl.full([R, 1, BN], -1e30, queries[0].dtype)
    norm = tl.zeros([R, 1, BN], queries[0].dtype)
    acc = _zeros(queries, R, BN)
    for o in range(L):
        other, seen = _neighbours(steps, o, n, n0, n1, n2, TORUS, 1)
        bias = tl.where(seen, 0.0, -float("inf"))[None, None, :].to(norm.dtype)
        if SPATIAL:
            bias += dot(queries, _vector(table + o * C, C, 1))
        keys = k + _lanes(m * k_head + b * k_image, other, BN)
        values = v + _lanes(m * v_head + b * v_image, other, BN)
        for first_p in range(0, P, PU):
            scores, more = (), most
            for u in tl.static_range(PU):
                score = dot(queries, _vector(keys + (first_p + u) * (C * N), C, N)) + bias
                if POSE:
                    score += tl.load(known + (first_p + u) * N)
                scores = scores + (score,)
                more = tl.maximum(more, score)
            less = tl.exp2(most - more)
            norm *= less
            acc = scaled(acc, less)
            most = more
            for u in tl.static_range(PU):
                probability = tl.exp2(scores[u] - most)
                norm += probability
                if RATE > 0:
                    probability = _drop(probability, seed, n, o * P + first_p + u, h0 + h, first + image, RATE)
                acc = add(acc, probability, _vector(values + (first_p + u) * (C * N), C, N))
    out += _lanes(m * out_head + b * out_image + h0 * (C * N), n, BN) + h * (C * N)
    _store(out, acc, 1 / norm, here, C, N)
    sums += _lanes(((first + image) * H + h0) * N, n, BN) + h * N
    tl.store(sums, most + tl.log2(norm), mask=here[None, None, :])


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_MEMORY)
def backward_queries(
    q, k, v, table, pose, steps, seed, out, sums, grad,  # as in the forward pass; grad as out
    grad_q, known, means, change,  # filled: vectors, as in the forward pass, as sums, (images, H, K, N)
    q_head, q_image, k_head, k_image, v_head, v_image,
    out_head, out_image, grad_head, grad_image, grad_q_head, grad_q_image, table_head, pose_head,
    first, total, batch,
    n0: tl.constexpr, n1: tl.constexpr, n2: tl.constexpr, TORUS: tl.constexpr,
    N: tl.constexpr, H: tl.constexpr, P: tl.constexpr,
    L: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BN: tl.constexpr, R: tl.constexpr,
    SPATIAL: tl.constexpr, POSE: tl.constexpr, RATE: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """The gradients of queries, and the means of the gradients of their probabilities.

    ``change`` has the gradients of their products with the K rows of both tables, over log 2: first those of the
    offsets, then those of the poses.
    """
    image, m, b, n, here = _place(first, total, batch, N, BN)
    h0, h = tl.program_id(1) * R, tl.arange(0, R)[:, None, None]
    mine = here[None, None, :]
    queries = _vector(q + _lanes(m * q_head + b * q_image + h0 * (C * N), n, BN) + h * (C * N), C, N)
    queries = scaled(queries, SCALE)
    grads = _vector(grad + _lanes(m * grad_head + b * grad_image + h0 * (C * N), n, BN) + h * (C * N), C, N)
    out += _lanes(m * out_head + b * out_image + h0 * (C * N), n, BN) + h * (C * N)
    table += _lanes(m * table_head, n * 0 + h0 * (C * L), BN) + h * (C * L)
    pose += _lanes(m * pose_head, n * 0 + h0 * (C * P), BN) + h * (C * P)
    known += _lanes((image * H + h0) * (P * N), n, BN) + h * (P * N)
    change += _lanes((image * H + h0) * (K * N), n, BN) + h * (K * N)
    pairs = _lanes(((first + image) * H + h0) * N, n, BN) + h * N
    logarithm = tl.load(sums + pairs)
    mean = dot(grads, _vector(out, C, N))
    tl.store(means + pairs, mean, mask=mine)
    if POSE:
        _know_poses(known, queries, pose, C, P, N)
        for p in range(P):
            tl.store(change + (K - P + p) * N, tl.zeros_like(mean), mask=mine)
    grad_queries = _zeros(queries, R, BN)
    for o in range(L):
        other, seen = _neighbours(steps, o, n, n0, n1, n2, TORUS, 1)
        bias = tl.where(seen, 0.0, -float("inf"))[None, None, :].to(mean.dtype)
        if SPATIAL:
            bias += dot(queries, _vector(table + o * C, C, 1))
        keys = k + _lanes(m * k_head + b * k_image, other, BN)
        values = v + _lanes(m * v_head + b * v_image, other, BN)
        of_offset = tl.zeros_like(mean)
        for p in range(P):
            key = _vector(keys + p * (C * N), C, N)
            score = dot(queries, key) + bias
            if POSE:
                score += tl.load(known + p * N)
            of_probability = dot(grads, _vector(values + p * (C * N), C, N))
            if RATE > 0:
                of_probability = _drop(of_probability, seed, n, o * P + p, h0 + h, first + image, RATE)
            of_score = tl.exp2(score - logarithm) * (of_probability - mean)
            of_offset += of_score
            if POSE:
                # No other thread adds to these numbers, and this one does not wait for what it has added.
                tl.atomic_add(change + (K - P + p) * N, of_score, mask=mine, sem="relaxed")
            grad_queries = add(grad_queries, of_score, key)
        if SPATIAL:
            tl.store(change + o * N, of_offset, mask=mine)
            grad_queries = add(grad_queries, of_offset, _vector(table + o * C, C, 1))
    if POSE:
        for p in range(P):
            of_pose = tl.load(change + (K - P + p) * N)
            grad_queries = add(grad_queries, of_pose, _vector(pose + p * C, C, 1))
    grad_q += _lanes(m * grad_q_head + b * grad_q_image + h0 * (C * N), n, BN) + h * (C * N)
    _store(grad_q, grad_queries, _LN2 * SCALE, here, C, N)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_MEMORY)
def backward_keys(
    q, k, v, table, steps, seed, known, sums, means, grad,  # known as it was written by the queries
    grad_k, grad_v,  # filled
    q_head, q_image, k_head, k_image, v_head, v_image,
    grad_head, grad_image, grad_k_head, grad_k_image, grad_v_head, grad_v_image, table_head,
    first, total, batch,
    n0: tl.constexpr, n1: tl.constexpr, n2: tl.constexpr, TORUS: tl.constexpr,
    N: tl.constexpr, H: tl.constexpr, P: tl.constexpr,
    L: tl.constexpr, C: tl.constexpr, BN: tl.constexpr, R: tl.constexpr,
    SPATIAL: tl.constexpr, POSE: tl.constexpr, RATE: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """The gradients of keys and values: a thread has R poses of a position, and goes over the queries that see it."""
    image, m, b, n, here = _place(first, total, batch, N, BN)
    p0, p = tl.program_id(1) * R, tl.arange(0, R)[:, None, None]
    at = p0 * (C * N) + n
    keys = _vector(k + _lanes(m * k_head + b * k_image, at, BN) + p * (C * N), C, N)
    values = _vector(v + _lanes(m * v_head + b * v_image, at, BN) + p * (C * N), C, N)
    table += _lanes(m * table_head, n * 0, BN)
    grad_keys, grad_values = _zeros(keys, R, BN), _zeros(keys, R, BN)
    for o in range(L):
        other, seen = _neighbours(steps, o, n, n0, n1, n2, TORUS, -1)
        of_unseen = tl.where(seen, 0.0, -float("inf"))[None, None, :].to(keys[0].dtype)
        queries = q + _lanes(m * q_head + b * q_image, other, BN)
        grads = grad + _lanes(m * grad_head + b * grad_image, other, BN)
        pairs = _lanes((first + image) * (H * N), other, BN)
        poses = known + _lanes(image * (H * P * N) + p0 * N, other, BN) + p * N
        for h in range(H):
            query = scaled(_vector(queries + h * (C * N), C, N), SCALE)
            of_output = _vector(grads + h * (C * N), C, N)
            bias = of_unseen
            if SPATIAL:
                bias += dot(query, _vector(table + (h * L + o) * C, C, 1))
            score = dot(query, keys) + bias
            if POSE:
                score += tl.load(poses + h * (P * N))
            probability = tl.exp2(score - tl.load(sums + pairs + h * N))
            of_probability, dropped = dot(of_output, values), probability
            if RATE > 0:
                of_probability = _drop(of_probability, seed, other, o * P + p0 + p, h, first + image, RATE)
                dropped = _drop(probability, seed, other, o * P + p0 + p, h, first + image, RATE)
            of_score = probability * (of_probability - tl.load(means + pairs + h * N))
            grad_keys = add(grad_keys, of_score, query)
            grad_values = add(grad_values, dropped, of_output)
    grad_k += _lanes(m * grad_k_head + b * grad_k_image, at, BN) + p * (C * N)
    grad_v += _lanes(m * grad_v_head + b * grad_v_image, at, BN) + p * (C * N)
    _store(grad_k, grad_keys, _LN2, here, C, N)
    _store(grad_v, grad_values, 1.0, here, C, N)
