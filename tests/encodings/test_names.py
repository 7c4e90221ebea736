"""Encodings by name."""

import pytest
import torch

from escnn_attention import MLPEncoding
from escnn_attention.encodings import as_encoding
from tests.encodings.cases import NAMES


@pytest.mark.parametrize("name", NAMES)
def test_names(name):
    encoding = as_encoding(name)
    assert type(encoding) is NAMES[name]
    assert as_encoding(encoding) is encoding


def test_the_default_is_the_mlp():
    assert type(as_encoding(None)) is MLPEncoding


def test_wrong_encodings_are_refused():
    with pytest.raises(ValueError, match=r"encoding: .*'mlp'"):
        as_encoding("spiral")
    for value in 3, MLPEncoding, torch.nn.Linear(2, 2), False:
        with pytest.raises(TypeError, match=r"encoding: .*Encoding"):
            as_encoding(value)
    with pytest.raises(TypeError, match=r"encoding: .*MLPEncoding\(\)"):
        as_encoding(MLPEncoding)
