"""The command line."""

from __future__ import annotations

import functools
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from examples.experiments.options import Out, Seeds, training_command
from examples.experiments.report import execute_all, marked
from examples.recipes import tables

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)

_OUT = Path("runs/recipes")
_ATTENTIVE = ("hybrid-rotmnist", "gsa-net-rotmnist", "hybrid-digits", "gsa-net-digits")


class Network(str, Enum):
    """The networks of the ablations."""

    steerable = "steerable"
    hybrid = "hybrid"
    gsa_net = "gsa-net"


@training_command(app)
def rotmnist(
    out: Out = _OUT,
    full_train: Annotated[
        bool, typer.Option("--full-train", help="Train on the validation images too; no figure.")
    ] = False,
    **training: Any,
) -> None:
    """Rotated MNIST: steerable convolutions, hybrid and attention alone, as a table and a figure."""
    from examples.recipes.figures import draw_accuracies

    if full_train:
        execute_all("rotmnist-full-train", tables.rotmnist(full_train=True), out, **training)
        return
    name = marked("rotmnist", None, training["seed"], training["seeds"])
    draw = functools.partial(draw_accuracies, out / f"{name}.png")
    execute_all("rotmnist", tables.rotmnist(), out, draw=draw, **training)


@training_command(app)
def short(out: Out = _OUT, **training: Any) -> None:
    """Rotated MNIST in five epochs with half of the parameters."""
    execute_all("rotmnist-short", tables.short(), out, **training)


@app.command()
def ablations(
    out: Out = _OUT / "ablations",
    networks: Annotated[list[Network] | None, typer.Option(help="Which networks.", show_default="all")] = None,
    seeds: Seeds = 3,
    group: Annotated[str, typer.Option(help="cN or dN.")] = "c8",
    epochs: Annotated[int, typer.Option(min=1)] = 10,
    limit_train: Annotated[int | None, typer.Option(min=1, help="Train on the first so many digits.")] = None,
    limit_test: Annotated[int | None, typer.Option(min=1, help="Test on the first so many digits.")] = None,
) -> None:
    """Change one part of a recipe at a time, on handwritten digits: about forty minutes on one core."""
    from examples.recipes.ablations import measure

    names = [network.value for network in networks or Network]
    measure(out, names, seeds=seeds, group=group, epochs=epochs, limit_train=limit_train, limit_test=limit_test)


@app.command()
def heads(
    names: Annotated[
        list[str] | None, typer.Argument(help="Networks that have weights.", show_default=", ".join(_ATTENTIVE))
    ] = None,
    out: Out = _OUT / "heads",
    images: Annotated[int, typer.Option(min=1, help="Number of test images.")] = 32,
) -> None:
    """The effective number of keys of each head before and after training: the exponential of its entropy."""
    from examples.recipes.heads import measure

    Console(soft_wrap=True).print(measure(out, names or list(_ATTENTIVE), images), highlight=False, markup=False)
