"""Patches of images as fields, and the tables that they are read with."""

from __future__ import annotations

import math

import numpy as np
from escnn.nn import FieldType, GeometricTensor

from escnn_attention._checks import check_int
from escnn_attention.geometry.orbits import orbit_places
from escnn_attention.groups.fibers import Fibers, columns_of, fibers, frames, invariant_vectors
from escnn_attention.nn.arguments import check_input, check_shape, check_types
from escnn_attention.nn.heads import check_scalars
from escnn_attention.nn.module import PlainModule
from escnn_attention.plain.invariant_table import InvariantTable
from escnn_attention.plain.invariant_table import PatchEmbedding as PlainPatchEmbedding

__all__ = ["PatchEmbedding", "invariant_table"]


class PatchEmbedding(PlainModule):
    r"""Every equivariant map of the patches of an image to fields: what a transformer of patches begins with.

    .. math:: y(X) = \sum_{c, u} K_c(u)\, f_c(X + u) + b, \qquad K_c(h u) = \rho(h)\, K_c(u)

    for patches about X that do not overlap. The kernel is free at one pixel u of each orbit of a patch, but for what
    the elements that leave u where it is make equal. Patches of an even and of an odd size are symmetric about their
    middles alike. The layer commutes with the group on images whose sides are multiples of the patch.

    Args:
        in_type: the type of the input: scalar fields.
        out_type: the type of the output: any fields.
        size: the pixels along every axis of a patch.

    Shape:
        ``(B, in_type.size, *space)`` to ``(B, out_type.size, *(n // size for n in space))``.

    Raises:
        TypeError: an argument is of another type.
        ValueError: an input that is not scalars, no grid, or a fiber group that does not map a square onto itself; on
            application, an axis that patches do not divide.
        NotImplementedError: the fiber group is continuous.

    Example:
        >>> import torch
        >>> from escnn_attention import PatchEmbedding, assert_equivariant
        >>> from escnn import gspaces, nn
        >>> g = gspaces.flipRot2dOnR2(4)
        >>> images, fields = nn.FieldType(g, 3 * [g.trivial_repr]), nn.FieldType(g, [g.regular_repr, g.irrep(1, 1)])
        >>> embedding = PatchEmbedding(images, fields, 4)
        >>> embedding(images(torch.randn(1, 3, 12, 12))).shape
        torch.Size([1, 10, 3, 3])
        >>> assert_equivariant(embedding, (1, 3, 12, 12), tolerance=1e-12)

    Source: Dosovitskiy et al., "An Image is Worth 16x16 Words", ICLR 2021; Nordström et al., "Octic Vision
    Transformers", 2025, for the symmetries of the square.
    """

    plain: PlainPatchEmbedding

    def __init__(self, in_type: FieldType, out_type: FieldType, size: int):
        check_types(in_type, out_type)
        check_scalars(in_type, type(self).__name__)
        std = 1 / math.sqrt(in_type.size * check_int("size", size) ** max(in_type.gspace.dimensionality, 1))
        table = invariant_table(out_type, size, copies=in_type.size, std=std)
        super().__init__(in_type, out_type, PlainPatchEmbedding(table, invariant_vectors(out_type)))

    def forward(self, input: GeometricTensor) -> GeometricTensor:
        x = check_input(input, self.in_type, self)
        self.evaluate_output_shape(tuple(x.shape))
        return super().forward(x)

    def evaluate_output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the output for an input of this shape."""
        batch, _, *space = check_shape(input_shape, self.in_type, type(self).__name__)
        self.plain.check_space(space)
        return (batch, self.out_type.size, *(n // self.plain.size for n in space))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, size={self.plain.size}"


def invariant_table(field_type: FieldType, size: int, *, copies: int = 1, std: float = 0.02) -> InvariantTable:
    """Learned fields of a type that the group leaves as they are, on a grid as long along every axis.

    Raises:
        ValueError: there is no grid, or the group does not map it onto itself.
        NotImplementedError: the fiber group is continuous.
    """
    group, gspace = fibers(field_type.gspace), field_type.gspace
    if not group.dimension:
        raise ValueError(f"in_type: {gspace.name} has no base space, and so no grid")
    if not group.preserves_square:
        raise ValueError(
            f"in_type: {gspace.name} does not map a square grid onto itself, needed a group that does, such as that of "
            "gspaces.flipRot2dOnR2(4)"
        )
    places = orbit_places(check_int("size", size), group.action)
    alike: dict[tuple[bool, ...], list[int]] = {}
    for orbit, stays in enumerate(places == places[:, :1]):
        alike.setdefault(tuple(stays), []).append(orbit)
    found = [(np.array(orbits), _basis(field_type, group, stays)) for stays, orbits in alike.items()]
    bases = [(orbits, basis) for orbits, basis in found if basis is None or basis.shape[1]]
    shape = (size,) * group.dimension
    return InvariantTable(frames(field_type, dual=True), field_type.size, places, shape, bases, copies=copies, std=std)


def _basis(field_type: FieldType, group: Fibers, stays: tuple[bool, ...]) -> np.ndarray | None:
    """An orthonormal basis ``(size, m)`` of the vectors that some elements leave as they are; None where all are."""
    if sum(stays) == 1:
        return None
    vectors = []
    for representation, columns in columns_of(field_type):
        chosen = [representation(h) for h, stay in zip(group.elements, stays, strict=True) if stay]
        left, values, _ = np.linalg.svd(np.mean(chosen, axis=0))
        for field in columns:
            vector = np.zeros((field_type.size, int((values > 0.5).sum())))
            vector[field] = left[:, values > 0.5]
            vectors.append(vector)
    return np.concatenate(vectors, axis=1)
