"""Attentive convolutions to test."""

from escnn_attention.nn.attentive import AttentiveConv
from tests import spaces
from tests.layers import redrawn

EXACT = 1e-12
PLANE = {n: spaces.PLANE[n] for n in ("trivial", "flip", "C2", "C4", "C8", "D3", "D4")}
VOLUME = {n: spaces.VOLUME[n] for n in ("trivial 3D", "mirror", "C4 3D")}
VARIANTS = {
    "full": {},
    "channel": {"spatial": False},
    "spatial": {"channel": False},
    "none": {"channel": False, "spatial": False},
}


def layer_on(gspace, fields=(2, 2), kinds=("regular", "regular"), size=3, **options):
    """A layer with those of the options that its attention has."""
    make = {"regular": spaces.regular, "trivial": spaces.scalars}
    types = [make[k](gspace, n) for k, n in zip(kinds, fields, strict=True)]
    options = {"attention_size": 3, "ratio": 1, "channel": True, "spatial": True} | options
    absent = [] if options["channel"] else ["ratio"]
    absent += [] if options["spatial"] else ["attention_size", "attention_dilation"]
    absent += [] if options["channel"] or options["spatial"] else ["residual"]
    return redrawn(AttentiveConv(*types, size, **{n: v for n, v in options.items() if n not in absent}), 0.5)


def input_of(layer, size=5, **options):
    return spaces.random_field(layer.in_type, *spaces.shape_of(layer.in_type.gspace, size), **options)
