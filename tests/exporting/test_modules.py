"""Modules of escnn as plain modules, as files that need no escnn, and as packages of AOTInductor.

Packages have compiled loops inside, and run where neither this package nor escnn is.
"""

from collections.abc import Callable
from dataclasses import replace

import escnn.nn as en
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
from escnn_attention.models import compile_package, exported
from tests import spaces
from tests.packages import ELSEWHERE, times_written
from tests.packages import exported as exported_layer

C4 = gspaces.rot2dOnR2(4)
REGULAR = spaces.regular(C4, 2)
VECTORS = en.FieldType(C4, 2 * [C4.irrep(1)])
MIXED = en.FieldType(C4, [C4.trivial_repr, C4.irrep(1)])
GATED = en.FieldType(C4, 2 * [C4.trivial_repr] + 2 * [C4.irrep(1)])


def multiple():
    return en.MultipleModule(
        MIXED,
        ["a", "b"],
        [(en.ReLU(MIXED.index_select([0])), "a"), (en.NormNonLinearity(MIXED.index_select([1])), "b")],
    )


MODULES = {
    "NormPool": lambda: en.NormPool(VECTORS),
    "NormNonLinearity": lambda: en.NormNonLinearity(VECTORS),
    "NormBatchNorm": lambda: en.NormBatchNorm(VECTORS),
    "GNormBatchNorm": lambda: en.GNormBatchNorm(MIXED),
    "PointwiseAvgPool": lambda: en.PointwiseAvgPool(REGULAR, 2),
    "PointwiseAvgPoolAntialiased": lambda: en.PointwiseAvgPoolAntialiased(REGULAR, 0.6, 2),
    "PointwiseMaxPoolAntialiased": lambda: en.PointwiseMaxPoolAntialiased(REGULAR, 3, 2),
    "NormMaxPool": lambda: en.NormMaxPool(VECTORS, 2),
    "FieldDropout": lambda: en.FieldDropout(VECTORS, 0.5),
    "MaskModule": lambda: en.MaskModule(VECTORS, 6, 1),
    "ReshuffleModule": lambda: en.ReshuffleModule(MIXED, [1, 0]),
    "MultipleModule": multiple,
    "DisentangleModule": lambda: en.DisentangleModule(REGULAR),
    "GatedNonLinearity1": lambda: en.GatedNonLinearity1(GATED, drop_gates=False),
    "ConcatenatedNonLinearity": lambda: en.ConcatenatedNonLinearity(REGULAR, "c_relu"),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.slow
def test_modules_that_escnn_has_no_export_of(name):
    module = MODULES[name]()
    net = en.SequentialModule(ea.PoseLinear(REGULAR, module.in_type), module).double().eval()
    plain, x = exported(net), torch.randn(3, REGULAR.size, 6, 6, dtype=torch.float64)
    program = torch.export.export(plain, (x,), dynamic_shapes=({0: Dim("batch", max=99)},), strict=False).module()
    for images in (x, x[:2]):
        expected = net(REGULAR(images)).tensor
        for found in (plain(images), program(images)):
            assert found.shape == expected.shape
            assert torch.allclose(found, expected, atol=1e-12)


def test_modules_without_export_hold_others():
    """What has tables of its own, such as a layer norm, keeps them as tensors; all is in eval mode."""
    parts = [(ea.FieldLayerNorm(spaces.mixed(C4)), "a"), (ea.PoseLinear(REGULAR, REGULAR), "b")]
    fields = spaces.mixed(C4) + REGULAR
    module = en.MultipleModule(fields, ["a"] * 4 + ["b"] * 2, parts).double().eval()
    plain, x = exported(module), torch.randn(2, fields.size, 3, 3, dtype=torch.float64)
    program = torch.export.export(plain, (x,), strict=False).module()
    for found in (plain(x), program(x)):
        torch.testing.assert_close(found, module(fields(x)).tensor, rtol=0, atol=1e-12)


@pytest.mark.parametrize("export", [exported, lambda module: module.export()], ids=["exported", "export"])
def test_in_eval_mode(export):
    modules = [ea.PoseLinear(REGULAR, REGULAR), en.ReLU(REGULAR), en.SequentialModule(en.ReLU(REGULAR))]
    for module in modules + [en.NormNonLinearity(VECTORS), en.FieldDropout(VECTORS)] * (export is exported):
        plain = export(en.SequentialModule(module).train())
        assert not any(part.training for part in plain.modules())
        if export is exported:
            assert not exported(module.train()).training


def test_modules_that_cannot_be_exported_are_named():
    module = en.BranchingModule(MIXED, ["a", "b"])
    with pytest.raises(NotImplementedError, match=r"exported: BranchingModule .*several fields"):
        exported(module)
    pytest.importorskip("torch_geometric")
    with pytest.raises(NotImplementedError, match=r"exported: .*PointSelf"):
        exported(en.R2PointConv(VECTORS, VECTORS, sigma=0.5, width=1.0, n_rings=2, frequencies_cutoff=2.0))


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
    made = ea.GroupSelfAttention(REGULAR, REGULAR, 2, head_fields=2, **LAYERS[name]).to(dtype)
    return exported_layer(made)


def features(number: int, size: int = 7) -> Tensor:
    return torch.randn(number, REGULAR.size, size, size, dtype=torch.float64, requires_grad=False)


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
    """Loops of both precisions in windows and everywhere, for any number of images, also of what is not finite.

    They are compiled for as many images as heads, which a compiler must not take for the same.
    """
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
    found, outputs = run(transformed(x, REGULAR, turn)), run(x)
    for y, of_turned, tolerance in zip(outputs, found, tolerances, strict=True):
        expected = transformed(y, REGULAR, turn)
        assert (of_turned - expected).abs().max() <= tolerance * expected.abs().max()
        assert (of_turned - transformed(y, REGULAR, other)).abs().max() > 0.1 * expected.abs().max()


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


@pytest.mark.sampled(1, of="programs")
@pytest.mark.parametrize("name", LAYERS)
def test_a_loop_is_written_down_once_and_for_packages_only(name, compiler):
    plain = layer(name)
    with for_package():
        program = program_of(plain)
    assert loops_of(program) == 1
    (output,) = program.graph.output_node().args[0]
    assert not isinstance(output.meta["val"].shape[0], int)
    assert loops_of(program_of(plain)) == 0


@pytest.mark.sampled(1, of="programs")
def test_what_the_loop_cannot_serve_is_of_pytorch(monkeypatch):
    elsewhere = replace(ON_GRIDS.packaged, why_unsupported=lambda _: "it lies elsewhere")
    monkeypatch.setattr(ON_GRIDS, "packaged", elsewhere)
    with for_package():
        assert loops_of(program_of(layer("own queries"))) == 0


def test_what_cannot_be_compiled(tmp_path, monkeypatch):
    plain, x, file = layer("own queries"), features(2).float(), tmp_path / "n.pt2"
    with pytest.raises(TypeError, match=r"plain: got GroupSelfAttention, .*export\(\)"):
        compile_package(ea.GroupSelfAttention(REGULAR, REGULAR, kernel_size=3), (x,), file)
    with pytest.raises(ValueError, match=r"file: .*name that ends"):
        compile_package(plain, (x,), file.with_suffix(".so"))
    monkeypatch.delenv("CXX", raising=False)
    with monkeypatch.context() as patch:
        patch.setattr(packaged, "_OLDEST", "2.7")
        patch.setenv("PATH", "")
        with pytest.raises(RuntimeError, match=r"compile_package: .*C\+\+ compiler"):
            compile_package(plain, (x,), file)
    monkeypatch.setattr(packaged, "_OLDEST", "99.0")
    with pytest.raises(RuntimeError, match=r"compile_package: .*99\.0 or later"):
        compile_package(plain, (x,), file)
    assert not file.exists()
