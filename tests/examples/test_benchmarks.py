"""The benchmark runs, writes what it says, and judges right."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("matplotlib")

from escnn_attention.functional import backends_for
from examples.benchmarks import processes
from examples.benchmarks.commands import points
from examples.benchmarks.commands.ceilings import numbers, operations, scores
from examples.benchmarks.commands.layer_cases import CASES, QUICK, Case
from examples.benchmarks.commands.point_edges import by_neighbours, by_points
from examples.benchmarks.conditions import Conditions
from examples.benchmarks.curves import Curve, follow, slope
from examples.benchmarks.memory import PeakMemory
from examples.benchmarks.pictures import Bar, bars
from examples.benchmarks.report import cost, curve_table, size, table, time, verdict
from examples.benchmarks.results import Check, Result, ratio
from examples.benchmarks.run import Options, UnusableError
from examples.benchmarks.subjects import (
    Attention,
    AttGConvs,
    Classifier,
    Convolution,
    Dense,
    LieTransformer,
    PointAttention,
    PointConvolution,
    PointNetwork,
    TrainingStep,
    from_json,
    to_json,
)
from examples.benchmarks.subjects.checkouts import CheckoutError, import_from
from examples.benchmarks.subjects.dense import widened
from examples.benchmarks.subjects.points import clouds, nearest, with_hub
from examples.benchmarks.subjects.spaces import gspace, order

ROOT = Path(__file__).parents[2]


def result(*seconds, peak=1_000_000):
    return Result(tuple({"first": 2 * s, "steps": [s, 3 * s], "peak": peak, "details": {}} for s in seconds))


def benchmark(*arguments):
    return subprocess.run(
        [sys.executable, str(ROOT / "examples" / "benchmarks"), *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "TERM": "dumb", "COLUMNS": "120", "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_layers(tmp_path):
    run = benchmark("layers", "--quick", "--out", tmp_path)
    assert run.returncode == 0, run.stderr
    stored = json.loads((tmp_path / "layers.json").read_text(encoding="utf-8"))
    assert {"cpu", "cores", "gpu"} <= stored["environment"]["hardware"].keys()
    assert {"python", "torch", "escnn", "escnn_attention"} <= stored["environment"]["versions"].keys()
    assert {"device", "dtype", "threads", "seed", "repeats"} <= stored["conditions"].keys()
    assert stored["checks"] == []  # nothing to compare with
    assert stored["notes"] == []  # nothing failed
    local, everywhere = stored["cases"]
    assert (local["name"], everywhere["name"]) == ("p4, 5×5, all", "p4, global 6×6, all, Fourier")
    for case in stored["cases"]:
        assert case["name"] in run.stdout
        assert case["references"] == {}
        for measured in (case["ours"], case["convolution"]):
            assert 0 < measured["seconds"] <= measured["median_seconds"]
            assert measured["peak_bytes"] >= 0
        factor = case["ours"]["seconds"] / case["convolution"]["seconds"]
        assert case["convolution"]["ours_over_this"]["seconds"] == pytest.approx(factor)
    assert "plain_attention" in everywhere
    assert "plain_attention" not in local


def test_backends(tmp_path):
    run = benchmark("backends", "--quick", "--out", tmp_path)
    assert run.returncode == 0, run.stderr
    stored = json.loads((tmp_path / "backends.json").read_text(encoding="utf-8"))
    assert stored["notes"] == []
    local, everywhere = (case["backends"] for case in stored["cases"])
    assert local.keys() == everywhere.keys() == {"auto", *backends_for()} - {"reference"}
    for case, name, served in (
        (local, "auto", True),
        (local, "blocked", True),
        (local, "triton", False),
        (everywhere, "tiled", True),
        (everywhere, "native", False),
    ):
        assert ("seconds" in case[name]) == served
        assert served or "cannot serve this call" in case[name]["failure"]


def test_scaling(tmp_path):
    run = benchmark("scaling", "--quick", "--out", tmp_path)
    assert run.returncode == 0, run.stderr
    stored = json.loads((tmp_path / "scaling.json").read_text(encoding="utf-8"))
    assert [curve["name"] for curve in stored["pixels"]] == [
        "5×5, own",
        "5×5, all",
        "global, own",
        "global, all",
        "R2Conv 5×5",
    ]
    for axis, sizes in (("pixels", [16, 36]), ("order", [1, 2])):
        for curve in stored[axis]:
            assert [point[axis] for point in curve["points"]] == sizes
            assert all(point["seconds"] > 0 for point in curve["points"])
    for picture in ("scaling_pixels.png", "scaling_group.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")


def test_ceilings(tmp_path):
    run = benchmark("ceilings", "--quick", "--out", tmp_path)
    assert run.returncode == 0, run.stderr
    stored = json.loads((tmp_path / "ceilings.json").read_text(encoding="utf-8"))
    assert stored["operations_per_second"] > 0
    assert stored["bytes_per_second"] > 0
    for case in stored["cases"]:
        assert case["name"] in run.stdout
        assert case["operations_per_second"] * case["seconds"] == pytest.approx(
            operations(next(c for c in QUICK if c.name == case["name"]))
        )


def test_attentive(tmp_path):
    run = benchmark("attentive", "--quick", "--out", tmp_path)
    assert run.returncode == 0, run.stderr
    stored = json.loads((tmp_path / "attentive.json").read_text(encoding="utf-8"))
    assert stored["notes"] == []
    assert stored["checks"] == []  # nothing to compare with
    plain = stored["variants"]["plain"]["ours"]
    assert len(stored["variants"]) == 5
    for name, variant in stored["variants"].items():
        assert name in run.stdout
        assert "published" not in variant
        assert variant["ours"]["this_over_plain"]["seconds"] == pytest.approx(
            variant["ours"]["seconds"] / plain["seconds"]
        )
    assert (tmp_path / "attentive.png").read_bytes().startswith(b"\x89PNG")
    large = json.loads((tmp_path / "attentive-all-cnn-c.json").read_text(encoding="utf-8"))
    (check,) = large["checks"]
    assert (check["relation"], check["target"], check["unit"]) == ("≤", 12.0, "GB")
    assert check["value"] == pytest.approx(large["variants"]["α"]["peak_bytes"] / 1e9)


def test_points(tmp_path):
    run = benchmark("points", "--quick", "--out", tmp_path)
    assert run.returncode == 0, run.stderr
    stored = {
        name: json.loads((tmp_path / f"{name}.json").read_text(encoding="utf-8"))
        for name in ("points", "points-frames", "points-edges", "points-training")
    }
    assert all(report["notes"] == [] for report in stored.values())  # nothing failed
    assert stored["points"]["checks"] == stored["points-frames"]["checks"] == []  # nothing to compare with
    assert list(stored["points"]["networks"]) == [
        "kernel of the reference",
        "MLP",
        "MLP, poses mixed by every map",
        "no encoding",
    ]
    for name, network in stored["points"]["networks"].items():
        assert name in run.stdout
        assert 0 < network["seconds"] <= network["median_seconds"]
        assert "reference_over_this" not in network
    (frames,) = stored["points-frames"]["layers"].values()
    assert frames["seconds"] > 0
    for family, edges in (("by_points", [64, 128]), ("by_neighbours", [128, 256])):
        for curve in stored["points-edges"][family]:
            assert [point["edges"] for point in curve["points"]] == edges
            assert all(point["seconds"] > 0 for point in curve["points"])
    # Every curve of ours is held against the target, and none of the convolution.
    curves = [*stored["points-edges"]["by_points"], *stored["points-edges"]["by_neighbours"]]
    ours = [curve for curve in curves if curve["name"] != "R2PointConv"]
    assert len(ours) == len(curves) - 2
    for check, curve in zip(stored["points-edges"]["checks"], ours, strict=True):
        assert curve["name"] in check["name"]
        assert (check["value"], check["relation"]) == (curve["slope_peak_bytes"], "≤")
    for picture in ("points_edges_points.png", "points_edges_neighbours.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")
    (check,) = stored["points-training"]["checks"]
    assert (check["relation"], check["target"], check["unit"]) == ("≤", 8.0, "GB")
    assert check["value"] == pytest.approx(stored["points-training"]["step"]["peak_bytes"] / 1e9)


@pytest.mark.parametrize(("seconds", "peak", "met"), [(5.0, 500, True), (4.9, 490, False)])
def test_points_are_judged_against_the_reference(monkeypatch, seconds, peak, met):
    def found(subjects, conditions, say):
        names = {LieTransformer: result(seconds, peak=peak), PointNetwork: result(1.0, peak=100)}
        return {subject: names[type(subject)] for subject in subjects}

    monkeypatch.setattr(points, "measure_all", found)
    report = points.run(Conditions(), "somewhere", None, lambda _: None)
    # The kernel of the reference and the MLP; the network that sees no positions has no target.
    assert [check.met for check in report.checks] == 4 * [met]
    assert [check.value for check in report.checks] == pytest.approx(2 * [seconds, peak / 100])
    assert all("no encoding" not in check.name for check in report.checks)
    networks = report.data["networks"]
    assert len(networks) == 4
    assert all(network["reference_over_this"]["seconds"] == seconds for network in networks.values())


def test_points_are_those_of_the_issue(asked):
    points.run(Conditions(repeats=1), "somewhere", None, lambda _: None)
    reference, *ours = asked
    assert (reference.points, reference.poses, reference.batch) == (20, 2, 16)
    assert (reference.channels, reference.num_layers, reference.num_heads, reference.hidden) == (64, 4, 8, 16)
    for network in ours:
        assert (network.space, network.points, network.batch, network.features) == ("c2", 20, 16, reference.features)
        assert (network.fields, network.num_blocks, network.num_heads) == (64, 4, 8)
    asked.clear()
    points.run_frames(Conditions(repeats=1), "somewhere", lambda _: None)
    theirs, frames = asked
    assert (theirs.points, theirs.batch) == (frames.points, frames.batch) == (512, 4)
    assert theirs.channels == order(frames.space) * frames.fields == 192
    assert theirs.channels // theirs.head_channels == order(frames.space) * frames.num_heads
    assert (frames.keys, frames.encoding, frames.head_fields) == ("own", "rotary", theirs.head_channels)
    asked.clear()
    points.run_training(Conditions(repeats=3), lambda _: None)
    (large,) = asked
    assert (large.space, large.points, large.num_neighbours) == ("octahedral", 20000, 32)


def test_edges_of_the_curves():
    for curve in by_points(32):
        assert (curve.subject(32 * 1000).points, curve.subject(32 * 1000).num_neighbours) == (1000, 32)
    for curve in by_neighbours(4000):
        assert (curve.subject(16 * 4000).points, curve.subject(16 * 4000).num_neighbours) == (4000, 16)
    coords, batch = clouds(30, 1, 2, Conditions())
    assert batch is None
    edges = nearest(coords, 5)
    assert edges.shape == (2, 150)
    distances = torch.cdist(coords, coords)
    within = distances[edges[1], edges[0]].view(30, 5).max(1).values
    assert ((distances <= within[:, None]).sum(1) == 5).all()
    uneven = with_hub(edges)
    assert uneven[1].bincount().tolist() == [30] + 29 * [4]
    assert uneven[0][uneven[1] == 0].tolist() == list(range(30))
    assert clouds(3, 2, 3, Conditions())[1].tolist() == [0, 0, 0, 1, 1, 1]


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


def lie_transformer(checkout, lie_conv=None):
    return LieTransformer(str(checkout), lie_conv, 4, 2, 2, 8, 1, 2)


@pytest.mark.parametrize("inside", [True, False])
def test_the_line_that_is_no_python_is_mended(lie, inside):
    with pytest.raises(SyntaxError):
        compile(GROUPS, "lieGroups.py", "exec")
    folder = lie / "LieConv"
    if not inside:
        folder = shutil.move(folder, lie.parent / "elsewhere")
    subject = lie_transformer(lie, None if inside else str(folder))
    subject.load()
    subject.build(Conditions())()
    assert (folder / "lie_conv" / "lieGroups.py").read_text() == GROUPS
    assert not list(folder.rglob("lieGroups*.pyc"))


def test_a_lie_transformer_that_lacks_something(lie, tmp_path):
    def says(message, *folders):
        with pytest.raises(CheckoutError, match=re.escape(message)):
            lie_transformer(*folders).load()

    says(f"{lie}/LieConv is no checkout of eqv_transformer", lie / "LieConv")
    says(f"{tmp_path} is no checkout of lie_conv", lie, str(tmp_path))
    (lie / "LieConv" / "lie_conv" / "lieGroups.py").unlink()
    says("is no checkout of LieConv: it has no file lie_conv/lieGroups.py", lie)
    shutil.rmtree(lie / "LieConv")
    says("no folder LieConv/lie_conv: get the submodule, or name a checkout with --lie-conv", lie)
    with pytest.raises(UnusableError, match="--lie-conv: got it without --lie-transformer"):
        Options(Conditions(), tmp_path, lie_conv=str(lie)).check()


def test_bars(tmp_path):
    found = [Bar("plain", "ours", 0.1, 1_000_000), Bar("α", "published", 4.0, 10), Bar("α", "ours", 1.0, 5)]
    bars(tmp_path / "bars.png", "a title", found)
    assert (tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_counted():
    """By walking through the formula: batch, heads, output and query poses, positions, keys, channels."""
    case = Case(4, 6, 2, 3, "all", "mlp", faster=1, smaller=1)
    by_hand = 2 * 9 * 4 * 4 * 36 * (4 * 9)
    assert scores(case) == by_hand
    assert operations(case) == by_hand * 10 * 2 * (2 + 5)
    assert scores(replace(case, query="own", kernel_size=None)) == 2 * 9 * 4 * 36 * (4 * 36)
    assert numbers(case) == 12 * 2 * 9 * 10 * 4 * 36


def test_a_checkout_that_lacks_something_ends_in_one_clear_line(tmp_path):
    run = benchmark("layers", "--quick", "--out", tmp_path / "out", "--g-selfatt", tmp_path)
    assert run.returncode == 2
    assert f"{tmp_path} is no checkout of g_selfatt" in run.stderr
    assert "Traceback" not in run.stderr
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
    assert ratio(slow, fast).seconds == 4.0
    assert ratio(slow, fast).peak == 3.0
    assert ratio(slow, fast).median_seconds == 9.0 / 2.5
    assert ratio(slow, result(1.0, peak=0)).peak is None
    assert ratio(slow, Result(failure="no")).seconds is None


@pytest.mark.parametrize(
    ("value", "relation", "met"),
    [(4.0, "≥", True), (3.9, "≥", False), (4.0, "≤", True), (4.1, "≤", False), (None, "≥", False), (None, "≤", False)],
)
def test_check(value, relation, met):
    check = Check("what", value, relation, 4.0)
    assert check.met is met
    assert check.as_dict()["met"] is met
    assert ("✓" in verdict(check)) is met
    assert "4" in verdict(check)


def test_cells_and_tables():
    assert [time(None), time(0.0123), time(1.234)] == ["–", "12.3 ms", "1.23 s"]
    assert [size(None), size(2.5e6), size(1.62e9)] == ["–", "2 MB", "1.62 GB"]
    assert cost(Result(failure="no")) == ("failed", "–")
    made = table("title", ["layer", "time"], [["a", "1 s"], ["b", "2 s"]])
    assert made.row_count == 2
    assert [column.justify for column in made.columns] == ["left", "right"]
    assert verdict(Check("what", 1.0, "≤", 1.1, "")).startswith("1 (≤ 1.1)")
    curve = Curve("a", lambda n: Convolution("c4", (n, n), 1), points={2: result(1.0), 4: result(4.0)})
    cells = list(curve_table("title", "pixels", [curve]).columns[1].cells)
    assert cells == ["1 s, 1 MB", "4 s, 1 MB", "2.00, 0.00"]


def test_subjects_survive_json():
    subjects = [
        Attention("c4", (6, 6), 2),
        Convolution("d4", (6, 6), 2),
        Dense(1, 2, 3, 4, 5, 6),
        TrainingStep("d4-96"),
        Classifier("p4-cnn", None, 2),
        AttGConvs("somewhere", "full", 2),
        PointAttention("c4", 9, num_neighbours=3, hub=True),
        PointConvolution("c4", 9, 3),
        PointNetwork("c2", 4, 2, 8, 1, 2, labels=3),
        LieTransformer("somewhere", None, 4, 2, 2, 8, 1, 2),
    ]
    for subject in subjects:
        assert from_json(json.loads(json.dumps(to_json(subject)))) == subject


def test_sizes_of_the_issue():
    assert [(case.faster, case.smaller) for case in CASES] == [(4, 6), (5, 20), (4, 25), (10, 15), (10, 6), (22, 25)]
    dense = CASES[3].dense()
    assert (dense.queries, dense.keys, dense.poses) == (3136, 3136, 4)
    assert dense.width == widened(10) == 48
    assert replace(CASES[3], query="own").dense().queries == 784


def test_orders_of_spaces():
    for name in ("c1", "c4", "d4"):
        assert gspace(name).fibergroup.order() == order(name)
    with pytest.raises(ValueError, match="'so3'"):
        gspace("so3")


@pytest.fixture
def asked(monkeypatch):
    """What fresh processes would be asked for; subjects on one row of pixels fail."""
    asked = []

    def ask(subjects, conditions):
        asked.extend(subjects)
        sizes = [getattr(subject, "shape", (2,))[0] for subject in subjects]
        return [
            {"failure": "too small"} if size == 1 else {"first": 1.0, "steps": [float(size)], "peak": 10, "details": {}}
            for size in sizes
        ]

    monkeypatch.setattr(processes, "_ask", ask)
    return asked


def test_subjects_take_turns(asked):
    a, b, broken = (Convolution("c4", (n, n), 1) for n in (2, 3, 1))
    results = processes.measure_all([a, broken, b, a], Conditions(repeats=3))
    # One that failed is not tried again.
    assert asked == [a, broken, b, a, b, a, b]
    assert len(results[a].runs) == 3
    assert results[b].seconds == 3.0
    assert results[broken].failure == "too small"


def test_curves_end_where_they_take_too_long(asked):
    curve = Curve("slow", lambda n: Convolution("c4", (n, n), 1))
    follow([curve], [2, 3, 4, 5], 3.5, Conditions(repeats=1), lambda _: None)
    assert list(curve.points) == [2, 3, 4]
    assert "more than 3.5 s" in curve.stopped
    failing = Curve("failing", lambda n: Convolution("c4", (n, n), 1))
    follow([failing], [1, 2], 3.5, Conditions(repeats=1), lambda _: None)
    assert failing.points == {}
    assert "too small" in failing.stopped


def test_the_readme_has_every_command():
    from examples.benchmarks.run import COMMANDS

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
    monkeypatch.setattr(processes.sys, "executable", shutil.which("false"))
    found = processes.measure_all([Dense(1, 1, 1, 1, 1, 1)], Conditions(repeats=1))
    assert "status 1" in found[Dense(1, 1, 1, 1, 1, 1)].failure


def test_peak_memory_is_seen_after_it_was_freed():
    memory = PeakMemory("cpu")
    before = memory.read()
    block = torch.ones(2**24)
    del block
    assert memory.read() - before > 0.9 * 2**26


def test_profile_tells_kinds_apart():
    from escnn import nn

    from escnn_attention import FieldLayerNorm, GroupSelfAttention, SiLU
    from examples.benchmarks.subjects import profile

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
    with profile._marks(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        step()
    events = list(profiler.events())
    forward = profile._forward_kinds(events)
    backward = [event for event in events if event.name == "SiluBackward0"]
    assert backward
    assert {profile._kind(event, forward) for event in backward} == {"activations"}
    assert {profile._kind(event, {}) for event in backward} == {None}
