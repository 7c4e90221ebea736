"""Layers and networks as files that need neither this package nor escnn: the same values, for any number of images."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from escnn_attention import models
from escnn_attention._export import exporting
from tests.layers import CASES, Case

ON_GRIDS = [name for name, case in CASES.items() if not case.points]
BATCH = ({0: Dim("batch")},)


@pytest.fixture
def written_down(monkeypatch):
    """Have everything done as it is written down, without writing it."""
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: True)


def plain_and_input(case: Case, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Tensor]:
    module = case.drawn().to(dtype)
    return module.export(), case.inputs(module, dtype=dtype)[0]


def several(x: Tensor) -> Tensor:
    """Another number of images, of another size."""
    return torch.cat([x, 2 * x, -x[:1]])


def program_of(plain: nn.Module, x: Tensor) -> ExportedProgram:
    return torch.export.export(plain, (x,), dynamic_shapes=BATCH)


def operators(program: ExportedProgram) -> set[str]:
    """Whose the operators of a program are."""
    return {str(node.target).split(".")[0] for node in program.graph.nodes if node.op == "call_function"}


def assert_same(found: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= tolerance * max(1.0, expected.abs().max())


def test_nothing_is_exported_by_itself():
    assert not exporting()
    seen = []

    class Asks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(exporting())
            return x + 1

    torch.export.export(Asks(), (torch.ones(2),))
    assert seen == [True]


@pytest.mark.parametrize("name", ON_GRIDS)
def test_what_is_written_down_is_the_same(name, written_down, monkeypatch):
    plain, x = plain_and_input(CASES[name], torch.float64)
    with torch.no_grad():
        found = plain(x)
        monkeypatch.undo()
        assert_same(found, plain(x), 1e-12)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", [name for name in ON_GRIDS if not hasattr(models, name)])
def test_programs_have_pytorch_operators_only_and_take_any_number_of_images(name):
    check_program(name)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ON_GRIDS)
def test_programs_of_layers_and_networks(name):
    check_program(name)


def check_program(name: str) -> None:
    plain, x = plain_and_input(CASES[name])
    program = program_of(plain, x)
    assert operators(program) <= {"aten", "<built-in function getitem>", "<built-in function add>"}, operators(program)
    for images in (several(x), x[:1]):
        with torch.no_grad():
            assert_same(program.module()(images), plain(images))


def test_an_operator_of_this_package_would_be_noticed(monkeypatch):
    plain, x = plain_and_input(CASES["LiftingSelfAttention"])
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: False)
    program = torch.export.export(plain, (x,))
    assert "escnn_attention" in operators(program)
