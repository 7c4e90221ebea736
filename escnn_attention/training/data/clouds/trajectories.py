"""Trajectories of bodies as clouds, and their rigid motions."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch

from escnn_attention.training.data.clouds.batch import Clouds, CloudsInMemory
from escnn_attention.training.data.clouds.motions import About, Motions, moved_points, rotated

__all__ = ["as_clouds", "move_trajectories"]


def as_clouds(features: npt.NDArray[Any], targets: npt.NDArray[Any], frames: npt.NDArray[Any]) -> CloudsInMemory:
    """Trajectories of S systems of n bodies as clouds of n points.

    Args:
        features: (S, n, C), what does not change with time.
        targets: (S,), one number of each system.
        frames: (S, T, 2, n, d), the positions and the momenta (or velocities) in T frames.

    Returns:
        clouds whose points are those of the first frame, and whose ``point_targets`` (S·n, T, 2, d) are all frames.

    Example:
        >>> import numpy as np
        >>> systems = as_clouds(np.ones((7, 5, 1)), np.zeros(7), np.zeros((7, 2, 2, 5, 3)))
        >>> systems.take([3, 4]).point_targets.shape
        torch.Size([10, 2, 2, 3])
    """
    count, bodies = features.shape[:2]
    by_body = torch.from_numpy(frames).permute(0, 3, 1, 2, 4).flatten(0, 1).float().contiguous()
    return CloudsInMemory(
        torch.full((count,), bodies),
        by_body[:, 0, 0].contiguous(),
        torch.from_numpy(features).flatten(0, 1).float(),
        torch.from_numpy(targets).float(),
        by_body,
    )


def move_trajectories(clouds: Clouds, motions: Motions, *, about: About = "mean") -> Clouds:
    """Trajectories after a rigid motion of each: positions move, momenta and velocities rotate.

    Args:
        clouds: what is moved, with ``point_targets`` (N, T, 2, d): see :func:`as_clouds`.
        motions: one of each cloud.
        about: what the systems are rotated about: the mean of their positions at the first frame, or the origin.

    Raises:
        ValueError: there are no ``point_targets``.
    """
    coords, centres = moved_points(clouds, motions, about)
    frames = clouds.point_targets
    if frames is None:
        raise ValueError("clouds: got none with point_targets, needed positions and momenta (N, T, 2, d)")
    rotations = motions.rotations[clouds.batch]
    before, after = centres[clouds.batch], (centres + motions.translations)[clouds.batch]
    positions = rotated(frames[:, :, 0].double() - before[:, None], rotations, 1) + after[:, None]
    momenta = rotated(frames[:, :, 1].double(), rotations, 1)
    return clouds._replace(
        coords=coords.to(clouds.coords.dtype),
        point_targets=torch.stack([positions, momenta], dim=2).to(frames.dtype),
    )
