"""How far a warm forward pass goes through the package: files and functions, and changes of file."""

import itertools
import os
import sys

import pytest
import torch
from escnn import gspaces, nn

import escnn_attention as ea
from escnn_attention.functional.grid.native import why_not_built

ROOT = os.path.dirname(os.path.abspath(ea.__file__))


def trace(call) -> tuple[int, int, int]:
    """The files and functions of the package in a call, and how often a function of another file is called."""
    for _ in range(3):
        call()
    files, functions, passed = set(), set(), []

    def profile(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(ROOT):
            files.add(code.co_filename)
            functions.add((code.co_filename, code.co_firstlineno))
            passed.append(code.co_filename)

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return len(files), len(functions), sum(a != b for a, b in itertools.pairwise(passed))


def grid():
    g = gspaces.rot2dOnR2(4)
    t = nn.FieldType(g, 4 * [g.regular_repr])
    return t, t(torch.randn(2, t.size, 9, 9))


def attention_on_a_grid():
    t, x = grid()
    layer = ea.GroupSelfAttention(t, t, num_heads=2, kernel_size=5)
    return lambda: layer(x)


def block_on_a_grid():
    t, x = grid()
    block = ea.TransformerBlock(t, t, num_heads=2, kernel_size=5)
    return lambda: block(x)


def attention_between_points():
    g = gspaces.octaOnR3()
    t = nn.FieldType(g, 2 * [g.regular_repr])
    x = nn.GeometricTensor(torch.randn(20, t.size), t, torch.randn(20, 3))
    layer = ea.PointSelfAttention(t, t, num_heads=2)
    return lambda: layer(x)


@pytest.mark.skipif(bool(why_not_built(torch.float32)), reason="the loop is not built here")
@pytest.mark.parametrize(
    ("make", "most"),
    [
        (attention_on_a_grid, (14, 55, 36)),
        (block_on_a_grid, (18, 68, 61)),
        (attention_between_points, (17, 80, 52)),
    ],
)
def test_a_forward_pass_is_short(make, most):
    found = trace(make())
    assert all(a <= b for a, b in zip(found, most, strict=True)), found
