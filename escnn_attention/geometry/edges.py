"""Features of pairs of points: a row of each edge, or tables of all pairs of points of each cloud."""

from __future__ import annotations

import torch
from torch import Tensor

from escnn_attention.geometry.stretches import stretches, where

__all__ = ["features_of_shown", "pair_rows", "ranks"]


def ranks(batch: Tensor | None, mask: Tensor | None, coords: Tensor) -> Tensor:
    """``(N,)``, how many points of its own cloud, those that a mask hides left out, are before each point."""
    places = torch.arange(coords.shape[0], device=coords.device)
    if batch is None and mask is None:
        return places
    cloud = torch.zeros_like(places) if batch is None else batch
    if mask is not None:
        cloud = torch.where(mask, cloud, cloud.max() + 1)
    # All different, as ONNX has no stable sort.
    order = (cloud * coords.shape[0] + places).argsort()
    among, first = stretches(cloud.index_select(0, order))
    return torch.empty_like(places).index_copy(0, order, places - first.index_select(0, among))


def pair_rows(queries: Tensor, keys: Tensor, batch: Tensor | None, rank: Tensor, size: int) -> Tensor:
    """Where the features of pairs of points stand among all rows of a table, ``(G, A, K)``; -1 where either fills up.

    Args:
        queries, keys: ``(G, A)`` and ``(G, K)``, points; -1 fills up.
        batch: ``(N,)``, the number of the cloud of each point; None for a single cloud.
        rank: ``(N,)``, how many points of its cloud are before each: see :func:`ranks`.
        size: n of the table ``(B, n, n, ...)`` of the points of each cloud, in their order.

    Example:
        >>> import torch
        >>> from escnn_attention.geometry.edges import pair_rows, ranks
        >>> batch, keys = torch.tensor([0, 1, 1]), torch.tensor([[1, 2, -1]])
        >>> pair_rows(keys[:, :2], keys, batch, ranks(batch, None, torch.zeros(3, 2)), 2)
        tensor([[[ 4,  5, -1],
                 [ 6,  7, -1]]])
    """
    row = rank if batch is None else batch * size + rank
    rows = row[queries.clamp(min=0)].unsqueeze(2) * size + rank[keys.clamp(min=0)].unsqueeze(1)
    return rows.masked_fill((queries < 0).unsqueeze(2) | (keys < 0).unsqueeze(1), -1)


def features_of_shown(edge_attr: Tensor, mask: Tensor, edge_index: Tensor | None, batch: Tensor | None) -> Tensor:
    """The features of the pairs that a mask shows, as those of a cloud without the points that it hides.

    Args:
        edge_attr: ``(E, F)`` with ``edge_index``, or ``(B, n, n, F)``.
        mask: ``(N,)``, False for points that are not there.
        edge_index: ``(2, E)``, or None.
        batch: ``(N,)``, or None.

    Returns:
        of edges those that are left. Of tables some that begin with the points that are there, with zeros behind.
    """
    if edge_index is not None:
        return edge_attr.index_select(0, where(mask[edge_index].all(0)))
    clouds, size = edge_attr.shape[:2]
    cloud = torch.zeros_like(mask, dtype=torch.long) if batch is None else batch
    # One place more is for the points that are hidden.
    target = torch.where(mask, cloud * size + ranks(batch, mask, mask), clouds * size)
    source = ranks(batch, None, mask)
    place = source.new_zeros(clouds * size + 1).scatter(0, target, source)[:-1].view(clouds, size)
    there = mask.new_zeros(clouds * size + 1).scatter(0, target, mask)[:-1].view(clouds, size)
    first = torch.arange(clouds, device=mask.device).view(-1, 1, 1) * size
    rows = (first + place[:, :, None]) * size + place[:, None]
    moved = edge_attr.flatten(0, 2).index_select(0, rows.flatten()).view(clouds, size, size, -1)
    return torch.where((there[:, :, None] & there[:, None]).unsqueeze(-1), moved, 0.0)
