"""Options of the commands."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

Small = Annotated[bool, typer.Option("--small", help="Few images, few epochs, narrow networks: minutes on a CPU.")]
Out = Annotated[Path, typer.Option(help="Folder for all output; running the command again resumes it.")]
Folder = Annotated[Path | None, typer.Option(help="Folder of the data sets.", show_default="$ESCNN_ATTENTION_DATA")]
Epochs = Annotated[int | None, typer.Option(min=1, help="Epochs, instead of the paper's (or the small version's).")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of weights, order and dropout.")]
Seeds = Annotated[
    int, typer.Option(min=1, help="Number of seeds for every network, from --seed on: mean ± standard error.")
]
Accelerator = Annotated[str, typer.Option(help="Lightning's accelerator: auto, cpu, gpu.")]
Only = Annotated[
    list[str] | None, typer.Option(help="Train only the network with this label in the table; repeatable.")
]


_TRAINING: dict[str, tuple[Any, Any]] = {
    "data_dir": (Folder, None),
    "epochs": (Epochs, None),
    "seed": (Seed, 0),
    "seeds": (Seeds, 1),
    "accelerator": (Accelerator, "auto"),
    "only": (Only, None),
}
"""The options that trainings have, and their defaults."""


def training_command(app: typer.Typer, *names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add a function as a command whose ``**training`` are the training options of these names, or all."""

    def add(function: Callable[..., None]) -> Callable[..., None]:
        *own, _ = inspect.signature(function, eval_str=True).parameters.values()
        kind = inspect.Parameter.KEYWORD_ONLY
        for name in names or _TRAINING:
            annotation, default = _TRAINING[name]
            own.append(inspect.Parameter(name, kind, default=default, annotation=annotation))

        @functools.wraps(function)
        def command(**given: Any) -> None:
            function(**given)

        command.__signature__ = inspect.Signature(own)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in own}
        app.command()(command)
        return function

    return add
