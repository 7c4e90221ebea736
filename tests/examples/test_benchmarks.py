"""The benchmark runs, writes what it says, and judges right."""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("matplotlib")
from typer.testing import CliRunner

from examples.benchmarks import attention, curves, files, growth, measure, points, profile
from examples.benchmarks.cli import COMMANDS, app
from examples.benchmarks.curves import Curve, follow, show, slope
from examples.benchmarks.layers import CASES, QUICK, Case, layers
from examples.benchmarks.measure import Conditions, Result, ratio
from examples.benchmarks.references import CheckoutError, gsa, import_from, lie_transformer, octic_block
from examples.benchmarks.report import Check, Report, Run, cost, size, time
from examples.benchmarks.subjects import (
    clouds,
    convolution,
    gspace,
    nearest,
    plain_attention,
    torch_block,
    widened,
    with_hub,
)

ROOT = Path(__file__).parents[2]
PLACE = {"device": "cpu", "dtype": torch.float32}


def result(*seconds, peak=1_000_000):
    return Result.of([{"first": 2 * s, "steps": [s, 3 * s], "peak": peak} for s in seconds])


@pytest.fixture
def in_this_process(monkeypatch):
    """No other is asked."""
    monkeypatch.setattr(measure, "ask", lambda subjects, conditions: [measure.attempt(s, conditions) for s in subjects])


@pytest.fixture
def quickly(in_this_process, tmp_path):
    """A command with ``--quick`` that measures in this process: what it prints and what it writes."""
    threads = torch.get_num_threads()

    def run(*arguments):
        found = CliRunner().invoke(app, [*arguments, "--quick", "--out", str(tmp_path)])
        assert found.exit_code == 0, found.output
        files = sorted(tmp_path.glob("*.json"))
        return found.output, {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in files}

    yield run
    torch.set_num_threads(threads)


@pytest.mark.sampled(4, of="commands of the examples")
def test_layers(tmp_path, monkeypatch, capsys, quick_path):
    """The program, with a process of its own to measure in."""
    for name, value in {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0", "PYTHONPATH": quick_path}.items():
        monkeypatch.setenv(name, value)
    program = ROOT / "examples" / "benchmarks"
    monkeypatch.setattr(sys, "argv", [str(program), "layers", "--quick", "--out", str(tmp_path)])
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(program), run_name="__main__")
    printed = capsys.readouterr()
    assert not ended.value.code, printed.err
    stored = json.loads((tmp_path / "layers.json").read_text(encoding="utf-8"))
    assert stored["environment"].keys() >= {"hardware", "versions"}
    assert stored["conditions"].keys() >= {"device", "dtype", "threads", "seed", "repeats"}
    assert (stored["checks"], stored["notes"]) == ([], [])  # nothing to compare with, and nothing failed
    assert len(stored["results"]) == 5  # a convolution for each, and plain attention for the global one
    assert all(0 < result["seconds"] <= result["median_seconds"] for result in stored["results"].values())
    assert all(case.name in printed.out for case in QUICK)


POINTS = {"points", "points-edges", "points-training"}
RUNS = {
    "backends": ({"backends"}, ()),
    "scaling": ({"scaling"}, ("scaling_pixels", "scaling_group")),
    "files": ({"files"}, ()),
    "step --case d4-96 --query own": ({"step-d4-96"}, ()),
    "dense": ({"dense"}, ()),
    "rotary": ({"rotary"}, ()),
    "blocks": ({"blocks"}, ("blocks",)),
    "fields": ({"fields"}, ()),
    "attentive": ({"attentive", "attentive-all-cnn-c"}, ("attentive",)),
    "points": (POINTS, ("points_edges_points", "points_edges_neighbours")),
    "frames": ({"points-frames"}, ()),
    "graphs": ({"graphs"}, ()),
    "networks": ({"networks"}, ()),
    "others": ({"others"}, ()),
}
"""Commands, the reports that each writes, and the pictures."""


@pytest.mark.sampled(4, of="commands of the examples")
@pytest.mark.parametrize("command", RUNS)
def test_commands_report_what_they_measured(quickly, tmp_path, monkeypatch, command):
    """Costs that are measured and ratios of these; a backend that cannot serve a case is reported as that."""
    pytest.importorskip("onnxruntime")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    printed, reports = quickly(*command.split())
    names, pictures = RUNS[command]
    assert printed
    assert reports.keys() == names
    for report in reports.values():
        assert report["notes"] == []  # nothing failed
        results = report["results"]
        for name, result in results.items():
            if "failure" in result:
                assert command == "backends"
                assert "cannot serve this call" in result["failure"]
                assert name.endswith(("triton", "dense", "standard", "native", "linear"))
            else:
                assert 0 < result["seconds"] <= result["median_seconds"]
        for pair, factors in report["ratios"].items():
            one, other = (results[name] for name in pair.split(" / "))
            assert factors["seconds"] == pytest.approx(one["seconds"] / other["seconds"])
        curves = [curve for family in report.get("curves", {}).values() for curve in family]
        assert all(point["seconds"] > 0 for curve in curves for point in curve["points"])
        assert results or curves
        for check in report["checks"]:
            peaks = [result["peak_bytes"] / 1e9 for result in results.values()]
            assert check["unit"] != "GB" or any(check["value"] == pytest.approx(peak) for peak in peaks)
    for picture in pictures:
        assert (tmp_path / f"{picture}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.sampled(4, of="commands of the examples")
def test_ceilings(quickly):
    printed, stored = quickly("ceilings")
    stored = stored["ceilings"]
    rates = stored["rates"]
    assert all(rate > 0 for rate in rates["ceiling"].values())
    for case in QUICK:
        assert case.name in printed
        done = rates[case.name]["operations_per_second"] * stored["results"][case.name]["seconds"]
        assert done == pytest.approx(case.operations())


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", files.FORMS)
@pytest.mark.parametrize("name", files.QUICK)
def test_files_do_what_their_layers_do(name, form):
    pytest.importorskip("onnxruntime")
    example = files.QUICK[name](PLACE)
    plain = example.module.eval().export()
    with torch.no_grad():
        found, expected = files.FORMS[form](plain, example)(), plain(*example.inputs, **example.named)
    found = torch.as_tensor(found[0]) if form == "ONNX" else found
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.fixture
def asked(monkeypatch):
    """What fresh processes would be asked for, with as many seconds as a shape says; one row of pixels fails."""
    asked = []

    def ask(subjects, conditions):
        asked.extend(subjects)
        found = []
        for subject in subjects:
            seconds = subject.args[1][0] if subject.func is convolution else 1
            slow = subject.func in (lie_transformer, gsa)
            steps = [float(seconds) * (5 if slow else 1)]
            found.append({"first": 1.0, "steps": steps, "peak": 50 if slow else 10})
            if seconds == 1 and subject.func is convolution:
                found[-1] = {"failure": "too small"}
        return found

    monkeypatch.setattr(measure, "ask", ask)
    return asked


def run_of(folder="nowhere", repeats=1, **checkouts):
    return Run(Conditions(repeats=repeats), Path(folder), checkouts)


def options_of(subject):
    return dict(zip(("space", "points", "batch"), subject.args, strict=False)) | subject.keywords


def test_points_are_judged_against_the_reference(asked, monkeypatch):
    report = points.networks(run_of(lie_transformer="somewhere"))
    # The kernel of the reference and the MLP; the network that sees no positions has no target.
    assert [check.value for check in report.checks] == 4 * [5.0]
    assert all(check.met for check in report.checks)
    assert all("no encoding" not in check.name for check in report.checks)
    assert len(report.results) == 5
    assert {factors["seconds"] for factors in report.data["ratios"].values()} == {5.0}
    monkeypatch.setattr(points, "_FASTER", 5.1)
    checks = points.networks(run_of(lie_transformer="somewhere")).checks
    assert [check.met for check in checks] == 2 * [False, True]
    assert points.networks(run_of()).checks == []


def test_sizes_of_the_points(asked):
    points.networks(run_of(lie_transformer="somewhere"))
    reference, *ours = asked
    assert reference.args == (20, 2, 16)
    sizes = {"channels": 64, "num_layers": 4, "num_heads": 8}
    assert reference.keywords == {**sizes, "checkout": "somewhere"}
    for network in ours:
        assert network.args == ("c2", 20, 16)
        options = network.keywords
        assert (options["fields"], options["num_blocks"], options["num_heads"]) == tuple(sizes.values())
    asked.clear()
    points.frames(run_of(platonic="somewhere"))
    theirs, frames, each, one = asked
    assert one.args == each.args == frames.args
    assert {
        name: (each.keywords[name], option) for name, option in one.keywords.items() if option != each.keywords[name]
    } == {"shared_scores": (False, True)}
    count, batch, channels, head = theirs.args
    assert (count, batch) == frames.args[1:] == (512, 4)
    order, options = gspace(frames.args[0]).fibergroup.order(), frames.keywords
    assert channels == order * options["fields"] == 192
    assert channels // head == order * options["num_heads"]
    assert (options["keys"], options["encoding"], options["head_fields"]) == ("own", "rotary", head)
    asked.clear()
    points.large(run_of(repeats=3))
    (large,) = asked
    assert large.args == ("octahedral", 20000, 1)
    assert large.keywords["attention"] == {"num_neighbours": 32}


def test_sizes_of_the_blocks(asked, monkeypatch, tmp_path):
    monkeypatch.setattr(attention, "_products", lambda _: 1)
    report = attention.blocks(run_of(tmp_path, octic_vits="somewhere"))
    theirs = [subject for subject in asked if subject.func is octic_block]
    plain = [subject.args for subject in asked if subject.func is torch_block]
    assert [subject.args for subject in theirs] == plain[:4] == [(8, n, c) for n in (256, 512) for c in (384, 768)]
    d4 = [subject for subject in asked if subject.args[0] == "d4"]
    for expanded, rotary, bare in zip(d4[::3], d4[1::3], d4[2::3], strict=True):
        assert rotary.args == bare.args == expanded.args
        assert bare.keywords == rotary.keywords | {"encoding": "none"}
        assert expanded.keywords == rotary.keywords | {"form": "expanded"}
    assert [check.met for check in report.checks if "octic" in check.name] == 4 * [True]
    asked.clear()
    attention.blocks(run_of(tmp_path))
    assert not [subject for subject in asked if subject.func is octic_block]


def test_edges_of_the_curves():
    for curve in growth.by_points(32):
        options = options_of(curve.subject(32 * 1000))
        assert options["points"] == 1000
        assert 32 in (options.get("num_neighbours"), options.get("batch"))
    for curve in growth.by_neighbours(4000):
        options = options_of(curve.subject(16 * 4000))
        assert options["points"] == 4000
        assert 16 in (options.get("num_neighbours"), options.get("batch"))
    coords, batch = clouds(30, 1, 2, PLACE)
    assert batch is None
    edges = nearest(coords, 5)
    assert edges.shape == (2, 150)
    distances = torch.cdist(coords, coords)
    within = distances[edges[1], edges[0]].view(30, 5).max(1).values
    assert ((distances <= within[:, None]).sum(1) == 5).all()
    uneven = with_hub(edges)
    assert uneven[1].bincount().tolist() == [30] + 29 * [4]
    assert uneven[0][uneven[1] == 0].tolist() == list(range(30))
    assert clouds(3, 2, 3, PLACE)[1].tolist() == [0, 0, 0, 1, 1, 1]


NETWORK = """
import torch

class EquivariantTransformer(torch.nn.Module):
    def __init__(self, dim_input, dim_output, dim_hidden, num_layers, num_heads, group, liftsamples, kernel_dim):
        super().__init__()
        assert (dim_hidden, num_layers, num_heads, liftsamples, kernel_dim) == (8, 1, 2, 2, 16)
        self.map, self.size = torch.nn.Linear(dim_input, dim_output), group.size

    def forward(self, cloud):
        coords, x, there = cloud
        assert coords.shape == (*there.shape, 2) == (*self.size(coords), 2)
        return self.map(x).mean(1)
"""
GROUPS = """
class SE2:
    def size(self, p):
        return tuple((*p.shape[:2]))
"""


@pytest.fixture
def lie(tmp_path, monkeypatch):
    """Checkouts of a network that has nothing of the published one but its signature, and of groups for it."""
    for folder, name, text in (
        ("lie/eqv_transformer", "eqv_attention", NETWORK),
        ("lie/LieConv/lie_conv", "lieGroups", GROUPS),
    ):
        package = tmp_path / folder
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("")
        (package / f"{name}.py").write_text(text)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    yield tmp_path / "lie"
    for name in list(sys.modules):
        if name.partition(".")[0] in {"eqv_transformer", "lie_conv"}:
            del sys.modules[name]


def lie_network(checkout):
    sizes = {"channels": 8, "num_layers": 1, "num_heads": 2}
    return lie_transformer(4, 2, 2, **sizes, checkout=str(checkout))


def test_the_line_that_is_no_python_is_mended(lie):
    with pytest.raises(SyntaxError):
        compile(GROUPS, "lieGroups.py", "exec")
    lie_network(lie)(PLACE)()
    folder = lie / "LieConv"
    assert (folder / "lie_conv" / "lieGroups.py").read_text() == GROUPS
    assert not list(folder.rglob("lieGroups*.pyc"))


def test_a_lie_transformer_that_lacks_something(lie):
    def says(message, folder=lie):
        with pytest.raises(CheckoutError, match=re.escape(message)):
            lie_network(folder)

    says(f"{lie}/LieConv is no checkout of eqv_transformer", lie / "LieConv")
    (lie / "LieConv" / "lie_conv" / "lieGroups.py").unlink()
    says("is no checkout of LieConv: it has no file lie_conv/lieGroups.py")
    shutil.rmtree(lie / "LieConv")
    says("no folder LieConv/lie_conv: get the submodule")


def test_what_is_counted():
    """By walking through the formula: batch, heads, output and query poses, positions, keys, channels."""
    case = Case(4, 6, 2, 3, "all", "mlp", faster=1, smaller=1)
    by_hand = 2 * 9 * 4 * 4 * 36 * (4 * 9)
    assert case.scores() == by_hand
    assert case.operations() == by_hand * 10 * 2 * (2 + 5)
    assert replace(case, query="own", kernel_size=None).scores() == 2 * 9 * 4 * 36 * (4 * 36)
    assert case.numbers() == 12 * 2 * 9 * 10 * 4 * 36


@pytest.mark.usefixtures("in_this_process")
def test_a_checkout_that_lacks_something_ends_in_one_clear_line(tmp_path):
    run = CliRunner().invoke(app, ["layers", "--quick", "--out", str(tmp_path / "out"), "--g-selfatt", str(tmp_path)])
    assert run.exit_code == 2
    assert f"{tmp_path} is no checkout of g_selfatt" in run.output
    assert len(run.output.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_a_module_that_a_checkout_needs_is_named(tmp_path, monkeypatch):
    package = tmp_path / "checked_out"
    package.mkdir()
    (package / "__init__.py").write_text("import no_such_module_anywhere\n")
    monkeypatch.setattr(sys, "path", sys.path.copy())
    with pytest.raises(CheckoutError, match="needs the module no_such_module_anywhere"):
        import_from(str(tmp_path), "checked_out")
    (package / "__init__.py").write_text("")
    (module,) = import_from(str(tmp_path), "checked_out")
    assert module.__name__ == "checked_out"
    other = tmp_path / "other"
    (other / "checked_out").mkdir(parents=True)
    with pytest.raises(CheckoutError, match="not from"):
        import_from(str(other), "checked_out")


def test_ratio():
    slow, fast = result(6.0, 4.0, peak=300), result(1.0, 2.0, peak=100)
    assert (slow.seconds, slow.median_seconds, slow.first_seconds) == (4.0, 9.0, 8.0)
    assert ratio(slow, fast) == {"seconds": 4.0, "median_seconds": 9.0 / 2.5, "peak_bytes": 3.0}
    assert ratio(slow, result(1.0, peak=0))["peak_bytes"] is None
    assert ratio(slow, Result(failure="no")) == dict.fromkeys(measure.COSTS)
    assert Result(failure="no").as_dict() == {"failure": "no"}
    assert "failure" not in slow.as_dict()


@pytest.mark.parametrize(
    ("value", "relation", "met"),
    [(4.0, "≥", True), (3.9, "≥", False), (4.0, "≤", True), (4.1, "≤", False), (None, "≥", False), (None, "≤", False)],
)
def test_check(value, relation, met):
    check = Check("what", value, relation, 4.0)
    assert check.met is met
    assert ("✓" in check.cell()) is met
    assert "4" in check.cell()


def test_cells_and_tables(tmp_path):
    assert [time(None), time(0.0123), time(1.234)] == ["–", "12.3 ms", "1.23 s"]
    assert [size(None), size(2.5e6), size(1.62e9)] == ["–", "2 MB", "1.62 GB"]
    assert cost(Result(failure="no")) == ["failed", "–"]
    report = Report("name", run_of(tmp_path))
    report.table("title", ["layer", "time"], [["a", "1 s"], ["b", "2 s"]])
    (made,) = report.tables
    assert made.row_count == 2
    assert [column.justify for column in made.columns] == ["left", "right"]
    assert Check("what", 1.0, "≤", 1.1, "").cell().startswith("1 (≤ 1.1)")
    curve = Curve("a", lambda n: partial(convolution, "c4", (n, n), 1), points={2: result(1.0), 4: result(4.0)})
    show(report, [curve], "pixels", (1,), title="of pixels", picture="a.png", caption="all of them")
    assert list(report.tables[1].columns[1].cells) == ["1 s, 1 MB", "4 s, 1 MB", "2.00, 0.00"]
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_sizes_of_the_issue():
    assert [(case.faster, case.smaller) for case in CASES] == [(4, 6), (5, 20), (4, 25), (10, 15), (10, 6), (22, 25)]
    assert widened(10) == 48
    for case, queries in ((CASES[3], 3136), (replace(CASES[3], query="own"), 784)):
        (plain,) = (subject for name, subject in case.others({}).items() if name.startswith("plain attention"))
        assert plain.args == (1, 9, 4, queries, 3136, 48)


def test_layers_with_a_reference_in_common_share_its_runs(asked, tmp_path):
    report = layers(run_of(tmp_path, g_selfatt="somewhere"))
    references = [subject for subject in asked if subject.func is gsa]
    assert len(references) == 4
    assert len({subject.args for subject in references}) == 4
    # Six layers against the reference in time and memory, and two against the convolution.
    assert len(report.checks) == 14
    assert [check.met for check in report.checks[:4]] == [True, False, True, False]
    assert len(report.tables) == 2


def test_spaces():
    assert [gspace(name).fibergroup.order() for name in ("c1", "c4", "d4", "octahedral")] == [1, 4, 8, 24]
    assert (gspace("d4 sequence").dimensionality, gspace("d4 sequence").fibergroup.order()) == (1, 8)
    with pytest.raises(ValueError, match="'so3'"):
        gspace("so3")


@pytest.mark.skipif(shutil.which("bash") is None, reason="it needs bash")
@pytest.mark.parametrize(("begun", "run"), [(0, True), (58, False)])
def test_a_run_on_a_gpu_ends_in_time(tmp_path, begun, run):
    python = tmp_path / "python3"
    python.write_text('#!/bin/sh\necho "ran $*"\n')
    python.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SECONDS": str(begun)}
    command = ["bash", str(ROOT / "examples" / "benchmarks" / "on_gpu.sh"), str(tmp_path / "out"), "--minutes", "1"]
    output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    stages = re.findall(r"^(ran|not begun:) .*(-m pytest|examples/benchmarks \w+)", output, re.MULTILINE)
    assert {how for how, _ in stages} == {"ran" if run else "not begun:"}
    first, others = (
        "frames frames networks graphs",
        "dense backends points layers rotary others fields attentive layers",
    )
    commands = [[f"examples/benchmarks {command}" for command in some.split()] for some in (first, others)]
    assert [what for _, what in stages] == ["-m pytest", *commands[0], "-m pytest", *commands[1]]


def test_minutes_are_a_number():
    command = ["bash", str(ROOT / "examples" / "benchmarks" / "on_gpu.sh"), "out", "--minutes", "soon"]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == 2
    assert "--minutes: got soon, needed a positive integer" in found.stderr


def square(n):
    return partial(convolution, "c4", (n, n), 1)


def test_subjects_take_turns(asked):
    a, b, broken = square(2), square(3), square(1)
    results = measure.measure({"a": a, "broken": broken, "b": b}, Conditions(repeats=3))
    # One that failed is not tried again.
    assert asked == [a, broken, b, a, b, a, b]
    assert len(results["a"].runs) == 3
    assert results["b"].seconds == 3.0
    assert results["broken"].failure == "too small"


def test_checkouts_have_processes_of_their_own(monkeypatch):
    orders = []
    monkeypatch.setattr(
        measure, "ask", lambda subjects, _: orders.append(subjects) or [{"failure": ""}] * len(subjects)
    )
    theirs = [partial(gsa, 2, 3, 1, checkout=name) for name in ("one", "two")]
    subjects = {"one": theirs[0], "ours": square(2), "two": theirs[1], "also ours": square(3)}
    measure.measure(subjects, Conditions().hurried())
    assert orders == [[theirs[0]], [subjects["ours"], subjects["also ours"]], [theirs[1]]]


def test_curves_end_where_they_take_too_long(asked, monkeypatch):
    monkeypatch.setattr(curves, "LIMIT", 3.5)
    curve = Curve("slow", square)
    follow([curve], [2, 3, 4, 5], run_of())
    assert list(curve.points) == [2, 3, 4]
    assert "more than 3.5 s" in curve.stopped
    failing = Curve("failing", square)
    follow([failing], [1, 2], run_of())
    assert failing.points == {}
    assert "too small" in failing.stopped


def test_the_readme_has_every_command():
    page = (ROOT / "examples" / "benchmarks" / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == list(COMMANDS)


def test_slope():
    assert slope([1, 2, 4], [7, 1, 8]) == pytest.approx(3)
    assert slope([1], [1]) is None
    assert slope([1, 2, 4], [1, 5, 16], 2) == pytest.approx(2)
    assert slope([1, 2], [1, 2], 2) == pytest.approx(1)
    assert slope([1, 2, 4], [1, 0, 16], 2) == pytest.approx(2)
    assert slope([1, 2, 4], [0, 2, 16], 2) is None
    assert slope([1, 2], [0, 1]) is None


def test_what_kills_a_process_is_reported(monkeypatch):
    monkeypatch.setattr(measure.sys, "executable", shutil.which("false"))
    found = measure.measure({"attention": partial(plain_attention, 1, 1, 1, 1, 1, 1)}, Conditions(repeats=1))
    assert "status 1" in found["attention"].failure


FREED = """
import torch
from examples.benchmarks.measure import PeakMemory

memory = PeakMemory("cpu")
before = memory.read()
block = torch.ones(2**24)
del block
print(memory.read() - before)
"""


def test_peak_memory_is_seen_after_it_was_freed(run_python):
    """Of a process of its own, as those are that benchmarks measure: its peak so far may not be reset."""
    assert int(run_python(FREED)) > 0.9 * 2**26


def test_profile_tells_kinds_apart():
    from escnn import nn

    from escnn_attention import FieldLayerNorm, GroupSelfAttention, SiLU

    space = gspace("c2")
    kind = nn.FieldType(space, 2 * [space.regular_repr])
    network = nn.SequentialModule(GroupSelfAttention(kind, kind, kernel_size=3), FieldLayerNorm(kind), SiLU(kind))
    optimizer = torch.optim.Adam(network.parameters())
    x = torch.randn(1, kind.size, 5, 5)

    def step():
        network(kind(x)).tensor.square().sum().backward()
        optimizer.step()

    step()
    assert all(seconds > 0 for seconds in profile.shares(step, "cpu").values())

    # The backward pass belongs to what it is the backward pass of.
    with profile.marks(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        step()
    events = list(profiler.events())
    forward = profile.forward_kinds(events)
    backward = [event for event in events if event.name == "SiluBackward0"]
    assert backward
    assert {profile.kind_of(event, forward) for event in backward} == {"activations"}
    assert {profile.kind_of(event, {}) for event in backward} == {None}
