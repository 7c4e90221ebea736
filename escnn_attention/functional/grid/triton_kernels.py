"""The loops of :mod:`~escnn_attention.functional.grid.triton_windows`, for Triton to compile.

A thread has one position and RJ query poses (in the gradients of keys RP key poses), and goes over the window. A vector
is a tuple of its channels: each is a tensor ``(RJ, 1, BN)`` of poses and BN positions, which lie side by side in memory
and in threads. All addresses of a vector are one pointer and constants.

A query pose h has the output pose h; or, by SUM, every output pose has all query poses. A thread then has RH output
poses, in tuples: products of queries with keys serve all of them. In the forward pass it has one query pose after the
other, and in the gradients of keys weights are added up over the query poses before they meet the values. T are the
pairs of a query pose j and an output pose h: h, or ``j · H + h``.

Only stores are masked: instead of a key beyond the edge of the grid a thread reads the one of its own position, and its
score becomes minus infinity. The query sees its own key anyway: what is not finite there reaches no other query.

Names: ``n`` are positions of the grid, ``m`` heads, ``b`` images, ``h`` output poses, ``j`` query poses, ``p`` key
poses, ``o`` an offset of the window, ``t`` a pair. Vectors of a head of an image are ``(poses, C, N)``, with strides of
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
    "first_h",
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

    Axes that the grid does not have have a side of 0. From axis TORUS on, both ends meet.
    """
    x2, seen2 = _along(n % n2, SIGN * tl.load(steps + 4 * o + 2), n2, TORUS <= 2)
    other, seen = n + SIGN * tl.load(steps + 4 * o + 3), seen2
    x1, x0 = n * 0, n * 0
    if n1 > 0:
        x1, seen1 = _along(n // n2 % n1, SIGN * tl.load(steps + 4 * o + 1), n1, TORUS <= 1)
        seen = seen & seen1
    if n0 > 0:
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
def _add_to(x, v, factor, earlier, here, C: tl.constexpr, STEP: tl.constexpr):
    """Add multiples of vectors to what is written earlier, if there are earlier ones, or write them."""
    for i in tl.static_range(C):
        written = tl.load(x + i * STEP, mask=(here.to(tl.int32) * earlier > 0)[None, None, :], other=0.0)
        tl.store(x + i * STEP, written + v[i] * factor, mask=here[None, None, :])


@triton.jit
def _zeros(R: tl.constexpr, kind: tl.constexpr, C: tl.constexpr, BN: tl.constexpr):
    """Zeros for R vectors."""
    v = ()
    for _ in tl.static_range(C):
        v = v + (tl.zeros([R, 1, BN], kind),)
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
def _know_poses(known, queries, pose, C: tl.constexpr, ROWS: tl.constexpr, N: tl.constexpr):
    """Write the products of queries with a table of poses. Threads without a position write what another writes."""
    for p in range(ROWS):
        tl.store(known + p * N, dot(queries, _vector(pose + p * C, C, 1)))


@triton.jit
def _biases(
    queries, table, seen, RH: tl.constexpr, ROW: tl.constexpr, C: tl.constexpr, SPATIAL: tl.constexpr
):  # fmt: skip
    """The products of queries with the offset in the tables of RH output poses, ROW numbers apart."""
    biases = ()
    for r in tl.static_range(RH):
        bias = tl.where(seen, 0.0, -float("inf"))[None, None, :].to(queries[0].dtype)
        if SPATIAL:
            bias += dot(queries, _vector(table + r * ROW, C, 1))
        biases = biases + (bias,)
    return biases


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_MEMORY)
def forward(
    q, k, v, table, pose, steps, seed,  # vectors; (M or 1, H, L, C), (M or 1, H, P, C), (L, 4), (1,)
    out, known, sums,  # filled: vectors, (images, T, P, N), (M · B, T, N)
    q_head, q_image, k_head, k_image, v_head, v_image, out_head, out_image, table_head, pose_head,  # strides
    first, total, batch,  # the first image, how many positions all images have, how many images a head
    n0: tl.constexpr, n1: tl.constexpr, n2: tl.constexpr, TORUS: tl.constexpr, N: tl.constexpr,
    J: tl.constexpr, H: tl.constexpr, P: tl.constexpr, T: tl.constexpr,
    L: tl.constexpr, C: tl.constexpr, BN: tl.constexpr, RJ: tl.constexpr, RH: tl.constexpr, RP: tl.constexpr,
    SUM: tl.constexpr, SPATIAL: tl.constexpr, POSE: tl.constexpr, RATE: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """The output, and the logarithms of the sums of exponentials. RP key poses share one change of the maximum."""
    image, m, b, n, here = _place(first, total, batch, N, BN)
    j = tl.arange(0, RJ)[:, None, None]
    S: tl.constexpr = T // J  # pairs of a query pose
    first_h = tl.program_id(1) * (RH if SUM else RJ)
    table += _lanes(m * table_head, n * 0 + first_h * (C * L), BN)
    pose += _lanes(m * pose_head, n * 0 + first_h * (C * P), BN)
    out += _lanes(m * out_head + b * out_image + first_h * (C * N), n, BN)
    if not SUM:
        table, pose, out = table + j * (C * L), pose + j * (C * P), out + j * (C * N)
    for round in range(J if SUM else 1):
        j0 = round if SUM else first_h
        t0 = j0 * S + (first_h if SUM else 0)
        queries = _vector(q + _lanes(m * q_head + b * q_image + j0 * (C * N), n, BN) + j * (C * N), C, N)
        queries = scaled(queries, SCALE)
        of_poses = known + _lanes((image * T + t0) * (P * N), n, BN) + j * (S * P * N)
        if POSE:
            _know_poses(of_poses, queries, pose, C, RH * P, N)
        most, norm, acc = (), (), ()
        for _ in tl.static_range(RH):
            most = most + (tl.full([RJ, 1, BN], -1e30, queries[0].dtype),)
            norm = norm + (tl.zeros([RJ, 1, BN], queries[0].dtype),)
            acc = acc + (_zeros(RJ, queries[0].dtype, C, BN),)
        for o in range(L):
            other, seen = _neighbours(steps, o, n, n0, n1, n2, TORUS, 1)
            biases = _biases(queries, table + o * C, seen, RH, C * L, C, SPATIAL)
            keys = k + _lanes(m * k_head + b * k_image, other, BN)
            values = v + _lanes(m * v_head + b * v_image, other, BN)
            for first_p in range(0, P, RP):
                scores, more = (), most
                for u in tl.static_range(RP):
                    products = dot(queries, _vector(keys + (first_p + u) * (C * N), C, N))
                    more_ = ()
                    for r in tl.static_range(RH):
                        score = products + biases[r]
                        if POSE:
                            score += tl.load(of_poses + r * (P * N) + (first_p + u) * N)
                        scores = scores + (score,)
                        more_ = more_ + (tl.maximum(more[r], score),)
                    more = more_
                norm_, acc_ = (), ()
                for r in tl.static_range(RH):
                    less = tl.exp2(most[r] - more[r])
                    norm_ = norm_ + (norm[r] * less,)
                    acc_ = acc_ + (scaled(acc[r], less),)
                most, norm, acc = more, norm_, acc_
                for u in tl.static_range(RP):
                    value = _vector(values + (first_p + u) * (C * N), C, N)
                    norm_, acc_ = (), ()
                    for r in tl.static_range(RH):
                        probability = tl.exp2(scores[u * RH + r] - most[r])
                        norm_ = norm_ + (norm[r] + probability,)
                        if RATE > 0:
                            key, t = o * P + first_p + u, t0 + j * S + r
                            probability = _drop(probability, seed, n, key, t, first + image, RATE)
                        acc_ = acc_ + (add(acc[r], probability, value),)
                    norm, acc = norm_, acc_
        pairs = _lanes(((first + image) * T + t0) * N, n, BN) + j * (S * N)
        for r in tl.static_range(RH):
            tl.store(sums + pairs + r * N, most[r] + tl.log2(norm[r]), mask=here[None, None, :])
            _add_to(out + r * (C * N), acc[r], 1 / norm[r], round, here, C, N)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_MEMORY)
def backward_queries(
    q, k, v, table, pose, steps, seed, out, sums, grad,  # as in the forward pass; grad as out
    grad_q, known, means, change,  # filled: vectors, as in the forward pass, as sums, (images, T, K, N)
    q_head, q_image, k_head, k_image, v_head, v_image,
    out_head, out_image, grad_head, grad_image, grad_q_head, grad_q_image, table_head, pose_head,
    first, total, batch, first_h,  # the first of RH output poses, where an output pose has all query poses
    n0: tl.constexpr, n1: tl.constexpr, n2: tl.constexpr, TORUS: tl.constexpr, N: tl.constexpr,
    J: tl.constexpr, H: tl.constexpr, P: tl.constexpr, T: tl.constexpr, K: tl.constexpr,
    L: tl.constexpr, C: tl.constexpr, BN: tl.constexpr, RJ: tl.constexpr, RH: tl.constexpr,
    SUM: tl.constexpr, SPATIAL: tl.constexpr, POSE: tl.constexpr, RATE: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """The gradients of queries, and the means of the gradients of their probabilities.

    ``change`` has the gradients of their products with the K rows of both tables, over log 2: first those of the
    offsets, then those of the poses.
    """
    image, m, b, n, here = _place(first, total, batch, N, BN)
    mine = here[None, None, :]
    j = tl.arange(0, RJ)[:, None, None]
    S: tl.constexpr = T // J
    j0 = tl.program_id(1) * RJ
    queries = _vector(q + _lanes(m * q_head + b * q_image + j0 * (C * N), n, BN) + j * (C * N), C, N)
    queries = scaled(queries, SCALE)
    grad_queries = _zeros(RJ, queries[0].dtype, C, BN)
    h0 = first_h if SUM else j0
    t0 = j0 * S + first_h
    of_outputs = grad + _lanes(m * grad_head + b * grad_image + h0 * (C * N), n, BN)
    outputs = out + _lanes(m * out_head + b * out_image + h0 * (C * N), n, BN)
    tables = table + _lanes(m * table_head, n * 0 + h0 * (C * L), BN)
    poses = pose + _lanes(m * pose_head, n * 0 + h0 * (C * P), BN)
    if not SUM:
        of_outputs, outputs = of_outputs + j * (C * N), outputs + j * (C * N)
        tables, poses = tables + j * (C * L), poses + j * (C * P)
    of_poses = known + _lanes((image * T + t0) * (P * N), n, BN) + j * (S * P * N)
    changes = change + _lanes((image * T + t0) * (K * N), n, BN) + j * (S * K * N)
    pairs = _lanes(((first + image) * T + t0) * N, n, BN) + j * (S * N)
    grads, logarithms, mean = (), (), ()
    for r in tl.static_range(RH):
        grads = grads + (_vector(of_outputs + r * (C * N), C, N),)
        logarithms = logarithms + (tl.load(sums + pairs + r * N),)
        mean = mean + (tl.zeros_like(logarithms[r]) if SUM else dot(grads[r], _vector(outputs, C, N)),)
        if POSE:
            _know_poses(of_poses + r * (P * N), queries, poses + r * (C * P), C, P, N)
            for p in range(P):
                tl.store(changes + (r * K + K - P + p) * N, tl.zeros_like(mean[r]), mask=mine)
    # Of the sum over the query poses there is an output, of each of them there is none: their means come first.
    for stage in tl.static_range(0 if SUM else 1, 2):
        for o in range(L):
            other, seen = _neighbours(steps, o, n, n0, n1, n2, TORUS, 1)
            # Without a position a thread adds zero to what is that of another.
            biases = _biases(queries, tables + o * C, seen & here, RH, C * L, C, SPATIAL)
            keys = k + _lanes(m * k_head + b * k_image, other, BN)
            values = v + _lanes(m * v_head + b * v_image, other, BN)
            of_offset = ()
            for r in tl.static_range(RH):
                of_offset = of_offset + (tl.zeros_like(logarithms[r]),)
            for p in range(P):
                key = _vector(keys + p * (C * N), C, N)
                products = dot(queries, key)
                value = _vector(values + p * (C * N), C, N)
                of_products = tl.zeros_like(products)
                mean_, of_offset_ = (), ()
                for r in tl.static_range(RH):
                    score = products + biases[r]
                    if POSE:
                        score += tl.load(of_poses + r * (P * N) + p * N)
                    probability = tl.exp2(score - logarithms[r])
                    of_probability = dot(grads[r], value)
                    if RATE > 0:
                        t = t0 + j * S + r
                        of_probability = _drop(of_probability, seed, n, o * P + p, t, first + image, RATE)
                    if stage == 0:
                        mean_ = mean_ + (mean[r] + probability * of_probability,)
                    else:
                        of_score = probability * (of_probability - mean[r])
                        of_products += of_score
                        of_offset_ = of_offset_ + (of_offset[r] + of_score,)
                        if POSE:
                            # No other thread adds to these numbers, and this one does not wait for what it has
                            # added.
                            to = changes + (r * K + K - P + p) * N
                            tl.atomic_add(to, of_score, sem="relaxed")
                if stage == 0:
                    mean = mean_
                else:
                    of_offset = of_offset_
                    grad_queries = add(grad_queries, of_products, key)
            if SPATIAL and stage == 1:
                for r in tl.static_range(RH):
                    tl.store(changes + (r * K + o) * N, of_offset[r], mask=mine)
                    row = _vector(tables + o * C + r * (C * L), C, 1)
                    grad_queries = add(grad_queries, of_offset[r], row)
    for r in tl.static_range(RH):
        tl.store(means + pairs + r * N, mean[r], mask=mine)
        if POSE:
            for p in range(P):
                of_pose = tl.load(changes + (r * K + K - P + p) * N)
                grad_queries = add(grad_queries, of_pose, _vector(poses + r * (C * P) + p * C, C, 1))
    grad_q += _lanes(m * grad_q_head + b * grad_q_image + j0 * (C * N), n, BN) + j * (C * N)
    _add_to(grad_q, grad_queries, _LN2 * SCALE, first_h, here, C, N)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_MEMORY)
def backward_keys(
    q, k, v, table, steps, seed, known, sums, means, grad,  # known as it was written by the queries
    grad_k, grad_v,  # filled
    q_head, q_image, k_head, k_image, v_head, v_image,
    grad_head, grad_image, grad_k_head, grad_k_image, grad_v_head, grad_v_image, table_head,
    first, total, batch,
    n0: tl.constexpr, n1: tl.constexpr, n2: tl.constexpr, TORUS: tl.constexpr, N: tl.constexpr,
    J: tl.constexpr, H: tl.constexpr, P: tl.constexpr, T: tl.constexpr,
    L: tl.constexpr, C: tl.constexpr, BN: tl.constexpr, RP: tl.constexpr, RJ: tl.constexpr, RH: tl.constexpr,
    SUM: tl.constexpr, SPATIAL: tl.constexpr, POSE: tl.constexpr, RATE: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """The gradients of keys and values: a thread has RP poses of a position, and goes over the queries that see it."""
    image, m, b, n, here = _place(first, total, batch, N, BN)
    p0, p = tl.program_id(1) * RP, tl.arange(0, RP)[:, None, None]
    S: tl.constexpr = T // J
    at = p0 * (C * N) + n
    keys = _vector(k + _lanes(m * k_head + b * k_image, at, BN) + p * (C * N), C, N)
    values = _vector(v + _lanes(m * v_head + b * v_image, at, BN) + p * (C * N), C, N)
    table += _lanes(m * table_head, n * 0, BN)
    grad_keys, grad_values = _zeros(RP, keys[0].dtype, C, BN), _zeros(RP, keys[0].dtype, C, BN)
    for o in range(L):
        other, seen = _neighbours(steps, o, n, n0, n1, n2, TORUS, -1)
        of_unseen = tl.where(seen, 0.0, -float("inf"))[None, None, :].to(keys[0].dtype)
        queries = q + _lanes(m * q_head + b * q_image, other, BN)
        grads = grad + _lanes(m * grad_head + b * grad_image, other, BN)
        pairs = _lanes((first + image) * (T * N), other, BN)
        poses = known + _lanes(image * (T * P * N) + p0 * N, other, BN) + p * N
        for tile in range(J // RJ * (H // RH if SUM else 1)):
            j0 = tile // (H // RH) * RJ if SUM else tile
            h0 = tile % (H // RH) * RH if SUM else tile
            query, products, of_products = (), (), ()
            for u in tl.static_range(RJ):
                query = query + (scaled(_vector(queries + (j0 + u) * (C * N), C, N), SCALE),)
                products = products + (dot(query[u], keys),)
                of_products = of_products + (tl.zeros_like(products[u]),)
            for r in tl.static_range(RH):
                h = h0 + r
                of_output = _vector(grads + h * (C * N), C, N)
                of_value = dot(of_output, values)
                weight = tl.zeros_like(of_value)
                of_products_ = ()
                for u in tl.static_range(RJ):
                    t = (j0 + u) * S + (h if SUM else 0)
                    bias = of_unseen
                    if SPATIAL:
                        bias += dot(query[u], _vector(table + (h * L + o) * C, C, 1))
                    score = products[u] + bias
                    if POSE:
                        score += tl.load(poses + t * (P * N))
                    probability = tl.exp2(score - tl.load(sums + pairs + t * N))
                    of_probability, dropped = of_value, probability
                    if RATE > 0:
                        key = o * P + p0 + p
                        of_probability = _drop(of_probability, seed, other, key, t, first + image, RATE)
                        dropped = _drop(probability, seed, other, key, t, first + image, RATE)
                    weight += dropped
                    of_score = probability * (of_probability - tl.load(means + pairs + t * N))
                    of_products_ = of_products_ + (of_products[u] + of_score,)
                of_products = of_products_
                grad_values = add(grad_values, weight, of_output)
            for u in tl.static_range(RJ):
                grad_keys = add(grad_keys, of_products[u], query[u])
    grad_k += _lanes(m * grad_k_head + b * grad_k_image, at, BN) + p * (C * N)
    grad_v += _lanes(m * grad_v_head + b * grad_v_image, at, BN) + p * (C * N)
    _store(grad_k, grad_keys, _LN2, here, C, N)
    _store(grad_v, grad_values, 1.0, here, C, N)


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
