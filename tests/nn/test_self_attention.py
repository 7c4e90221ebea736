import copy
import functools
import itertools
import math
import pickle

import numpy as np
import pytest
import torch
from escnn import gspaces
from escnn.nn import FieldType, GeometricTensor, GroupPooling, InnerBatchNorm, R2Conv, ReLU, SequentialModule
from hypothesis import given, settings
from hypothesis import strategies as st

from escnn_attention import (
    AbsoluteEncoding,
    FieldLayerNorm,
    FourierEncoding,
    GroupSelfAttention,
    LiftingSelfAttention,
    MLPEncoding,
    Samples,
    SeparableEncoding,
)
from escnn_attention.functional import backends_for
from escnn_attention.geometry.grid import Grid
from escnn_attention.groups.fibers import fibers, mass
from escnn_attention.plain.projections import Scalars, ToPoses
from tests import spaces
from tests.spaces import (
    ALL,
    LARGE,
    PLANE,
    field_types,
    grid_elements,
    grid_error,
    mixed,
    random_field,
    regular,
    scalars,
    shape_of,
)

ENCODINGS = ["mlp", "separable", "fourier", "rotary", "absolute", "none"]
TOLERANCE = 1e-10


def turned_error(layer, x):
    def on_grid(values, frame):
        grid = Grid(values.shape[2:], layer.plain.window, dtype=values.dtype, frame=frame)
        return layer.plain.attend(values, grid)

    return spaces.turned_error(layer, x, on_grid)


def attention_for(space, *, lifting=False, encoding="mlp", size=None, **options):
    """A layer on mixed types in float64, with heads wide enough for every encoding."""
    out_type = mixed(space)
    if lifting:
        return LiftingSelfAttention(
            scalars(space, 2), out_type, 2, size, head_fields=4, encoding=encoding, **options
        ).double()
    return GroupSelfAttention(out_type, out_type, 2, size, head_fields=4, encoding=encoding, **options).double()


class TestEquivariance:
    @pytest.mark.sampled
    @pytest.mark.parametrize("query", ["own", "all"])
    @pytest.mark.parametrize("name", ALL)
    def test_every_group(self, name, query):
        space = ALL[name]()
        for size in (None,) if space.dimensionality == 0 else (None, 3):
            layer = attention_for(space, query=query, size=size)
            x = random_field(layer.in_type, *shape_of(space, 3))
            assert turned_error(layer, x) < TOLERANCE
            assert grid_error(layer, x) < TOLERANCE

    @pytest.mark.parametrize("name", ["flip about an odd axis", "C8", "D3", "D4", "octahedral", "D4 on a point"])
    def test_lifting(self, name):
        space = ALL[name]()
        layer = attention_for(space, lifting=True)
        x = random_field(layer.in_type, *shape_of(space, 4))
        assert turned_error(layer, x) < TOLERANCE
        assert grid_error(layer, x) < TOLERANCE

    @pytest.mark.sampled
    @pytest.mark.parametrize("encoding", ENCODINGS)
    @pytest.mark.parametrize("query", ["own", "all", "lifting", "own keys"])
    @pytest.mark.parametrize("name", ["C4", "D6", "conical"])
    def test_every_encoding(self, name, query, encoding):
        space = ALL[name]()
        options = {"lifting": True} if query == "lifting" else {"query": query[:3]}
        if query == "own keys":
            options["keys"] = "own"
        for window in ({}, {"size": 3}, {"size": 5, "dilation": 2}):
            layer = attention_for(space, encoding=encoding, **options, **window)
            x = random_field(layer.in_type, *shape_of(space, 4), batch=1)
            assert turned_error(layer, x) < TOLERANCE
            assert grid_error(layer, x) < TOLERANCE

    @pytest.mark.sampled
    # Interpreted, "triton" takes seconds for each of these: tests/functional/backends/test_triton.py has fewer.
    @pytest.mark.parametrize("backend", sorted(set(backends_for()) - {"triton"}))
    @pytest.mark.parametrize("query", ["own", "all", "lifting", "own keys"])
    @pytest.mark.parametrize("encoding", ["mlp", "fourier", "rotary", "none"])
    @pytest.mark.parametrize("size", [None, 3])
    def test_every_backend(self, backend, query, encoding, size):
        options = {"lifting": True} if query == "lifting" else {"query": query[:3]}
        if query == "own keys":
            options["keys"] = "own"
        for name in ("C3", "D4", "conical"):
            layer = attention_for(ALL[name](), encoding=encoding, size=size, backend=backend, **options)
            x = random_field(layer.in_type, *shape_of(layer.space, 4), batch=1)
            if size is None and encoding == "mlp" and backend == "dense":
                with pytest.raises(ValueError, match="cannot serve this call: without a window it needs"):
                    turned_error(layer, x)
                continue
            assert turned_error(layer, x) < TOLERANCE
            assert grid_error(layer, x) < TOLERANCE

    @settings(max_examples=20)
    @given(st.data())
    def test_anything(self, data):
        space = ALL[data.draw(st.sampled_from(sorted(set(ALL) - {"octahedral", "octahedral on a point"})))]()
        in_type, out_type = data.draw(field_types(space)), data.draw(field_types(space))
        kernel_size = data.draw(st.sampled_from([None, 1, 3, 5])) if space.dimensionality else None
        layer = GroupSelfAttention(
            in_type,
            out_type,
            data.draw(st.integers(1, 3)),
            kernel_size,
            head_fields=data.draw(st.integers(4, 5)),
            query=data.draw(st.sampled_from(["own", "all"])),
            keys=data.draw(st.sampled_from(["all", "own"])),
            encoding=data.draw(st.sampled_from(ENCODINGS)),
            dilation=data.draw(st.integers(1, 2)) if kernel_size else 1,
            bias=data.draw(st.booleans()),
        ).double()
        # Biases start at zero; any value must do.
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter)
        shape = data.draw(st.lists(st.integers(1, 4), min_size=space.dimensionality, max_size=space.dimensionality))
        x = random_field(in_type, *shape, batch=1)
        assert turned_error(layer, x) < TOLERANCE
        assert grid_error(layer, x) < TOLERANCE

    @pytest.mark.exhaustive
    @pytest.mark.parametrize("encoding", ENCODINGS)
    @pytest.mark.parametrize("query", ["own", "all"])
    @pytest.mark.parametrize("name", ALL | LARGE)
    def test_exhaustive(self, name, query, encoding):
        space = (ALL | LARGE)[name]()
        if query == "all" and space.fibergroup.order() > 60:
            pytest.skip("the cube of 120 poses")
        for size in (None,) if space.dimensionality == 0 else (None, 3, 5):
            layer = attention_for(space, query=query, size=size, encoding=encoding)
            x = random_field(layer.in_type, *shape_of(space, 3), batch=1)
            assert turned_error(layer, x) < TOLERANCE
            assert grid_error(layer, x) < TOLERANCE

    @pytest.mark.parametrize("query", ["own", "all"])
    def test_sharp_attention(self, query):
        # With weights this large the softmax picks single keys, and small errors of the scores would show.
        layer = attention_for(PLANE["D4"](), query=query, size=3)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.mul_(4)
        assert turned_error(layer, random_field(layer.in_type, 5, 5)) < TOLERANCE

    @pytest.mark.parametrize("shape", [(4, 4), (5, 2), (1, 6), (2, 2)])
    def test_every_shape(self, shape):
        layer = attention_for(PLANE["D4"](), size=5)
        x = random_field(layer.in_type, *shape)
        assert layer(x).shape == (2, layer.out_type.size, *shape)
        assert grid_error(layer, x) < TOLERANCE

    @pytest.mark.parametrize("projection", ["group", "pointwise"])
    def test_projections(self, projection):
        fields = regular(PLANE["D3"](), 4)
        layer = GroupSelfAttention(fields, fields, 2, 3, projection=projection).double()
        assert turned_error(layer, random_field(fields, 4, 5)) < TOLERANCE

    def test_vector_fields_are_lifted(self):
        space = PLANE["D4"]()
        vectors = FieldType(space, 2 * [space.irrep(1, 1)])
        layer = GroupSelfAttention(vectors, vectors, 2, 3).double()
        assert grid_error(layer, random_field(vectors, 6, 6)) < TOLERANCE

    def test_translations_away_from_the_border(self):
        layer = attention_for(PLANE["C4"](), size=3)
        x = random_field(layer.in_type, 9, 9)
        moved = layer.in_type(x.tensor.roll((1, 2), (2, 3)))
        inner = (slice(None), slice(None), slice(3, 7), slice(3, 7))
        torch.testing.assert_close(layer(moved).tensor[inner], layer(x).tensor.roll((1, 2), (2, 3))[inner])

    def test_proposition_4_1_no_encoding_commutes_with_permutations(self):
        layer = attention_for(PLANE["C4"](), encoding="none")
        x = random_field(layer.in_type, 3, 4)
        order = torch.randperm(12)
        permuted = layer.in_type(x.tensor.flatten(2)[:, :, order].unflatten(2, (3, 4)))
        torch.testing.assert_close(layer(permuted).tensor.flatten(2), layer(x).tensor.flatten(2)[:, :, order])

    @pytest.mark.parametrize("query", ["own", "all"])
    def test_proposition_4_2_absolute_encoding_breaks_permutations_and_translations(self, query):
        layer = attention_for(PLANE["C4"](), encoding="absolute", query=query, size=3)
        x = random_field(layer.in_type, 9, 9)
        y = layer(x).tensor
        moved = layer(layer.in_type(x.tensor.roll(2, 3))).tensor
        assert (moved - y.roll(2, 3))[:, :, 3:7, 3:7].norm() > 1e-3 * y[:, :, 3:7, 3:7].norm()
        whole = attention_for(PLANE["C4"](), encoding="absolute", query=query)
        order = torch.randperm(81)
        permuted = whole(whole.in_type(x.tensor.flatten(2)[:, :, order].unflatten(2, (9, 9)))).tensor
        expected = whole(x).tensor.flatten(2)[:, :, order].unflatten(2, (9, 9))
        assert (permuted - expected).norm() > 1e-3 * expected.norm()

    @pytest.mark.parametrize("encoding", ["mlp", "separable", "fourier", "rotary"])
    def test_equivariance_is_unique(self, encoding):
        """A network on C4, invariant to its turns, tells mirror images and permutations of the pixels apart."""
        space = PLANE["C4"]()
        image, hidden = scalars(space, 1), regular(space, 4)
        lift = LiftingSelfAttention(image, hidden, 1, encoding=encoding).double()
        group = GroupSelfAttention(hidden, scalars(space, 3), 1, encoding=encoding, head_fields=4).double()
        x = torch.randn(1, 1, 5, 5, dtype=torch.float64)

        def summed(tensor):
            return group(lift(image(tensor))).tensor.sum((2, 3))

        y = summed(x)
        torch.testing.assert_close(summed(x.rot90(1, (2, 3))), y)
        assert (summed(x.flip(3)) - y).norm() > 1e-3 * y.norm()
        order = torch.randperm(25)
        assert (summed(x.flatten(2)[:, :, order].unflatten(2, (5, 5))) - y).norm() > 1e-3 * y.norm()


class TestNegativeControls:
    """Without the action of the group on either argument of the encoding the tests above fail."""

    @pytest.mark.sampled
    @pytest.mark.parametrize("encoding", ["mlp", "separable", "fourier", "rotary", "absolute"])
    @pytest.mark.parametrize("query", ["own", "all", "lifting", "own keys", "all queries, own keys"])
    def test_without_the_action_on_offsets(self, query, encoding):
        options = {"lifting": True} if query == "lifting" else {"query": query[:3]}
        if "keys" in query:
            options["keys"] = "own"
        layer = attention_for(PLANE["D3"](), encoding=encoding, **options)
        x = random_field(layer.in_type, 4, 4)
        assert turned_error(layer, x) < TOLERANCE
        layer.plain.inverse_action[:] = torch.eye(2)
        assert turned_error(layer, x) > 1e-3

    @pytest.mark.sampled
    @pytest.mark.parametrize("encoding", ["mlp", "separable", "fourier", "rotary", "absolute"])
    @pytest.mark.parametrize("query", ["own", "all"])
    @pytest.mark.parametrize("name", ["D3", "D4 on a point"])
    def test_without_the_action_on_poses(self, name, query, encoding):
        layer = attention_for(ALL[name](), encoding=encoding, query=query)
        x = random_field(layer.in_type, *shape_of(layer.space, 4))
        assert turned_error(layer, x) < TOLERANCE
        layer.plain.quotient[:] = torch.arange(len(layer.plain.quotient))
        assert turned_error(layer, x) > 1e-3

    def test_with_the_action_of_the_printed_equation(self):
        """Eq. 16 as printed encodes h⁻¹h̃⁻¹ĥ, which is not invariant."""
        space = PLANE["D3"]()
        group = fibers(space)
        layer = attention_for(space, query="own")
        x = random_field(layer.in_type, 4, 4)
        # With h̃ = h: the index of h⁻¹h⁻¹ĥ.
        layer.plain.quotient[:] = torch.tensor(
            np.stack([group.quotient[h][group.quotient[h]] for h in range(group.order)])
        )
        assert turned_error(layer, x) > 1e-3

    def test_with_the_other_orientation_of_the_grid(self):
        layer = attention_for(PLANE["C4"](), size=3)
        x = random_field(layer.in_type, 4, 4)
        assert grid_error(layer, x) < TOLERANCE
        # y growing downwards: the transposed matrices.
        layer.plain.inverse_action[:] = layer.plain.inverse_action.transpose(1, 2).clone()
        assert grid_error(layer, x) > 1e-3


def written_out(layer, x, query):
    """The layer in plain loops over escnn's own group elements, with none of the package's tables.

    Everything is looked up where the formula says: ρ(h)⁻¹ from the representation, h⁻¹Δ from the action on the base
    space, h⁻¹ĥ from the product of elements.
    """
    space, core = layer.space, layer.plain
    elements = list(space.fibergroup.elements)
    lifting = isinstance(layer, LiftingSelfAttention)
    heads, fields = layer.num_heads, layer.head_fields
    weight, bias = core.project_in.weight, core.project_in.bias
    shape = x.shape[2:]
    places = list(itertools.product(*map(range, shape)))
    reach = (core.window.kernel_size // 2) * core.window.dilation if core.window.kernel_size else max(shape) - 1

    def project(place, h):
        f = x[(0, slice(None), *place)]
        seen = f if lifting else torch.tensor(layer.in_type.representation(~h)) @ f
        y = weight @ seen
        return (y + torch.cat([bias, torch.zeros(heads * fields, dtype=y.dtype)])).view(3, heads, fields)

    def vector(query_place, key_place):
        steps = [b - a for a, b in zip(query_place, key_place, strict=True)]
        return torch.tensor([steps[1], -steps[0]], dtype=torch.float64) / reach

    def near(query_place, key_place):
        steps = [abs(b - a) for a, b in zip(query_place, key_place, strict=True)]
        return core.window.kernel_size is None or max(steps) <= reach

    def head_of(table, m):
        return table[m if len(table) > 1 else 0]

    @functools.cache
    def encoded(h, steps, p):
        turn = torch.tensor(np.asarray(space.basespace_action(~h)), dtype=torch.float64)
        offset = core.encoding.offsets(turn @ vector((0, 0), steps))
        poses = None if lifting else core.encoding.poses()
        index = None if lifting else elements.index(~h @ p)
        return [head_of(offset, m) if lifting else head_of(offset, m) + head_of(poses, m)[index] for m in range(heads)]

    out = []
    projected = {(p, h): project(p, h) for p in places for h in (elements[:1] if lifting else elements)}
    for place in places:
        total = torch.zeros(len(elements), heads, fields, dtype=torch.float64)
        for (i, h), m in itertools.product(enumerate(elements), range(heads)):
            for own in [elements[0]] if lifting else [h] if query == "own" else elements:
                q = projected[place, own][0][m]
                scores, values = [], []
                for key_place, p in itertools.product(places, elements[:1] if lifting else elements):
                    if not near(place, key_place):
                        continue
                    _, v, k = projected[key_place, p]
                    steps = tuple(b - a for a, b in zip(place, key_place, strict=True))
                    rho = encoded(h, steps, p)[m]
                    scores.append(q @ (k[m] + rho) / math.sqrt(fields))
                    values.append(v[m])
                total[i, m] = total[i, m] + torch.stack(scores).softmax(0) @ torch.stack(values)
        y = core.project_out.invariants @ core.project_out.bias
        for i, h in enumerate(elements):
            rho_h = torch.tensor(layer.out_type.representation(h))
            y = y + rho_h @ (core.project_out.weight.T @ total[i].flatten())
        out.append(y)
    return torch.stack(out, 1).unflatten(1, shape)[None]


class TestFormula:
    @pytest.mark.parametrize("encoding", ["mlp", "separable", "fourier"])
    @pytest.mark.parametrize("kernel_size", [None, 3])
    @pytest.mark.parametrize("query", ["own", "all", "lifting"])
    def test_agrees_with_plain_loops(self, query, kernel_size, encoding):
        space = PLANE["D4" if kernel_size else "C3"]()
        if query == "all" and kernel_size:
            space = PLANE["C2"]()
        options = {"head_fields": 3, "encoding": encoding}
        out_type = FieldType(space, [space.regular_repr, space.fibergroup.irreps()[-1]])
        if query == "lifting":
            layer = LiftingSelfAttention(scalars(space, 2), out_type, 2, kernel_size, **options).double()
        else:
            in_type = FieldType(space, [space.fibergroup.irreps()[-1], space.trivial_repr])
            layer = GroupSelfAttention(in_type, out_type, 2, kernel_size, query=query, **options).double()
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
        x = torch.randn(1, layer.in_type.size, 3, 2, dtype=torch.float64, requires_grad=True)
        leaves = [x, *layer.parameters()]
        expected = written_out(layer, x, query)
        weight = torch.randn_like(expected)
        gradients = torch.autograd.grad((expected * weight).sum(), leaves)
        for backend in ("reference", "blocked"):
            layer.plain.backend = backend
            got = layer(layer.in_type(x)).tensor
            torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)
            for a, b in zip(torch.autograd.grad((got * weight).sum(), leaves), gradients, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


class TestLocality:
    @pytest.mark.parametrize("window", ["square", "disc"])
    @pytest.mark.parametrize("dilation", [1, 2])
    def test_the_receptive_field_is_the_window(self, window, dilation):
        fields = regular(PLANE["C4"](), 2)
        layer = GroupSelfAttention(fields, fields, 1, 5, window=window, dilation=dilation, encoding="mlp").double()
        x = torch.randn(1, fields.size, 11, 11, dtype=torch.float64, requires_grad=True)
        (gradient,) = torch.autograd.grad(layer(fields(x)).tensor[0, :, 5, 5].square().sum(), x)
        y, z = torch.meshgrid(torch.arange(-5, 6), torch.arange(-5, 6), indexing="ij")
        inside = (y % dilation == 0) & (z % dilation == 0) & (y.abs() <= 2 * dilation) & (z.abs() <= 2 * dilation)
        if window == "disc":
            inside &= y**2 + z**2 <= (2.5 * dilation) ** 2
        assert torch.equal(gradient[0].abs().sum(0) > 0, inside)

    @pytest.mark.parametrize("backend", ["auto", "reference"])
    def test_nan_stays_nan_and_within_the_window(self, backend):
        layer = attention_for(PLANE["D4"](), size=3, backend=backend)
        x = random_field(layer.in_type, 7, 6)
        clean = layer(x).tensor
        x.tensor[0, 1, 3, 2] = torch.nan
        broken = layer(x).tensor
        expected = torch.zeros(7, 6, dtype=torch.bool)
        expected[2:5, 1:4] = True
        assert torch.equal(broken[0].isnan().all(0), expected)
        torch.testing.assert_close(broken[0][:, ~expected], clean[0][:, ~expected])
        torch.testing.assert_close(broken[1], clean[1])

    @pytest.mark.parametrize(("shape", "kernel_size"), [((1, 1), 5), ((4, 4), 1), ((1, 1), None), ((3, 3), 9)])
    def test_few_positions(self, shape, kernel_size):
        layer = attention_for(PLANE["D4"](), size=kernel_size)
        x = random_field(layer.in_type, *shape)
        x.tensor.requires_grad_()
        y = layer(x).tensor
        y.sum().backward()
        assert y.isfinite().all()
        assert x.tensor.grad.isfinite().all()

    def test_dilated_windows_larger_than_the_grid(self):
        layer = attention_for(PLANE["C4"](), size=3, dilation=7)
        alone = attention_for(PLANE["C4"](), size=1)
        alone.load_state_dict(layer.state_dict())
        x = random_field(layer.in_type, 4, 4)
        # Every query sees itself alone, at the offset 0.
        torch.testing.assert_close(layer(x).tensor, alone(x).tensor)


def with_and_without_poses(monkeypatch, space, query, encoding, samples=None, **options):
    """A layer on scalars, and one with poses of queries and keys and the same numbers."""

    def make():
        torch.manual_seed(0)
        out_type = FieldType(space, [space.fibergroup.irreps()[-1] if samples is None else space.irrep(1)])
        layer = GroupSelfAttention(
            scalars(space, 3), out_type, 2, query=query, encoding=encoding, samples=samples, head_fields=4, **options
        ).double()
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter)
        return layer

    layer = make()
    monkeypatch.setattr("escnn_attention.nn.self_attention._sees_scalars", lambda *_: False)
    return layer, make()


class TestScalars:
    """Of scalars queries and keys have no poses, and the layer is what it is with them."""

    @pytest.mark.parametrize("encoding", ["mlp", "separable", "fourier", "none"])
    @pytest.mark.parametrize("query", ["own", "all"])
    @pytest.mark.parametrize("keys", ["own", "all"])
    def test_is_the_layer_with_poses(self, monkeypatch, keys, query, encoding):
        options = {"keys": keys, "kernel_size": 3}
        layer, posed = with_and_without_poses(monkeypatch, PLANE["D3"](), query, encoding, **options)
        assert isinstance(layer.plain.project_in, Scalars)
        assert isinstance(posed.plain.project_in, ToPoses)
        layer.load_state_dict(posed.state_dict())  # terms of poses that drop out are left out
        x = random_field(layer.in_type, 5, 4)
        torch.testing.assert_close(layer(x).tensor, posed(x).tensor, rtol=1e-10, atol=1e-12)
        assert turned_error(layer, x) < TOLERANCE
        places = [(0, 1), (3, 3)]
        maps, of_poses = layer.attention_maps(x, places), posed.attention_maps(x, places)
        assert maps.shape == (2, 2, 6, 2, 1, 1, 5, 4)
        assert of_poses.shape == (2, 2, 6, 2, 6 if query == "all" else 1, 6, 5, 4)
        torch.testing.assert_close(maps[:, :, :, :, 0, 0], of_poses.sum(5).mean(4))

    def test_keys_of_the_own_pose_are_alike_with_rotary_encodings_too(self, monkeypatch):
        layer, posed = with_and_without_poses(monkeypatch, PLANE["D3"](), "own", "rotary", keys="own")
        layer.load_state_dict(posed.state_dict())
        x = random_field(layer.in_type, 4, 4)
        assert isinstance(layer.plain.project_in, Scalars)
        torch.testing.assert_close(layer(x).tensor, posed(x).tensor, rtol=1e-10, atol=1e-12)

    @pytest.mark.parametrize("query", ["own", "all"])
    def test_samples_of_a_continuous_group(self, monkeypatch, query):
        layer, posed = with_and_without_poses(monkeypatch, gspaces.rot2dOnR2(-1), query, "mlp", samples=5)
        assert posed.plain.relative is not None
        assert layer.plain.relative is None
        layer.load_state_dict(posed.state_dict())
        x = random_field(layer.in_type, 4, 4)
        torch.testing.assert_close(layer(x).tensor, posed(x).tensor, rtol=1e-10, atol=1e-12)

    def test_the_same_seed_gives_the_same_layer(self):
        """As in versions in which scalars had poses: what is left out is drawn."""
        space = PLANE["D3"]()
        states = []
        for in_type in (scalars(space, 3), FieldType(space, 3 * [space.irrep(1, 0)])):
            torch.manual_seed(0)
            states.append(GroupSelfAttention(in_type, regular(space, 8), 2, encoding="separable").state_dict())
        alone, posed = states
        assert set(posed) - set(alone) == {"plain.encoding.pose_embedding"}
        assert all(torch.equal(alone[name], posed[name]) for name in alone)

    @pytest.mark.parametrize("encoding", ["rotary", "absolute"])
    def test_encodings_whose_poses_matter_keep_them(self, encoding):
        """Without the poses of the keys these give something else."""
        space = PLANE["D3"]()
        layer = GroupSelfAttention(scalars(space, 3), regular(space, 4), 2, encoding=encoding, query="all").double()
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
            layers.append(GroupSelfAttention(*types, query=query, samples=samples, head_fields=3).double())
        own, every = layers
        x = random_field(types[0], 3, 3, 3)
        torch.testing.assert_close(every(x).tensor, mass(types[1]) * own(x).tensor)


class TestModule:
    def test_gradients_numerically(self):
        layer = attention_for(PLANE["C2"](), size=3)
        x = torch.randn(1, layer.in_type.size, 2, 2, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(lambda x: layer(layer.in_type(x)).tensor, x)

    def test_every_parameter_learns(self):
        for lifting in (False, True):
            layer = attention_for(PLANE["D4"](), size=3, lifting=lifting)
            layer(random_field(layer.in_type, 5, 5)).tensor.square().sum().backward()
            for name, parameter in layer.named_parameters():
                assert parameter.grad.abs().max() > 0, name

    def test_is_deterministic(self):
        layer = attention_for(PLANE["D4"](), size=3)
        x = random_field(layer.in_type, 6, 6)
        assert torch.equal(layer(x).tensor, layer(x).tensor)
        torch.manual_seed(1)
        first = attention_for(PLANE["D4"](), size=3)
        torch.manual_seed(1)
        second = attention_for(PLANE["D4"](), size=3)
        assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))

    def test_dropout_acts_in_training_only(self):
        layer = attention_for(PLANE["C4"](), size=3, dropout=0.5)
        x = random_field(layer.in_type, 5, 5)
        assert not torch.equal(layer(x).tensor, layer(x).tensor)
        layer.eval()
        assert torch.equal(layer(x).tensor, layer(x).tensor)

    def test_head_fields(self):
        space = PLANE["D4"]()
        fields = regular(space, 6)
        assert GroupSelfAttention(fields, fields, 3).head_fields == 2
        assert GroupSelfAttention(fields, fields, 4, head_fields=5).head_fields == 5
        with pytest.raises(ValueError, match=r"num_heads: the 6 regular fields .* 4 heads; set head_fields"):
            GroupSelfAttention(fields, fields, 4)
        # Without regular fields: the least number whose 2 heads have at least 33 channels with 8 poses each.
        assert GroupSelfAttention(fields, scalars(space, 33), 2).head_fields == 3
        assert GroupSelfAttention(fields, scalars(space, 32), 2).head_fields == 2
        vectors = FieldType(space, [space.irrep(1, 1)])
        assert GroupSelfAttention(vectors, vectors, 1).head_fields == 1

    @pytest.mark.parametrize(
        ("name", "square"),
        [
            *((name, True) for name in ("trivial", "flip", "C4", "D4", "octahedral", "cylindrical")),
            *((name, False) for name in ("C3", "C8", "D6", "flip about an odd axis", "C3 3D")),
        ],
    )
    def test_auto_picks_the_square_where_the_group_preserves_it(self, name, square):
        fields = regular(ALL[name](), 1)
        layer = GroupSelfAttention(fields, fields, 1, 3)
        assert layer.plain.window.shape == ("square" if square else "disc")
        assert GroupSelfAttention(fields, fields, 1, 3, window="disc").plain.window.shape == "disc"
        if not square:
            with pytest.raises(ValueError, match='window: got "square"'):
                GroupSelfAttention(fields, fields, 1, 3, window="square")

    def test_biases_are_invariant_and_optional(self):
        layer = attention_for(PLANE["D4"](), bias=False)
        assert not [name for name, _ in layer.plain.project_in.named_parameters() if "bias" in name]
        assert not [name for name, _ in layer.plain.project_out.named_parameters() if "bias" in name]
        space = PLANE["D4"]()
        vectors = FieldType(space, [space.irrep(1, 1)])
        assert GroupSelfAttention(vectors, vectors).plain.project_out.bias is None

    def test_lifting_computes_the_content_once(self, monkeypatch):
        """The product of queries and keys is as large for eight poses as for one."""
        sizes = {}
        matmul = torch.Tensor.__matmul__

        def watch(a, b):
            out = matmul(a, b)
            sizes.setdefault(name, []).append(out.numel())
            return out

        for name in ("trivial", "D4"):
            types = scalars(PLANE[name](), 1), regular(PLANE[name](), 4)
            layer = LiftingSelfAttention(*types, 2, head_fields=2, backend="blocked")
            with monkeypatch.context() as patch:
                patch.setattr(torch.Tensor, "__matmul__", watch)
                layer(random_field(layer.in_type, 5, 4, dtype=torch.float32))
        scores = 2 * 20 * 20
        assert sizes["D4"].count(scores) == sizes["trivial"].count(scores) == 2

    def test_attention_maps(self):
        layer = attention_for(PLANE["D4"](), size=3, query="all")
        x = random_field(layer.in_type, 5, 4)
        elements = list(layer.space.fibergroup.elements)
        maps = layer.attention_maps(x, [(0, 0), (2, -1), (4, 1)], poses=[elements[3], 0])
        assert maps.shape == (2, 2, 2, 3, 8, 8, 5, 4)
        torch.testing.assert_close(maps.sum((-3, -2, -1)), torch.ones(2, 2, 2, 3, 8, dtype=torch.float64))
        inside = torch.zeros(5, 4, dtype=torch.bool)
        inside[1:4, 2:4] = True
        assert torch.equal(maps[0, 0, 0, 1].sum((0, 1)) > 0, inside)

    @pytest.mark.parametrize("query", ["own", "all", "lifting"])
    def test_attention_maps_make_the_output(self, query):
        layer = attention_for(PLANE["D3"](), **({"lifting": True} if query == "lifting" else {"query": query}))
        x = random_field(layer.in_type, 3, 2)
        places = list(itertools.product(range(3), range(2)))
        maps = layer.attention_maps(x, places)
        v = layer.plain.call(x.tensor, layer.plain.positions(x.tensor)).v
        # b m h n (query poses) (key poses) space, with the values m b n p c
        heads = torch.einsum("bmhqjpk,mbkpc->mbqhc", maps.flatten(-2), v)
        y = layer.plain.project_out(heads).transpose(1, 2).unflatten(2, (3, 2))
        torch.testing.assert_close(y, layer(x).tensor)

    def test_attention_maps_turn_with_the_image(self):
        layer = attention_for(PLANE["C4"](), size=3)
        x = random_field(layer.in_type, 5, 5, batch=1)
        g = list(layer.space.fibergroup.elements)[1]
        before = layer.attention_maps(x, [(1, 3)])
        # A quarter turn takes the pixel (1, 3) to (1, 1), and pose h to gh.
        after = layer.attention_maps(x.transform(g), [(1, 1)])
        turned = before.rot90(1, (-2, -1)).roll((1, 1), (2, 5))
        torch.testing.assert_close(after, turned)

    def test_shapes_state_copies_and_files(self, tmp_path):
        layer = attention_for(PLANE["D4"](), size=3, encoding=FourierEncoding(learned=False)).float()
        x = random_field(layer.in_type, 6, 5, dtype=torch.float32)
        y = layer(x)
        assert y.type == layer.out_type
        assert layer.evaluate_output_shape((2, layer.in_type.size, 6, 5)) == tuple(y.shape)
        other = attention_for(PLANE["D4"](), size=3, encoding=FourierEncoding(learned=False)).float()
        other.load_state_dict(layer.state_dict())
        torch.save(layer, tmp_path / "layer.pt")
        copies = [other, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))]
        for copied in [*copies, torch.load(tmp_path / "layer.pt", weights_only=False)]:
            assert torch.equal(copied(x).tensor, y.tensor)

    def test_says_what_it_is(self):
        text = repr(attention_for(PLANE["C8"](), size=5, dilation=2, dropout=0.1))
        for part in (
            "num_heads=2",
            "head_fields=4",
            "kernel_size=5 (disc)",
            "dilation=2",
            "query='own'",
            "dropout=0.1",
        ):
            assert part in text
        assert "MLPEncoding(hidden=16" in text
        assert "global" in repr(attention_for(PLANE["C8"]()))

    def test_check_equivariance(self, capsys):
        layer = attention_for(PLANE["D4"](), size=3)
        errors = layer.check_equivariance()
        assert [g for g, _ in errors] == grid_elements(layer.space)
        assert capsys.readouterr().out == ""
        layer.plain.inverse_action = torch.eye(2, dtype=torch.float64).expand(8, 2, 2).clone()
        layer.plain._exact["inverse_action"] = layer.plain.inverse_action
        with pytest.raises(AssertionError, match="the error is"):
            layer.check_equivariance()

    def test_the_example_of_the_readme_trains(self):
        g = gspaces.flipRot2dOnR2(4)
        image, hidden = scalars(g, 3), regular(g, 4)
        net = SequentialModule(
            R2Conv(image, hidden, 5, padding=2),
            InnerBatchNorm(hidden),
            ReLU(hidden),
            GroupSelfAttention(hidden, hidden, num_heads=4, kernel_size=7),
            FieldLayerNorm(hidden),
            GroupPooling(hidden),
        )
        x, target = random_field(image, 8, 8, dtype=torch.float32), torch.randn(2, 4)
        optimizer = torch.optim.Adam(net.parameters(), 1e-2)
        losses = []
        for _ in range(30):
            loss = (net(x).tensor.mean((2, 3)) - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < 0.5 * losses[0]


class TestPrecision:
    def test_float32_module_becomes_exact_in_float64(self):
        layer = attention_for(PLANE["C8"](), size=3).float().double()
        assert turned_error(layer, random_field(layer.in_type, 4, 4)) < 1e-13

    @pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
    @pytest.mark.parametrize("query", ["own", "all"])
    def test_lower_precision(self, dtype, tolerance, query):
        layer = attention_for(PLANE["D4"](), size=3, query=query)
        x = random_field(layer.in_type, 6, 6)
        exact = layer(x).tensor
        low = layer.to(dtype)(layer.in_type(x.tensor.to(dtype))).tensor
        assert low.dtype == dtype
        assert (low.double() - exact).norm() < tolerance * exact.norm()

    def test_autocast(self):
        layer = attention_for(PLANE["D4"](), size=3).float()
        x = random_field(layer.in_type, 6, 6, dtype=torch.float32)
        exact = layer(x).tensor
        with torch.autocast("cpu", dtype=torch.bfloat16):
            low = layer(x).tensor
            loss = low.float().square().sum()
        loss.backward()
        assert low.dtype == torch.bfloat16
        assert (low.float() - exact).norm() < 2e-2 * exact.norm()
        assert all(p.grad.isfinite().all() for p in layer.parameters())

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
    @pytest.mark.parametrize(
        ("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-3), (torch.bfloat16, 5e-2)]
    )
    def test_cuda(self, dtype, tolerance):
        for query, size in itertools.product(("own", "all"), (None, 3)):
            layer = attention_for(PLANE["D4"](), size=size, query=query)
            x = random_field(layer.in_type, 8, 8)
            exact = layer(x).tensor
            on_gpu = copy.deepcopy(layer).to("cuda", dtype)
            got = on_gpu(layer.in_type(x.tensor.to("cuda", dtype))).tensor
            assert got.device.type == "cuda"
            assert (got.double().cpu() - exact).norm() < tolerance * exact.norm()
            got.float().square().sum().backward()
            assert all(p.grad.isfinite().all() for p in on_gpu.parameters())


class TestExport:
    @pytest.mark.parametrize("query", ["own", "all", "lifting"])
    def test_gives_the_same_values_on_every_size(self, query):
        layer = attention_for(PLANE["D4"](), **({"lifting": True} if query == "lifting" else {"query": query}), size=3)
        exported = layer.export()
        assert not any(type(m).__module__.startswith("escnn.") for m in exported.modules())
        assert not exported.training
        for shape in ((5, 5), (3, 8)):
            x = random_field(layer.in_type, *shape)
            assert torch.equal(exported(x.tensor), layer(x).tensor)

    def test_is_a_copy(self):
        layer = attention_for(PLANE["D4"](), size=3)
        x = random_field(layer.in_type, 4, 4)
        exported = layer.export()
        before = exported(x.tensor)
        with torch.no_grad():
            layer.plain.project_in.weight.zero_()
        assert torch.equal(exported(x.tensor), before)

    @pytest.mark.parametrize("backend", ["auto", "blocked"])
    def test_compiles_in_one_graph(self, backend):
        for options in ({"size": 3}, {"query": "all", "encoding": "fourier"}, {"lifting": True, "size": 3}):
            torch.compiler.reset()  # there is a limit to how often one function is compiled
            layer = attention_for(PLANE["C4"](), backend=backend, **options)
            exported = layer.export()
            compiled = torch.compile(exported, fullgraph=True, backend="aot_eager")
            for shape in ((4, 4), (5, 6)):
                x = random_field(layer.in_type, *shape).tensor.requires_grad_()
                torch.testing.assert_close(compiled(x), exported(x))
                got, expected = (torch.autograd.grad(f(x).square().sum(), x) for f in (compiled, exported))
                torch.testing.assert_close(got, expected)

    def test_geometric_tensor_layers_compile(self):
        layer = attention_for(PLANE["C4"](), size=3)
        compiled = torch.compile(layer, backend="aot_eager")
        x = random_field(layer.in_type, 4, 4)
        y = compiled(x)
        assert y.type == layer.out_type
        torch.testing.assert_close(y.tensor, layer(x).tensor)


D4 = PLANE["D4"]
BAD_ARGUMENTS = {
    "in_type: got int": (TypeError, lambda t: GroupSelfAttention(3, t)),
    "out_type: got str": (TypeError, lambda t: GroupSelfAttention(t, "regular")),
    "out_type: its gspace is C4": (ValueError, lambda t: GroupSelfAttention(t, regular(PLANE["C4"](), 4))),
    "num_heads: the 4 regular fields": (ValueError, lambda t: GroupSelfAttention(t, t, 3)),
    "num_heads: got 0": (ValueError, lambda t: GroupSelfAttention(t, t, 0)),
    "num_heads: got 1.5": (TypeError, lambda t: GroupSelfAttention(t, t, 1.5)),
    "head_fields: got -1": (ValueError, lambda t: GroupSelfAttention(t, t, head_fields=-1)),
    "kernel_size: got 4, needed an odd": (ValueError, lambda t: GroupSelfAttention(t, t, 1, 4)),
    "kernel_size: got -3": (ValueError, lambda t: GroupSelfAttention(t, t, 1, -3)),
    "kernel_size: got '3'": (TypeError, lambda t: GroupSelfAttention(t, t, 1, "3")),
    "query: got 'each'": (ValueError, lambda t: GroupSelfAttention(t, t, query="each")),
    "window: got 'round'": (ValueError, lambda t: GroupSelfAttention(t, t, 1, 3, window="round")),
    "dilation: got 0": (ValueError, lambda t: GroupSelfAttention(t, t, 1, 3, dilation=0)),
    "dilation: got 2, but attention is global": (ValueError, lambda t: GroupSelfAttention(t, t, dilation=2)),
    "projection: got 'full'": (ValueError, lambda t: GroupSelfAttention(t, t, projection="full")),
    "dropout: got 1.0": (ValueError, lambda t: GroupSelfAttention(t, t, dropout=1.0)),
    "dropout: got 'much'": (ValueError, lambda t: GroupSelfAttention(t, t, dropout="much")),
    "backend: got 'fast'": (ValueError, lambda t: GroupSelfAttention(t, t, backend="fast")),
    "encoding: got 'spiral'": (ValueError, lambda t: GroupSelfAttention(t, t, encoding="spiral")),
    "encoding: RotaryEncoding rotates 2 channels and a head has 1": (
        ValueError,
        lambda t: GroupSelfAttention(t, t, 4, encoding="rotary"),
    ),
    "keys: got 'none'": (ValueError, lambda t: GroupSelfAttention(t, t, keys="none")),
    "encoding: got int": (TypeError, lambda t: GroupSelfAttention(t, t, encoding=3)),
    "encoding: SeparableEncoding divides": (
        ValueError,
        lambda t: GroupSelfAttention(t, t, 4, encoding=SeparableEncoding()),
    ),
    "encoding: this MLPEncoding belongs to a layer": (
        ValueError,
        lambda t: GroupSelfAttention(t, t, encoding=MLPEncoding().bind(2, 1, 4, 8)),
    ),
    'in_type: projection="pointwise" needs regular fields': (
        ValueError,
        lambda t: GroupSelfAttention(scalars(D4(), 2), t, projection="pointwise"),
    ),
    'out_type: projection="pointwise" needs regular fields': (
        ValueError,
        lambda t: GroupSelfAttention(t, scalars(D4(), 2), projection="pointwise"),
    ),
    "in_type: LiftingSelfAttention needs trivial .*GroupSelfAttention lifts": (
        ValueError,
        lambda t: LiftingSelfAttention(t, t),
    ),
    "query: LiftingSelfAttention has no such option, needed some of head_fields, encoding,": (
        TypeError,
        lambda t: LiftingSelfAttention(scalars(D4(), 2), t, query="own"),
    ),
    "gspace: the fiber group SO\\(2\\) is continuous": (
        NotImplementedError,
        lambda t: GroupSelfAttention(*2 * [scalars(gspaces.rot2dOnR2(-1), 2)]),
    ),
    "kernel_size: got 3, but D4 has no base space": (
        ValueError,
        lambda t: GroupSelfAttention(*2 * [regular(ALL["D4 on a point"](), 1)], 1, 3),
    ),
}


@pytest.mark.parametrize("message", BAD_ARGUMENTS)
def test_bad_arguments(message):
    error, make = BAD_ARGUMENTS[message]
    with pytest.raises(error, match=message):
        make(regular(D4(), 4))


class TestBadInput:
    def setup_method(self):
        self.fields = regular(D4(), 2)
        self.layer = GroupSelfAttention(self.fields, self.fields, 2, 3)

    def test_not_a_geometric_tensor(self):
        with pytest.raises(
            TypeError, match=r"input: GroupSelfAttention got Tensor, needed an escnn\.nn\.GeometricTensor"
        ):
            self.layer(torch.randn(1, 16, 4, 4))

    def test_another_gspace(self):
        with pytest.raises(ValueError, match="input: GroupSelfAttention got a tensor on the gspace C4"):
            self.layer(random_field(regular(PLANE["C4"](), 4), 4, 4))

    def test_another_type(self):
        with pytest.raises(ValueError, match="input: GroupSelfAttention got a tensor of type"):
            self.layer(random_field(regular(D4(), 3), 4, 4))

    def test_scattered_points(self):
        points = GeometricTensor(torch.randn(7, 16), self.fields, coords=torch.randn(7, 2))
        with pytest.raises(ValueError, match=r"input: GroupSelfAttention got scattered points"):
            self.layer(points)

    def test_wrong_shape(self):
        for shape in ((1, 16, 4), (1, 17, 4, 4)):
            with pytest.raises(ValueError, match="input_shape: GroupSelfAttention got"):
                self.layer.evaluate_output_shape(shape)

    def test_positions_and_poses_of_maps(self):
        x = random_field(self.fields, 4, 4, dtype=torch.float32)
        with pytest.raises(ValueError, match="positions: got 3 indices each, needed 2"):
            self.layer.attention_maps(x, [(0, 0, 0)])
        with pytest.raises(ValueError, match=r"positions: .* grid of shape \(4, 4\)"):
            self.layer.attention_maps(x, [(0, 4)])
        with pytest.raises(ValueError, match="poses: got 8, needed an index from 0 to 7"):
            self.layer.attention_maps(x, [(0, 0)], [8])
        with pytest.raises(ValueError, match="poses: got an element of C4, needed D4"):
            self.layer.attention_maps(x, [(0, 0)], [PLANE["C4"]().fibergroup.identity])


def test_options_reach_the_encoding():
    fields = regular(D4(), 8)
    for encoding in (MLPEncoding(hidden=5, layers=2), AbsoluteEncoding(per_head=False), FourierEncoding(3)):
        layer = GroupSelfAttention(fields, fields, 2, encoding=encoding)
        assert type(layer.plain.encoding) is type(encoding)
        assert layer.plain.encoding.extra_repr() == encoding.extra_repr()
        assert not encoding.bound
