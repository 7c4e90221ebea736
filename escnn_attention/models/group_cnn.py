"""The convolutional network of the rotated MNIST experiments, plain and attentive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from escnn.gspaces import GSpace
from escnn.nn import EquivariantModule, FieldType

from escnn_attention._checks import check_int, check_ints
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
from escnn_attention.nn.resample import HalvingPool

__all__ = ["GroupCNN"]

_Self = TypeVar("_Self", bound="GroupCNN")


class GroupCNN(EquivariantClassifier):
    r"""The p4-CNN of Cohen and Welling, for any group, and its attentive versions.

    .. math::
        f_i &= \mathrm{Dropout}([\mathrm{BN}(f_{i-1} \star_G \psi_i)]^+), \quad f_0 = \mathrm{image} \\
        \mathrm{logits} &= \operatorname{mean}_x \max\nolimits_h \, (f_n \star_G \psi)(x, h)

    Convolutions without padding and without bias, of the same number of fields, a 2×2 max pooling behind the first few,
    in front of which there is no dropout, and a last convolution to one field a class. On rotated MNIST the sizes are
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

    The BIG versions of the paper are plain networks of greater ``width``: 11, 15 and 19 fields have about as many
    parameters as :math:`\alpha_F`, :math:`\alpha_{CH}` and :math:`\alpha_{SP}`, and :math:`\alpha`.

    Args:
        gspace: the symmetry, of the plane or of space.
        in_channels: the channels of the images.
        num_classes: the number of classes.
        width: the number of regular fields of every layer; by default :math:`20 / \sqrt{|H|}`, rounded, which is 10 for
            p4 and 20 for the trivial group, as published.
        attention: where the convolutions attend.
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
        TypeError: an argument is of another type.
        ValueError: a gspace without a grid, a number that is not positive, an unknown attention, an option that the
            attention does not have, or, on application, images too small for the convolutions.
        NotImplementedError: the fiber group is continuous.

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

        wider = FieldType(gspace, width_for(gspace, width, 20) * [gspace.regular_repr])
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
        classes = FieldType(gspace, check_int("num_classes", num_classes) * [gspace.regular_repr])
        stages["classes"] = sequence(attended(fields, classes, last_kernel, ratio=ratio, **options))
        super().__init__(stages, None)
        self.reset_parameters()

    @classmethod
    def rotmnist(cls: type[_Self], gspace: GSpace, **options: Any) -> _Self:
        """The network for rotated MNIST (Table 1): one channel of 28×28, ten classes, seven convolutions.

        Args:
            gspace: the symmetry; in the paper p4.
            options: of :class:`GroupCNN`, in place of those of the paper. The versions of Table 1 are ``attention``
                ``None``, ``"poses"``, ``"full"``, ``"channel"``, ``"spatial"`` and ``"features"``, and ``width`` 11, 15
                and 19 for the BIG ones.
        """
        return cls(gspace, 1, 10, **options)

    def reset_parameters(self, gain: float = 1.0) -> None:
        r"""Draw all weights as the published implementation does.

        Kernels are uniform within :math:`\pm \mathrm{gain} / \sqrt{C k^d}`, the layers of channel attention within the
        inverse square root of the product of their dimensions behind the first; the norms become the identity.
        """
        draw_as_published(self, gain)
