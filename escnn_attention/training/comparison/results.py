"""The result of a network and the table of all, as files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from escnn_attention.training.errors import UserError
from escnn_attention.training.files import write_csv, write_json
from escnn_attention.training.provenance import hardware, versions

RESULT = "result.json"


@dataclass(frozen=True)
class NetworkResult:
    """What was measured of one network.

    Attributes:
        network: its name.
        parameters: how many it has.
        accuracy_upright: on the test images as the data set gives them, from 0 to 1.
        accuracy_rotated: mean over ``accuracy_by_element``; ``None`` if that is empty.
        accuracy_any_angle: on the test images, each rotated by a random angle.
        accuracy_by_element: on the test images under each group element that maps the grid onto itself, without the
            identity.
        equivariance_error: relative, of the logits, worst over these elements; ``None`` if there are none, or if
            logits are not finite.
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
