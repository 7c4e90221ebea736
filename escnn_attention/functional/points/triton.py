"""Attention between points on a GPU, by kernels that Triton compiles.

A chunk of groups of queries and their keys is a list of edges. Vectors are read where they lie, scores are made, used
and dropped, and the backward pass makes them again: once sorted by query, and once by key. What is held between the
passes grows with the number of points; what is held of an edge are the functions of its offset, or its scores, as the
encoding makes them. Every number is summed by one program, in the same order in every run.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from escnn_attention.functional.autograd import PRECISE, Operator, Passes
from escnn_attention.functional.call import Normalization
from escnn_attention.functional.launch import interpreted, kernels, on_device, power_of_two, why_not_run
from escnn_attention.functional.points.call import PairScores, PointCall, against
from escnn_attention.functional.points.native import features_of, of_rows, why_not_first
from escnn_attention.functional.points.portable import Chunks, Weights, attend_in_chunks
from escnn_attention.geometry.neighbours import Chunk

__all__ = ["Arguments", "attention", "why_not_first", "why_unsupported"]

_SCORES_PER_CHUNK, _GIVEN_SCORES_PER_CHUNK = 2**34, 2**26
"""Scores that are not held bound what queries know of poses; those that an encoding gives are held."""

_NUMBERS = 24
"""How many numbers of the vectors of its heads a thread has at most: its registers hold up to six such vectors."""


def why_unsupported(call: PointCall) -> str | None:
    """Why the kernels cannot serve a call."""
    if reason := why_not_run(call.q.device.type):
        return reason
    if call.values is not None:
        return "values pass through a kernel"
    if call.edges is not None:
        return "edges have features"
    if call.envelope is not None:
        return "the measure has an envelope"
    log_measure = call.bias.log_measure
    if log_measure is not None and log_measure.requires_grad:
        return "the measure requires a gradient"
    return None


def attention(call: PointCall) -> Tensor:
    """Attention between points by the kernels: see :func:`escnn_attention.functional.attention`."""
    given = call.bias.widths[0] > 1 or not call.bias.tables.offsets
    numbers = _GIVEN_SCORES_PER_CHUNK if given else _SCORES_PER_CHUNK
    return attend_in_chunks(call, _Edges, numbers)


class Arguments(NamedTuple):
    """A chunk of G groups of A queries each, which see the same K of N points.

    Attributes:
        q: ``(M, G · A, J, C)``, scaled; None where products of queries and keys are not in the scores.
        k, v: ``(M, N, P, C)``.
        reads, features: ``(M, G · A, J, F)`` and ``(M or 1, H, F, G, A, K)``, whose products are added to the scores.
        known: ``(M, G · A, H, J or 1, P or 1)``, what poses add to the scores.
        extra: ``(M, H · (J or 1), P or 1, G, A, K)``, what is added to the scores.
        layer, shift: ``(F, D)`` and ``(F,)``: the features are the SiLU of this linear map of ``relation``; None
            where they are given.
        relation: ``(H, D, G, A, K)``, what every output pose sees of the edges; it has no gradient.
        keys: ``(G, K)``; -1 at the end of a row fills up.
        log_measure: ``(N, P)``.
        seed: ``(1,)``, of dropout.
        num_poses: H.
        group_queries: A.
        padded: whether keys have any -1.
        sum_query_poses: whether all J query poses contribute to every output pose.
        own_keys: whether a query sees keys of its own pose only.
        normalize_by_count: whether scores are divided by the measure of the keys, instead of a softmax.
        dropout: the probability.
    """

    q: Tensor | None
    k: Tensor | None
    v: Tensor
    reads: Tensor | None
    features: Tensor | None
    known: Tensor | None
    extra: Tensor | None
    layer: Tensor | None
    shift: Tensor | None
    relation: Tensor | None
    keys: Tensor
    log_measure: Tensor | None
    seed: Tensor | None
    num_poses: int
    group_queries: int
    padded: bool
    sum_query_poses: bool
    own_keys: bool
    normalize_by_count: bool
    dropout: float

    @property
    def number(self) -> int:
        """How many queries there are."""
        return len(self.keys) * self.group_queries

    @property
    def query_poses(self) -> int:
        """J, of what belongs to queries; H where nothing does."""
        given = self.reads if self.q is None else self.q
        if given is not None:
            return given.shape[2]
        return self.summed_poses if self.sum_query_poses else self.num_poses

    @property
    def summed_poses(self) -> int:
        """How many query poses contribute to an output pose."""
        if not self.sum_query_poses:
            return 1
        if self.extra is not None:
            return self.extra.shape[1] // self.num_poses
        return self.query_poses


_LEAVES = 9


class _Edges(Chunks):
    """The attention of one call, chunk by chunk, by the kernels."""

    shares = False
    makes_features = True

    def combine(self, terms: PairScores, k: Tensor, v: Tensor, some: Chunk, seen: Tensor | None) -> Tensor:
        """The output of a chunk, of the terms of its scores."""
        weights, extra, features, reads = self.weights, terms.extra, terms.features, terms.reads
        if features is not None and reads is not None and features.shape[5] > 1:
            # Functions of the poses of the keys, too: the kernels get what they are worth.
            worth = against(reads, features).permute(1, 2, 3, 5, 0, 4, 6)
            extra = worth if extra is None else extra + worth
            features = reads = None
        first = self.layer if reads is not None and features is None else None
        known = None
        if terms.q is not None and terms.poses is not None:
            q = terms.q.expand(-1, -1, weights.num_poses, -1, -1, -1)
            poses = terms.poses.expand(q.shape[1], -1, q.shape[3], -1, -1)
            known = torch.einsum("gmhjac,mhjpc->mgahjp", q, poses).flatten(1, 2)
        if extra is not None:
            rows = (weights.num_poses, weights.query_poses if weights.sum_query_poses else 1)
            extra = extra.expand(v.shape[1], *rows, *extra.shape[3:]).flatten(1, 2)
        dtype, measure = PRECISE[v.dtype], self.measure

        def exact(t: Tensor) -> Tensor:
            return t.to(dtype).contiguous()

        arguments = Arguments(
            q=None if terms.q is None else exact(of_rows(terms.q)),
            k=None if terms.q is None else exact(k.transpose(0, 1)),
            v=exact(v.transpose(0, 1)),
            reads=None if reads is None or (features is None and first is None) else exact(of_rows(reads)),
            features=None if features is None else exact(features.squeeze(5)),
            known=None if known is None else exact(known),
            extra=None if extra is None else exact(extra),
            layer=None if first is None else exact(first[0]),
            shift=None if first is None else exact(first[1]),
            relation=None if first is None or seen is None else exact(seen.squeeze(3).permute(1, 4, 0, 2, 3)),
            keys=some.keys.contiguous(),
            log_measure=None if measure is None else exact(measure.expand(-1, v.shape[2])),
            seed=torch.randint(2**62, (1,), device=v.device) if weights.dropout else None,
            num_poses=weights.num_poses,
            group_queries=some.queries.shape[1],
            padded=some.padded,
            sum_query_poses=weights.sum_query_poses,
            own_keys=weights.own_keys,
            normalize_by_count=weights.normalization == "count",
            dropout=weights.dropout,
        )
        return _operator(arguments).transpose(0, 1)


def _empty(call: Arguments) -> tuple[Tensor, Tensor]:
    """Room for the output, and for what the backward pass makes weights from."""
    heads, _, _, channels = call.v.shape
    out = call.v.new_empty(heads, call.number, call.num_poses, channels)
    return out, call.v.new_empty(heads, call.number, call.num_poses, call.summed_poses)


def _forward_pass(call: Arguments) -> tuple[Tensor, Tensor]:
    out, sums = _empty(call)
    _launch("forward", call, _per_query(call) | {"out": out, "sums": sums})
    return out, sums


def _backward_pass(
    call: Arguments, grad: Tensor, out: Tensor | None, sums: Tensor, needed: list[bool]
) -> list[Tensor | None]:
    given = {"sums": sums, "means": torch.empty_like(sums), "grad": grad.contiguous()}
    grads = _room_for_gradients(call)
    _launch("backward_queries", call, _per_query(call) | given | {"out": out} | grads)
    if call.sum_query_poses:
        for name in ("grad_q", "grad_reads"):
            grads[name] = None if grads[name] is None else grads[name].sum(0)
    by_key = {"grad_k": None if call.k is None else torch.empty_like(call.k), "grad_v": torch.empty_like(call.v)}
    if any(needed[1:3]):
        _launch("backward_keys", call, _by_key(call) | given | by_key)
    if call.features is not None and len(call.features) < len(grads["grad_features"]):
        grads["grad_features"] = grads["grad_features"].sum(0, keepdim=True)
    functions = grads.pop("grad_functions")
    if functions is not None:
        functions = functions.sum(0)
        grads |= {"grad_layer": functions[:, :-1], "grad_shift": functions[:, -1]}
    found = {"grad_layer": None, "grad_shift": None} | grads | by_key
    return [found[f"grad_{name}"] for name in call._fields[:_LEAVES]]


def _per_query(call: Arguments) -> dict[str, Tensor | None]:
    """The keys of each group, and how many there are."""
    return {"keys": call.keys, "lengths": (call.keys >= 0).sum(1) if call.padded else None}


def _by_key(call: Arguments) -> dict[str, Tensor | None]:
    """The places of each point among the keys of all groups, ``(G · K,)``, and where those of a point begin."""
    ordered, order = call.keys.flatten().sort(stable=True)
    every = torch.arange(call.v.shape[1] + 1, device=order.device)
    return {"order": order, "starts": torch.searchsorted(ordered, every)}


def _room_for_gradients(call: Arguments) -> dict[str, Any]:
    """Room for the gradients of what belongs to queries and edges; zeros where not every number is written."""
    poses = (call.num_poses,) if call.sum_query_poses else ()
    blocks = -(-len(call.v) // rows_of("backward_queries", call))
    room: dict[str, Any] = {"grad_functions": None}
    if call.layer is not None:
        # Of every program.
        programs = call.number * blocks * call.num_poses
        functions, coordinates = call.layer.shape
        room["grad_functions"] = call.layer.new_empty(programs, functions, coordinates + 1)
    for name in ("q", "reads", "features", "known", "extra"):
        t = getattr(call, name)
        if t is not None:
            shape = (*(poses if name in ("q", "reads") else ()), *t.shape)
            if name == "features" and len(t) == 1:
                shape = (blocks, *t.shape[1:])  # of the heads of each program
            t = t.new_zeros(shape) if call.padded and name in ("features", "extra") else t.new_empty(shape)
        room[f"grad_{name}"] = t
    return room


def rows_of(name: str, call: Arguments) -> int:
    """How many heads, or key poses, a program of a kernel has.

    More of them read the functions of an edge together; with fewer, four programs or more fit into the registers.
    """
    heads, _, poses, channels = call.v.shape
    most = 2 if name == "backward_queries" or channels > _NUMBERS else 4
    return min(most, power_of_two(poses if name == "backward_keys" and not call.own_keys else heads))


class Program(NamedTuple):
    """Sizes of a program of a kernel.

    Attributes:
        sharing: how many threads share the channels of a vector.
        lanes: how many keys threads have side by side.
    """

    sharing: int
    lanes: int


def program(held: int, widest: int, number_size: int, keys: int) -> Program:
    """The program where a thread holds so many vectors of at most so many channels, and for so many keys."""
    wide = min(16, power_of_two(widest))
    if interpreted():  # Every program takes as long, however much it does.
        return Program(wide, power_of_two(keys))
    sharing = 1
    while sharing < wide and held * -(-widest // sharing) * number_size // 4 > _NUMBERS:
        sharing *= 2
    # Threads that would have no key share the channels.
    while sharing < wide and keys <= 16 // sharing:
        sharing *= 2
    return Program(sharing, 32 // sharing)


def constants(name: str, call: Arguments) -> dict[str, Any]:
    """The constants that a kernel is compiled for."""
    heads, points, poses, channels = call.v.shape
    features = 0 if call.reads is None else call.reads.shape[3]
    by_key = name == "backward_keys"
    rows = rows_of(name, call)
    keys = points if by_key else call.keys.shape[1]
    coordinates = 0 if call.layer is None else call.layer.shape[1]
    # The gradients of a layer are held, too, for all heads.
    held = rows + (coordinates if name == "backward_queries" else 0)
    chosen = program(held, max(channels, features), call.v.element_size(), keys)
    found: dict[str, Any] = {
        **{"M": heads, "H": call.num_poses, "J": call.query_poses, "P": poses, "C": channels, "F": features},
        "D": coordinates,
        "FM": 1 if call.features is None else len(call.features),
        "PE": 0 if call.extra is None else call.extra.shape[2],
        **{"R": rows, "W": chosen.sharing, "LANES": chosen.lanes},
        "CONTENT": call.q is not None,
        "KNOWN": call.known is not None,
        "MEASURE": call.log_measure is not None,
        "SUMMED": call.sum_query_poses,
        "OWN": call.own_keys,
        "COUNT": call.normalize_by_count,
        "RATE": call.dropout,
    }
    return found if by_key else found | {"PADDED": call.padded}


def _launch(name: str, call: Arguments, others: dict[str, Any]) -> None:
    """Run a kernel."""
    chosen, heads, (_, points, poses, _) = constants(name, call), len(call.v), call.v.shape
    if name == "backward_keys":
        # Heads, or key poses, are rows of a program.
        each, of_poses = (chosen["R"], poses) if call.own_keys else (1, -(-poses // chosen["R"]))
        grid = (-(-points // chosen["LANES"]) * -(-heads // each), of_poses)
    else:
        grid = (call.number * -(-heads // chosen["R"]), call.num_poses)
    kernel = getattr(kernels("points.triton_kernels"), name)
    tensors: dict[str, Any] = {n: t for n, t in call._asdict().items() if n in kernel.arg_names}
    tensors |= {"measure": call.log_measure, "seed": call.seed} | others
    sizes = {"number": call.number, "points": points}
    sizes |= {"group_queries": call.group_queries, "group_keys": call.keys.shape[1]}
    # What there is none of is not read.
    given = {n: call.v if t is None else t for n, t in tensors.items()} | sizes
    with on_device(call.v.device):
        kernel[grid](
            **{n: t for n, t in given.items() if n in kernel.arg_names},
            **chosen,
            num_warps=1,
            num_stages=1,
            enable_fp_fusion=True,  # which is the default of some versions only
        )


def _plainly(call: Arguments) -> Tensor:
    """The output by operations that autograd looks through, without dropout."""
    groups = len(call.keys)
    normalization: Normalization = "count" if call.normalize_by_count else "softmax"
    options = (call.num_poses, call.query_poses, call.sum_query_poses, call.own_keys, normalization, 0.0)
    weights = Weights(*options)

    def of_queries(rows: Tensor | None) -> Tensor | None:
        """Rows of the queries of each group, from ``(M, G · A, J, F)`` to ``(G, M, H or 1, J, A, F)``."""
        if rows is None:
            return None
        return rows.unflatten(1, (groups, -1)).permute(1, 0, 3, 2, 4).unsqueeze(weights.own_axis)

    def of_keys(points: Tensor) -> Tensor:
        """Rows ``(G, K, ...)`` of the keys of each group, with zeros for keys that fill up."""
        rows = points.index_select(0, call.keys.clamp(min=0).flatten()).unflatten(0, call.keys.shape)
        return rows.masked_fill((call.keys < 0).view(*call.keys.shape, *[1] * (points.dim() - 1)), 0.0)

    extra = None if call.extra is None else call.extra.unflatten(1, (call.num_poses, call.summed_poses))
    if call.known is not None:
        known = call.known.unflatten(1, (groups, -1, 1)).permute(0, 4, 5, 6, 1, 2, 3)  # M, H, J, P, G, A, 1
        extra = known if extra is None else extra + known
    features = None if call.features is None else call.features.unsqueeze(5)
    if call.layer is not None and call.shift is not None and call.relation is not None:
        features = features_of(call.layer, call.shift, call.relation).unsqueeze(5)
    terms = PairScores(of_queries(call.q), None, of_queries(call.reads), features, extra)
    k, v = ((call.v if t is None else t).transpose(0, 1) for t in (call.k, call.v))
    measure = None if call.log_measure is None else of_keys(call.log_measure)
    p = weights.probabilities(terms, lambda: of_keys(k), call.keys < 0 if call.padded else None, measure)
    return weights.weighted_sum(p, of_keys(v)).transpose(0, 1)


_operator = Operator(
    "point_edges",
    Arguments,
    _LEAVES,
    Passes(
        _forward_pass,
        _backward_pass,
        _empty,
        _plainly,
        keeps_output=True,
        backend="triton",
        instead="neighbours",
    ),
)
