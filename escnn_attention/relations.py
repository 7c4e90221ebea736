r"""What the encoding sees of a pair of points.

A layer evaluates its encoding at a function of the two positions as they look from an output pose,
:math:`r(h^{-1}x, h^{-1}x')`. Every function there is equivariant to the fiber group; which one is chosen decides what
else the layer is equivariant to, and with it the group that acts on the points.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

__all__ = ["LogPolar", "Offset", "Pair", "Relation"]


class Relation(ABC):
    """Base class: a function of the position of the query and of the key, both seen from one pose."""

    @abstractmethod
    def size(self, dim: int) -> int:
        """The number of coordinates of the relation between points of R^dim.

        Raises:
            ValueError: there is none in this dimension.
        """

    @abstractmethod
    def __call__(self, query: Tensor, key: Tensor) -> Tensor:
        """``(..., size)`` of positions ``(..., d)`` that broadcast against each other."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class Offset(Relation):
    r""":math:`x' - x`: translations and the fiber group, :math:`R^d \rtimes H`. The default.

    With the trivial fiber group these are the translations T(d) alone.
    """

    def size(self, dim: int) -> int:
        return dim

    def __call__(self, query: Tensor, key: Tensor) -> Tensor:
        return key - query


class Pair(Relation):
    """Both positions: the fiber group H about the origin, and no translations, as for SO(2) and SO(3) in LieConv.

    The origin is where the coordinates are zero: subtract what is to be the centre.
    """

    def size(self, dim: int) -> int:
        return 2 * dim

    def __call__(self, query: Tensor, key: Tensor) -> Tensor:
        return torch.cat(torch.broadcast_tensors(query, key), dim=-1)


class LogPolar(Relation):
    r"""The logarithm of the ratio of the distances from the origin, and the angle between the two directions as its
    cosine and sine: scalings and rotations of the plane about the origin, :math:`R_{>0} \times SO(2)`.

    Both groups act on the plane without its origin as on themselves, so that the fiber group may be the trivial one.
    Scalings do not change the relation; with a neighbourhood by radius they change who is a neighbour.

    Raises:
        ValueError: on application, when a point is the origin, which has no direction.
    """

    def size(self, dim: int) -> int:
        if dim != 2:
            raise ValueError(f"relation: LogPolar is for points of the plane, got dimension {dim}")
        return 3

    def __call__(self, query: Tensor, key: Tensor) -> Tensor:
        squares = query.square().sum(-1), key.square().sum(-1)
        if not torch.compiler.is_compiling() and not (squares[0].all() and squares[1].all()):
            raise ValueError("coords: got a point at the origin, where LogPolar has no direction")
        ratio = (squares[1].log() - squares[0].log()) / 2
        lengths = (squares[0] * squares[1]).sqrt()
        dot = (query * key).sum(-1)
        cross = query[..., 0] * key[..., 1] - query[..., 1] * key[..., 0]
        return torch.stack(torch.broadcast_tensors(ratio, dot / lengths, cross / lengths), dim=-1)
