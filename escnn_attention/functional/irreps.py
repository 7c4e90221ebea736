"""Products of features in irreps with the blocks of an equivariant map, one dense matrix for each irrep."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from escnn_attention.functional.autograd import PRECISE

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
    if not by_position:
        for w, of_copies, component in in_blocks(weights, y, x):
            torch.mm(w, component, out=of_copies)
        return y
    pose = 0
    for part, w in zip(x, weights, strict=True):
        for component in part:
            for of_copy in w:
                torch.mm(component.T, of_copy.T, out=y[pose])
                pose += 1
    return y


def from_copies(y: Tensor, weights: Sequence[Tensor], by_position: bool, out: Sequence[Tensor]) -> Sequence[Tensor]:
    """The transpose of :func:`to_copies`, from regular fields to features, which it writes to ``out``."""
    if not by_position:
        for w, of_copies, component in in_blocks(weights, y, out):
            torch.mm(w.T, of_copies, out=component)
        return out
    pose = 0
    for part, w in zip(out, weights, strict=True):
        for component in part:
            for i, of_copy in enumerate(w):
                component.addmm_(of_copy.T, y[pose].T, beta=int(i > 0))
                pose += 1
    return out


def weight_gradients(x: Sequence[Tensor], y: Tensor, weights: Sequence[Tensor], by_position: bool) -> list[Tensor]:
    """The gradients of the weights, of the side of the features and that of the regular fields."""
    gradients = [torch.zeros_like(w, memory_format=torch.contiguous_format) for w in weights]
    if not by_position:
        for of_weights, of_copies, component in in_blocks(gradients, y, x):
            of_weights.addmm_(of_copies, component.T)
        return gradients
    pose = 0
    for part, of_irrep in zip(x, gradients, strict=True):
        for component in part:
            for of_weights in of_irrep:
                of_weights.addmm_(y[pose].T, component.T)
                pose += 1
    return gradients


def in_blocks(weights: Sequence[Tensor], y: Tensor, x: Sequence[Tensor]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Of each component of each irrep: weights ``(d F, K)``, copies ``(d F, N)`` of regular fields, ``(K, N)``."""
    found, pose = [], 0
    for part, w in zip(x, weights, strict=True):
        matrix = w.flatten(0, 1)
        for component in part:
            found.append((matrix, y[pose : pose + len(w)].view(len(matrix), -1), component))
            pose += len(w)
    return found


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


class Images:
    """Features of images in irreps, ``(m, K, B N)``, and their regular fields, in parts of the groups.

    Maps are computed image by image and part by part, so that the irreps of one stay in the cache.

    Args:
        poses: ``(H, H)``, from poses to irreps.
        x, weights: as in :func:`to_copies`, with the fields of all parts.
        y: the parts, each as :func:`by_image` has it.
    """

    def __init__(self, poses: Tensor, x: Sequence[Tensor], weights: Sequence[Tensor], y: Sequence[Tensor]):
        images, groups, order, channels, number = y[0].shape
        self.irreps = x[0].new_empty(order, groups * channels, number)
        self.of_groups = self.irreps.view(order, groups, -1).transpose(0, 1)
        self.poses, self.y = poses.expand(groups, -1, -1), [part.flatten(3) for part in y]
        self.images = [slice(i * number, (i + 1) * number) for i in range(images)]
        self.x, self.weights = x, list(zip(*(w.chunk(len(y), 1) for w in weights), strict=True))
        self.blocks = [in_blocks(of_part, self.irreps, x) for of_part in self.weights]

    def _each(self) -> Iterator[tuple[int, slice, Tensor]]:
        """The number of a part, where an image is among the positions of the features, and its regular fields."""
        for i, at in enumerate(self.images):
            for part, y in enumerate(self.y):
                yield part, at, y[i]

    def write(self, biases: Tensor | None) -> None:
        """The map from the features to the regular fields, with a bias ``(F,)`` of the trivial irrep."""
        of_parts = None if biases is None else biases.unsqueeze(1).chunk(len(self.y))
        for part, at, y in self._each():
            for w, of_copies, component in self.blocks[part]:
                torch.mm(w, component[:, at], out=of_copies)
            if of_parts is not None:
                self.irreps[0] += of_parts[part]
            torch.bmm(self.poses.mT, self.of_groups, out=y)

    def read(self) -> None:
        """The transpose of :meth:`write`."""
        for part, at, y in self._each():
            torch.bmm(self.poses, y, out=self.of_groups)
            for w, of_copies, component in self.blocks[part]:
                component[:, at].addmm_(w.T, of_copies, beta=int(part > 0))

    def weight_gradients(self, out: Sequence[Tensor] | None) -> tuple[list[Tensor], Tensor]:
        """The gradients of the weights and the bias of :meth:`write`; ``out`` is room for what :meth:`read` gives."""
        dtype = self.irreps.dtype
        exact = PRECISE[dtype]  # a sum over images that is rounded after each of them would lose most of half precision
        of_parts = [[torch.zeros(w.shape, dtype=exact, device=w.device) for w in ws] for ws in self.weights]
        blocks = [in_blocks(of_part, self.irreps, self.x) for of_part in of_parts]
        read = None if out is None else [in_blocks(of_part, self.irreps, out) for of_part in self.weights]
        of_bias = self.irreps.new_zeros(len(self.y), self.irreps.shape[1], dtype=exact)
        for part, at, y in self._each():
            torch.bmm(self.poses, y, out=self.of_groups)
            of_bias[part] += self.irreps[0].sum(1, dtype=exact)
            for of_weights, of_copies, component in blocks[part]:
                if dtype == exact:
                    of_weights.addmm_(of_copies, component[:, at].T)
                else:
                    of_weights += torch.mm(of_copies, component[:, at].T)
            for w, of_copies, component in read[part] if read else ():
                component[:, at].addmm_(w.T, of_copies, beta=int(part > 0))
        of_irreps = [torch.cat(of_irrep, 1).to(dtype) for of_irrep in zip(*of_parts, strict=True)]
        return of_irreps, of_bias.flatten().to(dtype)


def by_image(y: Tensor) -> Tensor:
    """Regular fields ``(groups, B, N, H, C)`` as they lie in memory, ``(B, groups, H, C, N)``."""
    return y.permute(1, 0, 3, 4, 2).contiguous()
