"""The command line."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from examples.gsa_nets import tables
from examples.gsa_nets.runs import DATA, Run, execute

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


class Data(str, Enum):
    """The data sets of Table 2."""

    rotmnist = "rotmnist"
    cifar10 = "cifar10"
    pcam = "pcam"


Small = Annotated[
    bool, typer.Option("--small", help="Few images, few epochs, narrow networks: minutes on a CPU, and says so.")
]
Out = Annotated[Path, typer.Option(help="Folder for everything that is written; started again, a command goes on.")]
Folder = Annotated[Path | None, typer.Option(help="Folder of the data sets.", show_default="$ESCNN_ATTENTION_DATA")]
Epochs = Annotated[int | None, typer.Option(min=1, help="Epochs in place of the paper's (or of the small version's).")]
Seed = Annotated[int, typer.Option(min=0, help="Of weights, order and dropout.")]
Accelerator = Annotated[str, typer.Option(help="As Lightning's: auto, cpu, gpu.")]


@app.command()
def table1(
    small: Small = False,
    out: Out = Path("runs/gsa_nets"),
    data_dir: Folder = None,
    epochs: Epochs = None,
    seed: Seed = 0,
    accelerator: Accelerator = "auto",
) -> None:
    """Table 1 and Figure 3: accuracy against the size of the neighbourhood."""
    runs = tables.table_1(small)
    results = _execute("table1", runs, small, out, data_dir, epochs, seed, accelerator)
    from examples.gsa_nets.figures import draw_curves

    draw_curves(out / _suffix("figure3", small), runs, results)


@app.command()
def table2(
    data: Annotated[Data, typer.Option(help="The data set.")] = Data.rotmnist,
    small: Small = False,
    out: Out = Path("runs/gsa_nets"),
    data_dir: Folder = None,
    epochs: Epochs = None,
    seed: Seed = 0,
    accelerator: Accelerator = "auto",
) -> None:
    """Table 2: discretisations of the group, beside convolutional twins and hybrids of as many parameters."""
    runs = tables.table_2(data.value, small)
    _execute(f"table2-{data.value}", runs, small, out, data_dir, epochs, seed, accelerator)


@app.command()
def figure1(out: Out = Path("runs/gsa_nets")) -> None:
    """Figure 1: what rotations of the input do to the feature maps of a network."""
    from examples.gsa_nets.figures import draw_feature_maps

    out.mkdir(parents=True, exist_ok=True)
    draw_feature_maps(out / "figure1.png")


@app.command()
def figure2(out: Out = Path("runs/gsa_nets")) -> None:
    """Figure 2: steerability of attention, against convolution kernels that are interpolated."""
    from examples.gsa_nets.figures import draw_steerability

    out.mkdir(parents=True, exist_ok=True)
    draw_steerability(out / "figure2.png")


def _suffix(name: str, small: bool) -> str:
    return f"{name}-small.png" if small else f"{name}.png"


# Images to train, validate and test on in the small version.
_SMALL_DATA = {
    f"{DATA}.limit_train": 600,
    f"{DATA}.limit_valid": 500,
    f"{DATA}.limit_test": 1000,
    f"{DATA}.batch_size": 16,
}
# Few steps want a high learning rate and a schedule.
_SMALL_TRAINING = {
    "trainer.max_epochs": 6,
    "trainer.precision": "32-true",
    "model.optimizer": {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.01}},
    "model.schedule": "one-cycle",
    "model.warm_up": 1,
}


def _execute(
    name: str,
    runs: Sequence[Run],
    small: bool,
    out: Path,
    data_dir: Path | None,
    epochs: int | None,
    seed: int,
    accelerator: str,
) -> list[dict[str, Any]]:
    """Train and test all runs, and write and show the table after each."""
    console = Console()
    folder = out / ("small" if small else "full")
    results = []
    for run in runs:
        more: dict[str, Any] = {"trainer.accelerator": accelerator, "trainer.devices": 1}
        if data_dir is not None:
            more[f"{DATA}.folder"] = str(data_dir)
        if small:
            more |= _SMALL_DATA | _SMALL_TRAINING
            more |= tables.SMALL if run.kind == "attention" else {}
        if epochs is not None:
            more["trainer.max_epochs"] = epochs
        console.rule(run.label)
        results.append(execute(run, folder, more, seed))
        file = out / f"{name}{'-small' if small else ''}.json"
        file.write_text(json.dumps(_rows(runs, results), indent=2) + "\n", encoding="utf-8")
        file.with_suffix(".md").write_text(_markdown(runs, results), encoding="utf-8")
        console.print(_table(name, runs, results, small))
        console.print(f"written: {file} and {file.with_suffix('.md').name}", highlight=False, soft_wrap=True)
    return results


def _rows(runs: Sequence[Run], results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {"label": run.label, "group": run.group, "kind": run.kind, "published": run.published, **result}
        for run, result in zip(runs, results, strict=False)
    ]


def _table(name: str, runs: Sequence[Run], results: Sequence[dict[str, Any]], small: bool) -> Table:
    caption = (
        "SMALL: few images and epochs, and attention with 12 fields, 1 head, own queries: not the paper's networks"
        if small
        else None
    )
    table = Table(title=name, caption=caption, caption_justify="left")
    for column in _COLUMNS:
        table.add_column(column, justify="left" if column == "network" else "right")
    for cells in _cells(runs, results):
        table.add_row(*cells)
    return table


def _markdown(runs: Sequence[Run], results: Sequence[dict[str, Any]]) -> str:
    """The table for the documentation, with what it was measured on."""
    versions, hardware = results[0]["trained"]["versions"], results[0]["trained"]["hardware"]
    device = hardware.get("gpu") or f"{hardware['processor']}, {hardware['threads']} of {hardware['cores']} cores"
    packages = ", ".join(f"{package} {versions[package]}" for package in ("torch", "escnn"))
    data = results[0]["tested"]["configuration"]["data"]["init_args"]
    images = ", ".join(f"{data.get(f'limit_{part}') or 'all'} to {part}" for part in ("train", "test"))
    lines = [
        "| " + " | ".join(_COLUMNS) + " |",
        "|---" + "|--:" * (len(_COLUMNS) - 1) + "|",
        *("| " + " | ".join(cells) + " |" for cells in _cells(runs, results)),
        "",
        f"Images: {images}; seed {results[0]['seed']}; {device}; {packages}.",
    ]
    return "\n".join(lines) + "\n"


_COLUMNS = ("network", "accuracy (%)", "paper (%)", "parameters", "epochs", "s per epoch")


def _cells(runs: Sequence[Run], results: Sequence[dict[str, Any]]) -> Iterator[list[str]]:
    for run, result in zip(runs, results, strict=False):
        seconds = sorted(row["seconds"] for row in result["curve"])
        yield [
            run.label,
            f"{100 * result['accuracy']:.2f}",
            "" if run.published is None else f"{run.published:.2f}",
            f"{result['parameters']:,}",
            str(len(result["curve"])),
            f"{seconds[len(seconds) // 2]:.1f}" if seconds else "",
        ]
