"""The result of a network and the table of all, as files."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import escnn_attention
from escnn_attention.training.errors import UserError
from escnn_attention.training.files import write_csv, write_json

RESULT = "result.json"
_PACKAGES = ("escnn", "torch", "lightning", "numpy", "scipy", "scikit-learn")


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
    """Versions of Python and of the packages that the results depend on; of this one as it is imported.

    In a checkout also ``"commit"``, as ``git describe --always --dirty`` has it: with ``-dirty`` where files that git
    knows have been changed since.
    """
    found = {"python": platform.python_version(), "escnn-attention": escnn_attention.__version__}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed as a package"
    commit = _commit(Path(escnn_attention.__file__).parents[1])
    return found if commit is None else {**found, "commit": commit}


def _commit(checkout: Path) -> str | None:
    """What ``git describe`` says of a folder; None where it is no checkout, or git cannot tell."""
    # A package that is installed somewhere below another repository is none of its files.
    if not (checkout / ".git").exists():
        return None
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty"]
    # Without the locks that git takes to remember what it has compared.
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True, env=environment)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip() or None


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
