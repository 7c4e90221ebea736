"""What attention layers share: the queries, keys and values of their heads."""

from __future__ import annotations

import math
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from escnn_attention.encodings import Encoding, PairKernel
from escnn_attention.encodings.needs import Needs
from escnn_attention.plain.buffers import ExactBuffers
from escnn_attention.plain.projections import Scalars, ToPoses

__all__ = ["HeadModule"]


class HeadModule(ExactBuffers):
    """A module with heads: the projection of features to queries, values and keys, and the encoding that reads them.

    Args:
        project_in: from the features to C fields for each of M heads and for each of queries, values and keys, in this
            order, in as many groups; those that are not needed are left out.
        encoding: a bound encoding or kernel.
        needs: what of them its scores are made of.
    """

    def __init__(self, project_in: ToPoses | Scalars, encoding: Encoding | PairKernel, needs: Needs):
        super().__init__()
        self.project_in = project_in
        self.encoding: Any = encoding
        self.needs = needs
        self.num_heads = project_in.groups // len(needs.fields)

    def to_heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of features ``(B, *space, in)`` at N positions, each ``(M, B, N, P, C)``."""
        made = self.project_in(x)  # heads of each, B, *space, P, C
        shape = (len(self.needs.fields), self.num_heads, len(x), math.prod(x.shape[1:-1]), *made.shape[-2:])
        made = made.reshape(shape)
        fields = dict(zip(self.needs.fields, made.unbind(), strict=True))
        values = fields["values"]
        # Queries that nobody reads only say how many there are.
        queries = fields["queries"] if self.needs.queries else values.detach()
        keys = fields["keys"] if self.needs.keys else values.new_ones(1).expand_as(values)
        return queries, keys, values

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load what a layer without biases of the keys has saved, too, and one with queries and keys that nobody reads.

        The biases of the keys are zero then.
        """
        for name, own in self.project_in.named_parameters():
            saved = state_dict.get(f"{prefix}project_in.{name}")
            if saved is None or saved.shape[1:] != own.shape[1:]:
                continue
            if name == "bias" and len(saved) == len(own) - self.num_heads * self.needs.key_bias:
                saved = F.pad(saved, (0, len(own) - len(saved)))
            elif self.needs.fields == ("values",) and len(saved) == (2 if name == "bias" else 3) * len(own):
                saved = saved[len(own) : 2 * len(own)]
            state_dict[f"{prefix}project_in.{name}"] = saved
        super()._load_from_state_dict(state_dict, prefix, *args)
