r"""Attention on plain tensors: no escnn, and no group but for index tables and coordinates.

:func:`attention` dispatches to a backend, each of which is one file here:

- :mod:`~escnn_attention.functional.backends.reference`: the formula, written out.
- :mod:`~escnn_attention.functional.backends.blocked`: bounded pieces, on every device.
- :mod:`~escnn_attention.functional.backends.native`: windows on the CPU, where there is a C++ compiler.
- :mod:`~escnn_attention.functional.backends.tiled`: windows on the CPU, and global attention with terms that factorise.
- :mod:`~escnn_attention.functional.backends.dense`: standard attention on widened vectors, by PyTorch's fused kernels.
- :mod:`~escnn_attention.functional.backends.triton`: windows, and tables of offsets, on CUDA.
- :mod:`~escnn_attention.functional.backends.flex`: windows, and tables of offsets, on CUDA.

Attention between points is in :mod:`~escnn_attention.functional.points.attention`, with a compiled loop for the CPU in
:mod:`~escnn_attention.functional.points.native`; attention on the responses of convolutions in
:mod:`~escnn_attention.functional.convolutions.attentive`.

A backend is a module with ``attention`` and an entry in :data:`BACKENDS`, which says what it cannot serve.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from escnn_attention.functional.backends import blocked, dense, flex, native, reference, tiled, triton
from escnn_attention.functional.backends.reference import probabilities
from escnn_attention.functional.bias import KeyMode, QueryMode, Terms, Waves
from escnn_attention.functional.fold import fold
from escnn_attention.functional.memory import explain_shortage, refuse_the_impossible, working_memory
from escnn_attention.geometry.grid import Positions

__all__ = [
    "BACKENDS",
    "Backend",
    "KeyMode",
    "QueryMode",
    "Terms",
    "Waves",
    "attention",
    "check_backend",
    "preference",
    "probabilities",
    "working_memory",
]


class _Attention(Protocol):
    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, positions: Positions, terms: Terms, *, query: QueryMode, dropout: float
    ) -> Tensor: ...


@dataclass(frozen=True)
class Backend:
    """One way to compute the attention.

    Attributes:
        attention: the function.
        refuses: given the arguments of a call, why this backend cannot serve it, or None if it can.
        contains: whether it keeps values that are not finite from those who do not see them, without help.
    """

    attention: _Attention
    refuses: Callable[[Tensor, Positions, Terms, QueryMode, float], str | None] = lambda *_: None
    contains: bool = False


BACKENDS: dict[str, Backend] = {
    "reference": Backend(reference.attention),
    "blocked": Backend(blocked.attention),
    "native": Backend(native.attention, native.refuses, contains=True),
    "tiled": Backend(tiled.attention, tiled.refuses, contains=True),
    "triton": Backend(triton.attention, triton.refuses, contains=True),
    "dense": Backend(dense.attention, dense.refuses),
    "flex": Backend(flex.attention, flex.refuses),
}
"""The backends by name. ``"auto"`` takes the first of :func:`preference` that can serve the call."""


def preference(q: Tensor) -> tuple[str, ...]:
    """The backends to try for queries of one device, from the fastest on.

    ``"flex"`` is for calling by name: it compiles a kernel for every shape, which takes some seconds each.
    """
    return {"cpu": ("native", "tiled", "blocked"), "cuda": ("triton", "dense", "blocked")}.get(
        q.device.type, ("blocked",)
    )


def check_backend(backend: str) -> str:
    """``backend``, if there is one of this name.

    Raises:
        ValueError: there is none.
    """
    if backend != "auto" and backend not in BACKENDS:
        raise ValueError(f"backend: got {backend!r}, needed 'auto', {', '.join(map(repr, BACKENDS))}")
    return backend


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Positions,
    terms: Terms,
    *,
    query: QueryMode = "own",
    keys: KeyMode = "all",
    dropout: float = 0.0,
    backend: str = "auto",
) -> Tensor:
    r"""Group self-attention (design of GSA-Nets, Eqs. 14 and 16, corrected).

    Args:
        q: ``(B, M, J, N, C)``, the queries of M heads of C channels at N positions and J poses: :math:`|H|`, or 1 for
            features without poses (lifting).
        k, v: ``(B, M, P, N, C)``, keys and values. P is J, or more where keys have poses that queries have not.
        positions: where they are and who sees whom.
        terms: the positional encoding, seen from each of the :math:`|H|` output poses.
        query: which query poses contribute to an output pose h: ``"own"`` only h, ``"all"`` the sum over all of q's.
        keys: which key poses a query pose h̃ attends to: ``"all"``, or ``"own"``, only h̃.
        dropout: the probability with which a key is dropped from a query's attention.
        backend: ``"auto"`` or one of :data:`BACKENDS`.

    Returns:
        ``(B, M, |H|, N, C)``.

    Raises:
        ValueError: an unknown backend, or one that cannot serve this call (it says why), or ``query="own"`` and queries
            of other poses than those of the output, or ``keys="own"`` and keys of other poses than those of the
            queries.
        MemoryError, torch.OutOfMemoryError: an allocation failed, on the CPU or on CUDA; it says what would fit.
    """
    check_backend(backend)
    if query == "own" and q.shape[2] != terms.num_poses:
        raise ValueError(
            f"query: got 'own' for {q.shape[2]} poses of queries, needed the {terms.num_poses} poses of the output"
        )
    if keys == "own" and k.shape[2] not in (1, q.shape[2]):
        raise ValueError(
            f"keys: got 'own' for {k.shape[2]} poses of keys, needed the {q.shape[2]} poses of the queries"
        )
    if backend != "reference":
        (q, k, v, terms, query), unfold = fold(q, k, v, positions, terms, query, keys)
        if backend == "auto":
            backend = next(b for b in preference(q) if BACKENDS[b].refuses(q, positions, terms, query, dropout) is None)
        elif reason := BACKENDS[backend].refuses(q, positions, terms, query, dropout):
            raise ValueError(f"backend: {backend!r} cannot serve this call: {reason}")
    if not (positions.complete or BACKENDS[backend].contains):
        k, v = _contain(k, v)
    # Compilers do not look into what explains an error.
    explained = nullcontext() if torch.compiler.is_compiling() else explain_shortage(q, k, terms, query, backend)
    with explained:
        if backend == "reference":
            refuse_the_impossible(q, k, terms, query)
            return reference.attention(q, k, v, positions, terms, query=query, keys=keys, dropout=dropout)
        return unfold(BACKENDS[backend].attention(q, k, v, positions, terms, query=query, dropout=dropout))


def _contain(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keep values that are not finite from spreading beyond the queries that attend to them.

    A backend multiplies values outside a window with a probability of zero, and 0 · NaN is NaN. Here such a value is
    taken out, and its key made NaN in its place: the scores, and with them the output, of the queries that see it are
    NaN, and masked for all others.
    """
    finite = torch.isfinite(v)
    poison = torch.where(finite.all(-1, keepdim=True), 0.0, torch.nan).to(k.dtype)
    return k + poison, torch.where(finite, v, 0.0)
