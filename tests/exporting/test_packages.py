"""Packages of AOTInductor with compiled loops inside, which run where neither this package nor escnn is."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from escnn import gspaces
from escnn.nn import FieldType
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

import escnn_attention as ea
from escnn_attention.exporting import packaged
from escnn_attention.exporting.mode import for_package
from escnn_attention.functional import ON_GRIDS
from escnn_attention.functional.native import build
from escnn_attention.models import compile_package
from tests import spaces
from tests.packages import ELSEWHERE, exported, times_written

C4 = gspaces.rot2dOnR2(4)
FIELDS = spaces.regular(C4, 2)
BATCH = ({0: Dim("batch", max=2**31 - 1)},)  # PyTorch 2.7 needs a bound

LAYERS: dict[str, dict] = {
    "own keys, dilation": {"kernel_size": 3, "keys": "own", "dilation": 2},
    "all queries": {"kernel_size": 3, "query": "all"},
    "own queries": {"kernel_size": 5},
    "disc, own queries and keys": {"kernel_size": 5, "keys": "own", "window": "disc"},
    "rotary in a window": {"kernel_size": 3, "encoding": ea.RotaryEncoding()},
    "global, Fourier": {"kernel_size": None, "encoding": "fourier"},
    "global, Fourier, all queries": {"kernel_size": None, "encoding": "fourier", "query": "all"},
    "global, rotary": {"kernel_size": None, "encoding": ea.RotaryEncoding()},
    "global, MLP": {"kernel_size": None, "encoding": "mlp"},
    "global, own keys": {"kernel_size": None, "keys": "own"},
    "norm of queries and keys, registers": {"kernel_size": None, "qk_norm": True, "registers": 2},
}


class Several(nn.Module):
    """The outputs of some layers for the same fields."""

    def __init__(self, *layers: nn.Module):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [layer(x.to(next(layer.parameters()).dtype)) for layer in self.layers]


def layer(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    made = ea.GroupSelfAttention(FIELDS, FIELDS, 2, head_fields=2, **LAYERS[name]).to(dtype)
    return exported(made)


def features(number: int, size: int = 7) -> Tensor:
    return torch.randn(number, FIELDS.size, size, size, dtype=torch.float64, requires_grad=False)


def spoilt(x: Tensor) -> Tensor:
    x = x.clone()
    x[0, 3, 1, 2], x[-1, 0, 5, 5] = torch.nan, torch.inf
    return x


@pytest.fixture
def compiler() -> None:
    if reason := packaged.why_not_linked():
        pytest.skip(reason)


def compiled(plain: nn.Module, folder) -> Callable[[Tensor], list[Tensor]]:
    file = compile_package(plain, (features(2),), folder / "n.pt2", dynamic_shapes=BATCH)
    return torch._inductor.aoti_load_package(str(file))


def transformed(x: Tensor, fields: FieldType, element) -> Tensor:
    return fields(x).transform(element).tensor


@pytest.mark.sampled(1, of="exported files")
@pytest.mark.usefixtures("compiler")
@torch.no_grad()
def test_a_package_where_neither_package_is(tmp_path, run_python):
    """Loops of both precisions in windows and everywhere, for any number of images, also of what is not finite."""
    plain = Several(layer("own keys, dilation"), layer("global, Fourier"), layer("all queries", torch.float64))
    run = compiled(plain, tmp_path)
    inputs = [features(3), features(1), spoilt(features(2))]
    assert plain(inputs[-1])[0].isnan().any()
    assert not plain(inputs[-1])[0].isnan().all()
    torch.save([((x,), plain(x)) for x in inputs], tmp_path / "inputs.pt")
    errors = run_python(ELSEWHERE, tmp_path / "n.pt2", tmp_path / "inputs.pt", build._folder()).split()
    assert len(errors) == 9
    for error, tolerance in zip(map(float, errors), 3 * [1e-5, 1e-5, 1e-12], strict=True):
        assert error < tolerance
    check_equivariance(run, [1e-5, 1e-5, 1e-12])


def check_equivariance(run: Callable[[Tensor], list[Tensor]], tolerances: list[float]) -> None:
    """And the output is not the same for every element."""
    x, (turn, other) = features(2), list(C4.testing_elements)[1:3]
    found, outputs = run(transformed(x, FIELDS, turn)), run(x)
    for y, of_turned, tolerance in zip(outputs, found, tolerances, strict=True):
        expected = transformed(y, FIELDS, turn)
        assert (of_turned - expected).abs().max() <= tolerance * expected.abs().max()
        assert (of_turned - transformed(y, FIELDS, other)).abs().max() > 0.1 * expected.abs().max()


@pytest.mark.exhaustive
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@torch.no_grad()
def test_packages_of_all_kinds_of_layers(tmp_path, dtype):
    """In one package: most of the time goes by for what all have in common."""
    plain = Several(*(layer(name, dtype) for name in LAYERS))
    run, tolerance = compiled(plain, tmp_path), 1e-5 if dtype == torch.float32 else 1e-12
    for x in (features(3), features(1), spoilt(features(2))):
        for found, expected in zip(run(x), plain(x), strict=True):
            assert torch.equal(found.isnan(), expected.isnan())
            error = (found - expected).nan_to_num().abs().max()
            assert error <= tolerance * expected.nan_to_num().abs().max()
    check_equivariance(run, len(LAYERS) * [tolerance])


def program_of(plain: nn.Module) -> ExportedProgram:
    return torch.export.export(plain, (features(2).float(),), dynamic_shapes=BATCH, strict=False)


def loops_of(program: ExportedProgram) -> int:
    return times_written(program, "packaged_grids")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", LAYERS)
def test_a_loop_is_written_down_once_and_for_packages_only(name, compiler):
    plain = layer(name)
    with for_package():
        program = program_of(plain)
    assert loops_of(program) == 1
    (output,) = program.graph.output_node().args[0]
    assert not isinstance(output.meta["val"].shape[0], int)
    assert loops_of(program_of(plain)) == 0


def test_what_the_loop_cannot_serve_is_of_pytorch(monkeypatch):
    elsewhere = replace(ON_GRIDS.packaged, why_unsupported=lambda _: "it lies elsewhere")
    monkeypatch.setattr(ON_GRIDS, "packaged", elsewhere)
    with for_package():
        assert loops_of(program_of(layer("own queries"))) == 0


def test_what_cannot_be_compiled(tmp_path, monkeypatch):
    plain, x, file = layer("own queries"), features(2).float(), tmp_path / "n.pt2"
    with pytest.raises(TypeError, match=r"plain: got GroupSelfAttention, .* its export\(\) gives"):
        compile_package(ea.GroupSelfAttention(FIELDS, FIELDS, kernel_size=3), (x,), file)
    with pytest.raises(ValueError, match=r"file: .*name that ends"):
        compile_package(plain, (x,), file.with_suffix(".so"))
    monkeypatch.delenv("CXX", raising=False)
    with monkeypatch.context() as patch:
        patch.setattr(packaged, "_OLDEST", "2.7")
        patch.setenv("PATH", "")
        with pytest.raises(RuntimeError, match=r"compile_package: there is no C\+\+ compiler"):
            compile_package(plain, (x,), file)
    monkeypatch.setattr(packaged, "_OLDEST", "99.0")
    with pytest.raises(RuntimeError, match=r"compile_package: .*99\.0 or later"):
        compile_package(plain, (x,), file)
    assert not file.exists()
