"""Published LieTransformers, against their formulas written out for all pairs of lifted points."""

import itertools
import math
import warnings

import pytest
import scipy.linalg
import torch
import torch.nn.functional as F

from escnn_attention.models import HamiltonianNetwork, LieTransformer, from_published
from tests.models.published.mistakes import changing, check_names

pytestmark = pytest.mark.usefixtures("double")

HEADS, WIDTH, INS, OUTS, HIDDEN, EMBEDDING = 2, 6, 3, 2, 4, 2
GROUPS = {
    "T(2)": (2, 1),
    "T(3)": (3, 1),
    "SE(2)_canonical": (2, 4),
    "Trivial(2)": (2, 1),
    "SE(2)": (2, 3),
    "SE(3)": (3, 2),
}
"""The dimension and the lifts of a point."""


def network(group, kernel, readout, location=None):
    """Tensors of a network of two blocks: names and shapes of the published modules."""
    dim, _ = GROUPS[group]
    location = location or {"T(": dim, "SE": dim + 1, "Tr": 2 * dim}[group[:2]]
    tensors = {}

    def linear(name, outs, ins):
        tensors[f"{name}.weight"], tensors[f"{name}.bias"] = torch.randn(outs, ins) / math.sqrt(ins), torch.randn(outs)

    def networks(name, sizes):
        for i, (ins, outs) in enumerate(itertools.pairwise(sizes), start=1):
            start = f"{name}.LinNormAct_{i}.linear.module"
            tensors[f"{start}.weight"] = torch.randn(HEADS, ins, outs)
            tensors[f"{start}.bias"] = torch.randn(HEADS, outs)

    linear("net.0.module", WIDTH, INS)
    for i in (1, 2):
        name = f"net.{i}"
        for what in ("ema.input_linear", "ema.output_linear", *[f"mlp.LinNormAct_{n}.linear.module" for n in (1, 2)]):
            linear(f"{name}.{what}", WIDTH, WIDTH)
        for what in ("ln_ema", "ln_mlp"):
            tensors[f"{name}.{what}.weight"], tensors[f"{name}.{what}.bias"] = torch.randn(WIDTH), torch.randn(WIDTH)
        if kernel == "mlp":
            networks(f"{name}.ema.kernel.location_kernel", (location, HIDDEN, HIDDEN, 1))
            for what in "kq":
                linear(f"{name}.ema.kernel.feature_kernel.fc_{what}", WIDTH, WIDTH)
        else:
            both = f"{name}.ema.kernel.location_feature_combination.1"
            networks(both, (EMBEDDING + location, HIDDEN, HIDDEN, 1))
            for what in "kq":
                linear(f"{name}.ema.kernel.feature_featurisation.fc_{what}", HEADS * EMBEDDING, WIDTH)
            linear(f"{name}.ema.kernel.feature_featurisation.fc_o", EMBEDDING, 2 * EMBEDDING)
    if readout == "clouds":
        for i, outs in ((2, WIDTH), (5, WIDTH), (8, OUTS)):
            linear(f"net.4.{i}", outs, WIDTH)
    else:
        linear("net.3.linear.module", OUTS, WIDTH)
    return tensors


# ------------------------------------------------------------------------------------------------------ the formulas


def mapped(tensors, name, x):
    return F.linear(x, tensors[f"{name}.weight"], tensors[f"{name}.bias"])


def perceived(tensors, name, x):
    """A network for each head, with a nonlinearity behind each layer, of (i, j, heads, numbers)."""
    for i in (1, 2, 3):
        start = f"{name}.LinNormAct_{i}.linear.module"
        x = F.silu(torch.einsum("ijhc,hco->ijho", x, tensors[f"{start}.weight"]) + tensors[f"{start}.bias"])
    return x.squeeze(-1)


def located(group, x):
    """What is seen of all pairs of lifted points, (i, j, numbers), where i attends to j."""
    lifts = GROUPS[group][1]
    if group.startswith("T("):
        return x[:, None] - x[None]
    if group.startswith("Trivial"):
        return torch.cat([x[:, None].expand(-1, len(x), -1), x[None].expand(len(x), -1, -1)], dim=-1)
    x, r = x.repeat_interleave(lifts, 0), torch.arange(lifts).repeat(len(x))
    cosine, sine = (2 * math.pi * r / lifts).cos(), (2 * math.pi * r / lifts).sin()
    inverse = torch.stack([torch.stack([cosine, sine], -1), torch.stack([-sine, cosine], -1)], -2)
    offsets = torch.einsum("iab,ijb->ija", inverse, x[None] - x[:, None])
    return torch.cat([offsets, ((r[None] - r[:, None]) % lifts)[..., None]], dim=-1)


def rotated(lift):
    """The matrix of an angle or of a unit quaternion."""
    if lift.dim() == 0:
        return torch.stack([lift.cos(), -lift.sin(), lift.sin(), lift.cos()]).view(2, 2)
    w, x, y, z = lift
    rows = [
        [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
        [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
        [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
    ]
    return torch.stack([torch.stack(row) for row in rows])


def lifted(x, lifts, location):
    """What is seen of all pairs of points with rotations: the motion from j to i, its rotation first."""
    dim, g = x.shape[1], []
    for point, rotations in zip(x, lifts, strict=True):
        for lift in rotations:
            g.append(torch.eye(dim + 1))
            g[-1][:dim, :dim], g[-1][:dim, dim] = rotated(lift), point
    rotations, seen = lifts.flatten(0, 1), torch.empty(len(g), len(g), location)
    for (i, to), (j, start) in itertools.product(enumerate(g), enumerate(g)):
        motion = torch.linalg.solve(start, to)
        if location == 7:
            (a, u), (b, v) = ((q[0], q[1:]) for q in (rotations[j] * torch.tensor([1, -1, -1, -1]), rotations[i]))
            between = [(a * b - u @ v)[None], a * v + b * u + torch.linalg.cross(u, v), motion[:dim, dim]]
        else:
            log = torch.as_tensor(scipy.linalg.logm(motion.numpy()).real)
            between = [log[1, :1]] if dim == 2 else [log[2, 1:2], log[0, 2:3], log[1, :1]]
            between.append(log[:dim, dim])
        seen[i, j] = torch.cat(between)
    return seen


def limited(place, nonlinearity):
    length = place.norm(dim=-1, keepdim=True) + 1e-6
    return torch.tanh(length / 7) / length * place if nonlinearity == "tanh" else place


def nearest(place, number, rotation=0):
    """Whether j is among the so many nearest of i, by the first so many numbers and by the others."""
    parts = place[..., :rotation].norm(dim=-1), place[..., rotation:].norm(dim=-1)
    order = (0.2 * parts[0] + 0.8 * parts[1]).argsort(1)[:, :number]
    return torch.zeros(place.shape[:2], dtype=torch.bool).scatter(1, order, True)


def attended(tensors, name, place, f, normalization, near):
    n, heads = len(f), (HEADS, -1)
    near = torch.ones(n, n, dtype=torch.bool) if near is None else near
    if f"{name}.kernel.feature_kernel.fc_k.weight" in tensors:
        k, q = (mapped(tensors, f"{name}.kernel.feature_kernel.fc_{w}", f).unflatten(1, heads) for w in "kq")
        scores = torch.einsum("ihc,jhc->ijh", q, k) / math.sqrt(WIDTH / HEADS)
        place = place[:, :, None].expand(-1, -1, HEADS, -1)
        scores = scores + perceived(tensors, f"{name}.kernel.location_kernel", place)
    else:
        start = f"{name}.kernel.feature_featurisation"
        k, q = (mapped(tensors, f"{start}.fc_{w}", f).unflatten(1, heads) for w in "kq")
        content = torch.cat([k[:, None].expand(-1, n, -1, -1), q[None].expand(n, -1, -1, -1)], dim=-1)
        place = place[:, :, None].expand(-1, -1, HEADS, -1)
        both = torch.cat([mapped(tensors, f"{start}.fc_o", content), place], dim=-1)
        scores = perceived(tensors, f"{name}.kernel.location_feature_combination.1", both)
    hidden, number = ~near[..., None], near.sum(1)[:, None, None]
    weights = (
        scores.masked_fill(hidden, -torch.inf).softmax(1)
        if normalization == "softmax"
        else scores.masked_fill(hidden, 0) / number
    )
    v = mapped(tensors, f"{name}.input_linear", f).unflatten(1, heads)
    return mapped(tensors, f"{name}.output_linear", torch.einsum("ijh,jhc->ihc", weights, v).flatten(1))


def output(tensors, group, features, x, normalization, pool, place=None, near=None):
    """The output of one cloud: LieTransformer, Section 3.3, from all points or those that are near."""
    place = located(group, x) if place is None else place
    f = mapped(tensors, "net.0.module", features).repeat_interleave(GROUPS[group][1], 0)
    for i in (1, 2):
        name = f"net.{i}"
        normed = [(tensors[f"{name}.ln_{w}.weight"], tensors[f"{name}.ln_{w}.bias"]) for w in ("ema", "mlp")]
        y = F.layer_norm(f, (WIDTH,), *normed[0])
        f = f + attended(tensors, f"{name}.ema", place, y, normalization, near)
        y = F.layer_norm(f, (WIDTH,), *normed[1])
        for number in (1, 2):
            y = F.silu(mapped(tensors, f"{name}.mlp.LinNormAct_{number}.linear.module", y))
        f = f + y
    pooled = {"mean": lambda z: z.mean(0), "max": lambda z: z.amax(0)}[pool]
    if "net.3.linear.module.weight" in tensors:
        return pooled(mapped(tensors, "net.3.linear.module", F.silu(f)))
    y = pooled(f)
    for i in (2, 5, 8):
        y = mapped(tensors, f"net.4.{i}", F.silu(y))
    return y


# ------------------------------------------------------------------------------------------------------------ the tests


@pytest.mark.parametrize(
    ("group", "kernel", "readout", "normalization", "pool"),
    [
        ("T(2)", "mlp", "clouds", "softmax", "mean"),
        ("T(3)", "2232", "points", "count", "mean"),
        ("SE(2)_canonical", "mlp", "clouds", "count", "max"),
        ("SE(2)_canonical", "2232", "points", "softmax", "max"),
        ("Trivial(2)", "mlp", "points", "softmax", "mean"),
        ("Trivial(2)", "2232", "clouds", "count", "mean"),
    ],
)
def test_networks_give_the_published_outputs(group, kernel, readout, normalization, pool):
    dim, lifts = GROUPS[group]
    tensors, options = network(group, kernel, readout), {"normalization": normalization, "pool": pool}
    ours = from_published(
        {f"predictor.{n}": t for n, t in tensors.items()}, "lie_transformer", group=group, lift_samples=lifts, **options
    )
    assert isinstance(ours, LieTransformer)
    features, x, batch = torch.randn(7, INS), torch.randn(7, dim), torch.tensor([0, 0, 0, 1, 1, 1, 1])
    expected = [output(tensors, group, features[batch == i], x[batch == i], **options) for i in (0, 1)]
    torch.testing.assert_close(ours(features, x, batch=batch), torch.stack(expected), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours.export()(features, x, None, batch), torch.stack(expected), rtol=1e-12, atol=1e-12)
    # A point that a mask hides is not there.
    mask = torch.arange(7) != 2
    hidden = output(tensors, group, features[:2], x[:2], **options)
    torch.testing.assert_close(ours(features, x, batch=batch, mask=mask)[0], hidden, rtol=1e-12, atol=1e-12)
    # Motions that the group has leave the output, and others do not.
    if group.startswith("Trivial"):
        return
    moved = ours(features, x + torch.randn(dim), batch=batch)
    torch.testing.assert_close(moved, torch.stack(expected), rtol=1e-12, atol=1e-12)
    turned = x.clone()
    turned[:, 0], turned[:, 1] = -x[:, 1], x[:, 0]
    difference = (ours(features, turned, batch=batch) - torch.stack(expected)).abs().max()
    assert difference < 1e-12 if lifts == 4 else difference > 1e-4


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("group", "kernel", "readout", "location", "nonlinearity"),
    [
        ("SE(2)", "mlp", "clouds", 3, None),
        ("SE(2)", "2232", "points", 3, "tanh"),
        ("SE(3)", "mlp", "points", 6, None),
        ("SE(3)", "2232", "points", 7, None),
        ("SE(3)", "2232", "points", 7, "tanh"),
    ],
)
def test_networks_that_draw_rotations_give_the_published_outputs(group, kernel, readout, location, nonlinearity):
    dim, number = GROUPS[group]
    tensors = network(group, kernel, readout, location)
    options = {"lift_samples": number, "lie_algebra_nonlinearity": nonlinearity, "positive_quaternions": location == 7}
    ours = from_published(tensors, "lie_transformer", group=group, **options)
    features, x, batch = torch.randn(5, INS), torch.randn(5, dim), torch.tensor([0, 0, 1, 1, 1])
    lifts = torch.randn(5, number) if dim == 2 else F.normalize(torch.randn(5, number, 4), dim=-1)
    options = {"normalization": "softmax" if kernel == "mlp" else "count", "pool": "mean"}
    parts = [batch == i for i in (0, 1)]
    places = [limited(lifted(x[p], lifts[p], location), nonlinearity) for p in parts]
    expected = torch.stack(
        [output(tensors, group, features[p], x[p], **options, place=q) for p, q in zip(parts, places, strict=True)]
    )
    torch.testing.assert_close(ours(features, x, batch=batch, lifts=lifts), expected, rtol=1e-12, atol=1e-12)
    exported = ours.export()(features, x, None, batch, None, None, lifts)
    torch.testing.assert_close(exported, expected, rtol=1e-12, atol=1e-12)
    assert (ours(features, x, batch=batch) - expected).abs().max() > 1e-4
    assert ours.lift.plain.positive_quaternions is (location == 7)
    other = from_published(tensors, "lie_transformer", group=group, lift_samples=number)
    differs = (other(features, x, batch=batch, lifts=lifts) - expected).abs().max() > 1e-4
    assert differs if nonlinearity else not differs


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("group", "kernel", "location", "nonlinearity"),
    [
        ("T(2)", "mlp", None, None),
        ("Trivial(2)", "2232", None, None),
        ("SE(2)", "mlp", 3, None),
        ("SE(2)", "2232", 3, "tanh"),
        ("SE(3)", "2232", 6, None),
        ("SE(3)", "2232", 7, None),
        ("SE(3)", "mlp", 7, "tanh"),
    ],
)
@pytest.mark.parametrize("fill", [1.0, 0.5])
@pytest.mark.slow
def test_points_that_are_drawn_are_some_of_the_nearest(group, kernel, location, nonlinearity, fill):
    (dim, lifts), samples = GROUPS[group], 2
    tensors = network(group, kernel, "points", location)
    options = {"group": group, "lift_samples": lifts, "lie_algebra_nonlinearity": nonlinearity}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        ours = from_published(tensors, "lie_transformer", mc_samples=samples, fill=fill, **options)
    said = [str(warning.message) for warning in caught]
    if fill == 1:
        assert said == []  # They are all of them, and nothing is drawn.
    else:
        assert len(said) == 1
        assert said[0].startswith("lie_transformer: the published network draws 2 of the 4 nearest points anew")
    number = int(samples / fill)
    assert {block.attention.plain.neighbourhood.num_neighbours for block in ours.blocks} == {number}
    features, x, batch = torch.randn(11, INS), torch.randn(11, dim), torch.tensor([0] * 5 + [1] * 6)
    drawn = group in ("SE(2)", "SE(3)")
    rotations = None
    if drawn:
        rotations = torch.randn(11, lifts) if dim == 2 else F.normalize(torch.randn(11, lifts, 4), dim=-1)
    expected = []
    for part in (batch == 0, batch == 1):
        place = lifted(x[part], rotations[part], location) if drawn else located(group, x[part])
        place = limited(place, nonlinearity)
        near = nearest(place, number, {"SE(2)": 1, "SE(3)": 3}.get(group, 0))
        if group.startswith("Trivial"):
            near = nearest(x[part][:, None] - x[part], number)
        normalization = "softmax" if kernel == "mlp" else "count"
        expected.append(output(tensors, group, features[part], x[part], normalization, "mean", place, near))
    expected, given = torch.stack(expected), {"lifts": rotations} if drawn else {}
    torch.testing.assert_close(ours(features, x, batch=batch, **given), expected, rtol=1e-12, atol=1e-12)
    exported = ours.export()(features, x, None, batch, None, None, *given.values())
    torch.testing.assert_close(exported, expected, rtol=1e-12, atol=1e-12)
    # A point that a mask hides is nobody's neighbour, and all points are others than the nearest.
    more = [*range(11), 3]
    hidden = {"batch": batch[more], "mask": torch.arange(12) < 11} | {n: t[more] for n, t in given.items()}
    torch.testing.assert_close(ours(features[more], x[more], **hidden), expected, rtol=1e-12, atol=1e-12)
    everyone = from_published(tensors, "lie_transformer", **options)
    assert (everyone(features, x, batch=batch, **given) - expected).abs().max() > 1e-4


def test_defaults_and_dynamics():
    energy = from_published(network("T(2)", "mlp", "clouds"), "lie_transformer", group="T(2)")
    assert {block.attention.plain.normalization for block in energy.blocks} == {"softmax"}
    ours = from_published(network("T(3)", "2232", "points"), "lie_transformer", group="T(3)")
    assert {block.attention.plain.normalization for block in ours.blocks} == {"count"}
    tensors = network("T(2)", "mlp", "points")
    tensors |= {f"net.3.linear.module.{n}": tensors[f"net.3.linear.module.{n}"][:1] for n in ("weight", "bias")}
    energy = from_published(tensors, "lie_transformer", group="T(2)", normalization="count")
    dynamics = HamiltonianNetwork(energy)
    q, p, features = torch.randn(3, 2), torch.randn(3, 2), torch.rand(3, INS)
    path = dynamics.rollout(q, p, features, num_frames=3, step=0.05)
    torch.testing.assert_close(path[:, -1, 1].sum(0), p.sum(0), rtol=1e-12, atol=1e-12)


def test_bad_state_dicts():
    tensors = network("T(2)", "mlp", "clouds")
    load = changing(tensors, "lie_transformer", group="T(2)")
    missing = ("net.1.ema.output_linear.bias", "net.2.ln_mlp.weight", "net.4.5.weight", "net.0.module.weight")
    longer = ("net.2.ema.kernel.feature_kernel.fc_q.weight", "net.1.mlp.LinNormAct_2.linear.module.bias")
    check_names(load, tensors, missing, longer)
    with pytest.raises(ValueError, match=r"^net.4.9.weight: not a tensor"):
        load({"net.4.9.weight": torch.ones(2)})
    first = "net.1.ema.kernel.location_kernel.LinNormAct_1.linear.module.weight"
    for options, message in (
        ({"group": "T(3)"}, rf"{first}: .*\(2, 3, 4\)"),
        ({"group": "SE3"}, r"group: .*'T\(2\)'"),
        ({"lift_samples": 2}, r"lift_samples: .*T\(2\) has one"),
        ({"group": "SE(3)", "lift_samples": 2}, rf"{first}: .*\(2, 6, 4\)"),
        ({"mc_samples": -1}, "mc_samples: got -1"),
        ({"fill": 0.5}, "fill: .*points are seen"),
        ({"mc_samples": 2, "fill": 0}, "fill: .*needed a p"),
        ({"mc_samples": 2, "fill": 1.5}, "fill: .*needed a p"),
        ({"group": "SE(2)_canonical", "mc_samples": 2}, "mc_samples: .*has no distance"),
        ({"lie_algebra_nonlinearity": "relu"}, "lie_algebra_nonlinearity: .*'tanh'"),
        ({"lie_algebra_nonlinearity": "tanh"}, "lie_algebra_nonlinearity: .*has no rotations"),
        ({"positive_quaternions": True}, "positive_quaternions: got True"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            load({}, **options)
    with pytest.raises(ValueError, match=r"^net.0.module.weight: makes 5 channels"):
        load({"net.0.module.weight": torch.ones(5, INS)})
    wide = network("T(3)", "2232", "points") | {"net.1.ema.kernel.feature_featurisation.fc_o.weight": torch.ones(4, 8)}
    with pytest.raises(ValueError, match=r"^net.1.ema.kernel.feature_featurisation.fc_o.weight: makes 4 numbers"):
        from_published(wide, "lie_transformer", group="T(3)")
    with pytest.raises(ValueError, match=r"^group: .*'T\(2\)'"):
        from_published(tensors, "lie_transformer")
