import pytest
import torch
from escnn import gspaces, nn

from escnn_attention import equivariance_report
from escnn_attention.models import CNN, InvariantLogits
from escnn_attention.plain.resample import AntialiasedPool

SMALL = {"widths": (3, 4), "convolutions": (2, 1), "features": 5}


def test_stages_are_as_asked_for():
    network = CNN(2, 7, **SMALL, stem_kernel=7)
    assert list(network.stages) == ["convolution_1_1", "convolution_1_2", "pool_1", "convolution_2_1", "features"]
    kernels = [m.kernel_size[0] for m in network.modules() if isinstance(m, torch.nn.Conv2d)]
    assert kernels == [7, 3, 3, 1]
    assert network(torch.randn(2, 2, 8, 9)).shape == (2, 7)
    assert (network.in_channels, network.num_classes) == (2, 7)


def test_antialiased_pooling_takes_the_place_of_the_maximum():
    network = CNN(2, 7, **SMALL, antialiased=True).double()
    x = torch.randn(2, 3, 8, 9, dtype=torch.float64)
    torch.testing.assert_close(network.stages["pool_1"](x), AntialiasedPool("max", 2).double()(x))
    assert network(torch.randn(2, 2, 8, 9, dtype=torch.float64)).shape == (2, 7)
    assert CNN(2, 7, **SMALL).stages["pool_1"](x).equal(torch.nn.functional.max_pool2d(x, 2))


def test_it_is_not_equivariant():
    torch.manual_seed(0)
    gspace = gspaces.rot2dOnR2(4)
    image = nn.FieldType(gspace, [gspace.trivial_repr])
    probe = InvariantLogits(CNN(1, 3, **SMALL), image, 3)
    assert equivariance_report(probe, (2, 1, 8, 8), layers=False).relative_error > 1e-3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"widths": (3,)}, "widths: got 1 values, needed 2"),
        ({"convolutions": (1, 0)}, "convolutions: got 0, needed at least 1"),
        ({"conv_kernel": 2}, "conv_kernel: got 2, needed an odd width"),
        ({"features": 0}, "features: got 0, needed at least 1"),
    ],
)
def test_mistakes(options, message):
    with pytest.raises(ValueError, match=message):
        CNN(1, 2, **{**SMALL, **options})
    with pytest.raises(TypeError, match="antialiased: got 1, needed"):
        CNN(1, 2, **SMALL, antialiased=1)
