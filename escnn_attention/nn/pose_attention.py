"""Attention over the poses only."""

from __future__ import annotations

from escnn.nn import FieldType, GeometricTensor
from torch import Tensor

from escnn_attention._checks import check_bool
from escnn_attention.nn.arguments import check_input, check_type
from escnn_attention.nn.kernels import pose_kernel, poses_of
from escnn_attention.nn.module import PlainModule
from escnn_attention.plain.pose_attention import PoseAttention as PlainPoseAttention

__all__ = ["PoseAttention"]


class PoseAttention(PlainModule):
    r"""Attention over the poses, at every position by itself (co-attention).

    .. math::
        \alpha(x, h) = \sigma\Big( \sum_c \sum_{\tilde h} w_c(h^{-1}\tilde h)\, f_c(x, \tilde h) \Big), \qquad
        \mathrm{out}(x, h) = (1 - \alpha(x, h))\, f(x, h)

    For cyclic groups the matrices :math:`w_c(h^{-1}\tilde h)` are the circulant ones of the original; here the group is
    any. It has :math:`|H|` weights a field, and one a field on trivial fields, whose single map depends on the position
    alone. This is the form in which Romero et al. (2020) compare with it (:math:`\alpha_{RH}`, in front of every
    convolution): a sigmoid where the original has a softmax over the poses, and one map for all fields.

    Args:
        in_type: the type of the input and of the output: regular fields only, or trivial fields only. Any base space,
            or none.
        residual: whether the output is :math:`(1 - \alpha) f` or :math:`\alpha f`.

    Shape:
        ``(B, in_type.size, *space)`` to the same.

    Raises:
        TypeError: an argument is of another type.
        ValueError: fields that are neither all regular nor all trivial.
        NotImplementedError: the fiber group is continuous.

    Example:
        >>> import torch
        >>> from escnn_attention import PoseAttention
        >>> from escnn import gspaces, nn
        >>> g = gspaces.rot2dOnR2(4)
        >>> fields = nn.FieldType(g, 10 * [g.regular_repr])
        >>> attention = PoseAttention(fields)
        >>> attention(fields(torch.randn(1, 40, 5, 5))).shape
        torch.Size([1, 40, 5, 5])
        >>> sum(p.numel() for p in attention.parameters())
        40

    Source: Romero and Hoogendoorn, "Co-Attentive Equivariant Neural Networks", ICLR 2020, as in Romero et al.,
    "Attentive Group Equivariant Convolutional Networks", ICML 2020, Section 3.1.2.
    """

    plain: PlainPoseAttention

    def __init__(self, in_type: FieldType, *, residual: bool = True):
        check_type("in_type", in_type)
        check_bool("residual", residual)
        poses = poses_of("in_type", in_type, type(self).__name__)
        weight = pose_kernel(in_type.gspace, 1, poses, len(in_type), poses, None, gain=1 / 3)
        super().__init__(in_type, in_type, PlainPoseAttention(poses, weight, residual))

    def attention_maps(self, input: GeometricTensor) -> Tensor:
        """The maps, between 0 and 1: with ``residual`` what is suppressed is where they are large.

        Args:
            input: features of type ``in_type``.

        Returns:
            ``(B, poses, *space)``, with one pose on trivial fields.

        Raises:
            TypeError, ValueError: as ``forward``.
        """
        return self.plain.attention_maps(check_input(input, self.in_type, self).tensor)

    def extra_repr(self) -> str:
        return super().extra_repr() + ("" if self.plain.residual else ", residual=False")
