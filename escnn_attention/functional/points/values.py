"""What becomes of the values that points attend to."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from escnn_attention.functional.matmul import matmul

__all__ = ["Values", "sum_values"]


class Values(Protocol):
    """What becomes of the values that a query attends to.

    Attributes:
        features: how many numbers it makes for every score.
    """

    features: int

    def __call__(self, p: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        """The output ``(G, M, H, A, C)`` of attention to the values.

        Args:
            p: ``(G, M, H, A, P, K)``, the probabilities.
            v: ``(G, M, H or 1, P, K, C)``, the values.
            seen: ``(G, H, A, P or 1, K, D)``, what every output pose sees of the pairs.
        """


def sum_values(p: Tensor, v: Tensor) -> Tensor:
    """The sum of the values, weighed: the arguments and the result of :class:`Values`."""
    weights, values = p.flatten(-2), v.flatten(3, 4)
    if v.shape[2] == 1:
        return matmul(weights.flatten(2, 3), values[:, :, 0]).unflatten(2, p.shape[2:4])
    return matmul(weights, values)
