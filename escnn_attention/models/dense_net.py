"""The densely connected network of the PatchCamelyon experiments, plain and attentive."""

from __future__ import annotations

import math
from typing import Any, TypeVar

from escnn.gspaces import GSpace
from escnn.nn import EquivariantModule, FieldType

from escnn_attention._checks import check_int
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
from escnn_attention.models.dense import DenseBlock
from escnn_attention.models.pose_mean import PoseMean
from escnn_attention.nn.resample import HalvingPool

__all__ = ["GroupDenseNet"]

_Self = TypeVar("_Self", bound="GroupDenseNet")

# Of the kernels of spatial attention, in the last blocks and transitions; 4 in those before.
_BLOCKS = (3, 2, 1)
_TRANSITIONS = (3, 1)


class GroupDenseNet(EquivariantClassifier):
    r"""The p4m-DenseNet of Veeling et al. for any group, and its attentive versions.

    A 3×3 convolution, then :class:`DenseBlock`\ s with transitions between them (batch norm, ReLU, a 1×1 convolution of
    as many fields, a mean over 2×2 positions), batch norm, ReLU, a 1×1 convolution to one field a class, and a mean
    over positions and poses. Nothing is padded. On PatchCamelyon the sizes are 96 → 94 → 92 → 46 → 44 → 22 → 20 → 10 →
    8 → 4 → 2, all of which keep the equivariance exact; a grid of odd size is pooled symmetrically
    (:class:`HalvingPool`).

    The kernels of spatial attention are dilated by 4 on large grids, by less in the last blocks, and in the very last
    ones they are narrower, as published.

    Args:
        gspace: the symmetry, of the plane or of space.
        in_channels: the channels of the images.
        num_classes: the number of classes.
        width: the number of regular fields of the first convolution, and by which every block grows; by default
            :math:`26 / \sqrt{|H|}`, rounded, which is 13 for p4, 9 for p4m and 26 for the trivial group, as published.
        blocks: the number of dense blocks.
        attention: where the convolutions attend, those of transitions and the last one included; see
            :class:`GroupCNN`. In the paper None and ``"features"``.
        hidden: the number of hidden fields of channel attention; as nearly as a ratio of integers comes to it. On the
            image there are as many as channels. Only with channel attention.
        attention_size: the odd width of the kernels of spatial attention; at most 5 in the last block, and 3 in the
            last convolution. Only with that.

    Shape:
        ``(B, in_channels, *space)`` to ``(B, num_classes)``.

    Raises:
        TypeError: an argument is of another type.
        ValueError: a gspace without a grid, a number that is not positive, an unknown attention, an option that the
            attention does not have, or, on application, images too small.
        NotImplementedError: the fiber group is continuous.

    Example:
        >>> import torch
        >>> from escnn_attention.models import GroupDenseNet
        >>> from escnn import gspaces
        >>> network = GroupDenseNet(gspaces.flipRot2dOnR2(4), 3, 2, width=2, blocks=3)
        >>> network(torch.randn(2, 3, 24, 24)).shape
        torch.Size([2, 2])

    Source: Veeling et al., "Rotation Equivariant CNNs for Digital Pathology", MICCAI 2018; Romero et al., "Attentive
    Group Equivariant Convolutional Networks", ICML 2020, Section 4.3 and Appendix B.4, with the details of the
    published implementation.
    """

    def __init__(
        self,
        gspace: GSpace,
        in_channels: int,
        num_classes: int,
        *,
        width: int | None = None,
        blocks: int = 5,
        attention: Attention | None = None,
        hidden: int = 2,
        attention_size: int = 7,
    ):
        image = image_type(gspace, in_channels)
        check_attention(attention, hidden=(hidden, 2), attention_size=(attention_size, 7))
        check_int("blocks", blocks)
        growth = width_for(gspace, width, 26)

        def pointwise(fields: FieldType, out: FieldType, size: int, dilation: int) -> dict[str, EquivariantModule]:
            return attended(
                fields,
                out,
                1,
                attention,
                ratio=max(1, len(fields) // hidden),
                attention_size=size,
                attention_dilation=dilation,
            )

        fields = FieldType(gspace, growth * [gspace.regular_repr])
        stem = attended(image, fields, 3, attention, attention_size=attention_size, attention_dilation=4)
        stages: dict[str, EquivariantModule] = {"stem": sequence(stem)}
        for i, dilation in enumerate(_aligned(_BLOCKS, blocks), start=1):
            if i > 1:
                stages[f"transition_{i - 1}"] = sequence(
                    norm_and_relu(fields),
                    pointwise(fields, fields, attention_size, _aligned(_TRANSITIONS, blocks - 1)[i - 2]),
                    {"pool": HalvingPool(fields, "avg")},
                )
            stages[f"dense_{i}"] = block = DenseBlock(
                fields,
                growth,
                attention=attention,
                **options_of(
                    attention,
                    hidden=hidden,
                    attention_size=min(5, attention_size) if i == blocks else attention_size,
                    attention_dilation=dilation,
                ),
            )
            fields = block.out_type
        classes = FieldType(gspace, check_int("num_classes", num_classes) * [gspace.regular_repr])
        stages["classes"] = sequence(
            norm_and_relu(fields), pointwise(fields, classes, min(3, attention_size), 1), {"mean": PoseMean(classes)}
        )
        super().__init__(stages, None)
        self.reset_parameters()

    @classmethod
    def patch_camelyon(cls: type[_Self], gspace: GSpace, **options: Any) -> _Self:
        """The network for PatchCamelyon (Table 3): three channels of 96×96, two classes, five blocks.

        Args:
            gspace: the symmetry; in the paper Z2, p4 and p4m.
            options: of :class:`GroupDenseNet`, in place of those of the paper.
        """
        return cls(gspace, 3, 2, **options)

    def reset_parameters(self, gain: float = math.sqrt(2)) -> None:
        r"""Draw all weights as the published implementation does.

        Kernels are uniform within :math:`\pm \mathrm{gain} / \sqrt{C k^d}`, the layers of channel attention within the
        inverse square root of the product of their dimensions behind the first.
        """
        draw_as_published(self, gain)


def _aligned(last: tuple[int, ...], count: int) -> tuple[int, ...]:
    """``count`` numbers: the last ones as given, 4 before."""
    return ((4,) * count + last)[-count:] if count else ()
