"""Compiled loops as operators of packages."""

import os
import re
import shutil

import pytest
import torch
from escnn import gspaces
from escnn.nn import FieldType, GeometricTensor
from torch._inductor import config

from escnn_attention import GroupSelfAttention, PairKernel, PointSelfAttention
from escnn_attention.exporting import packaged
from escnn_attention.functional.grid import native
from escnn_attention.functional.native.arguments import Members
from escnn_attention.functional.points import native as between_points_native

C4 = gspaces.rot2dOnR2(4)


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
            packed = kernel.structure.pack(Members(tensors, integers, numbers))
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


def check_operator(layer, arguments, run_here, monkeypatch) -> None:
    """The operator in place of the loop of a layer does the same, and what it says of itself."""
    with torch.no_grad():
        y = layer(*arguments).tensor
        monkeypatch.undo()
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
