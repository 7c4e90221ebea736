"""``layers``, ``backends`` and ``ceilings``: single layers, between the fields of the rotMNIST network of GSA-Nets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from escnn_attention.functional import ON_GRIDS
from examples.benchmarks.measure import Subject
from examples.benchmarks.references import gsa
from examples.benchmarks.report import Report, Run
from examples.benchmarks.subjects import attention, convolution, copy, plain_attention, product, widened

HEADS, CHANNELS = 9, 10
_REFERENCES = {"g_selfatt": "g_selfatt", "gevit": "GE-ViT"}  # by the options that name their checkouts
_SLACK = 1.1  # the allowed difference of two equal runs
_WIDTHS = {"float64": 8, "float32": 4, "bfloat16": 2}  # bytes of a number
_DISC = 21  # positions in the disc that C8 has for a window of 5×5


@dataclass(frozen=True)
class Case:
    """A layer between 20 regular fields with 9 heads of 10 channels, as in the rotMNIST network of GSA-Nets.

    Rotations by 45° do not map a square window onto itself: for C8 ours is the disc of 21 positions among the 25 of the
    reference, which always has all query poses and separable MLPs. Targets are for the CPU.
    """

    rotations: int  # the group, C4 or C8
    size: int  # of the images
    batch: int
    kernel_size: int | None  # None for global attention
    query: str
    encoding: str | None
    faster: float  # required ratio of the time of the reference
    smaller: float  # required ratio of the memory
    slower: float | None = None  # allowed multiple of the time of the convolution

    @property
    def name(self) -> str:
        """The name for tables."""
        window = f"{self.kernel_size}×{self.kernel_size}" if self.kernel_size else f"global {self.size}×{self.size}"
        return f"p{self.rotations}, {window}, {self.query}" + (", Fourier" if self.encoding == "fourier" else "")

    @property
    def setting(self) -> str:
        """The settings shared with the layers of the comparison."""
        return f"p{self.rotations}, {self.size}×{self.size}, window {self.kernel_size}"

    def targets(self, device: str) -> tuple[float, float, float | None]:
        """Required gains in time and memory over the reference, and the allowed time relative to the convolution."""
        if device == "cuda":
            return 10, 10, None if self.slower is None else 3
        return self.faster, self.smaller, self.slower

    @property
    def _where(self) -> tuple[str, tuple[int, int], int]:
        return f"c{self.rotations}", (self.size, self.size), self.batch

    def ours(self, backend: str = "auto") -> Subject:
        """Our layer."""
        options = {"kernel_size": self.kernel_size, "query": self.query, "encoding": self.encoding}
        return partial(attention, *self._where, num_heads=HEADS, head_fields=CHANNELS, backend=backend, **options)

    def others(self, checkouts: Mapping[str, str]) -> dict[str, Subject]:
        """The layers of the comparison, by name."""
        reference = partial(gsa, self.rotations, self.size, self.batch, self.kernel_size)
        found: dict[str, Subject] = {
            f"{name}, {self.setting}": partial(reference, checkout=checkouts[option])
            for option, name in _REFERENCES.items()
            if option in checkouts
        }
        found[f"R2Conv, {self.setting}"] = partial(convolution, *self._where)
        if self.kernel_size is None:
            # On the vectors that the Fourier identity makes.
            tokens = self.rotations * self.size**2
            queries = tokens if self.query == "all" else self.size**2
            sizes = (self.batch, HEADS, self.rotations, queries, tokens, widened(CHANNELS))
            found[f"plain attention, {self.setting}"] = partial(plain_attention, *sizes)
        return found

    def scores(self) -> float:
        """The number of scores of the formula."""
        positions = self.size**2
        neighbours = positions if self.kernel_size is None else _DISC if self.rotations == 8 else self.kernel_size**2
        queries = self.rotations * (self.rotations if self.query == "all" else 1)
        return float(self.batch * HEADS * queries * positions * self.rotations * neighbours)

    def operations(self) -> float:
        """Multiplications and additions of the formula, forward and backward.

        Two products of C channels for every score forward, five backward, and one to recompute the scores.
        """
        return 7 * 2 * CHANNELS * self.scores()

    def numbers(self) -> float:
        """The least number of numbers read or written, forward and backward.

        Queries, keys, values and outputs once each in the forward pass, they and their gradients in the backward pass.
        """
        return 12.0 * self.batch * HEADS * CHANNELS * self.rotations * self.size**2


CASES = (
    Case(4, 24, 8, 5, "all", "mlp", faster=4, smaller=6),
    Case(4, 24, 8, 9, "all", "mlp", faster=5, smaller=20),
    Case(8, 24, 8, 5, "all", "mlp", faster=4, smaller=25),
    Case(4, 28, 1, None, "all", "fourier", faster=10, smaller=15),
    Case(4, 24, 8, 5, "own", None, faster=10, smaller=6, slower=10),
    Case(8, 24, 8, 5, "own", None, faster=22, smaller=25, slower=9),
)

QUICK = tuple(replace(CASES[i], size=6, batch=1) for i in (0, 3))


def layers(run: Run) -> Report:
    """All cases against the published implementations, R2Conv and plain attention."""
    report, cases = Report("layers", run), QUICK if run.quick else CASES
    groups: dict[str, dict[str, Subject]] = {}
    for case in cases:
        # Cases with the same reference are compared with the same runs of it.
        group = groups.setdefault("" if run.quick else case.setting, {})
        group |= case.others(run.checkouts) | {case.name: case.ours()}
    for group in groups.values():
        report.measure(group)
    targets = {case: case.targets(run.conditions.device) for case in cases}
    for name in (name for option, name in _REFERENCES.items() if option in run.checkouts):
        rows = []
        for case, (faster, smaller, _) in targets.items():
            names = (f"{name}, {case.setting}", case.name)
            gains = report.check_gains(case.name, name, names, faster, smaller)
            rows.append([case.name, *report.cost(names[0]), *report.cost(case.name), *gains])
        columns = ["layer", name, "memory", "ours", "memory", "times faster", "times smaller"]
        report.table(f"Against {name}: forward and backward", columns, rows)
    rows = []
    for case, (_, _, slowest) in targets.items():
        rows.append([case.name, *report.cost(case.name)])
        for other in (f"R2Conv, {case.setting}", f"plain attention, {case.setting}"):
            known = other in report.results
            rows[-1] += [report.cost(other)[0], report.gains(case.name, other)[0]] if known else ["", ""]
        if slowest is not None:
            slower = report.ratio(case.name, f"R2Conv, {case.setting}")["seconds"]
            report.check(f"{case.name}: time of ours / R2Conv 5×5", slower, "≤", slowest)
    columns = ["layer", "ours", "memory", "R2Conv 5×5", "ours / R2Conv", "plain attention", "ours / plain"]
    caption = "plain attention: scaled_dot_product_attention, on vectors as wide as the Fourier identity makes them"
    report.table("Against a convolution and plain attention: forward and backward", columns, rows, caption)
    return report


def backends(run: Run) -> Report:
    """The layers with every backend except the reference, and whether "auto" chooses the fastest."""
    report, cases = Report("backends", run), QUICK if run.quick else CASES
    names = ["auto", *(name for name in ON_GRIDS.backends if name != "reference")]
    report.measure({f"{case.name}, {name}": case.ours(name) for case in cases for name in names})
    report.notes = [note for note in report.notes if "cannot serve this call" not in note]
    rows = []
    for case in cases:
        labels = [f"{case.name}, {name}" for name in names]
        found = {label: seconds for label in labels if (seconds := report.results[label].seconds) is not None}
        rows.append([case.name, *(", ".join(report.cost(label)) if label in found else "–" for label in labels)])
        others = {label: seconds for label, seconds in found.items() if label != labels[0]}
        if others and not run.quick:
            slower = report.ratio(labels[0], min(others, key=others.__getitem__))["seconds"]
            report.check(f"{case.name}: time of 'auto' / the fastest backend", slower, "≤", _SLACK)
    caption = "–: it cannot serve this layer on this device"
    report.table("Every backend: forward and backward", ["layer", *names], rows, caption)
    return report


def ceilings(run: Run) -> Report:
    """The operations and memory traffic of the layers, projections included, relative to the peak of the device.

    Counts are those of the formula, :meth:`Case.operations` and :meth:`Case.numbers`.
    """
    report, cases = Report("ceilings", run), QUICK if run.quick else CASES
    large = run.conditions.device == "cuda"
    side = 64 if run.quick else 8192 if large else 2048
    count = 2**12 if run.quick else 2**28 if large else 2**25
    ceiling: dict[str, Subject] = {"product of matrices": partial(product, side), "copy": partial(copy, count)}
    report.measure(ceiling | {case.name: case.ours() for case in cases})
    product_time, copy_time = (report.results[name].seconds for name in ceiling)
    if product_time is None or copy_time is None:
        return report
    width = _WIDTHS[run.conditions.dtype]
    fastest, widest = 2.0 * side**3 / product_time, 2 * count * width / copy_time
    report.data["rates"] = {"ceiling": {"operations_per_second": fastest, "bytes_per_second": widest}}
    rows = [["ceiling", f"{fastest / 1e12:.3g}", "", f"{widest / 1e9:.3g}", ""]]
    for case in cases:
        seconds = report.results[case.name].seconds
        if seconds is not None:
            done, moved = case.operations() / seconds, case.numbers() * width / seconds
            shares = [f"{100 * done / fastest:.2g} %", f"{100 * moved / widest:.2g} %"]
            rows.append([case.name, f"{done / 1e12:.3g}", shares[0], f"{moved / 1e9:.3g}", shares[1]])
            report.data["rates"][case.name] = {"operations_per_second": done, "bytes_per_second": moved}
    columns = ["layer", "TFLOP/s", "of the ceiling", "GB/s", "of the ceiling"]
    report.table("Against what the device can do: forward and backward", columns, rows)
    return report
