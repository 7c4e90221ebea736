"""Layers drawn at random: every backend by the formula, equivariance, and what is saved and exported.

A test is named after its seed: ``--seed`` with that number draws the same layer as the first of its kind.
"""

from __future__ import annotations

import itertools
import pickle
from dataclasses import replace

import pytest
import torch
from escnn.nn import GeometricTensor
from torch import Tensor

from escnn_attention import (
    GroupCrossAttention,
    GroupSelfAttention,
    LiftingSelfAttention,
    PointSelfAttention,
    sequence_space,
)
from escnn_attention.functional import BACKENDS
from tests import spaces
from tests.drawing import AROUND, KINDS, Draw, Drawn, Layer, around, values
from tests.layers import compute_by, gradients, packed, served, unpacked
from tests.nn.attention import turned_error
from tests.sampling import seeds

FEW = 4
TOLERANCE = 1e-10
PERTURBATION = 1e-14  # of a sum of some fifty numbers, in float64


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        counts = {kind: count for kind, (_, count) in KINDS.items()}
        metafunc.parametrize(("kind", "seed"), seeds(metafunc.config, counts, FEW))


def results(layer: Layer, drawn: Drawn, formula: bool = False) -> list[Tensor]:
    """The output, and the gradients of a loss by all that it depends on."""
    tensors = [t.clone().requires_grad_() for t in drawn.tensors]
    if formula:
        assert drawn.formula is not None
        y = drawn.formula(layer, GeometricTensor(tensors[0], layer.in_type, *tensors[1:]))
    else:
        y = drawn.output(layer, *tensors)
    weight = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(1))
    wanted = [*tensors, *layer.parameters()]
    return [y.detach(), *gradients((y * weight).sum(), wanted)]


def perturbed(layer: Layer, drawn: Drawn) -> list[Tensor]:
    """The results where the output of each part, and the gradient by it, have relative errors of sums."""
    generator = torch.Generator().manual_seed(2)

    def rounded(t: Tensor) -> Tensor:
        return t + PERTURBATION * t * torch.randn(t.shape, dtype=t.dtype, generator=generator)

    def hook(_: Layer, inputs: tuple, out: Tensor | GeometricTensor) -> Tensor | GeometricTensor | None:
        if not isinstance(out, (Tensor, GeometricTensor)) or not values(out).requires_grad:
            return None
        t = rounded(values(out))
        t.register_hook(rounded)
        return t if isinstance(out, Tensor) else GeometricTensor(t, out.type, out.coords)

    hooks = [part.register_forward_hook(hook) for part in layer.modules()]
    try:
        return results(layer, drawn)
    finally:
        for handle in hooks:
            handle.remove()


def check_results(found: list[Tensor], expected: list[Tensor], what: str, layer: Layer, drawn: Drawn) -> None:
    # Outputs and gradients that the symmetry forces to vanish are rounding errors, of the others or of 1. A norm
    # magnifies those of what vanishes: they may be as large as what errors of a known size lead to.
    largest, magnified = max(float(spaces.size_of(t)) for t in expected), None
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        error = float((a - b).norm() / (largest + b.norm()))
        if error > TOLERANCE:
            magnified = magnified or perturbed(layer, drawn)
            conditioned = (a - b).norm() <= (magnified[i] - b).norm()
            assert conditioned, f"{what}: the error of {f'gradient {i}' if i else 'the output'} is {error:.1e}"


def check_backends(layer: Layer, drawn: Drawn) -> list[str]:
    """Every backend gives what the formula does; returns those that serve."""
    found = dict(served(lambda: results(layer, drawn), layer))
    compute_by(layer, "auto")
    expected = results(layer, drawn, formula=True) if drawn.formula else found.pop("reference", None)
    for name, some in found.items():
        if expected is None:
            expected = some
        check_results(some, expected, name, layer, drawn)
    if expected is not None:
        check_results(results(layer, drawn), expected, "auto", layer, drawn)
    return list(found)


def check_equivariance(layer: Layer, drawn: Drawn) -> None:
    if drawn.error is not None:
        error = drawn.error(layer, drawn.input(layer))
        if error > TOLERANCE:  # of an output that vanishes, rounding errors may be larger than that
            y = results(layer, drawn)[0]
            rounding = float((perturbed(layer, drawn)[0] - y).norm() / spaces.size_of(y))
            assert error < rounding, f"equivariance error {error:.1e}"


@torch.no_grad()
def check_copies(layer: Layer, drawn: Drawn) -> None:
    """What is saved, loaded and exported gives the same."""
    expected = drawn.output(layer, *drawn.tensors)
    other = drawn.layer(seed=-1)
    file = packed(layer.train().state_dict())  # in eval mode escnn's convolutions keep kernels
    other.train().load_state_dict(unpacked(file, weights_only=True))
    layer.eval(), other.eval()
    exports = [layer.export(), pickle.loads(pickle.dumps(layer.export()))]
    for found in (drawn.output(other, *drawn.tensors), *map(drawn.exported, exports)):
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)


@torch.no_grad()
def check_maps(layer: Layer, drawn: Drawn) -> None:
    """Attention maps are the weights of the values in the output, and those of some queries a part of them."""
    if type(layer) not in (GroupSelfAttention, LiftingSelfAttention, GroupCrossAttention, PointSelfAttention):
        return
    if getattr(layer.plain.encoding, "rotates_values", False):  # by each offset
        return
    fields, named = drawn.given(layer, *drawn.tensors)
    y, at_points, plain = layer(*fields, **named).tensor, fields[0].coords is not None, layer.plain
    places = list(range(len(y)) if at_points else itertools.product(*map(range, y.shape[2:])))
    if places == [()]:  # no base space, whose one position has no indices to give
        return

    def maps(places: list, *poses: list) -> Tensor:
        return layer.attention_maps(*fields[:2], places, *poses, **named)

    if isinstance(layer, GroupSelfAttention):
        v = plain.call(fields[0].tensor, plain.positions(fields[0].tensor)).v
    else:
        rows = [t.tensor[None] if t.coords is not None else t.tensor.movedim(1, -1) for t in fields]
        v = plain.to_heads(*(rows if at_points and len(rows) == 1 else [*rows, None][:3]))[2]
    of_all = maps(places)
    made = plain.project(torch.einsum("bmhqjpk,mbkpc->mbqhc", of_all.flatten(6), v.flatten(2, -3)))
    made = made[0] if at_points else made.mT.view_as(y)
    torch.testing.assert_close(torch.where(y == 0, y, made), y, rtol=1e-10, atol=1e-11)  # hidden queries give zeros
    torch.testing.assert_close(maps(places[:1], [0]), of_all[:, :, :1, :1])


@pytest.mark.sampled(27)
def test_drawn(kind, seed):
    drawn = KINDS[kind][0](Draw(f"{seed} {kind}"))
    layer = drawn.layer(seed)
    shapes = {name: tuple(t.shape) for name, t in drawn.arguments.items()}
    print(layer, [tuple(t.shape) for t in drawn.tensors], shapes)
    check_backends(layer, drawn)
    check_equivariance(layer, drawn)
    check_copies(layer, drawn)
    check_maps(layer, drawn)


AROUND_SPACES = spaces.ALL | {
    "D4 sequences": lambda: sequence_space(spaces.PLANE["D4"]().fibergroup),
    "icosahedral sequences": lambda: sequence_space(spaces.LARGE["icosahedral"]().fibergroup),
}


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", AROUND)
@pytest.mark.parametrize("space", AROUND_SPACES)
def test_around_attention(name, space, request):
    if name == "FeatureAttention" and AROUND_SPACES[space]().dimensionality < 2:
        pytest.skip("it is for the plane and for space")
    drawn = around(Draw(f"{request.config.option.hypothesis_seed} {name} {space}"), name, AROUND_SPACES[space]())
    layer = drawn.layer(seed=0)
    print(layer, [tuple(t.shape) for t in drawn.tensors])
    check_equivariance(layer, drawn)
    check_copies(layer, drawn)


def weighted(_, inputs, y):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(y.tensor.shape, generator=generator, dtype=torch.float64)
    return GeometricTensor(y.tensor * weight, y.type)


@pytest.mark.parametrize("kind", ["levels", "heads"])
def test_networks_that_are_not_equivariant_are_found(kind):
    found = []
    for seed in range(6):
        drawn = KINDS[kind][0](Draw(f"{seed}"))
        layer = drawn.layer(seed)
        layer.register_forward_hook(weighted)
        found.append(drawn.error(layer, drawn.input(layer)) > 1e-2)
    assert sum(found) >= 3  # but for trivial groups, and scalars of sequences


def wrong_backend(layer, monkeypatch):
    exact = BACKENDS["blocked"]
    wrong = replace(exact, attention=lambda call: (1 + 1e-8) * exact.attention(call))
    monkeypatch.setitem(BACKENDS, "blocked", wrong)


def wrong_table(layer, _):
    layer.plain.inverse_action[:] = torch.eye(2)


def wrong_maps(layer, monkeypatch):
    exact = layer.attention_maps
    monkeypatch.setattr(layer, "attention_maps", lambda *given: (1 + 1e-8) * exact(*given))


def unsaved_number(layer, _):
    layer.plain.query_weight = 1 + 1e-8


@pytest.mark.parametrize(
    ("check", "spoil", "message"),
    [
        (check_backends, wrong_backend, "blocked: the error of the output is [1-9]"),
        (check_equivariance, wrong_table, "equivariance error [0-9.]+e([+]|-0[0-3])"),
        (check_copies, unsaved_number, "not close"),
        (check_maps, wrong_maps, "not close"),
    ],
)
def test_what_is_wrong_is_found(check, spoil, message, monkeypatch):
    fields = spaces.mixed(spaces.PLANE["D3"]())
    x = torch.randn(1, fields.size, 3, 4, dtype=torch.float64)
    drawn = Drawn(lambda: GroupSelfAttention(fields, fields, 2, 3, head_fields=3), (x,), turned_error)
    layer = drawn.layer(seed=0)
    assert check(layer, drawn) in (None, ["blocked", "dense", "native"], ["blocked", "dense"])
    spoil(layer, monkeypatch)
    with pytest.raises(AssertionError, match=message):
        check(layer, drawn)


def test_errors_that_norms_magnify_are_bounded():
    """Of a network whose output vanishes, with all of its gradients."""
    drawn = KINDS["heads"][0](Draw("12158528 heads"))
    layer = drawn.layer(12158528)
    check_backends(layer, drawn)
    expected = results(layer, drawn)
    with pytest.raises(AssertionError, match="more: the error of the output is"):
        check_results([t + 1e-8 for t in expected], expected, "more", layer, drawn)
