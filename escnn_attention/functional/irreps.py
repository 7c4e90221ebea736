r"""Maps between features and regular fields in irreps, one dense matrix for each irrep, by a compiled loop.

An irrep of m components over its endomorphism algebra stands K times in the features, and d times in each of F regular
fields. A transform is a product of sparse matrices, whose columns are the channels of a field and whose rows are, irrep
by irrep, the components and in them the copies. In irreps the map is one matrix ``(d F, K)`` for all components of an
irrep. The loop, ``irreps.cpp``, takes some positions at a time, transforms, maps and transforms back while they are in
the cache, and adds up the gradients of the matrices on the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, NamedTuple

import numpy as np
import torch
from torch import Tensor

from escnn_attention.functional.native.arguments import Array, Kernel
from escnn_attention.functional.native.build import FOLDER
from escnn_attention.geometry.cache import constant_result

_STRIDED = "as its strides say"
_PARTS = 3
"""Parts of the regular fields, each in a tensor of its own: queries, keys and values."""


class Arguments(NamedTuple):
    """What is read: features or regular fields, or both for the gradients of the weights."""

    tables: Annotated[Tensor, Array("table of transforms", element="int64_t")]
    values: Annotated[Tensor, Array("numbers of transforms")]
    strides: Annotated[Tensor, Array("8, 5", element="int64_t")]
    weights: Annotated[Tensor, Array("num_weights", "of each irrep (d, F, K)", gradient="void")]
    bias: Annotated[Tensor | None, Array("num_biases", "of the trivial irrep", gradient="void")]
    features: Annotated[Tensor | None, Array(_STRIDED)]
    first: Annotated[Tensor | None, Array(_STRIDED, "regular fields")]
    second: Annotated[Tensor | None, Array(_STRIDED)]
    third: Annotated[Tensor | None, Array(_STRIDED)]
    images: Annotated[int, "of features and fields"]
    number: Annotated[int, "positions of an image"]
    groups: Annotated[int, "of regular fields, in all parts"]
    parts: Annotated[int, "of the groups"]
    num_weights: Annotated[int, "of all irreps"]
    num_biases: Annotated[int, "of the trivial irrep"]
    bias_of_fields: Annotated[bool, "or of the features"]


class Results(NamedTuple):
    """What is written: regular fields of the features, or features of the fields."""

    made_features: Annotated[Tensor | None, Array(_STRIDED)] = None
    made_first: Annotated[Tensor | None, Array(_STRIDED, "regular fields")] = None
    made_second: Annotated[Tensor | None, Array(_STRIDED)] = None
    made_third: Annotated[Tensor | None, Array(_STRIDED)] = None


KERNEL = Kernel(FOLDER / "irreps.cpp", "a map in irreps", Arguments, Results)


def tables(
    order: int,
    fields: int,
    irreps: Sequence[tuple[int, int, int]],
    poses: Sequence[np.ndarray],
    segments: Sequence[tuple[np.ndarray, np.ndarray, Sequence[np.ndarray]]],
) -> tuple[np.ndarray, np.ndarray]:
    """The sizes and transforms that the loop reads: whole numbers, and the numbers of the transforms.

    Args:
        order, fields: how many poses and regular fields there are.
        irreps: m, d and K of each irrep.
        poses: one or two matrices whose product is the transform of a regular field, the last applied first.
        segments: of the fields of a representation the channels of each, the rows of their transforms in all irreps
            ``(size, number)``, and matrices as ``poses``.
    """
    whole: list[np.ndarray] = [np.array([order, fields, len(irreps), *np.ravel(irreps)])]
    numbers: list[np.ndarray] = []

    def add(factors: Sequence[np.ndarray]) -> None:
        whole.append(np.array([len(factors)]))
        for matrix in factors:
            rows_of: dict[tuple[int, ...], list[int]] = {}  # with numbers in the same columns
            for i, row in enumerate(matrix):
                rows_of.setdefault(tuple(np.flatnonzero(row).tolist()), []).append(i)
            whole.append(np.array([len(rows_of)]))
            for columns, rows in rows_of.items():
                whole.append(np.array([len(rows), len(columns), *rows, *columns]))
                numbers.append(matrix[np.ix_(rows, columns)].ravel())

    def add_both(factors: Sequence[np.ndarray]) -> None:
        add(factors[::-1])
        add([matrix.T for matrix in factors])

    add_both(poses)
    whole.append(np.array([len(segments)]))
    for channels, rows, factors in segments:
        whole.extend([np.array(channels.shape), channels.ravel(), rows.ravel()])
        add_both(factors)
    return np.concatenate(whole).astype(np.int64), np.concatenate(numbers)


class Maps(NamedTuple):
    """Which map there is: the tables, the weights, and how many groups of regular fields there are.

    Attributes:
        whole, numbers: what :func:`tables` gives.
        weights: of each irrep ``(d, F, K)``, one after the other.
        groups: of the regular fields.
    """

    whole: Tensor
    numbers: Tensor
    weights: Tensor
    groups: int


def run(
    maps: Maps,
    features: Tensor | None = None,
    fields: Sequence[Tensor] = (),
    bias: Tensor | None = None,
    made_features: Tensor | None = None,
    made_fields: Sequence[Tensor] = (),
    gradients: Sequence[Tensor | None] = (None, None),
    bias_of_fields: bool = False,
) -> None:
    """Write the regular fields of features, or the features of fields by the transposed map; or gradients of weights.

    Tensors may lie in memory in any order.

    Args:
        maps: the map.
        features: ``(B, N, size)``, to read.
        fields: ``(G, B, N, H, C)`` in up to three parts, to read.
        bias: of the trivial irrep of what is written.
        made_features, made_fields: to write.
        gradients: those of the weights and of the bias, to fill, of features and fields that are the gradient of one
            and the argument of the other.
        bias_of_fields: whether the gradient of the bias is that of the regular fields, or else of the features.
    """
    shown = [(t, 0) for t in (features, made_features)] + [(t, 1) for t in (*_padded(fields), *_padded(made_fields))]
    one, axis = next((t, axis) for t, axis in shown if t is not None)
    images, number = one.shape[axis : axis + 2]
    places = [_strides(t, axis, number) for t, axis in shown]
    # Whether the positions of all images are one axis.
    if number == 1 or all(image == number * position for image, position, *_ in places):
        images, number = 1, images * number
    first, second, third = _padded(fields)
    arguments = Arguments(
        maps.whole,
        maps.numbers,
        torch.tensor(places),
        maps.weights,
        bias,
        features,
        first,
        second,
        third,
        images,
        number,
        maps.groups,
        max(len(fields), len(made_fields)),
        maps.weights.numel(),
        0 if gradients[1] is None else gradients[1].numel(),
        bias_of_fields,
    )
    KERNEL.run(maps.weights.dtype, arguments, Results(made_features, *_padded(made_fields)), gradients)


def _strides(x: Tensor | None, axis: int, number: int) -> tuple[int, ...]:
    """The strides of images and positions, which are the axis and the next, and of the others."""
    if x is None:
        return (0,) * 5
    strides = x.stride()
    image, position = strides[axis : axis + 2]
    if number == 1:  # the images are the positions of one image
        image, position = 0, image
    rest = strides[:axis] + strides[axis + 2 :]
    return (image, position, *rest, *(0,) * (3 - len(rest)))


def _padded(parts: Sequence[Tensor]) -> list[Tensor | None]:
    return [*parts, *[None] * (_PARTS - len(parts))]


@constant_result
def why_not_built(dtype: torch.dtype) -> str | None:
    """Why there is no loop for numbers of this type, if there is none."""
    return KERNEL.why_not_built(dtype)
