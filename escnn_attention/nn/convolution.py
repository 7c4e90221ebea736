"""Convolutions as attention."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from escnn.nn import R2Conv, R3Conv
from torch import Tensor

from escnn_attention._checks import check_length, check_option
from escnn_attention.encodings.quadratic import QuadraticEncoding
from escnn_attention.geometry.grid import Grid
from escnn_attention.geometry.orbits import orbits_of
from escnn_attention.geometry.windows import Window
from escnn_attention.groups.fibers import Fibers, fibers
from escnn_attention.nn.arguments import check_regular
from escnn_attention.nn.self_attention import GroupSelfAttention
from escnn_attention.plain.projections import ProjectionKind

_MOST_SHARP = 1e6  # Far beyond what leaves anything to the other keys in any precision.


def attention_from_convolution(
    convolution: R2Conv | R3Conv,
    *,
    heads: Literal["all", "orbits"] = "all",
    sharpness: float = 40.0,
    projection: ProjectionKind = "group",
    backend: str = "auto",
) -> GroupSelfAttention:
    r"""Group self-attention that computes a given group convolution.

    The filters of a convolution between regular fields are those of one pose, W, transformed by each element:

    .. math:: \mathrm{out}(x, h) = \sum_{\Delta, p} W(\Delta, p)\, f(x + h\Delta, hp) .

    It becomes a layer with one head for each place :math:`\Delta` of the kernel and each pose p. Queries are constant
    and keys zero, so that the scores are those of a :class:`~escnn_attention.QuadraticEncoding` with the centre
    :math:`\Delta`:

    .. math:: s_h(x; x', \hat h) = -\alpha \|h^{-1}(x' - x) - \Delta\|^2 - \beta\, [h^{-1}\hat h \ne p] .

    For large :math:`\alpha` and :math:`\beta` the softmax leaves nothing to other keys than :math:`(x + h\Delta, hp)`.
    With the fields themselves as values the head returns :math:`f(x + h\Delta, hp)`, and the output projection holds W.

    The complete projections of this package need fewer heads, and no regular fields: as a kernel K between any fields
    has :math:`K(h\Delta) = \rho_{out}(h) K(\Delta) \rho_{in}(h)^{-1}`, one head, whose pose h looks at
    :math:`(x + h\Delta, h)`, does for all places of the orbit of :math:`\Delta`.

    It shows what attention can express and is no way to compute a convolution. The two agree to rounding error away
    from the border, where a convolution sees zeros and a head the next key. A circular convolution has no border.

    Args:
        convolution: over a group that maps the grid onto itself (a subgroup of D4, or of the full octahedral group in
            3D), with an odd width, stride 1, one group, any dilation, and padding that keeps the size, with zeros or
            circular. Its present kernel is copied, in its precision.
        heads: ``"all"``, one for each place and pose, :math:`k^d |H|`, for regular fields; or ``"orbits"``, one for
            each orbit of places under H, for fields of any type.
        sharpness: by how much the score of the key that a head looks at exceeds that of the next ones. They get
            :math:`e^{-\mathrm{sharpness}}` of it, and so does the gradient of the centres: with a smaller one heads
            can move when the layer is trained further.
        projection: of the layer. With all heads ``"pointwise"``, which mixes fields only, holds the convolution too;
            ``"group"`` has the complete weights, the others of them zero.
        backend: of the layer.

    Raises:
        ValueError: it is one that this does not hold for, ``sharpness`` is not positive or is beyond 1e6, or an
            unknown option.

    Example:
        >>> import torch
        >>> from escnn_attention import attention_from_convolution
        >>> from escnn import gspaces, nn
        >>> g = gspaces.rot2dOnR2(4)
        >>> fields = nn.FieldType(g, 2 * [g.regular_repr])
        >>> convolution = nn.R2Conv(fields, fields, kernel_size=3, padding=1)
        >>> layer = attention_from_convolution(convolution)
        >>> layer.num_heads, attention_from_convolution(convolution, heads="orbits").num_heads
        (36, 3)
        >>> x = fields(torch.randn(1, 8, 7, 7))
        >>> inside = (..., slice(1, -1), slice(1, -1))
        >>> torch.allclose(layer(x).tensor[inside], convolution(x).tensor[inside], atol=1e-5)
        True

    Source: GSA-Nets (Romero and Cordonnier 2021), Section 5.3; for ordinary convolutions Cordonnier, Loukas and Jaggi,
    "On the Relationship between Self-Attention and Convolutional Layers", ICLR 2020, Theorem 1.
    """
    group = _check(convolution)
    check_option("heads", heads, ("all", "orbits"))
    check_option("projection", projection, ("group", "pointwise"))
    if heads == "all" and group.order > 1:  # every field of the trivial group is as good as regular
        for name in ("in_type", "out_type"):
            check_regular(f"convolution.{name}", getattr(convolution, name), 'heads="all"')
    if heads == "orbits" and projection != "group":
        raise ValueError(f'projection: got {projection!r}, but heads="orbits" needs the complete ones, "group"')
    sharpness = check_length("sharpness", sharpness, "number", _MOST_SHARP)

    width = convolution.kernel_size
    kernel, bias = _parameters(convolution)
    kernel = kernel.flatten(2)
    places = Grid((1,) * group.dimension, Window(width)).offsets  # in the order of the kernel
    if heads == "all":
        identity = group.index(convolution.in_type.fibergroup.identity)
        # Of the output pose e; to output fields, from input fields, poses and places.
        kernel = kernel.unflatten(0, (-1, group.order))[:, identity].unflatten(1, (-1, group.order))
        weights = kernel.permute(3, 2, 1, 0).flatten(0, 1)
        reads = torch.eye(weights.shape[1]).to(weights)
        if projection == "group":
            # The complete projections read, and write, a vector of all channels in the frame of each pose.
            frame = torch.eye(group.order).to(weights)[identity]
            reads, weights = ((t.unsqueeze(-1) * frame).flatten(-2) for t in (reads, weights))
        places = places.repeat_interleave(group.order, dim=0)
    else:
        first, stabiliser = orbits_of(places, group.action)
        weights = (kernel[..., first] / stabiliser.to(kernel)).permute(2, 1, 0)
        reads = torch.eye(weights.shape[1]).to(weights)
        places = places[first]

    layer = GroupSelfAttention(
        convolution.in_type,
        convolution.out_type,
        num_heads=len(places),
        kernel_size=width,
        head_fields=max(len(reads), group.dimension + 1),
        keys="all" if heads == "all" else "own",
        encoding=QuadraticEncoding(sharpness=sharpness * max(width // 2, 1) ** 2),
        dilation=convolution.dilation,
        padding_mode="circular" if convolution.padding_mode == "circular" else "none",
        projection=projection,
        backend=backend,
    ).to(device=kernel.device, dtype=kernel.dtype)
    _look_at(layer, places, sharpness)
    _project(layer, reads, weights, bias)
    return layer


def _check(convolution: Any) -> Fibers:
    """The fiber group of a convolution that is an attention."""
    if not isinstance(convolution, (R2Conv, R3Conv)):
        raise TypeError(f"convolution: got {type(convolution).__name__}, needed an R2Conv or R3Conv")
    group = fibers(convolution.in_type.gspace)
    if not group.preserves_square:
        raise ValueError(
            f"convolution: the fiber group of {convolution.in_type.gspace.name} does not map the grid onto itself, so "
            "that a head would have to look between its points; needed a subgroup of D4, or of the full octahedral "
            "group in 3D"
        )
    width = convolution.kernel_size
    if width % 2 == 0:
        raise ValueError(f"convolution: its kernel_size is {width}, needed an odd number")
    for name, needed in ("stride", 1), ("groups", 1), ("padding", convolution.dilation * (width // 2)):
        value = getattr(convolution, name)
        if any(v != needed for v in (value if isinstance(value, tuple) else (value,))):
            raise ValueError(f"convolution: its {name} is {value}, needed {needed}")
    if convolution.padding_mode not in ("zeros", "circular"):
        raise ValueError(
            f"convolution: its padding_mode is {convolution.padding_mode!r}, needed 'zeros' or 'circular': attention "
            "sees nothing outside the grid, or is on a torus"
        )
    return group


@torch.no_grad()
def _parameters(convolution: R2Conv | R3Conv) -> tuple[Tensor, Tensor | None]:
    """The filter and the bias that a convolution uses in its present mode."""
    if convolution.training:
        return convolution.expand_parameters()
    return convolution.filter, convolution.expanded_bias


@torch.no_grad()
def _look_at(layer: GroupSelfAttention, places: Tensor, sharpness: float) -> None:
    """Point each head at its place and, in turn, at the poses."""
    encoding = layer.plain.encoding
    assert isinstance(encoding, QuadraticEncoding)
    assert encoding.centre is not None
    encoding.centre.copy_(places)
    if encoding.pose_embedding is not None:
        num_poses = encoding.num_poses
        others = 1 - torch.eye(num_poses).repeat(len(places) // num_poses, 1)
        encoding.pose_embedding.zero_()
        encoding.pose_embedding[..., 0] = -sharpness * math.sqrt(layer.head_fields) * others


@torch.no_grad()
def _project(layer: GroupSelfAttention, reads: Tensor, weights: Tensor, bias: Tensor | None) -> None:
    """Constant queries and no keys; values and output by these weights, ``(c, in)`` and ``(heads, c, out)``."""
    project_in, project_out = layer.plain.project_in, layer.plain.project_out
    assert project_in.bias is not None
    channels = (layer.num_heads, layer.head_fields)
    project_in.weight.zero_()
    project_in.weight.unflatten(0, (3, *channels))[1, :, : len(reads)] = reads
    project_in.bias.zero_()
    project_in.bias.unflatten(0, (2, *channels))[0, :, 0] = 1.0
    project_out.weight.zero_()
    held = project_out.weight.T if project_out.kind == "pointwise" else project_out.weight
    held.unflatten(0, channels)[:, : len(reads)] = weights
    if project_out.bias is not None and bias is not None:
        # Both write a bias in the same space of invariant vectors, each in a basis of its own.
        basis = project_out.invariants.double()
        project_out.bias.copy_(torch.linalg.lstsq(basis, bias.to(basis).unsqueeze(1)).solution.squeeze(1))
