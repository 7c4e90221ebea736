"""What the tests of the convolutional networks share."""

import copy
from collections import OrderedDict

import torch
from escnn.nn import EquivariantModule, SequentialModule
from hypothesis import settings
from torch.nn.modules.batchnorm import _BatchNorm

from escnn_attention.plain.attentive import PoseKernel

# Each example of these tests builds a network: 2 in an ordinary run, 38 in one of everything.
few_examples = settings(max_examples=settings.default.max_examples * 2 // 5 - 2)


def count(module):
    return sum(p.numel() for p in module.parameters())


def settled(module, *shape, spread=1.0):
    """In float64 and eval mode, with the statistics of random features of this shape, and attention far from 1/2."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "attention" in name or any(part in name for part in ("squeeze", "excite", "spatial")):
                parameter.mul_(spread)
        for norm in norms(module):
            norm.weight.uniform_(0.5, 1.5)
            norm.bias.normal_(std=0.3)
            norm.momentum = 1.0
        module = module.double().train()
        x = torch.randn(*shape, dtype=torch.float64)
        module(module.in_type(x))
    return module.eval()


def check_trains(network, size, lr):
    """Eight images of two classes are learned by heart."""
    images, labels = torch.randn(8, 1, size, size), torch.arange(8) % 2
    optimiser = torch.optim.Adam(network.parameters(), lr=lr)
    losses = []
    for _ in range(30):
        loss = torch.nn.functional.cross_entropy(network(images), labels)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def norms(module):
    return [m for m in module.modules() if isinstance(m, _BatchNorm)]


def sequence(network):
    """The stages of a network as one module, whose layers the report tells apart."""
    return SequentialModule(OrderedDict(network.stages.items()))


def broken(module, kind):
    """The module with one kernel that no longer turns with the group: the last entries of all poses are exchanged."""
    kernel = next(m for name, m in module.named_modules() if isinstance(m, PoseKernel) and name.endswith(kind))
    kernel.orbits[1:] = kernel.orbits[1:].roll(1, -1) if kernel.orbits.dim() > 2 else kernel.orbits[1:].flip(1)
    return module


def assert_exported(module, *shape):
    """The export is plain, and does the same in the same precision: to rounding error, so that nothing in it was ever
    rounded to another one.
    """
    for dtype, tolerance in ((torch.float64, 1e-11), (torch.float32, 1e-4)):
        module = copy.deepcopy(module).to(dtype)
        plain = module.export()
        assert not any(isinstance(m, EquivariantModule) for m in plain.modules())
        assert {t.dtype for t in plain.state_dict().values() if t.is_floating_point()} == {dtype}
        assert torch.get_default_dtype() == torch.float32
        x = torch.randn(*shape, dtype=dtype)
        y = module(module.in_type(x))
        y = y if isinstance(y, torch.Tensor) else y.tensor
        torch.testing.assert_close(plain(x), y, atol=tolerance, rtol=tolerance)
