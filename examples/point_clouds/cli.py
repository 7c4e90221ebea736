"""The command line."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from examples.experiments.options import Folder, Out, Small, training_command

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)

_OUT = Path("runs/point_clouds")


class Solver(str, Enum):
    """The source of the trajectories of the springs."""

    exact = "exact"
    rk4 = "rk4"


@training_command(app, "epochs", "seed", "seeds", "accelerator")
def constellations(small: Small = False, out: Out = _OUT, **training: Any) -> None:
    """Count patterns in the plane: accuracy, also on rotated clouds."""
    _run("constellations", out, small, None, training)


@training_command(app, "epochs", "seed", "seeds", "accelerator")
def springs(
    small: Small = False,
    out: Out = _OUT,
    solver: Annotated[
        Solver | None,
        typer.Option(
            help="Solver: exact, by eigenvectors; rk4, as published.",
            show_default="rk4, exact with --small",
        ),
    ] = None,
    **training: Any,
) -> None:
    """Learn the potential of six bodies from their motion: errors and energy of roll-outs."""
    changes = {} if solver is None else {"solver": solver.value}
    _run("springs", out, small, None, training, changes)


@training_command(app, "epochs", "seed", "seeds", "accelerator")
def qm9(small: Small = False, out: Out = _OUT, data_dir: Folder = None, **training: Any) -> None:
    """Properties of molecules: μ, α, the HOMO, and the polarizability as a tensor."""
    _run("qm9", out, small, data_dir, training)


def _run(
    name: str,
    out: Path,
    small: bool,
    data_dir: Path | None,
    training: dict[str, Any],
    data: dict[str, Any] | None = None,
) -> None:
    # Imported late, so that --help and errors in the options are fast.
    from escnn_attention.training.errors import UserError
    from examples.point_clouds.report import run_all

    try:
        run_all(name, out, small=small, data_dir=data_dir, data=data, **training)
    except UserError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
