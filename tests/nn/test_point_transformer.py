"""The transformer block on points."""

from __future__ import annotations

import pytest
import torch
from escnn import gspaces
from escnn.nn import FieldType, GeometricTensor

from escnn_attention import FieldLayerNorm, PointSelfAttention, PointTransformerBlock, PoseLinear, SiLU


def fields(space) -> FieldType:
    return FieldType(space, 2 * [space.regular_repr, space.trivial_repr, space.basespace_action])


def cloud(field_type: FieldType, number: int = 8) -> GeometricTensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(number, field_type.size, generator=generator, dtype=torch.float64)
    coords = torch.randn(number, field_type.gspace.dimensionality, generator=generator, dtype=torch.float64)
    return GeometricTensor(x, field_type, coords)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kernel_features", [None, 3])
@pytest.mark.parametrize("space", [gspaces.flipRot2dOnR2(5), gspaces.rot2dOnR3(3), gspaces.invOnR3()])
@pytest.mark.parametrize("same", [True, False])
def test_equivariance_and_export(space, kernel_features, same):
    torch.manual_seed(0)
    in_type = fields(space)
    out_type = in_type if same else FieldType(space, [space.basespace_action, space.trivial_repr])
    block = PointTransformerBlock(
        in_type, out_type, num_heads=2, head_fields=2, kernel_features=kernel_features, radius=1.5
    ).double()
    x, batch = cloud(in_type), torch.tensor([0, 0, 0, 1, 1, 1, 1, 1])
    y = block(x, batch=batch)
    assert y.coords is x.coords
    assert block.evaluate_output_shape(tuple(x.tensor.shape)) == tuple(y.tensor.shape)
    for h in space.fibergroup.elements:
        z = block(x.transform(h), batch=batch).tensor
        torch.testing.assert_close(z, y.transform_fibers(h).tensor, rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(block.export()(x.tensor, x.coords, batch=batch), y.tensor)
    block.check_equivariance()


def test_masked_points_reach_nothing():
    torch.manual_seed(1)
    space = gspaces.rot2dOnR2(4)
    in_type = fields(space)
    block = PointTransformerBlock(in_type, in_type, num_heads=2).double()
    x = cloud(in_type)
    mask = torch.tensor([True, True, False, True, False, True, True, True])
    batch = torch.tensor([0, 0, 0, 1, 1, 1, 1, 1])
    alone = block(GeometricTensor(x.tensor[mask], in_type, x.coords[mask]), batch=batch[mask]).tensor
    x.tensor[~mask] = torch.nan
    y = block(x, batch=batch, mask=mask).tensor
    torch.testing.assert_close(y[mask], alone)
    assert not y[~mask].any()
    y.sum().backward()
    assert all(p.grad.isfinite().all() for p in block.parameters() if p.grad is not None)
    torch.testing.assert_close(block.export()(x.tensor, x.coords, batch=batch, mask=mask), y)
    edges = torch.combinations(torch.arange(8), with_replacement=True).T
    edges = edges[:, batch[edges[0]] == batch[edges[1]]]
    edges = torch.cat([edges, edges.flip(0)], dim=1).unique(dim=1)
    torch.testing.assert_close(block(x, edges, mask=mask).tensor[mask], alone, rtol=1e-9, atol=1e-10)


def test_pointwise_modules_take_points():
    space = gspaces.rot2dOnR2(4)
    regular = FieldType(space, 2 * [space.regular_repr])
    x = cloud(regular)
    for module in (FieldLayerNorm(regular), SiLU(regular), PoseLinear(regular, regular)):
        y = module.double()(x)
        assert y.coords is x.coords
        assert module.evaluate_output_shape((8, 8)) == (8, 8)
        one_each = GeometricTensor(x.tensor[:, :, None, None], regular)
        torch.testing.assert_close(module(one_each).tensor[:, :, 0, 0], y.tensor)
    with pytest.raises(ValueError, match="coords"):
        FieldLayerNorm(regular, scope="sample").double()(x)


def test_bad_arguments():
    space = gspaces.rot2dOnR2(4)
    in_type = fields(space)
    for message, arguments in (
        ("keys", {"keys": "own", "kernel_features": 2}),
        ("backend", {"backend": "dense", "kernel_features": 2}),
        ("hidden_fields", {"hidden_fields": 0}),
        ("dropout", {"dropout": 1.0}),
        ("attention_dropout", {"attention_dropout": -0.1}),
    ):
        with pytest.raises(ValueError, match=message):
            PointTransformerBlock(in_type, in_type, **arguments)
    block, x = PointTransformerBlock(in_type, in_type).double(), cloud(in_type)
    with pytest.raises(ValueError, match="mask"):
        block(x, mask=torch.ones(3, dtype=torch.bool))
    everyone = torch.ones(len(x.tensor), dtype=torch.bool)
    for message, arguments in (
        ("edge_index", {"edge_index": torch.tensor([[len(everyone)], [0]])}),
        ("batch", {"batch": torch.zeros(2, dtype=torch.long)}),
        ("measure", {"measure": torch.ones(2)}),
    ):
        with pytest.raises(ValueError, match=message):
            block(x, mask=everyone, **arguments)


def test_dropout_is_for_training():
    torch.manual_seed(2)
    space = gspaces.rot2dOnR2(4)
    in_type = fields(space)
    block = PointTransformerBlock(in_type, in_type, dropout=0.5, attention_dropout=0.2).double()
    x = cloud(in_type)
    assert not torch.equal(block(x).tensor, block(x).tensor)
    block.eval()
    assert torch.equal(block(x).tensor, block(x).tensor)


def test_any_attention():
    def attention(in_type, out_type):
        return PointSelfAttention(in_type, out_type, 2, head_fields=2, num_neighbours=4, query="all")

    both = fields(gspaces.flipRot2dOnR2(3))
    blocks = []
    for options in ({"attention": attention}, {"num_heads": 2, "head_fields": 2, "num_neighbours": 4, "query": "all"}):
        torch.manual_seed(0)
        blocks.append(PointTransformerBlock(both, both, **options).eval())
    x = GeometricTensor(torch.randn(7, both.size), both, torch.randn(7, 2))
    given, made = (block(x).tensor for block in blocks)
    assert torch.equal(given, made)
    assert torch.equal(blocks[0].export()(x.tensor, x.coords), made)
    with pytest.raises(ValueError, match="kernel_features: got 3 beside an attention"):
        PointTransformerBlock(both, both, attention=attention, kernel_features=3)
    with pytest.raises(ValueError, match=r"radius: got 1\.0 beside an attention"):
        PointTransformerBlock(both, both, attention=attention, radius=1.0)
    with pytest.raises(TypeError, match=r"raduis: PointTransformerBlock has no such option, needed some of .*radius"):
        PointTransformerBlock(both, both, raduis=1.0)
    for name, value in (("keys", "own"), ("backend", "native")):
        with pytest.raises(ValueError, match=f"{name}: got {value!r}, but an attentive convolution"):
            PointTransformerBlock(both, both, kernel_features=3, **{name: value})


def test_networks_may_end_in_a_nonlinearity_and_norms_have_an_epsilon():
    torch.manual_seed(0)
    space = gspaces.flipRot2dOnR2(3)
    both = FieldType(space, 4 * [space.regular_repr])
    options = {"num_heads": 2, "norm_eps": 0.3}
    block = PointTransformerBlock(both, both, last_activation=True, **options).double()
    norm, expand, _, contract, *_ = block.feed_forward
    x = cloud(both)
    y = x + block.attention(block.norm(x))
    inside = torch.nn.functional.silu(expand(FieldLayerNorm(both, eps=0.3).double()(y)).tensor)
    last = contract(GeometricTensor(inside, expand.out_type, x.coords)).tensor
    expected = y.tensor + torch.nn.functional.silu(last)
    torch.testing.assert_close(block(x).tensor, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(block.export()(x.tensor, x.coords), expected, rtol=1e-12, atol=1e-12)
    assert block.norm.plain.eps == norm.plain.eps == 0.3
    block.check_equivariance(1e-11, 0)
    plain = PointTransformerBlock(both, both, **options).double()
    plain.load_state_dict(block.state_dict())
    torch.testing.assert_close(plain(x).tensor, y.tensor + last, rtol=1e-12, atol=1e-12)
    assert (plain(x).tensor - expected).abs().max() > 1e-3
    with pytest.raises(ValueError, match="acts on every channel by itself, which irrep_1,1 does not"):
        PointTransformerBlock(both, FieldType(space, [space.irrep(1, 1)]), last_activation=True)
    with pytest.raises(TypeError, match=r"^last_activation: got 1, needed True or False"):
        PointTransformerBlock(both, both, last_activation=1)
    with pytest.raises(ValueError, match=r"^eps: got -1"):
        PointTransformerBlock(both, both, norm_eps=-1)
