"""Run the experiments of a command, and write their table as JSON and Markdown."""

from __future__ import annotations

import functools
import itertools
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import escnn_attention  # noqa: F401  # isort: skip  # before escnn
from escnn.gspaces import GSpace
from rich.console import Console
from rich.table import Table

from escnn_attention.training.errors import UserError
from examples.experiments.report import marked, mean_error, rows_of_all, told_seeds
from examples.experiments.runs import DATA, Run, named
from examples.point_clouds.measure import ROTATED, execute_and_rotate, once, rollout_errors, tensor_equivariance
from examples.point_clouds.tables import SMALL, Experiment, experiments

_BEYOND = {
    "springs": ("after 20", "after 99", "energy after 99"),
    "qm9-polarizability": ("rotates with the group", "at random"),
}
"""The columns of what is measured beyond the test, by experiment."""


def run_all(
    name: str,
    out: Path,
    *,
    small: bool,
    data_dir: Path | None,
    epochs: int | None,
    seed: int,
    seeds: int,
    accelerator: str,
    data: Mapping[str, Any] | None = None,
) -> None:
    """Train and test everything of a command with every seed; the tables are written after each run.

    If a further measurement fails, the other runs continue; running the command again repeats it.

    Args:
        name: of the experiments.
        out: the folder for all output.
        small: few clouds and epochs, narrow networks.
        data_dir: the folder of the data set; by default that of the environment.
        epochs: replace those of the configurations.
        seed: of everything, the first of the seeds. If it is not 0 the files are marked with the seeds.
        seeds: their number.
        accelerator: Lightning's.
        data: changed arguments of the data modules.

    Raises:
        UserError: a training or a measurement failed.
    """
    console = Console()
    folder = out / ("small" if small else "full")
    more: dict[str, Any] = {"trainer.accelerator": accelerator, "trainer.devices": 1}
    more.update({f"{DATA}.{argument}": value for argument, value in (data or {}).items()})
    if data_dir is not None:
        more[f"{DATA}.folder"] = str(data_dir)
    if epochs is not None:
        more["trainer.max_epochs"] = epochs
    out.mkdir(parents=True, exist_ok=True)
    caption = SMALL if small else None
    failed: list[str] = []
    for experiment in experiments(name, small):
        runs = experiment.runs(small)
        file = out / f"{marked(experiment.name, caption, seed, seeds)}.json"
        results: list[list[dict[str, Any]]] = [[] for _ in runs]
        for number, (i, run) in itertools.product(range(seed, seed + seeds), enumerate(runs)):
            label = run.label if seeds == 1 else f"{run.label}, seed {number}"
            console.rule(label)
            result = execute_and_rotate(run, folder, more, number)
            results[i].append(result)
            own = folder / f"{run.name}-{number}"
            try:
                result.update(_more(experiment, runs[0], own, result, data_dir, accelerator))
            except Exception:  # any failure: the trained networks must still appear in the table
                console.print_exception()
                failed.append(label)
            done = [pair for pair in zip(runs, results, strict=True) if pair[1]]
            file.write_text(json.dumps(rows_of_all(done), indent=2) + "\n", encoding="utf-8")
            file.with_suffix(".md").write_text(markdown(experiment, done, caption), encoding="utf-8")
            console.print(_table(experiment, done, caption))
        if experiment.name == "springs":
            from examples.point_clouds.figures import draw_rollouts

            name = marked("springs-rollout", caption, seed, seeds)
            draw_rollouts(out / f"{name}.png", runs, [found[0] for found in results])
        console.print(f"written: {file} and {file.with_suffix('.md').name}", highlight=False, soft_wrap=True)
    if failed:
        raise UserError(
            f"{', '.join(failed)}: trained and tested, but what is measured beyond that failed, as told above; the "
            "same command measures it again, and trains nothing"
        )


def _more(
    experiment: Experiment,
    equivariant: Run,
    folder: Path,
    result: dict[str, Any],
    data_dir: Path | None,
    accelerator: str,
) -> dict[str, Any]:
    """Measurements of single experiments."""
    weights = result["weights_sha256"]
    where: dict[str, Any] = {"data_dir": data_dir, "accelerator": accelerator}
    if experiment.name == "springs":
        measure = functools.partial(rollout_errors, folder, result, **where)
        return {"rollout": once(folder / "rollout.json", weights, measure)}
    if experiment.name == "qm9-polarizability":
        space = _gspace(equivariant.configuration()["model"]["network"]["init_args"]["gspace"])
        measure = functools.partial(tensor_equivariance, folder, result, space, **where)
        return {"rotating": once(folder / "rotating.json", weights, measure)}
    return {}


def _gspace(described: Mapping[str, Any]) -> GSpace:
    """The gspace of a configuration."""
    space: GSpace = named(described["class_path"])(**described.get("init_args", {}))
    return space


Done = Sequence[tuple[Run, Sequence[dict[str, Any]]]]
"""The runs that are done, and the results of each, one for each seed."""


def markdown(experiment: Experiment, done: Done, caption: str | None = None) -> str:
    """The table for the documentation, with means over the seeds, clouds, hardware and versions."""
    columns = _columns(experiment)
    found = done[0][1]
    versions, hardware = found[0]["trained"]["versions"], found[0]["trained"]["hardware"]
    device = hardware.get("gpu") or f"{hardware['processor']}, {hardware['threads']} of {hardware['cores']} cores"
    packages = ", ".join(f"{package} {versions[package]}" for package in ("torch", "escnn"))
    data = found[0]["tested"]["configuration"]["data"]["init_args"]
    clouds = ", ".join(
        f"{data.get(f'limit_{part}') or data.get(f'num_{part}') or 'all'} to {part}" for part in ("train", "test")
    )
    lines = [
        "| " + " | ".join(columns) + " |",
        "|---" + "|--:" * (len(columns) - 1) + "|",
        *("| " + " | ".join(_cells(experiment, run, results)) + " |" for run, results in done),
        "",
        f"Clouds: {clouds}; batches of {data['batch_size']}; {told_seeds([found])}; {device}; {packages}.",
        *(() if caption is None else ("", f"Small version: {caption}.")),
        *(() if not experiment.published else ("", f"Published: {experiment.published}.")),
    ]
    return "\n".join(lines) + "\n"


def _columns(experiment: Experiment) -> list[str]:
    columns = ["network"]
    for title in experiment.measures.values():
        columns += [title, "rotated"]
    return [*columns, *_BEYOND.get(experiment.name, ()), "parameters", "epochs", "s per epoch", "memory (MB)"]


def _cells(experiment: Experiment, run: Run, results: Sequence[dict[str, Any]]) -> list[str]:
    cells = [run.label]
    for name, title in experiment.measures.items():
        for found in (results, [result[ROTATED] for result in results]):
            cells.append(_spread([result[name] for result in found], percent="%" in title))
    if all("rollout" in result for result in results):
        errors, drifts = ([result["rollout"][name] for result in results] for name in ("error", "drift"))
        cells += [_spread([error[frame] for error in errors]) for frame in (20, 99)]
        cells.append(f"{_spread([drift[99] for drift in drifts], percent=True)} %")
    elif all("rotating" in result for result in results):
        cells += [f"{max(result['rotating'][of] for result in results):.0e}" for of in ("group", "random")]
    else:
        cells += len(_BEYOND.get(experiment.name, ())) * [""]  # a measurement that failed
    curves = [row for result in results for row in result["curve"]]
    return [
        *cells,
        f"{results[0]['parameters']:,}",
        str(len(results[0]["curve"])),
        f"{statistics.median(row['seconds'] for row in curves):.1f}",
        f"{max(row['memory'] for row in curves):.0f}",
    ]


def _spread(values: Sequence[float], percent: bool = False) -> str:
    """The mean, and for several values the standard error."""
    mean, error = mean_error([100 * value for value in values] if percent else values)
    digits = ".1f" if percent else ".3f" if 0.01 <= abs(mean) < 1000 else ".1e"
    return f"{mean:{digits}}" if len(values) == 1 else f"{mean:{digits}} ± {error:{digits}}"


def _table(experiment: Experiment, done: Done, caption: str | None) -> Table:
    table = Table(
        title=experiment.name, caption=None if caption is None else f"SMALL: {caption}", caption_justify="left"
    )
    for i, column in enumerate(_columns(experiment)):
        table.add_column(column, justify="right" if i else "left")
    for run, results in done:
        table.add_row(*_cells(experiment, run, results))
    return table
