"""Compiled loops inside of packages of AOTInductor.

While a package is made, the program has an operator of a :class:`PackagedLoop` where a layer has its loop. It has a
schema and no code in this process: AOTInductor writes the call of a C function, and links the static library that is
compiled from ``packaged.cpp``. Such a package needs nothing but PyTorch.
"""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

SOURCE = Path(__file__).with_name("packaged.cpp")

_SCHEMA = "(Tensor?[] tensors, SymInt[] integers, float[] numbers, SymInt[] shape) -> Tensor"
_DECLARATION = (
    "AOTITorchError aoti_torch_cpu_{}(const AtenTensorHandle** tensors, int64_t num_tensors, const int64_t* integers,"
    " int64_t num_integers, const double* numbers, int64_t num_numbers, const int64_t* shape, int64_t dim,"
    " AtenTensorHandle* out)"
)

_OLDEST = "2.10"
"""The version of PyTorch whose C interface says how many threads there are."""

# PyTorch 2.7, which cannot link them, has no tag for exact strides.
_TAGS = [getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order), torch.Tag.pt2_compliant_tag]

_library = torch.library.Library("escnn_attention", "FRAGMENT")

Archive = Callable[..., bytes]


class PackagedLoop:
    """The forward pass of a loop as operators of PyTorch for programs of packages, one for each type of numbers.

    The source of the loop ``name`` is ``name.cpp``, which ``archive`` compiles to a static library;
    ``why_not_compiled`` tells why there is no compiler, if there is none.
    """

    def __init__(self, name: str, archive: Archive, why_not_compiled: Callable[[], str | None]):
        self.name, self.archive, self.why_not_compiled = name, archive, why_not_compiled
        self.operators = {t: f"packaged_{name}_{number}" for t, number in _NUMBERS.items()}
        for dtype, operator in self.operators.items():
            _loops[operator] = self, _NUMBERS[dtype]
            _library.define(operator + _SCHEMA, tags=_TAGS)
            torch.library.register_fake(f"escnn_attention::{operator}", _empty, lib=_library)

    def __call__(
        self,
        dtype: torch.dtype,
        members: tuple[list[Tensor | None], list[int], list[float]],
        shape: Sequence[int],
    ) -> Tensor:
        """The output of the loop, of this shape, for the members of the structure of its arguments without results."""
        out: Tensor = getattr(torch.ops.escnn_attention, self.operators[dtype])(*members, shape)
        return out


_NUMBERS = {torch.float32: "float", torch.float64: "double"}
_loops: dict[str, tuple[PackagedLoop, str]] = {}  # of all operators, with the type of the numbers


def _empty(tensors: Sequence[Tensor | None], _: Any, __: Any, shape: Sequence[int]) -> Tensor:
    """Room for the output."""
    return next(t for t in tensors if t is not None).new_empty(shape)


def why_not_linked() -> str | None:
    """Why nothing can be linked into a package, if that is so."""
    if torch.__version__ < _OLDEST:
        return f"got PyTorch {torch.__version__}, needed {_OLDEST} or later, which can link operators into packages"
    return next((loop.why_not_compiled() for loop, _ in _loops.values()), None)


@contextmanager
def linked(program: ExportedProgram) -> Iterator[None]:
    """Within this context AOTInductor links what the operators of a program need.

    Raises:
        OSError: there is no compiler, or it fails.
    """
    from torch._inductor import config
    from torch.utils.cpp_extension import include_paths

    graphs = (module.graph for module in program.graph_module.modules() if isinstance(module, torch.fx.GraphModule))
    targets = {node.target for graph in graphs for node in graph.nodes}
    operators = {name: getattr(torch.ops.escnn_attention, name).default for name in _loops}
    used = {name: operator for name, operator in operators.items() if operator in targets}
    with tempfile.TemporaryDirectory(prefix="escnn_attention") as folder:
        for name in used:
            loop, number = _loops[name]
            definitions = (f"NUMBER={number}", f"LOOP={loop.name}", f'SOURCE="{loop.name}.cpp"')
            content = loop.archive(SOURCE, *definitions, include=tuple(include_paths()))
            Path(folder, f"lib{name}.a").write_bytes(content)
        options = {
            "aot_inductor.custom_ops_to_c_shims": {op: [_DECLARATION.format(name)] for name, op in used.items()},
            # Inductor puts "-l" before each, and has no option for the folder.
            "aot_inductor.custom_op_libs": [f"{name} -L{shlex.quote(folder)}" for name in used],
        }
        with config.patch(options):
            yield
