"""The all-convolutional network of the CIFAR-10 experiments, plain and attentive."""

from __future__ import annotations

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
    drop,
    image_type,
    norm_and_relu,
    sequence,
    width_for,
)
from escnn_attention.models.pose_mean import PoseMean
from escnn_attention.nn.resample import HalvingPool

__all__ = ["AllCNNC"]

_Self = TypeVar("_Self", bound="AllCNNC")

# For each convolution how many times the width, the width of the kernel, and whether the grid is halved behind it.
_LAYERS = (
    (1, 3, False),
    (1, 3, False),
    (1, 3, True),
    (2, 3, False),
    (2, 3, False),
    (2, 3, True),
    (2, 3, False),
    (2, 1, False),
)


class AllCNNC(EquivariantClassifier):
    r"""The All-CNN-C for any group, and its attentive versions.

    Nine convolutions of widths C, C, C, 2C, 2C, 2C, 2C, 2C and one field a class, with padded kernels of 3×3 and, the
    last two, of 1×1, each followed by batch norm and ReLU, the last one too; then a mean over poses and positions.
    Dropout on the image and behind the third and sixth convolution.

    The third and sixth convolution of the original have stride 2, which on grids of even size is not equivariant.
    Here, as in the paper (Appendix C), they have none, and a 2×2 maximum is taken before their batch norm; grids of odd
    size are pooled symmetrically (:class:`HalvingPool`).

    Args:
        gspace: the symmetry, of the plane or of space.
        in_channels: the channels of the images.
        num_classes: the number of classes.
        width: the number C of regular fields of the first layers; by default :math:`96 / \sqrt{|H|}`, rounded, which is
            48 for p4 and 96 for the trivial group, as published, and 32 for groups of order 8, as published for p4m.
        attention: where the convolutions attend; see :class:`GroupCNN`. In the paper None and ``"features"``.
        ratio: by how much the hidden layers of channel attention are narrower than the input; on the image it is 1.
            Only with channel attention.
        attention_size: the odd width of the kernels of spatial attention. Only with that.
        input_dropout: of the pixels.
        dropout: behind the third and the sixth convolution.

    Shape:
        ``(B, in_channels, *space)`` to ``(B, num_classes)``.

    Raises:
        TypeError: an argument is of another type.
        ValueError: a gspace without a grid, a number that is not positive, an unknown attention, an option that the
            attention does not have, or, on application, images too small.
        NotImplementedError: the fiber group is continuous.

    Example:
        >>> import torch
        >>> from escnn_attention.models import AllCNNC
        >>> from escnn import gspaces
        >>> network = AllCNNC(gspaces.rot2dOnR2(4), 3, 10, width=4, attention="features")
        >>> network(torch.randn(2, 3, 16, 16)).shape
        torch.Size([2, 10])

    Source: Springenberg et al., "Striving for Simplicity: The All Convolutional Net", 2014; Cohen and Welling, "Group
    Equivariant Convolutional Networks", ICML 2016; Romero et al., "Attentive Group Equivariant Convolutional Networks",
    ICML 2020, Section 4.2, Appendices B.3.1 and C, with the details of the published implementation.
    """

    def __init__(
        self,
        gspace: GSpace,
        in_channels: int,
        num_classes: int,
        *,
        width: int | None = None,
        attention: Attention | None = None,
        ratio: int = 16,
        attention_size: int = 7,
        input_dropout: float = 0.2,
        dropout: float = 0.5,
    ):
        fields = image_type(gspace, in_channels)
        check_attention(attention, ratio=(ratio, 16), attention_size=(attention_size, 7))
        if width is None and gspace.fibergroup.order() == 8:
            width = 32
        width = width_for(gspace, width, 96)
        options: dict[str, Any] = {"attention": attention, "attention_size": attention_size}

        stages: dict[str, EquivariantModule] = {}
        for i, (factor, kernel_size, halve) in enumerate(_LAYERS, start=1):
            wider = FieldType(gspace, factor * width * [gspace.regular_repr])
            stages[f"convolution_{i}"] = sequence(
                drop(fields, input_dropout, "input_dropout") if i == 1 else {},
                attended(fields, wider, kernel_size, padding=kernel_size // 2, ratio=1 if i == 1 else ratio, **options),
                {"pool": HalvingPool(wider)} if halve else {},
                norm_and_relu(wider),
                drop(wider, dropout) if halve else {},
            )
            fields = wider
        classes = FieldType(gspace, check_int("num_classes", num_classes) * [gspace.regular_repr])
        stages["classes"] = sequence(
            attended(fields, classes, 1, ratio=ratio, **options), norm_and_relu(classes), {"mean": PoseMean(classes)}
        )
        super().__init__(stages, None)
        self.reset_parameters()

    @classmethod
    def cifar10(cls: type[_Self], gspace: GSpace, **options: Any) -> _Self:
        """The network for CIFAR-10 (Table 2): three channels of 32×32, ten classes.

        Args:
            gspace: the symmetry; in the paper p4 and p4m.
            options: of :class:`AllCNNC`, in place of those of the paper.
        """
        return cls(gspace, 3, 10, **options)

    def reset_parameters(self, gain: float = 0.035) -> None:
        r"""Draw all weights as the published implementation does.

        Kernels are uniform within :math:`\pm \mathrm{gain} / \sqrt{C k^d}`, the layers of channel attention within the
        inverse square root of the product of their dimensions behind the first.
        """
        draw_as_published(self, gain)
