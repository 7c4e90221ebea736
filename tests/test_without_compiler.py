"""Layers where there is no C++ compiler: operations of PyTorch serve, with the same results."""

from collections import Counter

import pytest
import torch

from escnn_attention.functional.backends.native import why_not_built

LAYERS = """
import itertools, sys, torch
import escnn_attention as ea
from escnn import gspaces, nn
from escnn_attention.functional import dispatch

choose = dispatch._choose

def watched(call, backend):
    name, left = choose(call, backend)
    print(name)
    return name, left

def check(make, x):
    dispatch._choose = watched
    found = []
    for backend in ("auto", "reference"):
        torch.manual_seed(0)
        out = make(backend).double()(x).tensor
        found.append([out, *torch.autograd.grad(out.square().sum(), x.tensor)])
        dispatch._choose = choose
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-10)

space = gspaces.rot2dOnR2(4)
fields, scalars = nn.FieldType(space, 2 * [space.regular_repr]), nn.FieldType(space, 3 * [space.trivial_repr])
encodings = ("mlp", ea.FourierEncoding(4), "rotary", "absolute", "none")
windows = (((1, 1), None), ((2, 2), None), ((2, 2), 1), ((1, 1), 3))
poses = ((fields, "own"), (fields, "all"), (scalars, "all"))
for i, (encoding, (size, kernel_size)) in enumerate(itertools.product(encodings, windows)):
    given, query = poses[i % 3]  # each with every encoding, and with every window
    check(
        lambda backend: ea.GroupSelfAttention(
            given, fields, num_heads=2, head_fields=2, kernel_size=kernel_size, encoding=encoding, query=query,
            backend=backend,
        ),
        given(torch.randn(2, given.size, *size, dtype=torch.float64, requires_grad=True)),
    )

point = gspaces.no_base_space(space.fibergroup)
fields = nn.FieldType(point, 2 * [space.regular_repr])
for encoding in ("mlp", "none"):
    check(
        lambda backend: ea.GroupSelfAttention(fields, fields, num_heads=2, encoding=encoding, backend=backend),
        fields(torch.randn(2, fields.size, dtype=torch.float64, requires_grad=True)),
    )
"""

NO_BACKEND = """
import torch
from escnn_attention.functional import PositionalBias, attention
from escnn_attention.geometry.grid import Grid
from escnn_attention.geometry.positions import Window
q = torch.zeros(1, 1, 4, 1, 2)
try:
    attention(q, q, q, Grid((2, 2), Window()), PositionalBias(1), backend="native")
except ValueError as error:
    print(error)
"""


@pytest.fixture
def no_compiler(monkeypatch, tmp_path):
    """A compiler that does not run, and no library that was built before."""
    monkeypatch.setenv("CXX", "/nonexistent/compiler")
    monkeypatch.setenv("ESCNN_ATTENTION_CACHE", str(tmp_path))


def test_layers_on_grids_of_any_size(no_compiler, run_python):
    *served, missing = run_python(LAYERS + NO_BACKEND).splitlines()
    assert Counter(served) == {"blocked": 5 * 4 + 2}
    assert "'native' cannot serve this call: /nonexistent/compiler does not run" in missing


def test_with_a_compiler_nothing_is_missing(capsys):
    """The complaint comes of the compiler."""
    if reason := why_not_built(torch.float32):
        pytest.skip(reason)
    exec(NO_BACKEND, {})
    assert capsys.readouterr().out == ""
