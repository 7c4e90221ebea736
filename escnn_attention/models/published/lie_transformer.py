"""The networks of the published code of the LieTransformer."""

from __future__ import annotations

import math
import warnings
from typing import Any, Literal

import torch
import torch.nn.functional as F
from escnn import gspaces
from escnn.gspaces import GSpace
from torch import Tensor

from escnn_attention._checks import check_int, check_length, check_option, check_unused
from escnn_attention.encodings import PairKernel
from escnn_attention.functional.call import Normalization
from escnn_attention.geometry.relations import LiftedMotion, Offset, Pair
from escnn_attention.models.checkpoint import (
    Checkpoint,
    children_of,
    load_heads,
    load_linear,
    load_parameters,
    load_values,
    take_linear,
)
from escnn_attention.models.lie_transformer import LieTransformer
from escnn_attention.plain.point_attention import PointAttention
from escnn_attention.plain.point_network import Readout

_GROUPS = ("T(2)", "T(3)", "SE(2)_canonical", "SE(2)", "SE(3)", "Trivial(2)", "Trivial(3)")
_LIFTED = ("SE(2)", "SE(3)")  # points with rotations of their own
_LIMIT = 7.0
"""The limit of the hyperbolic tangent of motions, a constant of the published code that no tensor shows."""
_DOT, _LOCATION = "ema.kernel.feature_kernel", "ema.kernel.location_kernel"
_CONCAT, _BOTH = "ema.kernel.feature_featurisation", "ema.kernel.location_feature_combination.1"


def from_lie_transformer(
    checkpoint: Checkpoint,
    *,
    group: str | None = None,
    lift_samples: int = 1,
    normalization: Normalization | None = None,
    pool: Literal["mean", "max"] = "mean",
    positive_quaternions: bool = False,
    lie_algebra_nonlinearity: str | None = None,
    mc_samples: int = 0,
    fill: float = 1.0,
) -> LieTransformer:
    """The network of a checkpoint of the LieTransformer, with the options of :func:`~.load.from_published`."""
    check_option("group", group, _GROUPS)
    assert group is not None
    start = checkpoint.start_of("net.0.module.weight", "the map of the features") + "net."
    blocks = 0
    while checkpoint.any(f"{start}{blocks + 1}.ema."):
        blocks += 1
    if not blocks:
        raise checkpoint.missing(f"{start}1.ema.input_linear.weight", ", needed a block")
    width, ins = checkpoint.shape(f"{start}0.module.weight", 2)
    kernel, heads, located = _kernel(checkpoint, f"{start}1.")
    gspace, options = _space(group, lift_samples, located, lie_algebra_nonlinearity)
    last = f"{start}{blocks + 1}.linear.module"
    readout: Readout = "points" if f"{last}.weight" in checkpoint.tensors else "clouds"
    last = last if readout == "points" else f"{start}{blocks + 2}.8"
    if width % heads:
        raise ValueError(f"{start}0.module.weight: makes {width} channels, needed a multiple of {heads}, the heads")
    counts: Normalization = "softmax" if kernel.content == "dot" else "count"
    network = LieTransformer(
        gspace,
        ins,
        checkpoint.shape(f"{last}.weight", 2)[0],
        fields=width,
        num_blocks=blocks,
        num_heads=heads,
        encoding=kernel,
        normalization=counts if normalization is None else normalization,
        readout=readout,
        pool=pool,
        positive_quaternions=positive_quaternions,
        num_neighbours=_neighbours(mc_samples, fill, group),
        **options,
    )
    with torch.no_grad():
        _load(checkpoint, network, start, last, group)
    checkpoint.check_used()
    return network.eval()


def _space(group: str, lift_samples: int, located: int, nonlinearity: str | None) -> tuple[GSpace, dict[str, Any]]:
    """The gspace, and the relation of two points by its size."""
    samples = check_int("lift_samples", lift_samples)
    if nonlinearity is not None:
        check_option("lie_algebra_nonlinearity", nonlinearity, ("tanh",))
        if group not in _LIFTED:
            needed = "needed None, or one of the groups " + " and ".join(_LIFTED)
            raise ValueError(
                f"lie_algebra_nonlinearity: got 'tanh', and {group} has no rotations that are drawn; {needed}"
            )
    if group == "SE(2)_canonical":
        return gspaces.trivialOnR2() if samples == 1 else gspaces.rot2dOnR2(samples), {"relation": Offset()}
    if group in _LIFTED:
        gspace = gspaces.rot2dOnR2(-1) if group == "SE(2)" else gspaces.rot3dOnR3()
        quaternions = group == "SE(3)" and located == LiftedMotion("quaternion").size(7)
        relation = LiftedMotion("quaternion" if quaternions else "vector", _LIMIT if nonlinearity else None)
        return gspace, {"relation": relation, "lift_samples": samples}
    if samples != 1:
        raise ValueError(f"lift_samples: got {samples}, and {group} has one lift of a point")
    gspace = gspaces.trivialOnR2() if "2" in group else gspaces.trivialOnR3()
    return gspace, {"relation": Pair() if group.startswith("Trivial") else Offset()}


def _neighbours(mc_samples: int, fill: float, group: str) -> int | None:
    """The number of points that a query attends to: all points from which the published network draws some."""
    if not check_int("mc_samples", mc_samples, least=0):
        check_unused("fill", fill, 1.0, "without mc_samples all points are seen")
        return None
    if check_length("fill", fill, "part of the nearest points") > 1:
        raise ValueError(f"fill: got {fill!r}, needed a part of the nearest points, at most 1")
    if group == "SE(2)_canonical":
        raise ValueError(
            f"mc_samples: got {mc_samples}, and the published {group} has no distance by which points are near; needed "
            "0, all points"
        )
    number = int(mc_samples / fill)
    if number > mc_samples:
        warnings.warn(
            f"lie_transformer: the published network draws {mc_samples} of the {number} nearest points anew in every "
            f"layer and at every call, and the one that is loaded takes all {number}, without chance. The outputs "
            "differ by that draw",
            UserWarning,
            stacklevel=4,
        )
    return number


def _kernel(checkpoint: Checkpoint, block: str) -> tuple[PairKernel, int, int]:
    """The kernel of the scores, the number of its heads, and the size of the relation of two points."""
    options: dict[str, Any] = {"biases": True, "last_activation": True}
    if checkpoint.any(f"{block}{_BOTH}."):
        heads, seen, hidden = checkpoint.shape(f"{block}{_BOTH}.LinNormAct_1.linear.module.weight", 3)
        seen -= checkpoint.shape(f"{block}{_CONCAT}.fc_o.weight", 2)[0]
        return PairKernel("concat", "raw", "mlp", hidden=hidden, **options), heads, seen
    heads, seen, hidden = checkpoint.shape(f"{block}{_LOCATION}.LinNormAct_1.linear.module.weight", 3)
    return PairKernel(hidden=hidden, **options), heads, seen


def _load(checkpoint: Checkpoint, network: LieTransformer, start: str, last: str, group: str) -> None:
    fields = len(network.embedding.out_type)
    load_linear(checkpoint, f"{start}0.module", network.embedding.plain.projection)
    for i, block in enumerate(children_of(network.blocks), start=1):
        name = f"{start}{i}."
        _load_attention(checkpoint, name, block.attention.plain, fields, group)
        norm, expand, _, contract, *_ = children_of(block.feed_forward)
        load_parameters(checkpoint, f"{name}ln_ema", block.norm.plain)
        load_parameters(checkpoint, f"{name}ln_mlp", norm.plain)
        for number, layer in enumerate((expand, contract), start=1):
            load_linear(checkpoint, f"{name}mlp.LinNormAct_{number}.linear.module", layer.plain.projection)
    linear = [m for m in network.head.perceptron if isinstance(m, torch.nn.Linear)]
    names = [last] if len(linear) == 1 else [f"{last.removesuffix('8')}{i}" for i in (2, 5, 8)]
    for module, name in zip(linear, names, strict=True):
        load_linear(checkpoint, name, module)


def _load_attention(checkpoint: Checkpoint, name: str, plain: PointAttention, fields: int, group: str) -> None:
    kernel = plain.encoding
    assert isinstance(kernel, PairKernel)
    heads, channels = kernel.num_heads, kernel.channels

    def head_maps(what: str, width: int) -> tuple[Tensor, Tensor]:
        """A map to some channels of every head, and to zero in the others."""
        weight, bias = take_linear(checkpoint, f"{name}{what}", heads * width, fields)
        weight, bias = weight.view(heads, width, fields), bias.view(heads, width)
        return F.pad(weight, (0, 0, 0, channels - width)), F.pad(bias, (0, channels - width))

    made = {"values": head_maps("ema.input_linear", channels)}
    if kernel.content == "dot":
        made |= {"queries": head_maps(f"{_DOT}.fc_q", channels), "keys": head_maps(f"{_DOT}.fc_k", channels)}
        _load_location(checkpoint, f"{name}{_LOCATION}", kernel, group)
    else:
        width = checkpoint.shape(f"{name}{_CONCAT}.fc_o.weight", 2)[0]
        if width > channels:
            raise ValueError(f"{name}{_CONCAT}.fc_o.weight: makes {width} numbers, needed at most {channels} of a head")
        # The published keys are those of the attending point.
        made |= {"queries": head_maps(f"{_CONCAT}.fc_k", width), "keys": head_maps(f"{_CONCAT}.fc_q", width)}
        _load_both(checkpoint, name, kernel, width, group)
    load_heads(plain, made)
    load_linear(checkpoint, f"{name}ema.output_linear", plain.project_out)


def _take_layers(checkpoint: Checkpoint, name: str, kernel: PairKernel, ins: int) -> list[tuple[Tensor, Tensor]]:
    """The weights ``(heads, outs, ins)`` and biases ``(heads, outs)`` of the three linear maps of each head."""
    heads, hidden = kernel.num_heads, kernel.hidden
    layers = []
    for number, (outs, width) in enumerate(((hidden, ins), (hidden, hidden), (1, hidden)), start=1):
        linear = f"{name}.LinNormAct_{number}.linear.module"
        weight = checkpoint.take(f"{linear}.weight", heads, width, outs).transpose(1, 2)
        layers.append((weight, checkpoint.take(f"{linear}.bias", heads, outs)))
    return layers


def _coordinates(kernel: PairKernel, group: str) -> int:
    """The size of the relation of two points in the published kernel."""
    return kernel.of_offset.shape[2] + (group == "SE(2)_canonical")


def _load_place(kernel: PairKernel, weight: Tensor, group: str) -> None:
    """Load the weights of the location in the first layer, ``(heads, outs, numbers)``.

    The published translation is :math:`x - x'` for a query x and a key x', minus the offset. With fixed rotations it is
    the offset in the frame of the query's pose, and the index of the relative pose. In motions the published rotation
    comes first, and here the translation.
    """
    dim = kernel.of_offset.shape[2]
    if group in _LIFTED:
        weight = weight.roll(int(group[3]), dims=-1)
    load_values(kernel.of_offset, weight[..., :dim] * (-1 if group.startswith("T(") else 1))
    if kernel.of_pose is not None:
        load_values(kernel.of_pose, weight[..., dim:] * torch.arange(kernel.num_poses))


def _load_location(checkpoint: Checkpoint, name: str, kernel: PairKernel, group: str) -> None:
    """Load the network of the location, whose number is added to the product of query and key."""
    first, second, last = _take_layers(checkpoint, name, kernel, _coordinates(kernel, group))
    _load_place(kernel, first[0], group)
    load_values(kernel.bias, first[1])
    load_values(kernel.within, second[0])
    load_values(kernel.location_hidden_bias, second[1])
    load_values(kernel.read_location, last[0].squeeze(1))
    load_values(kernel.location_last_bias, last[1].squeeze(1))


def _load_both(checkpoint: Checkpoint, name: str, kernel: PairKernel, width: int, group: str) -> None:
    """Load the network of content and location together."""
    first, second, last = _take_layers(checkpoint, f"{name}{_BOTH}", kernel, width + _coordinates(kernel, group))
    content, content_bias = take_linear(checkpoint, f"{name}{_CONCAT}.fc_o", width, 2 * width)
    heads, missing = kernel.num_heads, kernel.channels - width
    # Contents are a sum of both divided by √2 here.
    of_both = [math.sqrt(2) * F.pad(t, (0, missing, 0, missing)).expand(heads, -1, -1) for t in content.chunk(2, dim=1)]
    load_values(kernel.of_query, of_both[0])
    load_values(kernel.of_key, of_both[1])
    load_values(kernel.join_content, F.pad(first[0][..., :width], (0, missing)))
    _load_place(kernel, first[0][..., width:], group)
    if kernel.bias is not None:
        load_values(kernel.bias, torch.zeros_like(kernel.bias))
    load_values(kernel.join_bias, first[1] + first[0][..., :width] @ content_bias)
    load_values(kernel.join_within, second[0])
    load_values(kernel.join_hidden_bias, second[1])
    load_values(kernel.read_both, last[0].squeeze(1))
    load_values(kernel.join_last_bias, last[1].squeeze(1))
