"""Points in rings, of which every one sees its neighbours as the first one of its ring does."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from escnn_attention.geometry.cache import kept
from escnn_attention.geometry.neighbours import Chunk, Neighbourhood, Neighbours, numbers_of
from escnn_attention.geometry.points import Points


class Turns(NamedTuple):
    """Points ``(images · rings · number)``; a rotation moves all points of all rings by one place.

    Attributes:
        images: the number of images, which have the same coordinates.
        rings: the number of rings of an image.
        number: the number of points of a ring.
    """

    images: int
    rings: int
    number: int

    def keys_of(self, queries: Tensor, keys: Tensor) -> Tensor:
        """The keys ``(G, R, K)`` of queries ``(G, R)``: those of the first point of their ring, ``(G, K)``, rotated.

        >>> Turns(1, 2, 4).keys_of(torch.tensor([[0, 1, 2]]), torch.tensor([[0, 2, 7, -1]])).tolist()
        [[[0, 2, 7, -1], [1, 3, 4, -1], [2, 0, 5, -1]]]
        """
        keys, turn, size = keys.unsqueeze(1), (queries % self.number).unsqueeze(2), self.rings * self.number
        first = (queries - queries % size).unsqueeze(2)
        rotated = torch.where(keys % self.number + turn < self.number, turn, turn - self.number)
        return torch.where(keys < 0, -1, keys + rotated + first)


_turns = WeakTensorKeyDictionary()


def remember(turns: Turns, coords: Tensor, batch: Tensor) -> None:
    """Note how the points at these very ``coords``, of the images ``batch``, lie in rings."""
    if not (coords.is_inference() or batch.is_inference()):
        _turns[coords] = turns, coords._version, weakref.ref(batch), batch._version


def turns_of(coords: Tensor, batch: Tensor | None) -> Turns | None:
    """How points lie in rings, if that is known of these very tensors and nobody has written into them."""
    turns, version, images, image_version = _turns.get(coords, (None, 0, None, 0))
    if turns is None or coords._version != version:
        return None
    alike = turns.images == 1 if batch is None else batch is images() and batch._version == image_version
    return turns if alike else None


def points_in_rings(coordinates: Tensor, coords: Tensor, batch: Tensor | None, *arguments: Any) -> Points:
    """Points: see :class:`Points`; in rings, if that is known of their ``coords`` and there are no edges.

    Args:
        coordinates: of which relations are functions that the rotation of the rings does not change.
        coords, batch: where the points are, and in which clouds.
        arguments: the edges, the rule of neighbours, and the features of edges.
    """
    edges, *others = arguments
    # Gradients of coordinates are those of every point.
    known = edges is None and coords.device.type == "cpu" and not coords.requires_grad
    turns = kept(turns_of, coords, batch) if known else None
    if turns is None:
        return Points(coordinates, coords, edges, batch, *others)
    return _Rings(turns, coordinates, coords, batch, *others)


class _Rings(Points):
    """Points in rings."""

    def __init__(self, turns: Turns, coordinates: Tensor, coords: Tensor, batch: Tensor | None, *arguments: Any):
        super().__init__(coordinates, coords, None, batch, *arguments)
        self._turns, self.repeats = turns, turns.images * turns.number

    def neighbours(self, keys: Points) -> Neighbours:
        return super().neighbours(keys) if self.whole else kept(_EachTurned, self._rule, self._places, self._turns)

    def shared(self, keys: Points) -> Neighbours:
        return kept(_Turned, self._rule, self._places, self._turns)


class _Turned(Neighbours):
    """The neighbours of the first point of every ring, for all points of the ring."""

    def __init__(self, rule: Neighbourhood, coords: Tensor, turns: Turns):
        x = numbers_of("coords", coords)[: turns.rings * turns.number]
        self._turns, self._of_first = turns, rule.between(x[:: turns.number], None, x, None)
        self._repeats, self._whole = turns.images * turns.number, rule.is_global

    def _chunks(self, limit: int) -> list[Chunk]:
        out: list[Chunk] = []
        points = torch.arange(self._turns.rings * self._repeats).view(self._turns)
        for some in self._of_first.chunks(max(1, limit // self._repeats)):
            rings = some.queries.flatten()
            queries, keys = points[:, rings].transpose(0, 1), some.keys.expand(len(rings), -1)
            # All points of a ring may be too many at once.
            most = self._repeats if len(rings) > 1 else max(1, limit // keys.shape[1])
            for images in queries.split(max(1, most // self._turns.number), dim=1):
                for part in images.split(most, dim=2):
                    arc = (part.shape[2], self._turns.number) if self._whole else None
                    shared = {"repeats": part[0].numel(), "keys_of": self._turns.keys_of, "arc": arc}
                    out.append(Chunk(part.reshape(-1, 1), keys, some.padded, **shared))
        return out


class _EachTurned(_Turned):
    """The same, where relations are not shared."""

    def _chunks(self, limit: int) -> list[Chunk]:
        return [some.whole()._replace(repeats=1, arc=None) for some in super()._chunks(limit)]
