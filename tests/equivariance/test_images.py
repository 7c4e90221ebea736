"""Images as they look after a rotation."""

import pytest
import torch
from escnn import gspaces, nn

from escnn_attention.equivariance.images import rotate_images, smooth_images


def test_quarters_move_pixels_and_others_interpolate():
    images = torch.randn(2, 3, 7, 7)
    for quarters in range(-4, 5):
        assert torch.equal(rotate_images(images, 90 * quarters), images.rot90(quarters % 4, (-2, -1)))
    smooth = smooth_images(41)
    rotated = rotate_images(smooth, 30)
    # As escnn turns images.
    space = gspaces.rot2dOnR2(12)
    scalar = nn.FieldType(space, [space.trivial_repr])
    assert (scalar(smooth).transform(space.fibergroup.element(1)).tensor - rotated).abs().max() < 5e-2
    assert (smooth_images(41, 30) - rotated).abs().max() < 5e-3
    assert (smooth_images(41, -30) - rotated).abs().max() > 0.5
    around = rotate_images(torch.zeros(1, 9, 9), 45, background=2.0)
    assert (around[0, 0, 0], around[0, 4, 4]) == (pytest.approx(2.0, abs=0.3), pytest.approx(0.0, abs=1e-6))
    assert rotate_images(images, 30).dtype == images.dtype
    with pytest.raises(ValueError, match="square images"):
        rotate_images(torch.zeros(1, 4, 5), 30)


def test_smooth_images():
    images = smooth_images(33, number=2, channels=3)
    assert images.shape == (2, 3, 33, 33)
    assert images.dtype == torch.float64
    assert torch.equal(images, smooth_images(33, number=2, channels=3))
    assert not torch.allclose(images, smooth_images(33, number=2, channels=3, seed=1))
    # The same functions on a finer grid, whose points include those of the coarser one.
    assert torch.allclose(smooth_images(99)[..., 1::3, 1::3], smooth_images(33))
    assert (images[..., 0, :] == 0).all()
    assert 0.3 < images[..., 12:21, 12:21].std() < 2
    # Band-limited: next to nothing beyond twice the periods of its waves.
    spectrum = torch.fft.fft2(smooth_images(64)[0, 0]).abs().square()
    frequency = torch.fft.fftfreq(64, 1 / 64)
    high = frequency[:, None].square() + frequency.square() > 8**2
    assert spectrum[high].sum() < 1e-3 * spectrum.sum()
