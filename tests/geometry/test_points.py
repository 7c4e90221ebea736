"""Points as positions: all offsets of a cloud, and who sees whom in several."""

import pytest
import torch

from escnn_attention.geometry.clouds import Lists, Neighbourhood, WholeClouds
from escnn_attention.geometry.points import Cloud, Points


def test_a_cloud_has_all_offsets():
    x = torch.randn(4, 3)
    cloud = Cloud(x)
    i, j = torch.tensor([1, 2]), torch.tensor([3, 0])
    torch.testing.assert_close(cloud.offsets[cloud.rows(i, j)], x[j] - x[i])
    with pytest.raises(NotImplementedError, match="dense"):
        cloud.blocks(3)


def test_points_see_their_clouds_or_those_of_their_edges():
    x, batch = torch.randn(5, 2), torch.tensor([0, 1, 0, 1, 1])
    points = Points(x, x, None, batch, Neighbourhood())
    assert points.whole
    assert isinstance(points.neighbours(), WholeClouds)
    assert points.neighbours() is points.clouds() is Points(x, x, None, batch, Neighbourhood()).clouds()
    assert points.clouds().sizes == [3, 2]
    assert Points(x, x, None, None, Neighbourhood()).clouds().sizes == [5]
    for other in (
        Points(x, x, torch.tensor([[0, 1], [1, 0]]), batch, Neighbourhood()),
        Points(x, x, None, batch, Neighbourhood(num_neighbours=2)),
    ):
        assert not other.whole
        assert isinstance(other.neighbours(), Lists)
    index = torch.arange(5)
    with pytest.raises(NotImplementedError, match="no table of offsets"):
        points.rows(index, index)
    with pytest.raises(NotImplementedError, match="chunks"):
        points.blocks(3)
