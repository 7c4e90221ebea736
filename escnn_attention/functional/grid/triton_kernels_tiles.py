"""The loops of :mod:`~escnn_attention.functional.grid.triton_tiles`, for Triton to compile.

Rows of a tile are the query poses of a block of neighbouring positions, and columns the key poses of some positions
that their windows reach: products of tiles are those of tensor cores, and a key is read once for all of them. What is
beyond a window is hidden by the bias.

Names: ``n`` are positions of the grid, ``m`` heads, ``b`` images, ``j`` query poses, ``p`` key poses, ``h`` output
poses, ``t`` pairs of a query and an output pose, ``o`` an offset of the window. Channels of a pose lie side by side,
and so do the poses of a position; positions, images and heads have strides. ``image`` counts heads and images, and
products of queries with tables are held for a stretch of them, K for each of T pairs of a position. Scores are in units
of log 2, by SCALE.
"""

# ruff: noqa: RUF005  (the language of Triton has no stars in tuples)

import triton
import triton.language as tl

_LN2 = tl.constexpr(0.6931471805599453)

_VECTORS = ["q", "k", "v", "out", "grad", "grad_q", "grad_k", "grad_v"]

# These vary from call to call.
_SIZES = ["first", "batch", *(f"{name}_{stride}" for name in _VECTORS for stride in ("head", "image", "place"))]


@triton.jit
def _image(blocks, first, batch, others: tl.constexpr):
    """The number of an image in the stretch, its head, and its number in the batch; the block in it, and another axis.

    Programs that differ in the last axis only share what they read, and are neighbours.
    """
    program = tl.program_id(0) // others
    image = program // blocks
    m, b = (first + image) // batch, (first + image) % batch
    return image.to(tl.int64), m.to(tl.int64), b.to(tl.int64), program % blocks, tl.program_id(0) % others


@triton.jit
def _rows(block, i, n1: tl.constexpr, n2: tl.constexpr, n0: tl.constexpr, B0: tl.constexpr, B1: tl.constexpr,
          B2: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr, EVERYWHERE: tl.constexpr):  # fmt: skip
    """The positions of a block: the first coordinates, the positions, their places in the table, which are there."""
    blocks1: tl.constexpr = (n1 + B1 - 1) // B1
    blocks2: tl.constexpr = (n2 + B2 - 1) // B2
    o0, o1, o2 = block // (blocks1 * blocks2) * B0, block // blocks2 % blocks1 * B1, block % blocks2 * B2
    x0, x1, x2 = o0 + i // (B1 * B2), o1 + i // B2 % B1, o2 + i % B2
    here = (x0 < n0) & (x1 < n1) & (x2 < n2)
    x0, x1, x2 = tl.minimum(x0, n0 - 1), tl.minimum(x1, n1 - 1), tl.minimum(x2, n2 - 1)
    n = (x0 * n1 + x1) * n2 + x2
    if not EVERYWHERE:
        x0, x1, x2 = x0 - o0, x1 - o1, x2 - o2
    return o0, o1, o2, n, (x0 * W1 + x1) * W2 + x2, here


@triton.jit
def _axis(e, o, n: tl.constexpr, TORUS: tl.constexpr, EVERYWHERE: tl.constexpr):
    """A coordinate from the first of a block on, and whether it is on the grid, whose ends meet on a torus."""
    if not EVERYWHERE:
        e += o
    if TORUS:
        e = (e + 2 * n) % n
    return e, (e >= 0) & (e < n)


@triton.jit
def _others(places, u, o0, o1, o2, U: tl.constexpr, n0: tl.constexpr, n1: tl.constexpr, n2: tl.constexpr,
            TORUS: tl.constexpr, EVERYWHERE: tl.constexpr):  # fmt: skip
    """The positions that are reached from a block, their places in the table, and which of them are there."""
    y0, on0 = _axis(tl.load(places + 4 * u), o0, n0, TORUS <= 0, EVERYWHERE)
    y1, on1 = _axis(tl.load(places + 4 * u + 1), o1, n1, TORUS <= 1, EVERYWHERE)
    y2, on2 = _axis(tl.load(places + 4 * u + 2), o2, n2, TORUS <= 2, EVERYWHERE)
    on = on0 & on1 & on2 & (u < U)
    return tl.where(on, (y0 * n1 + y1) * n2 + y2, 0), tl.load(places + 4 * u + 3), on


@triton.jit
def _vectors(x, n, pose, here, place, C: tl.constexpr, CP: tl.constexpr, E: tl.constexpr):
    """The vectors of poses at positions, ``(rows, CP)``."""
    c = tl.arange(0, CP)
    at = (n * place + pose) * C
    return tl.load(x + at[:, None] + c[None, :], mask=here[:, None] & (c < C)[None, :], other=0.0).to(E)


@triton.jit
def _tile(x, y, on, place, BU: tl.constexpr, P: tl.constexpr, PP: tl.constexpr, C: tl.constexpr, CP: tl.constexpr,
          E: tl.constexpr):  # fmt: skip
    """The vectors of all poses at positions, ``(positions · PP, CP)``."""
    p, c = tl.arange(0, PP)[None, :, None], tl.arange(0, CP)[None, None, :]
    at = ((y * place)[:, None, None] + p) * C + c
    found = tl.load(x + at, mask=on[:, None, None] & (p < P) & (c < C), other=0.0)
    return tl.reshape(found.to(E), [BU * PP, CP])


@triton.jit
def _finite(x):
    """Zeros for what is not finite, as a product with zero is not zero then."""
    return tl.where(tl.abs(x) < float("inf"), x, 0.0)


@triton.jit
def _store(x, n, pose, here, place, vectors, C: tl.constexpr, CP: tl.constexpr):
    c = tl.arange(0, CP)
    at = (n * place + pose) * C
    tl.store(x + at[:, None] + c[None, :], vectors, mask=here[:, None] & (c < C)[None, :])


@triton.jit
def _dot(a, b, acc, IN: tl.constexpr, TRANSPOSED: tl.constexpr = False):
    """The sum with a product: of single precision by three products of what tensor cores read, if IN is "exact".

    TRANSPOSED changes their order, so that products of keys and queries are those of queries and keys.
    """
    if IN == "exact":
        high_a, high_b = _high(a), _high(b)
        if TRANSPOSED:
            acc = tl.dot(high_a, b - high_b, acc, input_precision="tf32", out_dtype=acc.dtype)
            acc = tl.dot(a - high_a, high_b, acc, input_precision="tf32", out_dtype=acc.dtype)
        else:
            acc = tl.dot(a - high_a, high_b, acc, input_precision="tf32", out_dtype=acc.dtype)
            acc = tl.dot(high_a, b - high_b, acc, input_precision="tf32", out_dtype=acc.dtype)
        return tl.dot(high_a, high_b, acc, input_precision="tf32", out_dtype=acc.dtype)
    else:
        return tl.dot(a, b, acc, input_precision=IN, out_dtype=acc.dtype)


@triton.jit
def _high(x):
    """The leading bits, which TensorFloat-32 has."""
    return (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)


@triton.jit
def _of_offsets(known, lut, rows, of_rows, of_others, seen, LOW: tl.constexpr, KS: tl.constexpr, SPATIAL: tl.constexpr,
                F: tl.constexpr):  # fmt: skip
    """The bias of rows and other positions, the offset between them, and whether it is in the window."""
    o = tl.load(lut + (of_others[None, :] - of_rows[:, None] + LOW))
    near = seen & (o >= 0)
    if SPATIAL:
        return tl.load(known + rows[:, None] + o * KS, mask=near, other=0.0), o, near
    else:
        return tl.zeros([o.shape[0], o.shape[1]], F), o, near


@triton.jit
def _score(products, bias, of_pose, P: tl.constexpr, PP: tl.constexpr, POSE: tl.constexpr, SCALE: tl.constexpr):
    """Scores ``(rows, positions, PP)``."""
    score = products * SCALE + bias[:, :, None]
    if POSE:
        score += of_pose[:, None, :]
    if P < PP:
        score = tl.where((tl.arange(0, PP) < P)[None, None, :], score, -float("inf"))
    return score


@triton.jit(do_not_specialize=_SIZES)
def mark(
    k, v, marks, k_head, k_image, k_place, v_head, v_image, v_place, first, batch,
    N: tl.constexpr, P: tl.constexpr, PP: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, BR: tl.constexpr,
    F: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """NaN for every position with a key or value that is not finite, and zero for the others, ``(M · B, N)``."""
    image, m, b, block, _ = _image((N + BR - 1) // BR, first, batch, 1)
    n = block * BR + tl.arange(0, BR)
    total = tl.zeros([BR, CP], F)
    for p in range(P):
        key = _vectors(k + (m * k_head + b * k_image) * C, n, p, n < N, k_place, C, CP, E)
        value = _vectors(v + (m * v_head + b * v_image) * C, n, p, n < N, v_place, C, CP, E)
        total += key.to(F) * 0.0 + value.to(F) * 0.0
    tl.store(marks + (first + image) * N + n, tl.sum(total, axis=1), mask=n < N)


@triton.jit
def _drop(x, seed, n, key, t, image, RATE: tl.constexpr):
    """Dropout of what belongs to pairs of queries and keys, by numbers drawn from a counter: the same in every pass."""
    zero = (t + key + n) * 0
    # Seven rounds pass all tests of randomness that ten do.
    random, _, _, _ = tl.philox(tl.load(seed), zero + n, zero + key, zero + t, zero + image.to(tl.int32), n_rounds=7)
    return tl.where(tl.uint_to_uniform_float(random) < RATE, 0.0, x * (1 / (1 - RATE)))


@triton.jit
def _queries_of(block, h, N: tl.constexpr, T: tl.constexpr, TS: tl.constexpr, K: tl.constexpr, J: tl.constexpr,
                JP: tl.constexpr, BR: tl.constexpr, SUM: tl.constexpr):  # fmt: skip
    """The queries of a block that see the table of an output pose: positions, poses, which there are, their pairs."""
    row = tl.arange(0, BR)
    if SUM:
        n, j = block * (BR // JP) + row // JP, row % JP
        return n, j, (n < N) & (j < J), n * (T * K) + (h * J + j) * TS
    else:
        n, j = block * BR + row, row * 0 + h
        return n, j, n < N, n * (T * K) + h * TS


@triton.jit(do_not_specialize=_SIZES)
def know(
    q, table, known, q_head, q_image, q_place, first, batch,  # table: (M, H, K, C)
    N: tl.constexpr, T: tl.constexpr, TS: tl.constexpr, KS: tl.constexpr, J: tl.constexpr, JP: tl.constexpr,
    H: tl.constexpr, K: tl.constexpr, KT: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, BR: tl.constexpr,
    SUM: tl.constexpr, SCALE: tl.constexpr, IN: tl.constexpr, F: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """The products of queries with the tables."""
    TILES: tl.constexpr = (K + KT - 1) // KT
    blocks: tl.constexpr = (N * (JP if SUM else 1) + BR - 1) // BR
    image, m, b, block, part = _image(blocks, first, batch, TILES * H)
    h, k = part % H, part // H * KT + tl.arange(0, KT)
    n, j, here, pairs = _queries_of(block, h, N, T, TS, K, J, JP, BR, SUM)
    queries = _vectors(q + (m * q_head + b * q_image) * C, n, j, here, q_place, C, CP, E)
    rows = _vectors(table + (m * H + h) * (K * C), k, 0, k < K, 1, C, CP, E)
    products = _dot(queries, tl.trans(rows), tl.zeros([BR, KT], F), IN) * SCALE
    at = known + image * (N * T * K) + pairs[:, None] + (k * KS)[None, :]
    tl.store(at, products, mask=here[:, None] & (k < K)[None, :])


@triton.jit(do_not_specialize=_SIZES)
def of_queries(
    change, table, grad_q, grad_q_head, grad_q_image, grad_q_place, first, batch,
    N: tl.constexpr, T: tl.constexpr, TS: tl.constexpr, KS: tl.constexpr, J: tl.constexpr, JP: tl.constexpr,
    H: tl.constexpr, K: tl.constexpr, KT: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, BR: tl.constexpr,
    SUM: tl.constexpr, SCALE: tl.constexpr, IN: tl.constexpr, F: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Add to the gradients of queries what they have by the products with the tables."""
    blocks: tl.constexpr = (N * (JP if SUM else 1) + BR - 1) // BR
    image, m, b, block, part = _image(blocks, first, batch, 1 if SUM else H)
    n, j, here, _ = _queries_of(block, part, N, T, TS, K, J, JP, BR, SUM)
    total = tl.zeros([BR, CP], F)
    for step in range(H if SUM else 1):
        h = part + step
        pairs = _queries_of(block, h, N, T, TS, K, J, JP, BR, SUM)[3]
        for first_k in range(0, K, KT):
            k = first_k + tl.arange(0, KT)
            at = change + image * (N * T * K) + pairs[:, None] + (k * KS)[None, :]
            of_products = tl.load(at, mask=here[:, None] & (k < K)[None, :], other=0.0)
            rows = _vectors(table + (m * H + h) * (K * C), k, 0, k < K, 1, C, CP, E)
            total = _dot(of_products.to(E), rows, total, IN)
    to = grad_q + (m * grad_q_head + b * grad_q_image) * C
    total = total * (_LN2 * SCALE) + _vectors(to, n, j, here, grad_q_place, C, CP, E)
    _store(to, n, j, here, grad_q_place, total, C, CP)


@triton.jit(do_not_specialize=_SIZES)
def of_tables(
    change, q, grad_table, q_head, q_image, q_place, first, batch,
    N: tl.constexpr, T: tl.constexpr, TS: tl.constexpr, KS: tl.constexpr, J: tl.constexpr, JP: tl.constexpr,
    H: tl.constexpr, K: tl.constexpr, KT: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, BR: tl.constexpr,
    SUM: tl.constexpr, SCALE: tl.constexpr, IN: tl.constexpr, F: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """The gradients of the tables from each image, ``(images, H, K, C)``."""
    TILES: tl.constexpr = (K + KT - 1) // KT
    blocks: tl.constexpr = (N * (JP if SUM else 1) + BR - 1) // BR
    image, m, b, _, part = _image(1, first, batch, TILES * H)
    h, k = part % H, part // H * KT + tl.arange(0, KT)
    total = tl.zeros([KT, CP], F)
    for block in range(blocks):
        n, j, here, pairs = _queries_of(block, h, N, T, TS, K, J, JP, BR, SUM)
        at = change + image * (N * T * K) + pairs[None, :] + (k * KS)[:, None]
        of_products = tl.load(at, mask=here[None, :] & (k < K)[:, None], other=0.0)
        queries = _vectors(q + (m * q_head + b * q_image) * C, n, j, here, q_place, C, CP, E)
        total = _dot(of_products.to(E), queries, total, IN)
    _store(grad_table + (image * H + h) * (K * C), k, 0, k < K, 1, total * (_LN2 * SCALE), C, CP)


@triton.jit(do_not_specialize=_SIZES)
def forward(
    q, k, v, known, marks, places, lut, seed, out, sums,  # out and sums are filled
    q_head, q_image, q_place, k_head, k_image, k_place, v_head, v_image, v_place, out_head, out_image, out_place,
    first, batch,
    n0: tl.constexpr, n1: tl.constexpr, n2: tl.constexpr, TORUS: tl.constexpr, EVERYWHERE: tl.constexpr,
    W1: tl.constexpr, W2: tl.constexpr, LOW: tl.constexpr, U: tl.constexpr, L: tl.constexpr,
    J: tl.constexpr, JP: tl.constexpr, P: tl.constexpr, PP: tl.constexpr, H: tl.constexpr, RH: tl.constexpr,
    K: tl.constexpr, T: tl.constexpr, TS: tl.constexpr, KS: tl.constexpr, C: tl.constexpr, CP: tl.constexpr,
    B0: tl.constexpr, B1: tl.constexpr, B2: tl.constexpr, BU: tl.constexpr, SUM: tl.constexpr,
    SPATIAL: tl.constexpr, POSE: tl.constexpr, RATE: tl.constexpr, SCALE: tl.constexpr,
    IN: tl.constexpr, F: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """The output, and the logarithms of the sums of exponentials."""
    BN: tl.constexpr = B0 * B1 * B2
    BM: tl.constexpr = BN * JP
    BK: tl.constexpr = BU * PP
    blocks: tl.constexpr = ((n0 + B0 - 1) // B0) * ((n1 + B1 - 1) // B1) * ((n2 + B2 - 1) // B2)
    N: tl.constexpr = n0 * n1 * n2
    HG: tl.constexpr = H // RH if SUM else 1
    image, m, b, block, part = _image(blocks, first, batch, HG)
    i, j = tl.arange(0, BM) // JP, tl.arange(0, BM) % JP
    o0, o1, o2, n, of_rows, here = _rows(block, i, n1, n2, n0, B0, B1, B2, W1, W2, EVERYWHERE)
    here = here & (j < J)
    p = tl.arange(0, PP)
    queries = _vectors(q + (m * q_head + b * q_image) * C, n, j, here, q_place, C, CP, E)
    known += image * (N * T * K)
    keys, values = k + (m * k_head + b * k_image) * C, v + (m * v_head + b * v_image) * C
    h0 = part * RH
    of_poses, most, norm, acc = (), (), (), ()
    for r in tl.static_range(RH):
        if POSE:
            rows = n * (T * K) + ((h0 + r) * J + j if SUM else j) * TS
            at = known + rows[:, None] + ((K - P + p) * KS)[None, :]
            of_pose = tl.load(at, mask=here[:, None] & (p < P)[None, :], other=0.0)
            of_poses = of_poses + (of_pose,)
        most = most + (tl.full([BM], -1e30, F),)
        norm = norm + (tl.zeros([BM], F),)
        acc = acc + (tl.zeros([BM, CP], F),)
    for first_u in range(0, U, BU):
        u = first_u + tl.arange(0, BU)
        y, of_others, on = _others(places, u, o0, o1, o2, U, n0, n1, n2, TORUS, EVERYWHERE)
        key = _finite(_tile(keys, y, on, k_place, BU, P, PP, C, CP, E))
        value = _finite(_tile(values, y, on, v_place, BU, P, PP, C, CP, E))
        products = tl.reshape(_dot(queries, tl.trans(key), tl.zeros([BM, BK], F), IN), [BM, BU, PP])
        # Who sees what is not finite has no finite output.
        nan = tl.load(marks + (first + image) * N + y)
        seen = here[:, None] & on[None, :]
        more_, norm_, acc_ = (), (), ()
        for r in tl.static_range(RH):
            t = (h0 + r) * J + j if SUM else j
            bias, o, near = _of_offsets(known, lut, n * (T * K) + t * TS, of_rows, of_others, seen, LOW, KS, SPATIAL, F)
            bias = tl.where(near, bias + nan[None, :], -float("inf"))
            score = tl.reshape(_score(products, bias, of_poses[r] if POSE else p, P, PP, POSE, SCALE), [BM, BK])
            more = tl.maximum(most[r], tl.max(score, axis=1))
            less = tl.exp2(most[r] - more)
            probability = tl.exp2(score - more[:, None])
            norm_ = norm_ + (norm[r] * less + tl.sum(probability, axis=1),)
            more_ = more_ + (more,)
            if RATE > 0:
                pair = tl.reshape((o * P)[:, :, None] + p[None, None, :], [BM, BK])
                probability = _drop(probability, seed, n[:, None], pair, t[:, None], first + image, RATE)
            acc_ = acc_ + (_dot(probability.to(value.dtype), value, acc[r] * less[:, None], IN),)
        most, norm, acc = more_, norm_, acc_
    of_outputs = out + (m * out_head + b * out_image) * C
    for r in tl.static_range(RH):
        mean = acc[r] / norm[r][:, None]
        t = (h0 + r) * J + j if SUM else j
        tl.store(sums + ((first + image) * N + n) * T + t, most[r] + tl.log2(norm[r]), mask=here)
        if SUM:
            mean = tl.where(here[:, None], mean, 0.0)
            mean = tl.sum(tl.reshape(mean, [BN, JP, CP]), axis=1)
            _, _, _, place, _, inside = _rows(block, tl.arange(0, BN), n1, n2, n0, B0, B1, B2, W1, W2, EVERYWHERE)
            _store(of_outputs, place, h0 + r, inside, out_place, mean, C, CP)
        else:
            _store(of_outputs, n, j, here, out_place, mean, C, CP)


@triton.jit(do_not_specialize=_SIZES)
def backward_queries(
    q, k, v, known, places, lut, seed, out, sums, grad, grad_q, means, change,  # the last three are filled
    q_head, q_image, q_place, k_head, k_image, k_place, v_head, v_image, v_place, out_head, out_image, out_place,
    grad_head, grad_image, grad_place, grad_q_head, grad_q_image, grad_q_place, first, batch,
    n0: tl.constexpr, n1: tl.constexpr, n2: tl.constexpr, TORUS: tl.constexpr, EVERYWHERE: tl.constexpr,
    W1: tl.constexpr, W2: tl.constexpr, LOW: tl.constexpr, U: tl.constexpr, L: tl.constexpr,
    J: tl.constexpr, JP: tl.constexpr, P: tl.constexpr, PP: tl.constexpr, H: tl.constexpr, RH: tl.constexpr,
    K: tl.constexpr, T: tl.constexpr, TS: tl.constexpr, KS: tl.constexpr, C: tl.constexpr, CP: tl.constexpr,
    B0: tl.constexpr, B1: tl.constexpr, B2: tl.constexpr, BU: tl.constexpr, SUM: tl.constexpr,
    SPATIAL: tl.constexpr, POSE: tl.constexpr, RATE: tl.constexpr, SCALE: tl.constexpr,
    IN: tl.constexpr, F: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """The gradients of queries, and the means of the gradients of their probabilities.

    ``change`` has the gradients of their products with the K rows of both tables, over log 2: those of the offsets
    are filled where there is a key, and those of the poses.
    """
    BN: tl.constexpr = B0 * B1 * B2
    BM: tl.constexpr = BN * JP
    BK: tl.constexpr = BU * PP
    blocks: tl.constexpr = ((n0 + B0 - 1) // B0) * ((n1 + B1 - 1) // B1) * ((n2 + B2 - 1) // B2)
    N: tl.constexpr = n0 * n1 * n2
    image, m, b, block, _ = _image(blocks, first, batch, 1)
    i, j = tl.arange(0, BM) // JP, tl.arange(0, BM) % JP
    o0, o1, o2, n, of_rows, here = _rows(block, i, n1, n2, n0, B0, B1, B2, W1, W2, EVERYWHERE)
    here = here & (j < J)
    p = tl.arange(0, PP)
    queries = _vectors(q + (m * q_head + b * q_image) * C, n, j, here, q_place, C, CP, E)
    known += image * (N * T * K)
    change += image * (N * T * K)
    keys, values = k + (m * k_head + b * k_image) * C, v + (m * v_head + b * v_image) * C
    grads = grad + (m * grad_head + b * grad_image) * C
    grad_queries = tl.zeros([BM, CP], F)
    for h0 in range(0, H if SUM else 1, RH):
        of_outputs, logarithms, mean, of_poses, grad_poses = (), (), (), (), ()
        for r in tl.static_range(RH):
            t, h = ((h0 + r) * J + j, j * 0 + h0 + r) if SUM else (j, j)
            of_output = _vectors(grads, n, h, here, grad_place, C, CP, E)
            of_outputs = of_outputs + (of_output,)
            logarithms = logarithms + (tl.load(sums + ((first + image) * N + n) * T + t, mask=here, other=0.0),)
            if SUM:
                mean = mean + (tl.zeros([BM], F),)
            else:
                outputs = _vectors(out + (m * out_head + b * out_image) * C, n, h, here, out_place, C, CP, E)
                mean = mean + (tl.sum(of_output.to(F) * outputs.to(F), axis=1),)
            if POSE:
                at = known + (n * (T * K) + t * TS)[:, None] + ((K - P + p) * KS)[None, :]
                of_poses = of_poses + (tl.load(at, mask=here[:, None] & (p < P)[None, :], other=0.0),)
                grad_poses = grad_poses + (tl.zeros([BM, BU, PP], F),)
        # Of the sum over the query poses there is an output, of each of them there is none: their means come first.
        for stage in tl.static_range(1 if SUM else 2, 3):
            for first_u in range(0, U, BU):
                u = first_u + tl.arange(0, BU)
                y, of_others, on = _others(places, u, o0, o1, o2, U, n0, n1, n2, TORUS, EVERYWHERE)
                key = _finite(_tile(keys, y, on, k_place, BU, P, PP, C, CP, E))
                value = _tile(values, y, on, v_place, BU, P, PP, C, CP, E)
                products = tl.reshape(_dot(queries, tl.trans(key), tl.zeros([BM, BK], F), IN), [BM, BU, PP])
                seen = here[:, None] & on[None, :]
                of_scores = tl.zeros([BM, BK], F)
                mean_, grad_poses_ = (), ()
                for r in tl.static_range(RH):
                    t = (h0 + r) * J + j if SUM else j
                    bias, o, near = _of_offsets(
                        known, lut, n * (T * K) + t * TS, of_rows, of_others, seen, LOW, KS, SPATIAL, F
                    )
                    bias = tl.where(near, bias, -float("inf"))
                    score = _score(products, bias, of_poses[r] if POSE else p, P, PP, POSE, SCALE)
                    probability = tl.exp2(tl.reshape(score, [BM, BK]) - logarithms[r][:, None])
                    of_probability = _dot(of_outputs[r], tl.trans(value), tl.zeros([BM, BK], F), IN)
                    if RATE > 0:
                        pair = tl.reshape((o * P)[:, :, None] + p[None, None, :], [BM, BK])
                        of_probability = _drop(of_probability, seed, n[:, None], pair, t[:, None], first + image, RATE)
                    if SUM and stage == 1:
                        shares = tl.where(probability == 0.0, 0.0, probability * of_probability)
                        mean_ = mean_ + (mean[r] + tl.sum(shares, axis=1),)
                    else:
                        # What is not finite is not seen by those who have no share of it.
                        of_score = probability * (of_probability - mean[r][:, None])
                        of_score = tl.where(probability == 0.0, 0.0, of_score)
                        of_scores += of_score
                        of_score = tl.reshape(of_score, [BM, BU, PP])
                        if SPATIAL:
                            of_offset = tl.sum(of_score, axis=2)
                            tl.store(change + (n * (T * K) + t * TS)[:, None] + o * KS, of_offset, mask=near)
                        if POSE:
                            grad_poses_ = grad_poses_ + (grad_poses[r] + of_score,)
                if SUM and stage == 1:
                    mean = mean_
                else:
                    grad_poses = grad_poses_
                    grad_queries = _dot(of_scores.to(key.dtype), key, grad_queries, IN)
        for r in tl.static_range(RH):
            t = (h0 + r) * J + j if SUM else j
            tl.store(means + ((first + image) * N + n) * T + t, mean[r], mask=here)
            if POSE:
                at = change + (n * (T * K) + t * TS)[:, None] + ((K - P + p) * KS)[None, :]
                tl.store(at, tl.sum(grad_poses[r], axis=1), mask=here[:, None] & (p < P)[None, :])
    to = grad_q + (m * grad_q_head + b * grad_q_image) * C
    _store(to, n, j, here, grad_q_place, grad_queries * (_LN2 * SCALE), C, CP)


@triton.jit(do_not_specialize=_SIZES)
def backward_keys(
    q, k, v, known, places, lut, seed, sums, means, grad, grad_k, grad_v,  # the last two are filled
    q_head, q_image, q_place, k_head, k_image, k_place, v_head, v_image, v_place,
    grad_head, grad_image, grad_place, grad_k_head, grad_k_image, grad_k_place, grad_v_head, grad_v_image, grad_v_place,
    first, batch,
    n0: tl.constexpr, n1: tl.constexpr, n2: tl.constexpr, TORUS: tl.constexpr, EVERYWHERE: tl.constexpr,
    W1: tl.constexpr, W2: tl.constexpr, LOW: tl.constexpr, U: tl.constexpr, L: tl.constexpr,
    J: tl.constexpr, JP: tl.constexpr, P: tl.constexpr, PP: tl.constexpr, H: tl.constexpr, RH: tl.constexpr,
    K: tl.constexpr, T: tl.constexpr, TS: tl.constexpr, KS: tl.constexpr, C: tl.constexpr, CP: tl.constexpr,
    B0: tl.constexpr, B1: tl.constexpr, B2: tl.constexpr, BU: tl.constexpr, SUM: tl.constexpr,
    SPATIAL: tl.constexpr, POSE: tl.constexpr, RATE: tl.constexpr, SCALE: tl.constexpr,
    IN: tl.constexpr, F: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """The gradients of keys and values: rows are the key poses of a block, and columns the queries that see it."""
    BN: tl.constexpr = B0 * B1 * B2
    BM: tl.constexpr = BN * PP
    BK: tl.constexpr = BU * JP
    blocks: tl.constexpr = ((n0 + B0 - 1) // B0) * ((n1 + B1 - 1) // B1) * ((n2 + B2 - 1) // B2)
    N: tl.constexpr = n0 * n1 * n2
    image, m, b, block, _ = _image(blocks, first, batch, 1)
    i, p = tl.arange(0, BM) // PP, tl.arange(0, BM) % PP
    o0, o1, o2, n, of_rows, here = _rows(block, i, n1, n2, n0, B0, B1, B2, W1, W2, EVERYWHERE)
    here = here & (p < P)
    key = _vectors(k + (m * k_head + b * k_image) * C, n, p, here, k_place, C, CP, E)
    value = _vectors(v + (m * v_head + b * v_image) * C, n, p, here, v_place, C, CP, E)
    known += image * (N * T * K)
    queries, grads = q + (m * q_head + b * q_image) * C, grad + (m * grad_head + b * grad_image) * C
    grad_keys, grad_values = tl.zeros([BM, CP], F), tl.zeros([BM, CP], F)
    for first_u in range(0, U, BU):
        u = first_u + tl.arange(0, BU)
        y, of_others, on = _others(places, u, o0, o1, o2, U, n0, n1, n2, TORUS, EVERYWHERE)
        query = _finite(_tile(queries, y, on, q_place, BU, J, JP, C, CP, E))
        products = _dot(key, tl.trans(query), tl.zeros([BM, BK], F), IN, True)
        products = tl.reshape(products, [BM, BU, JP])
        o = tl.load(lut + (of_rows[:, None] - of_others[None, :] + LOW))
        seen = here[:, None] & on[None, :] & (o >= 0)
        j3 = tl.arange(0, JP)[None, :]
        of_scores = tl.zeros([BM, BK], F)
        for h0 in range(H if SUM else 1):
            t = h0 * J + j3 if SUM else j3
            if SUM:
                grad_h = _tile(grads + h0 * C, y, on, grad_place, BU, 1, 1, C, CP, E)
                of_output = tl.reshape(tl.broadcast_to(tl.reshape(grad_h, [BU, 1, CP]), [BU, JP, CP]), [BK, CP])
            else:
                of_output = _tile(grads, y, on, grad_place, BU, J, JP, C, CP, E)
            at, pairs = y[:, None] * (T * K) + t * TS, ((first + image) * N + y[:, None]) * T + t
            there = on[:, None] & (j3 < J)
            logarithm = tl.load(sums + pairs, mask=there, other=0.0)
            mean = tl.reshape(tl.load(means + pairs, mask=there, other=0.0), [BK])
            all_seen = seen[:, :, None] & (j3 < J)[None, :, :]
            # In the same order as the forward pass: a score that is by far the largest has a share of exactly 1.
            if SPATIAL:
                score = products * SCALE + tl.load(
                    known + at[None, :, :] + (o * KS)[:, :, None], mask=all_seen, other=0.0
                )
            else:
                score = products * SCALE
            if POSE:
                score += tl.load(known + at[None, :, :] + ((K - P + p) * KS)[:, None, None], mask=all_seen, other=0.0)
            score = tl.where(all_seen, score - logarithm[None, :, :], -float("inf"))
            probability = tl.reshape(tl.exp2(score), [BM, BK])
            of_probability = _dot(value, tl.trans(of_output), tl.zeros([BM, BK], F), IN)
            dropped = probability
            if RATE > 0:
                j_, y_ = tl.reshape(t + y[:, None] * 0, [BK])[None, :], tl.reshape(y[:, None] + j3 * 0, [BK])[None, :]
                pair = tl.reshape((o * P + p[:, None])[:, :, None] + (j3 * 0)[None, :, :], [BM, BK])
                of_probability = _drop(of_probability, seed, y_, pair, j_, first + image, RATE)
                dropped = _drop(probability, seed, y_, pair, j_, first + image, RATE)
            of_scores += tl.where(probability == 0.0, 0.0, probability * (of_probability - mean[None, :]))
            grad_values = _dot(dropped.to(of_output.dtype), of_output, grad_values, IN)
        grad_keys = _dot(of_scores.to(query.dtype), query, grad_keys, IN)
    to_keys, to_values = (
        grad_k + (m * grad_k_head + b * grad_k_image) * C,
        grad_v + (m * grad_v_head + b * grad_v_image) * C,
    )
    _store(to_keys, n, p, here, grad_k_place, grad_keys * (_LN2 * SCALE), C, CP)
    _store(to_values, n, p, here, grad_v_place, grad_values, C, CP)
