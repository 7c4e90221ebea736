"""The subjects of this package, of torch and of escnn.

Spaces are given by name: the plane with the group ``cN`` or ``dN``, a sequence with ``cN sequence`` or ``dN sequence``,
or space with the group ``octahedral`` or ``icosahedral``. Layers map regular fields to equally many. Points are
random, one per unit of area or volume. Other options are those of the layer or network.
"""

from __future__ import annotations

import importlib
import math
import re
from functools import partial
from typing import Any

import escnn_attention  # noqa: F401  # isort: skip  # before escnn
import torch
from escnn import gspaces
from escnn.gspaces import GSpace
from escnn.nn import FieldType, GeometricTensor, R2Conv
from scipy.spatial import cKDTree
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from escnn_attention import (
    CudaGraphs,
    GroupCrossAttention,
    GroupSelfAttention,
    PairKernel,
    PointSelfAttention,
    TransformerBlock,
    functional,
    sequence_space,
)
from escnn_attention.models import (
    AllCNNC,
    FieldTransformer,
    FieldUNet,
    GroupCNN,
    GSANet,
    HybridNet,
    PointTransformer,
    VisionTransformer,
)
from escnn_attention.plain.projections import FromPoses, ToPoses
from examples.benchmarks.measure import Build, Place, Step, gradient_step, training_step

_hybrid = partial(HybridNet, in_channels=1, num_classes=10, conv_kernel=5)
NETWORKS = {
    "rotmnist-p4": (GSANet.rotmnist, "c4", 28),
    "hybrid": (partial(_hybrid, widths=(8, 10, 16), convolutions=(1, 2, 0), attention=(0, 0, 2)), "c8", 28),
    "convolutions": (partial(_hybrid, widths=(8, 10, 18), convolutions=(1, 2, 2), attention=(0, 0, 0)), "c8", 28),
    "d4-96": (GSANet.patch_camelyon, "d4", 96),
    "p4-cnn": (GroupCNN.rotmnist, "c4", 28),
    "all-cnn-c": (AllCNNC.cifar10, "c4", 32),
}
"""Networks for images, their spaces, and the sizes of the images of their data sets."""


def gspace(name: str) -> GSpace:
    """A space by its name."""
    if name in ("octahedral", "icosahedral"):
        return gspaces.octaOnR3() if name == "octahedral" else gspaces.icoOnR3()
    match = re.fullmatch(r"([cd])(\d+)( sequence)?", name)
    if match is None:
        raise ValueError(f"space: got {name!r}, needed cN, dN, cN sequence, dN sequence, octahedral or icosahedral")
    if match[3]:
        return sequence_space(gspace(name.removesuffix(match[3])).fibergroup)
    if name == "c1":
        return gspaces.trivialOnR2()
    return (gspaces.rot2dOnR2 if match[1] == "c" else gspaces.flipRot2dOnR2)(int(match[2]))


def regular(name: str, fields: int) -> FieldType:
    """A type of regular fields on a space."""
    space = gspace(name)
    return FieldType(space, fields * [space.regular_repr])


def attention(
    space: str, shape: tuple[int, ...], batch: int, fields: int = 20, form: str = "module", **options: Any
) -> Build:
    """Group self-attention on a grid, or with ``block=True`` a transformer block around it.

    The form is the escnn ``"module"``, or that as a CUDA ``"graph"``, or ``"expanded"`` without irreps; the
    ``"exported"`` torch module, or that ``"compiled"``, or ``"recorded"``: compiled and launched as a CUDA graph.
    """
    make = TransformerBlock if options.pop("block", False) else GroupSelfAttention
    if form in ("compiled", "recorded"):
        # The cache of an earlier process must not speed up this one.
        importlib.import_module("torch._inductor.config").force_disable_caches = True  # type: ignore[attr-defined]

    def build(place: Place) -> Step:
        kind = regular(space, fields)
        layer = make(kind, kind, **{"kernel_size": None, "num_heads": 9, "head_fields": 10, **options}).to(**place)
        x = torch.randn(batch, kind.size, *shape, **place)
        if form in ("module", "graph", "expanded"):
            if form == "expanded":
                for part in layer.modules():
                    if isinstance(part, (ToPoses, FromPoses)):
                        part.irreps = None
            run = CudaGraphs(layer) if form == "graph" else layer
            return gradient_step(lambda x: run(kind(x)).tensor, [x], layer.parameters())
        module = layer.export()
        modes = {"compiled": None, "recorded": "reduce-overhead"}
        forward = torch.compile(module, fullgraph=True, mode=modes[form]) if form in modes else module
        return gradient_step(forward, [x], module.parameters())

    return build


def cross_attention(
    space: str,
    shape: tuple[int, ...],
    key_shape: tuple[int, ...],
    batch: int,
    fields: int = 20,
    form: str = "module",
    **options: Any,
) -> Build:
    """Cross-attention from one grid to another; its form is the ``"module"``, or a CUDA ``"graph"``."""

    def build(place: Place) -> Step:
        kind = regular(space, fields)
        layer = GroupCrossAttention(kind, kind, kind, **options).to(**place)
        run = CudaGraphs(layer) if form == "graph" else layer
        x, memory = (torch.randn(batch, kind.size, *s, **place) for s in (shape, key_shape))
        return gradient_step(lambda x, memory: run(kind(x), kind(memory)).tensor, [x, memory], layer.parameters())

    return build


def convolution(
    space: str, shape: tuple[int, ...], batch: int, fields: int = 20, kernel_size: int = 5, form: str = "module"
) -> Build:
    """``R2Conv``, padded to keep the grid; its form is the ``"module"``, or a CUDA ``"graph"``."""

    def build(place: Place) -> Step:
        kind = regular(space, fields)
        layer = R2Conv(kind, kind, kernel_size, padding=kernel_size // 2).to(**place)
        run = CudaGraphs(layer) if form == "graph" else layer
        x = torch.randn(batch, kind.size, *shape, **place)
        return gradient_step(lambda x: run(kind(x)).tensor, [x], layer.parameters())

    return build


def torch_block(batch: int, tokens: int, channels: int, head: int = 64) -> Build:
    """PyTorch's own pre-norm block with GELU, of hidden layers twice as wide."""

    def build(place: Place) -> Step:
        norms = torch.nn.ModuleList(torch.nn.LayerNorm(channels) for _ in range(2))
        sizes = ((channels, 3 * channels), (channels, channels), (channels, 2 * channels), (2 * channels, channels))
        project, out, expand, contract = linear = torch.nn.ModuleList(torch.nn.Linear(*size) for size in sizes)
        heads = max(1, channels // head)
        while channels % heads:
            heads -= 1

        def forward(x: Tensor) -> Tensor:
            q, k, v = project(norms[0](x)).view(batch, tokens, 3, heads, -1).permute(2, 0, 3, 1, 4)
            x = x + out(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
            return x + contract(torch.nn.functional.gelu(expand(norms[1](x))))

        parts = torch.nn.ModuleList([norms, linear]).to(**place)
        return gradient_step(forward, [torch.randn(batch, tokens, channels, **place)], parts.parameters())

    return build


def widened(channels: int, frequencies: int = 16) -> int:
    """The width of vectors with the waves of FourierEncoding: a multiple of 16, for the fastest of torch's kernels."""
    return -(-(channels + 2 * frequencies) // 16) * 16


def plain_attention(batch: int, num_heads: int, poses: int, queries: int, keys: int, width: int) -> Build:
    """Torch's attention on random vectors, one call for every output pose.

    A lower bound: without projections, wider vectors and sums over query poses.
    """

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.stack([scaled_dot_product_attention(*pose) for pose in zip(q, k, v, strict=True)])

    def build(place: Place) -> Step:
        vectors = [torch.randn(poses, batch, num_heads, count, width, **place) for count in (queries, keys, keys)]
        return gradient_step(forward, vectors)

    return build


def bare_attention(
    space: str, shape: tuple[int, ...], batch: int, num_heads: int, head_fields: int, backend: str, **options: Any
) -> Build:
    """Global ``escnn_attention.functional.attention`` on random queries, keys and values."""

    def build(place: Place) -> Step:
        # A layer knows the encoding's terms; its projections are not used.
        kind = regular(space, 1)
        plain = GroupSelfAttention(kind, kind, num_heads, None, head_fields=head_fields, **options).plain.to(**place)
        positions = plain.positions(torch.empty(1, 1, *shape, **place))
        size = (num_heads, batch, positions.num_positions, kind.size, head_fields)

        def forward(*vectors: Tensor) -> Tensor:
            bias = plain.bias(positions)
            return functional.attention(*vectors, positions, bias, query=plain.query, backend=backend)

        return gradient_step(forward, [torch.randn(size, **place) for _ in range(3)], plain.encoding.parameters())

    return build


def product(size: int) -> Build:
    """The product of two square matrices, without gradients."""

    def build(place: Place) -> Step:
        a, b = torch.randn(2, size, size, **place)
        out = torch.empty_like(a)
        return lambda: torch.mm(a, b, out=out)

    return build


def copy(count: int) -> Build:
    """A copy of numbers between two regions of memory."""

    def build(place: Place) -> Step:
        source = torch.randn(count, **place)
        target = torch.empty_like(source)
        return lambda: target.copy_(source)

    return build


def training(network: str, batch: int, size: int | None = None, form: str = "module", **options: Any) -> Build:
    """A training step of one of :data:`NETWORKS` as in its paper, including dropout, or as a CUDA ``"graph"``."""
    # The first optimizer of a process imports torch's compiler.
    importlib.import_module("torch._dynamo")
    make, space, usual = NETWORKS[network]

    def build(place: Place) -> Step:
        module = make(gspace(space), **options).to(**place)
        images = torch.randn(batch, module.in_type.size, size or usual, size or usual, **place)
        run = CudaGraphs(module) if form == "graph" else module
        return training_step(run, images, module.num_classes, module.parameters())

    return build


def point_attention(
    space: str, points: int, batch: int = 1, fields: int = 8, hub: bool = False, **options: Any
) -> Build:
    """Group self-attention between points, including the search for neighbours.

    With ``hub`` edges are given instead, and one point is connected to all.
    """
    options = {"num_heads": 4, "head_fields": 8, **options, "encoding": _encoding(options.get("encoding"))}
    given = options.pop("num_neighbours") if hub else 0

    def build(place: Place) -> Step:
        kind = regular(space, fields)
        layer = PointSelfAttention(kind, kind, **options).to(**place)
        coords, owners = clouds(points, batch, kind.gspace.dimensionality, place)
        edges = with_hub(nearest(coords, given)) if hub else None
        x = torch.randn(len(coords), kind.size, **place)
        return gradient_step(
            lambda x: layer(GeometricTensor(x, kind, coords), edges, owners).tensor, [x], layer.parameters()
        )

    return build


def point_convolution(space: str, points: int, num_neighbours: int, fields: int = 8) -> Build:
    """``R2PointConv`` on a single cloud, with edges to the nearest points."""
    importlib.import_module("torch_geometric")
    from escnn.nn import R2PointConv

    def build(place: Place) -> Step:
        kind = regular(space, fields)
        # The disc that contains so many points on average.
        width = math.sqrt(num_neighbours / math.pi)
        layer = R2PointConv(kind, kind, width=width, n_rings=2, frequencies_cutoff=2.0).to(**place)
        coords, _ = clouds(points, 1, 2, place)
        edges = nearest(coords, num_neighbours)
        x = torch.randn(points, kind.size, **place)
        return gradient_step(lambda x: layer(GeometricTensor(x, kind, coords), edges).tensor, [x], layer.parameters())

    return build


def point_network(
    space: str, points: int, batch: int, *, fields: int, features: int = 2, labels: int | None = None, **options: Any
) -> Build:
    """A point transformer whose pointwise networks are as wide as its blocks.

    It computes one invariant of every cloud; with ``labels``, a training step that classifies every point.
    """
    if labels is not None:
        importlib.import_module("torch._dynamo")
    options["attention"] = {"hidden_fields": fields, **options["attention"]}
    options |= {"encoding": _encoding(options.get("encoding")), "pool": "mean" if labels is None else None}

    def build(place: Place) -> Step:
        network = PointTransformer(gspace(space), features, labels or 1, fields=fields, **options).to(**place)
        coords, owners = clouds(points, batch, network.gspace.dimensionality, place)
        x = torch.randn(len(coords), features, **place)

        def forward(x: Tensor) -> Tensor:
            return network(x, coords, batch=owners)

        if labels is None:
            return gradient_step(forward, [x], network.parameters())
        return training_step(forward, x, labels, network.parameters())

    return build


def clouds(points: int, batch: int, dim: int, place: Place) -> tuple[Tensor, Tensor | None]:
    """Clouds of random points, one per unit of volume, and the index of each point's cloud; None for a single cloud."""
    coords = points ** (1 / dim) * torch.rand(batch * points, dim, **place)
    return coords, None if batch == 1 else torch.arange(batch, device=coords.device).repeat_interleave(points)


def nearest(coords: Tensor, number: int) -> Tensor:
    """The edges ``(2, E)`` from the nearest points to every point."""
    points = coords.double().cpu().numpy()
    keys = torch.as_tensor(cKDTree(points).query(points, k=number)[1]).view(len(points), number)
    queries = torch.arange(len(points))[:, None].expand_as(keys)
    return torch.stack([keys.flatten(), queries.flatten()]).to(coords.device)


def with_hub(edges: Tensor) -> Tensor:
    """About as many edges, with one from every point to the first: each other point has one edge less."""
    number = int((edges[1] == 0).sum())
    others = edges.view(2, -1, number)[:, 1:, :-1].flatten(1)
    every = torch.arange(edges.shape[1] // number, device=edges.device)
    return torch.cat([torch.stack([every, torch.zeros_like(every)]), others], dim=1)


def _encoding(name: str | None) -> Any:
    """The encoding for the layers; a pair kernel has an MLP as wide as in the LieTransformer."""
    return PairKernel(hidden=16) if name == "pair kernel" else name


def field_network(kind: str, space: str, side: int, batch: int, *, plain: bool = False, backward: bool = True) -> Build:
    """A network from vectors to vectors, see :func:`fields_to_fields`."""

    def build(place: Place) -> Step:
        network = fields_to_fields(kind, space, side, plain=plain).to(**place)
        given = [network.in_type] if kind != "transformer" else [network.in_type, network.memory_type]
        x, *others = (torch.randn(batch, 2, *(side,) * t.gspace.dimensionality, **place) for t in given)

        def forward(x: Tensor) -> Tensor:
            fields = [GeometricTensor(y, t) for y, t in zip((x, *others), given, strict=True)]
            y: Tensor = network(*fields).tensor
            return y

        if backward:
            return gradient_step(forward, [x], network.parameters())
        network.eval()
        return partial(torch.no_grad()(forward), x)

    return build


def fields_to_fields(kind: str, space: str, side: int, *, plain: bool = False) -> Any:
    """A network from vectors to vectors; with ``plain`` that of the same outline and channels without a group.

    ``kind`` is a U-Net with attention at the coarsest level (``"unet"``) or without (``"convolutions"``), a transformer
    of a sequence with a grid as memory (``"transformer"``), or of patches (``"patches"``).
    """
    full = gspace(space)
    chosen, times = (gspace("c1"), full.fibergroup.order()) if plain else (full, 1)
    vectors = FieldType(chosen, [chosen.basespace_action])
    if kind == "patches":
        sizes = {"image_size": side, "patch_size": 4, "fields": 8 * times, "num_heads": 4, "num_blocks": (4, 0)}
        return VisionTransformer(chosen, vectors, vectors, class_token=False, **sizes)
    if kind == "transformer":
        tokens = sequence_space(chosen.fibergroup)
        actions = FieldType(tokens, [chosen.basespace_action])
        sizes = {"fields": 4 * times, "num_heads": 4, "num_encoder_layers": 1, "num_decoder_layers": 2}
        return FieldTransformer(actions, actions, memory_type=vectors, **sizes)
    widths, attention = tuple(times * width for width in (2, 4, 8)), (0, 0, int(kind == "unet"))
    return FieldUNet(chosen, vectors, vectors, widths=widths, attention=attention)
