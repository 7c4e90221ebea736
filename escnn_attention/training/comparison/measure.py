"""What a trained network is measured by."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
from escnn.gspaces import GSpace
from escnn.nn import FieldType
from torch import nn

from escnn_attention import equivariance_report
from escnn_attention.models import InvariantLogits
from escnn_attention.training.comparison.groups import (
    grid_symmetries,
    random_angles,
    rotate_by_angles,
    transform_by_element,
)
from escnn_attention.training.comparison.images import ImageData
from escnn_attention.training.comparison.progress import Advance

UPRIGHT, ANY_ANGLE = "upright", "any angle"
"""The test images as the data set gives them, and each rotated by an angle of its own."""

_ANGLE_SEED = 0  # the angles are part of the test set: they do not change with the seed of a run
_PROBES = 4  # images in the measurement of the equivariance error


def orient(images: npt.NDArray[np.float32], gspace: GSpace) -> dict[str, npt.NDArray[np.float32]]:
    """Images (N, S, S) in every orientation that is measured.

    Returns:
        The images as they are (:data:`UPRIGHT`), under each group element that maps the grid onto itself, without the
        identity (by its name), and each rotated by an angle of its own (:data:`ANY_ANGLE`).
    """
    by_element = {name: transform_by_element(images, matrix) for name, matrix in grid_symmetries(gspace).items()}
    any_angle = rotate_by_angles(images, random_angles(len(images), _ANGLE_SEED))
    return {UPRIGHT: images, **by_element, ANY_ANGLE: any_angle}


def measure_accuracies(
    network: nn.Module,
    oriented: Mapping[str, npt.NDArray[np.float32]],
    data: ImageData,
    device: torch.device,
    batch_size: int,
    advance: Advance | None = None,
) -> dict[str, float]:
    """The part of the test images that is recognised in each orientation, from 0 to 1.

    The network is left on the CPU, in evaluation mode.

    Args:
        network: normalised images (B, 1, S, S) to logits.
        oriented: the test images by the name of their orientation, see :func:`orient`.
        data: what they are of: labels and normalisation.
        device: where to compute.
        batch_size: images at a time.
        advance: called with the number of images that are done.
    """
    with torch.no_grad():  # escnn expands its weights here, and what it keeps should not hold on to their graph
        network.to(device).eval()
    labels = torch.from_numpy(data.test.labels)
    total, done = len(labels) * len(oriented), 0
    accuracies = {}
    with torch.inference_mode():
        for name, images in oriented.items():
            correct = 0
            for start in range(0, len(labels), batch_size):
                chosen = slice(start, start + batch_size)
                logits = network(data.normalised(images[chosen]).to(device))
                correct += int((logits.argmax(dim=1).cpu() == labels[chosen]).sum())
                done += len(logits)
                if advance is not None:
                    advance(done, total)
            accuracies[name] = correct / len(labels)
    # escnn shares the bases of its convolutions between networks: left on another device, they would be there for the
    # next network, too.
    network.cpu()
    return accuracies


def measure_equivariance_error(network: nn.Module, gspace: GSpace, size: int, num_classes: int) -> float | None:
    """How far the logits change, at worst, when an element that maps the grid onto itself transforms the input.

    Relative to the size of the logits, in float64, on random images: rounding errors for an equivariant network (1e-15,
    or 1e-7 with escnn's convolutions, whose bases are float32), of order 1 for any other. ``None`` where only the
    identity maps the grid onto itself, and where logits are not finite. ``network`` is not changed.

    Args:
        network: images (B, 1, S, S) to logits.
        gspace: the symmetry.
        size: side S of the images.
        num_classes: number of classes.
    """
    if not grid_symmetries(gspace):
        return None
    training = network.training
    with torch.no_grad():
        # In evaluation mode escnn keeps expanded weights, which cannot be copied: train mode drops them.
        copied = copy.deepcopy(network.train()).cpu()
        network.train(training)
    probe = InvariantLogits(copied, FieldType(gspace, [gspace.trivial_repr]), num_classes)
    error = float(equivariance_report(probe, (_PROBES, 1, size, size), layers=False).relative_error)
    return error if math.isfinite(error) else None
