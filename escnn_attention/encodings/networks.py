"""Small networks of coordinates, of which encodings are made."""

from __future__ import annotations

import math

import torch

__all__ = ["coordinate_mlp", "last_linear"]


def coordinate_mlp(inputs: int, hidden: int, layers: int, outputs: int, normalize_hidden: bool) -> torch.nn.Sequential:
    """Linear maps with SiLU between them.

    Coordinates are the inputs, so the first layer decides how fast it varies: a standard deviation of 2 and offsets
    spread over the window let a hidden unit bend once or twice across it.
    """
    modules: list[torch.nn.Module] = []
    for layer in range(layers):
        linear = torch.nn.Linear(inputs if layer == 0 else hidden, hidden)
        torch.nn.init.normal_(linear.weight, std=2.0 if layer == 0 else 1 / math.sqrt(hidden))
        if normalize_hidden:
            torch.nn.init.zeros_(linear.bias)
        else:
            torch.nn.init.uniform_(linear.bias, -1.0, 1.0)
        modules += [linear, *([_HiddenNorm(hidden)] if normalize_hidden else []), torch.nn.SiLU()]
    last = torch.nn.Linear(hidden, outputs, bias=False)
    torch.nn.init.normal_(last.weight, std=1 / math.sqrt(hidden))
    return torch.nn.Sequential(*modules, last)


def last_linear(mlp: torch.nn.Module) -> torch.nn.Linear:
    """The linear map with which a network ends."""
    last = list(mlp.children())[-1]
    assert isinstance(last, torch.nn.Linear)
    return last


class _HiddenNorm(torch.nn.LayerNorm):
    def __init__(self, features: int):
        super().__init__(features, eps=1e-12)
