"""Transformers on point clouds."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from escnn.gspaces import GSpace
from escnn.nn import EquivariantModule, FieldType, IdentityModule

from escnn_attention._checks import check_bool, check_int, check_option, check_sequence
from escnn_attention.encodings import Encoding
from escnn_attention.encodings.pair_kernel import PairKernel
from escnn_attention.geometry.relations import Relation
from escnn_attention.groups.fibers import count_irreps, fibers, frames, invariant_vectors
from escnn_attention.groups.samples import Samples, as_samples
from escnn_attention.models.cloud_network import CloudNetwork
from escnn_attention.models.convolutions import field_type_of, regular_type
from escnn_attention.models.symmetric_tensors import symmetric_tensor_repr
from escnn_attention.nn.arguments import check_options, check_passed_on
from escnn_attention.nn.heads import is_scalar
from escnn_attention.nn.invariants import PowerSpectrum
from escnn_attention.nn.module import PlainModule
from escnn_attention.nn.norms import norm_of
from escnn_attention.nn.pointwise import depth_rates, shortcut_of
from escnn_attention.nn.transformer import PointTransformerBlock
from escnn_attention.plain.cloud_pooling import Pool
from escnn_attention.plain.invariants import PowerSpectrum as PlainPowerSpectrum
from escnn_attention.plain.point_network import EquivariantHead, InvariantHead, Readout, SymmetricTensors
from escnn_attention.plain.projections import FromPoses, ToPoses

# Arguments of the network itself, and of calls with a condition or a memory, which it does not have.
_OWN = ("num_heads", "encoding", "relation", "samples", "condition", "cross_attention")


class PointTransformer(CloudNetwork):
    r"""A transformer on point clouds: an embedding, blocks, a norm, and a head.

    .. math::
        f^0_i &= W x_i, \qquad f^{l+1} = \mathrm{Block}_l(f^l), \qquad
        z_i(h) = \sigma\big( (W' \, \mathrm{LN}(f^L_i))(h) \big) \\
        y &= \mathrm{MLP}\Big( \operatorname{pool}_i \operatorname{pool}_h z_i(h) \Big)
        \qquad\text{or}\qquad y = \operatorname{pool}_i \sum_h \rho(h)\, W''\, z_i(h)

    The blocks are :class:`PointTransformerBlock`. The first kind of head gives invariants, the second fields of any
    type: vectors, tensors. Without the pooling over the points the output is at every point. Equivariance is exact for
    every element of a finite fiber group, under translations and permutations; for a continuous one the error falls
    with the number of ``samples``. Scalar features are embedded as scalars, which the first block maps to fields.

    Softmax attention averages its values: features that are equal at all points remain equal, for any geometry. For
    clouds without features use ``positions=True``, ``attention={"kernel_features": 8}`` (attentive convolution) or
    ``{"normalization": "count"}``.

    Args:
        gspace: the symmetry, over R^2 or R^3.
        in_type: the type of the features; the number of scalars; or numbers of scalars and vectors by name and in their
            order, such as ``{"scalar": 1, "vector": 2}``.
        out_type: a number of invariants; or the type of an equivariant output, for which ``"vector"`` is one vector and
            ``"symmetric tensor"`` one symmetric d × d matrix.
        fields: the regular fields of the blocks; numbers of scalars and vectors, ``{"scalar": 8, "vector": 8}``; or the
            type of their features, which a continuous group needs, for example several times
            ``fibergroup.bl_regular_representation(2)``.
        num_blocks: the number of blocks.
        num_heads: of each attention.
        attention: further arguments of :class:`PointTransformerBlock`, such as ``radius``, ``num_neighbours``,
            ``cutoff``, ``period``, ``query``, ``keys``, ``length_scale``, ``normalization``, ``kernel_features``,
            ``hidden_fields``, ``dropout``, ``layer_scale``, ``norm_kind`` and ``norm_eps`` (of the last norm, too),
            ``qk_norm``, ``edge_dim`` (with ``edge_attr`` on application), ``backend``; ``drop_path`` is that of the
            last block, and from 0 of the first it rises by equal steps.
        encoding: of each attention. Each layer gets a copy of its own.
        relation: likewise.
        positions: whether the features get one more vector field: the position relative to the mean of the cloud, in
            units of the ``length_scale`` of the attention (or 1).
        even_in: the fields of ``in_type``, by their numbers from 0, on whose common sign the output does not depend:
            charges, or eigenvectors. The output is then :math:`\tfrac12 (y(x) + y(Sx))`, at twice the cost, where S
            changes the sign of all of them. It adds no parameters, and can be set for a trained network.
        samples: the samples of a continuous fiber group.
        pool: over the points of a cloud, ``"mean"``, ``"sum"`` or ``"max"`` (invariants only); None for an output at
            every point.
        readout: whether the MLP acts on the pooled features of ``"clouds"``, or at ``"points"`` before they are pooled,
            which makes sums over the points extensive.
        head: further options of the head. ``"fields"``: the fields of z, by default as many as ``fields`` has scalars,
            each regular field with one. An invariant head also takes ``"layers"``: the hidden layers of the MLP, each
            as wide as z, by default 1; ``"poses"``: the pooling of z over the poses, ``"mean"`` or ``"max"``, or
            ``"spectrum"``, the :class:`~escnn_attention.PowerSpectrum` of f in place of z, which is exact for
            continuous groups, too; and ``"batch_norm"``: whether invariants go through a batch norm before the MLP.
            Those of different clouds differ little, and are learned from faster; let the learning rate fall to zero.

    Shape:
        ``(N, in_type.size)`` at points ``(N, d)`` to ``(B, out_type.size)`` for B clouds, or with ``pool=None`` to
        ``(N, out_type.size)``. A symmetric tensor is ``(..., d, d)``.

    Raises:
        ValueError: another gspace, ``pool="max"`` for an equivariant output, an unknown option, a field that there is
            not.

    Example:
        >>> import torch
        >>> from escnn_attention.models import PointTransformer
        >>> from escnn import gspaces, nn
        >>> g = gspaces.dihedralOnR3(2)
        >>> network = PointTransformer(g, in_type=5, out_type=3, fields=4, num_blocks=2, num_heads=2)
        >>> atoms, coords, batch = torch.randn(7, 5), torch.randn(7, 3), torch.tensor([0, 0, 0, 0, 1, 1, 1])
        >>> network(atoms, coords, batch=batch).shape
        torch.Size([2, 3])
        >>> forces = PointTransformer(g, 5, "vector", fields=4, num_blocks=2, num_heads=2, pool=None)
        >>> forces(atoms, coords, batch=batch).shape
        torch.Size([7, 3])

    Source: Hutchinson et al., "LieTransformer", ICML 2021, Section 3.3 and Appendix B; Lim et al., "Sign and Basis
    Invariant Networks", ICLR 2023, for ``even_in``.
    """

    def __init__(
        self,
        gspace: GSpace,
        in_type: int | Mapping[str, int] | FieldType,
        out_type: int | Literal["vector", "symmetric tensor"] | FieldType,
        *,
        fields: int | Mapping[str, int] | FieldType = 16,
        num_blocks: int = 4,
        num_heads: int = 4,
        attention: Mapping[str, Any] | None = None,
        encoding: Encoding | PairKernel | str | None = None,
        relation: Relation | None = None,
        positions: bool = False,
        even_in: Sequence[int] = (),
        samples: Samples | int | None = None,
        pool: Pool | None = "mean",
        readout: Readout = "clouds",
        head: Mapping[str, Any] | None = None,
    ):
        head = _head_options(head)
        if pool is not None:
            check_option("pool", pool, ("mean", "sum", "max"))
        check_option("readout", readout, ("clouds", "points"))
        check_int("num_blocks", num_blocks)
        super().__init__(gspace, field_type_of("in_type", in_type, gspace))
        self.pool: Pool | None = pool
        self.register_exact("signs", _signs(self.in_type, even_in))
        chosen = as_samples(samples)
        group = fibers(gspace, chosen)
        hidden = _hidden_type(self.in_type, fields, chosen)
        width = invariant_vectors(hidden).shape[1] or len(hidden)
        options = dict(attention or {})
        check_passed_on(PointTransformer, "attention", options, PointTransformerBlock, _OWN)
        if chosen is not None:
            options["samples"] = chosen
        if positions and (options.get("period") or getattr(relation, "period", None)) is not None:
            raise ValueError("positions: got True in a periodic box, where clouds have no mean; needed False")
        unit = float(options.get("length_scale") or options.get("radius") or 1.0)
        self.positions = unit if positions else None
        first = self.in_type + _named(gspace, "vector") if positions else self.in_type
        pointwise = options.get("projection") == "pointwise" and chosen is None
        self.embedding = _embedding(first, hidden, 0 if pointwise else max(2, width), chosen)
        types = [self.embedding.out_type] + num_blocks * [hidden]
        self.blocks = _blocks(types, num_heads, {"encoding": encoding, "relation": relation, **options})
        self.norm = norm_of(hidden, options.get("norm_kind"), eps=options.get("norm_eps", 1e-5))
        width = width if head["fields"] is None else check_int("fields", head["fields"])
        to_poses = ToPoses(frames(hidden, group=group), hidden.size, width, group.order, bias=width)
        self.num_outputs: int | None = None
        if isinstance(out_type, int):
            self.num_outputs = check_int("out_type", out_type)
            self.out_type = field_type_of("out_type", out_type, gspace)
            invariants: ToPoses | PlainPowerSpectrum = to_poses
            widths = (1 + head["layers"]) * [width] + [self.num_outputs]
            if head["poses"] == "spectrum":
                spectrum = PowerSpectrum(hidden)
                invariants, widths[0] = spectrum.plain, spectrum.out_type.size
            options = {"poses": head["poses"], "batch_norm": head["batch_norm"]}
            self.head = InvariantHead(invariants, group.weights, widths, pool=pool, readout=readout, **options)
            return
        _check_equivariant(pool, head)
        tensors = SymmetricTensors(gspace.dimensionality) if out_type == "symmetric tensor" else None
        self.out_type = given = _named(gspace, out_type)
        dual, invariants_of = frames(given, group=group, dual=True), invariant_vectors(given)
        from_poses = FromPoses(dual, given.size, width, group.order, invariants=invariants_of)
        self.head = EquivariantHead(to_poses, from_poses, pool, tensors)


def _signs(in_type: FieldType, fields: Sequence[int]) -> np.ndarray | None:
    """−1 for the channels of some fields, and 1 for the others; None if there are none."""
    check_sequence("even_in", fields, "numbers of fields")
    of_fields = np.ones(len(in_type))
    for field in fields:
        if check_int("even_in", field, least=0) >= len(in_type):
            raise ValueError(f"even_in: got {field}, needed numbers of the {len(in_type)} fields of in_type, from 0")
        of_fields[field] = -1
    return of_fields.repeat([field.size for field in in_type.representations]) if len(fields) else None


class _PointwiseLinear(PlainModule):
    """A linear map between scalars, at every point."""

    pointwise = True

    def __init__(self, in_type: FieldType, out_type: FieldType):
        super().__init__(in_type, out_type, torch.nn.Linear(in_type.size, out_type.size))


def _blocks(types: list[FieldType], num_heads: int, options: dict[str, Any]) -> torch.nn.ModuleList:
    """A block from each of the types to the next, with a rate of ``drop_path`` that rises from block to block."""
    rates = depth_rates(options.pop("drop_path", 0.0), len(types) - 1)
    return torch.nn.ModuleList(
        PointTransformerBlock(*pair, num_heads, drop_path=rate, **options)
        for pair, rate in zip(itertools.pairwise(types), rates, strict=True)
    )


def _named(gspace: GSpace, value: str | FieldType) -> FieldType:
    if value == "vector":
        return FieldType(gspace, [gspace.basespace_action])
    if value == "symmetric tensor":
        return FieldType(gspace, [symmetric_tensor_repr(gspace)])
    if isinstance(value, str):
        raise ValueError(f'out_type: got {value!r}, needed a number, a FieldType, "vector" or "symmetric tensor"')
    return field_type_of("out_type", value, gspace)


def _hidden_type(in_type: FieldType, fields: int | Mapping[str, int] | FieldType, samples: Samples | None) -> FieldType:
    """The type of the features of the blocks."""
    gspace = in_type.gspace
    if isinstance(fields, (Mapping, FieldType)):
        return field_type_of("fields", fields, gspace)
    if samples is not None:
        raise TypeError(f"fields: got {fields!r}, needed a FieldType: {gspace.name} has no regular fields")
    return regular_type(gspace, check_int("fields", fields))


def _embedding(in_type: FieldType, hidden: FieldType, scalars: int, samples: Samples | None) -> EquivariantModule:
    """The map to the features of the first block: from scalars to scalars, or to ``hidden``.

    If ``hidden`` lacks an irrep of the features, the first block gets the features themselves.
    """
    if is_scalar(in_type) and scalars:
        # Scalars need no poses until positions come in.
        return _PointwiseLinear(in_type, FieldType(in_type.gspace, scalars * [in_type.gspace.trivial_repr]))
    if samples is None and count_irreps(in_type).keys() <= count_irreps(hidden).keys():
        return shortcut_of(in_type, hidden, "group")
    return IdentityModule(in_type)


def _head_options(given: Mapping[str, Any] | None) -> dict[str, Any]:
    options = {"fields": None, "layers": 1, "poses": "mean", "batch_norm": False}
    check_options("head", given or {}, tuple(options))
    options |= given or {}
    check_int("layers", options["layers"], least=0)
    check_option("poses", options["poses"], ("mean", "max", "spectrum"))
    check_bool("batch_norm", options["batch_norm"])
    return options


def _check_equivariant(pool: Pool | None, head: Mapping[str, Any]) -> None:
    """Check that no option is for invariants only."""
    if head["poses"] == "spectrum":
        raise ValueError('poses: got "spectrum", which are invariants; leave it at "mean"')
    if head["batch_norm"]:
        raise ValueError("batch_norm: got True, which is for invariants; leave it at False")
    if pool == "max":
        raise ValueError(
            'pool: got "max", which is not equivariant on fields that are not scalars; needed "mean", "sum" or None'
        )
