"""Modules of escnn on plain tensors: their exports, and compiled packages."""

from __future__ import annotations

import copy
import itertools
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from escnn.nn import (
    EquivariantModule,
    FieldDropout,
    FieldType,
    GeometricTensor,
    IdentityModule,
    PointwiseDropout,
    SequentialModule,
)
from torch import Tensor

from escnn_attention.exporting.mode import for_package
from escnn_attention.exporting.packaged import linked, why_not_linked


def exported(module: EquivariantModule) -> torch.nn.Module:
    """A module of escnn or of this package, or a sequence of both, as a plain torch module in eval mode.

    It is ``module.export()`` in the precision and on the device of the module, where some of escnn's exports make new
    modules in PyTorch's default precision, on the CPU, and copy numbers into them. Modules that escnn has no export of,
    such as ``NormNonLinearity`` or ``PointwiseAvgPoolAntialiased2D``, are copied and given tensors: these need escnn to
    run, while a file that :func:`torch.export.export` or :func:`torch.onnx.export` makes of them does not.

    Args:
        module: from fields on a grid to fields on a grid.

    Returns:
        a module on tensors ``(B, module.in_type.size, *space)``, with the same values.

    Raises:
        NotImplementedError: a module has no export, and takes more than the tensor of its input, or gives several.

    Example:
        >>> import torch
        >>> from escnn_attention import GroupSelfAttention
        >>> from escnn_attention.models import exported
        >>> from escnn import gspaces, nn
        >>> g = gspaces.rot2dOnR2(4)
        >>> vectors = nn.FieldType(g, 2 * [g.irrep(1)])
        >>> net = nn.SequentialModule(nn.NormNonLinearity(vectors), GroupSelfAttention(vectors, vectors, 1, 3))
        >>> exported(net)(torch.randn(1, 4, 5, 5)).shape
        torch.Size([1, 4, 5, 5])
    """
    module.eval()
    if isinstance(module, (IdentityModule, PointwiseDropout, FieldDropout)):
        return torch.nn.Identity().eval()
    if type(module).export is SequentialModule.export:
        parts = OrderedDict(
            (name, exported(part) if isinstance(part, EquivariantModule) else copy.deepcopy(part))
            for name, part in module.named_children()
        )
        return torch.nn.Sequential(parts).eval()
    tensors = itertools.chain(module.parameters(), module.buffers())
    like = next((t for t in tensors if t.is_floating_point()), None)
    default = torch.get_default_dtype()
    if like is not None:
        torch.set_default_dtype(like.dtype)
    try:
        with nullcontext() if like is None else like.device:
            plain: torch.nn.Module = module.export()
    except NotImplementedError:
        plain = _without_export(module)
    finally:
        torch.set_default_dtype(default)
    return plain.eval()


def exported_parts(
    module: torch.nn.Module, plain_type: Callable[..., torch.nn.Module], leave_out: Collection[str] = ()
) -> torch.nn.Module:
    """The plain module of a type whose arguments have the names of the parts of ``module``, from exports of these."""
    module.eval()

    def plain(part: torch.nn.Module) -> torch.nn.Module:
        if isinstance(part, torch.nn.ModuleList):
            return torch.nn.ModuleList(map(plain, part))
        return exported(part) if isinstance(part, EquivariantModule) else copy.deepcopy(part)

    # Not named_children(), which leaves out a module that is two parts at once.
    parts = {name: part for name, part in module._modules.items() if part is not None and name not in leave_out}
    return plain_type(**{name: plain(part) for name, part in parts.items()}).eval()


class OnTensors(torch.nn.Module):
    """An equivariant module on grids, from the tensor of its input to that of its output."""

    def __init__(self, module: EquivariantModule):
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        """The module on features ``(B, in_type.size, *space)``."""
        y: Tensor = self.module(GeometricTensor(x, self.module.in_type)).tensor
        return y


class _Copy(OnTensors):
    """A copy of an equivariant module, which can be traced."""

    def __init__(self, module: EquivariantModule):
        super().__init__(copy.deepcopy(module))
        for part in self.module.modules():
            if type(part).__module__.partition(".")[0] != "escnn":
                continue
            # escnn keeps the two ends of slices in tensors, whose numbers are unknown while a program is traced.
            for name, buffer in list(part.named_buffers(recurse=False, remove_duplicate=False)):
                if buffer.dtype == torch.long and buffer.shape == (2,):
                    delattr(part, name)
                    setattr(part, name, buffer.tolist())


def _without_export(module: EquivariantModule) -> torch.nn.Module:
    """A stand-in for the export of a module that has none in escnn."""
    name = type(module).__name__
    in_type, out_type = getattr(module, "in_type", None), getattr(module, "out_type", None)
    if not (isinstance(in_type, FieldType) and isinstance(out_type, FieldType)):
        raise NotImplementedError(
            f"exported: {name} takes or gives several fields, and has no export; needed one from a field to a field,"
            " such as the module that contains it"
        )
    if name.endswith("PointConv"):
        raise NotImplementedError(
            f"exported: {name} reads coordinates and edges, and has no export; needed PointSelfAttention or"
            " PointTransformer, whose export() takes them"
        )
    return _Copy(module)


def compile_package(
    plain: torch.nn.Module,
    args: tuple[Any, ...],
    file: str | Path,
    *,
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
) -> Path:
    """Compile a plain module to a package that runs about as fast as it does, and needs only PyTorch.

    It is what ``torch._inductor.aoti_compile_and_package`` makes of the program of :func:`torch.export.export`, but
    that attention on grids and between points is the loop of backend ``"native"``, which is linked into the package,
    where PyTorch's own operators take several times as long. What that loop cannot serve, such as what lies on CUDA,
    and between points keys of the query's own pose and values that pass through a kernel, stays with PyTorch's
    operators.

    All of a package is compiled for the processor that is there, and others may be unable to run it. It takes a minute
    or two, and a C++ compiler. As every package of AOTInductor it looks at the sizes of its inputs only where the
    environment has ``AOTI_RUNTIME_CHECK_INPUTS=1``: with images of another size it is undefined what it gives.

    Args:
        plain: what ``export()`` or :func:`exported` gives, in eval mode.
        args: examples of its inputs; of what is to be of any size, two or more.
        file: the package, ``.pt2``, for ``torch._inductor.aoti_load_package``.
        kwargs: examples of inputs by name.
        dynamic_shapes: which sizes are free, as :func:`torch.export.export` takes them.

    Returns:
        the file.

    Raises:
        TypeError: ``plain`` takes a ``GeometricTensor``.
        ValueError: another suffix.
        RuntimeError: no C++ compiler, or a PyTorch before 2.10.

    Example:
        >>> import torch
        >>> from escnn_attention import GroupSelfAttention
        >>> from escnn_attention.models import compile_package
        >>> from escnn import gspaces, nn
        >>> g = gspaces.rot2dOnR2(4)
        >>> fields = nn.FieldType(g, 2 * [g.regular_repr])
        >>> layer = GroupSelfAttention(fields, fields, num_heads=1, kernel_size=3)
        >>> try:
        ...     compile_package(layer, (torch.randn(2, 8, 9, 9),), "layer.pt2")
        ... except TypeError as error:
        ...     print(error)
        plain: got GroupSelfAttention, whose fields have types, needed the module that its export() gives
    """
    if isinstance(plain, EquivariantModule):
        name = type(plain).__name__
        raise TypeError(f"plain: got {name}, whose fields have types, needed the module that its export() gives")
    path = Path(file)
    if path.suffix != ".pt2":
        raise ValueError(f"file: got {path}, needed a name that ends in .pt2")
    if reason := why_not_linked():
        raise RuntimeError(f"compile_package: {reason}")
    with for_package():
        program = torch.export.export(plain, args, dict(kwargs or {}), dynamic_shapes=dynamic_shapes)
    with linked(program):
        return Path(torch._inductor.aoti_compile_and_package(program, package_path=str(path)))
