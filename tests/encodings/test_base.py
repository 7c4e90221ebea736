"""What all encodings have in common, and the encodings by networks of the offset."""

import math

import pytest
import torch
from escnn import gspaces
from torch.nn.utils import parameters_to_vector

from escnn_attention import (
    AbsoluteEncoding,
    Encoding,
    FourierEncoding,
    GroupSelfAttention,
    LiftingSelfAttention,
    MLPEncoding,
    NoEncoding,
    PointSelfAttention,
    RotaryEncoding,
    SeparableEncoding,
)
from escnn_attention.encodings.base import coordinate_mlp
from tests import spaces
from tests.encodings.cases import NAMES, POSITIONAL, cube, every_encoding, positional


@positional
@pytest.mark.parametrize("num_poses", [1, 4])
@pytest.mark.parametrize("dim", [0, 1, 2, 3])
def test_shapes(make, dim, num_poses):
    encoding = make().bind(dim, 3, 5, num_poses)
    offsets, poses = encoding.offsets(torch.randn(7, 2, dim)), encoding.poses()
    assert (None if offsets is None else offsets.shape) == ((3, 7, 2, 5) if dim else None)
    # A single pose is the same for all keys: nothing is learned about it.
    assert (None if poses is None else poses.shape) == ((3, 4, 5) if num_poses > 1 else None)
    assert bool(list(encoding.parameters())) == (dim > 0 or num_poses > 1)


def test_heads_have_encodings_of_their_own():
    for make in POSITIONAL.values():
        encoding = make().bind(2, 2, 4, 3)
        offsets, poses = encoding.offsets(cube(2)), encoding.poses()
        assert (offsets[0] - offsets[1]).abs().max() > 0.1
        assert (poses[0] - poses[1]).abs().max() > 0.1


@every_encoding
def test_a_bound_encoding_cannot_be_bound_again(make):
    bound = make().bind(2, 1, 4, 4)
    with pytest.raises(ValueError, match=r"encoding: .*belongs to a layer"):
        bound.bind(2, 1, 4, 4)
    hidden = spaces.regular(gspaces.rot2dOnR2(4), 4)
    layer = GroupSelfAttention(hidden, hidden, encoding=make(), kernel_size=None)
    with pytest.raises(ValueError, match="encoding"):
        GroupSelfAttention(hidden, hidden, encoding=layer.plain.encoding, kernel_size=None)


@positional
def test_layers_given_the_same_encoding_share_nothing(make):
    hidden = spaces.regular(gspaces.rot2dOnR2(4), 4)
    encoding = make()
    first, second = (GroupSelfAttention(hidden, hidden, kernel_size=3, encoding=encoding) for _ in range(2))
    assert not encoding.bound
    assert not list(encoding.parameters())
    ours, theirs = (parameters_to_vector(layer.plain.encoding.parameters()) for layer in (first, second))
    assert ours.numel() == theirs.numel() > 0
    assert (ours != theirs).all()
    ids = [{p.data_ptr() for p in layer.parameters()} for layer in (first, second)]
    assert not ids[0] & ids[1]


@positional
def test_continuous_in_the_offset(make):
    """No table: what changes by little on the way to a nearby offset changes at every offset in between."""
    encoding = make().bind(2, 1, 4, 1).double()
    start, direction = torch.rand(20, 1, 2, dtype=torch.float64) - 0.5, torch.tensor([0.6, -0.8], dtype=torch.float64)
    steps = torch.linspace(0, 1e-3, 11, dtype=torch.float64)
    values = encoding.offsets(start + steps[:, None] * direction)[0]
    change = (values[:, 1:] - values[:, :-1]).norm(dim=-1)
    assert change.min() > 0
    assert change.max() < 1e-2
    # As for any function with a derivative, equal steps change it by almost equal amounts.
    assert (change.max(1).values / change.min(1).values).median() < 1.1


@positional
def test_gradients_of_the_offset_are_finite_at_zero(make):
    delta = torch.zeros(1, 2, requires_grad=True)
    make().bind(2, 1, 4, 1).offsets(delta).sum().backward()
    assert 0 < delta.grad.norm() < 100


@pytest.mark.sampled(6)
@positional
@pytest.mark.parametrize(("dim", "num_poses"), [(2, 8), (3, 24), (2, 1), (0, 8)])
def test_the_positional_score_of_a_unit_query_has_unit_variance(make, dim, num_poses):
    """Half from the offset and half from the pose; all from the one where the other is missing."""
    channels, parts = 12, (dim > 0) + (num_poses > 1)
    scores_x, scores_p = [], []
    for seed in range(20):
        torch.manual_seed(seed)
        encoding = make().bind(dim, 2, channels, num_poses)
        q = torch.randn(30, channels)
        if dim:
            scores = torch.einsum("qc,mlc->mql", q, encoding.offsets(cube(dim))) / math.sqrt(channels)
            scores_x.append(scores.var(-1).mean())
        if num_poses > 1:
            scores = torch.einsum("qc,mpc->mqp", q, encoding.poses()) / math.sqrt(channels)
            scores_p.append(scores.var(-1).mean())
    for scores in filter(None, (scores_x, scores_p)):
        assert torch.stack(scores).mean().item() == pytest.approx(1 / parts, rel=0.25)


def regular_layer(gspace, kernel_size, size, encoding):
    hidden = spaces.regular(gspace, 8)
    layer = GroupSelfAttention(hidden, hidden, 2, kernel_size, encoding=encoding)
    return layer, spaces.random_field(hidden, *spaces.shape_of(gspace, size), dtype=torch.float32)


def lifting_layer(gspace, kernel_size, size, encoding):
    image = spaces.scalars(gspace, 8)
    layer = LiftingSelfAttention(image, spaces.regular(gspace, 16), 2, kernel_size, encoding=encoding)
    return layer, spaces.random_field(image, size, size, dtype=torch.float32)


LAYERS = {
    "window": lambda e: regular_layer(gspaces.flipRot2dOnR2(4), 7, 9, e),
    "global": lambda e: regular_layer(gspaces.rot2dOnR2(4), None, 9, e),
    "lifting": lambda e: lifting_layer(gspaces.flipRot2dOnR2(4), 7, 9, e),
    "volume": lambda e: regular_layer(gspaces.octaOnR3(), 3, 3, e),
}


@pytest.mark.sampled(7)
@every_encoding
@pytest.mark.parametrize("layer_of", LAYERS.values(), ids=LAYERS)
def test_attention_is_neither_uniform_nor_saturated_at_initialisation(layer_of, make):
    """Its perplexity, as a share of the keys. It would be 1 for uniform attention, and 1 / keys for a hard choice."""
    shares = []
    for seed in range(4):
        torch.manual_seed(seed)
        layer, x = layer_of(make())
        centre = [s // 2 for s in x.shape[2:]]
        maps = layer.attention_maps(x, [centre], poses=[0, 1, 3]).detach().flatten(5)
        entropy = -torch.xlogy(maps, maps).sum(-1)
        shares.append((entropy.exp() / (maps > 0).sum(-1)).mean().item())
    mean = sum(shares) / len(shares)
    # Without an encoding only the content scores vary.
    assert 0.15 < mean < (0.9 if make is NoEncoding else 0.75)


def test_an_encoding_of_ones_own():
    """The base class is public: a function of the offset is all that it takes."""

    class Distance(Encoding):
        def _build_offsets(self):
            self.weight = torch.nn.Parameter(torch.randn(self.num_heads, self.channels))

        def offsets(self, delta):
            return torch.einsum("...,mc->m...c", delta.norm(dim=-1), self.weight)

    hidden = spaces.regular(gspaces.rot2dOnR2(4), 2)
    layer = GroupSelfAttention(hidden, hidden, kernel_size=3, encoding=Distance()).double()
    assert spaces.grid_error(layer, spaces.random_field(hidden, 4, 4)) < 1e-12


@every_encoding
def test_repr_says_what_it_is(make):
    hidden = spaces.regular(gspaces.rot2dOnR2(4), 4)
    assert make.__name__ in repr(GroupSelfAttention(hidden, hidden, encoding=make(), kernel_size=None))
    assert make.__name__ in repr(make())


class Twice(MLPEncoding):
    """Another function of the offset, without features."""

    form = "offsets"

    def offsets(self, delta):
        return 2 * super().offsets(delta)


class TwiceByFeatures(MLPEncoding):
    """The same function, by features alone."""

    offsets = Encoding.offsets

    def features(self, columns):
        features, readout = super().features(columns)
        return 2 * features, readout


class Mixin:
    form = "offsets"

    def offsets(self, delta):
        return 2 * super().offsets(delta)


class TwiceMixed(Mixin, MLPEncoding):
    pass


class TwiceWaves(FourierEncoding):
    def waves(self):
        frequencies, readout = super().waves()
        return frequencies, 2 * readout


class TwiceNoWaves(FourierEncoding):
    form = "offsets"

    def offsets(self, delta):
        return 2 * super().offsets(delta)


class Renamed(MLPEncoding):
    """Overrides nothing."""


@pytest.mark.parametrize("make", [Twice, TwiceByFeatures, TwiceMixed, TwiceWaves, TwiceNoWaves])
def test_a_subclass_is_one_function_in_all_its_forms(make):
    torch.manual_seed(1)
    base = next(c for c in make.__mro__ if c in (MLPEncoding, FourierEncoding))
    encoding = make(6).bind(2, 2, 4, 1).double()
    original = base(6).bind(2, 2, 4, 1).double()
    original.load_state_dict(encoding.state_dict())
    delta = torch.randn(3, 5, 2, dtype=torch.float64)
    expected = 2 * original.offsets(delta)
    torch.testing.assert_close(encoding.offsets(delta), expected)
    assert (encoding.form == "offsets") == (make in (Twice, TwiceMixed, TwiceNoWaves))
    if encoding.form != "offsets":
        features, readout = encoding.features(delta.flatten(0, 1).T.unsqueeze(0))
        torch.testing.assert_close((readout @ features).mT.unflatten(1, (3, 5)), expected)


@pytest.mark.parametrize("base", [MLPEncoding, FourierEncoding])
def test_forms_of_different_functions_are_refused(base):
    class Mistaken(base):
        def offsets(self, delta):
            return 2 * super().offsets(delta)

    with pytest.raises(ValueError, match=f"encoding: offsets and {base.form}"):
        Mistaken(6).bind(2, 2, 4, 1)
    Mistaken(6).bind(0, 2, 4, 3)  # without offsets there is nothing to compare


def test_rotations_need_their_attribute():
    class Mistaken(RotaryEncoding):
        rotates = False

    with pytest.raises(ValueError, match=r"encoding: Mistaken .*rotates = True"):
        Mistaken(1).bind(2, 2, 4, 1)


@pytest.mark.parametrize(
    ("make", "base"), [(Twice, MLPEncoding), (TwiceByFeatures, MLPEncoding), (TwiceWaves, FourierEncoding)]
)
@pytest.mark.parametrize("layer", [GroupSelfAttention, PointSelfAttention])
def test_layers_take_what_a_subclass_says(layer, make, base):
    hidden = spaces.regular(gspaces.rot2dOnR2(4), 4)
    seen = {"kernel_size": None} if layer is GroupSelfAttention else {}
    ours, theirs = (layer(hidden, hidden, encoding=encoding(6), **seen).double() for encoding in (make, base))
    theirs.load_state_dict(ours.state_dict())
    if layer is PointSelfAttention:
        x = hidden(torch.randn(9, 16, dtype=torch.float64), torch.randn(9, 2, dtype=torch.float64))
    else:
        x = spaces.random_field(hidden, 5, 5)
    with torch.no_grad():
        assert (ours(x).tensor - theirs(x).tensor).abs().max() > 1e-3
        last = theirs.plain.encoding.mlp[-1] if base is MLPEncoding else theirs.plain.encoding.readout
        last.weight.mul_(2)
        torch.testing.assert_close(ours(x).tensor, theirs(x).tensor)


def test_a_subclass_that_says_nothing_of_its_own_offers_what_its_base_does(monkeypatch):
    hidden = spaces.regular(gspaces.rot2dOnR2(4), 4)
    layer = PointSelfAttention(hidden, hidden, encoding=Renamed())
    x = hidden(torch.randn(9, 16), torch.randn(9, 2))
    y = layer(x).tensor
    # Whole tables of the function of the offset are not asked for.
    monkeypatch.setattr(MLPEncoding, "offsets", None)
    torch.testing.assert_close(layer(x).tensor, y)


def test_features_alone_make_an_encoding():
    class Rings(Encoding):
        form = "features"

        def _build_offsets(self):
            self.readout = torch.nn.Parameter(torch.randn(self.num_heads, self.channels, 4))

        def features(self, columns):
            centres = torch.linspace(0, 1, 4, dtype=columns.dtype)
            return (-(4 * (columns.norm(dim=1, keepdim=True) - centres[:, None]) ** 2)).exp(), self.readout

    encoding = Rings().bind(2, 3, 5, 1).double()
    assert encoding.offsets(torch.randn(6, 7, 2, dtype=torch.float64)).shape == (3, 6, 7, 5)
    assert Rings().bind(0, 3, 5, 2).offsets(torch.randn(6, 7, 0)) is None
    hidden = spaces.regular(gspaces.rot2dOnR2(4), 2)
    layer = GroupSelfAttention(hidden, hidden, kernel_size=3, encoding=Rings()).double()
    assert spaces.grid_error(layer, spaces.random_field(hidden, 4, 4)) < 1e-12


def test_an_encoding_defines_a_function_of_the_offset():
    class Silent(Encoding):
        def _build_offsets(self):
            pass

    with pytest.raises(TypeError, match=r"encoding: .*defines no offsets"):
        Silent().bind(2, 2, 4, 1)


def test_normalised_hidden_units_have_unit_variance():
    normed, plain = (coordinate_mlp(2, 8, 1, 5, normalize_hidden=n) for n in (True, False))
    x = torch.randn(20, 2)
    assert torch.allclose(normed[:2](x).var(-1, correction=0), torch.ones(20))
    assert not normed[0].bias.any()
    assert not torch.allclose(plain[:1](x).var(-1, correction=0), torch.ones(20))


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
