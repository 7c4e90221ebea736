"""The Lightning module that trains a network to say where bodies will be."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from escnn_attention.training.data.clouds.batch import Clouds
from escnn_attention.training.modules.point_module import TrajectoryModule, numbered

__all__ = ["PointForecast"]


class PointForecast(TrajectoryModule):
    r"""Trains a network to say where bodies will be, of where they are and how they move.

    .. math:: \hat q_i(T) = q_i(0) + T\,v_i(0) + f_i\big((c_1, v_1(0)), q_1(0), (c_2, v_2(0)), q_2(0), \dots\big)

    The network f takes the features c of all bodies and, in the channels behind them, their velocities; it gives the
    vectors by which they miss the place that they would come to by themselves. If it is equivariant to a group with the
    velocities as a vector field, the forecast is, and to translations.

    The loss is the mean square over all coordinates of all bodies, in the last of the frames that the clouds have.
    ``error`` is the same, and the epoch with the lowest is the best.

    Args:
        network: of ``(features, coords, batch=batch)`` to ``(N, d)``, such as a
            :class:`~escnn_attention.models.PointTransformer` with ``pool=None`` and ``"vector"`` as its output; the
            features are ``(N, C + d)``. Where the data has features of pairs of bodies, it takes them as ``edge_attr``.
        step: the time from one frame to the next, T where there are two; by default what the data says (``step``).
        **options: of the training, such as ``optimizer`` and ``schedule``: see :class:`~.scheduled.Scheduled`.

    Raises:
        ValueError: as :class:`~.scheduled.Scheduled` raises; no step that is known; on a batch, no frames, or an output
            of another shape.

    Example:
        >>> import torch
        >>> from escnn_attention.models import PointTransformer
        >>> from escnn_attention.training import Clouds, PointForecast
        >>> from escnn import gspaces
        >>> g = gspaces.rot2dOnR2(4)
        >>> fields = {"scalar": 1, "vector": 1}
        >>> network = PointTransformer(g, fields, "vector", fields=4, num_blocks=1, pool=None)
        >>> frames = torch.randn(6, 2, 2, 2)
        >>> batch = Clouds(frames[:, 0, 0], torch.ones(6, 1), torch.zeros(6).long(), torch.ones(1), frames)
        >>> PointForecast(network, step=1.0)(batch).shape
        torch.Size([6, 2])
    """

    def __init__(
        self,
        network: nn.Module,
        *,
        step: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__(step=step, **options)
        self.network = network

    def forward(self, clouds: Clouds) -> Tensor:
        """The positions ``(N, d)`` in the last frame."""
        frames = self.frames(clouds)
        velocities = frames[:, 0, 1]
        features = torch.cat([clouds.features, velocities], dim=1)
        misses = self.output(features, clouds)
        if misses.shape != clouds.coords.shape:
            raise ValueError(f"network: got an output {tuple(misses.shape)}, needed {tuple(clouds.coords.shape)}")
        return clouds.coords + (frames.shape[1] - 1) * self.time_of_step() * velocities + misses

    def predict_step(self, batch: Clouds, batch_index: int) -> Tensor:
        """The positions ``(N, d)`` in the last frame."""
        return self(batch)

    def truth(self, batch: Clouds) -> Tensor:
        """The true positions ``(N, d)`` in the last frame."""
        return self.frames(batch)[:, -1, 0]

    def describe(self, predictions: Tensor, truth: Tensor | None = None) -> list[dict[str, Any]]:
        """One row a body, of all clouds end to end: its number, and where it is predicted and is in the last frame."""
        return numbered("body", [f"x{j}" for j in range(predictions.shape[1])], predictions, truth)

    def _loss(self, output: Tensor, batch: Clouds) -> Tensor:
        return (output - self.truth(batch)).square().mean()

    def _measure(self, part: str, output: Tensor, batch: Clouds) -> None:
        self.log_mean(f"{part}_error", self._loss(output, batch), len(batch.targets))
