"""The heads of an attention layer: how many channels they have, and how fields become theirs and they become fields."""

from __future__ import annotations

from dataclasses import dataclass

from escnn.nn import FieldType

from escnn_attention._checks import check_int, check_option
from escnn_attention.groups.fibers import Fibers, frames, invariant_vectors, mass
from escnn_attention.nn.arguments import check_regular, choose_head_fields
from escnn_attention.plain.projections import FromPoses, ProjectionKind, Scalars, ToPoses

__all__ = ["Heads", "check_scalars", "check_weights", "is_scalar"]


@dataclass(frozen=True)
class Heads:
    """The heads of a layer on the poses of a group.

    Attributes:
        number: the number M of heads.
        channels: the number C of regular fields of each.
        group: the poses.
        projection: the kind of the projections.
        bias: whether they have biases.
    """

    number: int
    channels: int
    group: Fibers
    projection: ProjectionKind
    bias: bool

    @classmethod
    def choose(
        cls,
        out_type: FieldType,
        num_heads: int,
        head_fields: int | None,
        group: Fibers,
        projection: ProjectionKind,
        bias: bool,
    ) -> Heads:
        """The heads of a layer to ``out_type``, by the arguments of :class:`GroupSelfAttention`.

        Raises:
            TypeError: a number is none.
            ValueError: heads that do not divide the fields, an unknown projection, or one that needs regular fields.
        """
        check_option("projection", projection, ("group", "pointwise"))
        num_heads = check_int("num_heads", num_heads)
        channels = choose_head_fields(out_type, num_heads, head_fields, mass(out_type))
        if projection == "pointwise":
            check_regular("out_type", out_type, 'projection="pointwise"')
        return cls(num_heads, channels, group, projection, bool(bias))

    @property
    def fields(self) -> int:
        """The regular fields of all heads together."""
        return self.number * self.channels

    def read(self, in_type: FieldType) -> ToPoses:
        """The projection of any fields to the queries, values and keys of all heads."""
        if self.projection == "pointwise":
            check_regular("in_type", in_type, 'projection="pointwise"')
        return ToPoses(
            frames(in_type, group=self.group),
            in_type.size,
            3 * self.fields,
            self.group.order,
            groups=3 * self.number,
            kind=self.projection,
            bias=2 * self.fields if self.bias else 0,
        )

    def read_scalars(self, in_type: FieldType) -> Scalars:
        """The projection of scalar fields to queries, values and keys, which are the same from every pose."""
        return Scalars(in_type.size, 3 * self.fields, groups=3 * self.number, bias=2 * self.fields if self.bias else 0)

    def write(self, out_type: FieldType) -> FromPoses:
        """The projection of all heads together to any fields."""
        return FromPoses(
            frames(out_type, group=self.group, dual=True),
            out_type.size,
            self.fields,
            self.group.order,
            groups=self.number,
            kind=self.projection,
            invariants=invariant_vectors(out_type) if self.bias else None,
            mass=mass(out_type),
        )


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
