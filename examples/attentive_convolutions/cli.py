"""The command line."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from examples.attentive_convolutions import tables
from examples.experiments.options import Out, Small, training_command
from examples.experiments.report import execute_all
from examples.experiments.runs import Run

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)

_OUT = Path("runs/attentive_convolutions")


class Data(str, Enum):
    """The training data of the DenseNets of Table 3."""

    pcam = "pcam"
    cifar10 = "cifar10"


@training_command(app)
def table1(
    small: Small = False,
    out: Out = _OUT,
    recipe: Annotated[
        bool, typer.Option("--recipe", help="Train by the recipe of docs/training_attention.md, 15 epochs.")
    ] = False,
    **training: Any,
) -> None:
    """Table 1: rotated MNIST, the p4-CNN, its attentive versions, and larger ones."""
    if recipe and small:
        raise typer.BadParameter("the small version has it already", param_hint="--recipe")
    _execute("table1-recipe" if recipe else "table1", tables.table_1(small, recipe), small, out, training)


@training_command(app)
def table2(
    small: Small = False,
    out: Out = _OUT,
    learning_rate: Annotated[
        float | None,
        typer.Option(help="Learning rate of the All-CNNs; the paper has the best of 0.01, 0.05, 0.1, 0.25.", min=0.0),
    ] = None,
    **training: Any,
) -> None:
    """Table 2: CIFAR-10 and CIFAR-10+, the All-CNN-C and the ResNet44."""
    if learning_rate is not None and small:
        raise typer.BadParameter("the small version has an optimiser of its own", param_hint="--learning-rate")
    name = "table2" if learning_rate is None else f"table2-lr{learning_rate:g}"
    _execute(name, tables.table_2(small, learning_rate), small, out, training)


@training_command(app)
def table3(
    small: Small = False,
    out: Out = _OUT,
    data: Annotated[
        Data,
        typer.Option(
            help="PatchCamelyon, 8 GB; or with --small two classes of CIFAR-10 in its place, with which nothing of the "
            "paper is compared."
        ),
    ] = Data.pcam,
    **training: Any,
) -> None:
    """Table 3: PatchCamelyon, the DenseNet."""
    if data is not Data.pcam and not small:
        raise typer.BadParameter("it takes the place of PatchCamelyon in the small version only", param_hint="--data")
    name = "table3" if data is Data.pcam else f"table3-{data.value}"
    _execute(name, tables.table_3(small, data.value), small, out, training)


@app.command()
def costs(
    out: Out = _OUT,
    fields: Annotated[int, typer.Option(min=1, help="Regular fields of C4.")] = 10,
    size: Annotated[int, typer.Option(min=3, help="The side of the grid.")] = 24,
    batch: Annotated[int, typer.Option(min=1, help="Images.")] = 16,
) -> None:
    """Compare the kinds of attention: time, memory and parameters of a layer, on this CPU."""
    from examples.attentive_convolutions.costs import table

    lines = []
    for line in table(fields, size, batch):
        typer.echo(line)
        lines.append(line)
    out.mkdir(parents=True, exist_ok=True)
    (out / "costs.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _execute(name: str, runs: list[Run], small: bool, out: Path, training: dict[str, Any]) -> None:
    execute_all(name, runs, out, small=tables.SMALL[name] if small else None, **training)
