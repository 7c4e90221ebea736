"""Every layer and network in any mode of PyTorch, one after the other: what one call leaves behind spoils no other.

Tables that are remembered are the danger: made in inference mode they cannot be saved for a backward pass, made in an
export they have no numbers.
"""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from escnn.nn.modules.basismanager import BasisManager
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jvp, vmap

from escnn_attention import models
from escnn_attention.geometry.cache import constant_tables
from tests.layers import BACKENDS, CASES, Case, compute_by, gradients, served

Function = Callable[..., Tensor]


def _has_bases(module: nn.Module) -> bool:
    """Whether a module has steerable convolutions.

    escnn tells their parts apart by the numbers of the bases: functions of the weights are for exports.
    """
    return any(isinstance(part, BasisManager) for part in module.modules())


def eager(output: Function, module: nn.Module, inputs: list[Tensor]) -> Tensor:
    return output(module, *inputs)


def no_grad(output: Function, module: nn.Module, inputs: list[Tensor]) -> Tensor:
    with torch.no_grad():
        return output(module, *inputs)


def inference(output: Function, module: nn.Module, inputs: list[Tensor]) -> Tensor:
    with torch.inference_mode():
        return output(module, *inputs).clone()


def autocast(output: Function, module: nn.Module, inputs: list[Tensor]) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        output(module, *inputs)


def another_default_device(output: Function, module: nn.Module, inputs: list[Tensor]) -> Tensor:
    """Where tensors without numbers are made that nothing is said of."""
    with torch.device("meta"):
        return output(module, *inputs)


def fake(output: Function, module: nn.Module, inputs: list[Tensor]) -> None:
    """Without numbers, where none decide what is done: neighbours, random rotations, escnn's bases."""
    if len(inputs) > 1 or module.training or _has_bases(module):
        return
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        fakes = {name: mode.from_tensor(t) for name, t in tensors.items()}
        inputs = [mode.from_tensor(t) for t in inputs]
        expected = _of_weights(output, module, fakes)(*inputs)
        assert type(expected) is type(inputs[0])


def transformed_by_grad(output: Function, module: nn.Module, inputs: list[Tensor]) -> None:
    weights, step = _step(output, module)
    found = grad(step, argnums=tuple(range(1 + len(inputs))))(weights, *inputs)
    _assert_same([*found[0].values(), *found[1:]], _gradients(step, weights, inputs))


def transformed_by_jvp(output: Function, module: nn.Module, inputs: list[Tensor]) -> None:
    weights, step = _step(output, module)
    tangents = [torch.randn_like(t) for t in inputs]
    state = torch.get_rng_state()
    _, found = jvp(lambda *some: step(weights, *some), tuple(inputs), tuple(tangents))
    torch.set_rng_state(state)
    of_inputs = _gradients(step, weights, inputs)[len(weights) :]
    _assert_same([found], [sum((a * b).sum() for a, b in zip(tangents, of_inputs, strict=True))])


def transformed_by_vmap(output: Function, module: nn.Module, inputs: list[Tensor]) -> Tensor | None:
    """Over features; and gradients for each of them. Coordinates decide who sees whom, which is for one call."""
    features, *rest = inputs
    several = torch.stack([features, 2 * features, features])
    if isinstance(module, models.HamiltonianNetwork):  # which has positions there
        return None

    def of_features(features: Tensor) -> Tensor:
        return output(module, features, *rest)

    vmap(grad(lambda features: of_features(features).square().sum()), randomness="same")(several)
    torch.manual_seed(2)
    return vmap(of_features, randomness="same")(several)[2]


def _of_weights(output: Function, module: nn.Module, weights: dict[str, Tensor]) -> Function:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def forward(self, *inputs: Tensor) -> Tensor:
            return output(self.module, *inputs)

    named = {f"module.{name}": t for name, t in weights.items()}
    return lambda *inputs: functional_call(Wrapped(), named, inputs)


def _step(output: Function, module: nn.Module) -> tuple[dict[str, Tensor], Function]:
    if _has_bases(module):
        module = copy.deepcopy(module).export()
        return _step(lambda plain, x: plain(x), module)
    weights = {name: t.detach() for name, t in module.named_parameters()}

    def loss(weights: dict[str, Tensor], *inputs: Tensor) -> Tensor:
        torch.manual_seed(2)
        return _of_weights(output, module, weights)(*inputs).sin().sum()

    return weights, loss


def _gradients(loss: Function, weights: dict[str, Tensor], inputs: list[Tensor]) -> list[Tensor]:
    weights = {name: t.clone().requires_grad_() for name, t in weights.items()}
    wanted = [*weights.values(), *(t.clone().requires_grad_() for t in inputs)]
    return gradients(loss(weights, *wanted[len(weights) :]), wanted)


def _takes_features_alone(module: nn.Module, inputs: list[Tensor]) -> bool:
    """Whether the export of a module takes one tensor, for which its mode is right."""
    return len(inputs) == 1 and not module.training and getattr(module, "condition", None) is None


def exported(output: Function, module: nn.Module, inputs: list[Tensor]) -> Tensor | None:
    """A layer on grids by ``torch.export``."""
    if not _takes_features_alone(module, inputs):
        return None
    plain = copy.deepcopy(module).export()
    return torch.export.export(plain, tuple(inputs)).module()(*inputs)


def compiled(output: Function, module: nn.Module, inputs: list[Tensor]) -> Tensor | None:
    """To one graph, with its gradients."""
    if not _takes_features_alone(module, inputs):
        return None
    torch._dynamo.reset()
    plain = copy.deepcopy(module).export()
    run = torch.compile(plain, backend="aot_eager", fullgraph=True)
    wanted = [inputs[0].requires_grad_(), *plain.parameters()]
    found, expected = ([y, *gradients(y.square().sum(), wanted)] for y in (run(*inputs), plain(*inputs)))
    _assert_same(found, expected)
    return found[0]


TRANSFORMS = (transformed_by_grad, transformed_by_jvp, transformed_by_vmap)
MODES = (eager, no_grad, inference, autocast, another_default_device, fake, *TRANSFORMS)


CACHES = [found for found in gc.get_objects() if type(found) is functools._lru_cache_wrapper]


def forget() -> None:
    """Empty what the package remembers of calls."""
    for found in CACHES:
        if found.__module__ == constant_tables.__module__:
            found.cache_clear()


def _assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-9)


def trained(case: Case, module: nn.Module) -> list[Tensor]:
    """The output, and the gradients of a loss."""
    inputs = [t.requires_grad_() for t in case.inputs(module)]
    torch.manual_seed(2)
    out = case.output(module, *inputs)
    wanted = [t for t in (*inputs, *module.parameters()) if t.requires_grad]
    return [out.detach(), *gradients(out.square().sum(), wanted)]


def check(case: Case, modes: list[Callable[..., Tensor | None]], backend: str = "auto") -> None:
    """The same values in each mode as of a layer that was never called, and the same gradients afterwards."""
    module = case.drawn()
    compute_by(module, backend)
    fresh = copy.deepcopy(module)
    forget()
    outputs = []
    for mode in modes:
        torch.manual_seed(2)
        outputs.append(mode(case.output, module, case.inputs(module)))
    after = trained(case, module)
    forget()
    expected = trained(case, fresh)
    _assert_same(after, expected)
    for mode, found in zip(modes, outputs, strict=True):
        if found is not None:
            torch.testing.assert_close(found.detach(), expected[0], rtol=1e-8, atol=1e-9, msg=mode.__name__)


@pytest.fixture
def draw(request) -> random.Random:
    """Another order at every run, which the number in the header of the tests brings back."""
    return random.Random(f"{request.config.option.hypothesis_seed} {request.node.name}")


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", CASES)
def test_no_mode_spoils_another(name, draw):
    check(CASES[name], draw.sample(MODES, 2))


@pytest.mark.sampled(20)
@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_what_autocast_rounds_is_for_autocast_only(name):
    case = replace(CASES[name], training=False)
    module = case.drawn().float().eval()
    fresh, inputs = copy.deepcopy(module), case.inputs(module, dtype=torch.float32)

    def output(of: nn.Module, *, rounds: bool) -> Tensor:
        torch.manual_seed(2)
        with torch.autocast("cpu", torch.bfloat16, enabled=rounds):
            return case.output(of, *inputs)

    rounded, precise = output(module, rounds=True), output(module, rounds=False)
    torch.testing.assert_close(precise, output(fresh, rounds=False), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(rounded, output(fresh, rounds=True), rtol=1e-5, atol=1e-5)


@pytest.mark.sampled(20)
@pytest.mark.parametrize("name", [name for name in CASES if name not in ("Crop", "DropPath", "ScalePooling")])
def test_outputs_may_be_changed_in_place(name):
    """As by ``ReLU(inplace=True)``; the others give what they got, or keep what they give."""
    case = CASES[name]
    module = case.drawn()
    inputs = [t.requires_grad_() for t in case.inputs(module)]
    found = []
    for double in (lambda y: y.mul(2), lambda y: y.mul_(2)):
        torch.manual_seed(2)
        loss = double(case.output(module, *inputs)).sin().sum()
        found.append(gradients(loss, [*inputs, *module.parameters()]))
    _assert_same(*found)


@pytest.mark.parametrize("name", ["AllCNNC", "GroupCrossAttention, points to grid", "PointSelfAttention"])
def test_gradients_in_batches(name):
    """As ``torch.autograd.functional.jacobian`` takes them with ``vectorize=True``."""
    case = CASES[name]
    module = case.drawn()
    inputs = [t.requires_grad_() for t in case.inputs(module)]
    output, wanted = case.output(module, *inputs), [*inputs, *module.parameters()]
    toward, options = torch.randn(2, *output.shape, dtype=output.dtype), {"retain_graph": True, "allow_unused": True}
    found = torch.autograd.grad(output, wanted, toward, is_grads_batched=True, **options)
    one_by_one = (torch.autograd.grad(output, wanted, t, **options) for t in toward)
    _assert_same(list(found), [None if g[0] is None else torch.stack(g) for g in zip(*one_by_one, strict=True)])


COMPILED = [name for name in CASES if name.split(",")[0] in ("GroupSelfAttention", "AttentiveConv")]
COMPILED += ["LiftingSelfAttention", "DilationSelfAttention", "DilationLiftingSelfAttention"]


@pytest.mark.parametrize("encoding", ["Fourier", "rotary", "convolutional"])
def test_gradients_follow_tangents_of_the_loss_alone(encoding):
    """Derivatives in forward mode that begin behind the layer."""
    case = CASES[f"GroupSelfAttention, {encoding}"]
    module = case.drawn()
    inputs = [t.requires_grad_() for t in case.inputs(module)]
    output = case.output(module, *inputs)
    wanted, tangent = [*inputs, *module.parameters()], torch.randn_like(output)
    expected = torch.autograd.grad(output, wanted, tangent, retain_graph=True)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones_like(output), tangent)
        found = [forward_ad.unpack_dual(t).tangent for t in torch.autograd.grad(output, wanted, dual)]
    _assert_same(found, list(expected))


@pytest.mark.sampled(1, of="compiled graphs")
@pytest.mark.parametrize("name", COMPILED)
def test_no_export_and_no_compiler_spoils_another_mode(name, draw):
    check(CASES[name], draw.sample((exported, compiled, inference), 3))


def served_of(case: Case) -> Iterator[str]:
    """The backends that serve a case, by their names."""
    module = case.drawn()
    return (name for name, _ in served(lambda: case.output(module, *case.inputs(module)), module))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", [name for name in CASES if "Attention" in name or "Transformer" in name])
@pytest.mark.slow
def test_transforms_go_through_all_that_serves(name, draw):
    """Each by one of them."""
    transforms = itertools.cycle(draw.sample(TRANSFORMS, 3))
    for backend in served_of(CASES[name]):
        check(CASES[name], [next(transforms)], backend)


@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
@pytest.mark.parametrize("name", CASES)
def test_no_mode_spoils_another_whatever_serves(name, backend, draw):
    if backend != "auto" and backend not in served_of(CASES[name]):
        pytest.skip("it does not serve this layer")
    modes = [*MODES, exported, compiled]
    check(CASES[name], draw.sample(modes, len(modes)), backend)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", [name for name in CASES if "SelfAttention" in name or "CrossAttention" in name])
def test_dropout_acts_in_training_only(name):
    case = replace(CASES[name], training=False)
    module = case.drawn()
    module.plain.dropout, inputs = 0.5, case.inputs(module)
    assert torch.equal(case.output(module, *inputs), case.output(module, *inputs))
    module.train()
    assert not torch.equal(case.output(module, *inputs), case.output(module, *inputs))


@pytest.mark.sampled(11)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.points])
def test_who_sees_whom_is_for_one_call(name):
    case = CASES[name]
    module = case.drawn()
    features, *rest = case.inputs(module)
    coords = rest[0] if rest else features
    with pytest.raises(ValueError, match=r"coords: .*torch\.vmap .*in batch"):
        vmap(lambda coords: case.output(module, features, coords, *rest[1:]))(torch.stack([coords, coords]))
