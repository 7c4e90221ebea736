"""Attention to lists of neighbours: pieces, shapes, measures. The layers' formula: tests/nn/test_point_attention.py."""

from __future__ import annotations

import pytest
import torch

from escnn_attention import working_memory
from escnn_attention.functional.points import _cuts, mix_values, point_attention
from escnn_attention.neighbours import list_edges
from escnn_attention.pair_kernels import products

NEIGHBOURS = list_edges(torch.tensor([[0, 1, 2, 3, 4, 4, 1], [0, 0, 0, 2, 2, 3, 4]]), 6)


def relate(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return (key - query)[:, :, None, None].expand(-1, -1, 3, -1, -1)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize("normalization", ["softmax", "count"])
@pytest.mark.parametrize("query", ["own", "all"])
def test_against_a_loop(query, normalization):
    torch.manual_seed(0)
    q, k, v, x = random(6, 2, 3, 4), random(6, 2, 3, 4), random(6, 2, 3, 4), random(6, 2)
    log_measure = random(6, 3)

    def plain(q, k, seen):
        offset = seen.sum(-1) * torch.arange(1.0, 4.0, dtype=torch.float64)[:, None]  # Q, K, H, 1
        return products(q, k) + offset.permute(0, 2, 1, 3)[:, None, :, None]

    def attend():
        return point_attention(
            q,
            k,
            v,
            x,
            NEIGHBOURS,
            num_poses=3,
            relate=relate,
            scores=plain,
            log_measure=log_measure,
            query=query,
            normalization=normalization,
        )

    out = attend()
    expected = torch.zeros_like(out)
    for i, row in enumerate(NEIGHBOURS.tolist()):
        keys = [j for j in row if j >= 0]
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
    assert not out[[1, 5]].any()
    with working_memory(1):
        torch.testing.assert_close(attend(), out)


def test_no_points_and_no_neighbours():
    q = random(0, 2, 3, 4)
    empty = torch.zeros(0, 0, dtype=torch.long)
    assert point_attention(
        q, q, q, random(0, 2), empty, num_poses=5, relate=relate, scores=lambda q, k, s: products(q, k)
    ).shape == (0, 2, 5, 4)


def test_values_of_poses_by_themselves():
    p, v = random(3, 2, 4, 5, 1), random(3, 5, 2, 4, 1, 6)
    torch.testing.assert_close(mix_values(p, v, p), torch.einsum("qmhkp,qkmhpc->qmhc", p, v))


def test_pieces_hold_lists_of_about_one_length():
    assert _cuts([9, 3, 3, 3, 1, 1, 1, 1, 1], 9) == [1, 4]
    assert _cuts([4, 4, 4], 100) == []
    assert _cuts([7, 5], 1) == [1]
    assert _cuts([], 5) == []
