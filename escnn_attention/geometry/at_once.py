"""Who sees whom in a single chunk, by operations of PyTorch and ONNX alone: for programs that are written down.

They take it some :class:`Rows` at a time. No decision depends on the numbers, and sizes that follow from them are those
of tensors, so that a program that is written down is for any clouds. Groups are filled up to the longest: the pairs of
a chunk are at most three times as many as there are points, times the most keys of a point.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from escnn_attention.exporting.loops import name_sizes_apart
from escnn_attention.geometry.neighbours import Chunk, Neighbourhood, stretches, where

_LEAST = 2
"""The length of the shortest groups: AOTInductor has to know that no axis has length 1, which it could expand."""

_MOST = 2**21 - 1
"""The most groups, and the longest: the bounds of products of three sizes, which programs have, are of 64 bits."""

_FAR = 1e30
"""A coordinate that is far from all others, and not from itself; its square is a number."""

_MEAN_SIZES = 2
"""Of how many clouds of mean size there are points in a group, at most."""


def all_at_once(
    places: Tensor, edge_index: Tensor | None, batch: Tensor | None, rule: Neighbourhood, numbered: bool = False
) -> Chunk:
    """All points ``(N, d)`` in one chunk, with the keys that each of them sees: see :class:`~.points.Points`.

    Points of a ``batch`` below zero are of no cloud. A ``numbered`` chunk tells which of the edges is which.

    >>> some = all_at_once(torch.tensor([[0.0], [1.0], [3.0]]), None, None, Neighbourhood(radius=1.5))
    >>> some.queries.flatten().tolist(), some.keys.tolist()
    ([0, 1, 2], [[0, 1], [0, 1], [2, -1]])
    """
    name_sizes_apart()
    if edge_index is not None:
        return _by_edges(edge_index.long(), places.shape[0], numbered)
    clouds = _whole_clouds(places, batch)
    return clouds if rule.is_global else _by_rule(places, clouds, rule)


def clouds_at_once(places: Tensor, batch: Tensor | None) -> Chunk:
    """All clouds in one chunk, each a group, filled up to the longest: see :func:`all_at_once`.

    >>> clouds_at_once(torch.zeros(5, 1), torch.tensor([1, 0, 1, 1, -1])).keys.tolist()
    [[1, -1, -1], [0, 2, 3]]
    """
    name_sizes_apart()
    if batch is None:
        one = torch.arange(places.shape[0], device=places.device).unsqueeze(0)
        return Chunk(one, one, False, 0)
    keys = _members(batch)[0]
    return Chunk(keys, keys, True)


def pairs_at_once(
    queries: Tensor,
    query_batch: Tensor | None,
    keys: Tensor,
    key_batch: Tensor | None,
    rule: Neighbourhood = Neighbourhood(),  # noqa: B008
) -> Chunk:
    """All points ``(N, d)`` in one chunk, each with its neighbours in another cloud ``(N', d)``, of the same number.

    >>> some = pairs_at_once(torch.zeros(2, 1), torch.tensor([0, 1]), torch.zeros(3, 1), torch.tensor([1, 0, 1]))
    >>> some.queries.flatten().tolist(), some.keys.tolist()
    ([0, 1], [[1, -1], [0, 2]])
    """
    name_sizes_apart()
    if query_batch is None and key_batch is None and rule.is_global:
        asking, asked = (torch.arange(t.shape[0], device=t.device).unsqueeze(0) for t in (queries, keys))
        return Chunk(asking, asked, False, 0)
    batches = ((queries, query_batch), (keys, key_batch))
    asking, asked = (t.new_zeros(t.shape[0], dtype=torch.long) if batch is None else batch for t, batch in batches)
    there = (asking.unsqueeze(1) == asked) & (asked >= 0)
    found = torch.arange(keys.shape[0], device=keys.device).expand_as(there)
    if not rule.is_global:
        there, found = _nearest(queries, keys, there, rule)
    query, place = there.nonzero().unbind(1)
    return _by_edges(torch.stack([found[query, place], query]), queries.shape[0], False)


def _nearest(queries: Tensor, keys: Tensor, there: Tensor, rule: Neighbourhood) -> tuple[Tensor, Tensor]:
    """Which of some keys of every query are neighbours, ``(N, n)``, and these keys, of those that are ``there``."""
    square = rule.squares(rule.precise(queries).unsqueeze(1), rule.precise(keys)).masked_fill(~there, torch.inf)
    found = torch.arange(keys.shape[0], device=keys.device).expand_as(there)
    if (few := rule.num_neighbours) is not None:
        # As many again that are infinitely far, in case there are fewer.
        square, found = F.pad(square, (0, few), value=torch.inf).topk(few, largest=False)
    most = torch.finfo(square.dtype).max if rule.radius is None else rule.radius * rule.radius
    # A tensor, as in _by_rule.
    return square <= torch.tensor(most, dtype=square.dtype, device=square.device), found


class Rows:
    """The groups of a chunk, or the queries of a single cloud, some at a time: as many at every step of a loop.

    There are at most ``pairs`` of a query and a key at a time, where two rows have no more. ``number`` is that of all
    rows, ``step`` of those at a time.

    >>> keys = torch.tensor([[0, 1], [0, -1], [1, 2]])
    >>> rows = Rows(Chunk(torch.arange(3)[:, None], keys, True), pairs=5)
    >>> rows.some(rows.step).queries.flatten().tolist()
    [2, -1]
    """

    def __init__(self, one: Chunk, pairs: int):
        groups, queries = one.queries.shape
        self._one, self._alone = one, one.first is not None
        rows, of_each = (queries, one.keys.shape[1]) if self._alone else (groups, queries * one.keys.shape[1])
        self.number, most, least = (torch.scalar_tensor(n, dtype=torch.long) for n in (rows, pairs, of_each))
        some = _size(most // least.clamp(min=1), rows, _LEAST)
        self._those = torch.arange(some, device=one.keys.device)
        self.step = torch.scalar_tensor(some, dtype=torch.long)

    def some(self, first: Tensor) -> Chunk:
        """The rows from the first on, ``()``; behind the last ones -1 fills up the queries."""
        index = first + self._those
        there = index < self.number
        if self._alone:
            return Chunk(torch.where(there, index, -1).unsqueeze(0), self._one.keys, True)
        index = torch.minimum(index, self.number - 1)
        queries = torch.where(there.unsqueeze(1), self._one.queries.index_select(0, index), -1)
        edges = None if self._one.edges is None else self._one.edges.index_select(0, index)
        return Chunk(queries, self._one.keys.index_select(0, index), True, edges=edges)


def _by_edges(edges: Tensor, number: int, numbered: bool) -> Chunk:
    queries, order = edges[1].sort()
    keys = edges[0].index_select(0, order)
    lists = _Lists(queries, queries, number)
    return Chunk(lists.queries, lists.of(keys), True, edges=lists.of(order) if numbered else None)


def _whole_clouds(places: Tensor, batch: Tensor | None) -> Chunk:
    """The points of every cloud, in one group or several, each of which sees the cloud."""
    if batch is None:
        return clouds_at_once(places, None)
    number = batch.shape[0]
    keys, order, cloud, place = _members(batch)
    clouds = keys.shape[0]
    sizes = order.new_zeros(clouds).index_add(0, cloud, torch.ones_like(cloud))
    longest = sizes.max().clamp(min=_LEAST)
    # A long cloud among short ones would make all groups as long; clouds that are about alike are one group each.
    few = torch.minimum(longest, _MEAN_SIZES * sizes.sum() // clouds).clamp(min=_LEAST)
    parts = (sizes + few - 1) // few
    group = (parts.cumsum(0) - parts).index_select(0, cloud) + place // few
    groups = _size(_largest(group + 1), number, 1)
    queries = _table(order, group, place % few, groups, _size(few, number, _LEAST))
    seen = group.new_zeros(groups).scatter(0, group, cloud)
    return Chunk(queries, keys.index_select(0, seen), True)


def _members(batch: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The points of every cloud ``(clouds, longest)``; and in their order points, their clouds and places in these."""
    number = batch.shape[0]
    ordered, order = batch.sort()
    there = where(ordered >= 0)
    ordered, order = ordered.index_select(0, there), order.index_select(0, there)
    cloud, start = stretches(ordered)
    place = torch.arange(order.shape[0], device=order.device) - start.index_select(0, cloud)
    clouds = _size(_largest(cloud + 1), number, 1)
    longest = _size(_largest(place + 1), number, _LEAST)
    return _table(order, cloud, place, clouds, longest), order, cloud, place


def _by_rule(places: Tensor, clouds: Chunk, rule: Neighbourhood) -> Chunk:
    """Every point by itself, with those of its cloud that are neighbours by a rule."""
    number, few = places.shape[0], rule.num_neighbours
    x = rule.precise(places)
    # What is done to all pairs costs the most. A ball needs no masks of these: what fills up is far from all points,
    # and points are near themselves, also those that are nowhere, whose outputs say so then.
    ball = few is None and rule.metric is None and rule.period is None
    if ball:
        x = torch.where(x.isfinite(), x, _FAR)
    # Every coordinate by itself, so that numbers of pairs lie side by side.
    x = x.T.contiguous()
    x = x.unsqueeze(1) if clouds.first is not None else F.pad(x, (0, 1), value=torch.inf)
    of_queries, of_keys = (
        x if clouds.first is not None else _columns(x, index) for index in (clouds.queries, clouds.keys)
    )
    square = rule.squares(of_queries.unsqueeze(3).movedim(0, -1), of_keys.unsqueeze(2).movedim(0, -1))
    if not ball:
        queries, keys = clouds.queries.unsqueeze(2), clouds.keys.unsqueeze(1)
        # A point is the nearest to itself, also where others lie at the same place.
        square = square.masked_fill(queries == keys, -1.0)
        if clouds.padded:
            square = square.masked_fill((queries < 0) | (keys < 0), torch.inf)
    most = torch.finfo(square.dtype).max if rule.radius is None else rule.radius * rule.radius
    # A tensor: numbers by themselves go through single precision on their way to ONNX, where the largest is infinite.
    bound = torch.tensor(most, dtype=square.dtype, device=square.device)
    asking, size = clouds.queries.flatten(), clouds.queries.shape[1]
    if few is None:
        row, column = (square <= bound).flatten(0, 1).nonzero().unbind(1)
        lists = _Lists(row, asking.index_select(0, row), number)
        return Chunk(lists.queries, lists.of(clouds.keys[row // size, column]), True)
    # As many again that are infinitely far, in case there are fewer.
    square, nearest = F.pad(square.flatten(0, 1), (0, few), value=torch.inf).topk(few, largest=False)
    there = where(asking >= 0)
    row, square, nearest = there.unsqueeze(1) // size, square.index_select(0, there), nearest.index_select(0, there)
    of_each = torch.where(square <= bound, clouds.keys[row, nearest.clamp(max=clouds.keys.shape[1] - 1)], -1)
    asking = asking.index_select(0, there)
    points = asking.new_full((number,), -1).index_copy(0, asking, asking)
    return Chunk(points.unsqueeze(1), of_each.new_full((number, few), -1).index_copy(0, asking, of_each), True)


class _Lists:
    """Entries of edges as a list for each of so many points; a point without any is no query: it gets zeros.

    ``row`` ``(E,)`` rises: entries of one ``query`` ``(E,)`` have the same.
    """

    def __init__(self, row: Tensor, query: Tensor, number: int):
        which, start = stretches(row)
        entry = torch.arange(row.shape[0], device=row.device)
        self._row, self._place = query, entry - start.index_select(0, which)
        self._rows, self._longest = number, _size(_largest(self._place + 1), row.shape[0], _LEAST)
        self.queries = query.new_full((number,), -1).scatter(0, query, query).unsqueeze(1)

    def of(self, entries: Tensor) -> Tensor:
        """The entries ``(E,)`` as ``(N, longest)``; -1 fills up."""
        return _table(entries, self._row, self._place, self._rows, self._longest)


def _table(entries: Tensor, row: Tensor, place: Tensor, rows: int, longest: int) -> Tensor:
    """Entries ``(E,)`` at their places in the rows of a table ``(rows, longest)``; -1 elsewhere."""
    empty = entries.new_full((rows * longest,), -1)
    return empty.scatter(0, row * longest + place, entries).view(rows, longest)


def _columns(x: Tensor, index: Tensor) -> Tensor:
    """The columns of ``x``, ``(d, N)``, of an index of any shape; the last for -1."""
    index = torch.where(index < 0, x.shape[1] - 1, index)
    return x.index_select(1, index.flatten()).unflatten(1, index.shape)


def _largest(numbers: Tensor) -> Tensor:
    """The largest of some numbers from 0 on, and 0 of none."""
    return F.pad(numbers, (0, 1)).max()


def _size(number: Tensor, most: int, least: int) -> int:
    """A number as a size between ``least`` and ``most``, that of a tensor, which written programs follow."""
    size = where(torch.arange(most + least, device=number.device) < number.clamp(min=least)).shape[0]
    torch._check(size >= least)
    torch._check(size <= _MOST)
    return size
