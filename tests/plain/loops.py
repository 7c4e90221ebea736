"""Self-attention on a grid in plain loops."""

import functools
import itertools
import math

import numpy as np
import torch

from escnn_attention import Scales


def written_out(layer, x, query):
    """A layer over escnn's own group elements and over numbers, with none of the package's tables.

    Everything is looked up where the formula says: ρ(h)⁻¹ from the representation, h⁻¹Δ from the action on the base
    space, h⁻¹ĥ from the product of elements.

    Args:
        layer: attention on a group, or on dilations too; without these there is one scale.
        x: its input, a tensor of one image.
        query: the poses that each output pose sees, ``"own"`` or ``"all"``, or ``"lifting"`` for a layer that lifts.
    """
    space, core = layer.space, layer.plain
    elements, lifting = list(space.fibergroup.elements), query == "lifting"
    scales, measure = getattr(layer, "scales", Scales(2, 1)), getattr(layer, "measure", None)
    width = layer.kernel_size if hasattr(layer, "scales") else core.window.kernel_size
    heads, fields, n = layer.num_heads, layer.head_fields, scales.count
    weight, bias = core.project_in.weight, core.project_in.bias
    places = list(itertools.product(*map(range, x.shape[2:])))
    reach = width // 2 if width else max(x.shape[2:]) - 1
    one_in, one_out = layer.in_type if lifting else scales.single(layer.in_type), scales.single(layer.out_type)
    levels, poses = range(1 if lifting else n), elements[:1] if lifting else elements
    interval = getattr(core, "interval", None) or 1
    x = x.unflatten(1, (len(levels), -1))

    def project(place, level, h):
        f = x[(0, level, slice(None), *place)]
        y = weight @ (f if lifting else torch.tensor(one_in.representation(~h)) @ f)
        return (y + torch.cat([bias, torch.zeros(heads * fields, dtype=y.dtype)])).view(3, heads, fields)

    def cell(steps, s):
        """How much of the unit cell around a position lies in the window."""
        if getattr(layer, "windows", None) == "dilated":
            return 1.0 if all(step % s == 0 and abs(step) <= reach * s for step in steps) else 0.0
        if measure != "haar":
            return float(all(abs(step) <= reach * s for step in steps))
        if layer.window == "disc":
            return min(1.0, max(0.0, reach * s + 0.5 - math.hypot(*steps)))
        return math.prod(min(1.0, max(0.0, reach * s + 0.5 - abs(step))) for step in steps)

    @functools.cache
    def encoded(h, steps, s, t, p):
        turn = torch.tensor(np.asarray(space.basespace_action(~h)), dtype=torch.float64)
        delta = torch.tensor([steps[1], -steps[0]], dtype=torch.float64) / (s * reach)
        terms = core.encoding.offsets(turn @ delta)
        if not lifting:
            terms = terms + core.encoding.poses()[:, t * len(elements) + elements.index(~h @ p)]
        return terms.expand(heads, -1)

    projected = {key: project(*key) for key in itertools.product(places, levels, poses)}
    out = []
    for i in range(n):
        s = scales.base**i
        rows = []
        for place in places:
            total = torch.zeros(len(elements), heads, fields, dtype=torch.float64)
            for (a, h), m in itertools.product(enumerate(elements), range(heads)):
                for own in [h] if query == "own" else poses:
                    q = projected[place, 0 if lifting else i, own][0][m]
                    scores, values = [], []
                    for other, t, p in itertools.product(places, range(interval), poses):
                        steps = tuple(b - c for b, c in zip(other, place, strict=True))
                        share = cell(steps, s)
                        if share == 0 or (not lifting and i + t >= n):
                            continue
                        _, v, k = projected[other, 0 if lifting else i + t, p]
                        counts = share * (scales.base ** (-2 * t) if measure == "haar" else 1.0)
                        rho = encoded(h, steps, s, t, p)[m]
                        scores.append(q @ (k[m] + rho) / math.sqrt(fields) + math.log(counts))
                        values.append(v[m])
                    total[a, m] = total[a, m] + torch.stack(scores).softmax(0) @ torch.stack(values)
            if measure == "printed":
                total = total / s ** (2 if lifting else 3)
            y = core.project_out.invariants @ core.project_out.bias
            for a, h in enumerate(elements):
                y = y + torch.tensor(one_out.representation(h)) @ (core.project_out.weight.T @ total[a].flatten())
            rows.append(y)
        out.append(torch.stack(rows, 1))
    return torch.cat(out)[None].unflatten(2, x.shape[3:])
