"""Class tokens that read a feature map, on plain tensors."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from escnn_attention._checks import check_grid
from escnn_attention.plain.buffers import ExactBuffers
from escnn_attention.plain.projections import ToPoses
from escnn_attention.plain.self_attention import rows_of

__all__ = ["AttentionPool"]


class AttentionPool(ExactBuffers):
    """Learned tokens attend to all positions and poses: ``(B, in, *space)`` to ``(B, tokens · out, 1, ..., 1)``.

    Args:
        project_in: to keys and values of M heads, in 2M groups of C regular fields.
        log_measure: ``(P,)``, the logarithm of the measure of the poses; None where all are alike.
        tokens: the number of tokens.
        out: the numbers that each of them gives.
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

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """What the tokens read of features; positions that a mask ``(B, *space)`` hides are not there."""
        check_grid(x.shape[2:])
        if mask is not None:
            x = x.masked_fill(~mask.unsqueeze(1), 0.0)
        rows = self.project_in(rows_of(x))  # 2M, B, *space, P, C
        keys, values = rows.unflatten(0, (2, -1)).flatten(3, -3).unbind()  # M, B, N, P, C
        scores = torch.einsum("mtc,mbnpc->mbtnp", self.tokens.to(x.dtype), keys) / math.sqrt(keys.shape[-1])
        if self.log_measure is not None:
            scores = scores + self.log_measure.to(scores.dtype)
        if mask is not None:
            hidden = ~mask.flatten(1)[:, None, :, None]
            scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
        p = scores.flatten(-2).softmax(-1).unflatten(-1, scores.shape[-2:])
        read = torch.einsum("mbtnp,mbnpc->btmc", p.to(values.dtype), values).flatten(2)
        out: Tensor = self.readout(read).flatten(1)
        return out[(..., *[None] * (x.dim() - 2))]
