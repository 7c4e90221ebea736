"""No encoding."""

import torch

from escnn_attention import NoEncoding


def test_no_encoding_says_nothing():
    encoding = NoEncoding().bind(2, 3, 5, 4)
    assert encoding.offsets(torch.randn(7, 2)) is None
    assert encoding.poses() is None
    assert not list(encoding.parameters())
