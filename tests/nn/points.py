"""Attention on points: spaces, encodings and clouds to test it on, and its formula written out."""

from __future__ import annotations

import math

import torch
from escnn import gspaces
from escnn.nn import FieldType, GeometricTensor

from escnn_attention import FourierEncoding, MLPEncoding, PairKernel, QuadraticEncoding, RotaryEncoding
from escnn_attention.geometry.neighbours import nearest_image
from escnn_attention.groups.fibers import fibers
from tests.spaces import generators

SPACES = {
    "trivial": lambda: gspaces.trivialOnR2(),
    "C3": lambda: gspaces.rot2dOnR2(3),
    "D4": lambda: gspaces.flipRot2dOnR2(4),
    "flip": lambda: gspaces.flip2dOnR2(),
    "C5 on R3": lambda: gspaces.rot2dOnR3(5),
    "inversion": lambda: gspaces.invOnR3(),
    "D3 on R3": lambda: gspaces.dihedralOnR3(3),
}


ENCODINGS = {
    "mlp": lambda: MLPEncoding(hidden=5),
    "shared": lambda: MLPEncoding(hidden=5, layers=2, per_head=False),
    "separable": lambda: "separable",
    "fourier": lambda: FourierEncoding(3),
    "rotary": lambda: RotaryEncoding(),
    "absolute": lambda: "absolute",
    "none": lambda: "none",
    "quadratic": lambda: QuadraticEncoding(),
    "LieTransformer": lambda: PairKernel(hidden=4),
    "2232": lambda: PairKernel("concat", "raw", "mlp", hidden=4),
    "product": lambda: PairKernel("concat", "mlp", "product", hidden=4),
    "location only": lambda: PairKernel("none", "mlp", "sum", hidden=4),
    "raw sum": lambda: PairKernel("dot", "raw", "sum", hidden=4),
    "content only": lambda: PairKernel("concat", "none", "mlp", hidden=4),
}

NORMED = ("mlp", "shared", "separable", "fourier", "rotary", "none", "LieTransformer", "2232")
"""Encodings of layers that may have registers and normalised queries and keys."""


def mixed(space, fields: int = 1) -> FieldType:
    """Regular, trivial and other fields."""
    action = space.basespace_action
    return FieldType(space, fields * [space.regular_repr, space.trivial_repr, action])


def cloud(field_type: FieldType, number: int, seed: int = 0, spread: float = 1.0) -> GeometricTensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(number, field_type.size, generator=generator, dtype=torch.float64)
    coords = spread * torch.randn(number, field_type.gspace.dimensionality, generator=generator, dtype=torch.float64)
    return GeometricTensor(x, field_type, coords)


def error_of(layer, x: GeometricTensor, elements, **arguments) -> float:
    with torch.no_grad():
        y, worst = layer(x, **arguments), 0.0
        for element in elements:
            z = layer(x.transform(element), **arguments)
            worst = max(worst, float((z.tensor - y.transform_fibers(element).tensor).norm() / y.tensor.norm()))
    return worst


def worst_error(layer, x: GeometricTensor, **arguments) -> float:
    return error_of(layer, x, generators(layer.space), **arguments)


def written_out(
    layer,
    x: GeometricTensor,
    edges: torch.Tensor,
    measure: torch.Tensor | None = None,
    edge_attr: torch.Tensor | None = None,
) -> torch.Tensor:
    """The layer by its formula: a loop over queries, poses and keys. Features of edges are one row for each."""
    core, group = layer.plain, fibers(layer.space)
    order, heads = group.order, layer.num_heads
    q, k, v = (t.squeeze(1) for t in core.to_heads(x.tensor.unsqueeze(0)))  # M, N, P, C
    channels, poses = q.shape[-1], k.shape[2]
    alike = order // q.shape[2] if core.query == "all" else 1  # queries of scalars
    actions = [torch.as_tensor(group.action[group.inverse[h]]) for h in range(order)]
    points = x.coords / core.length_scale
    out = q.new_zeros(heads, len(points), order, channels)
    encoding = core.encoding

    def scored(m, i, t, j, p, h):
        a, b, pose = points[i] @ actions[h].T, points[j] @ actions[h].T, int(group.quotient[h, p])
        seen = core.relation.in_units(core.length_scale)(a, b)
        return score(encoding, m, q[m, i, t], k[m, j, p], seen, pose, a, b, group, h, t), seen, pose

    for i in range(len(points)):
        keys = [(e, j) for e, (j, target) in enumerate(edges.T.tolist()) if target == i]
        for h in range(order):
            for m in range(heads):
                for t in [h] if core.query == "own" else range(q.shape[2]):
                    tilde = t if q.shape[2] > 1 else 0
                    scores, values, mass = [], [], []
                    for e, j in keys:
                        for p in range(poses):
                            if core.keys == "own" and poses > 1 and p != tilde:
                                continue
                            s, seen, pose = scored(m, i, tilde, j, p, h)
                            if core.shared_scores:  # of all poses, for each
                                own = [(g % q.shape[2], g % poses, g) for g in range(order)]
                                s = sum(scored(m, i, t, j, p, g)[0] for t, p, g in own) / math.sqrt(order)
                            mu = s.new_ones(()) if measure is None else measure[j].detach()
                            if core.cutoff is not None:
                                apart = nearest_image(x.coords[i] - x.coords[j], core.relation.period)
                                mu = mu * core.cutoff.function(apart.norm() / core.cutoff.radius)
                            mass.append(mu)
                            factor = 1.0
                            if edge_attr is not None:
                                added, change = core.edge_readout[:, m] @ edge_attr[e]
                                s, factor = s + added, 1 + change
                            scores.append(s)
                            value = factor * v[m, j, p]
                            if core.values is not None:
                                matrices = core.values.weight[m, pose if poses > 1 else 0]
                                value = torch.einsum("f,fic,c->i", core.values.kernel(seen), matrices, value)
                            values.append(value)
                    if not scores:
                        continue
                    s, mu = torch.stack(scores), torch.stack(mass)
                    alpha = (s + mu.log()).softmax(0) if core.normalization == "softmax" else s * mu / mu.sum()
                    out[m, i, h] += alike * alpha @ torch.stack(values)
    return core.project_out(out.unsqueeze(1)).squeeze(0)


def bias_of(bias, m):
    return 0.0 if bias is None else bias[m]


def score(encoding, m, q, k, seen, pose=0, a=None, b=None, group=None, h=0, tilde=0):
    """Of one key, for one head; where both are and in which poses is of absolute encodings."""
    root = math.sqrt(len(q))

    def of(table):
        return table[m if len(table) > 1 else 0]

    if not isinstance(encoding, PairKernel):
        table = encoding.poses()
        if encoding.absolute:
            own = 0.0 if table is None else of(table)[int(group.quotient[h, tilde])]
            q = q + of(encoding.offsets(a)) + own
            k = k + of(encoding.offsets(b)) + (0.0 if table is None else of(table)[pose])
            return q @ k / root
        if table is not None:
            k = k + of(table)[pose]
        if isinstance(encoding, RotaryEncoding):
            angle = of(encoding.rotations()) @ seen
            n = len(angle)
            first, second = k[:n].clone(), k[n : 2 * n].clone()
            k = torch.cat(
                [first * angle.cos() - second * angle.sin(), first * angle.sin() + second * angle.cos(), k[2 * n :]]
            )
        elif (offset := encoding.offsets(seen)) is not None:
            k = k + of(offset)
        return q @ k / root
    f = torch.nn.functional.silu
    c = None
    if encoding.content == "dot":
        c = (q @ k / root).view(1)
    elif encoding.content == "concat":
        c = (encoding.of_query[m] @ q + encoding.of_key[m] @ k) / math.sqrt(2)
    location = None
    if encoding.location != "none":
        location = encoding.of_offset[m] @ seen + bias_of(encoding.bias, m)
        if encoding.num_poses > 1:
            location = location + encoding.of_pose[m][:, pose]
        if encoding.location == "mlp":
            hidden = encoding.within[m] @ f(location) + bias_of(encoding.location_hidden_bias, m)
            location = (encoding.read_location[m] @ f(hidden) + bias_of(encoding.location_last_bias, m)).view(1)
            location = f(location) if encoding.last_activation else location
    if encoding.combine == "mlp":
        total = encoding.join_bias[m]
        if c is not None:
            total = total + encoding.join_content[m] @ c
        if location is not None:
            total = total + (encoding.join_location[m] @ location if encoding.location == "mlp" else location)
        hidden = encoding.join_within[m] @ f(total) + bias_of(encoding.join_hidden_bias, m)
        number = encoding.read_both[m] @ f(hidden) + bias_of(encoding.join_last_bias, m)
        return f(number) if encoding.last_activation else number
    if c is not None:
        c = c[0] if encoding.content == "dot" else encoding.read_content[m] @ f(c)
    if location is not None:
        location = location[0]
    if c is None or location is None:
        return location if c is None else c
    return c + location if encoding.combine == "sum" else c * location
