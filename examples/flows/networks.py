"""Networks for a step of a flow: what all add to a frame, and two networks of other packages."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


def without_divergence(velocity: Tensor) -> Tensor:
    """Velocities ``(B, 2, m, n)`` on a torus without their gradient part, and without waves the grid cannot tell."""
    sides = velocity.shape[-2:]
    of_axes = (torch.fft.fftfreq(n, 1 / max(sides), dtype=velocity.dtype, device=velocity.device) for n in sides)
    down, along = torch.meshgrid(*of_axes, indexing="ij")
    waves = torch.stack((along, -down))  # the second component is that upwards
    # The frequency of a wave of two positions is rounded, and may be a little less than the half.
    modes = torch.fft.fft2(velocity) * (waves.abs().amax(0) < max(sides) / 2 - 0.25)
    length = (waves * modes).sum(1, keepdim=True) / waves.square().sum(0).clamp(min=1)
    return torch.fft.ifft2(modes - waves * length).real


class Increment(nn.Module):
    r"""The step :math:`u_{t+1} = u_t + f(u_t)` with a network f; equivariant if f is.

    Args:
        network: from all channels of a frame to the increments of the first of them, such as a
            :class:`~escnn_attention.models.FieldUNet`. Those it gives no increment of, such as a force, do not change.
        incompressible: whether the increment of the velocity, the first two channels, is taken
            :func:`without_divergence`.
    """

    def __init__(self, network: nn.Module, incompressible: bool = False) -> None:
        super().__init__()
        self.network, self.incompressible = network, incompressible

    def forward(self, frame: Tensor) -> Tensor:
        increment: Tensor = self.network(frame)
        if self.incompressible:
            increment = torch.cat((without_divergence(increment[:, :2]), increment[:, 2:]), dim=1)
        changing = increment.shape[1]
        return torch.cat((frame[:, :changing] + increment, frame[:, changing:]), dim=1)

    @torch.no_grad()
    def rollout(self, frame: Tensor, steps: int, stored: torch.dtype | None = None) -> Tensor:
        """The frames ``(B, steps + 1, C, *space)`` from the given one on.

        With ``stored``, each frame is rounded to that precision before the next step. This commutes with turns and
        mirrors, and removes the rounding errors of a step in higher precision before the flow amplifies them.
        """
        frames = [frame]
        for _ in range(steps):
            step = self(frames[-1])
            frames.append(step if stored is None else step.to(stored).to(step.dtype))
        return torch.stack(frames, dim=1)


def _drop_arguments(module: nn.Module, state: dict[str, Any], *_: Any) -> None:
    """Leave out the arguments that neuralop keeps beside the weights: a checkpoint may not hold a function."""
    state.pop("_metadata", None)


class FourierOperator(nn.Module):
    """A Fourier neural operator of neuraloperator.

    Args:
        modes: the waves along either axis that its layers keep.
        width: its hidden channels.
        layers: their number.
        inputs: the channels of a frame.
        outputs: those it gives the increments of.
    """

    def __init__(self, modes: int, width: int, layers: int, inputs: int = 2, outputs: int = 2) -> None:
        super().__init__()
        from neuralop.models import FNO

        self.network = FNO(
            (modes, modes), in_channels=inputs, out_channels=outputs, hidden_channels=width, n_layers=layers
        )
        self.register_state_dict_post_hook(_drop_arguments)

    def forward(self, frame: Tensor) -> Tensor:
        increment: Tensor = self.network(frame)
        return increment


class LocalFrames(nn.Module):
    """ReViT of revit-pde, whose vectors have the components of images: to the right and down.

    Args:
        options: of ``revit.ReViT2D``.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__()
        from revit import ReViT2D

        self.network = ReViT2D(**options)
        for part in self.network.modules():  # of a network in double precision one input is single
            if isinstance(part, nn.Linear):
                part.register_forward_pre_hook(lambda linear, inputs: inputs[0].to(linear.weight))
        self.register_buffer("down", torch.tensor([1.0, -1.0])[:, None, None], persistent=False)

    def forward(self, frame: Tensor) -> Tensor:
        increment: Tensor = self.down * self.network(self.down * frame)
        return increment
