"""Who sees whom in a single chunk, by operations of PyTorch and ONNX alone: for programs that are written down.

No decision depends on the numbers, and sizes that follow from them are those of tensors, so that a program that is
written down is for any clouds. Groups are filled up to the longest: the pairs of a chunk are at most three times as
many as there are points, times the most keys of a point.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from escnn_attention.geometry.clouds import Chunk, Neighbourhood
from escnn_attention.geometry.stretches import stretches, where

__all__ = ["all_at_once"]

_MEAN_SIZES = 2
"""Of how many clouds of mean size there are points in a group, at most."""


def all_at_once(
    places: Tensor, edge_index: Tensor | None, batch: Tensor | None, rule: Neighbourhood, numbered: bool = False
) -> Chunk:
    """All points in one chunk, with the keys that each of them sees.

    Args:
        places: ``(N, d)``, where neighbours are searched.
        edge_index: ``(2, E)``, from keys to queries; None for those of the rule.
        batch: ``(N,)``, the number of the cloud of each point, in any order; None for a single cloud.
        rule: by which points are neighbours.
        numbered: whether the chunk tells which of the edges of ``edge_index`` is which.

    Example:
        >>> import torch
        >>> from escnn_attention.geometry.at_once import all_at_once
        >>> from escnn_attention.geometry.clouds import Neighbourhood
        >>> some = all_at_once(torch.tensor([[0.0], [1.0], [3.0]]), None, None, Neighbourhood(radius=1.5))
        >>> some.queries.flatten().tolist(), some.keys.tolist()
        ([0, 1, 2], [[0, 1], [0, 1], [2, -1]])
    """
    if edge_index is not None:
        return _by_edges(edge_index.long(), places.shape[0], numbered)
    clouds = _whole_clouds(places, batch)
    return clouds if rule.is_global else _by_rule(places, clouds, rule)


def _by_edges(edges: Tensor, number: int, numbered: bool) -> Chunk:
    queries, order = edges[1].sort()
    keys = edges[0].index_select(0, order)
    degree = queries.new_zeros(number).index_add(0, queries, torch.ones_like(queries))
    lists = _Lists(queries, degree)
    # A query without keys is none: it gets zeros, whatever it holds.
    asking = torch.where(degree > 0, torch.arange(number, device=edges.device), -1)
    return Chunk(asking.unsqueeze(1), lists.of(keys), True, edges=lists.of(order) if numbered else None)


def _whole_clouds(places: Tensor, batch: Tensor | None) -> Chunk:
    """The points of every cloud, in one group or several, each of which sees the cloud."""
    number = places.shape[0]
    points = torch.arange(number, device=places.device)
    if batch is None:
        one = points.unsqueeze(0)
        return Chunk(one, one, False, 0)
    ordered, order = batch.sort()
    cloud, start = stretches(ordered)
    place = points - start.index_select(0, cloud)
    sizes = torch.zeros_like(start).index_add(0, cloud, torch.ones_like(cloud))
    keys = _table(order, cloud, place, start.shape[0], _size(_largest(sizes), number))
    # A long cloud among short ones would make all groups as long; clouds that are about alike are one group each.
    few = torch.minimum(_largest(sizes), _MEAN_SIZES * number // _largest(cloud + 1).clamp(min=1))
    parts = (sizes + few - 1) // few
    group = (parts.cumsum(0) - parts).index_select(0, cloud) + place // few
    groups = _size(_largest(group + 1), number)
    queries = _table(order, group, place % few, groups, _size(few, number))
    seen = torch.zeros_like(group[:groups]).scatter(0, group, cloud)
    return Chunk(queries, keys.index_select(0, seen), True)


def _by_rule(places: Tensor, clouds: Chunk, rule: Neighbourhood) -> Chunk:
    """Every point by itself, with those of its cloud that are neighbours by a rule."""
    x, queries, keys = rule.precise(places), clouds.queries.unsqueeze(2), clouds.keys.unsqueeze(1)
    square = rule.squares(_rows(x, queries), _rows(x, keys))
    if clouds.padded:
        square = square.masked_fill((queries < 0) | (keys < 0), torch.inf)
    # A point is the nearest to itself, also where others lie at the same place.
    square = square.masked_fill(queries == keys, -1.0)
    bound = torch.finfo(square.dtype).max if rule.radius is None else rule.radius * rule.radius
    asking, square, keys = (t.flatten(0, 1) for t in (queries.squeeze(2), square, keys.expand(square.shape)))
    if clouds.padded:
        there = where(asking >= 0)
        asking, square, keys = (t.index_select(0, there) for t in (asking, square, keys))
    if rule.num_neighbours is not None:
        # As many again that are infinitely far, in case there are fewer.
        square, keys = (F.pad(t, (0, rule.num_neighbours), value=v) for t, v in ((square, torch.inf), (keys, -1)))
        square, nearest = square.topk(rule.num_neighbours, largest=False)
        return Chunk(asking.unsqueeze(1), torch.where(square <= bound, keys.gather(1, nearest), -1), True)
    near = square <= bound
    query, key = near.nonzero().unbind(1)
    return Chunk(asking.unsqueeze(1), _Lists(query, near.sum(1)).of(keys[query, key]), True)


class _Lists:
    """Entries row by row.

    Args:
        row: ``(E,)``, of each entry, rising.
        number: ``(R,)``, how many each row has.
    """

    def __init__(self, row: Tensor, number: Tensor):
        entry = torch.arange(row.shape[0], device=row.device)
        self._row = row
        self._place = entry - (number.cumsum(0) - number).index_select(0, row)
        self._rows, self._longest = number.shape[0], _size(_largest(number), row.shape[0])

    def of(self, entries: Tensor) -> Tensor:
        """The entries ``(E,)`` as ``(R, longest)``; -1 fills up."""
        return _table(entries, self._row, self._place, self._rows, self._longest)


def _table(entries: Tensor, row: Tensor, place: Tensor, rows: int, longest: int) -> Tensor:
    """Entries ``(E,)`` at their places in the rows of a table ``(rows, longest)``; -1 elsewhere."""
    empty = entries.new_full((rows * longest,), -1)
    return empty.scatter(0, row * longest + place, entries).view(rows, longest)


def _rows(x: Tensor, index: Tensor) -> Tensor:
    """The rows of an index of any shape; any row for -1."""
    return x.index_select(0, index.clamp(min=0).flatten()).unflatten(0, index.shape)


def _largest(numbers: Tensor) -> Tensor:
    """The largest of some numbers from 0 on, and 0 of none."""
    return F.pad(numbers, (0, 1)).max()


def _size(number: Tensor, most: int) -> int:
    """A number, at most so large, as a size: that of a tensor, which all that writes programs down follow."""
    return where(torch.arange(most, device=number.device) < number).shape[0]
