"""Figures 1, 2 and 3."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import escnn_attention  # noqa: F401  # isort: skip  # before escnn
import numpy as np
import torch
from escnn import gspaces, nn
from matplotlib.figure import Figure
from scipy.ndimage import map_coordinates, zoom
from sklearn.datasets import load_digits

from escnn_attention import LiftingSelfAttention
from escnn_attention.models import GSANet
from escnn_attention.plotting import plot_feature_maps
from examples.experiments.runs import Run

_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999", "#882255")


def draw_curves(path: Path, runs: Sequence[Run], results: Sequence[Sequence[dict[str, Any]]]) -> None:
    """Figure 3: accuracy on the validation images, epoch by epoch, of the first seed."""
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    colors = itertools.cycle(_COLORS)
    twins = itertools.cycle((("0.35", "--"), ("0.35", ":")))
    for run, (result, *_) in zip(runs, results, strict=False):
        color, line = (next(colors), "-") if run.kind == "attention" else next(twins)
        curve = [row for row in result["curve"] if row["valid_accuracy"] is not None]
        axes.plot(
            [row["epoch"] for row in curve],
            [100 * row["valid_accuracy"] for row in curve],
            color=color,
            linestyle=line,
            label=run.label,
        )
    axes.set(xlabel="epoch", ylabel="validation accuracy (%)")
    axes.grid(color="0.9", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right center", frameon=False, fontsize="small")
    figure.savefig(path, dpi=150)


def draw_feature_maps(path: Path) -> None:
    """Figure 1: a digit rotated by the elements of C4, and the feature maps of a GSA-Net after each stage.

    The weights are random: equivariance does not depend on training.
    """
    torch.manual_seed(0)
    network = GSANet.rotmnist(gspaces.rot2dOnR2(4), num_heads=4).eval()
    digit = zoom(load_digits().images[4] / 16, 28 / 8, order=3).clip(0, 1)
    image = network.in_type(torch.tensor(digit, dtype=torch.float32)[None, None])
    stages = list(network.stages.items())
    shown = {
        "after lifting": nn.SequentialModule(stages[0][1]),
        "after two blocks": nn.SequentialModule(*(stage for _, stage in stages[:3])),
    }
    figure = plot_feature_maps(image, shown, title="a rotation of the input rotates the maps and moves the poses")
    figure.savefig(path, dpi=130)


_ANGLES = 72  # poses of the layer: steps of 5°
_RADIUS = 5  # of the neighbourhood, in pixels
_SAMPLES = 24  # images, each with a kernel of its own


def draw_steerability(path: Path) -> None:
    """Figure 2: a convolution kernel and a positional encoding rotated by fine angles, and their errors."""
    angles, convolution, smooth, attention = steerability_errors()
    figure = Figure(figsize=(10, 6), layout="constrained")
    top, bottom = figure.subfigures(2, 1, height_ratios=(1.25, 1))
    shown = (0, 3, 6, 9, 12, 15, 18)
    panels = top.subplots(2, len(shown))
    kernel = np.random.default_rng(3).standard_normal((2 * _RADIUS + 1,) * 2)
    encoding = _encoding(seed=3)
    for i, step in enumerate(shown):
        theta = np.deg2rad(5 * step)
        for row, values in enumerate((_rotated(kernel, theta) * _disc(), encoding(theta) * _disc())):
            panel = panels[row, i]
            panel.imshow(np.where(_disc(), values, np.nan), cmap="RdBu", vmin=-2.2, vmax=2.2)
            panel.set_xticks([])
            panel.set_yticks([])
            panel.spines[:].set_visible(False)
        panels[0, i].set_title(f"{5 * step}°", fontsize="medium")
    panels[0, 0].set_ylabel("convolution kernel,\ninterpolated", fontsize="medium")
    panels[1, 0].set_ylabel("positional encoding,\nevaluated", fontsize="medium")
    axes = bottom.subplots()
    axes.plot(angles, convolution, color=_COLORS[1], label="convolution, interpolated kernel of free weights")
    axes.plot(angles, smooth, color=_COLORS[4], label="convolution, interpolated kernel that is smooth")
    axes.plot(angles, attention, color=_COLORS[0], label="lifting self-attention")
    axes.set(
        xlabel="angle by which the input is rotated",
        ylabel="relative error",
        yscale="log",
        xlim=(0, 180),
        ylim=(3e-3, 1),
    )
    axes.set_xticks(range(0, 181, 15), [f"{a}°" for a in range(0, 181, 15)])
    axes.grid(color="0.9", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper center", ncols=3, fontsize="small")
    figure.savefig(path, dpi=140)


def steerability_errors() -> tuple[list[int], list[float], list[float], list[float]]:
    """The change of the response in the centre when image and pose are rotated together.

    Smooth images are evaluated from a formula at every angle, without interpolation. Compared are a convolution kernel
    of random weights, rotated by bilinear interpolation; a channel of an encoding as a kernel, rotated in the same way;
    and a lifting self-attention layer with random weights, on the same disc of pixels. The error is relative to the
    standard deviation of the response when the pose alone is rotated; the median over the samples.

    Returns:
        the angles in degrees, and the errors of the two convolutions and of the attention.
    """
    steps = range(0, _ANGLES // 2 + 1)
    free, smooth, attention = [], [], []
    for sample in range(_SAMPLES):
        image = _blobs(sample)
        random = np.random.default_rng(100 + sample).standard_normal((2 * _RADIUS + 1,) * 2)
        for kernel, responses in ((random, free), (_encoding(sample)(0.0), smooth)):
            rotated = [_rotated(kernel, 2 * np.pi * k / _ANGLES) * _disc() for k in range(_ANGLES)]
            seen = [[(image(2 * np.pi * s / _ANGLES) * k).sum() for k in rotated] for s in steps]
            responses.append(np.array(seen)[..., None])
        layer = _layer(seed=sample)
        images = torch.tensor(np.stack([image(2 * np.pi * s / _ANGLES) for s in steps]))
        with torch.no_grad():
            y = layer(layer.in_type(images[:, None])).tensor[:, :, _RADIUS, _RADIUS]
        attention.append(y.unflatten(1, (-1, _ANGLES)).transpose(1, 2).numpy())
    return [s * 360 // _ANGLES for s in steps], _errors(free), _errors(smooth), _errors(attention)


def _errors(samples: Sequence[np.ndarray]) -> list[float]:
    """From ``(angle, pose, field)``: the response of each pose, rotated with the image, against that at the angle 0."""
    changes, variances = [], []
    for responses in samples:
        followed = np.stack([np.roll(r, -s, axis=0) for s, r in enumerate(responses)])
        changes.append(((followed - followed[0]) ** 2).mean((1, 2)))
        variances.append(followed[0].var(0).mean())
    # Relative to the size of the response of each layer, so that all count equally.
    return list(np.sqrt(np.median(np.stack(changes) / np.array(variances)[:, None], axis=0)))


def _blobs(seed: int) -> Any:
    """A sum of Gaussians on the pixels about the centre, rotated by an angle."""
    draw = np.random.default_rng(seed)
    centres, weights = draw.uniform(-2, 2, (6, 2)), draw.standard_normal(6)
    axis = np.arange(-_RADIUS, _RADIUS + 1)

    def image(theta: float) -> np.ndarray:
        x, y = np.meshgrid(axis, -axis)
        c, s = np.cos(theta), np.sin(theta)
        u, v = c * x + s * y, -s * x + c * y  # the position before the rotation
        return sum(
            w * np.exp(-((u - a) ** 2 + (v - b) ** 2) / (2 * 1.3**2))
            for w, (a, b) in zip(weights, centres, strict=True)
        )

    return image


def _disc() -> np.ndarray:
    axis = np.arange(-_RADIUS, _RADIUS + 1)
    x, y = np.meshgrid(axis, axis)
    return x**2 + y**2 <= (_RADIUS + 0.5) ** 2


def _rotated(kernel: np.ndarray, theta: float) -> np.ndarray:
    """A kernel rotated counter-clockwise about its centre, by bilinear interpolation."""
    axis = np.arange(-_RADIUS, _RADIUS + 1)
    x, y = np.meshgrid(axis, -axis)
    c, s = np.cos(theta), np.sin(theta)
    u, v = c * x + s * y, -s * x + c * y
    return map_coordinates(kernel, [_RADIUS - v, u + _RADIUS], order=1, mode="nearest")


def _layer(seed: int) -> LiftingSelfAttention:
    torch.manual_seed(seed)
    gspace = gspaces.rot2dOnR2(_ANGLES)
    image, fields = nn.FieldType(gspace, [gspace.trivial_repr]), nn.FieldType(gspace, 4 * [gspace.regular_repr])
    return LiftingSelfAttention(image, fields, 2, 2 * _RADIUS + 1).double().eval()


def _encoding(seed: int) -> Any:
    """One channel of the encoding of such a layer on the pixels, in the frame of a pose."""
    encoding = _layer(seed).plain.encoding
    axis = np.arange(-_RADIUS, _RADIUS + 1) / _RADIUS
    x, y = np.meshgrid(axis, -axis)

    def values(theta: float) -> np.ndarray:
        c, s = np.cos(theta), np.sin(theta)
        delta = torch.tensor(np.stack([c * x + s * y, -s * x + c * y], axis=-1))
        with torch.no_grad():
            channel = encoding.offsets(delta)[0, ..., 0].numpy()
        return (channel - channel.mean()) / channel.std()

    return values
