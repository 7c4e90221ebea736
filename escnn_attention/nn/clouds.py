"""The checks of what layers on point clouds take: options, and what comes with the features."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from escnn_attention._checks import check_int, check_option
from escnn_attention.functional import check_backend
from escnn_attention.geometry.neighbours import numbers_if_one, numbers_of
from escnn_attention.geometry.points import Points, ranks

_NEEDED_TABLES = (
    "needed (edges, features) with edge_index, or without (clouds, points, points, features), of the points of each "
    "cloud in their order"
)

__all__ = ["check_cloud", "check_edge_dim", "check_points_mode"]


def check_points_mode(query: str, normalization: str, keys: str = "all", backend: str = "auto") -> None:
    """The options of attention between points are some that there are."""
    check_option("query", query, ("own", "all"))
    check_option("keys", keys, ("all", "own"))
    check_option("normalization", normalization, ("softmax", "count"))
    check_backend(backend, Points)


def check_edge_dim(edge_dim: int | None) -> int | None:
    """``edge_dim``, if it is a number of features of an edge, or None."""
    return None if edge_dim is None else check_int("edge_dim", edge_dim)


def check_cloud(
    coords: Tensor,
    edge_index: Any = None,
    batch: Any = None,
    mask: Any = None,
    measure: Any = None,
    edge_attr: Any = None,
) -> None:
    """What comes with the features of a cloud fits together; what a mask hides may be anything."""
    number = len(coords)
    if number == 0:
        raise ValueError("input: got a cloud without points, needed at least one")
    others = {"edge_index": edge_index, "batch": batch, "mask": mask, "measure": measure}
    for name, value in {**others, "edge_attr": edge_attr}.items():
        if value is not None and not isinstance(value, Tensor):
            raise TypeError(f"{name}: got {type(value).__name__}, needed a tensor or None")
    coords = numbers_of("coords", coords)
    others = {name: None if value is None else numbers_of(name, value) for name, value in others.items()}
    _check_numbers(coords, **others)
    if edge_attr is not None:
        _check_features(edge_attr, coords, others["edge_index"], others["batch"], others["mask"])


def _check_numbers(
    coords: Tensor, edge_index: Tensor | None, batch: Tensor | None, mask: Tensor | None, measure: Tensor | None
) -> None:
    """What comes with the features has shapes, types and numbers that fit the points."""
    number = len(coords)
    if mask is not None and (mask.dtype != torch.bool or mask.shape != (number,)):
        raise ValueError(f"mask: got {mask.dtype} of shape {tuple(mask.shape)}, needed bool of shape ({number},)")
    if mask is not None and not bool(mask.any()):
        raise ValueError("mask: hides all points, needed at least one that is there")
    finite = coords.isfinite().all(-1)
    if not bool((finite if mask is None else finite | ~mask).all()):
        raise ValueError("coords: got numbers that are not finite; leave points out by mask")
    if edge_index is not None:
        _check_index("edge_index", edge_index, (2, edge_index.shape[-1] if edge_index.dim() else 0), number)
    if batch is not None:
        _check_index("batch", batch, (number,), None)
        if edge_index is not None and bool((batch[edge_index[0]] != batch[edge_index[1]]).any()):
            raise ValueError("edge_index: got edges between points that belong to different clouds of batch")
    if edge_index is not None:
        _check_keys(edge_index, number, mask)
    if measure is not None:
        if measure.shape != (number,):
            raise ValueError(f"measure: got shape {tuple(measure.shape)}, needed ({number},)")
        good = (measure > 0) & measure.isfinite()
        if not bool((good if mask is None else good | ~mask).all()):
            raise ValueError("measure: got numbers that are not positive and finite; leave points out by mask")


def _check_features(
    edge_attr: Tensor, coords: Tensor, edge_index: Tensor | None, batch: Tensor | None, mask: Tensor | None
) -> None:
    """Features of edges are finite numbers, one row for each edge, or in tables that have room for all points."""
    needed = "needed (edges, features) with edge_index" if edge_index is not None else _NEEDED_TABLES
    got, number = tuple(edge_attr.shape), len(coords)
    if not edge_attr.dtype.is_floating_point:
        raise TypeError(f"edge_attr: got {edge_attr.dtype}, needed floating-point numbers")
    if edge_attr.device != coords.device:
        raise ValueError(f"edge_attr: got a tensor on {edge_attr.device}, needed one on {coords.device}, as coords are")
    features = numbers_if_one(edge_attr)  # which may differ from call to call of torch.vmap
    if edge_index is not None:
        if len(got) != 2 or got[0] != edge_index.shape[1]:
            raise ValueError(f"edge_attr: got shape {got} for {edge_index.shape[1]} edges, {needed}")
        there = torch.ones_like(edge_index[0], dtype=torch.bool) if mask is None else mask[edge_index].all(0)
    else:
        cloud = torch.zeros(number, dtype=torch.long, device=coords.device) if batch is None else batch
        clouds, most = int(cloud.max()) + 1, int(cloud.bincount().max())
        if len(got) != 4 or got[0] < clouds or got[1] != got[2] or got[1] < most:
            raise ValueError(f"edge_attr: got shape {got} for {clouds} clouds of up to {most} points, {needed}")
        points = edge_attr.new_zeros(got[:2], dtype=torch.bool)
        points[cloud, ranks(batch, None, coords)] = True if mask is None else mask
        there = points.unsqueeze(2) & points.unsqueeze(1)
    if features is not None and not bool((features.isfinite().all(-1) | ~there).all()):
        raise ValueError("edge_attr: got numbers that are not finite; leave points out by mask")


def _check_keys(edge_index: Tensor, number: int, mask: Tensor | None) -> None:
    """Every point that is there has a key."""
    queries = edge_index[1] if mask is None else edge_index[1, mask[edge_index[0]]]
    without = torch.ones(number, dtype=torch.bool, device=edge_index.device) if mask is None else mask.clone()
    without[queries] = False
    if bool(without.any()):
        example, several = int(without.nonzero()[0]), int(without.sum())
        raise ValueError(
            f"edge_index: no edge leads to point {example} ({several} such of {number} points), which then has nothing "
            "to attend to; give isolated points an edge to themselves, or leave them out by mask"
        )


def _check_index(name: str, index: Tensor, shape: tuple[int, ...], number: int | None) -> None:
    """``index`` is of integers, of this shape, from 0 to ``number`` - 1."""
    if index.dtype != torch.long:
        raise TypeError(f"{name}: got {index.dtype}, needed a tensor of torch.long")
    if tuple(index.shape) != shape:
        needed = "(2, edges)" if name == "edge_index" else shape
        raise ValueError(f"{name}: got shape {tuple(index.shape)}, needed {needed}")
    if index.numel() and (int(index.min()) < 0 or (number is not None and int(index.max()) >= number)):
        most = "" if number is None else f" to {number - 1}"
        raise ValueError(f"{name}: got {int(index.min())} to {int(index.max())}, needed numbers from 0{most}")
