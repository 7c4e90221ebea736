"""What a trained network is measured by."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from escnn.gspaces import GSpace
from escnn.nn import FieldType
from torch import nn

from escnn_attention import equivariance_report
from escnn_attention.models import InvariantLogits
from escnn_attention.training.groups import grid_turns, random_angles, turn_by_angles, turn_by_element
from escnn_attention.training.images import ImageData
from escnn_attention.training.progress import Advance

_ANGLE_SEED = 0  # the angles are part of the test set: they do not change with the seed of a run
_PROBES = 4  # images in the measurement of the equivariance error


@dataclass(frozen=True)
class TestSet:
    """The test images in every orientation that is measured.

    Attributes:
        upright: (N, S, S) as the data set gives them.
        turned: by the name of each group element that maps the grid onto itself, without the identity.
        any_angle: each image turned by an angle of its own.
        labels: (N,).
        normalisation: mean and standard deviation of the training pixels.
    """

    __test__ = False  # not a test case, whatever pytest takes the name for

    upright: npt.NDArray[np.float32]
    turned: dict[str, npt.NDArray[np.float32]]
    any_angle: npt.NDArray[np.float32]
    labels: npt.NDArray[np.int64]
    normalisation: tuple[float, float]

    @classmethod
    def of(cls, data: ImageData, gspace: GSpace) -> TestSet:
        """The test part of ``data``, turned by the elements of ``gspace`` and by random angles."""
        images = data.test.images
        return cls(
            upright=images,
            turned={name: turn_by_element(images, matrix) for name, matrix in grid_turns(gspace).items()},
            any_angle=turn_by_angles(images, random_angles(len(images), _ANGLE_SEED)),
            labels=data.test.labels,
            normalisation=data.normalisation(),
        )


@dataclass(frozen=True)
class Accuracies:
    """Parts of the test images that are recognised, from 0 to 1.

    Attributes:
        upright: as the data set gives them.
        turned: by each group element that maps the grid onto itself, without the identity.
        any_angle: turned by arbitrary angles.
    """

    upright: float
    turned: dict[str, float]
    any_angle: float

    @property
    def rotated(self) -> float | None:
        """The mean over ``turned``, ``None`` where no element other than the identity keeps the grid."""
        return sum(self.turned.values()) / len(self.turned) if self.turned else None


def measure_accuracies(
    network: nn.Module, test: TestSet, device: torch.device, batch_size: int, advance: Advance | None = None
) -> Accuracies:
    """Classify every image of ``test``. The network is left on the CPU, in evaluation mode.

    Args:
        network: normalised images (B, 1, S, S) to logits.
        test: the images.
        device: where to compute.
        batch_size: images at a time.
        advance: called with the number of images that are done.
    """
    with torch.no_grad():  # escnn expands its weights here, and what it keeps should not hold on to their graph
        network.to(device).eval()
    total = len(test.labels) * (2 + len(test.turned))
    done = 0
    labels = torch.from_numpy(test.labels)
    mean, deviation = test.normalisation

    def accuracy(images: npt.NDArray[np.float32]) -> float:
        nonlocal done
        correct = 0
        for batch, answers in zip(torch.from_numpy(images).split(batch_size), labels.split(batch_size), strict=True):
            logits = network(((batch[:, None] - mean) / deviation).to(device))
            correct += int((logits.argmax(dim=1).cpu() == answers).sum())
            done += len(batch)
            if advance is not None:
                advance(done, total)
        return correct / len(labels)

    with torch.inference_mode():
        accuracies = Accuracies(
            upright=accuracy(test.upright),
            turned={name: accuracy(images) for name, images in test.turned.items()},
            any_angle=accuracy(test.any_angle),
        )
    # escnn shares the bases of its convolutions between networks: left on another device, they would be there for the
    # next network, too.
    network.cpu()
    return accuracies


def measure_equivariance_error(network: nn.Module, gspace: GSpace, size: int, num_classes: int) -> float | None:
    """How far the logits change, at the worst, when the input is turned by an element that maps the grid onto itself.

    Relative to the size of the logits, in float64, on random images: rounding errors for an equivariant network (1e-15,
    or 1e-7 with escnn's convolutions, whose bases are float32), of order 1 for any other. ``None`` where only the
    identity maps the grid onto itself. ``network`` is not changed.

    Args:
        network: images (B, 1, S, S) to logits.
        gspace: the symmetry.
        size: side S of the images.
        num_classes: number of classes.
    """
    if not grid_turns(gspace):
        return None
    training = network.training
    with torch.no_grad():
        # In evaluation mode escnn keeps expanded weights, which cannot be copied: train mode drops them.
        copied = copy.deepcopy(network.train()).cpu()
        network.train(training)
    probe = InvariantLogits(copied, FieldType(gspace, [gspace.trivial_repr]), num_classes)
    return float(equivariance_report(probe, (_PROBES, 1, size, size), layers=False).relative_error)
