"""Compiled loops as operators of packages, and packages of layers, which run where neither package is."""

import os
import re
from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

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
from escnn_attention.functional import BETWEEN_POINTS, ON_GRIDS
from escnn_attention.functional.grid import native
from escnn_attention.functional.native import build
from escnn_attention.functional.points import native as between_points_native
from escnn_attention.models import compile_package
from tests import spaces
from tests.packages import ELSEWHERE, NEEDS_LOOPS, exported, times_written

C4 = gspaces.rot2dOnR2(4)
FIELDS = spaces.regular(C4, 2)
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


class Several(nn.Module):
    """The outputs of some layers for the same input; classes say of what."""

    def __init__(self, *layers: nn.Module):
        super().__init__()
        self.parts = nn.ModuleList(layers)

    def each(self, x: Tensor, *at: Tensor, **named: Tensor) -> list[Tensor]:
        return [part(x.to(next(part.parameters()).dtype), *at, **named) for part in self.parts]

    @classmethod
    def layer(cls, name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
        options = (cls.LAYERS | cls.OTHERS)[name]
        return exported(cls.KIND(FIELDS, FIELDS, 2, head_fields=2, **options).to(dtype))


class OnGrids(Several):
    """For any number of images; at first of as many as heads, which a compiler must not take for the same."""

    LOOP, KIND, REGISTRY = "grids", GroupSelfAttention, ON_GRIDS
    LAYERS: ClassVar[dict[str, dict]] = {
        "own keys, dilation": {"kernel_size": 3, "keys": "own", "dilation": 2},
        "all queries": {"kernel_size": 3, "query": "all"},
        "own queries": {"kernel_size": 5},
        "disc, own queries and keys": {"kernel_size": 5, "keys": "own", "window": "disc"},
        "rotary in a window": {"kernel_size": 3, "encoding": ea.RotaryEncoding()},
        "global, Fourier": {"kernel_size": None, "encoding": "fourier"},
        "global, Fourier, all queries": {"kernel_size": None, "encoding": "fourier", "query": "all"},
        "global, rotary": {"kernel_size": None, "encoding": ea.RotaryEncoding()},
        "global, MLP": {"kernel_size": None, "encoding": "mlp"},
        "global, own keys": {"kernel_size": None, "keys": "own"},
        "norm of queries and keys, registers": {"kernel_size": None, "qk_norm": True, "registers": 2},
    }
    OTHERS: ClassVar[dict[str, dict]] = {}
    TOGETHER = ("own keys, dilation", "global, Fourier", "all queries")
    FREE = ({0: Dim("batch", max=2**31 - 1)},)  # PyTorch 2.7 needs a bound

    def forward(self, x: Tensor) -> list[Tensor]:
        return self.each(x)

    @staticmethod
    def example(number: int = 2) -> tuple[Tensor]:
        return (torch.randn(number, FIELDS.size, 7, 7, dtype=torch.float64),)

    def cases(self) -> list[tuple[Tensor]]:
        """Other numbers of images; the last are not finite, but for one."""
        (spoilt,) = self.example(3)
        spoilt[0, 3, 1, 2], spoilt[1, 0, 5, 5] = torch.nan, torch.inf
        return [self.example(3), self.example(1), (spoilt,)]

    @staticmethod
    def finite(y: Tensor) -> Tensor:
        return y[2]


class OnPoints(Several):
    """For any number of points and clouds."""

    LOOP, KIND, REGISTRY = "points", PointSelfAttention, BETWEEN_POINTS
    LAYERS: ClassVar[dict[str, dict]] = {
        "whole clouds": {},
        "radius": {"radius": 1.5},
        "neighbours": {"num_neighbours": 3, "query": "all"},
        "Fourier": {"encoding": "fourier", "radius": 2.0},
        "rotary": {"encoding": ea.RotaryEncoding()},
        "kernel": {"encoding": PairKernel(hidden=4), "normalization": "count"},
        "motions": {"encoding": PairKernel(hidden=4), "relation": ea.LogMotion()},
    }
    OTHERS: ClassVar[dict[str, dict]] = {"own keys": {"keys": "own", "radius": 1.5}}  # which the loop does not serve
    TOGETHER = ("whole clouds", "own keys", "radius")
    FREE = 3 * ({0: Dim.AUTO},)

    def forward(self, x: Tensor, coords: Tensor, batch: Tensor) -> list[Tensor]:
        return self.each(x, coords, batch=batch)

    @staticmethod
    def example(batch: Tensor = BATCH) -> tuple[Tensor, Tensor, Tensor]:
        number = len(batch)
        return *(torch.randn(number, size, dtype=torch.float64) for size in (FIELDS.size, 2)), batch

    def cases(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Other numbers of points, clouds and neighbours, in any order; and clouds that are of very different sizes.

        A feature of the last is not finite, of one point of the first cloud.
        """
        batches = torch.arange(21) % 4, torch.tensor([0, 7, *([3] * 12)]), torch.zeros(5, dtype=torch.long)
        spoilt = self.example()
        spoilt[0][1, 3] = torch.nan
        return [self.example(), *map(self.example, batches), spoilt]

    @staticmethod
    def finite(y: Tensor) -> Tensor:
        return y[BATCH == 1]


def compiled(plain: Several, folder) -> Callable[..., list[Tensor]]:
    file = compile_package(plain, plain.example(), folder / "n.pt2", dynamic_shapes=plain.FREE)
    return torch._inductor.aoti_load_package(str(file))


@pytest.fixture
def compiler() -> None:
    if reason := packaged.why_not_linked():
        pytest.skip(reason)


def check_values(run: Callable[..., list[Tensor]], plain: Several, tolerances: list[float]) -> None:
    """Those of other inputs, too; and what is not finite stays in its image or cloud."""
    for inputs in (cases := plain.cases()):
        for found, y, tolerance in zip(run(*inputs), plain(*inputs), tolerances, strict=True):
            assert torch.equal(found.isnan(), y.isnan())
            assert (found - y).nan_to_num().abs().max() <= tolerance * y.nan_to_num().abs().max()
    for y in plain(*cases[-1]):
        assert y.isnan().any()
        assert not plain.finite(y).isnan().any()


kinds = pytest.mark.parametrize("kind", [OnGrids, pytest.param(OnPoints, marks=NEEDS_LOOPS)])


@kinds
@pytest.mark.sampled(1, of="exported files")
@pytest.mark.usefixtures("compiler")
@torch.no_grad()
def test_a_package_where_neither_package_is(kind, tmp_path, run_python):
    """Loops of both precisions, and what they do not serve."""
    dtypes, tolerances = (torch.float32, torch.float32, torch.float64), [1e-5, 1e-5, 1e-12]
    plain = kind(*map(kind.layer, kind.TOGETHER, dtypes))
    run, cases = compiled(plain, tmp_path), plain.cases()
    torch.save([(inputs, plain(*inputs)) for inputs in cases], tmp_path / "inputs.pt")
    errors = run_python(ELSEWHERE, tmp_path / "n.pt2", tmp_path / "inputs.pt", build._folder()).split()
    assert len(errors) == 3 * len(cases)
    for error, tolerance in zip(map(float, errors), len(cases) * tolerances, strict=True):
        assert error < tolerance
    check_values(run, plain, tolerances)


@kinds
@pytest.mark.exhaustive
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@torch.no_grad()
def test_packages_of_all_kinds_of_layers(kind, tmp_path, dtype):
    """In one package: most of the time goes by for what all have in common."""
    plain = kind(*(kind.layer(name, dtype) for name in kind.LAYERS | kind.OTHERS))
    run, tolerances = compiled(plain, tmp_path), len(plain.parts) * [1e-5 if dtype == torch.float32 else 1e-12]
    check_values(run, plain, tolerances)


def program_of(kind: type[Several], name: str) -> ExportedProgram:
    x, *at = kind.example()
    plain = kind(kind.layer(name))
    return torch.export.export(plain, (x.float(), *at), dynamic_shapes=kind.FREE, strict=False)


def loops_of(kind: type[Several], name: str) -> int:
    return times_written(program_of(kind, name), f"packaged_{kind.LOOP}")


@pytest.mark.sampled(1, of="programs")
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *((OnGrids, name) for name in OnGrids.LAYERS),
        *(pytest.param(OnPoints, name, marks=NEEDS_LOOPS) for name in OnPoints.LAYERS),
    ],
)
def test_a_loop_is_written_down_once_and_for_packages_only(kind, name, compiler):
    with for_package():
        program = program_of(kind, name)
    assert times_written(program, f"packaged_{kind.LOOP}") == 1
    (output,) = program.graph.output_node().args[0]
    assert not isinstance(output.meta["val"].shape[0], int)
    assert loops_of(kind, name) == 0


@pytest.mark.sampled(1, of="programs")
@pytest.mark.parametrize(
    ("kind", "name", "elsewhere"),
    [
        (OnGrids, "own queries", True),
        pytest.param(OnPoints, "radius", True, marks=NEEDS_LOOPS),
        pytest.param(OnPoints, "own keys", False, marks=NEEDS_LOOPS),
    ],
)
def test_what_the_loop_cannot_serve_is_of_pytorch(kind, name, elsewhere, compiler, monkeypatch):
    if elsewhere:
        backend = replace(kind.REGISTRY.packaged, why_unsupported=lambda _: "it lies elsewhere")
        monkeypatch.setattr(kind.REGISTRY, "packaged", backend)
    with for_package():
        assert loops_of(kind, name) == 0
