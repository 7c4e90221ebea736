"""An encoding by waves."""

import math

import pytest
import torch

from escnn_attention import FourierEncoding


def test_fourier_is_the_formula():
    encoding = FourierEncoding(5, scale=2.0).bind(2, 3, 4, 1).double()
    delta = torch.randn(11, 2, dtype=torch.float64)
    w = encoding.readout.weight.view(3, 4, 2, 5)  # heads, channels, cosine and sine, frequencies
    phase = torch.einsum("wd,ld->lw", encoding.frequencies, delta)
    expected = torch.einsum("mcw,lw->mlc", w[:, :, 0], phase.cos()) + torch.einsum(
        "mcw,lw->mlc", w[:, :, 1], phase.sin()
    )
    torch.testing.assert_close(encoding.offsets(delta), expected)
    scales = [FourierEncoding(500, scale=s).bind(2, 1, 4, 1).frequencies.std() for s in (0.5, 4.0)]
    torch.testing.assert_close(torch.stack(scales), torch.tensor([0.5, 4.0]), rtol=0.1, atol=0)


@pytest.mark.parametrize("value", [0, -1.0, math.nan])
def test_wrong_scales_are_named(value):
    with pytest.raises(ValueError, match="scale: got"):
        FourierEncoding(scale=value)
