import pytest
import torch
from escnn import gspaces, nn

from escnn_attention import (
    FieldLayerNorm,
    GroupSelfAttention,
    LiftingSelfAttention,
    PointSelfAttention,
    PointTransformerBlock,
    TransformerBlock,
    summary,
)
from escnn_attention.functional import BACKENDS
from escnn_attention.models import CNN, GroupCNN, HybridNet, PointTransformer

C4 = gspaces.rot2dOnR2(4)
C8 = gspaces.rot2dOnR2(8)


def types(g, fields=2):
    return nn.FieldType(g, [g.trivial_repr]), nn.FieldType(g, fields * [g.regular_repr])


def of_images(layer, shape, images=1):
    """The operations of images, without those of the encoding, which is the same for all."""
    one, more = (summary(layer, (n, layer.in_type.size, *shape)).total.operations for n in (1, 1 + images))
    return more - one


def pairs(shape, seen):
    """Pairs of positions of a grid that see each other, counted one by one."""
    places = torch.cartesian_prod(*map(torch.arange, shape))
    return sum(bool(seen(b - a)) for a in places for b in places)


@pytest.mark.parametrize(
    ("options", "factor"),
    [
        ({}, 4 * 4),  # poses of the query times those of the keys
        ({"keys": "own"}, 4),
        ({"query": "all"}, 4 * 4 * 4),
        ({"query": "all", "keys": "own"}, 4 * 4),
    ],
)
@pytest.mark.parametrize(("kernel_size", "reach"), [(3, 1), (None, 9)])
def test_attention_is_counted_pair_by_pair(options, factor, kernel_size, reach):
    _, fields = types(C4)
    layer = GroupSelfAttention(fields, fields, 2, kernel_size, head_fields=3, encoding="none", **options)
    shape = (5, 4)
    found = of_images(layer, shape, 2)
    # Three projections to 2 · 3 fields, and one from them, on 2 · 20 positions.
    projections = 2 * 40 * (3 * 8 * 24 + 24 * 8)
    seen = pairs(shape, lambda d: d.abs().max() <= reach)
    assert found - projections == 4 * 3 * 2 * 2 * factor * seen


def test_discs_and_dilation():
    _, fields = types(C8, 1)
    for dilation in (1, 2):
        layer = GroupSelfAttention(fields, fields, 1, 5, encoding="none", dilation=dilation)
        found = of_images(layer, (5, 5))
        seen = pairs((5, 5), lambda d, s=dilation: (d % s == 0).all() and d.square().sum() <= (2.5 * s) ** 2)
        assert found - 2 * 25 * 4 * 8 * 8 == 4 * 8 * 8 * seen


def test_scalars_have_no_poses():
    image, fields = types(C4, 1)
    layer = LiftingSelfAttention(image, fields, 1, 3, encoding="none")
    projections = 2 * 9 * (3 + 4 * 4)
    seen = pairs((3, 3), lambda d: d.abs().max() <= 1)
    assert of_images(layer, (3, 3)) - projections == 4 * 4 * seen


def test_points():
    _, fields = types(C4, 1)
    coords, features = torch.randn(7, 2), torch.randn(7, 4)
    edges = torch.tensor([[0, 1, 2, 3, 3, 4, 5, 6, 6], [0, 1, 2, 3, 4, 5, 6, 0, 1]])
    layer = PointSelfAttention(fields, fields, 1, encoding="none")
    x = nn.GeometricTensor(features, fields, coords)
    assert summary(layer, x).total.operations - summary(layer, x, edges).total.operations == 4 * 16 * (49 - 9)


def test_convolutions_are_counted_as_pytorch_counts_them():
    image, fields = types(C4)
    table = summary(nn.SequentialModule(nn.R2Conv(image, fields, 3)), (2, 1, 7, 7))
    assert table.total.operations == table.rows[0].operations == 2 * 2 * 8 * 9 * 25
    assert table.rows[0].output == (2, 8, 5, 5)
    assert table.rows[0].memory == 2 * 8 * 25 * 4


def test_backends_make_no_difference_and_are_as_before():
    _, fields = types(C4)
    found, names = set(), set(BACKENDS)
    for backend in ("auto", "blocked", "reference"):
        layer = GroupSelfAttention(fields, fields, 2, 3, backend=backend).train()
        found.add(summary(layer, (1, 8, 6, 6)).total)
        assert layer.plain.backend == backend
        assert layer.training
    assert len(found) == 1
    assert set(BACKENDS) == names


def test_a_network_that_fails_is_left_as_it_was():
    _, fields = types(C4)
    layer, names = GroupSelfAttention(fields, fields, 2, 3), set(BACKENDS)
    with pytest.raises(ValueError, match="needed features on a grid"):
        summary(layer, nn.GeometricTensor(torch.zeros(3, 8), fields, torch.zeros(3, 2)))
    assert layer.plain.backend == "auto"
    assert set(BACKENDS) == names
    assert not layer._forward_hooks


def test_layers_by_depth():
    network = HybridNet(C4, 1, 3, widths=(4, 4), convolutions=(1, 0), attention=(0, 1), kernel_size=3)
    first, second = (summary(network, (1, 1, 9, 9), depth=depth) for depth in (1, 2))
    assert "stages.attention_2_1" in {row.name for row in first.rows}
    assert {"stages.attention_2_1.attention", "stages.attention_2_1.shortcut"} & {row.name for row in second.rows} == {
        "stages.attention_2_1.attention"  # the shortcut is the identity
    }
    for table in (first, second):
        assert sum(row.parameters for row in table.rows[:-1]) == table.total.parameters
        assert sum(row.operations for row in table.rows[:-1]) == table.total.operations
        assert sum(row.memory for row in table.rows[:-1]) == table.total.memory
    assert network.training


@pytest.mark.parametrize(
    ("make", "inputs"),
    [
        (lambda: CNN(1, 3, widths=(2,), convolutions=(1,), features=2), ((2, 1, 8, 8),)),
        (
            lambda: GroupCNN(C4, 1, 3, width=2, convolutions=(1, 0), last_kernel=2, attention="full"),
            (torch.zeros(2, 1, 8, 8),),
        ),
        (
            lambda: PointTransformer(C4, 2, 1, fields=2, num_blocks=1, num_heads=1),
            (torch.randn(5, 2), torch.randn(5, 2)),
        ),
        (lambda: CNN(1, 3, widths=(2,), convolutions=(1,), features=2).double(), ((2, 1, 8, 8),)),
    ],
)
def test_any_network(make, inputs):
    network = make()
    table = summary(network, *inputs)
    assert table.total.parameters == sum(p.numel() for p in network.parameters())
    assert table.total.operations > 0
    lines = str(table).splitlines()
    assert len(lines) == len(table.rows) + 3
    assert len({len(line) for line in lines}) == 1


def test_blocks_take_fields():
    _, fields = types(C4)
    assert summary(TransformerBlock(fields, fields, kernel_size=3), (1, 8, 5, 5)).total.output == (1, 8, 5, 5)
    x = nn.GeometricTensor(torch.randn(4, 8), fields, torch.randn(4, 2))
    assert summary(PointTransformerBlock(fields, fields), x).total.output == (4, 8)
    assert summary(FieldLayerNorm(fields), (1, 8, 5, 5)).total.operations == 0


@pytest.mark.parametrize(
    ("arguments", "options", "error"),
    [((3,), {}, TypeError), ((), {}, TypeError), (("a",), {}, TypeError), (((1, 8, 5, 5),), {"depth": 0}, ValueError)],
)
def test_wrong_arguments(arguments, options, error):
    _, fields = types(C4)
    with pytest.raises(error, match=r"inputs|depth"):
        summary(FieldLayerNorm(fields), *arguments, **options)
    with pytest.raises(TypeError, match="network"):
        summary(3, (1, 8, 5, 5))
