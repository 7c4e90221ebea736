r"""What the encoding sees of a pair of points.

A layer evaluates its encoding at a function of the two positions as they look from an output pose,
:math:`r(h^{-1}x, h^{-1}x')`. Every function there is equivariant to the fiber group; which one is chosen decides what
else the layer is equivariant to, and with it the group that acts on the points.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor

__all__ = ["LogPolar", "Offset", "Pair", "Relation"]


class Relation(ABC):
    """Base class: a function of the position of the query and of the key, both seen from one pose.

    Example:
        >>> import torch
        >>> from escnn_attention import Relation
        >>> class Distance(Relation):
        ...     def size(self, dim: int) -> int:
        ...         return 1
        ...
        ...     def __call__(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        ...         return (key - query).norm(dim=-1, keepdim=True)
        >>> Distance()(torch.zeros(2), torch.tensor([3.0, 4.0]))
        tensor([5.])
    """

    is_offset: bool = False
    """Whether it is the offset itself, a linear function of which every pose sees."""

    @abstractmethod
    def size(self, dim: int) -> int:
        """The number of coordinates of the relation between points of R^dim.

        Raises:
            ValueError: there is none in this dimension.
        """

    @abstractmethod
    def __call__(self, query: Tensor, key: Tensor) -> Tensor:
        """The relation ``(..., size)`` of positions ``(..., d)`` that broadcast against each other."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class Offset(Relation):
    r""":math:`x' - x`: translations and the fiber group, :math:`R^d \rtimes H`. The default.

    With the trivial fiber group these are the translations T(d) alone.

    Example:
        >>> import torch
        >>> from escnn_attention import Offset
        >>> Offset()(torch.tensor([1.0, 0.0]), torch.tensor([3.0, 4.0]))
        tensor([2., 4.])
    """

    is_offset = True

    def size(self, dim: int) -> int:
        return dim

    def __call__(self, query: Tensor, key: Tensor) -> Tensor:
        return key - query


class Pair(Relation):
    """Both positions: the fiber group H about the origin, and no translations, as for SO(2) and SO(3) in LieConv.

    The origin is where the coordinates are zero: subtract what is to be the centre.

    Example:
        >>> import torch
        >>> from escnn_attention import Pair
        >>> Pair()(torch.tensor([1.0, 0.0]), torch.tensor([3.0, 4.0]))
        tensor([1., 0., 3., 4.])
    """

    def size(self, dim: int) -> int:
        return 2 * dim

    def __call__(self, query: Tensor, key: Tensor) -> Tensor:
        return torch.cat(torch.broadcast_tensors(query, key), dim=-1)


class LogPolar(Relation):
    r"""The logarithm of the ratio of the distances from the origin, and the angle between the two directions as its
    cosine and sine: scalings and rotations of the plane about the origin, :math:`R_{>0} \times SO(2)`.

    Both groups act on the plane without its origin as on themselves, so that the fiber group may be the trivial one.
    Scalings do not change the relation, from the smallest to the largest numbers of the precision; with a neighbourhood
    by radius they change who is a neighbour.

    Raises:
        ValueError: on application, when a point is the origin, which has no direction.

    Example:
        >>> import torch
        >>> from escnn_attention import LogPolar
        >>> relation, query, key = LogPolar(), torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
        >>> relation(query, key)  # as far away, and a quarter further round
        tensor([0., 0., 1.])
        >>> torch.equal(relation(2 * query, 2 * key), relation(query, key))
        True
    """

    def size(self, dim: int) -> int:
        if dim != 2:
            raise ValueError(f"relation: LogPolar is for points of the plane, got dimension {dim}")
        return 3

    def __call__(self, query: Tensor, key: Tensor) -> Tensor:
        (x, length, exponent), (y, other_length, other_exponent) = _polar(query), _polar(key)
        ratio = other_length - length + (other_exponent - exponent) * math.log(2)
        dot = (x * y).sum(-1)
        cross = x[..., 0] * y[..., 1] - x[..., 1] * y[..., 0]
        return torch.stack(torch.broadcast_tensors(ratio, dot, cross), dim=-1)


def _polar(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The direction of ``(..., d)``, and its length in two parts: e^length · 2^exponent, each ``(...)``."""
    largest = x.detach().abs().amax(-1, keepdim=True)
    if not torch.compiler.is_compiling() and not largest.all():
        raise ValueError("coords: got a point at the origin, where LogPolar has no direction")
    # A power of two near the length is taken out: squares neither overflow nor vanish at any scale.
    exponent = largest.log2().floor()
    # In two halves, as 2¹⁴⁹, which the smallest numbers need, is no number of single precision.
    half = (exponent / 2).floor()
    scaled = x * (-half).exp2() * (half - exponent).exp2()
    norm = scaled.square().sum(-1, keepdim=True).sqrt()
    return scaled / norm, norm.squeeze(-1).log(), exponent.squeeze(-1)
