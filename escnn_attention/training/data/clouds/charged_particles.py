"""Charged particles: bodies that attract or repel each other, each pair of them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from escnn_attention.training.data.base import Batches, RandomChange, Source, integers, one_of, random_choices
from escnn_attention.training.data.clouds.base import Array, Clouds, GeneratedClouds, as_clouds, move_trajectories
from escnn_attention.training.errors import UserError

TIME_STEP = 0.001
"""The time of one step of the published integrator."""
STEPS_OF_A_FRAME = 100
"""The steps of the integrator from one published frame to the next, and from the start to frame 0."""

_SPEED = 0.5  # of every particle at time 0
_MOST = 0.1 / TIME_STEP  # of each component of a force
_SIGNS, _DIRECTIONS = 3, 4  # the streams of the random signs, of charges and of time; those below are of motions
_AT_ONCE = 1024  # systems, whose pairs fit into a cache


class Systems(NamedTuple):
    """Systems of n particles of mass 1 at one time: charges (S, n), 1 or −1, positions and velocities (S, n, d)."""

    charges: Array
    positions: Array
    velocities: Array


def random_systems(count: int, generator: np.random.Generator, *, num_bodies: int = 5) -> Systems:
    """Systems in space as published: either charge with probability 1/2, q ~ N(0, (n/5)^(2/3)), velocities of length ½.

    More bodies lie in a larger region, at the same density.
    """
    charges = 2.0 * generator.integers(2, size=(count, num_bodies)) - 1.0
    positions = (num_bodies / 5) ** (1 / 3) * generator.standard_normal((count, num_bodies, 3))
    directions = generator.standard_normal((count, num_bodies, 3))
    return Systems(charges, positions, _SPEED * directions / np.linalg.norm(directions, axis=2, keepdims=True))


def energy(systems: Systems) -> Array:
    """H = Σ_i ‖v_i‖²/2 + Σ_{i<j} c_i c_j / ‖q_i − q_j‖ of each system, (S,).

    Example:
        >>> pair = np.array([[[0.0, 0.0, 0.0], [0.0, 3.0, 4.0]]])
        >>> energy(Systems(np.array([[1.0, -1.0]]), pair, np.zeros((1, 2, 3)))).tolist()
        [-0.2]
    """
    first, second = np.triu_indices(systems.charges.shape[1], 1)
    distances = np.linalg.norm(systems.positions[:, first] - systems.positions[:, second], axis=2)
    potential = (systems.charges[:, first] * systems.charges[:, second] / distances).sum(axis=1)
    kinetic: Array = (systems.velocities**2).sum(axis=(1, 2)) / 2
    return kinetic + potential


def simulate(systems: Systems, steps: Sequence[int], time_step: float = TIME_STEP) -> tuple[Array, Array]:
    r"""Positions and velocities, each (S, T, n, d), after the T ascending numbers of ``steps``.

    The published rule: in each step of the time τ, ``time_step``, first the velocity changes, then the position,

    .. math::
        v \mathrel{+}= \tau F(q), \qquad q \mathrel{+}= \tau v, \qquad
        F_i(q) = \sum_{j \ne i} c_i c_j \frac{q_i - q_j}{\|q_i - q_j\|^3} .

    Each component of a force is held between −100 and 100, which bodies within 0.1 of each other exceed. There, and
    only there, energy is not conserved, and a rotated system does not move in a rotated way.

    >>> systems = random_systems(2, np.random.default_rng(0))
    >>> q, v = simulate(systems, [10, 20])
    >>> q.shape, bool(np.allclose(v.sum(2), systems.velocities.sum(1)[:, None]))  # momentum is conserved
    ((2, 2, 5, 3), True)
    """
    parts = [
        _simulate(Systems(*(values[start : start + _AT_ONCE] for values in systems)), steps, time_step)
        for start in range(0, len(systems.charges), _AT_ONCE)
    ]
    positions, velocities = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return positions, velocities


def _simulate(systems: Systems, steps: Sequence[int], time_step: float) -> tuple[Array, Array]:
    # The systems lie innermost, and what belongs to a body or a pair side by side: (n or pairs, d, S).
    position, velocity = (values.transpose(1, 2, 0).copy() for values in systems[1:])
    first, second = np.triu_indices(len(position), 1)
    strengths = systems.charges.T[first] * systems.charges.T[second]
    pairs = list(zip(first, second, strict=True))
    forces = np.empty_like(position)
    frames = []
    for step in range(1, max(steps) + 1):
        of_pairs = position[first]
        of_pairs -= position[second]
        squares = np.einsum("pds,pds->ps", of_pairs, of_pairs)
        of_pairs *= (strengths / (squares * np.sqrt(squares)))[:, None]
        forces.fill(0)
        # Not a product of matrices, whose rounding could depend on how many systems there are.
        for number, (i, j) in enumerate(pairs):
            forces[i] += of_pairs[number]
            forces[j] -= of_pairs[number]
        np.clip(forces, -_MOST, _MOST, out=forces)
        forces *= time_step
        velocity += forces
        position += time_step * velocity
        if step in steps:
            frames.append([values.transpose(2, 0, 1).copy() for values in (position, velocity)])
    positions, velocities = (np.stack(arrays, axis=1) for arrays in zip(*frames, strict=True))
    return positions, velocities


class ChargedParticles(GeneratedClouds):
    """Charged particles in space: where will they be?

    Particles of mass 1 with charges of 1 and −1 attract or repel each other with a force 1/r². A trajectory has a frame
    at every tenth of a unit of time, frame 0 at time 0.1; two of them make a cloud.

    A batch has n = 5 points for each of B systems:

    - ``coords`` (B·n, 3): the positions in frame ``start_frame``;
    - ``features`` (B·n, 1): the charges;
    - ``targets`` (B,): the energy in this frame;
    - ``point_targets`` (B·n, 2, 2, 3): in ``start_frame`` and in ``end_frame``, position and velocity.

    The defaults are the benchmark of EGNN and its successors, its physics and numbers of systems; the systems are drawn
    by a generator of this package. The error there is the mean square over all coordinates in ``end_frame``: 0.082 for
    the best multiple of the velocity (here 0.085, with a standard error of 0.001), 0.0071 for EGNN.

    Args:
        num_train, num_valid, num_test: systems of each part.
        start_frame, end_frame: the frame that is given, and that to be predicted.
        conjugate_train: change the sign of all charges of each training system with probability ½, of another half of
            them in each epoch. Forces are products of two charges, and stay as they are.
        reverse_train: likewise let time run backwards: a system starts where it ended, with opposite velocities, and
            ends where it started: exact to the order of the time step, but for forces that were held back.
        **options: of :class:`~.base.PointClouds`, such as ``batch_size`` and ``rotate_train``.

    Attributes:
        step: the time from ``start_frame`` to ``end_frame``.

    Source: Kipf, Fetaya, Wang, Welling and Zemel, *Neural relational inference for interacting systems*, ICML 2018; in
    space, with these frames: Satorras, Hoogeboom and Welling, *E(n) equivariant graph neural networks*, ICML 2021.

    Example:
        >>> data = ChargedParticles(num_train=4, batch_size=4, start_frame=0, end_frame=1)
        >>> data.setup("fit")
        >>> batch = next(iter(data.train_dataloader()))
        >>> batch.coords.shape, batch.point_targets.shape, data.step
        (torch.Size([20, 3]), torch.Size([20, 2, 2, 3]), 0.1)
    """

    dim = 3
    in_channels = 1

    def __init__(
        self,
        num_train: int = 3_000,
        num_valid: int = 2_000,
        num_test: int = 2_000,
        start_frame: int = 30,
        end_frame: int = 40,
        conjugate_train: bool = False,
        reverse_train: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(num_train, num_valid, num_test, **options)
        integers(0, start_frame=start_frame, end_frame=end_frame)
        one_of((False, True), conjugate_train=conjugate_train, reverse_train=reverse_train)
        if end_frame <= start_frame:
            raise UserError(f"end_frame must be after start_frame, got {end_frame} for {start_frame}")
        self.mover = move_trajectories
        self.conjugate_train, self.reverse_train = conjugate_train, reverse_train
        self.steps = [STEPS_OF_A_FRAME * (frame + 1) for frame in (start_frame, end_frame)]
        self.step = TIME_STEP * STEPS_OF_A_FRAME * (end_frame - start_frame)

    def _batches(self, part: str) -> Batches:
        batches = super()._batches(part)
        if part != "train":
            return batches
        numbers = functools.partial(random_choices, 2, len(batches))
        own = ((self.conjugate_train, _conjugated, _SIGNS), (self.reverse_train, _reversed, _DIRECTIONS))
        changes = (RandomChange(change, numbers, self.seed, stream) for asked, change, stream in own if asked)
        return Batches(batches.source, *batches.changes, *changes)

    def _make(self, part: str) -> Source:
        systems = Systems(*self._in_blocks(part, random_systems))
        positions, velocities = simulate(systems, self.steps)
        energies = energy(Systems(systems.charges, positions[:, 0], velocities[:, 0]))
        return as_clouds(systems.charges[..., None], energies, np.stack([positions, velocities], axis=2))


def _conjugated(clouds: Clouds, which: Tensor) -> Clouds:
    """Clouds, those whose number ``which`` (B,) is 1 with the opposite signs of all charges."""
    signs = 1.0 - 2.0 * which.float()
    return clouds._replace(features=clouds.features * signs[clouds.batch, None])


def _reversed(clouds: Clouds, which: Tensor) -> Clouds:
    """Clouds, those whose number ``which`` (B,) is 1 with time running backwards."""
    frames = clouds.point_targets
    assert frames is not None
    which = which.bool()
    backwards = frames.flip(1) * frames.new_tensor([1.0, -1.0])[:, None]
    frames = torch.where(which[clouds.batch, None, None, None], backwards, frames)
    q, v = frames[:, 0].double().numpy().reshape(len(which), -1, 2, 3).transpose(2, 0, 1, 3)
    charges = clouds.features.double().numpy().reshape(len(which), -1)
    energies = torch.from_numpy(energy(Systems(charges, q, v))).to(clouds.targets.dtype)
    targets = torch.where(which, energies, clouds.targets)
    return clouds._replace(coords=frames[:, 0, 0].contiguous(), targets=targets, point_targets=frames)
