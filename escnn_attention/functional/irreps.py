"""Products of features in irreps with the blocks of an equivariant map, one dense matrix for each irrep."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# An irrep of m components over its endomorphism algebra stands K times in the features, and d times in each of F
# regular fields. Features are a matrix (m, K, N) for each irrep, at N positions, with any strides. Regular fields are
# one tensor: irrep by irrep, component by component, the d copies, each (F, N), or (N, F) where ``by_position``.


def to_copies(x: Sequence[Tensor], weights: Sequence[Tensor], by_position: bool) -> Tensor:
    r"""The map from features to regular fields, :math:`y_a = W_\rho x_a` for each component a of each irrep.

    Args:
        x: ``(m, K, N)`` of each irrep.
        weights: ``(d, F, K)`` of each irrep.
        by_position: whether the result is ``(H, N, F)`` instead of ``(H, F, N)``.
    """
    fields, number = weights[0].shape[1], x[0].shape[2]
    size = sum(len(part) * len(w) for part, w in zip(x, weights, strict=True))
    y = x[0].new_empty((size, number, fields) if by_position else (size, fields, number))
    pose = 0
    for part, w in zip(x, weights, strict=True):
        for component in part:
            if by_position:
                for i, of_copy in enumerate(w):
                    torch.mm(component.T, of_copy.T, out=y[pose + i])
            else:
                torch.mm(w.flatten(0, 1), component, out=y[pose : pose + len(w)].view(-1, number))
            pose += len(w)
    return y


def from_copies(y: Tensor, weights: Sequence[Tensor], by_position: bool, out: Sequence[Tensor]) -> Sequence[Tensor]:
    """The transpose of :func:`to_copies`, from regular fields to features, which it writes to ``out``."""
    pose = 0
    for part, w in zip(out, weights, strict=True):
        for component in part:
            if by_position:
                torch.mm(w[0].T, y[pose].T, out=component)
                for i in range(1, len(w)):
                    component.addmm_(w[i].T, y[pose + i].T)
            else:
                torch.mm(w.flatten(0, 1).T, y[pose : pose + len(w)].view(-1, y.shape[2]), out=component)
            pose += len(w)
    return out


def weight_gradients(x: Sequence[Tensor], y: Tensor, weights: Sequence[Tensor], by_position: bool) -> list[Tensor]:
    """The gradients of the weights, of the side of the features and that of the regular fields."""
    gradients, pose = [], 0
    for part, w in zip(x, weights, strict=True):
        gradients.append(torch.zeros_like(w, memory_format=torch.contiguous_format))
        for component in part:
            if by_position:
                for i, out in enumerate(gradients[-1]):
                    out.addmm_(y[pose + i].T, component.T)
            else:
                of_copies = y[pose : pose + len(w)].view(-1, y.shape[2])
                gradients[-1].view(-1, w.shape[2]).addmm_(of_copies, component.T)
            pose += len(w)
    return gradients


def to_copies_plainly(x: Sequence[Tensor], weights: Sequence[Tensor], by_position: bool) -> Tensor:
    """:func:`to_copies` by operations that autograd looks through."""
    equation = "mkn,dfk->mdnf" if by_position else "mkn,dfk->mdfn"
    return torch.cat([torch.einsum(equation, *pair).flatten(0, 1) for pair in zip(x, weights, strict=True)])


def from_copies_plainly(
    y: Tensor, weights: Sequence[Tensor], by_position: bool, out: Sequence[Tensor]
) -> Sequence[Tensor]:
    """:func:`from_copies` by operations that autograd looks through; ``out`` says the shapes."""
    equation = "mdnf,dfk->mkn" if by_position else "mdfn,dfk->mkn"
    parts = y.split([len(part) * len(w) for part, w in zip(out, weights, strict=True)])
    return [torch.einsum(equation, part.unflatten(0, (-1, len(w))), w) for part, w in zip(parts, weights, strict=True)]
