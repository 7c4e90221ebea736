"""Maps of attention, drawn over the images that they are of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from escnn.nn import GeometricTensor
from torch import Tensor

from escnn_attention.plotting._fields import as_drawn
from escnn_attention.plotting._sheet import Sheet

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ATTENTION = (0.835, 0.369, 0.0)
_STRONGEST = 0.9  # opacity


def extents(maps: Sequence[Tensor]) -> tuple[float, float]:
    """The range of colours of maps that share a scale."""
    lowest, highest = min(float(m.min()) for m in maps), max(float(m.max()) for m in maps)
    return (lowest, highest) if highest - lowest > 1e-6 else (lowest - 0.5, lowest + 0.5)


def shades(x: GeometricTensor) -> npt.NDArray[np.float32]:
    """The first image of ``x`` in colour where it has three scalar fields, else the mean over its channels."""
    values = as_drawn(x.tensor[0])
    if len(values) == 3 and all(r.is_trivial() for r in x.type.representations):
        lowest, highest = values.min(), values.max()
        colours: npt.NDArray[np.float32] = (
            ((values - lowest) / (highest - lowest).clamp_min(1e-12)).movedim(0, -1).numpy()
        )
        return colours
    grey: npt.NDArray[np.float32] = values.mean(0).numpy()
    return grey


def draw_image(ax: Axes, image: npt.NDArray[np.float32], *, faint: bool = False, extent: Any = None) -> None:
    """Draw an image, dark on light where it has no colours."""
    options: dict[str, Any] = {"interpolation": "nearest", "extent": extent}
    if image.ndim == 3 and faint:
        ax.imshow(image.mean(-1), cmap="gray", alpha=0.45, **options)
    elif image.ndim == 3:
        ax.imshow(image, **options)
    else:
        ax.imshow(image, cmap="gray_r", alpha=0.35 if faint else 1.0, **options)


def shaded(weights: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.float64]:
    """The colour of attention ``(..., 4)``, the more opaque the closer ``weights`` are to 1."""
    colour = np.ones((*weights.shape, 4)) * np.array([*ATTENTION, 0.0])
    colour[..., 3] = _STRONGEST * weights
    return colour


def draw_over(
    ax: Axes,
    image: npt.NDArray[np.float32],
    values: Tensor,
    scale: tuple[float, float],
    covered: tuple[float, float],
) -> None:
    """Draw a map over the part of the image that it is of.

    Args:
        ax: the panel.
        image: ``(H, W)`` or ``(H, W, 3)``, drawn faintly.
        values: ``(h, w)``; the map, or one value for the whole image.
        scale: the values without any colour and with the strongest.
        covered: the parts of the rows and columns of the image, about its centre, that the map is of.
    """
    height, width = image.shape[:2]
    draw_image(ax, image, faint=True, extent=(-width / 2, width / 2, height / 2, -height / 2))
    lowest, highest = scale
    colour = shaded(((values - lowest) / (highest - lowest)).clamp(0, 1).numpy())
    # A map without positions is one value for the whole image.
    half = (width / 2, height / 2) if values.numel() == 1 else (covered[1] * width / 2, covered[0] * height / 2)
    ax.imshow(colour, interpolation="nearest", extent=(-half[0], half[0], half[1], -half[1]))
    ax.set_xlim(-max(width / 2, half[0]), max(width / 2, half[0]))
    ax.set_ylim(max(height / 2, half[1]), -max(height / 2, half[1]))


def draw_bar(sheet: Sheet, x: float, y: float, height: float, scale: tuple[float, float]) -> None:
    """Draw the scale of :func:`draw_over`."""
    bar = sheet.panel(x, y, 0.09, height)
    bar.imshow(shaded(np.linspace(1, 0, 64)[:, None]), aspect="auto", extent=(0, 1, 0, 1))
    bar.yaxis.tick_right()
    bar.set_yticks([0, 1], [f"{value:.2f}" for value in scale], fontsize=7)
    bar.tick_params(length=2, pad=2)


def as_change(value: float) -> str:
    """A change of maps as text, with one significant digit where it is small."""
    return "0" if value == 0 else f"{value:.0e}".replace("e-0", "e-") if value < 0.01 else f"{value:.2f}"
