"""Features of points and of clouds: how many clouds there are, pooling over their points, and what heads read."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from escnn_attention.exporting.mode import in_programs
from escnn_attention.geometry.cache import kept

Pool = Literal["mean", "sum", "max"]


def count_clouds(batch: Tensor | None, coords: Tensor, mask: Tensor | None = None) -> int:
    """The number of clouds in a batch; in an export that of the points, of which every cloud has one at least.

    No shape but that of the output then depends on how many clouds there are: see :func:`of_clouds`. A TypeError or
    ValueError for a batch or mask that is none, a negative number, or a cloud without points.

    >>> count_clouds(torch.tensor([0, 0, 1, 1, 1]), torch.randn(5, 3))
    2
    """
    _check_of_points("mask", mask, torch.bool, coords)
    _check_of_points("batch", batch, torch.long, coords)
    return _count(batch, coords, mask)


@in_programs(lambda batch, coords, mask: 1 if batch is None else coords.shape[0])
def _count(batch: Tensor | None, coords: Tensor, mask: Tensor | None) -> int:
    return kept(_count_there, batch, len(coords), mask)


def _count_there(batch: Tensor | None, number: int, mask: Tensor | None) -> int:
    if batch is None:
        sizes = torch.tensor([number if mask is None else int(mask.sum())])
    else:
        if number and int(batch.min()) < 0:
            raise ValueError(f"batch: got {int(batch.min())}, needed the numbers of the clouds from 0")
        sizes = torch.bincount(batch if mask is None else batch[mask], minlength=int(batch.max()) + 1 if number else 1)
    if not bool((sizes > 0).all()):
        raise ValueError(f"batch: cloud {int(sizes.argmin())} has no points, needed at least one in each")
    return len(sizes)


def _of_clouds_there(y: Tensor, batch: Tensor | None) -> Tensor:
    """:func:`of_clouds` in programs."""
    if batch is None:
        return y
    number: int = batch.max().item() + 1  # type: ignore[assignment]
    torch._check(number >= 1)
    torch._check(number <= y.shape[0])
    return y[:number]


@in_programs(_of_clouds_there)
def of_clouds(y: Tensor, batch: Tensor | None) -> Tensor:
    """The rows of the clouds that there are, of ``(B, ...)`` as :func:`count_clouds` counts them."""
    return y


def _check_of_points(name: str, values: Tensor | None, dtype: torch.dtype, coords: Tensor) -> None:
    """``values`` are None, or one of this type for each point of ``coords``."""
    if values is None:
        return
    if not isinstance(values, Tensor):
        raise TypeError(f"{name}: got {type(values).__name__}, needed a tensor or None")
    if values.dtype != dtype:
        raise TypeError(f"{name}: got {values.dtype}, needed a tensor of {dtype}")
    if values.shape != coords.shape[:1]:
        raise ValueError(f"{name}: got shape {tuple(values.shape)}, needed {tuple(coords.shape[:1])}")
    if values.device != coords.device:
        raise ValueError(f"{name}: got a tensor on {values.device}, needed one on {coords.device}, as coords are")


def pool_clouds(x: Tensor, batch: Tensor | None, num_clouds: int, how: Pool, measure: Tensor | None = None) -> Tensor:
    """Features ``(N, C)`` of points to ``(B, C)`` of clouds; a point of measure 2 counts as two in means and sums."""
    if batch is None:
        batch = torch.zeros(x.shape[0], dtype=torch.long, device=x.device)
    if how == "max":
        lowest = x.new_full((num_clouds, x.shape[1]), -torch.inf)
        return lowest.scatter_reduce(0, batch[:, None].expand_as(x), x, "amax")
    weights = x.new_ones(x.shape[0]) if measure is None else measure.to(x.dtype)
    total = x.new_zeros(num_clouds, x.shape[1]).index_add(0, batch, x * weights[:, None])
    if how == "sum":
        return total
    return total / x.new_zeros(num_clouds).index_add(0, batch, weights)[:, None]


def offsets_from_mean(
    coords: Tensor, batch: Tensor | None, num_clouds: int, mask: Tensor | None = None, measure: Tensor | None = None
) -> Tensor:
    """The points ``(N, d)`` relative to the mean of their cloud; zero for those that a mask hides."""
    if mask is not None:
        coords, batch, measure = _apart(mask, coords, batch, num_clouds, measure)
        return torch.where(mask[:, None], offsets_from_mean(coords, batch, num_clouds + 1, None, measure), 0.0)
    means = pool_clouds(coords, batch, num_clouds, "mean", measure)
    return coords - (means if batch is None else means[batch])


def read(
    head: torch.nn.Module,
    x: Tensor,
    batch: Tensor | None,
    num_clouds: int,
    mask: Tensor | None,
    measure: Tensor | None,
) -> Tensor:
    """The output of a head for the points that are there; at the others, where it has one, zero."""
    if mask is None:
        y: Tensor = head(x, batch, num_clouds, measure)
        return of_clouds(y, batch) if pools(head) else y
    x, cloud, measure = _apart(mask, x, batch, num_clouds, measure)
    y = head(x, cloud, num_clouds + 1, measure)
    if pools(head):
        return of_clouds(y[:num_clouds], batch)
    return torch.where(mask.view(-1, *[1] * (y.dim() - 1)), y, 0.0)


def pools(head: torch.nn.Module) -> bool:
    """Whether the output of a head is of clouds, and not of points."""
    return getattr(head, "pool", None) is not None


def _apart(
    mask: Tensor, x: Tensor, batch: Tensor | None, num_clouds: int, measure: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Features, clouds and measures, with zeros of measure 1 in one more cloud for the points that a mask hides."""
    cloud = torch.zeros_like(mask, dtype=torch.long) if batch is None else batch
    measure = None if measure is None else torch.where(mask, measure, 1.0)
    return torch.where(mask[:, None], x, 0.0), torch.where(mask, cloud, num_clouds), measure
