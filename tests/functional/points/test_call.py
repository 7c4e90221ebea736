"""What a call between points is reduced to before it is computed."""

from __future__ import annotations

import pytest
import torch
from escnn import gspaces
from escnn.nn import FieldType

from escnn_attention import PointSelfAttention
from escnn_attention.functional import BETWEEN_POINTS
from escnn_attention.functional.points import portable
from escnn_attention.functional.points.call import fold_points
from escnn_attention.geometry.neighbours import Neighbourhood
from escnn_attention.geometry.points import Points

SPACE = gspaces.octaOnR3()


def call_of(*, scalar: bool, **options):
    torch.manual_seed(0)
    in_type = FieldType(SPACE, 2 * [SPACE.trivial_repr if scalar else SPACE.regular_repr])
    out_type = FieldType(SPACE, 2 * [SPACE.regular_repr])
    layer = PointSelfAttention(in_type, out_type, 2, query="all", **options).double().plain
    x = torch.randn(7, 3, dtype=torch.float64)
    return layer.call(torch.randn(7, in_type.size).double(), Points(x, x, None, None, Neighbourhood(radius=1.5)), None)


@pytest.mark.parametrize("scalar", [True, False])
def test_without_an_encoding_all_output_poses_are_computed_once(scalar):
    call = call_of(scalar=scalar, encoding="none")
    folded, unfold = fold_points(call)
    assert (call.num_poses, folded.num_poses) == (24, 1)
    for backend in ("native", "neighbours"):
        y = unfold(BETWEEN_POINTS.backends[backend].attention(folded))
        torch.testing.assert_close(y, BETWEEN_POINTS.compute(call, "reference"), rtol=1e-12, atol=1e-12)


def test_with_an_encoding_they_differ():
    call = call_of(scalar=True)
    folded, unfold = fold_points(call)
    assert folded is call
    assert unfold is None
    y = BETWEEN_POINTS.compute(call)
    assert (y - y[:, :, :, :1]).abs().max() > 1e-3


def test_functions_of_the_location_bound_a_chunk(monkeypatch):
    call = call_of(scalar=False)
    needed = BETWEEN_POINTS.compute(call, "reference")
    pairs = portable._pairs(call, 2**26)
    assert len(call.query_points.neighbours(call.key_points).chunks(pairs)) == 1
    # Three pairs of points, of 16 functions from each of 24 poses.
    monkeypatch.setattr(portable, "_FEATURES_PER_CHUNK", 3 * 24 * 16)
    assert portable._pairs(call, 2**26) == 3
    for backend in ("native", "neighbours"):
        torch.testing.assert_close(BETWEEN_POINTS.compute(call, backend), needed, rtol=1e-12, atol=1e-12)
