"""Layers on the points that a mask shows."""

import torch

from escnn_attention.geometry.shown import among


def test_edges_among_some_points():
    mask = torch.tensor([True, False, True, True])
    edges = among(mask.nonzero().squeeze(-1), mask, torch.tensor([[0, 1, 3, 2], [2, 2, 0, 1]]))
    assert edges is not None
    assert edges.tolist() == [[0, 2], [1, 0]]
