"""Transformer blocks on the sphere."""

from __future__ import annotations

import io

import pytest
import torch
from escnn.nn import FieldType, GeometricTensor

from escnn_attention import SphereSelfAttention, SphereTransformerBlock
from tests.nn.spheres import ALL, ROTATIONS, SPACES, error, irrep, mixed, on_sphere, scalars


@pytest.mark.sampled(1)
@pytest.mark.parametrize("space", SPACES)
def test_the_block(space):
    space = SPACES[space]
    torch.manual_seed(4)
    fields = mixed(space)
    x = on_sphere(fields, 6)
    for out_type in (fields, FieldType(space, [irrep(space, 1)])):
        errors = []
        for samples in (4, 32):
            torch.manual_seed(4)
            samples *= 1 + (space is ALL)
            block = SphereTransformerBlock(fields, out_type, samples=samples, num_heads=2, num_neighbours=5).double()
            errors.append(error(block, x))
        assert errors[1] < 1e-3
        assert errors[1] < errors[0] / 20
    block.check_equivariance()


def test_masks_and_export_of_the_block():
    torch.manual_seed(6)
    in_type = mixed(ROTATIONS)
    x, batch = on_sphere(in_type, 8), torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    measure, mask = torch.rand(8).double() + 0.5, torch.tensor([True] * 6 + [False, True])
    everyone = torch.cartesian_prod(torch.arange(8), torch.arange(8)).T
    for out_type in (in_type, scalars(ROTATIONS)):
        block = SphereTransformerBlock(in_type, out_type, samples=4, dropout=0.3).double().eval()
        y = block(x, batch=batch, measure=measure).tensor
        buffer = io.BytesIO()
        torch.save(block.export(), buffer)
        buffer.seek(0)
        exported = torch.load(buffer, weights_only=False)
        torch.testing.assert_close(exported(x.tensor, x.coords, batch=batch, measure=measure), y)
        holes = GeometricTensor(x.tensor.clone(), in_type, x.coords.clone())
        holes.tensor[6] = holes.coords[6] = torch.nan
        masked = block(holes, batch=batch, mask=mask, measure=measure).tensor
        alone = GeometricTensor(x.tensor[mask], in_type, x.coords[mask])
        expected = block(alone, batch=batch[mask], measure=measure[mask]).tensor
        torch.testing.assert_close(masked[mask], expected)
        assert not masked[6].any()
        torch.testing.assert_close(exported(holes.tensor, holes.coords, None, batch, mask, measure), masked)
        torch.testing.assert_close(block(holes, everyone, mask=mask).tensor, block(holes, mask=mask).tensor)
    with pytest.raises(ValueError, match="batch"):
        block(x, batch=batch[:3], mask=mask)


def test_any_attention_in_a_block():
    in_type = mixed(ROTATIONS)
    options = {"head_fields": 2, "num_neighbours": 6}

    def attention(*types):
        return SphereSelfAttention(*types, 2, samples=6, **options)

    blocks = []
    for given in ({"attention": attention}, {"num_heads": 2, **options}):
        torch.manual_seed(0)
        blocks.append(SphereTransformerBlock(in_type, in_type, samples=6, **given).eval())
    coords = torch.nn.functional.normalize(torch.randn(9, 3), dim=-1)
    x = GeometricTensor(torch.randn(9, in_type.size), in_type, coords)
    assert torch.equal(blocks[0](x).tensor, blocks[1](x).tensor)
    with pytest.raises(ValueError, match="num_neighbours: got 6 beside an attention"):
        SphereTransformerBlock(in_type, in_type, attention=attention, num_neighbours=6)
    with pytest.raises(TypeError, match="keys: SphereTransformerBlock has no such option"):
        SphereTransformerBlock(in_type, in_type, keys="own")


def test_norms_of_the_block_have_an_epsilon():
    fields = mixed(ROTATIONS)
    block = SphereTransformerBlock(fields, fields, samples=4, norm_eps=0.2)
    assert [norm.plain.eps for norm in block.norms] == [0.2, 0.2]
    with pytest.raises(ValueError, match=r"^eps: got -1"):
        SphereTransformerBlock(fields, fields, samples=4, norm_eps=-1)
