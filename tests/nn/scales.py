"""Layers that are equivariant to dilations, to test."""

from escnn_attention.nn.dilation import DilationLiftingSelfAttention, DilationSelfAttention, Scales
from tests import spaces
from tests.spaces import mixed, scalars

TOLERANCE = 1e-10
EXACT = 1e-13
THREE = Scales(2, 3)


def lifting(space, scales=THREE, kernel_size=3, out=mixed, **options):
    options = {"head_fields": 4, **options}
    return DilationLiftingSelfAttention(
        scalars(space, 2), scales.repeat(out(space)), scales, 2, kernel_size, **options
    ).double()


def group(space, scales=THREE, kernel_size=3, fields=mixed, **options):
    options = {"head_fields": 4, **options}
    fields = scales.repeat(fields(space))
    return DilationSelfAttention(fields, fields, scales, 2, kernel_size, **options).double()


def turned_error(layer, x):
    core = layer.plain
    return spaces.turned_error(layer, x, lambda values, frame: core.attend(values, core.positions(values, frame=frame)))
