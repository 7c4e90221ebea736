"""A network that is evaluated on its input as seen from every pose, on plain tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from escnn_attention._checks import check_grid
from escnn_attention.plain.buffers import ExactBuffers


class FrameLift(ExactBuffers):
    """Evaluates a network on every view of its input, and puts the outputs where they belong.

    Args:
        network, method: from ``(B, C, *space)`` to maps ``(B, D, *grid)`` or tokens ``(B, prefix_tokens + N, D)``.
        turns: ``(|H|, d, d)``, the action of every pose on the axes of a tensor: signed permutations.
        matrices: ``(|H|, C, C)``, by which the channels of a view are transformed; None for scalars.
        prefix_tokens, frozen, poses_at_once: as of :class:`escnn_attention.FrameLift`.
    """

    matrices: Tensor | None

    def __init__(
        self,
        network: torch.nn.Module,
        turns: np.ndarray,
        matrices: np.ndarray | None,
        *,
        prefix_tokens: int = 0,
        frozen: bool = False,
        poses_at_once: int | None = None,
        method: str = "forward",
    ):
        super().__init__()
        self.network = network
        self.prefix_tokens = prefix_tokens
        self.frozen = frozen
        self.poses_at_once = poses_at_once
        self.method = method
        self.views = [_axes(turn) for turn in turns]
        self.places = [_axes(turn.T) for turn in turns]
        self.register_exact("matrices", matrices)
        self.train(self.training)

    def train(self, mode: bool = True) -> FrameLift:
        """Set the mode; a frozen network stays in eval mode."""
        super().train(mode)
        if self.frozen:
            self.network.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        """The feature maps ``(B, D * |H|, *grid)`` of an input ``(B, C, *space)``."""
        return self.lift(x)[0]

    def lift(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The feature maps, and the tokens without a place ``(B, D * |H|, prefix_tokens)``."""
        check_grid(x.shape[2:])
        views = [self._view(x, pose) for pose in range(len(self.views))]
        maps: list[Tensor] = [x] * len(views)
        prefix: list[Tensor] = [x] * len(views)
        for poses in self._batches([v.shape for v in views]):
            with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen):
                output = getattr(self.network, self.method)(torch.cat([views[pose] for pose in poses]))
            grid, tokens = self._separate(output, views[poses[0]].shape)
            by_pose = (t.unflatten(0, (len(poses), x.shape[0])).unbind() for t in (grid, tokens))
            for pose, g, t in zip(poses, *by_pose, strict=True):
                maps[pose], prefix[pose] = _turn(g, self.places[pose]), t
        return torch.stack(maps, 2).flatten(1, 2), torch.stack(prefix, 2).flatten(1, 2)

    def _view(self, x: Tensor, pose: int) -> Tensor:
        """The input as the pose sees it."""
        if self.matrices is not None:
            x = torch.einsum("ij,bj...->bi...", self.matrices[pose].to(x.dtype), x)
        return _turn(x, self.views[pose])

    def _batches(self, shapes: list[torch.Size]) -> list[list[int]]:
        """The poses whose views the network takes together: views of one shape."""
        alike: list[list[int]] = []
        for pose, shape in enumerate(shapes):
            # Sizes that a program leaves free cannot be the keys of a dictionary.
            found = next((poses for poses in alike if shapes[poses[0]] == shape), None)
            if found is None:
                alike.append([pose])
            else:
                found.append(pose)
        size = self.poses_at_once or len(shapes)
        return [poses[i : i + size] for poses in alike for i in range(0, len(poses), size)]

    def _separate(self, output: Tensor, shape: torch.Size) -> tuple[Tensor, Tensor]:
        """Feature maps ``(B, D, *grid)`` and prefix tokens ``(B, D, prefix_tokens)``, from what the network gives."""
        space = shape[2:]
        if isinstance(output, Tensor) and output.dim() == len(shape) and not self.prefix_tokens:
            return output, output.new_empty(*output.shape[:2], 0)
        if not isinstance(output, Tensor) or output.dim() != 3:
            got = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise ValueError(
                f"module: gives {got} for an input of shape {tuple(shape)}, needed tokens (batch, tokens, channels) "
                f"or feature maps (batch, channels{', size' * len(space)}) without prefix tokens"
            )
        number = output.shape[1] - self.prefix_tokens
        patch = round((math.prod(space) / max(number, 1)) ** (1 / len(space)))
        grid = [n // max(patch, 1) for n in space]
        if math.prod(grid) != number:
            raise ValueError(
                f"module: gives {output.shape[1]} tokens, {self.prefix_tokens} of them prefix tokens, for an input of "
                f"shape {tuple(shape)}; needed one token for every square patch of the input"
            )
        prefix, tokens = output.transpose(1, 2).split([self.prefix_tokens, number], dim=2)
        return tokens.unflatten(2, grid), prefix


_Axes = tuple[list[int], list[int]]


def _axes(turn: np.ndarray) -> _Axes:
    """For ``y[i] = x[turn @ i]``, with indices from the middle: the axes of x that are flipped, and their new order."""
    rows, columns = np.nonzero(np.round(turn))
    flipped = [int(a) + 2 for a, b in zip(rows, columns, strict=True) if turn[a, b] < 0]
    return flipped, [0, 1, *(int(a) + 2 for a in np.argsort(columns))]


def _turn(x: Tensor, axes: _Axes) -> Tensor:
    flipped, order = axes
    return (x.flip(flipped) if flipped else x).permute(order)


def tensor_axes(action: Sequence[np.ndarray] | np.ndarray) -> np.ndarray:
    """The action ``(|H|, d, d)`` on the axes of a tensor, whose last one is x, and whose others run against y and z."""
    action = np.asarray(action)
    d = action.shape[-1]
    sign = np.array([-1.0] * (d - 1) + [1.0])
    return sign[:, None] * action[:, ::-1, ::-1] * sign
