"""Layers and networks as files that need neither this package nor escnn: the same values, for any number of images."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import escnn.nn as en
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

import escnn_attention as ea
from escnn_attention import models
from escnn_attention.exporting import loops
from escnn_attention.exporting.mode import exporting
from escnn_attention.models import compile_package
from tests import spaces
from tests.layers import C4, CASES, Case
from tests.packages import NEEDS_LOOPS, in_onnx, operators, write_down

ON_GRIDS = [name for name, case in CASES.items() if case.on_one_plane]
ON_POINTS = [name for name, case in CASES.items() if case.points and name != "HamiltonianNetwork"]
OTHERS = [n for n, case in CASES.items() if case.keys or (case.arguments and not (case.points or case.training))]
MORE_ON_GRIDS = [name for name in OTHERS if CASES[name].on_grids]
EVERY = [*ON_GRIDS, *(pytest.param(name, marks=NEEDS_LOOPS) for name in ON_POINTS)]


def mixed() -> nn.Module:
    """Modules of escnn and of this package in one network, which ends in a module of escnn's when it is exported."""
    hidden = spaces.regular(C4, 2)
    return en.SequentialModule(
        en.R2Conv(spaces.scalars(C4, 2), hidden, 3, padding=1),
        en.InnerBatchNorm(hidden),
        en.ReLU(hidden),
        ea.GroupSelfAttention(hidden, hidden, 1, 3),
        en.GroupPooling(hidden),
    )


MIXED = Case(mixed, shape=(2, 7, 7))

# What a machine does that has neither package: the file, the inputs and what is expected of them are its arguments.
_ELSEWHERE = """
sys.modules["escnn"] = sys.modules["escnn_attention"] = None
import torch
inputs, named, expected = torch.load(sys.argv[2])
output = torch.export.load(sys.argv[1]).module()(*inputs, **named)
print(float((output - expected).abs().max() / expected.abs().max()))
assert not any(name.split(".")[0] in ("escnn", "escnn_attention") and module for name, module in sys.modules.items())
"""


@pytest.fixture
def written_down(monkeypatch):
    write_down(monkeypatch)


def exported(case: Case, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, list[Tensor], dict[str, Tensor]]:
    """The plain module, its inputs, and what else it takes."""
    module = case.drawn().to(dtype)
    inputs, named = case.exported(lambda *inputs, **named: (inputs, named), *case.inputs(module, dtype=dtype))
    return module.export(), list(inputs), named


def at_points(inputs: list[Tensor], named: dict[str, Tensor]) -> bool:
    return len(inputs) > 1 or any("coords" in name for name in named)


def others(inputs: list[Tensor], named: dict[str, Tensor]) -> list[tuple[list[Tensor], dict[str, Tensor]]]:
    """Other numbers of images; or twice the points, clouds and edges, and the same; of two sets the same."""
    if not at_points(inputs, named):
        more = (lambda t: torch.cat([t, 2 * t, -t[:1]])), (lambda t: t[:1])
        return [(list(map(of, inputs)), {name: of(t) for name, t in named.items()}) for of in more]
    if not inputs:
        return [(inputs, named)]
    twice = {key: torch.cat([value, value]) for key, value in named.items()}
    if "batch" in named:
        twice["batch"] = torch.cat([named["batch"], named["batch"] + 2])
    if "edge_index" in named:
        twice["edge_index"] = torch.cat([named["edge_index"], named["edge_index"] + len(inputs[0])], dim=1)
    return [([torch.cat([t, t.flip(0)]) for t in inputs], twice), (inputs, named)]


def free_sizes(inputs: list[Tensor], named: dict[str, Tensor]) -> Any:
    if not at_points(inputs, named):
        images = {0: Dim("batch", max=2**31 - 1)}  # PyTorch 2.7 needs a bound
        return dict.fromkeys(named, images) | ({"x": images} if inputs else {}) if named else (images,)
    if not inputs:
        return None
    free = {key: {1 if key == "edge_index" else 0: Dim.AUTO} for key in ("x", "coords", *named)}
    if "edge_attr" in named:
        free["edge_attr"] = dict.fromkeys(range(named["edge_attr"].dim() - 1), Dim.AUTO)
    return free


def program_of(plain: nn.Module, inputs: list[Tensor], named: dict[str, Tensor]) -> ExportedProgram:
    free = free_sizes(inputs, named)
    return torch.export.export(plain, tuple(inputs), named, dynamic_shapes=free, strict=False)


def whose(program: ExportedProgram) -> set[str]:
    """Whose the operators of a program are."""
    return {name.split(".")[0] for name in operators(program)}


def assert_same(found: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= tolerance * max(1.0, expected.abs().max())


@torch.no_grad()
def check_outputs(run: Callable[..., Tensor], plain: nn.Module, inputs: list[Tensor], named: dict[str, Tensor]) -> None:
    for tensors, options in others(inputs, named):
        assert_same(run(*tensors, **options), plain(*tensors, **options))


def check_program(program: ExportedProgram, plain: nn.Module, inputs: list[Tensor], named: dict[str, Tensor]) -> None:
    """One of PyTorch's operators only."""
    numbers = {"<built-in function getitem>", "<built-in function add>", "<built-in function mul>"}
    assert "escnn_attention" not in whose(program)
    assert at_points(inputs, named) or whose(program) <= {"aten"} | numbers, whose(program)
    check_outputs(program.module(), plain, inputs, named)


def check_onnx(program: ExportedProgram, plain: nn.Module, inputs: list[Tensor], named: dict[str, Tensor]) -> None:
    """What ONNX is made of a program, which it changes."""
    run = in_onnx(program)

    def first(*tensors: Tensor, **options: Tensor) -> Tensor:
        (found,) = run(*tensors, *options.values())
        return found

    check_outputs(first, plain, inputs, named)


def test_nothing_is_exported_by_itself():
    assert not exporting()
    seen = []

    class Asks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(exporting())
            return x + 1

    torch.export.export(Asks(), (torch.ones(2),), strict=False)
    assert seen == [True]


@pytest.mark.slow
def test_what_is_compiled_is_not_exported():
    class Told(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sin() if exporting() else x.cos()

    x = torch.ones(2)
    assert torch.equal(torch.compile(Told(), backend="eager", fullgraph=True)(x), x.cos())
    for strict in (False, True):
        assert torch.equal(torch.export.export(Told(), (x,), strict=strict).module()(x), x.sin())


@pytest.mark.sampled(14)
@pytest.mark.parametrize("name", [*ON_GRIDS, *ON_POINTS, *OTHERS])
def test_what_is_written_down_is_the_same(name, written_down, monkeypatch):
    plain, inputs, named = exported(CASES[name], torch.float64)
    with torch.no_grad():
        found = plain(*inputs, **named)
        monkeypatch.undo()
        assert_same(found, plain(*inputs, **named), 1e-12)


SEEN = {"radius": 1.5}, {"num_neighbours": 3}, {}, {"normalization": "count"}, {"edge_dim": 2}


@pytest.mark.parametrize("options", SEEN, ids=str)
def test_who_sees_whom_is_written_down(options, written_down, monkeypatch):
    """Edges that are there twice, clouds in any order, fewer points than neighbours, and points that are hidden."""
    fields = spaces.regular(C4, 1)
    encoding = ea.PairKernel(hidden=4) if "normalization" in options else None
    plain = ea.PointSelfAttention(fields, fields, 1, encoding=encoding, **options).double().export()
    x, coords = torch.randn(7, 4, dtype=torch.float64), torch.randn(7, 2, dtype=torch.float64)
    x[5], coords[5] = torch.nan, torch.inf
    mask = torch.arange(7) != 5
    cases = [{"batch": torch.tensor([0, 1, 0, 1, 2, 2, 0]), "mask": mask}, {"mask": mask}]
    if not {"radius", "num_neighbours"} & set(options):
        edges = torch.tensor([[0, 0, 1, 2, 5, 3, 4, 6, 1], [1, 1, 0, 2, 3, 3, 4, 6, 1]])
        cases.append({"edge_index": edges, "mask": mask, "measure": torch.linspace(1, 2, 7, dtype=torch.float64)})
    if "edge_dim" in options:
        shapes = (3, 4, 4, 2), (1, 7, 7, 2), (9, 2)
        cases = [named | {"edge_attr": torch.randn(s).double()} for named, s in zip(cases, shapes, strict=True)]
        cases[2]["edge_attr"][~mask[edges].all(0)] = torch.nan
    with torch.no_grad():
        found = [plain(x, coords, **named) for named in cases]
        monkeypatch.undo()
        for y, named in zip(found, cases, strict=True):
            assert_same(y, plain(x, coords, **named), 1e-12)


@pytest.mark.sampled(1, of="exported files")
@pytest.mark.parametrize(
    "name",
    [
        *("mixed", *(name for name in [*ON_GRIDS, *MORE_ON_GRIDS] if not hasattr(models, name))),
        *(pytest.param(name, marks=NEEDS_LOOPS) for name in ON_POINTS if "Self" in name),
    ],
)
def test_files_take_any_number_and_are_used_where_neither_package_is(name, tmp_path, run_python):
    """A program, its file elsewhere, and what ONNX is made of it: one program for all, which takes seconds to write."""
    plain, inputs, named = exported(MIXED if name == "mixed" else CASES[name])
    program = program_of(plain, inputs, named)
    check_program(program, plain, inputs, named)
    tensors, options = others(inputs, named)[0]
    assert error_elsewhere(tmp_path, run_python, plain, program, *tensors, **options) < 1e-5
    check_onnx(program, plain, inputs, named)


@pytest.mark.exhaustive
@pytest.mark.parametrize("check", [check_program, check_onnx])
@pytest.mark.parametrize("name", [*EVERY, *OTHERS])
def test_files_of_layers_and_networks(name, check):
    plain, *arguments = exported(CASES[name])
    check(program_of(plain, *arguments), plain, *arguments)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", EVERY)
def test_compiled_packages(name, tmp_path):
    """By AOTInductor, which compiles for a minute."""
    plain, inputs, named = exported(CASES[name])
    free = free_sizes(inputs, named)
    file = compile_package(plain, tuple(inputs), tmp_path / "n.pt2", kwargs=named, dynamic_shapes=free)
    check_outputs(torch._inductor.aoti_load_package(str(file)), plain, inputs, named)


@NEEDS_LOOPS
@pytest.mark.exhaustive
@pytest.mark.parametrize("given", ["edges", "clouds"])
def test_compiled_packages_take_masks_and_edges(given, tmp_path):
    """The sizes of all that is known of edges are unknown to the compiler."""
    fields = spaces.regular(C4, 2)
    options = {"edge_dim": 3} if given == "edges" else {"radius": 1.5}
    layer = ea.PointSelfAttention(fields, fields, num_heads=1, **options).eval().export()
    any_size, any_edges = {0: Dim.AUTO}, {1: Dim.AUTO}

    def inputs(number: int, edges: int) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        mask = torch.arange(number) % 4 > 0
        named = {"batch": torch.arange(number) // 3, "mask": mask}
        if given == "edges":
            named = {"edge_index": torch.randint(number, (2, edges)), "edge_attr": torch.randn(edges, 3), "mask": mask}
        return (torch.randn(number, fields.size), torch.randn(number, 2)), named

    args, named = inputs(9, 20)
    shapes = {name: any_edges if name == "edge_index" else any_size for name in ("x", "coords", *named)}
    file = compile_package(layer, args, tmp_path / "layer.pt2", kwargs=named, dynamic_shapes=shapes)
    assert b"packaged_points_float" in file.read_bytes()
    run = torch._inductor.aoti_load_package(str(file))
    for number, edges in ((9, 20), (14, 41), (5, 7)):
        args, named = inputs(number, edges)
        torch.testing.assert_close(run(*args, **named), layer(*args, **named), atol=1e-5, rtol=1e-5)


@pytest.mark.sampled(1, of="exported files")
@pytest.mark.parametrize(
    "name", ["GroupSelfAttention", "AttentiveConv", pytest.param("PointSelfAttention", marks=NEEDS_LOOPS)]
)
def test_strict_programs(name):
    """Those that PyTorch reads Python for, in place of running it: for images, for as many as there are."""
    plain, inputs, named = exported(CASES[name])
    free = free_sizes(inputs, named) if len(inputs) > 1 else None
    program = torch.export.export(plain, tuple(inputs), named, dynamic_shapes=free, strict=True)
    assert "escnn_attention" not in whose(program)
    for tensors, options in others(inputs, named) if free else [(inputs, named)]:
        assert_same(program.module()(*tensors, **options), plain(*tensors, **options))


@NEEDS_LOOPS
@pytest.mark.sampled(1, of="programs")
def test_programs_of_points_have_gradients():
    plain, inputs, named = exported(CASES["PointSelfAttention"], torch.float64)
    run = program_of(plain, inputs, named).module()
    inputs = [t.requires_grad_() for t in inputs]
    found, expected = (torch.autograd.grad(made(*inputs, **named).square().sum(), inputs) for made in (run, plain))
    for of_program, of_layer in zip(found, expected, strict=True):
        assert_same(of_program, of_layer, 1e-10)


@pytest.mark.slow
def test_without_loops_there_are_no_programs_of_points(monkeypatch):
    monkeypatch.setattr(loops, "_OLDEST", "99.0")
    plain, inputs, named = exported(CASES["PointSelfAttention"])
    with pytest.raises(NotImplementedError, match=r"PyTorch .*, needed 99\.0"):
        program_of(plain, inputs, named)


def test_exported_modules_need_what_their_parts_are_of(without_escnn):
    """Unlike their files."""
    plain, inputs, _ = exported(MIXED)
    with pytest.raises(AssertionError, match="escnn"):
        without_escnn(plain, *inputs)


@torch.no_grad()  # with gradients, products outside of exports cannot be traced
def test_an_operator_of_this_package_would_be_noticed(monkeypatch):
    plain, (x,), _ = exported(CASES["LiftingSelfAttention"])
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: False)
    program = torch.export.export(plain, (x,), strict=False)
    assert "escnn_attention" in whose(program)


@torch.no_grad()
def error_elsewhere(folder, run_python, plain: nn.Module, program: ExportedProgram, *inputs: Tensor, **named: Tensor):
    """How far the file of a program is off where neither package is; what runs ONNX knows of no package."""
    torch.save((inputs, named, plain(*inputs, **named)), folder / "inputs.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # as of tensors that are parts of others
        torch.export.save(program, folder / "n.pt2")
    return float(run_python(_ELSEWHERE, folder / "n.pt2", folder / "inputs.pt"))


@pytest.mark.parametrize("name", ["GroupSelfAttention", "AttentiveConv", "PointSelfAttention"])
def test_torchscript_is_refused(name):
    plain = nn.Sequential(CASES[name].drawn().export())
    with pytest.raises(NotImplementedError, match=r"torch\.jit\.script: .*torch\.export\.export"):
        torch.jit.script(plain)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_traces_before_and_after_a_call():
    plain, (x,), _ = exported(CASES["GroupSelfAttention"])
    for followed in (False, True, False):  # PyTorch checks the trace by one without gradients
        with torch.set_grad_enabled(followed):
            assert_same(torch.jit.trace(plain, x)(x), plain(x))
