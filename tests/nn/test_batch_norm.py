"""Batch norm of fields."""

import pytest
import torch
from escnn import gspaces
from escnn.nn import FieldType, GeometricTensor, InnerBatchNorm

from escnn_attention import FieldBatchNorm
from tests import spaces

C4 = gspaces.rot2dOnR2(4)


def drawn(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return module.double()


@pytest.mark.sampled(8)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("make", spaces.ALL.values(), ids=spaces.ALL)
def test_equivariant(make, training):
    gspace = make()
    fields = spaces.mixed(gspace)
    norm, x = drawn(FieldBatchNorm(fields, momentum=0.5)), spaces.random_field(fields, *spaces.shape_of(gspace, 3))
    norm(x)
    assert spaces.grid_error(norm.train(training), x) < 1e-11


def test_means_of_vectors_are_not_equivariant():
    fields = FieldType(C4, [C4.irrep(1)])
    norm, x = drawn(FieldBatchNorm(fields)), spaces.random_field(fields, 3, 3)
    assert spaces.grid_error(norm, x) < 1e-12
    norm.plain.mean.fill_(1)
    assert spaces.grid_error(norm, x) > 1e-3


def test_is_torchs_on_scalars_and_escnns_on_regular_fields():
    scalars, regular = spaces.scalars(C4, 3), spaces.regular(C4, 3)
    for ours, other in (
        (FieldBatchNorm(scalars), torch.nn.BatchNorm2d(3)),
        (FieldBatchNorm(regular), InnerBatchNorm(regular)),
    ):
        ours, other = ours.double(), other.double()
        for _ in range(3):
            x = spaces.random_field(ours.in_type, 4, 4)
            theirs = other(x.tensor).clone() if ours.in_type == scalars else other(x).tensor
            torch.testing.assert_close(ours(x).tensor, theirs)
        ours.eval(), other.eval()
        theirs = other(x.tensor) if ours.in_type == scalars else other(x).tensor
        if ours.in_type == scalars:
            torch.testing.assert_close(ours(x).tensor, theirs)
        else:  # escnn's running variance counts components of a field as torch counts positions
            torch.testing.assert_close(ours(x).tensor, theirs, rtol=1e-6, atol=1e-6)


def test_vectors_are_divided_by_their_length():
    vectors = FieldType(C4, 2 * [C4.irrep(1)])
    x = spaces.random_field(vectors, 5, 5)
    y = FieldBatchNorm(vectors, eps=0.0).double()(x).tensor.unflatten(1, (2, 2))
    torch.testing.assert_close(y.square().mean((0, 2, 3, 4)), torch.ones(2).double())
    torch.testing.assert_close(
        y / y.norm(dim=2, keepdim=True), (z := x.tensor.unflatten(1, (2, 2))) / z.norm(dim=2, keepdim=True)
    )


def test_points_are_as_good_as_a_grid():
    fields = spaces.mixed(C4)
    norm, x = drawn(FieldBatchNorm(fields)), spaces.random_field(fields, 3, 3)
    flat = GeometricTensor(x.tensor.movedim(1, -1).flatten(0, 2), fields, torch.randn(18, 2).double())
    torch.testing.assert_close(norm(flat).tensor, norm(x).tensor.movedim(1, -1).flatten(0, 2))
    torch.testing.assert_close(norm.eval().export()(flat.tensor), norm(flat).tensor)


def test_half_precision_takes_its_statistics_in_single():
    fields = spaces.scalars(C4, 1)
    x = fields(1000 + torch.randn(4, 1, 8, 8)).tensor
    norm = FieldBatchNorm(fields).plain
    assert (norm(x.bfloat16()).float() - norm(x.bfloat16().float())).abs().max() < 0.02


def test_bad_arguments():
    fields = spaces.scalars(C4, 1)
    with pytest.raises(ValueError, match="momentum: got 0"):
        FieldBatchNorm(fields, momentum=0)
    with pytest.raises(ValueError, match="eps: got -1"):
        FieldBatchNorm(fields, eps=-1)
    with pytest.raises(ValueError, match="got 1 position"):
        FieldBatchNorm(fields)(fields(torch.randn(1, 1, 1, 1)))


def test_transforms_take_it_in_eval_mode():
    """In training it remembers statistics, which they forbid."""
    norm = FieldBatchNorm(spaces.mixed(gspaces.rot2dOnR2(4)))
    x = torch.randn(3, norm.in_type.size, 2, 2)

    def loss(x):
        return norm(norm.in_type(x)).tensor.square().sum()

    with pytest.raises(RuntimeError, match=r"FieldBatchNorm remembers statistics.*call eval\(\)"):
        torch.func.grad(loss)(x)
    norm.eval()
    expected = x.clone().requires_grad_()
    loss(expected).backward()
    torch.testing.assert_close(torch.func.grad(loss)(x), expected.grad)
