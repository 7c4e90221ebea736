"""The encoding by rotations of channels."""

from __future__ import annotations

import math

from torch import Tensor

from escnn_attention.encodings.frequencies import FrequencyEncoding

__all__ = ["RotaryEncoding"]


class RotaryEncoding(FrequencyEncoding):
    r"""Rotations of pairs of channels: :math:`\langle q, R(\Omega\delta)(k + E[p]) \rangle`.

    Queries and keys are rotated by the angles :math:`\Omega h^{-1}x` of their own positions, so that a score depends on
    the offset, and nothing but ordinary attention is left. With ``keys="own"`` a layer then costs what an ordinary
    transformer costs, with :math:`|H|` times the heads.

    Args:
        num_frequencies: the number of rotated pairs; by default all channels of a head, C // 2 pairs.
        scale: the standard deviation of the entries of :math:`\Omega` at initialisation, in radians for each unit of
            the window's reach.
        learned: whether :math:`\Omega` is a parameter; otherwise it stays as drawn and is saved with the layer.

    Raises:
        ValueError: on binding, when a head has fewer channels than are to be rotated.

    Example:
        >>> from escnn import gspaces, nn
        >>> from escnn_attention import GroupSelfAttention, RotaryEncoding
        >>> g = gspaces.dihedralOnR3(4)
        >>> fields = nn.FieldType(g, 8 * [g.regular_repr])
        >>> layer = GroupSelfAttention(fields, fields, encoding=RotaryEncoding(), keys="own")

    Source: Su et al., "RoFormer", 2021, for rotary encodings; "Platonic Transformers", 2025, for their use in frames.
    """

    def __init__(self, num_frequencies: int | None = None, *, scale: float = math.pi, learned: bool = True):
        super().__init__(num_frequencies, scale, learned)

    def _build_offsets(self) -> None:
        pairs = self.channels // 2 if self.num_frequencies is None else self.num_frequencies
        if not 0 < 2 * pairs <= self.channels:
            raise ValueError(
                f"encoding: RotaryEncoding rotates {2 * max(pairs, 1)} channels and a head has {self.channels}; set "
                f"head_fields to {2 * max(pairs, 1)} or more"
            )
        self._draw_frequencies(self.num_heads, pairs, self.dim)

    def offsets(self, delta: Tensor) -> Tensor | None:
        return None

    def rotations(self) -> Tensor | None:
        return self.frequencies if self.bound and self.dim else None
