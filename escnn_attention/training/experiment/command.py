"""The commands ``fit``, ``validate``, ``test`` and ``predict``."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
from jsonargparse import ArgumentParser, Namespace
from lightning.fabric.utilities.seed import max_seed_value, min_seed_value
from lightning.pytorch.callbacks import Checkpoint, ProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from escnn_attention import models
from escnn_attention._checks import reason_of
from escnn_attention.models.cloud_network import CloudNetwork
from escnn_attention.models.limits import within
from escnn_attention.models.registry import recipe_file
from escnn_attention.nn.summary import count_parameters
from escnn_attention.training.data.images.base import PublishedImages
from escnn_attention.training.data.images.own import OwnImages
from escnn_attention.training.errors import UserError, as_misuse, as_user_error, message_of, quiet_lightning
from escnn_attention.training.experiment import callbacks, checkpoints, configuration
from escnn_attention.training.experiment.network import check_fit, checkpoint_of, load_weights
from escnn_attention.training.experiment.result import hardware, versions, write_result
from escnn_attention.training.experiment.trust import check_parsed
from escnn_attention.training.files import remove_temporaries
from escnn_attention.training.modules import TASKS, Task
from escnn_attention.training.modules.classifier import Classifier

_PATIENCE = 10.0  # seconds in which the processes end that prepared batches for one that was killed

# Parts of a checkpoint that Lightning needs: the first two always, the others to resume.
_NEEDED = ("state_dict", "epoch", "optimizer_states", "lr_schedulers", "loops", "pytorch-lightning_version")

# Parsers and names of options, by the command and the class of the module: Lightning takes a second to collect them.
_PARSERS: dict[tuple[str, Any], dict[str, Any]] = {}


def run_experiment(arguments: Sequence[str]) -> ExperimentCLI:
    """Fit, validate, test or predict, as ``escnn-attention`` does: ``arguments`` are the command and its options.

    Raises:
        UserError: an option or a configuration that cannot be parsed, the folder holds another experiment, a checkpoint
            is missing, or the data cannot be had.
    """
    command, options = next(iter(arguments), ""), list(arguments)
    if command == "fit" and (name := configuration.known_options(options).recipe) is not None:
        options[1:1] = ["--config", json.dumps(configuration.recipe(name))]
    arguments = configuration.with_configuration(options, checkpoints.CONFIGURATION)
    foreign = options if arguments != options and "--trust" not in options else None
    with quiet_lightning(), as_user_error():
        return ExperimentCLI(
            command,
            foreign,
            model_class=TASKS.get(configuration.find_task(arguments), Classifier),
            datamodule_class=pl.LightningDataModule,
            subclass_mode_data=True,
            save_config_callback=None,
            seed_everything_default=0,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            parser_kwargs={"prog": "escnn-attention", "exit_on_error": False},
            args=list(arguments),
        )


class ExperimentCLI(LightningCLI):
    """Lightning's command line, with everything about an experiment in one folder.

    The folder holds ``config.yaml``, ``last.ckpt`` (after every epoch), ``best.ckpt`` (of the highest validation
    accuracy, or the lowest error), ``epochs.csv``, TensorBoard's logs in ``tensorboard``, and what ``test`` and
    ``predict`` write. With ``--trainer.fast_dev_run`` nothing is written, and a training starts anew.

    Args:
        command: the command to run; options of the others are not collected, which takes a second for each.
        foreign: the options of the command where the configuration is the folder's own, which is not trusted.
    """

    def __init__(self, command: str, foreign: Sequence[str] | None, **options: Any) -> None:
        self.command, self.foreign = command, foreign
        super().__init__(**options)

    def init_parser(self, **options: Any) -> LightningArgumentParser:
        # known_options reads a few before all are parsed, by their whole names only.
        return super().init_parser(allow_abbrev=False, **options)

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """The command that is run, or all commands if it is unknown."""
        known = LightningCLI.subcommands()
        return {self.command: known[self.command]} if self.command in known else known

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        add = parser.add_argument
        add("--folder", type=str, required=True, help="Folder of the experiment: checkpoints, logs and results.")
        add("--task", type=Task, default="classification", help="What is learned: the module that `model` describes.")
        if self.command == "fit":
            about = "Train as the weights of this name were trained, a name of models.list_models(pretrained=True);"
            add("--recipe", type=str, help=f"{about} other options change the recipe.")
        else:
            add("--trust", action="store_true", help="The configuration in --folder may run whatever it names.")
        if self.command == "predict":
            about = "Images of your own: a folder, or an .npz file with `images` and, if they are known, `labels`; of"
            about += " the channels and the size of those of the training. By default the test part of its data."
            add("--images", type=str, help=about)
        parser.link_arguments("seed_everything", "model.seed", compute_fn=int)
        parser.link_arguments("seed_everything", "data.init_args.seed", compute_fn=int)

    def setup_parser(self, *options: Any) -> None:
        """Collect the options, once in a process that runs a command several times."""
        key = self.command, self._model_class
        if key not in _PARSERS:
            others = set(vars(self))
            super().setup_parser(*options)
            _PARSERS[key] = {name: value for name, value in vars(self).items() if name not in others}
        vars(self).update(_PARSERS[key])

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse by the parser of the command alone: the parser above it would check everything again."""
        vars(parser).pop("print_config", None)  # asked for by arguments before these, which were wrong
        of_command = self._subcommand_parsers.get(self.command)
        with as_misuse(self.command):
            if of_command is None or any(text.startswith("--print_config") for text in args):
                super().parse_arguments(parser, args)  # which also prints configurations
            else:
                parsed = of_command.parse_args(args[1:])
                self.config = Namespace(**{"config": None, "subcommand": self.command, self.command: parsed})
        seed = self.config[self.config["subcommand"]]["seed_everything"]
        if isinstance(seed, bool) or not min_seed_value <= (seed or 0) <= max_seed_value:
            raise UserError(
                f"--seed_everything: got {seed}, needed an integer from {min_seed_value} to {max_seed_value}"
            )

    def _parse_ckpt_path(self) -> None:
        """Lightning would take options from the checkpoint; here the configuration has them all."""

    def before_instantiate_classes(self) -> None:
        config = self.config[self.subcommand]
        for name in ("default_root_dir", "enable_checkpointing"):
            if config["trainer"].get(name) is not None:
                raise UserError(f"--trainer.{name} is not an option here: --folder says where everything is kept")
        if self.foreign is not None:
            check_parsed(self._plain, self.foreign, Path(config["folder"], checkpoints.CONFIGURATION))
        self.writes = not config["trainer"].get("fast_dev_run")
        self.checkpoint_is_given = config.get("ckpt_path") is not None
        if not config["folder"]:
            raise UserError("--folder: got an empty name, needed a folder")
        self.folder = Path(config["folder"])
        if self.folder.exists() and not self.folder.is_dir():
            raise UserError(f"--folder: {self.folder} is not a folder")
        self.last = checkpoints.stamp(self.folder / checkpoints.LAST)
        checkpoint = self._checkpoint(config.get("ckpt_path"))
        if self.subcommand == "fit" and self.writes:
            checkpoints.check_folder(self.folder, checkpoint, self._plain)
        # As "ckpt_path" of the command, which Lightning hands to the trainer.
        config["ckpt_path"] = None if checkpoint is None else str(checkpoint)
        if checkpoint is not None:
            self._check_checkpoint(checkpoint)

    def _checkpoint(self, given: str | Path | None) -> Path | None:
        """The checkpoint to resume from (``fit``), or that of the network to use."""
        last = self.folder / checkpoints.LAST
        if given is not None:
            path = {"best": self.folder / checkpoints.BEST, "last": last}.get(str(given), Path(given))
            if not path.is_file():
                raise UserError(f"--ckpt_path: there is no file {path}")
            return path
        if self.subcommand == "fit":
            return last if self.writes and last.exists() else None
        return checkpoint_of(self.folder)

    def _check_checkpoint(self, path: Path) -> None:
        """Check that the configuration agrees with that of the checkpoint where it must."""
        content, fits = checkpoints.read_checkpoint(path), self.subcommand == "fit"
        for name in _NEEDED[: None if fits else 2]:
            if name not in content:
                raise UserError(f"{self._told_apart(path)} is not a checkpoint to {self.subcommand} from: no {name!r}")
        self.tensors = len(content["state_dict"])
        trained, now = checkpoints.provenance_of(content), self._plain
        if trained is None:
            return
        if changed := configuration.differences(
            trained["configuration"], now, configuration.training_facts if fits else configuration.network_facts
        ):
            way_out = f"Choose another {'checkpoint' if self.checkpoint_is_given else 'folder'}"
            raise UserError(f"{self._told_apart(path)} is of another configuration: {changed}. {way_out}")
        if not fits:
            return
        epochs, finished = now["trainer"].get("max_epochs"), int(content["epoch"]) + 1
        if epochs is not None and 0 <= epochs < finished:
            raise UserError(f"--trainer.max_epochs: got {epochs}, but {path} has finished {finished}")
        before = configuration.scheduled_epochs(trained["configuration"])
        if before != configuration.scheduled_epochs(now):
            rank_zero_only(print)(
                f"--trainer.max_epochs: {before} before, {epochs} now: the schedule {now['model']['schedule']!r} is"
                f" laid out over {epochs} from epoch {finished + 1} on; {checkpoints.EPOCHS} has the learning rates",
                file=sys.stderr,
            )

    def instantiate_classes(self) -> None:
        checkpoint = self.config[self.subcommand].get("ckpt_path")
        with _built(), contextlib.ExitStack() as limits:
            if self.foreign is not None and checkpoint is not None:  # what is not trusted is no larger than its weights
                size = Path(checkpoint).stat().st_size
                limits.enter_context(within(self._plain["model"]["network"], size, self.tensors))
            super().instantiate_classes()
        check_fit(self.model, self.datamodule, "model.network")
        images = self.config[self.subcommand].get("images")
        if images is not None:
            if not isinstance(self.datamodule, PublishedImages):
                raise UserError(f"--images: got {images}, but {type(self.datamodule).__name__} has none to go by")
            self.datamodule = OwnImages(images, self.datamodule)
        if checkpoint is not None:
            weights = checkpoints.read_checkpoint(Path(checkpoint))["state_dict"]
            load_weights(self.model, weights, self._told_apart(checkpoint))

    def _told_apart(self, path: str | Path) -> str:
        return f"--ckpt_path: {path}" if self.checkpoint_is_given else str(path)

    def _run_subcommand(self, subcommand: str) -> None:
        with self._alone(), as_user_error(ValueError, MisconfigurationException):
            super()._run_subcommand(subcommand)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """One training in a folder at a time, however many processes it has."""
        if not (self.subcommand == "fit" and self.writes and self.trainer.is_global_zero):
            yield
            return
        with checkpoints.made_for_training(self.folder, _PATIENCE):
            if checkpoints.stamp(self.folder / checkpoints.LAST) != self.last:
                raise UserError(f"another process has trained in {self.folder} just now: start again to resume there")
            remove_temporaries(
                self.folder, checkpoints.BEST, checkpoints.LAST, checkpoints.EPOCHS, checkpoints.CONFIGURATION
            )
            yield

    @cached_property
    def _plain(self) -> dict[str, Any]:
        """The configuration as plain values, which takes a tenth of a second to compute."""
        return configuration.plain(self.parser, self.config, self.subcommand)

    @property
    def facts(self) -> dict[str, Any]:
        """The configuration, versions and hardware of a checkpoint or a result of this command."""
        return {"configuration": configuration.essential(self._plain), "versions": versions(), "hardware": hardware()}

    @property
    def epochs(self) -> list[dict[str, Any]]:
        """The rows of ``epochs.csv``, of a training."""
        every: list[Any] = self.trainer.callbacks  # type: ignore[attr-defined]
        return next(callback for callback in every if isinstance(callback, callbacks.EpochHistory)).rows

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        config = self._get(self.config_init, "trainer", default={})
        logger = config.get("logger")
        chosen, plugins = _listed(config.get("callbacks")), _listed(config.get("plugins"))
        training = self.subcommand == "fit" and self.writes
        if training:
            chosen += callbacks.training_callbacks(self.folder, self._plain, self.facts, self.model, self.datamodule)
        else:
            chosen = [callback for callback in chosen if not isinstance(callback, Checkpoint)]
        if self.subcommand == "predict" and self.writes:
            chosen.append(callbacks.PredictionWriter(self.folder / checkpoints.PREDICTIONS))
        if config.get("enable_progress_bar") is not False and not any(isinstance(c, ProgressBar) for c in chosen):
            chosen.append(callbacks.ProgressLine())
        if logger is None:
            logger = TensorBoardLogger(self.folder, name=None, version="tensorboard") if training else False
        return super().instantiate_trainer(
            default_root_dir=str(self.folder),
            logger=logger,
            callbacks=chosen,
            enable_checkpointing=training,
            plugins=[*plugins, checkpoints.AtomicCheckpointIO()],
            **kwargs,
        )

    def after_test(self) -> None:
        """Write what was measured, with everything that it depends on."""
        if not (self.trainer.is_global_zero and self.writes):
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        config, metrics = self.config[self.subcommand], self.trainer.callback_metrics
        facts = {"parameters": count_parameters(self.model.network), "seed": config["seed_everything"]}
        write_result(self.folder, Path(config["ckpt_path"]), metrics, facts, self.facts)


def _listed(given: Any) -> list[Any]:
    """Callbacks or plugins as a list, of which there may be one alone or none."""
    return [*given] if isinstance(given, list) else [given] if given else []


@contextlib.contextmanager
def _built() -> Iterator[None]:
    """Turn any error of the constructors in a configuration into one line."""
    try:
        yield
    except (UserError, OSError):
        raise
    except Exception as error:
        clear = isinstance(error, (NotImplementedError, TypeError, ValueError, MisconfigurationException))
        raise UserError(message_of(error) if clear else f"{type(error).__name__}: {reason_of(error)}") from error


_OPTION = "--pretrained"
_KINDS = {"classification": "images", "segmentation": "fields", "fields": "fields"}


class Measured(NamedTuple):
    """A measurement: the network, the data, their number, and the measures by name."""

    network: str
    data: str
    size: int
    things: str
    numbers: dict[str, float]

    def __str__(self) -> str:
        numbers = (
            f"{name} {100 * value:.2f} %" if name == "accuracy" else f"{name} {value:.4f}"
            for name, value in self.numbers.items()
        )
        return f"{self.network} on the test part of {self.data}: {', '.join(numbers)}, {self.size} {self.things}"


def is_asked_for(arguments: Sequence[str]) -> bool:
    """Whether the options of a command have ``--pretrained``."""
    return any(argument.partition("=")[0] == _OPTION for argument in arguments)


def run_pretrained(arguments: Sequence[str]) -> Measured:
    """Measure a trained network on the test part of its data.

    The ``arguments`` of ``escnn-attention test`` are ``--pretrained`` with a name of
    :func:`escnn_attention.models.list_models`, a folder or a repository, and ``--task``, ``--data``, ``--trainer`` as
    in trainings. Task and data of a name are known, those of a folder are not.
    """
    about = "Measure a network that is trained already."
    parser = ArgumentParser(prog="escnn-attention test", description=about, exit_on_error=False, allow_abbrev=False)
    parser.add_argument(_OPTION, required=True, help="A name of models.list_models(pretrained=True), or a folder.")
    parser.add_argument("--task", type=Task, default="classification", help="What it was trained for.")
    parser.add_subclass_arguments(pl.LightningDataModule, "data", required=False, help="By default those of the name.")
    parser.add_argument("--trainer.accelerator", type=str, default="auto", help="Where to compute: cpu, cuda or mps.")
    parser.add_argument("--trainer.precision", type=str, default="32-true", help="Of the computation.")
    parser.add_argument("--trainer.enable_progress_bar", type=bool, default=True, help="Whether to show one.")
    name: str | None = configuration.known_options(arguments).pretrained
    if not name:
        raise UserError(f"{_OPTION}: needed a name or a folder")
    if recipe_file(name).is_file():
        known = configuration.recipe(name)
        parser.set_defaults({"data": known["data"], "task": known.get("task", "classification")})
    with as_misuse(f"test {_OPTION} {name}"):
        config = parser.parse_args(list(arguments))
    with quiet_lightning(), as_user_error(OSError, ImportError, TypeError, ValueError):
        network = models.from_pretrained(name)
        if config.get("data") is None:
            example = "escnn_attention.training.RotMNIST"
            raise UserError(f"--data: {name} does not say on which data; give a class such as {example}")
        chosen = parser.instantiate_classes(config)
        return _measure(name, network, config.task, chosen.data, config.trainer.as_dict())


def _measure(name: str, network: Any, task: str, data: pl.LightningDataModule, options: dict[str, Any]) -> Measured:
    of_points = isinstance(network, (CloudNetwork, models.HamiltonianNetwork))
    images = isinstance(getattr(network, "num_classes", None), int)
    kind = "points" if of_points else "images" if images else "fields"
    if kind != _KINDS.get(task, "points"):
        raise UserError(f"--task: {name} is a {type(network).__name__}, a network of {kind}, got {task}")
    trainer = pl.Trainer(**options, devices=1, logger=False, enable_checkpointing=False, enable_model_summary=False)
    make: Any = TASKS[task]
    counts = ("num_classes", "num_targets") if task == "point-classification" else ()  # which the network does not tell
    told_by_data = {count: getattr(data, count) for count in counts if hasattr(data, count)}
    model = make(network=network, **told_by_data)
    check_fit(model, data, f"{_OPTION} {name}")
    (found,) = trainer.test(model, data, verbose=False)
    # The data modules of this package have a sampler that knows how many of the data it is for.
    loaders: Any = trainer.test_dataloaders
    loaders = loaders if isinstance(loaders, list) else [loaders]
    size = sum(getattr(loader.sampler, "length", len(loader.dataset)) for loader in loaders)
    numbers = {key.removeprefix("test_"): value for key, value in found.items()}
    best_first = dict(sorted(numbers.items(), key=lambda item: item[0] == "loss"))
    return Measured(name, type(data).__name__, size, getattr(data, "things", "images"), best_first)
