"""Layers of self-attention on grids to test, their equivariance errors, and their formula."""

import itertools
import math

import torch

from escnn_attention import GroupSelfAttention, LiftingSelfAttention
from escnn_attention.geometry.grid import Grid
from escnn_attention.plain.self_attention import rows_of
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


def written_out(layer, x, steps, unit):
    """A layer with query="own", keys="all" and an encoding that is added to the keys, query by query.

    Args:
        layer: the layer.
        x: its input, a tensor.
        steps: from the indices of a query and of a key to the steps between them along the axes of the tensor: none
            for a key that is not seen, and several where the encoding is the mean over them.
        unit: how many steps are an offset of 1.
    """
    plain, index = layer.plain, list(itertools.product(*map(range, x.shape[2:])))
    q, k, v = plain.to_heads(rows_of(x))  # M, B, N, H, C
    pose = plain.encoding.poses()[:, plain.quotient][:, None, None]  # M, 1, 1, H, P, C

    def encoded(ways):
        # x grows along the last axis, y and z against theirs.
        delta = torch.tensor(ways, dtype=x.dtype).flip(-1) / unit
        delta[:, 1:] *= -1
        values = plain.encoding.offsets(delta @ plain.inverse_action.mT)  # M, H, ways, C
        return values.mean(2)[:, None, None, :, None]

    outputs = []
    for a, query in enumerate(index):
        seen = {b: ways for b, key in enumerate(index) if (ways := steps(query, key))}
        keys = torch.cat([k[:, :, [b], None] + encoded(ways) + pose for b, ways in seen.items()], dim=2)
        score = torch.einsum("mbhc,mbkhpc->mbhkp", q[:, :, a], keys) / math.sqrt(q.shape[-1])
        p = score.flatten(3).softmax(-1)
        outputs.append(torch.einsum("mbhn,mbnc->mbhc", p, v[:, :, list(seen)].flatten(2, 3)))
    return plain.project_out(torch.stack(outputs, dim=2)).transpose(1, 2).unflatten(2, x.shape[2:])
