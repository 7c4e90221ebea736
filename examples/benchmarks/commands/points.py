"""``points``: attention on point clouds, against published implementations, and training on a large one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from examples.benchmarks.conditions import Conditions
from examples.benchmarks.processes import measure_all
from examples.benchmarks.report import Report, cost, failures, table, times, verdict
from examples.benchmarks.results import Check, ratio
from examples.benchmarks.subjects import LieTransformer, Platonic, PointAttention, PointNetwork, Subject

Say = Callable[[str], None]

_FASTER, _SMALLER = 5.0, 5.0  # than the LieTransformer
_ORDER, _HEAD = 24, 8  # of the octahedral group; channels of a head
_MOST = 8.0  # GB, for a step of training


@dataclass(frozen=True)
class Case:
    """A small batch of small clouds in the plane, for a whole network.

    Attributes:
        points: the number of points of a cloud.
        poses: the number of rotations.
        batch: the number of clouds.
        channels, num_layers, num_heads: of the network.
    """

    points: int = 20
    poses: int = 2
    batch: int = 16
    channels: int = 64
    num_layers: int = 4
    num_heads: int = 8

    def ours(self, encoding: str | None, projection: str) -> PointNetwork:
        """Our network."""
        return PointNetwork(
            f"c{self.poses}",
            self.points,
            self.batch,
            self.channels,
            self.num_layers,
            self.num_heads,
            encoding=encoding,
            projection=projection,
        )

    def reference(self, checkout: str, lie_conv: str | None) -> LieTransformer:
        """The published one."""
        return LieTransformer(
            checkout,
            lie_conv,
            self.points,
            self.poses,
            self.batch,
            self.channels,
            self.num_layers,
            self.num_heads,
        )


NETWORKS: dict[str, tuple[str | None, str]] = {
    "kernel of the reference": ("pair kernel", "pointwise"),
    "MLP": (None, "pointwise"),
    "MLP, poses mixed by every map": (None, "group"),
    "no encoding": ("none", "pointwise"),
}
"""Our networks, by encoding and projection. The reference has pointwise linear maps; our default is the third."""

# What sees no positions shows what is left without them, and other linear maps are another network.
_JUDGED = ("kernel of the reference", "MLP")


def run(conditions: Conditions, checkout: str | None, lie_conv: str | None, say: Say) -> Report:
    """Measure a whole network against the LieTransformer.

    Args:
        conditions: for all measurements.
        checkout: the folder of lie-transformer, or None to go without.
        lie_conv: the folder of LieConv; None where it is in the other.
        say: is told what is being measured.
    """
    case = Case(points=4, batch=2, channels=8, num_layers=1, num_heads=2) if conditions.quick else Case()
    ours = {name: case.ours(*options) for name, options in NETWORKS.items()}
    reference = None if checkout is None else case.reference(checkout, lie_conv)
    results = measure_all([*([] if reference is None else [reference]), *ours.values()], conditions, say)

    report = Report("points", conditions, data=asdict(case) | {"networks": {}}, notes=failures(results))
    rows = []
    if reference is not None:
        report.data["LieTransformer"] = results[reference].as_dict()
        rows.append(["LieTransformer", *cost(results[reference]), "", ""])
    for name, subject in ours.items():
        mine = results[subject]
        report.data["networks"][name] = mine.as_dict()
        cells = ["", ""]
        if reference is not None:
            factor = ratio(results[reference], mine)
            report.data["networks"][name]["reference_over_this"] = factor.as_dict()
            cells = [times(factor.seconds), times(factor.peak)]
            if name in _JUDGED:
                checks = [
                    Check(f"SE(2) network, {name}: time of LieTransformer / ours", factor.seconds, "≥", _FASTER),
                    Check(f"SE(2) network, {name}: memory of LieTransformer / ours", factor.peak, "≥", _SMALLER),
                ]
                report.checks += checks
                cells = [verdict(check) for check in checks]
        rows.append([f"PointTransformer, {name}", *cost(mine), *cells])
    title = (
        f"SE(2), {case.points} points × {case.poses} poses, batch {case.batch}, {case.num_layers} layers, "
        f"{case.num_heads} heads, {case.channels} channels: forward and backward"
    )
    report.tables.append(table(title, ["network", "time", "memory", "times faster", "times smaller"], rows))
    return report


def run_frames(conditions: Conditions, checkout: str | None, say: Say) -> Report:
    """Measure attention in which every pose has keys of its own, against Platonic Transformers.

    Args:
        conditions: for all measurements.
        checkout: the folder of PlatonicTransformers, or None to go without.
        say: is told what is being measured.
    """
    points, batch = (8, 1) if conditions.quick else (512, 4)
    channels = _ORDER * _HEAD
    # The heads of the reference are counted over all frames, of which each has its own.
    heads = channels // (_ORDER * _HEAD)
    ours = PointAttention("octahedral", points, batch, channels // _ORDER, heads, _HEAD, keys="own", encoding="rotary")
    subjects: dict[str, Subject] = {'PointSelfAttention, keys="own", rotary': ours}
    if checkout is not None:
        subjects = {"PlatonicConv, dense softmax": Platonic(checkout, points, batch, channels, _HEAD)} | subjects
    results = measure_all(list(subjects.values()), conditions, say)
    report = Report(
        "points-frames",
        conditions,
        data={"points": points, "batch": batch, "channels": channels, "layers": {}},
        notes=failures(results),
    )
    rows = []
    for name, subject in subjects.items():
        factor = ratio(results[subject], results[ours])
        report.data["layers"][name] = results[subject].as_dict() | {"this_over_ours": factor.as_dict()}
        cells = ["", ""]
        if subject != ours:
            check = Check("octahedral points, rotary: time of PlatonicConv / ours", factor.seconds, "≥", 1.0)
            report.checks.append(check)
            cells = [verdict(check), times(factor.peak)]
        rows.append([name, *cost(results[subject]), *cells])
    title = f"Octahedral, {points} points, batch {batch}, {channels} channels: forward and backward"
    columns = ["layer", "time", "memory", "times faster", "times smaller"]
    report.tables.append(table(title, columns, rows))
    return report


def run_training(conditions: Conditions, say: Say) -> Report:
    """Measure a step of training on a large cloud.

    Args:
        conditions: for all measurements.
        say: is told what is being measured.
    """
    points, neighbours = (32, 4) if conditions.quick else (20000, 32)
    subject = PointNetwork("octahedral", points, 1, 8, 2, 2, num_neighbours=neighbours, features=1, labels=10)
    # A step takes long, and the memory is the same in all.
    result = measure_all([subject], replace(conditions, repeats=1, warmup=1, steps=1), say)[subject]
    peak = None if result.failure is not None else result.peak / 1e9
    check = Check(
        f"octahedral, {points} points, {neighbours} neighbours: peak memory of a step", peak, "≤", _MOST, "GB"
    )
    title = f"A training step: octahedral, {points} points, {neighbours} neighbours, 2 blocks of 8 fields"
    return Report(
        "points-training",
        conditions,
        data=asdict(subject) | {"step": result.as_dict()},
        tables=[table(title, ["network", "time", "memory"], [["PointTransformer", cost(result)[0], verdict(check)]])],
        checks=[check],
        notes=failures({subject: result}),
    )
