"""Time and memory of subjects, each measured in processes of its own.

A subject is a function that can be pickled. It imports what it needs, which is not counted, and returns what builds it:
a function of the device and the precision, which returns a step.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Step = Callable[[], object]
Place = dict[str, Any]  # device and precision, as torch takes them
Build = Callable[[Place], Step]
Subject = partial[Build]

COSTS = ("seconds", "median_seconds", "peak_bytes")
_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Conditions:
    """What all measurements of a run have in common."""

    device: str = "cpu"  # or "cuda"
    dtype: str = "float32"  # by its name in torch
    threads: int = 2  # that torch may use
    seed: int = 0  # of weights and inputs
    repeats: int = 3  # the processes in which each subject is measured
    warmup: int = 3  # steps that are not timed, at most; fewer where they take more than a third of `seconds`
    steps: int = 10  # that are timed in a process, at most
    seconds: float = 8.0  # after which a process starts no further step; two are timed however long they take
    patience: float = 1800.0  # seconds after which a process is given up
    quick: bool = False  # only to show that everything works: tiny sizes, one process for all subjects
    profile: bool = False  # whether to find out where the time of a step goes, after the timed ones

    def hurried(self) -> Conditions:
        """These conditions for a quick run."""
        return replace(self, threads=1, repeats=1, warmup=1, steps=2, quick=True)


@dataclass(frozen=True)
class Result:
    """One subject, over all processes in which it was measured. Where it failed there are no numbers."""

    seconds: float | None = None  # of the fastest step
    median_seconds: float | None = None  # of all timed steps
    first_seconds: float | None = None  # of the first step, with all that is set up or compiled in it, at best
    peak_bytes: int | None = None  # at most, above the process after its imports; the median over the processes
    runs: Sequence[dict[str, Any]] = ()  # what each process found
    failure: str | None = None

    @classmethod
    def of(cls, runs: Sequence[dict[str, Any]]) -> Result:
        """From what each process found."""
        failures = [run["failure"] for run in runs if "failure" in run]
        if failures:
            return cls(failure=failures[0])
        steps = [step for run in runs for step in run["steps"]]
        peak = int(statistics.median(run["peak"] for run in runs))
        return cls(min(steps), statistics.median(steps), min(run["first"] for run in runs), peak, runs)

    def as_dict(self) -> dict[str, Any]:
        """For JSON: the numbers, or the failure."""
        return {name: value for name, value in vars(self).items() if (name == "failure") == bool(self.failure)}


def ratio(more: Result, less: Result) -> dict[str, float | None]:
    """How many times more of each cost the one takes; None where either failed or the other is counted as nothing."""
    pairs = {cost: (getattr(more, cost), getattr(less, cost)) for cost in COSTS}
    return {cost: None if a is None or b is None or b <= 0 else a / b for cost, (a, b) in pairs.items()}


def gradient_step(forward: Callable[..., Tensor], inputs: Iterable[Tensor], parameters: Iterable[Tensor] = ()) -> Step:
    """A forward pass, and the gradients of the output times a fixed random tensor for all inputs and parameters."""
    arguments = [x.requires_grad_() for x in inputs]
    leaves = [*arguments, *parameters]
    weight: Tensor | None = None

    def step() -> None:
        nonlocal weight
        for leaf in leaves:
            leaf.grad = None
        y = forward(*arguments)
        if weight is None:
            weight = torch.randn_like(y)
        y.backward(weight)

    return step


def training_step(
    network: Callable[[Tensor], Tensor], x: Tensor, num_classes: int, parameters: Iterable[torch.nn.Parameter]
) -> Step:
    """A step of Adam on random labels, one for each image or point of the input."""
    labels = torch.randint(num_classes, (len(x),), device=x.device)
    optimizer = torch.optim.Adam(parameters, lr=1e-3)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        torch.nn.functional.cross_entropy(network(x), labels).backward()
        optimizer.step()

    return step


def measure(
    subjects: Mapping[str, Subject], conditions: Conditions, say: Callable[[str], None] = lambda _: None
) -> dict[str, Result]:
    """Measure subjects by name in turn, again and again: A B A B.

    A process knows nothing of those before it, and what slows the machine for a while falls on all alike. A quick run
    has one process for all of our own. ``say`` is told what is being measured.
    """
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in subjects}
    groups = [[name] for name in subjects] * conditions.repeats
    if conditions.quick:
        # Checkouts may hold packages of the same name: each gets a process.
        checkouts = {name: subject.keywords.get("checkout") for name, subject in subjects.items()}
        groups = [[name for name in subjects if checkouts[name] == one] for one in dict.fromkeys(checkouts.values())]
    for group in groups:
        if not any("failure" in run for name in group for run in found[name]):
            say(f"{', '.join(group)} (process {len(found[group[0]]) + 1} of {conditions.repeats})")
            for name, run in zip(group, ask([subjects[name] for name in group], conditions), strict=True):
                found[name].append(run)
    return {name: Result.of(runs) for name, runs in found.items()}


def ask(subjects: Sequence[Subject], conditions: Conditions) -> list[dict[str, Any]]:
    """What a fresh process finds, for each subject."""
    paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    # Thread pools that are made at import time take their number from the environment.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": str(conditions.threads)}
    command = [sys.executable, "-c", "from examples.benchmarks.measure import answer; answer()"]
    options = {"input": pickle.dumps((conditions, subjects)), "capture_output": True, "timeout": conditions.patience}
    try:
        process = subprocess.run(command, env=environment, **options)
    except subprocess.TimeoutExpired:
        return [{"failure": f"no answer within {conditions.patience:g} s"}] * len(subjects)
    found = [json.loads(line) for line in process.stdout.splitlines()]
    # A negative status is a signal; the system ends processes that way when the memory is used up.
    last = (process.stderr.decode(errors="replace").strip().splitlines() or ["it wrote nothing"])[-1]
    failure = {"failure": f"the process ended with status {process.returncode}: {last}"}
    return found + [failure] * (len(subjects) - len(found))


def answer() -> None:
    """The program of a fresh process: measure what the input asks for, and write a line of JSON for each subject."""
    # escnn warns at import that an optional package, which no finite group needs, is missing.
    warnings.filterwarnings("ignore", message=".*py3nj.*")
    conditions, subjects = pickle.load(sys.stdin.buffer)
    for subject in subjects:
        # Whatever libraries print is not an answer.
        with redirect_stdout(sys.stderr):
            found = attempt(subject, conditions)
        print(json.dumps(found), flush=True)
    # Compilers leave threads and processes behind that take their time to end.
    os._exit(0)


def attempt(subject: Subject, conditions: Conditions) -> dict[str, Any]:
    """What this process finds, or why it fails: for want of memory or of a feature of the device, say."""
    try:
        return measure_here(subject, conditions)
    except Exception as error:
        return {"failure": f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"}


def measure_here(subject: Subject, conditions: Conditions) -> dict[str, Any]:
    """Build a subject in this process and take its steps: seconds of the first and of the timed ones, and bytes."""
    torch.set_num_threads(conditions.threads)
    place = {"device": conditions.device, "dtype": getattr(torch, conditions.dtype)}
    build = subject()
    _settle(place)
    memory = PeakMemory(conditions.device)
    torch.manual_seed(conditions.seed)
    step = build(place)
    timed = partial(_timed, step, torch.cuda.synchronize if conditions.device == "cuda" else lambda: None)
    first = timed()
    _repeat(timed, conditions.warmup - 1, conditions.seconds / 3 - first, least=0)
    steps = _repeat(timed, conditions.steps, conditions.seconds, least=2)
    found = {"first": first, "steps": steps, "peak": memory.read()}
    if conditions.profile:
        from examples.benchmarks.profile import shares

        found["seconds_by_kind"] = shares(step, conditions.device)
    return found


def _settle(place: Place) -> None:
    """Have torch start its threads and load what it loads at the first use, which no subject is charged for."""
    x = torch.ones(1, 1, 64, 64, **place, requires_grad=True)
    y = torch.nn.functional.scaled_dot_product_attention(x @ x, x, x)
    # Started from a given gradient, the first backward pass of a process imports sympy.
    y.backward(torch.ones_like(y))


def _timed(step: Step, wait: Step) -> float:
    """The seconds of a step, until the device has done what it was given to do."""
    wait()
    start = time.perf_counter()
    step()
    wait()
    return time.perf_counter() - start


def _repeat(timed: Callable[[], float], most: int, seconds: float, *, least: int) -> list[float]:
    """Steps until there are ``most``, or ``least`` and the time is over."""
    taken: list[float] = []
    while len(taken) < most and (len(taken) < least or sum(taken) < seconds):
        taken.append(timed())
    return taken


class PeakMemory:
    """Peak memory above what is held when this object is made, in bytes.

    On CUDA it is what torch has allocated. On a CPU it is the resident memory of the process: Linux keeps the highest
    value since it was last told to forget it, other systems the highest value since the process started, which is
    right as long as nothing before held more.
    """

    def __init__(self, device: str):
        self._cuda, self._linux = device == "cuda", False
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
        else:
            with suppress(OSError):
                self._linux = bool(Path("/proc/self/clear_refs").write_text("5"))
        self._before = torch.cuda.memory_allocated() if self._cuda else self._resident("VmRSS")

    def read(self) -> int:
        """The peak so far."""
        return (torch.cuda.max_memory_allocated() if self._cuda else self._resident("VmHWM")) - self._before

    def _resident(self, entry: str) -> int:
        """An entry of Linux's description of this process; elsewhere the highest, which macOS counts in bytes."""
        if self._linux:
            lines = Path("/proc/self/status").read_text().splitlines()
            return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{entry}:"))
        highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return highest if sys.platform == "darwin" else 1024 * highest
