"""Layers on the points of clouds that a mask shows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from escnn_attention.geometry.edges import features_of_shown
from escnn_attention.geometry.stretches import where

__all__ = ["PointLayer", "among", "only_shown", "where_present"]

PointLayer = Callable[[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None], Tensor]
"""A layer of features, coordinates, ``edge_index``, ``batch``, ``measure`` and ``edge_attr``."""


def among(there: Tensor, mask: Tensor, edges: Tensor | None) -> Tensor | None:
    """The edges ``(2, E)`` between the points ``there``, which are those of ``mask``, numbered among themselves."""
    if edges is None:
        return None
    place = edges.new_zeros(mask.shape[0]).index_copy(0, there, torch.arange(there.shape[0], device=there.device))
    return place[edges.index_select(1, where(mask[edges].all(0)))]


def where_present(
    layer: PointLayer,
    mask: Tensor,
    x: Tensor,
    coords: Tensor,
    edge_index: Tensor | None,
    batch: Tensor | None,
    measure: Tensor | None,
    edge_attr: Tensor | None = None,
) -> Tensor:
    """A layer on the points that a mask shows, and zeros at the others.

    Whatever the points that are not there hold, it reaches nothing, gradients included.
    """
    there = where(mask)
    edge_attr = None if edge_attr is None else features_of_shown(edge_attr, mask, edge_index, batch)
    batch, measure = (None if t is None else t[there] for t in (batch, measure))
    y = layer(x[there], coords[there], among(there, mask, edge_index), batch, measure, edge_attr)
    return y.new_zeros(mask.shape[0], y.shape[1]).index_copy(0, there, y)


def only_shown(
    layer: PointLayer,
    mask: Tensor,
    x: Tensor,
    coords: Tensor,
    edge_index: Tensor | None,
    batch: Tensor | None,
    measure: Tensor | None,
    edge_attr: Tensor | None = None,
) -> Tensor:
    """What :func:`where_present` gives, for programs that are written down: no size depends on the mask.

    Points that are hidden are of no cloud and of no edge, and their features and coordinates are zeros.
    """
    x, coords = (torch.where(mask[:, None], t, 0.0) for t in (x, coords))
    edge_attr = None if edge_attr is None else features_of_shown(edge_attr, mask, edge_index, batch)
    if edge_index is not None:
        edge_index = edge_index.index_select(1, where(mask[edge_index].all(0)))
    cloud = torch.where(mask, 0 if batch is None else batch, -1)
    measure = None if measure is None else torch.where(mask, measure, 1.0)
    y = layer(x, coords, edge_index, cloud, measure, edge_attr)
    return torch.where(mask[:, None], y, 0.0)
