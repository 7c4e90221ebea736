"""Batch normalisation of feature fields."""

from __future__ import annotations

from typing import Any, Literal, get_args

from escnn.nn import EquivariantModule, FieldType

from escnn_attention._checks import check_option, check_unused
from escnn_attention.groups.fibers import invariant_vectors
from escnn_attention.nn.arguments import check_type
from escnn_attention.nn.layer_norm import FieldLayerNorm, channels_of, check_eps
from escnn_attention.nn.module import PlainModule
from escnn_attention.plain.batch_norm import BatchNorm
from escnn_attention.plain.layer_norm import NormScope

__all__ = ["BlockNorm", "FieldBatchNorm", "check_norm_kind", "norm_of"]

BlockNorm = Literal["layer", "rms", "fields", "batch"]
"""The norms of a block: :class:`FieldLayerNorm` of any kind, or :class:`FieldBatchNorm`."""


class FieldBatchNorm(PlainModule):
    r"""Batch normalisation of any fields, on grids, at points and without a space.

    For every field f, with the mean over the batch, the positions and the components of the field,

    .. math:: y_f = \gamma_f \, \frac{x_f - \mu_f}{\sqrt{\operatorname{mean}(x_f - \mu_f)^2 + \epsilon}} + \beta

    The mean :math:`\mu_f` is that of permutation fields (regular, quotient, trivial), whose sum no element changes; it
    is 0 of other fields, whose mean square is invariant because the representations are orthogonal.
    :math:`\gamma` is one number a field and :math:`\beta` one a trivial component, both learned. In eval mode it takes
    the running means of both statistics. On scalars it is PyTorch's batch norm, on regular fields escnn's
    ``InnerBatchNorm``.

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

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.plain.extra_repr()}"


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
