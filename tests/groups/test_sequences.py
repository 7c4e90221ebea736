"""Sequences and images over time as gspaces of escnn."""

import copy
import pickle

import pytest
import torch
from escnn import group, gspaces
from escnn.nn import FieldType, GeometricTensor

from escnn_attention import (
    FieldLayerNorm,
    GroupSelfAttention,
    TransformerBlock,
    assert_equivariant,
    equivariance_report,
    sequence_space,
    space_time,
)
from escnn_attention.groups.sequences import SpaceTime

GROUPS = {
    "trivial": lambda: group.cyclic_group(1),
    "C8": lambda: group.cyclic_group(8),
    "D3": lambda: group.dihedral_group(3),
    "octahedral": group.octa_group,
}
IMAGES = {
    "C4": (lambda: gspaces.rot2dOnR2(4), (3, 4, 4)),
    "D4": (lambda: gspaces.flipRot2dOnR2(4), (2, 5, 3)),
    "octahedral": (gspaces.octaOnR3, (2, 3, 3, 3)),
}


def fields_over(space):
    """Scalars, all of the group's irreps at most twice, and regular fields."""
    return FieldType(space, [space.trivial_repr, *space.irreps[-2:], *2 * [space.regular_repr]])


@pytest.mark.parametrize("name", GROUPS)
def test_space_of_sequences(name):
    space = sequence_space(GROUPS[name]())
    assert space.dimensionality == space.basespace_action.size == 1
    assert space == sequence_space(GROUPS[name]())
    assert space != gspaces.no_base_space(space.fibergroup)
    for again in (pickle.loads(pickle.dumps(space)), copy.deepcopy(space)):
        assert again == space
        assert hash(again) == hash(space)


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("encoding", ["none", "fourier", "mlp", "rotary", "absolute"])
@pytest.mark.parametrize("kernel_size", [None, 3])
@pytest.mark.sampled(10)
def test_attention_over_sequences(name, encoding, kernel_size):
    fields = fields_over(sequence_space(GROUPS[name]()))
    layer = GroupSelfAttention(fields, fields, 1, kernel_size, encoding=encoding, head_fields=2)
    report = equivariance_report(layer, (2, fields.size, 5))
    assert all(row.exact for row in report.rows)
    assert report.relative_error < 1e-12


@pytest.mark.parametrize("name", GROUPS)
def test_blocks_and_norms_over_sequences(name):
    fields = fields_over(sequence_space(GROUPS[name]()))
    for module in (TransformerBlock(fields, fields, 1, None, norm="pre", head_fields=2), FieldLayerNorm(fields)):
        assert_equivariant(module, (2, fields.size, 6), tolerance=1e-12)
        x = torch.randn(2, fields.size, 6)
        torch.testing.assert_close(module.export()(x), module(fields(x)).tensor, rtol=1e-4, atol=1e-5)


def test_without_an_encoding_tokens_are_a_set():
    fields = fields_over(sequence_space(group.dihedral_group(4)))
    order = torch.randperm(7)
    for encoding, is_set in (("none", True), ("fourier", False)):
        layer = GroupSelfAttention(fields, fields, 1, None, encoding=encoding, head_fields=2).double()
        x = torch.randn(1, fields.size, 7, dtype=torch.float64)
        error = (layer(fields(x)).tensor[..., order] - layer(fields(x[..., order])).tensor).abs().max()
        assert (error < 1e-13) == is_set


def test_windows_reach_so_many_tokens():
    fields = fields_over(sequence_space(group.cyclic_group(4)))
    layer = GroupSelfAttention(fields, fields, 1, 5, head_fields=2)
    x = torch.randn(1, fields.size, 9, requires_grad=True)
    layer(fields(x)).tensor[..., 4].square().sum().backward()
    assert x.grad.abs().sum((0, 1)).nonzero().flatten().tolist() == [2, 3, 4, 5, 6]


@pytest.mark.parametrize("name", IMAGES)
def test_images_over_time(name):
    make, shape = IMAGES[name]
    space = space_time(make())
    assert space.dimensionality == len(shape)
    fields = fields_over(space)
    layer = GroupSelfAttention(fields, fields, 1, 3, head_fields=1)
    report = equivariance_report(layer, (1, fields.size, *shape))
    assert any(row.exact for row in report.rows)
    assert max(row.relative for row in report.rows if row.exact) < 1e-12


def test_images_over_time_turn_one_by_one():
    space = space_time(gspaces.rot2dOnR2(4))
    video = FieldType(space, [space.trivial_repr, space.irrep(1)])
    image = FieldType(space.base, [space.base.trivial_repr, space.base.irrep(1)])
    x = torch.randn(1, 3, 2, 5, 5)
    for g in space.fibergroup.elements:
        turned = video(x).transform(g).tensor
        expected = [GeometricTensor(x[:, :, t], image).transform(g).tensor for t in range(2)]
        torch.testing.assert_close(turned, torch.stack(expected, 2), rtol=1e-5, atol=1e-5)


def test_a_group_that_moves_time_is_found():
    """A layer that mixes time with a component of a vector is not equivariant."""
    space = sequence_space(group.cyclic_group(4))
    vectors = FieldType(space, [space.irrep(1)])
    layer = GroupSelfAttention(vectors, vectors, 1, None, head_fields=2)
    forward = layer.plain.forward
    weights = torch.linspace(0, 1, 6) * torch.tensor([[1.0], [2.0]])
    layer.plain.forward = lambda x: forward(x * weights)
    assert equivariance_report(layer, (1, 2, 6)).relative_error > 1e-3


def test_subgroups():
    space = space_time(gspaces.flipRot2dOnR2(4))
    rotations, to_group, to_subgroup = space.restrict((None, 4))
    assert rotations == space_time(gspaces.rot2dOnR2(4))
    g = rotations.fibergroup.element(1)
    assert to_subgroup(to_group(g)) == g
    assert sequence_space(group.cyclic_group(6)).restrict(3)[0] == sequence_space(group.cyclic_group(3))


def test_bad_arguments():
    with pytest.raises(TypeError, match=r"group: .*group"):
        sequence_space(4)
    with pytest.raises(TypeError, match=r"gspace: .*gspace"):
        space_time(group.cyclic_group(4))
    space = SpaceTime(gspaces.rot2dOnR2(4))
    with pytest.raises(NotImplementedError, match="no steerable kernels"):
        space.build_kernel_basis(space.trivial_repr, space.trivial_repr, sigma=1.0, rings=[0.0])
