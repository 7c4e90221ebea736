"""The loop over grids as an operator of packages."""

import os
import shutil

import pytest
import torch
from escnn import gspaces
from escnn.nn import FieldType
from torch._inductor import config

from escnn_attention import GroupSelfAttention
from escnn_attention.functional.backends import grid_loop, native
from escnn_attention.functional.native import packaged
from escnn_attention.functional.native.fields import FIELDS

C4 = gspaces.rot2dOnR2(4)


class Calls(torch.nn.Module):
    """Calls the operator for one precision or both."""

    def __init__(self, *dtypes: torch.dtype):
        super().__init__()
        self.dtypes = dtypes

    def forward(self, q):
        values = dict.fromkeys(FIELDS["grids"].names) | dict.fromkeys(NUMBERS, 1)
        return [packaged.attention_on_grids(t, {**values, "q": q.to(t), "num_poses": 5}, True) for t in self.dtypes]


NUMBERS = {field.name for field in FIELDS["grids"].fields if not field.type.endswith("*")}


def program(*dtypes: torch.dtype) -> torch.export.ExportedProgram:
    return torch.export.export(Calls(*dtypes), (torch.randn(2, 3, 9, 4, 8),))


def test_members_lie_as_the_operator_gives_them():
    """Pointers, whole numbers and numbers, in this order, all as wide."""
    types = [field.type for field in FIELDS["grids"].fields]
    kinds = ["pointer" if t.endswith("*") else t for t in types]
    assert kinds == sorted(kinds, key=["pointer", "int64_t", "double"].index)
    assert FIELDS["grids"].structure().size == 8 * len(types)


def test_an_output_of_all_poses():
    (output,) = program(torch.float64).graph.output_node().args[0]
    assert output.meta["val"].shape == (2, 3, 9, 5, 8)
    assert output.meta["val"].dtype == torch.float64


def test_the_operator_has_no_code_in_this_process():
    with pytest.raises(NotImplementedError, match="attention_on_grids_float"):
        Calls(torch.float32)(torch.randn(2, 3, 9, 4, 8))


@pytest.fixture
def run_here(monkeypatch):
    """Gives the operators the loop of this process, and writes down what they are called with."""
    calls = []

    def attend(tensors, integers, numbers, in_windows):
        calls.append((tensors, integers, numbers, in_windows))
        names = [field.name for field in FIELDS["grids"].fields]
        values = dict(zip(names, [*tensors, *integers, *numbers], strict=True))
        q = values["q"]
        values["out"] = q.new_empty(*q.shape[:3], values["num_poses"], q.shape[-1])
        # More than there are sums.
        values["sums"] = q.new_empty(q.numel() // q.shape[-1] * values["num_poses"])
        native._KERNEL.run(q.dtype, values)
        return values["out"]

    library = torch.library.Library("escnn_attention", "IMPL")
    for name in packaged._OPERATORS.values():
        library.impl(name, attend, "CPU")
    monkeypatch.setattr(grid_loop, "packaging", lambda: True)
    yield calls
    library._destroy()


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
    with torch.no_grad():
        y = layer(x).tensor
        monkeypatch.setattr(grid_loop, "packaging", lambda: False)
        torch.testing.assert_close(y, layer(x).tensor)
    (arguments,) = run_here
    operator = getattr(torch.ops.escnn_attention, packaged._OPERATORS[dtype]).default
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(operator, arguments, test_utils=tests)


def test_libraries_of_the_precisions_that_are_used(monkeypatch):
    built = []
    monkeypatch.setattr(packaged, "archive", lambda source, number, include: built.append(number) or b"content")
    before = os.environ.get("LIBRARY_PATH")
    for dtypes in ((), (torch.float64,), (torch.float32, torch.float64)):
        built.clear()
        with packaged.linked(program(*dtypes)):
            libraries = config.aot_inductor.custom_op_libs
            assert len(libraries) == len(built) == len(dtypes) == len(config.aot_inductor.custom_ops_to_c_shims)
            folder = os.environ["LIBRARY_PATH"].split(os.pathsep)[0]
            assert sorted(os.listdir(folder)) == sorted(f"lib{name}.a" for name in libraries)
            for library, number in zip(libraries, built, strict=True):
                assert library.rpartition("_")[2] == number.removeprefix("NUMBER=")
        assert os.environ.get("LIBRARY_PATH") == before
        assert not config.aot_inductor.custom_op_libs
        assert not os.path.exists(folder)


def test_why_nothing_can_be_linked(monkeypatch):
    if shutil.which("c++"):
        assert packaged.why_not_linked() is None
    monkeypatch.setenv("CXX", '"')
    assert "CXX: got" in str(packaged.why_not_linked())
    monkeypatch.setattr(packaged, "_OLDEST", "99.0")
    assert "needed 99.0 or later" in str(packaged.why_not_linked())
