"""``dense``, ``rotary``, ``blocks`` and ``compile``: attention that factorises, within frames, in blocks, compiled."""

from __future__ import annotations

import math
from functools import partial
from unittest.mock import patch

import torch
from torch.utils.flop_counter import FlopCounterMode

from escnn_attention.plain.irreps import Irreps
from examples.benchmarks.curves import bars
from examples.benchmarks.measure import Subject
from examples.benchmarks.references import octic_block, platonic
from examples.benchmarks.report import Report, Run, time
from examples.benchmarks.subjects import attention, bare_attention, gspace, plain_attention, torch_block, widened

_THROUGHPUT = 70.0  # per cent of plain attention
ORDER, HEAD = 24, 8  # of the octahedral group; channels of a head
FRAMES = {"fields": HEAD, "num_heads": 1, "head_fields": HEAD, "keys": "own", "encoding": "rotary"}
"""Attention within octahedral frames as wide as one head of the reference, which counts heads over all frames."""


def dense(run: Run) -> Report:
    """Global attention that factorises, against plain attention on equally many vectors of the same width."""
    report, rows = Report("dense", run), []
    shape, heads, channels, poses = ((4, 4), 2, 10, 4) if run.quick else ((28, 28), 9, 10, 4)
    keys = poses * math.prod(shape)
    for encoding, query in (("fourier", "own"), ("fourier", "all"), ("none", "own"), ("none", "all")):
        name = f"{'Fourier' if encoding == 'fourier' else 'no encoding'}, {query}"
        sizes = (1, heads, poses, keys if query == "all" else keys // poses, keys, widened(channels))
        if encoding == "none":
            # All output poses attend to the same keys: the queries of all poses are needed once, in either mode.
            sizes = (1, heads, 1, keys, keys, widened(channels, 0))
        plain, ours = f"plain attention, {name}", partial(bare_attention, "c4", shape, 1, heads, channels, "dense")
        report.measure({plain: partial(plain_attention, *sizes), name: partial(ours, query=query, encoding=encoding)})
        gain = report.ratio(plain, name)["seconds"]
        percent = None if gain is None else 100 * gain
        verdict = report.check(f"{name}: throughput / plain attention", percent, "≥", _THROUGHPUT, "%")
        rows.append([name, *report.cost(plain), *report.cost(name), verdict])
    title = f"Global attention on {shape[0]}×{shape[1]}, C4: forward and backward, without projections"
    report.table(title, ["attention", "plain", "memory", "ours", "memory", "throughput"], rows)
    return report


def rotary(run: Run) -> Report:
    """Attention with rotary encoding and keys of the query's own pose, against Platonic Transformers.

    The reference takes a cloud of points, ours a grid with as many positions: the cost of a query and a key is the
    same.
    """
    report, (side, batch) = Report("rotary", run), (2, 1) if run.quick else (8, 4)
    subjects: dict[str, Subject] = {}
    if checkout := run.checkouts.get("platonic"):
        theirs = partial(platonic, side**3, batch, ORDER * HEAD, HEAD, checkout=checkout)
        subjects["PlatonicConv, dense softmax"] = theirs
    ours = 'GroupSelfAttention, keys="own", rotary'
    subjects[ours] = partial(attention, "octahedral", 3 * (side,), batch, **FRAMES)
    report.measure(subjects)
    rows = [[n, *report.cost(n), "" if n == ours else report.gains(ours, n)[0]] for n in subjects]
    title = f"Octahedral, {side**3} positions, batch {batch}, {ORDER * HEAD} channels: forward and backward"
    report.table(title, ["layer", "time", "memory", "ours takes"], rows)
    shared(report, "GroupSelfAttention", partial(attention, "octahedral", 3 * (side,), batch, **FRAMES))
    return report


def shared(report: Report, layer: str, ours: Subject) -> None:
    """One score for all poses against one for each, without an encoding, between the same fields.

    Products of queries and keys take as long; the number of exponentials is divided by that of the poses.
    """
    each, one = f'{layer}, keys="own", no encoding', f"{layer}, shared_scores, no encoding"
    report.measure({name: partial(ours, encoding="none", shared_scores=name == one) for name in (each, one)})
    rows = [[each, *report.cost(each), "", ""], [one, *report.cost(one), *report.gains(each, one)]]
    columns = ["layer", "time", "memory", "times faster", "times smaller"]
    report.table("One score for all poses: forward and backward", columns, rows)


def blocks(run: Run) -> Report:
    """Pre-norm blocks with rotary attention within frames: in irreps, by expanded weights, PyTorch's, and octic ViTs'.

    Each frame has one head; PyTorch's block has heads of 64 channels. Octic ViTs have no encoding: ours without one is
    measured beside them.
    """
    report, rows, besides = Report("blocks", run), [], []
    checkout = run.checkouts.get("octic_vits")
    grids = {"d4": ((16, 16), (16, 32)), "octahedral": ((4, 8, 8), (8, 8, 8)), "icosahedral": ((4, 8, 8), (8, 8, 8))}
    cases = [(space, shape, width) for space, shapes in grids.items() for shape in shapes for width in (384, 768)]
    for space, shape, width in [("d4", (16, 16), 96)] if run.quick else cases:
        order, batch, tokens = gspace(space).fibergroup.order(), 1 if run.quick else 8, math.prod(shape)
        fields = width // order
        options = {"num_heads": 1, "head_fields": fields, "keys": "own", "encoding": "rotary", "norm": "pre"}
        ours = partial(attention, space, shape, batch, fields, block=True, activation="gelu", **options)
        name = f"{space.capitalize()}, {tokens} tokens, {fields * order} channels"
        subjects = {
            f"PyTorch, {name}": partial(torch_block, batch, tokens, fields * order),
            f"expanded, {name}": partial(ours, form="expanded"),
            f"irreps, {name}": ours,
        }
        beside: dict[str, Subject] = {}
        if space == "d4" and checkout:
            beside[f"octic ViTs, {name}"] = partial(octic_block, batch, tokens, width, checkout=checkout)
            beside[f"no encoding, {name}"] = partial(ours, encoding="none")
        report.measure(subjects | beside)
        scores = 7 * 2 * batch * tokens**2 * fields * order  # two products forward, five backward
        _, expanded, irreps = (_products(subject) + scores for subject in subjects.values())
        operations = report.check(f"{name}: operations, irreps / expanded", irreps / expanded, "≤", 0.5)
        ratios = [operations]
        for other, most in (("expanded", 0.8), ("PyTorch", 1.0)):
            value = report.ratio(f"irreps, {name}", f"{other}, {name}")["seconds"]
            ratios.append(report.check(f"{name}: time, irreps / {other}", value, "≤", most))
        if beside:
            theirs, bare = beside
            value = report.ratio(bare, theirs)["seconds"]
            ratio = report.check(f"{name}: time, no encoding / octic ViTs", value, "≤", 1.0)
            gains = [report.gains(f"{kind}, {name}", theirs)[0] for kind in ("irreps", "PyTorch")]
            besides.append([name, *report.cost(theirs), *report.cost(bare), ratio, *gains])
        rows.append([name, *(cell for subject in subjects for cell in report.cost(subject)), *ratios])
    kinds = [column for kind in ("PyTorch", "expanded", "irreps") for column in (kind, "memory")]
    columns = ["block", *kinds, "operations", "time / expanded", "time / PyTorch"]
    report.table("Blocks: forward and backward", columns, rows)
    if besides:
        columns = ["block", "octic ViTs", "memory", "no encoding", "memory", "time / octic ViTs", "rotary", "PyTorch"]
        report.table("Beside octic ViTs: forward and backward", columns, besides)
    groups = [str(row[0]) for row in rows]
    named = {kind: [f"{kind}, {group}" for group in groups] for kind in ("PyTorch", "expanded", "irreps")}
    bars(report, "blocks.png", "Pre-norm blocks, batch 8, forward and backward", groups, named)
    return report


def _products(subject: Subject) -> int:
    """Multiplications and additions of the matrix products in a step, without those of scores."""
    step = subject()({"device": "cpu", "dtype": torch.float32})
    saved = 0

    def count(irreps: Irreps, x: torch.Tensor, _: torch.Tensor) -> bool:
        """Maps in irreps are counted as expanded ones, which cost more: forward, and for two gradients."""
        nonlocal saved
        positions = math.prod(x.shape[:-1] if x.dim() == 3 else x.shape[1:3])
        saved += 3 * 2 * positions * (irreps.expanded - irreps.multiplications)
        return False

    with patch.object(Irreps, "serve", count), FlopCounterMode(display=False) as counter:
        step()
    counted = sum(n for operator, n in counter.get_flop_counts()["Global"].items() if "attention" not in str(operator))
    return counted - saved


def compiled(run: Run) -> Report:
    """Exported layers, plain and compiled into one graph, on a GPU also recorded.

    The time of compilation is that of the first step, which compiles both passes, minus that of a later step.
    """
    report, rows = Report("compile", run), []
    side, batch = (6, 1) if run.quick else (24, 8)
    window = partial(attention, "c4", (side, side), batch, kernel_size=5)
    layers = {"5×5, own": window}
    if not run.quick:
        layers["5×5, all"] = partial(window, query="all")
        layers["transformer block, 5×5, own"] = partial(window, block=True)
    forms = ("compiled", "recorded") if run.conditions.device == "cuda" else ("compiled",)
    for name, layer in layers.items():
        report.measure({f"{name}, {form}": partial(layer, form=form) for form in ("exported", *forms)})
        for form in forms:
            before, after = f"{name}, exported", f"{name}, {form}"
            first, later = report.results[after].first_seconds, report.results[after].seconds
            compiling = time(None if first is None or later is None else first - later)
            rows.append([after, *report.cost(before), *report.cost(after), report.gains(before, after)[0], compiling])
    title = f"Exported layers, C4, {side}×{side}, batch {batch}: forward and backward"
    columns = ["layer", "eager", "memory", "compiled", "memory", "times faster", "compiling"]
    report.table(title, columns, rows)
    return report
