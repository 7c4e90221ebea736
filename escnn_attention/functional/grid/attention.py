"""Attention on grids: its backends, and the function that calls them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from escnn_attention.functional.call import KeyMode, QueryMode
from escnn_attention.functional.grid import dense, linear, native, portable, reference, triton
from escnn_attention.functional.grid.call import GridCall, PositionalBias
from escnn_attention.functional.grid.fold import Unfold, fold
from escnn_attention.functional.registry import Backend, Registry
from escnn_attention.geometry.grid import Grid


def _isolate_nonfinite(call: GridCall) -> GridCall:
    """Keep values that are not finite from spreading beyond the queries that attend to them.

    A backend multiplies values outside a window with a probability of zero, and 0 · NaN is NaN. Here such a value is
    taken out, and its key made NaN in its place: the scores, and with them the output, of the queries that see it are
    NaN, and masked for all others.
    """
    if call.query_grid.complete:
        return call
    finite = torch.isfinite(call.v)
    poison = torch.where(finite.all(-1, keepdim=True), 0.0, torch.nan).to(call.k.dtype)
    return replace(call, k=call.k + poison, v=torch.where(finite, call.v, 0.0))


def _fold(call: GridCall) -> tuple[GridCall, Unfold | None]:
    positions = call.offsets
    if call.bias.log_window is not None or call.query_grid.window.circular:
        # Across an edge the offset is not the difference of the coordinates, by which waves would factorise.
        call = replace(call, bias=call.bias.explicit(positions))
    return fold(call, positions.places, positions.key_places)


_PREFERENCE = {"cpu": ("native", "blocked"), "cuda": ("triton", "dense", "blocked")}
_portable = Backend(portable.attention, isolates_nonfinite=True, serves_two_sets=True)
_native = Backend(native.attention, native.why_unsupported, isolates_nonfinite=True, serves_two_sets=True)
_linear = Backend(linear.attention, linear.why_unsupported, True, serves_two_sets=True, counts=True)

ON_GRIDS: Registry[GridCall] = Registry(
    {
        "reference": Backend(reference.attention, folds=False, serves_two_sets=True, counts=True),
        "blocked": _portable,
        "native": _native,
        "triton": Backend(triton.attention, triton.why_unsupported, isolates_nonfinite=True),
        "dense": Backend(dense.attention, dense.why_unsupported, isolates_nonfinite=True, serves_two_sets=True),
        "linear": _linear,
    },
    preference=lambda device: (*_PREFERENCE.get(device, ("blocked",)), "linear"),
    fold=_fold,
    isolate=_isolate_nonfinite,
    exported=(_linear, _portable),
    packaged=_native,
)
"""The backends of attention on grids."""


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grid: Grid,
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
        grid: their positions, and the window of each.
        bias: the positional encoding, seen from each of the :math:`|H|` output poses.
        query: which query poses contribute to an output pose h: ``"own"`` only h, ``"all"`` the sum over all of q's.
        keys: which key poses a query pose h̃ attends to: ``"all"``, or ``"own"``, only h̃.
        dropout: the probability with which a key is dropped from a query's attention.
        backend: ``"auto"`` or one of those of :data:`ON_GRIDS`. Programs that ``torch.export`` makes are for any
            machine and have one of their own.

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
    return ON_GRIDS.compute(GridCall(q, k, v, bias, grid, grid, query=query, keys=keys, dropout=dropout), backend)
