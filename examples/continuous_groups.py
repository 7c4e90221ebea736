"""Measure the equivariance error of attention over samples of a continuous group against their number.

    python examples/continuous_groups.py --output figures

One layer with random weights has increasing numbers of samples, on which its parameters do not depend. The error is
that for random elements of the group. Grids and points are transformed without interpolation. Prints tables and draws
``continuous_error.png`` (grids) and ``continuous_error_points.png`` (points). Needs matplotlib: the extra "plot".
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import escnn_attention  # noqa: F401  # isort: skip  # before escnn
import numpy as np
import torch
from escnn import gspaces
from escnn.group import GroupElement
from escnn.gspaces import GSpace
from escnn.nn import FieldType, GeometricTensor
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from escnn_attention import GroupSelfAttention, PairKernel, PointAttentiveConv, PointSelfAttention, Samples
from escnn_attention.geometry.grid import Grid
from escnn_attention.plotting import COLOURS

PLANE = (3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
VOLUME = (4, 12, 24, 60, 120, 240)
WITH_REFLECTIONS = {"O(2)": (4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128), "O(3)": (8, 24, 48, 120, 240)}
POINTS = 4  # of a cloud, within a ball of diameter 1: offsets are as long as those of a grid
ENCODINGS = ("none", "mlp", "fourier", "rotary", "pair kernel")


@torch.no_grad()
def on_grid(layer: GroupSelfAttention, x: Tensor, elements: Sequence[GroupElement]) -> list[float]:
    """For each element the relative difference of the layer on transformed features and its transformed output."""
    plain, fields = layer.plain, layer.in_type(x)
    y, found = layer(fields), []
    for element in elements:
        frame = torch.tensor(layer.space.basespace_action(element))
        grid = Grid(tuple(x.shape[2:]), plain.window, frame=frame)
        expected = y.transform_fibers(element).tensor
        of_transformed = plain.attend(fields.transform_fibers(element).tensor, grid)
        found.append(float((of_transformed - expected).norm() / expected.norm()))
    return found


@torch.no_grad()
def on_points(layer: torch.nn.Module, x: GeometricTensor, elements: Sequence[GroupElement]) -> list[float]:
    """For each element the relative difference of the layer on the rotated cloud and its rotated output."""
    y, found = layer(x), []
    for element in elements:
        expected = y.transform_fibers(element).tensor
        found.append(float((layer(x.transform(element)).tensor - expected).norm() / expected.norm()))
    return found


def errors(
    gspace: GSpace, numbers: Sequence[int | Samples], shape: tuple[int, ...], encoding: str, draws: int
) -> list[float]:
    """The root mean square of the error over random elements and random weights, for each number of samples."""
    field_type = FieldType(gspace, [gspace.trivial_repr, gspace.irrep(1), gspace.irrep(1), gspace.irrep(2)])

    def make(samples: int | Samples) -> GroupSelfAttention:
        return GroupSelfAttention(
            field_type,
            field_type,
            num_heads=2,
            head_fields=8,
            encoding=encoding,
            samples=samples,
            kernel_size=None,
        )

    def draw() -> Tensor:
        return torch.randn(1, field_type.size, *shape, dtype=torch.float64)

    return measure(gspace, numbers, draws, draw, make, on_grid)


def errors_on_points(
    layer: type[PointSelfAttention] | type[PointAttentiveConv],
    gspace: GSpace,
    irreps: Sequence[tuple[int, ...]],
    numbers: Sequence[int],
    encoding: str,
    draws: int,
) -> list[float]:
    """The root mean square of the error of a layer on a few points."""
    field_type = FieldType(gspace, [gspace.trivial_repr, *(gspace.irrep(*i) for i in irreps)])

    def make(samples: int | Samples) -> torch.nn.Module:
        kernel = PairKernel() if encoding == "pair kernel" else encoding
        return layer(
            field_type, field_type, num_heads=2, head_fields=4, encoding=kernel, samples=samples, length_scale=2.0
        )

    def draw() -> GeometricTensor:
        coords = torch.randn(POINTS, gspace.dimensionality, dtype=torch.float64)
        radii = torch.rand(POINTS, 1, dtype=torch.float64) ** (1 / gspace.dimensionality)
        features = torch.randn(POINTS, field_type.size, dtype=torch.float64)
        return GeometricTensor(features, field_type, radii * coords / coords.norm(dim=1, keepdim=True))

    return measure(gspace, numbers, draws, draw, make, on_points)


def measure(
    gspace: GSpace,
    numbers: Sequence[int | Samples],
    draws: int,
    draw: Callable[[], object],
    make: Callable[[int | Samples], torch.nn.Module],
    of: Callable[..., list[float]],
) -> list[float]:
    """The root mean square over inputs, weights and elements, equal for all numbers of samples."""
    squares = np.zeros((draws, len(numbers)))
    for i in range(draws):
        torch.manual_seed(i)
        np.random.seed(i)  # escnn draws elements with it
        x, elements, state = draw(), [gspace.fibergroup.sample() for _ in range(3)], None
        for j, samples in enumerate(numbers):
            layer = make(samples)
            state = state or layer.state_dict()
            layer.load_state_dict(state)
            layer = layer.double().eval()
            squares[i, j] = np.mean(np.square(of(layer, x, elements)))
    return list(np.sqrt(squares.mean(axis=0)))


def draw_grids(draws: int) -> Figure:
    """The error of attention on grids."""
    figure = Figure(figsize=(9.0, 4.2), layout="constrained")
    panels: list[tuple[str, Callable[[], GSpace], Sequence[int], tuple[int, ...]]] = [
        ("SO(2), in the plane", lambda: gspaces.rot2dOnR2(-1), PLANE, (4, 4)),
        ("SO(3), in space", gspaces.rot3dOnR3, VOLUME, (2, 2, 2)),
    ]
    for ax, (title, make, numbers, shape) in zip(figure.subplots(1, 2), panels, strict=True):
        of = partial(errors, make(), numbers, shape, draws=draws)
        curves(ax, f"{title}, on a grid", ENCODINGS[:4], numbers, of)
        ax.set_title(title, fontsize=11)
        ax.set_xlabel("samples S")
    figure.axes[0].set_ylabel("relative equivariance error")
    finish(figure, "Equivariance error for random elements against the number of samples, on a grid")
    return figure


def draw_points(draws: int) -> Figure:
    """The error of attention and of attentive convolution on points."""
    figure = Figure(figsize=(12.4, 6.6), layout="constrained")
    panels: list[tuple[str, Callable[[], GSpace], Sequence[int], Sequence[tuple[int, ...]]]] = [
        ("SO(2)", lambda: gspaces.rot2dOnR2(-1), PLANE, [(1,), (1,), (2,)]),
        ("O(2)", lambda: gspaces.flipRot2dOnR2(-1), WITH_REFLECTIONS["O(2)"], [(1, 1), (1, 1), (1, 2)]),
        ("SO(3)", gspaces.rot3dOnR3, VOLUME, [(1,), (1,), (2,)]),
        ("O(3)", gspaces.flipRot3dOnR3, WITH_REFLECTIONS["O(3)"], [(1, 1), (1, 1), (0, 2)]),
    ]
    axes = figure.subplots(2, 4, sharex="col", sharey="col")
    for row, layer in zip(axes, (PointSelfAttention, PointAttentiveConv), strict=True):
        # An attentive convolution has no rotary encoding.
        encodings = [e for e in ENCODINGS if layer is PointSelfAttention or e != "rotary"]
        for ax, (title, make, numbers, irreps) in zip(row, panels, strict=True):
            of = partial(errors_on_points, layer, make(), irreps, numbers, draws=draws)
            curves(ax, f"{title}, on points: {layer.__name__}", encodings, numbers, of)
        row[0].set_ylabel(f"{layer.__name__}\nrelative equivariance error")
    for ax, (title, *_) in zip(axes[0], panels, strict=True):
        ax.set_title(title, fontsize=11)
    for ax in axes[1]:
        ax.set_xlabel("samples S")
    finish(figure, "Equivariance error for random elements against the number of samples, on points")
    return figure


def curves(
    ax: Axes, title: str, encodings: Sequence[str], numbers: Sequence[int], of: Callable[[str], list[float]]
) -> None:
    """The errors of every encoding, printed and drawn."""
    print(f"{title}\n{'samples':>12}" + "".join(f"{n:>10}" for n in numbers))
    for encoding in encodings:
        found = of(encoding)
        print(f"{encoding:>12}" + "".join(f"{e:10.1e}" for e in found), flush=True)
        colour = COLOURS[ENCODINGS.index(encoding)]
        ax.plot(numbers, found, "o-", color=colour, markersize=4, label=encoding)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ticks = [t for t in (4, 8, 16, 32, 64, 128, 256) if t <= 1.1 * max(numbers)]
    ax.set_xticks(ticks, [str(t) for t in ticks])
    ax.grid(color="#E5E5E5")
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)


def finish(figure: Figure, title: str) -> None:
    """A legend and a title."""
    handles, names = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, names, title="encoding", loc="outside lower center", ncols=len(names), frameon=False)
    figure.suptitle(title, weight="bold", fontsize=12)


PICTURES = {"grid": ("continuous_error.png", draw_grids), "points": ("continuous_error_points.png", draw_points)}


def main() -> None:
    """Measure, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path(), help="folder for the pictures (default: this one)")
    parser.add_argument("--draws", type=int, default=2, help="random weights (default: %(default)s)")
    parser.add_argument("--dpi", type=int, default=110, help="resolution (default: %(default)s)")
    parser.add_argument("--only", choices=list(PICTURES), help="one of the pictures (default: both)")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    for name, (file, draw) in PICTURES.items():
        if arguments.only in (None, name):
            draw(arguments.draws).savefig(arguments.output / file, dpi=arguments.dpi)
            print(f"wrote {arguments.output / file}", flush=True)


if __name__ == "__main__":
    main()
