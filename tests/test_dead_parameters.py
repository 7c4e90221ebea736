"""Every number that is learned changes what comes out: of each parameter, each entry."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from escnn import gspaces
from escnn.nn import FieldType

import escnn_attention as ea
from tests import spaces
from tests.layers import CASES, Case, on_points, vectors
from tests.nn import spheres
from tests.nn.points import ENCODINGS, mixed

C3, D3, D4 = gspaces.rot2dOnR2(3), gspaces.flipRot2dOnR2(3), gspaces.flipRot2dOnR2(4)
SO2 = gspaces.rot2dOnR2(-1)
SCALES = ea.Scales(2, 2)


def dead_entries(case: Case, draws: int = 3) -> dict[str, int]:
    """How many entries of each parameter have a gradient of zero, or rounding errors of one, whatever the input is."""
    torch.manual_seed(0)
    module = case.make().double().train()
    for part in module.modules():
        if isinstance(part, torch.nn.modules.dropout._DropoutNd):
            part.eval()
    parameters = dict(module.named_parameters())
    if not parameters:
        return {}
    largest = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
    for _ in range(draws):
        with torch.no_grad():
            for parameter in module.parameters():
                # Of either sign, so that no activation is off in every draw.
                parameter.add_(0.1 * torch.randn_like(parameter)).mul_(torch.randn_like(parameter).sign())
        inputs = [t + 0.5 * torch.randn_like(t) for t in case.inputs(module)]
        if case.unit:
            inputs[1] = torch.nn.functional.normalize(inputs[1], dim=-1)
        out = case.output(module, *inputs)
        found = torch.autograd.grad((out * torch.randn_like(out)).sum(), list(parameters.values()), allow_unused=True)
        for name, gradient in zip(parameters, found, strict=True):
            if gradient is not None:
                largest[name] = torch.maximum(largest[name], gradient.abs())
    scale = max((float(t.max()) for t in largest.values()), default=1.0)
    return {name: int(dead) for name, t in largest.items() if (dead := (t <= 1e-12 * scale).sum())}


def case_of(make: Callable[[], torch.nn.Module], *, points: bool = False, unit: bool = False) -> Case:
    return on_points(make, unit=unit) if points else Case(make, shape=(2, 5, 5))


ELSEWHERE_ALIVE = {
    "GroupCNN": "spatial.weight",  # of kernels that reach beyond the last, small maps, as published
    "ResNet44": "spatial.weight",
    "attention_from_convolution": "pose_embedding",  # where the softmax of sharp heads is not 0 or 1 in all digits
    "HamiltonianNetwork": "potential.head.perceptron.3.bias",  # the zero of the energy: a potential is any module
}
"""Parameters that are alive on larger grids, for other weights, or in another use of a module."""


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", CASES)
def test_layers_and_networks(name):
    dead = dead_entries(CASES[name], draws=12 if "Net" in name or "CNN" in name else 3)
    assert [parameter for parameter in dead if not parameter.endswith(ELSEWHERE_ALIVE.get(name, "no such"))] == []


GRID_ENCODINGS = {
    **{name: lambda name=name: name for name in ("mlp", "separable", "rotary", "absolute", "none")},
    "fourier": lambda: ea.FourierEncoding(3),
    "quadratic": ea.QuadraticEncoding,
    "constant keys": lambda: ea.RotaryEncoding(constant_keys=True),
    "one frequency": lambda: ea.RotaryEncoding(1),
}
GROUPS = {
    "D3": lambda: (spaces.mixed(D3), spaces.mixed(D3), {}),
    "scalars": lambda: (spaces.scalars(D4, 3), spaces.regular(D4, 2), {}),
    "trivial": lambda: (*2 * [spaces.scalars(gspaces.trivialOnR2(), 2)], {}),
    "SO(2)": lambda: (vectors(SO2), vectors(SO2), {"samples": 5}),
}


def adds_up(encoding, query: str, keys: str = "all", normalization: str = "softmax") -> bool:
    """Whether the output sees queries, or values, of all poses added up: of fields without an invariant, nothing."""
    kernel = isinstance(encoding, ea.PairKernel)
    of_queries = normalization == "count" and keys == "all" and not (kernel and "concat" in str(encoding))
    of_values = keys == "own" and kernel and encoding.content == "none" and encoding.is_linear
    return query == "all" and (of_queries or of_values)


def layer_for(layer, group: str, encoding, **options) -> Callable[[], torch.nn.Module]:
    """What makes a layer for one of the groups, to scalars where nothing tells its output poses apart."""
    in_type, out_type, more = GROUPS[group]()
    modes = [options.get(name, "softmax") for name in ("query", "keys", "normalization")]
    if adds_up(encoding, *modes):
        in_type = spaces.scalars(in_type.gspace, 2)
    if options["query"] == "all" and (encoding == "none" or getattr(encoding, "location", "") == "none"):
        out_type = spaces.scalars(out_type.gspace, 2)
    return lambda: layer(in_type, out_type, 2, head_fields=4, encoding=encoding, **options, **more)


@pytest.mark.sampled
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("query", ["own", "all"])
@pytest.mark.parametrize("keys", ["own", "all"])
@pytest.mark.parametrize("encoding", [*GRID_ENCODINGS, "convolutional"])
@pytest.mark.parametrize("bias", [True, False])
def test_modes_on_grids(group, query, keys, encoding, bias):
    if encoding == "convolutional" and (group == "SO(2)" or not bias):
        pytest.skip("it is for finite groups, and begins with a bias")
    options = {"query": query, "keys": keys, "bias": bias, "kernel_size": 3}
    make = layer_for(ea.GroupSelfAttention, group, GRID_ENCODINGS.get(encoding, lambda: encoding)(), **options)
    assert dead_entries(case_of(make)) == {}


POINT_ENCODINGS = {
    **GRID_ENCODINGS,
    **{name: make for name, make in ENCODINGS.items() if isinstance(make(), ea.PairKernel)},
    "published": lambda: ea.PairKernel(hidden=3, biases=True, last_activation=True),
    "published 2232": lambda: ea.PairKernel("concat", "raw", "mlp", hidden=3, biases=True, last_activation=True),
    "biases": lambda: ea.PairKernel("dot", "mlp", "mlp", hidden=3, biases=True),
    "raw product": lambda: ea.PairKernel("dot", "raw", "product", hidden=3),
    "raw location": lambda: ea.PairKernel("none", "raw", "sum", hidden=3),
    "location network": lambda: ea.PairKernel("none", "mlp", "mlp", hidden=3),
    "concat, raw": lambda: ea.PairKernel("concat", "raw", "sum", hidden=3),
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("query", ["own", "all"])
@pytest.mark.parametrize("keys", ["own", "all"])
@pytest.mark.parametrize("encoding", POINT_ENCODINGS)
@pytest.mark.parametrize("normalization", ["softmax", "count"])
@pytest.mark.parametrize("bias", [True, False])
def test_modes_between_points(group, query, keys, encoding, normalization, bias):
    options = {"query": query, "keys": keys, "bias": bias, "normalization": normalization}
    make = layer_for(ea.PointSelfAttention, group, POINT_ENCODINGS[encoding](), **options)
    assert dead_entries(case_of(make, points=True)) == {}


@pytest.mark.sampled
@pytest.mark.parametrize("query", ["own", "all"])
@pytest.mark.parametrize("encoding", ["mlp", "fourier", "none", "raw sum", "2232", "location only", "LieTransformer"])
@pytest.mark.parametrize("normalization", ["softmax", "count"])
@pytest.mark.parametrize("kind", ["convolution", "lifting convolution", "sphere", "lifting to the sphere"])
def test_convolutions_and_the_sphere(query, encoding, normalization, kind):
    options = {"query": query, "normalization": normalization, "head_fields": 3}
    lifts = "lifting" in kind or adds_up(POINT_ENCODINGS[encoding](), query, "all", normalization)
    on_sphere = "sphere" in kind
    if on_sphere:
        in_type = (spheres.scalars if lifts else spheres.mixed)(spheres.ROTATIONS)
        # Without directions, or with linear functions of them, there is nothing of higher degrees.
        flat, linear = encoding == "none" and (lifts or query == "all"), encoding == "raw sum" and lifts
        degrees = [0] if flat else [0, 1] if linear else [0, 1, 2]
        out_type = FieldType(spheres.ROTATIONS, [spheres.irrep(spheres.ROTATIONS, degree) for degree in degrees])
        layer = ea.SphereSelfAttention
        options["samples"] = 4
    else:
        in_type = spaces.scalars(C3, 2) if lifts else mixed(C3)
        layer, out_type = ea.PointAttentiveConv, mixed(C3)
        options["kernel_features"] = 3

    def make():
        return layer(in_type, out_type, 2, encoding=POINT_ENCODINGS[encoding](), **options)

    assert dead_entries(case_of(make, points=True, unit=on_sphere)) == {}


@pytest.mark.sampled
@pytest.mark.parametrize("encoding", ["mlp", "separable", "rotary", "none"])
@pytest.mark.parametrize("query", ["own", "all"])
@pytest.mark.parametrize("interval", [1, 2])
@pytest.mark.parametrize("measure", ["haar", "printed"])
def test_dilations(encoding, query, interval, measure):
    fields = SCALES.repeat(spaces.regular(C3, 1))
    options = {"head_fields": 3, "query": query, "interval": interval, "measure": measure}
    make = lambda: ea.DilationSelfAttention(fields, fields, SCALES, 2, 3, encoding=encoding, **options)  # noqa: E731
    assert dead_entries(case_of(make)) == {}


def test_dead_entries_are_found():
    """A row that nobody reads, a bias in front of a softmax, and a parameter that is not in use at all."""

    class Wrong(ea.SiLU):
        def __init__(self, in_type):
            super().__init__(in_type)
            self.unread, self.shift = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2))
            self.unused = torch.nn.Parameter(torch.ones(4))

        def forward(self, x):
            y = x.tensor.flatten(1)[:, :2] * self.unread[:2]
            return (y + self.shift[:1]).softmax(-1) * self.shift[1]

    assert dead_entries(case_of(lambda: Wrong(spaces.scalars(C3, 2)))) == {"unread": 1, "shift": 1, "unused": 4}
