"""Encodings as all poses together see them: in each of their forms the same function of the offset."""

import pytest
import torch
from escnn import gspaces

from escnn_attention.encodings import as_encoding
from escnn_attention.encodings.bias import FromAllPoses
from escnn_attention.groups.fibers import fibers

pytestmark = pytest.mark.usefixtures("double")


@pytest.mark.parametrize("name", ["mlp", "separable", "fourier", "none"])
@pytest.mark.parametrize("make", [lambda: gspaces.flipRot2dOnR2(3), lambda: gspaces.rot2dOnR3(4)])
def test_every_form_is_the_function_from_each_pose(name, make):
    group = fibers(make())
    encoding = as_encoding(name).bind(group.dimension, 2, 3, 1)
    inverse, delta = torch.as_tensor(group.inverse_action), torch.randn(7, group.dimension)
    seen = FromAllPoses(encoding, inverse)
    assert seen.rotations() is seen.poses() is None
    assert torch.equal(seen.identity[0], torch.eye(group.dimension))
    if name == "none":
        assert seen.offsets(delta) is seen.features(delta.T[None]) is seen.waves() is None
        return
    of_each = [encoding.offsets(delta @ matrix.T) for matrix in inverse]
    expected = torch.cat([values.expand(2, -1, -1) for values in of_each], dim=-1)
    torch.testing.assert_close(seen.offsets(delta).expand(2, -1, -1), expected)
    offered = seen.features(torch.stack([delta.T, 2 * delta.T]))
    assert (offered is None) == (encoding.features(delta.T[None]) is None)
    if offered is not None:
        features, readout = offered
        torch.testing.assert_close((readout @ features[0]).mT.expand(2, -1, -1), expected)
        torch.testing.assert_close((readout @ features[1]).mT, seen.offsets(2 * delta))
    offered = seen.waves()
    assert (offered is None) == (name != "fourier")
    if offered is not None:
        phase = delta @ offered[0].T
        torch.testing.assert_close(torch.cat([phase.cos(), phase.sin()], -1) @ offered[1].mT, expected)
