"""The convolutional networks of the papers for any group, plain and attentive."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from escnn.gspaces import GSpace
from escnn.nn import EquivariantModule, FieldType, PointwiseAdaptiveAvgPool2D, PointwiseAdaptiveAvgPool3D
from typing_extensions import Self, Unpack

from escnn_attention._checks import check_int, check_ints
from escnn_attention.models.classifier import EquivariantClassifier, PoseMean
from escnn_attention.models.convolutions import (
    Attention,
    DenseBlock,
    ResidualBlock,
    attended,
    check_attention,
    draw_as_published,
    drop,
    image_type,
    norm_and_relu,
    options_of,
    regular_type,
    sequence,
    width_for,
)
from escnn_attention.nn.resample import HalvingPool


class _Options(TypedDict, total=False):
    attention: Attention | None
    attention_size: int


class GroupCNNOptions(_Options, total=False):
    """Options of :class:`GroupCNN`."""

    width: int | None
    convolutions: Sequence[int]
    last_kernel: int
    ratio: int
    image_dilation: int | None
    dropout: float


class AllCNNCOptions(_Options, total=False):
    """Options of :class:`AllCNNC`."""

    width: int | None
    ratio: int
    input_dropout: float
    dropout: float


class ResNet44Options(_Options, total=False):
    """Options of :class:`ResNet44`."""

    width: Sequence[int] | None
    blocks: int
    hidden: int


class DenseNetOptions(_Options, total=False):
    """Options of :class:`GroupDenseNet`."""

    width: int | None
    blocks: int
    hidden: int


class _PublishedNetwork(EquivariantClassifier):
    """Base class of the networks whose weights are drawn as in the published implementation."""

    gain: float

    def __init__(self, stages: Mapping[str, EquivariantModule]):
        super().__init__(stages, None)
        self.reset_parameters()

    def reset_parameters(self, gain: float | None = None) -> None:
        r"""Draw all weights as the published implementation does: see :func:`~.convolutions.draw_as_published`.

        ``gain`` is by default that of the published network.
        """
        draw_as_published(self, self.gain if gain is None else gain)


class GroupCNN(_PublishedNetwork):
    r"""The p4-CNN of Cohen and Welling, for any group, and its attentive versions.

    .. math::
        f_i &= \mathrm{Dropout}([\mathrm{BN}(f_{i-1} \star_G \psi_i)]^+), \quad f_0 = \mathrm{image} \\
        \mathrm{logits} &= \operatorname{mean}_x \max\nolimits_h \, (f_n \star_G \psi)(x, h)

    Convolutions without padding and without bias, of the same number of fields, a 2×2 max pooling after the first few,
    before which there is no dropout, and a last convolution to one field per class. On rotated MNIST the sizes are
    28 → 26 → 24 → 12 → 10 → 8 → 6 → 4 → 1, all of which keep the equivariance exact; a grid of odd size is pooled
    symmetrically (:class:`HalvingPool`).

    All convolutions are attentive, the first and the last included:

    ============== =================== ======================================================
    ``attention``  paper               what is attended to
    ============== =================== ======================================================
    None                               nothing: the p4-CNN itself
    ``"full"``     :math:`\alpha`      the responses of every pair of fields, in fields and positions
    ``"channel"``  :math:`\alpha_{CH}` the same, in fields only
    ``"spatial"``  :math:`\alpha_{SP}` the same, in positions only
    ``"features"`` :math:`\alpha_F`    the input, in fields and positions
    ``"poses"``    :math:`\alpha_{RH}` the input, in poses only
    ============== =================== ======================================================

    Args:
        gspace: the symmetry, of the plane or of space.
        in_channels: the channels of the images.
        num_classes: the number of classes.
        width: the number of regular fields of every layer; by default :math:`20 / \sqrt{|H|}`, rounded, which is 10 for
            p4 and 20 for the trivial group, as published.
        attention: the attention of the convolutions.
        convolutions: how many there are in front of the pooling and behind it, the last one not counted.
        last_kernel: the width of the last convolution.
        ratio: by how much the hidden layers of channel attention are narrower than the input, which has ``width``
            fields; on the image it is 1. Only with channel attention.
        attention_size: the odd width of the kernels of spatial attention. Only with that.
        image_dilation: the dilation of that kernel on the image; by default 4 for ``"features"`` and 1 for the others,
            as published.
        dropout: behind every layer but the last and the one in front of the pooling.

    Shape:
        ``(B, in_channels, *space)`` to ``(B, num_classes)``.

    Raises:
        ValueError: a gspace without a grid, an option that the attention does not have, or, on application, images too
            small for the convolutions.

    Example:
        >>> import torch
        >>> from escnn_attention.models import GroupCNN
        >>> from escnn import gspaces
        >>> network = GroupCNN.rotmnist(gspaces.rot2dOnR2(4), attention="features")
        >>> network(torch.randn(2, 1, 28, 28)).shape
        torch.Size([2, 10])

    Source: Cohen and Welling, "Group Equivariant Convolutional Networks", ICML 2016, for the network; Romero et al.,
    "Attentive Group Equivariant Convolutional Networks", ICML 2020, Section 4.1 and Appendix B.2, with the details of
    the published implementation.
    """

    gain = 1.0

    def __init__(
        self,
        gspace: GSpace,
        in_channels: int,
        num_classes: int,
        *,
        width: int | None = None,
        attention: Attention | None = None,
        convolutions: Sequence[int] = (2, 4),
        last_kernel: int = 4,
        ratio: int = 2,
        attention_size: int = 7,
        image_dilation: int | None = None,
        dropout: float = 0.3,
    ):
        fields = image_type(gspace, in_channels)
        check_attention(
            attention, ratio=(ratio, 2), attention_size=(attention_size, 7), image_dilation=(image_dilation, None)
        )
        before, behind = check_ints("convolutions", convolutions, 2, "in front of the pooling and behind", least=0)
        check_int("convolutions", before)
        check_int("last_kernel", last_kernel)
        if image_dilation is None:
            image_dilation = 4 if attention == "features" else 1
        options: dict[str, Any] = {"attention": attention, "attention_size": attention_size}

        wider = regular_type(gspace, width_for(gspace, width, 20))
        stages: dict[str, EquivariantModule] = {}
        for i in range(1, before + behind + 1):
            of_layer: dict[str, Any] = {"ratio": ratio}
            if i == 1:
                of_layer = {"ratio": 1, "attention_dilation": image_dilation}
            stages[f"convolution_{i}"] = sequence(
                attended(fields, wider, 3, **of_layer, **options),
                norm_and_relu(wider),
                drop(wider, dropout) if i != before else {},
            )
            fields = wider
            if i == before:
                stages["pool"] = HalvingPool(fields)
        classes = regular_type(gspace, check_int("num_classes", num_classes))
        stages["classes"] = sequence(attended(fields, classes, last_kernel, ratio=ratio, **options))
        super().__init__(stages)

    @classmethod
    def rotmnist(cls, gspace: GSpace, **options: Unpack[GroupCNNOptions]) -> Self:
        """The network for rotated MNIST (Table 1): one channel of 28×28, ten classes, seven convolutions.

        The group of the paper is p4. The versions of Table 1 are ``attention`` ``None``, ``"poses"``, ``"full"``,
        ``"channel"``, ``"spatial"`` and ``"features"``, and ``width`` 11, 15 and 19 for the BIG ones.
        """
        return cls(gspace, 1, 10, **options)


# For each convolution how many times the width, the width of the kernel, and whether the grid is halved behind it.
_ALL_CNN_C = (
    (1, 3, False),
    (1, 3, False),
    (1, 3, True),
    (2, 3, False),
    (2, 3, False),
    (2, 3, True),
    (2, 3, False),
    (2, 1, False),
)


class AllCNNC(_PublishedNetwork):
    r"""The All-CNN-C for any group, and its attentive versions.

    Nine convolutions of widths C, C, C, 2C, 2C, 2C, 2C, 2C and one field per class, with padded kernels of 3×3 and, the
    last two, of 1×1, each followed by batch norm and ReLU, the last one too; then a mean over poses and positions.
    Dropout on the image and behind the third and sixth convolution.

    In place of a stride the third and sixth convolution have a 2×2 maximum before their batch norm, as in the paper
    (Appendix C); grids of odd size are pooled symmetrically (:class:`HalvingPool`).

    Args:
        gspace, in_channels, num_classes: as of :class:`GroupCNN`.
        width: the number C of regular fields of the first layers; by default :math:`96 / \sqrt{|H|}`, rounded, which is
            48 for p4 and 96 for the trivial group, as published, and 32 for groups of order 8, as published for p4m.
        attention, ratio, attention_size: as of :class:`GroupCNN`; ``attention`` is None or ``"features"`` in the paper.
        input_dropout: of the pixels.
        dropout: behind the third and the sixth convolution.

    Example:
        >>> import torch
        >>> from escnn_attention.models import AllCNNC
        >>> from escnn import gspaces
        >>> network = AllCNNC(gspaces.rot2dOnR2(4), 3, 10, width=4, attention="features")
        >>> network(torch.randn(2, 3, 16, 16)).shape
        torch.Size([2, 10])

    Source: Springenberg et al., "Striving for Simplicity: The All Convolutional Net", 2014; Romero et al., ICML 2020,
    as of :class:`GroupCNN`, Section 4.2, Appendices B.3.1 and C.
    """

    gain = 0.035

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
        for i, (factor, kernel_size, halve) in enumerate(_ALL_CNN_C, start=1):
            wider = regular_type(gspace, factor * width)
            stages[f"convolution_{i}"] = sequence(
                drop(fields, input_dropout, "input_dropout") if i == 1 else {},
                attended(fields, wider, kernel_size, padding=kernel_size // 2, ratio=1 if i == 1 else ratio, **options),
                {"pool": HalvingPool(wider)} if halve else {},
                norm_and_relu(wider),
                drop(wider, dropout) if halve else {},
            )
            fields = wider
        classes = regular_type(gspace, check_int("num_classes", num_classes))
        stages["classes"] = sequence(
            attended(fields, classes, 1, ratio=ratio, **options), norm_and_relu(classes), {"mean": PoseMean(classes)}
        )
        super().__init__(stages)

    @classmethod
    def cifar10(cls, gspace: GSpace, **options: Unpack[AllCNNCOptions]) -> Self:
        """The network for CIFAR-10 (Table 2): three channels of 32×32, ten classes, p4 and p4m in the paper."""
        return cls(gspace, 3, 10, **options)


class ResNet44(_PublishedNetwork):
    r"""The 44-layer residual network for any group, and its attentive versions.

    A convolution, three stages of seven :class:`ResidualBlock`\ s, batch norm, ReLU, a mean over the positions, a 1×1
    convolution to one field per class and a mean over the poses: :math:`6 n + 2` layers for n blocks a stage. The first
    block of the second and of the third stage halves the grid, exactly.

    Args:
        gspace, in_channels, num_classes: as of :class:`GroupCNN`.
        width: the number of regular fields in each stage; by default :math:`(32, 64, 128) / \sqrt{|H|}`, rounded, which
            is (11, 23, 45) for p4m, as published.
        blocks: the number of blocks in every stage.
        attention: the attention of all convolutions; see :class:`GroupCNN`. In the paper None and ``"features"``.
        hidden, attention_size: as of :class:`ResidualBlock`.

    Example:
        >>> import torch
        >>> from escnn_attention.models import ResNet44
        >>> from escnn import gspaces
        >>> network = ResNet44(gspaces.flipRot2dOnR2(4), 3, 10, width=(1, 2, 3), blocks=1)
        >>> network(torch.randn(2, 3, 16, 16)).shape
        torch.Size([2, 10])

    Source: He et al., "Deep Residual Learning for Image Recognition", CVPR 2016; Romero et al., ICML 2020, as of
    :class:`GroupCNN`, Section 4.2, Appendices B.3.2 and C.
    """

    gain = math.sqrt(2)

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

        fields = regular_type(gspace, widths[0])
        stages: dict[str, EquivariantModule] = {
            "stem": sequence(attended(image, fields, 3, attention, padding=1, attention_size=attention_size))
        }
        for stage, count in enumerate(widths, start=1):
            for i in range(1, blocks + 1):
                wider = regular_type(gspace, count)
                options = options_of(attention, hidden=hidden, attention_size=attention_size)
                block = ResidualBlock(fields, wider, halve=stage > 1 and i == 1, attention=attention, **options)
                stages[f"residual_{stage}_{i}"] = block
                fields = wider
        classes = regular_type(gspace, check_int("num_classes", num_classes))
        pool = {2: PointwiseAdaptiveAvgPool2D, 3: PointwiseAdaptiveAvgPool3D}[gspace.dimensionality]
        stages["classes"] = sequence(
            norm_and_relu(fields),
            {"pool": pool(fields, 1)},
            attended(fields, classes, 1, attention, hidden=hidden, attention_size=attention_size),
            {"mean": PoseMean(classes)},
        )
        super().__init__(stages)

    @classmethod
    def cifar10(cls, gspace: GSpace, **options: Unpack[ResNet44Options]) -> Self:
        """The network for CIFAR-10 (Table 2): three channels of 32×32, ten classes, p4m in the paper."""
        return cls(gspace, 3, 10, **options)


# Of the kernels of spatial attention, in the last blocks and transitions; 4 in those before.
_BLOCK_DILATIONS = (3, 2, 1)
_TRANSITION_DILATIONS = (3, 1)


class GroupDenseNet(_PublishedNetwork):
    r"""The p4m-DenseNet of Veeling et al. for any group, and its attentive versions.

    A 3×3 convolution, then :class:`DenseBlock`\ s with transitions between them (batch norm, ReLU, a 1×1 convolution of
    as many fields, a mean over 2×2 positions), batch norm, ReLU, a 1×1 convolution to one field per class, and a mean
    over positions and poses. Nothing is padded. On PatchCamelyon the sizes are 96 → 94 → 92 → 46 → 44 → 22 → 20 → 10 →
    8 → 4 → 2, all of which keep the equivariance exact; a grid of odd size is pooled symmetrically
    (:class:`HalvingPool`).

    The kernels of spatial attention are dilated by 4 on large grids, by less in the last blocks, and in the very last
    ones they are narrower, as published.

    Args:
        gspace, in_channels, num_classes: as of :class:`GroupCNN`.
        width: the number of regular fields of the first convolution, and by which every block grows; by default
            :math:`26 / \sqrt{|H|}`, rounded, which is 13 for p4, 9 for p4m and 26 for the trivial group, as published.
        blocks: the number of dense blocks.
        attention: the attention of the convolutions, those of transitions and the last one included; see
            :class:`GroupCNN`. In the paper None and ``"features"``.
        hidden: the number of hidden fields of channel attention, rounded to an integer ratio; on the image there are as
            many as channels. Only with channel attention.
        attention_size: the odd width of the kernels of spatial attention; at most 5 in the last block, and 3 in the
            last convolution. Only with that.

    Example:
        >>> import torch
        >>> from escnn_attention.models import GroupDenseNet
        >>> from escnn import gspaces
        >>> network = GroupDenseNet(gspaces.flipRot2dOnR2(4), 3, 2, width=2, blocks=3)
        >>> network(torch.randn(2, 3, 24, 24)).shape
        torch.Size([2, 2])

    Source: Veeling et al., "Rotation Equivariant CNNs for Digital Pathology", MICCAI 2018; Romero et al., ICML 2020, as
    of :class:`GroupCNN`, Section 4.3 and Appendix B.4.
    """

    gain = math.sqrt(2)

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
            options: dict[str, Any] = {"attention_size": size, "attention_dilation": dilation}
            return attended(fields, out, 1, attention, hidden=hidden, **options)

        fields = regular_type(gspace, growth)
        stem = attended(image, fields, 3, attention, attention_size=attention_size, attention_dilation=4)
        stages: dict[str, EquivariantModule] = {"stem": sequence(stem)}
        for i, dilation in enumerate(_last_aligned(_BLOCK_DILATIONS, blocks), start=1):
            if i > 1:
                stages[f"transition_{i - 1}"] = sequence(
                    norm_and_relu(fields),
                    pointwise(fields, fields, attention_size, _last_aligned(_TRANSITION_DILATIONS, blocks - 1)[i - 2]),
                    {"pool": HalvingPool(fields, "avg")},
                )
            sizes = {"hidden": hidden, "attention_size": min(5, attention_size) if i == blocks else attention_size}
            options = options_of(attention, **sizes, attention_dilation=dilation)
            stages[f"dense_{i}"] = block = DenseBlock(fields, growth, attention=attention, **options)
            fields = block.out_type
        classes = regular_type(gspace, check_int("num_classes", num_classes))
        stages["classes"] = sequence(
            norm_and_relu(fields), pointwise(fields, classes, min(3, attention_size), 1), {"mean": PoseMean(classes)}
        )
        super().__init__(stages)

    @classmethod
    def patch_camelyon(cls, gspace: GSpace, **options: Unpack[DenseNetOptions]) -> Self:
        """The network for PatchCamelyon (Table 3): three channels of 96×96, two classes; Z2, p4, p4m in the paper."""
        return cls(gspace, 3, 2, **options)


def _last_aligned(last: tuple[int, ...], count: int) -> tuple[int, ...]:
    """``count`` numbers: the last ones as given, 4 before."""
    return ((4,) * count + last)[-count:] if count else ()
