"""The comparison: four networks, trained on upright images, tested on upright and rotated ones."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from escnn_attention.training.comparison.figures import write_figures
from escnn_attention.training.comparison.groups import grid_symmetries, gspace_by_name
from escnn_attention.training.comparison.images import ImageData, load_images
from escnn_attention.training.comparison.measure import (
    ANY_ANGLE,
    UPRIGHT,
    measure_accuracies,
    measure_equivariance_error,
    orient,
)
from escnn_attention.training.comparison.networks import count_parameters, describe_network
from escnn_attention.training.comparison.processes import side_by_side
from escnn_attention.training.comparison.progress import Reporter
from escnn_attention.training.comparison.results import NetworkResult, write_results
from escnn_attention.training.comparison.run_folder import FIGURES, open_run
from escnn_attention.training.comparison.settings import LARGEST_SEED, NETWORK_NAMES, Settings
from escnn_attention.training.comparison.training import configure, read_network, train
from escnn_attention.training.errors import UserError
from escnn_attention.training.experiment import LAST


@dataclass(frozen=True)
class Comparison:
    """What a comparison gave.

    Attributes:
        results: one per network that is finished in the folder, in the order of :data:`.settings.NETWORK_NAMES`.
        data: the images.
        elements: names of the group elements by which the test images were transformed, without the identity.
        files: the tables and figures that were written.
    """

    results: list[NetworkResult]
    data: ImageData
    elements: list[str]
    files: list[Path]


def compare(settings: Settings, report: Reporter | None = None) -> Comparison:
    """Train and measure the networks of ``settings``, and write tables, checkpoints and figures to its folder.

    Networks that the folder holds finished are not trained again; one whose training was killed goes on from its last
    finished epoch.

    Args:
        settings: the options.
        report: told what happens.

    Raises:
        UserError: an option that cannot be met; the message says which and what to do.
        KeyboardInterrupt: on Ctrl-C. What is finished stays.
    """
    report = report or Reporter()
    _check(settings)
    gspace = gspace_by_name(settings.group)
    data = load_images(settings.data, settings.data_dir).limited(settings.limit_train, settings.limit_test)
    configuration = settings.configuration(data.fingerprint())
    folder = settings.folder

    @functools.cache
    def describe(name: str) -> dict[str, Any]:
        return describe_network(name, settings.group, data.size, data.num_classes, settings.parameters)

    with open_run(folder, configuration, restart=settings.restart) as moved:
        if moved is not None:
            report.say(f"the earlier run was moved to {moved}")
        pending = []
        for name in filter(settings.networks.__contains__, NETWORK_NAMES):
            if NetworkResult.read(folder / name) is None:
                pending.append(name)
            else:
                report.say(f"{name} is finished, it is not trained again ({folder / name})")
        work = functools.partial(_finish, {name: describe(name) for name in pending}, data, settings)
        if settings.jobs > 1 and len(pending) > 1:
            # The last ones take longest, and are begun first.
            side_by_side(work, pending[::-1], settings.jobs, report)
        else:
            for name in pending:
                work(name, report)
        results = [result for name in NETWORK_NAMES if (result := NetworkResult.read(folder / name)) is not None]
        files = write_results(folder, results, configuration, data.source)
        networks = {r.network: read_network(describe(r.network), folder / r.network / LAST)[0] for r in results}
        report.say("drawing figures")
        files += write_figures(folder / FIGURES, networks, results, data)
    return Comparison(results, data, list(grid_symmetries(gspace)), files)


def _check(settings: Settings) -> None:
    unknown = [name for name in settings.networks if name not in NETWORK_NAMES]
    if unknown or not settings.networks:
        raise UserError(f"unknown network {', '.join(unknown) or '(none)'}: choose from {', '.join(NETWORK_NAMES)}")
    for name in ("parameters", "epochs", "batch_size", "limit_train", "limit_test", "learning_rate", "jobs"):
        value = getattr(settings, name)
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"--{name.replace('_', '-')} must be positive and finite, got {value}")
    if not 0 <= settings.seed <= LARGEST_SEED:
        raise UserError(f"--seed: got {settings.seed}, needed an integer from 0 to {LARGEST_SEED}")


def _finish(
    descriptions: Mapping[str, dict[str, Any]], data: ImageData, settings: Settings, name: str, report: Reporter
) -> None:
    """Train a network, measure it, and write the result to its folder."""
    training = train(name, configure(descriptions[name], data, settings), settings, report)
    network, gspace = training.network, gspace_by_name(settings.group)
    with report.bar(f"testing {name}") as advance:
        test = orient(data.test.images, gspace)
        accuracies = measure_accuracies(network, test, data, training.device, 4 * settings.batch_size, advance)
    upright, any_angle = accuracies.pop(UPRIGHT), accuracies.pop(ANY_ANGLE)
    result = NetworkResult(
        network=name,
        parameters=count_parameters(network),
        accuracy_upright=upright,
        accuracy_rotated=sum(accuracies.values()) / len(accuracies) if accuracies else None,
        accuracy_any_angle=any_angle,
        accuracy_by_element=accuracies,
        equivariance_error=measure_equivariance_error(network, gspace, data.size, data.num_classes),
        seconds_per_epoch=training.seconds_per_epoch,
        epochs=settings.epoch_count,
        device=str(training.device),
    )
    result.write(settings.folder / name)
