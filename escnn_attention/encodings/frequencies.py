"""The encodings by frequencies: waves that are added to the keys, and rotations of queries and keys."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import Parameter

from escnn_attention._checks import check_bool, check_int, check_length
from escnn_attention.encodings.base import Encoding, Needs
from escnn_attention.functional.call import Normalization


class FrequencyEncoding(Encoding):
    """Base class of the encodings by frequencies, with their options and the frequencies themselves."""

    frequencies: Tensor

    def __init__(self, num_frequencies: int | None, scale: float, learned: bool):
        super().__init__()
        if num_frequencies is not None:
            check_int("num_frequencies", num_frequencies)
        self.num_frequencies, self.learned = num_frequencies, learned
        self.scale = check_length("scale", scale, "number")

    def _draw_frequencies(self, *shape: int) -> None:
        frequencies = self.scale * torch.randn(shape)
        if self.learned:
            self.frequencies = Parameter(frequencies)
        else:
            self.register_buffer("frequencies", frequencies)

    def extra_repr(self) -> str:
        return f"num_frequencies={self.num_frequencies}, learned={self.learned}"


class FourierEncoding(FrequencyEncoding):
    r"""Waves of the offset: :math:`\rho(\delta, p) = W\,[\cos\Omega\delta, \sin\Omega\delta] + E[p]`.

    Its attention factorises: the scores are those of standard attention on wider vectors.

    Args:
        num_frequencies: the number of rows of :math:`\Omega`, which all heads share; W is each head's own.
        scale: the standard deviation of the entries of :math:`\Omega` at initialisation, in radians for each unit of
            the window's reach.
        learned: whether :math:`\Omega` is a parameter; otherwise it stays as drawn, and is saved with the layer.

    Example:
        >>> from escnn_attention import FourierEncoding
        >>> frequencies, readout = FourierEncoding(8).bind(dim=2, num_heads=3, channels=4, num_poses=1).waves()
        >>> frequencies.shape, readout.shape
        (torch.Size([8, 2]), torch.Size([3, 4, 16]))

    Source: random Fourier features (Rahimi and Recht 2007) as a relative encoding in the sense of GSA-Nets, Eq. 11.
    """

    form = "waves"

    def __init__(self, num_frequencies: int = 16, *, scale: float = math.pi, learned: bool = True):
        super().__init__(num_frequencies, scale, learned)
        self.readout: torch.nn.Linear | None = None

    def _build_offsets(self) -> None:
        assert self.num_frequencies is not None
        self._draw_frequencies(self.num_frequencies, self.dim)
        self.readout = torch.nn.Linear(2 * self.num_frequencies, self.num_heads * self.channels, bias=False)
        torch.nn.init.normal_(self.readout.weight, std=1 / math.sqrt(self.num_frequencies))

    @property
    def num_features(self) -> int:
        return 2 * (self.num_frequencies or 0)

    def _output_layers(self) -> list[torch.nn.Linear]:
        return [] if self.readout is None else [self.readout]

    def waves(self) -> tuple[Tensor, Tensor] | None:
        if self.readout is None:
            return None
        return self.frequencies, self.readout.weight.unflatten(0, (self.num_heads, self.channels))


class RotaryEncoding(FrequencyEncoding):
    r"""Rotations of pairs of channels: :math:`\langle q, R(\Omega\delta)(k + E[p]) \rangle`.

    Queries and keys are rotated by the angles :math:`\Omega h^{-1}x` of their own positions, so that a score depends on
    the offset, and the rest is ordinary attention. With ``keys="own"`` a layer costs as much as an ordinary transformer
    with :math:`|H|` times the heads.

    With ``constant_keys`` k is 1 in every channel: scores depend on offsets and poses, not on the features of the keys.

    With ``values`` the values are rotated by the same angles, so that the output depends on their offsets:

    .. math:: \mathrm{out}(x, h) = \sum \mathrm{softmax}(s_h) \; R(\Omega h^{-1}\Delta)\, v(x', \hat h)

    Args:
        num_frequencies: the number of rotated pairs; by default all channels of a head, C // 2 pairs.
        scale: the standard deviation of the entries of :math:`\Omega` at initialisation, in radians for each unit of
            the window's reach.
        learned: whether :math:`\Omega` is a parameter; otherwise it stays as drawn, and is saved with the layer.
        constant_keys: whether keys are constant instead of projections of the features.
        values: whether values are rotated, too.

    Raises:
        ValueError: on binding, if a head has fewer channels than are to be rotated; with ``constant_keys``, if it has
            channels that are not rotated, whose scores would not depend on the offset.

    Example:
        >>> from escnn_attention import GroupSelfAttention, RotaryEncoding
        >>> from escnn import gspaces, nn
        >>> g = gspaces.dihedralOnR3(4)
        >>> fields = nn.FieldType(g, 8 * [g.regular_repr])
        >>> layer = GroupSelfAttention(fields, fields, kernel_size=None, encoding=RotaryEncoding(), keys="own")

    Source: Su et al., "RoFormer", 2021, for rotary encodings; "Platonic Transformers", 2025, for their use in frames,
    for constant keys and rotated values (there: RoPE on values).
    """

    form = None
    rotates = True

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

    def rotations(self) -> Tensor | None:
        return self.frequencies if self.bound and self.dim else None

    def extra_repr(self) -> str:
        extra = (", constant_keys=True" if self.constant_keys else "") + (
            ", values=True" if self.rotates_values else ""
        )
        return super().extra_repr() + extra
