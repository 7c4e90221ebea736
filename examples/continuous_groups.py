"""Measure how the equivariance error of attention over samples of a continuous group falls with their number.

    python examples/continuous_groups.py --output figures

One layer with random weights, at more and more samples: its parameters do not depend on their number. The error is that
for random elements of the group, on a grid that is turned by the element, so that nothing is interpolated. Prints a
table and draws ``continuous_error.png``. Needs matplotlib: the extra "plot".
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from escnn import gspaces
from escnn.group import GroupElement
from escnn.gspaces import GSpace
from escnn.nn import FieldType
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from escnn_attention import GroupSelfAttention, Samples
from escnn_attention.plotting._drawing import COLOURS
from escnn_attention.positions import Grid

PLANE = (3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
VOLUME = (4, 12, 24, 60, 120, 240)


@torch.no_grad()
def error(layer: GroupSelfAttention, x: torch.Tensor, element: GroupElement) -> float:
    """The relative difference of the layer on turned features and its turned output."""
    plain, fields = layer.plain, layer.in_type(x)
    expected = layer(fields).transform_fibers(element).tensor
    frame = torch.tensor(layer.space.basespace_action(element))
    turned = plain.attend(fields.transform_fibers(element).tensor, Grid(tuple(x.shape[2:]), plain.window, frame=frame))
    return float((turned - expected).norm() / expected.norm())


def errors(
    gspace: GSpace, numbers: Sequence[int | Samples], shape: tuple[int, ...], encoding: str, draws: int
) -> list[float]:
    """The root mean square of the error over random elements and random weights, for each number of samples."""
    group = gspace.fibergroup
    field_type = FieldType(gspace, [gspace.trivial_repr, gspace.irrep(1), gspace.irrep(1), gspace.irrep(2)])
    squares = np.zeros((draws, len(numbers)))
    for draw in range(draws):
        torch.manual_seed(draw)
        np.random.seed(draw)  # escnn draws elements with it
        x = torch.randn(1, field_type.size, *shape, dtype=torch.float64)
        elements, state = [group.sample() for _ in range(3)], None
        for i, samples in enumerate(numbers):
            layer = GroupSelfAttention(
                field_type, field_type, num_heads=2, head_fields=8, encoding=encoding, samples=samples
            )
            state = state or layer.state_dict()
            layer.load_state_dict(state)
            layer = layer.double().eval()
            squares[draw, i] = np.mean([error(layer, x, g) ** 2 for g in elements])
    return list(np.sqrt(squares.mean(axis=0)))


def main() -> None:
    """Measure, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path(), help="folder for the picture (default: this one)")
    parser.add_argument("--draws", type=int, default=2, help="random weights (default: %(default)s)")
    parser.add_argument("--dpi", type=int, default=110, help="resolution (default: %(default)s)")
    arguments = parser.parse_args()

    figure = Figure(figsize=(9.0, 4.2), layout="constrained")
    panels: list[tuple[str, Callable[[], GSpace], Sequence[int], tuple[int, ...]]] = [
        ("SO(2), in the plane", lambda: gspaces.rot2dOnR2(-1), PLANE, (4, 4)),
        ("SO(3), in space", gspaces.rot3dOnR3, VOLUME, (2, 2, 2)),
    ]
    for ax, (title, make, numbers, shape) in zip(figure.subplots(1, 2), panels, strict=True):
        print(f"{title}\n{'samples':>10}" + "".join(f"{n:>10}" for n in numbers))
        for colour, encoding in zip(COLOURS, ("none", "mlp", "fourier", "rotary"), strict=False):
            found = errors(make(), numbers, shape, encoding, arguments.draws)
            print(f"{encoding:>10}" + "".join(f"{e:10.1e}" for e in found), flush=True)
            ax.plot(numbers, found, "o-", color=colour, markersize=4, label=encoding)
        style(ax, title)
    figure.axes[0].set_ylabel("relative equivariance error")
    figure.legend(
        *figure.axes[0].get_legend_handles_labels(),
        title="encoding",
        loc="outside lower center",
        ncols=4,
        frameon=False,
    )
    figure.suptitle("Equivariance error for random elements against the number of samples", weight="bold", fontsize=12)
    arguments.output.mkdir(parents=True, exist_ok=True)
    figure.savefig(arguments.output / "continuous_error.png", dpi=arguments.dpi)


def style(ax: Axes, title: str) -> None:
    """Logarithmic axes with a grid."""
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ticks = [4, 8, 16, 32, 64, 128, 256][: 5 if title.startswith("SO(2)") else 7]
    ax.set_xticks(ticks, [str(t) for t in ticks])
    ax.set_xlabel("samples S")
    ax.set_title(title, fontsize=11)
    ax.grid(color="#E5E5E5")
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    main()
