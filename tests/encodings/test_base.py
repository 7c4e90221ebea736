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
    SeparableEncoding,
)
from escnn_attention.encodings.base import as_encoding
from tests import spaces

NAMES = {
    "mlp": MLPEncoding,
    "separable": SeparableEncoding,
    "fourier": FourierEncoding,
    "absolute": AbsoluteEncoding,
    "none": NoEncoding,
}
POSITIONAL = {name: cls for name, cls in NAMES.items() if name != "none"}
every_encoding = pytest.mark.parametrize("make", NAMES.values(), ids=NAMES)
positional = pytest.mark.parametrize("make", POSITIONAL.values(), ids=POSITIONAL)


def cube(dim, size=9):
    """Offsets that fill a window."""
    axis = torch.linspace(-1, 1, size)
    return torch.stack(torch.meshgrid([axis] * dim, indexing="ij"), dim=-1).flatten(0, -2)


# ---------------------------------------------------------------------------------------------------------- shapes


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


def test_no_encoding_says_nothing():
    encoding = NoEncoding().bind(2, 3, 5, 4)
    assert encoding.offsets(torch.randn(7, 2)) is None
    assert encoding.poses() is None
    assert not list(encoding.parameters())


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


def test_heads_have_encodings_of_their_own():
    for make in POSITIONAL.values():
        encoding = make().bind(2, 2, 4, 3)
        offsets, poses = encoding.offsets(cube(2)), encoding.poses()
        assert (offsets[0] - offsets[1]).abs().max() > 0.1
        assert (poses[0] - poses[1]).abs().max() > 0.1


# ------------------------------------------------------------------------------------------------------- separable


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
    with pytest.raises(ValueError, match=f"encoding: .* set head_fields to {parts} or more"):
        SeparableEncoding().bind(dim, 1, channels, num_poses)
    SeparableEncoding().bind(dim, 1, parts, num_poses)


# --------------------------------------------------------------------------------------------------------- binding


@every_encoding
def test_a_bound_encoding_cannot_be_bound_again(make):
    bound = make().bind(2, 1, 4, 4)
    with pytest.raises(ValueError, match=rf"encoding: this {make.__name__} belongs to a layer already"):
        bound.bind(2, 1, 4, 4)
    hidden = spaces.regular(gspaces.rot2dOnR2(4), 4)
    layer = GroupSelfAttention(hidden, hidden, encoding=make())
    with pytest.raises(ValueError, match="encoding"):
        GroupSelfAttention(hidden, hidden, encoding=layer.plain.encoding)


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


# --------------------------------------------------------------------------------------------------------- options


@pytest.mark.parametrize("make", [MLPEncoding, AbsoluteEncoding, SeparableEncoding])
@pytest.mark.parametrize("argument", ["hidden", "layers"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "2"])
def test_wrong_sizes_are_named(make, argument, value):
    with pytest.raises((TypeError, ValueError), match=f"{argument}: got {value!r}"):
        make(**{argument: value})


@pytest.mark.parametrize("value", [0, -3, 2.0])
def test_wrong_numbers_of_frequencies_are_named(value):
    with pytest.raises((TypeError, ValueError), match=f"num_frequencies: got {value!r}"):
        FourierEncoding(value)


@pytest.mark.parametrize("value", [0, -1.0, math.nan])
def test_wrong_scales_are_named(value):
    with pytest.raises(ValueError, match="scale: got"):
        FourierEncoding(scale=value)


def test_width_and_depth_of_the_mlp():
    def shapes(**options):
        mlp = MLPEncoding(**options).bind(2, 3, 5, 4).mlp
        return [tuple(m.weight.shape) for m in mlp if isinstance(m, torch.nn.Linear)]

    assert shapes() == [(16, 2), (15, 16)]
    assert shapes(hidden=8, layers=3) == [(8, 2), (8, 8), (8, 8), (15, 8)]


def test_normalize_hidden_sees_only_the_sign_of_a_coordinate():
    encoding = SeparableEncoding(normalize_hidden=True).bind(1, 2, 4, 1)
    values = encoding.offsets(torch.tensor([[-1.0], [-0.3], [0.2], [0.9]]))
    torch.testing.assert_close(values[:, 0], values[:, 1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(values[:, 2], values[:, 3], rtol=1e-4, atol=1e-4)
    assert (values[:, 1] - values[:, 2]).abs().max() > 0.1
    smooth = SeparableEncoding().bind(1, 2, 4, 1).offsets(torch.tensor([[0.2], [0.9]]))
    assert (smooth[:, 0] - smooth[:, 1]).abs().max() > 0.1


@pytest.mark.parametrize("learned", [True, False])
def test_frequencies_are_learned_or_kept(learned):
    encoding = FourierEncoding(6, learned=learned).bind(3, 2, 4, 5)
    assert encoding.frequencies.shape == (6, 3)
    assert ("frequencies" in dict(encoding.named_parameters())) == learned
    assert "frequencies" in encoding.state_dict()  # saved either way: it cannot be drawn again
    other = FourierEncoding(6, learned=learned).bind(3, 2, 4, 5)
    delta = torch.randn(10, 3)
    assert (other.offsets(delta) - encoding.offsets(delta)).abs().max() > 0.01
    other.load_state_dict(encoding.state_dict())
    torch.testing.assert_close(other.offsets(delta), encoding.offsets(delta))
    encoding.offsets(delta).sum().backward()
    assert (encoding.frequencies.grad is not None) == learned


def test_fourier_is_the_formula():
    encoding = FourierEncoding(5, scale=2.0).bind(2, 3, 4, 1).double()
    delta = torch.randn(11, 2, dtype=torch.float64)
    w = encoding.readout.weight.view(3, 4, 2, 5)  # heads, channels, cosine and sine, frequencies
    phase = torch.einsum("wd,ld->lw", encoding.frequencies, delta)
    expected = torch.einsum("mcw,lw->mlc", w[:, :, 0], phase.cos()) + torch.einsum(
        "mcw,lw->mlc", w[:, :, 1], phase.sin()
    )
    torch.testing.assert_close(encoding.offsets(delta), expected)
    scales = [FourierEncoding(500, scale=s).bind(2, 1, 4, 1).frequencies.std() for s in (0.5, 4.0)]
    torch.testing.assert_close(torch.stack(scales), torch.tensor([0.5, 4.0]), rtol=0.1, atol=0)


def test_absolute_is_told_from_relative():
    assert [cls().absolute for cls in NAMES.values()] == [False, False, False, True, False]


# ----------------------------------------------------------------------------------------------------- smoothness


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


# -------------------------------------------------------------------------------------------------- initialisation


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


# ------------------------------------------------------------------------------------------------------- arguments


@every_encoding
def test_names(make):
    name = next(name for name, cls in NAMES.items() if cls is make)
    assert type(as_encoding(name)) is make
    encoding = make()
    assert as_encoding(encoding) is encoding


def test_the_default_is_the_mlp():
    assert type(as_encoding(None)) is MLPEncoding


def test_wrong_encodings_are_refused():
    with pytest.raises(ValueError, match=r"encoding: got 'spiral', needed one of 'mlp', .*'none'"):
        as_encoding("spiral")
    for value in 3, MLPEncoding, torch.nn.Linear(2, 2), False:
        with pytest.raises(TypeError, match=r"encoding: got .*, needed an Encoding, a name or None"):
            as_encoding(value)


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
    assert make.__name__ in repr(GroupSelfAttention(hidden, hidden, encoding=make()))
    assert make.__name__ in repr(make())
