"""The Lightning module that trains a Hamiltonian network by trajectories."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from escnn_attention.models.hamiltonian import HamiltonianNetwork
from escnn_attention.training.data.clouds.batch import Clouds
from escnn_attention.training.modules.point_module import TrajectoryModule

__all__ = ["PointDynamics"]


class PointDynamics(TrajectoryModule):
    """Trains a Hamiltonian network by the trajectories that it gives.

    The loss is the mean square of the difference of positions and momenta, over the frames that are predicted, which
    are all but the first. (A mean that includes the first, which is given, is (T − 1)/T of it.) ``error`` is the same,
    and the epoch with the lowest is the best. ``drift`` is how far the energy that the network conserves changes along
    a trajectory at most, relative to the true energy in the first frame.

    Args:
        network: a :class:`~escnn_attention.models.HamiltonianNetwork`.
        step: the time from one frame to the next; by default what the data says (``step``).
        substeps: the steps of the integrator between two frames.
        **options: of the training, such as ``optimizer`` and ``schedule``: see :class:`~.scheduled.Scheduled`.

    Raises:
        TypeError: another network.
        ValueError: as :class:`~.scheduled.Scheduled` raises; no step that is known; on a batch, no frames,
            or features of pairs.

    Example:
        >>> import torch
        >>> from escnn_attention.models import HamiltonianNetwork, PointTransformer
        >>> from escnn_attention.training import Clouds, PointDynamics
        >>> from escnn import gspaces
        >>> network = HamiltonianNetwork(PointTransformer(gspaces.rot2dOnR2(4), 2, 1, fields=4, num_blocks=1))
        >>> frames = torch.randn(6, 5, 2, 2)
        >>> batch = Clouds(frames[:, 0, 0], torch.rand(6, 2) + 1, torch.zeros(6).long(), torch.ones(1), frames)
        >>> PointDynamics(network, step=0.01)(batch).shape
        torch.Size([6, 5, 2, 2])
    """

    network: HamiltonianNetwork

    def __init__(
        self,
        network: nn.Module,
        *,
        step: float | None = None,
        substeps: int = 1,
        **options: Any,
    ) -> None:
        super().__init__(step=step, **options)
        if not isinstance(network, HamiltonianNetwork):
            raise TypeError(f"network: got {type(network).__name__}, needed a HamiltonianNetwork")
        self.network = network
        self.substeps = substeps

    def forward(self, clouds: Clouds) -> Tensor:
        """The trajectories ``(N, T, 2, d)`` from the first frames, as many frames as the clouds have."""
        frames = self.frames(clouds)
        if clouds.edge_attr is not None:
            raise ValueError("edge_attr: got features of pairs, and a HamiltonianNetwork takes none; leave them out")
        return self.network(
            frames[:, 0, 0],
            frames[:, 0, 1],
            clouds.features,
            clouds.batch,
            num_frames=frames.shape[1],
            step=self.time_of_step(),
            substeps=self.substeps,
        )

    def _loss(self, output: Tensor, batch: Clouds) -> Tensor:
        return (output - self.frames(batch))[:, 1:].square().mean()

    def _measure(self, part: str, output: Tensor, batch: Clouds) -> None:
        self.log_mean(f"{part}_error", self._loss(output, batch), len(batch.targets))
        energies = torch.stack(
            [
                self.network.energy(output[:, t, 0], output[:, t, 1], batch.features, batch.batch)
                for t in range(output.shape[1])
            ]
        )
        drift = ((energies - energies[0]).abs().amax(0) / batch.targets.abs()).mean()
        self.log_mean(f"{part}_drift", drift, len(batch.targets))
