"""Attention on the features that a convolution sees."""

from __future__ import annotations

from collections.abc import Sequence

from escnn.nn import FieldType, GeometricTensor

from escnn_attention._checks import check_bool, check_int, check_option, check_unused
from escnn_attention.groups.fibers import fibers
from escnn_attention.nn.arguments import check_input, check_type
from escnn_attention.nn.kernels import BasisKind, check_grid, pose_kernel, poses_of
from escnn_attention.nn.module import PlainModule
from escnn_attention.plain.feature_attention import AttentionMaps
from escnn_attention.plain.feature_attention import FeatureAttention as PlainFeatureAttention
from escnn_attention.plain.kernels import PoseKernel

__all__ = ["AttentionMaps", "FeatureAttention"]

# The maps start near 1/2: the scale with which the linear layers of PyTorch are drawn.
GAIN = 1 / 3


class FeatureAttention(PlainModule):
    r"""Attention on features: what an attentive group convolution does to its input, for any convolution behind it.

    .. math::
        \alpha^C &= \sigma\Big( \sum_{s} W_2 \star_H [W_1 \star_H s]^+ \Big), \quad
            s \in \{\operatorname{mean}_x f, \max\nolimits_x f\} \\
        \alpha^X &= \sigma\big( \psi^X \star_G (\operatorname{mean}_c \alpha^C f,\,
            \max\nolimits_c \alpha^C f) \big) \\
        \mathrm{out} &= (1 - \alpha^X \alpha^C)\, f

    On regular fields both layers are complete equivariant maps, :math:`(W \star_H s)(h) = \sum_{\tilde h}
    W(h^{-1}\tilde h)\, s(\tilde h)`, and :math:`\psi^X` is a group convolution: there is a channel map for each field
    and pose, and a spatial map for each pose. On trivial fields (images) :math:`W_1` and :math:`W_2` are matrices and
    the spatial map is one, the maximum over the poses of a lifting convolution.

    The maps are what is suppressed (the residual attention branch, Section 3.3), and the published networks have it so;
    Eq. 20 of the paper prints :math:`\alpha^X \alpha^C f`, which is ``residual=False``.

    Args:
        in_type: the type of the input and of the output: regular fields only, or trivial fields only.
        channel: whether there is channel attention.
        spatial: whether there is spatial attention.
        ratio: by how much the hidden layer of channel attention is narrower than the input. It has ``fields // ratio``
            fields, and at least one. The paper has 2 on rotated MNIST, 16 on CIFAR-10, and 1 on images. Only with
            channel attention.
        kernel_size: the odd width of the kernel of spatial attention, which is padded with zeros. Only with spatial
            attention, like its ``dilation`` and its ``basis``.
        dilation: of that kernel.
        statistics: ``"mean"``, ``"max"`` or both.
        residual: whether the output is :math:`(1 - \alpha) f` or :math:`\alpha f`.
        basis: of the kernel of spatial attention: ``"complete"`` for all equivariant kernels, ``"bandlimited"`` for
            those of escnn's defaults, ``"auto"`` for the complete ones where the group maps the grid onto itself.

    Shape:
        ``(B, in_type.size, *space)`` to the same, in two or three dimensions.

    Raises:
        TypeError: an argument is of another type; on application, a tensor of another precision than the parameters,
            where autocast does not choose it.
        ValueError: fields that are neither all regular nor all trivial, no grid, neither kind of attention, an even
            kernel, an unknown option, an option of an attention that is off.
        NotImplementedError: the fiber group is continuous.

    Example:
        >>> import torch
        >>> from escnn_attention import FeatureAttention
        >>> from escnn import gspaces, nn
        >>> g = gspaces.rot2dOnR2(4)
        >>> fields = nn.FieldType(g, 10 * [g.regular_repr])
        >>> attention = FeatureAttention(fields, ratio=2)
        >>> convolution = nn.R2Conv(fields, fields, kernel_size=3)
        >>> convolution(attention(fields(torch.randn(1, 40, 12, 12)))).shape
        torch.Size([1, 40, 10, 10])

    Source: Romero et al., "Attentive Group Equivariant Convolutional Networks", ICML 2020, Section 3.4; with the
    trivial group CBAM (Woo et al. 2018) for ``residual=False``, and squeeze-and-excitation (Hu et al. 2018) for
    ``spatial=False, statistics="mean"`` besides, both without biases.
    """

    plain: PlainFeatureAttention

    def __init__(
        self,
        in_type: FieldType,
        *,
        channel: bool = True,
        spatial: bool = True,
        ratio: int = 2,
        kernel_size: int = 7,
        dilation: int = 1,
        statistics: str | Sequence[str] = ("mean", "max"),
        residual: bool = True,
        basis: BasisKind = "auto",
    ):
        check_type("in_type", in_type)
        space = in_type.gspace
        poses = poses_of("in_type", in_type, type(self).__name__)
        check_grid("in_type", space, type(self).__name__)
        for option, value in {"channel": channel, "spatial": spatial, "residual": residual}.items():
            check_bool(option, value)
        if not (channel or spatial):
            raise ValueError("channel, spatial: got False for both, which leaves no attention")
        check_int("ratio", ratio)
        check_int("dilation", dilation)
        check_attention_size("kernel_size", kernel_size)
        if not isinstance(statistics, (str, Sequence)):
            raise TypeError(f"statistics: got {statistics!r}, needed 'mean', 'max' or both")
        statistics = (statistics,) if isinstance(statistics, str) else tuple(statistics)
        if not statistics or len(set(statistics)) < len(statistics):
            raise ValueError(f"statistics: got {statistics!r}, needed 'mean', 'max' or both")
        for statistic in statistics:
            check_option("statistics", statistic, ("mean", "max"))
        check_option("basis", basis, ("auto", "complete", "bandlimited"))
        if not channel:
            check_unused("ratio", ratio, 2, "there is no channel attention")
        if not spatial:
            check_unused("kernel_size", kernel_size, 7, "there is no spatial attention")
            check_unused("dilation", dilation, 1, "there is no spatial attention")
            check_unused("basis", basis, "auto", "there is no spatial attention")
        fields, hidden = len(in_type), max(1, len(in_type) // ratio)
        layers: tuple[PoseKernel, PoseKernel] | None = None
        if channel:
            layers = (
                pose_kernel(space, hidden, poses, fields, poses, None, gain=GAIN),
                pose_kernel(space, fields, poses, hidden, poses, None, gain=GAIN),
            )
        kernel: PoseKernel | None = None
        if spatial:
            order = fibers(space).order
            kernel = pose_kernel(space, 1, order, len(statistics), poses, kernel_size, basis=basis, gain=GAIN)
        plain = PlainFeatureAttention(
            poses,
            layers,
            kernel,
            statistics=statistics,
            dilation=dilation,
            residual=residual,
        )
        super().__init__(in_type, in_type, plain)
        self.ratio = ratio
        self.kernel_size = kernel_size

    def attention_maps(self, input: GeometricTensor) -> AttentionMaps:
        """The maps, between 0 and 1: with ``residual`` what is suppressed is where they are large.

        Args:
            input: features of type ``in_type``.

        Returns:
            ``channel``, of shape ``(B, fields, poses)``, and ``spatial``, ``(B, poses, *space)``, each None where it is
            off. There is one pose on trivial fields.

        Raises:
            TypeError, ValueError: as ``forward``.
        """
        return self.plain.attention_maps(check_input(input, self.in_type, self).tensor)

    def extra_repr(self) -> str:
        parts = [super().extra_repr()]
        parts.append(f"ratio={self.ratio}" if self.plain.squeeze is not None else "channel=False")
        if self.plain.spatial is None:
            parts.append("spatial=False")
        else:
            parts.append(f"kernel_size={self.kernel_size}")
            if self.plain.dilation > 1:
                parts.append(f"dilation={self.plain.dilation}")
        if self.plain.statistics != ("mean", "max"):
            parts.append(f"statistics={self.plain.statistics}")
        if not self.plain.residual:
            parts.append("residual=False")
        return ", ".join(parts)


def check_attention_size(name: str, kernel_size: int) -> int:
    """``kernel_size``, if it is odd: padded with zeros the map then has the size of the features."""
    if check_int(name, kernel_size) % 2 == 0:
        raise ValueError(f"{name}: got {kernel_size}, needed an odd number")
    return kernel_size
