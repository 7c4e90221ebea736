"""The networks of the published code of GSA-Nets, and those of GE-ViT, whose layers have the same names."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from escnn.gspaces import GSpace

from escnn_attention.encodings import SeparableEncoding
from escnn_attention.groups.fibers import Fibers, fibers
from escnn_attention.models.checkpoint import (
    Checkpoint,
    at_pose,
    children_of,
    find_gspace,
    load_heads,
    load_linear,
    load_parameters,
    load_values,
    take_linear,
    take_matrix,
)
from escnn_attention.models.gsa_net import GSANet
from escnn_attention.nn.pointwise import PoseLinear
from escnn_attention.nn.self_attention import GroupSelfAttention
from escnn_attention.nn.transformer import TransformerBlock
from escnn_attention.plain.self_attention import SelfAttention

_BLOCK = re.compile(r"transformer\.(\d+)\.(.+)")
_CLASSES = re.compile(r"transformer\.\d+\.weight")
_BUFFERS = re.compile(r"(^|\.)(group\._\w+|(row|col|g)_indices)$")

_CROPS: dict[tuple[Any, ...], tuple[tuple[int, ...], int]] = {
    ((2, 3), (True, False)): ((2, 0, 2, 1, 1), 28),
    ((2, 2, 2), (True, True, False)): ((0,) * 6, 32),
    ((0, 1, 2, 1), (True,) * 4): ((0, 2, 1, 1), 96),
}
"""Crops and image size of published networks, which tensors do not show, by the blocks and poolings of the stages."""


def from_gsa(checkpoint: Checkpoint, *, crops: Sequence[int] | None = None) -> GSANet:
    """The network of a checkpoint of GSA-Nets; by default with the crops of the published one of the same outline."""
    return _load(checkpoint, "g_selfatt", crops)


def from_gevit(checkpoint: Checkpoint, *, crops: Sequence[int] | None = None) -> GSANet:
    """The network of a checkpoint of the published code of GE-ViT; the arguments are those of GSA-Nets."""
    return _load(checkpoint, "gevit", crops)


def _load(checkpoint: Checkpoint, kind: str, crops: Sequence[int] | None) -> GSANet:
    if checkpoint.any("lifting_normalization.running_mean"):
        raise ValueError(
            "lifting_normalization.running_mean: the network has batch norms, needed one of layer norms, as published"
        )
    gspace, poses = gspace_of(checkpoint)
    group = fibers(gspace)
    outline = _outline(checkpoint)
    names = [f"transformer.{i}.attention.2" for stage in outline for i in stage.blocks]
    pose_terms = [pose_term(checkpoint, f"{name}.g_indices", group, poses) for name in names]
    key = (tuple(len(stage.blocks) for stage in outline), tuple(stage.pool for stage in outline))
    margins, image_size = (crops, None) if crops is not None else _CROPS.get(key, (None, None))
    if margins is None:
        raise ValueError(
            f"crops: the published networks have none with {key[0]} blocks in its stages and poolings {key[1]}, so the "
            "margin that each block takes off is not known; needed one number for each block"
        )
    each = any(table is None or (table != table[0]).any() for table, _ in pose_terms)
    network = _network(checkpoint, gspace, outline, margins, query="each" if each else "all")
    _warn(kind, network, [exact for _, exact in pose_terms], _odd_poolings(key, margins, image_size))
    with torch.no_grad():
        _load_network(checkpoint, network, outline, [table for table, _ in pose_terms])
    for name in checkpoint.tensors:
        if _BUFFERS.search(name):
            checkpoint.used.add(name)
    checkpoint.check_used()
    return network.eval()


def _warn(kind: str, network: GSANet, exact: Sequence[bool], odd: Sequence[int]) -> None:
    """Warn about parts of the published network that do not commute with its group, and differ here."""
    name = network.gspace.name
    reasons = []
    if not all(exact):
        reasons.append(
            "the term of the poses in its group layers depends on the pose of the output: the layers agree at the pose "
            "of the identity only"
        )
    # A disc of 3 positions is a square.
    lifting = next(m for m in network.modules() if isinstance(m, SelfAttention))
    if (lifting.window.kernel_size or 0) > 3 and not fibers(network.gspace).preserves_square:
        reasons.append("its windows are squares, which the group does not map onto themselves: here they are discs")
    if odd:
        sizes = ", ".join(map(str, odd))
        reasons.append(f"it pools {sizes} positions in windows of 2, which leaves the last one out: here they are of 3")
    if reasons:
        warnings.warn(
            f"{kind}: the published network does not commute with {name}, and the one that is loaded does: "
            f"{'; '.join(reasons)}. The outputs differ; take it as a starting point for training",
            UserWarning,
            stacklevel=5,
        )


def _odd_poolings(key: tuple[Any, ...], crops: Sequence[int], size: int | None) -> list[int]:
    """The odd sizes that are pooled, in images of the published size."""
    odd: list[int] = []
    if size is None:
        return odd
    margins = iter(crops)
    for blocks, pool in zip(*key, strict=True):
        size -= 2 * sum(next(margins) for _ in range(blocks))
        if pool:
            odd += [size] * (size % 2)
            size //= 2
    return odd


# ------------------------------------------------------------------------------------------------------- the structure


@dataclass(frozen=True)
class _Stage:
    """The blocks of a stage, by their published numbers; the norms behind them; and whether it ends in a pooling."""

    blocks: list[int]
    norms: list[int]
    pool: bool


def _outline(checkpoint: Checkpoint) -> list[_Stage]:
    """The stages, by the numbers of the modules that have tensors: poolings and dropouts are gaps between them."""
    parts = [match.groups() for name in checkpoint.tensors if (match := _BLOCK.fullmatch(name))]
    kinds = {int(i): ("norm" if rest.startswith("layer_norm.") else "block") for i, rest in parts}
    if not kinds:
        raise checkpoint.missing("transformer.0.attention.2.query.weight")
    kinds |= {int(i): "classes" for i, rest in parts if rest == "weight"}
    blocks: list[int] = []
    norms: list[int] = []
    stages: list[_Stage] = []
    following = 0
    for i in sorted(kinds):
        if i > following:
            stages.append(_Stage(blocks, norms, True))
            blocks, norms = [], []
        if kinds[i] == "block":
            blocks.append(i)
        elif kinds[i] == "norm":
            norms.append(i)
        following = i + 1 + (kinds[i] == "norm")  # An activation follows a norm.
    if blocks:
        stages.append(_Stage(blocks, norms, False))
    return stages


def _width(checkpoint: Checkpoint, name: str) -> int:
    return checkpoint.shape(f"{name}.wout.weight", 5)[0]


def _classes(checkpoint: Checkpoint) -> str:
    """The name of the map to the classes, the last module of the transformer."""
    names = [name.removesuffix(".weight") for name in checkpoint.tensors if _CLASSES.fullmatch(name)]
    if not names:
        raise checkpoint.missing("transformer.N.weight", ", needed the map to the classes, the last of the transformer")
    return names[0]


def _network(
    checkpoint: Checkpoint, gspace: GSpace, outline: Sequence[_Stage], crops: Sequence[int], query: Any
) -> GSANet:
    channels = width = _width(checkpoint, LIFTING)
    expansion = []
    for stage in outline:
        first = _width(checkpoint, f"transformer.{stage.blocks[0]}.attention.2") if stage.blocks else width
        if first % width:
            raise ValueError(
                f"transformer.{stage.blocks[0]}.attention.2.wout.weight: makes {first} fields of {width}, needed a "
                "multiple of them"
            )
        expansion.append(first // width)
        width = first
    rows, ins = checkpoint.shape(f"{LIFTING}.query.weight", 4)[:2]
    half = channels // 2
    if half % 2:
        raise ValueError(
            f"{LIFTING}.wout.weight: makes {channels} fields, needed a multiple of 4, so that rows and columns share "
            "half as many channels of a head"
        )
    if rows % half:
        raise ValueError(f"{LIFTING}.query.weight: got {rows} rows, needed a multiple of {half}, half of the fields")
    window = checkpoint.tensors[f"{LIFTING}.row_indices"]
    hidden = checkpoint.shape(f"{LIFTING}.row_embedding.0.weight", 4)[0]
    encoding = SeparableEncoding(hidden, per_head=query == "each", normalize_hidden=True)
    return GSANet(
        gspace,
        ins,
        checkpoint.shape(f"{_classes(checkpoint)}.weight", 5)[0],
        channels=channels,
        blocks=[len(stage.blocks) for stage in outline],
        expansion=expansion,
        crops=list(crops),
        pool=[stage.pool for stage in outline],
        num_heads=rows // half,
        kernel_size=window.shape[-1] if window.dim() == 3 else None,
        query=query,
        norm_between=any(stage.norms for stage in outline),
        readout="sum",
        block={"encoding": encoding, "norm_eps": 1e-12},
    )


# --------------------------------------------------------------------------------------------------------- the weights


def _load_network(
    checkpoint: Checkpoint, network: GSANet, outline: Sequence[_Stage], tables: Sequence[np.ndarray]
) -> None:
    lifting = next(m for m in network.stages["lifting"].modules() if isinstance(m, GroupSelfAttention))
    _load_attention(checkpoint, LIFTING, lifting.plain, len(lifting.in_type), None)
    load_parameters(checkpoint, "lifting_normalization.layer_norm", children_of(network.stages["lifting"])[-2].plain)
    numbers = iter(tables)
    for number, stage in enumerate(outline, start=1):
        for i, published in enumerate(stage.blocks):
            modules = children_of(network.stages[f"attention_{number}_{i + 1}"])
            _load_block(checkpoint, f"transformer.{published}", modules[0], next(numbers))
            if len(modules) > 1:
                load_parameters(checkpoint, f"transformer.{published + 1}.layer_norm", modules[1].plain)
    classes: Any = network.stages["classes"]
    own = classes.plain.projection.weight
    load_values(own, take_matrix(checkpoint, f"{_classes(checkpoint)}.weight", *own.shape))


def _load_block(checkpoint: Checkpoint, name: str, block: TransformerBlock, table: np.ndarray) -> None:
    attention: Any = block.attention
    _load_attention(checkpoint, f"{name}.attention.2", attention.plain, len(block.in_type), table)
    if isinstance(block.shortcut, PoseLinear):
        load_linear(checkpoint, f"{name}.shortcut.0", block.shortcut.plain.projection)
    expand, norm, _, contract, last = children_of(block.feed_forward)
    norms = {"attention.0": children_of(block.before)[0], "attention.3": children_of(block.after)[0]}
    for part, layer in (norms | {"mlp.1": norm, "mlp.4": last}).items():
        load_parameters(checkpoint, f"{name}.{part}.layer_norm", layer.plain)
    for part, layer in (("mlp.0", expand), ("mlp.3", contract)):
        load_linear(checkpoint, f"{name}.{part}", layer.plain.projection)


def _load_attention(
    checkpoint: Checkpoint, name: str, plain: SelfAttention, fields: int, table: np.ndarray | None
) -> None:
    r"""Load an attention layer.

    Scores are divided by √(fields) there and by √C here, which the scale of the queries compensates. The channels of
    queries and keys are in the order of the coordinates x, y here, and of rows, columns there.

    With :math:`|H|` times the heads, head (d, m) asks with :math:`q_m(x, h d)`, with row d of the pose term.
    """
    encoding: Any = plain.encoding
    channels = encoding.channels
    order = 1 if table is None else len(table)
    each = plain.project_out.kind == "group" and table is not None
    heads = plain.num_heads // order if each else plain.num_heads
    parts = _encoders(checkpoint, name, encoding, channels, lifts=table is None)
    made = {}
    for kind, ours in (("query", "queries"), ("value", "values"), ("key", "keys")):
        weight, bias = take_linear(checkpoint, f"{name}.{kind}", channels * heads, fields)
        # Channels of heads, the head running fastest, as heads of channels.
        weight, bias = weight.unflatten(0, (channels, heads)).transpose(0, 1), bias.view(channels, heads).T
        if kind != "value":
            weight, bias = weight[:, parts], bias[:, parts]
        if kind == "query":
            weight, bias = (math.sqrt(channels / fields) * t for t in (weight, bias))
        if each:
            weight = torch.cat([at_pose(weight, d if kind == "query" else _IDENTITY, order) for d in range(order)])
            bias = bias.repeat(order, 1)
        made[ours] = weight, bias
    load_heads(plain, made)
    assert plain.project_out.bias is not None
    outs = len(plain.project_out.bias)
    weight, bias = take_linear(checkpoint, f"{name}.wout", outs, channels * heads)
    weight = weight.unflatten(1, (channels, heads)).transpose(1, 2).flatten(1)
    if each:
        load_values(plain.project_out.weight, at_pose(weight.repeat(1, order).T, _IDENTITY, order))
    else:
        load_values(plain.project_out.weight, weight)
    load_values(plain.project_out.bias, bias)
    if table is not None:
        width = channels - 2 * (channels // 3)
        embedding = checkpoint.take(f"{name}.group_embedding.weight", order, width)
        if encoding.pose_embedding is not None:
            rows = table if each else table[:1]
            load_values(encoding.pose_embedding, embedding[rows].repeat_interleave(heads if each else 1, dim=0))


_IDENTITY = 0
"""The index of the identity among the elements of every group of escnn."""


def _encoders(checkpoint: Checkpoint, name: str, encoding: Any, channels: int, *, lifts: bool) -> list[int]:
    """Load the networks of rows and columns, and return the published channel of each channel here."""
    each = channels // 2 if lifts else channels // 3
    widths = [last.out_features // encoding.table_heads for *_, last in encoding.coordinates]
    of_rows, of_columns = list(range(each)), list(range(each, 2 * each))
    others = list(range(2 * each, channels))
    parts: list[int] = []
    for own, kind, sign, width in ((of_columns, "col", 1.0, widths[0]), (of_rows, "row", -1.0, widths[1])):
        first, norm, _, last = encoding.coordinates[0 if kind == "col" else 1]
        embedding, hidden = f"{name}.{kind}_embedding", first.out_features
        weight, bias = take_linear(checkpoint, f"{embedding}.0", hidden, 1)
        load_values(first.weight, sign * weight)  # Rows grow downwards, and y upwards.
        load_values(first.bias, bias)
        load_parameters(checkpoint, f"{embedding}.1.layer_norm", norm)
        # A constant, as the bias, adds the same to all scores of a query.
        weight, _ = take_linear(checkpoint, f"{embedding}.3", each, hidden)
        padded = torch.cat([weight, weight.new_zeros(width - each, hidden)])
        load_values(last.weight, padded.repeat(encoding.table_heads, 1))
        parts += own + [others.pop(0) for _ in range(width - each)]
    return parts + others


LIFTING = "lifting_self_attention"
"""The published name of the lifting layer."""


def gspace_of(checkpoint: Checkpoint) -> tuple[GSpace, np.ndarray]:
    """The gspace, and the published pose of each element.

    A published pose maps the offset (row, column) by the matrix of its buffers; here the pose h maps it by
    :math:`h^{-1}`, in coordinates that grow to the right and upwards.
    """
    rows, columns = (
        checkpoint.take(f"{LIFTING}.{kind}_indices", *checkpoint.shape(f"{LIFTING}.{kind}_indices", 3, 5)).double()
        for kind in ("row", "col")
    )
    poses, size = len(rows), rows.shape[-1]
    if size == 1:
        raise ValueError(f"{LIFTING}.row_indices: got windows of a single position, which do not show the group")
    middle = size // 2
    of_row, of_column = (
        ((slice(None), -1, middle), (slice(None), middle, -1))
        if rows.dim() == 3
        else ((slice(None), 0, 0, -1, 0), (slice(None), 0, 0, 0, -1))
    )
    seen = torch.stack([torch.stack([t[of_row], t[of_column]], dim=-1) for t in (rows, columns)], dim=1)
    axes = torch.tensor([[0.0, 1.0], [-1.0, 0.0]], dtype=torch.float64)  # x is the column, y minus the row.
    matrices = (axes @ seen @ axes.T).numpy()
    found = find_gspace(matrices.transpose(0, 2, 1), 1e-3)
    if found is not None:
        return found
    raise ValueError(
        f"{LIFTING}.row_indices: the {poses} maps of offsets are those of no group of rotations of the plane by equal "
        "angles, with or without a reflection, that escnn has"
    )


def pose_term(checkpoint: Checkpoint, name: str, group: Fibers, poses: np.ndarray) -> tuple[np.ndarray, bool]:
    """The entries of the published table over the poses that queries read, ``(|H|, |H|)``.

    They are by the poses of the query and the key, both relative to that of the output; and whether the entry depends
    on these alone. If not, the entries are those of the output at the pose of the identity.
    """
    order = group.order
    table = checkpoint.take(name, order, order, order).long().numpy()
    if table.min() < 0 or table.max() >= order:
        raise ValueError(f"{name}: got entries from {table.min()} to {table.max()}, needed 0 to {order - 1}")
    table = table[np.ix_(poses, poses, poses)]  # of output, query and key, by elements
    identity = next(h for h in range(order) if group.quotient[h, h] == h)
    relative = table[identity]
    exact = all((table[h] == relative[np.ix_(group.quotient[h], group.quotient[h])]).all() for h in range(order))
    return relative, exact
