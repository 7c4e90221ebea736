"""Compiled loops as operators of packages."""

import os
import shutil

import pytest
import torch
from escnn import gspaces
from escnn.nn import FieldType, GeometricTensor
from torch._inductor import config

from escnn_attention import GroupSelfAttention, PairKernel, PointSelfAttention
from escnn_attention.functional.grid import kernel, native
from escnn_attention.functional.native import packaged
from escnn_attention.functional.native.fields import FIELDS
from escnn_attention.functional.points import native as between_points_native

C4 = gspaces.rot2dOnR2(4)


LOOPS = {"grids": packaged.attention_on_grids, "points": packaged.attention_between_points}
# What outputs have their shapes of, and these.
GIVEN = {
    "grids": ({"q": (2, 3, 9, 4, 8), "v": (2, 3, 9, 4, 8)}, (2, 3, 9, 5, 8)),
    "points": ({"v": (2, 7, 4, 8), "queries": (3, 2)}, (2, 6, 5, 8)),
}


class Calls(torch.nn.Module):
    """Calls the operator of a loop for one precision or both."""

    def __init__(self, loop: str, *dtypes: torch.dtype):
        super().__init__()
        self.loop, self.dtypes = loop, dtypes

    def forward(self, *tensors):
        fields = FIELDS[self.loop]
        numbers = {field.name for field in fields.fields if not field.type.endswith("*")}
        values = dict.fromkeys(fields.names) | dict.fromkeys(numbers, 1) | {"num_poses": 5}
        outputs = []
        for dtype in self.dtypes:
            given = {name: t.to(dtype) for name, t in zip(GIVEN[self.loop][0], tensors, strict=True)}
            outputs.append(LOOPS[self.loop](dtype, {**values, **given}, True))
        return outputs


def tensors_of(loop: str) -> list[torch.Tensor]:
    return [torch.randn(shape) for shape in GIVEN[loop][0].values()]


def program(*dtypes: torch.dtype, loop: str = "grids") -> torch.export.ExportedProgram:
    return torch.export.export(Calls(loop, *dtypes), tuple(tensors_of(loop)), strict=False)


@pytest.mark.parametrize("loop", LOOPS)
def test_members_lie_as_the_operator_gives_them(loop):
    """Pointers, whole numbers and numbers, in this order, all as wide."""
    types = [field.type for field in FIELDS[loop].fields]
    kinds = ["pointer" if t.endswith("*") else t for t in types]
    assert kinds == sorted(kinds, key=["pointer", "int64_t", "double"].index)
    assert FIELDS[loop].structure().size == 8 * len(types)


@pytest.mark.parametrize("loop", LOOPS)
def test_an_output_of_all_poses(loop):
    (output,) = program(torch.float64, loop=loop).graph.output_node().args[0]
    assert output.meta["val"].shape == GIVEN[loop][1]
    assert output.meta["val"].dtype == torch.float64


@pytest.mark.parametrize("loop", LOOPS)
def test_the_operator_has_no_code_in_this_process(loop):
    with pytest.raises(NotImplementedError, match=LOOPS[loop].operators[torch.float32]):
        Calls(loop, torch.float32)(*tensors_of(loop))


@pytest.fixture
def run_here(monkeypatch):
    """Gives the operators the loops of this process, and writes down what they are called with."""
    calls = []

    def given(loop, kernel, filled):
        def attend(tensors, integers, numbers, isolating):
            calls.append((tensors, integers, numbers, isolating))
            names = [field.name for field in FIELDS[loop].fields]
            values = dict(zip(names, [*tensors, *integers, *numbers], strict=True))
            values |= filled(values)
            kernel.run(values["v"].dtype, values)
            return values["out"]

        return attend

    def on_grids(values):
        q = values["q"]
        out = q.new_empty(*q.shape[:3], values["num_poses"], q.shape[-1])
        # As many numbers as there are at most.
        return {"out": out, "sums": q.new_empty(2 * q.numel() // q.shape[-1] * values["num_poses"])}

    def between_points(values):
        v, queries, poses = values["v"], values["queries"].numel(), values["num_poses"]
        out = v.new_zeros(len(v), queries, poses, v.shape[3])
        return {"out": out, "sums": v.new_empty(len(v), queries, poses * values["query_poses"], 2)}

    library = torch.library.Library("escnn_attention", "IMPL")
    for name, of_loop in {
        "grids": (native._KERNEL, on_grids),
        "points": (between_points_native._KERNEL, between_points),
    }.items():
        for operator in LOOPS[name].operators.values():
            library.impl(operator, given(name, *of_loop), "CPU")
    for module in (kernel, between_points_native):
        monkeypatch.setattr(module, "packaging", lambda: True)
    yield calls
    library._destroy()


def check_operator(layer, arguments, run_here, monkeypatch) -> None:
    """The operator in place of the loop of a layer does the same, and what it says of itself."""
    with torch.no_grad():
        y = layer(*arguments).tensor
        for module in (kernel, between_points_native):
            monkeypatch.setattr(module, "packaging", lambda: False)
        torch.testing.assert_close(y, layer(*arguments).tensor)
    (arguments,) = run_here
    loop = "grids" if isinstance(layer, GroupSelfAttention) else "points"
    operator = getattr(torch.ops.escnn_attention, LOOPS[loop].operators[y.dtype]).default
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(operator, arguments, test_utils=tests)


@pytest.mark.skipif(native.why_not_built(torch.float64) is not None, reason="there is no compiled loop")
@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"kernel_size": 3, "query": "own"},
        {"kernel_size": 3, "query": "all", "keys": "own"},
        {"kernel_size": None, "encoding": "fourier"},
        {"kernel_size": None, "encoding": "none"},
    ],
    ids=str,
)
def test_operators_do_what_they_say(options, dtype, run_here, monkeypatch):
    fields = FieldType(C4, 2 * [C4.regular_repr])
    layer = GroupSelfAttention(fields, fields, num_heads=2, backend="native", **options).to(dtype).eval()
    x = fields(torch.randn(2, fields.size, 5, 4, dtype=dtype))
    check_operator(layer, (x,), run_here, monkeypatch)


@pytest.mark.skipif(native.why_not_built(torch.float64) is not None, reason="there is no compiled loop")
@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"radius": 1.0},
        {"query": "all"},
        {"num_neighbours": 3, "encoding": PairKernel(hidden=4), "normalization": "count"},
        {"encoding": "fourier"},
    ],
    ids=str,
)
def test_operators_between_points_do_what_they_say(options, dtype, run_here, monkeypatch):
    fields = FieldType(C4, 2 * [C4.regular_repr])
    layer = PointSelfAttention(fields, fields, num_heads=2, backend="native", **options).to(dtype).eval()
    x = GeometricTensor(torch.randn(7, fields.size, dtype=dtype), fields, torch.randn(7, 2, dtype=dtype))
    check_operator(layer, (x,), run_here, monkeypatch)


@pytest.mark.skipif(torch.__version__ < packaged._OLDEST, reason=f"needed PyTorch {packaged._OLDEST} or later")
@pytest.mark.parametrize("loop", LOOPS)
def test_libraries_of_the_precisions_that_are_used(loop, monkeypatch):
    built = []

    def archive(source, number, include):
        assert source.exists()
        built.append((source.stem, number))
        return b"content"

    monkeypatch.setattr(packaged, "archive", archive)
    before = os.environ.get("LIBRARY_PATH")
    for dtypes in ((), (torch.float64,), (torch.float32, torch.float64)):
        built.clear()
        with packaged.linked(program(*dtypes, loop=loop)):
            libraries = config.aot_inductor.custom_op_libs
            assert len(libraries) == len(built) == len(dtypes) == len(config.aot_inductor.custom_ops_to_c_shims)
            folder = os.environ["LIBRARY_PATH"].split(os.pathsep)[0]
            assert sorted(os.listdir(folder)) == sorted(f"lib{name}.a" for name in libraries)
            for library, (source, number) in zip(libraries, built, strict=True):
                assert source == f"packaged_{loop}"
                assert library.rpartition("_")[2] == number.removeprefix("NUMBER=")
        assert os.environ.get("LIBRARY_PATH") == before
        assert not config.aot_inductor.custom_op_libs
        assert not os.path.exists(folder)


def test_why_nothing_can_be_linked(monkeypatch):
    if shutil.which("c++") and torch.__version__ >= packaged._OLDEST:
        assert packaged.why_not_linked() is None
    monkeypatch.setattr(packaged, "_OLDEST", "2.7")
    monkeypatch.setenv("CXX", '"')
    assert "CXX: got" in str(packaged.why_not_linked())
    monkeypatch.setattr(packaged, "_OLDEST", "99.0")
    assert "needed 99.0 or later" in str(packaged.why_not_linked())
