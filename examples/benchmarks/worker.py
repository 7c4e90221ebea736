"""The program of the processes in which subjects are measured.

It reads conditions and a list of subjects as JSON from its input and writes a line of JSON for each: what was measured,
or why nothing was.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from contextlib import redirect_stdout
from typing import Any

from examples.benchmarks.conditions import Conditions
from examples.benchmarks.subjects import Subject, from_json


def main() -> None:
    """Measure what the input asks for."""
    order = json.load(sys.stdin)
    for data in order["subjects"]:
        # Whatever libraries print is not an answer.
        with redirect_stdout(sys.stderr):
            answer = _answer(from_json(data), Conditions(**order["conditions"]))
        print(json.dumps(answer), flush=True)


def _answer(subject: Subject, conditions: Conditions) -> dict[str, Any]:
    # escnn warns at import that an optional package, which no finite group needs, is missing.
    warnings.filterwarnings("ignore", message=".*py3nj.*")
    from examples.benchmarks.measure import measure

    try:
        return measure(subject, conditions).as_dict()
    except Exception as error:
        # One case that fails, for want of memory or of a feature of the device, is no reason to lose all others.
        return {"failure": f"{type(error).__name__}: {_first_line(error)}"}


def _first_line(error: Exception) -> str:
    return (str(error).strip() or "no message").splitlines()[0]


if __name__ == "__main__":
    main()
    # Compilers leave threads and processes behind that take their time to end.
    sys.stdout.flush()
    os._exit(0)
