"""``points``: point clouds, against published implementations, and training on a large one."""

from __future__ import annotations

from functools import partial

from examples.benchmarks.attention import FRAMES, HEAD, ORDER, shared
from examples.benchmarks.measure import Subject
from examples.benchmarks.references import lie_transformer, platonic
from examples.benchmarks.report import Report, Run
from examples.benchmarks.subjects import point_attention, point_network

_FASTER, _SMALLER = 5.0, 5.0  # than the LieTransformer
_MOST = 8.0  # GB, for a step of training

NETWORKS: dict[str, tuple[str | None, str]] = {
    "kernel of the reference": ("pair kernel", "pointwise"),
    "MLP": (None, "pointwise"),
    "MLP, poses mixed by every map": (None, "group"),
    "no encoding": ("none", "pointwise"),
}
"""Our networks, by encoding and projection. The reference has pointwise linear maps; our default is the third."""

# The row without positions shows their cost; other linear maps are another network.
_JUDGED = ("kernel of the reference", "MLP")


def networks(run: Run) -> Report:
    """A whole network on small batches of small clouds in the plane, against the LieTransformer."""
    report, name = Report("points", run), "LieTransformer"
    points, poses, batch, channels, layers, heads = (4, 2, 2, 8, 1, 2) if run.quick else (20, 2, 16, 64, 4, 8)
    subjects: dict[str, Subject] = {}
    if checkout := run.checkouts.get("lie_transformer"):
        sizes = {"channels": channels, "num_layers": layers, "num_heads": heads}
        reference = partial(lie_transformer, points, poses, batch, **sizes)
        subjects[name] = partial(reference, checkout=checkout)
    sizes = {"fields": channels, "num_blocks": layers, "num_heads": heads}
    for ours, (encoding, projection) in NETWORKS.items():
        network = partial(point_network, f"c{poses}", points, batch, **sizes)
        subjects[ours] = partial(network, encoding=encoding, attention={"projection": projection})
    report.measure(subjects)

    rows = []
    if name in subjects:
        rows.append([name, *report.cost(name), "", ""])
    for ours in NETWORKS:
        gains = report.gains(name, ours) if name in subjects else ["", ""]
        if name in subjects and ours in _JUDGED:
            gains = report.check_gains(f"SE(2) network, {ours}", name, (name, ours), _FASTER, _SMALLER)
        rows.append([f"PointTransformer, {ours}", *report.cost(ours), *gains])
    title = f"{points} points × {poses} poses, batch {batch}, {layers} layers, {heads} heads, {channels} channels"
    columns = ["network", "time", "memory", "times faster", "times smaller"]
    report.table(f"SE(2), {title}: forward and backward", columns, rows)
    return report


def frames(run: Run) -> Report:
    """Attention with keys of the query's own pose, against Platonic Transformers."""
    report, (points, batch) = Report("points-frames", run), (8, 1) if run.quick else (512, 4)
    theirs, ours = "PlatonicConv, dense softmax", 'PointSelfAttention, keys="own", rotary'
    subjects: dict[str, Subject] = {ours: partial(point_attention, "octahedral", points, batch, **FRAMES)}
    rows = []
    if checkout := run.checkouts.get("platonic"):
        subjects = {theirs: partial(platonic, points, batch, ORDER * HEAD, HEAD, checkout=checkout)} | subjects
    report.measure(subjects)
    if theirs in subjects:
        gain = report.ratio(theirs, ours)["seconds"]
        verdict = report.check("octahedral points, rotary: time of PlatonicConv / ours", gain, "≥", 1.0)
        rows.append([theirs, *report.cost(theirs), verdict, report.gains(theirs, ours)[1]])
    rows.append([ours, *report.cost(ours), "", ""])
    title = f"Octahedral, {points} points, batch {batch}, {ORDER * HEAD} channels: forward and backward"
    report.table(title, ["layer", "time", "memory", "times faster", "times smaller"], rows)
    shared(report, "PointSelfAttention", partial(point_attention, "octahedral", points, batch, **FRAMES))
    return report


def large(run: Run) -> Report:
    """A training step on a large cloud with labels at every point."""
    report, (points, neighbours) = Report("points-training", run), (32, 4) if run.quick else (20000, 32)
    sizes = {"fields": 8, "num_blocks": 2, "num_heads": 2, "features": 1, "labels": 10}
    subject = partial(point_network, "octahedral", points, 1, **sizes, attention={"num_neighbours": neighbours})
    # A step takes long, and the memory is the same in all.
    report.measure({"PointTransformer": subject}, repeats=1, warmup=1, steps=1)
    verdict = report.check_peak(f"octahedral, {points} points, {neighbours} neighbours", "PointTransformer", _MOST)
    title = f"A training step: octahedral, {points} points, {neighbours} neighbours, 2 blocks of 8 fields"
    rows = [["PointTransformer", report.cost("PointTransformer")[0], verdict]]
    report.table(title, ["network", "time", "memory"], rows)
    return report
