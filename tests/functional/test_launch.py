"""What hosts remember for launches of kernels."""

from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from escnn_attention import functional
from escnn_attention.functional.launch import by_shapes


class Call(NamedTuple):
    x: torch.Tensor
    pose: torch.Tensor | None
    sides: list[int]


X = torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("other", "remembered"),
    [
        (Call(torch.ones(2, 3), None, [4]), True),
        (Call(torch.zeros(2, 4), None, [4]), False),
        (Call(X.double(), None, [4]), False),
        (Call(X, X, [4]), False),
        (Call(X, None, [5]), False),
    ],
)
def test_results_are_remembered_by_shapes_types_and_numbers(other, remembered):
    made = []
    find = by_shapes(lambda name, call: made.append(call) or len(made))
    assert [find("forward", Call(X, None, [4])), find("backward", Call(X, None, [4]))] == [1, 2]
    assert find("forward", other) == (1 if remembered else 3)
    assert len(made) == (2 if remembered else 3)


def test_sums_have_one_order():
    """Kernels add nothing atomically, but where each number is a sum of one thread, in the order of its program."""
    folder = Path(functional.__file__).parent
    found = {str(path.relative_to(folder)) for path in folder.rglob("*.py") if "tl.atomic" in path.read_text()}
    assert found <= {"grid/triton_kernels.py"}
