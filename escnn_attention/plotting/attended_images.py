"""What attention lets through of many images, and how it follows when they are transformed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from escnn.group import GroupElement
from escnn.nn import GeometricTensor
from torch import Tensor

from escnn_attention.plotting._attended import Attended, find_attentive, look
from escnn_attention.plotting._overlays import as_change, draw_bar, draw_image, draw_over, extents, shades
from escnn_attention.plotting._sheet import Sheet, figure_class
from escnn_attention.plotting._transformations import Transformation, largest_change, transformations_for

if TYPE_CHECKING:
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
    r"""The equivariant attention maps of one layer for several images, each transformed.

    Two rows belong to an image: the transformed image, and over it what the layer lets through, as in
    :func:`plot_attentive_maps`, in the mean over the poses. The mean knows no poses, so that an equivariant network
    gives one map for an image, which is transformed with it. At the right are the maps transformed back, and the
    largest difference that they have from those of the image as it is, over all poses: zero but for rounding where the
    network is exact, and not where it is so approximately only, as with strides that do not fit the size of a grid
    (Appendix C).

    Args:
        images: (B, C, S, S), over a planar gspace with a finite group: fields, or a plain tensor for models that take
            one. Three scalar fields are drawn as colours.
        model: an attentive layer, or any module in which some stand; called in evaluation mode, image by image.
        layer: the layer: its name in the model, itself, or a block that contains it; by default the first.
        elements: the elements that transform the images; by default those that map the grid onto itself, at most four.
        angles: degrees to rotate them by in place of elements.
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
        >>> from escnn_attention import FeatureAttention
        >>> from escnn_attention.plotting import plot_attended_images
        >>> from escnn import gspaces, nn
        >>> g = gspaces.flipRot2dOnR2(4)
        >>> attention = FeatureAttention(nn.FieldType(g, 3 * [g.trivial_repr]), ratio=1)
        >>> figure = plot_attended_images(torch.randn(2, 3, 12, 12), attention)
        >>> len(figure.axes)  # for each image, there and back, four colour images and four maps
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
        columns = transformations_for(x, elements, angles, background, most=4)
        rows.append(_row(x, run, name, columns))
    what = name.removeprefix("stages.") or type(module).__name__
    return _draw(rows, columns, back, title, f"{what}, mean over fields and poses")


@dataclass(frozen=True)
class _Row:
    """One row of the picture: an image, and what is let through of it.

    Attributes:
        image: as it is.
        images: transformed, one for each column.
        maps: over these, in the mean over the poses.
        returned: the maps, transformed back.
        covered: the parts of the rows and columns of the image that the maps are of.
        change: the largest difference of what was transformed back, over all poses.
    """

    image: npt.NDArray[np.float32]
    images: list[npt.NDArray[np.float32]]
    maps: list[Tensor]
    returned: list[Tensor]
    covered: tuple[float, float]
    change: float


def _row(
    x: GeometricTensor,
    run: Callable[[GeometricTensor], dict[str, Attended]],
    name: str,
    transformations: Sequence[Transformation],
) -> _Row:
    """An image under all transformations; ``run`` gives what the layers do to an image, by name."""
    upright = run(x)[name]
    images = [t.apply(x) for t in transformations]
    seen = [run(image)[name] for image in images]
    returned = [t.undo(found.passed, x.type) for t, found in zip(transformations, seen, strict=True)]
    changes = [largest_change(r, upright.passed, t) for r, t in zip(returned, transformations, strict=True)]
    return _Row(
        image=shades(x),
        images=[shades(image) for image in images],
        maps=[found.passed.mean(0) for found in seen],
        returned=[r.mean(0) for r in returned],
        covered=upright.covered,
        change=max(changes),
    )


def _draw(rows: Sequence[_Row], columns: Sequence[Transformation], back: bool, title: str, note: str) -> Figure:
    """The figure of all rows."""
    scale = extents([m for row in rows for m in row.maps])
    cell, left, gap, between = 0.8, 0.15, 0.35, 0.14
    block = cell * len(columns)
    top = Sheet.TOP + 0.25
    width = left + block + (gap + block + 0.75 if back else 0) + 0.5
    sheet = Sheet(width, top + (2 * cell + between) * len(rows) + 0.1, title, note)
    blocks = [
        (left, "the image is transformed"),
        *([(left + block + gap, "its map is transformed back")] if back else []),
    ]
    for start, heading in blocks:
        sheet.text(start + block / 2, Sheet.TOP - 0.1, heading, ha="center", fontsize=9.5)
    end = blocks[-1][0] + block
    draw_bar(sheet, end + 0.06, top + cell + 0.04 * cell, 0.92 * cell, scale)
    if back:
        sheet.text(end + 0.78, top - 0.1, "change", ha="center", fontsize=8)
    y = top
    for row in rows:
        for k, (start, _) in enumerate(blocks):
            for column, transformation in enumerate(columns):
                x = start + column * cell
                image = row.image if k else row.images[column]
                ax = sheet.cell(x, y, cell, 0.04)
                draw_image(ax, image)
                if y == top:
                    ax.set_title(transformation.name, fontsize=8, pad=3)
                values = (row.returned if k else row.maps)[column]
                draw_over(sheet.cell(x, y + cell, cell, 0.04), image, values, scale, row.covered)
        if back:
            sheet.text(end + 0.78, y + cell, as_change(row.change), ha="center", fontsize=8)
        y += 2 * cell + between
    return sheet.figure
