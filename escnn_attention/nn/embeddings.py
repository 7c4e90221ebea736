"""Patches of images and learned positions, as fields."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from escnn.group import Representation
from escnn.nn import FieldType, GeometricTensor
from torch import Tensor

from escnn_attention._checks import check_int, check_length
from escnn_attention.encodings import Encoding, as_encoding
from escnn_attention.geometry.orbits import orbit_places
from escnn_attention.groups.fibers import Fibers, columns_of, fibers, frames, invariant_vectors, mass
from escnn_attention.groups.samples import Samples, as_samples
from escnn_attention.nn.arguments import check_type, check_types
from escnn_attention.nn.module import PlainModule, check_field, check_no_batch
from escnn_attention.plain.embeddings import InvariantTable
from escnn_attention.plain.embeddings import PatchDecoder as PlainPatchDecoder
from escnn_attention.plain.embeddings import PatchEmbedding as PlainPatchEmbedding
from escnn_attention.plain.embeddings import PositionEmbedding as PlainPositionEmbedding
from escnn_attention.plain.embeddings import PositionTable as PlainPositionTable
from escnn_attention.plain.projections import FromPoses


class PatchEmbedding(PlainModule):
    r"""Every equivariant map of the patches of an image to fields: the first layer of a transformer of patches.

    .. math:: y(X) = \sum_u K(u)\, f(X + u) + b, \qquad
        K(h u) = \rho_\text{out}(h)\, K(u)\, \rho_\text{in}(h)^{-1}

    for patches about X that do not overlap. The kernel is free at one pixel u of each orbit of a patch, but for what
    the elements that keep u make equal. It commutes with the group on images whose sides are multiples of the patch.

    Args:
        in_type: the type of the input: any fields, such as the colours of images or velocities.
        out_type: the type of the output: any fields.
        size: the pixels along every axis of a patch.

    Shape:
        ``(B, in_type.size, *space)`` to ``(B, out_type.size, *(n // size for n in space))``.

    Raises:
        ValueError: no grid, or a fiber group that does not map a square onto itself; on application, an axis that
            patches do not divide.

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

    resizes = True

    def __init__(self, in_type: FieldType, out_type: FieldType, size: int):
        super().__init__(
            in_type, out_type, PlainPatchEmbedding(*_patches(in_type, out_type, size, check_int("size", size)))
        )

    def _output_space(self, space: Sequence[int]) -> Sequence[int]:
        self.plain.check_space(space)
        return [n // self.plain.size for n in space]


class PatchDecoder(PlainModule):
    r"""Every equivariant map of fields to patches of an image: from the tokens of a transformer back to pixels.

    .. math:: y(X + u) = K(u)\, f(X) + b, \qquad K(h u) = \rho_\text{out}(h)\, K(u)\, \rho_\text{in}(h)^{-1}

    for every position X and every pixel u of its patch, where patches do not overlap. It is the transpose of
    :class:`PatchEmbedding`, and commutes with the group on grids of every size.

    Args:
        in_type: the type of the input: any fields.
        out_type: the type of the output: any fields, such as scores of classes or velocities.
        size: the pixels along every axis of a patch.

    Shape:
        ``(B, in_type.size, *space)`` to ``(B, out_type.size, *(n * size for n in space))``.

    Raises:
        ValueError: no grid, or a fiber group that does not map a square onto itself.

    Example:
        >>> import torch
        >>> from escnn_attention import PatchDecoder, assert_equivariant
        >>> from escnn import gspaces, nn
        >>> g = gspaces.flipRot2dOnR2(4)
        >>> fields, velocity = nn.FieldType(g, 2 * [g.regular_repr]), nn.FieldType(g, [g.irrep(1, 1)])
        >>> decoder = PatchDecoder(fields, velocity, 4)
        >>> decoder(fields(torch.randn(1, 16, 3, 3))).shape
        torch.Size([1, 2, 12, 12])
        >>> assert_equivariant(decoder, (1, 16, 3, 3), tolerance=1e-12)

    Source: He et al., "Masked Autoencoders Are Scalable Vision Learners", CVPR 2022, for a decoder of patches.
    """

    plain: PlainPatchDecoder

    resizes = True

    def __init__(self, in_type: FieldType, out_type: FieldType, size: int):
        super().__init__(in_type, out_type, PlainPatchDecoder(*_patches(in_type, out_type, size, 1)))

    def _output_space(self, space: Sequence[int]) -> Sequence[int]:
        return [n * self.plain.size for n in space]


def _patches(
    in_type: FieldType, out_type: FieldType, size: int, reach: int
) -> tuple[list[InvariantTable], list[np.ndarray], np.ndarray]:
    """The tables, columns and invariants of patches, whose outputs sum over ``reach`` positions along every axis."""
    check_types(in_type, out_type)
    std = 1 / math.sqrt(in_type.size * reach ** max(in_type.gspace.dimensionality, 1))
    tables, columns = [], []
    for representation, channels in columns_of(in_type):
        products = out_type
        if not representation.is_trivial():
            inverse = _dual(representation)
            products = FieldType(out_type.gspace, [r.tensor(inverse) for r in out_type.representations])
        tables.append(invariant_table(products, size, copies=len(channels), std=std))
        columns.append(channels)
    return tables, columns, invariant_vectors(out_type)


def _dual(representation: Representation) -> Representation:
    """The representation by the transposed inverse, which is the same one if it is orthogonal."""
    basis = representation.change_of_basis
    if np.allclose(basis @ basis.T, np.eye(representation.size)):
        return representation
    inverse = representation.change_of_basis_inv.T
    return Representation(representation.group, f"dual {representation.name}", representation.irreps, inverse, [])


def invariant_table(field_type: FieldType, size: int, *, copies: int = 1, std: float = 0.02) -> InvariantTable:
    """Learned invariant fields of a type, on a grid with sides of equal length that the group maps onto itself."""
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


class PositionTable(PlainModule):
    r"""Adds a learned field to features on a grid: the table of position embeddings of vision transformers, steerable.

    .. math:: y(x) = f(x) + p(x), \qquad p(h u) = \rho(h)\, p(u)

    for one position u of each orbit of the grid: p is any field that the group leaves as it is, so that adding it
    commutes with the group, and not with translations. On a grid of another size the table is interpolated,
    bicubically in the plane and linearly in space. :class:`PositionEmbedding` learns a continuous function instead,
    for any group, and at points too.

    Args:
        in_type: the type of the input and of the output: any fields.
        size: the positions along every axis of the table.

    Shape:
        ``(B, in_type.size, *space)`` to the same.

    Raises:
        ValueError: no grid, or a fiber group that does not map a square onto itself.

    Example:
        >>> import torch
        >>> from escnn_attention import PositionTable, assert_equivariant
        >>> from escnn import gspaces, nn
        >>> g = gspaces.flipRot2dOnR2(4)
        >>> fields = nn.FieldType(g, [g.regular_repr, g.irrep(1, 1), g.trivial_repr])
        >>> for n in (6, 9):
        ...     assert_equivariant(PositionTable(fields, 6), (2, 11, n, n), tolerance=1e-12)

    Source: Dosovitskiy et al., "An Image is Worth 16x16 Words", ICLR 2021; Nordström et al., "Octic Vision
    Transformers", 2025, Section 4, for the symmetries of the square.
    """

    plain: PlainPositionTable

    def __init__(self, in_type: FieldType, size: int):
        table = invariant_table(check_type("in_type", in_type), size)
        super().__init__(in_type, in_type, PlainPositionTable(table))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, size={self.plain.table.shape[0]}"


class PositionEmbedding(PlainModule):
    r"""Adds a learned field to features, equal for all inputs: a steerable absolute position embedding.

    .. math:: y(x) = f(x) + \sum_h \rho(h)\, W\, \varphi(h^{-1} x)

    with a continuous function :math:`\varphi` of the position and :math:`\rho` the representation of the features. The
    group leaves the field as it is, whatever :math:`\varphi` is, so that adding it commutes with the fiber group, and
    not with translations of an image. On a grid x is measured from its centre, in units of half its longest side; at
    points from the mean of the cloud, in units of ``length_scale``.

    Args:
        in_type: the type of the input and of the output: any fields.
        encoding: the function :math:`\varphi`, by name or as an object: ``"mlp"``, ``"separable"``, ``"fourier"`` or
            one of your own that is a function of the offset.
        channels: the number of its channels.
        length_scale: the length that is 1 to it, at points.
        samples: which elements stand for a continuous fiber group; None where it is finite.

    Shape:
        ``(B, in_type.size, *space)`` to the same; ``(N, in_type.size)`` at scattered points.

    Raises:
        ValueError: a gspace without a base space, or an encoding that is no function of the position.

    Example:
        >>> import torch
        >>> from escnn_attention import PositionEmbedding, assert_equivariant
        >>> from escnn import gspaces, nn
        >>> g = gspaces.flipRot2dOnR2(4)
        >>> fields = nn.FieldType(g, [g.regular_repr, g.irrep(1, 1), g.trivial_repr])
        >>> assert_equivariant(PositionEmbedding(fields), (2, 11, 7, 7), tolerance=1e-12)

    Source: Dosovitskiy et al., "An Image is Worth 16x16 Words", ICLR 2021, for the embedding; Weiler and Cesa, NeurIPS
    2019, for functions that are steerable.
    """

    plain: PlainPositionEmbedding
    pointwise = True

    def __init__(
        self,
        in_type: FieldType,
        *,
        encoding: Encoding | str = "mlp",
        channels: int = 8,
        length_scale: float = 1.0,
        samples: Samples | int | None = None,
    ):
        check_type("in_type", in_type)
        group = fibers(in_type.gspace, as_samples(samples))
        if not group.dimension:
            raise ValueError(f"in_type: {in_type.gspace.name} has no base space, and so no positions")
        kernel, channels = as_encoding(encoding), check_int("channels", channels)
        name = type(kernel).__name__
        if kernel.has_start or kernel.form is None:
            raise ValueError(f"encoding: got {name}, needed a function of the position: mlp, separable, fourier")
        function = kernel.bind(group.dimension, 1, channels, 1)
        project_out = FromPoses(
            frames(in_type, group=group, dual=True), in_type.size, channels, group.order, mass=mass(in_type)
        )
        scale = check_length("length_scale", length_scale)
        super().__init__(in_type, in_type, PlainPositionEmbedding(function, project_out, group.inverse_action, scale))

    def forward(
        self, input: GeometricTensor, batch: Tensor | None = None, *, mask: Tensor | None = None
    ) -> GeometricTensor:
        """Add the embedding.

        Args:
            input: features of type ``in_type``, on a grid or at points.
            batch: ``(N,)``, at points the number of the cloud of each; None for a single cloud.
            mask: ``(N,)``, at points: False for those that are not there, which are left out of the mean and zero.
        """
        x = check_field(input, self.in_type, self)
        for name, value in (("batch", batch), ("mask", mask)):
            check_no_batch(x, value, name)
        return GeometricTensor(self.plain(x.tensor, x.coords, batch, mask), self.out_type, x.coords)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, encoding={type(self.plain.encoding).__name__}"
