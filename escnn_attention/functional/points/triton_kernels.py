"""The loops of :mod:`~escnn_attention.functional.points.triton`, for Triton to compile.

In the passes over queries a program has a query, an output pose and R heads, and its threads go over the keys of the
query side by side. In the pass over keys threads have a key each, and go over the queries that see it; a program has R
heads where keys are of the query's own pose, and otherwise R poses of the keys, which share what they read of a query.
A vector is a tuple of its channels: each is a tensor ``(R, W, lanes)``, where W threads share the channels of a vector.

Names: ``r`` are queries of a chunk, A of each group ``g``; ``n`` points that are keys; ``e`` edges, the pairs of a
query and one of the K keys of its group; ``m`` heads, ``h`` output poses, ``j`` query poses, ``p`` key poses.
"""

# ruff: noqa: RUF005  (the language of Triton has no stars in tuples)

import triton
import triton.language as tl

from escnn_attention.functional.vectors_kernels import add, dot, scaled

_SIZES = ["number", "points", "group_queries", "group_keys"]

# Knowing that memory is aligned, Triton would give a thread neighbouring channels for some accesses, and make numbers
# twice or exchange them between threads in every round.
_VECTORS = ["q", "k", "v", "reads", "features", "known", "extra", "layer", "shift", "relation", "keys", "lengths"]
_VECTORS += ["measure", "out", "sums", "grad", "means", "order", "starts"]
_VECTORS += [f"grad_{name}" for name in ("q", "k", "v", "reads", "features", "known", "extra", "functions")]


@triton.jit
def _vector(x, here, C: tl.constexpr, W: tl.constexpr, STEP):
    """Read the C channels of vectors, which lie STEP apart; zeros where there is nothing."""
    w = tl.arange(0, W)[None, :, None]
    v = ()
    for i in tl.static_range((C + W - 1) // W):
        c = w + i * W
        v = v + (tl.load(x + c * STEP, mask=here & (c < C), other=0.0),)
    return v


@triton.jit
def _store(x, v, factor, here, C: tl.constexpr, W: tl.constexpr):
    """Write multiples of vectors."""
    w = tl.arange(0, W)[None, :, None]
    for i in tl.static_range((C + W - 1) // W):
        tl.store(x + w + i * W, v[i] * factor, mask=here & (w + i * W < C))


@triton.jit
def _over_lanes(x):
    """The sums over all lanes."""
    v = ()
    for i in tl.static_range(len(x)):
        v = v + (tl.sum(x[i], axis=2, keep_dims=True),)
    return v


@triton.jit
def _threads(W: tl.constexpr, LANES: tl.constexpr):
    """The numbers of threads, ``(1, W, LANES)``."""
    return tl.arange(0, W)[None, :, None] * LANES + tl.arange(0, LANES)[None, None, :]


@triton.jit
def _add_at(total, place, number):
    """Add numbers ``(R, 1, 1)`` in one of many places, some of which each thread has, ``(R, W, LANES)``."""
    W: tl.constexpr = total[0].shape[1]
    LANES: tl.constexpr = total[0].shape[2]
    v = ()
    for i in tl.static_range(len(total)):
        v = v + (total[i] + tl.where(_threads(W, LANES) + i * (W * LANES) == place, number, 0.0),)
    return v


@triton.jit
def _zeros(kind, C: tl.constexpr, R: tl.constexpr, W: tl.constexpr, LANES: tl.constexpr):
    """Zeros for vectors of C channels, of the type that a pointer is to."""
    v = ()
    for _ in tl.static_range((C + W - 1) // W):
        v = v + (tl.zeros([R, W, LANES], kind.dtype.element_ty),)
    return v


@triton.jit
def _linear(layer, shift, coords, F: tl.constexpr, W: tl.constexpr):
    """A linear map of coordinates to F numbers, those that are none repeat the last."""
    w = tl.arange(0, W)[None, :, None]
    v = ()
    for i in tl.static_range((F + W - 1) // W):
        f = tl.minimum(w + i * W, F - 1)
        z = tl.load(shift + f)
        for d in tl.static_range(len(coords)):
            z += tl.load(layer + f * len(coords) + d) * coords[d]
        v = v + (z,)
    return v


@triton.jit
def _silu(x):
    v = ()
    for i in tl.static_range(len(x)):
        v = v + (x[i] * tl.sigmoid(x[i]),)
    return v


@triton.jit
def _add_slopes(total, change, inner, coords):
    """Add gradients of the weights of a linear map, and of its shift, from those of its SiLU."""
    v = ()
    for i in tl.static_range(len(inner)):
        s = tl.sigmoid(inner[i])
        of_inner = change[i] * (s + inner[i] * s * (1 - s))
        for d in tl.static_range(len(coords)):
            v = v + (total[i * (len(coords) + 1) + d] + of_inner * coords[d],)
        v = v + (total[i * (len(coords) + 1) + len(coords)] + of_inner,)
    return v


@triton.jit
def _features(features, layer, shift, relation, at, edges, e, here, F: tl.constexpr, W: tl.constexpr, D: tl.constexpr):
    """Functions of the location: as they are given, or of D coordinates."""
    if D == 0:
        v = _vector(features + at * F * edges + e, here, F, W, edges)
    else:
        v = _silu(_linear(layer, shift, _vector(relation + at * D * edges + e, here, D, 1, edges), F, W))
    return v


@triton.jit
def _drop(x, seed, e, m, row, p, RATE: tl.constexpr):
    """Dropout of what belongs to an edge, a head, a row of scores and a key pose: the same in every pass."""
    zero = (e + m + p + row).to(tl.int32) * 0
    counters = (zero + e.to(tl.int32), zero + p.to(tl.int32), zero + row, zero + m.to(tl.int32))
    random, _, _, _ = tl.philox(tl.load(seed), counters[0], counters[1], counters[2], counters[3], n_rounds=7)
    return tl.where(tl.uint_to_uniform_float(random) < RATE, 0.0, x * (1 / (1 - RATE)))


@triton.jit
def _place(number, group_queries, M: tl.constexpr, R: tl.constexpr):
    """The query of a program, its group, its heads, and which of these no other row has: others repeat the last."""
    blocks: tl.constexpr = (M + R - 1) // R
    at = tl.program_id(0).to(tl.int64)
    m = at % blocks * R + tl.arange(0, R)[:, None, None]
    r = at // blocks
    return r, r // group_queries, tl.minimum(m, M - 1), m < M


@triton.jit
def _weigh(score, share, seen, measure, sums, MEASURE: tl.constexpr, COUNT: tl.constexpr):
    """Probabilities of scores, or shares of them, and by what the gradient of a probability becomes that of a score.

    Args:
        share: the score of a key that is seen, which is zero, or minus infinity for those that are not.
        measure: where the logarithms of the measure of the keys are.
        sums: logarithms of sums of exponentials, or inverse sums of the measure.
    """
    if MEASURE:
        share += tl.load(measure, mask=seen, other=0.0)
    if COUNT:
        share = tl.exp(share) * sums
        weight = score * share
    else:
        share = tl.exp(score + share - sums)
        weight = share
    # With a return in each branch, Triton would compare the shapes of both.
    return weight, share


@triton.jit(do_not_specialize=_SIZES)
def forward(
    q, k, v, reads, features, known, extra, layer, shift, relation,  # see Arguments
    keys, lengths, measure, seed,
    out, sums,  # filled: (M, Q, H, C), (M, Q, H, JS)
    number, points, group_queries, group_keys,
    M: tl.constexpr, H: tl.constexpr, J: tl.constexpr, P: tl.constexpr, C: tl.constexpr, F: tl.constexpr,
    D: tl.constexpr, FM: tl.constexpr, PE: tl.constexpr, R: tl.constexpr, W: tl.constexpr, LANES: tl.constexpr,
    CONTENT: tl.constexpr, KNOWN: tl.constexpr, MEASURE: tl.constexpr, PADDED: tl.constexpr, SUMMED: tl.constexpr,
    OWN: tl.constexpr, COUNT: tl.constexpr, RATE: tl.constexpr,
):  # fmt: skip
    """The output, and what the backward pass makes weights from."""
    JS: tl.constexpr = J if SUMMED else 1
    PU: tl.constexpr = 1 if OWN else P
    r, g, m, mine = _place(number, group_queries, M, R)
    every = m >= 0
    h = tl.program_id(1)
    lane = tl.arange(0, LANES)[None, None, :]
    length = tl.load(lengths + g).to(tl.int32) if PADDED else group_keys
    edges = number.to(tl.int64) * group_keys
    total = _zeros(v, C, R, W, 1)
    for j in range(JS):
        pose = j if SUMMED else h
        row = (m * number + r) * J + pose
        if CONTENT:
            query = _vector(q + row * C, every, C, W, 1)
        if F > 0:
            reader = _vector(reads + row * F, every, F, W, 1)
        most = tl.full([R, 1, LANES], -1e30, v.dtype.element_ty)
        norm = tl.zeros([R, 1, LANES], v.dtype.element_ty)
        acc = _zeros(v, C, R, W, LANES)
        at_scores = ((m * number + r) * H + h) * JS + j
        for first in range(0, length, LANES):
            seen = first + lane < length
            n = tl.load(keys + g * group_keys + first + lane, mask=seen, other=0)
            e = r * group_keys + first + lane
            bias = tl.where(seen, 0.0, -float("inf")).to(norm.dtype)
            share, score = bias, tl.zeros([R, 1, LANES], norm.dtype)
            if F > 0:
                of_head = (m if FM > 1 else 0) * H + h
                feature = _features(features, layer, shift, relation, of_head, edges, e, seen, F, W, D)
                score += dot(reader, feature, W)
            if PE == 1:
                score += tl.load(extra + ((m * H + h) * JS + j) * edges + e, mask=seen, other=0.0)
            at_keys = (m * points + n) * P
            for u in range(PU):
                p = pose if OWN else u
                s = score
                if CONTENT:
                    s += dot(query, _vector(k + (at_keys + p) * C, seen, C, W, 1), W)
                if KNOWN:
                    s += tl.load(known + at_scores * PU + u)
                if PE > 1:
                    s += tl.load(extra + (((m * H + h) * JS + j) * PE + u) * edges + e, mask=seen, other=0.0)
                if COUNT:
                    weight, mass = _weigh(s, share, seen, measure + n * P + p, 1.0, MEASURE, True)
                    norm += mass
                else:
                    if MEASURE:
                        s += tl.load(measure + n * P + p, mask=seen, other=0.0)
                    s += share
                    more = tl.maximum(most, s)
                    less = tl.exp(most - more)
                    weight, most = tl.exp(s - more), more
                    norm = norm * less + weight
                    acc = scaled(acc, less)
                if RATE > 0:
                    weight = _drop(weight, seed, e, m, h * JS + j, p, RATE)
                acc = add(acc, weight, _vector(v + (at_keys + p) * C, seen, C, W, 1))
        if COUNT:
            norm = tl.sum(norm, axis=2, keep_dims=True)
            saved = tl.where(norm > 0, 1 / norm, 0.0)
            factor = saved
        else:
            top = tl.max(most, axis=2, keep_dims=True)
            less = tl.exp(most - top)
            norm = tl.sum(norm * less, axis=2, keep_dims=True)
            acc = scaled(acc, less)
            saved = top + tl.log(norm)
            factor = tl.where(norm > 0, 1 / norm, 0.0)
        total = add(total, factor, _over_lanes(acc))
        tl.store(sums + at_scores, saved, mask=mine)
    _store(out + ((m * number + r) * H + h) * C, total, 1.0, mine, C, W)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_VECTORS)
def backward_queries(
    q, k, v, reads, features, known, extra, layer, shift, relation,
    keys, lengths, measure, seed,
    out, sums, grad,
    # filled: means as sums, gradients of products with queries from each output pose, and of what is added to scores
    means, grad_q, grad_reads, grad_features, grad_known, grad_extra, grad_functions,
    number, points, group_queries, group_keys,
    M: tl.constexpr, H: tl.constexpr, J: tl.constexpr, P: tl.constexpr, C: tl.constexpr, F: tl.constexpr,
    D: tl.constexpr, FM: tl.constexpr, PE: tl.constexpr, R: tl.constexpr, W: tl.constexpr, LANES: tl.constexpr,
    CONTENT: tl.constexpr, KNOWN: tl.constexpr, MEASURE: tl.constexpr, PADDED: tl.constexpr, SUMMED: tl.constexpr,
    OWN: tl.constexpr, COUNT: tl.constexpr, RATE: tl.constexpr,
):  # fmt: skip
    """The gradients of all that belongs to queries and to edges, and the means of the gradients of probabilities."""
    JS: tl.constexpr = J if SUMMED else 1
    PU: tl.constexpr = 1 if OWN else P
    SWEEPS: tl.constexpr = 2 if JS > 1 and not COUNT else 1
    THREADS: tl.constexpr = W * LANES
    r, g, m, mine = _place(number, group_queries, M, R)
    every = m >= 0
    h = tl.program_id(1)
    lane = tl.arange(0, LANES)[None, None, :]
    length = tl.load(lengths + g).to(tl.int32) if PADDED else group_keys
    edges = number.to(tl.int64) * group_keys
    at_out = ((m * number + r) * H + h) * C
    of_out = _vector(grad + at_out, every, C, W, 1)
    # The weights and the shift of each function.
    slopes = _zeros(v, (F + W - 1) // W * (D + 1) * W, 1, W, LANES)
    for j in range(JS):
        pose = j if SUMMED else h
        row = (m * number + r) * J + pose
        if CONTENT:
            query = _vector(q + row * C, every, C, W, 1)
        if F > 0:
            reader = _vector(reads + row * F, every, F, W, 1)
            grad_reader = _zeros(v, F, R, W, LANES)
        at_scores = ((m * number + r) * H + h) * JS + j
        logarithm = tl.load(sums + at_scores)
        grad_query = _zeros(v, C, R, W, LANES)
        # Where several query poses contribute, a first sweep makes the mean of each.
        mean = tl.zeros([R, 1, LANES], v.dtype.element_ty)
        if not COUNT and JS == 1:
            mean += dot(of_out, _vector(out + at_out, every, C, W, 1), W)
        of_pose = tl.zeros([R, 1, LANES], v.dtype.element_ty)
        of_poses = _zeros(v, (PU + THREADS - 1) // THREADS * W, R, W, LANES)
        if JS > 1:
            tl.debug_barrier()  # another thread may have written what this one reads
        for sweep in tl.static_range(SWEEPS):
            for first in range(0, length, LANES):
                seen = first + lane < length
                n = tl.load(keys + g * group_keys + first + lane, mask=seen, other=0)
                e = r * group_keys + first + lane
                share = tl.where(seen, 0.0, -float("inf")).to(mean.dtype)
                score, of_edge = tl.zeros_like(mean), tl.zeros_like(mean)
                if F > 0:
                    of_head = (m if FM > 1 else 0) * H + h
                    at_features = of_head * F * edges + e
                    if D > 0:
                        coords = _vector(relation + of_head * D * edges + e, seen, D, 1, edges)
                        inner = _linear(layer, shift, coords, F, W)
                        feature = _silu(inner)
                    else:
                        feature = _vector(features + at_features, seen, F, W, edges)
                    score += dot(reader, feature, W)
                if PE == 1:
                    score += tl.load(extra + ((m * H + h) * JS + j) * edges + e, mask=seen, other=0.0)
                at_keys = (m * points + n) * P
                for u in range(PU):
                    p = pose if OWN else u
                    s = score
                    if CONTENT:
                        key = _vector(k + (at_keys + p) * C, seen, C, W, 1)
                        s += dot(query, key, W)
                    if KNOWN:
                        s += tl.load(known + at_scores * PU + u)
                    if PE > 1:
                        s += tl.load(extra + (((m * H + h) * JS + j) * PE + u) * edges + e, mask=seen, other=0.0)
                    probability, share_of = _weigh(s, share, seen, measure + n * P + p, logarithm, MEASURE, COUNT)
                    of_weight = dot(of_out, _vector(v + (at_keys + p) * C, seen, C, W, 1), W)
                    if RATE > 0:
                        of_weight = _drop(of_weight, seed, e, m, h * JS + j, p, RATE)
                    if sweep == SWEEPS - 1:
                        of_score = share_of * (of_weight - mean)
                        of_edge += of_score
                        if CONTENT:
                            grad_query = add(grad_query, of_score, key)
                        if KNOWN:
                            if PU == 1:
                                of_pose += of_score
                            else:
                                of_poses = _add_at(of_poses, u, tl.sum(of_score, axis=2, keep_dims=True))
                        if PE > 1:
                            at_extra = (((m * H + h) * JS + j) * PE + u) * edges + e
                            tl.store(grad_extra + at_extra, of_score, mask=seen & mine)
                    else:
                        of_edge += probability * of_weight
                if sweep == SWEEPS - 1:
                    if PE == 1:
                        tl.store(grad_extra + ((m * H + h) * JS + j) * edges + e, of_edge, mask=seen & mine)
                    if F > 0:
                        grad_reader = add(grad_reader, of_edge, feature)
                        w = tl.arange(0, W)[None, :, None]
                        changes = ()
                        for i in tl.static_range((F + W - 1) // W):
                            change = of_edge * reader[i]
                            if FM == 1:
                                change = tl.sum(tl.where(mine, change, 0.0), axis=0, keep_dims=True)
                            changes = changes + (change,)
                        if D > 0:
                            slopes = _add_slopes(slopes, changes, inner, coords)
                        else:
                            for i in tl.static_range((F + W - 1) // W):
                                to, there = grad_features + at_features + (w + i * W) * edges, seen & (w + i * W < F)
                                if FM > 1:
                                    there = there & mine
                                else:
                                    # Heads of other programs have numbers of their own.
                                    to += tl.program_id(0) % ((M + R - 1) // R) * H * F * edges
                                change = changes[i]
                                if JS > 1:  # Earlier query poses have written theirs.
                                    change += tl.load(to, mask=there & (j > 0), other=0.0)
                                tl.store(to, change, mask=there)
                else:
                    mean += of_edge
            if sweep < SWEEPS - 1:
                mean = tl.sum(mean, axis=2, keep_dims=True) + tl.zeros([R, 1, LANES], mean.dtype)
        if not COUNT:
            tl.store(means + at_scores, tl.max(mean, axis=2, keep_dims=True), mask=mine)
        # The poses of queries that contribute to all output poses are told apart by these.
        row += h * (M * J * number.to(tl.int64)) if SUMMED else 0
        if CONTENT:
            _store(grad_q + row * C, _over_lanes(grad_query), 1.0, mine, C, W)
        if F > 0:
            _store(grad_reads + row * F, _over_lanes(grad_reader), 1.0, mine, F, W)
        if KNOWN and PU == 1:
            tl.store(grad_known + at_scores, tl.sum(of_pose, axis=2, keep_dims=True), mask=mine)
        elif KNOWN:
            for i in tl.static_range(len(of_poses)):
                u = i * THREADS + _threads(W, LANES)
                tl.store(grad_known + at_scores * PU + u, of_poses[i], mask=mine & (u < PU))
    if D > 0:
        slopes = _over_lanes(slopes)
        of_program = grad_functions + (tl.program_id(0).to(tl.int64) * H + h) * F * (D + 1)
        w = tl.arange(0, W)[None, :, None]
        for i in tl.static_range((F + W - 1) // W):
            for d in tl.static_range(D + 1):
                to = of_program + (w + i * W) * (D + 1) + d
                tl.store(to, slopes[i * (D + 1) + d], mask=w + i * W < F)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_VECTORS)
def backward_keys(
    q, k, v, reads, features, known, extra, layer, shift, relation,
    order, starts, measure, seed,  # the places of each point among the keys of all groups
    sums, means, grad,
    grad_k, grad_v,  # filled
    number, points, group_queries, group_keys,
    M: tl.constexpr, H: tl.constexpr, J: tl.constexpr, P: tl.constexpr, C: tl.constexpr, F: tl.constexpr,
    D: tl.constexpr, FM: tl.constexpr, PE: tl.constexpr, R: tl.constexpr, W: tl.constexpr, LANES: tl.constexpr,
    CONTENT: tl.constexpr, KNOWN: tl.constexpr, MEASURE: tl.constexpr, SUMMED: tl.constexpr,
    OWN: tl.constexpr, COUNT: tl.constexpr, RATE: tl.constexpr,
):  # fmt: skip
    """The gradients of keys and values."""
    JS: tl.constexpr = J if SUMMED else 1
    PU: tl.constexpr = 1 if OWN else P
    HEADS: tl.constexpr = R if OWN else 1
    blocks: tl.constexpr = (M + HEADS - 1) // HEADS
    at = tl.program_id(0).to(tl.int64)
    n = at // blocks * LANES + tl.arange(0, LANES)[None, None, :]
    here = n < points
    rows = tl.arange(0, R)[:, None, None]
    m = at % blocks * HEADS + (rows if OWN else rows * 0)
    p0 = tl.program_id(1) * (1 if OWN else R)
    p = p0 + (rows * 0 if OWN else rows)
    mine = here & (m < M) & (p < P)
    # Heads and poses that are none read those of the last.
    m, p, u = tl.minimum(m, M - 1), tl.minimum(p, P - 1), (rows * 0 if OWN else tl.minimum(p, P - 1))
    # All rows of a program have one head where they are poses: then what is read of a query is read once.
    mq = m if OWN else at % blocks
    edges = number.to(tl.int64) * group_keys
    n = tl.minimum(n, points - 1)
    at_keys = ((m * points + n) * P + p) * C
    if CONTENT:
        key = _vector(k + at_keys, here, C, W, 1)
    value = _vector(v + at_keys, here, C, W, 1)
    start = tl.load(starts + n)
    count = tl.where(here, tl.load(starts + n + 1) - start, 0) * group_queries
    of_measure = tl.zeros([R, 1, LANES], v.dtype.element_ty)
    if MEASURE:
        of_measure += tl.load(measure + n * P + p)
    grad_key, grad_value = _zeros(v, C, R, W, LANES), _zeros(v, C, R, W, LANES)
    for t in range(0, tl.max(count).to(tl.int32)):
        seen = t < count
        place = tl.load(order + start + t // group_queries, mask=seen, other=0)
        r = place // group_keys * group_queries + t % group_queries
        e = r * group_keys + place % group_keys
        share = tl.where(seen, of_measure, -float("inf"))
        for s in range(p0 if OWN else 0, p0 + 1 if OWN and not SUMMED else H * JS, JS if OWN else 1):
            h, j = s // JS, s % JS
            pose = j if SUMMED else h
            row = (mq * number + r) * J + pose
            score = tl.zeros([R, 1, LANES], of_measure.dtype)
            if F > 0:
                of_head = (mq if FM > 1 else 0) * H + h
                feature = _features(features, layer, shift, relation, of_head, edges, e, seen, F, W, D)
                score += dot(_vector(reads + row * F, seen, F, W, 1), feature, W)
            if PE > 0:
                at_extra = ((mq * H + h) * JS + j) * PE + (u if PE > 1 else 0)
                score += tl.load(extra + at_extra * edges + e, mask=seen, other=0.0)
            if CONTENT:
                query = _vector(q + row * C, seen, C, W, 1)
                score += dot(query, key, W)
            at_scores = ((mq * number + r) * H + h) * JS + j
            if KNOWN:
                score += tl.load(known + at_scores * PU + u, mask=seen, other=0.0)
            # It is added already.
            weight, share_of = _weigh(
                score, share, seen, measure, tl.load(sums + at_scores, mask=seen, other=0.0), False, COUNT
            )
            of_out = _vector(grad + ((mq * number + r) * H + h) * C, seen, C, W, 1)
            of_weight = dot(of_out, value, W)
            if RATE > 0:
                of_weight = _drop(of_weight, seed, e, m, h * JS + j, p, RATE)
                weight = _drop(weight, seed, e, m, h * JS + j, p, RATE)
            if not COUNT:
                of_weight -= tl.load(means + at_scores, mask=seen, other=0.0)
            if CONTENT:
                grad_key = add(grad_key, share_of * of_weight, query)
            grad_value = add(grad_value, weight, of_out)
    if CONTENT:
        _store(grad_k + at_keys, grad_key, 1.0, mine, C, W)
    _store(grad_v + at_keys, grad_value, 1.0, mine, C, W)
