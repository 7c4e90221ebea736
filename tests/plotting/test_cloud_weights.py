import math

import numpy as np
import pytest
import torch
from escnn import gspaces

from escnn_attention import PairKernel, PointAttentiveConv
from escnn_attention.plotting._cloud_weights import attention_of_point
from tests.plotting.pictures import cloud_for, layer_on


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


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"query": "all"},
        {"keys": "own"},
        {"query": "all", "keys": "own"},
        {"encoding": "fourier"},
        {"encoding": "rotary", "keys": "own"},
        {"encoding": "absolute"},
        {"encoding": "none"},
        {"encoding": PairKernel()},
        {"num_neighbours": 4},
        {"radius": 1.2},
        {"encoding": "fourier", "backend": "dense"},
        {"backend": "reference"},
        {"projection": "pointwise", "dropout": 0.5},
    ],
    ids=str,
)
def test_what_comes_out_of_the_heads_are_means_with_these_weights(options):
    """For values that are alike at all poses of a point, with every option."""
    torch.manual_seed(1)
    layer = layer_on(gspaces.rot2dOnR2(3), **options).eval()
    x = cloud_for(layer)
    found = weights_of(layer, x, 3, [0, 1, 2])
    np.testing.assert_allclose(found.sum(-1), 1, atol=1e-5)
    assert found.min() >= 0
    values = torch.randn(layer.num_heads, 1, 7, 1, layer.head_fields)

    def replace(module, arguments, fields):
        q, v, k = fields.unflatten(0, (3, layer.num_heads))
        return torch.stack([q, values.expand_as(v), k]).flatten(0, 1)

    heads = []
    layer.plain.project_in.register_forward_hook(replace)
    layer.plain.project_out.register_forward_pre_hook(lambda module, arguments: heads.append(arguments[0]))
    with torch.no_grad():
        layer(x)
    expected = torch.einsum("hmj,mjc->mhc", torch.tensor(found).float(), values[:, 0, :, 0])
    if options.get("query") == "all":
        expected = 3 * layer.plain.query_weight * expected
    np.testing.assert_allclose(heads[0][:, 0, 3], expected, atol=1e-5)


def test_who_is_no_neighbour_has_no_weight():
    layer = layer_on(gspaces.rot2dOnR2(2), radius=1.0)
    x = cloud_for(layer, 12)
    found = weights_of(layer, x, 0, [0])[0]
    far = ((x.coords - x.coords[0]).norm(dim=1) > 1.0).numpy()
    assert 0 < far.sum() < len(far)
    np.testing.assert_array_equal(found[:, far], 0)
    assert (found[:, ~far] > 0).all()

    free = layer_on(gspaces.rot2dOnR2(2))
    each = torch.arange(1, 12)  # has an edge to itself
    edges = torch.cat([torch.tensor([[3, 5], [0, 0]]), torch.stack([each, each])], dim=1)
    np.testing.assert_array_equal(weights_of(free, x, 0, [0], edge_index=edges)[0].nonzero()[1], [3, 5, 3, 5])
    np.testing.assert_array_equal(weights_of(free, x, 1, [0], edge_index=edges)[0].nonzero()[1], [1, 1])


def test_attentive_convolution_is_drawn_without_its_kernel():
    g = gspaces.rot2dOnR2(3)
    convolution, attention = layer_on(g, PointAttentiveConv), layer_on(g)
    attention.load_state_dict(convolution.state_dict(), strict=False)
    x = cloud_for(attention)
    kernel, before = convolution.plain.values, convolution(x).tensor
    np.testing.assert_allclose(weights_of(convolution, x, 1, [2]), weights_of(attention, x, 1, [2]), atol=1e-6)
    assert convolution.plain.values is kernel
    torch.testing.assert_close(convolution(x).tensor, before)
