"""The layers of this package."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from examples.benchmarks.subjects.spaces import regular
from examples.benchmarks.subjects.subject import Poses, Step, Subject, gradient_step, place

Form = Literal["module", "exported", "compiled", "recorded"]

if TYPE_CHECKING:
    from examples.benchmarks.conditions import Conditions


@dataclass(frozen=True)
class Attention(Subject):
    """Group self-attention between regular fields, or a transformer block around it.

    Attributes:
        space: the group, as in :func:`.spaces.gspace`.
        shape: of the grid.
        batch: the number of images or volumes.
        fields: regular fields in and out.
        num_heads, head_fields, kernel_size, query, keys, encoding, window: of the layer.
        backend: of the layer.
        block: whether the layer stands in a transformer block.
        form: the escnn ``"module"``, the ``"exported"`` torch module, or that one ``"compiled"``, or ``"recorded"``:
            compiled, and its kernels launched together as a CUDA graph.
    """

    space: str
    shape: tuple[int, ...]
    batch: int
    fields: int = 20
    num_heads: int = 9
    head_fields: int = 10
    kernel_size: int | None = None
    query: Poses = "own"
    keys: Poses = "all"
    encoding: str | None = None
    window: str = "auto"
    backend: str = "auto"
    block: bool = False
    form: Form = "module"

    def __str__(self) -> str:
        grid = "×".join(map(str, self.shape))
        window = "global" if self.kernel_size is None else f"window {self.kernel_size}"
        backend = "" if self.backend == "auto" else f" by {self.backend!r}"
        return f"{self.form} attention {self.space} {grid} {window} {self.query}{backend}"

    def load(self) -> None:
        importlib.import_module("escnn_attention")
        if self.form in ("compiled", "recorded"):
            # What an earlier process compiled must not make this one look fast.
            config = importlib.import_module("torch._inductor.config")
            config.force_disable_caches = True  # type: ignore[attr-defined]

    def build(self, conditions: Conditions) -> Step:
        import torch

        from escnn_attention import GroupSelfAttention, TransformerBlock

        kind = regular(self.space, self.fields)
        Layer = TransformerBlock if self.block else GroupSelfAttention
        layer = Layer(
            kind,
            kind,
            self.num_heads,
            self.kernel_size,
            head_fields=self.head_fields,
            query=self.query,
            keys=self.keys,
            encoding=self.encoding,
            window=self.window,
            backend=self.backend,
        ).to(**place(conditions))
        x = torch.randn(self.batch, kind.size, *self.shape, **place(conditions))
        if self.form == "module":
            return gradient_step(lambda x: layer(kind(x)).tensor, [x], layer.parameters())
        module = layer.export()
        if self.form == "compiled":
            return gradient_step(torch.compile(module, fullgraph=True), [x], module.parameters())
        if self.form == "recorded":
            recorded = torch.compile(module, fullgraph=True, mode="reduce-overhead")
            return gradient_step(recorded, [x], module.parameters())
        return gradient_step(module, [x], module.parameters())
