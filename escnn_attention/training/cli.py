"""The command line ``escnn-attention``, which SIGTERM (of a scheduler) or SIGINT (Ctrl-C) stops."""

from __future__ import annotations

import contextlib
import inspect
import os
import shlex
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from typer.core import TyperGroup

from escnn_attention import __version__
from escnn_attention.training.comparison import Settings, unset

_PROGRAM = "escnn-attention"
_MisuseError: Any = typer.BadParameter.__bases__[0]  # of the click that typer uses, which may be its own
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_AT_ONCE = 1.0  # seconds: who stops a group of processes may send the signal to each of them twice


@contextlib.contextmanager
def stoppable(say: Callable[[str], None]) -> Iterator[None]:
    """Raise a :class:`KeyboardInterrupt` in the block at SIGTERM or SIGINT, and end the process once it has unwound.

    The exit status is 128 + the number of the signal, 143 or 130, as shells have it, whatever other error or exit the
    block makes of the interrupt. A signal that the process ignores stays ignored. Outside the main thread nothing
    changes. ``say`` is called with the name of the signal before the process ends.

    >>> try:
    ...     with stoppable(print):
    ...         signal.raise_signal(signal.SIGTERM)
    ... except SystemExit as ended:
    ...     print(ended.code)
    SIGTERM
    143
    """
    received: list[tuple[int, float]] = []

    def stop(number: int, frame: FrameType | None) -> None:
        again = bool(received) and time.monotonic() - received[-1][1] < _AT_ONCE
        received.append((number, time.monotonic()))
        if not again:
            raise KeyboardInterrupt

    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    is_main = threading.current_thread() is threading.main_thread()
    before = {number: handler for number, handler in handlers.items() if is_main and handler != signal.SIG_IGN}
    try:
        for number in before:
            signal.signal(number, stop)
        yield
    except BaseException as error:
        ended_well = isinstance(error, SystemExit) and not error.code
        if not received or ended_well:
            raise
        say(signal.Signals(received[0][0]).name)
        raise SystemExit(128 + received[0][0]) from error
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Commands(TyperGroup):
    """The commands, with one line for misuse and for signals."""

    def main(self, args: Sequence[str] | None = None, **options: Any) -> NoReturn:  # type: ignore[override]
        given = list(sys.argv[1:] if args is None else args)
        with stoppable(lambda name: _say_stopped(name, given)), warnings.catch_warnings():
            # escnn warns at import that an optional package, which no finite group on the plane needs, is missing.
            warnings.filterwarnings("ignore", message=".*py3nj.*")
            try:
                status = super().main(given or ["--help"], **{**options, "standalone_mode": False})
            except _MisuseError as error:
                path = _PROGRAM if error.ctx is None else error.ctx.command_path
                _print_error(f"error: {error.format_message().rstrip('.')} (see {path} --help)")
                status = 2
            sys.exit(status)


def _say_stopped(name: str, given: Sequence[str]) -> None:
    """Print the command that resumes after a signal, in one of the processes of a training."""
    from lightning_utilities.core.rank_zero import rank_zero_only

    if getattr(rank_zero_only, "rank", None):
        return
    # With --restart, the command would move the run aside.
    command = shlex.join([_PROGRAM, *(word for word in given if word != "--restart")])
    trains = given[:1] in (["fit"], ["compare"])
    way_on = "finished epochs are kept, and this resumes" if trains else "this starts again"
    _print_error(f"stopped by {name}; {way_on}: {command}")


def _print_error(message: str) -> None:
    Console(stderr=True).print(message, style="red", markup=False, highlight=False, soft_wrap=True)


app = typer.Typer(cls=_Commands, add_completion=False, pretty_exceptions_enable=False)


def _say_version(asked: bool) -> None:
    if asked:
        print(f"{_PROGRAM} {__version__}")
        raise typer.Exit


@app.callback()
def describe(
    version: Annotated[
        bool, typer.Option("--version", help="Say which version this is.", callback=_say_version, is_eager=True)
    ] = False,
) -> None:
    """Group equivariant attention for escnn."""


def _with_settings(function: Callable[..., None]) -> Callable[..., None]:
    """Give a function the fields of :class:`Settings` as options: typer reads them off a signature."""
    function.__signature__ = inspect.signature(Settings, eval_str=True)  # type: ignore[attr-defined]
    return function


@app.command()
@_with_settings
def compare(**options: Any) -> None:
    """Train four networks on upright images and compare them on upright and on rotated ones.

    A CNN that is not equivariant, a steerable CNN, a hybrid of steerable convolutions and group self-attention, and a
    stand-alone group self-attention network, all with about the same number of parameters.

    Started again, the command resumes where it was stopped or killed: no finished epoch is run again.
    """
    console, settings = Console(), Settings(**options)
    # Imported late: --help and mistakes in the options need nothing of it.
    with console.status("loading torch, escnn and Lightning"):
        import torch

        from escnn_attention.training.comparison.compare import compare as run
        from escnn_attention.training.comparison.compare import result_table
        from escnn_attention.training.errors import UserError
    if settings.threads is not None or "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(settings.threads or 1)  # networks so small hardly gain from a second one
    try:
        results = run(settings)
    except UserError as error:
        _fail(error)
    console.print(result_table(results))
    console.print(f"written: {settings.folder / 'results.csv'}", markup=False, highlight=False, soft_wrap=True)


_LIGHTNING: dict[str, Any] = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
_EXPERIMENTS = {
    "fit": "Train a network from a configuration file or a recipe; --help lists the options.",
    "validate": "Measure a trained network on the validation part of its data.",
    "test": "Measure a trained network on the test part of its data, and keep the result.\n\n"
    "--pretrained NAME_OR_FOLDER measures a network that save_pretrained wrote, and prints its accuracy.",
    "predict": "Write the predictions of a trained network for the test part of its data.",
}


def _run_experiment(context: typer.Context) -> None:
    from escnn_attention.training.errors import UserError
    from escnn_attention.training.experiment.command import is_asked_for, run_experiment, run_pretrained

    try:
        if context.info_name == "test" and is_asked_for(context.args):
            print(run_pretrained(context.args))
        else:
            run_experiment([str(context.info_name), *context.args])
    except UserError as error:
        _fail(error)


for _name, _help in _EXPERIMENTS.items():
    app.command(_name, help=_help, context_settings=_LIGHTNING, add_help_option=False)(_run_experiment)


@app.command()
def export(
    source: Annotated[
        str,
        typer.Argument(
            metavar="RUN_OR_NAME",
            help="The folder of a training, a checkpoint in it, a folder that save_pretrained wrote, or a name of"
            " models.list_models(pretrained=True).",
        ),
    ],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What to write: NAME.onnx or NAME.pt2.")],
    size: Annotated[
        str | None, unset("Positions of images and fields along every axis, or along each: 32x64.", "those of the data")
    ] = None,
    opset: Annotated[int | None, unset("Version of ONNX's operators.", "20")] = None,
    compiled: Annotated[
        bool, typer.Option("--compiled", help="Compile NAME.pt2 for processors like this one: the fastest.")
    ] = False,
    replace: Annotated[bool, typer.Option("--replace", help="Replace FILE if it is there.")] = False,
) -> None:
    """Write a trained network to a file that needs neither this package nor escnn, and check it.

    The file is given random images, fields or clouds, and the same transformed by the group, before it takes its place.
    """
    console = Console()
    with console.status("loading torch and escnn"):
        from escnn_attention.training.errors import UserError
        from escnn_attention.training.experiment.export import export_network, size_from
    try:
        with console.status(f"exporting {file.name}"):
            sides = None if size is None else size_from(size)
            written = export_network(source, file, size=sides, opset=opset, compiled=compiled, replace=replace)
    except UserError as error:
        _fail(error)
    takes = "" if len(written.inputs) == 1 else f": {', '.join(written.inputs)}"
    found = "equivariance: not measured, the network has no group"
    if written.report is not None:
        found = str(written.report).splitlines()[-1].replace("equivariant", "the file is equivariant", 1)
    for line in (
        f"{written.file}: {written.num_bytes / 1e6:.2f} MB, for any number of {written.things}{takes}",
        f"values: as those of the network, to {written.error:.1e} of the largest",
        found,
    ):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _fail(error: Exception) -> NoReturn:
    _print_error(f"error: {error}")
    raise typer.Exit(2) from error


def main() -> None:
    """Entry point of the command ``escnn-attention``."""
    app(prog_name=_PROGRAM)


if __name__ == "__main__":
    main()
