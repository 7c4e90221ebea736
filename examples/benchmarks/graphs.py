"""``graphs``: layers and networks as CUDA graphs, against the same without graphs."""

from __future__ import annotations

from functools import partial

from examples.benchmarks.layers import CHANNELS, HEADS
from examples.benchmarks.measure import Subject
from examples.benchmarks.report import Report, Run
from examples.benchmarks.subjects import attention, convolution, training

FORMS = ("module", "graph")


def graphs(run: Run) -> Report:
    """Layers of 20 fields in windows of 5×5, R2Conv beside, and the rotMNIST network of GSA-Nets with C4."""
    report = Report("graphs", run)
    groups, batches, shape, side = ((4,), (1,), (6, 6), 22) if run.quick else ((4, 8), (8, 64), (24, 24), None)
    subjects: dict[str, Subject] = {}
    for batch in batches:
        for rotations in groups:
            where = f"c{rotations}", shape, batch
            window = {"num_heads": HEADS, "head_fields": CHANNELS, "kernel_size": 5}
            subjects[f"R2Conv, C{rotations}, batch {batch}"] = partial(convolution, *where)
            for query in ("own", "all"):
                subject = partial(attention, *where, query=query, **window)
                subjects[f"{query}, C{rotations}, batch {batch}"] = subject
        options = {"kernel_size": 3, "query": "own"} if run.quick else {}
        subjects[f"GSANet, C4, batch {batch}"] = partial(training, "rotmnist-p4", batch, side, **options)
    forms = {f"{name}, {form}": partial(s, form=form) for name, s in subjects.items() for form in FORMS}
    report.measure(forms)
    rows = []
    for name in subjects:
        eager, graph = (f"{name}, {form}" for form in FORMS)
        rows.append([name, *report.cost(eager), *report.cost(graph), report.gains(eager, graph)[0]])
    columns = ["forward and backward", "as it is", "memory", "as a graph", "memory", "times faster"]
    report.table("CUDA graphs; on a CPU both columns are the same", columns, rows)
    return report
