import numpy as np
import pytest
import torch

from escnn_attention.geometry.relations import rotate
from escnn_attention.plain.frames import Frames

pytestmark = pytest.mark.usefixtures("double")


def test_vectors_in_the_frame_of_a_rotation():
    torch.manual_seed(0)
    # Two vectors of space, whose channels lie apart, and a scalar.
    cross = np.zeros((3, 3, 3))
    for i, j, k in ((0, 1, 2), (1, 2, 0), (2, 0, 1)):
        cross[i, k, j], cross[i, j, k] = 1.0, -1.0  # e_i × e_j = e_k
    frames = Frames([np.array([[0, 2, 4], [6, 5, 3]])], [cross])
    x, q = torch.randn(7, 7), torch.nn.functional.normalize(torch.randn(7, 4), dim=1)
    y = frames(x, q)
    for channels in ([0, 2, 4], [6, 5, 3]):
        torch.testing.assert_close(y[:, channels], rotate(q, x[:, channels]), rtol=1e-12, atol=1e-12)
    assert torch.equal(y[:, 1], x[:, 1])
    torch.testing.assert_close(frames(y, q, inverse=True), x, rtol=1e-12, atol=1e-12)
    assert (frames(y, q) - x).abs().max() > 0.1
    assert not frames.state_dict()
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(frames(x, q), y, rtol=1e-12, atol=1e-12)
