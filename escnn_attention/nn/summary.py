"""Parameters, memory and operations of a network, layer by layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from escnn.nn import EquivariantModule, GeometricTensor, IdentityModule
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, addmm_flop

from escnn_attention._checks import check_int
from escnn_attention.equivariance.inspection import evaluating
from escnn_attention.functional import BETWEEN_POINTS, ON_GRIDS, Backend, GridCall, PointCall
from escnn_attention.functional.call import Call
from escnn_attention.geometry.grid import Grid

_COUNTING = "counting operations"
_CHUNK = 1 << 20  # pairs of positions that are looked at at once


@dataclass(frozen=True)
class LayerSummary:
    """Parameters, memory and operations of a layer.

    Example:
        >>> from escnn_attention import FieldLayerNorm, summary
        >>> from escnn import gspaces, nn
        >>> g = gspaces.rot2dOnR2(4)
        >>> row = summary(FieldLayerNorm(nn.FieldType(g, [g.regular_repr])), (1, 4, 5, 5)).total  # a LayerSummary
        >>> row.kind, row.parameters, row.memory
        ('FieldLayerNorm', 2, 400)

    Attributes:
        name: in the network; empty for the network itself.
        kind: the name of its class.
        output: the shape of its output, as it was when the layer was first called.
        parameters: the number of trained numbers in it.
        memory: the bytes of its output, and of the outputs of the layers inside.
        operations: multiplications and additions of a forward pass.
    """

    name: str
    kind: str
    output: tuple[int, ...]
    parameters: int
    memory: int
    operations: int


@dataclass(frozen=True)
class Summary:
    """A table of layers, which ``print`` shows; the last row is the whole network.

    Example:
        >>> from escnn_attention import summary
        >>> from escnn_attention.models import HybridNet
        >>> from escnn import gspaces
        >>> network = HybridNet(gspaces.rot2dOnR2(4), 1, 10, widths=(4, 4), convolutions=(1, 0), attention=(0, 1))
        >>> table = summary(network, (1, 1, 28, 28))  # a Summary
        >>> [row.name for row in table.rows]
        ['stages.convolution_1_1', 'stages.pool_1', 'stages.attention_2_1', 'stages.norm', 'head', '']
        >>> table.total.parameters == sum(parameter.numel() for parameter in network.parameters())
        True
    """

    rows: tuple[LayerSummary, ...]

    @property
    def total(self) -> LayerSummary:
        """The row of the whole network."""
        return self.rows[-1]

    def __str__(self) -> str:
        head = ("layer", "output", "parameters", "memory", "operations")
        table = [
            (
                f"{row.name} ({row.kind})" if row.name else f"in all ({row.kind})",
                "×".join(map(str, row.output)),
                f"{row.parameters:,}",
                _short(row.memory, "B"),
                _short(row.operations),
            )
            for row in self.rows
        ]
        widths = [max(map(len, column)) for column in zip(head, *table, strict=True)]
        lines = [
            "  ".join(text.ljust(width) if i < 2 else text.rjust(width) for i, (text, width) in enumerate(pairs))
            for pairs in (zip(row, widths, strict=True) for row in (head, *table))
        ]
        rule = "-" * len(lines[0])
        return "\n".join([lines[0], rule, *lines[1:-1], rule, lines[-1]])


def summary(network: torch.nn.Module, *inputs: Any, depth: int = 1) -> Summary:
    r"""Parameters, memory and operations of a network, layer by layer.

    The network is called once, in eval mode and without gradients. Operations are those of the formula, whatever
    backend a layer takes: twice the multiply-adds of convolutions and matrix products, as
    :class:`torch.utils.flop_counter.FlopCounterMode` counts them, and for attention

    .. math:: 4 \, C M B \, |H| \, |Q| \, |K| \; \#\{(x, x') : x' \in N(x)\}

    for the scores and the sums of M heads of C channels in B images, with :math:`|Q|` query poses for each of the
    :math:`|H|` poses and :math:`|K|` key poses for each of these; pairs beyond the border are none. Pointwise
    operations are not counted. Memory is that of the outputs: what a training keeps is of that order, and attention
    keeps no scores.

    Args:
        network: any module: escnn's, of this package, of your own.
        inputs: what the network is called with; or one shape ``(B, C, *space)``, for which zeros are made.
        depth: how far down layers are listed: 1 for those of the network itself, 2 for what blocks and sequences among
            them are made of, and so on. What is inside a single layer is not listed.

    Raises:
        TypeError: ``network`` is no module, or there are no inputs.
        ValueError: ``depth`` is below 1, or the network refuses the input.

    Example:
        >>> from escnn_attention import GroupSelfAttention, summary
        >>> from escnn import gspaces, nn
        >>> g = gspaces.rot2dOnR2(4)
        >>> image, fields = nn.FieldType(g, [g.trivial_repr]), nn.FieldType(g, 4 * [g.regular_repr])
        >>> attention = GroupSelfAttention(fields, fields, num_heads=2, kernel_size=5)
        >>> print(summary(nn.SequentialModule(nn.R2Conv(image, fields, 3, padding=1), attention), (1, 1, 16, 16)))
        layer                      output      parameters   memory  operations
        ----------------------------------------------------------------------
        0 (R2Conv)                 1×16×16×16          28  16.4 kB      73.7 k
        1 (GroupSelfAttention)     1×16×16×16         396  16.4 kB      1.95 M
        ----------------------------------------------------------------------
        in all (SequentialModule)  1×16×16×16         424  32.8 kB      2.02 M

    Source: torch.utils.flop_counter for what is counted of PyTorch's operations.
    """
    if not isinstance(network, torch.nn.Module):
        raise TypeError(f"network: got {type(network).__name__}, needed a torch.nn.Module")
    check_int("depth", depth)
    arguments = _arguments(network, inputs)
    layers = dict(_layers(network, depth))
    outputs: dict[str, Tensor] = {}
    handles = [
        module.register_forward_hook(_keeper(name, outputs)) for name, module in [*layers.items(), ("", network)]
    ]
    # PyTorch counts no products that are added in place.
    counter = FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: addmm_flop})
    try:
        with evaluating(network), torch.no_grad(), _counted(network, counter), counter:
            network(*arguments)
    finally:
        for handle in handles:
            handle.remove()
    counts = {str(name): sum(of.values()) for name, of in counter.get_flop_counts().items()}
    root = type(network).__name__
    rows = [
        _row(name, module, outputs[name], counts.get(f"{root}.{name}", 0))
        for name, module in layers.items()
        if name in outputs
    ]
    whole = _row("", network, outputs.get("", torch.empty(0)), counts.get("Global", 0))
    return Summary((*rows, replace(whole, memory=sum(row.memory for row in rows) or whole.memory)))


def _arguments(network: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments for a call of the network."""
    if not inputs:
        raise TypeError(
            "inputs: got none, needed what the network is called with, or a shape (batch, channels, *space)"
        )
    (first, *others) = inputs
    if others or isinstance(first, (Tensor, GeometricTensor)):
        return inputs
    if not isinstance(first, (tuple, list)) or not all(isinstance(n, int) for n in first):
        raise TypeError(f"inputs: got {first!r}, needed tensors, or one shape (batch, channels, *space)")
    like = next((p for p in network.parameters() if p.is_floating_point()), torch.empty(0))
    x = torch.zeros(*first, dtype=like.dtype, device=like.device)
    in_type = getattr(network, "in_type", None)
    return (GeometricTensor(x, in_type) if isinstance(network, EquivariantModule) and in_type is not None else x,)


def _layers(network: torch.nn.Module, depth: int, prefix: str = "") -> Iterator[tuple[str, torch.nn.Module]]:
    """The layers to list, by name: containers of others count as one level only where they are called themselves."""
    for name, module in network.named_children():
        path = f"{prefix}{name}"
        if isinstance(module, (torch.nn.ModuleDict, torch.nn.ModuleList)):
            yield from _layers(module, depth, f"{path}.")
        elif depth > 1 and _is_transparent(module):
            yield from _layers(module, depth - 1, f"{path}.")
        elif not isinstance(module, (torch.nn.Identity, IdentityModule)):
            yield path, module


def _is_transparent(module: torch.nn.Module) -> bool:
    """Whether a module is made of equivariant ones, or of ordinary ones: not the work of a single layer."""
    if isinstance(module, EquivariantModule):
        return any(isinstance(child, EquivariantModule) for child in module.children())
    return any(True for _ in module.children())


def _keeper(name: str, outputs: dict[str, Tensor]) -> Any:
    def keep(module: torch.nn.Module, arguments: Any, out: Any) -> None:
        found = out.tensor if isinstance(out, GeometricTensor) else out
        if isinstance(found, Tensor):
            outputs.setdefault(name, torch.empty_like(found, device="meta"))

    return keep


@contextmanager
def _counted(network: torch.nn.Module, counter: FlopCounterMode) -> Iterator[None]:
    """Count the attentions of a network in this block instead of computing them."""

    def note(operations: int) -> None:
        for module in set(counter.mod_tracker.parents):
            counter.flop_counts[module][_COUNTING] += operations

    def on_grids(call: GridCall) -> Tensor:
        note(_operations(call, call.q.shape[1] * _pairs_on(call.query_grid)))
        return call.v.new_zeros(*call.q.shape[:3], call.num_poses, call.v.shape[-1])

    def between_points(call: PointCall) -> Tensor:
        chunks = call.query_points.neighbours(call.key_points).chunks(_CHUNK)
        pairs = sum(int(((c.queries >= 0).sum(-1) * (c.keys >= 0).sum(-1)).sum()) for c in chunks)
        note(_operations(call, pairs))
        if call.values is not None:  # a kernel in place of a sum
            return BETWEEN_POINTS.compute(call)
        return call.v.new_zeros(*call.q.shape[:3], call.num_poses, call.v.shape[-1])

    attending = [m for m in network.modules() if isinstance(getattr(m, "backend", None), str)]
    before = [(module, module.backend) for module in attending]
    try:
        ON_GRIDS.backends[_COUNTING] = Backend(on_grids, isolates_nonfinite=True, folds=False)
        BETWEEN_POINTS.backends[_COUNTING] = Backend(between_points, isolates_nonfinite=True, folds=False)
        for module in attending:
            module.backend = _COUNTING  # type: ignore[assignment]
        yield
    finally:
        for module, backend in before:
            module.backend = backend
        for registry in (ON_GRIDS, BETWEEN_POINTS):
            registry.backends.pop(_COUNTING, None)


def _operations(call: Call, pairs: int) -> int:
    """The operations of the scores and of the sums of the values, 2 C each for a pair of positions and of poses."""
    heads, _, _, query_poses, channels = call.q.shape
    seen = 1 if call.keys == "own" else call.k.shape[3]
    asking = query_poses if call.query == "all" else 1
    return 4 * channels * heads * call.num_poses * asking * seen * pairs


def _pairs_on(grid: Grid) -> int:
    """The number of pairs of a query and a key on a grid."""
    number = grid.num_positions
    if grid.complete:
        return number * number
    keys = torch.arange(number)
    step = max(1, _CHUNK // number)
    return sum(int((grid.rows(q[:, None], keys) >= 0).sum()) for q in keys.split(step))


def count_parameters(network: torch.nn.Module) -> int:
    """The number of trainable numbers in a network."""
    return sum(p.numel() for p in network.parameters() if p.requires_grad)


def _row(name: str, module: torch.nn.Module, out: Tensor, operations: int) -> LayerSummary:
    memory = out.numel() * out.element_size()
    return LayerSummary(name, type(module).__name__, tuple(out.shape), count_parameters(module), memory, operations)


def _short(number: int, unit: str = "") -> str:
    """A number with three digits."""
    size = 0
    value = float(number)
    while value >= 999.5 and size < 4:
        value, size = value / 1000, size + 1
    digits = f"{value:.3g}" if size else f"{number}"
    return f"{digits} {['', 'k', 'M', 'G', 'T'][size]}{unit}".rstrip()
