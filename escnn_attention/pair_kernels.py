r"""Attention weights as functions of content and location: the kernels of the LieTransformer.

The default of the layers, :math:`\langle q, k + \rho(\delta, p) \rangle / \sqrt C`, lets the query decide what a
location is worth to it. The kernels here take the two apart.
"""

from __future__ import annotations

import copy
import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from escnn_attention.functional.products import product

__all__ = ["Combination", "Content", "Location", "PairKernel"]

Content = Literal["dot", "concat", "none"]
Location = Literal["mlp", "raw", "none"]
Combination = Literal["sum", "product", "mlp"]


class PairKernel(torch.nn.Module):
    r"""The score of a key as a function of content and location.

    .. math:: s = \phi\big( c(q, k),\; l(\delta, p) \big), \qquad
        \delta = r(h^{-1}x, h^{-1}x'), \quad p = h^{-1}\hat h

    with parameters of its own for each head. Every argument is invariant when the group acts on everything.

    Args:
        content: ``"dot"`` is :math:`\langle q, k \rangle / \sqrt C`; ``"concat"`` the vector
            :math:`W [q \| k]` of C numbers; ``"none"`` leaves the content out (location only).
        location: ``"mlp"`` is a number, :math:`w^T\mathrm{SiLU}(W'\mathrm{SiLU}(W\delta + E[p]))`; ``"raw"`` the
            vector :math:`(\delta, E[p])` itself; ``"none"`` leaves the location out.
        combine: ``"sum"`` and ``"product"`` of the two as numbers, or ``"mlp"``, a network with two hidden layers of
            both together. Where a number is needed of a vector c it is :math:`w^T\mathrm{SiLU}(c)`: a linear map would
            leave nothing of the query in a softmax over sums.
        hidden: the width of the networks.

    Raises:
        ValueError: an unknown option; neither content nor location; a ``"product"`` of one thing.

    Example:
        >>> from escnn import gspaces, nn
        >>> from escnn_attention import PairKernel, PointSelfAttention
        >>> g = gspaces.rot2dOnR2(4)
        >>> fields = nn.FieldType(g, 4 * [g.regular_repr])
        >>> kernel = PairKernel(content="concat", location="raw", combine="mlp", hidden=8)
        >>> layer = PointSelfAttention(fields, fields, num_heads=2, encoding=kernel, normalization="count")

    Source: Hutchinson et al., "LieTransformer", ICML 2021, Section 3.2 and Appendix C. Its default is ``PairKernel()``,
    its kernel for QM9 ``PairKernel("concat", "raw", "mlp", hidden=6)`` with ``normalization="count"``.
    """

    def __init__(
        self,
        content: Content = "dot",
        location: Location = "mlp",
        combine: Combination = "sum",
        *,
        hidden: int = 16,
    ):
        super().__init__()
        for name, value, options in (
            ("content", content, ("dot", "concat", "none")),
            ("location", location, ("mlp", "raw", "none")),
            ("combine", combine, ("sum", "product", "mlp")),
        ):
            if value not in options:
                raise ValueError(f"{name}: got {value!r}, needed one of {', '.join(map(repr, options))}")
        if isinstance(hidden, bool) or not isinstance(hidden, int) or hidden < 1:
            raise ValueError(f"hidden: got {hidden!r}, needed a positive integer")
        if content == "none" and location == "none":
            raise ValueError("location: got 'none' with content='none', and nothing is left to attend by")
        if combine == "product" and "none" in (content, location):
            raise ValueError("combine: got 'product', needed content and location, and one of them is 'none'")
        self.content: Content = content
        self.location: Location = location
        self.combine: Combination = combine
        self.hidden = hidden
        self.bound = False

    def bind(
        self, dim: int, num_heads: int, channels: int, num_poses: int, pose_features: int | Tensor = 0
    ) -> PairKernel:
        """A copy with parameters: see :meth:`escnn_attention.encodings.Encoding.bind`."""
        if self.bound:
            raise ValueError("encoding: this PairKernel belongs to a layer already; pass a new one")
        bound = copy.deepcopy(self)
        bound.bound = True
        number = pose_features.shape[-1] if isinstance(pose_features, Tensor) else pose_features
        bound._build(dim, num_heads, channels, num_poses, number)
        return bound

    def _build(self, dim: int, heads: int, channels: int, num_poses: int, pose_features: int) -> None:
        self.num_heads, self.channels = heads, channels
        self.num_poses, self.pose_features = num_poses, pose_features
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
        r"""What the pose adds to the first layer of the location, ``(M, first, H, P)``.

        Args:
            quotient: ``(H, P)``; the index of :math:`h^{-1}\hat h`.
            relative: ``(H, P, F)``, features of it, where the fiber group is continuous.
        """
        if self.location == "none" or self.num_poses <= 1:
            return None
        if relative is not None:
            return torch.einsum("hpf,mof->mohp", relative.to(self.of_pose.dtype), self.of_pose)
        return self.of_pose[:, :, quotient]

    def score(self, q: Tensor, k: Tensor, seen: Tensor, pose: Tensor | None, opposite: Tensor | None = None) -> Tensor:
        """The scores of :class:`escnn_attention.functional.points.Scores`.

        Args:
            q, k, seen: as there.
            pose: as :meth:`poses` gives it, ``(M, first, H, J or 1, P)``: with P = 1 of the pose of the query.
            opposite: ``(H,)``, the index of -h, where every pair of points is there both ways round and what -h sees of
                one is what h sees of the other; None elsewhere.
        """
        content = self._content(q, k)
        if opposite is None or self.location != "mlp":
            location = self._location(seen, pose)
        else:
            # A network of many numbers for each: from half of the poses.
            half = (opposite > torch.arange(len(opposite), device=opposite.device)).nonzero().squeeze(-1)
            location = self._location(seen[:, half], None if pose is None else pose[:, :, half])
            assert location is not None
            other = location.transpose(-1, -2)
            # What -h sees of ĥ is what h sees of -ĥ.
            other = other[:, :, :, opposite] if other.shape[3] > 1 else other
            other = other[:, :, :, :, opposite] if other.shape[4] > 1 else other
            order = torch.cat([half, opposite[half]]).argsort()
            location = torch.cat([location, other], dim=2)[:, :, order]
        if self.combine == "mlp":
            return _outside(self._join(content, location))
        if content is not None and self.content == "concat":
            content = _dot(F.silu(content), self.read_content)
        numbers = [_outside(x) for x in (content, location) if x is not None]
        if len(numbers) == 1:
            return numbers[0]
        return numbers[0] + numbers[1] if self.combine == "sum" else numbers[0] * numbers[1]

    def _content(self, q: Tensor, k: Tensor) -> Tensor | None:
        """``(M, number or vector, H or 1, J, P, G, A, K)``."""
        if self.content == "none":
            return None
        if self.content == "dot":
            return _inside(products(q, k).unsqueeze(-1)) / math.sqrt(self.channels)
        of_query = _of_heads(_inside(q[:, :, :, :, :, None, None]), self.of_query)
        return (of_query + _of_heads(_inside(k.unsqueeze(4)), self.of_key)) / math.sqrt(2)

    def _location(self, seen: Tensor, pose: Tensor | None) -> Tensor | None:
        """``(M, number or vector, H, J or 1, P or 1, G, A, K)``."""
        if self.location == "none":
            return None
        # All pairs of points side by side, so that every layer is a product with long rows.
        seen = seen.permute(5, 1, 3, 0, 2, 4).unsqueeze(2)  # D, H, 1, P, G, A, K
        weight = torch.cat([self.of_offset, self.bias.unsqueeze(-1)], dim=-1).flatten(0, 1)
        rows = torch.cat([seen.flatten(1), seen.new_ones(1, seen[0].numel())])
        first = product(weight.unsqueeze(0), rows.unsqueeze(0)).view(*self.bias.shape, *seen.shape[1:])
        if pose is not None:
            first = first + pose[..., None, None, None]
        if self.location == "mlp":
            first = _dot(F.silu(_of_heads(F.silu(first), self.within)), self.read_location)
        return first

    def _join(self, content: Tensor | None, location: Tensor | None) -> Tensor:
        total = self.join_bias.view(*self.join_bias.shape, *[1] * 6)
        if content is not None:
            total = total + _of_heads(content, self.join_content)
        if location is not None:
            total = total + (_of_heads(location, self.join_location) if self.location == "mlp" else location)
        return _dot(F.silu(_of_heads(F.silu(total), self.join_within)), self.read_both)

    def extra_repr(self) -> str:
        return f"{self.content!r}, {self.location!r}, {self.combine!r}, hidden={self.hidden}"


def products(q: Tensor, k: Tensor) -> Tensor:
    """``(G, M, H, J, A, P, K)``, of queries ``(G, M, H, J, A, C)`` with keys ``(G, M, H', J', P, K, C)``."""
    if k.shape[2] == k.shape[3] == 1:
        out = product(q.flatten(2, 4), k[:, :, 0, 0].flatten(2, 3).transpose(-1, -2)).unflatten(2, q.shape[2:5])
    else:
        out = product(q, k.flatten(4, 5).transpose(-1, -2))
    return out.unflatten(-1, k.shape[4:6])


def _inside(x: Tensor) -> Tensor:
    """From ``(G, M, H, J, A, P, K, C)`` to ``(M, C, H, J, P, G, A, K)``."""
    return x.permute(1, 7, 2, 3, 5, 0, 4, 6)


def _outside(x: Tensor) -> Tensor:
    """And back, from numbers ``(M, 1, H, J, P, G, A, K)``."""
    return x.squeeze(1).permute(4, 0, 1, 2, 5, 3, 6)


def _of_heads(x: Tensor, weight: Tensor) -> Tensor:
    """``(M, I, ...)`` with ``(M, O, I)``."""
    return product(weight, x.flatten(2)).unflatten(2, x.shape[2:])


def _dot(x: Tensor, weight: Tensor) -> Tensor:
    """``(M, I, ...)`` with ``(M, I)``: ``(M, 1, ...)``."""
    return _of_heads(x, weight.unsqueeze(1))


def _weight(heads: int, *shape: int, gain: float = 1.0) -> Parameter:
    """Weights with a variance of ``gain`` over their last axis."""
    return Parameter(torch.randn(heads, *shape) * math.sqrt(gain / shape[-1]))
