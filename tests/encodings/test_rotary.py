"""The encoding by rotations of channels."""

import pytest
import torch

from escnn_attention import RotaryEncoding


def test_rotations_take_the_place_of_a_function_of_the_offset():
    encoding = RotaryEncoding().bind(3, 2, 5, 4)
    assert encoding.rotations().shape == (2, 2, 3)
    assert encoding.offsets(torch.randn(7, 3)) is None
    assert encoding.features(torch.randn(1, 3, 7)) is None
    assert RotaryEncoding(1).bind(3, 2, 5, 4).rotations().shape == (2, 1, 3)
    assert RotaryEncoding().bind(0, 2, 5, 4).rotations() is None
    assert RotaryEncoding().rotations() is None


@pytest.mark.parametrize(("pairs", "channels", "needed"), [(None, 1, 2), (3, 5, 6)])
def test_pairs_need_channels(pairs, channels, needed):
    with pytest.raises(ValueError, match=f"encoding: .* rotates {needed} .* set head_fields to {needed} or more"):
        RotaryEncoding(pairs).bind(2, 1, channels, 4)
    RotaryEncoding(pairs).bind(2, 1, needed, 4)
