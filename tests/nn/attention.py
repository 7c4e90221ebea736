"""Layers of self-attention on grids to test, their equivariance errors, and their formula."""

import itertools
import math

import torch

from escnn_attention import GroupSelfAttention, LiftingSelfAttention
from escnn_attention.functional.rotate import rotate
from escnn_attention.geometry.grid import Grid
from escnn_attention.groups.fibers import fibers
from escnn_attention.plain.self_attention import fields_of, rows_of
from tests import spaces
from tests.spaces import mixed, scalars

ENCODINGS = ["mlp", "separable", "fourier", "rotary", "absolute", "none"]
TOLERANCE = 1e-10


def turned_error(layer, x):
    def on_grid(values, frame):
        grid = Grid(values.shape[2:], layer.plain.window, dtype=values.dtype, frame=frame)
        return layer.plain.attend(values, grid)

    return spaces.turned_error(layer, x, on_grid)


def attention_for(space, *, lifting=False, encoding="mlp", size=None, **options):
    """A layer on mixed types in float64, with heads wide enough for every encoding."""
    out_type = mixed(space)
    if lifting:
        return LiftingSelfAttention(
            scalars(space, 2), out_type, 2, size, head_fields=4, encoding=encoding, **options
        ).double()
    return GroupSelfAttention(out_type, out_type, 2, size, head_fields=4, encoding=encoding, **options).double()


def written_out_between(layer, heads, ways, envelope=lambda x, y: 1.0):
    """The output of a layer by its formula, ``(B, N, out)``, query by query and key by key.

    Args:
        layer: with an encoding that is added to the keys, or rotary.
        heads: its queries, keys and values.
        ways: from numbers of a query and of a key to the offsets in space between them, ``(n, d)``, in the unit of the
            encoding, which is the mean over them; none for a key that is not seen.
        envelope: by which the exponential of the score is multiplied.
    """
    core, tables = layer.plain, fibers(getattr(layer, "key_type", layer.in_type).gspace)
    encoding, order, back = core.encoding, tables.order, torch.tensor(tables.inverse_action).mT
    q, k, v = heads
    number = torch.arange(q.shape[3]).unsqueeze(0)  # of the poses of queries that each output pose asks
    if core.query == "own":
        q, number = q.expand(*q.shape[:3], order, -1).unsqueeze(4), torch.arange(order).unsqueeze(1)
    else:
        q = q.unsqueeze(3)
    apart = core.keys == "own" and k.shape[3] > 1
    seen = number.unsqueeze(2) == torch.arange(k.shape[3]) if apart else torch.tensor(True)  # H, A, P
    table = encoding.poses() if k.shape[3] > 1 else None
    k = k.unsqueeze(3).expand(*k.shape[:3], order, -1, -1)  # M, B, N, H, P, C
    k = k if table is None else k + table[:, None, None, tables.quotient]
    rotations, outputs = encoding.rotations(), []
    for x in range(q.shape[2]):
        weights, values = [q.new_zeros(*q.shape[:2], order, q.shape[4], 0)], [v[:, :, 0, :0]]
        for y in range(k.shape[2]):
            if not len(found := ways(x, y)):
                continue
            delta, keys = found @ back, k[:, :, y]
            if rotations is not None:
                angles = torch.einsum("mfd,hd->mhf", rotations, delta[:, 0])
                keys = rotate(keys, angles[:, None, :, None])
            elif encoding.form is not None:
                keys = keys + encoding.offsets(delta).mean(2)[:, None, :, None]
            scores = torch.einsum("mbhac,mbhpc->mbhap", q[:, :, x], keys) / math.sqrt(q.shape[-1])
            weights.append(seen * envelope(x, y) * scores.exp())
            values.append(v[:, :, y])
        p = torch.cat(weights, dim=-1)
        outputs.append(torch.einsum("mbhak,mbkc->mbhc", p / p.sum(-1, keepdim=True), torch.cat(values, dim=2)))
    return core.project(torch.stack(outputs, dim=2))


def written_out(layer, x, steps, unit):
    """A layer on a grid by its formula.

    Args:
        layer: the layer.
        x: its input, a tensor.
        steps: from the indices of a query and of a key to the steps between them along the axes of the tensor: none
            for a key that is not seen, and several where the encoding is the mean over them.
        unit: how many steps are an offset of 1.
    """
    index = list(itertools.product(*map(range, x.shape[2:])))
    # x grows along the last axis, y and z against theirs.
    scale = torch.tensor([1.0] + (x.dim() - 3) * [-1.0], dtype=x.dtype) / unit

    def ways(query, key):
        return torch.tensor(steps(index[query], index[key]), dtype=x.dtype).view(-1, x.dim() - 2).flip(1) * scale

    return fields_of(written_out_between(layer, layer.plain.to_heads(rows_of(x)), ways), x.shape[2:])
