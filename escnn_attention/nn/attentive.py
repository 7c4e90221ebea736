"""Attentive group convolutions, and attention on the features or poses in front of a convolution."""

from __future__ import annotations

from collections.abc import Sequence

from escnn.nn import FieldType, GeometricTensor
from torch import Tensor

from escnn_attention._checks import check_bool, check_int, check_option, check_unused
from escnn_attention.functional.responses.attentive import Geometry
from escnn_attention.groups.fibers import fibers
from escnn_attention.nn.arguments import (
    ConvolutionPadding,
    check_padding_mode,
    check_same_gspace,
    check_type,
    shown,
)
from escnn_attention.nn.kernels import BasisKind, check_grid, pose_kernel, poses_of
from escnn_attention.nn.module import PlainModule, check_input
from escnn_attention.plain.attentive import AttentionMaps, PoseKernel
from escnn_attention.plain.attentive import AttentiveConv as PlainAttentiveConv
from escnn_attention.plain.attentive import FeatureAttention as PlainFeatureAttention
from escnn_attention.plain.attentive import PoseAttention as PlainPoseAttention

# The maps start near 1/2: the scale with which the linear layers of PyTorch are drawn.
GAIN = 1 / 3


class FeatureAttention(PlainModule):
    r"""Attention on features: multiplies the input of any following convolution by attention maps.

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

    The maps say what is suppressed (the residual attention branch, Section 3.3), as in the published networks; Eq. 20
    of the paper prints :math:`\alpha^X \alpha^C f`, which is ``residual=False``.

    Args:
        in_type: the type of the input and of the output: regular fields only, or trivial fields only.
        channel: whether there is channel attention.
        spatial: whether there is spatial attention.
        ratio: by how much the hidden layer of channel attention is narrower than the input. It has ``fields // ratio``
            fields, and at least one. The paper has 2 on rotated MNIST, 16 on CIFAR-10, and 1 on images. Only with
            channel attention.
        kernel_size: the odd width of the kernel of spatial attention, which keeps the grid. Only with spatial
            attention, like its ``dilation``, ``basis`` and ``padding_mode``.
        dilation: of that kernel.
        padding_mode: ``"zeros"``, by which that kernel is padded; or ``"circular"`` for tori, whose opposite sides are
            neighbours, for groups that map the lattice onto itself. The layer then commutes with all rolls, exactly.
        statistics: ``"mean"``, ``"max"`` or both.
        residual: whether the output is :math:`(1 - \alpha) f` or :math:`\alpha f`.
        basis: of the kernel of spatial attention: ``"complete"`` for all equivariant kernels, ``"bandlimited"`` for
            those of escnn's defaults, ``"auto"`` for the complete ones where the group maps the grid onto itself.

    Shape:
        ``(B, in_type.size, *space)`` to the same, in two or three dimensions.

    Raises:
        ValueError: fields that are neither all regular nor all trivial, no grid, neither kind of attention, an even
            kernel, an unknown option, an option of an attention that is off, a torus that the group does not keep.

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
        padding_mode: ConvolutionPadding = "zeros",
    ):
        check_type("in_type", in_type)
        space = in_type.gspace
        poses = poses_of("in_type", in_type, type(self).__name__)
        check_grid("in_type", space, type(self).__name__)
        _check_attentions(channel, spatial, residual, ratio, ("kernel_size", kernel_size), ("dilation", dilation))
        if not (channel or spatial):
            raise ValueError("channel, spatial: got False for both, which leaves no attention")
        if not isinstance(statistics, (str, Sequence)):
            raise TypeError(f"statistics: got {statistics!r}, needed 'mean', 'max' or both")
        statistics = (statistics,) if isinstance(statistics, str) else tuple(statistics)
        if not statistics or len(set(statistics)) < len(statistics):
            raise ValueError(f"statistics: got {statistics!r}, needed 'mean', 'max' or both")
        for statistic in statistics:
            check_option("statistics", statistic, ("mean", "max"))
        check_option("basis", basis, ("auto", "complete", "bandlimited"))
        if not spatial:
            check_unused("basis", basis, "auto", "there is no spatial attention")
            check_unused("padding_mode", padding_mode, "zeros", "there is no spatial attention")
        circular = check_padding_mode(fibers(space), space, padding_mode, ConvolutionPadding)
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
            circular=circular,
            residual=residual,
        )
        super().__init__(in_type, in_type, plain)
        self.ratio, self.padding_mode = ratio, padding_mode
        self.kernel_size = kernel_size

    def attention_maps(self, input: GeometricTensor) -> AttentionMaps:
        """The maps, between 0 and 1; with ``residual``, features are suppressed where they are large.

        Returns:
            ``channel``, of shape ``(B, fields, poses)``, and ``spatial``, ``(B, poses, *space)``, each None where it is
            off. There is one pose on trivial fields.
        """
        return self.plain.attention_maps(check_input(input, self.in_type, self).tensor)

    def extra_repr(self) -> str:
        parts = [super().extra_repr(), *_attentions(self, "kernel_size")]
        return ", ".join([*parts, *shown(padding_mode=(self.padding_mode, "zeros"))])


def _attentions(layer: FeatureAttention | AttentiveConv, size: str) -> list[str]:
    """The options of both kinds of attention, as the representation of a layer shows them."""
    channel, spatial = layer.plain.squeeze is not None, layer.plain.spatial is not None
    return [
        *(shown(ratio=(layer.ratio, None)) if channel else ["channel=False"]),
        *(shown(**{size: (getattr(layer, size), None)}) if spatial else ["spatial=False"]),
    ]


def check_attention_size(name: str, kernel_size: int) -> int:
    """``kernel_size``, if it is odd, so that the padded map has the size of the features."""
    if check_int(name, kernel_size) % 2 == 0:
        raise ValueError(f"{name}: got {kernel_size}, needed an odd number")
    return kernel_size


class PoseAttention(PlainModule):
    r"""Attention over the poses, separately at every position (co-attention).

    .. math::
        \alpha(x, h) = \sigma\Big( \sum_c \sum_{\tilde h} w_c(h^{-1}\tilde h)\, f_c(x, \tilde h) \Big), \qquad
        \mathrm{out}(x, h) = (1 - \alpha(x, h))\, f(x, h)

    For cyclic groups the matrices :math:`w_c(h^{-1}\tilde h)` are the circulant ones of the original; here the group is
    arbitrary. It has :math:`|H|` weights a field, and one a field on trivial fields, whose single map depends on the
    position only. This is the form with which Romero et al. (2020) compare (:math:`\alpha_{RH}`, before every
    convolution): a sigmoid instead of the original softmax over the poses, and one map for all fields.

    Args:
        in_type: the type of the input and of the output: regular fields only, or trivial fields only. Any base space,
            or none.
        residual: whether the output is :math:`(1 - \alpha) f` or :math:`\alpha f`.

    Shape:
        ``(B, in_type.size, *space)`` to the same.

    Raises:
        ValueError: fields that are neither all regular nor all trivial.

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
        """The maps ``(B, poses, *space)``, of one pose on scalars: see :meth:`FeatureAttention.attention_maps`."""
        return self.plain.attention_maps(check_input(input, self.in_type, self).tensor)


class AttentiveConv(PlainModule):
    r"""Attentive group convolution: attention on the partial responses of a group convolution.

    The responses of output field c and pose h to input field :math:`\tilde c` and pose :math:`\tilde h`,

    .. math:: \tilde f_{c,\tilde c}(x, h, \tilde h) = [f_{\tilde c} \star L_h \psi_{c,\tilde c}](x, \tilde h),

    are modulated before they are summed:

    .. math::
        \alpha^C_{c,\cdot}(h, \tilde h) &= \sigma\Big( \sum_{s} W^c_2(h^{-1}\tilde h)\,
            [W^c_1(h^{-1}\tilde h)\, s_{c,\cdot}(h, \tilde h)]^+ \Big), \quad
            s \in \{\operatorname{mean}_x \tilde f, \max\nolimits_x \tilde f\} \\
        \alpha^X_c(x, h, \tilde h) &= \sigma\big( [(\operatorname{mean}_{\tilde c} \alpha^C \tilde f,\,
            \max\nolimits_{\tilde c} \alpha^C \tilde f) \star L_h \psi^X_c](x, h, \tilde h) \big) \\
        \mathrm{out}_c(x, h) &= \sum_{\tilde c, \tilde h} (1 - \alpha^X_c\, \alpha^C_{c,\tilde c})\,
            \tilde f_{c,\tilde c}(x, h, \tilde h) + b_c

    Each output field has its own attention, and both kinds act separately for each pair of poses. The maps say what is
    suppressed (the residual attention branch, Section 3.3).

    From trivial fields (lifting) there is no :math:`\tilde h`, and :math:`W_1, W_2` are shared by all poses h; to
    trivial fields there is no h. ``channel`` and ``spatial`` give the variants of the paper: :math:`\alpha` with both,
    :math:`\alpha_{CH}` and :math:`\alpha_{SP}` with one of them, and with neither the group convolution itself. The
    responses are computed in chunks that :class:`~escnn_attention.working_memory` bounds, and again in the backward
    pass.

    Args:
        in_type: the type of the input: regular fields only, or trivial fields only.
        out_type: the type of the output, likewise.
        kernel_size: the width of the kernel.
        channel: whether there is channel attention.
        spatial: whether there is spatial attention.
        ratio: by how much the hidden layer of channel attention is narrower than the input. It has ``fields // ratio``
            fields, and at least one. Only with channel attention.
        attention_size: the odd width of the kernel of spatial attention, which keeps the grid. Only with spatial
            attention.
        attention_dilation: of that kernel.
        stride, padding, dilation: of the convolution, as those of ``R2Conv``. A stride keeps the equivariance exact
            only where it reaches the last position of the padded grid: ``(n + 2 * padding - dilation * (kernel_size -
            1) - 1) % stride == 0``.
        padding_mode: ``"zeros"``, as of ``R2Conv``; or ``"circular"`` for tori, whose opposite sides are neighbours,
            for groups that map the lattice onto itself. Outputs are on a torus, too: ``2 * padding == dilation *
            (kernel_size - 1) - stride + 1``, and ``stride`` divides the sides. The layer then commutes exactly with the
            group and with all rolls by multiples of ``stride``.
        bias: whether each output field has a bias.
        residual: whether the responses are multiplied by :math:`1 - \alpha` or by :math:`\alpha`, as Eq. 19 prints it.
            Only with attention.
        basis: of the kernels: ``"complete"`` for all equivariant kernels, ``"bandlimited"`` for those of escnn's
            defaults, ``"auto"`` for the complete ones where the group maps the grid onto itself. There a complete
            kernel has one weight for each orbit of its entries: between regular fields :math:`\psi_{c,\tilde c}(x, p)`.

    Shape:
        ``(B, in_type.size, *space)`` to ``(B, out_type.size, *space)``, in two or three dimensions, with the sizes of a
        convolution.

    Raises:
        ValueError: as :class:`FeatureAttention`; a torus that outputs do not cover; on application, a grid smaller than
            the kernel, a torus whose sides the stride does not divide.

    Example:
        >>> import torch
        >>> from escnn_attention import AttentiveConv
        >>> from escnn import gspaces, nn
        >>> g = gspaces.rot2dOnR2(4)
        >>> image, fields = nn.FieldType(g, [g.trivial_repr]), nn.FieldType(g, 4 * [g.regular_repr])
        >>> lifting = AttentiveConv(image, fields, kernel_size=3, ratio=1)
        >>> layer = AttentiveConv(fields, fields, kernel_size=3)
        >>> layer(lifting(image(torch.randn(1, 1, 12, 12)))).shape
        torch.Size([1, 16, 8, 8])

    Source: Romero et al., "Attentive Group Equivariant Convolutional Networks", ICML 2020, Eqs. 16 to 19 and
    Section 3.3.
    """

    plain: PlainAttentiveConv

    resizes = True

    def __init__(
        self,
        in_type: FieldType,
        out_type: FieldType,
        kernel_size: int,
        *,
        channel: bool = True,
        spatial: bool = True,
        ratio: int = 2,
        attention_size: int = 7,
        attention_dilation: int = 1,
        stride: int = 1,
        padding: int = 0,
        dilation: int = 1,
        bias: bool = True,
        residual: bool = True,
        basis: BasisKind = "auto",
        padding_mode: ConvolutionPadding = "zeros",
    ):
        name = type(self).__name__
        check_same_gspace(check_type("in_type", in_type), check_type("out_type", out_type))
        space = in_type.gspace
        in_poses, out_poses = poses_of("in_type", in_type, name), poses_of("out_type", out_type, name)
        check_grid("in_type", space, name)
        check_int("kernel_size", kernel_size)
        check_bool("bias", bias)
        size, of_size = ("attention_size", attention_size), ("attention_dilation", attention_dilation)
        _check_attentions(channel, spatial, residual, ratio, size, of_size)
        if not (channel or spatial):
            check_unused("residual", residual, True, "there is no attention")
        for option, number, least in (("stride", stride, 1), ("padding", padding, 0), ("dilation", dilation, 1)):
            check_int(option, number, least=least)
        circular = check_padding_mode(fibers(space), space, padding_mode, ConvolutionPadding)
        beyond = dilation * (kernel_size - 1) - stride + 1
        if circular and beyond != 2 * padding:
            raise ValueError(
                f'padding: got {padding} with padding_mode="circular", needed half of dilation * (kernel_size - 1) - '
                f"stride + 1, here {beyond / 2:g}, a whole number, by which outputs cover the torus symmetrically"
            )
        ins, outs, hidden = len(in_type), len(out_type), max(1, len(in_type) // ratio)
        kernel = pose_kernel(space, outs, out_poses, ins, in_poses, kernel_size, basis=basis, gain=2.0)
        # The attention does not sum over the input poses, which the gain counts.
        gain = GAIN * in_poses
        layers: tuple[PoseKernel, PoseKernel] | None = None
        if channel:
            layers = (
                pose_kernel(space, outs * hidden, out_poses, ins, in_poses, None, gain=gain),
                pose_kernel(space, outs * ins, out_poses, hidden, in_poses, None, gain=gain),
            )
        attention = None
        if spatial:
            attention = pose_kernel(space, outs, out_poses, 2, in_poses, attention_size, basis=basis, gain=gain)
        plain = PlainAttentiveConv(
            kernel,
            layers,
            attention,
            bias=outs if bias else 0,
            geometry=Geometry(stride, padding, dilation, attention_dilation, circular),
            residual=residual,
        )
        super().__init__(in_type, out_type, plain)
        self.kernel_size = kernel_size
        self.ratio, self.padding_mode = ratio, padding_mode
        self.attention_size = attention_size

    def _output_space(self, space: Sequence[int]) -> Sequence[int]:
        stride, padding, dilation, _, circular = self.plain.geometry
        reach, shape = dilation * (self.kernel_size - 1), "×".join(map(str, space))
        if min(space) + 2 * padding <= reach:
            raise ValueError(
                f"input: a grid of {shape} with padding {padding} is smaller than the kernel, which covers {reach + 1} "
                "positions"
            )
        if circular and any(n % stride for n in space):
            raise ValueError(f"input: got a torus of {shape}, needed sides that the stride, {stride}, divides")
        return [(n + 2 * padding - reach - 1) // stride + 1 for n in space]

    def attention_maps(self, input: GeometricTensor) -> AttentionMaps:
        """The maps, between 0 and 1; with ``residual``, responses are suppressed where they are large.

        Returns:
            ``channel``, of shape ``(B, out_fields, out_poses, in_fields, in_poses)``, and ``spatial``, of shape
            ``(B, out_fields, out_poses, in_poses, *space)`` with the space of the output; each None where it is
            off. Trivial fields have one pose.
        """
        x = check_input(input, self.in_type, self)
        self.evaluate_output_shape(tuple(x.shape))
        return self.plain.attention_maps(x.tensor)

    def extra_repr(self) -> str:
        parts = [super().extra_repr(), f"kernel_size={self.kernel_size}", *_attentions(self, "attention_size")]
        parts += shown(padding_mode=(self.padding_mode, "zeros"), bias=(self.plain.bias is not None, True))
        return ", ".join(parts)


def _check_attentions(
    channel: bool, spatial: bool, residual: bool, ratio: int, size: tuple[str, int], dilation: tuple[str, int]
) -> None:
    """The options of both kinds of attention, none of which belongs to one that is off; ``size`` by its name."""
    for option, value in {"channel": channel, "spatial": spatial, "residual": residual}.items():
        check_bool(option, value)
    check_int("ratio", ratio)
    check_attention_size(*size)
    check_int(*dilation)
    if not channel:
        check_unused("ratio", ratio, 2, "there is no channel attention")
    if not spatial:
        check_unused(*size, 7, "there is no spatial attention")
        check_unused(*dilation, 1, "there is no spatial attention")
