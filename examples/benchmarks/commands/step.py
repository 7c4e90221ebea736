"""``step``: one step of training a whole network, and where its time goes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from examples.benchmarks.conditions import Conditions
from examples.benchmarks.processes import measure_all
from examples.benchmarks.report import Report, failures, size, table, time, verdict
from examples.benchmarks.results import Check
from examples.benchmarks.subjects import TrainingStep
from examples.benchmarks.subjects.subject import Poses

NETWORKS = ("rotmnist-p4", "d4-96")
"""The networks by name; ``subjects/training.py`` builds them."""

_TARGETS = {"d4-96": 4.0}  # GB at most
_LEAST = {"rotmnist-p4": 22, "d4-96": 56}  # the sizes of images of which something is left in the end


def run(conditions: Conditions, network: str, query: Poses, say: Callable[[str], None]) -> Report:
    """Measure and profile a step.

    Args:
        conditions: for all measurements.
        network: one of :data:`NETWORKS`.
        query: of the group layers, ``"own"`` or ``"all"``.
        say: is told what is being measured.
    """
    subject = TrainingStep(network, query=query)
    if conditions.quick:
        subject = replace(subject, batch=1, kernel_size=3, size=_LEAST[network])
    result = measure_all([subject], conditions, say)[subject]
    report = Report(f"step-{network}", conditions, data={"network": network, "query": query, "step": result.as_dict()})
    report.notes = failures({subject: result})
    peak = None if result.failure is not None else result.peak / 1e9
    if network in _TARGETS:
        report.checks.append(Check(f"{network}, {query}: peak memory of a step", peak, "≤", _TARGETS[network], "GB"))
    if result.failure is None:
        kinds = result.details["seconds_by_kind"]
        total = sum(kinds.values())
        rows = [[kind, time(seconds), f"{100 * seconds / total:.1f} %"] for kind, seconds in kinds.items()]
        rows.append(["with the profiler", time(total), ""])
        rows.append(["without", time(result.seconds), ""])
        rows.append(["peak memory", verdict(report.checks[0]) if report.checks else size(result.peak), ""])
        report.tables.append(table(f"A training step of {network}, query {query}", ["part", "time", "share"], rows))
    return report
