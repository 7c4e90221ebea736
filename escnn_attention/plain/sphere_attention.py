"""Self-attention between points of the sphere, on plain tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from escnn_attention._precision import working_precision
from escnn_attention.functional.points.bias import Relate
from escnn_attention.geometry.points import Points
from escnn_attention.plain.blocks import PointTransformerBlock
from escnn_attention.plain.local_frames import LocalFrames, angles_of, frames_at
from escnn_attention.plain.point_attention import PointAttention, from_poses
from escnn_attention.plain.projections import FromPoses, ToPoses

__all__ = ["SphereAttention", "SphereFeedForward", "SphereTransformerBlock"]


class SphereAttention(PointAttention):
    r"""Attention between functions on the frames of points.

    The poses of a point x are its frames :math:`R(x) h` with h in the stabiliser of the north pole. What one frame sees
    of another is their quotient, of which the last column is the position of the key, and the others are its axes.

    Args:
        into, out_of: to the frame of each point, and back.
        axes: how many axes of the key's frame a query sees: 0 where keys have no poses, 1 for rotations, 2 where there
            are reflections.
        arguments: of :class:`~escnn_attention.plain.point_attention.PointAttention`, with the inverse matrices of the
            elements h of the stabiliser.
    """

    def __init__(self, into: LocalFrames, out_of: LocalFrames, axes: int, **arguments: Any):
        super().__init__(**arguments)
        self.into = into
        self.out_of = out_of
        self.axes = axes

    def of_all(
        self,
        x: Tensor,
        coords: Tensor,
        edge_index: Tensor | None,
        batch: Tensor | None,
        measure: Tensor | None,
        edge_attr: Tensor | None,
    ) -> Tensor:
        angles = angles_of(coords.to(working_precision(self.inverse_action.dtype)))
        frames = Points(frames_at(*angles).flatten(1), coords, edge_index, batch, self.neighbourhood, edge_attr)
        return self.out_of.outward(self.attend(self.into.inward(x, *angles), frames, measure), *angles)

    def relate(self) -> Relate:
        """What the encoding sees of two points: their frames, from each other."""
        return SeenOnSphere(self.inverse_action, self.axes, self.length_scale)

    @property
    def sees_offsets(self) -> bool:
        """Whether the encoding sees the offset alone: here of frames."""
        return False


class SeenOnSphere:
    """What every frame of a point of the sphere sees of another point and of its frames.

    Args:
        inverse: ``(S, 3, 3)``; the inverse matrices of the elements of the stabiliser.
        axes: how many axes of the key's frame a query sees.
        length_scale: the unit of distances.
    """

    def __init__(self, inverse: Tensor, axes: int, length_scale: float):
        self._inverse, self._axes, self._length_scale = inverse, axes, length_scale

    def __call__(self, query: Tensor, key: Tensor) -> Tensor:
        """What every frame of the query sees of the key and of its frames, ``(G, S, A, S or 1, K, 3 + 3 · axes)``.

        Args:
            query, key: ``(G, A, 1, 9)`` and ``(G, 1, K, 9)``; the matrices of the frames of the points.
        """
        query, key = query.unflatten(-1, (3, 3)), key.unflatten(-1, (3, 3))
        inverse, dtype = self._inverse.to(query.dtype), self._inverse.dtype
        # The difference is taken first: what one frame sees of a near point is a small number.
        apart = (key[..., 2] - query[..., 2]) / self._length_scale  # G, A, K, 3
        into = query.transpose(-1, -2)
        offset = from_poses((into @ apart.unsqueeze(-1)).squeeze(-1), inverse).unsqueeze(-2)
        if not self._axes:
            return offset.permute(0, 3, 1, 4, 2, 5).to(dtype)
        seen = torch.einsum("sij,gakjl->gaksil", inverse, into @ key)  # of the key's own frame
        stabiliser = inverse.transpose(-1, -2)[..., : self._axes]  # S, 3, axes
        axes = torch.einsum("gaksij,tjn->gakstni", seen, stabiliser).flatten(-2)
        whole = torch.cat([offset.expand(*axes.shape[:-1], 3), axes], dim=-1)  # G, A, K, S, S, 3 + 3 · axes
        return whole.permute(0, 3, 1, 4, 2, 5).to(dtype)


class SphereFeedForward(torch.nn.Module):
    """A network at every point, on functions on its frames: ``(N, in)`` to ``(N, in)``."""

    def __init__(self, frames: LocalFrames, expand: ToPoses, contract: FromPoses):
        super().__init__()
        self.frames = frames
        self.expand = expand
        self.contract = contract

    def forward(self, x: Tensor, coords: Tensor) -> Tensor:
        angles = angles_of(coords.to(working_precision(self.contract.weight.dtype)))
        hidden = torch.nn.functional.silu(self.expand(self.frames.inward(x, *angles).unsqueeze(0)))
        return self.frames.outward(self.contract(hidden).squeeze(0), *angles)


class SphereTransformerBlock(PointTransformerBlock):
    """A transformer block whose pointwise network sees where points are."""

    def __init__(self, norms: torch.nn.ModuleList, gains: torch.nn.ModuleList, *modules: torch.nn.Module):
        super().__init__(norms[0], *modules)
        self.feed_norm = norms[1]
        self.feed_after: torch.nn.Module = torch.nn.Identity()
        if len(gains):
            self.after, self.feed_after = gains

    def _feed(self, y: Tensor, coords: Tensor) -> Tensor:
        z: Tensor = self.feed_after(self.feed_forward(self.feed_norm(y), coords))
        return z
