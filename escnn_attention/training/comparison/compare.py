"""The comparison: four networks trained on upright images by ``fit``, and tested on rotated ones too.

They are the shipped networks of digits, for another group, size and budget.

All have the same outline: a first layer from the image to hidden fields, two or three further layers, a pointwise map
to the final features, a maximum over poses (equivariant networks only), the mean over positions, and a linear map to
the classes. Grids of more than 8×8 and even size are halved by a maximum and a blur. So layers after the first see 8×8
positions of 16×16 images, and 14×14 and then 7×7 of 28×28 images. Smaller grids would lose the effect of a rotation
that does not map pixels onto pixels.
"""

from __future__ import annotations

import copy
import functools
import json
import math
import re
import statistics
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from escnn.gspaces import GSpace
from escnn.nn import FieldType
from rich.table import Table
from torch import Tensor, nn

from escnn_attention import equivariance_report
from escnn_attention.equivariance.angles import rotate_images
from escnn_attention.groups.fibers import fibers, is_signed_permutation
from escnn_attention.models import InvariantLogits
from escnn_attention.models.description import build
from escnn_attention.models.registry import description_of
from escnn_attention.nn.summary import count_parameters
from escnn_attention.plotting import name_element
from escnn_attention.training.comparison import TITLES, Settings
from escnn_attention.training.data.fields import turned
from escnn_attention.training.data.images.base import PublishedImages
from escnn_attention.training.data.images.digits import Digits
from escnn_attention.training.data.images.mnist import RotMNIST
from escnn_attention.training.errors import UserError, as_user_error
from escnn_attention.training.experiment import LAST, run_experiment
from escnn_attention.training.experiment.command import ExperimentCLI
from escnn_attention.training.experiment.configuration import recipe
from escnn_attention.training.experiment.network import build_described
from escnn_attention.training.experiment.result import hardware, versions, write_result
from escnn_attention.training.files import keep_aside, locked_folder, write_csv, write_json

UPRIGHT, ANY_ANGLE = "upright", "any angle"
"""The test images as the data set gives them, and each rotated by an angle of its own."""

_ANGLE_SEED = 0  # the angles are part of the test set: they do not change with the seed of a run
_PROBES = 4  # images in the measurement of the equivariance error


@dataclass(frozen=True)
class NetworkResult:
    """The measurements of one network.

    Accuracies, from 0 to 1, are on the test images as the data set gives them (``upright``), each rotated by a random
    angle (``any_angle``), and ``by_element`` of :func:`grid_symmetries`; ``rotated`` is the mean over these, None if
    there are none. ``equivariance_error`` is that of :func:`measure_equivariance_error`, ``seconds_per_epoch`` the
    median over the epochs, without validation.
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


def compare(settings: Settings) -> list[NetworkResult]:
    """Train and measure the networks of ``settings``, and write ``results.csv`` and ``results.json`` to its folder.

    Each network has a folder of ``fit`` there: a finished training is not run again, one that was killed resumes after
    its last finished epoch, and one with other options is an error, unless ``settings.restart`` has it moved aside.

    Raises:
        UserError: an option that cannot be met; the message names it.
    """
    names = [name.strip() for name in settings.networks.split(",")]
    if unknown := [name for name in names if name not in TITLES]:
        raise UserError(f"unknown network {', '.join(unknown) or '(none)'}: choose from {', '.join(TITLES)}")
    for option in ("parameters", "epochs", "learning_rate"):
        value = getattr(settings, option)
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"--{option.replace('_', '-')} must be positive and finite, got {value}")
    gspace_by_name(settings.group)
    with as_user_error():
        data = load_images(settings)
        for folder in (settings.folder / name for name in names if settings.restart):
            if folder.exists():
                with locked_folder(folder, "choose another --output"):
                    keep_aside(folder)
        results = [_measured(name, data, settings) for name in TITLES if name in names]
        networks = [asdict(result) for result in results]
        configuration = {k: str(v) if isinstance(v, Path) else v for k, v in asdict(settings).items()}
        facts = {"configuration": configuration, "networks": networks, "versions": versions(), "hardware": hardware()}
        rows = [{k: v for k, v in row.items() if k != "accuracy_by_element"} for row in networks]
        write_csv(settings.folder / "results.csv", rows)
        write_json(settings.folder / "results.json", facts)
    return results


def load_images(settings: Settings) -> PublishedImages:
    """The data module of a comparison, with its test images."""
    if settings.data == "digits" and settings.data_dir is not None:
        raise UserError("--data-dir: the digits ship with scikit-learn and are read from no folder; leave it out")
    options = _describe_data(settings)["init_args"]
    data: PublishedImages = Digits(**options) if settings.data == "digits" else RotMNIST(**options)
    data.prepare_data()
    data.setup("test")
    return data


def _describe_data(settings: Settings) -> dict[str, Any]:
    data: dict[str, Any] = recipe("steerable-digits")["data"]
    if settings.data == "rotmnist":
        folder = None if settings.data_dir is None else str(settings.data_dir)
        data = {"class_path": "escnn_attention.training.RotMNIST", "init_args": {"folder": folder, "drop_last": False}}
    data["init_args"] |= {"batch_size": settings.batch_size, "eval_batch_size": 4 * settings.batch_size}
    data["init_args"] |= {"limit_train": settings.limit_train, "limit_test": settings.limit_test}
    return data


def configure(name: str, settings: Settings) -> dict[str, Any]:
    """The configuration of the training of a network: the recipe of the networks of digits, with other options."""
    config, data, epochs = recipe("steerable-digits"), _describe_data(settings), settings.epoch_count
    size = data["init_args"].get("size", RotMNIST.size)
    config["model"]["warm_up"] = config["model"]["warm_up"] / config["trainer"]["max_epochs"] * epochs
    config["model"]["optimizer"]["init_args"]["lr"] = settings.learning_rate
    config["model"]["network"] = describe_network(name, settings.group, size, 10, settings.parameters)
    trainer = {"accelerator": settings.accelerator, "devices": 1, "max_epochs": epochs, "logger": False}
    trainer |= {"enable_model_summary": False, "num_sanity_val_steps": 0}
    return {**config, "data": data, "trainer": trainer, "seed_everything": settings.seed}


def train(configuration: Mapping[str, Any], folder: Path) -> ExperimentCLI:
    """Train a network by ``fit``, from the last finished epoch in its folder if there is one."""
    return run_experiment(["fit", "--config", json.dumps(configuration), "--folder", str(folder)])


def _measured(name: str, data: PublishedImages, settings: Settings) -> NetworkResult:
    """Train a network, measure it, and write the result to its folder."""
    folder, gspace = settings.folder / name, gspace_by_name(settings.group)
    print(f"{TITLES[name]}: {folder}", flush=True)
    experiment = train(configure(name, settings), folder)
    network, device = experiment.model.network, experiment.trainer.strategy.root_device
    by_element = measure_accuracies(network, orient(data, gspace), data, device)
    upright, any_angle = by_element.pop(UPRIGHT), by_element.pop(ANY_ANGLE)
    result = NetworkResult(
        network=name,
        parameters=count_parameters(network),
        accuracy_upright=upright,
        accuracy_rotated=sum(by_element.values()) / len(by_element) if by_element else None,
        accuracy_any_angle=any_angle,
        accuracy_by_element=by_element,
        equivariance_error=measure_equivariance_error(network, gspace, data.size, data.num_classes),
        seconds_per_epoch=statistics.median(row["seconds"] for row in experiment.epochs),
        epochs=settings.epoch_count,
        device=str(device),
    )
    facts = {**asdict(result), "seed": settings.seed}
    write_result(folder, folder / LAST, {"test_accuracy": upright}, facts, experiment.facts)
    return result


def grid_symmetries(gspace: GSpace) -> dict[str, npt.NDArray[np.float64]]:
    """The elements, other than the identity, that map a square grid of pixels onto itself; none for such as C3.

    The 2×2 matrix of each, in (x, y) with y upwards, by its name.
    """
    elements = [matrix for matrix in fibers(gspace).action if is_signed_permutation(matrix)]
    return {name_element(matrix): matrix for matrix in elements if not np.allclose(matrix, np.eye(2))}


def orient(data: PublishedImages, gspace: GSpace) -> dict[str, Tensor]:
    """The test images (N, 1, S, S), from 0 to 1, by the name of their orientation.

    They are as given (:data:`UPRIGHT`), under :func:`grid_symmetries`, or rotated at random (:data:`ANY_ANGLE`).
    """
    x = data.source("test").take(slice(data.limits["test"]))[0].to(torch.float32) / data.white
    by_element = {name: turned(x, g.round().astype(int), {"scalar": 1}) for name, g in grid_symmetries(gspace).items()}
    angles = np.random.default_rng(_ANGLE_SEED).uniform(0.0, 360.0, len(x))
    # Cubic interpolation leaves the range of the values.
    rotated = torch.stack([rotate_images(image, angle) for image, angle in zip(x, angles, strict=True)])
    return {UPRIGHT: x, **by_element, ANY_ANGLE: rotated.clamp(x.min(), x.max())}


def measure_accuracies(
    network: nn.Module, oriented: Mapping[str, Tensor], data: PublishedImages, device: torch.device
) -> dict[str, float]:
    """The accuracy, from 0 to 1, on the test images of ``data`` in each orientation of :func:`orient`.

    The network takes normalised images (B, 1, S, S), and is left on the CPU, in evaluation mode.
    """
    with torch.no_grad():  # escnn keeps the weights that it expands here, without their graph
        network.to(device).eval()
    labels = data.source("test").take(slice(data.limits["test"]))[1].split(data.eval_batch_size)
    accuracies = {}
    with torch.inference_mode():
        for name, images in oriented.items():
            correct = 0
            for part, expected in zip(images.split(data.eval_batch_size), labels, strict=True):
                logits = network(((part - data.mean[0]) / data.std[0]).to(device))
                correct += int((logits.argmax(dim=1).cpu() == expected).sum())
            accuracies[name] = correct / len(images)
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
    with torch.no_grad():
        # In evaluation mode escnn keeps expanded weights, which cannot be copied: train mode drops them.
        training, copied = network.training, copy.deepcopy(network.train()).cpu()
        network.train(training)
    probe = InvariantLogits(copied, FieldType(gspace, [gspace.trivial_repr]), num_classes)
    error = float(equivariance_report(probe, (_PROBES, 1, size, size), layers=False).relative_error)
    return error if math.isfinite(error) else None


def result_table(results: Sequence[NetworkResult]) -> Table:
    """The table at the end of a comparison; a dash stands for what the group has no elements for."""
    elements = "; ".join(results[0].accuracy_by_element)
    caption = f"group elements: each test image transformed by {elements}" if elements else ""
    table = Table(title="Accuracy on test images (%)", caption=caption, caption_justify="left")
    table.add_column("network", no_wrap=True)
    for title in ("upright", "group\nelements", "any\nangle", "parameters", "s per\nepoch", "equiv.\nerror"):
        table.add_column(title, justify="right")
    for r in results:
        accuracies = (r.accuracy_upright, r.accuracy_rotated, r.accuracy_any_angle)
        cells = ["–" if accuracy is None else f"{100 * accuracy:.1f}" for accuracy in accuracies]
        error = "–" if r.equivariance_error is None else f"{r.equivariance_error:.0e}"
        table.add_row(TITLES[r.network], *cells, f"{r.parameters:,}", f"{r.seconds_per_epoch:.2f}", error)
    return table


_LAYERS = {"cnn": (4, 0), "steerable": (4, 0), "hybrid": (3, 1), "gsa-net": (1, 2)}
"""The numbers of convolutions and of attention layers behind them. The stem of the GSA-Net is a lifting attention."""

_LARGEST_GRID = 8  # grids of this size, and smaller ones, are not pooled
_LARGEST_ORDER = 32


def describe_gspace(name: str) -> dict[str, Any]:
    """The plane with the group ``cN`` or ``dN``, as a configuration file describes it; see :func:`gspace_by_name`."""
    match = re.fullmatch(r"([cd])([1-9]\d{0,3})", name.lower())
    if match is None:
        example = "cN for rotations by 360°/N or dN with reflections, for example c4 or d4"
        raise UserError(f"unknown group {name!r}: give {example}")
    kind, fold = match[1], int(match[2])
    order = fold if kind == "c" else 2 * fold
    if order < 2:
        raise UserError("group 'c1' is no symmetry at all: choose c2 or more")
    if order > _LARGEST_ORDER:
        raise UserError(f"group {name!r} has {order} elements: choose one with at most {_LARGEST_ORDER}")
    if name.lower() == "d1":
        return {"class_path": "escnn.gspaces.flip2dOnR2"}
    space = "rot2dOnR2" if kind == "c" else "flipRot2dOnR2"
    return {"class_path": f"escnn.gspaces.{space}", "init_args": {"N": fold}}


def gspace_by_name(name: str) -> GSpace:
    """The plane with the group ``cN`` (rotations by 360°/N) or ``dN`` (these and reflections), of 2 to 32 elements.

    >>> gspace_by_name("d4").fibergroup.order()
    8
    """
    return build(describe_gspace(name))


def describe_network(name: str, group: str, size: int, num_classes: int, parameters: int) -> dict[str, Any]:
    """The network ``name`` with about ``parameters`` parameters, as ``class_path`` and ``init_args``.

    The width is the largest within the budget, at least one hidden field; the number of final features, of which each
    adds few parameters, fills the rest. ``size`` is the side of the images.

    >>> network = describe_network("hybrid", "c4", 16, 10, 900)
    >>> network["class_path"], network["init_args"]["convolutions"], network["init_args"]["attention"]
    ('escnn_attention.models.HybridNet', [1, 2], [0, 1])
    """
    return copy.deepcopy(_described(name, group, size, num_classes, parameters))


@functools.cache
def _described(name: str, group: str, size: int, num_classes: int, parameters: int) -> dict[str, Any]:
    layers, base = _outline(name, group, size)

    def sized(width: int, features: int) -> dict[str, Any]:
        sizes = {"num_classes": num_classes, "widths": len(layers) * [width], "features": features}
        return {**base, "init_args": {**base["init_args"], **sizes}}

    def size_of(width: int, features: int) -> int:
        return count_parameters(build_described(sized(width, features)))

    with torch.random.fork_rng(devices=[]):
        high = 2
        while size_of(high, high) <= parameters:
            high *= 2
        too_wide = bisect_right(range(high), parameters, high // 2, key=lambda width: size_of(width, width))
        width = max(1, too_wide - 1)
        least = size_of(width, width)
        each = size_of(width, width + 1) - least  # the count is affine in the number of features
    return sized(width, width + max(0, round((parameters - least) / each)))


def _outline(name: str, group: str, size: int) -> tuple[list[int], dict[str, Any]]:
    """The layers of a network on each of its grids, and its description but for sizes."""
    convolving, attending = _LAYERS[name]
    layers = _layers_by_grid(size, convolving + attending)
    if name == "cnn":
        base: dict[str, Any] = {"class_path": "escnn_attention.models.CNN", "init_args": {"convolutions": layers}}
    else:
        convolutions: list[int] = []
        for count in layers:
            convolutions.append(min(count, convolving - sum(convolutions)))
        attention = [count - convolving for count, convolving in zip(layers, convolutions, strict=True)]
        base = description_of(f"{name}-digits")
        base["init_args"] |= {"gspace": describe_gspace(group), "convolutions": convolutions, "attention": attention}
    base["init_args"] |= {"in_channels": 1, "antialiased": True}
    return layers, base


def _layers_by_grid(size: int, count: int) -> list[int]:
    """The numbers of layers, ``count`` in all, on each grid from that of the image to the last."""
    layers = [0]
    for i in range(count):
        layers[-1] += 1
        if i + 1 < count and size > _LARGEST_GRID and size % 2 == 0:
            layers.append(0)
            size //= 2
    return layers
