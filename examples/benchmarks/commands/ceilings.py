"""``ceilings``: what the layers reach of the operations and the memory traffic that the device can do.

Counted is what the formula asks for, as is usual for attention: two products of C channels for every score in the
forward pass and five in the backward pass, one of which makes the scores again; queries, keys, values and outputs once
each in the forward pass, and they and their gradients in the backward pass. The time is that of the whole layer,
projections included.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict

from examples.benchmarks.commands.layer_cases import CASES, QUICK, Case
from examples.benchmarks.conditions import Conditions
from examples.benchmarks.processes import measure_all
from examples.benchmarks.report import Report, failures, table
from examples.benchmarks.subjects import Copy, Product

_WIDTHS = {"float64": 8, "float32": 4, "bfloat16": 2}  # bytes of a number
_DISC = 21  # positions in the disc that C8 has for a window of 5×5


def run(conditions: Conditions, say: Callable[[str], None]) -> Report:
    """Measure the ceilings and all layers."""
    large = conditions.device == "cuda"
    product = Product(64 if conditions.quick else 8192 if large else 2048)
    copy = Copy(2**12 if conditions.quick else 2**28 if large else 2**25)
    cases = QUICK if conditions.quick else CASES
    results = measure_all([product, copy, *(case.ours() for case in cases)], conditions, say)
    report = Report("ceilings", conditions, data={"cases": []}, notes=failures(results))
    width = _WIDTHS[conditions.dtype]
    if results[product].failure is not None or results[copy].failure is not None:
        return report
    fastest = product.operations / results[product].seconds
    widest = 2 * copy.count * width / results[copy].seconds
    report.data |= {"operations_per_second": fastest, "bytes_per_second": widest}
    rows = [["ceiling", f"{fastest / 1e12:.3g}", "", f"{widest / 1e9:.3g}", ""]]
    for case in cases:
        result = results[case.ours()]
        if result.failure is not None:
            continue
        done = operations(case) / result.seconds
        moved = numbers(case) * width / result.seconds
        rows.append(
            [
                case.name,
                f"{done / 1e12:.3g}",
                f"{100 * done / fastest:.2g} %",
                f"{moved / 1e9:.3g}",
                f"{100 * moved / widest:.2g} %",
            ]
        )
        report.data["cases"].append(
            {"name": case.name}
            | asdict(case)
            | result.as_dict()
            | {"operations_per_second": done, "bytes_per_second": moved}
        )
    columns = ["layer", "TFLOP/s", "of the ceiling", "GB/s", "of the ceiling"]
    report.tables.append(table("Against what the device can do: forward and backward", columns, rows))
    return report


def operations(case: Case) -> float:
    """Multiplications and additions of the formula, forward and backward."""
    return 7 * 2 * case.ours().head_fields * scores(case)


def scores(case: Case) -> float:
    """How many scores the formula has."""
    ours, positions = case.ours(), case.size**2
    neighbours = positions if case.kernel_size is None else _DISC if case.rotations == 8 else case.kernel_size**2
    queries = case.rotations * (case.rotations if case.query == "all" else 1)
    return float(case.batch * ours.num_heads * queries * positions * case.rotations * neighbours)


def numbers(case: Case) -> float:
    """How many numbers have to be read or written at least, forward and backward."""
    ours = case.ours()
    one = case.batch * ours.num_heads * ours.head_fields * case.rotations * math.prod(ours.shape)
    return 12.0 * one
