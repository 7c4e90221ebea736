"""``attentive``: networks of attentive group convolutions, against the published ones and without attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.table import Table

from examples.benchmarks.conditions import Conditions
from examples.benchmarks.pictures import Bar, bars
from examples.benchmarks.processes import measure_all
from examples.benchmarks.report import Report, cost, failures, table, times, verdict
from examples.benchmarks.results import Check, Result, ratio
from examples.benchmarks.subjects import AttGConvs, Classifier, Subject
from examples.benchmarks.subjects.classifier import Variant

VARIANTS: dict[Variant | None, str] = {
    None: "plain",
    "channel": "α, channels",
    "spatial": "α, positions",
    "full": "α",
    "features": "α of features",
}
"""Where the networks attend, and what the tables call it."""

_FASTER, _SMALLER = 4.0, 4.0  # than the published network with full attention
_LARGE: tuple[Variant | None, ...] = (None, "features", "full")  # of the All-CNN-C
_MOST = 12.0  # GB, for the last of them


def run(conditions: Conditions, folder: Path, checkout: str | None, say: Callable[[str], None]) -> Report:
    """Measure training steps of all variants, and draw them in ``folder``.

    Args:
        conditions: for all measurements.
        folder: for the picture.
        checkout: the folder of att_gconvs, or None to go without.
        say: is told what is being measured.
    """
    batch = 2 if conditions.quick else 64
    ours = {variant: Classifier("p4-cnn", variant, batch) for variant in VARIANTS}
    published = {} if checkout is None else {variant: AttGConvs(checkout, variant, batch) for variant in VARIANTS}
    subjects: list[Subject] = []
    for variant in VARIANTS:
        subjects += [*([published[variant]] if published else []), ours[variant]]
    results = measure_all(subjects, conditions, say)

    report = Report("attentive", conditions, data={"batch": batch, "variants": {}})
    for variant, name in VARIANTS.items():
        entry: dict[str, Any] = {"ours": _as_dict(results[ours[variant]], results[ours[None]])}
        if published:
            theirs = results[published[variant]]
            entry["published"] = theirs.as_dict() | {"this_over_ours": ratio(theirs, results[ours[variant]]).as_dict()}
        report.data["variants"][name] = entry
    if published:
        report.tables.append(_comparison(ours, published, results, report, batch))
    report.tables.append(_costs(f"p4-CNN, batch {batch}, against the network without attention", ours, results))
    report.notes = failures(results)

    folder.mkdir(parents=True, exist_ok=True)
    rows = {name: [results[s[variant]] for s in (published, ours) if s] for variant, name in VARIANTS.items()}
    columns = ["published", "ours"] if published else ["ours"]
    bars(folder / "attentive.png", f"A training step of the p4-CNN, batch {batch}", _bars(columns, rows))
    return report


def run_large(conditions: Conditions, say: Callable[[str], None]) -> Report:
    """Measure the All-CNN-C, whose attended responses would fill 72 GB if they were stored.

    Args:
        conditions: for all measurements.
        say: is told what is being measured.
    """
    batch, width = (2, 1) if conditions.quick else (128, None)
    ours = {variant: Classifier("all-cnn-c", variant, batch, width) for variant in _LARGE}
    # A step takes minutes, and the memory is the same in all.
    results = measure_all(list(ours.values()), replace(conditions, repeats=1, warmup=1, steps=1), say)
    found = {VARIANTS[variant]: _as_dict(results[s], results[ours[None]]) for variant, s in ours.items()}
    attended = results[ours["full"]]
    peak = None if attended.failure is not None else attended.peak / 1e9
    check = Check("p4 All-CNN-C, α: peak memory of a step", peak, "≤", _MOST, "GB")
    return Report(
        "attentive-all-cnn-c",
        conditions,
        data={"batch": batch, "variants": found},
        tables=[
            _costs(
                f"p4 All-CNN-C, CIFAR-10 shapes, batch {batch}, against the network without attention", ours, results
            ),
            table("Targets", ["what", "measured"], [[check.name, verdict(check)]]),
        ],
        checks=[check],
        notes=failures(results),
    )


def _comparison(
    ours: Mapping[Variant | None, Subject],
    published: Mapping[Variant | None, Subject],
    results: Mapping[Subject, Result],
    report: Report,
    batch: int,
) -> Table:
    rows = []
    for variant, name in VARIANTS.items():
        theirs, mine = results[published[variant]], results[ours[variant]]
        factor = ratio(theirs, mine)
        cells = [times(factor.seconds), times(factor.peak)]
        if variant == "full":
            checks = [
                Check(f"p4-CNN, {name}: time of att_gconvs / ours", factor.seconds, "≥", _FASTER),
                Check(f"p4-CNN, {name}: memory of att_gconvs / ours", factor.peak, "≥", _SMALLER),
            ]
            report.checks += checks
            cells = [verdict(check) for check in checks]
        rows.append([name, *cost(theirs), *cost(mine), *cells])
    columns = ["p4-CNN", "att_gconvs", "memory", "ours", "memory", "times faster", "times smaller"]
    return table(f"Against att_gconvs: a training step, batch {batch}", columns, rows)


def _costs(title: str, subjects: Mapping[Variant | None, Subject], results: Mapping[Subject, Result]) -> Table:
    rows = []
    for variant, subject in subjects.items():
        factor = ratio(results[subject], results[subjects[None]])
        rows.append([VARIANTS[variant], *cost(results[subject]), times(factor.seconds), times(factor.peak)])
    return table(title, ["attention", "time", "memory", "× time", "× memory"], rows)


def _as_dict(result: Result, plain: Result) -> dict[str, Any]:
    return result.as_dict() | {"this_over_plain": ratio(result, plain).as_dict()}


def _bars(columns: list[str], rows: Mapping[str, list[Result]]) -> list[Bar]:
    return [
        Bar(name, column, result.seconds, result.peak)
        for name, results in rows.items()
        for column, result in zip(columns, results, strict=True)
        if result.failure is None
    ]
