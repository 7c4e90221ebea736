"""Run the benchmark from a checkout: ``python examples/benchmarks <command>``."""

import sys
from pathlib import Path

# A folder that is run puts itself on the path. All imports go from the checkout instead: a file here must not be taken
# for the module of the standard library that has its name.
sys.path[0] = str(Path(__file__).resolve().parents[2])

if __name__ == "__main__":
    from examples.benchmarks.cli import app

    app(prog_name="benchmarks")
