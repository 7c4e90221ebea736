"""Class tokens and power spectra, on plain tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from escnn_attention._checks import check_grid
from escnn_attention.plain.buffers import ExactBuffers
from escnn_attention.plain.cloud_pooling import count_clouds, of_clouds, pool_clouds
from escnn_attention.plain.projections import ToPoses
from escnn_attention.plain.self_attention import by_position, rows_of


class _ClassTokens(ExactBuffers):
    """Learned tokens, and what they read of all positions and poses.

    Args:
        project_in: to keys and values of M heads, in 2M groups of C regular fields.
        log_measure: ``(P,)``, the logarithm of the measure of the poses; None where all are alike.
        tokens, out: the number of tokens, and of the numbers that each of them gives.
    """

    log_measure: Tensor | None

    def __init__(self, project_in: ToPoses, log_measure: np.ndarray | None, tokens: int, out: int):
        super().__init__()
        heads = project_in.groups // 2
        channels = len(project_in.weight) // project_in.groups
        self.project_in = project_in
        self.register_exact("log_measure", log_measure)
        self.tokens = Parameter(torch.randn(heads, tokens, channels))
        self.readout = torch.nn.Linear(heads * channels, out)

    def scores(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The scores ``(M, B, T, N, P)`` and the values ``(M, B, N, P, C)`` of features ``(B, *space, in)``."""
        keys, values = self.project_in(rows.flatten(1, -2)).unflatten(0, (2, -1)).unbind()  # M, B, N, P, C
        scores = torch.einsum("mtc,mbnpc->mbtnp", self.tokens.to(keys.dtype), keys) / math.sqrt(keys.shape[-1])
        return scores if self.log_measure is None else scores + self.log_measure.to(scores.dtype), values


class AttentionPool(_ClassTokens):
    """Learned tokens attend to all positions and poses: ``(B, in, *space)`` to ``(B, tokens · out, 1, ..., 1)``."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """The readout of the tokens; positions that a mask ``(B, *space)`` hides are left out."""
        p, values = self._attend(x, mask)
        read = torch.einsum("mbtnp,mbnpc->btmc", p.to(values.dtype), values).flatten(2)
        out: Tensor = self.readout(read).flatten(1)
        return out[(..., *[None] * (x.dim() - 2))]

    def attention_maps(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """The attention maps of the tokens, ``(B, M, T, P, *space)``."""
        p, _ = self._attend(x, mask)
        return p.permute(1, 0, 2, 4, 3).reshape(*p.shape[1::-1], p.shape[2], p.shape[4], *x.shape[2:])

    def _attend(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """The probabilities ``(M, B, T, N, P)`` and the values ``(M, B, N, P, C)``."""
        check_grid(x.shape[2:])
        if mask is not None:
            x = x.masked_fill(~mask.unsqueeze(1), 0.0)
        scores, values = self.scores(rows_of(x))
        if mask is not None:
            hidden = ~by_position(mask)[:, None, :, None]
            scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
        return scores.flatten(-2).softmax(-1).unflatten(-1, scores.shape[-2:]), values


class PointAttentionPool(_ClassTokens):
    """Learned tokens attend to all points and poses of a cloud: ``(N, in)`` to ``(B, tokens · out)`` for B clouds."""

    def forward(
        self,
        x: Tensor,
        coords: Tensor,
        batch: Tensor | None = None,
        mask: Tensor | None = None,
        measure: Tensor | None = None,
    ) -> Tensor:
        """The readout of the tokens: see :meth:`escnn_attention.PointAttentionPool.forward`."""
        clouds = count_clouds(batch, coords, mask)
        cloud = torch.zeros(x.shape[0], dtype=torch.long, device=x.device) if batch is None else batch
        if mask is not None:
            x = x.masked_fill(~mask.unsqueeze(1), 0.0)
        scores, values = (t.squeeze(1) for t in self.scores(x.unsqueeze(0)))
        scores = scores.permute(2, 0, 1, 3)  # N, M, T, P
        if measure is not None:
            counted = measure if mask is None else torch.where(mask, measure, 1.0)
            scores = scores + counted.to(scores.dtype).log()[:, None, None, None]
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None, None, None], torch.finfo(scores.dtype).min)
        # Of every cloud the largest score is taken off, so that no exponential overflows.
        largest = pool_clouds(scores.detach().amax(-1).flatten(1), cloud, clouds, "max").unflatten(1, scores.shape[1:3])
        weights = (scores - largest[cloud].unsqueeze(-1)).exp()
        total = pool_clouds(weights.sum(-1).flatten(1), cloud, clouds, "sum").unflatten(1, scores.shape[1:3])
        each = torch.einsum("nmtp,mnpc->ntmc", weights.to(values.dtype), values)
        read = pool_clouds(each.flatten(1), cloud, clouds, "sum").unflatten(1, each.shape[1:])
        out: Tensor = self.readout((read / total.transpose(1, 2).unsqueeze(-1).to(read.dtype)).flatten(2))
        return of_clouds(out.flatten(1), batch)


SpectrumKind = Literal["norm", "square"]


class PowerSpectrum(ExactBuffers):
    """The length, or mean square, of each irreducible part of ``(B, size, *space)``; trivial parts stay as they are.

    The parts are, for the fields of each representation, their channels ``(m, n)``, the matrix ``(n, n)`` to irreps,
    the irrep of each of the n coordinates, which irreps are trivial, and the places of the m · k outcomes.
    """

    order: Tensor

    def __init__(
        self, parts: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]], kind: SpectrumKind
    ):
        super().__init__()
        self.kind: SpectrumKind = kind
        self.number = len(parts)
        self.trivial: list[list[bool]] = []
        places = []
        for i, (columns, matrix, irreps, trivial, place) in enumerate(parts):
            self.register_exact(f"columns_{i}", columns)
            self.register_exact(f"matrix_{i}", matrix)
            self.trivial.append(trivial.tolist())
            for number in range(len(trivial)):
                self.register_exact(f"coordinates_{i}_{number}", (irreps == number).nonzero()[0])
            places.append(place.ravel())
        self.register_exact("order", np.concatenate(places).argsort())

    def forward(self, x: Tensor) -> Tensor:
        rows = x.movedim(1, -1)
        found = []
        for i in range(self.number):
            columns = getattr(self, f"columns_{i}")
            fields = rows.index_select(-1, columns.flatten()).unflatten(-1, columns.shape)
            parts = fields @ getattr(self, f"matrix_{i}").to(x.dtype).T
            found.append(self._lengths(parts, i).flatten(-2))
        return torch.cat(found, dim=-1).index_select(-1, self.order).movedim(-1, 1)

    def _lengths(self, parts: Tensor, i: int) -> Tensor:
        """The lengths ``(..., m, k)`` of the irreps of coordinates ``(..., m, n)``, of the i-th representation."""
        lengths = []
        for number, is_trivial in enumerate(self.trivial[i]):
            part = parts.index_select(-1, getattr(self, f"coordinates_{i}_{number}"))
            if is_trivial:
                lengths.append(part.squeeze(-1))
            elif self.kind == "square":
                lengths.append(part.square().mean(-1))
            elif part.shape[-1] == 1:
                # PyTorch before 2.13 keeps the axis of a single number when it writes a norm down.
                lengths.append(part.squeeze(-1).abs())
            else:
                lengths.append(torch.linalg.vector_norm(part, dim=-1))
        return torch.stack(lengths, dim=-1)

    def extra_repr(self) -> str:
        return f"kind={self.kind!r}"
