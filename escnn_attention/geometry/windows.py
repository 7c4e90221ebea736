r"""Where features live, and which of them see each other.

Attention asks three things of a set of positions: the continuous offsets :math:`\Delta = x' - x` that occur between a
query and its keys, the row of that table which belongs to a pair, and a way to walk through the queries in blocks whose
keys fit in a bounded part of memory. :class:`Positions` is that interface; :class:`Window` is the neighbourhood of a
query on a grid.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

__all__ = ["Blocks", "Positions", "Window", "WindowShape"]

WindowShape = str
"""``"square"``, ``"disc"``, or ``"disc m"``: see :class:`Window`. Strings, since they are arguments of operators."""


@dataclass(frozen=True)
class Window:
    r"""The offsets a query looks at on a grid.

    Attributes:
        kernel_size: the odd width in positions; None looks at the whole grid.
        shape: ``"square"`` is the box of that width, ``"disc"`` the ball of that diameter inside it, and ``"disc m"``
            with a whole number m the ball of the offsets of at most :math:`\sqrt m` steps: see :meth:`ball`.
        dilation: the step between neighbours, in positions.

    Example:
        >>> from escnn_attention.geometry.grid import Grid
        >>> from escnn_attention.geometry.windows import Window
        >>> [len(Grid((9, 9), window).offsets) for window in (Window(5), Window(5, "disc"))]
        [25, 21]
    """

    kernel_size: int | None = None
    shape: WindowShape = "square"
    dilation: int = 1

    @classmethod
    def ball(cls, radius: float) -> Window:
        """The offsets that are shorter than ``radius`` positions, which need not be a whole number.

        Example:
            >>> from escnn_attention.geometry.windows import Window
            >>> Window.ball(2.5), Window.ball(3.0)
            (Window(kernel_size=5, shape='disc', dilation=1), Window(kernel_size=5, shape='disc 8', dilation=1))
        """
        longest = math.ceil(radius**2) - 1  # Squares of lengths on a grid are whole numbers.
        kernel_size = 2 * math.isqrt(longest) + 1
        return cls(kernel_size, "disc" if longest == kernel_size**2 // 4 else f"disc {longest}")


class Blocks(ABC):
    """Queries in blocks that share their candidate keys.

    Attributes:
        queries: ``(T, Q)``; the positions of the queries of each of the T blocks. -1 fills up.
        keys: ``(T, S)`` or ``(1, S)``; the positions of the candidate keys of a block. -1 fills up.
        place: ``(N,)``; where among all ``T · Q`` queries each position stands.

    Example:
        >>> from escnn_attention.geometry.grid import Grid
        >>> from escnn_attention.geometry.windows import Window
        >>> blocks = Grid((5,), Window()).blocks(max_queries=2)
        >>> blocks.queries.tolist(), blocks.keys.tolist(), blocks.rows(0, 3).shape
        ([[0, 1], [2, 3], [4, -1]], [[0, 1, 2, 3, 4]], torch.Size([3, 2, 5]))
    """

    queries: Tensor
    keys: Tensor
    place: Tensor

    @abstractmethod
    def rows(self, start: int, stop: int) -> Tensor:
        """The row of the table of offsets that belongs to each pair, in the blocks from ``start`` to ``stop``.

        ``(stop - start, Q, S)``, or ``(1, Q, S)`` where all blocks agree; -1 where the key is not in the query's
        neighbourhood. Pairs with a -1 in ``queries`` or ``keys`` hold anything.
        """


class Positions(ABC):
    """N positions and their neighbourhoods.

    Attributes:
        num_positions: N.
        offsets: ``(L, d)``; the offsets that occur, in units of the window's reach: within [-1, 1] along the axes.
        coordinates: ``(N, d)``; the positions themselves, relative to the centre, in units of half the extent.
        scale: the unit of the coordinates in units of the offsets: the offset between two positions is ``scale`` times
            the difference of their coordinates.
        complete: whether every position sees every other.

    Example:
        >>> import torch
        >>> from escnn_attention.geometry.grid import Grid
        >>> from escnn_attention.geometry.windows import Window
        >>> grid = Grid((1, 4), Window(3))
        >>> grid.num_positions, grid.complete
        (4, False)
        >>> row = grid.rows(torch.tensor(0), torch.arange(4))  # what the first position sees of each
        >>> (row >= 0).tolist(), grid.offsets[row[1], 0].item()
        ([True, True, False, False], 1.0)
    """

    num_positions: int
    offsets: Tensor
    coordinates: Tensor
    scale: float
    complete: bool

    @abstractmethod
    def rows(self, queries: Tensor, keys: Tensor) -> Tensor:
        """The row of ``offsets`` for each pair of positions, broadcast against each other; -1 for no neighbours."""

    @abstractmethod
    def blocks(self, max_queries: int) -> Blocks:
        """A partition of the queries in blocks; ``max_queries`` limits blocks that see every position."""
