"""The costs of the kinds of attention, between the same fields."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor

import escnn_attention  # noqa: F401  # isort: skip  # before escnn
import torch
from escnn import gspaces, nn

from escnn_attention import AttentiveConv, FeatureAttention, GroupSelfAttention, PoseAttention
from examples.benchmarks.measure import PeakMemory

_KERNEL = 3
_WINDOW = 5
_STEPS = 7

Layer = Callable[[nn.FieldType], nn.EquivariantModule]


def _convolution(**options: bool) -> Layer:
    return lambda fields: AttentiveConv(fields, fields, _KERNEL, padding=_KERNEL // 2, **options)


def _in_front(attention: Layer) -> Layer:
    plain = _convolution(channel=False, spatial=False)
    return lambda fields: nn.SequentialModule(attention(fields), plain(fields))


LAYERS: dict[str, Layer] = {
    "`R2Conv`": lambda fields: nn.R2Conv(fields, fields, _KERNEL, padding=_KERNEL // 2),
    "`AttentiveConv`, no attention": _convolution(channel=False, spatial=False),
    "`PoseAttention`, then the same": _in_front(PoseAttention),
    "`FeatureAttention`, then the same": _in_front(FeatureAttention),
    "`AttentiveConv`, channel": _convolution(spatial=False),
    "`AttentiveConv`, spatial": _convolution(channel=False),
    "`AttentiveConv`, full": _convolution(),
    '`GroupSelfAttention`, `query="own"`': lambda fields: GroupSelfAttention(fields, fields, 1, _WINDOW),
    '`GroupSelfAttention`, `query="all"`': lambda fields: GroupSelfAttention(fields, fields, 1, _WINDOW, query="all"),
}
"""By name, from the type of its input and output to a layer."""


def measure(name: str, number: int, size: int, batch: int) -> tuple[float, int, int]:
    """One layer between ``number`` regular fields of C4, in this process and in one thread.

    Returns:
        the least processor time of a forward and a backward pass in seconds; the peak memory in bytes above that of the
        process before the layer was made; the number of parameters.
    """
    torch.set_num_threads(1)
    gspace = gspaces.rot2dOnR2(4)

    def build(count: int, side: int, images: int) -> Callable[[], None]:
        nonlocal layer
        fields = nn.FieldType(gspace, count * [gspace.regular_repr])
        layer = LAYERS[name](fields)
        x = torch.randn(images, fields.size, side, side, requires_grad=True)
        return lambda: layer(fields(x)).tensor.square().mean().backward()

    layer: nn.EquivariantModule
    build(1, 8, 1)()  # tables, and what torch loads at its first step
    memory = PeakMemory("cpu")
    step = build(number, size, batch)
    seconds = []
    for _ in range(_STEPS):
        start = time.process_time()
        step()
        seconds.append(time.process_time() - start)
    return min(seconds), memory.read(), sum(p.numel() for p in layer.parameters())


def table(number: int, size: int, batch: int) -> Iterator[str]:
    """The lines of the table, in Markdown. Every layer runs in its own process."""
    yield "| layer | time (ms) | memory (MB) | parameters |"
    yield "|---|--:|--:|--:|"
    for name in LAYERS:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            seconds, held, parameters = pool.submit(measure, name, number, size, batch).result()
        yield f"| {name} | {1000 * seconds:.0f} | {held / 1e6:.0f} | {parameters:,} |"
    yield ""
    yield (
        f"{number} regular fields of C4 in and out, {size}×{size} positions, {batch} images, kernels of "
        f"{_KERNEL}×{_KERNEL}, of spatial attention 7×7, windows of {_WINDOW}×{_WINDOW}: a forward and a backward pass "
        f"in one thread, torch {torch.__version__.partition('+')[0]}."
    )
