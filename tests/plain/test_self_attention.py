"""Self-attention on tensors: the formula in plain loops, layers on scalars, field convolutions, hooks."""

import pytest
import torch
from escnn import gspaces
from escnn.nn import FieldType

from escnn_attention import GroupSelfAttention, LiftingSelfAttention, Samples, sequence_space
from escnn_attention.groups.fibers import mass
from escnn_attention.plain.projections import Scalars, ToPoses
from escnn_attention.plain.self_attention import FieldConvolution, SelfAttention
from tests.layers import assert_formula, drawn
from tests.nn.attention import TOLERANCE, turned_error
from tests.plain.loops import written_out
from tests.spaces import PLANE, random_field, regular, scalars


@pytest.mark.sampled(4)
@pytest.mark.parametrize("encoding", ["mlp", "separable", "fourier"])
@pytest.mark.parametrize(("kernel_size", "group"), [(None, "C3"), (3, "D3"), (3, "C4")])
@pytest.mark.parametrize("query", ["own", "all", "lifting"])
def test_agrees_with_plain_loops(query, group, kernel_size, encoding):
    """Which use escnn's elements and representations, and no table of the package."""
    space = PLANE[group]()
    some, options = space.fibergroup.irreps()[-1], {"head_fields": 3, "encoding": encoding}
    types = [FieldType(space, [some, space.trivial_repr]), FieldType(space, [space.regular_repr, some])]
    if query == "lifting":
        layer = drawn(LiftingSelfAttention(scalars(space, 2), types[1], 2, kernel_size, **options))
    else:
        layer = drawn(GroupSelfAttention(*types, 2, kernel_size, query=query, **options))
    x = torch.randn(1, layer.in_type.size, 3, 2, dtype=torch.float64, requires_grad=True)
    assert_formula(layer(layer.in_type(x)).tensor, written_out(layer, x, query), [x, *layer.parameters()])


def with_and_without_poses(monkeypatch, space, query, encoding, samples=None, **options):
    """A layer on scalars, and one with poses of queries and keys and the same numbers, but for terms that drop out."""

    def make():
        out_type = FieldType(space, [space.fibergroup.irreps()[-1] if samples is None else space.irrep(1)])
        layer = GroupSelfAttention(
            scalars(space, 3), out_type, 2, query=query, encoding=encoding, samples=samples, head_fields=4, **options
        ).double()
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter)
        return layer

    layer = make()
    monkeypatch.setattr("escnn_attention.nn.self_attention.sees_scalars", lambda *_: False)
    posed = make()
    assert isinstance(layer.plain.project_in, Scalars)
    assert isinstance(posed.plain.project_in, ToPoses)
    state = posed.state_dict()
    assert all("encoding.pose_" in name for name in state.keys() - layer.state_dict().keys())
    layer.load_state_dict({name: state[name] for name in layer.state_dict()})
    return layer, posed


class TestScalars:
    """Of scalars queries and keys have no poses, and the layer is what it is with them."""

    @pytest.mark.parametrize(
        ("encoding", "samples"),
        [*((name, None) for name in ("mlp", "separable", "fourier", "none", "rotary")), ("mlp", 5)],
    )
    @pytest.mark.parametrize("query", ["own", "all"])
    @pytest.mark.parametrize("keys", ["own", "all"])
    def test_is_the_layer_with_poses(self, monkeypatch, keys, query, encoding, samples):
        """Rotated keys are alike in their own pose only; samples of a continuous group are compared in values."""
        if (encoding == "rotary" and (keys, query) != ("own", "own")) or (encoding == "separable" and keys == "all"):
            pytest.skip("their poses matter, or take channels")
        space, options = PLANE["D3"]() if samples is None else gspaces.rot2dOnR2(-1), {"keys": keys, "kernel_size": 3}
        layer, posed = with_and_without_poses(monkeypatch, space, query, encoding, samples, **options)
        x = random_field(layer.in_type, 5, 4)
        torch.testing.assert_close(layer(x).tensor, posed(x).tensor, rtol=1e-10, atol=1e-12)
        if samples is not None:
            return
        assert turned_error(layer, x) < TOLERANCE
        places = [(0, 1), (3, 3)]
        maps, of_poses = layer.attention_maps(x, places), posed.attention_maps(x, places)
        assert maps.shape == (2, 2, 6, 2, 1, 1, 5, 4)
        assert of_poses.shape == (2, 2, 6, 2, 6 if query == "all" else 1, 6, 5, 4)
        torch.testing.assert_close(maps[:, :, :, :, 0, 0], of_poses.sum(5).mean(4))

    @pytest.mark.parametrize("encoding", ["rotary", "absolute"])
    def test_encodings_whose_poses_matter_keep_them(self, encoding):
        """Without the poses of the keys these give something else."""
        space = PLANE["D3"]()
        layer = GroupSelfAttention(
            scalars(space, 3), regular(space, 4), 2, encoding=encoding, query="all", kernel_size=None
        ).double()
        assert isinstance(layer.plain.project_in, ToPoses)
        x = random_field(layer.in_type, 4, 4)
        y = layer(x).tensor
        with torch.no_grad():
            layer.plain.encoding.pose_embedding.zero_()
        assert (layer(x).tensor - y).norm() > 1e-3 * y.norm()

    def test_all_queries_of_scalars_are_one(self):
        """Also where the poses have different weights, by which other fields cannot be added up."""
        space = gspaces.rot3dOnR3()
        samples = Samples(7, turn="fixed")
        types = scalars(space, 2), FieldType(space, [space.irrep(1)])
        layers = []
        for query in ("own", "all"):
            torch.manual_seed(0)
            layers.append(
                GroupSelfAttention(*types, kernel_size=None, query=query, samples=samples, head_fields=3).double()
            )
        own, every = layers
        x = random_field(types[0], 3, 3, 3)
        torch.testing.assert_close(every(x).tensor, mass(types[1]) * own(x).tensor)


def test_each_part_of_a_field_convolution_reads_its_channels():
    parts = [torch.nn.Conv2d(2, 3, 3, padding=1), torch.nn.Conv2d(1, 1, 3, padding=1)]
    x = torch.randn(2, 3, 4, 4)
    expected = torch.cat([parts[0](x[:, [0, 2]]), parts[1](x[:, [1]])], 1)
    torch.testing.assert_close(FieldConvolution(parts, [[0, 2], [1]])(x), expected)
    torch.testing.assert_close(FieldConvolution(parts[:1], [[0, 2]])(x[:, [0, 2]]), expected[:, :3])


TOKENS = sequence_space(gspaces.flipRot2dOnR2(4).fibergroup)
CONTENT = {
    "regular": (regular(TOKENS, 4), {}),
    "mixed": (FieldType(TOKENS, 4 * [TOKENS.trivial_repr] + 4 * [TOKENS.irrep(1, 1)]), {"head_fields": 2}),
    "cosets": (regular(TOKENS, 4), {"poses": (None, 2), "head_fields": 8}),
    "without bias": (regular(TOKENS, 4), {"bias": False}),
    "one head": (regular(TOKENS, 4), {"num_heads": 1}),
    "in irreps": (regular(TOKENS, 16), {}),
}


@pytest.mark.parametrize("kind", CONTENT)
@pytest.mark.slow
def test_attention_by_content_without_gradients_is_the_formula(kind, monkeypatch):
    fields, options = CONTENT[kind]
    given = {"num_heads": 2, "kernel_size": None, "encoding": "none", "keys": "own", "shared_scores": True, **options}
    plain = GroupSelfAttention(fields, fields, **given).double().eval().plain
    for parameter in plain.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    if kind == "in irreps":
        plain.project_in.irreps.least = plain.project_out.irreps.least = 0
    calls, computed = [], SelfAttention._attend_by_content
    monkeypatch.setattr(SelfAttention, "_attend_by_content", lambda *given: calls.append(1) or computed(*given))
    x = torch.randn(2, fields.size, 7, dtype=torch.float64)
    mask = torch.ones(2, 7, dtype=torch.bool)

    def error():
        plain.backend = "reference"
        expected = plain(x)
        plain.backend = "auto"
        found = [torch.export.export(plain, (x,)).module()(x), plain(x), plain(x)]
        return max(float((y - expected).abs().max() / expected.abs().max()) for y in found)

    with torch.no_grad():
        assert error() < 1e-12
        for parameter in plain.parameters():  # Expanded weights are those of the weights.
            parameter.data.mul_(1.2).add_(0.1)
        assert error() < 1e-12
        number = len(calls)
        assert number == (0 if kind == "one head" else 6)
        plain(x, mask)
    plain(x)
    assert len(calls) == number


@pytest.mark.parametrize("shape", [(8, 8), (16, 16)])
def test_hooks_of_its_parts_see_one_call(shape):
    fields = regular(PLANE["D4"](), 24)
    layer = GroupSelfAttention(fields, fields, 8, head_fields=3, kernel_size=None, keys="own", encoding="none")
    calls = []
    for name, part in layer.named_modules():
        part.register_forward_hook(lambda *_, name=name: calls.append(name))
    layer(fields(torch.randn(4, fields.size, *shape)))
    assert "plain.project_out" in calls
    assert len(calls) == len(set(calls))
