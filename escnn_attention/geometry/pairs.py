"""Who sees whom as a table of all pairs, without a decision by its numbers: for programs that are written down."""

from __future__ import annotations

import torch
from torch import Tensor

from escnn_attention.geometry.clouds import Neighbourhood
from escnn_attention.geometry.edges import features_of_shown

__all__ = ["only_visible", "times_seen"]


def times_seen(places: Tensor, edge_index: Tensor | None, batch: Tensor | None, rule: Neighbourhood) -> Tensor | None:
    """How many times every point sees every other, ``(N, N)`` from queries to keys; None where each sees all once.

    Args:
        places: ``(N, d)``, where neighbours are searched.
        edge_index: ``(2, E)``, from keys to queries; None for those of the rule.
        batch: ``(N,)``, the number of the cloud of each point; None for a single cloud.
        rule: by which points are neighbours.

    Example:
        >>> import torch
        >>> from escnn_attention.geometry.clouds import Neighbourhood
        >>> from escnn_attention.geometry.pairs import times_seen
        >>> times_seen(torch.tensor([[0.0], [1.0], [3.0]]), None, None, Neighbourhood(radius=1.5))
        tensor([[1., 1., 0.],
                [1., 1., 0.],
                [0., 0., 1.]])
    """
    number = places.shape[0]
    if edge_index is not None:
        keys, queries = edge_index.long()
        none = places.new_zeros(number, number, dtype=torch.float32)
        # An edge that is there twice counts twice.
        return none.index_put((queries, keys), none.new_ones(()).expand(queries.shape), accumulate=True)
    together = None if batch is None else batch[:, None] == batch
    if rule.is_global:
        return None if together is None else together.float()
    x = rule.precise(places)
    square = rule.squares(x[:, None], x)
    if together is not None:
        square = square.masked_fill(~together, torch.inf)
    # A point is the nearest to itself, also where others lie at the same place.
    itself = torch.arange(number, device=places.device)
    square = square.masked_fill(itself[:, None] == itself, -1.0)
    near = square <= (torch.finfo(square.dtype).max if rule.radius is None else rule.radius * rule.radius)
    if rule.num_neighbours is None:
        return near.float()
    # As many again that are infinitely far, in case there are fewer.
    far = square.new_full((1, rule.num_neighbours), torch.inf).expand(number, -1)
    nearest = torch.cat([square, far], dim=1).topk(rule.num_neighbours, largest=False).indices
    chosen = torch.zeros_like(torch.cat([square, far], dim=1)).scatter(1, nearest, 1.0)
    return (chosen[:, :number] * near).float()


def only_visible(
    mask: Tensor,
    x: Tensor,
    coords: Tensor,
    edge_index: Tensor | None,
    batch: Tensor | None,
    measure: Tensor | None,
    edge_attr: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor | None, Tensor | None]:
    """The arguments of a layer on points, such that those that a mask hides see themselves, and nobody else sees them.

    Features and coordinates of these are zero: whatever they hold, it reaches nothing.

    Example:
        >>> import torch
        >>> from escnn_attention.geometry.pairs import only_visible
        >>> mask, x = torch.tensor([True, False, True]), torch.tensor([[1.0], [torch.nan], [2.0]])
        >>> features, _, edges, batch, *_ = only_visible(mask, x, x, torch.tensor([[0, 1], [2, 2]]), None, None)
        >>> features.flatten().tolist(), edges.tolist(), batch.tolist()
        ([1.0, 0.0, 2.0], [[0, 1], [2, 1]], [0, 2, 0])
    """
    x, coords = (torch.where(mask[:, None], t, 0.0) for t in (x, coords))
    edge_attr = None if edge_attr is None else features_of_shown(edge_attr, mask, edge_index, batch)
    if edge_index is not None:
        keys, queries = edge_index
        edge_index = torch.stack([torch.where(mask[queries], keys, queries), torch.where(mask[keys], queries, keys)])
    cloud = torch.zeros_like(mask, dtype=torch.long) if batch is None else batch
    alone = torch.where(mask, cloud, 0).max() + 1 + torch.arange(mask.shape[0], device=mask.device)
    measure = None if measure is None else torch.where(mask, measure, 1.0)
    return x, coords, edge_index, torch.where(mask, cloud, alone), measure, edge_attr
