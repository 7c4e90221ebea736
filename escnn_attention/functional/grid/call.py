"""The arguments of one attention on a grid, and what backends with their own loops over a grid share."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from escnn_attention.functional.autograd import PRECISE, Operator, Passes, exactly
from escnn_attention.functional.call import Call
from escnn_attention.geometry.grid import Grid
from escnn_attention.geometry.grid_pair import GridPair
from escnn_attention.geometry.windows import WindowShape

LOG2E = math.log2(math.e)


def angles(points: Tensor, frequencies: Tensor) -> Tensor:
    """The angles at points ``(n, d)``, of frequencies ``(M, |H|, F, d)``: ``(M, |H|, n, F)``, in single precision."""
    precise = PRECISE[frequencies.dtype]
    rows = frequencies.to(precise).permute(3, 1, 0, 2)
    with exactly(points.device.type):  # one product of matrices
        return (points.to(precise) @ rows.flatten(1)).unflatten(1, rows.shape[1:]).permute(2, 1, 0, 3)


@dataclass(frozen=True)
class Waves:
    r"""A function of the offset as a sum of waves, :math:`\rho_x(\delta) = W [\cos\Omega\delta, \sin\Omega\delta]`.

    Attributes:
        frequencies: ``(M or 1, |H|, F, d)``; :math:`\Omega h^{-1}` for every output pose.
        readout: ``(M or 1, C, 2F)``; W.

    Example:
        >>> import torch
        >>> from escnn_attention.functional import Waves
        >>> waves = Waves(frequencies=torch.randn(2, 4, 3, 2), readout=torch.randn(2, 8, 6))
        >>> waves.table(torch.randn(9, 2)).shape  # 2 heads, 4 poses, 9 offsets, 8 channels
        torch.Size([2, 4, 9, 8])
    """

    frequencies: Tensor
    readout: Tensor

    def phases(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """The cosine and the sine of the phase at each of the points ``(n, d)``: ``(M or 1, |H|, n, F)``."""
        phase = angles(points, self.frequencies)
        return phase.cos(), phase.sin()

    def table(self, offsets: Tensor) -> Tensor:
        """The function at every offset, ``(M or 1, |H|, L, C)``."""
        waves = torch.cat(self.phases(offsets), dim=-1).to(self.readout.dtype)
        return waves @ self.readout.transpose(-1, -2).unsqueeze(1)


@dataclass(frozen=True)
class PositionalBias:
    r"""A positional encoding, evaluated from every output pose h. M may be 1, shared by all heads.

    The function of the offset is given as ``spatial`` or as ``waves`` or not at all.

    Attributes:
        num_poses: :math:`|H|`, the number of output poses.
        spatial: :math:`\rho_x`; ``(M, |H|, L, C)``, at :math:`h^{-1}\Delta` for every row of the table of offsets, or
            with ``absolute`` ``(M, |H|, N, C)``, at :math:`h^{-1}x` for every position.
        waves: :math:`\rho_x` in a form that factorises.
        pose: :math:`E[h^{-1}\hat h]`; ``(M, |H|, P, C)`` for every pose of the keys. None for no such term.
        rotary: ``(M, |H|, F, d)``; :math:`\Omega h^{-1}`, by which pairs of channels of the keys are rotated: the score
            becomes :math:`\langle q, R(\Omega h^{-1}\Delta)(k + E[h^{-1}\hat h])\rangle`. Pair i is the channels i and
            F + i; channels beyond 2F are not rotated.
        rotates_values: whether ``rotary`` rotates values, too, by the same angles:
            :math:`R(\Omega h^{-1}\Delta)\,v` is what is summed.
        absolute: whether the terms are added to the queries as well as to the keys. Where keys have more poses than
            queries, the first of them are those of the queries.
        query_spatial: with ``absolute`` and keys at other positions than those of the queries, the function at the
            positions of the queries, ``(M, |H|, N, C)``, where ``spatial`` is that at those of the keys.
        log_measure: :math:`\log\mu`, which is added to the scores; ``(P or 1, N or 1)``, for every pose and position of
            the keys, or ``(B, P or 1, N or 1)``, for each image. A key of measure 2 counts as two keys.
        log_window: ``(L,)``; the same for every row of the table of offsets.

    Example:
        >>> import torch
        >>> from escnn_attention.functional import PositionalBias, Waves
        >>> from escnn_attention.geometry.grid import Grid
        >>> from escnn_attention.geometry.windows import Window
        >>> waves = Waves(frequencies=torch.randn(2, 4, 3, 2), readout=torch.randn(2, 8, 6))
        >>> bias = PositionalBias(num_poses=4, waves=waves)
        >>> bias.explicit(Grid((5, 5), Window(3), dtype=torch.float32)).spatial.shape
        torch.Size([2, 4, 9, 8])
    """

    num_poses: int
    spatial: Tensor | None = None
    pose: Tensor | None = None
    absolute: bool = False
    waves: Waves | None = None
    rotary: Tensor | None = None
    log_measure: Tensor | None = None
    log_window: Tensor | None = None
    rotates_values: bool = False
    query_spatial: Tensor | None = None

    @property
    def adds_to_keys(self) -> bool:
        """Whether the terms are vectors that are added to the keys, and nothing else."""
        return not self.absolute and self.rotary is self.log_measure is self.log_window is None

    def map_tables(self, function: Callable[[Tensor], Tensor], *names: str) -> PositionalBias:
        """The bias with a function of the tables of these names, where they are given."""
        found: dict[str, Any] = {n: function(t) for n in names if (t := getattr(self, n)) is not None}
        return replace(self, **found)

    def explicit(self, positions: Grid | GridPair) -> PositionalBias:
        """The bias with its function of the offset as a table.

        Raises:
            ValueError: it is absolute or rotary, and the grid is a torus, where neither is a function of the offset.
        """
        if positions.window.circular and (self.absolute or self.rotary is not None):
            raise ValueError(
                f"encoding: got {'an absolute' if self.absolute else 'a rotary'} one on a torus, where it depends on "
                "the origin; needed an encoding that is added to the keys: mlp, separable, fourier, none"
            )
        if self.waves is None:
            return self
        return replace(self, spatial=positions.averaged(self.waves.table(positions.offsets)), waves=None)


@dataclass(frozen=True)
class Heads(Call):
    """Queries, keys and values of one set of positions, with the terms that these and poses add to the scores.

    Attributes:
        bias: these terms.
        q, k, v, query, keys, dropout, normalization: as in :class:`~escnn_attention.functional.call.Call`.
    """

    bias: PositionalBias

    @property
    def num_poses(self) -> int:
        return self.bias.num_poses

    @property
    def one_set(self) -> bool:
        return True

    def key(self) -> Hashable | None:
        return None


@dataclass(frozen=True)
class GridCall(Heads):
    """Attention of the positions of one grid to those of another, or of one grid to itself.

    Attributes:
        query_grid: the positions of the queries, and the window of keys that each of them sees.
        key_grid: the positions of the keys; the same object where queries and keys are on one grid.
        q, k, v, query, keys, dropout, normalization: as in :class:`~escnn_attention.functional.call.Call`.
        bias: the terms that positions and poses add to the scores.

    Example:
        >>> import torch
        >>> from escnn_attention.functional import ON_GRIDS, GridCall, PositionalBias
        >>> from escnn_attention.geometry.grid import Grid
        >>> from escnn_attention.geometry.windows import Window
        >>> fine, coarse = Grid((4, 4), Window(3)), Grid((2, 2), Window(), spacing=2)
        >>> q, k, v = (torch.randn(2, 1, n, 4, 8) for n in (16, 4, 4))  # 2 heads, 1 image, 4 poses, 8 channels
        >>> ON_GRIDS.compute(GridCall(q, k, v, PositionalBias(4), fine, coarse)).shape
        torch.Size([2, 1, 16, 4, 8])
    """

    query_grid: Grid
    key_grid: Grid

    @property
    def one_set(self) -> bool:
        return self.key_grid is self.query_grid

    @property
    def offsets(self) -> Grid | GridPair:
        """The offsets between queries and keys."""
        return self.query_grid if self.one_set else GridPair(self.query_grid, self.key_grid)

    def key(self) -> Hashable:
        bias = self.bias
        return (
            *(self.q.shape, self.k.shape, self.q.dtype, self.q.device, self.query, self.keys, self.dropout),
            *(self.query_grid.key, self.key_grid is self.query_grid or self.key_grid.key, torch.is_grad_enabled()),
            *(self.query_grid.spacing, self.key_grid.spacing),
            *(bias.num_poses, bias.absolute, bias.rotates_values, bias.spatial is None, bias.pose is None),
            *(bias.waves is None, bias.rotary is None, bias.log_measure is None, bias.log_window is None),
            self.normalization,
        )


class Arguments(NamedTuple):
    """Arguments of one call, as numbers and tensors that an operator takes.

    Attributes:
        q: ``(M, B, N, J, C)``.
        k, v: ``(M, B, N, P, C)``.
        spatial, pose: as in :class:`PositionalBias`.
        cos, sin, readout: of waves, at the positions of queries, and behind them those of keys elsewhere; None in a
            window.
        seed: ``(1,)``; for dropout.
        num_poses: :math:`|H|`.
        shape: the grid of the queries.
        key_shape: that of the keys.
        spacings: of both, where they are two grids; none where they are one.
        kernel_size, window, dilation: the window; a size of 0 is everything, or all up to now in a causal one.
        sum_query_poses: whether every output pose has all query poses.
        dropout: the probability.
        chunk: how many numbers are worked on at once.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    spatial: Tensor | None
    pose: Tensor | None
    cos: Tensor | None
    sin: Tensor | None
    readout: Tensor | None
    seed: Tensor | None
    num_poses: int
    shape: list[int]
    key_shape: list[int]
    spacings: list[int]
    kernel_size: int
    window: WindowShape
    dilation: int
    sum_query_poses: bool
    dropout: float
    chunk: int

    @property
    def scale(self) -> float:
        """The factor by which queries are multiplied, so that scores are in units of log 2."""
        return LOG2E / math.sqrt(self.q.shape[-1])

    @property
    def leaves(self) -> tuple[Tensor | None, ...]:
        """The tensors that there are gradients for: the first of the arguments."""
        return (self.q, self.k, self.v, self.spatial, self.pose, self.cos, self.sin, self.readout)


_LEAVES = 8  # How many of the arguments have gradients.


class GridLoop:
    """A loop over a grid as an operator of PyTorch: a backend gives its passes, which take :class:`Arguments`.

    Args:
        backend: its name.
        passes: they keep the output for the backward pass, and give ``(M, B, N, |H|, C)``.
        laid_out: queries, keys or values as the passes need them in memory; None where they lie so.
        keeps_half: whether the passes take half precision; else they get single precision in its place.
    """

    def __init__(
        self,
        backend: str,
        passes: Passes[Arguments],
        laid_out: Callable[[Tensor], Tensor] | None = None,
        keeps_half: bool = False,
    ):
        self.laid_out, self.keeps_half = laid_out, keeps_half
        passes = replace(passes, keeps_output=True, backend=backend, instead="blocked")
        self.operator = Operator(backend, Arguments, _LEAVES, passes)

    def __call__(self, call: GridCall, chunk: int) -> Tensor:
        """The output of a call on a grid; ``chunk`` is how many numbers are worked on at once."""
        positions, keys, bias = call.query_grid, call.key_grid, call.bias
        window, one_set = positions.window, keys is positions
        dtype, exact = call.v.dtype, PRECISE[call.v.dtype]
        cos = sin = readout = None
        if not positions.complete:
            bias = bias if bias.waves is None else bias.explicit(call.offsets)
            # What is beyond the grid would be places that are not there.
            window, rows = positions.trimmed if one_set else (window, None)
            if rows is not None and bias.spatial is not None:
                bias = replace(bias, spatial=bias.spatial[:, :, rows])
        elif bias.waves is not None:
            readout = bias.waves.readout.to(exact)
            cos, sin = (phase.to(exact) for phase in bias.waves.phases(_points(call)))
        spatial = None if bias.spatial is None else bias.spatial.to(exact)
        pose = None if bias.pose is None else bias.pose.to(exact)
        own = dtype if self.keeps_half else exact
        q, k, v = call.q.to(own), call.k.to(own), call.v.to(own)
        if self.laid_out is not None:
            q, k, v = map(self.laid_out, (q, k, v))
        arguments = Arguments(
            *(q, k, v, spatial, pose, cos, sin, readout),
            seed=torch.randint(2**62, (1,), device=call.q.device) if call.dropout else None,
            num_poses=bias.num_poses,
            shape=list(positions.shape),
            key_shape=list(keys.shape),
            spacings=[] if one_set else [positions.spacing, keys.spacing],
            kernel_size=window.kernel_size or 0,
            window=window.shape,
            dilation=window.dilation,
            sum_query_poses=call.query == "all",
            dropout=call.dropout,
            chunk=chunk,
        )
        # Without images a loop has nothing to go over.
        run = self.operator if arguments.q.shape[1] else self.operator.passes.plainly
        return run(arguments).to(dtype)


def _points(call: GridCall) -> Tensor:
    """The positions of queries, and behind them those of keys elsewhere, in units of the offsets."""
    positions = call.offsets
    return positions.places if positions.key_places is None else torch.cat([positions.places, positions.key_places])
