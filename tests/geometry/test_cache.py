"""What is worked out once for a whole network."""

import pytest
import torch

from escnn_attention.geometry.cache import cached, shared_geometry
from escnn_attention.geometry.clouds import Neighbourhood


def test_what_is_shared_is_found_once():
    made = []

    def make(a, b, c):
        made.append((a, b, c))
        return len(made)

    x, y = torch.zeros(3), torch.zeros(3)
    assert [cached(make, x, None, 1), cached(make, x, None, 1)] == [1, 2]
    with shared_geometry():
        assert [cached(make, x, None, 1), cached(make, x, None, 1), cached(make, y, None, 1)] == [3, 3, 4]
        assert [cached(make, x, None, 2), cached(make, x, None, 1)] == [5, 3]
        with shared_geometry():
            assert cached(make, x, None, 1) == 3
        # The identity of a tensor that is gone is not taken for another.
        first = cached(make, torch.zeros(3), None, 1)
        assert all(cached(make, torch.zeros(3), None, 1) > first for _ in range(20))
        points = torch.randn(6, 2)
        rule = Neighbourhood(num_neighbours=2)
        found = cached(Neighbourhood.__call__, rule, points, None)
        assert cached(Neighbourhood.__call__, Neighbourhood(num_neighbours=2), points, None) is found
        assert found.chunks(100) is found.chunks(100)
        assert found.chunks(2) is not found.chunks(100)
    assert cached(make, x, None, 1) == len(made)
    with pytest.raises(RuntimeError, match="stop"), shared_geometry():
        raise RuntimeError("stop")
    assert cached(make, x, None, 1) == len(made)
