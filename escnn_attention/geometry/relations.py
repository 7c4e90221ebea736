r"""The arguments of encodings between points: functions of two positions.

A layer evaluates its encoding at a function of the two positions in the frame of an output pose, :math:`r(h^{-1}x,
h^{-1}x')`. Every function is equivariant to the fiber group; the choice determines the other equivariances, and so the
group that acts on the points.

Points may be motions of the plane or of space. A motion :math:`g = (x, R)` of SE(2) is given by the numbers :math:`(x,
\theta)`, with the angle of its rotation, and one of SE(3) by :math:`(x, q)`, with a unit quaternion, real part first; q
and -q are the same rotation.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch
from scipy.spatial.transform import Rotation
from torch import Tensor

from escnn_attention._checks import check_length, check_option, check_sequence
from escnn_attention.geometry.neighbours import nearest_image


class Relation(ABC):
    """Base class: a function of the positions of the query and of the key, both in the frame of one pose.

    Example:
        >>> import torch
        >>> from escnn_attention import Relation
        >>> class Distance(Relation):
        ...     def size(self, dim: int) -> int:
        ...         return 1
        ...
        ...     def __call__(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        ...         return (key - query).norm(dim=-1, keepdim=True)
        >>> Distance()(torch.zeros(2), torch.tensor([3.0, 4.0]))
        tensor([5.])
    """

    is_offset: bool = False
    """Whether it is the offset itself, a linear function of which every pose sees."""

    sees_poses: bool = False
    """Whether it is a function of the pose of the key as well, and not of positions alone."""

    period: tuple[float, ...] | float | None = None
    """The period of all coordinates, or of each, modulo which neighbours are searched, too; None for space itself."""

    @abstractmethod
    def size(self, dim: int) -> int:
        """The number of coordinates of the relation between points of R^dim.

        Raises:
            ValueError: there is none in this dimension.
        """

    @abstractmethod
    def __call__(self, query: Tensor, key: Tensor) -> Tensor:
        """The relation ``(..., size)`` of positions ``(..., d)`` that broadcast against each other."""

    @property
    def metric(self) -> Callable[[Tensor, Tensor], Tensor] | None:
        """The distance by which points are neighbours; None for that of their coordinates."""
        return None

    def scaled(self, coords: Tensor, length: float) -> Tensor:
        """Coordinates ``(..., d)`` in units of a length."""
        return coords / length

    def in_units(self, length: float) -> Relation:
        """The relation between coordinates in units of a length, as :meth:`scaled` gives them; by default itself."""
        return self

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class Offset(Relation):
    r""":math:`x' - x`: translations and the fiber group, :math:`R^d \rtimes H`. The default.

    With the trivial fiber group these are the translations T(d) alone.

    In a periodic box with sides :math:`L_i` it is the shortest of the offsets between the images of both points,
    :math:`\delta_i - L_i \operatorname{round}(\delta_i / L_i)`: points that differ by whole periods are the same. It
    jumps where a coordinate of the offset is half a period, and there is one of the two shortest.

    Args:
        period: the side of the box, or those along the axes of the coordinates; None for space itself.

    Raises:
        ValueError: a period is not positive, or there are not as many as axes.

    Example:
        >>> import torch
        >>> from escnn_attention import Offset
        >>> query, key = torch.tensor([1.0, 0.0]), torch.tensor([3.0, 4.0])
        >>> Offset()(query, key), Offset(period=5.0)(query, key), Offset(period=(5.0, 100.0))(query, key)
        (tensor([2., 4.]), tensor([ 2., -1.]), tensor([2., 4.]))
    """

    is_offset = True

    def __init__(self, period: float | Sequence[float] | None = None):
        if period is None or isinstance(period, (int, float)):
            self.period = None if period is None else check_length("period", period)
        else:
            check_sequence("period", period, "of the sides of a box, or needed a number")
            self.period = tuple(check_length("period", side) for side in period)

    def size(self, dim: int) -> int:
        periods_of(self.period, dim)
        return dim

    def __call__(self, query: Tensor, key: Tensor) -> Tensor:
        offset = key - query
        return offset if self.period is None else nearest_image(offset, self.period)

    def in_units(self, length: float) -> Relation:
        if self.period is None or length == 1:
            return self
        periods = self.period
        return Offset(tuple(side / length for side in periods) if isinstance(periods, tuple) else periods / length)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({'' if self.period is None else f'period={self.period}'})"


def periods_of(period: tuple[float, ...] | float | None, dim: int) -> tuple[float, ...] | None:
    """The periods of the coordinates of R^dim; None where there are none. A ValueError where they are not as many."""
    if period is None or isinstance(period, (int, float)):
        return None if period is None else dim * (float(period),)
    if len(period) != dim:
        raise ValueError(f"period: got {len(period)} sides of a box, needed a number or {dim} of them, one an axis")
    return tuple(map(float, period))


class Pair(Relation):
    """Both positions: the fiber group H about the origin, and no translations, as for SO(2) and SO(3) in LieConv.

    The origin is at coordinates zero: subtract the centre.

    Example:
        >>> import torch
        >>> from escnn_attention import Pair
        >>> Pair()(torch.tensor([1.0, 0.0]), torch.tensor([3.0, 4.0]))
        tensor([1., 0., 3., 4.])
    """

    def size(self, dim: int) -> int:
        return 2 * dim

    def __call__(self, query: Tensor, key: Tensor) -> Tensor:
        return torch.cat(torch.broadcast_tensors(query, key), dim=-1)


class LogMotion(Relation):
    r"""The logarithm of the motion between two poses, :math:`\log(g_k^{-1} g_q)` of :math:`g = (x, h)` in SE(2) or
    SE(3): position and rotation are coupled.

    With the offset :math:`\delta = h^{-1}(x' - x)` and the rotation :math:`R = h^{-1}\hat h` by the vector
    :math:`\omega = \log R` of length :math:`\theta` (a number in the plane),

    .. math::
        \log(g_k^{-1} g_q) = -(V(\omega)^{-1} \delta,\; \omega), \qquad
        V^{-1} = 1 - \tfrac12 [\omega]_\times
            + \tfrac{1}{\theta^2}\left(1 - \tfrac{\theta}{2}\cot\tfrac{\theta}{2}\right) [\omega]_\times^2 .

    An encoding or kernel of it needs no term for the pose. Fiber groups of rotations only; of those about one axis two
    coordinates of :math:`\omega` are zero. Where :math:`\theta = \pi`
    one of the two logarithms in space is taken, the same from every pose, so that layers stay exact.

    Example:
        >>> import torch
        >>> from escnn_attention import LogMotion, PairKernel, PointSelfAttention
        >>> from escnn import gspaces, nn
        >>> g = gspaces.rot2dOnR2(4)
        >>> fields = nn.FieldType(g, 2 * [g.regular_repr])
        >>> kernel = PairKernel(biases=True, last_activation=True)
        >>> layer = PointSelfAttention(fields, fields, encoding=kernel, relation=LogMotion())
        >>> layer(nn.GeometricTensor(torch.randn(5, 8), fields, torch.randn(5, 2))).shape
        torch.Size([5, 8])
    """

    sees_poses = True

    def size(self, dim: int) -> int:
        if dim not in (2, 3):
            raise ValueError(f"relation: LogMotion is for points of the plane or of space, got dimension {dim}")
        return dim + dim * (dim - 1) // 2

    def __call__(self, query: Tensor, key: Tensor) -> Tensor:
        raise TypeError("relation: LogMotion is a function of poses, too, and not of two positions")

    def tables(self, inverse: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Matrices ``(H, H, D, d)`` that multiply the offset, for pairs of poses, and vectors ``(H, H, D)`` to add.

        ``inverse`` are the matrices of the inverses of the elements, all of them rotations.
        """
        if not (np.linalg.det(inverse) > 0).all():
            raise ValueError("relation: LogMotion is for groups of rotations, got one with reflections or inversions")
        dim = inverse.shape[-1]
        relative = np.einsum("hij,pkj->hpik", inverse, inverse)  # h⁻¹ĥ
        omega = np.vectorize(_rotation_vector, signature="(i,j)->(k)")(relative)
        columns = torch.as_tensor(inverse.swapaxes(1, 2), device="cpu")[:, None]
        rotated = inverse_of_v(torch.as_tensor(omega, device="cpu")[:, :, None], columns).numpy()  # H, P, columns, d
        linear = np.zeros((*omega.shape[:2], self.size(dim), dim))
        linear[:, :, :dim] = -rotated.swapaxes(2, 3)
        constant = np.concatenate([np.zeros((*omega.shape[:2], dim)), -omega], axis=-1)
        return linear, constant


def _rotation_vector(matrix: np.ndarray) -> np.ndarray:
    """The logarithm of a rotation, as a number in the plane and as a vector in space."""
    if len(matrix) == 2:
        angle = math.atan2(matrix[1, 0], matrix[0, 0])
        return np.array([math.pi if angle < -math.pi + 1e-9 else angle])
    # A copy, since SciPy 1.13 refuses what is read-only.
    vector = Rotation.from_matrix(matrix.copy()).as_rotvec()
    if np.linalg.norm(vector) > math.pi - 1e-6:
        # Of the two opposite axes always the same one, whatever rounding says.
        first = vector[np.abs(vector) > 1e-6][0]
        vector = vector * np.sign(first)
    return vector


class LiftedMotion(Relation):
    r"""The motion between two points that are motions themselves, :math:`g_k^{-1} g_q` of :math:`g = (x, R)` in SE(2)
    or SE(3): the points of a cloud that :class:`~escnn_attention.PointLift` has lifted.

    With :math:`(t, R) = g_k^{-1} g_q` and the vector :math:`\omega = \log R` of length :math:`\theta` (a number in the
    plane), the logarithm is

    .. math:: \log(g_k^{-1} g_q) = (V(\omega)^{-1} t,\; \omega)

    with V as of :class:`LogMotion`.

    It is discontinuous at :math:`\theta = \pi`, in the plane 0.007 beyond, so that all half turns are treated alike. In
    space the quaternion can replace it, which is continuous: :math:`(t, q)` with :math:`q = q_k^{-1} q_q`, real part
    first.

    What is seen, r, may be limited in its length, so that far away points do not look unlike all others:
    :math:`\tanh(\lVert r \rVert / l)\, r / \lVert r \rVert`, with :math:`10^{-6}` added to the length.

    Neighbours are the nearest by :meth:`distance`, which is invariant under motions too.

    Args:
        rotation: ``"vector"`` for the logarithm, ``"quaternion"``.
        limit: the length l beyond which lengths hardly grow, up to 1; None for no limit.

    Raises:
        ValueError: an unknown rotation; a limit that is not positive; points that are not motions, or a quaternion in
            the plane.

    Example:
        >>> import torch
        >>> from escnn_attention import LiftedMotion
        >>> query, key = torch.tensor([1.0, 2.0, 0.5]), torch.tensor([1.0, 0.0, 0.5])  # positions and angles
        >>> LiftedMotion()(query, key).round(decimals=3)
        tensor([0.9590, 1.7550, 0.0000])

    Source: Hutchinson et al., "LieTransformer", ICML 2021; its published implementation for the limit, of 7.
    """

    def __init__(self, rotation: Literal["vector", "quaternion"] = "vector", limit: float | None = None):
        self.rotation = check_option("rotation", rotation, ("vector", "quaternion"))
        self.limit = None if limit is None else check_length("limit", limit)

    def size(self, dim: int) -> int:
        sizes = {MOTION_SIZES[3]: 7} if self.rotation == "quaternion" else {MOTION_SIZES[2]: 3, MOTION_SIZES[3]: 6}
        if dim not in sizes:
            raise ValueError(
                f"relation: {self} is for points that are motions, of {' or '.join(map(str, sizes))} numbers, got "
                f"dimension {dim}; PointLift makes them"
            )
        return sizes[dim]

    def __call__(self, query: Tensor, key: Tensor) -> Tensor:
        translation, rotation = quotient(key, query)
        if self.rotation == "vector":
            rotation = rotation_vector(rotation)
            translation = inverse_of_v(rotation, translation)
        seen = torch.cat([translation, rotation], dim=-1)
        return seen if self.limit is None else _limited(seen, self.limit)

    @property
    def metric(self) -> Callable[[Tensor, Tensor], Tensor]:
        """The distance of motions, :meth:`distance`."""
        return self.distance

    def scaled(self, coords: Tensor, length: float) -> Tensor:
        """Motions whose positions are in units of a length; rotations have none."""
        dim = dim_of_motions(coords)
        return torch.cat([coords[..., :dim] / length, coords[..., dim:]], dim=-1)

    def distance(self, query: Tensor, key: Tensor) -> Tensor:
        r"""The distance of two motions as published, ``(...)``: of what is seen, :math:`0.2` times the length of the
        rotation plus :math:`0.8` times that of the translation.

        Of quaternions the first three numbers count as the rotation, and the last with the translation.
        """
        seen = self(query, key)
        dim = dim_of_motions(query)
        translation, rotation = seen[..., :dim], seen[..., dim:]
        if self.rotation == "quaternion":
            translation, rotation = torch.cat([translation, rotation[..., 3:]], dim=-1), rotation[..., :3]
        return 0.2 * _length(rotation) + 0.8 * _length(translation)

    def __repr__(self) -> str:
        options = [] if self.rotation == "vector" else [repr(self.rotation)]
        options += [] if self.limit is None else [f"limit={self.limit:g}"]
        return f"{type(self).__name__}({', '.join(options)})"


class LogPolar(Relation):
    r"""The logarithm of the ratio of the distances from the origin, and the angle between the two directions as its
    cosine and sine: scalings and rotations of the plane about the origin, :math:`R_{>0} \times SO(2)`.

    Both groups act on the plane without its origin as on themselves, so the fiber group may be trivial. Scalings do not
    change the relation, at all magnitudes of the precision; a neighbourhood by radius is not invariant.

    Raises:
        ValueError: on application, when a point is the origin, which has no direction.

    Example:
        >>> import torch
        >>> from escnn_attention import LogPolar
        >>> relation, query, key = LogPolar(), torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
        >>> relation(query, key)  # as far away, and a quarter further round
        tensor([0., 0., 1.])
        >>> torch.equal(relation(2 * query, 2 * key), relation(query, key))
        True
    """

    def size(self, dim: int) -> int:
        if dim != 2:
            raise ValueError(f"relation: LogPolar is for points of the plane, got dimension {dim}")
        return 3

    def __call__(self, query: Tensor, key: Tensor) -> Tensor:
        (x, length, exponent), (y, other_length, other_exponent) = _polar(query), _polar(key)
        ratio = other_length - length + (other_exponent - exponent) * math.log(2)
        dot = (x * y).sum(-1)
        cross = x[..., 0] * y[..., 1] - x[..., 1] * y[..., 0]
        return torch.stack(torch.broadcast_tensors(ratio, dot, cross), dim=-1)


def _length(x: Tensor) -> Tensor:
    """The lengths of vectors ``(..., D)``; of zeros the derivative is 0, not that of a root."""
    square = x.square().sum(-1)
    return torch.where(square == 0, 0.0, torch.where(square == 0, 1.0, square).sqrt())


def _limited(x: Tensor, limit: float) -> Tensor:
    """Vectors of lengths that a hyperbolic tangent limits, with every derivative where they are zero."""
    length = _length(x).unsqueeze(-1) + 1e-6
    return x * (torch.tanh(length / limit) / length)


def _polar(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The direction of ``(..., d)``, and its length in two parts: e^length · 2^exponent, each ``(...)``."""
    largest = x.detach().abs().amax(-1, keepdim=True)
    if not torch.compiler.is_compiling() and not largest.all():
        raise ValueError("coords: got a point at the origin, where LogPolar has no direction")
    # A power of two near the length is taken out: squares neither overflow nor vanish at any scale.
    exponent = largest.log2().floor()
    # In two halves, as 2¹⁴⁹, which the smallest numbers need, is no number of single precision.
    half = (exponent / 2).floor()
    scaled = x * (-half).exp2() * (half - exponent).exp2()
    norm = scaled.square().sum(-1, keepdim=True).sqrt()
    return scaled / norm, norm.squeeze(-1).log(), exponent.squeeze(-1)


_JUMP = 7e-3
"""How far beyond a half turn the logarithm of an angle jumps, as in the published implementation of LieConv."""

MOTION_SIZES = {2: 3, 3: 7}
"""The numbers of a motion of the plane and of space."""


def dim_of_motions(g: Tensor) -> int:
    """The dimension of the space that motions ``(..., 3)`` or ``(..., 7)`` move."""
    return 2 if g.shape[-1] == MOTION_SIZES[2] else 3


def quotient(g: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """The translation ``(..., d)`` of :math:`g^{-1} h`, and its rotation, an angle ``(..., 1)`` or a quaternion."""
    dim = dim_of_motions(g)
    back = _inverse(g[..., dim:])
    return rotate(back, h[..., :dim] - g[..., :dim]), product(back, h[..., dim:])


def product(a: Tensor, b: Tensor) -> Tensor:
    """The rotation b, then a: angles ``(..., 1)``, or quaternions ``(..., 4)``."""
    if a.shape[-1] == 1:
        return a + b
    real, other = a[..., :1], b[..., :1]
    u, v = a[..., 1:], b[..., 1:]
    return torch.cat([real * other - (u * v).sum(-1, keepdim=True), real * v + other * u + _cross(u, v)], dim=-1)


def rotate(rotation: Tensor, x: Tensor) -> Tensor:
    """Vectors ``(..., d)``, rotated by angles ``(..., 1)`` or quaternions ``(..., 4)``."""
    if rotation.shape[-1] == 1:
        return rotation.cos() * x + rotation.sin() * torch.stack([-x[..., 1], x[..., 0]], dim=-1)
    real, axis = rotation[..., :1], rotation[..., 1:]
    across = 2 * _cross(axis, x)
    return x + real * across + _cross(axis, across)


def rotation_vector(rotation: Tensor) -> Tensor:
    r"""The logarithm of rotations, about a half turn at most: ``(..., 1)`` of angles, ``(..., 3)`` of quaternions.

    Angles are between :math:`-\pi + 0.007` and :math:`\pi + 0.007`: rounding has no say in half turns, which evenly
    spaced rotations of the plane have between them.
    """
    if rotation.shape[-1] == 1:
        angle = torch.atan2(rotation.sin(), rotation.cos())
        return torch.where(angle < _JUMP - math.pi, angle + 2 * math.pi, angle)
    rotation = torch.where(rotation[..., :1] < 0, -rotation, rotation)
    real, axis = rotation[..., :1], rotation[..., 1:]
    square = axis.square().sum(-1, keepdim=True)
    still = square == 0
    length = torch.where(still, 1.0, square).sqrt()
    return axis * torch.where(still, 2.0, 2 * torch.atan2(length, real) / length)


def inverse_of_v(omega: Tensor, x: Tensor) -> Tensor:
    r"""The translation of the logarithm of a motion by x that rotates by :math:`\omega`, of a length below 2π.

    .. math:: V^{-1} x = x - \tfrac12 \omega \times x
        + \tfrac{1}{\theta^2}\left(1 - \tfrac{\theta}{2}\cot\tfrac{\theta}{2}\right) \omega \times (\omega \times x)
    """
    square = omega.square().sum(-1, keepdim=True)
    small = square < 0.01  # where the closed form loses digits by cancellation, and its derivatives more
    half = torch.where(small, 1.0, square).sqrt() / 2
    series = 1 / 12 + square * (1 / 720 + square * (1 / 30240 + square / 1209600))
    factor = torch.where(small, series, (1 - half * half.cos() / half.sin()) / (4 * half.square()))
    across = _cross(omega, x)
    return x - across / 2 + factor * _cross(omega, across)


def _inverse(rotation: Tensor) -> Tensor:
    return -rotation if rotation.shape[-1] == 1 else torch.cat([rotation[..., :1], -rotation[..., 1:]], dim=-1)


def _cross(omega: Tensor, x: Tensor) -> Tensor:
    """The velocity of x in a rotation about ω; in the plane ω is a number."""
    if omega.shape[-1] == 1:
        return omega * torch.stack([-x[..., 1], x[..., 0]], dim=-1)
    (a, b, c), (u, v, w) = omega.unbind(-1), x.unbind(-1)
    return torch.stack([b * w - c * v, c * u - a * w, a * v - b * u], dim=-1)
