"""Measure the effect of rotations on attention on the sphere, and draw the picture of the documentation.

    python examples/sphere.py --out figures

First single layers between scattered points, against the number of samples.

Then grids: a smooth field on the sphere (temperature and wind) and its rotation by a random element are sampled on a
grid of latitudes and longitudes. Two blocks of attention and the mean over the area compute invariants: with attention
on the sphere, the same without quadrature weights, and plain attention on the image of latitudes and longitudes.

Weights are random, because equivariance does not depend on training. It takes some minutes on one core. Needs
matplotlib, rich and typer: the extra "train".
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import escnn_attention  # noqa: F401  # isort: skip  # before escnn
import matplotlib.pyplot as plt
import numpy as np
import torch
import typer
from escnn import gspaces
from escnn.nn import FieldType, GeometricTensor
from rich.console import Console
from rich.progress import track
from rich.table import Table
from scipy.spatial.transform import Rotation
from torch import Tensor

from escnn_attention import SphereGrid, SphereSelfAttention, SphereTransformerBlock, TransformerBlock

SPACE = gspaces.rot3dOnR3()
SPACES = {"SO(3)": SPACE, "O(3)": gspaces.flipRot3dOnR3()}
LAYERS, POINTS = 5, 24  # random layers and points for the error of a layer
VECTOR = SPACE.fibergroup.standard_representation()
INPUT = FieldType(SPACE, [SPACE.trivial_repr, VECTOR])
HIDDEN = FieldType(SPACE, 6 * [SPACE.trivial_repr] + 2 * [VECTOR])
PLANE = gspaces.trivialOnR2()
RADIUS = 0.8  # radians


class Field:
    """A scalar and a tangent vector field of a few smooth bumps: ``(N, 3)`` to ``(N, 4)``."""

    def __init__(self, seed: int):
        random = np.random.default_rng(seed)
        self.centres = random.normal(size=(6, 3))
        self.centres /= np.linalg.norm(self.centres, axis=1, keepdims=True)
        self.heights = random.normal(size=6)

    def __call__(self, points: np.ndarray, rotation: Rotation) -> Tensor:
        """The field rotated, at points of the sphere."""
        x = rotation.inv().apply(points)
        bumps = self.heights * np.exp(2 * (x @ self.centres.T - 1))
        # Winds blow around the highs.
        wind = np.einsum("nb,nbi->ni", bumps, np.cross(self.centres, x[:, None]))
        return torch.as_tensor(np.concatenate([bumps.sum(1, keepdims=True), rotation.apply(wind)], axis=1))


def field_types(space: gspaces.GSpace) -> dict[str, FieldType]:
    """Input types of a layer by name; its output is of the last."""
    group = space.fibergroup
    tensor = group.irrep(2) if space is SPACE else group.irrep(0, 2)
    scalars = FieldType(space, 2 * [space.trivial_repr])
    return {
        "scalars": scalars,
        "scalars, vectors and tensors": FieldType(space, [space.trivial_repr, space.basespace_action, tensor]),
    }


@torch.no_grad()
def layer_error(space: gspaces.GSpace, fields: str, samples: int) -> float:
    """The error of a layer under a random element of the group, relative to its output, in float64.

    The mean over some layers with random weights, on random fields at random points.
    """
    in_type, out_type = field_types(space)[fields], list(field_types(space).values())[-1]
    random = np.random.default_rng(0)
    errors = []
    for seed in range(LAYERS):
        torch.manual_seed(seed)
        layer = SphereSelfAttention(in_type, out_type, samples=samples, head_fields=2).double()
        coords = torch.nn.functional.normalize(torch.as_tensor(random.normal(size=(POINTS, 3))), dim=1)
        x = GeometricTensor(torch.as_tensor(random.normal(size=(POINTS, in_type.size))), in_type, coords)
        q = random.normal(size=4)
        q /= np.linalg.norm(q)
        element = space.fibergroup.element(q if space is SPACE else (seed % 2, q), "Q")
        y, z = layer(x), layer(x.transform(element))
        errors.append(float((z.tensor - y.transform_fibers(element).tensor).norm() / y.tensor.norm()))
    return float(np.mean(errors))


class OnSphere(torch.nn.Module):
    """Two blocks on the sphere and the mean of the scalars over the area."""

    def __init__(self, grid: SphereGrid, samples: int, weighted: bool = True):
        super().__init__()
        torch.manual_seed(0)
        arguments = {"samples": samples, "num_heads": 2, "head_fields": 2, "radius": RADIUS, "hidden_fields": 8}
        self.blocks = torch.nn.ModuleList(
            [SphereTransformerBlock(INPUT, HIDDEN, **arguments), SphereTransformerBlock(HIDDEN, HIDDEN, **arguments)]
        ).double()
        self.grid = grid
        self.measure = grid.weights if weighted else None

    @torch.no_grad()
    def forward(self, features: Tensor) -> Tensor:
        x = GeometricTensor(features, INPUT, self.grid.coords)
        for block in self.blocks:
            x = block(x, measure=self.measure)
        weights = self.grid.weights if self.measure is not None else torch.ones_like(self.grid.weights)
        return (weights / weights.sum()) @ x.tensor[:, :6]


class OnImage(torch.nn.Module):
    """As many layers of plain attention on the image, with windows of the same width at the equator."""

    def __init__(self, grid: SphereGrid):
        super().__init__()
        torch.manual_seed(0)
        first = FieldType(PLANE, 4 * [PLANE.trivial_repr])
        hidden = FieldType(PLANE, 12 * [PLANE.trivial_repr])
        window = 2 * round(RADIUS * grid.shape[0] / np.pi) + 1
        arguments = {"num_heads": 2, "kernel_size": window, "norm": "pre"}
        self.blocks = torch.nn.Sequential(
            TransformerBlock(first, hidden, **arguments), TransformerBlock(hidden, hidden, **arguments)
        ).double()
        self.grid, self.first = grid, first

    @torch.no_grad()
    def forward(self, features: Tensor) -> Tensor:
        # Winds to the south and to the east, as they are on maps.
        x, y, z = self.grid.coords.unbind(1)
        flat = (x.square() + y.square()).sqrt()
        east = torch.stack([-y / flat, x / flat, torch.zeros_like(x)], dim=1)
        south = torch.stack([x * z / flat, y * z / flat, -flat], dim=1)
        local = [features[:, 0], (features[:, 1:] * south).sum(1), (features[:, 1:] * east).sum(1), z]
        image = torch.stack(local).unflatten(1, self.grid.shape).unsqueeze(0)
        return self.blocks(GeometricTensor(image, self.first)).tensor[:, :6].mean((0, 2, 3))


def change(network: torch.nn.Module, grid: SphereGrid, rotations: list[Rotation]) -> float:
    """The change of the invariants with the rotation, relative to their change between fields."""
    points = grid.coords.numpy()
    fields = [Field(seed) for seed in range(3)]
    numbers = torch.stack([torch.stack([network(field(points, r)) for r in rotations]) for field in fields])
    within = numbers.var(dim=1).mean(0)
    between = numbers.mean(1).var(dim=0)
    return float((within.sum() / between.sum()).sqrt())


def main(
    out: Annotated[Path, typer.Option(help="Folder of the picture.")] = Path("figures"),
    sizes: Annotated[str, typer.Option(help="Numbers of latitudes, with commas.")] = "6,8,12,16",
    samples: Annotated[str, typer.Option(help="Numbers of frames a point, with commas.")] = "4,8",
    num_rotations: Annotated[int, typer.Option(min=2, help="Random rotations.")] = 4,
    layer_samples: Annotated[str, typer.Option(help="Samples of single layers, with commas.")] = "4,8,16,32",
) -> None:
    """Errors of single layers, and of invariants on grids of several sizes."""
    console = Console()
    numbers = [int(n) for n in layer_samples.split(",")]
    table = Table("group, fields", *map(str, numbers), title="error of a layer, by its samples")
    rows = [(group, fields) for group in SPACES for fields in field_types(SPACE)]
    for group, fields in track(rows, console=console, description="layers"):
        errors = (layer_error(SPACES[group], fields, n) for n in numbers)
        table.add_row(f"{group}, from {fields}", *(f"{error:.0e}" for error in errors))
    console.print(table)

    rotations = [Rotation.identity(), *Rotation.random(num_rotations - 1, random_state=0)]
    latitudes = [int(n) for n in sizes.split(",")]
    kinds = {f"sphere, {n} frames": (int(n), True) for n in samples.split(",")}
    kinds[f"sphere, {samples.split(',')[-1]} frames, no weights"] = (int(samples.split(",")[-1]), False)
    changes: dict[str, list[float]] = {name: [] for name in [*kinds, "latitudes and longitudes"]}
    for n in track(latitudes, console=console, description="grids"):
        grid = SphereGrid(n)
        for name, (frames, weighted) in kinds.items():
            changes[name].append(change(OnSphere(grid, frames, weighted), grid, rotations))
        changes["latitudes and longitudes"].append(change(OnImage(grid), grid, rotations))

    table = Table("attention", *(f"{n} × {2 * n}" for n in latitudes), title="change under rotations")
    for name, values in changes.items():
        table.add_row(name, *(f"{value:.1e}" for value in values))
    console.print(table)

    out.mkdir(parents=True, exist_ok=True)
    figure, axes = plt.subplots(figsize=(5.6, 3.4), layout="constrained")
    for (name, values), marker in zip(changes.items(), "osv^D", strict=False):
        axes.loglog(latitudes, values, marker=marker, label=name)
    axes.set_xticks(latitudes, [str(n) for n in latitudes])
    axes.minorticks_off()
    axes.set_xlabel("latitudes of the grid")
    axes.set_ylabel("change under rotations\n(1: as much as from field to field)")
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(out / "sphere.png", dpi=150)
    plt.close(figure)
    console.print(f"written: {out / 'sphere.png'}", soft_wrap=True)


if __name__ == "__main__":
    typer.run(main)
