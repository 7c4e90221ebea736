"""The base class of the positional encodings: what is bound to a layer, and its term of the pose."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from escnn_attention.encodings.bias import EncodingBias
from escnn_attention.encodings.needs import Needs
from escnn_attention.encodings.networks import coordinate_mlp, last_linear
from escnn_attention.functional.call import Normalization
from escnn_attention.functional.layout import Versioned
from escnn_attention.functional.matmul import matmul
from escnn_attention.functional.points.bias import PairBias, PairTables
from escnn_attention.geometry.orbits import Orbits

__all__ = ["Encoding", "spread_offsets"]


_Self = TypeVar("_Self", bound="Encoding")


class Encoding(Versioned, ABC):
    """Base class of the positional encodings.

    A subclass makes its parameters in ``_build_offsets`` and says its function of the offset as :meth:`offsets`, as
    :meth:`features` or as :meth:`waves`; layers take whichever form serves them best.

    An encoding is made with its options and has no parameters yet; a layer *binds* a copy of it, which creates the
    parameters for the layer's heads. One instance can therefore be given to many layers, and they share nothing.

    Attributes:
        absolute: whether the encoding is a function of the positions themselves, added to queries and keys (GSA-Nets,
            Eq. 10), and not of their differences, added to the keys (Eq. 11).
        rotates_values: whether :meth:`rotations` are for values, too.
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

    absolute: bool = False
    rotates_values: bool = False

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Take the function of the offset from the nearest class that says anything of it, and from no other.

        A class says it as :meth:`offsets`, :meth:`features` or :meth:`waves`, and what it leaves out follows from what
        it says: a subclass that overrides one of them does not inherit another that is of another function.
        """
        super().__init_subclass__(**arguments)
        default = {"offsets": Encoding._offsets_of_features, "features": Encoding.features, "waves": Encoding.waves}
        place = {name: [name in vars(c) for c in cls.__mro__].index(True) for name in default}
        for name, method in default.items():
            if place[name] > min(place.values()):
                setattr(cls, name, method)

    def __init__(self) -> None:
        super().__init__()
        self.bound = False
        self.dim = self.num_heads = self.channels = self.num_poses = 0
        self.pose_embedding: Parameter | None = None
        self.pose_network: torch.nn.Sequential | None = None
        self._relative: Tensor | None = None
        self._orbits: Orbits | None = None

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
            orbits: what there is to look at in the layer's window, for an encoding that begins with some of it; None
                where the layer is not on a grid with a finite group.

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
        bound._orbits = orbits
        bound._build()
        bound._relative = bound._orbits = None
        return bound

    def needs(self, channels: int, dim: int, normalization: Normalization = "softmax") -> Needs:
        """What a layer makes of its features for the scores, with heads of so many channels.

        A bias of the keys adds the same to all scores of a query and drops out of a softmax, but where the offset
        rotates it. Scores that are divided by the number of keys are what they are.

        Args:
            channels: the channels C of a head.
            dim: the dimension of the offsets.
            normalization: what becomes of the scores.
        """
        return Needs(key_bias=channels if normalization == "count" else self.rotated_channels(channels) if dim else 0)

    def rotated_channels(self, channels: int) -> int:
        """How many of the first channels of a head of so many :meth:`rotations` rotate."""
        return 0 if type(self).rotations is Encoding.rotations else channels

    def start(self, queries: Tensor | None, bias: Tensor | None, keys: Tensor | None) -> None:
        """Set how queries and keys begin, in place, where the encoding wants them otherwise than random.

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
            last_linear(self.pose_network).weight.mul_(std / varies.clamp(min=1e-6))

    def drop_poses(self) -> None:
        """Do without the term of the pose: the function of the offset stays the one that the layer has beside it."""
        self.pose_embedding = None
        if self.pose_network is not None:
            del self.pose_network  # A module that is None would take what is saved of one, and say nothing.
            self.pose_network = None

    @torch.no_grad()
    def saved_pose(self, saved: Mapping[str, Tensor], index: int | None, features: Tensor | None) -> Tensor:
        """The term of one pose as an encoding has it that was bound with poses and saved, ``(heads, C)``.

        Args:
            saved: its parameters by name, those of the term of the pose among them.
            index: the pose, of a table.
            features: ``(F,)``, the features of the pose, of a network.
        """
        if "pose_embedding" in saved:
            values = saved["pose_embedding"][:, index]
        else:
            assert features is not None
            start = "pose_network."
            weights = {n.removeprefix(start): t for n, t in saved.items() if n.startswith(start)}
            like = next(iter(weights.values()))
            network = self._pose_mlp(len(features), self._table_heads() * self._pose_channels()).to(like)
            network.load_state_dict(weights)
            values = network(features.to(like)).unflatten(-1, (self._table_heads(), -1))
        return F.pad(values, (self.channels - values.shape[-1], 0)).expand(self.num_heads, -1)

    def _pose_mlp(self, inputs: int, outputs: int) -> torch.nn.Sequential:
        """The network of the features of a relative pose."""
        return coordinate_mlp(inputs, 16, 1, outputs, False)

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

    def _offsets_of_features(self, delta: Tensor) -> Tensor | None:
        """:meth:`offsets` of an encoding that says its :meth:`features` or :meth:`waves`."""
        offered = self.features(delta.reshape(-1, delta.shape[-1]).T.unsqueeze(0)) if self.dim else None
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

        Example:
            >>> import torch
            >>> from escnn_attention import MLPEncoding
            >>> encoding = MLPEncoding(hidden=8).bind(dim=2, num_heads=3, channels=4, num_poses=1)
            >>> delta = torch.randn(5, 2)
            >>> features, readout = encoding.features(delta.T.unsqueeze(0))
            >>> features.shape, readout.shape
            (torch.Size([1, 8, 5]), torch.Size([3, 4, 8]))
            >>> torch.allclose((readout @ features).mT, encoding.offsets(delta), atol=1e-5)
            True
        """
        waves = self.waves()
        if waves is None:
            return None
        frequencies, readout = waves
        phase = matmul(frequencies.unsqueeze(0), columns)
        return torch.cat([phase.cos(), phase.sin()], dim=1), readout

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

    def pair_bias(self, tables: PairTables) -> PairBias:
        """What the encoding adds to the scores between points.

        Args:
            tables: what the layer knows of the group and of the pairs.
        """
        return EncodingBias(self, tables)

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
