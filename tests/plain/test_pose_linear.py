import pytest
import torch
from escnn import gspaces

from escnn_attention.groups.fibers import frames
from escnn_attention.plain.pose_linear import PoseLinear
from escnn_attention.plain.projections import FromPoses, ToPoses
from tests import spaces


def to_poses(kind="group"):
    field_type = spaces.regular(gspaces.rot2dOnR2(3), 2)
    return PoseLinear(ToPoses(frames(field_type), 6, 4, 3, kind=kind, bias=4), 3)


def from_poses(kind="group"):
    field_type = spaces.regular(gspaces.rot2dOnR2(3), 2)
    return PoseLinear(FromPoses(frames(field_type, dual=True), 6, 4, 3, kind=kind), 3)


@pytest.mark.parametrize("kind", ["group", "pointwise"])
@pytest.mark.parametrize("space", [(), (5,), (4, 3), (2, 3, 4)])
def test_positions_are_mapped_one_by_one(space, kind):
    for module, size_in, size_out in (to_poses(kind), 6, 12), (from_poses(kind), 12, 6):
        x = torch.randn(2, size_in, *space)
        y = module(x)
        assert y.shape == (2, size_out, *space)
        for index in [()] if not space else [(0,) * len(space), tuple(n - 1 for n in space)]:
            here = (slice(None), slice(None), *index)
            torch.testing.assert_close(y[here], module(x[here]))


def test_a_regular_field_keeps_its_poses_together():
    """Channel field · |H| + pose, as escnn has it."""
    module = to_poses()
    x = torch.randn(1, 6)
    with torch.no_grad():
        module.projection.bias.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    torch.testing.assert_close(module(0 * x)[0], torch.tensor([1.0, 2.0, 3.0, 4.0]).repeat_interleave(3))
    module = from_poses("pointwise")
    with torch.no_grad():
        module.projection.weight.zero_()[1, 2] = 1  # from field 2 to field 1
    x = torch.arange(12.0)[None]
    assert module(x).tolist() == [[0, 0, 0, 6, 7, 8]]


def test_empty_batches():
    assert to_poses()(torch.zeros(0, 6, 3, 3)).shape == (0, 12, 3, 3)
    assert from_poses()(torch.zeros(0, 12, 3, 3)).shape == (0, 6, 3, 3)
