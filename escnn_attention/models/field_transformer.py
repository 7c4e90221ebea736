"""Transformers from fields to fields on a sequence or a grid, such as the head of a diffusion policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from escnn.nn import FieldType, GeometricTensor
from torch import Tensor

from escnn_attention._checks import check_int
from escnn_attention.nn.arguments import check_input, check_mask, check_options, check_types
from escnn_attention.nn.conditioning import ConditionedFieldNorm, condition_of
from escnn_attention.nn.module import GridModule
from escnn_attention.nn.norms import FieldLayerNorm
from escnn_attention.nn.pointwise import PoseLinear
from escnn_attention.nn.transformer import TransformerBlock, grid_block_options
from escnn_attention.plain.field_transformer import FieldTransformer as PlainFieldTransformer

__all__ = ["FieldTransformer"]

_TAKEN = ("condition", "crop", "kernel_size", "norm", "norm_kind", "norm_scope")


class FieldTransformer(GridModule):
    r"""A transformer from fields to fields of any type, on sequences and grids.

    .. math:: y = W'\, \mathrm{LN}(\mathrm{Block}_L(\cdots \mathrm{Block}_1(W x)); c)

    W and W' are equivariant maps to and from regular fields. The blocks are
    :class:`escnn_attention.TransformerBlock` with ``norm="pre"``. With a ``condition`` n the network is called with
    vectors c of n invariants, on which all blocks and the last norm depend (adaLN-Zero). On
    :func:`escnn_attention.sequence_space` it is the head of a diffusion or flow policy: from noisy actions and the
    embedding of the diffusion step to a velocity of every action.

    Args:
        in_type: the type of the input: any fields over a finite group.
        out_type: the type of the output: any fields.
        fields: the width: the number of regular fields.
        num_blocks: the number of blocks.
        num_heads: the number of heads.
        kernel_size: the odd width of the windows; None for the whole sequence or grid.
        condition: the number of components of the condition; None for a network without.
        block: further options of every block, such as ``encoding``, ``causal``, ``dropout`` and ``hidden_fields``.

    Shape:
        ``(B, in_type.size, *space)`` to ``(B, out_type.size, *space)``, with a condition ``(B, n)`` or
        ``(B, n, *space)``.

    Raises:
        TypeError: an argument is of another type, or there is no such option.
        ValueError: two gspaces, heads that do not divide the fields, or as the layers inside raise.
        NotImplementedError: the fiber group is continuous.

    Example:
        >>> import torch
        >>> from escnn_attention import sequence_space
        >>> from escnn_attention.models import FieldTransformer
        >>> from escnn import gspaces, nn
        >>> tokens = sequence_space(gspaces.rot2dOnR2(8).fibergroup)
        >>> action = nn.FieldType(tokens, [tokens.irrep(1), tokens.trivial_repr])  # a velocity and a gripper
        >>> head = FieldTransformer(action, action, fields=4, num_blocks=2, num_heads=2, condition=16)
        >>> head(action(torch.randn(5, 3, 10)), torch.randn(5, 16)).shape  # 5 sequences of 10 actions
        torch.Size([5, 3, 10])

    Source: Peebles and Xie, "Scalable Diffusion Models with Transformers", ICCV 2023; Chi et al., "Diffusion Policy:
    Visuomotor Policy Learning via Action Diffusion", RSS 2023.
    """

    def __init__(
        self,
        in_type: FieldType,
        out_type: FieldType,
        *,
        fields: int,
        num_blocks: int,
        num_heads: int,
        kernel_size: int | None = None,
        condition: int | None = None,
        block: Mapping[str, Any] | None = None,
    ):
        check_types(in_type, out_type)
        if in_type.fibergroup.continuous:
            name = in_type.fibergroup.name
            raise NotImplementedError(f"in_type: the fiber group {name} is continuous; needed a finite one")
        super().__init__(in_type, out_type)
        options = dict(block or {})
        check_options("block", options, [n for n in grid_block_options() if n not in _TAKEN])
        hidden = FieldType(in_type.gspace, check_int("fields", fields) * [in_type.gspace.regular_repr])
        self.condition = None if condition is None else check_int("condition", condition)
        self.embedding = PoseLinear(in_type, hidden)
        self.blocks = torch.nn.ModuleList(
            TransformerBlock(hidden, hidden, num_heads, kernel_size, norm="pre", condition=condition, **options)
            for _ in range(check_int("num_blocks", num_blocks))
        )
        self.norm = FieldLayerNorm(hidden) if condition is None else ConditionedFieldNorm(hidden, condition)
        self.readout = PoseLinear(hidden, out_type)

    def forward(
        self,
        input: GeometricTensor,
        condition: Tensor | GeometricTensor | None = None,
        mask: Tensor | None = None,
    ) -> GeometricTensor:
        """Apply the network.

        Args:
            input: features of type ``in_type`` on a sequence or a grid.
            condition: of a network that has one: ``(B, n)``, ``(B, n, *space)``, or n trivial fields.
            mask: ``(B, *space)``, False for positions that are not there; the output is zero there.

        Returns:
            features of type ``out_type`` at the same positions.

        Raises:
            TypeError, ValueError: as :meth:`escnn_attention.TransformerBlock.forward`.
        """
        x = check_input(input, self.in_type, self)
        if mask is not None:
            check_mask(mask, x.tensor)
            x = GeometricTensor(x.tensor.masked_fill(~mask.unsqueeze(1), 0.0), self.in_type)
        rows = None
        if condition is not None or self.condition is not None:
            rows = condition_of(self, self.condition, condition, x)
        y = self.embedding(x)
        for block in self.blocks:
            y = block(y, mask, rows)
        y = self.readout(self.norm(y) if rows is None else self.norm(y, rows))
        return y if mask is None else GeometricTensor(y.tensor.masked_fill(~mask.unsqueeze(1), 0.0), self.out_type)

    def export(self) -> torch.nn.Module:
        """A copy as a plain torch module in eval mode, ``module(x, condition=None, mask=None)``.

        It gives the same values and needs no escnn, neither to run nor to be loaded.
        """
        self.eval()
        blocks = [block.export() for block in self.blocks]  # type: ignore[operator]
        plain = PlainFieldTransformer(self.embedding.export(), blocks, self.norm.export(), self.readout.export())
        return plain.eval()

    def extra_repr(self) -> str:
        return super().extra_repr() if self.condition is None else f"{super().extra_repr()}, condition={self.condition}"
