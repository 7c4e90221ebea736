"""The table of a comparison on a terminal."""

from __future__ import annotations

from rich.table import Table

from escnn_attention.training.comparison.compare import Comparison
from escnn_attention.training.comparison.measure import NetworkResult
from escnn_attention.training.comparison.networks import DESCRIPTIONS, TITLES


def result_table(comparison: Comparison) -> Table:
    """The table at the end of a comparison."""
    elements = comparison.elements
    table = Table(title="Accuracy on test images (%)", caption=_caption(comparison), caption_justify="left")
    table.add_column("network", no_wrap=True)
    table.add_column("upright", justify="right")
    if elements:
        table.add_column(_elements_title(elements).replace(" ", "\n"), justify="right")
    table.add_column("any\nangle", justify="right")
    table.add_column("parameters", justify="right")
    table.add_column("s per\nepoch", justify="right")
    if elements:
        table.add_column("equiv.\nerror", justify="right")
    for result in comparison.results:
        table.add_row(*_cells(result, bool(elements)))
    return table


def _cells(result: NetworkResult, with_elements: bool) -> list[str]:
    cells = [TITLES[result.network], f"{100 * result.accuracy_upright:.1f}"]
    if with_elements:
        assert result.accuracy_rotated is not None  # measured for every network of a group that keeps the grid
        cells.append(f"{100 * result.accuracy_rotated:.1f}")
    cells += [f"{100 * result.accuracy_any_angle:.1f}", f"{result.parameters:,}", f"{result.seconds_per_epoch:.2f}"]
    if with_elements:
        cells.append("–" if result.equivariance_error is None else f"{result.equivariance_error:.0e}")
    return cells


def _elements_title(elements: list[str]) -> str:
    if any(name.startswith("mirror") for name in elements):
        return "rotated, mirrored" if len(elements) > 1 else "mirrored"
    return "half turn" if elements == ["180°"] else "quarter turns"


def _caption(comparison: Comparison) -> str:
    data = comparison.data
    lines = [
        f"Data: {data.source}; {len(data.train[0])} to train, {len(data.test[0])} to test.",
        "; ".join(f"{TITLES[r.network]}: {DESCRIPTIONS[r.network]}" for r in comparison.results) + ".",
        f"upright: {data.upright}, as in training.",
    ]
    if comparison.elements:
        lines.append(
            f"{_elements_title(comparison.elements)}: each test image transformed by {'; '.join(comparison.elements)}."
        )
    lines.append("any angle: each test image rotated by a random angle, with cubic interpolation.")
    if comparison.elements:
        lines.append("equiv. error: worst relative change of the logits under these elements, in float64.")
    return "\n".join(lines)
