"""The result of a network and the table of all, as files."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from escnn_attention.training.errors import UserError
from escnn_attention.training.files import write_csv, write_json

RESULT = "result.json"
_PACKAGES = ("escnn-attention", "escnn", "torch", "lightning", "numpy", "scipy", "scikit-learn")


@dataclass(frozen=True)
class NetworkResult:
    """What was measured of one network.

    Attributes:
        network: its name.
        parameters: how many it has.
        accuracy_upright: on the test images as the data set gives them, from 0 to 1.
        accuracy_rotated: mean over ``accuracy_by_element``; ``None`` if that is empty.
        accuracy_any_angle: on the test images, each turned by a random angle.
        accuracy_by_element: on the test images turned by each group element that maps the grid onto itself, without the
            identity.
        equivariance_error: relative, of the logits, worst over these elements; ``None`` if there are none.
        seconds_per_epoch: median over the epochs, training only.
        epochs: how many it was trained.
        device: what it was trained on.
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

    def write(self, folder: Path) -> None:
        """Write as ``result.json``; that the file is there means that the network is finished."""
        write_json(folder / RESULT, asdict(self))

    @classmethod
    def read(cls, folder: Path) -> NetworkResult | None:
        """The result in ``folder``, ``None`` if the network is not finished.

        Raises:
            UserError: the file was damaged.
        """
        path = folder / RESULT
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError) as error:
            raise UserError(f"{path} is damaged ({error}): remove it, and the network is measured again") from error


def write_results(
    folder: Path, results: Sequence[NetworkResult], configuration: Mapping[str, Any], data_source: str
) -> list[Path]:
    """Write ``results.csv`` (one line per network) and ``results.json`` (with all that is known about the run).

    Returns:
        The files.
    """
    table, everything = folder / "results.csv", folder / "results.json"
    rows = [{k: v for k, v in asdict(result).items() if k != "accuracy_by_element"} for result in results]
    write_csv(table, rows)
    write_json(
        everything,
        {
            "configuration": dict(configuration),
            "data_source": data_source,
            "networks": [asdict(result) for result in results],
            "versions": versions(),
            "hardware": hardware(),
        },
    )
    return [table, everything]


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that the results depend on."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed as a package"
    return found


def hardware() -> dict[str, str | int]:
    """The machine, as far as it matters to the times measured."""
    found: dict[str, str | int] = {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": os.cpu_count() or 0,
        "threads": torch.get_num_threads(),
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # another system than Linux
    return platform.processor() or platform.machine()
