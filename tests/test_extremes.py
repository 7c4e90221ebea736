"""Every layer and network at the ends: no images, grids without positions, features as large as 1e12."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from tests.layers import CASES, Case, gradients, served

ON_GRIDS = {name: case for name, case in CASES.items() if case.on_one_plane}
ONE_BY_ONE = (
    "DropPath",
    "FieldBatchNorm",
    "FieldLayerNorm",
    "FieldLinear",
    "LayerScale",
    "PerScale",
    "PoseAttention",
    "PoseFeedForward",
    "PoseLinear",
    "PowerSpectrum",
    "SiLU",
    "GELU",
)


def computed(case: Case, module: nn.Module, inputs: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """The output, and the gradients of its sum for inputs and parameters."""
    wanted = [t for t in (*(t.requires_grad_() for t in inputs), *module.parameters()) if t.requires_grad]
    out = case.output(module, *inputs)
    return out, gradients(out.sum(), wanted)


def backends(case: Case, module: nn.Module, inputs: list[Tensor]) -> Iterator[str]:
    """The backends of a module, "auto" first."""
    yield "auto"
    for backend, _ in served(lambda: case.output(module, *inputs), module):
        yield backend


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", ON_GRIDS)
def test_no_images(name):
    case = ON_GRIDS[name]
    module = case.drawn()
    (x,) = case.inputs(module)
    expected = case.output(module, x).shape[1:]
    for backend in backends(case, module, [x]):
        out, found = computed(case, module, [x[:0].clone()])
        assert out.shape == (0, *expected), backend
        assert not any(g.any() for g in found), backend
    assert module.export()(x[:0]).shape == (0, *expected)


@pytest.mark.sampled(16)
@pytest.mark.parametrize("name", ON_GRIDS)
def test_grids_without_positions_are_refused_by_name(name):
    case = ON_GRIDS[name]
    module = case.drawn()
    (x,) = case.inputs(module)
    for space in ((0, 0), (0, 5), (5, 0)):
        message = f"^input: a grid of {space[0]}×{space[1]} has no positions, needed at least one along each axis$"
        with pytest.raises(ValueError, match=message):
            case.output(module, x.new_zeros(2, x.shape[1], *space))


@pytest.mark.sampled(16)
@pytest.mark.parametrize(
    "name", [n for n in ON_GRIDS if n.split(",")[0] not in (*ONE_BY_ONE, "ScalePooling", "HybridNet", "FieldUNet")]
)
def test_exported_modules_refuse_them_but_where_each_position_is_treated_by_itself(name):
    module = ON_GRIDS[name].drawn()
    (x,) = ON_GRIDS[name].inputs(module)
    plain = module.export()
    with pytest.raises(ValueError, match=r"input: .*0×5 .*no positions"):
        plain(x.new_zeros(2, x.shape[1], 0, 5))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("largest", [1e4, 1e8, 1e12])
@pytest.mark.slow
def test_gradients_of_large_features_are_finite(name, largest):
    case = CASES[name]
    module = case.drawn().float()
    features, *rest = case.inputs(module, dtype=torch.float32)
    for backend in backends(case, module, [features, *rest]):
        out, found = computed(case, module, [largest * features, *rest])
        assert out.isfinite().all(), backend
        assert all(g.isfinite().all() for g in found) or backend == "dense", backend


def test_those_of_fused_kernels_are_not():
    """The control, and what the documentation says of this backend."""
    case = CASES["GroupSelfAttention"]
    module = case.drawn().float()
    module.plain.backend = "dense"
    (x,) = case.inputs(module, dtype=torch.float32)
    finite = [all(g.isfinite().all() for g in computed(case, module, [scale * x])[1]) for scale in (1e2, 1e6)]
    assert finite == [True, False]
