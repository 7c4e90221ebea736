"""``dense``: the attention that factorises against plain attention on the same widened vectors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from examples.benchmarks.conditions import Conditions
from examples.benchmarks.processes import measure_all
from examples.benchmarks.report import Report, cost, failures, table, verdict
from examples.benchmarks.results import Check, ratio
from examples.benchmarks.subjects import Dense, Functional
from examples.benchmarks.subjects.dense import widened
from examples.benchmarks.subjects.spaces import order
from examples.benchmarks.subjects.subject import Poses

_TARGET = 70.0  # per cent


@dataclass(frozen=True)
class Case:
    """Global attention with an encoding that factorises, or with none.

    Attributes:
        name: for tables.
        query, encoding: of the attention.
        space, shape, batch, num_heads, head_fields: the sizes.
    """

    name: str
    query: Poses
    encoding: str
    space: str = "c4"
    shape: tuple[int, ...] = (28, 28)
    batch: int = 1
    num_heads: int = 9
    head_fields: int = 10

    def ours(self) -> Functional:
        """Our attention."""
        return Functional(
            self.space, self.shape, self.batch, self.num_heads, self.head_fields, self.query, self.encoding, "dense"
        )

    def plain(self) -> Dense:
        """Torch's attention on vectors of the same number and width."""
        poses, positions = order(self.space), math.prod(self.shape)
        queries = positions * (poses if self.query == "all" else 1)
        if self.encoding == "none":
            # All output poses see the same: the queries of all poses are needed once, in either mode.
            return Dense(
                self.batch, self.num_heads, 1, poses * positions, poses * positions, widened(self.head_fields, 0)
            )
        return Dense(self.batch, self.num_heads, poses, queries, poses * positions, widened(self.head_fields))


CASES = (
    Case("Fourier, own", "own", "fourier"),
    Case("Fourier, all", "all", "fourier"),
    Case("no encoding, own", "own", "none"),
    Case("no encoding, all", "all", "none"),
)


def run(conditions: Conditions, say: Callable[[str], None]) -> Report:
    """Measure all cases."""
    cases = list(CASES)
    if conditions.quick:
        cases = [replace(case, shape=(4, 4), num_heads=2) for case in cases]
    report = Report("dense", conditions, data={"cases": []})
    rows = []
    for case in cases:
        results = measure_all([case.plain(), case.ours()], conditions, say)
        plain, ours = results[case.plain()], results[case.ours()]
        fraction = ratio(plain, ours)
        percent = None if fraction.seconds is None else 100 * fraction.seconds
        check = Check(f"{case.name}: throughput / plain attention", percent, "≥", _TARGET, "%")
        rows.append([case.name, *cost(plain), *cost(ours), verdict(check)])
        report.checks.append(check)
        report.notes += failures(results)
        report.data["cases"].append(
            asdict(case)
            | {"plain_attention": plain.as_dict(), "ours": ours.as_dict(), "plain_over_ours": fraction.as_dict()}
        )
    shape = "×".join(map(str, cases[0].shape))
    report.tables.append(
        table(
            f"Global attention on {shape}, {cases[0].space.upper()}: forward and backward, without projections",
            ["attention", "plain", "memory", "ours", "memory", "throughput"],
            rows,
        )
    )
    return report
