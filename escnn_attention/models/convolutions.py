"""Group convolutions with any of the attentions, as the convolutional networks use them."""

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
    InnerBatchNorm,
    PointwiseDropout,
    ReLU,
    SequentialModule,
)

from escnn_attention._checks import check_int, check_probability, check_unused
from escnn_attention.groups.fibers import fibers
from escnn_attention.nn.attentive import AttentiveConv, FeatureAttention, PoseAttention, check_attention_size
from escnn_attention.nn.kernels import check_finite, check_grid
from escnn_attention.plain.attentive import AttentiveConv as PlainAttentiveConv
from escnn_attention.plain.attentive import FeatureAttention as PlainFeatureAttention
from escnn_attention.plain.attentive import PoseAttention as PlainPoseAttention
from escnn_attention.plain.attentive import PoseKernel

__all__ = [
    "EPS",
    "Attention",
    "BatchNorm",
    "attended",
    "check_attention",
    "draw_as_published",
    "drop",
    "image_type",
    "norm_and_relu",
    "options_of",
    "sequence",
    "width_for",
]

Attention = Literal["full", "channel", "spatial", "features", "poses"]
"""Where a convolution attends, see :class:`GroupCNN`."""

EPS = 2e-5
"""Of the batch norms, in all published networks."""


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
    """``attention`` is one of the kinds, or None, and has the options that were given.

    Args:
        attention: the kind.
        options: of attention, by name: the value and the default. What the kind does not have must be left alone.
    """
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


def image_type(gspace: GSpace, in_channels: int) -> FieldType:
    """The type of images: a trivial field for each channel."""
    if not isinstance(gspace, GSpace):
        raise TypeError(
            f"gspace: got {type(gspace).__name__}, needed a gspace of escnn, for example gspaces.rot2dOnR2(4)"
        )
    check_grid("gspace", gspace, "the network")
    check_finite("gspace", gspace, "the network")
    return FieldType(gspace, check_int("in_channels", in_channels) * [gspace.trivial_repr])


def attended(
    in_type: FieldType,
    out_type: FieldType,
    kernel_size: int,
    attention: Attention | None,
    *,
    padding: int = 0,
    ratio: int = 1,
    attention_size: int = 7,
    attention_dilation: int = 1,
) -> OrderedDict[str, EquivariantModule]:
    r"""A group convolution without bias, and what attends to its input or to its responses.

    The convolution is always an :class:`AttentiveConv`, which without attention is the plain group convolution: its
    kernels are complete at every size, in the parameters :math:`\psi(x, p)` of the papers, and equivariant to rounding
    error in every precision, where those of ``R2Conv`` are band-limited and in float32.

    Args:
        in_type, out_type, kernel_size, padding: of the convolution.
        attention: where to attend; None for nowhere.
        ratio: by how much the hidden layers of channel attention are narrower than the input, where there is any.
        attention_size, attention_dilation: of the kernels of spatial attention, where there is any.

    Returns:
        the modules by name: ``"convolution"``, and ``"attention"`` in front of it where it attends to its input.
    """
    check_attention(attention)
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
            in_type, ratio=ratio, kernel_size=attention_size, dilation=attention_dilation
        )
    elif attention == "poses":
        modules["attention"] = PoseAttention(in_type)
    modules["convolution"] = AttentiveConv(in_type, out_type, kernel_size, padding=padding, bias=False, **options)
    return modules


class BatchNorm(InnerBatchNorm):
    """escnn's batch norm with one statistic a field, also for no images, whose fields escnn cannot count."""

    def forward(self, input: GeometricTensor) -> GeometricTensor:
        x = input.tensor
        if len(x):
            return super().forward(input)
        # Where nothing is, the order of the channels is all the same.
        norms = {size: getattr(self, f"batch_norm_[{size}]") for size in self._contiguous}
        parts = [norm(x[:, : n * norm.num_features].unflatten(1, (-1, n))).flatten(1, 2) for n, norm in norms.items()]
        return GeometricTensor(torch.cat(parts, dim=1), self.out_type)


def norm_and_relu(in_type: FieldType) -> OrderedDict[str, EquivariantModule]:
    """Batch norm, with one statistic a field, and ReLU."""
    return OrderedDict(norm=BatchNorm(in_type, eps=EPS), relu=ReLU(in_type, inplace=True))


def drop(in_type: FieldType, probability: float, name: str = "dropout") -> OrderedDict[str, EquivariantModule]:
    """Dropout of single entries, or nothing where the probability is 0."""
    if check_probability(name, probability):
        return OrderedDict({name: PointwiseDropout(in_type, probability)})
    return OrderedDict()


def sequence(*parts: Mapping[str, EquivariantModule]) -> SequentialModule:
    """The modules of all parts, one after the other. A name that comes again gets a number."""
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

    Kernels, those of spatial attention included, are uniform within :math:`\pm \mathrm{gain} / \sqrt{C k^d}`, with C
    fields of the input (2 for spatial attention) and :math:`k^d` entries: the poses do not count. The layers of channel
    attention are uniform within :math:`\pm 1 / \sqrt n`, where n is the product of their dimensions behind the first.
    A band-limited kernel is normal, with the same variance of its entries.

    The published layers also multiply their responses by a constant, :math:`2\pi / |H|` for rotations, which the batch
    norms undo and which is left out here.
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
