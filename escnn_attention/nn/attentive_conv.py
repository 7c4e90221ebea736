"""Attentive group convolutions."""

from __future__ import annotations

from escnn.nn import FieldType, GeometricTensor

from escnn_attention._checks import check_bool, check_int, check_unused
from escnn_attention.nn.arguments import check_input, check_same_gspace, check_shape, check_type
from escnn_attention.nn.feature_attention import GAIN, AttentionMaps, check_attention_size
from escnn_attention.nn.kernels import BasisKind, check_grid, pose_kernel, poses_of
from escnn_attention.nn.module import PlainModule
from escnn_attention.plain.attentive_conv import AttentiveConv as PlainAttentiveConv
from escnn_attention.plain.kernels import PoseKernel

__all__ = ["AttentiveConv"]


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

    Each output field has attention of its own, and both kinds act for each pair of poses by itself. The maps are what
    is suppressed (the residual attention branch, Section 3.3).

    From trivial fields (lifting) there is no :math:`\tilde h`, and :math:`W_1, W_2` are shared by all poses h; to
    trivial fields there is no h. ``channel`` and ``spatial`` give the variants of the paper: :math:`\alpha` with both,
    :math:`\alpha_{CH}` and :math:`\alpha_{SP}` with one of them. With neither it is the group convolution itself, in
    float64 equivariant to rounding error, where escnn's is to the single precision of its bases.

    The responses, :math:`|H|^2` for each pair of fields, are never stored: the forward pass makes those of one
    input pose and a few images at a time, and the backward pass makes them again.
    :class:`~escnn_attention.working_memory` bounds how many there are at once.

    Args:
        in_type: the type of the input: regular fields only, or trivial fields only.
        out_type: the type of the output, likewise.
        kernel_size: the width of the kernel.
        channel: whether there is channel attention.
        spatial: whether there is spatial attention.
        ratio: by how much the hidden layer of channel attention is narrower than the input. It has ``fields // ratio``
            fields, and at least one. Only with channel attention.
        attention_size: the odd width of the kernel of spatial attention, which is padded with zeros. Only with spatial
            attention.
        attention_dilation: of that kernel.
        stride, padding, dilation: of the convolution, as those of ``R2Conv``. A stride keeps the equivariance exact
            only where it reaches the last position of the padded grid: ``(n + 2 * padding - dilation * (kernel_size -
            1) - 1) % stride == 0``.
        bias: whether each output field has a bias.
        residual: whether the responses are multiplied by :math:`1 - \alpha` or by :math:`\alpha`, as Eq. 19 prints it.
            Only with attention.
        basis: of the kernels: ``"complete"`` for all equivariant kernels, ``"bandlimited"`` for those of escnn's
            defaults, ``"auto"`` for the complete ones where the group maps the grid onto itself. There a complete
            kernel has one weight for each orbit of its entries: between regular fields
            :math:`\psi_{c,\tilde c}(x, p)`.

    Shape:
        ``(B, in_type.size, *space)`` to ``(B, out_type.size, *space)``, in two or three dimensions, with the sizes of a
        convolution.

    Raises:
        TypeError: an argument is of another type; on application, a tensor of another precision than the parameters,
            where autocast does not choose it.
        ValueError: another gspace, fields that are neither all regular nor all trivial, no grid, an even
            ``attention_size``, an unknown option, an option of an attention that is off; on application, a grid
            smaller than the kernel.
        NotImplementedError: the fiber group is continuous.

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
    ):
        name = type(self).__name__
        check_same_gspace(check_type("in_type", in_type), check_type("out_type", out_type))
        space = in_type.gspace
        in_poses, out_poses = poses_of("in_type", in_type, name), poses_of("out_type", out_type, name)
        check_grid("in_type", space, name)
        check_int("kernel_size", kernel_size)
        for option, value in {"channel": channel, "spatial": spatial, "bias": bias, "residual": residual}.items():
            check_bool(option, value)
        check_int("ratio", ratio)
        check_attention_size("attention_size", attention_size)
        check_int("attention_dilation", attention_dilation)
        _check_unused_options(channel, spatial, ratio, attention_size, attention_dilation, residual)
        for option, number, least in (("stride", stride, 1), ("padding", padding, 0), ("dilation", dilation, 1)):
            check_int(option, number, least=least)
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
            stride=stride,
            padding=padding,
            dilation=dilation,
            attention_dilation=attention_dilation,
            residual=residual,
        )
        super().__init__(in_type, out_type, plain)
        self.kernel_size = kernel_size
        self.ratio = ratio
        self.attention_size = attention_size

    def forward(self, input: GeometricTensor) -> GeometricTensor:
        x = check_input(input, self.in_type, self)
        self.evaluate_output_shape(tuple(x.shape))
        return super().forward(x)

    def evaluate_output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the output for an input of this shape."""
        batch, _, *space = check_shape(input_shape, self.in_type, type(self).__name__)
        plain, reach = self.plain, self.plain.dilation * (self.kernel_size - 1)
        if min(space) + 2 * plain.padding <= reach:
            raise ValueError(
                f"input: a grid of {'×'.join(map(str, space))} with padding {plain.padding} is smaller than the "
                f"kernel, which covers {reach + 1} positions"
            )
        return (batch, self.out_type.size, *((n + 2 * plain.padding - reach - 1) // plain.stride + 1 for n in space))

    def attention_maps(self, input: GeometricTensor) -> AttentionMaps:
        """The maps, between 0 and 1: with ``residual`` what is suppressed is where they are large.

        Args:
            input: features of type ``in_type``.

        Returns:
            ``channel``, of shape ``(B, out_fields, out_poses, in_fields, in_poses)``, and ``spatial``, of shape
            ``(B, out_fields, out_poses, in_poses, *space)`` with the space of the output; each None where it is
            off. Trivial fields have one pose.

        Raises:
            TypeError, ValueError: as ``forward``.
        """
        x = check_input(input, self.in_type, self)
        self.evaluate_output_shape(tuple(x.shape))
        return self.plain.attention_maps(x.tensor)

    def extra_repr(self) -> str:
        plain = self.plain
        parts = [super().extra_repr(), f"kernel_size={self.kernel_size}"]
        parts.append(f"ratio={self.ratio}" if plain.squeeze is not None else "channel=False")
        parts.append(f"attention_size={self.attention_size}" if plain.spatial is not None else "spatial=False")
        defaults = {"stride": 1, "padding": 0, "dilation": 1, "attention_dilation": 1, "residual": True}
        parts += [f"{n}={getattr(plain, n)}" for n, default in defaults.items() if getattr(plain, n) != default]
        if plain.bias is None:
            parts.append("bias=False")
        return ", ".join(parts)


def _check_unused_options(
    channel: bool, spatial: bool, ratio: int, attention_size: int, attention_dilation: int, residual: bool
) -> None:
    """No option is set of an attention that is not there."""
    if not channel:
        check_unused("ratio", ratio, 2, "there is no channel attention")
    if not spatial:
        check_unused("attention_size", attention_size, 7, "there is no spatial attention")
        check_unused("attention_dilation", attention_dilation, 1, "there is no spatial attention")
    if not (channel or spatial):
        check_unused("residual", residual, True, "there is no attention")
