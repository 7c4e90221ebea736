"""Smaller grids about the same centre."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from escnn.nn import FieldType

from escnn_attention._checks import check_int, check_option
from escnn_attention.groups.fibers import fibers
from escnn_attention.nn.arguments import PaddingMode, check_padding_mode, check_pointwise, check_type
from escnn_attention.nn.module import PlainModule
from escnn_attention.plain.resample import AntialiasedPool as PlainAntialiasedPool
from escnn_attention.plain.resample import Crop as PlainCrop
from escnn_attention.plain.resample import HalvingPool as PlainHalvingPool
from escnn_attention.plain.resample import PoolKind


class Crop(PlainModule):
    """Crops the same margin from every side of the grid, keeping its centre.

    Args:
        in_type: the type of the input and of the output.
        margin: the positions to take off at either end of every axis.

    Shape:
        ``(B, in_type.size, *space)`` to ``(B, in_type.size, *(n - 2 * margin for n in space))``.

    Raises:
        ValueError: on application, an axis has no more than ``2 * margin`` positions.

    Example:
        >>> import torch
        >>> from escnn_attention import Crop
        >>> from escnn import gspaces, nn
        >>> g = gspaces.rot2dOnR2(4)
        >>> fields = nn.FieldType(g, [g.regular_repr])
        >>> Crop(fields, 2)(fields(torch.randn(1, 4, 9, 8))).shape
        torch.Size([1, 4, 5, 4])

    Source: the published implementation of GSA-Nets, which crops where a convolution without padding would.
    """

    def __init__(self, in_type: FieldType, margin: int):
        super().__init__(check_type("in_type", in_type), in_type, PlainCrop(check_int("margin", margin, least=0)))
        self.margin, self.resizes = margin, margin > 0

    def _output_space(self, space: Sequence[int]) -> Sequence[int]:
        if space and min(space) <= 2 * self.margin:
            raise ValueError(
                f"input: a margin of {self.margin} leaves nothing of a grid of {'×'.join(map(str, space))}, needed "
                f"more than {2 * self.margin} positions along every axis"
            )
        return [n - 2 * self.margin for n in space]


class HalvingPool(PlainModule):
    """Halves the grid by pooling, exactly equivariant at every size.

    The windows are placed symmetrically about the centre, so that the pooling commutes with the group: windows of 2
    with stride 2 on an axis of even length, of 3 with stride 2 on one of odd length.

    Args:
        in_type: the type of the input and of the output; for ``kind="max"``, fields with pointwise nonlinearities.
        kind: ``"max"`` or ``"avg"``.
        padding_mode: ``"none"``, or ``"circular"`` for tori, whose opposite sides are neighbours: for axes of even
            length.

    Shape:
        ``(B, in_type.size, *space)`` to ``(B, in_type.size, *(n // 2 for n in space))``.

    Raises:
        ValueError: a field that does not allow the maximum, no base space to pool over, a torus that the group does not
            keep, or, on application, an axis with a single position, or one of a torus of odd length.
        NotImplementedError: a torus for a continuous fiber group.

    Example:
        >>> import torch
        >>> from escnn_attention import HalvingPool
        >>> from escnn import gspaces, nn
        >>> g = gspaces.rot2dOnR2(4)
        >>> fields = nn.FieldType(g, [g.regular_repr])
        >>> HalvingPool(fields)(fields(torch.randn(1, 4, 8, 7))).shape
        torch.Size([1, 4, 4, 3])

    Source: Romero et al., "Attentive Group Equivariant Convolutional Networks", ICML 2020, Appendix C, on which sizes
    keep the equivariance exact.
    """

    resizes = True

    def __init__(self, in_type: FieldType, kind: PoolKind = "max", *, padding_mode: PaddingMode = "none"):
        check_type("in_type", in_type)
        if check_option("kind", kind, ("max", "avg")) == "max":
            check_pointwise("in_type", in_type, 'kind="max"')
        dimensions = in_type.gspace.dimensionality
        if not dimensions:
            raise ValueError("in_type: its gspace has no base space to pool over")
        super().__init__(in_type, in_type, self._pool(kind, dimensions))
        self.kind, self.padding_mode = kind, padding_mode
        self._circular = padding_mode != "none" and check_padding_mode(
            fibers(in_type.gspace), in_type.gspace, padding_mode
        )

    _pool: ClassVar[type[Any]] = PlainHalvingPool

    def _output_space(self, space: Sequence[int]) -> Sequence[int]:
        if min(space) < 2:
            raise ValueError(f"input: a grid of {'×'.join(map(str, space))} cannot be halved")
        if self._circular and any(n % 2 for n in space):
            raise ValueError(
                f"input: got a torus of {'×'.join(map(str, space))}, needed even lengths along all axes, to be halved"
            )
        return [n // 2 for n in space]

    def extra_repr(self) -> str:
        return super().extra_repr() + (", padding_mode='circular'" if self._circular else "")


class AntialiasedPool(HalvingPool):
    r"""Blurs and halves the grid, exactly equivariant at every size.

    Along each axis the features are averaged with binomial weights and read at every second position: weights
    (1, 3, 3, 1) between pairs of positions on an axis of even length, (1, 4, 6, 4, 1) at the second, fourth, ...
    position on one of odd length. Both are symmetric about the centre of the grid, so that the pooling commutes with
    every element that maps the grid onto itself, and small shifts change little. (escnn's
    ``PointwiseAvgPoolAntialiased2D`` is exact on odd sizes only.)

    Args:
        in_type: the type of the input and of the output; for ``kind="max"``, fields with pointwise nonlinearities.
        kind: ``"avg"``; or ``"max"``, the maximum over three positions along each axis in front of the blur.
        padding_mode: as of :class:`HalvingPool`.

    Shape:
        ``(B, in_type.size, *space)`` to ``(B, in_type.size, *(n // 2 for n in space))``.

    Raises:
        ValueError, NotImplementedError: as :class:`HalvingPool`.

    Example:
        >>> import torch
        >>> from escnn_attention import AntialiasedPool, assert_equivariant
        >>> from escnn import gspaces, nn
        >>> g = gspaces.rot2dOnR2(4)
        >>> pool = AntialiasedPool(nn.FieldType(g, [g.regular_repr, g.irrep(1)]))
        >>> assert_equivariant(pool, (1, 6, 8, 8), tolerance=1e-12)

    Source: Zhang, "Making Convolutional Networks Shift-Invariant Again", ICML 2019.
    """

    _pool = PlainAntialiasedPool
    plain: PlainAntialiasedPool

    def __init__(self, in_type: FieldType, kind: PoolKind = "avg", *, padding_mode: PaddingMode = "none"):
        super().__init__(in_type, kind, padding_mode=padding_mode)
        self.plain.circular = self._circular
