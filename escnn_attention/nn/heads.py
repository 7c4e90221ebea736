"""The heads of an attention layer: how many channels they have, and how fields become theirs and they become fields."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
from escnn.nn import FieldType

from escnn_attention._checks import check_bool, check_int, check_option
from escnn_attention.encodings import Encoding, PairKernel
from escnn_attention.encodings.base import Needs
from escnn_attention.encodings.bias import EncodingBias
from escnn_attention.functional.call import Normalization
from escnn_attention.groups.fibers import Fibers, frames, invariant_vectors, mass
from escnn_attention.nn.arguments import check_regular, choose_head_fields, shown
from escnn_attention.plain.projections import (
    AttentionMode,
    FromPoses,
    HeadModule,
    ProjectionKind,
    QueryKeyNorm,
    Registers,
    Scalars,
    ScoredHeads,
    ToPoses,
)

_Module = TypeVar("_Module", bound=ScoredHeads)


class Heads:
    """The heads of a layer to ``out_type`` on the poses of a group, by the arguments of :class:`GroupSelfAttention`.

    Attributes:
        number: the number M of heads.
        channels: the number C of regular fields of each.

    Raises:
        ValueError: heads that do not divide the fields, an unknown projection, or one that needs regular fields.
    """

    def __init__(
        self,
        out_type: FieldType,
        num_heads: int,
        group: Fibers,
        *,
        head_fields: int | None = None,
        projection: ProjectionKind = "group",
        bias: bool = True,
        qk_norm: bool = False,
        registers: int = 0,
    ):
        self.projection: ProjectionKind = check_option("projection", projection, ("group", "pointwise"))
        self.number, self.group, self.qk_norm = check_int("num_heads", num_heads), group, qk_norm
        self.channels = choose_head_fields(out_type, num_heads, head_fields, _mass(out_type, group))
        if projection == "pointwise":
            check_regular("out_type", out_type, 'projection="pointwise"')
        self.registers, self.bias = check_int("registers", registers, least=0), check_bool("bias", bias)

    def needs(self, encoding: Encoding | PairKernel, mode: AttentionMode) -> Needs:
        """What a head needs of the fields, which an encoding reads.

        Raises:
            TypeError, ValueError: it does not go with normalised queries and keys, or with registers.
        """
        needs = normalised_needs(self.qk_norm, encoding, self.channels, self.group.dimension, mode.normalization)
        if not self.registers:
            return needs
        got = f"registers: got {self.registers}"
        if mode.keys == "own":
            raise ValueError(f'{got}, which belong to no pose, and keys="own"; needed keys="all"')
        if encoding.has_start:
            raise ValueError(
                f"{got}, but a {type(encoding).__name__} begins with certain keys; leave it at 0, or choose another "
                "encoding"
            )
        return needs

    def complete(self, module: _Module) -> _Module:
        """A module with the norms of queries and keys and with the registers."""
        if self.qk_norm:
            module.qk_norm = QueryKeyNorm(self.number, self.channels)
        if self.registers:
            module.registers = Registers(self.number, self.channels, self.registers)
        return module

    @property
    def fields(self) -> int:
        """The regular fields of all heads together."""
        return self.number * self.channels

    def read(self, in_type: FieldType, needs: Needs, *, scalars: bool = False) -> ToPoses | Scalars:
        """The projection of any fields to the queries, values and keys of all heads.

        Those of ``scalars`` are the same from every pose.
        """
        number, options = made_for(needs, self.number, self.channels, self.bias)
        return self._project(in_type, number, options, scalars)

    def read_one(self, in_type: FieldType, biased: int, *, scalars: bool = False) -> ToPoses | Scalars:
        """The projection of any fields to queries, keys or values alone, of which so many of a head have a bias."""
        options: dict[str, Any] = {"groups": self.number}
        if self.bias:
            whole = biased == self.channels
            options |= {"bias": self.fields} if whole else {"last_bias": (self.number, biased)}
        return self._project(in_type, self.fields, options, scalars)

    def _project(self, in_type: FieldType, number: int, options: dict[str, Any], scalars: bool) -> ToPoses | Scalars:
        if scalars:
            return Scalars(in_type.size, number, **options)
        if self.projection == "pointwise":
            check_regular("in_type", in_type, 'projection="pointwise"')
        segments = frames(in_type, group=self.group)
        if not any(s.matrices.size for s in segments):
            raise ValueError(f"poses: got cosets of a subgroup to which no field of {in_type} has an equivariant map")
        return ToPoses(segments, in_type.size, number, self.group.order, kind=self.projection, **options)

    def write(self, out_type: FieldType) -> FromPoses:
        """The projection of all heads together to any fields."""
        segments = frames(out_type, group=self.group, dual=True)
        if not any(s.matrices.size for s in segments):
            raise ValueError(
                f"poses: got cosets of a subgroup from which there is no equivariant map to a field of {out_type}"
            )
        return FromPoses(
            segments,
            out_type.size,
            self.fields,
            self.group.order,
            groups=self.number,
            kind=self.projection,
            invariants=invariant_vectors(out_type) if self.bias else None,
            mass=_mass(out_type, self.group),
        )


def _mass(out_type: FieldType, group: Fibers) -> int:
    """The number of independent poses of heads with these poses."""
    return mass(out_type) if group.cosets is None else group.order


def check_poses(heads: Heads, encoding: Encoding | PairKernel) -> None:
    """Check that, where poses are cosets, projections mix poses and the encoding has a mean over a coset."""
    stabilizer = heads.group.stabilizer
    if stabilizer is None:
        return
    name = type(encoding).__name__
    if heads.projection == "pointwise":
        raise ValueError('poses: got cosets with projection="pointwise", needed projection="group"')
    if isinstance(encoding, PairKernel) or encoding.has_start or encoding.pair_bias is not EncodingBias:
        raise ValueError(f"poses: got cosets with a {name}, which has no mean over them; needed another encoding")
    if encoding.rotates and heads.group.dimension and np.abs(stabilizer.mean(0)).max() < 1e-9:
        raise ValueError(
            f"poses: got cosets of a subgroup that keeps no direction, along which a {name} could rotate; needed "
            "another subgroup or encoding"
        )


def made_for(needs: Needs, heads: int, channels: int, bias: bool) -> tuple[int, dict[str, Any]]:
    """The number of fields that heads of so many channels need, and the options of a projection: groups and biases."""
    groups = heads * len(needs.fields)
    biased = (groups - heads if needs.keys else groups) * channels
    options: dict[str, Any] = {"groups": groups}
    if bias:
        options |= {"bias": biased, "last_bias": (heads, needs.key_bias) if needs.keys else (0, 0)}
    return groups * channels, options


def normalised_needs(
    qk_norm: bool, encoding: Encoding | PairKernel, channels: int, dim: int, normalization: Normalization = "softmax"
) -> Needs:
    """The fields that heads of so many channels need, with or without normalised queries and keys.

    A bias of the keys does not drop out of the softmax then: what it is divided by changes from key to key.
    """
    needs = encoding.needs(channels, dim, normalization)
    if not check_bool("qk_norm", qk_norm):
        return needs
    name = type(encoding).__name__
    if not (needs.queries and needs.keys):
        raise ValueError(
            f"qk_norm: got True, but the scores of this {name} have no queries and keys; leave it at False"
        )
    if encoding.has_start:
        raise ValueError(
            f"qk_norm: got True, but a {name} begins with queries of a certain size; leave it at False, or choose "
            "another encoding"
        )
    return replace(needs, key_bias=channels)


def is_scalar(field_type: FieldType) -> bool:
    """Whether all fields are trivial."""
    return all(r.is_trivial() for r in field_type.representations)


def check_scalars(in_type: FieldType, layer: str, advice: str = "") -> None:
    """All fields of ``in_type`` are trivial, as ``layer`` needs them; ``advice`` says what to do where they are not."""
    others = sorted({r.name for r in in_type.representations if not r.is_trivial()})
    if others:
        raise ValueError(f"in_type: {layer} needs trivial (scalar) fields only, got also {', '.join(others)}{advice}")


def check_weights(group: Fibers) -> None:
    """The poses of queries may be added up alike."""
    if group.log_measure is not None:
        assert group.samples is not None
        raise ValueError(
            f'query: "all" adds up the poses of queries alike, and {group.samples} have different weights; needed '
            '"own", or samples that are a subgroup'
        )


def shown_heads(core: HeadModule) -> list[str]:
    """The options of heads, as the representation of a layer shows them."""
    encoding, registers = core.encoding, core.registers
    return [
        *shown(query=(core.query, None), keys=(core.keys, "all"), shared_scores=(core.shared_scores, False)),
        f"encoding={type(encoding).__name__}({encoding.extra_repr()})",
        *shown(qk_norm=(core.qk_norm is not None, False), registers=(registers and registers.keys.shape[1], None)),
        *shown(dropout=(core.dropout, 0.0), normalization=(core.normalization, "softmax")),
    ]
