"""Draw what trained networks make of a test flow: fields, errors, spectra, a film, and the flow moved.

    python -m examples.flows.figures runs/flows/*-0 --data runs/flows.npz --out docs/_static

The folders are those that ``examples.flows.measure`` has measured. Needs matplotlib: the extra "train".
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import escnn_attention  # noqa: F401  # isort: skip  # before escnn
import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from escnn_attention.training.data.fields import turned
from examples.flows.measure import MOTIONS, STEPS, held_out, relative, spectrum, trained
from examples.flows.networks import Increment

SHOWN = (1, 4, 8, 20)  # steps
TURNED = 4  # steps of the turned flows


def vorticity(velocity: Tensor) -> Tensor:
    """The vorticities ``(..., n, n)`` of fields ``(..., C, n, n)`` that begin with the velocity."""
    n = velocity.shape[-1]
    waves = torch.fft.fftfreq(n, 1 / n) * (torch.fft.fftfreq(n) > -0.5)
    modes = torch.fft.fft2(velocity)
    return torch.fft.ifft2(1j * (waves * modes[..., 1, :, :] + waves[:, None] * modes[..., 0, :, :])).real


def _panel(figure: Figure, rows: int, columns: int) -> np.ndarray:
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
    return axes


@torch.no_grad()
def fields(networks: Mapping[str, Increment], flow: Tensor) -> Figure:
    """The vorticity of a flow ``(T, 2, n, n)`` and of the roll-outs from its first frame."""
    figure = Figure(figsize=(1.6 * len(SHOWN) + 0.6, 1.6 * len(networks) + 1.9), layout="constrained")
    axes = _panel(figure, len(networks) + 1, len(SHOWN))
    found = {"truth": flow} | {name: net.rollout(flow[:1], STEPS)[0] for name, net in networks.items()}
    for row, (name, frames) in zip(axes, found.items(), strict=True):
        row[0].set_ylabel(name, fontsize=8)
        for axis, step in zip(row, SHOWN, strict=True):
            axis.imshow(vorticity(frames[step]), cmap="RdBu_r", vmin=-5, vmax=5)
            if name == "truth":
                axis.set_title(f"step {step}", fontsize=9)
            else:
                axis.set_xlabel(f"error {relative(frames[step, :2], flow[step, :2]):.2f}", fontsize=7)
    return figure


def curves(results: Mapping[str, dict], flows: Tensor) -> Figure:
    """The errors of the roll-outs by step, and the spectra of their last frames beside the true one."""
    figure = Figure(figsize=(8.4, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, result in results.items():
        left.plot(range(1, STEPS + 1), result["errors"], label=name)
        right.loglog(range(1, len(result["spectrum"]) + 1), result["spectrum"])
    true = spectrum(flows[:, STEPS, :2])
    right.loglog(range(1, len(true) + 1), true, "k--", label="truth")
    left.set(xlabel="step", ylabel="relative error", ylim=(0, 1.6))
    right.set(xlabel="wave number", ylabel=f"energy after {STEPS} steps", ylim=(min(true) / 10, 2 * max(true)))
    left.legend(fontsize=7)
    right.legend(fontsize=7)
    return figure


@torch.no_grad()
def motions(networks: Mapping[str, Increment], flow: Tensor, kinds: dict[str, int]) -> Figure:
    """Roll-outs of a flow that was turned or mirrored at first, moved back, and their differences from the flow's."""
    figure = Figure(figsize=(1.6 * 5 + 0.6, 1.6 * len(networks) + 0.6), layout="constrained")
    axes = _panel(figure, len(networks), 5)
    for row, (name, network) in zip(axes, networks.items(), strict=True):
        row[0].set_ylabel(name, fontsize=8)
        still = network.rollout(flow[:1], TURNED)[:, -1]
        shown = {f"step {TURNED}": still}
        for motion, g in MOTIONS.items():
            moved = network.rollout(turned(flow[:1], g, kinds), TURNED)[:, -1]
            back = turned(moved, g.T, kinds)
            shown |= {f"{motion} at first,\nmoved back": back, f"difference\n({motion})": back - still}
        for axis, (title, frame) in zip(row, shown.items(), strict=True):
            axis.imshow(vorticity(frame)[0], cmap="RdBu_r", vmin=-5, vmax=5)
            if axis in axes[0]:
                axis.set_title(title, fontsize=8)
    return figure


@torch.no_grad()
def film(networks: Mapping[str, Increment], flow: Tensor, file: Path) -> None:
    """Write the vorticity of a flow ``(T, C, n, n)`` and of the roll-outs from its first frame, one after another."""
    figure = Figure(figsize=(1.6 * (len(networks) + 1), 1.9), dpi=80, layout="constrained")
    axes = _panel(figure, 1, len(networks) + 1)[0]
    found = {"truth": flow} | {name: net.rollout(flow[:1], STEPS)[0] for name, net in networks.items()}
    images = []
    for axis, (name, frames) in zip(axes, found.items(), strict=True):
        axis.set_title(name, fontsize=9)
        images.append(axis.imshow(vorticity(frames[0]), cmap="RdBu_r", vmin=-5, vmax=5, interpolation="nearest"))

    canvas, shots = FigureCanvasAgg(figure), []
    for step in range(STEPS + 1):
        for axis, image, (name, frames) in zip(axes, images, found.items(), strict=True):
            image.set_data(vorticity(frames[step]))
            error = relative(frames[step, :2], flow[step, :2])
            axis.set_xlabel(f"step {step}" if name == "truth" else f"error {error:.2f}", fontsize=8)
        canvas.draw()
        shot = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
        shots.append(shot.quantize(48, dither=Image.Dither.NONE))
    shots[0].save(file, save_all=True, append_images=shots[1:], duration=400, loop=0)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write ``flows_fields.png``, ``flows_curves.png``, ``flows_motions.png`` and ``flows_film.gif``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--number", type=int, default=32, help="test trajectories")
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--flow", type=int, default=0, help="the number of the test flow")
    given = parser.parse_args(arguments)
    networks, results = {}, {}
    for folder in given.folders:
        name = folder.name.rpartition("-")[0]
        networks[name], kinds = trained(folder)
        results[name] = json.loads((folder / "measured.json").read_text())
    flows = held_out(given.data, kinds, given.number)
    flow = flows[given.flow]
    drawn = {
        "fields": fields(networks, flow),
        "curves": curves(results, flows),
        "motions": motions(networks, flow, kinds),
    }
    for name, figure in drawn.items():
        figure.savefig(given.out / f"flows_{name}.png", dpi=80)
    film(networks, flow, given.out / "flows_film.gif")


if __name__ == "__main__":
    main()
