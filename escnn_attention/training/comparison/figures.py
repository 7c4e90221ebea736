"""The figures of a comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from escnn_attention.models import EquivariantClassifier
from escnn_attention.plotting import COLOURS, plot_attention_maps, plot_feature_maps
from escnn_attention.training.comparison.measure import ImageData, NetworkResult
from escnn_attention.training.comparison.networks import DESCRIPTIONS, TITLES
from escnn_attention.training.files import atomic_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_RESOLUTION = 130  # dots per inch
_SHOWN_DIGIT = 7  # no symmetry: a rotation of it is seen
_QUERIES = 2  # positions in the figures of attention


def write_figures(
    folder: Path, networks: Mapping[str, nn.Module], results: Sequence[NetworkResult], data: ImageData
) -> list[Path]:
    """Write the figures of trained networks on the CPU as PNG files, each in one step, and return their paths.

    ``accuracies.png`` always; ``feature_maps-NAME.png`` and ``attention-NAME.png`` for every network with group
    attention, of one of the test images.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = [_save(folder / "accuracies.png", _accuracies(results, data))]
    for name, network in networks.items():
        if not isinstance(network, EquivariantClassifier):
            continue
        names = list(network.stages)
        first = next((i for i, stage in enumerate(names) if stage.startswith("attention")), None)
        if first is None:
            continue
        image, layer = _example(network, data), f"stages.{names[first]}"
        # With the pooling behind it, if there is one.
        shown = [f"stages.{names[i]}" for i in (0, first + names[first + 1].startswith("pool"))]
        title = f"{TITLES[name]}: feature maps are transformed, poses permuted"
        files.append(_save(folder / f"feature_maps-{name}.png", plot_feature_maps(image, network, shown, title=title)))
        grid = network.feature_maps(image)[names[first - 1]].shape[-2:]
        title = f"{TITLES[name]}: where a query looks, pose by pose"
        figure = plot_attention_maps(image, network, layer, positions=_queries(image, grid), title=title)
        files.append(_save(folder / f"attention-{name}.png", figure))
    return files


def _accuracies(results: Sequence[NetworkResult], data: ImageData) -> Figure:
    """A dot chart: one line per network, one mark per condition."""
    from matplotlib.figure import Figure

    conditions: dict[str, list[float | None]] = {
        "upright": [result.accuracy_upright for result in results],
        "transformed by group elements": [result.accuracy_rotated for result in results],
        "rotated by any angle": [result.accuracy_any_angle for result in results],
    }
    figure = Figure(figsize=(7.6, 1.75 + 0.55 * len(results)), layout="constrained")
    ax = figure.add_subplot()
    for k, (condition, accuracies) in enumerate(conditions.items()):
        if None not in accuracies:
            # Open rings around filled dots: marks that coincide stay visible.
            style: dict[str, Any] = {"facecolors": "none", "s": 190, "linewidths": 2} if k == 0 else {"s": 70}
            percent = [100 * accuracy for accuracy in accuracies if accuracy is not None]
            ax.scatter(percent, range(len(results)), color=COLOURS[k], marker="oDs"[k], label=condition, **style)
    names = [f"{TITLES[result.network]}\n{DESCRIPTIONS[result.network]}" for result in results]
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.set_xlim(-3, 103)
    ax.set_xlabel("test accuracy in %")
    ax.grid(axis="x", color="#E5E5E5")
    ax.set_axisbelow(True)
    counts = [result.parameters for result in results]
    ax.set_title(f"trained on {len(data.train[0])} {data.upright}; {min(counts):,} to {max(counts):,} parameters")
    figure.suptitle("Accuracy on images in orientations that were not trained", weight="bold")
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    return figure


def _example(network: nn.Module, data: ImageData) -> Tensor:
    """(1, 1, S, S): the test image of the digit shown that ``network`` recognises with most confidence."""
    images, labels = data.normalised(data.test[0][:512]), torch.from_numpy(data.test[1][:512])
    with torch.no_grad():
        confidence = network(images).softmax(dim=1)[:, _SHOWN_DIGIT]
    confidence[labels != _SHOWN_DIGIT] -= 1.0
    return images[confidence.argmax()][None].clone()


def _queries(image: Tensor, grid: Sequence[int]) -> list[tuple[int, int]]:
    """Positions on the grid of a layer: the brightest of the image, then the brightest of those well away from it."""
    brightness = nn.functional.adaptive_avg_pool2d(image, (grid[0], grid[1]))[0, 0]
    rows, columns = torch.meshgrid(torch.arange(grid[0]), torch.arange(grid[1]), indexing="ij")
    chosen: list[tuple[int, int]] = []
    for _ in range(_QUERIES):
        row, column = divmod(int(brightness.argmax()), grid[1])
        chosen.append((row, column))
        near = (rows - row).square() + (columns - column).square() < (min(grid) / 2) ** 2
        brightness = brightness.masked_fill(near, float("-inf"))
    return chosen


def _save(path: Path, figure: Figure) -> Path:
    with atomic_file(path) as file:
        figure.savefig(file, format="png", dpi=_RESOLUTION)
    return path
