"""What a layer on grids makes of the poses of queries and keys: its weights, and the terms of its encoding."""

from __future__ import annotations

import numpy as np
import torch
from escnn.nn import FieldType

from escnn_attention._checks import check_bool
from escnn_attention.encodings import Encoding, PairKernel
from escnn_attention.functional import KeyMode, QueryMode
from escnn_attention.geometry.orbits import Orbits
from escnn_attention.geometry.windows import Window
from escnn_attention.groups.fibers import Fibers, mass
from escnn_attention.nn.heads import Heads, check_weights, is_scalar
from escnn_attention.plain.registers import padded, with_registers
from escnn_attention.plain.self_attention import GroupTables

__all__ = ["bind", "check_shared", "has_pose_term", "query_weight", "sees_scalars", "tables_of"]


def sees_scalars(in_type: FieldType, encoding: Encoding, heads: Heads, query: QueryMode, keys: KeyMode) -> bool:
    """Whether keys differ from pose to pose by a summand of the scores only, which is the same at all positions.

    Against values without a pose such a summand drops out of the softmax, and the poses of queries and keys with it.
    Rotary encodings rotate the term of the pose by the offset, absolute ones add it to queries of several poses, too.
    """
    added = type(encoding).rotations is Encoding.rotations or keys == "own"
    drops_out = query == "own" if encoding.absolute else added
    return is_scalar(in_type) and heads.group.order > 1 and drops_out


def tables_of(group: Fibers, num_poses: int, registers: int, *, poses: bool, weighs: bool) -> GroupTables:
    """What a layer knows of a group.

    Args:
        group: the group.
        num_poses: of the keys, registers included; 1 where a query sees keys of one pose, or keys have none.
        registers: how many of them there are.
        poses: whether keys have a term of the pose.
        weighs: whether the measure of the keys matters: that of the one pose that a query sees drops out.
    """
    return GroupTables(
        group.inverse_action,
        quotient=with_registers(group.quotient, registers) if poses and group.samples is None else None,
        relative=padded(group.relative, num_poses) if poses and num_poses > 1 else None,
        log_measure=padded(group.log_measure, num_poses) if weighs else None,
    )


def check_shared(
    shared_scores: bool, query: QueryMode, keys: KeyMode, encoding: Encoding | PairKernel, group: Fibers
) -> bool:
    """``shared_scores``: whether all poses attend by the sum of their scores, if they may.

    Raises:
        TypeError: ``shared_scores`` is not True or False.
        ValueError: a query pose sees others than its own, the encoding is not added to the keys, or there are samples.
    """
    if not check_bool("shared_scores", shared_scores):
        return False
    if (query, keys) != ("own", "own"):
        raise ValueError(f'shared_scores: got True with query={query!r} and keys={keys!r}, needed "own" of both')
    if isinstance(encoding, PairKernel) or (
        encoding.absolute
        or type(encoding).rotations is not Encoding.rotations
        or type(encoding).start is not Encoding.start
    ):
        raise ValueError(
            f"shared_scores: got True, but a {type(encoding).__name__} is of every pose by itself; needed an encoding "
            "that is added to the keys: mlp, separable, fourier, none"
        )
    if group.samples is not None:
        raise ValueError("shared_scores: got True, but samples of a continuous group; leave it at False")
    return True


def has_pose_term(encoding: Encoding, query: QueryMode, keys: KeyMode, *, lifts: bool) -> bool:
    """Whether the encoding's term of the pose differs from key to key.

    An absolute encoding adds it to queries and keys. If a query sees keys of its own pose only, the term is a constant,
    which the bias of the queries covers.
    """
    return not (lifts or (encoding.absolute and query == keys == "own"))


def query_weight(out_type: FieldType, group: Fibers, query: QueryMode, *, lifts: bool) -> float:
    """What the sum over the query poses is multiplied by.

    All query poses together weigh as many poses as there are; without poses there is one query for them.
    """
    if query == "own":
        return 1.0
    if not lifts:
        check_weights(group)
    return mass(out_type) / (1 if lifts else group.order)


def bind(encoding: Encoding, heads: Heads, window: Window, num_poses: int, *, poses: bool) -> Encoding:
    """The encoding for these heads, with its term for the poses or without."""
    group = heads.group
    relative = group.relative if num_poses > 1 else None
    features = 0 if relative is None else torch.tensor(padded(relative, num_poses))
    bound = encoding.bind(
        group.dimension, heads.number, heads.channels, num_poses, features, _orbits(heads, window, num_poses)
    )
    if not poses:
        bound.drop_poses()
    return bound


def _orbits(heads: Heads, window: Window, num_poses: int) -> Orbits | None:
    """What heads can look at: one place of each orbit, or all of them where the projections tell no poses apart."""
    group = heads.group
    if group.samples is not None or not group.dimension:
        return None
    ball = not group.preserves_square
    if heads.projection == "pointwise":
        return Orbits(window, np.eye(group.dimension)[None], tuple(range(num_poses)), ball)
    own = int(group.quotient[0, 0]) if num_poses > 1 else 0
    return Orbits(window, group.action, (own,), ball)
