"""Tiles and their halos as views."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from escnn_attention.functional.backends.tiles import chunks_of, tile_counts, tiles_of
from escnn_attention.geometry.grid import Grid
from escnn_attention.geometry.positions import Window

shapes = st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple)


@given(shapes, st.sampled_from([1, 3, 5]), st.sampled_from(["square", "disc"]), st.integers(1, 3), st.integers(1, 2))
def test_every_pair_of_neighbours_meets_once(shape, kernel_size, window, dilation, size):
    """The rows of a tile are those of the grid, for the positions that the views bring to it."""
    tiles = tiles_of(shape, kernel_size, window, dilation, size)
    grid = Grid(shape, Window(kernel_size, window, dilation))

    def numbered(margin):
        buffer = torch.full((1, 1, *tiles.padded(margin), 1), -1)
        tiles.inner(buffer, margin)[0, 0] = torch.arange(grid.num_positions).view(*shape, 1)
        return tiles.view(buffer, margin).reshape(-1, (size + (2 * tiles.radius if margin else 0)) ** len(shape))

    queries, keys = numbered(0), numbered(tiles.radius)
    assert sorted(queries[queries >= 0].tolist()) == list(range(grid.num_positions))
    for q, k in zip(queries, keys, strict=True):
        on_grid = (q[:, None] >= 0) & (k >= 0)
        expected = grid.rows(q[:, None].clamp(min=0), k.clamp(min=0))
        assert torch.equal(tiles.rows[on_grid], expected[on_grid])
        seen = {(int(q[i]), int(k[j])) for i, j in (on_grid & (tiles.rows >= 0)).nonzero()}
        own = [int(i) for i in q if i >= 0]
        pairs = itertools.product(own, range(grid.num_positions))
        assert seen == {(a, b) for a, b in pairs if grid.rows(torch.tensor(a), torch.tensor(b)) >= 0}


@given(shapes, st.sampled_from([1, 3, 5]), st.integers(1, 3), st.integers(1, 2), st.integers(1, 200))
def test_overlaps_add_up_what_the_views_show(shape, kernel_size, dilation, size, limit):
    tiles = tiles_of(shape, kernel_size, "square", dilation, size)
    buffer = torch.randn(2, 3, *tiles.padded(tiles.radius), 4, dtype=torch.float64)
    weight = torch.randn(tiles.view(buffer, tiles.radius).shape, dtype=torch.float64)
    total = torch.zeros_like(buffer)
    images, pieces = tiles.pieces(2, 10, limit)
    for some, piece in itertools.product(images, pieces):
        part = weight[some][(slice(None), *piece)].contiguous()
        for there, here in tiles.overlaps(total[some], part, piece, tiles.radius):
            there.add_(here)
    # Adding up is the transpose of looking.
    expected = (tiles.view(buffer, tiles.radius) * weight).sum()
    torch.testing.assert_close((total * buffer).sum(), expected)


@given(shapes, st.integers(1, 3), st.integers(1, 40), st.integers(1, 500), st.integers(1, 5))
def test_pieces_are_bounded_and_cover_everything(shape, dilation, scores, limit, images):
    tiles = tiles_of(shape, 3, "square", dilation, 2)
    some, pieces = tiles.pieces(images, scores, limit)
    count = torch.zeros(images, *tiles.counts)
    for i, piece in itertools.product(some, pieces):
        count[(i, *piece)] += 1
        number = count[(i, *piece)].numel() * dilation ** len(shape)
        assert number * scores <= limit or count[(i, *piece)].numel() == 1
    assert (count == 1).all()


def test_counts_are_of_the_largest_class():
    assert tile_counts((7, 4), 1, 2) == (4, 2)
    assert tile_counts((7, 4), 3, 2) == (2, 1)
    assert tiles_of((7, 4), 5, "square", 3, 2).counts == (2, 1)


@pytest.mark.parametrize(("positions", "limit"), [(10, 1), (10, 35), (10, 1000), (1, 1)])
def test_chunks_are_tiles_that_see_everything(positions, limit):
    chunks = chunks_of(positions, 10, limit)
    assert chunks.size == 1 or chunks.size * 10 <= limit
    buffer = torch.randn(2, 3, *chunks.padded(0), 4)
    queries = chunks.view(buffer, 0).transpose(2, 3).squeeze(3).transpose(1, 2).flatten(2, 3)
    assert torch.equal(queries[:, :, :positions], chunks.inner(buffer, 0))
    keys = torch.randn(2, 3, positions, 4)
    images, pieces = chunks.pieces(2, 10, limit)
    assert len(images) == 2
    total = torch.zeros_like(keys)
    for piece in pieces:
        view = chunks.view(keys, 1)[(slice(None), *piece)]
        assert torch.equal(view[:, 0, 0], keys)
        for there, here in chunks.overlaps(total, view.contiguous(), piece, 1):
            there.add_(here)
    torch.testing.assert_close(total, len(pieces) * keys)
