"""The tables of the paper as lists of runs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from examples.experiments.recipe import RECIPE, SMALL_RECIPE
from examples.experiments.runs import DATA, NETWORK, Run
from examples.experiments.twins import parameters, widest

_CONFIGURATIONS = Path(__file__).parent / "configurations"

SMALL = {
    "table1": "few images and epochs, 5 fields in place of 10, no dropout: not the paper's networks",
    "table2": "few images of half the size, few epochs, a sixth of the fields in the All-CNNs, 4 to 8 fields and 1 "
    "block a stage in the ResNets, no dropout: not the paper's networks",
    "table3": "few images and epochs, a third of the fields: not the paper's networks",
    "table3-cifar10": "two classes of CIFAR-10, airplanes and cars, as a stand-in for the two of PatchCamelyon; few "
    "images and epochs, a third of the fields, 3 dense blocks in place of 5: neither the paper's data nor its networks",
}
"""What the small versions are."""

_SMALL: dict[str, Any] = {**SMALL_RECIPE, f"{DATA}.limit_train": 1000, f"{DATA}.limit_valid": 500}
_ROTMNIST: dict[str, Any] = {f"{NETWORK}.dropout": 0.0, "trainer.max_epochs": 15}
_SMALL_ROTMNIST: dict[str, Any] = {**_ROTMNIST, f"{DATA}.rotate_train": 360.0}
_RECIPE_ROTMNIST: dict[str, Any] = {
    **RECIPE,
    **_ROTMNIST,
    f"{DATA}.batch_size": 32,
    f"{DATA}.rotate_train": 90.0,
}
# Images of half the size allow more steps in the same time.
_SMALL_CIFAR10: dict[str, Any] = {
    "data.class_path": "examples.experiments.half_size.HalfCIFAR10",
    f"{DATA}.limit_train": 3000,
    "trainer.max_epochs": 10,
}
# The published weights of the All-CNNs begin at 0.004: with the learning rate of the others, the first steps would turn
# all of them over, and alike.
_ALL_CNN: dict[str, Any] = {
    "model.optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.0001, "weight_decay": 0.01}},
    "model.warm_up": 1,
}
# By the beginning of their configurations.
_SMALL_NETWORKS: dict[str, dict[str, Any]] = {
    "all_cnn_p4m": {**_ALL_CNN, f"{NETWORK}.width": 5},
    "all_cnn_p4": {**_ALL_CNN, f"{NETWORK}.width": 8},
    "resnet44_p4m": {f"{NETWORK}.width": [4, 6, 8], f"{NETWORK}.blocks": 1},
}
_TWO_CLASSES: dict[str, Any] = {
    "data.class_path": "examples.experiments.two_classes.AirplanesAndCars",
    f"{DATA}.limit_train": 2000,
    "trainer.max_epochs": 5,
    f"{NETWORK}.blocks": 3,
}
# With other schedules there are none of these.
_NO_SCHEDULE: dict[str, Any] = {"model.milestones": [], "model.gamma": 0.1, "model.patience": 10}

# Label, configuration, test error in percent.
_TABLE_1 = (
    ("p4-CNN", "p4", 2.048),
    ("α_RH-p4-CNN", "p4_alpha_rh", 1.980),
    ("BIG19-p4-CNN", "p4_big19", 1.796),
    ("α-p4-CNN", "p4_alpha", 1.696),
    ("BIG15-p4-CNN", "p4_big15", 1.848),
    ("α_CH-p4-CNN", "p4_alpha_ch", 1.825),
    ("α_SP-p4-CNN", "p4_alpha_sp", 1.761),
    ("BIG11-p4-CNN", "p4_big11", 1.996),
    ("α_F-p4-CNN", "p4_alpha_f", 1.795),
)
# Label, configuration, fields: of about as many parameters, for a group that the paper does not have.
_TABLE_1_C8 = (("C8-CNN", "p4", 14), ("α_F-C8-CNN", "p4_alpha_f", 13))
# Label, configuration, test errors on CIFAR-10 and CIFAR-10+.
_TABLE_2 = (
    ("p4 All-CNN", "all_cnn_p4", 9.32, 8.91),
    ("α_F-p4 All-CNN", "all_cnn_p4_alpha_f", 8.8, 7.05),
    ("p4m All-CNN", "all_cnn_p4m", 7.61, 7.48),
    ("α_F-p4m All-CNN", "all_cnn_p4m_alpha_f", 6.93, 6.53),
    ("p4m ResNet44", "resnet44_p4m", 15.72, 15.4),
    ("α_F-p4m ResNet44", "resnet44_p4m_alpha_f", 10.82, 10.12),
)
_TABLE_3 = (
    ("Z2 DenseNet", "z2", 15.93),
    ("p4 DenseNet", "p4", 12.45),
    ("α_F-p4 DenseNet", "p4_alpha_f", 11.34),
    ("p4m DenseNet", "p4m", 11.64),
    ("α_F-p4m DenseNet", "p4m_alpha_f", 10.88),
)
_WIDTH = 5  # of the small p4-CNNs


def table_1(small: bool, recipe: bool = False) -> list[Run]:
    """Rotated MNIST: the p4-CNN, its attentive versions, and larger ones of about as many parameters.

    In the small version these have as many parameters as an attentive one, or slightly fewer.

    Args:
        small: the small version, trained by our recipe.
        recipe: the paper's networks, trained by our recipe, and two of C8.

    Raises:
        ValueError: both.
    """
    if small and recipe:
        raise ValueError("recipe: the small version has it already")
    runs = []
    changes: dict[str, Any] = _RECIPE_ROTMNIST if recipe else {}
    if small:
        changes = {**_SMALL, **_SMALL_ROTMNIST, f"{NETWORK}.width": _WIDTH}
    for label, base, error in _TABLE_1:
        if not (small and "big" in base):
            runs.append(_run(label, "rotmnist", base, changes, error, "recipe" if recipe else ""))
    if recipe:
        runs += [_of_c8(*row) for row in _TABLE_1_C8]
    if not small:
        return runs
    plain = runs[0]
    sizes = {_as_large(plain, parameters(run)) for run in runs if "_alpha" in str(run.base)}
    return [*runs, *(_big(plain, width) for width in sorted(sizes) if width > _WIDTH)]


def _of_c8(label: str, base: str, width: int) -> Run:
    changes = {f"{NETWORK}.gspace.init_args.N": 8, f"{NETWORK}.width": width, f"{DATA}.rotate_train": 45.0}
    run = _run(label, "rotmnist", base, {**_RECIPE_ROTMNIST, **changes}, None, "recipe")
    return dataclasses.replace(run, group="C8")


def _as_large(plain: Run, budget: int) -> int:
    """The width of the largest plain network with no more parameters."""
    network = plain.configuration()["model"]["network"]

    def wider(widths: list[int]) -> dict[str, Any]:
        return {**network, "init_args": {**network["init_args"], "width": widths[0]}}

    return int(widest(wider, (1,), budget)["init_args"]["width"])


def _big(plain: Run, width: int) -> Run:
    return Run(f"BIG{width}-p4-CNN", plain.base, {**plain.changes, f"{NETWORK}.width": width}, "p4", None, "plain")


def table_2(small: bool, learning_rate: float | None = None) -> list[Run]:
    """CIFAR-10, and with flips and crops CIFAR-10+.

    Args:
        small: the small version, without augmentation.
        learning_rate: of the All-CNNs, instead of 0.05, in separate folders. The paper has the best of 0.01, 0.05,
            0.1 and 0.25.
    """
    runs = []
    for augmented in (False, True)[: 1 if small else 2]:
        for label, base, *errors in _TABLE_2:
            changes: dict[str, Any] = {f"{DATA}.augment": True} if augmented else {}
            variant = ""
            if learning_rate is not None and "resnet" not in base:
                changes["model.optimizer.init_args.lr"] = learning_rate
                variant = f"lr{learning_rate:g}"
            if small:
                changes |= _small_cifar10(base)
            label = label + (", CIFAR-10+" if augmented else "")
            runs.append(_run(label, "cifar10", base, changes, errors[augmented], variant))
    return runs


def _small_cifar10(base: str) -> dict[str, Any]:
    """The changes that make a network of Table 2 small."""
    changes = {**_SMALL, **_NO_SCHEDULE, **_SMALL_CIFAR10}
    changes |= next(more for name, more in _SMALL_NETWORKS.items() if base in (name, f"{name}_alpha_f"))
    if "all_cnn" in base:
        changes |= {f"{NETWORK}.input_dropout": 0.0, f"{NETWORK}.dropout": 0.0}
        if "alpha" in base:
            changes[f"{NETWORK}.ratio"] = 4  # of the paper's 16, few fields leave nothing
    return changes


def table_3(small: bool, data: str = "pcam") -> list[Run]:
    """PatchCamelyon.

    Args:
        small: the small version.
        data: ``"pcam"``, or for the small version ``"cifar10"``: two of its classes instead of PatchCamelyon, for
            which the paper has no numbers.
    """
    changes: dict[str, Any] = {**_SMALL, **_NO_SCHEDULE, "trainer.max_epochs": 3} if small else {}
    if data == "cifar10":
        changes |= _TWO_CLASSES
    widths = {"z2": 9, "p4": 4, "p4m": 3}
    runs = []
    for label, base, error in _TABLE_3:
        width = {f"{NETWORK}.width": widths[base.partition("_")[0]]} if small else {}
        published, variant = (error, "") if data == "pcam" else (None, data)
        runs.append(_run(label, "pcam", base, changes | width, published, variant))
    return runs


def _run(label: str, data: str, base: str, changes: dict[str, Any], error: float | None, variant: str = "") -> Run:
    group = "p4m" if "p4m" in base else "p4" if "p4" in base else "Z2"
    kind = "attention" if "alpha" in base else "plain"
    published = None if error is None else round(100 - error, 3)
    return Run(label, _CONFIGURATIONS / f"{data}_{base}.yaml", changes, group, published, kind, variant=variant)
