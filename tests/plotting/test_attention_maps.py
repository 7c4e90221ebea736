import numpy as np
import pytest
import torch
from escnn import gspaces, nn

from escnn_attention import GroupSelfAttention, TransformerBlock
from escnn_attention.models import HybridNet
from escnn_attention.plotting import plot_attention_maps
from tests.plotting.pictures import drawn, number, opacity, shown, system, texts

pytest.importorskip("matplotlib")


def test_attention_turns_with_the_image():
    x, lifting, attention = system()
    figure = plot_attention_maps(
        x, nn.SequentialModule(lifting, attention), attention, positions=[(1, 2), (4, 4)], head=1
    )
    assert drawn(figure) > 1000
    assert len(figure.axes) == 2 * 2 * (1 + 4)
    assert any("head 1" in text for text in texts(figure))
    rows = [figure.axes[5 * row : 5 * row + 5] for row in range(4)]
    for upright, turned in (rows[:2], rows[2:]):
        before = {number(ax): opacity(ax) for ax in upright[1:]}
        for ax in turned[1:]:
            np.testing.assert_allclose(opacity(ax), np.rot90(before[number(ax)]), atol=1e-3)
    # The query is turned with the image: (1, 2) goes to (6 - 1 - 2, 1).
    assert rows[1][0].lines[0].get_data() == ([1], [3])


@pytest.mark.slow
def test_what_is_drawn_are_the_attention_maps_of_the_layer():
    x, lifting, attention = system()
    figure = plot_attention_maps(x, nn.SequentialModule(lifting, attention), "1", positions=[(2, 2)], head=0)
    maps = attention.attention_maps(lifting(x), [(2, 2)])[0, 0, :, 0].mean(1).sum(1).detach()
    upright, turned = maps, figure.axes[6:10]
    strongest = max(maps.max(), maps.max())  # the same maps, turned: one scale
    for pose, ax in enumerate(figure.axes[1:5]):
        np.testing.assert_allclose(opacity(ax), 0.9 * (upright[pose] / strongest).sqrt(), atol=1e-5)
    assert [number(ax) for ax in turned] == [3, 0, 1, 2]


def test_chosen_queries_are_turned_as_a_whole():
    x, lifting, attention = system()
    model = nn.SequentialModule(lifting, attention)
    every = plot_attention_maps(x, model, attention, positions=[(1, 2)], head=0)
    some = plot_attention_maps(x, model, attention, positions=[(1, 2)], head=0, poses=[2, 0])
    assert len(some.axes) == 2 * (1 + 2)
    upright, turned = some.axes[1:3], some.axes[4:6]
    assert [number(ax) for ax in upright] == [number(ax) for ax in turned] == [2, 0]
    scale = opacity(every.axes[3]).max() / opacity(upright[0]).max()
    np.testing.assert_allclose(opacity(every.axes[3]), scale * opacity(upright[0]), atol=1e-5)
    for before, after in zip(upright, turned, strict=True):
        np.testing.assert_allclose(opacity(after), np.rot90(opacity(before)), atol=1e-3)


@pytest.mark.slow
def test_the_layer_is_the_first_or_is_named():
    x, lifting, attention = system()
    sequence, options = nn.SequentialModule(lifting, attention), {"positions": [(3, 1)], "head": 0}
    block = TransformerBlock(attention.in_type, attention.in_type, 2, 3)
    assert len(plot_attention_maps(lifting(x), block, **options).axes) == 10
    first, lifted = (plot_attention_maps(x, sequence, layer, **options) for layer in (None, "0"))
    for one, other in zip(first.axes, lifted.axes, strict=True):
        np.testing.assert_array_equal(shown(one), shown(other))


@pytest.mark.slow
def test_maps_lie_on_what_they_are_of():
    """On half the grid all of the image, behind a crop the middle of it."""
    gspace = gspaces.rot2dOnR2(4)
    network = HybridNet(gspace, 1, 3, widths=(2, 2), convolutions=(1, 0), attention=(0, 1), num_heads=1)
    pooled = plot_attention_maps(torch.randn(1, 1, 12, 12), network, positions=[(5, 0)])
    assert pooled.axes[1].images[0].get_extent() == [-0.5, 5.5, 5.5, -0.5]

    fields = nn.FieldType(gspace, 2 * [gspace.regular_repr])
    cropping = nn.SequentialModule(
        TransformerBlock(fields, fields, 1, 3, crop=2), GroupSelfAttention(fields, fields, kernel_size=3)
    )
    figure = plot_attention_maps(fields(torch.randn(1, 8, 12, 12)), cropping, "1", positions=[(5, 0)])
    image, maps = figure.axes[1].images
    assert maps.get_extent() == [-0.5, 7.5, 7.5, -0.5]
    np.testing.assert_allclose(image.get_extent(), [-2.5, 9.5, 9.5, -2.5])
    inner = plot_attention_maps(fields(torch.randn(1, 8, 12, 12)), cropping, "0", positions=[(5, 0)])
    assert inner.axes[1].images[0].get_extent() == [-0.5, 11.5, 11.5, -0.5]


def test_grids_that_are_not_square():
    """Of lifting attention with reflections; the positions are any integers."""
    x, lifting, _ = system(gspaces.flipRot2dOnR2(4))
    wide = x.type(torch.randn(1, 1, 4, 7))
    figure = plot_attention_maps(wide, lifting, positions=np.array([[3, 5]]), head=0)
    assert drawn(figure) > 1000
    upright, turned = figure.axes[1:9], figure.axes[10:]
    before = {number(ax): opacity(ax) for ax in upright}
    for ax in turned:
        np.testing.assert_allclose(opacity(ax), np.rot90(before[number(ax)]), atol=1e-3)
    assert turned[0].lines[0].get_data() == ([3], [1])


def test_mistakes_are_named():
    x, lifting, attention = system()
    model = nn.SequentialModule(lifting, attention)
    options = {"positions": [(0, 0)]}
    for wrong, error, message in (
        ({"positions": [(1.5, 1)]}, TypeError, r"positions: got \[\(1.5, 1\)\], needed pairs of integers"),
        ({"positions": [(1, 2, 3)]}, TypeError, "positions: .* needed pairs of integers"),
        ({"positions": 3}, TypeError, "positions: got 3, needed pairs of integers"),
        ({"positions": [(6, 0)]}, ValueError, "outside .*grid of 6×6"),
        ({"positions": []}, ValueError, "positions: got none"),
        ({"head": 0.5}, TypeError, "head: got 0.5, needed an integer"),
    ):
        with pytest.raises(error, match=message):
            plot_attention_maps(x, lifting, **{**options, **wrong})
    for arguments, wrong, message in (
        ((x, model, "two"), {}, "no module 'two'.*'0', '1'"),
        ((x, nn.IdentityModule(x.type)), {}, "no attention layer"),
        ((x, model), {"head": 2}, "head: got 2"),
        ((x, model), {"poses": [4]}, "poses: got 4"),
        ((torch.randn(1, 2, 6, 6), model), {}, "x: .*1 channels"),
    ):
        with pytest.raises(ValueError, match=message):
            plot_attention_maps(*arguments, **options, **wrong)
    eighth = system(gspaces.rot2dOnR2(8))
    with pytest.raises(ValueError, match="elements"):
        plot_attention_maps(eighth[0], eighth[1], elements=[eighth[0].type.gspace.fibergroup.element(1)], **options)
