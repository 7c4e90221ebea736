"""The encodings by frequencies."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from escnn import gspaces
from escnn.nn import GeometricTensor

from escnn_attention import FourierEncoding, PointSelfAttention, RotaryEncoding
from escnn_attention.functional import attention, probabilities
from escnn_attention.functional.grid.call import GridCall
from escnn_attention.geometry.windows import Window
from tests import spaces
from tests.functional.cases import case
from tests.nn.points import cloud, error_of


def test_rotations_take_the_place_of_a_function_of_the_offset():
    encoding = RotaryEncoding().bind(3, 2, 5, 4)
    assert encoding.rotations().shape == (2, 2, 3)
    assert encoding.offsets(torch.randn(7, 3)) is None
    assert encoding.features(torch.randn(1, 3, 7)) is None
    assert RotaryEncoding(1).bind(3, 2, 5, 4).rotations().shape == (2, 1, 3)
    assert RotaryEncoding().bind(0, 2, 5, 4).rotations() is None
    assert RotaryEncoding().rotations() is None


@pytest.mark.parametrize(("pairs", "channels", "needed"), [(None, 1, 2), (3, 5, 6)])
def test_pairs_need_channels(pairs, channels, needed):
    with pytest.raises(ValueError, match=f"rotates {needed} .*head_fields to {needed}"):
        RotaryEncoding(pairs).bind(2, 1, channels, 4)
    RotaryEncoding(pairs).bind(2, 1, needed, 4)


@pytest.mark.parametrize(("query", "keys"), [("own", "own"), ("own", "all"), ("all", "all"), ("all", "own")])
def test_rotated_values_between_points(query, keys):
    """By chunks and by fused attention; they are equivariant, and translations change nothing."""
    gspace, outputs = gspaces.rot2dOnR2(4), {}
    fields = spaces.regular(gspace, 2)
    options = {"head_fields": 5, "query": query, "keys": keys, "encoding": RotaryEncoding(2, values=True)}
    at_points = PointSelfAttention(fields, fields, 1, **options).double()
    points = cloud(fields, 9)
    assert error_of(at_points, points, gspace.fibergroup.elements) < 1e-11
    moved = GeometricTensor(points.tensor, fields, points.coords + 5.0)
    for backend in ("neighbours", "dense", "reference"):
        at_points.plain.backend = backend
        torch.testing.assert_close(at_points(points).tensor, at_points(moved).tensor)
        outputs[backend] = at_points(points).tensor
        torch.testing.assert_close(outputs[backend], outputs["neighbours"])
    at_points.plain.encoding.rotates_values = False
    assert (at_points(points).tensor - outputs["reference"]).abs().max() > 1e-2


def test_rotated_values_by_loops():
    terms_of = case(2, 2, 2, (2, 3), Window(3), {"rotary"}, heads=1, batch=1, channels=3)
    (q, k, v), grid, terms = terms_of
    terms = replace(terms, rotates_values=True)
    p = probabilities(GridCall(q, k, v, terms, grid, grid))[0, 0, :, :, 0]  # positions, poses, keys, poses of keys
    expected = torch.zeros(6, 2, 3, dtype=torch.float64)
    for x, h, y, r in itertools.product(range(6), range(2), range(6), range(2)):
        row = int(grid.rows(torch.tensor(x), torch.tensor(y)))
        if row >= 0:
            angle = float(grid.offsets[row] @ terms.rotary[0, h, 0].detach())
            a, b, c = v[0, 0, y, r].tolist()
            z = complex(a, b) * complex(math.cos(angle), math.sin(angle))
            expected[x, h] += p[x, h, y, r].detach() * torch.tensor([z.real, z.imag, c]).double()
    for backend in ("reference", "native", "blocked"):
        torch.testing.assert_close(attention(q, k, v, grid, terms, backend=backend)[0, 0], expected)
    outputs = [attention(q, k, v, grid, terms, backend=backend).sin().sum() for backend in ("reference", "native")]
    gradients = [torch.autograd.grad(output, (v, terms.rotary)) for output in outputs]
    torch.testing.assert_close(*gradients)


def test_fourier_is_the_formula():
    encoding = FourierEncoding(5, scale=2.0).bind(2, 3, 4, 1).double()
    delta = torch.randn(11, 2, dtype=torch.float64)
    w = encoding.readout.weight.view(3, 4, 2, 5)  # heads, channels, cosine and sine, frequencies
    phase = torch.einsum("wd,ld->lw", encoding.frequencies, delta)
    expected = torch.einsum("mcw,lw->mlc", w[:, :, 0], phase.cos()) + torch.einsum(
        "mcw,lw->mlc", w[:, :, 1], phase.sin()
    )
    torch.testing.assert_close(encoding.offsets(delta), expected)
    scales = [FourierEncoding(500, scale=s).bind(2, 1, 4, 1).frequencies.std() for s in (0.5, 4.0)]
    torch.testing.assert_close(torch.stack(scales), torch.tensor([0.5, 4.0]), rtol=0.1, atol=0)


@pytest.mark.parametrize("value", [0, -1.0, math.nan])
def test_wrong_scales_are_named(value):
    with pytest.raises(ValueError, match="scale: got"):
        FourierEncoding(scale=value)


@pytest.mark.parametrize("learned", [True, False])
def test_frequencies_are_learned_or_kept(learned):
    encoding = FourierEncoding(6, learned=learned).bind(3, 2, 4, 5)
    assert encoding.frequencies.shape == (6, 3)
    assert ("frequencies" in dict(encoding.named_parameters())) == learned
    assert "frequencies" in encoding.state_dict()  # saved either way: it cannot be drawn again
    other = FourierEncoding(6, learned=learned).bind(3, 2, 4, 5)
    delta = torch.randn(10, 3)
    assert (other.offsets(delta) - encoding.offsets(delta)).abs().max() > 0.01
    other.load_state_dict(encoding.state_dict())
    torch.testing.assert_close(other.offsets(delta), encoding.offsets(delta))
    encoding.offsets(delta).sum().backward()
    assert (encoding.frequencies.grad is not None) == learned


@pytest.mark.parametrize("make", [FourierEncoding, RotaryEncoding])
@pytest.mark.parametrize("value", [0, -3, 2.0])
def test_wrong_numbers_of_frequencies_are_named(make, value):
    with pytest.raises((TypeError, ValueError), match=f"num_frequencies: got {value!r}"):
        make(value)
