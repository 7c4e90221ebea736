"""What the compiled loops are given: one list of fields for each, from which both sides of the boundary follow.

Python packs a structure (:class:`~escnn_attention.functional.native.build.Kernel`), and C++ reads a ``struct
Arguments`` of the same fields in the same order, from a header that is made of the list::

    python escnn_attention/functional/native/fields.py

writes all headers again. They lie beside the sources, so that a compiler needs no Python; a test compares them with the
lists, and a library whose structure has another size is an error where it is loaded.
"""

from __future__ import annotations

import struct
import textwrap
from pathlib import Path
from typing import NamedTuple

__all__ = ["FIELDS", "Field", "Fields"]


class Field(NamedTuple):
    """One argument of a loop.

    Attributes:
        name: of the member.
        type: of the member in C: a pointer to the numbers of a contiguous tensor, ``int64_t`` or ``double``. ``void``
            is for the type of most numbers, single or double.
        meaning: the shape of a tensor, or what a number is.
        optional: whether the pointer may be null.
    """

    name: str
    type: str
    meaning: str
    optional: bool = False


class Fields:
    """The arguments of a loop.

    Args:
        sizes: what the letters in the shapes are.
        fields: in the order in which they lie in memory.
    """

    def __init__(self, sizes: str, *fields: Field):
        self.sizes, self.fields = sizes, fields

    @property
    def names(self) -> frozenset[str]:
        """The names of all fields."""
        return frozenset(field.name for field in self.fields)

    @property
    def optional(self) -> frozenset[str]:
        """The names of those that may be None."""
        return frozenset(field.name for field in self.fields if field.optional)

    def structure(self) -> struct.Struct:
        """What packs the fields, in order, as the compiler lays them out."""
        numbers = {"int64_t": "q", "double": "d"}
        return struct.Struct("@" + "".join(numbers.get(field.type, "P") for field in self.fields))

    def header(self) -> str:
        """The text of the header: the structure, and a function that gives its size."""
        members = (
            f"    {field.type} {field.name};  // {field.meaning}{', or null' if field.optional else ''}"
            for field in self.fields
        )
        lines = [
            "// What Python gives the loop, made of the list in functional/native/fields.py: changes here are lost.",
            "",
            "#pragma once",
            "",
            "#include <cstdint>",
            "",
            *textwrap.wrap(self.sizes, 120, initial_indent="// ", subsequent_indent="// "),
            'extern "C" struct Arguments {',
            *members,
            "};",
            "",
            'extern "C" int64_t escnn_attention_size() { return sizeof(Arguments); }',
            "",
        ]
        return "\n".join(lines)


_GRIDS = Fields(
    "Sizes: M heads, B images of N positions, H output poses, J query poses, P key poses, C channels, L offsets, F "
    "cosines and sines.",
    Field("q", "const void*", "(M, B, N, J, C)"),
    Field("k", "const void*", "(M, B, N, P, C)"),
    Field("v", "const void*", "as k"),
    Field("spatial", "const void*", "(M or 1, H, L, C)", optional=True),
    Field("pose", "const void*", "(M or 1, H, P, C)", optional=True),
    Field("waves", "const void*", "(M or 1, H, N, F), only of everything", optional=True),
    Field("amplitudes", "const void*", "(M, B, N, J, F), of the queries; there with waves", optional=True),
    Field("out", "void*", "(M, B, N, H, C)"),
    Field("sums", "void*", "(M, B, 2, H or 1, J, N): the largest scores, and what makes sums of exponentials 1"),
    Field("grad", "const void*", "as out, in the backward pass", optional=True),
    Field("grad_q", "void*", "as q", optional=True),
    Field("grad_k", "void*", "as k, zero at first", optional=True),
    Field("grad_v", "void*", "as v, zero at first", optional=True),
    Field("grad_amplitudes", "void*", "as amplitudes", optional=True),
    Field("grad_waves", "double*", "as waves, zero at first", optional=True),
    Field("grad_spatial", "double*", "as spatial, zero at first", optional=True),
    Field("grad_pose", "double*", "as pose, zero at first", optional=True),
    Field("shape", "const int64_t*", "(dim)"),
    Field("steps", "const int64_t*", "(L, dim), in positions"),
    Field("dim", "int64_t", "axes of the grid"),
    Field("heads", "int64_t", "M"),
    Field("images", "int64_t", "B"),
    Field("query_poses", "int64_t", "J"),
    Field("key_poses", "int64_t", "P"),
    Field("num_poses", "int64_t", "H"),
    Field("offsets", "int64_t", "L"),
    Field("channels", "int64_t", "C"),
    Field("num_waves", "int64_t", "F"),
    Field("spatial_heads", "int64_t", "M or 1"),
    Field("pose_heads", "int64_t", "M or 1"),
    Field("wave_heads", "int64_t", "M or 1"),
    Field("key_positions", "int64_t", "of everything, where queries may have another number of them"),
    Field("everything", "int64_t", "whether queries see all keys, without a table; of one axis then"),
    Field("pad", "int64_t", "places of nothing after every row"),
    Field("rows", "int64_t", "of a band"),
    Field("parts", "int64_t", "of a batch, in each of which the gradients of tables are added up"),
    Field("threads", "int64_t", "how many"),
    Field("seed", "int64_t", "of dropout"),
    Field("sum_query_poses", "int64_t", "whether every output pose has all query poses"),
    Field("dropout", "double", "the probability"),
    Field("scale", "double", "by which scores are multiplied"),
)

_POINTS = Fields(
    (
        "Sizes: M heads, G groups of A queries that see the same K keys, H output poses, J query poses, P key poses, C "
        "channels, F features, and S rows of scores of a query: H, or H * J where all query poses contribute to every "
        "output pose."
    ),
    Field("q", "const void*", "(M, G * A, J, C)", optional=True),
    Field("k", "const void*", "(M, points, P, C); there with q", optional=True),
    Field("v", "const void*", "(M, points, P, C)"),
    Field("reads", "const void*", "(M, G * A, J, F)", optional=True),
    Field("features", "const void*", "(feature_heads, H, F, G, A, K); there with reads", optional=True),
    Field("pose", "const void*", "(pose_heads, H, C, padded_key_poses)", optional=True),
    Field("extra", "const void*", "(M, S, extra_poses, G, A, K)", optional=True),
    Field("factors", "const void*", "(M, G, A, K), which multiply weights", optional=True),
    Field("queries", "const int64_t*", "(G, A), points; -1 at the end of a row fills up"),
    Field("keys", "const int64_t*", "(G, K), points; -1 at the end of a row fills up"),
    Field("log_measure", "const void*", "(points, P)", optional=True),
    Field("out", "void*", "(M, G * A, H, C), in the forward pass", optional=True),
    Field("sums", "void*", "(M, G * A, S, 2): the largest scores, and what makes sums of exponentials 1"),
    Field("grad", "const void*", "as out, in the backward pass", optional=True),
    Field("grad_q", "void*", "as q, zero at first", optional=True),
    Field("grad_k", "void*", "as k, zero at first", optional=True),
    Field("grad_v", "void*", "as v, zero at first", optional=True),
    Field("grad_reads", "void*", "as reads, zero at first", optional=True),
    Field("grad_features", "void*", "as features, zero at first where anything fills up", optional=True),
    Field("grad_pose", "void*", "as pose, zero at first", optional=True),
    Field("grad_extra", "void*", "as extra, zero at first where anything fills up", optional=True),
    Field("grad_factors", "void*", "as factors, zero at first", optional=True),
    # Room for the backward pass, which needs none group by group.
    Field("weights", "void*", "(M, G * A, H, row_stride); not group by group", optional=True),
    Field("grad_scores", "void*", "(M, G * A, H or J, row_stride); not group by group", optional=True),
    Field("heads", "int64_t", "M"),
    Field("points", "int64_t", "how many"),
    Field("groups", "int64_t", "G"),
    Field("group_queries", "int64_t", "A"),
    Field("group_keys", "int64_t", "K"),
    Field("num_poses", "int64_t", "H"),
    Field("query_poses", "int64_t", "J"),
    Field("key_poses", "int64_t", "P"),
    Field("channels", "int64_t", "C"),
    Field("num_features", "int64_t", "F"),
    Field("feature_heads", "int64_t", "M or 1"),
    Field("pose_heads", "int64_t", "M or 1"),
    Field("padded_key_poses", "int64_t", "whole vectors that hold P"),
    Field("extra_poses", "int64_t", "P or 1"),
    Field("sum_query_poses", "int64_t", "whether all query poses contribute to every output pose"),
    Field("normalize_by_count", "int64_t", "whether scores are divided by the measure of the keys"),
    Field("group_by_group", "int64_t", "whether the keys of a group, which no other has, follow its queries"),
    Field("threads", "int64_t", "how many"),
    Field("seed", "int64_t", "of dropout"),
    Field(
        "row_stride", "int64_t", "of a row of scores: P * K and one vector more at least, in whole lines of the cache"
    ),
    Field("dropout", "double", "the probability"),
)

_PAIR_MLP = Fields(
    (
        "Sizes: B blocks of R rows with I inputs, M heads whose networks have F and S hidden units, and Q biases for "
        "each block, whose rows are repeated with every one."
    ),
    Field("x", "const void*", "(B, I, R)"),
    Field("bias", "const void*", "(M, F, B * Q)"),
    Field("first", "const void*", "(M, F, I)"),
    Field("second", "const void*", "(M, S, F)"),
    Field("last", "const void*", "(M, S)"),
    Field("out", "void*", "(M, B * Q, R), in the forward pass", optional=True),
    Field("grad", "const void*", "as out, in the backward pass", optional=True),
    Field("grad_bias", "void*", "as bias, zero at first", optional=True),
    Field("grad_first", "void*", "as first, zero at first", optional=True),
    Field("grad_second", "void*", "as second, zero at first", optional=True),
    Field("grad_last", "void*", "as last, zero at first", optional=True),
    Field("heads", "int64_t", "M"),
    Field("inputs", "int64_t", "I"),
    Field("hidden", "int64_t", "F"),
    Field("second_hidden", "int64_t", "S"),
    Field("blocks", "int64_t", "B"),
    Field("repeats", "int64_t", "Q"),
    Field("rows", "int64_t", "R"),
    Field("threads", "int64_t", "how many"),
)

FIELDS = {"grids": _GRIDS, "points": _POINTS, "pair_mlp": _PAIR_MLP}
"""The fields of every loop, by the folder of its headers, where ``arguments.h`` is."""


if __name__ == "__main__":
    for folder, fields in FIELDS.items():
        Path(__file__).with_name(folder).joinpath("arguments.h").write_text(fields.header(), encoding="utf-8")
