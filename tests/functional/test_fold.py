"""Folding poses into heads, against the formula."""

import itertools
import math

import pytest
import torch
from hypothesis import given

from escnn_attention.functional import attention
from escnn_attention.functional.fold import rotate
from escnn_attention.positions import Window
from tests.functional.cases import assert_same, case, cases, outputs_and_gradients


@given(cases())
def test_agrees_with_the_reference(arguments):
    assert_same(outputs_and_gradients("blocked", *arguments), outputs_and_gradients("reference", *arguments))


def test_rotating_is_complex_multiplication():
    torch.manual_seed(0)
    x, angle = torch.randn(4, 7, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    z = torch.complex(x[:, :3], x[:, 3:6]) * torch.exp(1j * angle)
    torch.testing.assert_close(rotate(x, angle), torch.cat([z.real, z.imag, x[:, 6:]], -1))


@pytest.mark.parametrize("query", ["own", "all"])
@pytest.mark.parametrize("keys", ["own", "all"])
def test_the_reference_of_rotary_terms_and_own_keys_agrees_with_plain_loops(query, keys):
    (q, k, v), grid, terms = case(2, 2, 2, (2, 3), Window(3), {"rotary", "pose"}, heads=1, batch=1, channels=3)
    got = attention(q, k, v, grid, terms, query=query, keys=keys, backend="reference")
    for h, x in itertools.product(range(2), range(6)):
        out = torch.zeros(3, dtype=torch.float64)
        for own in [h] if query == "own" else range(2):
            scores, values = [], []
            for y, p in itertools.product(range(6), [own] if keys == "own" else range(2)):
                row = int(grid.rows(torch.tensor(x), torch.tensor(y)))
                if row < 0:
                    continue
                key = (k[0, 0, p, y] + terms.pose[0, h, p]).tolist()
                angle = float(grid.offsets[row] @ terms.rotary[0, h, 0].detach())
                z = complex(key[0], key[1]) * complex(math.cos(angle), math.sin(angle))
                query_vector = q[0, 0, own, x].tolist()
                s = query_vector[0] * z.real + query_vector[1] * z.imag + query_vector[2] * key[2]
                scores.append(math.exp(s / math.sqrt(3)))
                values.append(v[0, 0, p, y])
            out = out + sum(s * value for s, value in zip(scores, values, strict=True)) / sum(scores)
        torch.testing.assert_close(got[0, 0, h, x], out, rtol=1e-12, atol=1e-13)
