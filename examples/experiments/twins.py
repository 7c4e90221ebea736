"""The number of parameters of networks in configurations, and the widest network within a budget."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from escnn_attention.models.description import build
from escnn_attention.nn.summary import count_parameters
from examples.experiments.runs import Run


def parameters(run: Run) -> int:
    """The number of parameters of a run's network."""
    return parameters_of(run.configuration()["model"]["network"])


def parameters_of(network: Mapping[str, Any]) -> int:
    """The number of parameters of a network described as in a configuration."""
    with torch.random.fork_rng(devices=[]):
        return count_parameters(build(network))


def widest(network: Callable[[list[int]], dict[str, Any]], proportions: Sequence[int], budget: int) -> dict[str, Any]:
    """The widest network with at most ``budget`` parameters.

    Args:
        network: a function from widths to a configuration, with parameters that increase with the widths.
        proportions: of the widths. The last one may be larger, because it uses the rest of the budget.
        budget: the number of parameters. If the proportions themselves have more, they are the widths.
    """

    def fits(widths: list[int]) -> bool:
        return parameters_of(network(widths)) <= budget

    width = _largest(lambda w: fits([w * part for part in proportions]))
    widths = [width * part for part in proportions]
    # Fields of the last stage cost least.
    more = _largest(lambda n: fits([*widths[:-1], widths[-1] + n]), least=0)
    return network([*widths[:-1], widths[-1] + more])


def _largest(fits: Callable[[int], bool], least: int = 1) -> int:
    """The largest number that fits, if all smaller ones do; ``least`` is assumed to fit."""
    low, high = least, least + 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
