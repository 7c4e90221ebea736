"""The encodings by networks of the offset."""

import pytest
import torch
from escnn import gspaces

from escnn_attention import AbsoluteEncoding, GroupSelfAttention, MLPEncoding, PointSelfAttention, SeparableEncoding
from tests import spaces
from tests.encodings.cases import NAMES


def test_width_and_depth_of_the_mlp():
    def shapes(**options):
        mlp = MLPEncoding(**options).bind(2, 3, 5, 4).mlp
        return [tuple(m.weight.shape) for m in mlp if isinstance(m, torch.nn.Linear)]

    assert shapes() == [(16, 2), (15, 16)]
    assert shapes(hidden=8, layers=3) == [(8, 2), (8, 8), (8, 8), (15, 8)]


@pytest.mark.parametrize("make", [MLPEncoding, AbsoluteEncoding, SeparableEncoding])
def test_heads_can_share_one_encoding(make):
    encoding = make(per_head=False).bind(2, 3, 5, 4)
    assert encoding.offsets(torch.randn(7, 2)).shape == (1, 7, 5)
    assert encoding.poses().shape == (1, 4, 5)
    gspace = gspaces.rot2dOnR2(4)
    hidden = spaces.regular(gspace, 6)
    layer = GroupSelfAttention(hidden, hidden, 2, 3, encoding=make(per_head=False)).double()
    own = GroupSelfAttention(hidden, hidden, 2, 3, encoding=make()).double()
    assert sum(p.numel() for p in layer.parameters()) < sum(p.numel() for p in own.parameters())
    assert spaces.grid_error(layer, spaces.random_field(hidden, 5, 5)) < 1e-12


@pytest.mark.parametrize("make", [MLPEncoding, AbsoluteEncoding, SeparableEncoding])
@pytest.mark.parametrize("argument", ["hidden", "layers"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "2"])
def test_wrong_sizes_are_named(make, argument, value):
    with pytest.raises((TypeError, ValueError), match=f"{argument}: got {value!r}"):
        make(**{argument: value})


@pytest.mark.parametrize("normalize_hidden", [False, True])
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("layers", [1, 2])
def test_features_are_the_same_function(layers, per_head, normalize_hidden):
    encoding = MLPEncoding(8, layers, per_head=per_head, normalize_hidden=normalize_hidden).bind(3, 2, 4, 5).double()
    delta = torch.randn(6, 7, 3, dtype=torch.float64)
    features, readout = encoding.features(delta.transpose(1, 2))
    assert features.shape == (6, 8, 7)
    values = torch.einsum("bfn,mcf->mbnc", features, readout)
    torch.testing.assert_close(values, encoding.offsets(delta))


def test_a_network_of_another_form_offers_no_features():
    class Biased(MLPEncoding):
        def _build_offsets(self):
            super()._build_offsets()
            last = self.mlp[-1]
            self.mlp[-1] = torch.nn.Linear(last.in_features, last.out_features)

    assert Biased().bind(2, 2, 4, 1).features(torch.randn(1, 2, 7)) is None
    assert MLPEncoding().bind(0, 2, 4, 3).features(torch.randn(1, 0, 7)) is None
    assert MLPEncoding().bind(2, 2, 4, 1).features(torch.randn(1, 2, 7)) is not None


def test_a_network_of_ones_own_offers_features():
    """Any activation will do, and any map of the last axis."""

    class Other(MLPEncoding):
        def _build_offsets(self):
            self.mlp = torch.nn.Sequential(
                torch.nn.Linear(self.dim, 6, bias=False),
                torch.nn.LayerNorm(6),
                torch.nn.GELU(),
                torch.nn.Linear(6, self.num_heads * self.channels, bias=False),
            )

    encoding, delta = Other().bind(2, 2, 4, 1).double(), torch.randn(7, 2, dtype=torch.float64)
    features, readout = encoding.features(delta.T.unsqueeze(0))
    torch.testing.assert_close((readout @ features).mT, encoding.offsets(delta))


def test_normalised_features_at_points():
    """The norm is over the features, also where these lie before the points."""
    hidden = spaces.regular(gspaces.rot2dOnR2(4), 4)
    layer = PointSelfAttention(hidden, hidden, encoding=MLPEncoding(5, 2, normalize_hidden=True)).double()
    x, coords = torch.randn(9, 16, dtype=torch.float64), torch.randn(9, 2, dtype=torch.float64)
    y = layer(hidden(x, coords)).tensor
    # Without features the layer takes the function of the offset itself.
    layer.plain.encoding.features = lambda columns: None
    torch.testing.assert_close(layer(hidden(x, coords)).tensor, y)


def test_absolute_is_told_from_relative():
    assert [cls().absolute for cls in NAMES.values()] == [False, False, False, True, False]


@pytest.mark.parametrize(("dim", "channels", "num_poses"), [(2, 8, 4), (2, 3, 4), (3, 9, 24), (2, 5, 1), (3, 7, 1)])
def test_separable_divides_the_channels(dim, channels, num_poses):
    """Every coordinate has channels that no other coordinate changes, and the poses have the rest."""
    encoding = SeparableEncoding().bind(dim, 2, channels, num_poses)
    each = channels // (dim + 1) if num_poses > 1 else channels // dim
    delta = torch.rand(50, dim) - 0.5
    for axis in range(dim):
        moved = delta.clone()
        moved[:, axis] += 0.4
        changed = (encoding.offsets(moved) != encoding.offsets(delta)).any(1).any(0)
        last = axis == dim - 1 and num_poses == 1
        stop = channels if last else (axis + 1) * each
        assert changed.nonzero().flatten().tolist() == list(range(axis * each, stop))
    if num_poses > 1:
        used = (encoding.poses() != 0).any(0).any(0)
        assert used.nonzero().flatten().tolist() == list(range(dim * each, channels))


@pytest.mark.parametrize(("dim", "channels", "num_poses", "parts"), [(2, 2, 4, 3), (3, 3, 2, 4), (2, 1, 1, 2)])
def test_separable_needs_a_channel_for_each_part(dim, channels, num_poses, parts):
    with pytest.raises(ValueError, match=f"encoding: .*head_fields to {parts}"):
        SeparableEncoding().bind(dim, 1, channels, num_poses)
    SeparableEncoding().bind(dim, 1, parts, num_poses)


def test_normalize_hidden_sees_only_the_sign_of_a_coordinate():
    encoding = SeparableEncoding(normalize_hidden=True).bind(1, 2, 4, 1)
    values = encoding.offsets(torch.tensor([[-1.0], [-0.3], [0.2], [0.9]]))
    torch.testing.assert_close(values[:, 0], values[:, 1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(values[:, 2], values[:, 3], rtol=1e-4, atol=1e-4)
    assert (values[:, 1] - values[:, 2]).abs().max() > 0.1
    smooth = SeparableEncoding().bind(1, 2, 4, 1).offsets(torch.tensor([[0.2], [0.9]]))
    assert (smooth[:, 0] - smooth[:, 1]).abs().max() > 0.1
