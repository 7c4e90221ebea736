"""The mean over the poses, as a field."""

from __future__ import annotations

from escnn.nn import FieldType

from escnn_attention.nn.arguments import check_regular, check_type
from escnn_attention.nn.module import PlainModule
from escnn_attention.plain.image_networks import PoseMean as PlainPoseMean

__all__ = ["PoseMean"]


class PoseMean(PlainModule):
    r"""Replaces a regular field by its mean over the poses, at every pose.

    .. math:: \mathrm{out}(x, h) = \frac{1}{|H|} \sum_{h'} f(x, h')

    As the last stage of an :class:`EquivariantClassifier` it makes a mean of the maximum over the poses.

    Args:
        in_type: the type of the input and of the output: regular fields.

    Shape:
        ``(B, in_type.size, *space)`` to the same.

    Raises:
        TypeError: ``in_type`` is no field type.
        ValueError: fields that are not regular.

    Example:
        >>> import torch
        >>> from escnn_attention.models import PoseMean
        >>> from escnn import gspaces, nn
        >>> g = gspaces.rot2dOnR2(4)
        >>> fields = nn.FieldType(g, [g.regular_repr])
        >>> PoseMean(fields)(fields(torch.tensor([0.0, 1.0, 2.0, 5.0]).view(1, 4, 1, 1))).tensor.flatten()
        tensor([2., 2., 2., 2.])

    Source: Romero et al., "Attentive Group Equivariant Convolutional Networks", ICML 2020: the published networks for
    CIFAR-10 and PatchCamelyon end in a mean over the poses.
    """

    def __init__(self, in_type: FieldType):
        check_regular("in_type", check_type("in_type", in_type), "the mean over the poses")
        super().__init__(in_type, in_type, PlainPoseMean(in_type.gspace.fibergroup.order()))
