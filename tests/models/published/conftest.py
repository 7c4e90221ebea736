"""What the tests of published networks share."""

import pytest
import torch


@pytest.fixture
def double():
    """PyTorch's default precision is float64, in which published formulas are compared."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(default)
