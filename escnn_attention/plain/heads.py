"""What attention layers share: the queries, keys and values of their heads."""

from __future__ import annotations

import math
from collections.abc import Collection
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
        constant_pose: what the term of the pose of a key is added to, "queries", "keys", both or neither, where it is
            the same for all keys of a query and the encoding goes without it: a bias of these. None where the encoding
            has the term, if there is one.
    """

    quotient: Tensor | None
    relative: Tensor | None

    def __init__(
        self,
        project_in: ToPoses | Scalars,
        encoding: Encoding | PairKernel,
        needs: Needs,
        constant_pose: Collection[str] | None = None,
    ):
        super().__init__()
        self.project_in = project_in
        self.encoding: Any = encoding
        self.needs = needs
        self.constant_pose = constant_pose
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
        """Load what a layer with parameters that change nothing has saved, too, and one without biases of the keys.

        The biases of the keys are zero then, and a constant term of the pose is a bias.
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
        if self.constant_pose is not None:
            self._load_constant_pose(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _load_constant_pose(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Make a bias of the term of the pose, if there is one in a state dict: that of h⁻¹h."""
        start, name = f"{prefix}encoding.", f"{prefix}project_in.bias"
        saved = {n: t for n, t in state_dict.items() if n.startswith(f"{start}pose_")}
        targets = self.constant_pose or ()
        if not saved or (targets and name not in state_dict):
            return
        for n in saved:
            del state_dict[n]
        if not targets:
            return
        saved = {n.removeprefix(start): t for n, t in saved.items()}
        if self.relative is not None:
            pose = self.encoding.saved_pose(saved, None, self.relative[0, 0])
        else:
            assert self.quotient is not None
            pose = self.encoding.saved_pose(saved, int(self.quotient[0, 0]), None)
        bias = state_dict[name].clone()
        of_fields = dict(zip(self.needs.fields, bias.split(pose.numel()), strict=False))
        for target in targets:
            if target in of_fields:
                of_fields[target] += pose.flatten().to(bias)
        state_dict[name] = bias
