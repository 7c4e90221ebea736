"""The layers and networks of this package on point clouds, and escnn's convolution of points."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from examples.benchmarks.subjects.spaces import gspace, regular
from examples.benchmarks.subjects.subject import Poses, Step, Subject, gradient_step, place, training_step

if TYPE_CHECKING:
    from torch import Tensor

    from examples.benchmarks.conditions import Conditions

_HIDDEN = 16  # the width of the MLP of a PairKernel, as in the LieTransformer


@dataclass(frozen=True)
class PointAttention(Subject):
    """Group self-attention between regular fields at random points, which lie one to a unit of area or volume.

    Attributes:
        space: the group, as in :func:`.spaces.gspace`.
        points: the number of points of a cloud.
        batch: the number of clouds.
        fields: regular fields in and out.
        num_heads, head_fields, query, keys: of the layer.
        num_neighbours: the points that each point sees, which the layer searches; None for all.
        encoding: of the layer; ``"pair kernel"`` is ``PairKernel(hidden=16)``.
        hub: whether edges are given instead, of which one point has as many as there are points.
    """

    space: str
    points: int
    batch: int = 1
    fields: int = 8
    num_heads: int = 4
    head_fields: int = 8
    num_neighbours: int | None = None
    query: Poses = "own"
    keys: Poses = "all"
    encoding: str | None = None
    hub: bool = False

    def __str__(self) -> str:
        seen = "global" if self.num_neighbours is None else f"{self.num_neighbours} neighbours"
        extra = ", one sees all" if self.hub else ""
        return f"attention {self.space} {self.points} points {seen}{extra} {self.query} {self.encoding or 'mlp'}"

    def load(self) -> None:
        importlib.import_module("escnn_attention")

    def build(self, conditions: Conditions) -> Step:
        import torch
        from escnn.nn import GeometricTensor

        from escnn_attention import PointSelfAttention

        kind = regular(self.space, self.fields)
        layer = PointSelfAttention(
            kind,
            kind,
            self.num_heads,
            head_fields=self.head_fields,
            num_neighbours=None if self.hub else self.num_neighbours,
            query=self.query,
            keys=self.keys,
            encoding=_encoding(self.encoding),
        ).to(**place(conditions))
        coords, batch = clouds(self.points, self.batch, kind.gspace.dimensionality, conditions)
        edges = None
        if self.hub:
            assert self.num_neighbours is not None
            edges = with_hub(nearest(coords, self.num_neighbours))
        x = torch.randn(len(coords), kind.size, **place(conditions))
        return gradient_step(
            lambda x: layer(GeometricTensor(x, kind, coords), edges, batch).tensor, [x], layer.parameters()
        )


@dataclass(frozen=True)
class PointConvolution(Subject):
    """``R2PointConv`` between regular fields at such points, with edges to the nearest ones.

    Attributes:
        space: the group, as in :func:`.spaces.gspace`, of the plane.
        points: the number of points.
        num_neighbours: the points that each point sees.
        fields: regular fields in and out.
    """

    space: str
    points: int
    num_neighbours: int
    fields: int = 8

    def __str__(self) -> str:
        return f"R2PointConv {self.space} {self.points} points {self.num_neighbours} neighbours"

    def load(self) -> None:
        # Not for its layers: it mends what keeps escnn from building kernel bases with a recent scikit-learn.
        importlib.import_module("escnn_attention")
        importlib.import_module("torch_geometric")

    def build(self, conditions: Conditions) -> Step:
        import math

        import torch
        from escnn.nn import GeometricTensor, R2PointConv

        kind = regular(self.space, self.fields)
        # The disc that holds so many points on average.
        width = math.sqrt(self.num_neighbours / math.pi)
        layer = R2PointConv(kind, kind, width=width, n_rings=2, frequencies_cutoff=2.0).to(**place(conditions))
        coords, _ = clouds(self.points, 1, 2, conditions)
        edges = nearest(coords, self.num_neighbours)
        x = torch.randn(self.points, kind.size, **place(conditions))
        return gradient_step(lambda x: layer(GeometricTensor(x, kind, coords), edges).tensor, [x], layer.parameters())


@dataclass(frozen=True)
class PointNetwork(Subject):
    """A point transformer: one invariant of every cloud, or a step of training to label every point.

    Attributes:
        space: the group, as in :func:`.spaces.gspace`.
        points: the number of points of a cloud.
        batch: the number of clouds.
        fields, num_blocks, num_heads: of the network, whose pointwise networks are as wide as its blocks.
        num_neighbours: the points that each point sees; None for all.
        encoding: as of :class:`PointAttention`.
        projection: of the blocks.
        features: the scalars at each point.
        labels: the number of labels; None for the invariant.
    """

    space: str
    points: int
    batch: int
    fields: int
    num_blocks: int
    num_heads: int
    num_neighbours: int | None = None
    encoding: str | None = None
    projection: str = "group"
    features: int = 2
    labels: int | None = None

    def __str__(self) -> str:
        what = "network" if self.labels is None else "training step"
        options = f"{self.encoding or 'mlp'}, {self.projection}"
        return f"{what} {self.space} {self.batch} clouds of {self.points} points, {options}"

    def load(self) -> None:
        importlib.import_module("escnn_attention.models")
        if self.labels is not None:
            # The first optimizer of a process imports torch's compiler.
            importlib.import_module("torch._dynamo")

    def build(self, conditions: Conditions) -> Step:
        import torch

        from escnn_attention.models import PointTransformer

        space = gspace(self.space)
        network = PointTransformer(
            space,
            self.features,
            1 if self.labels is None else self.labels,
            fields=self.fields,
            num_blocks=self.num_blocks,
            num_heads=self.num_heads,
            attention={
                "num_neighbours": self.num_neighbours,
                "hidden_fields": self.fields,
                "projection": self.projection,
            },
            encoding=_encoding(self.encoding),
            pool="mean" if self.labels is None else None,
        ).to(**place(conditions))
        coords, batch = clouds(self.points, self.batch, space.dimensionality, conditions)
        x = torch.randn(len(coords), self.features, **place(conditions))

        def forward(x: Tensor) -> Tensor:
            return network(x, coords, batch=batch)

        if self.labels is None:
            return gradient_step(forward, [x], network.parameters())
        return training_step(forward, x, self.labels, network.parameters())


def clouds(points: int, batch: int, dim: int, conditions: Conditions) -> tuple[Tensor, Tensor | None]:
    """Clouds of random points, one to a unit of volume, and the number of the cloud of each; None for a single one."""
    import torch

    coords = points ** (1 / dim) * torch.rand(batch * points, dim, **place(conditions))
    if batch == 1:
        return coords, None
    return coords, torch.arange(batch, device=conditions.device).repeat_interleave(points)


def nearest(coords: Tensor, number: int) -> Tensor:
    """The edges ``(2, E)`` from the nearest so many points to every point."""
    import torch
    from scipy.spatial import cKDTree

    points = coords.double().cpu().numpy()
    keys = torch.as_tensor(cKDTree(points).query(points, k=number)[1]).view(len(points), number)
    queries = torch.arange(len(points))[:, None].expand_as(keys)
    return torch.stack([keys.flatten(), queries.flatten()]).to(coords.device)


def with_hub(edges: Tensor) -> Tensor:
    """About as many edges, of which the first point has one from every point: each of the others has one edge less."""
    import torch

    keys, queries = edges
    number = int((queries == 0).sum())
    points = len(queries) // number
    keys = keys.view(points, number)[1:, :-1].flatten()
    queries = queries.view(points, number)[1:, :-1].flatten()
    every = torch.arange(points, device=edges.device)
    return torch.stack([torch.cat([every, keys]), torch.cat([torch.zeros_like(every), queries])])


def _encoding(name: str | None) -> Any:
    """The argument ``encoding`` of the layers."""
    from escnn_attention import PairKernel

    return PairKernel(hidden=_HIDDEN) if name == "pair kernel" else name
