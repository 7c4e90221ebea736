r"""Which points of a cloud see each other.

Clouds of a batch lie end to end, as in PyTorch Geometric: ``coords`` is ``(N, d)`` and ``batch``, ``(N,)``, is the
number of the cloud of each point. Attention reads a neighbourhood in chunks, groups of queries that see the same keys:
a query by itself with the list of its keys, or the points of a whole cloud together. What is kept between chunks grows
with the number of edges, and of whole clouds with the number of points.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from scipy.spatial import cKDTree
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from escnn_attention.geometry.cache import constant_tables, for_this_call, in_graph, kept


class Chunk(NamedTuple):
    """Groups of queries ``(G, A)`` that see the same keys ``(G, K)``; -1 fills up, where a chunk is ``padded``.

    ``queries`` is ``keys`` itself where all points of a group see each other. ``first``: queries and keys are all
    points from this one on, row by row. ``edges`` ``(G, K)`` are the numbers of the edges from the keys, of numbered
    lists. ``repeats`` groups, one after the other, have the same relations to their keys. Where there is ``keys_of``,
    ``keys`` are those of the first of them, and this function makes those of all, by their queries. ``arc``
    ``(n, m)``: every n queries, one after the other, lie side by side on a ring of m points, and see whole rings.
    """

    queries: Tensor
    keys: Tensor
    padded: bool
    first: int | None = None
    edges: Tensor | None = None
    repeats: int = 1
    keys_of: Callable[[Tensor, Tensor], Tensor] | None = None
    arc: tuple[int, int] | None = None

    def whole(self) -> Chunk:
        """The chunk with the keys of all groups."""
        if self.keys_of is None:
            return self
        keys = self.keys_of(self.queries.view(-1, self.repeats), self.keys)
        return self._replace(keys=keys.flatten(0, 1), keys_of=None, arc=None)

    def firsts(self) -> Chunk:
        """Of groups that have the same relations the first one."""
        keys = self.keys if self.keys_of is not None else self.keys[:: self.repeats]
        return self._replace(queries=self.queries[:: self.repeats], keys=keys, keys_of=None)

    def by_ring(self) -> Chunk:
        """The queries of an arc as a group, which sees all rings in their order."""
        assert self.arc is not None
        assert self.keys_of is not None
        queries = self.queries.view(-1, self.arc[0])
        first = queries[:, 0] - queries[:, 0] % self.arc[1]
        keys = self.keys_of(first.view(len(self.keys), -1), self.keys).flatten(0, 1)
        return self._replace(queries=queries, keys=keys, keys_of=None)


class Neighbours(ABC):
    """Which points each point sees."""

    def chunks(self, limit: int) -> list[Chunk]:
        """Chunks of all queries that see anything, each once, of at most so many pairs, or of one query."""
        return self._once(self._chunks, limit)

    def _once(self, make: Callable[..., list[Chunk]], *arguments: Any) -> list[Chunk]:
        """The result of a method, kept for later calls."""
        made, key = vars(self).setdefault("_made", {}), (make.__name__, arguments)
        if key in made:
            return made[key]  # type: ignore[no-any-return]
        chunks = make(*arguments)
        if not for_this_call():
            made[key] = chunks
        return chunks

    @abstractmethod
    def _chunks(self, limit: int) -> list[Chunk]: ...


class Lists(Neighbours):
    """A list of keys for every query, of edges ``(2, E)`` from keys to queries, among N points or from other points.

    Numbered lists tell which edge is which.
    """

    def __init__(self, edges: Tensor, num_points: int, num_keys: int | None = None, numbered: bool = False):
        num_keys = num_points if num_keys is None else num_keys
        for points, number in zip(edges, (num_keys, num_points), strict=True):
            if points.numel() and not 0 <= int(points.min()) <= int(points.max()) < number:
                raise ValueError(
                    f"edge_index: got points from {int(points.min())} to {int(points.max())}, needed numbers from 0 to "
                    f"{number - 1}"
                )
        keys, queries = edges.long()
        order = queries.argsort(stable=True)
        self._keys = keys[order]
        self._numbers = order if numbered else None
        self._degree = torch.bincount(queries, minlength=num_points)

    def _chunks(self, limit: int) -> list[Chunk]:
        # The longest lists first, so that those of a chunk are about as long.
        degree, order = self._degree.sort(descending=True, stable=True)
        start = (self._degree.cumsum(0) - self._degree)[order]
        lengths = array_of("edge_index", degree[: int((degree > 0).sum())]).tolist()
        out = []
        for i, j in _cuts(lengths, [1] * len(lengths), limit):
            lists = (start[i:j], degree[i:j], lengths[i])
            numbers = None if self._numbers is None else _rows(self._numbers, *lists)
            keys = _rows(self._keys, *lists)
            out.append(Chunk(order[i:j, None], keys, lengths[j - 1] < lengths[i], edges=numbers))
        return out


class WholeClouds(Neighbours):
    """Every point sees its whole cloud, by its number ``(N,)``; ``sizes`` are those of clouds, the largest first."""

    def __init__(self, cloud: Tensor):
        self._order, counts = _in_order(cloud)
        self._counts, clouds = counts.sort(descending=True, stable=True)
        self._start = (counts.cumsum(0) - counts)[clouds]
        in_order = (cloud[1:] >= cloud[:-1]).all()
        # A GPU is waited for once.
        *numbers, last = array_of("batch", torch.cat([self._counts, self._start, in_order.to(counts).view(1)])).tolist()
        self.sizes, self._starts = numbers[: len(counts)], numbers[len(counts) :]
        self._in_order = bool(last)

    @property
    def most_keys(self) -> int:
        """The largest number of keys that a query sees."""
        return max(self.sizes, default=0)

    @classmethod
    def single(cls, num_points: int, device: torch.device) -> WholeClouds:
        """A single cloud. Small ones on a CPU are made once; the oldest of many give way."""
        ordinary = device.type == "cpu" and not (torch.compiler.is_compiling() or is_in_torch_dispatch_mode())
        if ordinary and num_points in _single:
            return _single[num_points]
        ordinary = ordinary and num_points <= _MOST_POINTS
        one = cls.__new__(cls)
        # No GPU has to be waited for the size.
        one._order = _numbers(num_points) if ordinary else torch.arange(num_points, device=device)
        one._in_order = True
        one.sizes, one._starts = ([num_points], [0]) if num_points else ([], [])
        if ordinary:
            _single[num_points] = one
            if len(_single) > _MOST_SINGLE:
                _single.pop(next(iter(_single)), None)
        return one

    def alike(self, slack: float) -> list[Chunk]:
        """All points in groups of whole clouds, each of which is filled up to at most ``slack`` times its size."""
        stops = [0]
        for i, size in enumerate(self.sizes):
            if self.sizes[stops[-1]] > slack * size and i:
                stops.append(i)
        return self._once(self._groups, tuple(pairwise([*stops, len(self.sizes)])) if self.sizes else ())

    def _chunks(self, limit: int) -> list[Chunk]:
        return self._groups(tuple(_cuts(self.sizes, self.sizes, limit)), limit)

    def _groups(self, cuts: Sequence[tuple[int, int]], limit: int | None = None) -> list[Chunk]:
        lengths = self.sizes
        out: list[Chunk] = []
        first: int | None
        for i, j in cuts:
            first, padded = self._starts[i], lengths[j - 1] < lengths[i]
            stop = first + (j - i) * lengths[i]
            if self._in_order and not padded and self._starts[i:j] == [*range(first, stop, lengths[i])]:
                keys = self._order[first:stop].view(j - i, lengths[i])
            else:
                keys, first = _rows(self._order, self._start[i:j], self._counts[i:j], lengths[i]), None
            # One cloud may be too much at once: some of its points then are.
            size = lengths[i] if limit is None or j > i + 1 else max(1, limit // lengths[i])
            if size < lengths[i]:
                out += [Chunk(part, keys, False) for part in keys.split(size, dim=1)]
            else:
                out.append(Chunk(keys, keys, padded, first))
        return out


class Nearest(Neighbours):
    """So many keys ``(N, K)`` of every query, the nearest first; -1 at the end fills up, if ``padded``.

    Queries that see nothing are left out, but in a CUDA graph, which cannot wait for their number.
    """

    def __init__(self, keys: Tensor, padded: bool, among: bool):
        self._queries, self._keys, self._padded = torch.arange(len(keys), device=keys.device), keys, padded
        if not (among or in_graph()):  # among themselves points see themselves at least
            self._queries = where(keys[:, 0] >= 0)
            self._keys = keys[self._queries]

    def _chunks(self, limit: int) -> list[Chunk]:
        size = max(1, limit // max(1, self._keys.shape[1]))
        chunks = zip(self._queries.unsqueeze(1).split(size), self._keys.split(size), strict=True)
        return [Chunk(*of_chunk, self._padded) for of_chunk in chunks] if len(self._queries) else []


class CloudPairs(Neighbours):
    """Every point sees all points of another cloud, that of the same number, in any order; below zero is none."""

    @classmethod
    def of(
        cls, queries: Tensor | None, num_queries: int, keys: Tensor | None, num_keys: int, device: torch.device
    ) -> CloudPairs:
        """The pairs of clouds of so many queries and keys, by their numbers; None for a single cloud."""
        sets, numbers = (queries, keys), (num_queries, num_keys)
        if queries is not None or keys is not None:
            given = zip(sets, numbers, strict=True)
            return cls(*(torch.zeros(n, dtype=torch.long, device=device) if t is None else t for t, n in given))
        one = cls.__new__(cls)
        # No GPU has to be waited for the sizes.
        one._order = [torch.arange(n, device=device) for n in numbers]
        one._starts = torch.zeros(2, 1, dtype=torch.long, device=device)
        one._counts = torch.stack([torch.full((1,), n, device=device) for n in numbers])
        one._clouds, one._sizes = one._starts[0], [[*numbers]] if all(numbers) else []
        return one

    def __init__(self, queries: Tensor, keys: Tensor):
        names, number = torch.cat([queries, keys]).unique(return_inverse=True)
        there = names >= 0
        self._order, counts = [], []
        for of_points in number.split([len(queries), len(keys)]):
            self._order.append(of_points.argsort(stable=True))
            counts.append(torch.bincount(of_points, minlength=len(names)))
        self._starts = torch.stack([n.cumsum(0) - n for n in counts])
        self._counts = torch.stack(counts)
        both = where((counts[0] > 0) & (counts[1] > 0) & there)
        # The largest first, so that those of a chunk are about as large.
        self._clouds = both[self._counts[1, both].argsort(descending=True, stable=True)]
        self._sizes = array_of("batch", self._counts[:, self._clouds].T.contiguous()).tolist()

    @property
    def most_keys(self) -> int:
        """The largest number of keys that a query sees."""
        return max((keys for _, keys in self._sizes), default=0)

    def _chunks(self, limit: int) -> list[Chunk]:
        sizes, out, i = self._sizes, [], 0
        while i < len(sizes):
            j, (queries, keys) = i + 1, sizes[i]
            pairs = queries * keys
            while j < len(sizes):
                most, left = max(queries, sizes[j][0]), pairs + sizes[j][0] * sizes[j][1]
                if (j + 1 - i) * most * keys > min(limit, 2 * left):
                    break
                j, queries, pairs = j + 1, most, left
            padded = pairs < (j - i) * queries * keys
            out += self._chunk(self._clouds[i:j], queries, keys, limit, padded)
            i = j
        return out

    def _chunk(self, clouds: Tensor, queries: int, keys: int, limit: int, padded: bool) -> list[Chunk]:
        """Clouds of up to so many queries and keys, or where one is too much at once, some of its queries."""
        starts, counts, longest = self._starts[:, clouds], self._counts[:, clouds], (queries, keys)
        rows = [_rows(*of_set) for of_set in zip(self._order, starts, counts, longest, strict=True)]
        size = queries if len(clouds) > 1 else max(1, min(queries, limit // keys))
        return [Chunk(part, rows[1], padded) for part in rows[0].split(size, dim=1)]


_MOST_SINGLE, _MOST_POINTS = 64, 2**16
_single: dict[int, WholeClouds] = {}


@constant_tables
def _numbers(number: int) -> Tensor:
    return torch.arange(number)


def _rows(entries: Tensor, start: Tensor, number: Tensor, longest: int) -> Tensor:
    """The stretches of entries that begin at ``start``, ``(rows,)``, as ``(rows, longest)``; -1 fills up."""
    place = torch.arange(longest, device=entries.device)
    there = place < number[:, None]
    return torch.where(there, entries[torch.where(there, start[:, None] + place, 0)], -1)


def _cuts(keys: Sequence[int], queries: Sequence[int], limit: int) -> Iterator[tuple[int, int]]:
    """Stretches of falling numbers of keys and queries, each of which fits when it is filled up to its first."""
    stops = [0]
    for i in range(1, len(keys)):
        first = stops[-1]
        if (i - first + 1) * keys[first] * queries[first] > limit:
            stops.append(i)
    return pairwise([*stops, len(keys)] if keys else [])


@dataclass(frozen=True)
class Neighbourhood:
    """The rule by which the points of a cloud are neighbours. A point is a neighbour of itself.

    Attributes:
        radius: the largest distance, in the units of the coordinates; None for any.
        num_neighbours: the nearest so many, the point itself included; None for all. Ties are broken arbitrarily.
        metric: the distance ``(...)`` of points ``(..., d)``; None for that of their coordinates.
        period: of each coordinate, where the distance is that of the nearest images in a periodic box.
    """

    radius: float | None = None
    num_neighbours: int | None = None
    metric: Callable[[Tensor, Tensor], Tensor] | None = field(default=None, repr=False)
    period: tuple[float, ...] | None = field(default=None, repr=False)

    @property
    def is_global(self) -> bool:
        """Whether every point sees its whole cloud."""
        return self.radius is None and self.num_neighbours is None

    @property
    def length(self) -> float:
        """The radius, or 1 where there is none."""
        return self.radius or 1.0

    def __call__(self, coords: Tensor, batch: Tensor | None = None) -> Neighbours:
        """The neighbours of every point ``(N, d)`` in its cloud, by the number of the cloud of each, in any order."""
        x = numbers_of("coords", coords)
        if self._by_tree_on(x):
            cloud = torch.zeros(len(x), dtype=torch.long, device=x.device) if batch is None else batch
            return Lists(self._by_tree(x, cloud), len(x))
        clouds = WholeClouds.single(len(x), x.device) if batch is None else kept(WholeClouds, batch)
        return clouds if self.is_global else self._by_distances(x, clouds)

    def _by_tree_on(self, x: Tensor) -> bool:
        """Whether neighbours among these points are searched by a tree."""
        return x.device.type == "cpu" and self.metric is None and not self.is_global

    def between(
        self, queries: Tensor, query_batch: Tensor | None, keys: Tensor, key_batch: Tensor | None
    ) -> Neighbours:
        """The neighbours of points ``(N, d)`` among the points ``(N', d)`` of clouds of the same number."""
        x, y = (numbers_of("coords", t) for t in (queries, keys))
        clouds = kept(CloudPairs.of, query_batch, len(x), key_batch, len(y), x.device)
        return clouds if self.is_global else self._by_distances(x, clouds, y)

    def precise(self, x: Tensor) -> Tensor:
        """Coordinates as distances take them: double, but for metrics, as ONNX has no angles in double."""
        single = self.metric is not None or x.device.type == "mps"
        return x.to(torch.promote_types(x.dtype, torch.float32)) if single else x.double()

    def squares(self, query: Tensor, key: Tensor) -> Tensor:
        """The squared distances ``(...)`` of points ``(..., d)`` that broadcast against each other."""
        if self.metric is not None:
            return self.metric(query, key).square()
        # One by one: what is compiled takes many sums of a few numbers at a time then.
        offsets = (k - q for q, k in zip(query.unbind(-1), key.unbind(-1), strict=True))
        if self.period is not None:
            offsets = (nearest_image(*pair) for pair in zip(offsets, self.period, strict=True))
        return functools.reduce(torch.add, (offset.square() for offset in offsets))

    def _by_tree(self, x: Tensor, cloud: Tensor) -> Tensor:
        if not len(x):
            return cloud.new_zeros(2, 0)
        points = array_of("coords", x.double())
        box = None
        if self.period is not None:
            sides = np.array(self.period)
            points = points - sides * np.floor(points / sides)
            points = np.where((points < 0) | (points >= sides), 0.0, points)  # whatever rounding says
            box = np.append(sides, 0.0)  # none along the axis of the clouds
        extent = float(np.ptp(points, axis=0).max(initial=0.0)) * max(1, points.shape[1]) ** 0.5
        clouds = array_of("batch", cloud.unique(return_inverse=True)[1])
        # Clouds side by side along one more axis, so far apart that all points of a cloud are nearer than any other.
        apart = 2 * max(extent, self.radius or 0.0, 1.0)
        points = np.concatenate([points, apart * clouds[:, None]], axis=1)
        tree = cKDTree(points, boxsize=box)
        if self.num_neighbours is None:
            assert self.radius is not None
            pairs = torch.from_numpy(tree.query_pairs(self.radius, output_type="ndarray").astype(np.int64)).T
            own = torch.arange(len(x), device=x.device).expand(2, -1)
            return torch.cat([pairs, pairs.flip(0), own], dim=1)
        number = min(self.num_neighbours, len(x))
        bound = np.inf if self.radius is None else np.nextafter(self.radius, np.inf)
        distance, nearest = tree.query(points, k=number, distance_upper_bound=bound)
        distance, nearest = (torch.from_numpy(a).view(len(x), number) for a in (distance, nearest))
        found = distance.isfinite()
        keys = torch.where(found, nearest, 0)
        found &= cloud[keys] == cloud[:, None]
        queries = torch.arange(len(x), device=x.device)[:, None].expand_as(keys)
        # Where so many others lie at the same place, one of them gives way.
        absent = ~((keys == queries) & found).any(1)
        keys[absent, 0] = queries[absent, 0]
        return torch.stack([keys[found], queries[found]])

    def _by_distances(self, x: Tensor, clouds: WholeClouds | CloudPairs, y: Tensor | None = None) -> Neighbours:
        """The neighbours of points ``(N, d)`` in their ``clouds``, among themselves or the keys ``(N', d)``.

        For a number of neighbours, and in CUDA graphs, the host reads the sizes of clouds only, and between two sets
        outside of graphs which queries see anything.
        """
        among, few = y is None, self.num_neighbours
        if few is None and in_graph():
            few = clouds.most_keys
        queries, others = self.precise(x), self.precise(x if y is None else y)
        bound = torch.finfo(queries.dtype).max if self.radius is None else self.radius * self.radius
        edges, rows = [torch.zeros(2, 0, dtype=torch.long, device=x.device)], []
        for some in clouds.chunks(_DISTANCES):
            asking, keys = some.queries.unsqueeze(2), some.keys.unsqueeze(1)
            square = self.squares(queries[asking], others[keys]).masked_fill(keys < 0, torch.inf)
            if among:
                # A point is the nearest to itself, also where others lie at the same place.
                square = square.masked_fill(asking == keys, -1.0)
            keys = keys.expand_as(square)
            if few is not None:
                square, nearest = square.topk(min(few, keys.shape[2]), largest=False)
                keys = keys.gather(2, nearest).where(square <= bound, -1)
                rows.append((some.queries.flatten(), F.pad(keys.flatten(0, 1), (0, few - keys.shape[2]), value=-1)))
            else:
                found = (square <= bound) & (asking >= 0)
                edges.append(torch.stack([keys[found], asking.expand_as(keys)[found]]))
        if few is None or not rows:
            return Lists(torch.cat(edges, dim=1), len(x), len(others))
        table = torch.full((len(x) + 1, few), -1, device=x.device)
        for asking, keys in rows:
            # One row more is for queries that fill up.
            table = table.index_copy(0, torch.where(asking < 0, len(x), asking), keys)
        complete = self.radius is None and isinstance(clouds, WholeClouds) and clouds.sizes[-1] >= few
        return Nearest(table[:-1], not complete, among)


# The distances that are worked out at once on a GPU.
_DISTANCES = 2**22


def largest_step(query: Tensor, key: Tensor) -> Tensor:
    """The largest distance ``(...)`` along an axis of points ``(..., d)``: by it boxes are balls."""
    return (key - query).abs().amax(-1)


def nearest_image(offset: Tensor, period: tuple[float, ...] | float | None) -> Tensor:
    """The shortest of the offsets ``(..., d)`` between the images of two points in a box of these periods, or this one.

    >>> nearest_image(torch.tensor([4.0, -4.0, 11.0]), 5.0)
    tensor([-1.,  1.,  1.])
    """
    if period is None:
        return offset
    if isinstance(period, tuple):
        return torch.stack([nearest_image(x, p) for x, p in zip(offset.unbind(-1), period, strict=True)], dim=-1)
    return offset - period * (offset / period).round()


def numbers_of(name: str, values: Tensor) -> Tensor:
    """The numbers of a tensor, which ``grad`` or ``jvp`` of ``torch.func`` may have wrapped, without derivatives.

    A ValueError where ``torch.vmap`` goes over it: each of several calls would decide for itself.
    """
    found = numbers_if_one(values)
    if found is None:
        raise ValueError(
            f"{name}: got a tensor that torch.vmap goes over, and who sees whom depends on its numbers; needed all "
            "clouds end to end in one call, with the number of the cloud of each point in batch, or vmap over the "
            "features alone"
        )
    return found


def numbers_if_one(values: Tensor) -> Tensor | None:
    """The numbers of a tensor as :func:`numbers_of` gives them; None where ``torch.vmap`` goes over it."""
    values = values.detach()  # which a transform wraps like any other result
    while torch._C._functorch.is_functorch_wrapped_tensor(values):
        if torch._C._functorch.is_batchedtensor(values):
            return None
        values = torch._C._functorch.get_unwrapped(values)
    return values


def array_of(name: str, values: Tensor) -> np.ndarray:
    """The result of :func:`numbers_of` as an array on the CPU."""
    numbers = numbers_of(name, values)
    with torch._C._DisableFuncTorch():  # within a transform PyTorch would wrap what it reads
        # A copy where it is on the host, too, so that tests of what is read see it.
        return numbers.to("cpu", copy=True).numpy()


def _in_order(cloud: Tensor) -> tuple[Tensor, Tensor]:
    """The points cloud by cloud, and how many each cloud has."""
    order = cloud.argsort(stable=True)
    return order, torch.unique_consecutive(cloud[order], return_counts=True)[1]


def where(flags: Tensor) -> Tensor:
    """The indices of the flags ``(N,)`` that are true."""
    return flags.nonzero().squeeze(1)


def stretches(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """The stretch of equal numbers in which each of ``(N,)`` is, ``(N,)``, and where all begin, ``(G,)``.

    >>> stretches(torch.tensor([4, 4, 7, 5, 5]))
    (tensor([0, 0, 1, 2, 2]), tensor([0, 2, 3]))
    """
    place = torch.arange(numbers.shape[0], device=numbers.device)
    before = numbers.index_select(0, (place - 1).clamp(min=0))
    first = (numbers != before) | (place == 0)
    return first.cumsum(0) - 1, where(first)
