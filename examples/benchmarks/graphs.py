"""``graphs``, ``networks`` and ``others``: layers and networks as CUDA graphs, against the same without graphs."""

from __future__ import annotations

from functools import partial

from examples.benchmarks.layers import CHANNELS, HEADS
from examples.benchmarks.measure import Subject
from examples.benchmarks.report import Report, Run
from examples.benchmarks.subjects import attention, convolution, cross_attention, training

FORMS = ("module", "graph")


def graphs(run: Run) -> Report:
    """Layers of 20 fields in windows of 5×5, and R2Conv beside."""
    report = Report("graphs", run)
    groups, batches, shape = ((4,), (1,), (6, 6)) if run.quick else ((4, 8), (8, 64), (24, 24))
    subjects: dict[str, Subject] = {}
    for batch in batches:
        for rotations in groups:
            where = f"c{rotations}", shape, batch
            window = {"num_heads": HEADS, "head_fields": CHANNELS, "kernel_size": 5}
            subjects[f"R2Conv, C{rotations}, batch {batch}"] = partial(convolution, *where)
            for query in ("own", "all"):
                subject = partial(attention, *where, query=query, **window)
                subjects[f"{query}, C{rotations}, batch {batch}"] = subject
    _tabulate(report, "CUDA graphs; on a CPU both columns are the same", subjects)
    return report


def networks(run: Run) -> Report:
    """The rotMNIST network of GSA-Nets, and a hybrid with two blocks beside a network of convolutions."""
    report, subjects = Report("networks", run), {}
    of_each = {"rotmnist-p4": (8, 64), "hybrid": (32, 256), "convolutions": (32, 256)}
    for name, batches in of_each.items():
        for batch in (1,) if run.quick else batches:
            options = {"kernel_size": 3, "query": "own"} if run.quick and name == "rotmnist-p4" else {}
            subjects[f"{name}, batch {batch}"] = partial(training, name, batch, 22 if run.quick else None, **options)
    _tabulate(report, "A training step; on a CPU both columns are the same", subjects)
    return report


def others(run: Run) -> Report:
    """Layers beside those of images: cross-attention, sequences and tori."""
    report, batch = Report("others", run), 1 if run.quick else 8
    (side, half, length), fields = ((4, 2, 8), 2) if run.quick else ((24, 12, 1024), 20)
    full, few, heads = 2 * (side,), 2 * (half,), {"num_heads": 1 if run.quick else HEADS, "head_fields": CHANNELS}
    cross = partial(cross_attention, "c4", batch=batch, fields=fields, **heads)
    sequence = partial(attention, "c4 sequence", (length,), batch, fields, causal=True, **heads)
    torus = partial(attention, "c4", full, batch, fields, padding_mode="circular", **heads)
    tables: dict[str, dict[str, Subject]] = {
        f"Cross-attention, C4, {side}×{side} queries": {
            "as many keys, 5×5": partial(cross, full, full, kernel_size=5),
            f"{half}×{half} keys, 5×5": partial(cross, full, few, kernel_size=5),
            f"{half}×{half} keys, all, rotary": partial(cross, full, few, encoding="rotary", keys="own"),
        },
        f"Causal sequences, C4, {length} tokens": {
            "window of 33": partial(sequence, kernel_size=33),
            "all, rotary": partial(sequence, encoding="rotary", keys="own"),
        },
        f"Tori, C4, {side}×{side}": {
            "5×5": partial(torus, kernel_size=3 if run.quick else 5),
            "all, MLP": torus,
            "all, Fourier": partial(torus, encoding="fourier"),
        },
    }
    for title, subjects in tables.items():
        _tabulate(report, f"{title}, batch {batch}", {f"{title}, {name}": s for name, s in subjects.items()})
    return report


def _tabulate(report: Report, title: str, subjects: dict[str, Subject]) -> None:
    """Measure the subjects as they are and as graphs, and report both."""
    forms = {f"{name}, {form}": partial(s, form=form) for name, s in subjects.items() for form in FORMS}
    report.measure(forms)
    rows = []
    for name in subjects:
        eager, graph = (f"{name}, {form}" for form in FORMS)
        rows.append([name, *report.cost(eager), *report.cost(graph), report.gains(eager, graph)[0]])
    columns = ["forward and backward", "as it is", "memory", "as a graph", "memory", "times faster"]
    report.table(title, columns, rows)
