"""Draw the way of one tensor through the package: the picture of the page on extending it.

    python examples/way.py --output docs/_static

Every box is a file, in the room that it lies in, with its number in the order in which features come through. Needs
matplotlib: the extra "plot".
"""

import argparse
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

ROOMS = {
    "nn/": "types",
    "plain/": "tensors",
    "functional/": "attention",
    "functional/backends/": "one file each",
    "functional/native/": "C++",
}
# In the order of the way: what each does, and its column.
STATIONS = {
    "nn/module.py": ("takes the tensor out,\nputs the output in", 1),
    "nn/arguments.py": ("checks type,\nprecision", 0),
    "plain/self_attention.py": ("grid and bias,\nthe Call", 1),
    "plain/projections.py": ("to poses,\nfrom poses", 0),
    "functional/matmul.py": ("products of\ngroups of fields", 0),
    "functional/autograd.py": ("a loop as a node,\nits gradients", 2),
    "functional/dispatch.py": ("chooses the\nbackend", 1),
    "functional/backends/native.py": ("says what it serves,\nplans the passes", 1),
    "functional/backends/grid_loop.py": ("a call as\narguments", 2),
    "functional/native/build.py": ("fields to a\nC struct", 1),
}
LOOP = "attention.cpp"

BLUE, ORANGE, GREY = "#2c6fbb", "#d1711f", "#777777"
WIDTH, HEIGHT, COLUMN, ROW, LEFT = 2.3, 0.98, 3.1, 2.0, 2.9  # of boxes, and from one to the next


def centre(column: int, row: int) -> tuple[float, float]:
    """The middle of the place of a box."""
    return LEFT + column * COLUMN + WIDTH / 2, -row * ROW


def box(axes: Axes, at: tuple[float, float], title: str, text: str, colour: str = "white") -> None:
    """A rounded box with a name and what it does."""
    corner = (at[0] - WIDTH / 2, at[1] - HEIGHT / 2)
    style = "round,pad=0,rounding_size=0.12"
    axes.add_patch(FancyBboxPatch(corner, WIDTH, HEIGHT, boxstyle=style, facecolor=colour, edgecolor="#333333"))
    axes.text(at[0], at[1] + 0.25, title, ha="center", va="center", fontsize=9.5, weight="bold")
    axes.text(at[0], at[1] - 0.17, text, ha="center", va="center", fontsize=8, linespacing=1.1)


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], colour: str, style: str = "-|>") -> None:
    """A straight arrow between two places."""
    properties = {"arrowstyle": style, "color": colour, "linewidth": 1.6, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", xy=end, xytext=start, arrowprops=properties)


def down_and_up(axes: Axes, row: float, there: str, back: str) -> None:
    """The two arrows below the spine's box of a row, and the shapes that go along them."""
    x, y = centre(1, 0)[0], -row * ROW - HEIGHT / 2
    end = y - (ROW - HEIGHT)
    for side, colour, text in ((-1, BLUE, there), (1, ORANGE, back)):
        from_, to = (y, end) if side < 0 else (end, y)
        arrow(axes, (x + side * 0.25, from_), (x + side * 0.25, to), colour)
        at = (x + side * 0.37, (y + end) / 2)
        axes.text(*at, text, ha="right" if side < 0 else "left", va="center", fontsize=8, color=colour, linespacing=1.2)


def draw() -> Figure:
    """The picture."""
    figure = Figure(figsize=(8.9, 8.4), layout="constrained")
    axes = figure.subplots()
    right = LEFT + 2 * COLUMN + WIDTH + 0.3
    for row, (room, what) in enumerate(ROOMS.items()):
        axes.axhspan(-row * ROW - 0.72, -row * ROW + 0.72, color="#eef1f5" if row % 2 == 0 else "#f7f3ec", zorder=0)
        axes.text(0.15, -row * ROW + (0.16 if what else 0), room, va="center", fontsize=10, family="monospace")
        axes.text(0.15, -row * ROW - 0.24, what, va="center", fontsize=9, color=GREY)
    rows = {room: row for row, room in enumerate(ROOMS)}
    places = {}
    for number, (path, (text, column)) in enumerate(STATIONS.items(), start=1):
        room, _, name = path.rpartition("/")
        places[path] = centre(column, rows[f"{room}/"])
        box(axes, places[path], f"{number}  {name}", text)
    loop = centre(2, len(ROOMS) - 1)
    box(axes, loop, LOOP, "scores, softmax,\nsums, in vectors", "#dfeee0")

    half = WIDTH / 2
    for one, other in (
        ("nn/arguments.py", "nn/module.py"),
        ("plain/projections.py", "plain/self_attention.py"),
        ("functional/backends/native.py", "functional/backends/grid_loop.py"),
    ):
        (x, y), (to, _) = places[one], places[other]
        arrow(axes, (x + half, y), (to - half, y), GREY, "<|-|>")
    x, y = places["plain/projections.py"]
    arrow(axes, (x, y - HEIGHT / 2), (x, places["functional/matmul.py"][1] + HEIGHT / 2), GREY, "<|-|>")
    x, y = places["functional/backends/grid_loop.py"]
    _, top = places["functional/autograd.py"]
    arrow(axes, (x, y + HEIGHT / 2), (x, top - HEIGHT / 2), GREY, "<|-|>")
    axes.text(x + 0.12, (y + top) / 2, "as one node", ha="left", va="center", fontsize=8, color=GREY)
    arrow(axes, (places["functional/native/build.py"][0] + half, loop[1]), (loop[0] - half, loop[1]), GREY, "<|-|>")

    down_and_up(axes, -1, "GeometricTensor", "GeometricTensor")
    down_and_up(axes, 0, "(B, in, *space)", "(B, out, *space)")
    down_and_up(axes, 1, "q, k, v: (M, B, N, |H|, C)\nin a Call", "(M, B, N, |H|, C)")
    down_and_up(axes, 2, "the Call", "(M, B, N, |H|, C)")
    down_and_up(axes, 3, "fields by name", "output filled")
    axes.set(xlim=(0, right), ylim=(-(len(ROOMS) - 1) * ROW - 0.8, ROW - HEIGHT / 2 + 0.1))
    axes.set_axis_off()
    return figure


def main() -> None:
    """Draw and save the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path(), help="folder for the picture (default: this one)")
    parser.add_argument("--dpi", type=int, default=130, help="resolution (default: %(default)s)")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    draw().savefig(arguments.output / "way.png", dpi=arguments.dpi)
    print(f"wrote {arguments.output / 'way.png'}")


if __name__ == "__main__":
    main()
