"""Networks in configurations, their number of parameters, and the widest one within a budget of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from examples.experiments.runs import Run, named


def parameters(run: Run) -> int:
    """The number of parameters of a run's network."""
    return count_parameters(run.configuration()["model"]["network"])


def count_parameters(network: Mapping[str, Any]) -> int:
    """The number of parameters of a network that is given as in a configuration."""
    return sum(p.numel() for p in _build(network).parameters() if p.requires_grad)


def widest(network: Callable[[list[int]], dict[str, Any]], proportions: Sequence[int], budget: int) -> dict[str, Any]:
    """The widest network with at most ``budget`` parameters.

    Args:
        network: from widths to a configuration; more parameters the larger the widths are.
        proportions: of the widths. The last one may come out larger, as it takes what is left.
        budget: the number of parameters. If even the proportions themselves have more, they are the widths.
    """

    def fits(widths: list[int]) -> bool:
        return count_parameters(network(widths)) <= budget

    width = _largest(lambda w: fits([w * part for part in proportions]))
    widths = [width * part for part in proportions]
    # Fields of the last stage cost least.
    more = _largest(lambda n: fits([*widths[:-1], widths[-1] + n]), least=0)
    return network([*widths[:-1], widths[-1] + more])


def _largest(fits: Callable[[int], bool], least: int = 1) -> int:
    """The largest number that fits, where all smaller ones do too; ``least`` is taken to fit."""
    low, high = least, least + 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _build(network: Mapping[str, Any]) -> torch.nn.Module:
    arguments = {name: _made(value) for name, value in network["init_args"].items()}
    space = arguments.pop("gspace")
    with torch.random.fork_rng(devices=[]):
        return named(network["class_path"])(space, **arguments)


def _made(value: Any) -> Any:
    """An argument, which may be an object that is given by its class."""
    if isinstance(value, Mapping) and "class_path" in value:
        return named(value["class_path"])(**value.get("init_args", {}))
    return value
