"""Layers where there is no C++ compiler: operations of PyTorch serve, with the same results."""

import itertools

import pytest
import torch
from escnn import gspaces
from escnn.nn import FieldType

from escnn_attention import FourierEncoding, GroupSelfAttention
from escnn_attention.functional import ON_GRIDS, PositionalBias, attention
from escnn_attention.functional.grid import native
from escnn_attention.functional.native import build
from escnn_attention.geometry.grid import Grid
from escnn_attention.geometry.windows import Window
from tests import spaces

C4 = gspaces.rot2dOnR2(4)
FIELDS, SCALARS = spaces.regular(C4, 2), spaces.scalars(C4, 3)
ENCODINGS = ("mlp", FourierEncoding(4), "rotary", "absolute", "none")
WINDOWS = (((1, 1), None), ((2, 2), None), ((2, 2), 1), ((1, 1), 3))
POSES = ((FIELDS, "own"), (FIELDS, "all"), (SCALARS, "all"))


@pytest.fixture
def no_compiler(monkeypatch, tmp_path):
    """A compiler that does not run, and no library that was built before, on the disk or in this process."""
    monkeypatch.setenv("CXX", "/nonexistent/compiler")
    monkeypatch.setenv("ESCNN_ATTENTION_CACHE", str(tmp_path))
    monkeypatch.setattr(build, "library", build.library.__wrapped__)
    monkeypatch.setattr(native.KERNEL, "_found", {})


@pytest.fixture
def served(monkeypatch):
    """The backends that calls have been served by."""
    plan, names = ON_GRIDS.plan, []

    def watched(call, backend):
        found = plan(call, backend)
        names.append(found.name)
        return found

    monkeypatch.setattr(ON_GRIDS, "plan", watched)
    return names


def check(make, x):
    """The same output and gradient as of the formula."""
    found = []
    for backend in ("auto", "reference"):
        torch.manual_seed(0)
        out = make(backend=backend).double()(x).tensor
        found.append([out, *torch.autograd.grad(out.square().sum(), x.tensor)])
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-10)


def call_native():
    q = torch.zeros(1, 1, 4, 1, 2)
    attention(q, q, q, Grid((2, 2), Window()), PositionalBias(1), backend="native")


@pytest.mark.usefixtures("no_compiler")
def test_layers_on_grids_of_any_size(served):
    for i, (encoding, (size, kernel_size)) in enumerate(itertools.product(ENCODINGS, WINDOWS)):
        given, query = POSES[i % 3]  # each with every encoding, and with every window
        options = {"num_heads": 2, "head_fields": 2, "kernel_size": kernel_size, "encoding": encoding, "query": query}
        x = given(torch.randn(2, given.size, *size, dtype=torch.float64, requires_grad=True))
        check(lambda given=given, options=options, **more: GroupSelfAttention(given, FIELDS, **options, **more), x)
    point = gspaces.no_base_space(C4.fibergroup)
    fields = FieldType(point, 2 * [point.regular_repr])
    for encoding in ("mlp", "none"):
        x = fields(torch.randn(2, fields.size, dtype=torch.float64, requires_grad=True))
        check(lambda encoding=encoding, **more: GroupSelfAttention(fields, fields, 2, encoding=encoding, **more), x)
    assert served == (5 * 4 + 2) * ["blocked", "reference"]
    with pytest.raises(ValueError, match=r"'native' .*/nonexistent/compiler does not"):
        call_native()


def test_with_a_compiler_nothing_is_missing():
    """The complaint comes of the compiler."""
    if reason := native.why_not_built(torch.float32):
        pytest.skip(reason)
    call_native()
