import copy
import itertools
import pickle

import numpy as np
import pytest
import torch
from escnn import gspaces
from escnn.nn import FieldType, GroupPooling, InnerBatchNorm, R2Conv, ReLU, SequentialModule
from hypothesis import given, settings
from hypothesis import strategies as st

from escnn_attention import (
    AbsoluteEncoding,
    FieldLayerNorm,
    FourierEncoding,
    GroupSelfAttention,
    LiftingSelfAttention,
    MLPEncoding,
)
from escnn_attention.functional import backends_for
from escnn_attention.groups.fibers import fibers
from tests.nn.attention import ENCODINGS, TOLERANCE, attention_for, turned_error
from tests.spaces import (
    ALL,
    LARGE,
    PLANE,
    field_types,
    grid_elements,
    grid_error,
    random_field,
    regular,
    scalars,
    shape_of,
)


class TestEquivariance:
    @pytest.mark.sampled(8)
    @pytest.mark.parametrize("query", ["own", "all"])
    @pytest.mark.parametrize("name", ALL)
    def test_every_group(self, name, query):
        space = ALL[name]()
        for size in (None,) if space.dimensionality == 0 else (None, 3):
            layer = attention_for(space, query=query, size=size)
            x = random_field(layer.in_type, *shape_of(space, 3 if size or space.dimensionality == 2 else 2))
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
        lift = LiftingSelfAttention(image, hidden, 1, encoding=encoding, kernel_size=None).double()
        group = GroupSelfAttention(
            hidden, scalars(space, 3), 1, encoding=encoding, head_fields=4, kernel_size=None
        ).double()
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
        assert GroupSelfAttention(fields, fields, 3, kernel_size=None).head_fields == 2
        assert GroupSelfAttention(fields, fields, 4, head_fields=5, kernel_size=None).head_fields == 5
        with pytest.raises(ValueError, match=r"num_heads: the 6 regular fields .* 4 heads; set head_fields"):
            GroupSelfAttention(fields, fields, 4, kernel_size=None)
        # Without regular fields: the least number whose 2 heads have at least 33 channels with 8 poses each.
        assert GroupSelfAttention(fields, scalars(space, 33), 2, kernel_size=None).head_fields == 3
        assert GroupSelfAttention(fields, scalars(space, 32), 2, kernel_size=None).head_fields == 2
        vectors = FieldType(space, [space.irrep(1, 1)])
        assert GroupSelfAttention(vectors, vectors, 1, kernel_size=None).head_fields == 1

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
        assert GroupSelfAttention(vectors, vectors, kernel_size=None).plain.project_out.bias is None

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
            layer = LiftingSelfAttention(*types, 2, None, head_fields=2, backend="blocked")
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


def test_options_reach_the_encoding():
    fields = regular(PLANE["D4"](), 8)
    for encoding in (MLPEncoding(hidden=5, layers=2), AbsoluteEncoding(per_head=False), FourierEncoding(3)):
        layer = GroupSelfAttention(fields, fields, 2, encoding=encoding, kernel_size=None)
        assert type(layer.plain.encoding) is type(encoding)
        assert layer.plain.encoding.extra_repr() == encoding.extra_repr()
        assert not encoding.bound
