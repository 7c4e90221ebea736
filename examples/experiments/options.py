"""Options of the commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Small = Annotated[
    bool, typer.Option("--small", help="Few images, few epochs, narrow networks: minutes on a CPU, and says so.")
]
Out = Annotated[Path, typer.Option(help="Folder for everything that is written; started again, a command goes on.")]
Folder = Annotated[Path | None, typer.Option(help="Folder of the data sets.", show_default="$ESCNN_ATTENTION_DATA")]
Epochs = Annotated[int | None, typer.Option(min=1, help="Epochs in place of the paper's (or of the small version's).")]
Seed = Annotated[int, typer.Option(min=0, help="Of weights, order and dropout.")]
Seeds = Annotated[
    int, typer.Option(min=1, help="Train every network so many times, from --seed upwards: mean ± standard deviation.")
]
Accelerator = Annotated[str, typer.Option(help="As Lightning's: auto, cpu, gpu.")]
