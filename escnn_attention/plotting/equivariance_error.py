"""The error of equivariance against the angle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from escnn_attention.equivariance.angles import EquivarianceErrors, equivariance_errors, named_models
from escnn_attention.plotting._drawing import COLOURS, GREY, SMALL_PRINT, figure_class

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_CHARACTERS = 100  # of the legend, in a line across the figure


def plot_equivariance_error(
    models: torch.nn.Module | Mapping[str, torch.nn.Module] | EquivarianceErrors,
    images: Tensor | None = None,
    *,
    interpolation: bool = True,
    log: bool = False,
    title: str = "Equivariance error against the angle of the input",
    **measuring: Any,
) -> Figure:
    r"""The relative error of equivariance of models against the angle, finer than their groups.

    A curve belongs to a model and shows :math:`\|R_\theta^{-1} F(R_\theta x) - F(x)\| / \|F(x)\|`, with F the
    invariant part of what the model gives: its logits, or, of feature maps, the maximum over poses, rotated back and
    compared within a disc. It is one quantity for all models and angles;
    :func:`~escnn_attention.equivariance.angles.equivariance_errors` says how it is measured, and gives the numbers.
    Dots are the rotations in the group of a model. The dashed line is an image that is rotated, and rotated back by
    interpolation: what maps that are rotated back owe to that alone.

    Args:
        models: at most 8, by name; or one model; or errors that were measured before.
        images: as in :func:`~escnn_attention.equivariance.angles.equivariance_errors`; by default smooth images that
            are rotated without interpolation.
        interpolation: whether to draw the dashed line.
        log: whether errors are drawn on a logarithmic scale, from 1e-8.
        title: above the figure.
        measuring: ``angles``, ``layer``, ``size``, ``disc``, ``background`` and ``seed``, as in
            :func:`~escnn_attention.equivariance.angles.equivariance_errors`. Neither these nor ``images`` go with
            errors that were measured before.

    Raises:
        TypeError: as :func:`~escnn_attention.equivariance.angles.equivariance_errors` raises.
        ValueError: likewise, and for more than 8 models, nothing to draw, or options of measuring where ``models`` are
            errors.

    Example:
        >>> import torch
        >>> from escnn_attention.models import HybridNet
        >>> from escnn_attention.plotting import plot_equivariance_error
        >>> from escnn import gspaces
        >>> options = {"widths": (4, 4), "convolutions": (1, 0), "attention": (0, 1)}
        >>> models = {f"C{n}": HybridNet(gspaces.rot2dOnR2(n), 1, 10, **options) for n in (2, 4)}
        >>> figure = plot_equivariance_error(models, angles=range(0, 361, 90), size=12)
    """
    figure_type = figure_class()
    if images is not None:
        measuring["images"] = images
    if isinstance(models, EquivarianceErrors):
        for name in measuring:
            raise ValueError(f"{name}: got a value with errors that were measured before, needed none")
        curves: Mapping[str, object] = models.errors
    else:
        models = curves = named_models(models)
    if len(curves) > len(COLOURS):
        raise ValueError(f"models: got {len(curves)}, needed at most {len(COLOURS)}, each of which has its colour")
    errors = models if isinstance(models, EquivarianceErrors) else equivariance_errors(models, **measuring)
    if not len(errors.angles) or not (errors.errors or interpolation):
        raise ValueError("models: got no errors to draw, and without the dashed line there is nothing else")
    figure = figure_type(figsize=(7.6, 4.6), layout="constrained")
    ax = figure.add_subplot()
    floor = 1e-8 if log else 0.0
    _draw_curves(ax, errors, interpolation, floor)
    if log:
        ax.set_yscale("log")
    ax.set_ylim(bottom=floor)
    _label_angles(ax, errors.angles)
    ax.set_ylabel("relative error")
    ax.grid(color="#E5E5E5")
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=12, weight="bold")
    ax.set_title("dots: rotations in the group of the model", fontsize=9, color=SMALL_PRINT)
    labels = ax.get_legend_handles_labels()[1]
    fitting = max(1, _CHARACTERS // (max(map(len, labels)) + 6))  # the sample of a line is as wide as six of them
    figure.legend(loc="outside lower center", ncols=min(len(labels), fitting), frameon=False, fontsize=9.5)
    return figure


def _draw_curves(ax: Axes, errors: EquivarianceErrors, interpolation: bool, floor: float) -> None:
    """Draw a curve for each model, with dots at the rotations of its group, and the dashed line of interpolation."""
    # A line through one point is not seen.
    mark = "_" if errors.angles[0] == errors.angles[-1] else None
    if interpolation:
        ax.plot(
            errors.angles, np.maximum(errors.interpolation, floor), color=GREY, linestyle=(0, (5, 3)), linewidth=1.4,
            label="rotated and rotated back", marker=mark, markersize=16,
        )  # fmt: skip
    for k, (name, values) in enumerate(errors.errors.items()):
        ax.plot(
            errors.angles, np.maximum(values, floor), color=COLOURS[k], linewidth=1.8, label=name, zorder=3 + k,
            marker=mark, markersize=16,
        )  # fmt: skip
        # A rotation by 360° is the identity again.
        apart = np.subtract.outer(errors.angles, errors.rotations[name]) % 360
        in_group = (np.isclose(apart, 0, atol=1e-4) | np.isclose(apart, 360, atol=1e-4)).any(axis=1)
        ax.scatter(
            errors.angles[in_group], np.maximum(values[in_group], floor),
            # Dots in one place stay visible around each other.
            color=COLOURS[k], s=max(16, 78 - 22 * k), zorder=13 + k, clip_on=False,
        )  # fmt: skip


def _label_angles(ax: Axes, angles: npt.NDArray[np.float64]) -> None:
    """Label the axis of the angles, at multiples of 45° where there are many."""
    if angles[0] == angles[-1]:
        ax.set_xlim(angles[0] - 1, angles[0] + 1)
        ax.set_xticks(angles[:1])
    else:
        ax.set_xlim(angles[0], angles[-1])
    if angles[-1] - angles[0] > 90:
        ax.set_xticks(np.arange(45 * np.ceil(angles[0] / 45), angles[-1] + 1, 45))
    ax.set_xlabel("angle by which the input is rotated, in degrees")
