"""Runs one after another, and their table: as JSON with everything it depends on, for the documentation, on screen."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from examples.experiments.runs import DATA, Run, execute

_COLUMNS = ("network", "accuracy (%)", "paper (%)", "parameters", "epochs", "s per epoch")


def execute_all(
    name: str,
    runs: Sequence[Run],
    out: Path,
    *,
    small: str | None = None,
    data_dir: Path | None = None,
    epochs: int | None = None,
    seed: int = 0,
    accelerator: str = "auto",
) -> list[dict[str, Any]]:
    """Train and test all runs, and write and show the table after each.

    Args:
        name: of the table and its files.
        runs: what to train.
        out: the folder for everything that is written.
        small: in which way the runs are a small version; it stands below the table and marks the files.
        data_dir: the folder of the data sets; by default what the configurations or the environment say.
        epochs: in place of those of the configurations.
        seed: see :func:`execute`.
        accelerator: as Lightning's.

    Returns:
        one result for each run, see :func:`execute`.
    """
    console = Console()
    folder = out / ("full" if small is None else "small")
    file = out / f"{marked(name, small)}.json"
    more: dict[str, Any] = {"trainer.accelerator": accelerator, "trainer.devices": 1}
    if data_dir is not None:
        more[f"{DATA}.folder"] = str(data_dir)
    if epochs is not None:
        more["trainer.max_epochs"] = epochs
    results = []
    for run in runs:
        console.rule(run.label)
        results.append(execute(run, folder, more, seed))
        file.write_text(json.dumps(rows(runs, results), indent=2) + "\n", encoding="utf-8")
        file.with_suffix(".md").write_text(markdown(runs, results, small), encoding="utf-8")
        console.print(_table(name, runs, results, small))
        console.print(f"written: {file} and {file.with_suffix('.md').name}", highlight=False, soft_wrap=True)
    return results


def marked(name: str, small: str | None) -> str:
    """The name of a file, which tells a small version from a full one."""
    return name if small is None else f"{name}-small"


def rows(runs: Sequence[Run], results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The results of the runs that are done, with what the runs are."""
    return [
        {"label": run.label, "group": run.group, "kind": run.kind, "published": run.published, **result}
        for run, result in zip(runs, results, strict=False)
    ]


def markdown(runs: Sequence[Run], results: Sequence[dict[str, Any]], small: str | None = None) -> str:
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
        *(() if small is None else ("", f"Small version: {small}.")),
    ]
    return "\n".join(lines) + "\n"


def _table(name: str, runs: Sequence[Run], results: Sequence[dict[str, Any]], small: str | None) -> Table:
    table = Table(title=name, caption=None if small is None else f"SMALL: {small}", caption_justify="left")
    for column in _COLUMNS:
        table.add_column(column, justify="left" if column == _COLUMNS[0] else "right")
    for cells in _cells(runs, results):
        table.add_row(*cells)
    return table


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
