"""Group convolutions with any of the attentions, and residual and dense blocks of them."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch
from escnn.gspaces import GSpace
from escnn.nn import (
    EquivariantModule,
    FieldType,
    GeometricTensor,
    IdentityModule,
    InnerBatchNorm,
    PointwiseDropout,
    ReLU,
    SequentialModule,
    tensor_directsum,
)

from escnn_attention._checks import check_bool, check_int, check_probability, check_unused
from escnn_attention.exporting.modules import exported_parts
from escnn_attention.groups.fibers import fibers
from escnn_attention.nn.arguments import (
    ConvolutionPadding,
    PaddingMode,
    check_regular,
    check_same_gspace,
    check_type,
    shown,
)
from escnn_attention.nn.attentive import AttentiveConv, FeatureAttention, PoseAttention, check_attention_size
from escnn_attention.nn.kernels import check_finite, check_grid
from escnn_attention.nn.module import GridModule, check_input
from escnn_attention.nn.resample import Crop, HalvingPool
from escnn_attention.plain.attentive import AttentiveConv as PlainAttentiveConv
from escnn_attention.plain.attentive import FeatureAttention as PlainFeatureAttention
from escnn_attention.plain.attentive import PoseAttention as PlainPoseAttention
from escnn_attention.plain.attentive import PoseKernel
from escnn_attention.plain.blocks import DenseBlock as PlainDenseBlock
from escnn_attention.plain.blocks import ResidualBlock as PlainResidualBlock

Attention = Literal["full", "channel", "spatial", "features", "poses"]
"""The kind of attention of a convolution, see :class:`GroupCNN`."""

EPS = 2e-5
"""The epsilon of the batch norms in all published networks."""


_CHANNEL = ("full", "channel", "features")
_SPATIAL = ("full", "spatial", "features")
# The options of attention, and the kinds that have them.
_KINDS = {
    "ratio": _CHANNEL,
    "hidden": _CHANNEL,
    "attention_size": _SPATIAL,
    "attention_dilation": _SPATIAL,
    "image_dilation": _SPATIAL,
}


def check_attention(attention: Attention | None, **options: tuple[Any, Any]) -> None:
    """Check that ``attention`` is one of the kinds, or None, and has the options, by name their values and defaults."""
    kinds = get_args(Attention)
    if attention is not None and attention not in kinds:
        raise ValueError(f"attention: got {attention!r}, needed None or one of {', '.join(map(repr, kinds))}")
    for name, (value, default) in options.items():
        if value is not None:
            check_attention_size(name, value) if name == "attention_size" else check_int(name, value)
        if attention not in _KINDS[name]:
            part = "channel" if _KINDS[name] is _CHANNEL else "spatial"
            check_unused(name, value, default, f"attention={attention!r} has no {part} attention")


def options_of(attention: Attention | None, **options: Any) -> dict[str, Any]:
    """The options that a kind of attention has, of those given."""
    return {name: value for name, value in options.items() if attention in _KINDS[name]}


def check_odd_widths(**widths: int) -> None:
    """Check that widths of kernels, by the names of their arguments, are odd integers."""
    for name, width in widths.items():
        if check_int(name, width) % 2 == 0:
            raise ValueError(f"{name}: got {width}, needed an odd width, which keeps the grid")


def image_type(gspace: GSpace, in_channels: int) -> FieldType:
    """The type of images: a trivial field for each channel."""
    if not isinstance(gspace, GSpace):
        raise TypeError(
            f"gspace: got {type(gspace).__name__}, needed a gspace of escnn, for example gspaces.rot2dOnR2(4)"
        )
    check_grid("gspace", gspace, "the network")
    check_finite("gspace", gspace, "the network")
    return FieldType(gspace, check_int("in_channels", in_channels) * [gspace.trivial_repr])


def regular_type(gspace: GSpace, number: int) -> FieldType:
    """The type of so many regular fields."""
    return FieldType(gspace, number * [gspace.regular_repr])


def field_type_of(name: str, value: int | Mapping[str, int] | FieldType, gspace: GSpace) -> FieldType:
    """A type over a gspace, given as such, as a number of scalars, or by numbers of scalars and vectors."""
    if isinstance(value, FieldType):
        if value.gspace != gspace:
            raise ValueError(f"{name}: its gspace is {value.gspace.name}, needed {gspace.name}")
        return value
    if not isinstance(value, Mapping):
        return FieldType(gspace, check_int(name, value) * [gspace.trivial_repr])
    fields = {"scalar": gspace.trivial_repr, "vector": gspace.basespace_action}
    if not value or not value.keys() <= fields.keys():
        raise ValueError(f'{name}: got {dict(value)!r}, needed numbers of "scalar", of "vector" or of both')
    counts = {kind: check_int(f"{name}[{kind!r}]", count) for kind, count in value.items()}
    return FieldType(gspace, [field for kind, count in counts.items() for field in count * [fields[kind]]])


def attended(
    in_type: FieldType,
    out_type: FieldType,
    kernel_size: int,
    attention: Attention | None,
    *,
    padding: int = 0,
    ratio: int = 1,
    hidden: int | None = None,
    attention_size: int = 7,
    attention_dilation: int = 1,
    padding_mode: ConvolutionPadding = "zeros",
) -> OrderedDict[str, EquivariantModule]:
    r"""A group convolution without bias, with attention to its input or its responses.

    The convolution is always an :class:`AttentiveConv`, which without attention is the plain group convolution: its
    kernels are complete at every size, in the parameters :math:`\psi(x, p)` of the papers, and equivariant to rounding
    error in every precision, where those of ``R2Conv`` are band-limited and in float32. Arguments are those of
    :class:`AttentiveConv`; ``attention_size`` and ``attention_dilation`` are of the kernels of spatial attention, and
    ``hidden``, the number of hidden fields of channel attention, takes the place of ``ratio``.

    Returns:
        the modules by name: ``"convolution"``, and ``"attention"`` in front of it where it attends to its input.
    """
    ratio = ratio if hidden is None else max(1, len(in_type) // hidden)
    modules: OrderedDict[str, EquivariantModule] = OrderedDict()
    options: dict[str, Any] = {
        "channel": attention in ("full", "channel"),
        "spatial": attention in ("full", "spatial"),
    }
    if options["channel"]:
        options["ratio"] = ratio
    if options["spatial"]:
        options |= {"attention_size": attention_size, "attention_dilation": attention_dilation}
    if attention == "features":
        modules["attention"] = FeatureAttention(
            in_type, ratio=ratio, kernel_size=attention_size, dilation=attention_dilation, padding_mode=padding_mode
        )
    elif attention == "poses":
        modules["attention"] = PoseAttention(in_type)
    options |= {"padding": padding, "padding_mode": padding_mode}
    modules["convolution"] = AttentiveConv(in_type, out_type, kernel_size, bias=False, **options)
    return modules


class BatchNorm(InnerBatchNorm):
    """escnn's batch norm with one statistic per field, also for an empty batch, in which escnn cannot count fields.

    Its slices are numbers of Python: those that escnn reads from tensors break graphs of ``torch.compile``.
    """

    def __init__(self, in_type: FieldType, **options: Any):
        super().__init__(in_type, **options)
        self._slices = {n: self._buffers[f"indices_{n}"].tolist() for n, alone in self._contiguous.items() if alone}

    def forward(self, input: GeometricTensor) -> GeometricTensor:
        assert input.type == self.in_type
        x, several = input.tensor, len(self._contiguous) > 1
        y = torch.empty_like(x) if several else x
        for n in self._contiguous:
            channels = slice(*self._slices[n]) if n in self._slices else self._buffers[f"indices_{n}"]
            of_fields = self._modules[f"batch_norm_[{n}]"](x[:, channels].unflatten(1, (-1, n))).flatten(1, 2)
            if several:
                y[:, channels] = of_fields
            else:
                y = of_fields
        return GeometricTensor(y, self.out_type, input.coords)


def norm_and_relu(in_type: FieldType) -> OrderedDict[str, EquivariantModule]:
    """Batch norm, with one statistic per field, and ReLU."""
    return OrderedDict(norm=BatchNorm(in_type, eps=EPS), relu=ReLU(in_type, inplace=True))


def drop(in_type: FieldType, probability: float, name: str = "dropout") -> OrderedDict[str, EquivariantModule]:
    """Dropout of single entries, or nothing where the probability is 0."""
    if check_probability(name, probability):
        return OrderedDict({name: PointwiseDropout(in_type, probability)})
    return OrderedDict()


def sequence(*parts: Mapping[str, EquivariantModule]) -> SequentialModule:
    """The modules of all parts, one after the other. A repeated name gets a number."""
    modules: OrderedDict[str, EquivariantModule] = OrderedDict()
    for part in parts:
        for name, module in part.items():
            number, key = 1, name
            while key in modules:
                number += 1
                key = f"{name}_{number}"
            modules[key] = module
    return SequentialModule(modules)


def width_for(gspace: GSpace, width: int | None, planar: int) -> int:
    """``width``; by default ``planar``, that of the network without a group, over the square root of the group's order.

    A convolution then has about as many parameters for every group.
    """
    if width is None:
        return max(1, round(planar / math.sqrt(fibers(gspace).order)))
    return check_int("width", width)


@torch.no_grad()
def draw_as_published(network: torch.nn.Module, gain: float) -> None:
    r"""Draw the weights of all convolutions and attentions from the distributions of the published implementation.

    Kernels are uniform within :math:`\pm \mathrm{gain} / \sqrt{C k^d}`, with C fields of the input (2 for spatial
    attention) and :math:`k^d` entries; a band-limited one is normal, with the same variance. The layers of channel
    attention are uniform within :math:`\pm 1 / \sqrt n`, n the product of their dimensions behind the first. Published
    layers also multiply responses by a constant, :math:`2\pi / |H|` for rotations, which the batch norms undo.
    """
    for module in network.modules():
        if isinstance(module, PlainAttentiveConv):
            _draw(module.kernel, gain / math.sqrt(_fields(module.kernel) * _places(module.kernel)))
            if module.squeeze is not None and module.excite is not None:
                # One network for each output field: the hidden fields are a dimension behind the first.
                size = _fields(module.squeeze) * _fields(module.excite) * module.squeeze.weight.shape[2]
                _draw(module.squeeze, 1 / math.sqrt(size))
                _draw(module.excite, 1 / math.sqrt(size))
            if module.spatial is not None:
                _draw(module.spatial, gain / math.sqrt(2 * _places(module.spatial)))
        elif isinstance(module, PlainFeatureAttention):
            for layer in (module.squeeze, module.excite):
                if layer is not None:
                    _draw(layer, 1 / math.sqrt(layer.weight[0].numel()))
            if module.spatial is not None:
                _draw(module.spatial, gain / math.sqrt(_fields(module.spatial) * _places(module.spatial)))
        elif isinstance(module, PlainPoseAttention):
            _draw(module.weight, gain / math.sqrt(_fields(module.weight)))


def _fields(kernel: PoseKernel) -> int:
    return kernel.weight.shape[1]


def _places(kernel: PoseKernel) -> int:
    return kernel.orbits[0, 0].numel()


def _draw(kernel: PoseKernel, bound: float) -> None:
    if kernel.basis is None:
        kernel.weight.uniform_(-bound, bound)
    else:
        energy = kernel.basis.square().sum(0)[kernel.orbits].mean()
        kernel.weight.normal_(std=bound / math.sqrt(3 * energy.item()))


class ResidualBlock(GridModule):
    r"""Two group convolutions with a shortcut, with activations before the convolutions.

    .. math::
        \mathrm{out} = \mathrm{shortcut}(f)
            + [\mathrm{BN}([\mathrm{BN}(f)]^+ \star_G \psi_1)]^+ \star_G \psi_2

    The shortcut is the identity; where the block halves the grid or changes the type it is a 1×1 group convolution of
    f. Halving is exact: the convolutions have no stride, and a maximum over 2×2 positions is taken behind the first and
    behind the shortcut (:class:`HalvingPool`).

    Args:
        in_type: the type of the input: regular fields.
        out_type: the type of the output, likewise.
        kernel_size: the odd width of the kernels, padded such that they keep the grid.
        halve: whether the grid is halved.
        attention: where all the convolutions attend, that of the shortcut included; see :class:`GroupCNN`.
        hidden: the number of hidden fields of channel attention, rounded to an integer ratio. Only with channel
            attention.
        attention_size: the odd width of the kernels of spatial attention. Only with that.
        padding_mode: as of :class:`AttentiveConv`; tori that are halved have even sides.

    Shape:
        ``(B, in_type.size, *space)`` to ``(B, out_type.size, *space)``, or to half the space.

    Raises:
        ValueError: fields that are not regular, an even ``kernel_size``, an option that the attention does not have.

    Example:
        >>> import torch
        >>> from escnn_attention.models import ResidualBlock
        >>> from escnn import gspaces, nn
        >>> g = gspaces.rot2dOnR2(4)
        >>> narrow, wide = nn.FieldType(g, 2 * [g.regular_repr]), nn.FieldType(g, 4 * [g.regular_repr])
        >>> ResidualBlock(narrow, wide, halve=True)(narrow(torch.randn(1, 8, 10, 10))).shape
        torch.Size([1, 16, 5, 5])

    Source: He et al., "Identity Mappings in Deep Residual Networks", 2016, as in Cohen and Welling, "Group Equivariant
    Convolutional Networks", ICML 2016; the exact halving is Appendix C of Romero et al., ICML 2020.
    """

    def __init__(
        self,
        in_type: FieldType,
        out_type: FieldType,
        kernel_size: int = 3,
        *,
        halve: bool = False,
        attention: Attention | None = None,
        hidden: int = 2,
        attention_size: int = 7,
        padding_mode: ConvolutionPadding = "zeros",
    ):
        check_regular("in_type", check_type("in_type", in_type), "a residual block")
        check_regular("out_type", check_type("out_type", out_type), "a residual block")
        check_same_gspace(in_type, out_type)
        check_odd_widths(kernel_size=kernel_size)
        check_bool("halve", halve)
        check_attention(attention, hidden=(hidden, 2), attention_size=(attention_size, 7))
        super().__init__(in_type, out_type)

        def convolution(fields: FieldType, size: int) -> dict[str, EquivariantModule]:
            sizes: dict[str, Any] = {"padding": size // 2, "hidden": hidden, "attention_size": attention_size}
            return attended(fields, out_type, size, attention, **sizes, padding_mode=padding_mode)

        def pool() -> dict[str, EquivariantModule]:
            mode: PaddingMode = "circular" if padding_mode == "circular" else "none"
            return {"pool": HalvingPool(out_type, padding_mode=mode)} if halve else {}

        self.branch = sequence(
            norm_and_relu(in_type),
            convolution(in_type, kernel_size),
            pool(),
            norm_and_relu(out_type),
            convolution(out_type, kernel_size),
        )
        self.shortcut: EquivariantModule = IdentityModule(in_type)
        if halve or in_type != out_type:
            self.shortcut = sequence(convolution(in_type, 1), pool())
        self.halve, self.padding_mode = halve, padding_mode

    def forward(self, input: GeometricTensor) -> GeometricTensor:
        x = check_input(input, self.in_type, self)
        self.evaluate_output_shape(tuple(x.shape))
        return self.shortcut(x) + self.branch(x)

    def evaluate_output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self.branch.evaluate_output_shape(input_shape))

    def export(self) -> torch.nn.Module:
        return exported_parts(self, PlainResidualBlock)

    def extra_repr(self) -> str:
        parts = shown(halve=(self.halve, False), padding_mode=(self.padding_mode, "zeros"))
        return ", ".join([super().extra_repr(), *parts])


class DenseBlock(GridModule):
    r"""A group convolution whose output is concatenated with its input.

    .. math::
        \mathrm{out} = \big( [\mathrm{BN}(f)]^+ \star_G \psi,\; \mathrm{crop}(f) \big)

    The convolution has no padding, and f is cropped to the size that it leaves.

    Args:
        in_type: the type of the input: regular fields.
        growth: the number of regular fields that the block adds.
        kernel_size: the odd width of the kernel.
        attention, hidden, attention_size: as of :class:`ResidualBlock`, with an ``attention_dilation``.

    Shape:
        ``(B, in_type.size, *space)`` to ``(B, in_type.size + growth * |H|, *(n - kernel_size + 1 for n in space))``.

    Raises:
        ValueError: as :class:`ResidualBlock`; on application, a grid that is too small.

    Example:
        >>> import torch
        >>> from escnn_attention.models import DenseBlock
        >>> from escnn import gspaces, nn
        >>> g = gspaces.rot2dOnR2(4)
        >>> fields = nn.FieldType(g, 2 * [g.regular_repr])
        >>> DenseBlock(fields, growth=3)(fields(torch.randn(1, 8, 9, 9))).shape
        torch.Size([1, 20, 7, 7])

    Source: Huang et al., "Densely Connected Convolutional Networks", CVPR 2017, as in Veeling et al., "Rotation
    Equivariant CNNs for Digital Pathology", MICCAI 2018.
    """

    def __init__(
        self,
        in_type: FieldType,
        growth: int,
        kernel_size: int = 3,
        *,
        attention: Attention | None = None,
        hidden: int = 2,
        attention_size: int = 7,
        attention_dilation: int = 1,
    ):
        check_regular("in_type", check_type("in_type", in_type), "a dense block")
        if check_int("kernel_size", kernel_size) % 2 == 0:
            raise ValueError(f"kernel_size: got {kernel_size}, needed an odd width, whose margin can be cropped")
        check_attention(
            attention,
            hidden=(hidden, 2),
            attention_size=(attention_size, 7),
            attention_dilation=(attention_dilation, 1),
        )
        new = regular_type(in_type.gspace, check_int("growth", growth))
        super().__init__(in_type, new + in_type)
        options: dict[str, Any] = {"attention_size": attention_size, "attention_dilation": attention_dilation}
        convolution = attended(in_type, new, kernel_size, attention, hidden=hidden, **options)
        self.branch = sequence(norm_and_relu(in_type), convolution)
        self.crop = Crop(in_type, kernel_size // 2)

    def forward(self, input: GeometricTensor) -> GeometricTensor:
        x = check_input(input, self.in_type, self)
        return tensor_directsum([self.branch(x), self.crop(x)])

    def evaluate_output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        batch, _, *space = self.crop.evaluate_output_shape(input_shape)
        return (batch, self.out_type.size, *space)

    def export(self) -> torch.nn.Module:
        return exported_parts(self, PlainDenseBlock)
