"""Run the experiments of a command, and write their table as JSON and Markdown."""

from __future__ import annotations

import statistics
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from escnn_attention.training.errors import UserError
from escnn_attention.training.files import atomic_file, write_json
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
    seeds: int = 1,
    accelerator: str = "auto",
    only: Sequence[str] | None = None,
    draw: Callable[[Sequence[Run], Sequence[Sequence[dict[str, Any]]]], None] | None = None,
) -> list[list[dict[str, Any]]]:
    """Train and test all runs with every seed, and write and show the table after each.

    All networks are trained with one seed, then with the next. A failure is reported, and the others continue.

    Args:
        name: of the table and its files.
        runs: what to train.
        out: the folder for all output.
        small: how the runs differ from the full version; it is written below the table and marks the files.
        data_dir: the folder of the data sets; by default that of the configurations or the environment.
        epochs: replace those of the configurations.
        seed: the first of the seeds, see :func:`execute`. If it is not 0 the files are marked with the seeds.
        seeds: their number.
        accelerator: Lightning's.
        only: the labels of the runs to train; by default all.
        draw: makes a figure of the finished runs and their results, one for each seed.

    Returns:
        for each run one result for each seed, see :func:`execute`.

    Raises:
        UserError: no run has a label of ``only``.
        SystemExit: at the end, if any run has failed; the message names them.
    """
    labels = [run.label for run in runs]
    if missing := [label for label in only or () if label not in labels]:
        raise UserError(f"--only: got {', '.join(missing)}, needed labels of {name}: {', '.join(labels)}")
    runs = [run for run in runs if not only or run.label in only]
    console = Console()
    folder = out / ("full" if small is None else "small")
    file = out / f"{marked(name, small, seed, seeds)}.json"
    more: dict[str, Any] = {"trainer.accelerator": accelerator, "trainer.devices": 1}
    if data_dir is not None:
        more[f"{DATA}.folder"] = str(data_dir)
    if epochs is not None:
        more["trainer.max_epochs"] = epochs
    found: dict[int, list[dict[str, Any]]] = {i: [] for i in range(len(runs))}
    failed = []
    for number in range(seed, seed + seeds):
        for i, run in enumerate(runs):
            label = run.label if seeds == 1 else f"{run.label}, seed {number}"
            console.rule(label)
            try:
                found[i].append(execute(run, folder, more, number))
            except Exception as error:
                failed.append(f"{label}: {type(error).__name__}: {error}")
                console.print("".join(traceback.format_exception(error)), highlight=False, markup=False)
                continue
            done = [(run, found[i]) for i, run in enumerate(runs) if found[i]]
            write_json(file, rows_of_all(done))
            with atomic_file(file.with_suffix(".md"), "w") as page:
                page.write(markdown(*zip(*done, strict=True), small))
            console.print(_table(name, done, small))
            console.print(f"written: {file} and {file.with_suffix('.md').name}", highlight=False, soft_wrap=True)
    done = [(run, found[i]) for i, run in enumerate(runs) if found[i]]
    if draw is not None and done:
        draw(*zip(*done, strict=True))
    if failed:
        raise SystemExit("\n".join([f"{len(failed)} of {len(runs) * seeds} runs failed:", *failed]))
    return list(found.values())


def marked(name: str, small: str | None, seed: int = 0, seeds: int = 1) -> str:
    """The name of a file, marked for small versions and for seeds that do not begin with 0."""
    if small is not None:
        name = f"{name}-small"
    if seed == 0:
        return name
    return f"{name}-seed{seed}" if seeds == 1 else f"{name}-seeds{seed}-{seed + seeds - 1}"


def rows(runs: Sequence[Run], results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The results of the finished runs, with their labels and groups."""
    return [
        {"label": run.label, "group": run.group, "kind": run.kind, "published": run.published, **result}
        for run, result in zip(runs, results, strict=False)
    ]


def mean_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean and its standard error, 0 for a single value."""
    return statistics.mean(values), statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0


def mean_and_error(values: Sequence[float], digits: int) -> str:
    """The mean and its standard error as text; a single value alone."""
    mean, error = mean_error(values)
    return f"{mean:.{digits}f}" if len(values) == 1 else f"{mean:.{digits}f} ± {error:.{digits}f}"


def rows_of_all(done: Sequence[tuple[Run, Sequence[dict[str, Any]]]]) -> list[dict[str, Any]]:
    """The results of the finished runs, one for each seed, with their labels and groups."""
    pairs = [(run, result) for run, results in done for result in results]
    return rows([run for run, _ in pairs], [result for _, result in pairs])


def markdown(runs: Sequence[Run], results: Sequence[Sequence[Mapping[str, Any]]], small: str | None = None) -> str:
    """The table for the documentation, with images, seeds, hardware and versions."""
    first = results[0][0]
    versions, hardware = first["trained"]["versions"], first["trained"]["hardware"]
    device = hardware.get("gpu") or f"{hardware['processor']}, {hardware['threads']} of {hardware['cores']} cores"
    packages = ", ".join(f"{package} {versions[package]}" for package in ("torch", "escnn"))
    images = _images(first["tested"]["configuration"]["data"])
    done = list(zip(runs, results, strict=True))
    lines = [
        "| " + " | ".join(_COLUMNS) + " |",
        "|---" + "|--:" * (len(_COLUMNS) - 1) + "|",
        *("| " + " | ".join(cells) + " |" for cells in _cells(done)),
        "",
        f"Images: {images}; {told_seeds(results)}; {device}; {packages}.",
        *(() if small is None else ("", f"Small version: {small}.")),
    ]
    return "\n".join(lines) + "\n"


def _images(data: Mapping[str, Any]) -> str:
    """The number of images."""
    options = data["init_args"]
    held_out = data["class_path"].endswith("CIFAR10") and not options.get("full_train")
    every = {"train": "40,000 of 50,000" if held_out else "all", "test": "all"}
    return ", ".join(f"{options.get(f'limit_{part}') or every[part]} to {part}" for part in every)


def told_seeds(results: Sequence[Sequence[Mapping[str, Any]]]) -> str:
    """The seeds of a table."""
    seeds = sorted({result["seed"] for each in results for result in each})
    if len(seeds) == 1:
        return f"seed {seeds[0]}"
    return f"means ± standard errors of {len(seeds)} seeds, {', '.join(map(str, seeds))}"


def _table(name: str, done: Sequence[tuple[Run, Sequence[Mapping[str, Any]]]], small: str | None) -> Table:
    caption = told_seeds([results for _, results in done]) + ("" if small is None else f"; SMALL: {small}")
    table = Table(title=name, caption=caption, caption_justify="left")
    for column in _COLUMNS:
        table.add_column(column, justify="left" if column == _COLUMNS[0] else "right")
    for cells in _cells(done):
        table.add_row(*cells)
    return table


def _cells(done: Sequence[tuple[Run, Sequence[Mapping[str, Any]]]]) -> Iterator[list[str]]:
    most = max(len(results) for _, results in done)
    for run, results in done:
        seconds = sorted(row["seconds"] for result in results for row in result["curve"])
        accuracies = [100 * result["accuracy"] for result in results]
        accuracy = mean_and_error(accuracies, 2)
        if len(results) < most:
            accuracy += f" ({len(results)} of {most})"
        yield [
            run.label,
            accuracy,
            "" if run.published is None else f"{run.published:.2f}",
            f"{results[0]['parameters']:,}",
            str(len(results[0]["curve"])),
            f"{seconds[len(seconds) // 2]:.1f}" if seconds else "",
        ]
