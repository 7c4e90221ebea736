"""The loop over grids inside of packages that AOTInductor compiles: an operator that is linked into the package.

While a package is made, a traced program has :func:`attention_on_grids` where a layer has its loop. This operator has
a schema and no code in this process: AOTInductor writes the call of a C function, and links the static library that
:func:`linked` has a compiler make of ``packaged.cpp``. Such a package needs nothing but PyTorch.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from escnn_attention.functional.native.build import FOLDER, NotBuilt, archive, find_compiler
from escnn_attention.functional.native.fields import FIELDS

__all__ = ["attention_on_grids", "linked", "why_not_linked"]

_SCHEMA = "(Tensor?[] tensors, SymInt[] integers, float[] numbers, bool in_windows) -> Tensor"
_DECLARATION = (
    "AOTITorchError aoti_torch_cpu_{}(const AtenTensorHandle** tensors, int64_t num_tensors, const int64_t* integers,"
    " int64_t num_integers, const double* numbers, int64_t num_numbers, int32_t in_windows, AtenTensorHandle* out)"
)

_POINTERS = [field.name for field in FIELDS["grids"].fields if field.type.endswith("*")]
_INTEGERS = [field.name for field in FIELDS["grids"].fields if field.type == "int64_t"]
_NUMBERS = [field.name for field in FIELDS["grids"].fields if field.type == "double"]

_OPERATORS = {torch.float32: "attention_on_grids_float", torch.float64: "attention_on_grids_double"}
"""The names of the operators for each type of numbers, that of C++ at their end."""

_OLDEST = "2.10"
"""The version of PyTorch whose C interface says how many threads there are."""

_library = torch.library.Library("escnn_attention", "FRAGMENT")


def _empty(tensors: list[Tensor], integers: list[int], *_: Any) -> Tensor:
    """Room for the output."""
    q, sizes = tensors[_POINTERS.index("q")], dict(zip(_INTEGERS, integers, strict=True))
    return q.new_empty(*q.shape[:3], sizes["num_poses"], q.shape[-1])


for _name in _OPERATORS.values():
    _library.define(_name + _SCHEMA, tags=[torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag])
    torch.library.register_fake(f"escnn_attention::{_name}", _empty, lib=_library)


def attention_on_grids(dtype: torch.dtype, values: Mapping[str, Any], in_windows: bool) -> Tensor:
    """The output of the loop, ``(M, B, N, H, C)``, in a program that a package is made of.

    Args:
        dtype: of the numbers.
        values: all fields of the loop by name, None for what there is not.
        in_windows: whether what is not finite has to be kept from those who do not see it.
    """
    flags = {key: int(value) for key, value in values.items() if isinstance(value, bool)}
    fields = ([{**values, **flags}[key] for key in keys] for keys in (_POINTERS, _INTEGERS, _NUMBERS))
    out: Tensor = getattr(torch.ops.escnn_attention, _OPERATORS[dtype])(*fields, in_windows)
    return out


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
    operators = [getattr(torch.ops.escnn_attention, name).default for name in _OPERATORS.values()]
    used = {operator._opname: operator for operator in operators if operator in targets}
    with tempfile.TemporaryDirectory(prefix="escnn_attention") as folder:
        for name in used:
            definition = f"NUMBER={name.rpartition('_')[2]}"
            content = archive(FOLDER / "packaged.cpp", definition, include=tuple(include_paths()))
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
