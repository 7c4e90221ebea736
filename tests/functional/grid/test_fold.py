"""Folding poses into heads, against the formula."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given

from escnn_attention.functional import ON_GRIDS, attention
from escnn_attention.functional.grid.call import GridCall
from escnn_attention.geometry.grid import Grid
from escnn_attention.geometry.windows import Window
from tests.functional.cases import assert_as_exact, assert_same, case, cases, outputs_and_gradients


@given(cases())
def test_agrees_with_the_reference(arguments):
    assert_same(outputs_and_gradients("blocked", *arguments), outputs_and_gradients("reference", *arguments))


def test_angles_are_no_products_in_half_precision():
    """Those of far points would be off by whole turns."""
    (q, k, v), grid, terms = case(2, 2, 2, (40, 3), Window(), {"rotary"}, heads=1, batch=1, channels=4)
    terms = replace(terms, rotary=10 * terms.rotary.float())
    call = GridCall(*(t.detach().float() for t in (q, k, v)), terms, grid, grid)
    with torch.autocast("cpu", torch.bfloat16):
        folded = ON_GRIDS.fold(call)[0]
    torch.testing.assert_close(folded.k, ON_GRIDS.fold(call)[0].k)


class TestMeasure:
    """A key of measure m counts as m keys."""

    @pytest.mark.parametrize("backend", ["reference", "native", "blocked", "dense"])
    @pytest.mark.parametrize("query", ["own", "all"])
    def test_keys_that_count_twice(self, backend, query):
        (q, k, v), grid, terms = case(2, 2, 2, (4, 3), Window(3), {"spatial", "pose"})
        # Both poses once more: the second of them counts three times, the first twice.
        again = [0, 1, 0, 1, 1]
        many = replace(terms, pose=terms.pose[:, :, again])
        expected = attention(q, k[:, :, :, again], v[:, :, :, again], grid, many, query=query, backend="reference")
        weighed = replace(terms, log_measure=torch.tensor([[2.0], [3.0]], dtype=torch.float64).log())
        got = attention(q, k, v, grid, weighed, query=query, backend=backend)
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-13)
        plain = attention(q, k, v, grid, terms, query=query, backend=backend)
        assert (plain - expected).norm() > 1e-2 * expected.norm()

    @pytest.mark.sampled
    @pytest.mark.parametrize("backend", ["reference", "native", "blocked", "dense"])
    @pytest.mark.parametrize("encoding", ["spatial", "waves", "rotary", "none"])
    def test_offsets_that_hardly_count_make_the_window_smaller(self, backend, encoding):
        (q, k, v), grid, terms = case(2, 2, 2, (5, 4), Window(5), {encoding, "pose"}, channels=4)
        small = Grid(grid.shape, Window(3))
        outside = grid.offsets.abs().amax(-1) > 0.6
        # The same function of the offset, in units of the smaller window.
        halved = replace(
            terms,
            spatial=None if terms.spatial is None else terms.spatial[:, :, ~outside],
            waves=terms.waves and replace(terms.waves, frequencies=terms.waves.frequencies / 2),
            rotary=None if terms.rotary is None else terms.rotary / 2,
        )
        expected = attention(q, k, v, small, halved, backend="reference")
        weighed = replace(terms, log_window=-1e3 * outside.double())
        torch.testing.assert_close(attention(q, k, v, grid, weighed, backend=backend), expected)
        plain = attention(q, k, v, grid, terms, backend=backend)
        assert (plain - expected).norm() > 1e-2 * expected.norm()

    @pytest.mark.parametrize("backend", ["reference", "native", "blocked", "dense"])
    def test_the_same_measure_for_all_drops_out(self, backend):
        (q, k, v), grid, terms = case(2, 2, 2, (4, 3), Window(3), {"spatial", "pose"})
        even = replace(terms, log_measure=torch.full((1, 1), 2.0), log_window=torch.full((9,), -3.0))
        got, expected = (attention(q, k, v, grid, t, backend=backend) for t in (even, terms))
        torch.testing.assert_close(got, expected)

    @pytest.mark.parametrize("backend", ["reference", "native", "blocked", "dense"])
    def test_a_key_of_no_measure_is_no_key(self, backend):
        (q, k, v), grid, terms = case(2, 2, 2, (4, 3), Window(3), {"spatial", "pose"})
        none = replace(terms, log_measure=torch.tensor([[0.0], [-torch.inf]], dtype=torch.float64))
        one = replace(terms, pose=terms.pose[:, :, :1])
        expected = attention(q, k[:, :, :, :1], v[:, :, :, :1], grid, one, backend="reference")
        torch.testing.assert_close(attention(q, k, v, grid, none, backend=backend), expected)

    @pytest.mark.parametrize("backend", ["native", "blocked", "dense"])
    def test_of_positions_alone(self, backend):
        tensors, grid, terms = case(2, 2, 2, (4, 3), Window(3), {"spatial", "pose"})
        measure = torch.randn(1, 12, dtype=torch.float64, requires_grad=True)
        arguments = tensors, grid, replace(terms, log_measure=measure), "own"
        assert_same(outputs_and_gradients(backend, *arguments), outputs_and_gradients("reference", *arguments))

    @pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
    @pytest.mark.parametrize("backend", ["native", "blocked", "dense"])
    @pytest.mark.parametrize("query", ["own", "all"])
    def test_in_lower_precision(self, query, backend, dtype, tolerance):
        kinds = {"spatial", "pose", "measure", "weights"}
        tensors, grid, terms = case(4, 8 if query == "all" else 4, 4, (6, 5), Window(3), kinds, dtype=dtype)
        assert_as_exact(backend, tensors, grid, terms, query, tolerance)

    def test_without_one_nothing_is_touched(self):
        (q, k, v), grid, terms = case(2, 2, 2, (4, 3), Window(3), {"spatial", "pose"})
        call = GridCall(q, k, v, terms, grid, grid)
        assert ON_GRIDS.fold(call)[0] is call


def test_own_keys_are_of_the_poses_of_the_queries():
    (q, k, v), grid, terms = case(2, 4, 2, (4, 3), Window(3), {"spatial", "pose"})
    for backend in ("auto", "reference"):
        with pytest.raises(ValueError, match=r"keys: .*needed the 2"):
            attention(q, k, v, grid, terms, keys="own", backend=backend)
