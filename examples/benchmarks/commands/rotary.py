"""``rotary``: attention within frames against Platonic Transformers."""

from __future__ import annotations

import math
from collections.abc import Callable

from examples.benchmarks.conditions import Conditions
from examples.benchmarks.processes import measure_all
from examples.benchmarks.report import Report, cost, failures, table, times
from examples.benchmarks.results import Result, ratio
from examples.benchmarks.subjects import Attention, Platonic, Subject

_ORDER = 24  # of the octahedral group
_HEAD = 8


def run(conditions: Conditions, checkout: str | None, say: Callable[[str], None]) -> Report:
    """Measure attention with rotary encoding in which every pose has keys of its own.

    The reference takes a cloud of points, ours a grid of as many positions: what a query and a key cost is the same.

    Args:
        conditions: for all measurements.
        checkout: the folder of PlatonicTransformers, or None to go without.
        say: is told what is being measured.
    """
    side, batch, channels = (2, 1, _ORDER * _HEAD) if conditions.quick else (8, 4, _ORDER * _HEAD)
    shape = (side,) * 3
    ours = Attention(
        "octahedral",
        shape,
        batch,
        fields=channels // _ORDER,
        num_heads=channels // (_ORDER * _HEAD),
        head_fields=_HEAD,
        keys="own",
        encoding="rotary",
    )
    subjects: dict[str, Subject] = {"ours": ours}
    if checkout is not None:
        subjects = {"platonic": Platonic(checkout, math.prod(shape), batch, channels, _HEAD)} | subjects
    results = measure_all(list(subjects.values()), conditions, say)

    def multiple(name: str) -> str:
        return times(ratio(results[ours], results[subjects[name]]).seconds)

    rows = [[_TITLES[name], *cost(results[s]), "" if s == ours else multiple(name)] for name, s in subjects.items()]
    title = f"Octahedral, {math.prod(shape)} positions, batch {batch}, {channels} channels: forward and backward"
    data: dict[str, dict[str, object]] = {name: _as_dict(results[s], results[ours]) for name, s in subjects.items()}
    return Report(
        "rotary",
        conditions,
        data={"positions": math.prod(shape), "batch": batch, "channels": channels, "layers": data},
        tables=[table(title, ["layer", "time", "memory", "ours takes"], rows)],
        notes=failures(results),
    )


_TITLES = {"platonic": "PlatonicConv, dense softmax", "ours": 'GroupSelfAttention, keys="own", rotary'}


def _as_dict(result: Result, ours: Result) -> dict[str, object]:
    return result.as_dict() | {"ours_over_this": ratio(ours, result).as_dict()}
