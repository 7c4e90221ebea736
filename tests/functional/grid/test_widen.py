import math

import pytest
import torch
from hypothesis import assume, given

from escnn_attention.functional import ON_GRIDS
from escnn_attention.functional.grid import reference
from escnn_attention.functional.grid.call import GridCall
from escnn_attention.functional.grid.widen import num_channels, num_classes, widen
from escnn_attention.geometry.grid import Grid
from escnn_attention.geometry.windows import Window
from tests.functional.cases import case, cases


@given(cases(max_side=4))
def test_products_of_wide_vectors_give_the_probabilities(arguments):
    tensors, grid, terms, query, keys = arguments
    call, _ = ON_GRIDS.fold(GridCall(*tensors, terms, grid, grid, query=query, keys=keys))
    terms = call.bias
    assume(terms.spatial is None or num_classes(grid) is not None)
    expected = reference.probabilities(call)
    channels = call.q.shape[-1]
    q, k = widen(call.q, call.k, terms, call.query, grid.places, grid)
    assert q.shape[-1] == k.shape[-1] == num_channels(channels, grid, terms)
    q, k = (t.expand(-1, -1, -1, expected.shape[3], -1, -1) for t in (q, k))
    score = torch.einsum("mbnhjc,mbkhpc->mbnhjkp", q, k) / math.sqrt(channels)
    everywhere = torch.arange(grid.num_positions)
    unseen = grid.rows(everywhere[:, None], everywhere) < 0
    score = score.masked_fill(unseen[:, None, None, :, None], -torch.inf)
    torch.testing.assert_close(score.flatten(-2).softmax(-1), expected.flatten(-2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_phases_are_not_rounded_to_half_precision(dtype):
    (q, k, _), grid, terms = case(2, 2, 2, (40,), Window(), {"waves"}, dtype=dtype)
    exact = (grid.places.float() @ terms.waves.frequencies.float().mT).cos().to(dtype)
    _, wide = widen(q, k, terms, "all", grid.places)
    torch.testing.assert_close(
        wide[:, 0, :, :, 0, k.shape[-1] : -exact.shape[-1]].transpose(1, 2), exact.expand(2, -1, -1, -1)
    )
    assert wide.dtype == dtype


@pytest.mark.parametrize(
    ("shape", "window", "count"),
    [
        ((), Window(5), 1),
        ((9,), Window(3), 3),
        ((9, 2), Window(5), 10),
        ((9, 9), Window(5, "disc"), 25),
        ((9, 3), Window(3, dilation=2), 6),
        ((9, 9), Window(), None),
    ],
)
def test_number_of_classes(shape, window, count):
    assert num_classes(Grid(shape, window)) == count
