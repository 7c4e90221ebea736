"""Attention in whole clouds, those of about one size at once."""

from collections import Counter

import pytest
import torch
from escnn import gspaces
from escnn.nn import FieldType, GeometricTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from escnn_attention import PointSelfAttention
from escnn_attention.functional.points import call, dense
from escnn_attention.geometry.points import Cloud

SPACE = gspaces.rot2dOnR2(4)
TYPE = FieldType(SPACE, 2 * [SPACE.regular_repr])


def layer(encoding: str, keys: str = "own", backend: str = "dense") -> PointSelfAttention:
    torch.manual_seed(0)
    options = {"num_heads": 1, "head_fields": 2, "encoding": encoding, "keys": keys, "backend": backend}
    return PointSelfAttention(TYPE, TYPE, **options).double()


def points(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    x, coords = torch.randn(number, TYPE.size, dtype=torch.float64), torch.randn(number, 2, dtype=torch.float64)
    return x.requires_grad_(), coords


def outcome(layer: PointSelfAttention, backend: str, x, coords, **others) -> list[torch.Tensor]:
    layer.plain.backend = backend
    out = layer(GeometricTensor(x, TYPE, coords), **others).tensor
    leaves = [x, *(p for p in layer.parameters() if p.requires_grad)]
    gradients = torch.autograd.grad(out.sin().sum(), leaves, allow_unused=True)
    return [out, *(g for g in gradients if g is not None)]


def assert_close(got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(got) == len(expected)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


BATCHES = {
    "one": None,
    "alike": torch.arange(3).repeat_interleave(4),
    "unlike": torch.tensor([0, 0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 3]),
    "mixed up": torch.tensor([2, 0, 1, 1, 0, 7, 0, 2, 1, 0, 2, 1]),
}


@pytest.mark.sampled(12)
@pytest.mark.parametrize("slack", [1.0, 1.5, 10.0])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("measured", [False, True])
@pytest.mark.parametrize(("encoding", "keys"), [("rotary", "own"), ("fourier", "all"), ("absolute", "all")])
def test_agrees_with_the_formula_however_clouds_are_filled_up(monkeypatch, encoding, keys, measured, batch, slack):
    monkeypatch.setitem(dense._SLACK, "cpu", slack)
    x, coords = points(12)
    attention, others = layer(encoding, keys), {"batch": BATCHES[batch]}
    others |= {"measure": torch.rand(12, dtype=torch.float64) + 0.5} if measured else {}
    expected = outcome(attention, "neighbours", x, coords, **others)
    assert_close(outcome(attention, "dense", x, coords, **others), expected)
    assert_close(outcome(attention, "reference", x, coords, **others), expected)


def test_half_precision_counts_no_point_that_fills_up(monkeypatch):
    """Nor is there any infinity in float16, whose largest number is 65504."""
    monkeypatch.setitem(dense._SLACK, "cpu", 10.0)
    space = gspaces.rot2dOnR2(2)
    wide = FieldType(space, 64 * [space.regular_repr])
    torch.manual_seed(0)
    attention = PointSelfAttention(wide, wide, num_heads=1, encoding="rotary", keys="own", backend="dense")
    x, coords, batch = torch.randn(6, wide.size), torch.randn(6, 2), torch.tensor([0, 0, 0, 0, 1, 1])
    expected = attention(GeometricTensor(x, wide, coords), batch=batch).tensor
    x = x.half().requires_grad_()
    got = attention.half()(GeometricTensor(x, wide, coords.half()), batch=batch).tensor
    assert (got - expected).norm() < 2e-2 * expected.norm()
    got.float().sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


def test_a_batch_that_was_changed_is_noticed():
    x, coords = points(12)
    attention, batch = layer("rotary"), torch.arange(3).repeat_interleave(4)
    outcome(attention, "dense", x, coords, batch=batch)
    batch.copy_(BATCHES["unlike"])
    expected = outcome(attention, "neighbours", x, coords, batch=BATCHES["unlike"])
    assert_close(outcome(attention, "dense", x, coords, batch=batch), expected)


class Operations(TorchDispatchMode):
    """Counts the operations that make more than a view."""

    def __init__(self):
        super().__init__()
        self.count = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        name = function._schema.name.removeprefix("aten::")
        if name != "_unsafe_view" and not any(
            r.alias_info and not r.alias_info.is_write for r in function._schema.returns
        ):
            self.count[name] += 1
        return out


WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_consecutive", "is_nonzero", "equal")


def operations(clouds: list[int]) -> Counter:
    """Those of a step with a batch that has been seen before."""
    attention = layer("rotary")
    x, coords = points(sum(clouds))
    batch = torch.arange(len(clouds)).repeat_interleave(torch.tensor(clouds))

    def step() -> None:
        attention(GeometricTensor(x, TYPE, coords), batch=batch).tensor.sum().backward()

    step()
    with Operations() as counter:
        step()
    return counter.count


@pytest.mark.slow
def test_the_number_of_clouds_takes_no_operations_and_nothing_waits_for_a_gpu(monkeypatch, interpreted_kernels):
    monkeypatch.setitem(dense._SLACK, "cpu", 1.5)
    batches = [4, 4], 8 * [4], 16 * [4], [4, 3], 8 * [4, 3], 16 * [4, 3]
    counts = {str(sizes): operations(sizes) for sizes in batches}
    assert {name: sum(count[w] for w in WAITS) for name, count in counts.items()} == dict.fromkeys(counts, 0)
    alike, unlike = ([sum(count.values()) for count in list(counts.values())[i : i + 3]] for i in (0, 3))
    assert len(set(alike)) == len(set(unlike)) == 1, counts
    assert alike[0] <= 60, counts
    assert unlike[0] <= 95, counts


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("scale", [None, 2.0])
def test_checkpoints_drop_the_same_keys_again_or_say_that_they_cannot(monkeypatch, reentrant, scale):
    """Where fused attention has dropout, as on a GPU: coordinates that are given, and such as are computed within."""
    monkeypatch.setattr(dense, "why_no_kernel", lambda *_: None)
    monkeypatch.setattr(call, "MANY", 1)
    attention = PointSelfAttention(TYPE, TYPE, 1, encoding="rotary", keys="own", dropout=0.3).double()
    x, coords = points(12)
    coords.requires_grad_()

    def function(x: torch.Tensor, coords: torch.Tensor) -> torch.Tensor:
        return attention(GeometricTensor(x, TYPE, coords if scale is None else scale * coords)).tensor

    def outcome(run) -> list[torch.Tensor]:
        torch.manual_seed(2)
        out, x.grad, coords.grad = run(x, coords), None, None
        out.sin().sum().backward()
        return [out.detach(), x.grad, coords.grad]

    expected = outcome(function)
    if reentrant and scale is not None:
        with pytest.raises(RuntimeError, match=r"checkpoint: got use_reentrant=True.*needed use_reentrant=False"):
            outcome(lambda *inputs: checkpoint(function, *inputs, use_reentrant=True))
        attention.plain.backend = "neighbours"
        expected = outcome(function)
    assert_close(outcome(lambda *inputs: checkpoint(function, *inputs, use_reentrant=reentrant)), expected)


@pytest.mark.parametrize("encoding", ["rotary", "fourier", "absolute", "none"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_losses_of_gradients_by_features(encoding, checkpointed):
    """As a potential of features has; ``"auto"`` takes fused attention for so many points."""
    x, coords = points(70)
    attention, found = layer(encoding, backend="auto"), []
    assert dense.why_not_first(attention.plain.call(x, attention.plain._points(Cloud(coords)), None)) is None
    for backend in ("auto", "neighbours"):
        attention.plain.backend = backend

        def energy(x: torch.Tensor) -> torch.Tensor:
            return attention(GeometricTensor(x, TYPE, coords)).tensor.sin().sum()

        out = checkpoint(energy, x, use_reentrant=False) if checkpointed else energy(x)
        (force,) = torch.autograd.grad(out, x, create_graph=True)
        leaves = [x, *attention.parameters()]
        gradients = torch.autograd.grad(force.square().sum(), leaves, allow_unused=True)
        found.append([g for g in gradients if g is not None and g.any()])
    assert_close(*found)
