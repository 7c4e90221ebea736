"""Layers and networks as packages that AOTInductor compiles, with the compiled loops of attention inside."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from escnn.nn import EquivariantModule

from escnn_attention._export import with_loops
from escnn_attention.functional.native.packaged import linked, why_not_linked

__all__ = ["compile_package"]


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
    with with_loops():
        program = torch.export.export(plain, args, dict(kwargs or {}), dynamic_shapes=dynamic_shapes)
    with linked(program):
        return Path(torch._inductor.aoti_compile_and_package(program, package_path=str(path)))
