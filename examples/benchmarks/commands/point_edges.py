"""``points``: time and memory against the number of edges between points."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from examples.benchmarks.conditions import Conditions
from examples.benchmarks.curves import Curve, follow
from examples.benchmarks.pictures import draw
from examples.benchmarks.report import Report, curve_table, table, verdict
from examples.benchmarks.results import Check
from examples.benchmarks.subjects import PointAttention, PointConvolution, Subject
from examples.benchmarks.subjects.subject import Poses

_POINTS = (1000, 3000, 8000, 20000)  # with _DEGREE neighbours each
_DEGREE = 32
_DEGREES = (16, 32, 64, 128)  # of _FIXED points
_FIXED = 4000
_LIMIT = 5.0  # seconds; a curve ends with the first step that takes longer
_SEGMENTS = 2  # between the sizes over which slopes are taken: memory grows in steps of a working memory
_SLOPE = 1.1  # memory grows like the edges to this power at most


def run(conditions: Conditions, folder: Path, say: Callable[[str], None]) -> Report:
    """Measure curves over the number of edges, with more points and with more neighbours, and draw them in ``folder``.

    Args:
        conditions: for all measurements.
        folder: for the pictures.
        say: is told what is being measured.
    """
    quick = conditions.quick
    degree, fixed = (4, 32) if quick else (_DEGREE, _FIXED)
    more_points, more_neighbours = by_points(degree), by_neighbours(fixed)
    follow(more_points, [degree * n for n in ((16, 32) if quick else _POINTS)], _LIMIT, conditions, say)
    follow(more_neighbours, [fixed * n for n in ((4, 8) if quick else _DEGREES)], _LIMIT, conditions, say)

    titles = (f"{degree} neighbours", f"{fixed} points")
    families = dict(zip(titles, (more_points, more_neighbours), strict=True))
    folder.mkdir(parents=True, exist_ok=True)
    for name, (title, curves) in zip(("points", "neighbours"), families.items(), strict=True):
        picture = folder / f"points_edges_{name}.png"
        draw(picture, f"C$_4$, {title}, 8 fields, 4 heads of 8", "edges", curves, time_slopes=(1,))
    checks = [
        Check(f"C4, {title}, {curve.name}: slope of the memory over the edges", curve.slope("peak"), "≤", _SLOPE, "")
        for title, curves in families.items()
        for curve in curves
        if not curve.baseline
    ]
    return Report(
        "points-edges",
        conditions,
        data={
            "by_points": [curve.as_dict("edges") for curve in more_points],
            "by_neighbours": [curve.as_dict("edges") for curve in more_neighbours],
            "neighbours": degree,
            "points": fixed,
            "limit_seconds": _LIMIT,
        },
        tables=[
            *(curve_table(f"C4, {title}, against the number of edges", "edges", c) for title, c in families.items()),
            table("Targets", ["what", "measured"], [[check.name, verdict(check)] for check in checks]),
        ],
        checks=checks,
        notes=[f"{t}, {c.name}: {c.stopped}" for t, curves in families.items() for c in curves if c.stopped],
    )


def by_points(degree: int) -> list[Curve]:
    """Curves over the number of edges, where points have so many neighbours each."""

    def attention(query: Poses = "own", encoding: str | None = None, hub: bool = False) -> Callable[[int], Subject]:
        return lambda edges: PointAttention(
            "c4", edges // degree, num_neighbours=degree, query=query, encoding=encoding, hub=hub
        )

    return _curves(
        {
            "MLP, own": attention(),
            "MLP, all": attention("all"),
            "pair kernel, own": attention(encoding="pair kernel"),
            "MLP, own, one sees all": attention(hub=True),
        },
        lambda edges: PointConvolution("c4", edges // degree, degree),
    )


def by_neighbours(points: int) -> list[Curve]:
    """Curves over the number of edges between so many points."""

    def attention(query: Poses = "own", encoding: str | None = None) -> Callable[[int], Subject]:
        return lambda edges: PointAttention(
            "c4", points, num_neighbours=edges // points, query=query, encoding=encoding
        )

    return _curves(
        {
            "MLP, own": attention(),
            "MLP, all": attention("all"),
            "pair kernel, own": attention(encoding="pair kernel"),
        },
        lambda edges: PointConvolution("c4", points, edges // points),
    )


def _curves(ours: Mapping[str, Callable[[int], Subject]], baseline: Callable[[int], Subject]) -> list[Curve]:
    curves = [Curve(name, subject, segments=_SEGMENTS) for name, subject in ours.items()]
    return [*curves, Curve("R2PointConv", baseline, baseline=True, segments=_SEGMENTS)]
