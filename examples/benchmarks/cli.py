"""The command line."""

from __future__ import annotations

import sys
from enum import Enum
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

_STEPS = {"rotmnist-p4": "networks:step_rotmnist", "d4-96": "networks:step_d4"}  # by --case

COMMANDS = {
    "layers": ("single layers against published implementations, R2Conv and plain attention", "layers:layers"),
    "backends": ("the same layers with every backend that supports them", "layers:backends"),
    "scaling": ("curves over the size of the image and of the group", "growth:scaling"),
    "dense": ("attention that factorises against plain attention", "attention:dense"),
    "rotary": (
        "attention within frames against Platonic Transformers, and one score for all poses",
        "attention:rotary",
    ),
    "blocks": (
        "pre-norm blocks in irreps against expanded weights, PyTorch's own block and octic ViTs",
        "attention:blocks",
    ),
    "step": ("a training step, and its profile", *_STEPS.values()),
    "fields": ("networks from fields to fields against those without a group", "networks:fields"),
    "attentive": (
        "networks of attentive group convolutions against the published ones and without attention",
        *("networks:attentive", "networks:attentive_large"),
    ),
    "points": (
        "point clouds against the LieTransformer and the number of edges, and training",
        *("points:networks", "growth:edges", "points:large"),
    ),
    "frames": ("points within octahedral frames against Platonic Transformers", "points:frames"),
    "graphs": ("layers as CUDA graphs", "graphs:graphs"),
    "networks": ("training steps of networks as CUDA graphs", "graphs:networks"),
    "others": ("cross-attention, sequences and tori, also as CUDA graphs", "graphs:others"),
    "compile": ("the gain of torch.compile", "attention:compiled"),
    "files": ("exported files against their layers", "files:files"),
    "ceilings": ("the layers against the peak of the device", "layers:ceilings"),
}
"""The commands: what they measure, and their functions, which are imported late so that --help is fast."""

_HELP = ["Measure time and memory of the attention layers, forward and backward."]
_HELP += [f"{name}: {what}." for name, (what, *_) in COMMANDS.items()]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
Command = Enum("Command", {name: name for name in (*COMMANDS, "all")}, type=str)


def _option(panel: str, help: str, **more: Any) -> Any:
    return typer.Option(help=help, rich_help_panel=panel, **more)


_step = partial(_option, "The command step")
_condition = partial(_option, "Conditions")
_checkout = partial(_option, "Checkouts of reference implementations", exists=True, file_okay=False, resolve_path=True)


@app.command(help="\n\n".join([*_HELP, "all: all of them, with one summary of the targets."]))
def benchmark(
    command: Annotated[Command, typer.Argument(help="What to measure.", show_default=False)],
    out: Annotated[Path, typer.Option(help="Folder for JSON and pictures.")] = Path("runs/benchmarks"),
    quick: Annotated[
        bool, typer.Option("--quick", help="Tiny sizes in one process: a check, whose numbers mean nothing.")
    ] = False,
    g_selfatt: Annotated[Path | None, _checkout("GSA-Nets, for layers.")] = None,
    gevit: Annotated[Path | None, _checkout("GE-ViT, for layers.")] = None,
    platonic: Annotated[Path | None, _checkout("Platonic Transformers, for rotary and frames.")] = None,
    octic_vits: Annotated[Path | None, _checkout("Octic ViTs, for blocks.")] = None,
    att_gconvs: Annotated[Path | None, _checkout("Attentive group convolutions, for attentive.")] = None,
    lie_transformer: Annotated[Path | None, _checkout("The LieTransformer, with its submodule, for points.")] = None,
    case: Annotated[Literal["rotmnist-p4", "d4-96"] | None, _step("The network; both if none is given.")] = None,
    query: Annotated[Literal["own", "all"], _step("Whose queries contribute to a pose.")] = "all",
    device: Annotated[Literal["cpu", "cuda"], _condition("Where to compute.")] = "cpu",
    dtype: Annotated[Literal["float32", "float64", "bfloat16"], _condition("The precision.")] = "float32",
    threads: Annotated[int, _condition("Threads that torch may use.", min=1)] = 2,
    repeats: Annotated[int, _condition("Processes for each subject, in turn; curves have one.", min=1)] = 3,
    seed: Annotated[int, _condition("Of weights and inputs.", min=0)] = 0,
) -> None:
    """Measure, print and write."""
    import torch

    from examples.benchmarks.measure import Conditions
    from examples.benchmarks.references import CheckoutError, check
    from examples.benchmarks.report import Run, summary

    given = {"g_selfatt": g_selfatt, "gevit": gevit, "platonic": platonic, "octic_vits": octic_vits}
    given |= {"att_gconvs": att_gconvs, "lie_transformer": lie_transformer}
    checkouts = {name: str(path) for name, path in given.items() if path is not None}
    if device == "cuda" and not torch.cuda.is_available():
        _refuse("--device cuda: torch finds no CUDA device")
    conditions = Conditions(device, dtype, threads, seed, repeats)
    conditions = conditions.hurried() if quick else conditions
    try:
        check(checkouts, conditions)
    except CheckoutError as error:
        _refuse(str(error))
    functions = [f for name, (_, *listed) in COMMANDS.items() if command in (name, "all") for f in listed]
    functions = [f for f in functions if case is None or f == _STEPS[case] or f not in _STEPS.values()]
    console = Console()
    if not console.is_terminal:
        console.width = 120
    reports = []
    with console.status("starting") as status:
        # What is measured stays where a run is cut off.
        say = status.update if console.is_terminal else partial(print, file=sys.stderr, flush=True)
        run = Run(conditions, out, checkouts, query, say)
        for function in functions:
            reports.append(resolve_name(f"examples.benchmarks.{function}")(run))
            reports[-1].publish(console)
        if command == "all":
            summary(reports).publish(console)


def _refuse(message: str) -> None:
    Console(stderr=True).print(f"error: {message}", style="red", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(2)
