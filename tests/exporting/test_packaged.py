"""Compiled loops as operators of packages, and packages of layers on points."""

import os
import re
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from escnn import gspaces
from escnn.nn import FieldType, GeometricTensor
from torch import Tensor, nn
from torch._inductor import config
from torch.export import Dim, ExportedProgram

import escnn_attention as ea
from escnn_attention import GroupSelfAttention, PairKernel, PointSelfAttention
from escnn_attention.exporting import packaged
from escnn_attention.exporting.mode import for_package
from escnn_attention.functional import BETWEEN_POINTS
from escnn_attention.functional.grid import native
from escnn_attention.functional.native import build
from escnn_attention.functional.points import native as between_points_native
from escnn_attention.models import compile_package
from tests import spaces
from tests.packages import ELSEWHERE, NEEDS_LOOPS, exported, times_written

C4 = gspaces.rot2dOnR2(4)
FIELDS = spaces.regular(C4, 2)
AUTO = {0: Dim.AUTO}
BATCH = torch.tensor([1, 0, 0, 1, 1, 0, 1, 1])

LOOPS = {"grids": native._packaged_loop, "points": between_points_native._packaged_loop}
KERNELS = {"grids": native.KERNEL, "points": between_points_native.KERNEL}
SHAPE = (2, 3, 9, 5, 8)


class Calls(torch.nn.Module):
    """Calls the operator of a loop for one precision or both."""

    def __init__(self, loop: str, *dtypes: torch.dtype):
        super().__init__()
        self.loop, self.dtypes = loop, dtypes

    def forward(self, x):
        operators = [getattr(torch.ops.escnn_attention, LOOPS[self.loop].operators[dtype]) for dtype in self.dtypes]
        return [o([x.to(t), None], [1], [0.5], SHAPE) for o, t in zip(operators, self.dtypes, strict=True)]


def program(*dtypes: torch.dtype, loop: str = "grids") -> torch.export.ExportedProgram:
    return torch.export.export(Calls(loop, *dtypes), (torch.randn(3),), strict=False)


@pytest.mark.parametrize("loop", LOOPS)
def test_an_output_of_the_shape_that_is_given(loop):
    (output,) = program(torch.float64, loop=loop).graph.output_node().args[0]
    assert output.meta["val"].shape == SHAPE
    assert output.meta["val"].dtype == torch.float64


@pytest.mark.parametrize("loop", LOOPS)
def test_the_operator_has_no_code_in_this_process(loop):
    with pytest.raises(NotImplementedError, match=LOOPS[loop].operators[torch.float32]):
        Calls(loop, torch.float32)(torch.randn(3))


@pytest.fixture
def run_here(monkeypatch):
    """Gives the operators the loops of this process, and writes down what they are called with."""
    calls = []

    def given(kernel):
        def attend(tensors, integers, numbers, shape):
            calls.append((tensors, integers, numbers, shape))
            names = re.findall(r"\w+(?=;)", kernel.header.read_text())
            values = dict(zip(names, [*tensors, *integers, *numbers], strict=False))
            out = values["v"].new_zeros(shape)
            # As many sums as there are at most.
            sums = out.new_empty(2 * out.numel() * values["query_poses"])
            tensors = list(tensors)
            tensors[names.index("out")], tensors[names.index("sums")] = out, sums
            pointers = [0 if t is None else t.data_ptr() for t in tensors]
            packed = kernel.structure.packed.pack(*pointers, *integers, *numbers)
            assert not kernel._function(out.dtype)(packed)
            return out

        return attend

    library = torch.library.Library("escnn_attention", "IMPL")
    for name, loop in LOOPS.items():
        for operator in loop.operators.values():
            library.impl(operator, given(KERNELS[name]), "CPU")
    monkeypatch.setattr(native._loop, "operator", native._packaged)
    monkeypatch.setattr(between_points_native, "_operator", between_points_native._packaged)
    yield calls
    library._destroy()


@pytest.mark.skipif(native.why_not_built(torch.float64) is not None, reason="there is no compiled loop")
@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (GroupSelfAttention, {"kernel_size": 3, "query": "own"}),
        (GroupSelfAttention, {"kernel_size": 3, "query": "all", "keys": "own"}),
        (GroupSelfAttention, {"kernel_size": None, "encoding": "fourier"}),
        (GroupSelfAttention, {"kernel_size": None, "encoding": "none"}),
        (PointSelfAttention, {"radius": 1.0}),
        (PointSelfAttention, {"query": "all"}),
        (PointSelfAttention, {"num_neighbours": 3, "encoding": PairKernel(hidden=4), "normalization": "count"}),
        (PointSelfAttention, {"encoding": "fourier"}),
    ],
    ids=str,
)
@pytest.mark.slow
def test_operators_do_what_they_say(kind, options, dtype, run_here, monkeypatch):
    """The operator in place of the loop of a layer does the same, and what it says of itself."""
    fields = FieldType(C4, 2 * [C4.regular_repr])
    layer = kind(fields, fields, num_heads=2, backend="native", **options).to(dtype).eval()
    if on_grids := kind is GroupSelfAttention:
        x = fields(torch.randn(2, fields.size, 5, 4, dtype=dtype))
    else:
        x = GeometricTensor(torch.randn(7, fields.size, dtype=dtype), fields, torch.randn(7, 2, dtype=dtype))
    with torch.no_grad():
        y = layer(x).tensor
        monkeypatch.undo()
        torch.testing.assert_close(y, layer(x).tensor)
    (arguments,) = run_here
    operator = getattr(torch.ops.escnn_attention, LOOPS["grids" if on_grids else "points"].operators[dtype]).default
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(operator, arguments, test_utils=tests)


@pytest.mark.skipif(torch.__version__ < packaged._OLDEST, reason=f"needed PyTorch {packaged._OLDEST} or later")
@pytest.mark.parametrize("loop", LOOPS)
def test_libraries_of_the_precisions_that_are_used(loop, monkeypatch):
    built = []

    def archive(source, number, name, file, include):
        assert source.exists()
        built.append((name, file, number))
        return b"content"

    monkeypatch.setattr(LOOPS[loop], "archive", archive)
    environment = dict(os.environ)
    for dtypes in ((), (torch.float64,), (torch.float32, torch.float64)):
        built.clear()
        with packaged.linked(program(*dtypes, loop=loop)):
            libraries = [name.split(" -L") for name in config.aot_inductor.custom_op_libs]
            assert len(libraries) == len(built) == len(dtypes) == len(config.aot_inductor.custom_ops_to_c_shims)
            for (library, folder), (name, file, number) in zip(libraries, built, strict=True):
                assert (name, file) == (f"LOOP={loop}", f'SOURCE="{loop}.cpp"')
                assert library.rpartition("_")[2] == number.removeprefix("NUMBER=")
                assert sorted(os.listdir(folder)) == sorted(f"lib{name}.a" for name, _ in libraries)
        assert os.environ == environment
        assert not config.aot_inductor.custom_op_libs
        assert not any(os.path.exists(folder) for _, folder in libraries)


def test_why_nothing_can_be_linked(monkeypatch):
    if shutil.which("c++") and torch.__version__ >= packaged._OLDEST:
        assert packaged.why_not_linked() is None
    monkeypatch.setattr(packaged, "_OLDEST", "2.7")
    monkeypatch.setenv("CXX", '"')
    assert "CXX: got" in str(packaged.why_not_linked())
    monkeypatch.setattr(packaged, "_OLDEST", "99.0")
    assert "needed 99.0 or later" in str(packaged.why_not_linked())


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
@pytest.mark.sampled(1, of="programs")
@pytest.mark.parametrize("name", LAYERS)
def test_a_loop_between_points_is_written_down_in_a_package(name, compiler):
    with for_package():
        program = program_of(layer(name))
    assert loops_of(program) == 1
    (output,) = program.graph.output_node().args[0]
    assert not isinstance(output.meta["val"].shape[0], int)


@NEEDS_LOOPS
@pytest.mark.sampled(1, of="programs")
@pytest.mark.parametrize("case", ["no package", "own keys", "elsewhere"])
def test_what_the_loop_between_points_cannot_serve_is_of_pytorch(case, compiler, monkeypatch):
    if case == "elsewhere":
        backend = replace(BETWEEN_POINTS.packaged, why_unsupported=lambda _: "it lies elsewhere")
        monkeypatch.setattr(BETWEEN_POINTS, "packaged", backend)
    with nullcontext() if case == "no package" else for_package():
        assert loops_of(program_of(layer("own keys" if case == "own keys" else "radius"))) == 0
