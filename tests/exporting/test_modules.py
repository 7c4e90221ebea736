"""Modules of escnn as plain modules, as files that need no escnn, and what no package can be made of."""

import escnn.nn as en
import pytest
import torch
from escnn import gspaces
from torch.export import Dim

import escnn_attention as ea
from escnn_attention.exporting import packaged
from escnn_attention.models import compile_package, exported
from tests import spaces

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


def test_what_cannot_be_compiled(tmp_path, monkeypatch):
    layer = ea.GroupSelfAttention(REGULAR, REGULAR, kernel_size=3)
    plain, x, file = layer.export(), torch.randn(2, REGULAR.size, 7, 7), tmp_path / "n.pt2"
    with pytest.raises(TypeError, match=r"plain: got GroupSelfAttention, .*export\(\)"):
        compile_package(layer, (x,), file)
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
