"""``scaling``: time and memory against the number of pixels and against the order of the group."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from examples.benchmarks.conditions import Conditions
from examples.benchmarks.curves import Curve, follow
from examples.benchmarks.pictures import draw
from examples.benchmarks.report import Report, curve_table
from examples.benchmarks.subjects import Attention, Convolution
from examples.benchmarks.subjects.subject import Poses

_SIDES = (16, 24, 32, 48, 64, 96, 128)
_ORDERS = (1, 2, 4, 8, 12, 16, 24)
_LIMIT = 5.0  # seconds; a curve ends with the first step that takes longer


def run(conditions: Conditions, folder: Path, say: Callable[[str], None]) -> Report:
    """Measure both families of curves, and draw them in ``folder``.

    Args:
        conditions: for all measurements.
        folder: for the pictures.
        say: is told what is being measured.
    """
    quick = conditions.quick
    pixels = by_pixels()
    follow(pixels, [side**2 for side in ((4, 6) if quick else _SIDES)], _LIMIT, conditions, say)
    side = 6 if quick else 24
    orders = by_order(side)
    follow(orders, (1, 2) if quick else _ORDERS, _LIMIT, conditions, say)

    folder.mkdir(parents=True, exist_ok=True)
    layer = "20 fields, 9 heads of 10"
    draw(folder / "scaling_pixels.png", f"C$_4$, one image, {layer}", "pixels", pixels, time_slopes=(1, 2))
    title = f"C$_n$, one image of {side}×{side}, {layer}"
    draw(folder / "scaling_group.png", title, "elements of the group", orders, time_slopes=(1, 2, 3))
    return Report(
        "scaling",
        conditions,
        data={
            "pixels": [curve.as_dict("pixels") for curve in pixels],
            "order": [curve.as_dict("order") for curve in orders],
            "limit_seconds": _LIMIT,
        },
        tables=[
            curve_table("Against the number of pixels (C4)", "pixels", pixels),
            curve_table("Against the order of the group (Cn)", "elements", orders),
        ],
        notes=[f"{curve.name}: {curve.stopped}" for curve in (*pixels, *orders) if curve.stopped is not None],
    )


def by_pixels() -> list[Curve]:
    """Curves over the number of pixels of a square image, for C4."""

    def attention(kernel_size: int | None, query: Poses, encoding: str) -> Callable[[int], Attention]:
        return lambda n: Attention("c4", _square(n), 1, kernel_size=kernel_size, query=query, encoding=encoding)

    return [
        Curve("5×5, own", attention(5, "own", "mlp")),
        Curve("5×5, all", attention(5, "all", "mlp")),
        Curve("global, own", attention(None, "own", "fourier")),
        Curve("global, all", attention(None, "all", "fourier")),
        Curve("R2Conv 5×5", lambda n: Convolution("c4", _square(n), 1), baseline=True),
    ]


def by_order(side: int) -> list[Curve]:
    """Curves over the order n of the group Cn. Windows are discs, which are the same for all of them."""

    def attention(query: Poses) -> Callable[[int], Attention]:
        return lambda n: Attention(f"c{n}", (side, side), 1, kernel_size=5, query=query, window="disc")

    return [
        Curve("disc of 5, own", attention("own")),
        Curve("disc of 5, all", attention("all")),
        Curve("R2Conv 5×5", lambda n: Convolution(f"c{n}", (side, side), 1), baseline=True),
    ]


def _square(pixels: int) -> tuple[int, int]:
    side = round(pixels**0.5)
    return side, side
