"""The orbits of the positions of a window under a group, and their distribution over heads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from escnn_attention.geometry.grid import Grid
from escnn_attention.geometry.windows import Window, shape_of


def orbits_of(points: Tensor, action: np.ndarray) -> tuple[Tensor, Tensor]:
    """The row of the first of the points ``(n, d)`` in each orbit, ascending, and the order of its stabiliser.

    >>> signs = np.array([[[1.0]], [[-1.0]]])
    >>> [values.tolist() for values in orbits_of(torch.tensor([[-1.0], [0.0], [1.0]]), signs)]
    [[0, 1], [1, 2]]
    """
    places = points.double().numpy()
    same = np.zeros((len(places), len(places)), dtype=bool)
    stays = np.zeros(len(places), dtype=np.int64)
    for matrix in action:
        met = np.isclose((places @ matrix.T)[:, None], places, atol=1e-6).all(-1)
        same |= met
        stays += met.diagonal()
    first = np.unique(same.argmax(axis=0))
    return torch.as_tensor(first), torch.as_tensor(stays[first])


def orbit_places(size: int, action: np.ndarray) -> np.ndarray:
    """Where elements take the first position of each orbit, ``(K, |H|)``, on a grid that is as long along every axis.

    >>> orbit_places(3, np.array([[[1.0]], [[-1.0]]])).tolist()
    [[0, 2], [1, 1]]
    """
    points = Grid((size,) * action.shape[-1], Window()).coordinates.numpy() * (size - 1)  # whole numbers
    weights = (2 * size) ** np.arange(points.shape[1])
    codes = np.rint(points).astype(np.int64) @ weights
    moved = np.rint(points @ np.swapaxes(action, 1, 2)).astype(np.int64) @ weights
    order = codes.argsort()
    places = order[np.searchsorted(codes[order], moved)]
    return places[:, places.min(axis=0) == np.arange(len(points))].T


@dataclass(frozen=True)
class Views:
    """The places ``(M, d)``, in units of the reach and ``step`` apart, and relative poses ``(M,)`` of heads."""

    places: Tensor
    poses: Tensor
    step: float


@dataclass(frozen=True, eq=False)
class Orbits:
    r"""The orbits of the positions of a window under a finite group H.

    A head whose output pose h attends to :math:`x + h\Delta` covers, over all poses, the whole orbit :math:`H\Delta`.
    So one place of each orbit suffices if the projections distinguish poses; otherwise every place counts, with every
    pose, and ``action`` holds the identity alone. ``poses`` are the relative poses to look at.

    >>> quarters = np.array([[[1, 0], [0, 1]], [[0, -1], [1, 0]], [[-1, 0], [0, -1]], [[0, 1], [-1, 0]]])
    >>> views = Orbits(Window(3), quarters, poses=(0,)).spread(3)
    >>> views.places.norm(dim=1).tolist(), views.step  # the middle, a side and a corner
    ([0.0, 1.0, 1.4142135381698608], 1.0)
    """

    window: Window
    action: np.ndarray
    poses: tuple[int, ...]
    ball: bool = False

    def spread(self, num_heads: int, width: int | None = None, reach: float | None = None) -> Views:
        """The views of heads that together cover the window.

        Heads take places at equal steps of their order by the distance from the centre; of more heads than places the
        others start again, with the next pose. Global attention, which has no window, has a lattice of ``width`` places
        along each axis, the outermost at ``reach`` in units of the grid's reach, and raises a ValueError without them.
        """
        window = self.window
        if window.kernel_size is None:
            if width is None or reach is None:
                raise ValueError(
                    f"width, reach: got {width} and {reach} for global attention, which has no window; needed both: "
                    "how many places there are along an axis, and where the outermost lie, in units of the grid's reach"
                )
            window = Window(width, "disc" if self.ball else "square")
        else:
            width, reach = window.kernel_size, 1.0
            # On a torus too, the window is that of a plane.
            window = Window(width, shape_of(window.form, causal=window.causal), window.dilation)
        every = reach * Grid((1,) * self.action.shape[-1], window).offsets + 0.0  # without a sign of zeros
        places = every[orbits_of(every, self.action)[0]]
        places = places[places.norm(dim=1).sort(stable=True).indices]
        rounds, rest = divmod(num_heads, len(places))
        spread = torch.arange(rest) * len(places) // max(rest, 1)
        chosen = torch.cat([*rounds * [torch.arange(len(places))], spread])
        turn = torch.arange(num_heads) // len(places)
        poses = torch.tensor(self.poses)[(chosen + turn) % len(self.poses)]
        # Of a causal window the last of n times is n - 1 steps away.
        steps = width - 1 if window.causal else width // 2
        return Views(places[chosen].to(torch.get_default_dtype()), poses, reach / max(steps, 1))
