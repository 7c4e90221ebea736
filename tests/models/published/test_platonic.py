"""Published Platonic Transformers, against their formulas written out for each pair of poses."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from escnn import gspaces

from escnn_attention import tetraOnR3
from escnn_attention.groups.fibers import fibers
from escnn_attention.models import PlatonicTransformer, from_published
from tests.models.published.mistakes import changing, check_names

pytestmark = pytest.mark.usefixtures("double")

HEADS, CHANNELS, WIDTH, HIDDEN, SCALARS, OUTS = 2, 4, 8, 6, 3, 2


def matrices(name):
    """Elements of groups, in an order of their own and the identity first."""
    if name == "trivial":
        return torch.eye(3)[None]
    if name == "tetrahedron":
        return torch.tensor(fibers(tetraOnR3()).action)[[0, *range(11, 0, -1)]]
    if name == "octahedron":
        rotations = [
            np.eye(3)[list(p)] * np.array(signs)[:, None]
            for p in ((0, 1, 2), (1, 2, 0), (2, 0, 1), (1, 0, 2), (0, 2, 1), (2, 1, 0))
            for signs in np.ndindex(2, 2, 2)
            for signs in [1 - 2 * np.array(signs)]
        ]
        return torch.tensor(np.stack([r for r in rotations if np.linalg.det(r) > 0]))
    angles = [2 * math.pi * i / 3 for i in range(3)]
    rotations = torch.tensor([[[math.cos(a), -math.sin(a)], [math.sin(a), math.cos(a)]] for a in angles])
    return torch.cat([rotations, rotations @ torch.diag(torch.tensor([1.0, -1.0]))])  # dihedral


def relative(group):
    """The element g⁻¹h, of all g (rows) and h."""
    products = group.transpose(1, 2)[:, None] @ group[None]
    return (products[:, :, None] - group).abs().amax((3, 4)).argmin(2)


def network(group, *, vectors=0, keys=False, rms=False, scale=False, ape=False, hidden=True, out_vectors=0):
    """Tensors of a network of two layers: names and shapes of the published modules."""
    poses, dim, tensors = len(group), group.shape[-1], {}

    def linear(name, outs, ins, *, bias=True):
        tensors[f"{name}.kernel"] = torch.randn(poses, outs, ins) / math.sqrt(poses * max(ins, 1))
        if bias:
            tensors[f"{name}.bias"] = torch.randn(outs)
        tensors[f"{name}.cayley_table"] = torch.zeros(poses, poses, dtype=torch.long)
        tensors[f"{name}.inverse_indices"] = torch.zeros(poses, dtype=torch.long)

    linear("x_embedder", WIDTH, SCALARS + dim * vectors, bias=False)
    if ape:
        tensors["ape.freqs"], tensors["ape.group_elements"] = torch.randn(dim, WIDTH // 2), group
    for i in (0, 1):
        for name in ("q", "v", "k", "out") if keys else ("q", "v", "out"):
            linear(f"layers.{i}.interaction.{name}_proj", WIDTH, WIDTH)
        tensors[f"layers.{i}.interaction.rope_emb.freqs"] = torch.randn(HEADS, CHANNELS // 2, dim)
        tensors[f"layers.{i}.interaction.rope_emb.group_elements"] = group
        linear(f"layers.{i}.linear1", HIDDEN, WIDTH)
        linear(f"layers.{i}.linear2", WIDTH, HIDDEN)
        for number in (1, 2):
            tensors[f"layers.{i}.norm{number}.weight"] = torch.randn(WIDTH)
            if not rms:
                tensors[f"layers.{i}.norm{number}.bias"] = torch.randn(WIDTH)
            if scale:
                tensors[f"layers.{i}.gamma_{number}"] = torch.randn(WIDTH)
    for kind, outs in (("scalar", OUTS), ("vector", dim * out_vectors)):
        if hidden:
            linear(f"{kind}_readout.0", WIDTH, WIDTH)
        linear(f"{kind}_readout.2" if hidden else f"{kind}_readout", outs, WIDTH)
    return tensors


# ------------------------------------------------------------------------------------------------------ the formulas


def convolved(tensors, name, group, x):
    """A group convolution of features (..., poses, channels), whose kernel is of g⁻¹h."""
    kernel = tensors[f"{name}.kernel"][relative(group)]  # of g, h
    return torch.einsum("...gi,ghoi->...ho", x, kernel) + tensors.get(f"{name}.bias", torch.zeros(1))


def rotated(x, angle):
    """Pairs of neighbouring channels (..., 2F), by angles (..., F)."""
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], dim=-1).flatten(-2)


def attended(tensors, name, group, x, coords, values, softmax):
    """Each pose attends by itself, with keys and queries rotated by the positions as it sees them."""
    seen = torch.einsum("gji,nj->ngi", group, coords)
    angle = torch.einsum("ngi,hfi->nghf", seen, tensors[f"{name}.rope_emb.freqs"])
    q, v = (convolved(tensors, f"{name}.{w}_proj", group, x).unflatten(-1, (HEADS, -1)) for w in "qv")
    k = torch.ones_like(q)
    if f"{name}.k_proj.kernel" in tensors:
        k = convolved(tensors, f"{name}.k_proj", group, x).unflatten(-1, (HEADS, -1))
    scores = torch.einsum("nghc,mghc->nmgh", rotated(q, angle), rotated(k, angle))
    weights = (scores / math.sqrt(CHANNELS)).softmax(1) if softmax else scores / len(x)
    y = torch.einsum("nmgh,mghc->nghc", weights, rotated(v, angle) if values else v)
    y = rotated(y, -angle) if values else y
    return convolved(tensors, f"{name}.out_proj", group, y.flatten(-2))


def normed(tensors, name, x):
    weight, bias = tensors[f"{name}.weight"], tensors.get(f"{name}.bias")
    return F.rms_norm(x, x.shape[-1:], weight, 1e-5) if bias is None else F.layer_norm(x, x.shape[-1:], weight, bias)


def output(tensors, group, scalars, vectors, coords, pool, divisor, values, softmax):
    """The output of one cloud: scalars, and vectors behind them."""
    poses, dim = len(group), group.shape[-1]
    in_frames = torch.einsum("gji,ncj->ngci", group, vectors).flatten(2)
    x = torch.cat([scalars[:, None].expand(-1, poses, -1), in_frames], dim=-1)
    x = convolved(tensors, "x_embedder", group, x)
    if "ape.freqs" in tensors:
        angle = torch.einsum("gji,nj->ngi", group, coords) @ tensors["ape.freqs"]
        x = x + torch.cat([angle.cos(), angle.sin()], dim=-1)
    for i in (0, 1):
        name = f"layers.{i}"
        gains = [tensors.get(f"{name}.gamma_{number}", torch.ones(1)) for number in (1, 2)]
        y = normed(tensors, f"{name}.norm1", x)
        x = x + gains[0] * attended(tensors, f"{name}.interaction", group, y, coords, values, softmax)
        y = F.gelu(convolved(tensors, f"{name}.linear1", group, normed(tensors, f"{name}.norm2", x)))
        x = x + gains[1] * convolved(tensors, f"{name}.linear2", group, y)
    x = (x.mean(0) if pool == "mean" else x.sum(0)) / divisor
    read = {}
    for kind in ("scalar", "vector"):
        y, name = x, f"{kind}_readout"
        if f"{name}.2.kernel" in tensors:
            y, name = F.gelu(convolved(tensors, f"{name}.0", group, y)), f"{name}.2"
        read[kind] = convolved(tensors, name, group, y)
    vectors = torch.einsum("gij,gcj->ci", group, read["vector"].unflatten(-1, (-1, dim))) / poses
    return torch.cat([read["scalar"].mean(0), vectors.flatten()])


# ------------------------------------------------------------------------------------------------------------ the tests


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("octahedron", {"vectors": 1, "out_vectors": 1}),
        ("tetrahedron", {"vectors": 1, "out_vectors": 1}),
        ("dihedral", {"keys": True, "scale": True, "vectors": 2, "hidden": False}),
        ("dihedral", {"ape": True, "rms": True, "out_vectors": 2}),
        ("trivial", {"ape": True, "keys": True, "vectors": 1, "out_vectors": 1}),
    ],
)
@pytest.mark.parametrize(
    ("pool", "divisor", "values", "softmax"),
    [("mean", 1.0, False, True), ("sum", 3.5, True, True), ("mean", 1.0, False, False), ("mean", 1.0, True, False)],
)
@pytest.mark.slow
def test_networks_give_the_published_outputs(name, options, pool, divisor, values, softmax):
    group = matrices(name)
    tensors, number, dim = network(group, **options), options.get("vectors", 0), group.shape[-1]
    named = {f"net._orig_mod.{n}": t for n, t in tensors.items()} | {"shift": torch.zeros(())}
    given = {"pool": pool, "divisor": divisor} if softmax else {"attention": False, "mean_aggregation": True}
    ours = from_published(named, "platonic", vectors=number, rope_on_values=values, **given)
    assert isinstance(ours, PlatonicTransformer)
    scalars, vectors, coords = torch.randn(6, SCALARS), torch.randn(6, number, dim), torch.randn(6, dim)
    batch = torch.tensor([0, 0, 1, 1, 1, 1])
    expected = torch.stack(
        [
            output(tensors, group, *(t[batch == i] for t in (scalars, vectors, coords)), pool, divisor, values, softmax)
            for i in (0, 1)
        ]
    )
    x = torch.cat([scalars, vectors.flatten(1)], dim=1)
    torch.testing.assert_close(ours(x, coords, batch=batch), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours.export()(x, coords, None, batch), expected, rtol=1e-12, atol=1e-12)
    # The group rotates what is a vector and leaves the rest; other rotations do not.
    other = torch.linalg.qr(torch.randn(dim, dim))[0]
    for g, close in ((group[-1], True), (other, False)):
        turned = torch.cat([scalars, (vectors @ g.T).flatten(1)], dim=1)
        y, z = ours(turned, coords @ g.T, batch=batch), expected.clone()
        z[:, OUTS:] = (z[:, OUTS:].unflatten(1, (-1, dim)) @ g.T).flatten(1)
        assert torch.allclose(y, z, rtol=1e-12, atol=1e-12) == close


def test_groups_are_told_by_their_matrices():
    for gspace in (
        gspaces.rot2dOnR2(5),
        gspaces.flip2dOnR2(axis=0.0),
        gspaces.flip2dOnR2(axis=math.pi / 2),
        gspaces.rot2dOnR3(3),
        tetraOnR3(),
        gspaces.mirOnR3(axis=math.pi / 2),
        gspaces.invOnR3(),
    ):
        ours = from_published(network(torch.tensor(fibers(gspace).action)), "platonic")
        assert ours.gspace == gspace
    half = torch.diag(torch.tensor([-1.0, -1.0, 1.0]))
    with pytest.raises(ValueError, match=r"rope_emb.group_elements: escnn has no"):
        from_published(network(torch.stack([torch.eye(3), half @ matrices("octahedron")[1]])), "platonic")


def test_other_options():
    tensors = network(matrices("dihedral"))
    ours = from_published(tensors, "platonic", activation="silu", pool=None)
    x, coords = torch.randn(3, SCALARS), torch.randn(3, 2)
    assert ours(x, coords).shape == (3, OUTS)
    assert (ours(x, coords) - from_published(tensors, "platonic", pool=None)(x, coords)).abs().max() > 1e-6


def test_bad_state_dicts():
    tensors = network(matrices("dihedral"), keys=True)
    load, layer = changing(tensors, "platonic"), "layers.0.interaction"
    missing = ("layers.1.linear2.bias", "layers.1.interaction.k_proj.kernel", "x_embedder.kernel")
    longer = (f"{layer}.q_proj.kernel", "layers.0.norm2.weight", "scalar_readout.0.bias")
    check_names(load, tensors, (*missing, f"{layer}.rope_emb.group_elements"), longer)
    with pytest.raises(ValueError, match=r"^layers.1.gamma_1: not a tensor"):
        load({"layers.1.gamma_1": torch.ones(WIDTH)})
    with pytest.raises(ValueError, match=r"^attention: .*mean_aggregation=True"):
        load({}, attention=False)
    with pytest.raises(ValueError, match=r"^vectors: .*reads 3 numbers"):
        load({}, vectors=2)
    with pytest.raises(ValueError, match=r"^scalar_readout.kernel: missing"):
        load({f"{kind}_readout.2.kernel": None for kind in ("scalar", "vector")})
