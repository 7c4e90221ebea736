"""Networks without a group as liftings to regular fields."""

import pytest
import torch
from escnn import gspaces
from escnn.nn import FieldType, GeometricTensor, R2Conv

from escnn_attention import FrameLift, GroupSelfAttention, equivariance_report
from escnn_attention.groups.fibers import fibers

C4, D4 = gspaces.rot2dOnR2(4), gspaces.flipRot2dOnR2(4)

SPACES = {
    "C2": lambda: gspaces.rot2dOnR2(2),
    "C4": lambda: C4,
    "flip": gspaces.flip2dOnR2,
    "D4": lambda: D4,
    "inversion": gspaces.invOnR3,
    "octahedral": gspaces.octaOnR3,
}


def convolutional(in_channels=3, dim=2):
    """Two convolutions, one of them with a stride, without any symmetry."""
    convolution = {2: torch.nn.Conv2d, 3: torch.nn.Conv3d}[dim]
    first, second = convolution(in_channels, 4, 3, stride=2, padding=1), convolution(4, 5, 2)
    return torch.nn.Sequential(first, torch.nn.SiLU(), second).double()


class Tokens(torch.nn.Module):
    """A vision transformer with a class token and two registers, by the names of timm."""

    num_features, num_prefix_tokens = 8, 3

    def __init__(self, size=8):
        super().__init__()
        self.patches = torch.nn.Conv2d(3, 8, 4, stride=4)
        self.prefix = torch.nn.Parameter(torch.randn(1, 3, 8))
        self.positions = torch.nn.Parameter(torch.randn(1, (size // 4) ** 2, 8))
        self.block = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.head = torch.nn.Linear(8, 10)

    def forward_features(self, x):
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        return self.block(torch.cat([self.prefix.expand(len(x), -1, -1), tokens], 1))

    def forward(self, x):
        return self.head(self.forward_features(x)[:, 0])


@pytest.mark.parametrize("name", SPACES)
@pytest.mark.slow
def test_convolutions_become_equivariant_at_every_size(name):
    space = SPACES[name]()
    dim = fibers(space).dimension
    for shape in [(4, 5, 6)[:dim], (4,) * dim, (5,) * dim]:
        lift = FrameLift(convolutional(dim=dim), space, channels=5)
        report = equivariance_report(lift, (2, 3, *shape), layers=False)
        assert report.relative_error < 1e-12
        assert all(row.exact for row in report.rows)
    # Without the other poses it is not.
    lift.plain.views = len(lift.plain.views) * [([], list(range(2 + dim)))]
    assert equivariance_report(lift, (2, 3, *[5] * dim), layers=False).relative_error > 1e-3


def test_it_is_the_formula():
    in_type = FieldType(D4, [D4.irrep(1, 1), D4.trivial_repr])
    network = convolutional()
    lift = FrameLift(network, D4, channels=5, in_type=in_type)
    x = torch.randn(2, 3, 9, 9, dtype=torch.float64)
    found = lift(in_type(x)).tensor.unflatten(1, (5, 8))
    scalars = FieldType(D4, 5 * [D4.trivial_repr])
    for pose, h in enumerate(D4.fibergroup.elements):
        seen = in_type(x).transform(~h).tensor
        expected = GeometricTensor(network(seen.double()), scalars).transform(h).tensor
        torch.testing.assert_close(found[:, :, pose], expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("poses_at_once", [None, 1, 3])
def test_tokens_and_prefix_tokens(poses_at_once):
    lift = FrameLift(Tokens(), D4, poses_at_once=poses_at_once).double().eval()
    assert (lift.out_type.size, lift.plain.prefix_tokens) == (64, 3)
    assert equivariance_report(lift, (2, 3, 8, 8)).relative_error < 1e-12
    x = lift.in_type(torch.randn(2, 3, 8, 8, dtype=torch.float64))
    maps, prefix = lift.with_prefix(x)
    assert (maps.shape, prefix.shape) == ((2, 64, 2, 2), (2, 64, 3))
    torch.testing.assert_close(maps.tensor, lift(x).tensor, rtol=0, atol=1e-14)
    for g in D4.fibergroup.elements:
        again = lift.with_prefix(x.transform(g))[1].tensor
        torch.testing.assert_close(again, prefix.transform_fibers(g).tensor, rtol=1e-10, atol=1e-12)
    # The pose of the identity sees the image as it is.
    whole = lift.plain.network.forward_features(x.tensor)
    torch.testing.assert_close(prefix.tensor[:, ::8], whole[:, :3].transpose(1, 2), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(maps.tensor[:, ::8].flatten(2), whole[:, 3:].transpose(1, 2), rtol=1e-10, atol=1e-12)


def test_frozen_networks_stay_as_they_are():
    lift = FrameLift(Tokens(), C4, frozen=True).train()
    assert lift.training
    assert not lift.plain.network.training
    attention = GroupSelfAttention(lift.out_type, lift.out_type, 1, None)
    x = lift.in_type(torch.randn(1, 3, 8, 8, requires_grad=True))
    attention(lift(x)).tensor.sum().backward()
    assert x.tensor.grad is None
    assert all(p.grad is None for p in lift.parameters())
    assert all(p.grad is not None for p in attention.parameters())


def test_the_shape_is_found_in_eval_mode():
    lift = FrameLift(Tokens(), C4)
    assert lift.evaluate_output_shape((5, 3, 8, 8)) == (5, 32, 2, 2)
    assert lift.plain.network.training


def test_in_one_network_with_convolutions():
    lift = FrameLift(convolutional().float(), C4, channels=5)
    x = lift(lift.in_type(torch.randn(1, 3, 9, 9)))
    assert R2Conv(lift.out_type, lift.out_type, 3, padding=1)(x).shape == (1, 20, 4, 4)


class Gives(torch.nn.Module):
    """A network that gives what it is told."""

    def __init__(self, *shape):
        super().__init__()
        self.shape = shape

    def forward(self, x):
        return torch.zeros(self.shape) if self.shape else {"tokens": x}


def test_mistakes():
    network, space, other = convolutional(), C4, gspaces.trivialOnR2()
    scalars = FieldType(other, [other.trivial_repr])
    with pytest.raises(TypeError, match="module: got 3, needed"):
        FrameLift(3, space)
    with pytest.raises(TypeError, match=r"gspace: .*gspace"):
        FrameLift(network, 4)
    with pytest.raises(TypeError, match=r"channels: .*has no num_features"):
        FrameLift(network, space)
    with pytest.raises(ValueError, match="channels: got 0, needed"):
        FrameLift(network, space, channels=0)
    for refused in (gspaces.rot2dOnR2(8), gspaces.flip2dOnR2(axis=0.3), gspaces.no_base_space(space.fibergroup)):
        with pytest.raises(ValueError, match=r"gspace: .*square grid"):
            FrameLift(network, refused, channels=5)
    with pytest.raises(NotImplementedError, match="continuous"):
        FrameLift(network, gspaces.rot2dOnR2(-1), channels=5)
    with pytest.raises(ValueError, match="in_type: its gspace is"):
        FrameLift(network, space, channels=5, in_type=scalars)
    for gives, options, message in [
        (Gives(4, 7, 5), {}, "gives 7 tokens, 0 of them prefix tokens"),
        (Gives(4, 5, 2, 2), {"prefix_tokens": 1}, r"gives \(4, 5, 2, 2\) .*needed tokens"),
        (Gives(), {}, "gives dict .*needed tokens"),
    ]:
        lift = FrameLift(gives, space, channels=5, **options)
        with pytest.raises(ValueError, match=message):
            lift(lift.in_type(torch.randn(1, 3, 8, 8)))


SMALL = {"img_size": 16, "patch_size": 4, "embed_dim": 12, "depth": 1, "num_heads": 2}


@pytest.mark.parametrize(
    ("name", "options", "prefix", "grid"),
    [
        ("vit_tiny_patch16_224", SMALL, 1, 4),
        ("vit_small_patch14_reg4_dinov2", SMALL, 5, 4),
        ("resnet10t", {}, 0, 1),
    ],
)
@pytest.mark.parametrize("frozen", [False, True])
def test_networks_of_timm(name, options, prefix, grid, frozen):
    """Of random weights, with their class and register tokens."""
    timm = pytest.importorskip("timm")
    lift = FrameLift(timm.create_model(name, **options), D4, frozen=frozen, poses_at_once=2).double().eval()
    report = equivariance_report(lift, (1, 3, 16, 16), layers=False)
    assert report.relative_error < 1e-10
    assert all(row.exact for row in report.rows)
    x = lift.in_type(torch.randn(1, 3, 16, 16, dtype=torch.float64))
    maps, tokens = lift.with_prefix(x)
    assert (maps.shape[2:], tokens.shape[2]) == ((grid, grid), prefix)
    turned = lift.with_prefix(x.transform(D4.fibergroup.elements[1]))[1].tensor
    expected = tokens.transform_fibers(D4.fibergroup.elements[1]).tensor
    torch.testing.assert_close(turned, expected, rtol=1e-9, atol=1e-9)
    assert prefix == 0 or (turned - tokens.tensor).abs().max() > 1e-6
