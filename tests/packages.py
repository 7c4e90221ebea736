"""What the tests of files have in common, of programs and of packages that AOTInductor compiles."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule

from escnn_attention.exporting.loops import why_no_loops
from escnn_attention.functional.points import portable

NEEDS_LOOPS = pytest.mark.skipif(why_no_loops() is not None, reason=why_no_loops() or "there are loops")

# What a machine does that has neither package: arguments are the file, inputs with what is expected of them, and the
# folder of this package's libraries.
ELSEWHERE = """
sys.modules["escnn"] = sys.modules["escnn_attention"] = None
import torch
run = torch._inductor.aoti_load_package(sys.argv[1])
for inputs, expected in torch.load(sys.argv[2]):
    for found, y in zip(run(*inputs), expected, strict=True):
        assert found.dtype == y.dtype and torch.equal(found.isnan(), y.isnan())
        print(float((found - y).nan_to_num().abs().max() / y.nan_to_num().abs().max().clamp(min=1)))
try:
    maps = open("/proc/self/maps").read()
except FileNotFoundError:
    maps = ""
assert sys.argv[3] not in maps
"""


def exported(layer: nn.Module) -> nn.Module:
    """The plain module of a layer in eval mode, none of whose parameters is as it is initialised."""
    for parameter in layer.eval().parameters():
        parameter.data.add_(0.1 * parameter.data.new_empty(parameter.shape).normal_())
    return layer.export()


def in_onnx(made: ExportedProgram | nn.Module, *example: Tensor | None, **options: Any) -> Callable[..., list[Tensor]]:
    """What ONNX is made of a program, or of a module and examples of its arguments: a function of tensors."""
    runtime = pytest.importorskip("onnxruntime")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        written = torch.onnx.export(made, example, dynamo=True, verbose=False, **options)
    session = runtime.InferenceSession(written.model_proto.SerializeToString())
    names = [argument.name for argument in session.get_inputs()]

    def run(*tensors: Tensor | None) -> list[Tensor]:
        arrays = (t.detach().numpy() for t in tensors if t is not None)
        return list(map(torch.from_numpy, session.run(None, dict(zip(names, arrays, strict=True)))))

    return run


def check_files(plain: nn.Module, x: Tensor, folder: Path) -> None:
    """The saved program of a module for any number of images, and what ONNX is made of it."""
    program = torch.export.export(plain, (x,), dynamic_shapes=({0: torch.export.Dim.AUTO},), strict=False)
    torch.export.save(program, folder / "n.pt2")
    for images in (x, x[:1]):
        torch.testing.assert_close(torch.export.load(folder / "n.pt2").module()(images), plain(images))
    (found,) = in_onnx(program)(x)
    torch.testing.assert_close(found, plain(x), rtol=1e-5, atol=1e-5)


def write_down(patch: pytest.MonkeyPatch) -> None:
    """Have everything done as it is written down, with loops in Python, and without writing it."""
    patch.setattr(torch.compiler, "_is_exporting_flag", True)
    patch.setattr(portable, "while_loop", _in_python)


def _in_python(condition: Callable[..., Tensor], body: Callable[..., Any], carried: tuple[Tensor, ...]) -> Any:
    while condition(*carried):
        carried = body(*carried)
    return carried


def times_written(program: ExportedProgram, operator: str) -> int:
    """How many times a program calls operators whose names contain this."""
    return sum(operator in name for name in operators(program))


def operators(program: ExportedProgram) -> list[str]:
    """The names of all operators that a program calls, those in loops too."""
    graphs = (part.graph for part in program.graph_module.modules() if isinstance(part, GraphModule))
    return [str(node.target) for graph in graphs for node in graph.nodes if node.op == "call_function"]
