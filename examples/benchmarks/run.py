"""Running one command, or all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from examples.benchmarks.commands import (
    attentive,
    backends,
    ceilings,
    compiled,
    dense,
    layers,
    point_edges,
    points,
    rotary,
    scaling,
    step,
)
from examples.benchmarks.conditions import Conditions
from examples.benchmarks.environment import environment
from examples.benchmarks.processes import measure_all
from examples.benchmarks.report import Report
from examples.benchmarks.subjects import GSA, AttGConvs, LieTransformer, Platonic, Subject
from examples.benchmarks.subjects.subject import Poses

Say = Callable[[str], None]


class UnusableError(Exception):
    """A device or a reference that cannot be used, and why."""


@dataclass(frozen=True)
class Options:
    """What a run was asked for.

    Attributes:
        conditions: for all measurements.
        folder: for everything that is written.
        g_selfatt, gevit, platonic, att_gconvs, lie_transformer: checkouts of references; None to go without.
        lie_conv: of LieConv, which ``lie_transformer`` needs; None where it is in that checkout.
        network: of ``step``; None for all.
        query: of ``step``.
    """

    conditions: Conditions
    folder: Path
    g_selfatt: str | None = None
    gevit: str | None = None
    platonic: str | None = None
    att_gconvs: str | None = None
    lie_transformer: str | None = None
    lie_conv: str | None = None
    network: str | None = None
    query: Poses = "all"

    @property
    def layer_references(self) -> dict[str, str]:
        """The checkouts for ``layers``, by their names."""
        named = {"g_selfatt": self.g_selfatt, "GE-ViT": self.gevit}
        return {name: path for name, path in named.items() if path is not None}

    def check(self) -> None:
        """Run every reference once, on very little: what is missing should not show after an hour.

        Raises:
            UnusableError: there is no such device, or a reference does not run.
        """
        if self.conditions.device == "cuda" and environment()["hardware"]["gpu"] is None:
            raise UnusableError("--device cuda: torch finds no CUDA device")
        if self.lie_conv is not None and self.lie_transformer is None:
            raise UnusableError("--lie-conv: got it without --lie-transformer, the checkout that needs it")
        probes: list[Subject] = [GSA(path, 2, 3, 1, kernel_size=3) for path in self.layer_references.values()]
        if self.platonic is not None:
            probes.append(Platonic(self.platonic, 2, 1, 48, 2))
        if self.att_gconvs is not None:
            probes.append(AttGConvs(self.att_gconvs, None, 2))
        if self.lie_transformer is not None:
            probes.append(LieTransformer(self.lie_transformer, self.lie_conv, 3, 2, 1, 4, 1, 2))
        results = measure_all(probes, self.conditions.hurried())
        for result in results.values():
            if result.failure is not None:
                raise UnusableError(result.failure)


def _layers(options: Options, say: Say) -> Iterator[Report]:
    yield layers.run(options.conditions, options.layer_references, say)


def _backends(options: Options, say: Say) -> Iterator[Report]:
    yield backends.run(options.conditions, say)


def _scaling(options: Options, say: Say) -> Iterator[Report]:
    # Curves show powers, not percents: one process a point.
    yield scaling.run(replace(options.conditions, repeats=1), options.folder, say)


def _dense(options: Options, say: Say) -> Iterator[Report]:
    yield dense.run(options.conditions, say)


def _rotary(options: Options, say: Say) -> Iterator[Report]:
    yield rotary.run(options.conditions, options.platonic, say)


def _step(options: Options, say: Say) -> Iterator[Report]:
    for network in step.NETWORKS if options.network is None else [options.network]:
        yield step.run(options.conditions, network, options.query, say)


def _attentive(options: Options, say: Say) -> Iterator[Report]:
    yield attentive.run(options.conditions, options.folder, options.att_gconvs, say)
    yield attentive.run_large(options.conditions, say)


def _points(options: Options, say: Say) -> Iterator[Report]:
    yield points.run(options.conditions, options.lie_transformer, options.lie_conv, say)
    yield points.run_frames(options.conditions, options.platonic, say)
    # Curves show powers, not percents: one process a point.
    yield point_edges.run(replace(options.conditions, repeats=1), options.folder, say)
    yield points.run_training(options.conditions, say)


def _ceilings(options: Options, say: Say) -> Iterator[Report]:
    yield ceilings.run(options.conditions, say)


def _compile(options: Options, say: Say) -> Iterator[Report]:
    yield compiled.run(options.conditions, say)


COMMANDS: dict[str, Callable[[Options, Say], Iterator[Report]]] = {
    "layers": _layers,
    "backends": _backends,
    "scaling": _scaling,
    "dense": _dense,
    "rotary": _rotary,
    "step": _step,
    "attentive": _attentive,
    "points": _points,
    "compile": _compile,
    "ceilings": _ceilings,
}
"""The commands by name, in the order of ``all``."""


def run(command: str, options: Options, say: Say) -> Iterator[Report]:
    """The reports of one command, or of ``"all"`` of them, as they are finished."""
    for name in COMMANDS if command == "all" else [command]:
        yield from COMMANDS[name](options, say)
