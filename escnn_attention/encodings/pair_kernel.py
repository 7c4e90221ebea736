r"""Attention weights as functions of content and location: the kernels of the LieTransformer.

The default of the layers, :math:`\langle q, k + \rho(\delta, p) \rangle / \sqrt C`, lets the query decide what a
location is worth to it. The kernels here take the two apart.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from escnn_attention._checks import check_bool, check_int, check_option
from escnn_attention.encodings.base import Needs
from escnn_attention.exporting.mode import in_rows
from escnn_attention.functional.call import Normalization
from escnn_attention.functional.layout import Versioned
from escnn_attention.functional.matmul import matmul
from escnn_attention.functional.points.call import Halves, PairBias, PairScores, PairTables, products, repeats_of
from escnn_attention.functional.points.pair_mlp import pair_mlp
from escnn_attention.functional.tables import select_rows

Content = Literal["dot", "concat", "none"]
Location = Literal["mlp", "raw", "none"]
Combination = Literal["sum", "product", "mlp"]


class _KernelBias(PairBias):
    """The bias of a kernel between points."""

    def __init__(self, kernel: PairKernel, tables: PairTables):
        super().__init__(tables)
        self._kernel = kernel
        self._poses = tables.of_pairs(kernel.poses(tables.quotient, tables.relative))
        halved = tables.halves is not None and kernel.combine != "mlp"
        # The network has two layers.
        self.widths = 2 * kernel.hidden, (1 if halved else 2) * kernel.hidden

    def scores(self, q: Tensor, keys: Callable[[], Tensor], seen: Tensor, mutual: bool) -> PairScores:
        return self._kernel.score(q, keys, seen, self._poses, self.tables.halves if mutual else None)


class PairKernel(Versioned):
    r"""The score of a key as a function of content and location.

    .. math:: s = \phi\big( c(q, k),\; l(\delta, p) \big), \qquad
        \delta = r(h^{-1}x, h^{-1}x'), \quad p = h^{-1}\hat h

    with separate parameters for each head. Every argument is invariant under the group.

    Args:
        content: ``"dot"`` is :math:`\langle q, k \rangle / \sqrt C`; ``"concat"`` the vector
            :math:`W [q \| k]` of C numbers; ``"none"`` leaves the content out (location only).
        location: ``"mlp"`` is a number, :math:`w^T\mathrm{SiLU}(W'\mathrm{SiLU}(W\delta + b + E[p]))`; ``"raw"`` the
            vector :math:`(\delta, E[p])` itself; ``"none"`` leaves the location out.
        combine: ``"sum"`` and ``"product"`` of the two as numbers, or ``"mlp"``, a network of both with two hidden
            layers, :math:`w^T\mathrm{SiLU}(W'\mathrm{SiLU}(W[c, l] + b))`. A vector c becomes the number
            :math:`w^T\mathrm{SiLU}(c)`: of a linear map of c the part of the query would drop out of the softmax.
        hidden: the width of the networks.
        biases: whether the second and the last layer of the networks have biases, too, which start at zero:
            :math:`w^T\mathrm{SiLU}(W'\mathrm{SiLU}(\dots + b) + b') + b''`. The last layer has none where it would
            add the same to all scores of a query, which drops out of the softmax.
        last_activation: whether the networks end with one more SiLU,
            :math:`\mathrm{SiLU}(w^T\mathrm{SiLU}(\dots))`, so that the number is at least -0.28.

    Raises:
        ValueError: an unknown option; neither content nor location; a ``"product"`` without one of them; ``biases`` or
            ``last_activation`` without a network.

    Example:
        >>> from escnn_attention import PairKernel, PointSelfAttention
        >>> from escnn import gspaces, nn
        >>> g = gspaces.rot2dOnR2(4)
        >>> fields = nn.FieldType(g, 4 * [g.regular_repr])
        >>> kernel = PairKernel(content="concat", location="raw", combine="mlp", hidden=8)
        >>> layer = PointSelfAttention(fields, fields, num_heads=2, encoding=kernel, normalization="count")

    Source: Hutchinson et al., "LieTransformer", ICML 2021, Section 3.2 and Appendix C. The published default is
    ``PairKernel(biases=True, last_activation=True)``, and the kernel for QM9 ``PairKernel("concat", "raw", "mlp",
    hidden=6, biases=True, last_activation=True)`` with ``normalization="count"``, both of ``relation=LogMotion()``.
    """

    absolute = rotates = has_start = False

    bias: Parameter | None
    of_pose: Parameter | None
    location_hidden_bias: Parameter | None
    location_last_bias: Parameter | None
    join_hidden_bias: Parameter | None
    join_last_bias: Parameter | None

    pair_bias = _KernelBias

    def __init__(
        self,
        content: Content = "dot",
        location: Location = "mlp",
        combine: Combination = "sum",
        *,
        hidden: int = 16,
        biases: bool = False,
        last_activation: bool = False,
    ):
        super().__init__()
        for name, value, options in (
            ("content", content, ("dot", "concat", "none")),
            ("location", location, ("mlp", "raw", "none")),
            ("combine", combine, ("sum", "product", "mlp")),
        ):
            check_option(name, value, options)
        check_int("hidden", hidden)
        if content == "none" and location == "none":
            raise ValueError("location: got 'none' with content='none', and nothing is left to attend by")
        if combine == "product" and "none" in (content, location):
            raise ValueError("combine: got 'product', needed content and location, and one of them is 'none'")
        for name, option in (("biases", biases), ("last_activation", last_activation)):
            if check_bool(name, option) and "mlp" not in (location, combine):
                raise ValueError(f"{name}: got True, and there is no network, with neither location nor combine 'mlp'")
        self.content: Content = content
        self.location: Location = location
        self.combine: Combination = combine
        self.hidden = hidden
        self.biases, self.last_activation = biases, last_activation
        self.bound = False

    def needs(self, channels: int, dim: int, normalization: Normalization = "softmax") -> Needs:
        """The projections that a layer needs for its scores: see :meth:`escnn_attention.Encoding.needs`.

        A bias of keys drops out of a softmax only if the content is a product that is added to the location.
        """
        if self.content == "none":
            return Needs(queries=False, keys=False)
        drops_out = self.content == "dot" and self.combine == "sum" and normalization == "softmax"
        return Needs(key_bias=0 if drops_out else channels)

    @property
    def is_linear(self) -> bool:
        """Whether the location is a linear function that is added to the rest of the score."""
        return self.location == "raw" and self.combine == "sum"

    def bind(
        self,
        dim: int,
        num_heads: int,
        channels: int,
        num_poses: int,
        pose_features: int | Tensor = 0,
        *,
        normalization: Normalization = "softmax",
    ) -> PairKernel:
        """A copy with the parameters that do not drop out of a softmax: see :meth:`escnn_attention.Encoding.bind`."""
        if self.bound:
            raise ValueError("encoding: this PairKernel belongs to a layer already; pass a new one")
        bound = copy.deepcopy(self)
        bound.bound = True
        number = pose_features.shape[-1] if isinstance(pose_features, Tensor) else pose_features
        bound._build(dim, num_heads, channels, num_poses, number)
        if self.is_linear and normalization == "softmax":
            bound.bias = None
        if self.biases:
            bound._build_biases(num_heads, normalization)
        return bound

    def _build_biases(self, heads: int, normalization: Normalization) -> None:
        """The biases of the second layers, and of the last layers where they do not drop out of the softmax."""
        shifts = self.last_activation or normalization == "count"
        if self.location == "mlp":
            self.location_hidden_bias = Parameter(torch.zeros(heads, self.hidden))
            # In front of the network of both it is a bias of that network's first layer.
            matters = {"sum": shifts, "product": True, "mlp": self.last_activation}[self.combine]
            self.location_last_bias = Parameter(torch.zeros(heads)) if matters else None
        if self.combine == "mlp":
            self.join_hidden_bias = Parameter(torch.zeros(heads, self.hidden))
            self.join_last_bias = Parameter(torch.zeros(heads)) if shifts else None

    def _build(self, dim: int, heads: int, channels: int, num_poses: int, pose_features: int) -> None:
        self.num_heads, self.channels = heads, channels
        self.num_poses, self.pose_features = num_poses, pose_features
        self.bias = self.of_pose = None
        for name in ("location_hidden_bias", "location_last_bias", "join_hidden_bias", "join_last_bias"):
            setattr(self, name, None)
        hidden = self.hidden
        if self.content == "concat":
            self.of_query = _weight(heads, channels, channels)
            self.of_key = _weight(heads, channels, channels)
        contents = {"dot": 1, "concat": channels, "none": 0}[self.content]
        if self.combine != "mlp" and self.content == "concat":
            self.read_content = _weight(heads, contents, gain=2.0)
        # The first layer that location enters: of its own network, or of that of both.
        whole = self.combine == "mlp"
        first = hidden if self.location == "mlp" or whole else 1
        if self.location != "none":
            # Coordinates run over [-1, 1]: see the encodings.
            gain = 4.0 * dim if first > 1 or whole else 1.0
            self.of_offset = _weight(heads, first, dim, gain=gain)
            self.bias = Parameter(torch.empty(heads, first).uniform_(-1, 1))
            if num_poses > 1:
                features = pose_features or num_poses
                self.of_pose = _weight(heads, first, features, gain=float(features if not pose_features else 1))
            if self.location == "mlp":
                self.within = _weight(heads, hidden, hidden, gain=2.0)
                self.read_location = _weight(heads, hidden, gain=4.0)
        if whole:
            located = {"mlp": 1, "raw": hidden, "none": 0}[self.location]
            if contents:
                self.join_content = _weight(heads, hidden, contents)
            if located == 1:
                self.join_location = _weight(heads, hidden, 1)
            self.join_bias = Parameter(torch.empty(heads, hidden).uniform_(-1, 1))
            self.join_within = _weight(heads, hidden, hidden, gain=2.0)
            self.read_both = _weight(heads, hidden, gain=4.0)

    def poses(self, quotient: Tensor, relative: Tensor | None) -> Tensor | None:
        """The contribution ``(M, first, H, P)`` of poses to the first layer, by ``(H, P)`` indices or features."""
        if self.location == "none" or self.num_poses <= 1:
            return None
        assert self.of_pose is not None
        if relative is not None:
            return torch.einsum("hpf,mof->mohp", relative.to(self.of_pose.dtype), self.of_pose)
        return select_rows(self.of_pose.mT, quotient.flatten()).mT.unflatten(2, quotient.shape)

    def score(
        self,
        q: Tensor,
        keys: Callable[[], Tensor],
        seen: Tensor,
        pose: Tensor | None,
        halves: Halves | None = None,
    ) -> PairScores:
        """The terms of the scores of a chunk.

        Args:
            q, keys, seen: as in :meth:`escnn_attention.functional.points.call.PairBias.scores`.
            pose: as :meth:`poses` gives it, ``(M, first, H, J or 1, P)``: with P = 1 of the pose of the query.
            halves: of the poses, where every pair of points occurs in both orders and the pose -h sees a pair as h sees
                it in the other order; None elsewhere.
        """
        location = self._whole_location(seen, pose, halves)
        if location is not None and (repeats := repeats_of(q, seen.shape[0])) > 1:
            location = location.repeat_interleave(repeats, 5)
        if self.content == "dot" and self.combine == "sum":
            return PairScores(q / math.sqrt(self.channels), extra=None if location is None else location.squeeze(1))
        content = self._content(q, keys)
        if self.combine == "mlp":
            return PairScores(None, extra=self._join(content, location).squeeze(1))
        if content is not None and self.content == "concat":
            content = _dot(F.silu(content), self.read_content)
        numbers = [x.squeeze(1) for x in (content, location) if x is not None]
        if len(numbers) == 1:
            return PairScores(None, extra=numbers[0])
        return PairScores(None, extra=numbers[0] + numbers[1] if self.combine == "sum" else numbers[0] * numbers[1])

    def _whole_location(self, seen: Tensor, pose: Tensor | None, halves: Halves | None) -> Tensor | None:
        if halves is None or self.location != "mlp":
            return self._location(seen, pose)
        # The network is costly: it is evaluated for half of the poses.
        half = halves.half
        location = self._location(seen, None if pose is None else pose.index_select(2, half), half)
        assert location is not None
        other = location
        # The pose -h sees ĥ as h sees -ĥ.
        for axis in (3, 4):
            other = other.index_select(axis, halves.opposite) if other.shape[axis] > 1 else other
        whole = torch.cat([location, other.transpose(-1, -2)], dim=2)
        return whole if halves.order is None else whole.index_select(2, halves.order)

    def _content(self, q: Tensor, keys: Callable[[], Tensor]) -> Tensor | None:
        """The content of queries and keys, ``(M, number or vector, H or 1, J, P, G, A, K)``."""
        if self.content == "none":
            return None
        if self.content == "dot":
            return _channels_first(products(q, keys()).unsqueeze(-1)) / math.sqrt(self.channels)
        of_query = _map_heads(_channels_first(q[:, :, :, :, :, None, None]), self.of_query)
        return (of_query + _map_heads(_channels_first(keys().unsqueeze(4)), self.of_key)) / math.sqrt(2)

    def _location(self, seen: Tensor, pose: Tensor | None, only: Tensor | None = None) -> Tensor | None:
        """The location from some poses, ``(M, number or vector, H, J or 1, P or 1, G, A, K)``."""
        if self.location == "none":
            return None
        # All pairs of points in one row, for every pose, and for every pose of the keys that sees them differently.
        rows = in_rows(seen.permute(1, 3, 5, 0, 2, 4))  # H, P or 1, D, G, A, K
        rows, shape = rows.flatten(3), rows.shape[3:]
        rows = rows if only is None else rows.index_select(0, only)
        bias = self.of_offset.new_zeros(()) if self.bias is None else self.bias
        bias = bias.expand(self.of_offset.shape[:2])[:, :, None, None, None]
        bias = bias if pose is None else bias + pose  # M, first, H, J, P
        bias = bias.expand(-1, -1, len(rows), -1, max(bias.shape[4], rows.shape[1]))
        size = bias.shape[2:]
        if self.location == "mlp":
            # Poses of keys that see the same have other biases.
            bias = bias.flatten(3) if rows.shape[1] == 1 else bias.flatten(2).unsqueeze(-1)
            layers: tuple[Tensor, Tensor, Tensor] = (bias, self.of_offset, self.within)
            if self.location_hidden_bias is not None:
                layers = _with_constant(*layers, self.location_hidden_bias)
            numbers = pair_mlp(rows.flatten(0, 1), *layers, self.read_location)
            return self._last(numbers, self.location_last_bias).view(len(numbers), 1, *size, *shape)
        # A single product with long rows.
        first = matmul(self.of_offset.flatten(0, 1).unsqueeze(0), rows.movedim(2, 0).flatten(1).unsqueeze(0))
        first = first.view(*self.of_offset.shape[:2], len(rows), 1, rows.shape[1], *shape)
        return first + bias[..., None, None, None]

    def _join(self, content: Tensor | None, location: Tensor | None) -> Tensor:
        total = self.join_bias.view(*self.join_bias.shape, *[1] * 6)
        if content is not None:
            total = total + _map_heads(content, self.join_content)
        if location is not None:
            total = total + (_map_heads(location, self.join_location) if self.location == "mlp" else location)
        total = _map_heads(F.silu(total), self.join_within)
        if self.join_hidden_bias is not None:
            total = total + self.join_hidden_bias.view(*total.shape[:2], *[1] * 6)
        return self._last(_dot(F.silu(total), self.read_both), self.join_last_bias)

    def _last(self, numbers: Tensor, bias: Tensor | None) -> Tensor:
        """The output of a network whose last map gives the numbers ``(M, ...)``."""
        if bias is not None:
            numbers = numbers + bias.view(-1, *[1] * (numbers.dim() - 1))
        return F.silu(numbers) if self.last_activation else numbers

    def extra_repr(self) -> str:
        more = [f"{name}=True" for name in ("biases", "last_activation") if getattr(self, name)]
        return ", ".join([f"{self.content!r}, {self.location!r}, {self.combine!r}, hidden={self.hidden}", *more])


# The number whose SiLU is 1.
_INVERSE_OF_ONE = 1.2784645427610737


def _with_constant(bias: Tensor, first: Tensor, second: Tensor, hidden_bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The layers of :func:`pair_mlp` with one more hidden unit, which is always 1; its weight is a bias ``(M, S)``."""
    one = bias.new_full((), _INVERSE_OF_ONE).expand(len(bias), 1, *bias.shape[2:])
    return torch.cat([bias, one], dim=1), F.pad(first, (0, 0, 0, 1)), torch.cat([second, hidden_bias.unsqueeze(2)], 2)


def _channels_first(x: Tensor) -> Tensor:
    """Move the channels next to the heads: from ``(G, M, H, J, A, P, K, C)`` to ``(M, C, H, J, P, G, A, K)``."""
    return x.permute(1, 7, 2, 3, 5, 0, 4, 6)


def _map_heads(x: Tensor, weight: Tensor) -> Tensor:
    """A linear map ``(M, O, I)`` for each head of channels ``(M, I, ...)``: ``(M, O, ...)``."""
    return matmul(weight, x.flatten(2)).unflatten(2, x.shape[2:])


def _dot(x: Tensor, weight: Tensor) -> Tensor:
    """The product of channels ``(M, I, ...)`` with a vector ``(M, I)`` for each head: ``(M, 1, ...)``."""
    return _map_heads(x, weight.unsqueeze(1))


def _weight(heads: int, *shape: int, gain: float = 1.0) -> Parameter:
    """Weights with a variance of ``gain`` over their last axis."""
    return Parameter(torch.randn(heads, *shape) * math.sqrt(gain / shape[-1]))
