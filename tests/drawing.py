"""Layers drawn at random, each with something to call it on and ways to tell whether it is right."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
from escnn.group import CyclicGroup, DihedralGroup, Group, GroupElement
from escnn.gspaces import GSpace
from escnn.nn import FieldType, GeometricTensor
from torch import Tensor

import escnn_attention as ea
from escnn_attention import equivariance_report, models
from escnn_attention.equivariance.features import transformed_features
from escnn_attention.geometry.neighbours import nearest_image
from escnn_attention.groups.fibers import Fibers, fibers, is_signed_permutation
from escnn_attention.models.convolutions import DenseBlock, ResidualBlock, options_of
from escnn_attention.nn.pointwise import activation_of
from tests import spaces
from tests.nn import points
from tests.nn.attention import turned_error
from tests.nn.scales import turned_error as turned_error_of_scales
from tests.plain.test_attentive import written_out as attentive_written_out
from tests.test_continuous_groups import SPACES as CONTINUOUS
from tests.test_continuous_groups import on_turned_grid

Layer = Any  # an equivariant module or a network
Error = Callable[[Layer, GeometricTensor], float]

# More numbers than these take longer than a test should: of scores; and of passes through the loops of the formula.
MOST_SCORES = 1_500_000
MOST_TERMS = 1_200

ENCODINGS: dict[str, Callable[[], Any]] = {
    "mlp": lambda: ea.MLPEncoding(hidden=4),
    "mlp of two layers": lambda: ea.MLPEncoding(hidden=5, layers=2, per_head=False),
    "separable": lambda: "separable",
    "fourier": lambda: ea.FourierEncoding(3),
    "rotary": lambda: "rotary",
    "rotary values": lambda: ea.RotaryEncoding(values=True),
    "absolute": lambda: "absolute",
    "quadratic": lambda: ea.QuadraticEncoding(),
    "none": lambda: "none",
}
ON_COSETS = ("mlp", "shared", "separable", "fourier", "absolute", "none", "quadratic")  # of points.ENCODINGS
RELATIVE = ("mlp", "mlp of two layers", "separable", "fourier", "rotary", "none")
BASES = ("auto", "bandlimited", "complete")
FACTORISE = ("fourier", "rotary", "absolute", "none")
# Their first irreps take escnn seconds.
HEAVY = ("octahedral", "octahedral on a point", "icosahedral")


@dataclass(frozen=True)
class Drawn:
    """A layer and its input.

    Attributes:
        make: the layer, with other weights every time.
        tensors: features; or features and coordinates.
        error: the equivariance error for features; None where samples make it only nearly equivariant.
        arguments: what a layer at points is called with besides.
        formula: the output by loops over the formula, or None.
        names: of the last of the tensors, which an export takes by name.
    """

    make: Callable[[], Layer]
    tensors: tuple[Tensor, ...]
    error: Error | None = None
    arguments: dict[str, Tensor] = field(default_factory=dict)
    formula: Callable[[Layer, GeometricTensor], Tensor] | None = None
    names: tuple[str, ...] = ()

    def layer(self, seed: int) -> Layer:
        """The layer in float64, with weights that are all in use."""
        torch.manual_seed(seed)
        layer = self.make().double().eval()
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
        return layer

    def input(self, layer: Layer) -> GeometricTensor:
        return self.given(layer, *self.tensors)[0][0]

    def given(self, layer: Layer, *tensors: Tensor) -> tuple[tuple[GeometricTensor, ...], dict[str, Any]]:
        """What the layer is called with, for features, or for features and coordinates."""
        return (GeometricTensor(tensors[0], layer.in_type, *tensors[1:]),), self.arguments

    def output(self, layer: Layer, *tensors: Tensor) -> Tensor:
        """The output for these."""
        fields, named = self.given(layer, *tensors)
        return values(layer(*fields, **named))

    def exported(self, plain: Layer) -> Tensor:
        """The output of what the layer exports."""
        number = len(self.tensors) - len(self.names)
        named = dict(zip(self.names, self.tensors[number:], strict=True))
        return plain(*self.tensors[:number], **named, **self.arguments)


@dataclass(frozen=True)
class DrawnPair(Drawn):
    """A cross-attention: features of queries, keys and perhaps values, then the coordinates of points, by name."""

    def input(self, layer: Layer) -> Any:
        return self.given(layer, *self.tensors)[0]

    def given(self, layer: Layer, *tensors: Tensor) -> tuple[tuple[GeometricTensor, ...], dict[str, Any]]:
        features = len(tensors) - len(self.names)
        at = dict(zip(self.names, tensors[features:], strict=True))
        types = (layer.query_type, layer.key_type, layer.value_type)
        places = [at.get(f"{name}_coords") for name in ("query", "key", "key")]
        return tuple(map(GeometricTensor, tensors[:features], types, places)), self.arguments


@dataclass(frozen=True)
class DrawnNetwork(Drawn):
    """A network of fields: features, those of a memory, and the coordinates of a memory at points."""

    @torch.enable_grad()
    def layer(self, seed: int) -> Layer:
        """The network after a few steps of training."""
        network = super().layer(seed).train()
        optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
        for _ in range(3):
            optimizer.zero_grad()
            self.output(network, *self.tensors).sub(1).square().mean().backward()
            optimizer.step()
        with torch.no_grad():  # in eval mode escnn's convolutions keep kernels, which would belong to a graph
            return network.eval()

    def input(self, layer: Layer) -> Any:
        (x,), arguments = self.given(layer, *self.tensors)
        return x, arguments

    def given(self, layer: Layer, *tensors: Tensor) -> tuple[tuple[GeometricTensor, ...], dict[str, Any]]:
        x, *memory = tensors
        of_memory = {"memory": GeometricTensor(memory[0], layer.memory_type, *memory[1:])} if memory else {}
        return (GeometricTensor(x, layer.in_type),), self.arguments | of_memory


def values(y: GeometricTensor | Tensor) -> Tensor:
    return y if isinstance(y, Tensor) else y.tensor


class Draw(random.Random):
    """Draws the parts of a layer."""

    def yes(self, probability: float = 0.5) -> bool:
        return self.random() < probability

    def tensor(self, *shape: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.randrange(2**31))
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    def finite_space(self) -> GSpace:
        """Of the plane, of space or of a point; groups that take long seldom."""
        kind = self.choices([spaces.PLANE, spaces.VOLUME, spaces.POINT, spaces.LARGE], [10, 6, 1, 1])[0]
        names = [name for name in kind if name not in HEAVY or self.yes(0.1)] if kind is not spaces.LARGE else []
        name = self.choice(names or ["C4", "icosahedral"] if kind is not spaces.POINT else ["D4 on a point"])
        return (spaces.ALL | spaces.LARGE)[name]()

    def fields(self, space: GSpace, most: int = 3) -> FieldType:
        """Any mixture of regular, trivial, quotient and irreducible fields, and of those of the base space."""
        group = space.fibergroup
        candidates = [space.trivial_repr, *group.irreps()]
        if space.dimensionality:
            candidates.append(space.basespace_action)
        if group.order() <= 12:
            candidates += 2 * [space.regular_repr]
        candidates += [space.quotient_repr(subgroup) for subgroup in self.subgroups(group)]
        return FieldType(space, self.choices(candidates, k=self.randint(1, most)))

    def subgroups(self, group: Group) -> list[Any]:
        """The ids of subgroups of cyclic and dihedral groups: rotations, and one of the reflections."""
        divisors = [n for n in range(2, group.order()) if group.order() % n == 0]
        if isinstance(group, CyclicGroup):
            return divisors
        if isinstance(group, DihedralGroup):
            turns = group.order() // 2
            return [*((None, n) for n in divisors if turns % n == 0), (self.randrange(turns), 1)]
        return []

    def cosets(self, types: list[FieldType], options: dict[str, Any]) -> None:
        """Perhaps poses that are the cosets of a subgroup, on which scalars at least are functions."""
        space = types[0].gspace
        subgroups = self.subgroups(space.fibergroup) if space.dimensionality else []
        if subgroups and self.yes():
            options["poses"] = self.choice(subgroups)
            types[:] = [t + FieldType(space, [space.trivial_repr]) for t in types]

    def alike(self, space: GSpace, kind: str, most: int = 2) -> FieldType:
        make = spaces.regular if kind == "regular" else spaces.scalars
        return make(space, self.randint(1, most))

    def shape(self, space: GSpace, least: int = 1, most: int = 5) -> tuple[int, ...]:
        most = most if space.dimensionality < 3 else max(least, most - 2)
        return tuple(self.randint(least, most) for _ in range(space.dimensionality))

    def modes(self, group: Fibers) -> dict[str, Any]:
        """Whose poses see which, and with what encoding."""
        weighted = group.samples is not None and group.log_measure is not None
        heads = self.randint(1, 3)
        return {
            "num_heads": heads,
            "head_fields": self.randint(max(2, group.dimension + 1), 5),
            "query": "all" if group.order <= 12 and not weighted and self.yes(0.4) else "own",
            "keys": self.choice(["all", "all", "own"]),
            "bias": self.yes(0.7),
            "dropout": self.choice([0.0, 0.1]),
        }


def scores(batch: int, positions: int, order: int, options: dict[str, Any]) -> int:
    """How many scores there are."""
    return options["num_heads"] * batch * (positions * order) ** 2 * (order if options["query"] == "all" else 1)


def on_grid(draw: Draw, space: GSpace, group: Fibers, options: dict[str, Any]) -> tuple[int, tuple[int, ...]]:
    """Images, so many and of such a shape that all scores may be held at once."""
    for most in (5, 4, 3, 2, 1):
        batch, shape = draw.randint(1, 3), draw.shape(space, most=most)
        if scores(batch, math.prod(shape), group.order, options) <= MOST_SCORES:
            break
    return batch, shape


def window_of(draw: Draw, group: Fibers) -> dict[str, Any]:
    """A window, or none for the whole grid."""
    if not group.dimension or draw.yes(0.3):
        return {"kernel_size": None}
    shapes = ["auto", "disc", *(["square"] if group.preserves_square else [])]
    return {"kernel_size": draw.choice([1, 3, 5]), "dilation": draw.randint(1, 3), "window": draw.choice(shapes)}


def normed(draw: Draw, options: dict[str, Any]) -> dict[str, Any]:
    """Perhaps registers and normalised queries and keys."""
    registers = options.get("keys") != "own" and "normalization" not in options and draw.yes(0.3)
    return {"registers": draw.randint(1, 2) if registers else 0, "qk_norm": draw.yes(0.3)}


def grids(draw: Draw) -> Drawn:
    """Self-attention on grids and sequences, for a finite group."""
    space = draw.finite_space()
    tokens = draw.yes(0.15)
    space = ea.sequence_space(space.fibergroup) if tokens else space
    group = fibers(space)
    options = draw.modes(group) | window_of(draw, group)
    causal = {"causal": True} if tokens and draw.yes() else {}
    options |= causal
    names = [name for name in ENCODINGS if space.dimensionality > 1 or name != "quadratic"]
    name = draw.choice(names)
    encoding = ENCODINGS[name]
    if name in FACTORISE and options["kernel_size"] is None and not causal and draw.yes():
        options |= {"normalization": "count", "dropout": 0.0}
    types = [draw.fields(space), draw.fields(space)]
    layer: Any = ea.GroupSelfAttention
    if draw.yes(0.25):
        types[0] = draw.alike(space, "trivial", 3)
        if draw.yes():
            layer = ea.LiftingSelfAttention
            del options["keys"]
    elif group.order <= 12 and draw.yes(0.25):
        types = [draw.alike(space, "regular"), draw.alike(space, "regular")]
        options["projection"] = "pointwise"
    if "projection" not in options and not name.startswith("rotary"):
        draw.cosets(types, options)
    options |= normed(draw, options) if "poses" not in options else {}
    batch, shape = on_grid(draw, space, group, options)
    resampled = layer is ea.GroupSelfAttention and group.dimension and not causal and options.get("dilation", 1) == 1
    step = draw.choice([1, 1, 2, 3]) if resampled else 1
    if step > 1 and options["kernel_size"] != 1 and draw.yes():
        options["scale_factor"] = step
    elif step > 1:
        options["stride"], shape = step, tuple(n - (n - 1) % step for n in shape)
    if layer is ea.LiftingSelfAttention:
        del options["query"]
    arguments = {}
    if group.dimension and "scale_factor" not in options and draw.yes(0.3):
        arguments["mask"] = draw.tensor(batch, *shape) > -1
        arguments["mask"].view(batch, -1)[:, 0] = True

    @torch.no_grad()
    def error(layer: Layer, x: GeometricTensor) -> float:
        errors = [spaces.grid_error(layer, x)] + [turned_error(layer, x)] * (step == 1)
        for mask in arguments.values():
            y, marks = layer(x, mask), GeometricTensor(mask.double().unsqueeze(1), spaces.scalars(space, 1))
            for g in spaces.grid_generators(space):
                z = layer(x.transform(g), marks.transform(g).tensor.squeeze(1) > 0.5).tensor
                errors.append(float((z - y.transform(g).tensor).norm() / spaces.size_of(y.tensor)))
        return max(errors)

    x = draw.tensor(batch, types[0].size, *shape)
    return Drawn(lambda: layer(*types, encoding=encoding(), **options), (x,), error, arguments)


def continuous(draw: Draw) -> Drawn:
    """Self-attention on grids and at points, for samples of a continuous group."""
    name = draw.choice(list(CONTINUOUS))
    make, number = CONTINUOUS[name]
    space, weighted = make(), name == "SO(3)" and draw.yes(0.4)
    number += 2 * weighted  # of which none is a group, and whose weights differ
    exact = draw.yes(0.7)
    samples = ea.Samples(number, turn=draw.choice(["fixed", "random"])) if exact else ea.Samples(number, "rand")
    group = fibers(space, samples)
    exact = exact and not weighted and group.log_measure is None
    low = [r for r in space.fibergroup.irreps() if r.size <= 5][:5]
    types = [FieldType(space, draw.choices(low, k=draw.randint(1, 3))) for _ in range(2)]
    if draw.yes(0.2):
        types[0] = draw.alike(space, "trivial", 3)
    options = draw.modes(group) | {"samples": samples}
    encoding = ENCODINGS[draw.choice(list(ENCODINGS))]
    if draw.yes():
        encoding = points.ENCODINGS[draw.choice(list(points.ENCODINGS))]
        return at_points(draw, ea.PointSelfAttention, types, options | {"encoding": encoding}, group.elements, exact)
    options |= window_of(draw, group) | normed(draw, options)
    batch, shape = on_grid(draw, space, group, options)

    def error(layer: Layer, x: GeometricTensor) -> float:
        with torch.no_grad():
            y = layer(x)
            found = [
                on_turned_grid(layer, x.tensor, g) - y.transform_fibers(g).tensor
                for g in draw.sample(group.elements, 3)
            ]
        return max(float(e.norm() / spaces.size_of(y.tensor)) for e in found)

    x = draw.tensor(batch, types[0].size, *shape)
    return Drawn(lambda: ea.GroupSelfAttention(*types, encoding=encoding(), **options), (x,), error if exact else None)


def clouds(draw: Draw) -> Drawn:
    """Self-attention and attentive convolution at points, for a finite group."""
    space = points.SPACES[draw.choice(list(points.SPACES))]()
    group = fibers(space)
    types = [draw.fields(space), draw.fields(space)]
    if draw.yes(0.25):
        types[0] = draw.alike(space, "trivial", 3)
    options = draw.modes(group)
    layer, names = ea.PointSelfAttention, list(points.ENCODINGS)
    if draw.yes(0.3):
        layer, names = ea.PointAttentiveConv, [n for n in names if n not in ("rotary", "absolute")]
        options |= {"kernel_features": draw.randint(1, 4)}
        del options["keys"]
    name = draw.choice(names)
    if name not in ("rotary", "absolute") and draw.yes(0.2):
        options["relation"] = ea.Pair()
    elif name not in ("rotary", "absolute") and all(map(is_signed_permutation, group.action)) and draw.yes(0.3):
        options["period"] = draw.uniform(2.5, 4)
    if draw.yes(0.2):
        options["normalization"] = "count"
    if draw.yes(0.3):
        options["length_scale"] = draw.uniform(0.5, 2)
    if draw.yes(0.3):
        options["edge_dim"] = draw.randint(1, 3)
    if group.order <= 12 and options.get("kernel_features") is None and draw.yes(0.15):
        types = [draw.alike(space, "regular"), draw.alike(space, "regular")]
        options["projection"] = "pointwise"
    elif layer is ea.PointSelfAttention and "relation" not in options and name in ON_COSETS:
        draw.cosets(types, options)
    if "poses" not in options and name in points.NORMED:
        options |= normed(draw, options)
    return at_points(draw, layer, types, options | {"encoding": points.ENCODINGS[name]}, group.elements)


def networks(draw: Draw) -> Drawn:
    """Transformers on points, with any head, and their blocks."""
    space = points.SPACES[draw.choice(list(points.SPACES))]()
    in_type, out_type = draw.fields(space), draw.choice([3, "vector", "symmetric tensor", draw.fields(space)])
    poses = ["mean", "max", *(["spectrum"] if out_type == 3 else [])]
    heads = {"readout": draw.choice(["clouds", "points"]), "head": {"poses": draw.choice(poses)}}
    heads["pool"] = draw.choice(["mean", "sum", None, *(["max"] if isinstance(out_type, int) else [])])
    attention = {"query": draw.choice(["own", "all"])}
    attention |= draw.choice([{"keys": "all"}, {"keys": "own"}, {"kernel_features": 2}])
    number, positions = draw.randint(1, 2), draw.yes()
    even_in = draw.choice([[], [], [0]])
    block, kind, block_type = draw.yes(0.3), draw.choice(["layer", "rms", "batch"]), draw.fields(space)
    if block:  # of a lone scalar norms leave nothing
        in_type, block_type = (t + spaces.regular(space, 2) for t in (in_type, block_type))
    absent = ("rotary", "quadratic", *(["absolute"] if "kernel_features" in attention else []))
    encoding = points.ENCODINGS[draw.choice([n for n in points.ENCODINGS if n not in absent])]

    def network(*_: Any, encoding: Any, num_heads: int, **options: Any) -> Layer:
        if block:
            parts = {"layer_scale": 0.5, "drop_path": 0.1, "norm_kind": kind, "num_heads": num_heads}
            types = in_type, in_type if out_type == 3 else block_type
            return ea.PointTransformerBlock(*types, encoding=encoding, hidden_fields=2, **parts, **attention | options)
        return models.PointTransformer(
            *(space, in_type, out_type),
            **{"fields": 2 * num_heads, "num_blocks": number, "num_heads": num_heads, "encoding": encoding},
            **{"positions": positions, "even_in": even_in, "attention": attention | options, **heads},
        )

    options = {"num_heads": draw.randint(1, 2), "head_fields": 4, "encoding": encoding, "query": "own"}
    drawn = at_points(draw, network, [in_type], options, fibers(space).elements, whole=True)
    return replace(drawn, formula=None)


def at_points(
    draw: Draw,
    layer: Callable[..., Layer],
    types: list[FieldType],
    options: dict[str, Any],
    elements: tuple[GroupElement, ...],
    exact: bool = True,
    whole: bool = False,
) -> Drawn:
    """A layer on some clouds: neighbours by a rule, by edges, or all; points with a measure, or that are missing."""
    number, encoding, space = draw.randint(2, 9), options.pop("encoding"), types[0].gspace
    # Encodings divide channels among offsets of as many coordinates.
    options["head_fields"] = max(
        options["head_fields"], 1 + (options.get("relation") or ea.Offset()).size(space.dimensionality)
    )
    arguments: dict[str, Tensor] = {}
    batch = torch.zeros(number, dtype=torch.long)
    if draw.yes():
        batch = torch.tensor([draw.randint(0, 2) for _ in range(number)])
        batch = batch.unique(return_inverse=True)[1] if whole else batch  # every cloud has points
        arguments["batch"] = batch
    coords = draw.tensor(number, space.dimensionality)
    there = torch.tensor([draw.yes(0.8) for _ in range(number)])
    if draw.yes(0.3) and there.any() and not whole:
        arguments["mask"] = there
    else:
        there = torch.ones(number, dtype=torch.bool)
    if draw.yes(0.3):
        arguments["measure"] = draw.tensor(number).exp()
    rule = draw.choice(["all", "all", "radius", "number", "both", "edges"])
    if rule in ("radius", "both"):
        options["radius"] = draw.uniform(0.5, options.get("period", 5.0) / 2)
        options["cutoff"] = draw.yes()
    if rule in ("number", "both"):
        options["num_neighbours"] = draw.randint(1, 4)
    limits = (options.get("radius"), options.get("num_neighbours"), options.get("period"))
    edges = neighbours(coords, batch, there, *limits)
    if rule == "edges":
        own = edges[0] == edges[1]  # so that every query has a key
        edges = edges[:, own | torch.tensor([draw.yes() for _ in own])]
        edges = edges[:, draw.sample(range(edges.shape[1]), edges.shape[1])]
        arguments["edge_index"] = edges
    features = None
    if (edge_dim := options.get("edge_dim")) is not None:
        features = draw.tensor(edges.shape[1], edge_dim)
        arguments["edge_attr"] = features
        if rule != "edges":
            tables = draw.tensor(int(batch.max()) + 1, number, number, edge_dim)
            rank = torch.tensor([int((batch[:i] == batch[i]).sum()) for i in range(number)])
            features = tables[batch[edges[1]], rank[edges[1]], rank[edges[0]]]
            arguments["edge_attr"] = tables

    def error(layer: Layer, x: GeometricTensor) -> float:
        with torch.no_grad():
            y, order, given = values(layer(x, **arguments)), torch.arange(number), arguments
            if int(batch.max()) + 1 < number and not {"edge_index", "edge_attr"} & {*arguments}:
                order = torch.randperm(number)
                given = {name: t[order] for name, t in arguments.items()}
            away = 0.0 if "relation" in options or encoding() == "absolute" else 3.0
            moved = GeometricTensor(x.tensor[order], x.type, x.coords[order] + away)
            z = values(layer(moved, **given))
            worst = float((z - (y[order] if len(y) == number else y)).norm())
            for element in draw.sample(elements, min(4, len(elements))):
                z = values(layer(x.transform(element), **arguments))
                matrix, action = (
                    torch.as_tensor(t(element), dtype=y.dtype)
                    for t in (layer.out_type.representation, space.basespace_action)
                )
                worst = max(worst, float((z - (y @ matrix.T if y.dim() == 2 else action @ y @ action.T)).norm()))
        return worst / float(spaces.size_of(y))

    def formula(layer: Layer, x: GeometricTensor) -> Tensor:
        y = points.written_out(layer, x, edges, arguments.get("measure"), features)
        return torch.where(there[:, None], y, 0.0)

    group = fibers(space, options.get("samples"))
    scalar = all(r.is_trivial() for r in types[0].representations)
    poses = 1 if scalar else group.order
    terms = options["num_heads"] * edges.shape[1] * group.order * poses * (poses if options["query"] == "all" else 1)
    return Drawn(
        lambda: layer(*types, encoding=encoding(), **options),
        (draw.tensor(number, types[0].size), coords),
        error if exact else None,
        arguments,
        formula if terms <= MOST_TERMS and group.samples is None and not {"poses", "registers"} & {*options} else None,
    )


def neighbours(
    coords: Tensor,
    batch: Tensor,
    there: Tensor,
    radius: float | None,
    number: int | None,
    period: float | None = None,
) -> Tensor:
    """Edges from the keys to the queries, found by looking at all pairs."""
    distance = nearest_image(coords[:, None] - coords, period).norm(dim=-1)
    seen = (batch[:, None] == batch) & there[:, None] & there
    if radius is not None:
        seen &= distance <= radius
    if number is not None:
        place = distance.masked_fill(~seen, torch.inf).argsort(-1).argsort(-1)
        seen &= place < number
    queries, keys = seen.nonzero().T
    return torch.stack([keys, queries])


def crossings(draw: Draw) -> Drawn:
    """Cross-attention between sequences, grids and points."""
    name = draw.choice(["trivial", "flip", "C2", "C4", "D4", "C8", "D6", "mirror", "C3 3D", "octahedral"])
    space = spaces.ALL[name]()
    sequence, group = ea.sequence_space(space.fibergroup), fibers(space)
    kinds = draw.choice(["grid grid", "sequence grid", "grid sequence", "sequence sequence", "points points"])
    kinds = draw.choice([kinds, "points grid", "grid points", "sequence points"]).split()
    options, arguments, coords, d = draw.modes(group), {}, {}, space.dimensionality
    options |= normed(draw, options)
    encoding = ENCODINGS[draw.choice([name for name in ENCODINGS if name not in ("quadratic", "rotary values")])]
    both = [sequence if kind == "sequence" else space for kind in kinds]
    types = [draw.fields(gspace) for gspace in (*both, both[0])]
    batch = 1 if "points" in kinds else draw.randint(1, 2)
    sides, ratio = [draw.randint(1, 5 - d) for _ in range(d)], draw.choice([(1, 1), (1, 2), (2, 1)])
    tensors = []
    for kind, of_set, field_type, times in zip(kinds, ("query", "key"), types, ratio, strict=False):
        if kind == "points":
            coords[f"{of_set}_coords"] = draw.tensor(number := draw.randint(1, 7), d)
            tensors.append(draw.tensor(number, field_type.size))
        else:
            shape = [times * side for side in sides][: field_type.gspace.dimensionality]
            tensors.append(draw.tensor(batch, field_type.size, *shape))
    if draw.yes(0.3):
        options["value_type"] = draw.fields(both[1])
        tensors.append(draw.tensor(tensors[1].shape[0], options["value_type"].size, *tensors[1].shape[2:]))
    if "points" not in kinds and draw.yes(0.3):
        arguments["key_padding_mask"] = draw.tensor(batch, *tensors[1].shape[2:]) > 1
    if kinds == ["sequence", "sequence"] and tensors[0].shape[2] == tensors[1].shape[2]:
        options |= {"causal": draw.yes()}
    elif "grid" in kinds and "sequence" not in kinds and draw.yes():
        options["kernel_size"] = draw.choice([3, 5])
        if kinds == ["grid", "grid"] and draw.yes():  # every query sees a key
            options["spacing"] = draw.choice([1, 1.5, 2] if options["kernel_size"] == 5 else [1.5, 2])
    elif "points" in kinds and "sequence" not in kinds:
        near = {"radius": draw.uniform(0.5, 1.2), "cutoff": draw.yes(), "num_neighbours": draw.choice([None, 1, 3])}
        options |= draw.choice([near, {"num_neighbours": 2}, {}])
        square = all(map(is_signed_permutation, group.action))
        if encoding() not in ("rotary", "absolute") and square and draw.yes(0.3):
            options["period"] = draw.uniform(2.5, 4)

    def error(layer: Layer, inputs: tuple[GeometricTensor, GeometricTensor]) -> float:
        elements = spaces.generators(space) if "grid" not in kinds else spaces.grid_generators(space)
        with torch.no_grad():
            y = layer(*inputs, **arguments).tensor
            masks = [GeometricTensor(m.double().unsqueeze(1), spaces.scalars(both[1], 1)) for m in arguments.values()]
            worst = 0.0
            for g in elements:
                turned = {n: m.transform(g).tensor[:, 0] > 0.5 for n, m in zip(arguments, masks, strict=True)}
                z = layer(*(x.transform(g) for x in inputs), **turned)
                back = GeometricTensor(y, layer.out_type, inputs[0].coords).transform(g).tensor
                worst = max(worst, float((z.tensor - back).norm() / spaces.size_of(y)))
        return worst

    def make() -> Layer:
        return ea.GroupCrossAttention(*types, encoding=encoding(), **options)

    return DrawnPair(make, (*tensors, *coords.values()), error, arguments, names=tuple(coords))


def scales(draw: Draw) -> Drawn:
    """Self-attention on dilations."""
    space = spaces.ALL[draw.choice(["trivial", "flip", "C2", "C3", "C4", "C8", "D3", "D4", "conical"])]()
    group = fibers(space)
    some = ea.Scales(draw.choice([2, 2, math.sqrt(2)]), draw.randint(1, 3))
    options = draw.modes(group) | {"kernel_size": draw.choice([1, 3]), "scales": some}
    del options["keys"]
    options["windows"] = draw.choice(["scaled", "fixed", *(["dilated"] if some.base == 2 else [])])
    options["measure"] = draw.choice(["haar", "counting", "printed"])
    encoding, each = ENCODINGS[draw.choice(RELATIVE)], [draw.fields(space, 2), draw.fields(space, 2)]
    batch, shape = on_grid(draw, space, group, options)
    layer: Any = ea.DilationSelfAttention
    types = [some.repeat(each[0]), some.repeat(each[1])]
    if draw.yes(0.4):
        layer, types[0] = ea.DilationLiftingSelfAttention, draw.alike(space, "trivial")
        del options["query"]
    else:
        options["interval"] = draw.randint(1, some.count)

    def error(layer: Layer, x: GeometricTensor) -> float:
        return max(turned_error_of_scales(layer, x), spaces.grid_error(layer, x))

    x = draw.tensor(batch, types[0].size, *shape)
    return Drawn(lambda: layer(*types, encoding=encoding(), **options), (x,), error)


def convolutions(draw: Draw) -> Drawn:
    """Attentive convolutions, by their formula."""
    space = (spaces.PLANE | spaces.VOLUME)[
        draw.choice(["trivial", "flip", "C2", "C4", "C8", "D3", "D4", "mirror", "C4 3D"])
    ]()
    kinds = [draw.choice(["regular", "regular", "trivial"]) for _ in range(2)]
    types = [draw.alike(space, kind) for kind in kinds]
    channel, spatial = draw.yes(0.7), draw.yes(0.7)
    # The basis of escnn, for groups that do not keep the grid, is empty for a width of 2.
    sizes = [1, 2, 3] if fibers(space).preserves_square else [1, 3]
    options: dict[str, Any] = {"kernel_size": draw.choice(sizes), "channel": channel, "spatial": spatial}
    options |= {"padding": draw.randint(0, 2), "dilation": draw.randint(1, 2), "bias": draw.yes()}
    options |= {"basis": draw.choice(BASES[: 1 if options["kernel_size"] == 2 else 2])}
    if channel:
        options["ratio"] = draw.randint(1, 2)
    if spatial:
        options |= {"attention_size": draw.choice([1, 3]), "attention_dilation": draw.randint(1, 2)}
    if channel or spatial:
        options["residual"] = draw.yes()
    reach = options["dilation"] * (options["kernel_size"] - 1) + 1
    least = max(1, reach - 2 * options["padding"])
    shape = draw.shape(space, least, least + 3)
    x = draw.tensor(draw.randint(1, 3), types[0].size, *shape)

    def formula(layer: Layer, x: GeometricTensor) -> Tensor:
        return attentive_written_out(layer, x.tensor)

    return Drawn(lambda: ea.AttentiveConv(*types, **options), (x,), spaces.grid_error, formula=formula)


AROUND: dict[str, Callable[[SimpleNamespace], Layer]] = {
    "AttentionPool": lambda a: ea.AttentionPool(a.fields, 3, 2, head_fields=2, tokens=2),
    "FeatureAttention": lambda a: ea.FeatureAttention(a.alike, residual=a.yes, **a.maps),
    "FieldBatchNorm": lambda a: ea.FieldBatchNorm(a.fields, momentum=0.5),
    "FieldLayerNorm": lambda a: ea.FieldLayerNorm(a.fields, a.scope, kind=a.kind),
    "FieldLayerNorm, fields": lambda a: ea.FieldLayerNorm(a.fields + a.fields, a.scope, kind="fields"),
    "FieldLayerNorm, groups": lambda a: ea.FieldLayerNorm(a.fields + a.fields, "sample", kind=a.kind, num_groups=2),
    "FieldLayerNorm, poses": lambda a: ea.FieldLayerNorm(a.several, "pose", kind=a.kind),
    "FieldLinear": lambda a: ea.FieldLinear(a.fields, a.other, bias=a.yes),
    "LayerScale": lambda a: ea.LayerScale(a.fields),
    "activation": lambda a: activation_of(a.permuted, a.activation),
    "ConditionedFieldNorm": lambda a: ea.ConditionedFieldNorm(a.fields, 3, a.scope, kind=a.kind),
    "ConditionedFieldNorm, poses": lambda a: ea.ConditionedFieldNorm(a.several, 3, "pose"),
    "ConditionedGate": lambda a: ea.ConditionedGate(a.fields, 3),
    "PoseAttention": lambda a: ea.PoseAttention(a.alike, residual=a.yes),
    "PowerSpectrum": lambda a: ea.PowerSpectrum(a.fields, "norm" if a.yes else "square"),
    "PoseFeedForward": lambda a: ea.PoseFeedForward(a.fields, a.other, 2),
    "PoseLinear, from poses": lambda a: ea.PoseLinear(a.regular, a.fields, bias=a.yes),
    "PoseLinear, pointwise": lambda a: ea.PoseLinear(a.regular, a.regular, bias=a.yes, projection="pointwise"),
    "PoseLinear, to poses": lambda a: ea.PoseLinear(a.fields, a.regular, bias=a.yes),
    "TransformerBlock": lambda a: ea.TransformerBlock(a.regular, a.regular, norm="gsa", **a.block),
    "TransformerBlock, from scalars": lambda a: ea.TransformerBlock(a.scalars, a.regular, norm="gsa", **a.block),
    "TransformerBlock, pre": lambda a: ea.TransformerBlock(a.fields, a.other, norm="pre", **a.block),
    "TransformerBlock, parts": lambda a: ea.TransformerBlock(a.fields, a.other, norm="pre", **a.block, **a.parts),
    "TransformerBlock, batch": lambda a: ea.TransformerBlock(
        a.fields, a.other, norm="pre", **a.block, norm_kind="batch"
    ),
    "ConditionedTransformerBlock": lambda a: ea.TransformerBlock(a.fields, a.other, norm="pre", condition=3, **a.block),
}
"""What goes around attention: blocks, and layers that treat positions by themselves, of fields and options drawn."""


def around(draw: Draw, name: str, space: GSpace) -> Drawn:
    """One of these on a space; layers without a window for all elements of its group."""
    group, a = fibers(space), SimpleNamespace(yes=draw.yes(), scalars=spaces.scalars(space, 3))
    # Of so many a norm leaves something, and every type has maps to a regular field.
    a.regular = spaces.regular(space, draw.randint(2, 3))
    a.several = a.regular + spaces.regular(space, 1)
    a.fields, a.other = draw.fields(space) + a.regular, draw.fields(space) + a.regular
    a.permuted = FieldType(space, [r for r in a.fields.representations if "pointwise" in r.supported_nonlinearities])
    a.alike = draw.choice([a.regular, a.scalars])
    a.scope, a.kind = draw.choice(["position", "sample"]), draw.choice(["layer", "rms"])
    a.activation = draw.choice(["silu", "gelu", "relu"])
    a.parts = {"layer_scale": 0.5, "drop_path": 0.5, "qk_norm": True, "norm_kind": a.kind}
    spatial = {"kernel_size": draw.choice([1, 3]), "dilation": draw.randint(1, 3), "basis": draw.choice(BASES)}
    channel = {"ratio": draw.randint(1, 4)}
    a.maps = draw.choice([spatial | channel, {"channel": False} | spatial, {"spatial": False} | channel])
    a.maps |= {"statistics": draw.choice(["mean", "max", ("max", "mean")])}
    a.block = draw.modes(group) | (window_of(draw, group) if group.dimension > 1 else {"kernel_size": None})
    a.block |= {"hidden_fields": draw.choice([None, 1, 3])}
    a.block |= {"encoding": draw.choice(["mlp", "fourier", "absolute", "none"])}
    del a.block["dropout"]
    batch, shape = on_grid(draw, space, group, a.block)
    batch += 1  # a norm leaves nothing of a single position
    arguments = {"condition": draw.tensor(batch, 3)} if "Conditioned" in name else {}
    on_window = "TransformerBlock" in name or name == "FeatureAttention"

    def error(layer: Layer, x: GeometricTensor) -> float:
        by = spaces.grid_error if on_window else spaces.fibers_error
        # Of a batch norm, which remembers statistics, in training too.
        modes = [False] if name != "FieldBatchNorm" else [True, False]
        return max(by(lambda x, on=on: layer.train(on)(x, **arguments), x) for on in modes)

    def make() -> Layer:
        layer = AROUND[name](a)
        if "batch" in name.lower():  # other statistics than at the beginning
            layer(spaces.random_field(layer.in_type, *shape, batch=batch, dtype=torch.float32))
        return layer

    x = draw.tensor(batch, AROUND[name](a).in_type.size, *shape)
    return Drawn(make, (x,), error, arguments)


def error_on(gspace: GSpace) -> Error:
    """The equivariance error over elements that map grids of a gspace onto themselves, a memory transformed alike."""

    def error(layer: Layer, inputs: Any) -> float:
        x, arguments = inputs
        elements = spaces.grid_generators(gspace) if gspace.dimensionality else spaces.generators(gspace)
        with torch.no_grad():
            y, worst = layer(x, **arguments), 0.0
            for g in elements:
                z = layer(x.transform(g), **transformed_features(arguments, g))
                worst = max(worst, float((z.tensor - y.transform(g).tensor).norm() / spaces.size_of(y.tensor)))
        return worst

    return error


def levels(draw: Draw) -> Drawn:
    """U-shaped networks, networks of patches, and the maps from and to patches."""
    space = (spaces.PLANE | spaces.VOLUME)[draw.choice(["trivial", "flip", "C2", "C4", "C8", "D4", "mirror"])]()
    in_type, out_type = draw.fields(space), draw.fields(space)
    square, patch = fibers(space).preserves_square, draw.randint(2, 3)
    kind = draw.choice(["levels", "levels", "patches", "embedding", "decoder"]) if square else "levels"
    shape = draw.shape(space, least=2, most=5)
    kernel_size = draw.choice([3, None])
    encoding = draw.choice(["mlp", "fourier", "rotary", "none", *(["convolutional"] if kernel_size else [])])
    block: dict[str, Any] = {"keys": draw.choice(["own", "all"]), "encoding": encoding, "hidden_fields": 1}
    convolutions = draw.randint(0, 1)
    widths = (1, 2) if fibers(space).order > 1 else (2, 3)  # a single scalar has no norm
    options: dict[str, Any] = {"widths": widths, "convolutions": convolutions, "attention": (1 - convolutions, 1)}
    options |= {"num_heads": 1, "kernel_size": kernel_size, "block": block, "antialiased": draw.yes()}
    if kind == "levels" and square and draw.yes(0.4):
        options["patch_size"] = patch
    elif not convolutions:
        in_type += spaces.regular(space, 1)  # likewise
    sizes = {"image_size": 2 * patch, "patch_size": patch, "fields": 4, "num_heads": draw.randint(1, 2)}
    sizes |= {"num_blocks": (1, 0), "class_token": False, "registers": draw.randint(0, 1), "hidden_fields": 1}
    block["head_fields"] = 4
    makes: dict[str, Callable[[], Layer]] = {
        "levels": lambda: models.FieldUNet(space, in_type, out_type, **options),
        "patches": lambda: models.VisionTransformer(space, in_type, out_type, **sizes),
        "embedding": lambda: ea.PatchEmbedding(in_type, out_type, patch),
        "decoder": lambda: ea.PatchDecoder(in_type, out_type, patch),
    }
    times = options.get("patch_size", 1) if kind == "levels" else 1 if kind == "decoder" else patch
    x = draw.tensor(2, in_type.size, *(times * n for n in shape))
    return DrawnNetwork(makes[kind], (x,), error_on(space))


def images(draw: Draw) -> Drawn:
    """Classifiers of images, and the blocks of some of them."""
    space = (spaces.PLANE | spaces.VOLUME)[draw.choice(["trivial", "flip", "C2", "C4", "C8", "D4", "mirror"])]()
    flat, square, wide = space.dimensionality == 2, fibers(space).preserves_square, draw.randint(1, 2)
    few = fibers(space).order <= 4
    attention = draw.choice([None, "full", "channel", "spatial", "features", "poses"])
    kind: dict[str, Any] = {"attention": attention} | options_of(attention, attention_size=3)
    ratio = options_of(attention, ratio=draw.randint(1, 3))
    last = {"last_kernel": draw.randint(1, 2) if flat and square else 1}
    gsa = {"channels": 8, "blocks": (1, 1), "pool": (True, False), "num_heads": 2, "norm_between": draw.yes()}
    gsa |= {"kernel_size": draw.choice([3, None]) if few else 3, "query": draw.choice(["own", "all"]) if few else "own"}
    hybrid = {"widths": (2, 3), "convolutions": (1, draw.randint(0, 1)), "attention": (0, 1), "num_heads": 1}
    hybrid |= {"stem": 3, "antialiased": draw.yes(), "pool": draw.choice(["max", "avg"])}
    fields, halve = spaces.regular(space, 2), draw.yes()
    makes: dict[str, tuple[int, Callable[[], Layer]]] = {
        "GroupCNN": (
            12,
            lambda: models.GroupCNN(space, 2, 3, width=wide, convolutions=(wide, 1), **last, **ratio, **kind),
        ),
        "AllCNNC": (4, lambda: models.AllCNNC(space, 2, 3, width=1, **kind)),
        "ResNet44": (5, lambda: models.ResNet44(space, 2, 3, width=(1, 1, 2), blocks=1, **kind)),
        "GroupDenseNet": (10, lambda: models.GroupDenseNet(space, 2, 3, width=1, blocks=2, **kind)),
        "GSANet": (6, lambda: models.GSANet(space, 2, 3, **gsa)),
        "HybridNet": (8, lambda: models.HybridNet(space, 2, 3, **hybrid)),
        "ResidualBlock": (4, lambda: ResidualBlock(fields, spaces.regular(space, wide), halve=halve, **kind)),
        "DenseBlock": (4, lambda: DenseBlock(fields, wide, **kind)),
    }
    least, make = makes[draw.choice(list(makes))]
    x = draw.tensor(2, make().in_type.size, *spaces.shape_of(space, draw.randint(least, least + 3 if flat else least)))

    def error(layer: Layer, inputs: Any) -> float:
        fields = layer.as_fields() if hasattr(layer, "as_fields") else layer
        return equivariance_report(fields, (1, *inputs[0].tensor.shape[1:]), layers=False).relative_error

    return DrawnNetwork(make, (x,), error)


def heads(draw: Draw) -> Drawn:
    """Transformers of sequences and grids: encoders and decoders, with a memory of any kind, or none."""
    space = spaces.PLANE[draw.choice(["trivial", "flip", "C2", "C4", "C8", "D3", "D4"])]()
    tokens, memory = ea.sequence_space(space.fibergroup), draw.choice([None, "sequence", "grid", "points"])
    of_tokens = draw.yes(0.7)
    in_space, seen = tokens if of_tokens else space, tokens if memory == "sequence" else space
    in_type, out_type, memory_type = draw.fields(in_space), draw.fields(in_space), draw.fields(seen)
    encodings = ["mlp", "fourier", "none"]
    block: dict[str, Any] = {"hidden_fields": 1, "encoding": draw.choice(encodings), "head_fields": 3}
    options: dict[str, Any] = {"fields": 2, "num_heads": draw.randint(1, 2), "num_decoder_layers": draw.randint(1, 2)}
    options |= {"kernel_size": draw.choice([None, 3]), "condition": draw.choice([None, 2]), "block": block}
    batch, side = draw.randint(1, 2), draw.randint(2, 4)
    shape = (side,) if of_tokens else (side, side)
    tensors, arguments = [draw.tensor(batch, in_type.size, *shape)], {}
    if options["condition"] is not None:
        arguments["condition"] = draw.tensor(batch, 2)
    if of_tokens:
        block["causal"] = draw.yes()
    if memory is not None:
        options |= {"memory_type": memory_type, "cross_attention": {"encoding": draw.choice(encodings)}}
        options["cross_attention"]["head_fields"] = 3
        if memory != "points" and draw.yes():
            more = {"keys": draw.choice(["own", "all"]), "hidden_fields": 1, "head_fields": 3}
            options |= {"num_encoder_layers": 1, "encoder_block": more | {"kernel_size": draw.choice([None, 3])}}
        places = {"sequence": (draw.randint(1, 4),), "grid": (side, side)}.get(memory)
        tensors.append(draw.tensor(5 if places is None else batch, memory_type.size, *(places or ())))
        if memory == "points":
            tensors.append(draw.tensor(5, 2))
            arguments["memory_batch"] = torch.tensor([draw.randrange(batch) for _ in range(5)])
    grids = memory == "grid" or not of_tokens
    make = lambda: models.FieldTransformer(in_type, out_type, **options)  # noqa: E731
    error = error_on(space if grids else ea.sequence_space(space.fibergroup))
    names = ("memory", "memory_coords")[: len(tensors) - 1]
    return DrawnNetwork(make, tuple(tensors), error, arguments, names=names)


# So many of each are drawn for all, and a few in every run.
KINDS: dict[str, tuple[Callable[[Draw], Drawn], int]] = {
    "grids": (grids, 100),
    "continuous": (continuous, 50),
    "clouds": (clouds, 70),
    "networks": (networks, 40),
    "crossings": (crossings, 60),
    "scales": (scales, 25),
    "convolutions": (convolutions, 25),
    "levels": (levels, 40),
    "heads": (heads, 40),
    "images": (images, 60),
}
