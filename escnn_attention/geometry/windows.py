"""Windows, the neighbourhoods of queries on a grid, and blocks of queries that share their keys."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

WindowShape = str
"""``"square"``, ``"disc"``, or ``"disc m"``, behind the words ``"causal"`` and ``"circular"`` where these hold.

See :class:`Window`. They are strings, since they are arguments of operators.
"""

_CAUSAL, _CIRCULAR = "causal", "circular"


def shape_of(form: WindowShape, *, causal: bool = False, circular: bool = False) -> WindowShape:
    """A shape with its words in front, such as "causal disc"."""
    return " ".join([_CAUSAL] * causal + [_CIRCULAR] * circular + [form])


def is_causal(shape: WindowShape) -> bool:
    """Whether queries look at no later times, along the first axis."""
    return shape.startswith(_CAUSAL)


def is_circular(shape: WindowShape) -> bool:
    """Whether the grid is a torus."""
    return _CIRCULAR in shape


def torus_from(shape: WindowShape, axes: int) -> int:
    """The first of the axes of which both ends meet, as those of all behind it do; their number for none."""
    return int(is_causal(shape)) if is_circular(shape) else axes


def form_of(shape: WindowShape) -> WindowShape:
    """A shape without the words in front."""
    return shape.removeprefix(_CAUSAL).lstrip().removeprefix(_CIRCULAR).lstrip()


@dataclass(frozen=True)
class Window:
    r"""The offsets a query looks at on a grid.

    With the word ``"causal"`` in front of a shape the first axis of the grid is time, and a query looks at its own time
    and at earlier ones only: ``"causal square"`` of width n has the last n times, and at each of them the box of that
    width along the other axes. With ``"circular"`` the grid is a torus, along all axes but that of a causal time.

    Attributes:
        kernel_size: the width in positions, odd unless the only axis is a causal time; None looks at the whole grid.
        shape: ``"square"`` is the box of that width, ``"disc"`` the ball of that diameter inside it, ``"disc m"`` that
            of the offsets of at most :math:`\sqrt m` steps: see :meth:`ball`.
        dilation: the step between neighbours, in positions.
        form: the shape without the words in front.

    >>> from escnn_attention.geometry.grid import Grid
    >>> [len(Grid((9, 9), window).offsets) for window in (Window(5), Window(5, "disc"))]
    [25, 21]
    >>> Grid((9,), Window(3, "causal square")).offsets.squeeze(-1).tolist()  # two before, one before, itself
    [-1.0, -0.5, 0.0]
    """

    kernel_size: int | None = None
    shape: WindowShape = "square"
    dilation: int = 1

    causal: bool = field(init=False, repr=False, compare=False)
    circular: bool = field(init=False, repr=False, compare=False)
    form: WindowShape = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, value in (("causal", is_causal), ("circular", is_circular), ("form", form_of)):
            object.__setattr__(self, name, value(self.shape))

    @property
    def looks_everywhere(self) -> bool:
        """Whether every position looks at every other."""
        return self.kernel_size is None and not self.causal

    @classmethod
    def ball(cls, radius: float) -> Window:
        """The offsets that are shorter than ``radius`` positions, which need not be a whole number.

        >>> Window.ball(2.5), Window.ball(3.0)
        (Window(kernel_size=5, shape='disc', dilation=1), Window(kernel_size=5, shape='disc 8', dilation=1))
        """
        longest = math.ceil(radius**2) - 1  # Squares of lengths on a grid are whole numbers.
        kernel_size = 2 * math.isqrt(longest) + 1
        return cls(kernel_size, "disc" if longest == kernel_size**2 // 4 else f"disc {longest}")


@dataclass(frozen=True, eq=False)
class Blocks:
    """Queries in blocks that share their candidate keys.

    Attributes:
        queries: ``(T, Q)``; the positions of the queries of each of the T blocks. -1 fills up.
        keys: ``(T, S)`` or ``(1, S)``; the positions of the candidate keys of a block. -1 fills up.
        place: ``(N,)``; where among all ``T · Q`` queries each position stands.
        row: the :meth:`rows` of a block where all agree, or a function of queries and keys where they are too many to
            hold.
    """

    queries: Tensor
    keys: Tensor
    place: Tensor
    row: Tensor | Callable[[Tensor, Tensor], Tensor]

    def rows(self, start: int, stop: int) -> Tensor:
        """The row of the table of offsets that belongs to each pair, in the blocks from ``start`` to ``stop``.

        ``(stop - start, Q, S)``, or ``(1, Q, S)`` where all blocks agree; -1 where the key is not in the query's
        neighbourhood. Pairs with a -1 in ``queries`` or ``keys`` hold anything.
        """
        if isinstance(self.row, Tensor):
            return self.row
        return self.row(self.queries[start:stop, :, None].clamp(min=0), self.keys[:, None, :])
