"""Measuring many subjects, each in processes of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from examples.benchmarks.conditions import Conditions
from examples.benchmarks.results import Result
from examples.benchmarks.subjects import Subject, to_json

_ROOT = Path(__file__).resolve().parents[2]


def measure_all(
    subjects: Sequence[Subject], conditions: Conditions, say: Callable[[str], None] = lambda _: None
) -> dict[Subject, Result]:
    """Measure the subjects in turn, again and again: A B A B.

    A process knows nothing of those before it, and what slows the machine for a while falls on all alike.

    Args:
        subjects: what is compared with each other. One that is there twice is measured once.
        conditions: for all of them. A quick run has one process for all of our own.
        say: is told what is being measured.
    """
    subjects = list(dict.fromkeys(subjects))
    if conditions.quick:
        return _quick(subjects, conditions, say)
    answers: dict[Subject, list[dict[str, Any]]] = {subject: [] for subject in subjects}
    for number in range(conditions.repeats):
        for subject in subjects:
            if not any("failure" in answer for answer in answers[subject]):
                say(f"{subject} (process {number + 1} of {conditions.repeats})")
                answers[subject] += _ask([subject], conditions)
    return {subject: _result(found) for subject, found in answers.items()}


def _quick(subjects: list[Subject], conditions: Conditions, say: Callable[[str], None]) -> dict[Subject, Result]:
    # Checkouts may hold packages of the same name: each gets a process.
    groups: dict[str | None, list[Subject]] = {}
    for subject in subjects:
        groups.setdefault(subject.checkout, []).append(subject)
    results: dict[Subject, Result] = {}
    for group in groups.values():
        say(f"{len(group)} subjects in one process")
        answers = _ask(group, conditions)
        results |= {subject: _result([answer]) for subject, answer in zip(group, answers, strict=True)}
    return {subject: results[subject] for subject in subjects}


def _result(answers: Sequence[dict[str, Any]]) -> Result:
    failures = [answer["failure"] for answer in answers if "failure" in answer]
    return Result(failure=failures[0]) if failures else Result(tuple(answers))


def _ask(subjects: Sequence[Subject], conditions: Conditions) -> list[dict[str, Any]]:
    """The answers of a fresh process, one for each subject."""
    order = {"conditions": asdict(conditions), "subjects": [to_json(subject) for subject in subjects]}
    paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    try:
        process = subprocess.run(
            [sys.executable, "-m", "examples.benchmarks.worker"],
            input=json.dumps(order),
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(paths),
                # Thread pools that are made at import time take the number from here.
                "OMP_NUM_THREADS": str(conditions.threads),
            },
            capture_output=True,
            text=True,
            timeout=conditions.patience,
        )
    except subprocess.TimeoutExpired:
        return [{"failure": f"no answer within {conditions.patience:g} s"}] * len(subjects)
    answers = [json.loads(line) for line in process.stdout.splitlines()]
    if len(answers) < len(subjects):
        # A negative status is a signal; the system ends processes that way when the memory is used up.
        last = (process.stderr.strip().splitlines() or ["it wrote nothing"])[-1]
        failure = {"failure": f"the process ended with status {process.returncode}: {last}"}
        answers += [failure] * (len(subjects) - len(answers))
    return answers
