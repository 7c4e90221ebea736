"""Train a policy that commutes with rotations, and the same network without a group, on a small reaching task.

    python examples/policy.py --out figures

A gripper starts on one side of a table, has to pass an obstacle on the side to which it points, grasp a target and
carry it to a goal. The policy sees an image from above and the state of the gripper, and denoises ten actions (a
position and a command to the gripper) by flow matching. Demonstrations show targets in one eighth of all directions;
tests have them in all directions. Each network takes a minute or two on one core. Needs matplotlib and typer: the extra
"train".
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import escnn_attention  # noqa: F401  # isort: skip  # before escnn
import matplotlib.pyplot as plt
import numpy as np
import torch
import typer
from escnn import gspaces
from escnn.gspaces import GSpace
from escnn.nn import FieldType
from torch import Tensor

from escnn_attention import TimestepEmbedding, sequence_space
from escnn_attention.models import FieldTransformer

ACTIONS, GRASP = 10, 4  # actions of a plan, and the one at the target
PIXELS, PATCH = 32, 8
OBSTACLE, TARGET, GOAL = 0.2, 0.12, 0.12  # radii
STEPS = 8  # of the flow
SECTOR = math.pi / 8  # demonstrations have targets at angles between -SECTOR and SECTOR


@dataclass
class Scenes:
    """Scenes in the plane [-1, 1]²: places and directions ``(B, 2)``."""

    start: Tensor
    heading: Tensor
    obstacle: Tensor
    target: Tensor
    goal: Tensor

    @staticmethod
    def drawn(number: int, sector: float, seed: int, centre: float = 0.0) -> Scenes:
        """Scenes whose targets lie at angles within ``sector`` of ``centre``."""
        generator = torch.Generator().manual_seed(seed)

        def uniform(low: float, high: float) -> Tensor:
            return low + (high - low) * torch.rand(number, generator=generator, dtype=torch.float64)

        def polar(radius: Tensor, angle: Tensor) -> Tensor:
            return torch.stack([radius * angle.cos(), radius * angle.sin()], 1)

        angle = centre + uniform(-sector, sector)
        target = polar(uniform(0.55, 0.75), angle)
        start = polar(uniform(0.55, 0.75), angle + math.pi + uniform(-0.3, 0.3))
        obstacle = polar(uniform(0.0, 0.1), uniform(-math.pi, math.pi))
        goal = polar(uniform(0.55, 0.75), angle + uniform(1.4, 2.0))
        side = (torch.rand(number, generator=generator) < 0.5) * 2.0 - 1.0
        ahead = target - start
        heading = polar(torch.ones_like(angle), torch.atan2(ahead[:, 1], ahead[:, 0]) + side * uniform(0.5, 1.2))
        return Scenes(start, heading, obstacle, target, goal)

    def __getitem__(self, rows: Tensor | slice) -> Scenes:
        return Scenes(*(getattr(self, field.name)[rows] for field in fields(self)))

    def turned(self, angle: float) -> Scenes:
        """The scenes rotated about the centre of the table; exactly by multiples of 90 degrees."""
        return Scenes(*(getattr(self, field.name) @ rotation(angle).T for field in fields(self)))

    def demonstrations(self) -> Tensor:
        """Actions ``(B, 3, ACTIONS)``: positions, and 1 for an open or -1 for a closed gripper."""
        ahead = self.target - self.start
        normal = torch.stack([-ahead[:, 1], ahead[:, 0]], 1) / ahead.norm(dim=1, keepdim=True)
        side = (self.heading * normal).sum(1, keepdim=True).sign()
        passing = self.obstacle + side * normal * 2 * OBSTACLE
        control = 2 * passing - (self.start + self.target) / 2
        plan = [
            (1 - s) ** 2 * self.start + 2 * s * (1 - s) * control + s**2 * self.target
            for s in torch.linspace(0, 1, GRASP + 2, dtype=torch.float64)[1:]
        ]
        rest = torch.linspace(0, 1, ACTIONS - GRASP, dtype=torch.float64)[1:]
        plan += [(1 - s) * self.target + s * self.goal for s in rest]
        gripper = torch.ones(len(ahead), 1, ACTIONS, dtype=torch.float64)
        gripper[..., GRASP:] = -1
        return torch.cat([torch.stack(plan, 2), gripper], 1)

    def images(self) -> Tensor:
        """Images ``(B, 3, PIXELS, PIXELS)`` from above, with soft edges: of the obstacle, the target and the goal."""
        places = grid(PIXELS)
        discs = ((self.obstacle, OBSTACLE), (self.target, TARGET), (self.goal, GOAL))
        return torch.stack(
            [torch.sigmoid(PIXELS * (r - (places - c[:, None, None]).norm(dim=-1))) for c, r in discs], dim=1
        )

    def successes(self, actions: Tensor) -> Tensor:
        """Which plans pass the obstacle, close the gripper at the target and not before, and end at the goal."""
        positions, gripper = actions[:, :2], actions[:, 2]
        path = torch.cat([self.start[:, :, None], positions], 2)
        between = torch.cat([path[..., :-1] + s * path.diff(dim=2) for s in torch.linspace(0, 1, 5)], 2)
        clear = (between - self.obstacle[:, :, None]).norm(dim=1).amin(1) > OBSTACLE
        grasped = (positions[..., GRASP] - self.target).norm(dim=1) < TARGET
        there = (positions[..., -1] - self.goal).norm(dim=1) < GOAL
        closed = (gripper[:, :GRASP] > 0).all(1) & (gripper[:, GRASP:] < 0).all(1)
        return clear & grasped & there & closed


def rotation(angle: float) -> Tensor:
    """The matrix of a rotation."""
    c, s = math.cos(angle), math.sin(angle)
    if abs(math.remainder(angle, math.pi / 2)) < 1e-9:
        c, s = round(c), round(s)
    return torch.tensor([[c, -s], [s, c]], dtype=torch.float64)


def grid(number: int) -> Tensor:
    """The places of pixels ``(number, number, 2)``: x along the last axis of an image, y against the one before."""
    line = (torch.arange(number, dtype=torch.float64) - (number - 1) / 2) * 2 / number
    y, x = torch.meshgrid(line.flip(0), line, indexing="ij")
    return torch.stack([x, y], -1)


class Policy(torch.nn.Module):
    """A flow from noise to actions, given an image and the state of the gripper."""

    def __init__(self, gspace: GSpace, width: int):
        super().__init__()
        tokens = sequence_space(gspace.fibergroup)
        vector, scalar = gspace.basespace_action, gspace.trivial_repr
        self.action = FieldType(tokens, [vector, scalar])
        # The position of the gripper, its rotation, and whether it is open.
        self.state = FieldType(tokens, [vector, vector, scalar])
        # In each patch the mean of every colour, and the mean of every colour times the place.
        self.image = FieldType(gspace, 3 * [scalar] + 3 * [vector])
        self.times = TimestepEmbedding(32)
        self.places = TimestepEmbedding(32, scale=1.0)
        self.network = FieldTransformer(
            self.action + self.state,
            self.action,
            memory_type=self.image,
            fields=width,
            num_heads=2,
            num_decoder_layers=2,
            condition=32,
            block={"encoding": "none"},
            cross_attention={"keys": "own"},
        )

    def observe(self, scenes: Scenes) -> tuple[Tensor, Tensor]:
        """What the policy sees of scenes: patches of the image, and the state at every action."""
        image = scenes.images()
        moments = (image[:, :, None] * grid(PIXELS).movedim(-1, 0)).flatten(1, 2)
        patches = torch.nn.functional.avg_pool2d(torch.cat([image, moments], 1), PATCH)
        state = torch.cat([scenes.start, scenes.heading, torch.ones_like(scenes.start[:, :1])], 1)
        precision = next(self.parameters()).dtype
        return 10 * patches.to(precision), state[:, :, None].expand(-1, -1, ACTIONS).to(precision)

    def forward(self, noisy: Tensor, time: Tensor, patches: Tensor, state: Tensor) -> Tensor:
        """The velocity of actions ``(B, 3, ACTIONS)`` at times ``(B,)`` of the flow."""
        x = self.network.in_type(torch.cat([noisy, state], 1))
        condition = self.times(time)[:, :, None] + self.places(torch.arange(ACTIONS)).T
        velocity: Tensor = self.network(x, self.image(patches), condition).tensor
        return velocity

    @torch.no_grad()
    def plan(self, scenes: Scenes, noise: Tensor) -> Tensor:
        """Actions ``(B, 3, ACTIONS)`` from noise of this shape."""
        patches, state = self.observe(scenes)
        x = noise.to(patches.dtype)
        for step in range(STEPS):
            x = x + self(x, torch.full((len(x),), step / STEPS, dtype=x.dtype), patches, state) / STEPS
        return x.double()


def noise_like(scenes: Scenes, seed: int) -> Tensor:
    """Noise for plans."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(len(scenes.start), 3, ACTIONS, generator=generator, dtype=torch.float64)


def train(policy: Policy, scenes: Scenes, steps: int, seed: int, rate: float = 3e-3, batch: int = 64) -> None:
    """Train a policy on demonstrations by flow matching."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(policy.parameters(), rate, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    patches, state = policy.observe(scenes)
    actions = scenes.demonstrations().float()
    for _ in range(steps):
        rows = torch.randint(len(actions), (batch,), generator=generator)
        time, noise = torch.rand(batch, generator=generator), torch.randn(batch, 3, ACTIONS, generator=generator)
        mixed = torch.lerp(noise, actions[rows], time[:, None, None])
        loss = (policy(mixed, time, patches[rows], state[rows]) - (actions[rows] - noise)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        schedule.step()


def success(policy: Policy, scenes: Scenes) -> float:
    """The fraction of scenes in which a plan succeeds."""
    return float(scenes.successes(policy.plan(scenes, noise_like(scenes, 1))).double().mean())


def error(policy: Policy, angle: float) -> float:
    """How far the plans for turned scenes are from the turned plans, relative to them, in float64."""
    policy = policy.double()
    scenes, turn = Scenes.drawn(16, math.pi, seed=7), rotation(angle)
    noise = noise_like(scenes, 2)

    def turned(actions: Tensor) -> Tensor:
        return torch.cat([torch.einsum("ij,bjt->bit", turn, actions[:, :2]), actions[:, 2:]], 1)

    expected = turned(policy.plan(scenes, noise))
    found = float((policy.plan(scenes.turned(angle), turned(noise)) - expected).norm() / expected.norm())
    policy.float()
    return found


def parameters(policy: Policy) -> int:
    """The number of parameters."""
    return sum(p.numel() for p in policy.parameters())


C8, TRIVIAL = gspaces.rot2dOnR2(8), gspaces.trivialOnR2()
NETWORKS = {"C8": (C8, SECTOR), "no group": (TRIVIAL, SECTOR), "no group, all angles shown": (TRIVIAL, math.pi)}


def width_without_group(width: int) -> int:
    """The width of the network without a group whose number of parameters is nearest."""
    needed = parameters(Policy(C8, width))
    return min(range(2, 6 * width, 2), key=lambda n: abs(parameters(Policy(TRIVIAL, n)) - needed))


def trained(
    name: str, width: int, seed: int, steps: int, demonstrations: int = 1024
) -> tuple[Policy, dict[str, float]]:
    """A policy of a kind, and what was measured of it."""
    torch.manual_seed(seed)
    gspace, sector = NETWORKS[name]
    policy = Policy(gspace, width if gspace is C8 else width_without_group(width))
    measured = {"parameters": parameters(policy), "error before": error(policy, math.pi / 2)}
    train(policy, Scenes.drawn(demonstrations, sector, seed=100 + seed), steps, seed)
    policy.eval()
    measured["error after"] = error(policy, math.pi / 2)
    measured["error at 45°"] = error(policy, math.pi / 4)
    measured["validation"] = success(policy, Scenes.drawn(256, SECTOR, seed=3))
    measured["shown"] = success(policy, Scenes.drawn(512, SECTOR, seed=4))
    unseen = Scenes.drawn(512, math.pi - SECTOR, seed=5, centre=math.pi)
    measured["not shown"] = success(policy, unseen)
    return policy, measured


def by_angle(policy: Policy, number: int = 16) -> list[float]:
    """Success around ``number`` angles of the target."""
    step = 2 * math.pi / number
    return [success(policy, Scenes.drawn(96, step / 2, seed=6, centre=k * step)) for k in range(number)]


def table(results: dict[str, list[dict[str, float]]]) -> Iterator[str]:
    """The lines of a table in Markdown: means and standard errors over seeds."""
    yield "| network | parameters | success, angles shown | success, angles not shown | error before training | after |"
    yield "|---|--:|--:|--:|--:|--:|"
    for name, runs in results.items():
        cells = [f"{runs[0]['parameters']:,}"]
        for key in ("shown", "not shown"):
            values = 100 * np.array([run[key] for run in runs])
            error = f" ± {values.std(ddof=1) / len(values) ** 0.5:.1f}" if len(values) > 1 else ""
            cells.append(f"{values.mean():.1f}{error} %")
        cells += [f"{max(run[f'error {when}'] for run in runs):.0e}" for when in ("before", "after")]
        yield f"| {name} | {' | '.join(cells)} |"


def draw(policies: dict[str, Policy], results: dict[str, list[dict[str, float]]], file: Path) -> None:
    """A scene that turns with the plans of two networks, and the success by angle."""
    figure, axes = plt.subplots(1, 5, figsize=(15, 3.2), width_ratios=[1, 1, 1, 1, 1.6], layout="constrained")
    scene = Scenes.drawn(1, 0.0, seed=12)
    for axis, degrees in zip(axes, (0, 90, 135, 250), strict=False):
        turn = scene.turned(math.radians(degrees))
        obstacle, target, goal = turn.images()[0].float()
        picture = 1 - torch.stack([obstacle + goal, obstacle + target + goal * 0.3, obstacle + target], -1).clamp(0, 1)
        axis.imshow(picture, extent=(-1, 1, -1, 1))
        for (name, policy), colour in zip(policies.items(), ("tab:green", "tab:orange"), strict=False):
            noise = noise_like(scene, 1)
            noise[:, :2] = torch.einsum("ij,bjt->bit", rotation(math.radians(degrees)), noise[:, :2])
            plan = torch.cat([turn.start[:, :, None], policy.plan(turn, noise)[:, :2]], 2)[0]
            axis.plot(*plan, ".-", color=colour, label=name)
        axis.set(title=f"{degrees}°" + (" (as shown)" if not degrees else ""), xticks=[], yticks=[])
        axis.set(xlim=(-1, 1), ylim=(-1, 1))
    axes[0].legend(fontsize=8, loc="lower left")
    for (name, runs), colour in zip(results.items(), ("tab:green", "tab:orange", "tab:gray"), strict=True):
        values = 100 * np.mean([run["by angle"] for run in runs], 0)
        angles = 360 / len(values) * np.arange(len(values) + 1)
        axes[-1].plot(angles, [*values, values[0]], ".-", color=colour, label=name)
    half = math.degrees(SECTOR)
    axes[-1].axvspan(0, half, color="0.9", label="demonstrated")
    axes[-1].axvspan(360 - half, 360, color="0.9")
    axes[-1].set(xlabel="angle of the target", ylabel="success (%)", ylim=(-3, 103), xticks=range(0, 361, 90))
    axes[-1].legend(fontsize=8)
    figure.savefig(file, dpi=110, bbox_inches="tight")
    plt.close(figure)


def main(
    out: Annotated[Path, typer.Option(help="The folder for policy.png, policy.json and policy.md.")] = Path("."),
    seeds: Annotated[int, typer.Option(help="The number of seeds.")] = 3,
    steps: Annotated[int, typer.Option(help="The number of training steps.")] = 1000,
    width: Annotated[int, typer.Option(help="The number of regular fields of the C8 network.")] = 8,
) -> None:
    """Train all networks, and write the results."""
    torch.set_num_threads(1)
    out.mkdir(parents=True, exist_ok=True)
    results: dict[str, list[dict[str, float]]] = {name: [] for name in NETWORKS}
    policies: dict[str, Policy] = {}
    for seed in range(seeds):
        for name in NETWORKS:
            policy, measured = trained(name, width, seed, steps)
            policies.setdefault(name, policy)
            results[name].append({**measured, "by angle": by_angle(policy)})  # type: ignore[dict-item]
            typer.echo(f"{name}, seed {seed}: {measured}")
            (out / "policy.json").write_text(json.dumps(results, indent=1) + "\n")
    lines = "\n".join(table(results))
    (out / "policy.md").write_text(lines + "\n")
    draw(policies, results, out / "policy.png")
    typer.echo(lines)


if __name__ == "__main__":
    typer.run(main)
