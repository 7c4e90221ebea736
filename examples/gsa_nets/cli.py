"""The command line."""

from __future__ import annotations

import functools
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from examples.experiments.options import Out, Small, training_command
from examples.experiments.report import execute_all, marked
from examples.gsa_nets import tables

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)

_OUT = Path("runs/gsa_nets")


class Data(str, Enum):
    """The data sets of Table 2."""

    rotmnist = "rotmnist"
    cifar10 = "cifar10"
    pcam = "pcam"


@training_command(app)
def table1(small: Small = False, out: Out = _OUT, **training: Any) -> None:
    """Table 1 and Figure 3, of the first seed: accuracy against the size of the neighbourhood."""
    from examples.gsa_nets.figures import draw_curves

    caption = tables.SMALL if small else None
    name = marked("figure3", caption, training["seed"], training["seeds"])
    draw = functools.partial(draw_curves, out / f"{name}.png")
    execute_all("table1", tables.table_1(small), out, small=caption, draw=draw, **training)


@training_command(app)
def table2(
    data: Annotated[Data, typer.Option(help="The data set.")] = Data.rotmnist,
    small: Small = False,
    out: Out = _OUT,
    stand_in: Annotated[
        bool,
        typer.Option(
            "--stand-in",
            help="With --data pcam --small: two classes of CIFAR-10 instead of PatchCamelyon, which is 8 GB; not "
            "comparable with the paper.",
        ),
    ] = False,
    **training: Any,
) -> None:
    """Table 2: discretisations of the group, beside convolutional twins and hybrids with as many parameters."""
    if stand_in and (data is not Data.pcam or not small):
        raise typer.BadParameter("is for --data pcam --small only", param_hint="--stand-in")
    runs = tables.table_2(data.value, small, stand_in)
    name = f"table2-{data.value}" + ("-stand-in" if stand_in else "")
    execute_all(name, runs, out, small=tables.SMALL if small else None, **training)


@app.command()
def figure1(out: Out = _OUT) -> None:
    """Figure 1: the effect of rotations of the input on the feature maps of a network."""
    from examples.gsa_nets.figures import draw_feature_maps

    out.mkdir(parents=True, exist_ok=True)
    draw_feature_maps(out / "figure1.png")


@app.command()
def figure2(out: Out = _OUT) -> None:
    """Figure 2: steerability of attention and of interpolated convolution kernels."""
    from examples.gsa_nets.figures import draw_steerability

    out.mkdir(parents=True, exist_ok=True)
    draw_steerability(out / "figure2.png")
