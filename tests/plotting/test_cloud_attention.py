"""Attention between the points of a cloud."""

import math

import numpy as np
import pytest
import torch
from escnn import gspaces, nn

from escnn_attention import (
    GroupSelfAttention,
    PointAttentiveConv,
    PointSelfAttention,
    PointTransformerBlock,
    SphereSelfAttention,
)
from escnn_attention.models import PointTransformer
from escnn_attention.plotting import CloudStyle
from escnn_attention.plotting._cloud_drawing import _BOND, _POSITIVE
from escnn_attention.plotting.cloud_attention import attention_of_point, plot_cloud_attention
from tests.plotting.pictures import cloud_for, drawn, layer_on, texts

pytest.importorskip("matplotlib")


def points_of(ax):
    """The fill of every point of a panel; white is no attention."""
    return np.array([scatter.get_facecolor()[0, :3] for scatter in ax.collections])


def places_of(ax):
    return np.array([scatter.get_offsets()[0] for scatter in ax.collections])


def frame_of(ax):
    """The axes of the pose that are drawn, as columns."""
    lines = [
        line.get_xydata() for line in ax.lines if isinstance(line.get_color(), str) and line.get_color() == "black"
    ]
    return np.array([(end - start) / np.linalg.norm(end - start) for start, end in lines]).T


class Changed(torch.nn.Module):
    """A layer that sees something else than it is given."""

    def __init__(self, change, layer):
        super().__init__()
        self.change, self.layer = change, layer

    def forward(self, x):
        return self.layer(self.change(x))


def test_attention_turns_with_the_cloud():
    """Points, the pose and colours: all columns are turned copies of the first."""
    torch.manual_seed(0)
    g = gspaces.flipRot2dOnR2(3)
    layer = layer_on(g)
    x = cloud_for(layer)
    elements = list(g.fibergroup.elements)
    figure = plot_cloud_attention(x, layer, point=2, poses=[1, elements[4]], head=1, elements=elements)
    assert drawn(figure) > 1000
    assert len(figure.axes) == 2 * 6
    for row, pose in enumerate((1, 4)):
        axes = figure.axes[6 * row : 6 * row + 6]
        for ax, element in zip(axes, elements, strict=True):
            matrix = g.basespace_action(element)
            np.testing.assert_allclose(places_of(ax), places_of(axes[0]) @ matrix.T, atol=1e-5)
            np.testing.assert_allclose(points_of(ax), points_of(axes[0]), atol=1e-3)
            np.testing.assert_allclose(frame_of(ax), matrix @ g.basespace_action(elements[pose]), atol=1e-5)
    # Another pose of the same point looks elsewhere: that the columns agree is not for want of something to see.
    assert np.abs(points_of(figure.axes[0]) - points_of(figure.axes[6])).max() > 0.05
    assert any("head 1" in text and "pose 120°" in text for text in texts(figure))


@pytest.mark.slow
def test_what_is_drawn_are_the_weights():
    torch.manual_seed(0)
    layer = layer_on(gspaces.rot2dOnR2(4))
    x = cloud_for(layer)
    found = attention_of_point(layer, ((x,), {}), 5, [0])[0]
    for head in (0, 1):
        ax = plot_cloud_attention(x, layer, point=5, head=head).axes[0]
        strength = np.sqrt(found[head] / found[head].max())
        expected = 1 - strength[:, None] * (1 - np.array(_POSITIVE))
        np.testing.assert_allclose(points_of(ax), expected, atol=1e-4)
    share = found / found.sum(-1, keepdims=True)
    sharpest = int((-(share * np.log(share)).sum(-1)).argmin())
    assert any(f"head {sharpest}" in text for text in texts(plot_cloud_attention(x, layer, point=5)))


def test_what_is_not_equivariant_is_seen():
    """Attention that sees absolute positions does not turn about a point that is not the origin."""
    layer = layer_on(gspaces.rot2dOnR2(4), encoding="mlp")
    x = cloud_for(layer)
    stretched = Changed(lambda x: nn.GeometricTensor(x.tensor, x.type, x.coords * torch.tensor([1.0, 3.0])), layer)

    def largest(figure):
        return max(float(text.get_text()) for text in figure.texts if text.get_fontsize() == 8)

    assert largest(plot_cloud_attention(x, layer, point=1)) < 1e-5
    assert largest(plot_cloud_attention(x, stretched, point=1)) > 1e-2


@pytest.mark.slow
def test_clouds_in_space_with_labels_and_bonds():
    g = gspaces.dihedralOnR3(2)
    network = PointTransformer(g, 5, 1, fields=4, num_blocks=2, num_heads=2)
    x = cloud_for(network)
    style = CloudStyle(labels=list("CNOHHHH"), bonds=[(0, 1), (1, 2)])
    figure = plot_cloud_attention(x, network, point=0, style=style, elements=g.fibergroup.elements)
    assert len(figure.axes) == 2 * 4
    assert all(ax.name == "3d" for ax in figure.axes)
    assert drawn(figure) > 1000
    assert {"as it is", "180° about x", "180° about y", "180° about z"} <= set(texts(figure))
    assert [text.get_text() for text in figure.axes[0].texts] == list("CNOHHHH")
    colours = [line.get_color() for line in figure.axes[0].lines]
    assert sum(isinstance(colour, str) and colour == _BOND for colour in colours) == 2
    upright, turned = (np.array([points_of(ax) for ax in figure.axes[k::4]]) for k in (0, 2))
    np.testing.assert_allclose(upright, turned, atol=1e-3)


def test_layers_of_a_model():
    g = gspaces.rot2dOnR2(2)
    network = PointTransformer(g, 1, 1, fields=2, num_blocks=3, num_heads=1)
    network.blocks[0].eval()
    x = cloud_for(network)
    every = plot_cloud_attention(x, network, point=0)
    assert [module.training for module in (network, *network.blocks)] == [True, False, True, True]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in network.modules())
    assert len(every.axes) == 3 * 2
    one = plot_cloud_attention(x, network, "blocks.1", point=0)
    two = plot_cloud_attention(x, network, ["blocks.1.attention", network.blocks[2]], point=0)
    assert (len(one.axes), len(two.axes)) == (2, 4)
    for k, figure in ((2, one), (2, two)):
        np.testing.assert_array_equal(points_of(every.axes[k]), points_of(figure.axes[0]))
    assert any(text.startswith("blocks.2") for text in texts(two))

    scalars = network.in_type + network.in_type
    block = PointTransformerBlock(scalars, scalars, kernel_features=3)
    assert len(plot_cloud_attention(cloud_for(block), block, point=0).axes) == 2
    # A layer that is called with edges sees those only.
    chain = torch.tensor([[0, 1, 1, 2, 3, 4, 5, 6], [0, 0, 1, 2, 3, 4, 5, 6]])
    coloured = points_of(plot_cloud_attention(x, network, "blocks.0", point=0, edge_index=chain).axes[0])
    np.testing.assert_array_equal((coloured < 1).any(axis=1), [True, True, *(5 * [False])])


def test_negative_weights_are_blue():
    torch.manual_seed(0)
    layer = layer_on(gspaces.rot2dOnR2(2), normalization="count")
    x = cloud_for(layer)
    weights = attention_of_point(layer, ((x,), {}), 0, [0])[0, 0]
    assert weights.min() < 0 < weights.max()
    shown = points_of(plot_cloud_attention(x, layer, point=0, head=0).axes[0])
    np.testing.assert_array_equal(shown[:, 0] < shown[:, 2], weights < 0)


@pytest.mark.slow
def test_samples_of_a_continuous_group():
    g = gspaces.rot2dOnR2(-1)
    vectors = nn.FieldType(g, 2 * [g.irrep(1)])
    layer = PointSelfAttention(vectors, vectors, head_fields=2, samples=6)
    x = cloud_for(layer)
    figure = plot_cloud_attention(x, layer, point=0, poses=[1])
    assert len(figure.axes) == 4
    for ax in figure.axes[1:]:
        np.testing.assert_allclose(points_of(ax), points_of(figure.axes[0]), atol=1e-3)
    half = nn.GeometricTensor(x.tensor.bfloat16(), x.type, x.coords)
    assert len(plot_cloud_attention(half, layer.bfloat16(), point=0).axes) == 4  # whose matrices may be rounded
    layer.float()
    sixth, other = g.fibergroup.element(math.pi / 3, "radians"), g.fibergroup.element(0.1, "radians")
    plot_cloud_attention(x, layer, point=0, poses=[sixth], elements=[sixth])
    with pytest.raises(ValueError, match=r"elements: .*none of the samples"):
        plot_cloud_attention(x, layer, point=0, elements=[other])
    with pytest.raises(ValueError, match=r"poses: .*of the 6 samples"):
        plot_cloud_attention(x, layer, point=0, poses=[other])


@pytest.mark.parametrize("gspace", [gspaces.trivialOnR2(), gspaces.dihedralOnR3(2)], ids=lambda g: g.name)
@pytest.mark.parametrize("number", [1, 3])
def test_points_that_coincide(gspace, number):
    layer = layer_on(gspace)
    x = cloud_for(layer, number)
    x.coords = torch.zeros_like(x.coords)
    figure = plot_cloud_attention(x, layer, point=0)
    assert drawn(figure) > 500
    assert len(figure.axes) == len(gspace.fibergroup.elements)
    # The trivial group has one pose only, of which there is nothing to draw.
    assert any("ring: the query;" in text for text in texts(figure)) == (gspace.dimensionality == 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_any_precision(dtype):
    torch.manual_seed(0)
    layer = layer_on(gspaces.rot2dOnR2(3))
    x = cloud_for(layer)
    expected = plot_cloud_attention(x, layer, point=0, head=0)
    given = nn.GeometricTensor(x.tensor.to(dtype), x.type, x.coords.double())
    figure = plot_cloud_attention(given, layer.to(dtype), point=0, head=0)
    for ax, other in zip(figure.axes, expected.axes, strict=True):
        np.testing.assert_allclose(points_of(ax), points_of(other), atol=0.08)


def test_mistakes_are_named():
    g = gspaces.rot2dOnR2(4)
    layer = layer_on(g)
    x = cloud_for(layer)
    for wrong, error, message in (
        ({"point": 7}, ValueError, "point: got 7, needed a number from 0 to 6"),
        ({"point": 1.5}, TypeError, "point: got 1.5, needed an integer"),
        ({"head": 2}, ValueError, "head: got 2, needed a number from 0 to 1"),
        ({"poses": [4]}, ValueError, "poses: got 4"),
        ({"poses": []}, ValueError, "poses: got none"),
        ({"elements": []}, ValueError, "elements: got none"),
        ({"layers": []}, ValueError, "layers: got none"),
        ({"layers": 3}, TypeError, "layer: got int, needed a module"),
    ):
        with pytest.raises(error, match=message):
            plot_cloud_attention(x, layer, **{"point": 0, **wrong})
    for style, error, message in (
        ({"labels": ["C"]}, ValueError, "labels: got 1, needed one for each of 7 points"),
        ({"labels": "CCCCCCC"}, TypeError, "labels: got 'CCCCCCC', needed a sequence"),
        ({"bonds": [1, 2]}, TypeError, "bonds: got .* needed pairs"),
        ({"bonds": [(0, 7)]}, ValueError, "bonds: got 7, needed a number from 0 to 6"),
        ({"view": 3.0}, TypeError, "view: got 3.0, needed an elevation and an azimuth"),
    ):
        with pytest.raises(error, match=message):
            plot_cloud_attention(x, layer, point=0, style=CloudStyle(**style))
    with pytest.raises(TypeError, match="model: got str"):
        plot_cloud_attention(x, "layer", point=0)
    with pytest.raises(ValueError, match=r"model: .*attention between points"):
        plot_cloud_attention(x, nn.IdentityModule(x.type), point=0)
    for other in (
        GroupSelfAttention(layer.in_type, layer.in_type, kernel_size=None),
        SphereSelfAttention(*2 * [nn.FieldType(gspaces.rot3dOnR3(), [gspaces.rot3dOnR3().trivial_repr])]),
    ):
        with pytest.raises(ValueError, match="no attention between points"):
            plot_cloud_attention(x, other, point=0)
    with pytest.raises(TypeError, match="x: got Tensor"):
        plot_cloud_attention(x.tensor, layer, point=0)
    with pytest.raises(ValueError, match=r"x: .*on a grid"):
        plot_cloud_attention(layer.in_type(torch.randn(1, 16, 3, 3)), layer, point=0)
    with pytest.raises(ValueError, match="x: its gspace is"):
        plot_cloud_attention(cloud_for(layer_on(gspaces.rot2dOnR2(2))), layer, point=0)
    network = torch.nn.Identity()
    network.unused = layer
    with pytest.raises(ValueError, match=r"layers: .*not call 'unused'"):
        plot_cloud_attention(x, network, point=0)
    network = PointTransformer(g, 1, 1, fields=2, num_blocks=1, num_heads=1)
    with pytest.raises(ValueError, match=r"layers: got .norm., needed attention"):
        plot_cloud_attention(cloud_for(network), network, "norm", point=0)
    half = Changed(lambda x: nn.GeometricTensor(x.tensor[:3], x.type, x.coords[:3]), layer)
    with pytest.raises(ValueError, match=r"layers: .*3 points, needed .*7"):
        plot_cloud_attention(x, half, point=0)


def weights_of(module, x, point, poses, **call):
    """What the picture draws: (poses, heads, N)."""
    return attention_of_point(module, ((x,), call), point, poses)


def written_out(layer, x, point, pose):
    """The formula for an MLP encoding: (heads, N)."""
    plain = layer.plain
    q, _, k = plain.project_in(x.tensor.unsqueeze(0)).squeeze(1).unflatten(0, (3, layer.num_heads))
    offsets = (x.coords - x.coords[point]) / plain.length_scale @ plain.inverse_action[pose].T
    rho = plain.encoding.offsets(offsets.to(x.tensor))[:, :, None] + plain.encoding.poses(None)[
        :, plain.quotient[pose]
    ].unsqueeze(1)
    scores = ((k + rho) * q[:, point, pose, None, None]).sum(-1) / math.sqrt(q.shape[-1])
    return scores.flatten(1).softmax(-1).unflatten(-1, scores.shape[1:]).sum(-1)


def test_the_weights_are_those_of_the_formula():
    layer = layer_on(gspaces.flipRot2dOnR2(3), encoding="mlp", length_scale=1.7).double()
    x = cloud_for(layer).to(torch.float64)
    x.coords = x.coords.double()
    with torch.no_grad():
        for pose in (0, 4):
            found = weights_of(layer, x, 2, [pose])[0]
            np.testing.assert_allclose(found, written_out(layer, x, 2, pose), atol=1e-12)
            assert np.abs(found - written_out(layer, x, 2, pose + 1).numpy()).max() > 1e-3


def test_attention_of_all_poses_is_their_mean():
    layer = layer_on(gspaces.rot2dOnR2(3), query="all")
    found = weights_of(layer, cloud_for(layer), 3, [0, 2])
    assert found.shape == (2, 2, 7)
    np.testing.assert_allclose(found.sum(-1), 1, atol=1e-5)


def test_edges_are_those_of_the_call():
    free = layer_on(gspaces.rot2dOnR2(2))
    each = torch.arange(1, 12)  # has an edge to itself
    edges = torch.cat([torch.tensor([[3, 5], [0, 0]]), torch.stack([each, each])], dim=1)
    x = cloud_for(free, 12)
    np.testing.assert_array_equal(weights_of(free, x, 0, [0], edge_index=edges)[0].nonzero()[1], [3, 5, 3, 5])
    mask = torch.ones(12, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"layers: .*mask"):
        weights_of(free, x, 0, [0], mask=mask)


def test_attentive_convolution_is_drawn_without_its_kernel():
    g = gspaces.rot2dOnR2(3)
    convolution, attention = layer_on(g, PointAttentiveConv), layer_on(g)
    attention.load_state_dict(convolution.state_dict(), strict=False)
    x = cloud_for(attention)
    kernel, before = convolution.plain.values, convolution(x).tensor
    np.testing.assert_allclose(weights_of(convolution, x, 1, [2]), weights_of(attention, x, 1, [2]), atol=1e-6)
    assert convolution.plain.values is kernel
    torch.testing.assert_close(convolution(x).tensor, before)
