"""The comparison: four networks, trained on upright images, tested on upright and rotated ones."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from escnn.gspaces import GSpace
from torch import nn

from escnn_attention.training.data import load_data
from escnn_attention.training.errors import UserError
from escnn_attention.training.evaluate import TestSet, measure_accuracies, measure_equivariance_error
from escnn_attention.training.figures import write_figures
from escnn_attention.training.groups import grid_turns, gspace_by_name
from escnn_attention.training.images import ImageData
from escnn_attention.training.networks import NETWORKS, build_network, count_parameters
from escnn_attention.training.progress import Advance, Reporter
from escnn_attention.training.results import NetworkResult, write_results
from escnn_attention.training.run_folder import open_run
from escnn_attention.training.settings import Settings
from escnn_attention.training.train import CHECKPOINT, load_weights, train


@dataclass(frozen=True)
class Comparison:
    """What a comparison gave.

    Attributes:
        results: one per network that is finished in the folder, in the order of :data:`.networks.NETWORKS`.
        data: the images.
        turns: names of the group elements by which the test images were turned, without the identity.
        files: the tables and figures that were written.
    """

    results: list[NetworkResult]
    data: ImageData
    turns: list[str]
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
    data = _load(settings, report)
    configuration = settings.configuration(data.fingerprint())
    folder = settings.folder
    with open_run(folder, configuration, restart=settings.restart) as moved:
        if moved is not None:
            report.say(f"the earlier run was moved to {moved}")
        test: TestSet | None = None
        results = []
        for name in NETWORKS:
            result = NetworkResult.read(folder / name)
            if name in settings.networks:
                if result is not None:
                    report.say(f"{name} is finished, it is not trained again ({folder / name})")
                else:
                    test = test or TestSet.of(data, gspace)
                    result = _run_network(name, settings, gspace, data, test, report)
                    result.write(folder / name)
            if result is not None:
                results.append(result)
        files = write_results(folder, results, configuration, data.source)
        networks = {result.network: _trained(result.network, settings, gspace, data) for result in results}
        report.say("drawing figures")
        files += write_figures(folder / "figures", networks, results, gspace, data)
    return Comparison(results, data, list(grid_turns(gspace)), files)


def _check(settings: Settings) -> None:
    unknown = [name for name in settings.networks if name not in NETWORKS]
    if unknown or not settings.networks:
        raise UserError(f"unknown network {', '.join(unknown) or '(none)'}: choose from {', '.join(NETWORKS)}")
    for name in ("parameters", "epochs", "batch_size", "limit_train", "limit_test", "learning_rate"):
        value = getattr(settings, name)
        if value is not None and not value > 0:
            raise UserError(f"--{name.replace('_', '-')} must be positive, got {value}")
    if settings.seed < 0:
        raise UserError(f"--seed must not be negative, got {settings.seed}")


def _load(settings: Settings, report: Reporter) -> ImageData:
    # The bar of a download appears with its first bytes: mostly there is nothing to download.
    with contextlib.ExitStack() as stack:
        advance: Advance | None = None

        def progress(received: int, total: int | None) -> None:
            nonlocal advance
            if advance is None:
                advance = stack.enter_context(report.bar(f"downloading {settings.data}", total, size=True))
            advance(received, total)

        data = load_data(settings.data, settings.data_dir, progress)
    return data.limited(settings.limit_train, settings.limit_test)


def _run_network(
    name: str, settings: Settings, gspace: GSpace, data: ImageData, test: TestSet, report: Reporter
) -> NetworkResult:
    network = _build(name, settings, gspace, data)
    training = train(name, network, data, settings, settings.folder / name, report)
    with report.bar(f"testing {name}") as advance:
        accuracies = measure_accuracies(network, test, training.device, 4 * settings.batch_size, advance)
    return NetworkResult(
        network=name,
        parameters=count_parameters(network),
        accuracy_upright=accuracies.upright,
        accuracy_rotated=accuracies.rotated,
        accuracy_any_angle=accuracies.any_angle,
        accuracy_by_element=accuracies.turned,
        equivariance_error=measure_equivariance_error(network, gspace, data.size, data.num_classes),
        seconds_per_epoch=training.seconds_per_epoch,
        epochs=settings.epoch_count,
        device=str(training.device),
    )


def _build(name: str, settings: Settings, gspace: GSpace, data: ImageData) -> nn.Module:
    return build_network(name, gspace, data.size, data.num_classes, settings.parameters, settings.seed)


def _trained(name: str, settings: Settings, gspace: GSpace, data: ImageData) -> nn.Module:
    network = _build(name, settings, gspace, data)
    load_weights(network, settings.folder / name / CHECKPOINT)
    return network.eval()
