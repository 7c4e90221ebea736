"""Networks for a step of a flow: what all add to a frame, and two networks of other packages."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


class Increment(nn.Module):
    r"""The step :math:`u_{t+1} = u_t + f(u_t)` with a network f from frames to frames; equivariant if f is.

    Args:
        network: of any kind, such as a :class:`~escnn_attention.models.FieldUNet`.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, frame: Tensor) -> Tensor:
        increment: Tensor = self.network(frame)
        return frame + increment

    @torch.no_grad()
    def rollout(self, frame: Tensor, steps: int) -> Tensor:
        """The frames ``(B, steps + 1, C, *space)`` from the given one on."""
        frames = [frame]
        for _ in range(steps):
            frames.append(self(frames[-1]))
        return torch.stack(frames, dim=1)


def _drop_arguments(module: nn.Module, state: dict[str, Any], *_: Any) -> None:
    """Leave out the arguments that neuralop keeps beside the weights: a checkpoint may not hold a function."""
    state.pop("_metadata", None)


class FourierOperator(nn.Module):
    """A Fourier neural operator of neuraloperator, between pairs of channels.

    Args:
        modes: the waves along either axis that its layers keep.
        width: its hidden channels.
        layers: their number.
    """

    def __init__(self, modes: int, width: int, layers: int) -> None:
        super().__init__()
        from neuralop.models import FNO

        self.network = FNO((modes, modes), in_channels=2, out_channels=2, hidden_channels=width, n_layers=layers)
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
