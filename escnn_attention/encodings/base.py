"""The base class of the positional encodings, the encoding without positions, and those by networks of the offset."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Literal, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from escnn_attention._checks import check_int
from escnn_attention.encodings.bias import EncodingBias
from escnn_attention.functional.call import Normalization
from escnn_attention.functional.layout import Versioned
from escnn_attention.functional.matmul import matmul
from escnn_attention.geometry.orbits import Orbits

Form = Literal["offsets", "features", "waves"]
"""A form of a function of the offset: its values, features with a linear readout, or waves with a linear readout."""

_Self = TypeVar("_Self", bound="Encoding")


@dataclass(frozen=True)
class Needs:
    """The projections that a layer needs for its scores, besides the values.

    Attributes:
        queries: whether scores depend on queries.
        keys: whether they depend on keys; without, keys are 1 in every channel.
        fields: the names of the projections, in the order of the rows of a projection's weight.
        key_bias: the number of leading channels of a head whose key bias changes the attention. In the other channels a
            bias adds the same to all scores of a query, which drops out of a softmax.

    Example:
        >>> from escnn_attention import MLPEncoding, RotaryEncoding
        >>> RotaryEncoding().needs(channels=5, dim=2)
        Needs(queries=True, keys=True, key_bias=4)
        >>> MLPEncoding().needs(channels=5, dim=2).key_bias, MLPEncoding().needs(5, 2, "count").key_bias
        (0, 5)
    """

    queries: bool = True
    keys: bool = True
    key_bias: int = 0
    fields: tuple[str, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        names = (*(("queries",) if self.queries else ()), "values", *(("keys",) if self.keys else ()))
        object.__setattr__(self, "fields", names)


class Encoding(Versioned, ABC):
    """Base class of the positional encodings.

    A subclass creates its parameters in ``_build_offsets`` and defines its function of the offset in one of three
    forms: as :meth:`offsets`, :meth:`features` or :meth:`waves`. ``form`` names this form, which layers use. From
    features and waves the base class derives the offsets. A subclass of another encoding that changes the function in
    one form sets ``form`` to it; where it changes the features of :class:`MLPEncoding`, which has offsets of its own,
    it overrides both.

    An encoding is made with its options and has no parameters yet; a layer *binds* a copy of it, which creates the
    parameters for the layer's heads. One instance can therefore be given to many layers, and they share nothing.

    Attributes:
        form: the form of the function of the offset; None for an encoding that has no such function.
        absolute: whether the encoding is a function of the positions themselves, added to queries and keys (GSA-Nets,
            Eq. 10), and not of their differences, added to the keys (Eq. 11).
        rotates: whether it has :meth:`rotations`, which rotate queries and keys.
        rotates_values: whether they rotate values, too.
        has_start: whether :meth:`start` sets the initial weights of queries and keys.
        per_head: whether every head has tables of its own; otherwise they share one.
        pair_bias: the class of the terms that are added to the scores between points, made of the encoding and tables.
        table_heads: the leading dimension of tables, of a bound encoding: the number of heads, or one.
        bound: whether the parameters exist.

    Example:
        >>> import torch
        >>> from escnn_attention import Encoding
        >>> class LinearEncoding(Encoding):
        ...     def _build_offsets(self) -> None:
        ...         self.readout = torch.nn.Linear(self.dim, self.num_heads * self.channels, bias=False)
        ...
        ...     def offsets(self, delta: torch.Tensor) -> torch.Tensor:
        ...         return self.readout(delta).unflatten(-1, (self.num_heads, self.channels)).movedim(-2, 0)
        >>> encoding = LinearEncoding().bind(dim=2, num_heads=3, channels=4, num_poses=8)
        >>> encoding.offsets(torch.randn(25, 2)).shape, encoding.poses().shape
        (torch.Size([3, 25, 4]), torch.Size([3, 8, 4]))
    """

    form: Form | None = "offsets"
    absolute: bool = False
    rotates: bool = False
    rotates_values: bool = False
    has_start: bool = False
    per_head: bool = True
    pair_bias = EncodingBias

    def __init__(self) -> None:
        super().__init__()
        self.bound = False
        self.dim = self.num_heads = self.table_heads = self.channels = self.num_poses = 0
        self.pose_embedding: Parameter | None = None
        self.pose_network: torch.nn.Sequential | None = None
        self._relative: Tensor | None = None
        self._orbits: Orbits | None = None

    @property
    def num_features(self) -> int:
        """How many numbers the function of the offset is made of: what a chunk of pairs of points has room for."""
        return self.channels

    @property
    def adds_to_keys(self) -> bool:
        """Whether the encoding is a function of the offset and the pose that is added to the keys, and nothing else."""
        return not (self.absolute or self.rotates)

    def bind(
        self: _Self,
        dim: int,
        num_heads: int,
        channels: int,
        num_poses: int,
        pose_features: int | Tensor = 0,
        orbits: Orbits | None = None,
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
            orbits: the orbits of the positions in the layer's window, for an encoding whose heads start at some of
                them; None where the layer is not on a grid with a finite group.

        Raises:
            ValueError: the encoding is bound already, ``channels`` are too few for it, or two forms of its function
                differ.
        """
        if self.bound:
            raise ValueError(f"encoding: this {type(self).__name__} belongs to a layer already; pass a new one")
        bound = copy.deepcopy(self)
        bound.bound = True
        bound.dim, bound.num_heads, bound.channels, bound.num_poses = dim, num_heads, channels, num_poses
        bound.table_heads = num_heads if bound.per_head else 1
        if isinstance(pose_features, Tensor):
            bound._relative = pose_features.to(torch.get_default_dtype()).flatten(0, -2)
        elif pose_features:
            bound._relative = torch.randn(512, pose_features)
        bound._orbits = orbits
        bound._build()
        bound._relative = bound._orbits = None
        bound._check_forms()
        return bound

    def needs(self, channels: int, dim: int, normalization: Normalization = "softmax") -> Needs:
        """The projections that a layer needs for its scores, with heads of C channels and offsets of ``dim`` numbers.

        A bias of the keys adds the same to all scores of a query and drops out of a softmax, except where the offset
        rotates it. Scores that are divided by the number of keys keep it.
        """
        return Needs(key_bias=channels if normalization == "count" else self.rotated_channels(channels) if dim else 0)

    def rotated_channels(self, channels: int) -> int:
        """The number of leading channels that :meth:`rotations` rotate, in a head of so many channels."""
        return channels if self.rotates else 0

    def start(self, queries: Tensor | None, bias: Tensor | None, keys: Tensor | None) -> None:
        """Set the initial weights of queries and keys, in place; an encoding that does so has ``has_start = True``.

        Args:
            queries, keys: ``(num_heads, C, in)``, the weights that make them; None for what is not needed.
            bias: ``(num_heads, C)``, that of the queries; None where they have none.
        """

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
                self.pose_embedding = Parameter(std * torch.randn(self.table_heads, self.num_poses, self.channels))
            else:
                self._build_pose_network(self._relative, std)

    def _build_pose_network(self, relative: Tensor, std: float) -> None:
        """A network of the features of a relative pose, ``(n, F)``, scaled as :meth:`_calibrate` scales offsets."""
        self.pose_network = self._pose_mlp(relative.shape[-1], self.table_heads * self._pose_channels())
        first = self.pose_network[0]
        assert isinstance(first, torch.nn.Linear)
        # Features have unit variance each, whatever their number: hidden units bend once or twice over the group.
        torch.nn.init.normal_(first.weight, std=1.5 / math.sqrt(relative.shape[-1]))
        with torch.no_grad():
            values = self.poses(relative)
            assert values is not None
            varies = values.var(dim=1, correction=0).mean().sqrt()
            last_linear(self.pose_network).weight.mul_(std / varies.clamp(min=1e-6))

    def _check_forms(self) -> None:
        """Check that the attributes agree with the methods: an inherited form must not be of another function."""
        name = type(self).__name__
        if not self.rotates and self.rotations() is not None:
            raise ValueError(f"encoding: {name} has rotations, needed rotates = True")
        if not self.dim or self.form in (None, "offsets"):
            return
        delta = spread_offsets(self.dim)
        if delta.is_meta:  # without values
            return
        with torch.no_grad():
            ours, derived = self.offsets(delta), self._derived_offsets(delta)
        if ours is None or derived is None:
            return
        if (ours - derived).abs().max() > 1e-3 * ours.abs().max():
            raise ValueError(
                f"encoding: offsets and {self.form} of {name} are different functions; needed form = 'offsets', or "
                "both overridden"
            )

    def _pose_mlp(self, inputs: int, outputs: int) -> torch.nn.Sequential:
        """The network of the features of a relative pose."""
        return coordinate_mlp(inputs, 16, 1, outputs, False)

    def _pose_channels(self) -> int:
        """The channels of the pose term; where they are fewer than those of a head they are its last ones."""
        return self.channels

    @abstractmethod
    def _build_offsets(self) -> None:
        """Create the parameters of the function of the offset."""

    def offsets(self, delta: Tensor) -> Tensor | None:
        r"""The function of the offset :math:`\rho_x`.

        Args:
            delta: ``(..., d)``, offsets in units of the window's reach.

        Returns:
            ``(heads or 1, ..., C)``; None where the encoding ignores offsets or there are none.

        Raises:
            TypeError: the class defines no function of the offset.
        """
        if self.form is None or not self.dim:
            return None
        values = self._derived_offsets(delta)
        if values is None:
            raise TypeError(f"encoding: {type(self).__name__} defines no offsets, needed them, or features or waves")
        return values

    def _derived_offsets(self, delta: Tensor) -> Tensor | None:
        """The function of the offset from its features."""
        offered = self.features(delta.reshape(-1, delta.shape[-1]).T.unsqueeze(0))
        if offered is None:
            return None
        features, readout = offered
        return (features.transpose(1, 2) @ readout.transpose(1, 2)).reshape(len(readout), *delta.shape[:-1], -1)

    def features(self, columns: Tensor) -> tuple[Tensor, Tensor] | None:
        r"""The function of the offset in the form :math:`\rho_x(\delta) = W \varphi(\delta)`.

        Attention between points then needs no :math:`\rho_x` for every pair: with
        :math:`\langle q, \rho_x(\delta) \rangle = \langle W^T q, \varphi(\delta) \rangle` a query reads features that
        all heads share. By default they are the cosines and sines of :meth:`waves`, if there are any.

        Args:
            columns: ``(B, d, n)``, offsets side by side, in units of the window's reach.

        Returns:
            :math:`\varphi`, ``(B, F, n)``, and W, ``(heads or 1, C, F)``; None where it has no such form.
        """
        waves = self.waves()
        if waves is None:
            return None
        frequencies, readout = waves
        phase = matmul(frequencies.unsqueeze(0), columns)
        return torch.cat([phase.cos(), phase.sin()], dim=1), readout

    def first_layer(self) -> tuple[Tensor, Tensor, Tensor] | None:
        r"""``(F, d)``, ``(F,)`` and the readout of features :math:`\mathrm{SiLU}(A\delta + b)`; None without.

        Kernels on a GPU make these by themselves, and hold none.
        """
        return None

    def waves(self) -> tuple[Tensor, Tensor] | None:
        r"""Ω ``(F, d)`` and W ``(heads or 1, C, 2F)`` of a function :math:`W [\cos\Omega\delta, \sin\Omega\delta]`.

        None where it has no such form.
        """
        return None

    def rotations(self) -> Tensor | None:
        """The frequencies of rotations of pairs of channels, ``(heads or 1, F, d)``; None where there are none.

        An encoding that has some has ``rotates = True``.
        """
        return None

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
            values = self.pose_network(relative).unflatten(-1, (self.table_heads, -1)).movedim(-2, 0)
        if values is None or values.shape[-1] == self.channels:
            return values
        return F.pad(values, (self.channels - values.shape[-1], 0))

    def _output_layers(self) -> list[torch.nn.Linear]:
        """The linear layers whose weights scale the function of the offset."""
        return []

    @torch.no_grad()
    def _calibrate(self, std: float) -> None:
        r"""Scale :math:`\rho_x` such that the score of a unit query has this standard deviation over the offsets.

        Only what changes from key to key counts: a constant is lost in the softmax.
        """
        values = self.offsets(spread_offsets(self.dim))
        if values is None:
            return
        varies = values.flatten(1, -2).var(dim=1, correction=0).mean().sqrt()
        for layer in self._output_layers():
            layer.weight.mul_(std / varies.clamp(min=1e-6))


class NoEncoding(Encoding):
    """No positions at all: the attention is equivariant to every permutation of the positions (Prop. 4.1).

    Ask for it by name, ``encoding="none"``. Poses are not distinguished either.

    Example:
        >>> import torch
        >>> from escnn_attention import GroupSelfAttention
        >>> from escnn import gspaces, nn
        >>> g = gspaces.rot2dOnR2(4)
        >>> fields = nn.FieldType(g, 2 * [g.regular_repr])
        >>> layer = GroupSelfAttention(fields, fields, kernel_size=None, encoding="none")
        >>> x = torch.randn(1, 8, 3, 3)
        >>> torch.allclose(layer(fields(x.roll(1, 2))).tensor, layer(fields(x)).tensor.roll(1, 2), atol=1e-5)
        True

    Source: GSA-Nets (Romero and Cordonnier 2021), Eqs. 3 and 8.
    """

    form = None

    def _build(self) -> None:
        pass

    def _build_offsets(self) -> None:
        pass


def spread_offsets(dim: int) -> Tensor:
    """Offsets ``(n, d)`` that fill the box [-1, 1]^d evenly: a lattice, or a Sobol sequence where that has too many."""
    if dim > 3:
        with torch.device("cpu"):  # The engine knows no other.
            points = torch.quasirandom.SobolEngine(dim).draw(1024, dtype=torch.get_default_dtype())
        return 2 * points.to(torch.empty(0).device) - 1
    axis = torch.linspace(-1, 1, 9)
    return torch.stack(torch.meshgrid([axis] * dim, indexing="ij"), dim=-1).flatten(0, -2)


def coordinate_mlp(inputs: int, hidden: int, layers: int, outputs: int, normalize_hidden: bool) -> torch.nn.Sequential:
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
        modules += [linear, *([torch.nn.LayerNorm(hidden, eps=1e-12)] if normalize_hidden else []), torch.nn.SiLU()]
    last = torch.nn.Linear(hidden, outputs, bias=False)
    torch.nn.init.normal_(last.weight, std=1 / math.sqrt(hidden))
    return torch.nn.Sequential(*modules, last)


def last_linear(mlp: torch.nn.Module) -> torch.nn.Linear:
    """The linear map with which a network ends."""
    last = list(mlp.children())[-1]
    assert isinstance(last, torch.nn.Linear)
    return last


class MLPEncoding(Encoding):
    r""":math:`\rho(\delta, p) = \mathrm{MLP}(\delta) + E[p]`, the encoding of GSA-Nets and the default of the layers.

    For a continuous group E is an MLP of the same kind.

    Args:
        hidden: the width of the hidden layers.
        layers: the number of hidden layers.
        per_head: whether every head has an encoding of its own; otherwise they share one, as in the published code.
        normalize_hidden: whether to normalise the hidden features, as the published code of GSA-Nets does, with an
            epsilon of 1e-12. Biases start at zero, so that the encoding depends on little more than the sign of a
            coordinate, and gradients at 0 are of order 1e6: use it for parity only.

    Example:
        >>> from escnn_attention import GroupSelfAttention, MLPEncoding
        >>> from escnn import gspaces, nn
        >>> g = gspaces.rot2dOnR2(4)
        >>> fields = nn.FieldType(g, 4 * [g.regular_repr])
        >>> layer = GroupSelfAttention(fields, fields, num_heads=2, kernel_size=5, encoding=MLPEncoding(hidden=32))

    Source: GSA-Nets (Romero and Cordonnier 2021), Section 3 and the published implementation.
    """

    form: Form | None = "features"

    def __init__(self, hidden: int = 16, layers: int = 1, *, per_head: bool = True, normalize_hidden: bool = False):
        super().__init__()
        self.hidden, self.layers = check_int("hidden", hidden), check_int("layers", layers)
        self.per_head, self.normalize_hidden = per_head, normalize_hidden
        self.mlp: torch.nn.Sequential | None = None

    @property
    def num_features(self) -> int:
        return self.hidden if self.form == "features" else self.channels

    def _build_offsets(self) -> None:
        outputs = self.table_heads * self.channels
        self.mlp = coordinate_mlp(self.dim, self.hidden, self.layers, outputs, self.normalize_hidden)

    def _pose_mlp(self, inputs: int, outputs: int) -> torch.nn.Sequential:
        return coordinate_mlp(inputs, self.hidden, self.layers, outputs, self.normalize_hidden)

    def _output_layers(self) -> list[torch.nn.Linear]:
        return [] if self.mlp is None else [last_linear(self.mlp)]

    def offsets(self, delta: Tensor) -> Tensor | None:
        if self.mlp is None:
            return None
        rows = delta.reshape(-1, delta.shape[-1])
        values: Tensor = self.mlp(rows)
        return values.view(*delta.shape[:-1], self.table_heads, self.channels).movedim(-2, 0)

    def features(self, columns: Tensor) -> tuple[Tensor, Tensor] | None:
        if self.mlp is None:
            return None
        *hidden, last = self.mlp
        if not isinstance(last, torch.nn.Linear) or cast(Tensor | None, last.bias) is not None:
            return None
        for layer in hidden:
            if isinstance(layer, torch.nn.Linear):
                weight, bias = layer.weight.expand(len(columns), -1, -1), cast(Tensor | None, layer.bias)
                columns = weight @ columns if bias is None else torch.baddbmm(bias.unsqueeze(-1), weight, columns)
            elif isinstance(layer, torch.nn.SiLU):
                columns = F.silu(columns, inplace=not torch.is_grad_enabled())  # the result of a linear map
            else:  # such as a norm, which acts on the last axis
                columns = layer(columns.transpose(1, 2)).transpose(1, 2)
        return columns, last.weight.unflatten(0, (self.table_heads, self.channels))

    def first_layer(self) -> tuple[Tensor, Tensor, Tensor] | None:
        modules = [] if self.mlp is None else list(self.mlp)
        kinds = [torch.nn.Linear, torch.nn.SiLU, torch.nn.Linear]
        if type(self).features is not MLPEncoding.features or [*map(type, modules)] != kinds:
            return None  # Of other functions, or of more layers.
        first, last = cast(list[torch.nn.Linear], modules[::2])
        shift = cast(Tensor | None, first.bias)
        if shift is None or cast(Tensor | None, last.bias) is not None:
            return None
        return first.weight, shift, last.weight.unflatten(0, (self.table_heads, self.channels))

    def extra_repr(self) -> str:
        return f"hidden={self.hidden}, layers={self.layers}, per_head={self.per_head}"


class AbsoluteEncoding(MLPEncoding):
    r"""The MLP encoding of the positions themselves, relative to the centre of the grid.

    Queries and keys become :math:`q + \rho(h^{-1}x, h^{-1}\tilde h)` and :math:`k + \rho(h^{-1}x', h^{-1}\hat h)`. The
    layer stays equivariant to the fiber group acting about the centre, and gives up translations on purpose
    (Prop. 4.2). Coordinates are in units of half the extent of the grid.

    The options are those of :class:`MLPEncoding`.

    Example:
        >>> import torch
        >>> from escnn_attention import AbsoluteEncoding
        >>> AbsoluteEncoding().bind(dim=2, num_heads=3, channels=4, num_poses=1).offsets(torch.randn(9, 2)).shape
        torch.Size([3, 9, 4])

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
        >>> import torch
        >>> from escnn_attention import SeparableEncoding
        >>> SeparableEncoding().bind(dim=2, num_heads=3, channels=4, num_poses=1).offsets(torch.randn(9, 2)).shape
        torch.Size([3, 9, 4])

    Source: the published implementation of GSA-Nets (row and column encoders).
    """

    form = "offsets"

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
            coordinate_mlp(1, self.hidden, self.layers, self.table_heads * width, self.normalize_hidden)
            for width in self._widths
        )

    def _output_layers(self) -> list[torch.nn.Linear]:
        return [last_linear(mlp) for mlp in self.coordinates] if self.dim else []

    def offsets(self, delta: Tensor) -> Tensor | None:
        if not self.dim:
            return None
        parts = [
            mlp(delta[..., i : i + 1]).unflatten(-1, (self.table_heads, width)).movedim(-2, 0)
            for i, (mlp, width) in enumerate(zip(self.coordinates, self._widths, strict=True))
        ]
        values = torch.cat(parts, dim=-1)
        return F.pad(values, (0, self.channels - values.shape[-1]))

    def _pose_channels(self) -> int:
        return self.channels - sum(self._widths)
