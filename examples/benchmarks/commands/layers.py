"""``layers``: single layers against the published implementations, R2Conv and plain attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from examples.benchmarks.commands.layer_cases import CASES, QUICK, Case
from examples.benchmarks.conditions import Conditions
from examples.benchmarks.processes import measure_all
from examples.benchmarks.report import Report, cost, failures, table, times, verdict
from examples.benchmarks.results import Check, Ratio, Result, ratio
from examples.benchmarks.subjects import GSA, Subject


def run(conditions: Conditions, checkouts: Mapping[str, str], say: Callable[[str], None]) -> Report:
    """Measure all cases.

    Args:
        conditions: for all measurements.
        checkouts: the folders of the reference implementations, by their names. There may be none.
        say: is told what is being measured.
    """
    cases = QUICK if conditions.quick else CASES
    found: dict[Case, dict[Subject, Result]] = {}
    # Cases that have a reference in common are measured against the same runs of it.
    for alike in [cases] if conditions.quick else _groups(cases):
        results = measure_all([s for case in alike for s in case.subjects(checkouts)], conditions, say)
        found |= dict.fromkeys(alike, results)
    device = conditions.device
    content = [_as_dict(case, found[case], checkouts, device) for case in cases]
    report = Report("layers", conditions, data={"cases": content})
    for name, checkout in checkouts.items():
        comparisons = [_compare(case, found[case], checkout, device) for case in cases]
        report.tables.append(_comparison_table(name, comparisons))
        report.checks += [check for c in comparisons for check in c.checks(name)]
    report.tables.append(_cost_table(cases, found))
    for case in cases:
        slowest = case.targets(conditions.device)[2]
        if slowest is not None:
            slower = ratio(found[case][case.ours()], found[case][case.convolution()]).seconds
            report.checks.append(Check(f"{case.name}: time of ours / R2Conv 5×5", slower, "≤", slowest))
    report.notes = list(dict.fromkeys(note for results in found.values() for note in failures(results)))
    return report


def _groups(cases: tuple[Case, ...]) -> list[tuple[Case, ...]]:
    groups: dict[GSA, tuple[Case, ...]] = {}
    for case in cases:
        reference = case.reference("")
        groups[reference] = (*groups.get(reference, ()), case)
    return list(groups.values())


@dataclass(frozen=True)
class Comparison:
    """A case against one reference."""

    case: Case
    ours: Result
    reference: Result
    ratio: Ratio
    device: str

    def checks(self, name: str) -> tuple[Check, Check]:
        """Of time and of memory."""
        faster, smaller, _ = self.case.targets(self.device)
        return (
            Check(f"{self.case.name}: time of {name} / ours", self.ratio.seconds, "≥", faster),
            Check(f"{self.case.name}: memory of {name} / ours", self.ratio.peak, "≥", smaller),
        )


def _compare(case: Case, results: Mapping[Subject, Result], checkout: str, device: str) -> Comparison:
    ours, reference = results[case.ours()], results[case.reference(checkout)]
    return Comparison(case, ours, reference, ratio(reference, ours), device)


def _comparison_table(name: str, comparisons: list[Comparison]) -> Table:
    rows = [
        [c.case.name, *cost(c.reference), *cost(c.ours), *(verdict(check) for check in c.checks(name))]
        for c in comparisons
    ]
    columns = ["layer", name, "memory", "ours", "memory", "times faster", "times smaller"]
    return table(f"Against {name}: forward and backward", columns, rows)


def _cost_table(cases: tuple[Case, ...], found: Mapping[Case, Mapping[Subject, Result]]) -> Table:
    rows = []
    for case in cases:
        results, dense = found[case], case.dense()
        ours, convolution = results[case.ours()], results[case.convolution()]
        row = [case.name, *cost(ours), cost(convolution)[0], times(ratio(ours, convolution).seconds)]
        plain = None if dense is None else results[dense]
        row += ["", ""] if plain is None else [cost(plain)[0], times(ratio(ours, plain).seconds)]
        rows.append(row)
    columns = ["layer", "ours", "memory", "R2Conv 5×5", "ours / R2Conv", "plain attention", "ours / plain"]
    caption = (
        "plain attention: scaled_dot_product_attention alone, on vectors as wide as the Fourier identity makes them"
    )
    return table("Against a convolution and plain attention: forward and backward", columns, rows, caption)


def _as_dict(
    case: Case, results: Mapping[Subject, Result], checkouts: Mapping[str, str], device: str
) -> dict[str, Any]:
    ours, convolution, dense = results[case.ours()], results[case.convolution()], case.dense()
    content: dict[str, Any] = {
        "name": case.name,
        **asdict(case),
        "ours": ours.as_dict(),
        "convolution": convolution.as_dict() | {"ours_over_this": ratio(ours, convolution).as_dict()},
        "references": {},
    }
    if dense is not None:
        content["plain_attention"] = results[dense].as_dict() | {
            "ours_over_this": ratio(ours, results[dense]).as_dict()
        }
    for name, checkout in checkouts.items():
        comparison = _compare(case, results, checkout, device)
        content["references"][name] = comparison.reference.as_dict() | {
            "this_over_ours": comparison.ratio.as_dict(),
            "targets": [check.as_dict() for check in comparison.checks(name)],
        }
    return content
