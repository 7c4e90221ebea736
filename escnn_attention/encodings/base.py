r"""Continuous positional encodings :math:`\rho(\delta, p)`.

An encoding is a function of an offset :math:`\delta \in R^d` and a pose p, and the layers evaluate it at
:math:`(h^{-1}\Delta, h^{-1}\hat h)`: the group acts on the *argument* of a continuous function, so that no table of
weights is ever interpolated (GSA-Nets, Section 5.1). All encodings here but the rotary one are sums

.. math:: \rho(\delta, p) = \rho_x(\delta) + E[p]

of a function of the offset and a learned table over the poses, which lets every backend keep the two apart. Where the
group is continuous and has no table, E is a network of the matrix of p. Offsets are measured in units of the window's
reach, so that they lie in [-1, 1] along the axes.

**Initialisation.** With inputs of unit variance queries and keys have unit variance, so the content score
:math:`\langle q, k\rangle/\sqrt C` has variance 1. The encodings are scaled to add a positional score of variance 1
too, half of it from the offset and half from the pose. Softmax over n keys with Gaussian scores of variance
:math:`\sigma^2` attends to about :math:`n e^{-\sigma^2/2}` of them (its perplexity): at :math:`\sigma^2 = 2` to a
third, which is neither uniform nor saturated.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

__all__ = [
    "AbsoluteEncoding",
    "Encoding",
    "FourierEncoding",
    "MLPEncoding",
    "NoEncoding",
    "RotaryEncoding",
    "SeparableEncoding",
    "as_encoding",
    "spread_offsets",
]

_Self = TypeVar("_Self", bound="Encoding")


class Encoding(torch.nn.Module, ABC):
    """Base class of the positional encodings.

    An encoding is made with its options and has no parameters yet; a layer *binds* a copy of it, which creates the
    parameters for the layer's heads. One instance can therefore be given to many layers, and they share nothing.

    Attributes:
        absolute: whether the encoding is a function of the positions themselves, added to queries and keys (GSA-Nets,
            Eq. 10), and not of their differences, added to the keys (Eq. 11).
        bound: whether the parameters exist.
    """

    absolute: bool = False

    def __init__(self) -> None:
        super().__init__()
        self.bound = False
        self.dim = self.num_heads = self.channels = self.num_poses = 0
        self.pose_embedding: Parameter | None = None
        self.pose_network: torch.nn.Sequential | None = None
        self._relative: Tensor | None = None

    def bind(
        self: _Self, dim: int, num_heads: int, channels: int, num_poses: int, pose_features: int | Tensor = 0
    ) -> _Self:
        """A copy with parameters.

        Args:
            dim: the dimension d of the offsets; 0 where there is no base space.
            num_heads: the number of heads.
            channels: the channels C of a head.
            num_poses: the number of poses of the keys; 1 where they have none, as in lifting.
            pose_features: the number F of features of a relative pose, from which a network makes the pose term in
                place of the table; or such features ``(..., F)``, of all pairs of poses, over which the network is
                scaled at initialisation. 0 for a table.

        Raises:
            ValueError: the encoding is bound already, or ``channels`` are too few for it.
        """
        if self.bound:
            raise ValueError(f"encoding: this {type(self).__name__} belongs to a layer already; pass a new one")
        bound = copy.deepcopy(self)
        bound.bound = True
        bound.dim, bound.num_heads, bound.channels, bound.num_poses = dim, num_heads, channels, num_poses
        if isinstance(pose_features, Tensor):
            bound._relative = pose_features.to(torch.get_default_dtype()).flatten(0, -2)
        elif pose_features:
            bound._relative = torch.randn(512, pose_features)
        bound._build()
        bound._relative = None
        return bound

    @property
    def has_poses(self) -> bool:
        """Whether the pose of a key matters; with a single pose its term is the same for all and drops out."""
        return self.num_poses > 1

    def _build(self) -> None:
        """Create the parameters. Called once, on the bound copy."""
        if self.dim:
            self._build_offsets()
            self._calibrate(math.sqrt(0.5) if self.has_poses else 1.0)
        if self.has_poses:
            std = math.sqrt(0.5) if self.dim else 1.0
            if self._relative is None:
                self.pose_embedding = Parameter(std * torch.randn(self._table_heads(), self.num_poses, self.channels))
            else:
                self._build_pose_network(self._relative, std)

    def _build_pose_network(self, relative: Tensor, std: float) -> None:
        """A network of the features of a relative pose, ``(n, F)``, scaled as :meth:`_calibrate` does offsets."""
        self.pose_network = self._pose_mlp(relative.shape[-1], self._table_heads() * self._pose_channels())
        first = self.pose_network[0]
        assert isinstance(first, torch.nn.Linear)
        # Features have unit variance each, whatever their number: hidden units bend once or twice over the group.
        torch.nn.init.normal_(first.weight, std=1.5 / math.sqrt(relative.shape[-1]))
        with torch.no_grad():
            values = self.poses(relative)
            assert values is not None
            varies = values.var(dim=1, correction=0).mean().sqrt()
            _last(self.pose_network).weight.mul_(std / varies.clamp(min=1e-6))

    def _pose_mlp(self, inputs: int, outputs: int) -> torch.nn.Sequential:
        """The network of the features of a relative pose."""
        return _mlp(inputs, 16, 1, outputs, False)

    def _pose_channels(self) -> int:
        """The channels of the pose term; where they are fewer than those of a head they are its last ones."""
        return self.channels

    def _table_heads(self) -> int:
        """The leading dimension of tables: one for each head, or one that all heads share."""
        return self.num_heads

    @abstractmethod
    def _build_offsets(self) -> None:
        """Create the parameters of the function of the offset."""

    @abstractmethod
    def offsets(self, delta: Tensor) -> Tensor | None:
        r"""The function of the offset :math:`\rho_x`.

        Args:
            delta: ``(..., d)``, offsets in units of the window's reach.

        Returns:
            ``(heads or 1, ..., C)``; None where the encoding ignores offsets or there are none.
        """

    def poses(self, relative: Tensor | None = None) -> Tensor | None:
        """The function E of the pose.

        Args:
            relative: ``(..., F)``, features of relative poses, for an encoding that was bound with some.

        Returns:
            the table over the poses, ``(heads or 1, |H|, C)``, or its values at the relative poses,
            ``(heads or 1, ..., C)``; None where the encoding ignores poses.
        """
        if self.pose_network is None:
            values: Tensor | None = self.pose_embedding
        elif relative is None:
            raise ValueError("relative: got None, needed the features of relative poses, of which there is no table")
        else:
            heads = self._table_heads()
            values = self.pose_network(relative).unflatten(-1, (heads, -1)).movedim(-2, 0)
        if values is None or values.shape[-1] == self.channels:
            return values
        return F.pad(values, (self.channels - values.shape[-1], 0))

    def waves(self) -> tuple[Tensor, Tensor] | None:
        r"""The function of the offset in the form :math:`W [\cos\Omega\delta, \sin\Omega\delta]`.

        Returns:
            :math:`\Omega`, ``(F, d)``, and W, ``(heads or 1, C, 2F)``; None where it has no such form.
        """
        return None

    def rotations(self) -> Tensor | None:
        """The frequencies of rotations of pairs of channels, ``(heads or 1, F, d)``; None where there are none."""
        return None

    def _output_layers(self) -> list[torch.nn.Linear]:
        """The linear layers whose weights scale the function of the offset."""
        return []

    @torch.no_grad()
    def _calibrate(self, std: float) -> None:
        r"""Scale :math:`\rho_x` such that the score of a unit query has this standard deviation over the offsets.

        Only what changes from key to key counts: a constant is lost in the softmax.
        """
        delta = spread_offsets(self.dim)
        values = self.offsets(delta)
        if values is None:
            return
        varies = values.flatten(1, -2).var(dim=1, correction=0).mean().sqrt()
        for layer in self._output_layers():
            layer.weight.mul_(std / varies.clamp(min=1e-6))


def spread_offsets(dim: int) -> Tensor:
    """Offsets ``(n, d)`` that fill the box [-1, 1]^d evenly: a lattice, or a Sobol sequence where that has too many."""
    if dim > 3:
        with torch.device("cpu"):  # The engine knows no other.
            points = torch.quasirandom.SobolEngine(dim).draw(1024, dtype=torch.get_default_dtype())
        return 2 * points.to(torch.empty(0).device) - 1
    axis = torch.linspace(-1, 1, 9)
    return torch.stack(torch.meshgrid([axis] * dim, indexing="ij"), dim=-1).flatten(0, -2)


class _HiddenNorm(torch.nn.LayerNorm):
    def __init__(self, features: int):
        super().__init__(features, eps=1e-12)


def _mlp(inputs: int, hidden: int, layers: int, outputs: int, normalize_hidden: bool) -> torch.nn.Sequential:
    """Linear maps with SiLU between them.

    Coordinates are the inputs, so the first layer decides how fast it varies: a standard deviation of 2 and offsets
    spread over the window let a hidden unit bend once or twice across it.
    """
    modules: list[torch.nn.Module] = []
    for layer in range(layers):
        linear = torch.nn.Linear(inputs if layer == 0 else hidden, hidden)
        torch.nn.init.normal_(linear.weight, std=2.0 if layer == 0 else 1 / math.sqrt(hidden))
        if normalize_hidden:
            torch.nn.init.zeros_(linear.bias)
        else:
            torch.nn.init.uniform_(linear.bias, -1.0, 1.0)
        modules += [linear, *([_HiddenNorm(hidden)] if normalize_hidden else []), torch.nn.SiLU()]
    last = torch.nn.Linear(hidden, outputs, bias=False)
    torch.nn.init.normal_(last.weight, std=1 / math.sqrt(hidden))
    return torch.nn.Sequential(*modules, last)


def _last(mlp: torch.nn.Module) -> torch.nn.Linear:
    last = list(mlp.children())[-1]
    assert isinstance(last, torch.nn.Linear)
    return last


def _positive(**values: int) -> None:
    for name, value in values.items():
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}: got {value!r}, needed a positive integer")


class MLPEncoding(Encoding):
    r""":math:`\rho(\delta, p) = \mathrm{MLP}(\delta) + E[p]`, the encoding of GSA-Nets and the default of the layers.

    For a continuous group E is an MLP of the same kind.

    Args:
        hidden: the width of the hidden layers.
        layers: the number of hidden layers.
        per_head: whether every head has an encoding of its own; otherwise they share one, as in the published code.
        normalize_hidden: normalise the hidden features, as the published code of GSA-Nets does, with an epsilon of
            1e-12. With the zero biases of its initialisation the encoding then sees little but the sign of a
            coordinate, and gradients at 0 are of order 1e6: for parity only.

    Example:
        >>> from escnn import gspaces, nn
        >>> from escnn_attention import GroupSelfAttention, MLPEncoding
        >>> g = gspaces.rot2dOnR2(4)
        >>> fields = nn.FieldType(g, 4 * [g.regular_repr])
        >>> layer = GroupSelfAttention(fields, fields, num_heads=2, kernel_size=5, encoding=MLPEncoding(hidden=32))

    Source: GSA-Nets (Romero and Cordonnier 2021), Section 3 and the published implementation.
    """

    def __init__(self, hidden: int = 16, layers: int = 1, *, per_head: bool = True, normalize_hidden: bool = False):
        super().__init__()
        _positive(hidden=hidden, layers=layers)
        self.hidden, self.layers, self.per_head, self.normalize_hidden = hidden, layers, per_head, normalize_hidden
        self.mlp: torch.nn.Sequential | None = None

    def _table_heads(self) -> int:
        return self.num_heads if self.per_head else 1

    def _build_offsets(self) -> None:
        outputs = self._table_heads() * self.channels
        self.mlp = _mlp(self.dim, self.hidden, self.layers, outputs, self.normalize_hidden)

    def _pose_mlp(self, inputs: int, outputs: int) -> torch.nn.Sequential:
        return _mlp(inputs, self.hidden, self.layers, outputs, self.normalize_hidden)

    def _output_layers(self) -> list[torch.nn.Linear]:
        return [] if self.mlp is None else [_last(self.mlp)]

    def offsets(self, delta: Tensor) -> Tensor | None:
        if self.mlp is None:
            return None
        return self.mlp(delta).unflatten(-1, (self._table_heads(), self.channels)).movedim(-2, 0)

    def extra_repr(self) -> str:
        return f"hidden={self.hidden}, layers={self.layers}, per_head={self.per_head}"


class AbsoluteEncoding(MLPEncoding):
    r"""The MLP encoding of the positions themselves, relative to the centre of the grid.

    Queries and keys become :math:`q + \rho(h^{-1}x, h^{-1}\tilde h)` and :math:`k + \rho(h^{-1}x', h^{-1}\hat h)`. The
    layer stays equivariant to the fiber group acting about the centre, and gives up translations on purpose
    (Prop. 4.2). Coordinates are in units of half the extent of the grid.

    The options are those of :class:`MLPEncoding`.

    Example:
        >>> from escnn import gspaces, nn
        >>> from escnn_attention import AbsoluteEncoding, GroupSelfAttention
        >>> g = gspaces.flipRot2dOnR2(4)
        >>> fields = nn.FieldType(g, 2 * [g.regular_repr])
        >>> layer = GroupSelfAttention(fields, fields, encoding=AbsoluteEncoding())

    Source: GSA-Nets (Romero and Cordonnier 2021), Eq. 10 and Prop. 4.2.
    """

    absolute = True


class SeparableEncoding(MLPEncoding):
    r"""One MLP for each coordinate and a table over the poses, side by side:
    :math:`\rho(\delta, p) = [\mathrm{MLP}_1(\delta_1), \dots, \mathrm{MLP}_d(\delta_d), E[p]]`.

    Every coordinate gets ``channels // (d + 1)`` channels and the poses the rest; in lifting, where there are no poses,
    the coordinates get ``channels // d`` and the last one the rest. The options are those of :class:`MLPEncoding`.

    Raises:
        ValueError: on binding, when a head has fewer channels than there are parts.

    Example:
        >>> from escnn import gspaces, nn
        >>> from escnn_attention import GroupSelfAttention, SeparableEncoding
        >>> g = gspaces.rot2dOnR2(4)
        >>> fields = nn.FieldType(g, 6 * [g.regular_repr])
        >>> layer = GroupSelfAttention(fields, fields, num_heads=2, encoding=SeparableEncoding())

    Source: the published implementation of GSA-Nets (row and column encoders).
    """

    def _build(self) -> None:
        parts = self.dim + self.has_poses
        if self.channels < parts:
            raise ValueError(
                f"encoding: SeparableEncoding divides the {self.channels} channels of a head among {parts} parts; "
                f"set head_fields to {parts} or more"
            )
        each = self.channels // max(parts, 1)
        self._widths = [each] * self.dim
        if self.dim and not self.has_poses:
            self._widths[-1] = self.channels - each * (self.dim - 1)
        super()._build()
        if self.pose_embedding is not None:
            # The same variance of the score from fewer channels.
            scale = math.sqrt(self.channels / self._pose_channels())
            self.pose_embedding = Parameter(scale * self.pose_embedding.detach()[..., -self._pose_channels() :].clone())

    def _build_offsets(self) -> None:
        self.coordinates = torch.nn.ModuleList(
            _mlp(1, self.hidden, self.layers, self._table_heads() * width, self.normalize_hidden)
            for width in self._widths
        )

    def _output_layers(self) -> list[torch.nn.Linear]:
        return [_last(mlp) for mlp in self.coordinates] if self.dim else []

    def offsets(self, delta: Tensor) -> Tensor | None:
        if not self.dim:
            return None
        heads = self._table_heads()
        parts = [
            mlp(delta[..., i : i + 1]).unflatten(-1, (heads, width)).movedim(-2, 0)
            for i, (mlp, width) in enumerate(zip(self.coordinates, self._widths, strict=True))
        ]
        values = torch.cat(parts, dim=-1)
        return F.pad(values, (0, self.channels - values.shape[-1]))

    def _pose_channels(self) -> int:
        return self.channels - sum(self._widths)


class _FrequencyEncoding(Encoding):
    """What encodings by frequencies share: options, and the frequencies themselves."""

    frequencies: Tensor

    def __init__(self, num_frequencies: int | None, scale: float, learned: bool):
        super().__init__()
        if num_frequencies is not None:
            _positive(num_frequencies=num_frequencies)
        if not scale > 0:
            raise ValueError(f"scale: got {scale!r}, needed a positive number")
        self.num_frequencies, self.scale, self.learned = num_frequencies, scale, learned

    def _draw_frequencies(self, *shape: int) -> None:
        frequencies = self.scale * torch.randn(shape)
        if self.learned:
            self.frequencies = Parameter(frequencies)
        else:
            self.register_buffer("frequencies", frequencies)

    def extra_repr(self) -> str:
        return f"num_frequencies={self.num_frequencies}, learned={self.learned}"


class FourierEncoding(_FrequencyEncoding):
    r""":math:`\rho(\delta, p) = W\,[\cos\Omega\delta, \sin\Omega\delta] + E[p]`.

    The encoding whose attention factorises: with it the scores are those of standard attention on widened vectors.

    Args:
        num_frequencies: the number of rows of :math:`\Omega`, which all heads share; W is each head's own.
        scale: the standard deviation of the entries of :math:`\Omega` at initialisation, in radians for each unit of
            the window's reach.
        learned: whether :math:`\Omega` is a parameter; otherwise it stays as drawn and is saved with the layer.

    Example:
        >>> from escnn import gspaces, nn
        >>> from escnn_attention import FourierEncoding, GroupSelfAttention
        >>> g = gspaces.rot2dOnR2(8)
        >>> fields = nn.FieldType(g, 4 * [g.regular_repr])
        >>> layer = GroupSelfAttention(fields, fields, num_heads=2, encoding=FourierEncoding(learned=False))

    Source: random Fourier features (Rahimi and Recht 2007) as a relative encoding in the sense of GSA-Nets, Eq. 11.
    """

    def __init__(self, num_frequencies: int = 16, *, scale: float = math.pi, learned: bool = True):
        super().__init__(num_frequencies, scale, learned)
        self.readout: torch.nn.Linear | None = None

    def _build_offsets(self) -> None:
        assert self.num_frequencies is not None
        self._draw_frequencies(self.num_frequencies, self.dim)
        self.readout = torch.nn.Linear(2 * self.num_frequencies, self.num_heads * self.channels, bias=False)
        torch.nn.init.normal_(self.readout.weight, std=1 / math.sqrt(self.num_frequencies))

    def _output_layers(self) -> list[torch.nn.Linear]:
        return [] if self.readout is None else [self.readout]

    def offsets(self, delta: Tensor) -> Tensor | None:
        if self.readout is None:
            return None
        phase = F.linear(delta, self.frequencies)
        waves = torch.cat([phase.cos(), phase.sin()], dim=-1)
        return self.readout(waves).unflatten(-1, (self.num_heads, self.channels)).movedim(-2, 0)

    def waves(self) -> tuple[Tensor, Tensor] | None:
        if self.readout is None:
            return None
        return self.frequencies, self.readout.weight.unflatten(0, (self.num_heads, self.channels))


class RotaryEncoding(_FrequencyEncoding):
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


class NoEncoding(Encoding):
    """No positions at all: the attention is equivariant to every permutation of the positions (Prop. 4.1).

    Ask for it by name, ``encoding="none"``. Poses are told apart no more than positions are.

    Source: GSA-Nets (Romero and Cordonnier 2021), Eqs. 3 and 8.
    """

    def _build(self) -> None:
        pass

    def _build_offsets(self) -> None:
        pass

    def offsets(self, delta: Tensor) -> Tensor | None:
        return None


_NAMES: dict[str, type[Encoding]] = {
    "mlp": MLPEncoding,
    "separable": SeparableEncoding,
    "fourier": FourierEncoding,
    "rotary": RotaryEncoding,
    "absolute": AbsoluteEncoding,
    "none": NoEncoding,
}


def as_encoding(encoding: Encoding | str | None) -> Encoding:
    """The encoding that an argument names: an encoding, one of its names, or None for the default.

    Raises:
        ValueError: the name is not known.
        TypeError: anything else.
    """
    if encoding is None:
        return MLPEncoding()
    if isinstance(encoding, Encoding):
        return encoding
    if isinstance(encoding, str):
        if encoding not in _NAMES:
            raise ValueError(f"encoding: got {encoding!r}, needed one of {', '.join(map(repr, _NAMES))}")
        return _NAMES[encoding]()
    raise TypeError(f"encoding: got {type(encoding).__name__}, needed an Encoding, a name or None")
