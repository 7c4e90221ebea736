"""Class tokens."""

import pytest
import torch
from escnn import gspaces, nn

from escnn_attention import AttentionPool, PowerSpectrum
from escnn_attention.models import EquivariantClassifier
from tests import spaces

C4 = gspaces.rot2dOnR2(4)


def drawn(fields, **options):
    pool = AttentionPool(fields, 3, 2, head_fields=2, tokens=2, **options).double()
    with torch.no_grad():
        pool.plain.tokens.mul_(3)
    return pool


@pytest.mark.parametrize("make", spaces.ALL.values(), ids=spaces.ALL)
def test_no_element_changes_it(make):
    gspace = make()
    fields = spaces.mixed(gspace)
    pool, x = drawn(fields), spaces.random_field(fields, *spaces.shape_of(gspace, 3))
    y = pool(x)
    assert tuple(y.shape) == pool.evaluate_output_shape(tuple(x.shape)) == (2, 6, *[1] * gspace.dimensionality)
    assert spaces.grid_error(pool, x) < 1e-11
    for g in gspace.fibergroup.elements:
        torch.testing.assert_close(pool(x.transform_fibers(g)).tensor, y.tensor, rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(pool.export()(x.tensor), y.tensor)


def test_tokens_that_look_at_poses_by_number_change():
    fields = spaces.regular(C4, 2)
    pool, x = drawn(fields), spaces.random_field(fields, 3, 3)
    pool.plain.log_measure = torch.tensor([0.0, 1.0, 2.0, 3.0]).double()
    assert spaces.grid_error(pool, x) > 1e-3


def test_is_the_formula():
    fields = spaces.regular(C4, 2)
    pool, x = drawn(fields), spaces.random_field(fields, 2, 3)
    rows = pool.plain.project_in(x.tensor.movedim(1, -1)).flatten(2, 3)
    read = []
    for m in range(2):
        scores = torch.einsum("tc,bnpc->btnp", pool.plain.tokens[m], rows[m]) / 2**0.5
        p = scores.exp() / scores.exp().sum((-1, -2), keepdim=True)
        read.append(torch.einsum("btnp,bnpc->btc", p, rows[2 + m]))
    expected = pool.plain.readout(torch.cat(read, -1)).flatten(1)
    torch.testing.assert_close(pool(x).tensor[:, :, 0, 0], expected)


def test_what_is_hidden_reaches_nothing():
    fields = spaces.mixed(C4)
    pool, x = drawn(fields), spaces.random_field(fields, 3, 4)
    mask = torch.ones(2, 3, 4, dtype=torch.bool)
    mask[:, :, 2:] = False
    alone = pool(fields(x.tensor[..., :2].contiguous())).tensor
    x.tensor[..., 2:] = torch.nan
    torch.testing.assert_close(pool(x, mask).tensor, alone)
    torch.testing.assert_close(pool.export()(x.tensor, mask), alone)


@pytest.mark.parametrize("last", [lambda f: AttentionPool(f, 5), PowerSpectrum])
def test_classifiers_may_end_in_scalars(last):
    fields = spaces.mixed(C4)
    network = EquivariantClassifier({"features": nn.IdentityModule(fields), "last": last(fields)}, 4).double()
    x = spaces.random_field(fields, 4, 4)
    logits = network(x)
    assert logits.shape == (2, 4)
    for g in C4.fibergroup.elements:
        torch.testing.assert_close(network(x.transform(g)), logits, rtol=1e-10, atol=1e-11)
    vectors = nn.FieldType(C4, [C4.irrep(1)])
    with pytest.raises(ValueError, match="stages: the maximum over poses needs regular fields"):
        EquivariantClassifier({"last": nn.IdentityModule(vectors)}, 4)


def test_bad_arguments():
    fields = spaces.mixed(C4)
    for name in ("num_heads", "head_fields", "tokens", "out"):
        with pytest.raises(ValueError, match=f"{name}: got 0"):
            AttentionPool(fields, **{"out": 3, name: 0})
