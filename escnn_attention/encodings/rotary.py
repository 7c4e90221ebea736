"""The encoding by rotations of channels."""

from __future__ import annotations

import math

from torch import Tensor

from escnn_attention._checks import check_bool
from escnn_attention.encodings.frequencies import FrequencyEncoding
from escnn_attention.encodings.needs import Needs
from escnn_attention.functional.call import Normalization

__all__ = ["RotaryEncoding"]


class RotaryEncoding(FrequencyEncoding):
    r"""Rotations of pairs of channels: :math:`\langle q, R(\Omega\delta)(k + E[p]) \rangle`.

    With ``constant_keys`` k is 1 in every channel: queries ask for offsets and poses, whatever lies there. Another
    constant would be a rotation and a factor of each pair of channels, which the projection to the queries can have.

    Queries and keys are rotated by the angles :math:`\Omega h^{-1}x` of their own positions, so that a score depends on
    the offset, and nothing but ordinary attention is left. With ``keys="own"`` a layer then costs what an ordinary
    transformer costs, with :math:`|H|` times the heads.

    With ``values`` the values that are attended to are rotated by the same angles, and the output tells how far away
    they were:

    .. math:: \mathrm{out}(x, h) = \sum \mathrm{softmax}(s_h) \; R(\Omega h^{-1}\Delta)\, v(x', \hat h)

    Args:
        num_frequencies: the number of rotated pairs; by default all channels of a head, C // 2 pairs.
        scale: the standard deviation of the entries of :math:`\Omega` at initialisation, in radians for each unit of
            the window's reach.
        learned: whether :math:`\Omega` is a parameter; otherwise it stays as drawn and is saved with the layer.
        constant_keys: whether keys are constant, and not made of the features.
        values: whether values are rotated, too.

    Raises:
        ValueError: on binding, when a head has fewer channels than are to be rotated; with ``constant_keys``, when it
            has channels that are not rotated, in which a query would read nothing of the offset.

    Example:
        >>> from escnn_attention import GroupSelfAttention, RotaryEncoding
        >>> from escnn import gspaces, nn
        >>> g = gspaces.dihedralOnR3(4)
        >>> fields = nn.FieldType(g, 8 * [g.regular_repr])
        >>> layer = GroupSelfAttention(fields, fields, kernel_size=None, encoding=RotaryEncoding(), keys="own")

    Source: Su et al., "RoFormer", 2021, for rotary encodings; "Platonic Transformers", 2025, for their use in frames,
    for keys that are constant, and for values that are rotated (there: RoPE on values).
    """

    def __init__(
        self,
        num_frequencies: int | None = None,
        *,
        scale: float = math.pi,
        learned: bool = True,
        constant_keys: bool = False,
        values: bool = False,
    ):
        super().__init__(num_frequencies, scale, learned)
        self.constant_keys = check_bool("constant_keys", constant_keys)
        self.rotates_values = check_bool("values", values)

    def needs(self, channels: int, dim: int, normalization: Normalization = "softmax") -> Needs:
        if not self.constant_keys:
            return super().needs(channels, dim, normalization)
        rotated = self.rotated_channels(channels) if dim else 0
        if rotated < channels:
            raise ValueError(
                f"encoding: RotaryEncoding(constant_keys=True) rotates {rotated} of the {channels} channels of a head, "
                "and keys are the same everywhere in the others; "
                + ("set head_fields to the number that it rotates" if dim else "there are no offsets to rotate by")
            )
        return Needs(keys=False)

    def rotated_channels(self, channels: int) -> int:
        return 2 * (channels // 2 if self.num_frequencies is None else self.num_frequencies)

    def _build_offsets(self) -> None:
        rotated = self.rotated_channels(self.channels)
        if not 0 < rotated <= self.channels:
            raise ValueError(
                f"encoding: RotaryEncoding rotates {max(rotated, 2)} channels and a head has {self.channels}; set "
                f"head_fields to {max(rotated, 2)} or more"
            )
        self._draw_frequencies(self.num_heads, rotated // 2, self.dim)

    def offsets(self, delta: Tensor) -> Tensor | None:
        return None

    def rotations(self) -> Tensor | None:
        return self.frequencies if self.bound and self.dim else None

    def extra_repr(self) -> str:
        extra = (", constant_keys=True" if self.constant_keys else "") + (
            ", values=True" if self.rotates_values else ""
        )
        return super().extra_repr() + extra
