"""``step`` and ``attentive``: steps of training whole networks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from examples.benchmarks.curves import bars
from examples.benchmarks.references import att_gconvs
from examples.benchmarks.report import Report, Run, size, time, times
from examples.benchmarks.subjects import field_network, fields_to_fields, training

STEPS = {"rotmnist-p4": 22, "d4-96": 56}
"""The networks of ``step``, and the sizes of images of which something is left in the end."""

_MOST = {"d4-96": 4.0, "α": 12.0}  # GB, for a step of a network, and of the All-CNN-C with attention on its responses
_FASTER, _SMALLER = 4.0, 4.0  # than the published network with full attention

VARIANTS = {
    "plain": None,
    "α, channels": "channel",
    "α, positions": "spatial",
    "α": "full",
    "α of features": "features",
}
"""Where the networks attend, by what the tables call it."""


def step(network: str, run: Run) -> Report:
    """A training step of a GSA-Net, and its profile."""
    report, name = Report(f"step-{network}", run), f"training step of {network}"
    batch, side, kernel_size = (1, STEPS[network], 3) if run.quick else (8, None, 5)
    subject = partial(training, network, batch, side, kernel_size=kernel_size, query=run.query)
    report.measure({name: subject}, profile=True)
    result = report.results[name]
    memory = size(result.peak_bytes)
    if network in _MOST:
        memory = report.check_peak(f"{network}, {run.query}", name, _MOST[network])
    if result.failure is None:
        kinds = result.runs[-1]["seconds_by_kind"]
        total = sum(kinds.values())
        rows = [[kind, time(seconds), f"{100 * seconds / total:.1f} %"] for kind, seconds in kinds.items()]
        rows += [["with the profiler", time(total), ""], ["without", time(result.seconds), ""]]
        rows.append(["peak memory", memory, ""])
        report.table(f"A training step of {network}, query {run.query}", ["part", "time", "share"], rows)
    return report


step_rotmnist, step_d4 = (partial(step, network) for network in STEPS)


OF_FIELDS = {"convolutions": "c8", "unet": "c8", "transformer": "c8", "patches": "d4"}
"""The networks from fields to fields, and their spaces."""

_MORE = 1.25  # a step with attention at the coarsest level, in steps of convolutions alone
_SIZES = ((32, 4), (32, 16), (48, 16), (64, 16))  # sides of images and batches


def fields(run: Run) -> Report:
    """Networks from fields to fields, against those of the same outline and as many channels without a group."""
    report, (side, batch) = Report("fields", run), (8, 1) if run.quick else (32, 4)
    for kind, space in OF_FIELDS.items():
        names = {(plain, step): f"{kind}, {plain}, {step}" for plain in (False, True) for step in (False, True)}
        subjects = {
            name: partial(field_network, kind, space, side, batch, plain=plain, backward=step)
            for (plain, step), name in names.items()
        }
        report.measure(subjects)
    rows = []
    for kind, space in OF_FIELDS.items():
        numbers = [
            sum(p.numel() for p in fields_to_fields(kind, space, side, plain=p).parameters()) for p in (False, True)
        ]
        ratios = [report.ratio(f"{kind}, False, {step}", f"{kind}, True, {step}") for step in (False, True)]
        cells = [times(ratios[0]["seconds"]), times(ratios[1]["seconds"]), times(ratios[1]["peak_bytes"])]
        rows.append([f"{kind}, {space}", *(f"{number:,}" for number in numbers), *cells])
    columns = ["network", "parameters", "without a group", "× forward", "× step", "× memory of a step"]
    report.table(f"Against networks without a group, {side}×{side}, batch {batch}", columns, rows)
    _compare_attention(report, _SIZES[: 2 if run.quick else None])
    report.tabulate_checks()
    return report


def _compare_attention(report: Report, sizes: Sequence[tuple[int, int]]) -> None:
    """Steps of a U-Net with attention at the coarsest level, in steps of convolutions alone."""
    rows, kinds = [], ("unet", "convolutions")
    for side, batch in sizes:
        steps = [f"{kind}, {side}×{side}, batch {batch}" for kind in kinds]
        subjects = [partial(field_network, kind, OF_FIELDS[kind], side, batch) for kind in kinds]
        report.measure(dict(zip(steps, subjects, strict=True)))
        ratio, subject = report.ratio(*steps), f"U-Net, {side}×{side}, batch {batch}: a step with attention / without"
        cell = report.check(subject, ratio["seconds"], "≤", _MORE)
        rows.append([f"{side}×{side}", str(batch), times(ratio["seconds"]), times(ratio["peak_bytes"]), cell])
    report.table(
        "U-Net: attention at the coarsest level / none", ["image", "batch", "× step", "× memory", "check"], rows
    )


def attentive(run: Run) -> Report:
    """The p4-CNN of attentive group convolutions, against the published networks and without attention."""
    report, batch, checkout = Report("attentive", run), 2 if run.quick else 64, run.checkouts.get("att_gconvs")
    published = {name: f"att_gconvs, {name}" for name in VARIANTS if checkout is not None}
    subjects = {}
    for name, variant in VARIANTS.items():
        if name in published:
            subjects[published[name]] = partial(att_gconvs, variant, batch, checkout=checkout)
        subjects[name] = partial(training, "p4-cnn", batch, attention=variant)
    report.measure(subjects)
    rows = []
    for name, theirs in published.items():
        gains = report.gains(theirs, name)
        if name == "α":
            gains = report.check_gains(f"p4-CNN, {name}", "att_gconvs", (theirs, name), _FASTER, _SMALLER)
        rows.append([name, *report.cost(theirs), *report.cost(name), *gains])
    if rows:
        columns = ["p4-CNN", "att_gconvs", "memory", "ours", "memory", "times faster", "times smaller"]
        report.table(f"Against att_gconvs: a training step, batch {batch}", columns, rows)
    _tabulate(report, f"p4-CNN, batch {batch}, against the network without attention", list(VARIANTS))
    kinds = {"published": list(published.values()), "ours": list(VARIANTS)} if published else {"ours": list(VARIANTS)}
    bars(report, "attentive.png", f"A training step of the p4-CNN, batch {batch}", list(VARIANTS), kinds)
    return report


def attentive_large(run: Run) -> Report:
    """The All-CNN-C, whose attended responses would take 72 GB if they were stored."""
    report, (batch, width) = Report("attentive-all-cnn-c", run), (2, 1) if run.quick else (128, None)
    network = partial(training, "all-cnn-c", batch, width=width)
    subjects = {name: partial(network, attention=VARIANTS[name]) for name in ("plain", "α of features", "α")}
    # A step takes minutes, and the memory is the same in all.
    report.measure(subjects, repeats=1, warmup=1, steps=1)
    title = f"p4 All-CNN-C, CIFAR-10 shapes, batch {batch}, against the network without attention"
    _tabulate(report, title, list(subjects))
    report.check_peak("p4 All-CNN-C, α", "α", _MOST["α"])
    report.tabulate_checks()
    return report


def _tabulate(report: Report, title: str, names: list[str]) -> None:
    rows = [[name, *report.cost(name), *report.gains(name, "plain")] for name in names]
    report.table(title, ["attention", "time", "memory", "× time", "× memory"], rows)
