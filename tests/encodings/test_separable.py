"""An encoding by a network for each coordinate."""

import pytest
import torch

from escnn_attention import SeparableEncoding


@pytest.mark.parametrize(("dim", "channels", "num_poses"), [(2, 8, 4), (2, 3, 4), (3, 9, 24), (2, 5, 1), (3, 7, 1)])
def test_separable_divides_the_channels(dim, channels, num_poses):
    """Every coordinate has channels that no other coordinate changes, and the poses have the rest."""
    encoding = SeparableEncoding().bind(dim, 2, channels, num_poses)
    each = channels // (dim + 1) if num_poses > 1 else channels // dim
    delta = torch.rand(50, dim) - 0.5
    for axis in range(dim):
        moved = delta.clone()
        moved[:, axis] += 0.4
        changed = (encoding.offsets(moved) != encoding.offsets(delta)).any(1).any(0)
        last = axis == dim - 1 and num_poses == 1
        stop = channels if last else (axis + 1) * each
        assert changed.nonzero().flatten().tolist() == list(range(axis * each, stop))
    if num_poses > 1:
        used = (encoding.poses() != 0).any(0).any(0)
        assert used.nonzero().flatten().tolist() == list(range(dim * each, channels))


@pytest.mark.parametrize(("dim", "channels", "num_poses", "parts"), [(2, 2, 4, 3), (3, 3, 2, 4), (2, 1, 1, 2)])
def test_separable_needs_a_channel_for_each_part(dim, channels, num_poses, parts):
    with pytest.raises(ValueError, match=f"encoding: .* set head_fields to {parts} or more"):
        SeparableEncoding().bind(dim, 1, channels, num_poses)
    SeparableEncoding().bind(dim, 1, parts, num_poses)


def test_normalize_hidden_sees_only_the_sign_of_a_coordinate():
    encoding = SeparableEncoding(normalize_hidden=True).bind(1, 2, 4, 1)
    values = encoding.offsets(torch.tensor([[-1.0], [-0.3], [0.2], [0.9]]))
    torch.testing.assert_close(values[:, 0], values[:, 1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(values[:, 2], values[:, 3], rtol=1e-4, atol=1e-4)
    assert (values[:, 1] - values[:, 2]).abs().max() > 0.1
    smooth = SeparableEncoding().bind(1, 2, 4, 1).offsets(torch.tensor([[0.2], [0.9]]))
    assert (smooth[:, 0] - smooth[:, 1]).abs().max() > 0.1
