"""Train the recipes from a checkout: ``python examples/recipes <command>``."""

import sys
from pathlib import Path

# A folder that is run puts itself on the path; all imports go from the checkout instead.
sys.path[0] = str(Path(__file__).resolve().parents[2])

if __name__ == "__main__":
    from examples.recipes.cli import app

    app(prog_name="recipes")
