"""The wiring of loops of one's own: every operator as compilers take it, and a loop that is known by heart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from escnn import gspaces
from torch import Tensor
from torch.autograd.forward_ad import dual_level, make_dual, unpack_dual
from torch.autograd.gradcheck import GradcheckError
from torch.utils._python_dispatch import TorchDispatchMode

from escnn_attention.functional import rotate, tables
from escnn_attention.functional.autograd import Operator, Passes, recompute
from escnn_attention.functional.grid import native, triton
from escnn_attention.functional.grid.call import Arguments
from escnn_attention.functional.grid.dense import _attend
from escnn_attention.functional.matmul import (
    Columns,
    _GatherColumns,
    add_to_each,
    apart,
    grouped_linear,
    grouped_linear_transpose,
    matmul,
)
from escnn_attention.functional.norms import layer_norm
from escnn_attention.functional.points import native as points_native
from escnn_attention.functional.points import pair_mlp
from escnn_attention.functional.responses import attentive
from escnn_attention.plain.irreps import _Gradients
from tests.functional.grid.test_triton import interpreted
from tests.functional.points.test_native import case as points_case
from tests.functional.points.test_pair_mlp import draw
from tests.functional.responses.test_attentive import case as attentive_case
from tests.plain.test_irreps import features, field_type, projection

NO_COMPILER = native.why_not_built(torch.float64)


def on_a_grid(operator: Operator, sum_query_poses: bool) -> tuple[Operator, Arguments]:
    q, k, v = (torch.randn(2, 1, 4, 2, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))
    spatial, pose = (torch.randn(2, 2, n, 3, dtype=torch.float64, requires_grad=True) for n in (3, 2))
    rest = {"num_poses": 2, "shape": [4], "key_shape": [4], "spacings": []}
    rest |= {"kernel_size": 3, "window": "square", "dilation": 1, "dropout": 0.0}
    empty = dict.fromkeys(("cos", "sin", "readout", "seed"))
    call = Arguments(q, k, v, spatial=spatial, pose=pose, **empty, sum_query_poses=sum_query_poses, chunk=1000, **rest)
    return operator, call


def with_waves() -> tuple[Operator, Arguments]:
    operator, call = on_a_grid(native._loop.operator, True)
    cos, sin = torch.randn(2, 2, 2, 4, 3, dtype=torch.float64).unbind()
    readout = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)
    waves = {"cos": cos.requires_grad_(), "sin": sin.requires_grad_(), "readout": readout}
    return operator, call._replace(spatial=None, kernel_size=0, **waves)


def of_points() -> tuple[Operator, NamedTuple]:
    # No query fills up, of which what is kept for the backward pass has no number.
    call = points_case(queries=(3, 3), heads=1, num_poses=2, query_poses=2, key_poses=2)
    return points_native._operator, call._replace(pose=F.pad(call.pose, (0, 6)))  # whole vectors


def of_pairs() -> tuple[Operator, NamedTuple]:
    x, *weights = draw(rows=3)
    return pair_mlp._operator, pair_mlp.Arguments(*weights, x)


def of_responses() -> tuple[Operator, NamedTuple]:
    tensors, geometry = attentive_case("full", batch=1, outs=1, out_poses=1, ins=2, in_poses=1, size=3, kernel=2)
    return attentive._operator, attentive._call(*tensors, geometry)


def of_rotations() -> tuple[Operator, NamedTuple]:
    shapes = (2, 2, 2, 3, 1, 5), (2, 2, 1, 3, 1, 2), (2, 2, 2, 3, 1, 4), (2, 1, 1, 1, 1, 5)
    tensors = (torch.randn(*s, dtype=torch.float64).requires_grad_() for s in shapes)
    return rotate._operator, rotate._Arguments(*tensors, True, 12)


def of_tables() -> tuple[Operator, NamedTuple]:
    shapes = (3, 2), (3,), (2, 2, 3), (2, 4, 2), (5, 2), (3, 2, 2)
    *weights, points, inverse = (torch.randn(*s, dtype=torch.float64) for s in shapes)
    chosen = torch.tensor([0, 2, 1, 0, 3, 3])
    return tables._operator, tables._Arguments(*(w.requires_grad_() for w in weights), points, inverse, chosen)


def outputs(operator: Operator, found: Any) -> list[Tensor]:
    """The output of an operator, or both of one that has two."""
    return list(found[:2]) if operator.passes.pair else [found[0] if isinstance(found, tuple) else found]


compiled = pytest.mark.skipif(NO_COMPILER is not None, reason=str(NO_COMPILER))
OPERATORS = {
    "native-waves": pytest.param(with_waves, marks=compiled),
    "native-own": pytest.param(lambda: on_a_grid(native._loop.operator, False), marks=compiled),
    "native-all": pytest.param(lambda: on_a_grid(native._loop.operator, True), marks=compiled),
    "triton": pytest.param(lambda: on_a_grid(triton._loop.operator, False), marks=interpreted),
    "points": pytest.param(of_points, marks=compiled),
    "pair_mlp": pytest.param(of_pairs, marks=compiled),
    "attentive": pytest.param(of_responses),
    "rotate": pytest.param(of_rotations, marks=interpreted),
    "tables": pytest.param(of_tables, marks=interpreted),
}


def check(operator: Operator, call: NamedTuple, tests: Sequence[str]) -> None:
    """Hold both passes to what PyTorch's compilers take operators for."""
    torch.library.opcheck(operator.forward, tuple(call), test_utils=tests)
    with torch.no_grad():
        out, kept = operator.forward(*call)
        tensors = [t.detach() if isinstance(t, Tensor) else t for t in call]
        needed = [t is not None for t in tensors[: operator.leaves]]
        given = out if operator.passes.keeps_output else None
        arguments = (torch.randn_like(out), given, kept, needed, *tensors)
        torch.library.opcheck(operator.backward, arguments, test_utils=tests)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("make", OPERATORS.values(), ids=OPERATORS)
def test_every_operator_is_what_compilers_take_it_for(make):
    check(*make(), ["test_schema", "test_autograd_registration", "test_faketensor"])


@pytest.mark.sampled(1, of="compiled graphs")
@pytest.mark.parametrize("make", OPERATORS.values(), ids=OPERATORS)
def test_every_operator_is_compiled_with_its_gradients(make):
    check(*make(), ["test_aot_dispatch_dynamic"])


@pytest.mark.sampled(4)
@pytest.mark.parametrize("make", OPERATORS.values(), ids=OPERATORS)
def test_every_operator_gives_what_operations_of_pytorch_give(make):
    operator, call = make()
    leaves = [t for t in call[: operator.leaves] if t is not None]
    ways = operator(call), operator.forward(*call), operator.passes.plainly(call)
    direct, traced, plain = (outputs(operator, way) for way in ways)
    grads = [torch.randn_like(t) for t in plain]
    expected = torch.autograd.grad(plain, leaves, grads)
    for out in (direct, traced):
        torch.testing.assert_close(out, plain, atol=1e-11, rtol=1e-11)
        torch.testing.assert_close(torch.autograd.grad(out, leaves, grads), expected, atol=1e-11, rtol=1e-11)


@pytest.mark.parametrize("make", OPERATORS.values(), ids=OPERATORS)
def test_every_operator_is_looked_through_by_transforms(make):
    operator, call = make()
    tensors = [t for t in call[: operator.leaves] if t is not None]
    where = [i for i in range(operator.leaves) if call[i] is not None]

    def function(*given):
        fields = list(call)
        for i, t in zip(where, given, strict=True):
            fields[i] = t
        return sum(t.sin().sum() for t in outputs(operator, operator(operator.kind(*fields))))

    detached = [t.detach() for t in tensors]
    grads = torch.func.grad(function, argnums=tuple(range(len(where))))(*detached)
    expected = torch.autograd.grad(function(*tensors), tensors)
    torch.testing.assert_close(grads, expected, atol=1e-11, rtol=1e-11)
    steps = [torch.randn_like(t) for t in detached]
    _, change = torch.func.jvp(function, tuple(detached), tuple(steps))
    torch.testing.assert_close(change, sum((g * s).sum() for g, s in zip(grads, steps, strict=True)))
    with dual_level():
        dual = function(*map(make_dual, detached, steps))
        torch.testing.assert_close(unpack_dual(dual).tangent, change)


class _Scale(NamedTuple):
    x: Tensor
    factor: Tensor | None
    by: Tensor
    shape: list[int]
    times: int
    twice: bool
    dropout: float
    name: str


SEEN: list[list[bool]] = []


def _scaled(call: _Scale) -> Tensor:
    return call.x * call.by * call.times * (1 if call.factor is None else call.factor)


def _backward(call: _Scale, grad: Tensor, out: Tensor | None, kept: Tensor, needed: list[bool]) -> list[Tensor | None]:
    assert out is None
    SEEN.append(needed)
    unit = kept * grad
    return [unit if call.factor is None else unit * call.factor, None if call.factor is None else unit * call.x]


scale = Operator(
    "test_scale",
    _Scale,
    2,
    Passes(
        lambda call: (_scaled(call), call.by * call.times),
        _backward,
        lambda call: (torch.empty_like(call.x), torch.empty_like(call.by)),
        _scaled,
        backend="scale",
        instead="plain",
    ),
)


def a_scale(dropout: float = 0.0, factor: bool = True) -> _Scale:
    x, f, by = (torch.randn(3, dtype=torch.float64) for _ in range(3))
    return _Scale(x.requires_grad_(), f.requires_grad_() if factor else None, by, [3], 2, True, dropout, "a")


def test_the_schema_follows_from_the_fields():
    assert str(scale.forward._opoverload._schema) == (
        "escnn_attention::test_scale(Tensor x, Tensor? factor, Tensor by, int[] shape, int times, bool twice, "
        "float dropout, str name) -> (Tensor, Tensor)"
    )


@pytest.mark.parametrize("factor", [False, True])
@pytest.mark.slow
def test_gradients_of_any_order(factor):
    call = a_scale(factor=factor)
    leaves = [t for t in call[:2] if t is not None]

    def function(*given):
        return scale(_Scale(given[0], given[1] if factor else None, *call[2:]))

    assert torch.autograd.gradcheck(function, leaves)
    assert torch.autograd.gradgradcheck(function, leaves)
    torch.library.opcheck(scale.forward, tuple(call))


def test_leaves_that_are_computed_from_each_other():
    call = a_scale()

    def differentiate(function, **options):
        out = function(call._replace(x=function(call)))
        return torch.autograd.grad(out.square().sum(), [call.x, call.factor], **options)

    expected = differentiate(_scaled)
    for found in (differentiate(scale), differentiate(scale, create_graph=True)):
        torch.testing.assert_close(found, expected)


def test_only_gradients_that_are_needed():
    call = a_scale()
    SEEN.clear()
    torch.autograd.grad(scale(call).sum(), call.factor)
    x = call.x.detach()
    torch.autograd.grad(scale(call._replace(x=x)).sum(), call.factor)
    # The pass is told of those that require one.
    assert SEEN == [[True, True], [False, True]] or SEEN == [[False, True], [False, True]]


def _tensor(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def _columns() -> Columns:
    return Columns.of(torch.tensor([[0, 1, 2], [2, 0, 1]]), groups=2)


def _map_of_irreps(differentiated: bool = False) -> Tensor:
    made, irreps = projection(field_type(gspaces.flipRot2dOnR2(4), "regular"), 1, transposed=False)
    x = features((2, made.weight.shape[-1]), "channels")
    (y,) = irreps.to_poses(x, made.weight, None)
    return _Gradients.apply(irreps, True, irreps.weights(made.weight).detach(), x, y)[1] if differentiated else y


# What goes through each function that has a backward pass of its own.
FUNCTIONS = {
    "_AddToEach": lambda: add_to_each(_tensor(2, 3, 4), _tensor(2, 1, 4)),
    "_Direct": lambda: scale(a_scale()),
    "_GatherColumns": lambda: _GatherColumns.apply(_tensor(6, 3), *_columns()),
    "_Gradients": lambda: _map_of_irreps(differentiated=True),
    "_GroupedLinear": lambda: grouped_linear(_tensor(5, 3), _tensor(6, 3), columns=_columns()),
    "_GroupedLinearTranspose": lambda: grouped_linear_transpose(_tensor(2, 5, 2, 3), _tensor(6, 3), columns=_columns()),
    "_LayerNorm": lambda: layer_norm(_tensor(5, 3), _tensor(3), _tensor(3), 1e-5),
    "_Map": _map_of_irreps,
    "_Matmul": lambda: matmul(_tensor(2, 3, 4), _tensor(2, 4, 5)),
    "_TwiceDifferentiable": lambda: _attend(
        _tensor(1, 1, 3, 1, 2, 8), _tensor(1, 1, 3, 1, 1, 8), _tensor(1, 1, 3, 1, 8), None, 1.0, 0.0
    ),
    "_Unbind": lambda: torch.cat(list(apart(_tensor(5, 4, 3).transpose(0, 1), 2))),
}


def _check_reads(function: Callable[[], Tensor]) -> None:
    """Take gradients with what checkpoints allow: saved tensors are read once in a backward pass."""
    read: set[object] = set()

    def unpack(saved: tuple[object, Tensor]) -> Tensor:
        assert saved[0] not in read, "a saved tensor is read twice"
        read.add(saved[0])
        return saved[1]

    with torch.autograd.graph.saved_tensors_hooks(lambda t: (object(), t), unpack):
        out = function()
        out.square().sum().backward()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_saved_tensors_are_read_once(name, monkeypatch):
    monkeypatch.setattr("escnn_attention.functional.matmul.SMALL", 0)

    def checked() -> Tensor:
        out = FUNCTIONS[name]()
        nodes, seen = [out.grad_fn], set()
        while nodes:
            node = nodes.pop()
            if node is not None and node not in seen:
                seen.add(node)
                nodes += [following for following, _ in node.next_functions]
        assert f"{name}Backward" in {node.name() for node in seen}
        return out

    _check_reads(checked)


def test_no_function_is_left_out():
    """Each class that PyTorch differentiates by a backward pass of ours, but those that only others extend.

    Replays of CUDA graphs save no tensors.
    """
    found = [torch.autograd.Function]
    for kind in found:
        found += [k for k in kind.__subclasses__() if k.__module__.startswith("escnn_attention.")]
    assert {kind.__name__ for kind in found[1:] if "backward" in vars(kind)} - {"_Replay"} == set(FUNCTIONS)


def test_what_is_read_twice_is_found():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, grad):
            return grad * (ctx.saved_tensors[0] + ctx.saved_tensors[0])

    with pytest.raises(AssertionError, match="read twice"):
        _check_reads(lambda: Twice.apply(_tensor(3)))


def test_a_wrong_gradient_is_found_out():
    """The checks above would notice."""
    passes = Passes(lambda call: (_scaled(call), call.by * 3), _backward, lambda call: (call.x, call.by), _scaled)
    wrong = Operator("test_wrong", _Scale, 2, passes)
    call = a_scale()

    def function(*given):
        return wrong(_Scale(*given, *call[2:]))

    with pytest.raises(GradcheckError):
        torch.autograd.gradcheck(function, call[:2])
    with pytest.raises(Exception, match=r"test_wrong|stride|alias|view"):
        torch.library.opcheck(wrong.forward, tuple(a_scale()._replace(x=torch.randn(3, 2).double()[:, 0])))


def test_no_second_derivatives_with_dropout():
    call = a_scale(dropout=0.5)
    with pytest.raises(RuntimeError, match=r"second derivatives .*backend='plain'"):
        torch.autograd.grad(scale(call).sum(), call.x, create_graph=True)


def test_outside_autocast():
    call = a_scale()
    seen = []

    def forward(arguments: _Scale) -> tuple[Tensor, Tensor]:
        seen.append(torch.is_autocast_enabled("cpu"))
        return _scaled(arguments), arguments.by * 2

    operator = Operator("test_autocast", _Scale, 2, Passes(forward, _backward, forward, _scaled))
    with torch.autocast("cpu", torch.bfloat16):
        operator(call)
        assert torch.is_autocast_enabled("cpu")
    assert seen == [False]


PRODUCTS, EXPONENTIALS = torch.ops.aten.mm.default, torch.ops.aten.exp.default


@pytest.mark.parametrize("keep", [(), (PRODUCTS,), (PRODUCTS, EXPONENTIALS)])
def test_what_is_computed_again_is_differentiated_as_often_as_one_likes(keep):
    """Twice by one graph, and twice in a row; what is kept stands in its place, whatever it holds."""
    x, y = (torch.randn(3, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def function(x, y):
        return (x @ y).exp() @ (y @ x).sin()

    found, expected = recompute(function, x, y, keep=keep), function(x, y)
    for weight in (1.0, 2.0):
        wanted = torch.autograd.grad(expected.sum() * weight, (x, y), create_graph=True)
        grads = torch.autograd.grad(found.sum() * weight, (x, y), create_graph=True)
        torch.testing.assert_close(grads, wanted)
        again = torch.autograd.grad(grads[0].square().sum(), (x, y), retain_graph=True)
        torch.testing.assert_close(again, torch.autograd.grad(wanted[0].square().sum(), (x, y), retain_graph=True))


def test_what_is_kept_is_not_computed_again():
    calls = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            calls.append(function)
            return function(*args, **(kwargs or {}))

    x = torch.randn(3, 3, requires_grad=True)
    for keep, number in (((EXPONENTIALS,), 1), ((), 2)):
        calls.clear()
        with Count():
            recompute(lambda x: x.exp().sin(), x, keep=keep).sum().backward()
        assert calls.count(EXPONENTIALS) == number
