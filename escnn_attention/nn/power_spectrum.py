"""Invariants of fields of any type: the power spectrum."""

from __future__ import annotations

from typing import get_args

import numpy as np
from escnn.nn import FieldType

from escnn_attention._checks import check_option
from escnn_attention.groups.fibers import columns_of
from escnn_attention.nn.arguments import check_type
from escnn_attention.nn.layer_norm import channels_of
from escnn_attention.nn.module import PlainModule
from escnn_attention.plain.power_spectrum import PowerSpectrum as PlainPowerSpectrum
from escnn_attention.plain.power_spectrum import SpectrumKind

__all__ = ["PowerSpectrum"]


class PowerSpectrum(PlainModule):
    r"""The length of every irreducible part of every field, which no element changes.

    A field of type :math:`\rho = Q\,(\bigoplus_i \psi_i)\,Q^{-1}` has the parts :math:`\hat f_i` of
    :math:`Q^{-1} f`, and

    .. math:: y_i = \hat f_i \ \text{ where } \psi_i \text{ is trivial}, \qquad y_i = \|\hat f_i\| \ \text{ elsewhere.}

    Of regular fields it is the power spectrum of a function on the group; of fields that are irreps their norms. A
    linear map of the invariants, or a network of them, is a head for features of any type.

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
        first_channels = {int(start): i for i, start in enumerate(_starts(in_type))}
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

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.plain.extra_repr()}"


def _starts(field_type: FieldType) -> np.ndarray:
    """The first channel of each field."""
    return np.concatenate([[0], np.cumsum([r.size for r in field_type.representations])[:-1]])
