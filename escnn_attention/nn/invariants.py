"""Invariants of feature fields: class tokens and power spectra."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import numpy as np
from escnn.nn import FieldType, GeometricTensor
from torch import Tensor

from escnn_attention._checks import check_int, check_option
from escnn_attention.geometry.cache import checked
from escnn_attention.groups.fibers import columns_of, fibers, frames
from escnn_attention.groups.samples import Samples, as_samples
from escnn_attention.nn.arguments import check_type
from escnn_attention.nn.module import (
    MaskedModule,
    PlainModule,
    Wrapper,
    check_cloud,
    check_input,
    check_mask,
    check_points,
)
from escnn_attention.nn.norms import channels_of
from escnn_attention.plain.invariants import AttentionPool as PlainAttentionPool
from escnn_attention.plain.invariants import PointAttentionPool as PlainPointAttentionPool
from escnn_attention.plain.invariants import PowerSpectrum as PlainPowerSpectrum
from escnn_attention.plain.invariants import SpectrumKind
from escnn_attention.plain.projections import ToPoses


class AttentionPool(MaskedModule):
    r"""Class tokens: learned queries attend to all positions and poses of a feature map, and compute invariants.

    .. math::
        y_t = W \Big( \sum_{x, \hat h} \mathrm{softmax}_{(x, \hat h)}\big( \langle q_t, k(x, \hat h) \rangle / \sqrt C
            \big)\, v(x, \hat h) \Big)_{\text{heads}} + b

    with keys and values as in :class:`GroupSelfAttention`. A token is equal in every pose, so a group element permutes
    its keys, positions and poses, and the output is invariant. As the last stage of an
    :class:`~escnn_attention.models.EquivariantClassifier` it replaces the maximum over the poses and the mean over the
    positions.

    Args:
        in_type: the type of the input: any fields.
        out: the number of invariants of each token.
        num_heads: the number M of heads.
        head_fields: the number C of regular fields of a head.
        tokens: the number of tokens.
        samples: which elements stand for a continuous fiber group; None where it is finite.

    Shape:
        ``(B, in_type.size, *space)`` to ``(B, tokens * out, 1, ..., 1)``: scalar fields at a single position.

    Example:
        >>> import torch
        >>> from escnn_attention import AttentionPool
        >>> from escnn import gspaces, nn
        >>> g = gspaces.rot2dOnR2(4)
        >>> fields = nn.FieldType(g, [g.regular_repr, g.irrep(1)])
        >>> AttentionPool(fields, 10, num_heads=2)(fields(torch.randn(3, 6, 7, 7))).shape
        torch.Size([3, 10, 1, 1])

    Source: Touvron et al., "Going deeper with Image Transformers", ICCV 2021, Section 3 (class attention).
    """

    plain: PlainAttentionPool

    def __init__(
        self,
        in_type: FieldType,
        out: int,
        num_heads: int = 1,
        *,
        head_fields: int = 8,
        tokens: int = 1,
        samples: Samples | int | None = None,
    ):
        of_tokens = (*_read(in_type, num_heads, head_fields, samples), check_int("tokens", tokens))
        scalars = FieldType(in_type.gspace, tokens * check_int("out", out) * [in_type.gspace.trivial_repr])
        super().__init__(in_type, scalars, PlainAttentionPool(*of_tokens, out))

    def attention_maps(self, input: GeometricTensor, mask: Tensor | None = None) -> Tensor:
        """The attention maps of the tokens.

        Args:
            input: features of type ``in_type``.
            mask: ``(B, *space)``, False for positions that are not there, which get zeros.

        Returns:
            Probabilities of shape ``(B, num_heads, tokens, poses, *space)``. Each map sums to 1 over the poses and the
            space.
        """
        x = check_input(input, self.in_type, self)
        return self.plain.attention_maps(x.tensor, None if mask is None else check_mask(mask, x.tensor))

    def _output_space(self, space: Sequence[int]) -> Sequence[int]:
        return [1] * len(space)


class PointAttentionPool(Wrapper):
    r"""Class tokens of clouds: learned queries attend to all points and poses of a cloud, and compute invariants.

    .. math::
        y_t = W \Big( \sum_{i, \hat h} \mathrm{softmax}_{(i, \hat h)}\big( \langle q_t, k_i(\hat h) \rangle / \sqrt C
            + \log\mu_i \big)\, v_i(\hat h) \Big)_{\text{heads}} + b

    with keys and values as in :class:`PointSelfAttention`. It is :class:`AttentionPool` between points, with the same
    arguments: a pooling that selects, instead of a mean. Positions enter only through the features.

    Shape:
        ``(N, in_type.size)`` with ``coords`` ``(N, d)`` to ``(B, tokens * out)`` for B clouds: a tensor.

    Example:
        >>> import torch
        >>> from escnn_attention import PointAttentionPool
        >>> from escnn import gspaces, nn
        >>> g = gspaces.rot2dOnR3(4)
        >>> fields = nn.FieldType(g, [g.regular_repr, g.irrep(1)])
        >>> x = nn.GeometricTensor(torch.randn(7, 6), fields, torch.randn(7, 3))
        >>> pool = PointAttentionPool(fields, 10, num_heads=2)
        >>> pool(x, batch=torch.tensor([0, 0, 0, 0, 1, 1, 1])).shape
        torch.Size([2, 10])

    Source: Touvron et al., "Going deeper with Image Transformers", ICCV 2021, Section 3 (class attention); Lee et al.,
    "Set Transformer", ICML 2019, Section 3.2 (pooling by multihead attention).
    """

    plain: PlainPointAttentionPool

    def __init__(
        self,
        in_type: FieldType,
        out: int,
        num_heads: int = 1,
        *,
        head_fields: int = 8,
        tokens: int = 1,
        samples: Samples | int | None = None,
    ):
        super().__init__()
        of_tokens = (*_read(in_type, num_heads, head_fields, samples), check_int("tokens", tokens))
        self.plain = PlainPointAttentionPool(*of_tokens, check_int("out", out))
        self.in_type = in_type

    def forward(
        self,
        x: GeometricTensor,
        batch: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        measure: Tensor | None = None,
    ) -> Tensor:
        """Apply the tokens to features at points.

        Args:
            x, batch, mask, measure: as in :meth:`PointSelfAttention.forward`.
        """
        x = check_points(x, self.in_type, self)
        checked(check_cloud, x.coords, None, batch, mask, measure)
        y: Tensor = self.plain(x.tensor, x.coords, batch, mask, measure)
        return y

    def extra_repr(self) -> str:
        return f"{self.in_type}, tokens={self.plain.tokens.shape[1]}, out={self.plain.readout.out_features}"


def _read(
    in_type: FieldType, num_heads: int, head_fields: int, samples: Samples | int | None
) -> tuple[ToPoses, np.ndarray | None]:
    """The map of fields to keys and values, and the measure of their poses."""
    group = fibers(check_type("in_type", in_type).gspace, as_samples(samples))
    groups = 2 * check_int("num_heads", num_heads)
    fields = groups * check_int("head_fields", head_fields)
    # A bias of the keys adds the same to all scores of a token; values have one in the readout.
    return ToPoses(frames(in_type, group=group), in_type.size, fields, group.order, groups=groups), group.log_measure


class PowerSpectrum(PlainModule):
    r"""The length of every irreducible part of every field, which is invariant.

    A field of type :math:`\rho = Q\,(\bigoplus_i \psi_i)\,Q^{-1}` has the parts :math:`\hat f_i` of
    :math:`Q^{-1} f`, and

    .. math:: y_i = \hat f_i \ \text{ where } \psi_i \text{ is trivial}, \qquad y_i = \|\hat f_i\| \ \text{ elsewhere.}

    For regular fields it is the power spectrum of a function on the group, for irreps the norm. A linear map or a
    network of the invariants is a head for features of any type.

    Args:
        in_type: the type of the input: any fields whose representations are orthogonal.
        kind: ``"norm"``, or ``"square"`` for the mean square of the coordinates of a part, which is smooth at zero.

    Attributes:
        out_type: one scalar field for each irreducible part, field by field in the order of escnn's ``irreps``.

    Shape:
        ``(B, in_type.size, *space)`` to ``(B, out_type.size, *space)``; ``(N, in_type.size)`` to ``(N, out_type.size)``
        at scattered points.

    Raises:
        ValueError: an unknown kind, or a representation that is not orthogonal.

    Example:
        >>> import torch
        >>> from escnn_attention import PowerSpectrum
        >>> from escnn import gspaces, nn
        >>> g = gspaces.rot2dOnR2(4)
        >>> fields = nn.FieldType(g, [g.trivial_repr, g.irrep(1)])
        >>> PowerSpectrum(fields)(fields(torch.tensor([-2.0, 3.0, 4.0]).view(1, 3, 1, 1))).tensor.flatten()
        tensor([-2.,  5.])

    Source: Nordström et al., "Stronger ViTs With Octic Equivariance", 2025, whose invariant heads read such norms;
    Kakarala, "The bispectrum as a source of phase-sensitive invariants", 2012, for power spectra on groups.
    """

    plain: PlainPowerSpectrum
    pointwise = True

    def __init__(self, in_type: FieldType, kind: SpectrumKind = "norm"):
        check_type("in_type", in_type)
        check_option("kind", kind, get_args(SpectrumKind))
        channels_of(in_type)  # orthogonal, all of them
        counts = [len(r.irreps) for r in in_type.representations]
        starts = np.concatenate([[0], np.cumsum(counts)])
        first_channels = {int(start): i for i, start in enumerate(in_type.fields_start)}
        parts, group = [], in_type.fibergroup
        for representation, columns in columns_of(in_type):
            irreps = [group.irrep(*name) for name in representation.irreps]
            of_coordinates = np.repeat(np.arange(len(irreps)), [irrep.size for irrep in irreps])
            trivial = np.array([irrep.is_trivial() for irrep in irreps])
            fields = [first_channels[int(column)] for column in columns[:, 0]]
            places = starts[fields][:, None] + np.arange(len(irreps))
            parts.append((columns, representation.change_of_basis_inv, of_coordinates, trivial, places))
        scalars = FieldType(in_type.gspace, int(starts[-1]) * [in_type.gspace.trivial_repr])
        super().__init__(in_type, scalars, PlainPowerSpectrum(parts, kind))
