"""Windows, the neighbourhoods of queries on a grid, and blocks of queries that share their keys."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

__all__ = ["Blocks", "Window", "WindowShape"]

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
