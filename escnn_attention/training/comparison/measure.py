"""The images of the comparison, and the measurements of trained networks on them."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from escnn.gspaces import GSpace
from escnn.nn import FieldType
from torch import Tensor, nn

from escnn_attention import equivariance_report
from escnn_attention.equivariance.angles import rotate_images
from escnn_attention.groups.fibers import fibers, is_signed_permutation
from escnn_attention.models import InvariantLogits
from escnn_attention.plotting import name_element
from escnn_attention.training.data import Digits, RotMNIST
from escnn_attention.training.data.fields import turned
from escnn_attention.training.data.files import data_folder
from escnn_attention.training.data.images.base import PublishedImages
from escnn_attention.training.errors import UserError
from escnn_attention.training.experiment import TEST
from escnn_attention.training.experiment.result import read_result

UPRIGHT, ANY_ANGLE = "upright", "any angle"
"""The test images as the data set gives them, and each rotated by an angle of its own."""

_ANGLE_SEED = 0  # the angles are part of the test set: they do not change with the seed of a run
_PROBES = 4  # images in the measurement of the equivariance error
_DIGITS_SIZE = 16  # on the published 8×8 pixels, a rotation by 45° makes most digits illegible


@dataclass(frozen=True)
class NetworkResult:
    """The measurements of one network.

    Accuracies, from 0 to 1, are on the test images as the data set gives them (``upright``), each rotated by a random
    angle (``any_angle``), and ``by_element`` under each group element that maps the grid onto itself, without the
    identity; ``rotated`` is the mean over these, None if there are none. ``equivariance_error`` is that of
    :func:`measure_equivariance_error`, ``seconds_per_epoch`` the median over the epochs, without validation.
    """

    network: str
    parameters: int
    accuracy_upright: float
    accuracy_rotated: float | None
    accuracy_any_angle: float
    accuracy_by_element: dict[str, float]
    equivariance_error: float | None
    seconds_per_epoch: float
    epochs: int
    device: str

    @classmethod
    def read(cls, folder: Path) -> NetworkResult | None:
        """The result that ``test.json`` of a network's folder holds; ``None`` if the network is not finished.

        Raises:
            UserError: the file is damaged.
        """
        content = read_result(folder / TEST)
        names = [name for name in cls.__dataclass_fields__ if name != "network"]
        return cls(folder.name, **{name: content[name] for name in names}) if set(names) <= content.keys() else None


@dataclass(frozen=True)
class ImageData:
    """The images of a comparison: of both parts (N, S, S) float32 from 0 to 1, with labels (N,).

    ``configuration`` describes their data module; ``source`` and ``upright`` tell people their origin and orientation.
    """

    configuration: dict[str, Any]
    train: tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]
    test: tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]
    source: str
    upright: str
    num_classes: int = 10

    @property
    def size(self) -> int:
        """Side of the square images in pixels."""
        return int(self.train[0].shape[-1])

    def normalised(self, images: npt.NDArray[np.float32]) -> Tensor:
        """Images (N, S, S) as a network takes them, (N, 1, S, S)."""
        (mean,), (std,) = (self.configuration["init_args"][name] for name in ("mean", "std"))
        return (torch.from_numpy(images)[:, None] - mean) / std


def load_images(
    name: str, folder: Path | None = None, limit_train: int | None = None, limit_test: int | None = None
) -> ImageData:
    """The data set ``"digits"`` or ``"rotmnist"``, normalised by mean and standard deviation of the training pixels.

    Each limit takes the first so many images of a part. The digits take no folder; that of ``"rotmnist"`` is as in
    :class:`~escnn_attention.training.RotMNIST`.

    Raises:
        UserError: an unknown name, a folder for the digits, or as :class:`~escnn_attention.training.RotMNIST` raises.
    """
    if name == "digits":
        if folder is not None:
            raise UserError("--data-dir: the digits ship with scikit-learn and are read from no folder; leave it out")
        module: PublishedImages = Digits(_DIGITS_SIZE)
        options: dict[str, Any] = {"size": _DIGITS_SIZE}
        source = f"scikit-learn's handwritten digits (8×8), as splines on {_DIGITS_SIZE}×{_DIGITS_SIZE} pixels"
        upright = "upright digits"
    elif name == "rotmnist":
        folder = data_folder(folder, RotMNIST.files)
        module, options = RotMNIST(folder), {"folder": str(folder)}
        source = f"rotated MNIST (28×28) from {folder / RotMNIST.files}"
        upright = "images as the data set gives them, which are rotated already"
    else:
        raise UserError(f"--data: got {name}, needed digits or rotmnist")
    module.prepare_data()
    module.setup()
    train, test = (_arrays(module, part, limit) for part, limit in (("train", limit_train), ("test", limit_test)))
    options |= {"mean": [float(train[0].mean())], "std": [float(train[0].std())], "limit_train": len(train[0])}
    path = f"escnn_attention.training.{type(module).__name__}"
    return ImageData({"class_path": path, "init_args": options}, train, test, source, upright)


def _arrays(
    module: PublishedImages, part: str, limit: int | None
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    images, labels = module.source(part).take(slice(limit))
    return images[:, 0].numpy().astype(np.float32) / np.float32(module.white), labels.numpy()


def grid_symmetries(gspace: GSpace) -> dict[str, npt.NDArray[np.float64]]:
    """The elements, other than the identity, that map a square grid of pixels onto itself.

    Returns:
        The 2×2 matrix of each, in (x, y) with y upwards, by its name. Empty for groups such as C3.
    """
    table = fibers(gspace)
    return {
        name_element(matrix): matrix
        for matrix in table.action
        if is_signed_permutation(matrix) and not np.allclose(matrix, np.eye(2))
    }


def orient(images: npt.NDArray[np.float32], gspace: GSpace) -> dict[str, npt.NDArray[np.float32]]:
    """Images (N, S, S) by the name of their orientation.

    As they are (:data:`UPRIGHT`), under each group element that maps the grid onto itself, without the identity, and
    each rotated by an angle of its own (:data:`ANY_ANGLE`).
    """
    x = torch.from_numpy(images)[:, None]
    by_element = {
        name: turned(x, g.round().astype(int), {"scalar": 1})[:, 0].numpy()
        for name, g in grid_symmetries(gspace).items()
    }
    angles = np.random.default_rng(_ANGLE_SEED).uniform(0.0, 360.0, len(images))
    # Cubic interpolation leaves the range of the values.
    rotated = torch.cat([rotate_images(image, angle) for image, angle in zip(x, angles, strict=True)])
    return {UPRIGHT: images, **by_element, ANY_ANGLE: rotated.clamp(x.min(), x.max()).numpy()}


def measure_accuracies(
    network: nn.Module,
    oriented: Mapping[str, npt.NDArray[np.float32]],
    data: ImageData,
    device: torch.device,
    batch_size: int,
) -> dict[str, float]:
    """The accuracy, from 0 to 1, on the test images in each orientation of :func:`orient`, ``batch_size`` at a time.

    The network takes normalised images (B, 1, S, S), and is left on the CPU, in evaluation mode.
    """
    with torch.no_grad():  # escnn keeps the weights that it expands here, without their graph
        network.to(device).eval()
    labels = torch.from_numpy(data.test[1])
    accuracies = {}
    with torch.inference_mode():
        for name, images in oriented.items():
            correct = 0
            for start in range(0, len(labels), batch_size):
                chosen = slice(start, start + batch_size)
                logits = network(data.normalised(images[chosen]).to(device))
                correct += int((logits.argmax(dim=1).cpu() == labels[chosen]).sum())
            accuracies[name] = correct / len(labels)
    # escnn shares the bases of its convolutions between networks: the next network would find them on this device.
    network.cpu()
    return accuracies


def measure_equivariance_error(network: nn.Module, gspace: GSpace, size: int, num_classes: int) -> float | None:
    """The largest change of the logits under elements that map the grid onto itself, relative to them, in float64.

    On random images (B, 1, S, S) with S = ``size``: rounding errors for an equivariant network, of order 1 for any
    other. ``None`` where only the identity maps the grid onto itself, and where logits are not finite.
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
