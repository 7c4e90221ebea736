"""Layer and batch normalisation of feature fields."""

from __future__ import annotations

from numbers import Real
from typing import Any, Literal, get_args

import numpy as np
from escnn.nn import EquivariantModule, FieldType

from escnn_attention._checks import check_int, check_option, check_unused
from escnn_attention.groups.fibers import (
    columns_of,
    frames,
    generic_fibers,
    invariant_vectors,
    regular_fields,
)
from escnn_attention.nn.arguments import check_regular, check_type
from escnn_attention.nn.module import PlainModule
from escnn_attention.plain.norms import BatchNorm, LayerNorm, NormKind, NormScope


class FieldLayerNorm(PlainModule):
    r"""Layer normalisation over all fields and poses.

    Types of regular fields, of more than two channels, get the layer norm, with the mean :math:`\mu` over all fields
    and poses:

    .. math:: y = \gamma \, \frac{x - \mu}{\sqrt{\operatorname{mean}_c(x - \mu)_c^2 + \epsilon}} + \beta

    All other types get the root mean square norm, which divides by one number and subtracts nothing:

    .. math:: y = \gamma \, \frac{x}{\sqrt{\operatorname{mean}_c x_c^2 + \epsilon}}

    Subtracting a mean would remove the information of few scalars: a single one is its own mean. The mean square is
    invariant because the representations are orthogonal. :math:`\gamma` is one number a field and :math:`\beta` one a
    trivial component, both learned, so the layer commutes with the group.

    With ``num_groups`` each group of consecutive fields has statistics of its own. With ``scope="sample"`` it is the
    group norm, and with as many groups as fields the instance norm.

    Args:
        in_type: the type of the input and of the output.
        scope: ``"position"`` takes the statistics at each position by itself, ``"sample"`` over all positions of a
            sample together, as the published GSA-Nets do (there: group norm with one group), ``"pose"`` over the fields
            of each pose at each position.
        kind: None for the norm of the type, as above; ``"rms"`` for the second in any case; ``"layer"`` for the first:
            :math:`\mu` is then the mean over, and from, the channels of permutation fields (regular, quotient,
            trivial), whose sum no element changes; or ``"fields"``: :math:`\mu` is the mean over all fields of the same
            representation, component by component, which transforms as they do. It is that of octic ViTs, for features
            that are many fields of each irrep.
        eps: added to the mean square.
        affine: whether to learn :math:`\gamma` and :math:`\beta`.
        num_groups: the number of groups of as many fields each.

    Shape:
        ``(B, in_type.size, *space)`` to the same; ``(N, in_type.size)`` at scattered points,
        with ``scope="position"`` and ``"pose"``.

    Raises:
        ValueError: a representation that is not orthogonal; so few fields that one would become zero, or all of them
            signs; with ``scope="pose"`` a field that is not regular; ``kind="fields"`` or groups with poses as
            ``scope``; groups that do not divide the fields. On application, a single position of groups over positions
            of which it would leave zeros or signs.

    Example:
        >>> import torch
        >>> from escnn_attention import FieldLayerNorm
        >>> from escnn import gspaces, nn
        >>> g = gspaces.rot2dOnR2(4)
        >>> fields = nn.FieldType(g, 8 * [g.regular_repr] + 2 * [g.irrep(1)])
        >>> norm = FieldLayerNorm(fields)
        >>> y = norm(fields(5 + 3 * torch.randn(2, 36, 7, 7))).tensor
        >>> bool((y.square().mean(1) - 1).abs().max() < 1e-3)
        True

    Source: Ba, Kiros and Hinton, "Layer Normalization", 2016; GSA-Nets, Figure F.1; Zhang and Sennrich, "Root Mean
    Square Layer Normalization", NeurIPS 2019; Wu and He, "Group Normalization", ECCV 2018; Nordström et al., "Stronger
    ViTs With Octic Equivariance", 2025, for ``kind="fields"``.
    """

    plain: LayerNorm

    def __init__(
        self,
        in_type: FieldType,
        scope: NormScope = "position",
        *,
        kind: NormKind | None = None,
        eps: float = 1e-5,
        affine: bool = True,
        num_groups: int = 1,
    ):
        check_type("in_type", in_type)
        check_option("scope", scope, get_args(NormScope))
        parts = _parts(in_type, scope, kind, num_groups)
        kind = _kind_of(parts[0], scope) if kind is None else check_option("kind", kind, get_args(NormKind))
        poses = None
        if scope == "pose":
            check_regular("in_type", in_type, 'scope="pose", the norm over the fields of each pose,')
            poses = in_type.gspace.fibergroup.order()
        field, mean = channels_of(in_type)
        alike = _alike(in_type, scope) if kind == "fields" else None
        bounds = np.cumsum([part.size for part in parts])[:-1]
        permuted = [int(of_part.sum()) for of_part in np.split(mean, bounds)]
        if not _over_positions(in_type, scope):
            for part, number in zip(parts, permuted, strict=True):
                _check_varies(part, kind, number, 1 if poses is None else poses)
        varied = all(_varies(_left(p, kind, n), kind, n) for p, n in zip(parts, permuted, strict=True))
        group = None if num_groups == 1 else np.repeat(np.arange(num_groups), [part.size for part in parts])
        options: dict[str, Any] = {"poses": poses, "alike": alike, "group": group, "varied": varied}
        invariants, eps = invariant_vectors(in_type), check_eps(eps)
        plain = LayerNorm(field, mean, invariants, scope=scope, eps=eps, affine=affine, kind=kind, **options)
        super().__init__(in_type, in_type, plain)
        self.pointwise = scope != "sample"


def _over_positions(in_type: FieldType, scope: NormScope) -> bool:
    """Whether the statistics are over positions as well."""
    return scope == "sample" and in_type.gspace.dimensionality > 0


def _kind_of(in_type: FieldType, scope: NormScope) -> NormKind:
    """The norm of a type: with a mean if that is over regular fields, and leaves more of them than a sign."""
    several = (len(in_type) if scope == "pose" else in_type.size) > 2 or _over_positions(in_type, scope)
    return "layer" if several and regular_fields(in_type) == len(in_type) else "rms"


def _alike(in_type: FieldType, scope: NormScope) -> np.ndarray:
    """For each channel the number of the component that it is, of which representation."""
    if scope == "pose":
        raise ValueError('kind: got "fields" with scope="pose", whose mean is over the fields as well; needed "layer"')
    alike, start = np.zeros(in_type.size, dtype=np.int64), 0
    for representation, columns in columns_of(in_type):
        if len(columns) == 1:
            raise ValueError(
                f'in_type: got a single field of {representation.name}, which kind="fields" makes zero: it is its own '
                "mean"
            )
        alike[columns] = start + np.arange(representation.size)
        start += representation.size
    return alike


def _parts(in_type: FieldType, scope: NormScope, kind: NormKind | None, num_groups: int) -> list[FieldType]:
    """The types of the groups of fields."""
    if check_int("num_groups", num_groups) == 1:
        return [in_type]
    for name, value, others in (("scope", scope, "pose"), ("kind", kind, "fields")):
        if value == others:
            raise ValueError(f'num_groups: got {num_groups} with {name}="{value}", whose statistics have no groups')
    if len(in_type) % num_groups:
        raise ValueError(f"num_groups: got {num_groups}, needed a number that divides the {len(in_type)} fields")
    fields, each = in_type.representations, len(in_type) // num_groups
    return [FieldType(in_type.gspace, fields[i : i + each]) for i in range(0, len(fields), each)]


def _check_varies(in_type: FieldType, kind: NormKind, permuted: int, poses: int) -> None:
    """Check that the statistics are of enough numbers: what is left has a direction."""
    left = _left(in_type, kind, permuted, poses)
    if _varies(left, kind, permuted):
        return
    lost = "makes the only scalar zero, which is its own mean" if left != 1 else "makes a sign"
    needed = 'kind="rms", which has no mean' if kind != "rms" else 'scope="sample" on a grid, or a FieldBatchNorm'
    raise ValueError(f'in_type: got {in_type}, of which kind="{kind}" {lost}; needed more fields, or {needed}')


def _left(in_type: FieldType, kind: NormKind, permuted: int, poses: int = 1) -> int:
    """How many numbers a norm leaves free of fields at a position, or pose."""
    left = in_type.size // poses
    if kind == "fields":
        left -= sum(representation.size for representation, _ in columns_of(in_type))
    elif kind == "layer":
        left -= permuted > 0
    return left


def _varies(left: int, kind: NormKind, permuted: int) -> bool:
    return left >= 2 and not (kind == "layer" and permuted == 1)


def field_of_channels(in_type: FieldType) -> np.ndarray:
    """The number of the field of each channel, ``(size,)``."""
    return np.repeat(np.arange(len(in_type)), [r.size for r in in_type.representations])


def channels_of(in_type: FieldType) -> tuple[np.ndarray, np.ndarray]:
    """The number of the field of each channel, and 1 where a mean may be taken from it, else 0; both ``(size,)``."""
    mean = np.zeros(in_type.size)
    for segment in frames(in_type, group=generic_fibers(in_type.gspace)):
        products = segment.matrices @ np.swapaxes(segment.matrices, 1, 2)
        if not np.allclose(products, np.eye(products.shape[-1]), atol=1e-8):
            channel = int(segment.columns[0, 0])
            raise ValueError(
                f"in_type: the field at channel {channel} of {in_type} is not orthogonal; its norm is not invariant"
            )
        if segment.permutation is not None:
            mean[segment.columns.ravel()] = 1.0
    return field_of_channels(in_type), mean


def check_eps(eps: Any) -> float:
    """``eps``, if it is a number that is not negative."""
    if isinstance(eps, bool) or not isinstance(eps, Real) or not float(eps) >= 0:
        raise ValueError(f"eps: got {eps!r}, needed a number that is not negative")
    return float(eps)


BlockNorm = Literal["layer", "rms", "fields", "batch"]
"""The norms of a block: :class:`FieldLayerNorm` of any kind, or :class:`FieldBatchNorm`."""


class FieldBatchNorm(PlainModule):
    r"""Batch normalisation of any fields, on grids, at points and without a space.

    For every field f, with the mean over the batch, the positions and the components of the field,

    .. math:: y_f = \gamma_f \, \frac{x_f - \mu_f}{\sqrt{\operatorname{mean}(x_f - \mu_f)^2 + \epsilon}} + \beta

    The mean :math:`\mu_f` is that of permutation fields (regular, quotient, trivial), whose sum no element changes; it
    is 0 of other fields, whose mean square is invariant because the representations are orthogonal. :math:`\gamma` is
    one number a field and :math:`\beta` one a trivial component, both learned. In eval mode it takes the running means
    of both statistics. On scalars it is PyTorch's batch norm, on regular fields escnn's ``InnerBatchNorm``.

    Args:
        in_type: the type of the input and of the output.
        eps: added to the mean square.
        momentum: the weight of a batch in the running means.
        affine: whether to learn :math:`\gamma` and :math:`\beta`.

    Shape:
        ``(B, in_type.size, *space)`` to the same; ``(N, in_type.size)`` at scattered points.

    Raises:
        ValueError: a representation in ``in_type`` that is not orthogonal, a negative ``eps``, or a ``momentum`` that
            is none; on application in training, a single position.

    Example:
        >>> import torch
        >>> from escnn_attention import FieldBatchNorm
        >>> from escnn import gspaces, nn
        >>> g = gspaces.rot2dOnR2(4)
        >>> fields = nn.FieldType(g, 2 * [g.regular_repr] + [g.irrep(1)])
        >>> y = FieldBatchNorm(fields)(fields(5 + 3 * torch.randn(8, 10, 7, 7))).tensor
        >>> bool(y[:, :4].mean().abs() < 1e-5), bool((y[:, 8:].square().mean() - 1).abs() < 1e-3)
        (True, True)

    Source: Ioffe and Szegedy, "Batch Normalization", ICML 2015; Weiler and Cesa, "General E(2)-Equivariant Steerable
    CNNs", NeurIPS 2019, for fields.
    """

    plain: BatchNorm
    pointwise = True

    def __init__(self, in_type: FieldType, *, eps: float = 1e-5, momentum: float = 0.1, affine: bool = True):
        check_type("in_type", in_type)
        if isinstance(momentum, bool) or not isinstance(momentum, (int, float)) or not 0 < momentum <= 1:
            raise ValueError(f"momentum: got {momentum!r}, needed a weight in (0, 1]")
        field, mean = channels_of(in_type)
        plain = BatchNorm(field, mean, invariant_vectors(in_type), eps=check_eps(eps), momentum=momentum, affine=affine)
        super().__init__(in_type, in_type, plain)


def norm_of(
    field_type: FieldType, kind: BlockNorm | None, scope: NormScope = "position", eps: float = 1e-5
) -> EquivariantModule:
    """The norm of this kind, or of the type; the scope is that of the other norms than batch norm."""
    if kind == "batch":
        return FieldBatchNorm(field_type, eps=eps)
    return FieldLayerNorm(field_type, scope, kind=kind, eps=eps)


def check_norm_kind(norm_kind: Any, norm_scope: NormScope | None = None) -> BlockNorm | None:
    """``norm_kind``, if there is such a norm, and no scope was given for a batch norm, which has its own."""
    if norm_kind is None:
        return None
    kind: BlockNorm = check_option("norm_kind", norm_kind, get_args(BlockNorm))
    if kind == "batch":
        check_unused("norm_scope", norm_scope, None, "batch norm is over batch and positions")
    return kind
