"""What the tests of the convolutional networks share."""

from collections import OrderedDict

import torch
from escnn.nn import SequentialModule
from torch.nn.modules.batchnorm import _BatchNorm

from escnn_attention.plain.attentive import PoseKernel


def sizes(network, *shape):
    """The shapes of the features behind each stage."""
    found = [shape]
    for stage in network.stages.values():
        found.append(stage.evaluate_output_shape(found[-1]))
    return found[1:]


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
