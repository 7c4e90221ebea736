"""Columns of weights as all poses see them: against indexing written out, with derivatives of both orders."""

from __future__ import annotations

import pytest
import torch

from escnn_attention.functional.gather import Columns, add_columns, gather_columns, in_groups
from escnn_attention.functional.matmul import grouped_linear, grouped_linear_transpose

GROUPS = pytest.mark.parametrize("groups", [1, 3])


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def columns(groups: int) -> Columns:
    return Columns.of(torch.stack([torch.randperm(5) for _ in range(4)]), groups)


@GROUPS
def test_columns(groups):
    weight, seen = drawn(6, 5), columns(groups)
    found = gather_columns(weight, seen)
    for field in range(6):
        for pose in range(4):
            place = (0, field, pose) if groups == 1 else (field // 2, pose, field % 2)
            assert torch.equal(found[place], weight[field, seen.seen[pose]])
    with torch.no_grad():
        assert torch.equal(gather_columns(weight, seen), found)
    (weighted,) = torch.autograd.grad((found * (other := drawn(*found.shape))).sum(), weight)
    torch.testing.assert_close(add_columns(other, seen.back), weighted)


@GROUPS
@pytest.mark.parametrize("size", [2, 2000])  # of which one takes one product for all groups
def test_products_with_columns_are_those_with_what_they_give(groups, size):
    weight, seen, x = drawn(6, 5), columns(groups), drawn(size, 5)
    bias = drawn(groups, 1, 2) if groups > 1 else drawn(1, 6, 1)
    everywhere = in_groups(weight[:, seen.seen], groups)
    expected = torch.einsum("ns,gabs->gnab", x, everywhere) + bias.unsqueeze(1)
    y, shift = drawn(*expected.shape), drawn(5)
    back = torch.einsum("gnab,gabs->ns", y, everywhere) + shift
    for found, wanted, leaves in (
        (grouped_linear(x, weight, bias, seen), expected, (x, weight, bias)),
        (grouped_linear_transpose(y, weight, shift, seen), back, (y, weight, shift)),
    ):
        torch.testing.assert_close(found, wanted)
        like = torch.randn_like(wanted)
        for pair in zip(
            torch.autograd.grad(found, leaves, like, retain_graph=True),
            torch.autograd.grad(wanted, leaves, like, retain_graph=True),
            strict=True,
        ):
            torch.testing.assert_close(*pair)


@GROUPS
def test_derivatives_of_both_orders(groups):
    weight, seen, x = drawn(6, 5), columns(groups), drawn(2, 5)
    bias, shift = drawn(1, 1, 2) if groups > 1 else drawn(1, 6, 1), drawn(5)
    y = drawn(*gather_columns(weight, seen).shape[:1], 2, *gather_columns(weight, seen).shape[1:3])
    for check in torch.autograd.gradcheck, torch.autograd.gradgradcheck:
        assert check(lambda weight: gather_columns(weight, seen), weight)
        assert check(lambda x, weight, bias: grouped_linear(x, weight, bias, seen), (x, weight, bias))
        assert check(lambda y, weight, shift: grouped_linear_transpose(y, weight, shift, seen), (y, weight, shift))


@GROUPS
def test_inside_transforms(groups):
    weight, seen, x = drawn(6, 5).detach(), columns(groups), drawn(2, 5).detach()
    several = torch.stack([weight, 2 * weight])
    found = torch.func.vmap(lambda weight: grouped_linear(x, weight, None, seen))(several)
    torch.testing.assert_close(found[1], 2 * grouped_linear(x, weight, None, seen))
    _, tangent = torch.func.jvp(lambda weight: gather_columns(weight, seen), (weight,), (weight,))
    torch.testing.assert_close(tangent, gather_columns(weight, seen))
