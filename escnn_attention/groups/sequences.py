"""Gspaces with an axis of time, or of the places of a sequence, on which the group does not act."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from escnn.group import Group, directsum
from escnn.gspaces import GSpace, no_base_space

from escnn_attention.groups.spaces import OwnSpace


class SpaceTime(OwnSpace):
    r"""A gspace with one further axis on which the fiber group acts as the identity: :math:`g\,(x, t) = (g x, t)`.

    The ``base`` is the gspace of images or volumes, or one without a base space.
    """

    def __init__(self, base: GSpace) -> None:
        self.base, name = base, f"{base.name}_and_time"
        spatial = [base.basespace_action] if base.dimensionality else []
        super().__init__(directsum([*spatial, base.fibergroup.trivial_representation], name=name), name, base)

    def restrict(self, id: Any) -> tuple[SpaceTime, Callable[[Any], Any], Callable[[Any], Any]]:
        """The gspace of a subgroup, with the maps of elements to the group and back, as of ``base.restrict``."""
        base, to_group, to_subgroup = self.base.restrict(id)
        return SpaceTime(base), to_group, to_subgroup


def sequence_space(group: Group) -> SpaceTime:
    r"""The gspace of sequences of features: ``(B, size, T)``, where the group acts on features and not on the axis.

    .. math:: (g f)(t) = \rho(g)\, f(t)

    Every layer, norm, block and report of this package works over it. Attention with ``encoding="none"`` treats the
    tokens as a set; the other encodings see how far tokens lie apart; ``kernel_size`` is a number of tokens. With
    ``causal=True`` tokens see none that are later.

    Example:
        >>> import torch
        >>> from escnn_attention import TransformerBlock, sequence_space
        >>> from escnn import gspaces, nn
        >>> tokens = sequence_space(gspaces.rot2dOnR2(8).fibergroup)
        >>> actions = nn.FieldType(tokens, [tokens.irrep(1), tokens.trivial_repr] + 4 * [tokens.regular_repr])
        >>> block = TransformerBlock(actions, actions, num_heads=2, kernel_size=None, norm="pre")
        >>> block(actions(torch.randn(5, actions.size, 16))).shape  # 5 sequences of 16 tokens
        torch.Size([5, 35, 16])
    """
    if not isinstance(group, Group):
        raise TypeError(f"group: got {group!r}, needed a group of escnn, such as gspaces.rot2dOnR2(8).fibergroup")
    return SpaceTime(no_base_space(group))


def space_time(gspace: GSpace) -> SpaceTime:
    r"""The gspace of images or volumes over time: ``(B, size, T, *space)``.

    .. math:: (g f)(x, t) = \rho(g)\, f(g^{-1} x, t)

    Windows reach as far in time as in space; with ``causal=True`` they have the last times.

    Example:
        >>> import torch
        >>> from escnn_attention import GroupSelfAttention, space_time
        >>> from escnn import gspaces, nn
        >>> videos = space_time(gspaces.rot2dOnR2(4))
        >>> frames = nn.FieldType(videos, 3 * [videos.trivial_repr])
        >>> hidden = nn.FieldType(videos, 4 * [videos.regular_repr])
        >>> layer = GroupSelfAttention(frames, hidden, num_heads=2, kernel_size=3)
        >>> layer(frames(torch.randn(1, 3, 5, 8, 8))).shape  # 5 images of 8 x 8
        torch.Size([1, 16, 5, 8, 8])
    """
    if not isinstance(gspace, GSpace):
        raise TypeError(f"gspace: got {gspace!r}, needed a gspace of escnn")
    return SpaceTime(gspace)
