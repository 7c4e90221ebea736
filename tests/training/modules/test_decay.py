"""Which parameters weight decay is for, in all networks."""

import pytest
import torch
from escnn import gspaces, nn

from escnn_attention import (
    AttentiveConv,
    ConvolutionalEncoding,
    FourierEncoding,
    PairKernel,
    PoseAttention,
    QuadraticEncoding,
    RotaryEncoding,
)
from escnn_attention.models import (
    CNN,
    AllCNNC,
    GroupCNN,
    GroupDenseNet,
    GSANet,
    HamiltonianNetwork,
    HybridNet,
    PointTransformer,
    ResNet44,
)
from escnn_attention.training.modules.decay import decayed_parameters, parameter_groups

C2 = gspaces.rot2dOnR2(2)
POINTS = {"fields": 2, "num_blocks": 1, "num_heads": 1}


def hybrid(encoding):
    options = {"widths": (2, 4), "convolutions": (1, 1), "attention": (0, 1), "num_heads": 1, "kernel_size": 3}
    return HybridNet(C2, 1, 3, **options, features=2, block={"encoding": encoding})


def sequence():
    """Layers of escnn, and ours that no network has."""
    fields = nn.FieldType(C2, 2 * [C2.regular_repr])
    return nn.SequentialModule(
        nn.R2Conv(fields, fields, 3, padding=1),
        nn.InnerBatchNorm(fields),
        nn.IIDBatchNorm2d(fields),
        nn.GNormBatchNorm(fields),
        nn.NormNonLinearity(fields, bias=True),
        AttentiveConv(fields, fields, 3, padding=1),
        PoseAttention(fields),
    )


NETWORKS = {
    "GSA-Net": lambda: GSANet(C2, 1, 3, channels=6, blocks=(1,), num_heads=2, kernel_size=3),
    "hybrid": lambda: hybrid(None),
    "hybrid, Fourier": lambda: hybrid(FourierEncoding(3)),
    "hybrid, rotary": lambda: hybrid(RotaryEncoding()),
    "hybrid, quadratic": lambda: hybrid(QuadraticEncoding()),
    "hybrid, convolutional": lambda: hybrid(ConvolutionalEncoding(FourierEncoding(3))),
    "attention alone": lambda: HybridNet(C2, 1, 3, widths=(4,), convolutions=(1,), attention=(1,), stem={}),
    "CNN": lambda: CNN(1, 3, widths=(2,), convolutions=(1,), features=2),
    "p4-CNN": lambda: GroupCNN(C2, 1, 3, width=2, convolutions=(1, 1)),
    "α-p4-CNN": lambda: GroupCNN(C2, 1, 3, width=2, convolutions=(1, 1), attention="full"),
    "All-CNN-C": lambda: AllCNNC(C2, 3, 10, width=2),
    "ResNet44": lambda: ResNet44(C2, 3, 10, width=(1, 1, 1), blocks=1),
    "DenseNet": lambda: GroupDenseNet(C2, 3, 2, width=1, blocks=1),
    "clouds": lambda: PointTransformer(C2, 2, 3, head={"batch_norm": True}, **POINTS),
    "clouds, kernel": lambda: PointTransformer(C2, 2, "vector", encoding=PairKernel(), **POINTS),
    "clouds, convolved": lambda: PointTransformer(C2, 2, 3, attention={"kernel_features": 3}, **POINTS),
    "Hamiltonian": lambda: HamiltonianNetwork(PointTransformer(C2, 2, 1, **POINTS)),
    "layers": sequence,
}

# The last part of the name of a parameter, and the class that has it: all that is not to decay, and all that is.
SPARED = {
    ("IIDBatchNorm2d", "regular_weight"),
    ("LayerNorm", "weight"),
    ("LayerNorm", "bias"),
    ("BatchNorm1d", "weight"),
    ("BatchNorm1d", "bias"),
    ("BatchNorm2d", "weight"),
    ("BatchNorm2d", "bias"),
    ("BatchNorm3d", "weight"),
    ("BatchNorm3d", "bias"),
    ("GNormBatchNorm", "regular_weight"),
    ("NormNonLinearity", "eps"),
}
DECAYED = {"weight", "weights"}


def kind(network, name):
    """What an encoding is part of is one whatever it is made of."""
    *path, last = name.split(".")
    modules = [network.get_submodule(".".join(path[:i])) for i in range(len(path) + 1)]
    of_encoding = any(type(m).__name__.endswith("Encoding") or isinstance(m, PairKernel) for m in modules)
    return "encoding" if of_encoding else (type(modules[-1]).__name__, last)


@pytest.mark.parametrize("name", NETWORKS)
def test_weights_decay_and_nothing_else(name):
    network = NETWORKS[name]()
    decayed = set(decayed_parameters(network))
    assert decayed
    for parameter, _ in network.named_parameters():
        found = kind(network, parameter)
        spared = found == "encoding" or found in SPARED or "bias" in found[1]
        assert (parameter not in decayed) == spared, (parameter, found)
        assert spared or found[1] in DECAYED, (parameter, found)


def test_groups_hold_every_parameter_once():
    network = hybrid(None)
    groups = parameter_groups(network)
    held = [id(p) for group in groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in network.parameters())
    assert [group.get("weight_decay") for group in groups] == [None, 0.0]
    assert len(parameter_groups(torch.nn.Linear(2, 3, bias=False))) == 1


def test_what_does_not_decay_stays_where_it_is():
    """Without gradients a step of AdamW is decay alone: weights shrink by 1 − lr · decay."""
    network = hybrid(None)
    before = {name: p.detach().clone() for name, p in network.named_parameters()}
    optimiser = torch.optim.AdamW(parameter_groups(network), lr=0.1, weight_decay=0.5)
    for p in network.parameters():
        p.grad = torch.zeros_like(p)
    optimiser.step()
    decayed = set(decayed_parameters(network))
    for name, p in network.named_parameters():
        torch.testing.assert_close(p.detach(), before[name] * (0.95 if name in decayed else 1.0))
