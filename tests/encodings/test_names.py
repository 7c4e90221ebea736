"""Encodings by name."""

import pytest
import torch

from escnn_attention import MLPEncoding
from escnn_attention.encodings import as_encoding
from tests.encodings.cases import NAMES, every_encoding


@every_encoding
def test_names(make):
    name = next(name for name, cls in NAMES.items() if cls is make)
    assert type(as_encoding(name)) is make
    encoding = make()
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
