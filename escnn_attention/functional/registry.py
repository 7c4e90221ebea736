r"""The one way to attention: what can serve a call, and who does.

A backend is one file with an entry in :data:`BACKENDS`, which says what it cannot serve and why:

- on grids :mod:`~escnn_attention.functional.grid.reference`, the formula written out;
  :mod:`~escnn_attention.functional.grid.portable`, bounded chunks on every device;
  :mod:`~escnn_attention.functional.grid.native`, a compiled loop for the CPU;
  :mod:`~escnn_attention.functional.grid.triton`, windows on CUDA;
  :mod:`~escnn_attention.functional.grid.dense`, PyTorch's fused kernels on widened vectors;
- between points :mod:`~escnn_attention.functional.points.portable`, bounded chunks on every device;
  :mod:`~escnn_attention.functional.points.loop`, a compiled loop for the CPU;
  :mod:`~escnn_attention.functional.points.dense`, fused attention or the formula in whole clouds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from escnn_attention._export import exporting, packaging
from escnn_attention.functional.grid import dense, native, portable, reference, standard, triton
from escnn_attention.functional.grid.call import Call, KeyMode, PositionalBias, QueryMode
from escnn_attention.functional.grid.fold import fold
from escnn_attention.functional.memory import explain_shortage
from escnn_attention.functional.points import dense as clouds
from escnn_attention.functional.points import loop
from escnn_attention.functional.points import portable as neighbours
from escnn_attention.functional.points.fold import fold_points
from escnn_attention.geometry.grid import Grid
from escnn_attention.geometry.points import Points
from escnn_attention.geometry.windows import Positions

__all__ = ["BACKENDS", "Backend", "attention", "backends_for", "check_backend", "compute", "preference"]


@dataclass(frozen=True)
class Backend:
    """One way to compute the attention.

    Attributes:
        attention: the function of a call, folded where ``folds``; it gives ``(M, B, N, |H|, C)``.
        why_unsupported: why this backend cannot serve a call, or None if it can.
        isolates_nonfinite: whether it keeps values that are not finite from those who do not see them, without help.
        folds: whether the call is reduced first to terms that are added to the keys (:func:`~.fold.fold`).
        why_not_first: why ``"auto"`` passes it over for a call that it can serve, or None.

    Example:
        >>> from escnn_attention.functional import BACKENDS
        >>> reference = BACKENDS["reference"]
        >>> reference.folds, reference.why_unsupported is BACKENDS["blocked"].why_unsupported
        (False, True)
    """

    attention: Callable[[Call], Tensor]
    why_unsupported: Callable[[Call], str | None] = lambda _: None
    isolates_nonfinite: bool = False
    folds: bool = True
    why_not_first: Callable[[Call], str | None] = lambda _: None


_POINTS = "points/"

BACKENDS: dict[str, Backend] = {
    "reference": Backend(reference.attention, folds=False),
    "blocked": Backend(portable.attention),
    "native": Backend(native.attention, native.why_unsupported, isolates_nonfinite=True),
    "triton": Backend(triton.attention, triton.why_unsupported, isolates_nonfinite=True),
    "dense": Backend(dense.attention, dense.why_unsupported),
    "points/native": Backend(loop.attention, loop.why_unsupported, True, why_not_first=loop.why_not_first),
    "points/neighbours": Backend(neighbours.attention, isolates_nonfinite=True),
    "points/dense": Backend(clouds.dense, clouds.why_not_dense, folds=False, why_not_first=clouds.why_not_first),
    "points/reference": Backend(clouds.reference, clouds.why_unsupported, folds=False),
}
"""The backends by name; of those between points it follows ``points/``, and calls leave that out."""


def preference(positions: type[Positions], device: str) -> tuple[str, ...]:
    """The entries of :data:`BACKENDS` that ``"auto"`` tries for some kind of positions, from the fastest on.

    Args:
        positions: where features lie.
        device: the type of the device of the queries.

    Example:
        >>> from escnn_attention.functional import preference
        >>> from escnn_attention.geometry.grid import Grid
        >>> preference(Grid, "cuda")
        ('triton', 'dense', 'blocked')
    """
    if issubclass(positions, Points):
        return ("points/dense", "points/native", "points/neighbours")
    return {"cpu": ("native", "blocked"), "cuda": ("triton", "dense", "blocked")}.get(device, ("blocked",))


def backends_for(positions: type[Positions] = Grid) -> list[str]:
    """The names of the backends for some kind of positions, as layers take them.

    Example:
        >>> from escnn_attention.functional import backends_for
        >>> from escnn_attention.geometry.points import Points
        >>> backends_for(Points)
        ['native', 'neighbours', 'dense', 'reference']
    """
    points = issubclass(positions, Points)
    return [name.removeprefix(_POINTS) for name in BACKENDS if name.startswith(_POINTS) == points]


def check_backend(backend: str, positions: type[Positions] = Grid) -> str:
    """``backend``, if there is one of this name for some kind of positions.

    Raises:
        ValueError: there is none.

    Example:
        >>> from escnn_attention.functional import check_backend
        >>> check_backend("native")
        'native'
    """
    if backend != "auto" and backend not in (names := backends_for(positions)):
        raise ValueError(f"backend: got {backend!r}, needed 'auto', {', '.join(map(repr, names))}")
    return backend


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Positions,
    bias: PositionalBias,
    *,
    query: QueryMode = "own",
    keys: KeyMode = "all",
    dropout: float = 0.0,
    backend: str = "auto",
) -> Tensor:
    r"""Group self-attention (GSA-Nets, Eqs. 14 and 16, corrected).

    .. math::
        s_h(x, \tilde h; x', \hat h) &= \langle q(x, \tilde h),\; k(x', \hat h)
            + \rho(h^{-1}\Delta,\, h^{-1}\hat h) \rangle / \sqrt C + \log\mu(x', \hat h) \\
        \mathrm{out}(x, h) &= \sum_{\tilde h \in Q(h)} \; \sum_{(x', \hat h) \in N(x, \tilde h)}
            \mathrm{softmax}_{(x', \hat h)}(s_h) \; v(x', \hat h)

    Args:
        q: ``(M, B, N, J, C)``, the queries of M heads of C channels, in B images, at N positions and J poses:
            :math:`|H|`, or 1 for features without poses (lifting).
        k, v: ``(M, B, N, P, C)``, keys and values. P is J, or more where keys have poses that queries have not.
        positions: where they are and who sees whom.
        bias: the positional encoding, seen from each of the :math:`|H|` output poses.
        query: which query poses contribute to an output pose h: ``"own"`` only h, ``"all"`` the sum over all of q's.
        keys: which key poses a query pose h̃ attends to: ``"all"``, or ``"own"``, only h̃.
        dropout: the probability with which a key is dropped from a query's attention.
        backend: ``"auto"`` or one of :data:`BACKENDS`. Programs that ``torch.export`` writes down are for any machine:
            they have :mod:`~escnn_attention.functional.grid.standard` on grids, and between points
            :mod:`~escnn_attention.functional.points.portable` in one chunk, whichever is named.

    Returns:
        ``(M, B, N, |H|, C)``.

    Raises:
        ValueError: an unknown backend, or one that cannot serve this call (it says why), or ``query="own"`` and queries
            of other poses than those of the output, or ``keys="own"`` and keys of other poses than those of the
            queries.
        MemoryError, torch.OutOfMemoryError: an allocation failed, on the CPU or on CUDA; it says what would fit.

    Example:
        >>> import torch
        >>> from escnn_attention.functional import PositionalBias, attention
        >>> from escnn_attention.geometry.grid import Grid
        >>> from escnn_attention.geometry.windows import Window
        >>> q, k, v = torch.randn(3, 2, 1, 25, 4, 8).unbind()  # 2 heads, 1 image of 5 x 5, 4 poses, 8 channels
        >>> bias = PositionalBias(num_poses=4, spatial=torch.randn(2, 4, 9, 8))  # of the 9 offsets of the window
        >>> attention(q, k, v, Grid((5, 5), Window(3)), bias).shape
        torch.Size([2, 1, 25, 4, 8])

    Source: Romero and Cordonnier, "Group Equivariant Stand-Alone Self-Attention For Vision", ICLR 2021.
    """
    return compute(Call(q, k, v, positions, bias, query, keys, dropout), backend)


def compute(call: Call, backend: str = "auto") -> Tensor:
    """The attention of a call, by the backend that is named or by the fastest that serves it: see :func:`attention`.

    Example:
        >>> import torch
        >>> from escnn_attention.functional import PositionalBias, compute
        >>> from escnn_attention.functional.grid.call import Call
        >>> from escnn_attention.geometry.grid import Grid
        >>> from escnn_attention.geometry.windows import Window
        >>> q, k, v = torch.randn(3, 2, 1, 25, 4, 8).unbind()  # 2 heads, 1 image of 5 x 5, 4 poses, 8 channels
        >>> call = Call(q, k, v, Grid((5, 5), Window(3)), PositionalBias(num_poses=4))
        >>> torch.allclose(compute(call), compute(call, "reference"), atol=1e-5)
        True
    """
    check_backend(backend, type(call.positions))
    _check_poses(call)
    if call.keys == "own" and call.k.shape[3] == 1:
        call = replace(call, keys="all")
    if exporting():
        return _compute_anywhere(call)
    name, (call, unfold) = _choose(call, backend)
    chosen = BACKENDS[name]
    if not (call.positions.complete or chosen.isolates_nonfinite):
        call = _isolate_nonfinite(call)
    try:
        out = chosen.attention(call)
        return out if unfold is None else unfold(out)
    except RuntimeError as error:
        if torch.compiler.is_compiling() or (explained := explain_shortage(error, call, name)) is None:
            raise
        raise explained from error


def _compute_anywhere(call: Call) -> Tensor:
    """The attention of a call that PyTorch writes down: what is fastest on this machine says nothing of another."""
    if isinstance(call.positions, Points):
        call, unfold = fold_points(call)
        in_loop = loop.why_not_first(call) is None and _in_package(loop.why_unsupported, call)
        return unfold((loop if in_loop else neighbours).attention(call))
    call, unfold = fold(call)
    return unfold((native if _in_package(native.why_unsupported, call) else standard).attention(call))


def _in_package(why_unsupported: Callable[[Call], str | None], call: Call) -> bool:
    """Whether what is written down is a package with a loop that serves this call."""
    return packaging() and not call.dropout and why_unsupported(call) is None


_Reduced = tuple[Call, Callable[[Tensor], Tensor] | None]


def _choose(call: Call, backend: str) -> tuple[str, _Reduced]:
    """The entry that serves a call, and what is left for it to compute."""
    points = isinstance(call.positions, Points)
    reduced: _Reduced | None = None

    def as_it_takes_it(entry: Backend) -> _Reduced:
        nonlocal reduced
        if not entry.folds or (not points and call.bias.adds_to_keys and call.keys == "all"):
            return call, None
        reduced = reduced or (fold_points(call) if points else fold(call))
        return reduced

    if backend != "auto":
        name = f"{_POINTS}{backend}" if points else backend
        left = as_it_takes_it(BACKENDS[name])
        if reason := BACKENDS[name].why_unsupported(left[0]):
            raise ValueError(f"backend: {backend!r} cannot serve this call: {reason}")
        return name, left
    for name in preference(type(call.positions), call.q.device.type):
        entry = BACKENDS[name]
        left = as_it_takes_it(entry)
        if entry.why_not_first(left[0]) is None and entry.why_unsupported(left[0]) is None:
            return name, left
    raise AssertionError("the last of those that are tried serves every call")


def _check_poses(call: Call) -> None:
    """Queries and keys have the poses that the modes need."""
    query_poses, key_poses = call.q.shape[3], call.k.shape[3]
    if call.query == "own" and query_poses != call.bias.num_poses:
        raise ValueError(
            f"query: got 'own' for {query_poses} poses of queries, needed the {call.bias.num_poses} poses of the output"
        )
    if call.keys == "own" and key_poses not in (1, query_poses):
        raise ValueError(
            f"keys: got 'own' for {key_poses} poses of keys, needed the {query_poses} poses of the queries"
        )


def _isolate_nonfinite(call: Call) -> Call:
    """Keep values that are not finite from spreading beyond the queries that attend to them.

    A backend multiplies values outside a window with a probability of zero, and 0 · NaN is NaN. Here such a value is
    taken out, and its key made NaN in its place: the scores, and with them the output, of the queries that see it are
    NaN, and masked for all others.
    """
    finite = torch.isfinite(call.v)
    poison = torch.where(finite.all(-1, keepdim=True), 0.0, torch.nan).to(call.k.dtype)
    return replace(call, k=call.k + poison, v=torch.where(finite, call.v, 0.0))
