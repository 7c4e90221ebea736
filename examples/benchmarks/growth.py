"""``scaling`` and a part of ``points``: time and memory against pixels, poses and edges."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from examples.benchmarks.curves import Curve, follow, show
from examples.benchmarks.measure import Subject
from examples.benchmarks.report import Report, Run
from examples.benchmarks.subjects import attention, convolution, point_attention, point_convolution

_SIDES = (16, 24, 32, 48, 64, 96, 128)
_ORDERS = (1, 2, 4, 8, 12, 16, 24)
_POINTS = (1000, 3000, 8000, 20000)  # with 32 neighbours each
_DEGREES = (16, 32, 64, 128)  # of 4,000 points
_SEGMENTS = 2  # between the sizes over which slopes are taken: memory grows in steps of a working memory
_SLOPE = 1.1  # memory grows like the edges to this power at most

_LAYERS: dict[str, dict[str, Any]] = {
    "MLP, own": {},
    "MLP, all": {"query": "all"},
    "pair kernel, own": {"encoding": "pair kernel"},
}


def scaling(run: Run) -> Report:
    """Curves over the number of pixels and over the order of the group."""
    report, side = Report("scaling", run), 6 if run.quick else 24
    pixels, orders = by_pixels(), by_order(side)
    follow(pixels, [side**2 for side in ((4, 6) if run.quick else _SIDES)], run)
    follow(orders, (1, 2) if run.quick else _ORDERS, run)
    layer = "20 fields, 9 heads of 10"
    title, caption = "Against the number of pixels (C4)", f"C$_4$, one image, {layer}"
    show(report, pixels, "pixels", (1, 2), title=title, picture="scaling_pixels.png", caption=caption)
    title, caption = "Against the order of the group (Cn)", f"C$_n$, one image of {side}×{side}, {layer}"
    show(report, orders, "elements of the group", (1, 2, 3), title=title, picture="scaling_group.png", caption=caption)
    return report


def by_pixels() -> list[Curve]:
    """Curves over the number of pixels of a square image, for C4."""

    def square(subject: Callable[..., Any], **options: Any) -> Callable[[int], Subject]:
        return lambda pixels: partial(subject, "c4", 2 * (round(pixels**0.5),), 1, **options)

    return [
        Curve("5×5, own", square(attention, kernel_size=5, query="own", encoding="mlp")),
        Curve("5×5, all", square(attention, kernel_size=5, query="all", encoding="mlp")),
        Curve("global, own", square(attention, query="own", encoding="fourier")),
        Curve("global, all", square(attention, query="all", encoding="fourier")),
        Curve("R2Conv 5×5", square(convolution), baseline=True),
    ]


def by_order(side: int) -> list[Curve]:
    """Curves over the order n of the group Cn. Windows are discs for all of them."""

    def cyclic(subject: Callable[..., Any], **options: Any) -> Callable[[int], Subject]:
        return lambda order: partial(subject, f"c{order}", (side, side), 1, **options)

    return [
        Curve("disc of 5, own", cyclic(attention, kernel_size=5, query="own", window="disc")),
        Curve("disc of 5, all", cyclic(attention, kernel_size=5, query="all", window="disc")),
        Curve("R2Conv 5×5", cyclic(convolution), baseline=True),
    ]


def edges(run: Run) -> Report:
    """Curves over the number of edges, with more points and with more neighbours."""
    report, (degree, fixed) = Report("points-edges", run), (4, 32) if run.quick else (32, 4000)
    points, neighbours = by_points(degree), by_neighbours(fixed)
    follow(points, [degree * n for n in ((16, 32) if run.quick else _POINTS)], run)
    follow(neighbours, [fixed * n for n in ((4, 8) if run.quick else _DEGREES)], run)
    families = {"points": (f"{degree} neighbours", points), "neighbours": (f"{fixed} points", neighbours)}
    for name, (held, curves) in families.items():
        title, caption = f"C4, {held}, against the number of edges", f"C$_4$, {held}, 8 fields, 4 heads of 8"
        show(report, curves, "edges", (1,), title=title, picture=f"points_edges_{name}.png", caption=caption)
        for curve in curves:
            if not curve.baseline:
                what = f"C4, {held}, {curve.name}: slope of the memory over the edges"
                report.check(what, curve.slope("peak_bytes"), "≤", _SLOPE, "")
    report.tabulate_checks()
    return report


def by_points(degree: int) -> list[Curve]:
    """Curves over the number of edges, at a fixed number of neighbours."""
    layers = _LAYERS | {"MLP, own, one sees all": {"hub": True}}
    return _by_edges(layers, lambda edges: (edges // degree, degree))


def by_neighbours(points: int) -> list[Curve]:
    """Curves over the number of edges, at a fixed number of points."""
    return _by_edges(_LAYERS, lambda edges: (points, edges // points))


def _by_edges(layers: dict[str, dict[str, Any]], cloud: Callable[[int], tuple[int, int]]) -> list[Curve]:
    """Curves of layers by their options, on the points and neighbours of a number of edges."""

    def ours(edges: int, **options: Any) -> Subject:
        points, degree = cloud(edges)
        return partial(point_attention, "c4", points, num_neighbours=degree, **options)

    curves = [Curve(name, partial(ours, **options), segments=_SEGMENTS) for name, options in layers.items()]
    baseline = Curve("R2PointConv", lambda edges: partial(point_convolution, "c4", *cloud(edges)), True, _SEGMENTS)
    return [*curves, baseline]
