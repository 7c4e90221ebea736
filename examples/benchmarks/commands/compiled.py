"""``compile``: what torch.compile gains on exported layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from examples.benchmarks.conditions import Conditions
from examples.benchmarks.processes import measure_all
from examples.benchmarks.report import Report, cost, failures, table, time, times
from examples.benchmarks.results import ratio
from examples.benchmarks.subjects import Attention
from examples.benchmarks.subjects.attention import Form


def run(conditions: Conditions, say: Callable[[str], None]) -> Report:
    """Measure exported layers as they are and compiled into one graph, on a GPU also recorded.

    The time of compiling is that of the first step, in which forward and backward pass are compiled, without that of a
    later step.
    """
    side, batch = (6, 1) if conditions.quick else (24, 8)
    window = Attention("c4", (side, side), batch, kernel_size=5, form="exported")
    layers = {
        "5×5, own": window,
        "5×5, all": replace(window, query="all"),
        "transformer block, 5×5, own": replace(window, block=True),
    }
    if conditions.quick:
        layers = {name: layers[name] for name in ("5×5, own",)}
    report = Report("compile", conditions, data={"layers": []})
    rows = []
    forms: tuple[Form, ...] = ("compiled", "recorded") if conditions.device == "cuda" else ("compiled",)
    for name, eager in layers.items():
        changed = {form: replace(eager, form=form) for form in forms}
        results = measure_all([eager, *changed.values()], conditions, say)
        report.notes += failures(results)
        for form, layer in changed.items():
            before, after = results[eager], results[layer]
            gain = ratio(before, after)
            compiling = None if after.failure is not None else after.first_seconds - after.seconds
            rows.append([f"{name}, {form}", *cost(before), *cost(after), times(gain.seconds), time(compiling)])
            report.data["layers"].append(
                {
                    "name": name,
                    "form": form,
                    "eager": before.as_dict(),
                    "compiled": after.as_dict(),
                    "eager_over_compiled": gain.as_dict(),
                    "compile_seconds": compiling,
                }
            )
    title = f"Exported layers, C4, {side}×{side}, batch {batch}: forward and backward"
    report.tables.append(
        table(title, ["layer", "eager", "memory", "compiled", "memory", "times faster", "compiling"], rows)
    )
    return report
