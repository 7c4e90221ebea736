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

__all__ = ["all_at_once", "in_parts"]

_LEAST = 2
"""The length of the shortest groups: AOTInductor has to know that no axis has length 1, which it could expand."""

_MOST = 2**21 - 1
"""The most groups, and the longest: the bounds of products of three sizes, which programs have, are of 64 bits."""

_MEAN_SIZES = 2
"""Of how many clouds of mean size there are points in a group, at most."""


def all_at_once(
    places: Tensor, edge_index: Tensor | None, batch: Tensor | None, rule: Neighbourhood, numbered: bool = False
) -> Chunk:
    """All points in one chunk, with the keys that each of them sees.

    Args:
        places: ``(N, d)``, where neighbours are searched.
        edge_index: ``(2, E)``, from keys to queries; None for those of the rule.
        batch: ``(N,)``, the number of the cloud of each point, in any order, below zero for those of none; None for a
            single cloud.
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


def in_parts(some: Chunk, parts: int) -> list[Chunk]:
    """Lists of keys in so many chunks, the longest lists first, so that those of a chunk are about as long.

    Queries of a single cloud are in as many chunks, and what is in groups otherwise stays in one.

    Example:
        >>> import torch
        >>> from escnn_attention.geometry.at_once import in_parts
        >>> from escnn_attention.geometry.clouds import Chunk
        >>> keys = torch.tensor([[0, 1, -1], [0, 1, 2], [1, 2, -1]])
        >>> [part.keys.tolist() for part in in_parts(Chunk(torch.arange(3)[:, None], keys, True), 2)]
        [[[0, 1, 2], [0, 1, -1], [1, 2, -1]], [[-1, -1], [-1, -1], [-1, -1]]]
    """
    if some.first is not None:
        queries = _split(some.queries.squeeze(0), parts)
        return [Chunk(part.unsqueeze(0), some.keys, True) for part in queries]
    if not isinstance(some.queries.shape[1], int) or some.queries.shape[1] > 1:
        return [some]
    degree, order = (some.keys >= 0).sum(1).sort(descending=True)
    lists = [None if t is None else _split(t.index_select(0, order), parts) for t in (some.keys, some.edges)]
    all_queries, degrees = _split(some.queries.index_select(0, order), parts), _split(degree, parts)
    out = []
    for i, part in enumerate(all_queries):
        first = torch.arange(_size(_largest(degrees[i]), some.keys.shape[1], _LEAST), device=order.device)
        keys, edges = (None if t is None else t[i].index_select(1, first) for t in lists)
        assert keys is not None
        out.append(Chunk(part, keys, True, edges=edges))
    return out


def _split(rows: Tensor, parts: int) -> tuple[Tensor, ...]:
    """Rows in parts of as many, filled up with -1."""
    size = rows.shape[0] // parts + _LEAST
    whole = F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, parts * size - rows.shape[0]), value=-1)
    return whole.view(parts, size, *rows.shape[1:]).unbind()


def _by_edges(edges: Tensor, number: int, numbered: bool) -> Chunk:
    queries, order = edges[1].sort()
    keys = edges[0].index_select(0, order)
    lists = _Lists(queries, queries, number)
    return Chunk(lists.queries, lists.of(keys), True, edges=lists.of(order) if numbered else None)


def _whole_clouds(places: Tensor, batch: Tensor | None) -> Chunk:
    """The points of every cloud, in one group or several, each of which sees the cloud."""
    number = places.shape[0]
    if batch is None:
        one = torch.arange(number, device=places.device).unsqueeze(0)
        return Chunk(one, one, False, 0)
    ordered, order = batch.sort()
    there = where(ordered >= 0)
    ordered, order = ordered.index_select(0, there), order.index_select(0, there)
    cloud, start = stretches(ordered)
    place = torch.arange(order.shape[0], device=order.device) - start.index_select(0, cloud)
    clouds = _size(_largest(cloud + 1), number, 1)
    sizes = order.new_zeros(clouds).index_add(0, cloud, torch.ones_like(cloud))
    longest = sizes.max().clamp(min=_LEAST)
    keys = _table(order, cloud, place, clouds, _size(longest, number, _LEAST))
    # A long cloud among short ones would make all groups as long; clouds that are about alike are one group each.
    few = torch.minimum(longest, _MEAN_SIZES * sizes.sum() // clouds).clamp(min=_LEAST)
    parts = (sizes + few - 1) // few
    group = (parts.cumsum(0) - parts).index_select(0, cloud) + place // few
    groups = _size(_largest(group + 1), number, 1)
    queries = _table(order, group, place % few, groups, _size(few, number, _LEAST))
    seen = group.new_zeros(groups).scatter(0, group, cloud)
    return Chunk(queries, keys.index_select(0, seen), True)


def _by_rule(places: Tensor, clouds: Chunk, rule: Neighbourhood) -> Chunk:
    """Every point by itself, with those of its cloud that are neighbours by a rule."""
    queries, keys = clouds.queries.unsqueeze(2), clouds.keys.unsqueeze(1)
    # Every coordinate by itself, so that numbers of pairs lie side by side.
    x = rule.precise(places).T.contiguous()
    x = x.unsqueeze(1) if clouds.first is not None else F.pad(x, (0, 1))
    of_queries, of_keys = (
        x if clouds.first is not None else _columns(x, index) for index in (clouds.queries, clouds.keys)
    )
    square = rule.squares(of_queries.unsqueeze(3).movedim(0, -1), of_keys.unsqueeze(2).movedim(0, -1))
    # A point is the nearest to itself, also where others lie at the same place.
    square = square.masked_fill(queries == keys, -1.0)
    if clouds.padded:
        square = square.masked_fill((queries < 0) | (keys < 0), torch.inf)
    number, few = places.shape[0], rule.num_neighbours
    most = torch.finfo(square.dtype).max if rule.radius is None else rule.radius * rule.radius
    # A tensor: numbers by themselves go through single precision on their way to ONNX, where the largest is infinite.
    bound = torch.tensor(most, dtype=square.dtype, device=square.device)
    asking, square = queries.flatten(), square.flatten(0, 1)
    size = clouds.queries.shape[1]
    if few is None:
        query, key = (square <= bound).nonzero().unbind(1)
        lists = _Lists(query, asking.index_select(0, query), number)
        return Chunk(lists.queries, lists.of(clouds.keys[query // size, key]), True)
    # As many again that are infinitely far, in case there are fewer.
    square, nearest = F.pad(square, (0, few), value=torch.inf).topk(few, largest=False)
    there = where(asking >= 0)
    row, square, nearest = there.unsqueeze(1) // size, square.index_select(0, there), nearest.index_select(0, there)
    keys = torch.where(square <= bound, clouds.keys[row, nearest.clamp(max=clouds.keys.shape[1] - 1)], -1)
    asking = asking.index_select(0, there)
    points = asking.new_full((number,), -1).index_copy(0, asking, asking)
    return Chunk(points.unsqueeze(1), keys.new_full((number, few), -1).index_copy(0, asking, keys), True)


class _Lists:
    """Entries of edges as a list for each of N points; a point without any is no query: it gets zeros.

    Args:
        row: ``(E,)``, rising: entries of one query have the same.
        query: ``(E,)``, the point.
        number: N.
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
    """A number as a size, that of a tensor, which all that writes programs down follow.

    Args:
        number: itself.
        most: at least as large.
        least: the size of less.
    """
    size = where(torch.arange(most + least, device=number.device) < number.clamp(min=least)).shape[0]
    torch._check(size >= least)
    torch._check(size <= _MOST)
    return size
