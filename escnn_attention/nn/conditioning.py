"""Norms and gates of feature fields whose numbers depend on a condition, such as a diffusion step or a label."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from escnn.nn import EquivariantModule, FieldType, GeometricTensor
from torch import Tensor

from escnn_attention._checks import check_int
from escnn_attention.geometry.cache import kept
from escnn_attention.geometry.neighbours import numbers_of
from escnn_attention.groups.fibers import invariant_vectors
from escnn_attention.nn.arguments import check_type
from escnn_attention.nn.module import PlainModule, check_field, check_input, check_no_batch
from escnn_attention.nn.norms import BlockNorm, FieldLayerNorm, field_of_channels, norm_of
from escnn_attention.plain.conditioning import ConditionedNorm, Modulation
from escnn_attention.plain.norms import NormKind, NormScope


class _Conditioned(PlainModule):
    """A pointwise module that takes a condition, of ``condition`` components, with the features."""

    condition: int

    def forward(  # type: ignore[override]
        self, input: GeometricTensor, condition: Tensor | GeometricTensor, batch: Tensor | None = None
    ) -> GeometricTensor:
        """Apply the module to a feature field, under a condition.

        Args:
            input: features of type ``in_type``, on a grid or at points.
            condition: invariant vectors of n components. On grids and sequences ``(B, n)``, or ``(B, n, *space)`` for
                one at each position. At points ``(N, n)``, one for each point, or, with ``batch``, ``(clouds, n)``, and
                without ``(1, n)``. Or n trivial fields at the same positions.
            batch: ``(N,)``, the number of the cloud of each point; None for a single cloud, and on grids.

        Raises:
            TypeError: ``condition`` is no tensor, or of another precision than the features.
            ValueError: it has another shape or device, or fields that are not trivial; or a row for each point and for
                each cloud, of which each has one, in another order.
        """
        check = check_field if self.pointwise else check_input
        x = check(input, self.in_type, self)
        rows = check_condition(condition, self.condition, x, batch)
        if isinstance(condition, GeometricTensor):
            batch = None
        return GeometricTensor(self.plain(x.tensor, rows, batch), self.out_type, x.coords)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, n={self.condition}"


class ConditionedFieldNorm(_Conditioned):
    r"""Layer normalisation whose scale and shift depend on a condition: AdaLN, for fields.

    .. math:: y_f = (1 + \gamma_f(c))\, \mathrm{LN}(x)_f + \sum_i \beta_i(c)\, v_i, \qquad
        (\gamma, \beta)(c) = W c + b

    LN is the :class:`FieldLayerNorm` without parameters. The condition c is a vector of invariants, such as the
    embedding of a diffusion step or of a label. All components of a field share one scale, and the shift is along the
    vectors :math:`v_i` that no element moves, so that the layer commutes with the group for every W and b. These are
    zero at first, when the layer is LN.

    Args:
        in_type: the type of the input and of the output: any fields whose representations are orthogonal.
        n: the number of components of the condition.
        scope: over what the statistics are, as in :class:`FieldLayerNorm`.
        kind: of the norm, as in :class:`FieldLayerNorm`. The shift is there for every kind.
        eps: added to the mean square.
        num_groups: the number of groups of fields with statistics of their own, as in :class:`FieldLayerNorm`.

    Shape:
        ``(B, in_type.size, *space)`` with a condition ``(B, n)`` or ``(B, n, *space)`` to the same;
        ``(N, in_type.size)`` at scattered points with a condition ``(clouds, n)`` or ``(N, n)``.

    Raises:
        ValueError: ``n`` is not positive, or as :class:`FieldLayerNorm`.

    Example:
        >>> import torch
        >>> from escnn_attention import ConditionedFieldNorm
        >>> from escnn import gspaces, nn
        >>> g = gspaces.rot2dOnR2(4)
        >>> fields = nn.FieldType(g, 4 * [g.regular_repr] + 2 * [g.irrep(1)])
        >>> norm = ConditionedFieldNorm(fields, 8)
        >>> norm(fields(torch.randn(3, 20, 7, 7)), torch.randn(3, 8)).shape
        torch.Size([3, 20, 7, 7])

    Source: Perez et al., "FiLM: Visual Reasoning with a General Conditioning Layer", AAAI 2018; Peebles and Xie,
    "Scalable Diffusion Models with Transformers", ICCV 2023, Section 3.2 (adaLN).
    """

    plain: ConditionedNorm

    def __init__(
        self,
        in_type: FieldType,
        n: int,
        scope: NormScope = "position",
        *,
        kind: NormKind | None = None,
        eps: float = 1e-5,
        num_groups: int = 1,
    ):
        norm = FieldLayerNorm(in_type, scope, kind=kind, eps=eps, affine=False, num_groups=num_groups)
        modulation = Modulation(field_of_channels(in_type), invariant_vectors(in_type), check_int("n", n), offset=1.0)
        super().__init__(in_type, in_type, ConditionedNorm(norm.plain, modulation))
        self.condition = n
        self.pointwise = norm.pointwise

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.plain.norm.extra_repr().rpartition(', ')[0]}"


class ConditionedGate(_Conditioned):
    r"""A gate for every field that depends on a condition, and is closed at first: :math:`y_f = (W c + b)_f\, x_f`.

    At the end of a residual branch it is the gate of adaLN-Zero: W and b are zero at first, when the block is its
    shortcut. All components of a field have the same gate, which commutes with every representation.

    Args:
        in_type: the type of the input and of the output: any fields.
        n: the number of components of the condition.

    Shape:
        ``(B, in_type.size, *space)`` with a condition ``(B, n)`` or ``(B, n, *space)`` to the same;
        ``(N, in_type.size)`` at scattered points with a condition ``(clouds, n)`` or ``(N, n)``.

    Example:
        >>> import torch
        >>> from escnn_attention import ConditionedGate
        >>> from escnn import gspaces, nn
        >>> g = gspaces.rot2dOnR2(4)
        >>> fields = nn.FieldType(g, [g.regular_repr, g.irrep(1)])
        >>> gate = ConditionedGate(fields, 8)
        >>> bool(gate(fields(torch.randn(3, 6, 7, 7)), torch.randn(3, 8)).tensor.any())
        False

    Source: Peebles and Xie, "Scalable Diffusion Models with Transformers", ICCV 2023, Section 3.2 (adaLN-Zero).
    """

    plain: Modulation
    pointwise = True

    def __init__(self, in_type: FieldType, n: int):
        field = field_of_channels(check_type("in_type", in_type))
        super().__init__(in_type, in_type, Modulation(field, None, check_int("n", n), offset=0.0))
        self.condition = n


def check_condition(condition: Any, n: int, x: GeometricTensor, batch: Tensor | None = None) -> Tensor:
    """The tensor of a condition of n components, if it fits features; see :class:`ConditionedFieldNorm`."""
    if isinstance(condition, GeometricTensor):
        return _checked_fields(condition, n, x)
    if not isinstance(condition, Tensor):
        raise TypeError(f"condition: got {type(condition).__name__}, needed a tensor or a GeometricTensor")
    _check_numbers(condition, x.tensor)
    got, shape = tuple(condition.shape), x.tensor.shape
    if x.coords is None:
        check_no_batch(x, batch)
        if got not in ((shape[0], n), (shape[0], n, *shape[2:])):
            raise ValueError(f"condition: got shape {got}, needed {(shape[0], n)}, or {(shape[0], n, *shape[2:])}")
        return condition
    if len(got) != 2 or got[1] != n:
        raise ValueError(f"condition: got shape {got}, needed (clouds, {n}) with batch, or {(shape[0], n)}")
    _check_rows(got[0], shape[0], batch)
    return condition


def _check_rows(rows: int, points: int, batch: Tensor | None) -> None:
    """There are as many conditions as points or clouds, and it is clear of which."""
    if batch is None:
        if rows not in (1, points):
            raise ValueError(
                f"condition: got {rows} rows for a single cloud of {points} points, needed 1 or {points}; or batch, "
                "the number of the cloud of each point"
            )
        return
    clouds, in_order = kept(_clouds, batch)
    if rows == points:
        if clouds == points and not in_order:
            raise ValueError(
                f"condition: got {rows} rows, and there are as many points as clouds, in another order; needed "
                "condition[batch] as trivial fields at the points, a GeometricTensor"
            )
    elif rows < clouds:
        raise ValueError(f"condition: got {rows} rows, needed one for each of {clouds} clouds or {points} points")


def _clouds(batch: Tensor) -> tuple[int, bool]:
    """The number of clouds, and whether each has one point, in their order."""
    numbers = numbers_of("batch", batch)
    in_order = torch.equal(numbers, torch.arange(len(numbers), device=numbers.device))
    return (int(numbers.max()) + 1 if len(numbers) else 0), in_order


def _checked_fields(condition: GeometricTensor, n: int, x: GeometricTensor) -> Tensor:
    """The tensor of trivial fields, if they are at the positions of features."""
    others = sorted({r.name for r in condition.type.representations if not r.is_trivial()})
    if others:
        raise ValueError(f"condition: got fields of {', '.join(others)}, needed trivial ones, which no element changes")
    if condition.type.gspace != x.type.gspace:
        raise ValueError(
            f"condition: its gspace is {condition.type.gspace.name}, needed that of input, {x.type.gspace.name}"
        )
    got, needed = tuple(condition.tensor.shape), (x.tensor.shape[0], n, *x.tensor.shape[2:])
    if got != needed or (condition.coords is None) != (x.coords is None):
        where = "on a grid" if condition.coords is None else "at points"
        raise ValueError(f"condition: got fields {where} of shape {got}, needed {needed} at the positions of input")
    _check_numbers(condition.tensor, x.tensor)
    return condition.tensor


def _check_numbers(condition: Tensor, x: Tensor) -> None:
    """A condition is of the precision of the features, and on their device."""
    if condition.device != x.device:
        raise ValueError(f"condition: got a tensor on {condition.device}, needed one on {x.device}, as input is")
    if condition.dtype != x.dtype and not torch.is_autocast_enabled(x.device.type):
        raise TypeError(f"condition: got {condition.dtype}, needed {x.dtype}, as input has")


def check_condition_size(condition: Any, norm_kind: BlockNorm | None, norm: str = "pre") -> int | None:
    """The number of components of a condition, if a block with such norms can have one; None without."""
    if condition is None:
        return None
    if norm != "pre" or norm_kind == "batch":
        got = f"norm={norm!r}" if norm != "pre" else 'norm_kind="batch"'
        raise ValueError(f'condition: got {condition!r} with {got}, needed norm="pre" with layer norms')
    return check_int("condition", condition)


def block_norms(
    kind: BlockNorm | None, scope: NormScope, eps: float, condition: int | None
) -> Callable[[FieldType], EquivariantModule]:
    """What makes the norms of a block, of given types."""
    if condition is None or kind == "batch":
        return partial(norm_of, kind=kind, scope=scope, eps=eps)
    return partial(ConditionedFieldNorm, n=condition, scope=scope, kind=kind, eps=eps)


def condition_of(
    block: EquivariantModule, size: int | None, condition: Any, x: GeometricTensor, batch: Tensor | None = None
) -> Tensor:
    """The tensor of the condition of a block, if it needs one and got one that fits its features."""
    name = type(block).__name__
    if size is None:
        raise ValueError(f"condition: {name} got one and has none; leave it out, or make the block with condition=n")
    if condition is None:
        raise ValueError(f"condition: {name} got None, needed vectors of {size} components: it has condition={size}")
    return check_condition(condition, size, x, batch)
