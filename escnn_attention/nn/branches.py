"""What a residual branch ends in: gains that begin small, and stochastic depth."""

from __future__ import annotations

from escnn.nn import EquivariantModule, FieldType, GeometricTensor
from torch import Tensor

from escnn_attention._checks import check_length, check_probability
from escnn_attention.nn.arguments import check_field, check_type
from escnn_attention.nn.layer_norm import field_of_channels
from escnn_attention.nn.module import PlainModule
from escnn_attention.plain.branches import DropPath as PlainDropPath
from escnn_attention.plain.branches import LayerScale as PlainLayerScale

__all__ = ["DropPath", "LayerScale", "depth_rates", "ends_of"]


class LayerScale(PlainModule):
    r"""A learned gain for every field, which begins small: :math:`y_f = \lambda_f x_f`.

    All components of a field, and so all poses of a regular field, have the same gain, which commutes with every
    representation.

    Args:
        in_type: the type of the input and of the output: any fields.
        initial: the gains at first.

    Shape:
        ``(B, in_type.size, *space)`` to the same; ``(N, in_type.size)`` at scattered points.

    Raises:
        ValueError: ``initial`` is no positive number.

    Example:
        >>> import torch
        >>> from escnn_attention import LayerScale
        >>> from escnn import gspaces, nn
        >>> g = gspaces.rot2dOnR2(4)
        >>> fields = nn.FieldType(g, [g.regular_repr, g.irrep(1)])
        >>> LayerScale(fields, 0.5)(fields(torch.ones(1, 6, 1, 1))).tensor.flatten().tolist()
        [0.5, 0.5, 0.5, 0.5, 0.5, 0.5]

    Source: Touvron et al., "Going deeper with Image Transformers", ICCV 2021, Eq. 4.
    """

    plain: PlainLayerScale
    pointwise = True

    def __init__(self, in_type: FieldType, initial: float = 1e-4):
        check_type("in_type", in_type)
        gain = check_length("initial", initial, "gain")
        super().__init__(in_type, in_type, PlainLayerScale(field_of_channels(in_type), gain))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.plain.extra_repr()}"


class DropPath(PlainModule):
    r"""Stochastic depth: in training a sample is zero with probability p, and else divided by :math:`1 - p`.

    A sample is an image, or at points a cloud: it is dropped as a whole, with every pose and position. In eval mode
    it changes nothing.

    Args:
        in_type: the type of the input and of the output: any fields.
        p: the probability.

    Shape:
        ``(B, in_type.size, *space)`` to the same; ``(N, in_type.size)`` at scattered points.

    Raises:
        ValueError: ``p`` is not in [0, 1).

    Example:
        >>> import torch
        >>> from escnn_attention import DropPath
        >>> from escnn import gspaces, nn
        >>> g = gspaces.rot2dOnR2(4)
        >>> fields = nn.FieldType(g, [g.regular_repr])
        >>> y = DropPath(fields, 0.5)(fields(torch.ones(64, 4, 2, 2))).tensor.flatten(1)
        >>> sorted(y.mean(1).unique().tolist()), bool((y == y[:, :1]).all())
        ([0.0, 2.0], True)

    Source: Huang et al., "Deep Networks with Stochastic Depth", ECCV 2016.
    """

    plain: PlainDropPath
    pointwise = True

    def __init__(self, in_type: FieldType, p: float):
        super().__init__(check_type("in_type", in_type), in_type, PlainDropPath(check_probability("p", p)))

    def forward(self, input: GeometricTensor, batch: Tensor | None = None) -> GeometricTensor:
        """Drop some samples.

        Args:
            input: features of type ``in_type``, on a grid or at points.
            batch: ``(N,)``, the number of the cloud of each point; None for a single cloud, and on grids.
        """
        x = check_field(input, self.in_type, self)
        y = self.plain(x.tensor, batch, points=x.coords is not None)
        return GeometricTensor(y, self.out_type, x.coords)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, p={self.plain.p:g}"


def ends_of(out_type: FieldType, layer_scale: float | None, drop_path: float = 0.0) -> list[EquivariantModule]:
    """What a branch ends in: gains, unless they are None, and stochastic depth, unless its rate is 0.

    Raises:
        ValueError: the gain is not positive, or the rate not in [0, 1).
    """
    gains = [] if layer_scale is None else [LayerScale(out_type, check_length("layer_scale", layer_scale, "gain"))]
    return [*gains, *([DropPath(out_type, drop_path)] if check_probability("drop_path", drop_path) else [])]


def depth_rates(drop_path: float, blocks: int) -> list[float]:
    """The rate of each block: from 0 of the first to ``drop_path`` of the last, by equal steps; of one block its own.

    Example:
        >>> from escnn_attention.nn.branches import depth_rates
        >>> depth_rates(0.25, 3), depth_rates(0.25, 1)
        ([0.0, 0.125, 0.25], [0.25])
    """
    rate = check_probability("drop_path", drop_path)
    return [rate * (i / (blocks - 1) if blocks > 1 else 1.0) for i in range(blocks)]
