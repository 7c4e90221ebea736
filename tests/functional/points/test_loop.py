"""The compiled loop between points inside of packages of AOTInductor."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from escnn import gspaces
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

import escnn_attention as ea
from escnn_attention.exporting import packaged
from escnn_attention.exporting.mode import for_package
from escnn_attention.functional import BETWEEN_POINTS
from escnn_attention.functional.native import build
from escnn_attention.models import compile_package
from tests import spaces
from tests.packages import ELSEWHERE, NEEDS_LOOPS, exported, times_written

C4 = gspaces.rot2dOnR2(4)
FIELDS = spaces.regular(C4, 2)
AUTO = {0: Dim.AUTO}
BATCH = torch.tensor([1, 0, 0, 1, 1, 0, 1, 1])

LAYERS: dict[str, dict] = {
    "whole clouds": {},
    "radius": {"radius": 1.5},
    "neighbours": {"num_neighbours": 3, "query": "all"},
    "Fourier": {"encoding": "fourier", "radius": 2.0},
    "rotary": {"encoding": ea.RotaryEncoding()},
    "kernel": {"encoding": ea.PairKernel(hidden=4), "normalization": "count"},
    "motions": {"encoding": ea.PairKernel(hidden=4), "relation": ea.LogMotion()},
}
# What the loop does not serve.
OTHERS: dict[str, dict] = {"own keys": {"keys": "own", "radius": 1.5}}


class Several(nn.Module):
    """The outputs of some layers for the same points."""

    def __init__(self, *layers: nn.Module):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, coords: Tensor, batch: Tensor) -> list[Tensor]:
        return [layer(x.to(next(layer.parameters()).dtype), coords, batch=batch) for layer in self.layers]


def layer(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    options = {**LAYERS, **OTHERS}[name]
    made = ea.PointSelfAttention(FIELDS, FIELDS, 2, head_fields=2, **options).to(dtype)
    return exported(made)


def points(batch: Tensor = BATCH) -> tuple[Tensor, Tensor, Tensor]:
    number = len(batch)
    x, coords = torch.randn(number, FIELDS.size, dtype=torch.float64), torch.randn(number, 2, dtype=torch.float64)
    return x, coords, batch


def spoilt(batch: Tensor = BATCH) -> tuple[Tensor, Tensor, Tensor]:
    """A feature that is not finite, of one point of the first cloud."""
    x, coords, batch = points(batch)
    x[1, 3] = torch.nan
    return x, coords, batch


def cases() -> list[tuple[Tensor, Tensor, Tensor]]:
    """Other numbers of points, clouds and neighbours, in any order; and clouds that are of very different sizes."""
    several, uneven = torch.arange(21) % 4, torch.tensor([0, 7, *([3] * 12)])
    return [points(), points(several), points(uneven), points(torch.zeros(5, dtype=torch.long)), spoilt()]


def compiled(plain: nn.Module, folder) -> Callable[..., list[Tensor]]:
    file = compile_package(plain, points(), folder / "n.pt2", dynamic_shapes=(AUTO, AUTO, AUTO))
    return torch._inductor.aoti_load_package(str(file))


@pytest.fixture
def compiler() -> None:
    if reason := packaged.why_not_linked():
        pytest.skip(reason)


def check_equivariance(run: Callable[..., list[Tensor]], tolerances: list[float]) -> None:
    """And the output is not the same for every element."""
    x, coords, batch = points()
    turn, other = list(C4.testing_elements)[1:3]

    def turned(y: Tensor, element) -> Tensor:
        matrix = torch.from_numpy(FIELDS.representation(element)).to(y)
        return y @ matrix.T

    rotation = torch.from_numpy(C4.basespace_action(turn)).to(coords)
    outputs, found = run(x, coords, batch), run(turned(x, turn), coords @ rotation.T, batch)
    for y, of_turned, tolerance in zip(outputs, found, tolerances, strict=True):
        expected = turned(y, turn)
        assert (of_turned - expected).abs().max() <= tolerance * expected.abs().max()
        assert (of_turned - turned(y, other)).abs().max() > 0.1 * expected.abs().max()


def check_values(run: Callable[..., list[Tensor]], plain: nn.Module, tolerances: list[float]) -> None:
    """Those of other numbers of points, too; and what is not finite stays in its cloud."""
    for inputs in cases():
        for found, y, tolerance in zip(run(*inputs), plain(*inputs), tolerances, strict=True):
            assert torch.equal(found.isnan(), y.isnan())
            assert (found - y).nan_to_num().abs().max() <= tolerance * y.nan_to_num().abs().max()
            if inputs[0].isnan().any():
                assert found.isnan().any()
                assert not found[BATCH == 1].isnan().any()


@NEEDS_LOOPS
@pytest.mark.sampled(1, of="exported files")
@pytest.mark.usefixtures("compiler")
@torch.no_grad()
def test_a_package_of_points_where_neither_package_is(tmp_path, run_python):
    """Loops of both precisions, and what they do not serve, for any number of points and clouds."""
    plain = Several(layer("whole clouds"), layer("own keys"), layer("radius", torch.float64))
    run, tolerances = compiled(plain, tmp_path), [1e-5, 1e-5, 1e-12]
    torch.save([(inputs, plain(*inputs)) for inputs in cases()], tmp_path / "inputs.pt")
    errors = run_python(ELSEWHERE, tmp_path / "n.pt2", tmp_path / "inputs.pt", build._folder()).split()
    assert len(errors) == 3 * len(cases())
    for error, tolerance in zip(map(float, errors), len(cases()) * tolerances, strict=True):
        assert error < tolerance
    check_values(run, plain, tolerances)
    check_equivariance(run, tolerances)


@NEEDS_LOOPS
@pytest.mark.exhaustive
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@torch.no_grad()
def test_packages_of_all_kinds_of_layers_on_points(tmp_path, dtype):
    """In one package: most of the time goes by for what all have in common."""
    names = [*LAYERS, *OTHERS]
    plain, tolerance = Several(*(layer(name, dtype) for name in names)), 1e-5 if dtype == torch.float32 else 1e-12
    run = compiled(plain, tmp_path)
    check_values(run, plain, len(names) * [tolerance])
    check_equivariance(run, len(names) * [tolerance])


def program_of(plain: nn.Module) -> ExportedProgram:
    x, coords, batch = points()
    return torch.export.export(
        plain, (x.float(), coords), {"batch": batch}, dynamic_shapes={"x": AUTO, "coords": AUTO, "batch": AUTO}
    )


def loops_of(program: ExportedProgram) -> int:
    return times_written(program, "packaged_points")


@NEEDS_LOOPS
@pytest.mark.sampled(2, of="programs of points")
@pytest.mark.parametrize("name", LAYERS)
def test_a_loop_between_points_is_written_down_in_a_package(name, compiler):
    with for_package():
        program = program_of(layer(name))
    assert loops_of(program) == 1
    (output,) = program.graph.output_node().args[0]
    assert not isinstance(output.meta["val"].shape[0], int)


@NEEDS_LOOPS
@pytest.mark.sampled(2, of="programs of points")
@pytest.mark.parametrize("case", ["no package", "own keys", "elsewhere"])
def test_what_the_loop_between_points_cannot_serve_is_of_pytorch(case, compiler, monkeypatch):
    if case == "elsewhere":
        backend = replace(BETWEEN_POINTS.packaged, why_unsupported=lambda _: "it lies elsewhere")
        monkeypatch.setattr(BETWEEN_POINTS, "packaged", backend)
    with nullcontext() if case == "no package" else for_package():
        assert loops_of(program_of(layer("own keys" if case == "own keys" else "radius"))) == 0
