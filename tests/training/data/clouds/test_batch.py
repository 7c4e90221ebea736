import numpy as np
import pytest
import torch

from escnn_attention.training.data.clouds.batch import CloudsInMemory


def source(sizes=(3, 1, 4, 2), dim=3, table=None):
    total = sum(sizes)
    return CloudsInMemory(
        torch.tensor(sizes),
        torch.randn(total, dim),
        torch.randn(total, 2) if table is None else torch.arange(total) % len(table),
        torch.arange(len(sizes)),
        torch.randn(total, 5),
        table,
    )


@pytest.mark.parametrize("table", [None, torch.randn(3, 7)])
def test_clouds_are_laid_end_to_end(table):
    sizes = (3, 1, 4, 2)
    memory = source(sizes, table=table)
    starts = np.cumsum(sizes) - sizes
    order = [2, 0, 0, 3, 1]
    found = memory.take(order)
    places = [place for cloud in order for place in range(starts[cloud], starts[cloud] + sizes[cloud])]
    assert torch.equal(found.coords, memory.coords[places])
    features = memory.features if table is None else table[memory.features]
    assert torch.equal(found.features, features[places])
    assert torch.equal(found.point_targets, memory.point_targets[places])
    assert found.targets.tolist() == order
    assert found.batch.tolist() == [n for n, cloud in enumerate(order) for _ in range(sizes[cloud])]
    assert found.batch.dtype == torch.int64


def test_tensors_of_different_lengths():
    ones = torch.ones(3)
    with pytest.raises(ValueError, match="coords: got 4, needed one of each of 3 points"):
        CloudsInMemory(torch.tensor([1, 2]), torch.ones(4, 2), torch.ones(3, 1), ones[:2])
    with pytest.raises(ValueError, match="targets: got 3, needed one of each of 2 clouds"):
        CloudsInMemory(torch.tensor([1, 2]), torch.ones(3, 2), torch.ones(3, 1), ones)
