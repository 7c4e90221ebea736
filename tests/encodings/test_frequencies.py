"""What encodings by frequencies share."""

import pytest
import torch

from escnn_attention import FourierEncoding, RotaryEncoding


@pytest.mark.parametrize("learned", [True, False])
def test_frequencies_are_learned_or_kept(learned):
    encoding = FourierEncoding(6, learned=learned).bind(3, 2, 4, 5)
    assert encoding.frequencies.shape == (6, 3)
    assert ("frequencies" in dict(encoding.named_parameters())) == learned
    assert "frequencies" in encoding.state_dict()  # saved either way: it cannot be drawn again
    other = FourierEncoding(6, learned=learned).bind(3, 2, 4, 5)
    delta = torch.randn(10, 3)
    assert (other.offsets(delta) - encoding.offsets(delta)).abs().max() > 0.01
    other.load_state_dict(encoding.state_dict())
    torch.testing.assert_close(other.offsets(delta), encoding.offsets(delta))
    encoding.offsets(delta).sum().backward()
    assert (encoding.frequencies.grad is not None) == learned


@pytest.mark.parametrize("make", [FourierEncoding, RotaryEncoding])
@pytest.mark.parametrize("value", [0, -3, 2.0])
def test_wrong_numbers_of_frequencies_are_named(make, value):
    with pytest.raises((TypeError, ValueError), match=f"num_frequencies: got {value!r}"):
        make(value)
