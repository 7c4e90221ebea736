"""The residual network of the CIFAR-10 experiments, plain and attentive."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar

from escnn.gspaces import GSpace
from escnn.nn import EquivariantModule, FieldType, PointwiseAdaptiveAvgPool2D, PointwiseAdaptiveAvgPool3D

from escnn_attention._checks import check_int, check_ints
from escnn_attention.models.classifier import EquivariantClassifier
from escnn_attention.models.convolutions import (
    Attention,
    attended,
    check_attention,
    draw_as_published,
    image_type,
    norm_and_relu,
    options_of,
    sequence,
    width_for,
)
from escnn_attention.models.pose_mean import PoseMean
from escnn_attention.models.residual import ResidualBlock

__all__ = ["ResNet44"]

_Self = TypeVar("_Self", bound="ResNet44")


class ResNet44(EquivariantClassifier):
    r"""The 44-layer residual network for any group, and its attentive versions.

    A convolution, three stages of seven :class:`ResidualBlock`\ s, batch norm, ReLU, a mean over the positions, a 1×1
    convolution to one field a class and a mean over the poses: :math:`6 n + 2` layers for n blocks a stage. The first
    block of the second and of the third stage halves the grid, exactly.

    Args:
        gspace: the symmetry, of the plane or of space.
        in_channels: the channels of the images.
        num_classes: the number of classes.
        width: the number of regular fields in each stage; by default :math:`(32, 64, 128) / \sqrt{|H|}`, rounded, which
            is (11, 23, 45) for p4m, as published.
        blocks: the number of blocks in every stage.
        attention: where the convolutions attend, those of shortcuts and the last one included; see :class:`GroupCNN`.
            In the paper None and ``"features"``.
        hidden: the number of hidden fields of channel attention; as nearly as a ratio of integers comes to it.
            Only with channel attention.
        attention_size: the odd width of the kernels of spatial attention. Only with that.

    Shape:
        ``(B, in_channels, *space)`` to ``(B, num_classes)``.

    Raises:
        TypeError: an argument is of another type.
        ValueError: a gspace without a grid, a number that is not positive, other than three widths, an unknown
            attention, an option that the attention does not have, or, on application, images too small.
        NotImplementedError: the fiber group is continuous.

    Example:
        >>> import torch
        >>> from escnn_attention.models import ResNet44
        >>> from escnn import gspaces
        >>> network = ResNet44(gspaces.flipRot2dOnR2(4), 3, 10, width=(1, 2, 3), blocks=1)
        >>> network(torch.randn(2, 3, 16, 16)).shape
        torch.Size([2, 10])

    Source: He et al., "Deep Residual Learning for Image Recognition", CVPR 2016; Cohen and Welling, "Group Equivariant
    Convolutional Networks", ICML 2016; Romero et al., "Attentive Group Equivariant Convolutional Networks", ICML 2020,
    Section 4.2, Appendices B.3.2 and C, with the details of the published implementation.
    """

    def __init__(
        self,
        gspace: GSpace,
        in_channels: int,
        num_classes: int,
        *,
        width: Sequence[int] | None = None,
        blocks: int = 7,
        attention: Attention | None = None,
        hidden: int = 2,
        attention_size: int = 7,
    ):
        image = image_type(gspace, in_channels)
        check_attention(attention, hidden=(hidden, 2), attention_size=(attention_size, 7))
        check_int("blocks", blocks)
        widths = [width_for(gspace, None, n) for n in (32, 64, 128)]
        if width is not None:
            widths = list(check_ints("width", width, 3, "one for each stage"))

        fields = FieldType(gspace, widths[0] * [gspace.regular_repr])
        stages: dict[str, EquivariantModule] = {
            "stem": sequence(attended(image, fields, 3, attention, padding=1, attention_size=attention_size))
        }
        for stage, count in enumerate(widths, start=1):
            for i in range(1, blocks + 1):
                wider = FieldType(gspace, count * [gspace.regular_repr])
                stages[f"residual_{stage}_{i}"] = ResidualBlock(
                    fields,
                    wider,
                    halve=stage > 1 and i == 1,
                    attention=attention,
                    **options_of(attention, hidden=hidden, attention_size=attention_size),
                )
                fields = wider
        classes = FieldType(gspace, check_int("num_classes", num_classes) * [gspace.regular_repr])
        pool = {2: PointwiseAdaptiveAvgPool2D, 3: PointwiseAdaptiveAvgPool3D}[gspace.dimensionality]
        stages["classes"] = sequence(
            norm_and_relu(fields),
            {"pool": pool(fields, 1)},
            attended(fields, classes, 1, attention, ratio=max(1, len(fields) // hidden), attention_size=attention_size),
            {"mean": PoseMean(classes)},
        )
        super().__init__(stages, None)
        self.reset_parameters()

    @classmethod
    def cifar10(cls: type[_Self], gspace: GSpace, **options: Any) -> _Self:
        """The network for CIFAR-10 (Table 2): three channels of 32×32, ten classes.

        Args:
            gspace: the symmetry; in the paper p4m.
            options: of :class:`ResNet44`, in place of those of the paper.
        """
        return cls(gspace, 3, 10, **options)

    def reset_parameters(self, gain: float = math.sqrt(2)) -> None:
        r"""Draw all weights as the published implementation does.

        Kernels are uniform within :math:`\pm \mathrm{gain} / \sqrt{C k^d}`, the layers of channel attention within the
        inverse square root of the product of their dimensions behind the first.
        """
        draw_as_published(self, gain)
