"""``files``: exported files against their layers, without gradients."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.export import Dim

from escnn_attention import GroupSelfAttention, PointSelfAttention
from escnn_attention.models import HybridNet, compile_package
from examples.benchmarks.measure import Build, Place, Step, Subject
from examples.benchmarks.report import Report, Run
from examples.benchmarks.subjects import clouds, gspace, regular

_MOST = 1.2  # times the time of the layer


class Example(NamedTuple):
    """A module, its inputs, and which of their sizes are free in its file."""

    module: torch.nn.Module
    inputs: tuple[Tensor, ...]
    named: dict[str, Tensor]
    sizes: dict[str, Any] | tuple[Any, ...]


def grid_layer(size: int, batch: int, place: Place) -> Example:
    """The layer of ``layers`` with ``query="own"``: 20 fields of C4, 9 heads of 10 channels, windows of 5×5."""
    kind = regular("c4", 20)
    layer = GroupSelfAttention(kind, kind, 9, 5, head_fields=10)
    return Example(layer, (torch.randn(batch, kind.size, size, size, **place),), {}, ({0: Dim("batch")},))


def network(size: int, batch: int, place: Place) -> Example:
    """A hybrid of C4, with global attention at its end."""
    hybrid = HybridNet(
        gspace("c4"), 1, 10, widths=[8, 16, 16], convolutions=[1, 1, 0], attention=[0, 0, 1], kernel_size=None
    )
    return Example(hybrid, (torch.randn(batch, 1, size, size, **place),), {}, ({0: Dim("batch")},))


def points(space: str, number: int, batch: int, fields: int, neighbours: int | None, place: Place) -> Example:
    """Attention with two heads between all points of a cloud, or about ``neighbours`` of them within a radius."""
    kind = regular(space, fields)
    dim = kind.gspace.dimensionality
    volume = torch.pi if dim == 2 else 4 / 3 * torch.pi
    radius = None if neighbours is None else (neighbours / volume) ** (1 / dim)
    layer = PointSelfAttention(kind, kind, 2, radius=radius)
    coords, owners = clouds(number, batch, dim, place)
    free = {0: Dim.AUTO}
    named = {} if owners is None else {"batch": owners}
    inputs = torch.randn(len(coords), kind.size, **place), coords
    return Example(layer, inputs, named, dict.fromkeys(("x", "coords", *named), free))


CASES: dict[str, Callable[[Place], Example]] = {
    "C4, 24×24, windows of 5×5": partial(grid_layer, 24, 8),
    "C4, HybridNet, 28×28": partial(network, 28, 8),
    "C4, a cloud of 200": partial(points, "c4", 200, 1, 8, None),
    "C4, 16 clouds of 18": partial(points, "c4", 18, 16, 8, None),
    "C4, a cloud of 1,000, 45 neighbours": partial(points, "c4", 1000, 1, 8, 45),
    "octahedral, a cloud of 200": partial(points, "octahedral", 200, 1, 4, None),
    "octahedral, 16 clouds of 18": partial(points, "octahedral", 18, 16, 4, None),
    "octahedral, a cloud of 1,000, 45 neighbours": partial(points, "octahedral", 1000, 1, 4, 45),
}
QUICK: dict[str, Callable[[Place], Example]] = {
    "C4, 6×6, windows of 5×5": partial(grid_layer, 6, 2),
    "C4, 2 clouds of 3": partial(points, "c4", 3, 2, 2, None),
}


def files(run: Run) -> Report:
    """The time of a call of each form of each example. A quick run has no packages, which take long to compile."""
    report, rows = Report("files", run), []
    names, forms = (QUICK, [form for form in FORMS if form != "package"]) if run.quick else (CASES, list(FORMS))
    for name in names:
        subjects: dict[str, Subject] = {f"{name}, {form}": partial(in_form, name, form) for form in forms}
        report.measure(subjects)
        layer, *others = subjects
        ratios = {other: report.ratio(other, layer)["seconds"] for other in others}
        cells = [
            report.check(f"{name}: time of a package / layer", value, "≤", _MOST)
            if other.endswith("package")
            else "–"
            if value is None
            else f"{value:.2f}"
            for other, value in ratios.items()
        ]
        rows.append([name, report.cost(layer)[0], *cells])
    report.table("Files, without gradients, by the time of the layer", ["example", *forms], rows)
    return report


def in_form(case: str, form: str) -> Build:
    """A call of an example, directly or from an exported file."""

    def build(place: Place) -> Step:
        example = (CASES | QUICK)[case](place)
        plain = example.module.to(**place).eval().export()
        call = FORMS[form](plain, example)

        def step() -> None:
            with torch.no_grad():
                call()

        return step

    return build


def _layer(plain: torch.nn.Module, example: Example) -> Callable[[], object]:
    return lambda: plain(*example.inputs, **example.named)


def _package(plain: torch.nn.Module, example: Example) -> Callable[[], object]:
    _, inputs, named, sizes = example
    with tempfile.TemporaryDirectory() as folder:
        file = compile_package(plain, inputs, Path(folder) / "it.pt2", kwargs=named, dynamic_shapes=sizes)
        run = torch._inductor.aoti_load_package(str(file))
    return lambda: run(*inputs, **named)


def _exported(plain: torch.nn.Module, example: Example) -> torch.export.ExportedProgram:
    return torch.export.export(plain, example.inputs, example.named, dynamic_shapes=example.sizes)


def _program(plain: torch.nn.Module, example: Example) -> Callable[[], object]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "it.pt2"
        torch.export.save(_exported(plain, example), file)
        run = torch.export.load(file).module()
    return lambda: run(*example.inputs, **example.named)


def _onnx(plain: torch.nn.Module, example: Example) -> Callable[[], object]:
    import onnxruntime

    made = torch.onnx.export(_exported(plain, example), dynamo=True, verbose=False)
    assert made is not None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(made.model_proto.SerializeToString(), options)
    given = [t.numpy() for t in (*example.inputs, *example.named.values())]
    arrays = dict(zip([i.name for i in session.get_inputs()], given, strict=True))
    return lambda: session.run(None, arrays)


FORMS = {"layer": _layer, "package": _package, "program": _program, "ONNX": _onnx}
"""As it is; compiled by ``compile_package``; ``torch.export.load(...).module()``; in onnxruntime."""
