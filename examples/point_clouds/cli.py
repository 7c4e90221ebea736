"""The command line."""

from __future__ import annotations

from pathlib import Path

import typer

from examples.experiments.options import Accelerator, Epochs, Folder, Out, Seed, Small

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)

_OUT = Path("runs/point_clouds")


@app.command()
def constellations(
    small: Small = False,
    out: Out = _OUT,
    data_dir: Folder = None,
    epochs: Epochs = None,
    seed: Seed = 0,
    accelerator: Accelerator = "auto",
) -> None:
    """Count patterns in the plane: accuracy, also on turned clouds."""
    _run("constellations", out, small, data_dir, epochs, seed, accelerator)


@app.command()
def springs(
    small: Small = False,
    out: Out = _OUT,
    data_dir: Folder = None,
    epochs: Epochs = None,
    seed: Seed = 0,
    accelerator: Accelerator = "auto",
) -> None:
    """Learn the potential of six bodies from their motion: errors of roll-outs, and the energy."""
    _run("springs", out, small, data_dir, epochs, seed, accelerator)


@app.command()
def qm9(
    small: Small = False,
    out: Out = _OUT,
    data_dir: Folder = None,
    epochs: Epochs = None,
    seed: Seed = 0,
    accelerator: Accelerator = "auto",
) -> None:
    """Properties of molecules: μ, α, the HOMO, and the polarizability as a tensor."""
    _run("qm9", out, small, data_dir, epochs, seed, accelerator)


@app.command()
def shapes(
    small: Small = False,
    out: Out = _OUT,
    data_dir: Folder = None,
    epochs: Epochs = None,
    seed: Seed = 0,
    accelerator: Accelerator = "auto",
) -> None:
    """Classify solids that stand upright in training, and lie anyhow in the test."""
    _run("shapes", out, small, data_dir, epochs, seed, accelerator)


def _run(
    name: str, out: Path, small: bool, data_dir: Path | None, epochs: int | None, seed: int, accelerator: str
) -> None:
    # Imported late: --help and mistakes in the options are answered at once.
    from examples.point_clouds.report import run_all

    out.mkdir(parents=True, exist_ok=True)
    run_all(name, out, small=small, data_dir=data_dir, epochs=epochs, seed=seed, accelerator=accelerator)
