"""One experiment: a network, its data and its training, from a configuration file."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
import yaml
from lightning.pytorch.callbacks import BasePredictionWriter, Checkpoint, ModelCheckpoint, ProgressBar, RichProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from escnn_attention.training.checkpoints import AtomicCheckpointIO, read_checkpoint
from escnn_attention.training.described import build_described
from escnn_attention.training.errors import UserError
from escnn_attention.training.files import atomic_file, keep_aside, write_csv, write_json
from escnn_attention.training.history import EpochHistory
from escnn_attention.training.module import Classifier, Scheduled
from escnn_attention.training.points import PointClassifier, PointDynamics, PointRegression
from escnn_attention.training.quiet import quiet_lightning
from escnn_attention.training.results import hardware, versions
from escnn_attention.training.run_folder import held

__all__ = ["BEST", "CONFIGURATION", "LAST", "TEST", "ExperimentCLI", "load_network", "run_experiment"]

BEST, LAST = "best.ckpt", "last.ckpt"
CONFIGURATION = "config.yaml"
EPOCHS = "epochs.csv"
TEST = "test.json"
PREDICTIONS = "predictions.csv"

_WRITTEN = "# Written by escnn-attention fit."  # the first line of the configuration that a folder keeps
_PATIENCE = 10.0  # seconds in which the processes end that prepared batches for one that was killed

Task = Literal["classification", "point-classification", "point-regression", "point-dynamics"]

_MODULES: dict[str, type[Scheduled]] = {
    "classification": Classifier,
    "point-classification": PointClassifier,
    "point-regression": PointRegression,
    "point-dynamics": PointDynamics,
}

_OF_THE_CALL = ("folder", "ckpt_path", "config")
# What may change about the data from one call to the next.
_INCIDENTAL = tuple(
    f"data.init_args.{name}"
    for name in ("folder", "num_workers", "download", "eval_batch_size", "limit_valid", "limit_test")
)
# What of the trainer is part of the training.
_TRAINING = (
    "precision",
    "gradient_clip_val",
    "gradient_clip_algorithm",
    "accumulate_grad_batches",
    "limit_train_batches",
    "overfit_batches",
    "max_steps",
)


def run_experiment(arguments: Sequence[str]) -> ExperimentCLI:
    """Fit, validate, test or predict, as ``escnn-attention`` does.

    Args:
        arguments: the command (``fit``, ``validate``, ``test``, ``predict``) and its options.

    Raises:
        UserError: the folder holds another experiment, a checkpoint is missing, or the data cannot be had.
        SystemExit: an option or a configuration that cannot be parsed; the reason is on stderr.
    """
    with quiet_lightning():
        return ExperimentCLI(
            _MODULES.get(_task(arguments), Classifier),
            pl.LightningDataModule,
            subclass_mode_data=True,
            save_config_callback=_SaveConfiguration,
            save_config_kwargs={"save_to_log_dir": False},
            seed_everything_default=0,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            parser_kwargs={"prog": "escnn-attention"},
            args=list(arguments),
        )


def _task(arguments: Sequence[str]) -> str:
    """The task that the options or the configuration files name: on it depends what options there are."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("-c", "--config", action="append", default=[])
    parser.add_argument("--task")
    known, _ = parser.parse_known_args(list(arguments))
    if known.task is not None:
        return str(known.task)
    for path in reversed(known.config):
        # What cannot be read is reported once the options are known.
        with contextlib.suppress(OSError, ValueError, yaml.YAMLError):
            content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
            if isinstance(content, dict) and "task" in content:
                return str(content["task"])
    return "classification"


class ExperimentCLI(LightningCLI):
    """Lightning's command line, with everything about an experiment in one folder.

    The folder holds ``config.yaml``, ``last.ckpt`` (after every epoch), ``best.ckpt`` (of the highest validation
    accuracy, or the lowest error), ``epochs.csv``, TensorBoard's logs in ``tensorboard``, and what ``test`` and
    ``predict`` write. With ``--trainer.fast_dev_run`` nothing is written, and a training starts anew.
    """

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument(
            "--folder", type=Path, required=True, help="Folder of the experiment: checkpoints, logs and results."
        )
        parser.add_argument(
            "--task", type=Task, default="classification", help="What is learned: the module that `model` describes."
        )
        parser.link_arguments("seed_everything", "model.seed", compute_fn=int)
        parser.link_arguments("seed_everything", "data.init_args.seed", compute_fn=int)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        super().parse_arguments(parser, args)
        seed = self.config[self.config["subcommand"]]["seed_everything"]
        if isinstance(seed, bool):
            raise UserError(f"--seed_everything: got {seed}, needed an integer")

    def _parse_ckpt_path(self) -> None:
        """Lightning would take options from the checkpoint; here the configuration has them all."""

    def before_instantiate_classes(self) -> None:
        config = self.config[self.subcommand]
        for name in ("default_root_dir", "enable_checkpointing"):
            if config["trainer"].get(name) is not None:
                raise UserError(f"--trainer.{name} is not an option here: --folder says where everything is kept")
        self.writes = not config["trainer"].get("fast_dev_run")
        self.checkpoint_is_given = config.get("ckpt_path") is not None
        self.folder = Path(config["folder"])
        if self.folder.exists() and not self.folder.is_dir():
            raise UserError(f"--folder: {self.folder} is not a folder")
        self.last = _stamp(self.folder / LAST)
        checkpoint = self._checkpoint(config.get("ckpt_path"))
        if self.subcommand == "fit" and self.writes:
            self._check_folder(checkpoint)
        # As "ckpt_path" of the command, which Lightning hands to the trainer.
        config["ckpt_path"] = None if checkpoint is None else str(checkpoint)
        if checkpoint is not None:
            self._check_checkpoint(checkpoint)

    def _checkpoint(self, given: str | Path | None) -> Path | None:
        """What to go on from (``fit``), or the network to use."""
        if given is not None:
            path = (
                self.folder / {"best": BEST, "last": LAST}[str(given)]
                if str(given) in ("best", "last")
                else Path(given)
            )
            if not path.is_file():
                raise UserError(f"--ckpt_path: there is no file {path}")
            return path
        if self.subcommand == "fit":
            last = self.folder / LAST
            return last if self.writes and last.exists() else None
        for name in (BEST, LAST):
            if (self.folder / name).exists():
                return self.folder / name
        raise UserError(f"{self.folder} holds no trained network: run 'escnn-attention fit' with this --folder first")

    def _check_folder(self, checkpoint: Path | None) -> None:
        """A training takes the place of nothing but what it goes on with."""
        path = self.folder / CONFIGURATION
        if path.exists() and not _is_ours(path):
            raise UserError(
                f"--folder: {path} is not a file that fit has written, and would be replaced by one: give it another"
                " name, or choose another --folder"
            )
        if checkpoint is not None and checkpoint.resolve().parent == self.folder.resolve():
            return
        found = [name for name in (LAST, EPOCHS, TEST, PREDICTIONS) if (self.folder / name).exists()]
        # One that is killed in its first epoch may leave its best checkpoint only, and makes the same again.
        if not found and (self.folder / BEST).exists() and not self._is_first_epoch(self.folder / BEST):
            found = [BEST]
        if not found:
            return
        if checkpoint is not None:
            raise UserError(
                f"--folder: {self.folder} holds a training ({found[0]}): choose another for one from {checkpoint}"
            )
        raise UserError(
            f"--folder: {self.folder} holds {', '.join(found)} of a training, but no {LAST} to go on from: choose"
            " another folder, or move these files away"
        )

    def _is_first_epoch(self, path: Path) -> bool:
        """Whether a checkpoint is of the first epoch of this very training."""
        content = read_checkpoint(path)
        trained = _trained(content)
        return (
            content.get("epoch") == 0
            and trained is not None
            and not _differences(trained["configuration"], _plain(self.parser, self.config, self.subcommand), _training)
        )

    def _check_checkpoint(self, path: Path) -> None:
        """The configuration fits what the checkpoint was trained with, so far as it must."""
        content = read_checkpoint(path)
        needed = ("state_dict", "epoch") + (("optimizer_states",) if self.subcommand == "fit" else ())
        for name in needed:
            if name not in content:
                raise UserError(f"{self._told_apart(path)} is not a checkpoint to {self.subcommand} from: no {name!r}")
        if not isinstance(content["state_dict"], dict) or not isinstance(content["epoch"], int):
            raise UserError(f"{self._told_apart(path)} is not a checkpoint of this package")
        trained = _trained(content)
        if trained is None:
            return
        now = _plain(self.parser, self.config, self.subcommand)
        changed = _differences(trained["configuration"], now, _training if self.subcommand == "fit" else _network)
        if changed:
            way_out = "checkpoint" if self.checkpoint_is_given else "--folder"
            raise UserError(
                f"{self._told_apart(path)} is of another configuration: {changed}. Choose another {way_out}"
            )
        if self.subcommand != "fit":
            return
        epochs = now["trainer"].get("max_epochs")
        if epochs is not None and 0 <= epochs < int(content["epoch"]) + 1:
            raise UserError(f"--trainer.max_epochs: got {epochs}, but {path} has finished {int(content['epoch']) + 1}")

    def instantiate_classes(self) -> None:
        with _told():
            super().instantiate_classes()
        _check_images(self.model, self.datamodule)
        checkpoint = self.config[self.subcommand].get("ckpt_path")
        if checkpoint is not None:
            self._check_weights(Path(checkpoint))

    def _check_weights(self, path: Path) -> None:
        """Configurations do not tell everything: a checkpoint may be from elsewhere, and say nothing of its network."""
        try:
            self.model.load_state_dict(read_checkpoint(path)["state_dict"])
        except RuntimeError as error:
            _, *reasons = str(error).splitlines()
            raise UserError(f"{self._told_apart(path)} is of another network: {reasons[0].strip()}") from error

    def _told_apart(self, path: Path) -> str:
        return f"--ckpt_path: {path}" if self.checkpoint_is_given else str(path)

    def _run_subcommand(self, subcommand: str) -> None:
        with _told(), self._alone():
            super()._run_subcommand(subcommand)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """One training in a folder at a time, however many processes it has."""
        if not (self.subcommand == "fit" and self.writes and self.trainer.is_global_zero):
            yield
            return
        with held(self.folder, "choose another --folder", _PATIENCE):
            if _stamp(self.folder / LAST) != self.last:
                raise UserError(
                    f"another process has trained in {self.folder} just now: start again to go on from there"
                )
            yield

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        config = self._get(self.config_init, "trainer", default={})
        if self.writes:
            self.folder.mkdir(parents=True, exist_ok=True)
        logger = config.get("logger")
        given = config.get("callbacks") or []
        callbacks: list[pl.Callback] = [*given] if isinstance(given, list) else [given]
        training = self.subcommand == "fit" and self.writes
        if training:
            configuration = _essential(_plain(self.parser, self.config, self.subcommand))
            callbacks += [
                EpochHistory(self.folder / EPOCHS, self.model.monitor),
                _Provenance({"configuration": configuration, "versions": versions(), "hardware": hardware()}),
                # The best first, so that the last one, from which a run goes on, knows of it.
                _Best(self.folder, Path(BEST).stem, self.model.monitor, self.model.mode),
                _Last(self.folder, Path(LAST).stem),
            ]
        else:
            callbacks = [callback for callback in callbacks if not isinstance(callback, Checkpoint)]
        if self.subcommand == "predict" and self.writes:
            callbacks.append(_PredictionWriter(self.folder / PREDICTIONS))
        if config.get("enable_progress_bar") is not False and not any(isinstance(c, ProgressBar) for c in callbacks):
            callbacks.append(RichProgressBar())
        if logger is None:
            logger = TensorBoardLogger(self.folder, name=None, version="tensorboard") if training else False
        plugins = config.get("plugins") or []
        return super().instantiate_trainer(
            default_root_dir=str(self.folder),
            logger=logger,
            callbacks=callbacks,
            enable_checkpointing=training,
            plugins=[*(plugins if isinstance(plugins, list) else [plugins]), AtomicCheckpointIO()],
            **kwargs,
        )

    def after_test(self) -> None:
        """Write what was measured, with everything that it depends on."""
        if not (self.trainer.is_global_zero and self.writes):
            return
        checkpoint = Path(self.config[self.subcommand]["ckpt_path"])
        content = read_checkpoint(checkpoint)
        # The curve goes on after the best epoch.
        last = checkpoint.parent / LAST
        curve = _state(read_checkpoint(last) if last.is_file() else content, EpochHistory)
        tested = {
            "configuration": _essential(_plain(self.parser, self.config, self.subcommand)),
            "versions": versions(),
            "hardware": hardware(),
        }
        metrics = self.trainer.callback_metrics
        result = {
            **{n.removeprefix("test_"): _number(v) for n, v in metrics.items() if n.startswith("test_")},
            "epoch": int(content["epoch"]) + 1,
            "parameters": sum(p.numel() for p in self.model.network.parameters() if p.requires_grad),
            "seed": self.config[self.subcommand]["seed_everything"],
            "checkpoint": checkpoint.name,
            "weights_sha256": _digest(content["state_dict"]),
            "curve": [{k: _number(v) for k, v in row.items()} for row in (curve or {"rows": []})["rows"]],
            "trained": _trained(content),
            "tested": tested,
        }
        path = self.folder / TEST
        if path.exists() and _measured(_read_result(path)) != _measured(json.loads(json.dumps(result))):
            _say_kept(path, keep_aside(path))
        write_json(path, result)


class _Best(ModelCheckpoint):
    """The checkpoint of the best epoch. A class of its own, as Lightning tells callbacks apart by their classes."""

    def __init__(self, folder: Path, name: str, monitor: str, mode: str) -> None:
        super().__init__(folder, name, monitor=monitor, mode=mode, enable_version_counter=False)


class _Last(ModelCheckpoint):
    """The checkpoint of the last epoch."""

    def __init__(self, folder: Path, name: str) -> None:
        super().__init__(folder, name, save_on_train_epoch_end=True, enable_version_counter=False)


class _Provenance(pl.Callback):
    """Has checkpoints say by what they were made."""

    def __init__(self, facts: dict[str, Any]) -> None:
        self.facts = facts

    def state_dict(self) -> dict[str, Any]:
        return self.facts


class _SaveConfiguration(SaveConfigCallback):
    """Keeps the configuration of ``fit`` in the folder of the experiment."""

    def save_config(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit" and not self.config["trainer"].get("fast_dev_run"):
            kept = {k: v for k, v in yaml.safe_load(self.parser.dump(self.config)).items() if k not in _OF_THE_CALL}
            with atomic_file(Path(self.config["folder"]) / CONFIGURATION, "w") as file:
                file.write(f"{_WRITTEN}\n")
                yaml.safe_dump(kept, file, sort_keys=False)


class _PredictionWriter(BasePredictionWriter):
    """Writes one line for each image or cloud, as the module describes it."""

    def __init__(self, path: Path) -> None:
        super().__init__(write_interval="epoch")
        self.path = path

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if trainer.world_size > 1:
            raise UserError("predict runs in one process: give --trainer.devices 1")
        if not isinstance(pl_module, Scheduled) or type(pl_module).describe is Scheduled.describe:
            raise UserError(f"predict: {type(pl_module).__name__} has nothing to write; use test")
        self.describe = pl_module.describe

    def write_on_epoch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        predictions: Sequence[Any],
        batch_indices: Sequence[Any],
    ) -> None:
        new = self.path.with_name(f".{self.path.name}")
        write_csv(new, self.describe(torch.cat(list(predictions)).float().cpu()))
        if self.path.exists() and self.path.read_bytes() != new.read_bytes():
            _say_kept(self.path, keep_aside(self.path))
        new.replace(self.path)


def _is_ours(path: Path) -> bool:
    """Whether a configuration is as ``fit`` writes it, so that another may take its place."""
    text = path.read_text(encoding="utf-8", errors="replace")
    if text.startswith(_WRITTEN):
        return True
    if not (path.parent / LAST).exists():
        return False
    # Older versions wrote no first line. What has no comments, and stands beside a checkpoint, is theirs.
    with contextlib.suppress(yaml.YAMLError):
        return text == yaml.safe_dump(yaml.safe_load(text), sort_keys=False)
    return False


def _stamp(path: Path) -> tuple[int, int] | None:
    """Of a file, what changes when it is written anew; None where there is none."""
    with contextlib.suppress(FileNotFoundError):
        status = path.stat()
        return status.st_ino, status.st_mtime_ns
    return None


def _read_result(path: Path) -> dict[str, Any]:
    """A result that was written before; empty where the file is something else."""
    with contextlib.suppress(ValueError):
        content = json.loads(path.read_text(encoding="utf-8"))
        return content if isinstance(content, dict) else {}
    return {}


def _measured(result: Mapping[str, Any]) -> list[Any]:
    """What a result is of: the weights, the data, and how it was computed."""
    tested = result.get("tested")
    configuration = tested.get("configuration") if isinstance(tested, dict) else None
    return [result.get("weights_sha256"), result.get("checkpoint"), configuration]


def _say_kept(path: Path, aside: Path) -> None:
    print(f"{path} was of another measurement: it is kept as {aside.name}", file=sys.stderr)


def _check_images(model: pl.LightningModule, data: pl.LightningDataModule) -> None:
    """The network is one for these images, so far as both say what they are for."""
    if not isinstance(model, Classifier):
        return
    in_type = getattr(model.network, "in_type", None)
    sides = (
        ("channels", "in_channels", getattr(in_type, "size", getattr(model.network, "in_channels", None))),
        ("classes", "num_classes", model.num_classes),
    )
    for what, name, needed in sides:
        given = getattr(data, name, None)
        if isinstance(given, int) and isinstance(needed, int) and given != needed:
            raise UserError(f"model.network: it is for {needed} {what}, but {type(data).__name__} has {given} ({name})")


def _plain(parser: LightningArgumentParser, config: Any, subcommand: str | None) -> dict[str, Any]:
    """The configuration of a command as plain values."""
    dumped = yaml.safe_load(parser.dump(config))
    plain: dict[str, Any] = dumped if subcommand is None else dumped[subcommand]
    return plain


def _essential(configuration: dict[str, Any]) -> dict[str, Any]:
    """What a result depends on, without the paths of a machine."""
    kept = {name: configuration[name] for name in ("task", "seed_everything", "trainer", "model", "data")}
    data = dict(kept["data"])
    data["init_args"] = {
        name: value
        for name, value in data.get("init_args", {}).items()
        if name not in ("folder", "num_workers", "download")
    }
    return {**kept, "data": data}


def _state(checkpoint: dict[str, Any], callback: type[pl.Callback]) -> dict[str, Any] | None:
    """What a callback left in a checkpoint."""
    states = checkpoint.get("callbacks", {})
    if not isinstance(states, dict):
        return None
    return next((state for name, state in states.items() if callback.__qualname__ in str(name)), None)


def _trained(checkpoint: dict[str, Any]) -> dict[str, Any] | None:
    """By what a checkpoint was made; None where it does not say."""
    facts = _state(checkpoint, _Provenance)
    configuration = facts.get("configuration") if isinstance(facts, dict) else None
    if not isinstance(configuration, dict):
        return None
    model, trainer = configuration.get("model"), configuration.get("trainer")
    whole = isinstance(model, dict) and isinstance(model.get("network"), dict) and isinstance(trainer, dict)
    return facts if whole else None


def _training(configuration: Mapping[str, Any]) -> dict[str, str]:
    """All that a training depends on, by dotted names."""
    trainer, model = configuration["trainer"], configuration["model"]
    names = list(_TRAINING)
    if model.get("schedule") in ("cosine", "one-cycle"):
        names.append("max_epochs")  # which the schedule is laid out for
    parts = {
        name: configuration[name] for name in ("task", "seed_everything", "model", "data") if name in configuration
    }
    parts["trainer"] = {name: trainer.get(name) for name in names}
    return {name: value for name, value in _flat("", parts) if name not in _INCIDENTAL}


def _network(configuration: Mapping[str, Any]) -> dict[str, str]:
    """What the weights depend on: the network, but for how it is computed."""
    flat = _flat("model.network", configuration["model"]["network"])
    return {name: value for name, value in flat if not name.endswith(".backend")}


def _differences(
    trained: Mapping[str, Any], now: Mapping[str, Any], facts: Callable[[Mapping[str, Any]], dict[str, str]]
) -> str:
    old, new = facts(trained), facts(now)
    return ", ".join(
        f"{name} ({old[name]} there, {new[name]} now)"
        for name in old
        # What an older version did not know of has its default.
        if name in new and old[name] != new[name]
    )


def _flat(name: str, value: Any) -> list[tuple[str, str]]:
    if isinstance(value, dict):
        return [pair for key, inner in value.items() for pair in _flat(f"{name}.{key}".lstrip("."), inner)]
    if name.rpartition(".")[2] == "class_path":
        value = _place(value)
    return [(name, json.dumps(value, default=repr))]


def _place(path: Any) -> Any:
    """Where a class is defined, whichever of its names it was given by.

    Of what a checkpoint names nothing is imported: where it is what this command uses, it has been imported by now.
    """
    module, _, name = str(path).rpartition(".")
    try:
        found = getattr(sys.modules[module], name)
        return f"{found.__module__}.{found.__qualname__}"
    except (KeyError, AttributeError):
        return path


def _number(value: Any) -> float | None:
    """For JSON, which has no NaN."""
    number = None if value is None else float(value)
    return number if number is None or math.isfinite(number) else None


def _digest(weights: Mapping[str, torch.Tensor]) -> str:
    """Equal for equal weights, whatever else a checkpoint holds."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode())
        digest.update(weights[name].detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Wrong options and wrong sizes, which have clear messages, end as such."""
    try:
        yield
    except OSError as error:
        known = error.filename is not None and error.strerror is not None
        raise UserError(f"{error.filename}: {error.strerror}" if known else str(error)) from error
    except (ValueError, MisconfigurationException) as error:
        raise UserError(str(error)) from error


def load_network(folder: str | Path, network: torch.nn.Module | None = None) -> torch.nn.Module:
    """The trained network of an experiment: that of the highest validation accuracy, in eval mode.

    Nothing is run that the checkpoint brings along. It says by which class the network was made, and with which
    arguments; where all of them are of this package, and the gspace is escnn's, the network is built from that.

    Args:
        folder: that was given to ``escnn-attention fit --folder``.
        network: one of the same kind, which gets the weights, where it is not a network of this package; by default
            one is built, on the CPU.

    Raises:
        TypeError: ``network`` is not a module.
        UserError: there is no checkpoint in the folder, it cannot be read, it is of another network than the one that
            is given, or none is given and it is of a class from elsewhere.
    """
    if network is not None and not isinstance(network, torch.nn.Module):
        raise TypeError(f"network: got {type(network).__name__}, needed a torch.nn.Module")
    path = next((p for name in (BEST, LAST) if (p := Path(folder) / name).is_file()), None)
    if path is None:
        raise UserError(f"{folder} holds no trained network: there is neither {BEST} nor {LAST} in it")
    content = read_checkpoint(path)
    if network is None:
        trained = _trained(content)
        if trained is None:
            raise UserError(f"{path} does not say what network it is of: build it, and give it as `network`")
        try:
            network = build_described(trained["configuration"]["model"]["network"])
        except UserError as error:
            raise UserError(f"{path}: {error}") from error
    prefix = "network."
    state = content.get("state_dict")
    weights = {name: value for name, value in (state or {}).items() if name.startswith(prefix)}
    if not weights:
        raise UserError(f"{path} holds no weights of a network")
    try:
        network.load_state_dict({name.removeprefix(prefix): value for name, value in weights.items()})
    except RuntimeError as error:
        _, *reasons = str(error).splitlines()
        raise UserError(f"{path} is of another network: {reasons[0].strip()}") from error
    return network.eval()
