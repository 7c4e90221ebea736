"""Position embeddings as fields."""

import pytest
import torch
from escnn import gspaces
from escnn.nn import GeometricTensor

from escnn_attention import FourierEncoding, PositionEmbedding
from tests import spaces
from tests.layers import BATCH, MASK
from tests.nn.points import cloud, error_of

C4, D3 = gspaces.rot2dOnR2(4), gspaces.flipRot2dOnR2(3)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("make", (spaces.PLANE | spaces.VOLUME).values(), ids=spaces.PLANE | spaces.VOLUME)
def test_equivariant_on_grids(make):
    gspace = make()
    fields = spaces.mixed(gspace)
    layer = PositionEmbedding(fields, channels=3).double()
    x = spaces.random_field(fields, *spaces.shape_of(gspace, 4))
    assert spaces.grid_error(layer, x) < 1e-11
    assert (layer(x).tensor - x.tensor).std() > 1e-2
    torch.testing.assert_close(layer.export()(x.tensor), layer(x).tensor)


@pytest.mark.parametrize("encoding", ["mlp", "separable", "fourier", FourierEncoding(3)])
def test_equivariant_at_points(encoding):
    for space in (D3, gspaces.rot2dOnR3(3)):
        fields = spaces.mixed(space)
        layer = PositionEmbedding(fields, encoding=encoding, length_scale=2.0).double()
        x = cloud(fields, 9)
        assert error_of(layer, x, space.fibergroup.elements, batch=BATCH, mask=MASK) < 1e-11
        y = layer(x, BATCH, mask=MASK).tensor
        moved = GeometricTensor(x.tensor, fields, x.coords + 3.0)
        torch.testing.assert_close(layer(moved, BATCH, mask=MASK).tensor, y)
        assert not y[~MASK].any()
        torch.testing.assert_close(layer.export()(x.tensor, x.coords, BATCH, MASK), y)


def test_equal_from_all_poses_is_not_equivariant():
    fields = spaces.regular(C4, 2)
    layer, x = PositionEmbedding(fields).double(), spaces.random_field(fields, 4, 4)
    assert spaces.grid_error(layer, x) < 1e-12
    layer.plain.inverse_action = torch.eye(2).double().expand(4, -1, -1)
    assert spaces.grid_error(layer, x) > 1e-2


def test_tells_positions_apart_and_takes_any_grid():
    fields = spaces.regular(C4, 1)
    layer = PositionEmbedding(fields)
    y = layer(fields(torch.zeros(1, 4, 5, 7))).tensor
    assert torch.pdist(y[0].flatten(1).T).min() > 1e-4
    assert spaces.grid_error(layer.double(), spaces.random_field(fields, 5, 7)) < 1e-12


def test_bad_arguments():
    fields = spaces.regular(C4, 1)
    for encoding in ("rotary", "none", "convolutional"):
        with pytest.raises(ValueError, match="needed a function of the position"):
            PositionEmbedding(fields, encoding=encoding)
    with pytest.raises(ValueError, match="has no base space"):
        PositionEmbedding(spaces.regular(spaces.POINT["D4 on a point"](), 1))
    with pytest.raises(ValueError, match="batch: got a Tensor for features on a grid"):
        PositionEmbedding(fields)(fields(torch.zeros(1, 4, 3, 3)), torch.zeros(1))
