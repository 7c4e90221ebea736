"""Products of features in irreps with the blocks of an equivariant map, one dense matrix for each irrep."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# An irrep of m components over its endomorphism algebra stands K times in the features, and d times in each of F
# regular fields. In irreps features are a matrix (m, K, N) for each irrep, at N positions, and regular fields are one
# tensor (H, F, N): irrep by irrep, component by component, the d copies. Weights are (d, F, K) for each irrep.


_FEW = 2**14
"""A product of at most so many multiplications takes less time than its call: then all fields are copied into one."""


def transform(matrix: Tensor, x: Tensor, out: Tensor) -> None:
    """The products of a matrix with each of ``(b, i, n)``, written to ``(b, o, n)``; both may have any strides."""
    if len(x) == 1 or matrix.numel() * x.shape[2] > _FEW:
        torch.bmm(matrix.expand(len(x), -1, -1), x, out=out)
        return
    rows, y = x.transpose(0, 1).flatten(1), out.transpose(0, 1)
    if y.is_contiguous():
        torch.mm(matrix, rows, out=y.view(len(y), -1))
    else:
        y.copy_((matrix @ rows).view(y.shape))


def _channels_inside(y: Tensor) -> bool:
    return y.shape[3] == 1 or (y.stride(1) == 1 and y.stride(3) == y.shape[1])


def are_matrices(y: Tensor) -> bool:
    """Whether products read and write :func:`as_matrices` of regular fields without a copy."""
    groups, number, order, channels = y.shape
    together = groups == 1 or y.stride(0) == channels * y.stride(3)
    return _channels_inside(y) or (together and 1 in (y.stride(1), y.stride(2), number, order))


def as_matrices(y: Tensor) -> Tensor:
    """Regular fields ``(G, N, H, C)`` as matrices ``(G, H, C N)`` or ``(G C, H, N)``."""
    groups, number, order, channels = y.shape
    if _channels_inside(y):
        return y.permute(0, 2, 3, 1).view(groups, order, channels * number)
    return y.permute(0, 3, 2, 1).view(groups * channels, order, number)


class Copies:
    """Room for the irreps of F regular fields at N positions.

    Args:
        poses: ``(H, H)``, from poses to irreps.
        sizes: m and d of each irrep.
        fields, number: F and N.
    """

    def __init__(self, poses: Tensor, sizes: Sequence[tuple[int, int]], fields: int, number: int):
        self.poses, self.room = poses, poses.new_empty(len(poses), fields, number)
        split = self.room.split([m * d for m, d in sizes])
        self.blocks = [part.view(m, d * fields, number) for (m, d), part in zip(sizes, split, strict=True)]

    def read(self, y: Tensor) -> None:
        """The irreps of regular fields as :func:`as_matrices` has them."""
        transform(self.poses, y, self.room.view(len(self.room), len(y), -1).transpose(0, 1))

    def write(self, y: Tensor) -> None:
        """The regular fields of the irreps."""
        transform(self.poses.T, self.room.view(len(self.room), len(y), -1).transpose(0, 1), y)

    def map_from(self, x: Sequence[Tensor], weights: Sequence[Tensor], bias: Tensor | None) -> None:
        r"""The map of features, :math:`y_a = W_\rho x_a` for each component a of each irrep, and a bias ``(F, 1)``.

        Weights are ``(d F, K)`` here.
        """
        for w, copies, part in zip(weights, self.blocks, x, strict=True):
            torch.bmm(w.expand(len(part), -1, -1), part, out=copies)
        if bias is not None:
            self.room[0] += bias

    def map_to(self, x: Sequence[Tensor], weights: Sequence[Tensor], first: bool) -> None:
        """The transpose of :meth:`map_from`; it is added to ``x`` unless it is the ``first``."""
        for w, copies, part in zip(weights, self.blocks, x, strict=True):
            part.baddbmm_(w.T.expand(len(part), -1, -1), copies, beta=int(not first))

    def add_weight_gradients(self, x: Sequence[Tensor], sums: Sequence[Tensor]) -> None:
        """Add the gradients of the weights, of each component by itself, ``(m, d F, K)``."""
        for of_weights, copies, part in zip(sums, self.blocks, x, strict=True):
            if of_weights.dtype == part.dtype:
                of_weights.baddbmm_(copies, part.mT)
            else:  # A sum over images that is rounded after each of them would lose most of half precision.
                of_weights += torch.bmm(copies, part.mT)
