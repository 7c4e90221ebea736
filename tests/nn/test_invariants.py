"""Class tokens of feature maps and of clouds."""

import numpy as np
import pytest
import torch
from escnn import gspaces, nn
from escnn.nn import FieldType

from escnn_attention import AttentionPool, GroupSelfAttention, PointAttentionPool, PowerSpectrum
from escnn_attention.models import EquivariantClassifier
from tests import spaces
from tests.layers import assert_formula
from tests.nn.points import cloud

C4 = gspaces.rot2dOnR2(4)
REGULAR, MIXED = spaces.regular(C4, 2), spaces.mixed(C4)


def drawn(fields, layer=AttentionPool, **options):
    pool = layer(fields, 3, 2, head_fields=2, tokens=2, **options).double()
    with torch.no_grad():
        pool.plain.tokens.mul_(3)
    return pool


def test_tokens_that_look_at_poses_by_number_change():
    pool, x = drawn(REGULAR), spaces.random_field(REGULAR, 3, 3)
    pool.plain.log_measure = torch.tensor([0.0, 1.0, 2.0, 3.0]).double()
    assert spaces.grid_error(pool, x) > 1e-3


def test_maps_are_what_it_reads_by_and_turn_with_the_input():
    pool, x = drawn(REGULAR), spaces.random_field(REGULAR, 3, 3)
    mask = torch.rand(2, 3, 3) < 0.7
    maps = pool.attention_maps(x, mask)  # B, M, T, P, X, Y
    assert maps.shape == (2, 2, 2, 4, 3, 3)
    torch.testing.assert_close(maps.sum((-3, -2, -1)), torch.ones(2, 2, 2).double())
    assert not maps.masked_select(~mask[:, None, None, None]).any()
    values = pool.plain.project_in(x.tensor.flatten(2).mT)[2:].unflatten(2, x.tensor.shape[2:])  # M, B, X, Y, P, C
    read = torch.einsum("bmtpxy,mbxypc->btmc", maps, values).flatten(2)
    torch.testing.assert_close(pool(x, mask).tensor.flatten(1), pool.plain.readout(read).flatten(1))

    one = C4.fibergroup.element(1)
    of_poses = nn.FieldType(C4, [C4.regular_repr])  # what a token gives to each pose is a regular field
    straight = of_poses(pool.attention_maps(x)[:, 0, 0])
    turned = pool.attention_maps(x.transform(one))[:, 0, 0]
    torch.testing.assert_close(turned, straight.transform(one).tensor)
    assert not torch.allclose(turned, straight.tensor)


@pytest.mark.parametrize("last", [lambda f: AttentionPool(f, 5), PowerSpectrum])
def test_classifiers_may_end_in_scalars(last):
    network = EquivariantClassifier({"features": nn.IdentityModule(MIXED), "last": last(MIXED)}, 4).double()
    x = spaces.random_field(MIXED, 4, 4)
    logits = network(x)
    assert logits.shape == (2, 4)
    for g in C4.fibergroup.elements:
        torch.testing.assert_close(network(x.transform(g)), logits, rtol=1e-10, atol=1e-11)
    vectors = nn.FieldType(C4, [C4.irrep(1)])
    with pytest.raises(ValueError, match=r"stages: .*regular fields"):
        EquivariantClassifier({"last": nn.IdentityModule(vectors)}, 4)


def test_masks_without_a_space():
    """They hide whole samples: heads give zero, and a token reads zeros."""
    fields = spaces.regular(spaces.POINT["D4 on a point"](), 2)
    x, mask = spaces.random_field(fields, batch=3), torch.tensor([True, False, True])
    layer, pool = GroupSelfAttention(fields, fields).double(), AttentionPool(fields, 3).double()
    y = layer(x, mask).tensor
    assert not y[1].any()
    torch.testing.assert_close(y[mask], layer(x).tensor[mask])
    torch.testing.assert_close(pool(x, mask).tensor[mask], pool(x).tensor[mask])
    assert pool.attention_maps(x, mask).shape == (3, 1, 1, 8)


# ------------------------------------------------------------------------------------------------------------- points


@pytest.mark.sampled(7)
@pytest.mark.parametrize("make", (spaces.PLANE | spaces.VOLUME).values(), ids=spaces.PLANE | spaces.VOLUME)
def test_no_element_changes_what_is_read_of_a_cloud(make):
    fields = spaces.mixed(make())
    pool, x = drawn(fields, PointAttentionPool), cloud(fields, 5)
    y = pool(x)
    assert y.shape == (1, 6)
    for g in fields.fibergroup.elements:
        torch.testing.assert_close(pool(x.transform(g)), y, rtol=1e-11, atol=1e-11)
    assert "tokens=2, out=3" in repr(pool)
    # It is that of a map on whose positions the points lie.
    grid = AttentionPool(fields, 3, 2, head_fields=2, tokens=2).double()
    grid.load_state_dict(pool.state_dict())
    space = (5, *[1] * (fields.gspace.dimensionality - 1))
    on_grid = grid(fields(x.tensor.T.reshape(1, fields.size, *space))).tensor
    torch.testing.assert_close(on_grid.flatten(1), y, rtol=1e-12, atol=1e-12)


def test_samples_of_a_continuous_group_are_exact_for_what_permutes_them():
    so2 = gspaces.rot2dOnR2(-1)
    pool = drawn(nn.FieldType(so2, [so2.irrep(1), so2.irrep(2)]), PointAttentionPool, samples=8)
    x = cloud(pool.in_type, 5)
    y = pool(x)
    quarter, other = (
        (pool(x.transform(so2.fibergroup.element(angle))) - y).abs().max() for angle in (torch.pi / 2, 0.6)
    )
    assert quarter < 1e-12 < 1e-8 < other


def test_tokens_between_points_that_look_at_poses_by_number_change():
    pool, x = drawn(REGULAR, PointAttentionPool), cloud(REGULAR, 5)
    y, g = pool(x), C4.fibergroup.generators[0]
    torch.testing.assert_close(pool(x.transform(g)), y, rtol=1e-11, atol=1e-11)
    pool.plain.log_measure = torch.tensor([0.0, 1.0, 2.0, 3.0]).double()
    assert (pool(x.transform(g)) - pool(x)).abs().max() > 1e-3


@pytest.mark.parametrize("measured", [False, True])
def test_clouds_of_a_batch_are_read_by_the_formula(measured):
    pool, x = drawn(MIXED, PointAttentionPool), cloud(MIXED, 8)
    x.tensor.requires_grad_()
    batch, mask = torch.tensor([2, 0, 1, 1, 0, 2, 2, 0]), torch.arange(8) != 6
    measure = torch.linspace(0.5, 3, 8).double() if measured else None
    y = pool(x, batch, mask=mask, measure=measure)
    rows = pool.plain.project_in(x.tensor.unsqueeze(0))[:, 0]  # 2M, N, P, C
    expected = []
    for i in range(3):
        there, read = (batch == i) & mask, []
        for m in range(2):
            scores = torch.einsum("tc,npc->tnp", pool.plain.tokens[m], rows[m, there]) / 2**0.5
            weights = scores.exp() * (measure[there][:, None] if measured else 1)
            read.append(torch.einsum("tnp,npc->tc", weights / weights.sum((1, 2), keepdim=True), rows[2 + m, there]))
        expected.append(pool.plain.readout(torch.cat(read, -1)).flatten())
    assert_formula(y, torch.stack(expected), [x.tensor, *pool.parameters()], 1e-12, 1e-12)


def test_large_scores_of_clouds_do_not_overflow():
    pool, x = drawn(MIXED, PointAttentionPool), cloud(MIXED, 6)
    x.tensor.mul_(1e5)
    assert pool(x, torch.tensor([0, 0, 0, 1, 1, 1])).isfinite().all()


def test_bad_arguments_of_clouds():
    pool, x = PointAttentionPool(MIXED, 3).double(), cloud(MIXED, 3)
    with pytest.raises(ValueError, match=r"^batch: cloud 1"):
        pool(x, torch.tensor([0, 0, 2]))
    with pytest.raises(ValueError, match=r"^batch: cloud 1"):
        pool(x, torch.tensor([0, 0, 1]), mask=torch.tensor([True, True, False]))
    with pytest.raises(ValueError, match="needed scattered points"):
        pool(MIXED(torch.randn(1, MIXED.size, 2, 2).double()))
    with pytest.raises(ValueError, match=r"^measure: "):
        pool(x, measure=-torch.ones(3).double())


@pytest.mark.parametrize("layer", [AttentionPool, PointAttentionPool])
def test_bad_arguments(layer):
    for name in ("num_heads", "head_fields", "tokens", "out"):
        with pytest.raises(ValueError, match=f"{name}: got 0"):
            layer(spaces.mixed(C4), **{"out": 3, name: 0})


D4 = gspaces.flipRot2dOnR2(4)
SO3 = gspaces.rot3dOnR3()


def test_parts_in_another_basis_change():
    """Coordinates that are not those of the irreps have lengths that elements change."""
    fields = spaces.regular(D4, 1)
    layer, x = PowerSpectrum(fields).double(), spaces.random_field(fields, 2, 2)
    layer.plain.matrix_0 = torch.linalg.qr(torch.randn(8, 8).double())[0]
    g = D4.fibergroup.generators[0]
    assert (layer(x.transform_fibers(g)).tensor - layer(x).tensor).abs().max() > 1e-2


def test_is_the_formula_field_by_field():
    fields = FieldType(D4, [D4.irrep(1, 1), D4.trivial_repr, D4.regular_repr, D4.irrep(1, 0), D4.irrep(1, 1)])
    x = spaces.random_field(fields, 2, 3)
    expected, start = [], 0
    for representation in fields.representations:
        part = np.einsum(
            "ij,bjyx->biyx",
            representation.change_of_basis_inv,
            x.tensor[:, start : start + representation.size].numpy(),
        )
        start, place = start + representation.size, 0
        for name in representation.irreps:
            irrep = D4.irrep(*name)
            of_irrep = part[:, place : place + irrep.size]
            place += irrep.size
            expected.append(of_irrep[:, 0] if irrep.is_trivial() else np.sqrt((of_irrep**2).sum(1)))
    torch.testing.assert_close(PowerSpectrum(fields).double()(x).tensor, torch.from_numpy(np.stack(expected, 1)))
    squares = PowerSpectrum(fields, "square").double()(x).tensor[:, 0]
    torch.testing.assert_close(squares, torch.from_numpy(expected[0] ** 2 / 2))


def test_vectors_at_points_and_zeros():
    vectors = FieldType(SO3, 2 * [SO3.fibergroup.irrep(1)])
    x = cloud(vectors, 5)
    y = PowerSpectrum(vectors).double()(x)
    torch.testing.assert_close(y.tensor, x.tensor.unflatten(1, (2, 3)).norm(dim=2))
    assert y.coords is x.coords
    zeros = torch.zeros(1, 6, requires_grad=True)
    PowerSpectrum(vectors).plain(zeros).sum().backward()
    assert zeros.grad.isfinite().all()


def test_bad_arguments_power_spectrum():
    with pytest.raises(ValueError, match="kind: got 'power'"):
        PowerSpectrum(spaces.scalars(C4, 1), "power")
