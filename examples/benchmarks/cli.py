"""The command line."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from examples.benchmarks.conditions import Conditions
from examples.benchmarks.report import Report, summary
from examples.benchmarks.run import Options, UnusableError, run

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_REFERENCES = "Checkouts of reference implementations"
_CONDITIONS = "Conditions"
_STEP = "The command step"


class Command(str, Enum):
    """What to measure."""

    layers = "layers"
    backends = "backends"
    scaling = "scaling"
    dense = "dense"
    rotary = "rotary"
    step = "step"
    attentive = "attentive"
    points = "points"
    compile = "compile"
    ceilings = "ceilings"
    all = "all"


class Device(str, Enum):
    """Where to compute."""

    cpu = "cpu"
    cuda = "cuda"


class Precision(str, Enum):
    """In which precision."""

    float32 = "float32"
    float64 = "float64"
    bfloat16 = "bfloat16"


class Case(str, Enum):
    """The networks of ``step``."""

    rotmnist_p4 = "rotmnist-p4"
    d4_96 = "d4-96"


class Query(str, Enum):
    """Whose queries contribute to a pose."""

    own = "own"
    all = "all"


@app.command()
def benchmark(
    command: Annotated[Command, typer.Argument(help="What to measure.", show_default=False)],
    out: Annotated[Path, typer.Option(help="Folder for JSON and pictures.")] = Path("runs/benchmarks"),
    quick: Annotated[
        bool, typer.Option("--quick", help="Tiny sizes, in one process: shows that it runs; the numbers mean nothing.")
    ] = False,
    g_selfatt: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, help="GSA-Nets, for layers.", rich_help_panel=_REFERENCES),
    ] = None,
    gevit: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, help="GE-ViT, for layers.", rich_help_panel=_REFERENCES),
    ] = None,
    platonic: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            file_okay=False,
            help="Platonic Transformers, for rotary and points.",
            rich_help_panel=_REFERENCES,
        ),
    ] = None,
    att_gconvs: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            file_okay=False,
            help="Attentive group convolutions, for attentive.",
            rich_help_panel=_REFERENCES,
        ),
    ] = None,
    lie_transformer: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, help="The LieTransformer, for points.", rich_help_panel=_REFERENCES),
    ] = None,
    lie_conv: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            file_okay=False,
            help="The fork of LieConv that the LieTransformer needs.",
            show_default="LieConv in its checkout",
            rich_help_panel=_REFERENCES,
        ),
    ] = None,
    case: Annotated[Case | None, typer.Option(help="The network.", show_default="both", rich_help_panel=_STEP)] = None,
    query: Annotated[
        Query, typer.Option(help="Whose queries contribute to a pose.", rich_help_panel=_STEP)
    ] = Query.all,
    device: Annotated[Device, typer.Option(help="Where to compute.", rich_help_panel=_CONDITIONS)] = Device.cpu,
    dtype: Annotated[Precision, typer.Option(help="The precision.", rich_help_panel=_CONDITIONS)] = Precision.float32,
    threads: Annotated[
        int, typer.Option(min=1, help="Threads that torch may use.", rich_help_panel=_CONDITIONS)
    ] = Conditions.threads,
    repeats: Annotated[
        int,
        typer.Option(
            min=1,
            help="Processes for each subject, in turn with the others; curves have one.",
            rich_help_panel=_CONDITIONS,
        ),
    ] = Conditions.repeats,
    seed: Annotated[
        int, typer.Option(min=0, help="Of weights and inputs.", rich_help_panel=_CONDITIONS)
    ] = Conditions.seed,
) -> None:
    """Measure time and memory of the attention layers, forward and backward.

    layers: single layers against published implementations, R2Conv and plain attention.

    backends: the same layers with every backend that can serve them.

    scaling: curves over the size of the image and of the group.

    dense: attention that factorises against plain attention.

    rotary: attention within frames against Platonic Transformers.

    step: a step of training, and where its time goes.

    attentive: networks of attentive group convolutions against the published ones and without attention.

    points: point clouds against the LieTransformer, Platonic Transformers and the number of edges, and training.

    compile: what torch.compile gains.

    ceilings: what the layers reach of what the device can do.

    all: all of them, with one summary of the targets.
    """
    console = Console()
    if not console.is_terminal:
        console.width = 120
    conditions = Conditions(device=device.value, dtype=dtype.value, threads=threads, seed=seed, repeats=repeats)
    options = Options(
        conditions.hurried() if quick else conditions,
        out,
        g_selfatt=_path(g_selfatt),
        gevit=_path(gevit),
        platonic=_path(platonic),
        att_gconvs=_path(att_gconvs),
        lie_transformer=_path(lie_transformer),
        lie_conv=_path(lie_conv),
        network=None if case is None else case.value,
        query=query.value,
    )
    try:
        options.check()
    except UnusableError as error:
        Console(stderr=True).print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(2) from error
    reports = []
    with console.status("starting") as status:
        for report in run(command.value, options, lambda message: status.update(message)):
            report.show(console)
            reports.append(report)
            _write(report, options, console)
        if command == Command.all:
            total = summary(reports)
            total.show(console)
            _write(total, options, console)


def _path(checkout: Path | None) -> str | None:
    # Absolute: other processes run in other folders.
    return None if checkout is None else str(checkout.resolve())


def _write(report: Report, options: Options, console: Console) -> None:
    path = report.write(options.folder)
    console.print(f"written: {path}\n", markup=False, highlight=False, soft_wrap=True)
