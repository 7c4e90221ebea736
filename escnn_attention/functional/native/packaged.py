"""Compiled loops inside of packages that AOTInductor compiles: operators that are linked into the package.

While a package is made, a traced program has an operator of :data:`LOOPS` where a layer has its loop. This operator has
a schema and no code in this process: AOTInductor writes the call of a C function, and links the static library that
:func:`linked` has a compiler make of ``packaged_grids.cpp`` or ``packaged_points.cpp``. Such a package needs nothing
but PyTorch.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from escnn_attention.functional.native.build import FOLDER, NotBuilt, archive, find_compiler
from escnn_attention.functional.native.fields import FIELDS

__all__ = ["LOOPS", "PackagedLoop", "attention_between_points", "attention_on_grids", "linked", "why_not_linked"]

_SCHEMA = "(Tensor?[] tensors, SymInt[] integers, float[] numbers, bool isolating) -> Tensor"
_DECLARATION = (
    "AOTITorchError aoti_torch_cpu_{}(const AtenTensorHandle** tensors, int64_t num_tensors, const int64_t* integers,"
    " int64_t num_integers, const double* numbers, int64_t num_numbers, int32_t isolating, AtenTensorHandle* out)"
)

_OLDEST = "2.10"
"""The version of PyTorch whose C interface says how many threads there are."""

# PyTorch 2.7, which cannot link them, has no tag for exact strides.
_TAGS = [getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order), torch.Tag.pt2_compliant_tag]

_library = torch.library.Library("escnn_attention", "FRAGMENT")


class PackagedLoop:
    """A loop as operators of PyTorch for a program that a package is made of, one for each type of numbers.

    Args:
        name: of the operators; that of the type in C++ is put behind it.
        fields: the name of the list of fields of the loop, and of its source.
        shape: that of the output, of all fields by name.

    Attributes:
        operators: their names, for each type of numbers.
        source: the C++ file.
    """

    def __init__(self, name: str, fields: str, shape: Callable[[Mapping[str, Any]], tuple[int, ...]]):
        types = {field.name: field.type for field in FIELDS[fields].fields}
        self._pointers = [key for key, value in types.items() if value.endswith("*")]
        self._integers = [key for key, value in types.items() if value == "int64_t"]
        self._numbers = [key for key, value in types.items() if value == "double"]
        self._shape = shape
        self.source = FOLDER / f"packaged_{fields}.cpp"
        self.operators = {torch.float32: f"{name}_float", torch.float64: f"{name}_double"}
        for operator in self.operators.values():
            _library.define(operator + _SCHEMA, tags=_TAGS)
            torch.library.register_fake(f"escnn_attention::{operator}", self._empty, lib=_library)

    def __call__(self, dtype: torch.dtype, values: Mapping[str, Any], isolating: bool = False) -> Tensor:
        """The output of the loop.

        Args:
            dtype: of the numbers.
            values: all fields of the loop by name, None for what there is not.
            isolating: whether what is not finite has to be kept from those who do not see it, where the loop by itself
                does not.
        """
        flags = {key: int(value) for key, value in values.items() if isinstance(value, bool)}
        fields = (
            [{**values, **flags}[key] for key in keys] for keys in (self._pointers, self._integers, self._numbers)
        )
        out: Tensor = getattr(torch.ops.escnn_attention, self.operators[dtype])(*fields, isolating)
        return out

    def _empty(self, tensors: list[Tensor], integers: list[int], *_: Any) -> Tensor:
        """Room for the output."""
        given: dict[str, Any] = {
            **dict(zip(self._pointers, tensors, strict=True)),
            **dict(zip(self._integers, integers, strict=True)),
        }
        return given["v"].new_empty(self._shape(given))


def _of_positions(values: Mapping[str, Any]) -> tuple[int, ...]:
    """The shape of an output on a grid, ``(M, B, N, H, C)``."""
    q = values["q"]
    return (*q.shape[:3], values["num_poses"], q.shape[-1])


def _of_queries(values: Mapping[str, Any]) -> tuple[int, ...]:
    """The shape of an output between points, ``(M, G · A, H, C)``."""
    v, queries = values["v"], values["queries"]
    return v.shape[0], queries.shape[0] * queries.shape[1], values["num_poses"], v.shape[3]


attention_on_grids = PackagedLoop("attention_on_grids", "grids", _of_positions)
attention_between_points = PackagedLoop("attention_between_points", "points", _of_queries)

LOOPS = (attention_on_grids, attention_between_points)
"""All loops that packages can have."""


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
    sources = {name: loop.source for loop in LOOPS for name in loop.operators.values()}
    operators = {name: getattr(torch.ops.escnn_attention, name).default for name in sources}
    used = {name: operator for name, operator in operators.items() if operator in targets}
    with tempfile.TemporaryDirectory(prefix="escnn_attention") as folder:
        for name in used:
            definition = f"NUMBER={name.rpartition('_')[2]}"
            content = archive(sources[name], definition, include=tuple(include_paths()))
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
