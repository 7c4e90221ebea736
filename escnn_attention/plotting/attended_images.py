"""What attention lets through of many images, and that it turns with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from escnn.group import GroupElement
from escnn.nn import GeometricTensor
from torch import Tensor

from escnn_attention.plotting._attentive import (
    as_change,
    change,
    draw_bar,
    draw_image,
    draw_over,
    extents,
    find_attentive,
    look,
    shades,
    turns_for,
)
from escnn_attention.plotting._drawing import Sheet, figure_class

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["plot_attended_images"]


def plot_attended_images(
    images: GeometricTensor | Tensor,
    model: torch.nn.Module,
    layer: str | torch.nn.Module | None = None,
    *,
    elements: Sequence[GroupElement] | None = None,
    angles: Sequence[float] | npt.NDArray[np.floating[Any]] | None = None,
    back: bool = True,
    background: float = 0.0,
    title: str = "What attention lets through, image by image",
) -> Figure:
    r"""The equivariant attention maps of one layer for several images, each turned.

    Two rows belong to an image: the image as it is turned, and over it what the layer lets through, as in
    :func:`plot_attentive_maps`, in the mean over the poses. The mean knows no poses, so that an equivariant network
    gives one map for an image, which turns with it. At the right are the maps turned back, and the largest difference
    that they have from those of the image as it is, over all poses: zero but for rounding where the network is
    exact, and not where it is so approximately only, as with strides that do not fit the size of a grid (Appendix C).

    Args:
        images: (B, C, S, S), over a planar gspace with a finite group: fields, or a plain tensor for models that take
            one. Three scalar fields are drawn as colours.
        model: an attentive layer, or any module in which some stand; called in evaluation mode, image by image.
        layer: the layer: its name in the model, itself, or a block that contains it; by default the first.
        elements: the elements that turn the images; by default those that map the grid onto itself, at most four.
        angles: degrees to turn them by in place of elements.
        back: whether to draw the part at the right.
        background: the value around an image.
        title: above the figure.

    Returns:
        The figure.

    Raises:
        ImportError: matplotlib is missing.
        TypeError: ``model`` is not a module, ``images`` no tensor, or a layer or element is of another type.
        ValueError: there are no images, they are not planar, there is no such layer or element, the model does not call
            the layer, or both elements and angles are given, or angles for what is not square and scalar.

    Example:
        >>> import torch
        >>> from escnn import gspaces, nn
        >>> from escnn_attention import FeatureAttention
        >>> from escnn_attention.plotting import plot_attended_images
        >>> g = gspaces.flipRot2dOnR2(4)
        >>> attention = FeatureAttention(nn.FieldType(g, 3 * [g.trivial_repr]), ratio=1)
        >>> figure = plot_attended_images(torch.randn(2, 3, 12, 12), attention)
        >>> len(figure.axes)  # for each image, as it is turned and turned back, four colour images and four maps
        33

    Source: Romero et al., "Attentive Group Equivariant Convolutional Networks", ICML 2020, Figures 8, 10 and 11.
    """
    figure_class()
    if not isinstance(images, (Tensor, GeometricTensor)):
        raise TypeError(f"images: got {type(images).__name__}, needed a GeometricTensor or a torch.Tensor")
    if not images.shape or not images.shape[0]:
        raise ValueError(f"images: got shape {tuple(images.shape)}, needed at least one image (B, C, S, S)")
    chosen = dict(list(find_attentive(model, layer).items())[:1])
    ((name, module),) = chosen.items()
    rows = []
    for i in range(images.shape[0]):
        x, run = look(images[i : i + 1], model, chosen)
        turns = turns_for(x, elements, angles, background, most=4)
        upright = run(x)[name]
        turned = [turn.image(x) for turn in turns]
        seen = [run(image)[name] for image in turned]
        returned = [turn.back(found.passed, x.type) for turn, found in zip(turns, seen, strict=True)]
        largest = max(change(b, upright.passed, turn) for b, turn in zip(returned, turns, strict=True))
        pictures = [shades(image) for image in turned]
        maps = [found.passed.mean(0) for found in seen]
        rows.append((shades(x), pictures, maps, [b.mean(0) for b in returned], upright.covered, largest))
    scale = extents([m for row in rows for m in row[2]])

    columns = len(turns)
    cell = 0.8
    left, gap, between = 0.15, 0.35, 0.14
    block = cell * columns
    top = Sheet.TOP + 0.25
    total = top + (2 * cell + between) * len(rows) + 0.1
    what = name.removeprefix("stages.") or type(module).__name__
    width = left + block + (gap + block + 0.75 if back else 0) + 0.5
    sheet = Sheet(width, total, title, f"{what}, mean over fields and poses")
    blocks = [(left, "the image is turned"), *([(left + block + gap, "its map is turned back")] if back else [])]

    def panel(start: float, column: int, y: float) -> Axes:
        return sheet.panel(start + column * cell + 0.04 * cell, y + 0.04 * cell, 0.92 * cell)

    for start, heading in blocks:
        sheet.text(start + block / 2, Sheet.TOP - 0.1, heading, ha="center", fontsize=9.5)
    end = blocks[-1][0] + block
    draw_bar(sheet, end + 0.06, top + cell + 0.04 * cell, 0.92 * cell, scale)
    if back:
        sheet.text(end + 0.78, top - 0.1, "change", ha="center", fontsize=8)
    y = top
    for picture, pictures, maps, returned_maps, covered, largest in rows:
        for k, (start, _) in enumerate(blocks):
            for column, turn in enumerate(turns):
                image = picture if k else pictures[column]
                ax = panel(start, column, y)
                draw_image(ax, image)
                if y == top:
                    ax.set_title(turn.name, fontsize=8, pad=3)
                draw_over(panel(start, column, y + cell), image, (returned_maps if k else maps)[column], scale, covered)
        if back:
            sheet.text(end + 0.78, y + cell, as_change(largest), ha="center", fontsize=8)
        y += 2 * cell + between
    return sheet.figure
