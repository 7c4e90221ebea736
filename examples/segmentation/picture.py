"""Draw the segmentation of a rotated canvas by trained networks.

    python examples/segmentation/picture.py plain=runs/plain steerable=runs/steerable --out segmentation.png

Each argument is a title and the folder of ``escnn-attention fit``. The first row has the test canvas, the rows
below the class that a network gives each pixel. Needs matplotlib: the extra "train".
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import escnn_attention  # noqa: F401  # isort: skip  # before escnn
import torch
from matplotlib.figure import Figure
from torch import nn

from escnn_attention.equivariance.angles import rotate_images
from escnn_attention.training import DigitCanvas, load_network

ANGLES = (0.0, 45.0, 90.0, 120.0)  # in degrees


@torch.no_grad()
def classes(network: nn.Module, image: torch.Tensor) -> torch.Tensor:
    """The most likely class of every pixel of an image (H, W) from 0 to 1."""
    (mean,), (std,) = DigitCanvas.mean, DigitCanvas.std
    best: torch.Tensor = network((image[None, None] - mean) / std).argmax(1)[0]
    return best


def draw(networks: Mapping[str, nn.Module], image: torch.Tensor, angles: Sequence[float] = ANGLES) -> Figure:
    """A row of the rotated images, and for each network a row of classes, in one colour per digit."""
    figure = Figure(figsize=(2 * len(angles) + 0.6, 2 * len(networks) + 2.2), layout="constrained")
    axes = figure.subplots(len(networks) + 1, len(angles), squeeze=False)
    for column, angle in zip(axes.T, angles, strict=True):
        view = rotate_images(image, angle).clamp(0, 1)
        column[0].imshow(view, cmap="gray", vmin=0, vmax=1)
        column[0].set_title(f"{angle:.0f}°")
        for axis, network in zip(column[1:], networks.values(), strict=True):
            shown = axis.imshow(classes(network, view), cmap="tab20", vmin=-0.5, vmax=19.5, interpolation="nearest")
    for axis, title in zip(axes[:, 0], ("canvas", *networks), strict=True):
        axis.set_ylabel(title)
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
    bar = figure.colorbar(shown, ax=axes[1:, :], boundaries=[i - 0.5 for i in range(12)], ticks=range(11), aspect=40)
    bar.set_ticklabels(["background", *map(str, range(10))])
    return figure


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw the canvas of a number for the folders that are given."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", metavar="TITLE=FOLDER", help="a title and the folder of a training")
    parser.add_argument("--canvas", type=int, default=0, help="the number of the test canvas")
    parser.add_argument("--out", type=Path, default=Path("segmentation.png"))
    given = parser.parse_args(arguments)
    networks = {title: load_network(folder).eval() for title, _, folder in (run.partition("=") for run in given.runs)}
    data = DigitCanvas(source="mnist")
    data.setup("test")
    images, _ = next(iter(data.test_dataloader()))
    (mean,), (std,) = DigitCanvas.mean, DigitCanvas.std
    draw(networks, images[given.canvas, 0] * std + mean).savefig(given.out, dpi=90)


if __name__ == "__main__":
    main()
