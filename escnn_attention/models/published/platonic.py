"""The networks of the published code of Platonic Transformers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from escnn_attention._checks import check_bool, check_int
from escnn_attention.encodings import RotaryEncoding
from escnn_attention.groups.fibers import Fibers, fibers
from escnn_attention.models.checkpoint import (
    Checkpoint,
    children_of,
    find_gspace,
    load_heads,
    load_parameters,
    load_values,
)
from escnn_attention.models.platonic_transformer import PlatonicTransformer
from escnn_attention.nn.pointwise import Activation, LayerScale
from escnn_attention.nn.transformer import PointTransformerBlock
from escnn_attention.plain.point_attention import PointAttention
from escnn_attention.plain.projections import ToPoses

_BUFFERS = ("cayley_table", "inverse_indices", "group_elements")


def from_platonic(
    checkpoint: Checkpoint,
    *,
    vectors: int = 0,
    rope_on_values: bool = False,
    activation: Activation = "gelu",
    pool: Literal["mean", "sum"] | None = "sum",
    divisor: float = 1.0,
    attention: bool = True,
    mean_aggregation: bool = False,
) -> PlatonicTransformer:
    """The network of a checkpoint of Platonic Transformers, with the options of :func:`~.load.from_published`."""
    if check_bool("mean_aggregation", mean_aggregation) and pool == "sum":
        pool = "mean"  # as published
    if not (check_bool("attention", attention) or mean_aggregation):
        raise ValueError(
            "attention: got False, and no layer here sums over points without a softmax; needed the mean over points, "
            "with mean_aggregation=True, or a network with softmax attention"
        )
    start = checkpoint.start_of("x_embedder.kernel", "the embedding of the features")
    layer = f"{start}layers.0."
    rotary = f"{layer}interaction.rope_emb"
    matrices = checkpoint.take(f"{rotary}.group_elements", *checkpoint.shape(f"{rotary}.group_elements", 3)).double()
    found = find_gspace(matrices.numpy(), 1e-5)
    if found is None:
        shape = " × ".join(map(str, matrices.shape[1:]))
        raise ValueError(
            f"{rotary}.group_elements: escnn has no group with these {len(matrices)} matrices of {shape} numbers"
        )
    gspace, elements = found
    _, width, ins = checkpoint.shape(f"{start}x_embedder.kernel", 3)
    heads, _, dim = checkpoint.shape(f"{rotary}.freqs", 3)
    check_int("vectors", vectors, least=0)
    if ins < dim * vectors or not ins - dim * vectors + vectors:
        raise ValueError(f"vectors: got {vectors}, and the embedding reads {ins} numbers, of {dim} each vector has")
    gammas = checkpoint.tensors.get(f"{layer}gamma_1")
    network = PlatonicTransformer(
        gspace,
        _named(scalar=ins - dim * vectors, vector=vectors),
        _named(**{kind: number for kind, _, number in _readouts(checkpoint, start, dim)}),
        fields=width,
        num_blocks=checkpoint.count(f"{start}layers."),
        num_heads=heads,
        block={
            "hidden_fields": checkpoint.shape(f"{layer}linear1.kernel", 3)[1],
            "encoding": RotaryEncoding(
                scale=1.0, constant_keys=not checkpoint.any(f"{layer}interaction.k_proj."), values=rope_on_values
            ),
            "normalization": "softmax" if attention else "count",
            "activation": activation,
            "norm_kind": "layer" if f"{layer}norm1.bias" in checkpoint.tensors else "rms",
            "layer_scale": None if gammas is None else 1.0,
        },
        positions=checkpoint.any(f"{start}ape."),
        hidden_readout=any(".2." in name for _, name, _ in _readouts(checkpoint, start, dim)),
        pool=pool,
        divisor=divisor,
    )
    with torch.no_grad():
        _Loader(checkpoint, fibers(gspace), elements, start).load(network)
    for name in checkpoint.tensors:
        if name.endswith(_BUFFERS) or not name.startswith(start):
            checkpoint.used.add(name)
    checkpoint.check_used()
    return network.eval()


def _named(**counts: int) -> dict[str, int]:
    """The numbers of scalars and vectors that are not 0."""
    return {kind: number for kind, number in counts.items() if number}


def _readouts(checkpoint: Checkpoint, start: str, dim: int) -> Iterator[tuple[str, str, int]]:
    """The kinds of output of the heads, the names of their last maps, and their numbers of fields."""
    found = False
    for kind, size in (("scalar", 1), ("vector", dim)):
        for name in (f"{start}{kind}_readout.2.", f"{start}{kind}_readout."):
            if f"{name}kernel" in checkpoint.tensors:
                found = True
                yield kind, name, checkpoint.shape(f"{name}kernel", 3)[1] // size
                break
    if not found:
        raise checkpoint.missing(f"{start}scalar_readout.kernel", ", needed a readout")


class _Loader:
    """Writes group convolutions, which weigh by :math:`g^{-1} h` of input and output, as maps of this package.

    ``elements`` are the published elements of each element of the group, ``start`` is the common prefix of names.
    """

    def __init__(self, checkpoint: Checkpoint, group: Fibers, elements: np.ndarray, start: str):
        self.checkpoint, self.group, self.elements, self.start = checkpoint, group, elements, start

    def load(self, network: PlatonicTransformer) -> None:
        """Load all weights."""
        fields = len(network.embedding.out_type)
        scalars = sum(r.is_trivial() and r.size == 1 for r in network.in_type.representations)
        self._embedding(network, fields, min(scalars, network.in_type.size))
        if network.waves is not None:
            frequencies = self.checkpoint.take(f"{self.start}ape.freqs", self.group.dimension, fields // 2)
            load_values(network.waves.frequencies, frequencies.T)
        for i, block in enumerate(children_of(network.blocks)):
            self._block(f"{self.start}layers.{i}.", block, fields)
        parts = iter(network.head.parts)
        for kind, name, _ in _readouts(self.checkpoint, self.start, self.group.dimension):
            part: Any = next(parts)
            if len(part) > 1:
                self._to_regular(name.replace(".2.", ".0."), part[0].projection, fields, fields)
            self._to_output(name, part[-1].projection, fields, kind == "vector")
        for kind in ("scalar", "vector"):  # The hidden layer in front of nothing.
            for what in ("kernel", "bias"):
                self.checkpoint.used.add(f"{self.start}{kind}_readout.0.{what}")

    def _kernel(self, name: str, outs: int, ins: int) -> Tensor:
        """A kernel ``(outs, ins, |H|)``, by elements in escnn's order."""
        kernel = self.checkpoint.take(f"{name}kernel", self.group.order, outs, ins)
        return kernel[self.elements].permute(1, 2, 0)

    def _seen(self, name: str, outs: int, ins: int) -> Tensor:
        """A kernel by the pose of the input relative to the output, which is the inverse."""
        return self._kernel(name, outs, ins)[..., self.group.inverse]

    def _embedding(self, network: PlatonicTransformer, fields: int, scalars: int) -> None:
        size, dim = network.in_type.size, self.group.dimension
        kernel = self._seen(f"{self.start}x_embedder.", fields, size)
        of_vectors = (
            kernel[:, scalars:].unflatten(1, (-1, dim)) if size > scalars else kernel.new_zeros(fields, 0, dim, 1)
        )
        inverse = torch.tensor(self.group.inverse_action, dtype=kernel.dtype)
        seen = torch.einsum("ocip,pij->ocj", of_vectors, inverse) if size > scalars else of_vectors[..., 0]
        load_values(
            network.embedding.plain.projection.weight, torch.cat([kernel[:, :scalars].sum(-1), seen.flatten(1)], dim=1)
        )

    def _to_regular(self, name: str, projection: Any, outs: int, ins: int) -> None:
        load_values(projection.weight, self._seen(name, outs, ins).flatten(1))
        load_values(projection.bias, self.checkpoint.take(f"{name}bias", outs))

    def _to_output(self, name: str, projection: Any, ins: int, of_vectors: bool) -> None:
        """The mean over the poses of a convolution: of scalars, or of vectors in the frame of each pose."""
        outs = self.checkpoint.shape(f"{name}kernel", 3)[1]
        kernel, bias = self._kernel(name, outs, ins), self.checkpoint.take(f"{name}bias", outs)
        if of_vectors:
            dim = self.group.dimension
            action = torch.tensor(self.group.action, dtype=kernel.dtype)
            kernel = torch.einsum("pij,cjfp->cifp", action, kernel.unflatten(0, (-1, dim))).flatten(0, 1)
            bias = torch.einsum("ij,cj->ci", action.mean(0), bias.view(-1, dim)).flatten()
        weight = kernel.mean(-1)
        if isinstance(projection, ToPoses):  # Without a group scalars are regular fields.
            load_values(projection.weight, weight)
            load_values(projection.bias, bias)
            return
        load_values(projection.weight, weight.T)
        if projection.bias is not None:
            invariants = projection.invariants.to(bias.dtype)
            load_values(projection.bias, torch.linalg.lstsq(invariants, bias[:, None]).solution[:, 0])

    def _block(self, name: str, block: PointTransformerBlock, fields: int) -> None:
        norm, expand, _, contract, *_ = children_of(block.feed_forward)
        for number, layer in ((1, block.norm), (2, norm)):
            load_parameters(self.checkpoint, f"{name}norm{number}", layer.plain)
        gains = [m for m in block.modules() if isinstance(m, LayerScale)]
        for number, gain in enumerate(gains, start=1):
            load_values(gain.plain.gain, self.checkpoint.take(f"{name}gamma_{number}", fields))
        hidden = len(expand.out_type)
        self._to_regular(f"{name}linear1.", expand.plain.projection, hidden, fields)
        self._to_regular(f"{name}linear2.", contract.plain.projection, fields, hidden)
        self._attention(f"{name}interaction.", block.attention.plain, fields)

    def _attention(self, name: str, plain: PointAttention, fields: int) -> None:
        """Load the attention: channels that rotate together are neighbours there, and in two halves of a head here."""
        encoding: Any = plain.encoding
        heads, channels = plain.num_heads, encoding.channels
        order = [*range(0, channels, 2), *range(1, channels, 2)]
        load_values(encoding.frequencies, self.checkpoint.take(f"{name}rope_emb.freqs", *encoding.frequencies.shape))
        made: dict[str, tuple[Tensor, Tensor | None]] = {}
        for kind in plain.needs.fields:
            weight = self._seen(f"{name}{kind[0]}_proj.", fields, fields).flatten(1).unflatten(0, (heads, channels))
            bias = self.checkpoint.take(f"{name}{kind[0]}_proj.bias", fields).view(heads, channels)
            rotates = kind != "values" or encoding.rotates_values
            if rotates:
                weight, bias = weight[:, order], bias[:, order]
            # Without a softmax the published scores are not divided by the root of the channels.
            factor = math.sqrt(channels) if kind == "queries" and plain.normalization == "count" else 1.0
            made[kind] = factor * weight, factor * bias
        load_heads(plain, made)
        out = self._kernel(f"{name}out_proj.", fields, fields).transpose(0, 1)
        if encoding.rotates_values:
            out = out.unflatten(0, (heads, channels))[:, order].flatten(0, 1)
        load_values(plain.project_out.weight, out.flatten(1))
        load_values(plain.project_out.bias, self.checkpoint.take(f"{name}out_proj.bias", fields))
