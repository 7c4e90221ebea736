"""The figures of a comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from escnn import nn as enn
from escnn.gspaces import GSpace
from torch import Tensor, nn

from escnn_attention import GroupSelfAttention
from escnn_attention.models import EquivariantClassifier
from escnn_attention.plotting import plot_accuracies, plot_attention_maps, plot_feature_maps
from escnn_attention.training.datamodule import as_tensors
from escnn_attention.training.files import atomic_file
from escnn_attention.training.images import ImageData
from escnn_attention.training.networks import DESCRIPTIONS, TITLES
from escnn_attention.training.results import NetworkResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_RESOLUTION = 130  # dots per inch
_SHOWN_DIGIT = 7  # no symmetry: what turns is seen to turn
_QUERIES = 2  # positions in the figures of attention


def write_figures(
    folder: Path,
    networks: Mapping[str, nn.Module],
    results: Sequence[NetworkResult],
    gspace: GSpace,
    data: ImageData,
) -> list[Path]:
    """Write the figures that can be drawn of ``networks`` as PNG files, each in one step.

    ``accuracies.png`` always; ``feature_maps-NAME.png`` and ``attention-NAME.png`` for every network with group
    attention.

    Args:
        folder: created if it does not exist.
        networks: trained, on the CPU, by name.
        results: what was measured of them.
        gspace: the symmetry.
        data: the images; one of the test part is shown.

    Returns:
        The files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = [_save(folder / "accuracies.png", _accuracies(results, data))]
    for name, network in networks.items():
        if not isinstance(network, EquivariantClassifier) or not (attention := _attention_stages(network)):
            continue
        image = enn.GeometricTensor(_example(network, data), network.in_type)
        attended = _until(network, attention[0])
        # Before the pooling, in the resolution of the image.
        lifting = network.stages["lifting"].children()
        lifted = enn.SequentialModule(*(layer for layer in lifting if not isinstance(layer, enn.PointwiseMaxPool2D)))
        stages = {"after lifting": lifted, "after group attention": attended}
        title = f"{TITLES[name]}: feature maps turn, poses permute"
        files.append(_save(folder / f"feature_maps-{name}.png", plot_feature_maps(image, stages, title=title)))
        layer = next(m for m in network.stages[attention[0]].modules() if isinstance(m, GroupSelfAttention))
        figure = plot_attention_maps(
            image,
            attended,
            layer,
            positions=_queries(image.tensor, _before(network, attention[0])(image).shape[-2:]),
            title=f"{TITLES[name]}: where a query looks, pose by pose",
        )
        files.append(_save(folder / f"attention-{name}.png", figure))
    return files


def _accuracies(results: Sequence[NetworkResult], data: ImageData) -> Figure:
    rows = {}
    for result in results:
        row = {"upright": result.accuracy_upright}
        if result.accuracy_rotated is not None:
            row["turned by group elements"] = result.accuracy_rotated
        rows[f"{TITLES[result.network]}\n{DESCRIPTIONS[result.network]}"] = row | {
            "turned by any angle": result.accuracy_any_angle
        }
    counts = [result.parameters for result in results]
    note = f"trained on {len(data.train)} {data.upright}; {min(counts):,} to {max(counts):,} parameters"
    return plot_accuracies(rows, note=note)


def _attention_stages(network: EquivariantClassifier) -> list[str]:
    return [name for name in network.stages if name.startswith("attention")]


def _before(network: EquivariantClassifier, stage: str) -> enn.SequentialModule:
    """The stages of ``network`` that come before ``stage``."""
    names = list(network.stages)
    return enn.SequentialModule(*(network.stages[name] for name in names[: names.index(stage)]))


def _until(network: EquivariantClassifier, stage: str) -> enn.SequentialModule:
    """The stages of ``network`` up to ``stage``, which is included."""
    return enn.SequentialModule(*_before(network, stage).children(), network.stages[stage])


def _example(network: nn.Module, data: ImageData) -> Tensor:
    """(1, 1, S, S): the test image of the digit shown that ``network`` recognises with most confidence."""
    images, labels = as_tensors(data.test.first(512), data.normalisation())
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
