"""Attention to neighbours: chunks, shapes, measures. The layers' formula: tests/nn/test_point_attention.py."""

from __future__ import annotations

import pytest
import torch

from escnn_attention import working_memory
from escnn_attention.functional.points.bias import PairScores
from escnn_attention.geometry.clouds import Lists, WholeClouds
from tests.functional.points.calls import point_attention

EDGES = torch.tensor([[0, 1, 2, 3, 4, 4, 1], [0, 0, 0, 2, 2, 3, 4]])
CLOUDS = torch.tensor([1, 0, 1, 1, 0, 2])
NEIGHBOURS = {
    "lists": (Lists(EDGES, 6), [[j for j, i in EDGES.T.tolist() if i == query] for query in range(6)]),
    "whole clouds": (WholeClouds(CLOUDS), [(CLOUDS[i] == CLOUDS).nonzero().flatten().tolist() for i in range(6)]),
}


def relate(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return (key - query)[:, None, :, None].expand(-1, 3, -1, -1, -1, -1)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("neighbours", NEIGHBOURS)
@pytest.mark.parametrize("normalization", ["softmax", "count"])
@pytest.mark.parametrize("query", ["own", "all"])
@pytest.mark.parametrize("backend", ["neighbours", "native"])
def test_against_a_loop(backend, query, normalization, neighbours):
    torch.manual_seed(0)
    neighbours, rows = NEIGHBOURS[neighbours]
    q, k, v, x = random(6, 2, 3, 4), random(6, 2, 3, 4), random(6, 2, 3, 4), random(6, 2)
    log_measure = random(6, 3)

    def scores(q, keys, seen, mutual):
        offset = seen.sum(-1) * torch.arange(1.0, 4.0, dtype=torch.float64)[:, None, None, None]  # G, H, A, 1, K
        return PairScores(q, extra=offset.permute(1, 3, 0, 2, 4)[None, :, None])

    def attend():
        return point_attention(
            q,
            k,
            v,
            x,
            neighbours,
            num_poses=3,
            relate=relate,
            scores=scores,
            log_measure=log_measure,
            query=query,
            normalization=normalization,
            backend=backend,
        )

    out = attend()
    expected = torch.zeros_like(out)
    for i, keys in enumerate(rows):
        if not keys:
            continue
        for m in range(2):
            for h in range(3):
                for t in [h] if query == "own" else range(3):
                    s = torch.stack([k[j, m] @ q[i, m, t] + (x[j] - x[i]).sum() * (h + 1) for j in keys])
                    mu = log_measure[keys]
                    if normalization == "softmax":
                        p = (s + mu).flatten().softmax(0).view_as(s)
                    else:
                        p = s * mu.exp() / mu.exp().sum()
                    expected[i, m, h] += torch.einsum("kp,kpc->c", p, v[keys, m])
    torch.testing.assert_close(out, expected)
    assert all(row or not out[i].any() for i, row in enumerate(rows))
    with working_memory(1):
        torch.testing.assert_close(attend(), out)


@pytest.mark.parametrize("number", [0, 3])
def test_no_points_and_no_neighbours(number):
    q = random(number, 2, 5, 4)
    empty = Lists(torch.zeros(2, 0, dtype=torch.long), number)
    out = point_attention(
        q, q, q, random(number, 2), empty, num_poses=5, relate=relate, scores=lambda q, k, s, m: PairScores(q)
    )
    assert torch.equal(out, torch.zeros(number, 2, 5, 4, dtype=torch.float64))


@pytest.mark.parametrize("neighbours", NEIGHBOURS)
@pytest.mark.parametrize("backend", ["neighbours", "native"])
def test_pieces_are_dropped_and_made_again(backend, neighbours):
    neighbours, _ = NEIGHBOURS[neighbours]
    q, k, v, x = (t.requires_grad_() for t in (*(random(6, 2, 3, 4) for _ in range(3)), random(6, 2)))

    def gradients() -> list[torch.Tensor]:
        out = point_attention(
            q,
            k,
            v,
            x,
            neighbours,
            num_poses=3,
            relate=relate,
            scores=lambda q, keys, seen, mutual: PairScores(
                q, extra=seen.sum(-1).permute(1, 3, 0, 2, 4)[None, :, None]
            ),
            backend=backend,
        )
        return list(torch.autograd.grad(out.sin().sum(), [q, k, v, x]))

    whole = gradients()
    with working_memory(1):
        for a, b in zip(gradients(), whole, strict=True):
            torch.testing.assert_close(a, b)
