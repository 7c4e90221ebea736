import math

import numpy as np
import pytest
import torch

from escnn_attention.encodings.quadratic import QuadraticEncoding
from tests.encodings.cases import cube


def bound(dim=2, heads=3, channels=5, num_poses=4, **options):
    return QuadraticEncoding(**options).bind(dim, heads, channels, num_poses).double()


def changes(scores):
    """What of the scores ``(..., keys)`` is not lost in a softmax."""
    return scores - scores[..., :1]


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_a_constant_query_sees_a_gaussian_about_the_centre(dim):
    encoding = bound(dim, sharpness=7.0)
    query = torch.eye(5, dtype=torch.float64)[0]
    delta = cube(dim).double()
    scores = encoding.offsets(delta) @ query / math.sqrt(5)
    expected = -7 * (delta - encoding.centre.unsqueeze(1)).square().sum(-1)
    torch.testing.assert_close(scores, expected)


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_a_query_moves_the_centre_and_scales_the_sharpness(dim):
    encoding = bound(dim)
    q0, t = torch.tensor(1.7, dtype=torch.float64), torch.randn(dim, dtype=torch.float64)
    query = torch.cat([q0[None], q0 * t, torch.randn(4 - dim, dtype=torch.float64)])  # the rest meets zeros
    delta = cube(dim).double()
    scores = encoding.offsets(delta) @ query / math.sqrt(5)
    distance = (delta - encoding.centre.unsqueeze(1) - t).square().sum(-1)
    expected = -encoding.sharpness.unsqueeze(1) * q0 * distance
    torch.testing.assert_close(changes(scores), changes(expected))
    # The negative control: it is not the Gaussian about the centre itself.
    still = -encoding.sharpness.unsqueeze(1) * q0 * (delta - encoding.centre.unsqueeze(1)).square().sum(-1)
    assert (changes(scores) - changes(still)).abs().max() > 0.1


def test_sharp_heads_do_not_cancel_in_single_precision():
    """At the centre the score is 0 and one step away the sharpness, wherever the centre is."""
    encoding = QuadraticEncoding(sharpness=1e6).bind(2, 1, 3, 1)
    with torch.no_grad():
        encoding.centre.fill_(1 / 3)
    delta = torch.tensor([[1 / 3, 1 / 3], [1 / 3, 2 / 3]])
    scores = encoding.offsets(delta)[0, :, 0] / math.sqrt(3)
    torch.testing.assert_close(scores, torch.tensor([0.0, -1e6 / 9]))


def test_centres_are_drawn_within_the_disc():
    for dim in (1, 2, 3):
        radius = QuadraticEncoding().bind(dim, 4000, 4, 1).centre.norm(dim=-1)
        assert radius.max() <= 1 + 1e-6
        # Uniformly: half of the volume is within 2^(-1/d).
        assert (radius < 0.5 ** (1 / dim)).float().mean().item() == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize(("dim", "num_poses"), [(2, 8), (3, 24), (2, 1)])
def test_the_positional_score_of_a_unit_query_has_unit_variance(dim, num_poses):
    encoding = bound(dim, heads=5, channels=12, num_poses=num_poses)
    q = torch.randn(3000, 12, dtype=torch.float64)
    scores = torch.einsum("qc,mlc->mql", q, encoding.offsets(cube(dim).double())) / math.sqrt(12)
    # In every head, however far from the middle its centre lies.
    expected = torch.full((5,), 0.5 if num_poses > 1 else 1.0, dtype=torch.float64)
    torch.testing.assert_close(scores.var(-1).mean(-1), expected, rtol=0.15, atol=0)


def test_sharpness_is_taken_as_given():
    assert bound(sharpness=3).sharpness.tolist() == [3.0] * 3
    assert "sharpness=3" in repr(QuadraticEncoding(sharpness=3))


def test_gradients_of_the_offset_are_finite_at_the_centre():
    encoding = bound()
    delta = encoding.centre.detach()[:1].clone().requires_grad_()
    encoding.offsets(delta).sum().backward()
    assert 0 < delta.grad.norm() < 100


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_needs_a_channel_more_than_dimensions(dim):
    with pytest.raises(ValueError, match=f"encoding: .*head_fields to {dim + 1}"):
        QuadraticEncoding().bind(dim, 1, dim, 4)
    QuadraticEncoding().bind(dim, 1, dim + 1, 4)
    QuadraticEncoding().bind(0, 1, 1, 4)


@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, "sharp", True])
def test_wrong_sharpness_is_named(value):
    with pytest.raises(ValueError, match=f"sharpness: got {value!r}"):
        QuadraticEncoding(sharpness=value)


def test_sharpness_is_any_real_number_that_single_precision_holds():
    assert bound(sharpness=np.float32(2)).sharpness.tolist() == [2.0] * 3
    assert bound(sharpness=1e30).sharpness.isfinite().all()
    with pytest.raises(ValueError, match=r"sharpness: got 1e\+300"):
        QuadraticEncoding(sharpness=1e300)
