"""Measure scale equivariance, and draw the picture of the documentation.

    python examples/scale_equivariance.py --out figures

The input of a network on translations, quarter turns and dilations is a handwritten digit of scikit-learn and the same
digit enlarged by 2: a smooth function, sampled at one distance and at half of it. The features of the enlarged image at
twice the scale are compared with those of the image, away from the border; likewise for networks with the same weights
and fixed windows, or with a single scale, whose windows may be those of the first network at scale 2.

Weights are random, because equivariance does not depend on training. It takes a minute or two on one core. Needs
scikit-learn, matplotlib and rich: the extra "train".
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

import escnn_attention  # noqa: F401  # isort: skip  # before escnn
import matplotlib.pyplot as plt
import numpy as np
import torch
from escnn import gspaces
from escnn.nn import EquivariantModule, FieldType, SequentialModule
from rich.console import Console
from rich.table import Table
from scipy.interpolate import RectBivariateSpline
from sklearn.datasets import load_digits

from escnn_attention import (
    DilationLiftingSelfAttention,
    DilationSelfAttention,
    FieldLayerNorm,
    PerScale,
    ScalePooling,
    Scales,
    SiLU,
)

GSPACE = gspaces.rot2dOnR2(4)
IMAGE = FieldType(GSPACE, [GSPACE.trivial_repr])
FIELDS = FieldType(GSPACE, 4 * [GSPACE.regular_repr])
MARGIN = 4  # width of the border of the image, in positions


def digit(index: int, size: int) -> torch.Tensor:
    """The spline through a digit of 8×8 pixels with a margin of 2, sampled at (1, 1, size, size) positions."""
    pixels = np.pad(load_digits().images[index] / 8 - 1, 2, constant_values=-1)
    axis = np.linspace(0, 11, size)
    return torch.tensor(RectBivariateSpline(range(12), range(12), pixels)(axis, axis))[None, None]


def network(scales: Scales, widths: tuple[int, int] = (5, 3), **options: str) -> SequentialModule:
    """A lifting layer and two group layers, the first with keys of two scales if possible; weights from one seed."""
    of_lifting, of_group = widths
    torch.manual_seed(0)
    hidden = scales.repeat(FIELDS)
    return SequentialModule(
        DilationLiftingSelfAttention(IMAGE, hidden, scales, 2, of_lifting, **options),
        PerScale(FieldLayerNorm(FIELDS), scales),
        SiLU(hidden),
        DilationSelfAttention(hidden, hidden, scales, 2, of_group, **options),
        PerScale(FieldLayerNorm(FIELDS), scales),
        SiLU(hidden),
        DilationSelfAttention(hidden, hidden, scales, 2, of_group, interval=1, **options),
    ).double()


@torch.no_grad()
def features(module: EquivariantModule, image: torch.Tensor, count: int) -> torch.Tensor:
    """The features of an image: ``(scales, channels, size, size)``."""
    return module(IMAGE(image)).tensor.unflatten(1, (count, -1))[0]


def error(small: torch.Tensor, large: torch.Tensor) -> float:
    """The difference of the features of the enlarged image and of the image, at the positions of the image.

    Relative to their variation between positions, because most of an image is background.
    """
    inner = (..., slice(MARGIN, -MARGIN), slice(MARGIN, -MARGIN))
    small, large = small[inner], large[..., ::2, ::2][inner]
    return ((large - small).norm() / (small - small.mean((-2, -1), keepdim=True)).norm()).item()


@dataclass
class Result:
    """Of one network.

    Attributes:
        parameters: their number.
        errors: from each scale to the next; without scales, of the features.
        invariant: of the maximum over scales.
        shrinks: the norm of the features of the enlarged image, at the next scale, relative to the image's.
        small, large: the features of one image and of its enlargement.
    """

    parameters: int
    errors: list[float]
    invariant: float
    shrinks: float
    small: torch.Tensor
    large: torch.Tensor


def measure(module: SequentialModule, scales: Scales, size: int, digits: int) -> Result:
    """The errors of a network, as means over some digits."""
    pool = ScalePooling(scales.repeat(FIELDS), scales).plain
    errors, invariant, shrinks, shown = [], [], [], None
    for index in range(digits):
        small, large = (features(module, digit(index, n), scales.count) for n in (size, 2 * size - 1))
        shown = shown or (small, large)
        if scales.count == 1:
            errors.append([error(small, large)])
        else:
            errors.append([error(small[i], large[i + 1]) for i in range(scales.count - 1)])
            shrinks.append((large[1, ..., ::2, ::2].norm() / small[0].norm()).item())
        invariant.append(error(*(pool(t.flatten(0, 1)[None]) for t in (small, large))))
    parameters = sum(p.numel() for p in module.parameters())
    means = np.mean(errors, axis=0).tolist()
    return Result(parameters, means, float(np.mean(invariant)), float(np.mean(shrinks or [np.nan])), *shown)


@torch.no_grad()
def seconds(windows: str, counts: range, size: int) -> list[float]:
    """The additional time of each scale in a group layer, on an image of this size."""
    totals = [0.0]
    for count in counts:
        scales = Scales(2, count)
        hidden = scales.repeat(FIELDS)
        layer = DilationSelfAttention(hidden, hidden, scales, 2, 5, interval=1, windows=windows)
        x = hidden(torch.randn(1, hidden.size, size, size))
        times = []
        for _ in range(4):
            start = time.perf_counter()
            layer(x)
            times.append(time.perf_counter() - start)
        totals.append(min(times[1:]))
    return np.diff(totals).tolist()


def draw(results: dict[str, Result], size: int) -> plt.Figure:
    """Draw the features of an image and of the enlarged image, and their difference: one column for each network."""
    figure, axes = plt.subplots(3, len(results) + 1, figsize=(1.85 * (len(results) + 1), 5.9), layout="constrained")
    for axis, n, name in zip(axes[:, 0], (size, 2 * size - 1), (f"{size}×{size}", "enlarged by 2"), strict=False):
        axis.imshow(digit(0, n)[0, 0], cmap="gray", extent=(0, n, 0, n))
        axis.set(xlim=(0, 2 * size - 1), ylim=(0, 2 * size - 1))
        axis.set_ylabel(name, fontsize=9)
        axis.set_frame_on(False)
    axes[0, 0].set_title("image", fontsize=9)
    axes[2, 0].set_ylabel("difference", fontsize=9)
    axes[2, 0].set_frame_on(False)
    for column, (name, result) in zip(axes.T[1:], results.items(), strict=True):
        scale = int(len(result.small) > 1)
        small, large = result.small[scale], result.large[2 * scale]
        channel = int(small.flatten(1).std(1).argmax())
        small, large = small[channel], large[channel]
        middle, limit = small.mean(), (small - small.mean()).abs().max().item()
        maps = (small - middle, large - middle, large[::2, ::2] - small)
        off = result.errors[scale]
        labels = (
            f"scale {2**scale}" if scale else "",
            f"scale {2 ** (scale + 1)}" if scale else "",
            f"error {percent(off) if off > 1e-10 else 0}",
        )
        for axis, values, label in zip(column, maps, labels, strict=True):
            axis.imshow(values, cmap="RdBu_r", vmin=-limit, vmax=limit)
            axis.set_xlabel(label, fontsize=9)
        column[0].set_title(name, fontsize=9)
    for axis in axes.flat:
        axis.set_xticks([])
        axis.set_yticks([])
    return figure


def percent(value: float) -> str:
    """An error for the table."""
    if np.isnan(value):
        return "-"
    if value < 1e-10:
        return f"{value:.0e}"
    return f"{100 * value:.1f} %" if value < 1 else "> 100 %"


def main() -> None:
    """Measure, print the tables and save the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(), help="folder for the picture (default: this one)")
    parser.add_argument("--size", type=int, default=45, help="size of the image in positions (default: %(default)s)")
    parser.add_argument("--digits", type=int, default=3, help="number of digits (default: %(default)s)")
    parser.add_argument("--dpi", type=int, default=110, help="resolution (default: %(default)s)")
    arguments = parser.parse_args()

    many, one = Scales(base=2, count=4), Scales(base=2, count=1)
    networks = {
        "scaled windows": (many, {"windows": "scaled"}),
        "dilated windows": (many, {"windows": "dilated"}),
        "fixed windows": (many, {"windows": "fixed"}),
        "one scale": (one, {}),
        "one scale, 9×9 and 5×5": (one, {"widths": (9, 5)}),
        "scaled, counting": (many, {"windows": "scaled", "measure": "counting"}),
        "scaled, printed": (many, {"windows": "scaled", "measure": "printed"}),
    }
    results = {
        name: measure(network(scales, **options), scales, arguments.size, arguments.digits)
        for name, (scales, options) in networks.items()
    }
    console = Console(width=120)
    columns = [f"scale {2**i} to {2 ** (i + 1)}" for i in range(many.count - 1)]
    columns[-1] += ", end"
    table = Table("network", "parameters", *columns, "maximum", "size")
    for name, result in results.items():
        errors = [percent(e) for e in result.errors] + ["-"] * (len(columns) - len(result.errors))
        size = "-" if np.isnan(result.shrinks) else f"{result.shrinks:.3f}"
        table.add_row(name, str(result.parameters), *errors, percent(result.invariant), size)
    table.title = "Error on images enlarged by 2"
    console.print(table)

    table = Table("windows", *(f"scale {2**i}" for i in range(many.count)), title="Milliseconds that a scale takes")
    for windows in ("scaled", "dilated"):
        times = seconds(windows, range(1, many.count + 1), arguments.size)
        table.add_row(windows, *(f"{1000 * t:.0f}" for t in times))
    console.print(table)

    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / "scale_equivariance.png"
    draw(dict(list(results.items())[:5]), arguments.size).savefig(path, dpi=arguments.dpi)
    console.print(f"wrote {path}")


if __name__ == "__main__":
    main()
