"""Run the experiments from a checkout: ``python examples/point_clouds <command>``."""

import sys
from pathlib import Path

# A folder that is run puts itself on the path; all imports go from the checkout instead.
sys.path[0] = str(Path(__file__).resolve().parents[2])

if __name__ == "__main__":
    from examples.point_clouds.cli import app

    app(prog_name="point_clouds")
