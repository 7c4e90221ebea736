"""Maps to and from regular fields in irreps: beside the weights of all poses, in every layout and with gradients."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from escnn import gspaces
from escnn.nn import GeometricTensor
from torch.utils.checkpoint import checkpoint

from escnn_attention import AttentionPool, GroupCrossAttention, GroupSelfAttention, PoseLinear
from escnn_attention.groups.fibers import frames, invariant_vectors
from escnn_attention.plain.irreps import Irreps
from escnn_attention.plain.projections import FromPoses
from tests.plain.test_projections import GSPACES, every_gspace, from_poses, rich_type, to_poses
from tests.spaces import regular

FIELDS = 4
LARGE = {"full octahedral": gspaces.fullOctaOnR3, "full icosahedral": gspaces.fullIcoOnR3}
MORE = {"icosahedral": gspaces.icoOnR3, "C7": lambda: gspaces.rot2dOnR2(7), "D8": lambda: gspaces.flipRot2dOnR2(8)}
every_group = pytest.mark.parametrize(
    "make",
    [
        *(pytest.param(make, id=name) for name, make in (GSPACES | MORE).items()),
        *(pytest.param(make, id=name, marks=pytest.mark.exhaustive) for name, make in LARGE.items()),
    ],
)


def field_type(gspace, kind):
    return rich_type(gspace) if kind == "mixed" else regular(gspace, 3)


def projection(in_type, groups, transposed):
    """A projection in double precision, and the irreps of its features."""
    torch.manual_seed(groups)
    made = (from_poses if transposed else to_poses)(in_type, FIELDS, groups=groups, bias=2)
    torch.nn.init.normal_(made.bias)
    invariants = invariant_vectors(in_type) if transposed else None
    return made, Irreps(frames(in_type, dual=transposed), FIELDS, groups, invariants).double()


def features(shape, layout):
    """Random features ``(..., size)``: channel after channel, position after position, or at scattered points."""
    batch, size = shape[0], shape[-1]
    x = torch.randn(batch, size, 6, dtype=torch.float64).transpose(1, 2)
    x = {"channels": x, "images": x, "positions": x.contiguous(), "points": x.reshape(-1, 1, size).contiguous()}[layout]
    return x.requires_grad_()


def poses(in_type, groups, layout):
    """Random regular fields in the layout that a map to them has."""
    to = projection(regular(in_type.gspace, 1), groups, False)
    x = features((2, to[1].order), layout)
    y = to[1].to_poses(x, to[0].weight, None)[0].detach()
    if layout == "images":
        y = y.movedim(2, -1).contiguous().movedim(-1, 2)
    return y.requires_grad_()


def computed(made, irreps, x, layout):
    """The map of x, and the gradients of a function of it."""
    made.irreps = irreps
    if irreps is not None:
        irreps.least = 0

    def mapped():
        if isinstance(made, FromPoses) or layout != "images":
            return made(x)
        parts = made.in_parts(x, made.groups, side_by_side=True)
        assert all(part.stride(2) == 1 for part in parts)
        return torch.cat(list(parts))

    y = mapped()
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)
    with torch.no_grad():
        alone = mapped()
    return [y, alone, *torch.autograd.grad((y * weights).sum(), [x, made.weight, made.bias])]


def assert_alike(found, expected, tolerance=1e-12):
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        largest = float(other.detach().abs().max()) if other.numel() else 0.0
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance * max(1.0, largest))


@pytest.mark.sampled(12)
@every_group
def test_irreps_make_up_the_matrices_of_frames(make):
    gspace = make()
    for dual in (False, True):
        for segment in frames(rich_type(gspace), dual=dual):
            parts = [np.einsum("ajh,kjn,aki->hni", i.poses, i.weights, i.reads) for i in segment.irreps]
            np.testing.assert_allclose(sum(parts), segment.matrices, atol=1e-12)
    functions = np.concatenate([i.poses.reshape(-1, len(segment.matrices)) for i in segment.irreps])
    np.testing.assert_allclose(functions @ functions.T, np.eye(len(functions)), atol=1e-12)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("transposed", [False, True], ids=["to poses", "from poses"])
@pytest.mark.parametrize("layout", ["channels", "positions", "points", "images"])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("kind", ["regular", "mixed"])
@every_gspace
def test_the_map_of_the_expanded_weights(make, kind, groups, layout, transposed):
    in_type = field_type(make(), kind)
    made, irreps = projection(in_type, groups, transposed)
    x = poses(in_type, groups, layout) if transposed else features((2, in_type.size), layout)
    expected = computed(made, None, x, layout)
    assert_alike(computed(made, irreps, x, layout), expected)
    irreps.numbers[0] += 0.01  # of the transform of regular fields
    with pytest.raises(AssertionError):
        assert_alike(computed(made, irreps, x, layout), expected)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("side_by_side", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("lead", [(0, 3), (1, 1), (3, 1), (1, 70), (3, 70)], ids=str)
def test_tensors_that_lie_in_memory_in_any_order(lead, groups, side_by_side):
    in_type = field_type(gspaces.flipRot2dOnR2(4), "regular")
    made, irreps = projection(in_type, groups, False)
    back, irreps_back = projection(in_type, groups, True)
    expected = None

    def shuffled(x):
        axes = torch.randperm(x.dim())
        return x.permute(*axes).contiguous().permute(*axes.argsort())

    irreps.least = irreps_back.least = 0
    x = torch.randn(*lead, in_type.size, dtype=torch.float64).requires_grad_()
    for made.irreps, back.irreps in [(None, None), *[(irreps, irreps_back)] * 8]:
        (y,) = made.in_parts(shuffled(x), 1, side_by_side)
        z = back(shuffled(y))
        found = [y, z, *torch.autograd.grad(z, [x, made.weight, back.weight], shuffled(z.detach().sin()))]
        expected = expected or found
        assert_alike(found, expected)


@pytest.mark.parametrize("transposed", [False, True], ids=["to poses", "from poses"])
def test_weights_whose_rows_are_not_side_by_side(transposed):
    in_type = field_type(gspaces.flipRot2dOnR2(4), "regular")
    made, irreps = projection(in_type, 1, transposed)
    torch.nn.utils.parametrizations.orthogonal(made)
    x = poses(in_type, 1, "positions") if transposed else features((2, in_type.size), "positions")
    assert not made.weight.is_contiguous()

    def found(irreps):
        made.irreps = irreps
        y = made(x)
        return [y, *torch.autograd.grad(y.sin().sum(), [x, made.parametrizations.weight.original])]

    expected = found(None)
    irreps.least = 0
    assert_alike(found(irreps), expected)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("transposed", [False, True], ids=["to poses", "from poses"])
@pytest.mark.parametrize("layout", ["channels", "positions", "images"])
def test_second_derivatives(layout, transposed, biased):
    in_type, images = regular(GSPACES["C3"](), 1), layout == "images"
    groups = 1 + images
    made, irreps = projection(in_type, groups, transposed)
    x = poses(in_type, groups, layout) if transposed else features((1, in_type.size), layout)

    def mapped(x, weight, bias=None):
        if transposed:
            return irreps.from_poses(x, weight, bias)
        return irreps.to_poses(x, weight, bias, groups, images)

    leaves = (x, made.weight, made.bias) if biased else (x, made.weight)
    assert torch.autograd.gradgradcheck(mapped, leaves, fast_mode=True)


def test_a_map_that_is_used_twice():
    """All its gradients, also those that have gradients of their own, are those of the expanded weights."""
    in_type = regular(gspaces.flipRot2dOnR2(4), FIELDS)
    (there, irreps), (here, irreps_back) = (projection(in_type, 1, back) for back in (False, True))
    irreps.least = irreps_back.least = 0
    x = features((2, in_type.size), "positions")
    leaves = [x, there.weight, there.bias, here.weight, here.bias]

    def differentiate(*used):
        there.irreps, here.irreps = used
        first, again = (
            torch.autograd.grad(here(there(here(there(x)).tanh())).sum(), leaves, create_graph=graph)
            for graph in (True, False)
        )
        assert_alike(again, first)
        return first, torch.autograd.grad(first[0].square().sum(), leaves[:4])

    for found, expected in zip(differentiate(irreps, irreps_back), differentiate(None, None), strict=True):
        assert_alike(found, expected)


@pytest.fixture
def layer():
    torch.manual_seed(0)
    hidden = regular(gspaces.flipRot2dOnR2(4), 32)
    return PoseLinear(hidden, hidden)


@pytest.fixture
def calls(monkeypatch):
    """The numbers of positions that were computed in irreps."""
    found = []
    of_irreps = Irreps.compute

    def compute(self, given, *args, **kwargs):
        found.append(given[0][..., 0].numel())
        return of_irreps(self, given, *args, **kwargs)

    monkeypatch.setattr(Irreps, "compute", compute)
    return found


@pytest.mark.slow
def test_irreps_where_they_save_time(layer, calls):
    x = torch.randn(1, layer.in_type.size, 32, 32)
    layer.plain(x[..., :2, :2])
    assert not calls
    layer.plain(x)
    assert calls == [32 * 32]
    torch.compile(layer.plain, backend="eager")(x)
    torch.export.export(layer.plain, (x,))
    torch.func.vmap(layer.plain)(x[None])
    assert len(calls) == 1
    narrow = regular(layer.in_type.gspace, 2)
    assert PoseLinear(narrow, narrow).plain.projection.irreps is None


def test_a_layer_that_uses_irreps_is_equivariant(layer, calls):
    layer.double()
    x = GeometricTensor(torch.randn(1, layer.in_type.size, 32, 32, dtype=torch.float64), layer.in_type)

    def error():
        with torch.no_grad():
            y = layer(x)
            each = ((layer(x.transform(g)).tensor - y.transform(g).tensor) for g in x.type.testing_elements)
            return max(float(e.abs().max()) for e in each)

    assert error() < 1e-10
    assert calls
    layer.plain.projection.irreps.numbers.mul_(torch.linspace(1, 1.01, len(layer.plain.projection.irreps.numbers)))
    assert error() > 1e-4


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_lower_precision_and_checkpointing(layer, calls, dtype, tolerance):
    x = torch.randn(1, layer.in_type.size, 32, 32, requires_grad=True)
    expected = torch.autograd.grad(layer.double().plain(x.double()).square().mean(), x)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        y = checkpoint(layer.float().plain, x, use_reentrant=False)
        assert y.dtype == dtype
    found = torch.autograd.grad(y.float().square().mean(), x)
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=tolerance * float(expected[0].abs().max()))
    assert len(calls) == 3  # once more where the layer was checkpointed


def test_gradients_of_many_images_in_half_precision():
    made, irreps = projection(regular(gspaces.rot2dOnR2(8), 8), 2, False)
    x = features((256, 64), "images")

    def gradients(dtype):
        leaves = [leaf.detach().to(dtype).requires_grad_() for leaf in (made.weight, made.bias)]
        y = torch.cat(list(irreps.to_poses(x.to(dtype), *leaves, 2, True))).double()
        return torch.autograd.grad((y * torch.linspace(0, 2, y.numel(), dtype=y.dtype).view(y.shape)).sum(), leaves)

    for found, expected in zip(gradients(torch.bfloat16), gradients(torch.float64), strict=True):
        assert float((found - expected).norm()) < 1e-2 * float(expected.norm())


def test_features_of_a_wrong_shape_are_refused():
    made, irreps = projection(field_type(gspaces.rot2dOnR2(4), "regular"), 2, False)
    with pytest.raises(ValueError, match=r"x: got features \(1, 3, 3, 12\)"):
        irreps.to_poses(torch.zeros(1, 3, 3, 12, dtype=torch.float64), made.weight, None)
    for shape in [(1, 1, 9, 4, 4), (2, 1, 9, 4, 3), (2, 9, 4, 4)]:
        with pytest.raises(ValueError, match="y: got regular fields"):
            irreps.from_poses(torch.zeros(shape, dtype=torch.float64), made.weight, None)


ON_GRIDS = {
    "class tokens": lambda fields: AttentionPool(fields, 3, num_heads=2, head_fields=16, tokens=2),
    "cross-attention": lambda fields: GroupCrossAttention(*3 * [fields], num_heads=2, kernel_size=3, head_fields=16),
    "self-attention": lambda fields: GroupSelfAttention(fields, fields, num_heads=2, kernel_size=3, head_fields=16),
    "linear": lambda fields: PoseLinear(fields, fields),
}


@pytest.mark.parametrize("name", ON_GRIDS)
def test_layers_on_grids(name):
    fields = regular(gspaces.flipRot2dOnR2(8), 8)
    layer = ON_GRIDS[name](fields).double().plain
    x = (1 + (name == "cross-attention")) * [torch.randn(2, fields.size, 5, 7, dtype=torch.float64)]
    used = [module for module in layer.modules() if isinstance(module, Irreps)]
    assert used
    for module in used:
        module.least = 0
    found = layer(*x)
    for module in used:
        module.least = math.inf
    torch.testing.assert_close(found, layer(*x), rtol=0, atol=1e-12)
