"""GeometricTensors as containers of tensors: sharded modules inside a network, and trees."""

import copy
import dataclasses

import pytest
import torch
import torch.distributed as dist
from escnn.nn import GeometricTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils import _pytree

from escnn_attention._escnn import trees
from tests import spaces
from tests.layers import C4, CASES

BLOCKS = ["PoseLinear", "GroupSelfAttention", "TransformerBlock", "AttentiveConv", "PointTransformerBlock"]


class Network(torch.nn.Module):
    """Two modules, each of which is sharded by itself."""

    def __init__(self, block: torch.nn.Module):
        super().__init__()
        self.block, self.last = block, torch.nn.Linear(block.out_type.size, 2).double()

    def forward(self, x):
        return self.last(self.block(x).tensor.movedim(1, -1))


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path_factory.mktemp('store')}/s", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:.*returned a view tensor")
@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_are_sharded_by_themselves(name, mesh):
    block = CASES[name].drawn()
    network = Network(block)
    expected = copy.deepcopy(network)
    tensors = [t.requires_grad_() for t in CASES[name].inputs(block)]
    fully_shard(block, mesh=mesh)
    fully_shard(network, mesh=mesh)
    found = []
    for net in (network, expected):
        out = net(GeometricTensor(tensors[0], block.in_type, *tensors[1:]))
        tensors[0].grad = None
        out.square().sum().backward()
        grads = [p.grad for p in net.parameters()]
        grads = [g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads]
        found.append([out.detach(), tensors[0].grad, *grads])
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


def test_trees():
    trees.register()
    x = spaces.random_field(spaces.regular(C4, 1), 3, 3)
    leaves, _ = _pytree.tree_flatten((x,))
    assert leaves[0] is x.tensor
    assert leaves[1] is None  # a grid has no coordinates
    (doubled,) = _pytree.tree_map_only(torch.Tensor, lambda t: 2 * t, (x,))
    assert doubled.type is x.type
    assert torch.equal(doubled.tensor, 2 * x.tensor)
    moved = dataclasses.replace(x, tensor=x.tensor + 1)
    assert torch.equal(moved.tensor, x.tensor + 1)
    assert moved.type is x.type
    assert moved.coords is None
