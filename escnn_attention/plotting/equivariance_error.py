"""The error of equivariance against the angle."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from escnn_attention.equivariance.angles import DISC, EquivarianceErrors, equivariance_errors, named_models
from escnn_attention.plotting._drawing import COLOURS, GREY, SMALL_PRINT, figure_class

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["plot_equivariance_error"]

_CHARACTERS = 100  # of the legend, in a line across the figure


def plot_equivariance_error(
    models: torch.nn.Module | Mapping[str, torch.nn.Module] | EquivarianceErrors,
    images: Tensor | None = None,
    *,
    angles: Sequence[float] | npt.NDArray[np.floating] | None = None,
    layer: str | None = None,
    size: int = 28,
    disc: float = DISC,
    background: float = 0.0,
    seed: int = 0,
    interpolation: bool = True,
    log: bool = False,
    title: str = "Equivariance error against the angle of the input",
) -> Figure:
    r"""The relative error of equivariance of models against the angle, finer than their groups.

    A curve belongs to a model and shows :math:`\|R_\theta^{-1} F(R_\theta x) - F(x)\| / \|F(x)\|`, with F the
    invariant part of what the model gives: its logits, or, of feature maps, the maximum over poses, turned back and
    compared within a disc. It is one quantity for all models and angles;
    :func:`~escnn_attention.equivariance.angles.equivariance_errors` says how it is measured, and gives the numbers.
    Dots are the turns in the group of a model. The dashed line is an image that is turned, and turned back by
    interpolation: what maps that are turned back owe to that alone.

    Args:
        models: at most 8, by name; or one model; or errors that were measured before.
        images, angles, layer, size, disc, background, seed: as in
            :func:`~escnn_attention.equivariance.angles.equivariance_errors`; by default smooth images that are turned
            without interpolation. None of them with errors that were measured before.
        interpolation: whether to draw the dashed line.
        log: whether errors are drawn on a logarithmic scale, from 1e-8.
        title: above the figure.

    Returns:
        The figure.

    Raises:
        ImportError: matplotlib is missing.
        TypeError: as :func:`~escnn_attention.equivariance.angles.equivariance_errors` raises.
        ValueError: likewise, and for more than 8 models, nothing to draw, or options of measuring where ``models`` are
            errors.

    Example:
        >>> import torch
        >>> from escnn import gspaces
        >>> from escnn_attention.models import HybridNet
        >>> from escnn_attention.plotting import plot_equivariance_error
        >>> options = {"widths": (4, 4), "convolutions": (1, 0), "attention": (0, 1)}
        >>> models = {f"C{n}": HybridNet(gspaces.rot2dOnR2(n), 1, 10, **options) for n in (2, 4)}
        >>> figure = plot_equivariance_error(models, angles=range(0, 361, 90), size=12)
    """
    figure_type = figure_class()
    options: dict[str, Any] = {
        "images": images, "angles": angles, "layer": layer, "size": size, "disc": disc, "background": background,
        "seed": seed,
    }  # fmt: skip
    if isinstance(models, EquivarianceErrors):
        _check_left_out(options)
        _check_number(models.errors)
        errors = models
    else:
        models = named_models(models)
        _check_number(models)
        errors = equivariance_errors(models, **options)
    if not len(errors.angles) or not (errors.errors or interpolation):
        raise ValueError("models: got no errors to draw, and without the dashed line there is nothing else")
    figure = figure_type(figsize=(7.6, 4.6), layout="constrained")
    ax = figure.add_subplot()
    floor = 1e-8 if log else 0.0
    alone = errors.angles[0] == errors.angles[-1]
    mark = "_" if alone else None  # a line through one point is not seen
    if interpolation:
        ax.plot(
            errors.angles, np.maximum(errors.interpolation, floor), color=GREY, linestyle=(0, (5, 3)), linewidth=1.4,
            label="turned and turned back", marker=mark, markersize=16,
        )  # fmt: skip
    for k, (name, values) in enumerate(errors.errors.items()):
        colour = COLOURS[k]
        ax.plot(
            errors.angles, np.maximum(values, floor), color=colour, linewidth=1.8, label=name, zorder=3 + k,
            marker=mark, markersize=16,
        )  # fmt: skip
        # A turn by 360° is the identity again.
        in_group = np.isclose(np.subtract.outer(errors.angles, errors.turns[name]) % 360, 0, atol=1e-4)
        in_group |= np.isclose(np.subtract.outer(errors.angles, errors.turns[name]) % 360, 360, atol=1e-4)
        at = in_group.any(axis=1)
        ax.scatter(
            errors.angles[at], np.maximum(values[at], floor),
            # Dots in one place stay visible around each other.
            color=colour, s=max(16, 78 - 22 * k), zorder=13 + k, clip_on=False,
        )  # fmt: skip
    if log:
        ax.set_yscale("log")
        ax.set_ylim(bottom=floor)
    else:
        ax.set_ylim(bottom=0)
    if alone:
        ax.set_xlim(errors.angles[0] - 1, errors.angles[0] + 1)
        ax.set_xticks(errors.angles[:1])
    else:
        ax.set_xlim(errors.angles[0], errors.angles[-1])
    if errors.angles[-1] - errors.angles[0] > 90:
        ax.set_xticks(np.arange(45 * np.ceil(errors.angles[0] / 45), errors.angles[-1] + 1, 45))
    ax.set_xlabel("angle by which the input is turned, in degrees")
    ax.set_ylabel("relative error")
    ax.grid(color="#E5E5E5")
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=12, weight="bold")
    ax.set_title("dots: turns in the group of the model", fontsize=9, color=SMALL_PRINT)
    labels = ax.get_legend_handles_labels()[1]
    fitting = max(1, _CHARACTERS // (max(map(len, labels)) + 6))  # the sample of a line is as wide as six of them
    figure.legend(loc="outside lower center", ncols=min(len(labels), fitting), frameon=False, fontsize=9.5)
    return figure


def _check_left_out(options: Mapping[str, Any]) -> None:
    """Nothing is measured again, so that no option of measuring has any effect."""
    parameters = inspect.signature(equivariance_errors).parameters
    for name, value in options.items():
        default = parameters[name].default
        if value is not default and (default is None or value != default):
            raise ValueError(f"{name}: got a value with errors that were measured before, needed none")


def _check_number(models: Mapping[str, object]) -> None:
    if len(models) > len(COLOURS):
        raise ValueError(f"models: got {len(models)}, needed at most {len(COLOURS)}, each of which has its colour")
