"""``backends``: what every backend takes for a layer, and whether the one taken by default is the fastest."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from examples.benchmarks.commands.layer_cases import CASES, QUICK
from examples.benchmarks.conditions import Conditions
from examples.benchmarks.processes import measure_all
from examples.benchmarks.report import Report, cost, table
from examples.benchmarks.results import Check, ratio

_SLACK = 1.1  # What two runs of the same may differ by.


def run(conditions: Conditions, say: Callable[[str], None]) -> Report:
    """Measure the layers of ``layers`` with every backend but the one that writes the formula out."""
    cases = QUICK if conditions.quick else CASES
    backends = ["auto", *importlib.import_module("escnn_attention.functional").backends_for()]
    backends.remove("reference")
    results = measure_all([case.ours(name) for case in cases for name in backends], conditions, say)
    report = Report("backends", conditions, data={"cases": []})
    rows = []
    for case in cases:
        found = {name: results[case.ours(name)] for name in backends}
        served = {name: result for name, result in found.items() if result.failure is None}
        rows.append([case.name, *(", ".join(cost(found[name])) if name in served else "–" for name in backends)])
        report.data["cases"].append(
            {"name": case.name, "backends": {name: result.as_dict() for name, result in found.items()}}
        )
        for name, result in found.items():
            if result.failure is not None and "cannot serve this call" not in result.failure:
                report.notes.append(f"{case.name}, {name}: {result.failure}")
        others = [result for name, result in served.items() if name != "auto"]
        if others and not conditions.quick:
            best = min(others, key=lambda result: result.seconds)
            slower = ratio(found["auto"], best).seconds
            report.checks.append(Check(f"{case.name}: time of 'auto' / the fastest backend", slower, "≤", _SLACK))
    caption = "–: it cannot serve this layer on this device"
    report.tables.append(table("Every backend: forward and backward", ["layer", *backends], rows, caption))
    return report
