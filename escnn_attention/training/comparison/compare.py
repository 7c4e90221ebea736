"""The comparison: four networks trained on upright images by the code of ``fit``, and tested on rotated ones too."""

from __future__ import annotations

import math
import multiprocessing
import signal
import statistics
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from escnn_attention.nn.summary import count_parameters
from escnn_attention.training.comparison.measure import (
    ANY_ANGLE,
    UPRIGHT,
    ImageData,
    NetworkResult,
    grid_symmetries,
    load_images,
    measure_accuracies,
    measure_equivariance_error,
    orient,
)
from escnn_attention.training.comparison.networks import TITLES, describe_network, gspace_by_name
from escnn_attention.training.comparison.settings import LARGEST_SEED, Settings
from escnn_attention.training.errors import UserError, as_user_error
from escnn_attention.training.experiment import LAST, load_network, run_experiment
from escnn_attention.training.experiment.command import ExperimentCLI
from escnn_attention.training.experiment.configuration import recipe
from escnn_attention.training.experiment.folder import open_comparison
from escnn_attention.training.experiment.result import write_result
from escnn_attention.training.files import write_csv, write_json
from escnn_attention.training.provenance import hardware, versions

Say = Callable[[str], None]
"""Shows a line. It is sent to the processes in which networks are trained."""


def drop(line: str) -> None:
    """Show nothing."""


@dataclass(frozen=True)
class Comparison:
    """The results of all networks that are finished in the folder, in the order of :data:`~.networks.TITLES`.

    ``elements`` names the group elements, without the identity, by which the test images were transformed; ``files``
    are the tables and figures that were written.
    """

    results: list[NetworkResult]
    data: ImageData
    elements: list[str]
    files: list[Path]


def compare(settings: Settings, say: Say = drop) -> Comparison:
    """Train and measure the networks of ``settings``, and write tables, checkpoints and figures to its folder.

    A network that is finished in the folder is not trained again; a training that was killed resumes after its last
    finished epoch. ``say`` is called with a line at every step and epoch, in the process of the network.

    Raises:
        UserError: an option that cannot be met; the message names it.
        KeyboardInterrupt: on Ctrl-C. Finished epochs are kept.
    """
    from escnn_attention.training.comparison.figures import write_figures

    _check(settings)
    gspace, folder = gspace_by_name(settings.group), settings.folder
    with as_user_error():
        data = load_images(settings.data, settings.data_dir, settings.limit_train, settings.limit_test)
        images = data.configuration["init_args"]
        facts = settings.configuration([*images["mean"], *images["std"]])
        with open_comparison(folder, facts, restart=settings.restart) as moved:
            if moved is not None:
                say(f"the earlier run was moved to {moved}")
            pending = []
            for name in filter(settings.networks.__contains__, TITLES):
                if NetworkResult.read(folder / name) is None:
                    pending.append(name)
                else:
                    say(f"{name} is finished, it is not trained again ({folder / name})")
            configurations = {name: configure(name, data, settings) for name in pending}
            work = partial(_finish, configurations, data, settings, say)
            if settings.jobs > 1 and len(pending) > 1:
                # The last ones take longest, and are begun first.
                side_by_side(work, pending[::-1], settings.jobs)
            else:
                for name in pending:
                    work(name)
            results = [result for name in TITLES if (result := NetworkResult.read(folder / name)) is not None]
            files = _write_tables(folder, results, facts, data.source)
            say("drawing figures")
            networks = {result.network: load_network(folder / result.network / LAST) for result in results}
            files += write_figures(folder / "figures", networks, results, data)
    return Comparison(results, data, list(grid_symmetries(gspace)), files)


def configure(name: str, data: ImageData, settings: Settings) -> dict[str, Any]:
    """The configuration of the training of a network: the recipe of the networks of digits, with other options."""
    config = recipe("steerable-digits")
    epochs, batch_size = settings.epoch_count, settings.batch_size
    config["model"]["warm_up"] = config["model"]["warm_up"] / config["trainer"]["max_epochs"] * epochs
    config["model"]["optimizer"]["init_args"]["lr"] = settings.learning_rate
    config["model"] |= {
        "network": describe_network(name, settings.group, data.size, data.num_classes, settings.parameters),
        "num_classes": data.num_classes,
    }
    config["data"] = {
        "class_path": data.configuration["class_path"],
        "init_args": {
            **data.configuration["init_args"],
            "batch_size": batch_size,
            "eval_batch_size": 4 * batch_size,
            "drop_last": False,
        },
    }
    config["trainer"] = {
        "accelerator": settings.accelerator,
        "devices": 1,
        "max_epochs": epochs,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    return {**config, "seed_everything": settings.seed}


def _check(settings: Settings) -> None:
    unknown = [name for name in settings.networks if name not in TITLES]
    if unknown or not settings.networks:
        raise UserError(f"unknown network {', '.join(unknown) or '(none)'}: choose from {', '.join(TITLES)}")
    for name in ("parameters", "epochs", "batch_size", "limit_train", "limit_test", "learning_rate", "jobs"):
        value = getattr(settings, name)
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"--{name.replace('_', '-')} must be positive and finite, got {value}")
    if not 0 <= settings.seed <= LARGEST_SEED:
        raise UserError(f"--seed: got {settings.seed}, needed an integer from 0 to {LARGEST_SEED}")


def _finish(
    configurations: Mapping[str, dict[str, Any]], data: ImageData, settings: Settings, say: Say, name: str
) -> None:
    """Train a network, measure it, and write the result to its folder."""
    folder, gspace = settings.folder / name, gspace_by_name(settings.group)
    experiment = train(configurations[name], folder, say)
    network, device = experiment.model.network, experiment.trainer.strategy.root_device
    test = orient(data.test[0], gspace)
    say(f"testing {name}")
    accuracies = measure_accuracies(network, test, data, device, 4 * settings.batch_size)
    upright, any_angle = accuracies.pop(UPRIGHT), accuracies.pop(ANY_ANGLE)
    facts = {
        "parameters": count_parameters(network),
        "seed": settings.seed,
        "accuracy_upright": upright,
        "accuracy_rotated": sum(accuracies.values()) / len(accuracies) if accuracies else None,
        "accuracy_any_angle": any_angle,
        "accuracy_by_element": accuracies,
        "equivariance_error": measure_equivariance_error(network, gspace, data.size, data.num_classes),
        "seconds_per_epoch": statistics.median(row["seconds"] for row in experiment.epochs),
        "epochs": settings.epoch_count,
        "device": str(device),
    }
    write_result(folder, folder / LAST, {"test_accuracy": upright}, facts, experiment.facts)


def train(configuration: dict[str, Any], folder: Path, say: Say = drop) -> ExperimentCLI:
    """Train the network of ``folder`` by the code of ``fit``, from the last finished epoch if there is one."""
    try:
        return run_experiment({**configuration, "folder": str(folder)}, [_EpochLines(folder.name, say)])
    except SystemExit as error:  # what Lightning makes of Ctrl-C
        raise KeyboardInterrupt from error


class _EpochLines(pl.Callback):
    """A line for every epoch, and one where a training resumes."""

    def __init__(self, name: str, say: Say) -> None:
        self.name, self.say = name, say

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch:
            first, most = trainer.current_epoch + 1, trainer.max_epochs
            self.say(f"resuming {self.name} at epoch {first} of {most} from {trainer.ckpt_path}")

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        accuracy = 100 * float(trainer.callback_metrics["valid_accuracy"])
        self.say(f"{self.name}: epoch {trainer.current_epoch + 1} of {trainer.max_epochs}, valid {accuracy:.1f} %")


def _write_tables(
    folder: Path, results: Sequence[NetworkResult], configuration: Mapping[str, Any], data_source: str
) -> list[Path]:
    """Write ``results.csv``, one line per network, and ``results.json`` with versions and hardware as well."""
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


# Several networks at a time.


def side_by_side(work: Callable[[str], None], names: Sequence[str], jobs: int) -> None:
    """Do ``work`` for every name, in ``jobs`` new processes, each with as many threads as this one.

    ``work`` is a function of a module, or a partial of one. If it fails, or a process is killed, the other processes
    are killed, as they are by a Ctrl-C, and the error is a :class:`UserError`.
    """
    context = multiprocessing.get_context("spawn")
    others = set(multiprocessing.active_children())
    with _uninterrupted():
        pool = ProcessPoolExecutor(jobs, context, _begin, (torch.get_num_threads(),))
        unfinished = [pool.submit(work, name) for name in names]
    try:
        for future in as_completed(unfinished):
            future.result()
    except BrokenProcessPool as error:
        raise UserError("the process of a network was killed: run the same command again to resume") from error
    finally:
        for process in set(multiprocessing.active_children()) - others:
            process.kill()
        pool.shutdown(cancel_futures=True)


def _begin(threads: int) -> None:
    """Set up a process of the pool, which ends with the one that began it."""
    torch.set_num_threads(threads)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        signal.raise_signal(signal.SIGKILL if hasattr(signal, "SIGKILL") else signal.SIGTERM)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Have processes that are started here ignore a Ctrl-C, which the terminal sends to all of them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
