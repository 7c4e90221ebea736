"""Time and memory of subjects, each measured in separate processes.

A subject is a function that can be pickled. It does its imports, which are not counted, and returns a builder: a
function of device and precision that returns a step.
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
    """The settings shared by all measurements of a run."""

    device: str = "cpu"  # or "cuda"
    dtype: str = "float32"  # by its name in torch
    threads: int = 2  # that torch may use
    seed: int = 0  # of weights and inputs
    repeats: int = 3  # the processes in which each subject is measured
    warmup: int = 3  # untimed steps, at most; fewer if they take more than a third of `seconds`
    steps: int = 10  # timed steps in a process, at most
    seconds: float = 8.0  # after which a process starts no further step; at least two are timed
    patience: float = 1800.0  # seconds after which a process is terminated
    quick: bool = False  # only to check that everything works: tiny sizes, one process for all subjects
    profile: bool = False  # whether to profile a step after the timed ones

    def hurried(self) -> Conditions:
        """These conditions for a quick run."""
        return replace(self, threads=1, repeats=1, warmup=1, steps=2, quick=True)


@dataclass(frozen=True)
class Result:
    """One subject, over all its processes. A failed one has no numbers."""

    seconds: float | None = None  # of the fastest step
    median_seconds: float | None = None  # of all timed steps
    first_seconds: float | None = None  # of the first step, including set-up and compilation, at best
    peak_bytes: int | None = None  # at most, above the process after its imports; the median over the processes
    runs: Sequence[dict[str, Any]] = ()  # the results of each process
    failure: str | None = None

    @classmethod
    def of(cls, runs: Sequence[dict[str, Any]]) -> Result:
        """Combine the results of the processes."""
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
    """The ratio of each cost; None if either failed or the other is zero."""
    pairs = {cost: (getattr(more, cost), getattr(less, cost)) for cost in COSTS}
    return {cost: None if a is None or b is None or b <= 0 else a / b for cost, (a, b) in pairs.items()}


def gradient_step(forward: Callable[..., Any], inputs: Iterable[Tensor], parameters: Iterable[Tensor] = ()) -> Step:
    """A forward pass, and the gradients of its outputs times fixed random tensors for all inputs and parameters."""
    arguments = [x.requires_grad_() for x in inputs]
    leaves = [*arguments, *parameters]
    weights: list[Tensor] = []

    def step() -> None:
        for leaf in leaves:
            leaf.grad = None
        y = forward(*arguments)
        outputs = y if isinstance(y, tuple) else (y,)
        weights.extend(torch.randn_like(y) for y in outputs[len(weights) :])
        torch.autograd.backward(outputs, weights)

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
    """Measure subjects by name alternately: A B A B.

    Processes are independent, and a slow phase of the machine affects all subjects alike. A quick run has one process
    for all of our own. ``say`` is called with the current subject.
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
                numbers = Result.of([run])
                say(f"{name}: {numbers.failure or f'{1e3 * (numbers.seconds or 0):.3g} ms'}")
    return {name: Result.of(runs) for name, runs in found.items()}


def ask(subjects: Sequence[Subject], conditions: Conditions) -> list[dict[str, Any]]:
    """The results of a fresh process for each subject."""
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
    """The program of a fresh process: measure the requested subjects, and write a line of JSON for each."""
    # escnn warns at import that an optional package, which no finite group needs, is missing.
    warnings.filterwarnings("ignore", message=".*py3nj.*")
    conditions, subjects = pickle.load(sys.stdin.buffer)
    for subject in subjects:
        # Output of libraries must not mix with the answer.
        with redirect_stdout(sys.stderr):
            found = attempt(subject, conditions)
        print(json.dumps(found), flush=True)
    # Compilers leave threads and processes behind that take their time to end.
    os._exit(0)


def attempt(subject: Subject, conditions: Conditions) -> dict[str, Any]:
    """The result of this process, or the reason of its failure, such as missing memory or a missing feature."""
    try:
        return measure_here(subject, conditions)
    except Exception as error:
        return {"failure": f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"}


def measure_here(subject: Subject, conditions: Conditions) -> dict[str, Any]:
    """Build a subject in this process and run its steps: seconds of the first and of the timed ones, and bytes."""
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
    """Start torch's threads and load its libraries, which are not counted for any subject."""
    x = torch.ones(1, 1, 64, 64, **place, requires_grad=True)
    y = torch.nn.functional.scaled_dot_product_attention(x @ x, x, x)
    # Started from a given gradient, the first backward pass of a process imports sympy.
    y.backward(torch.ones_like(y))


def _timed(step: Step, wait: Step) -> float:
    """The seconds of a step, until the device has finished."""
    wait()
    start = time.perf_counter()
    step()
    wait()
    return time.perf_counter() - start


def _repeat(timed: Callable[[], float], most: int, seconds: float, *, least: int) -> list[float]:
    """Run steps until there are ``most``, or ``least`` and the time is over."""
    taken: list[float] = []
    while len(taken) < most and (len(taken) < least or sum(taken) < seconds):
        taken.append(timed())
    return taken


class PeakMemory:
    """Peak memory above that at the construction of this object, in bytes.

    On CUDA it is the memory allocated by torch. On a CPU it is the resident memory of the process: Linux keeps the
    highest value since the last reset, other systems since the start of the process, which is right as long as earlier
    peaks were lower.
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
