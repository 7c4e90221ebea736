r"""Grids of latitudes and longitudes on the sphere, as points with quadrature weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from escnn_attention._checks import check_int, check_option
from escnn_attention._escnn.lie_learn import latitudes
from escnn_attention.geometry.cache import kept
from escnn_attention.geometry.turns import Turns, remember

if TYPE_CHECKING:
    from escnn_attention._escnn.types import FieldType, GeometricTensor


GridKind = Literal["equiangular", "Clenshaw-Curtis", "Gauss-Legendre"]


class SphereGrid:
    r"""Latitudes and longitudes on the sphere S², as points of R³ and their quadrature weights.

    Meridians meet at the poles, so the points of such a grid are denser there. To be independent of the grid, attention
    integrates over the area, and each point has its weight as a measure.

    Longitudes start at 0, where y = 0 and x > 0, and go east. Latitudes start at the north pole, z = 1:

    =========================== ========================================= ========================================
    kind                        colatitudes                               number of latitudes
    =========================== ========================================= ========================================
    ``"equiangular"``           :math:`(j + \tfrac12)\pi / n`, no poles   even (lie_learn's SOFT grid)
    ``"Clenshaw-Curtis"``       :math:`j\pi / (n - 1)`, with both poles   odd
    ``"Gauss-Legendre"``        zeros of the Legendre polynomial          any
    =========================== ========================================= ========================================

    Args:
        num_latitudes: the number of latitudes n.
        num_longitudes: the number of longitudes; by default twice as many.
        kind: how latitudes are chosen.

    Attributes:
        shape: latitudes and longitudes.
        coords: ``(N, 3)`` float64, unit vectors, longitudes fastest.
        weights: ``(N,)`` float64, the area of each point, of sum :math:`4\pi`. The quadrature is exact for spherical
            harmonics of degrees below n (Gauss-Legendre 2n) where there are enough longitudes, more than the order.

    Raises:
        ValueError: a number that the kind does not have, or an unknown kind.

    Example:
        >>> import torch
        >>> from escnn_attention import SphereGrid
        >>> from escnn import gspaces, nn
        >>> grid = SphereGrid(8)
        >>> g = gspaces.rot3dOnR3()
        >>> scalars = nn.FieldType(g, 2 * [g.trivial_repr])
        >>> x, batch, measure = grid.points(torch.randn(3, 2, 8, 16), scalars)
        >>> x.tensor.shape, grid.image(x).shape
        (torch.Size([384, 2]), torch.Size([3, 2, 8, 16]))

    Source: lie_learn (Cohen et al., "Spherical CNNs", 2018), for the grids and their weights.
    """

    def __init__(self, num_latitudes: int, num_longitudes: int | None = None, kind: GridKind = "equiangular"):
        if num_longitudes is None:
            num_longitudes = 2 * num_latitudes
        for name, value in (("num_latitudes", num_latitudes), ("num_longitudes", num_longitudes)):
            check_int(name, value, least=2)
        check_option("kind", kind, get_args(GridKind))
        odd = {"equiangular": False, "Clenshaw-Curtis": True}.get(kind)
        if odd is not None and num_latitudes % 2 != odd:
            needed = "an odd number" if odd else "an even number"
            raise ValueError(f"num_latitudes: got {num_latitudes} for kind {kind!r}, needed {needed}")
        colatitude, weight = latitudes(num_latitudes, kind)
        self.shape = (num_latitudes, num_longitudes)
        self.kind = kind
        longitude = 2 * np.pi * np.arange(num_longitudes) / num_longitudes
        theta, phi = (a.ravel() for a in np.meshgrid(colatitude, longitude, indexing="ij"))
        points = np.stack([np.sin(theta) * np.cos(phi), np.sin(theta) * np.sin(phi), np.cos(theta)], axis=1)
        self.coords = torch.tensor(points)
        area = 4 * np.pi * weight / (weight.sum() * num_longitudes)
        self.weights = torch.tensor(np.repeat(area, num_longitudes))

    def points(self, x: Tensor, field_type: FieldType) -> tuple[GeometricTensor, Tensor, Tensor]:
        """Images ``(B, C, latitudes, longitudes)`` on the grid as features at points.

        Returns:
            the features ``(B · N, C)`` with their coordinates; the number of the image of each point; the weight of
            each point. They are what the layers on points take. Coordinates and weights of features in half precision
            are in float32.
        """
        if x.dim() != 4 or tuple(x.shape[2:]) != self.shape or x.shape[1] != field_type.size:
            needed = ("B", field_type.size, *self.shape)
            raise ValueError(f"x: got shape {tuple(x.shape)}, needed ({', '.join(map(str, needed))})")
        if field_type.gspace.dimensionality != 3:
            raise ValueError(f"field_type: got one on {field_type.gspace.name}, needed a gspace on R³")
        arguments = (self.coords, self.weights, len(x), x.device, torch.promote_types(x.dtype, torch.float32))
        coords, batch, measure = kept(_of_images, *arguments)
        if any(t._version for t in (coords, batch, measure)):  # somebody has written into them
            coords, batch, measure = _of_images(*arguments)
        if self.kind != "Clenshaw-Curtis":  # at a pole there is no longitude
            remember(Turns(len(x), *self.shape), coords, batch)
        features = x.flatten(2).transpose(1, 2).flatten(0, 1)
        return field_type(features, coords), batch, measure

    def image(self, x: GeometricTensor | Tensor) -> Tensor:
        """Features at the points of B grids, ``(B · N, C)``, as images ``(B, C, latitudes, longitudes)``."""
        features = x if isinstance(x, Tensor) else x.tensor
        if features.dim() != 2 or len(features) % len(self.coords):
            raise ValueError(f"x: got shape {tuple(features.shape)}, needed (B · {len(self.coords)}, C)")
        return features.unflatten(0, (-1, len(self.coords))).transpose(1, 2).unflatten(2, self.shape)

    def __repr__(self) -> str:
        return f"SphereGrid({self.shape[0]}, {self.shape[1]}, {self.kind!r})"


def _of_images(
    coords: Tensor, weights: Tensor, number: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """The coordinates, the number of the image and the weight of each point of so many images.

    They are the same tensors in every call, so that neighbours are searched once.
    """
    batch = torch.arange(number, device=device).repeat_interleave(len(coords))
    return coords.to(device, dtype).repeat(number, 1), batch, weights.to(device, dtype).repeat(number)
