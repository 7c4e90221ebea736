"""Compiled loops inside of packages that AOTInductor compiles: operators that are linked into the package.

While a package is made, the traced program has an operator of a :class:`PackagedLoop` where a layer has its loop. It
has a schema and no code in this process: AOTInductor writes the call of a C function, and links the static library
that :func:`linked` compiles. Such a package needs nothing but PyTorch.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic

import torch
from torch import Tensor
from torch.export import ExportedProgram

from escnn_attention.functional.native.arguments import Arguments, Results
from escnn_attention.functional.native.build import Kernel, NotBuilt, archive, find_compiler

__all__ = ["PackagedLoop", "linked", "why_not_linked"]

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
_sources: dict[str, Path] = {}  # of all operators


class PackagedLoop(Generic[Arguments, Results]):
    """The forward pass of a loop as operators of PyTorch for the program of a package, one for each type of numbers.

    Args:
        kernel: the loop.
        source: the C++ file of the operators.

    Attributes:
        operators: their names, for each type of numbers.
    """

    def __init__(self, kernel: Kernel[Arguments, Results], source: Path):
        self._structure = kernel.structure
        name = source.stem
        self.operators = {torch.float32: f"{name}_float", torch.float64: f"{name}_double"}
        for operator in self.operators.values():
            _sources[operator] = source
            _library.define(operator + _SCHEMA, tags=_TAGS)
            torch.library.register_fake(f"escnn_attention::{operator}", _empty, lib=_library)

    def __call__(self, dtype: torch.dtype, arguments: Arguments, results: Results, shape: Sequence[int]) -> Tensor:
        """The output of the loop.

        Args:
            dtype: of the numbers.
            arguments: the arguments of the loop.
            results: all None.
            shape: of the output.
        """
        members = self._structure.members(arguments, results)
        out: Tensor = getattr(torch.ops.escnn_attention, self.operators[dtype])(*members, shape)
        return out


def _empty(tensors: Sequence[Tensor | None], _: Any, __: Any, shape: Sequence[int]) -> Tensor:
    """Room for the output."""
    return next(t for t in tensors if t is not None).new_empty(shape)


def why_not_linked() -> str | None:
    """Why nothing can be linked into a package, if that is so."""
    if torch.__version__ < _OLDEST:
        return f"got PyTorch {torch.__version__}, needed {_OLDEST} or later, which can link operators into packages"
    try:
        find_compiler()
    except NotBuilt as reason:
        return str(reason)
    return None


@contextmanager
def linked(program: ExportedProgram) -> Iterator[None]:
    """Within this context AOTInductor links what the operators of a program need.

    Raises:
        NotBuilt: there is no compiler, or it fails.
    """
    from torch._inductor import config
    from torch.utils.cpp_extension import include_paths

    targets = {node.target for module in program.graph_module.modules() for node in _nodes(module)}
    operators = {name: getattr(torch.ops.escnn_attention, name).default for name in _sources}
    used = {name: operator for name, operator in operators.items() if operator in targets}
    with tempfile.TemporaryDirectory(prefix="escnn_attention") as folder:
        for name in used:
            definition = f"NUMBER={name.rpartition('_')[2]}"
            content = archive(_sources[name], definition, include=tuple(include_paths()))
            Path(folder, f"lib{name}.a").write_bytes(content)
        shims = {operator: [_DECLARATION.format(name)] for name, operator in used.items()}
        options = {"aot_inductor.custom_ops_to_c_shims": shims, "aot_inductor.custom_op_libs": list(used)}
        with _library_path(folder), config.patch(options):
            yield


def _nodes(module: torch.nn.Module) -> Iterable[torch.fx.Node]:
    return module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ()


@contextmanager
def _library_path(folder: str) -> Iterator[None]:
    """Within this context linkers look into a folder for libraries."""
    before = os.environ.get("LIBRARY_PATH")
    os.environ["LIBRARY_PATH"] = os.pathsep.join(filter(None, [folder, before]))
    try:
        yield
    finally:
        if before is None:
            del os.environ["LIBRARY_PATH"]
        else:
            os.environ["LIBRARY_PATH"] = before
