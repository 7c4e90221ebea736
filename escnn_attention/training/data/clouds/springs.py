"""Springs: bodies that pull at each other, each pair of them."""

from __future__ import annotations

import functools
from typing import Any, Literal, NamedTuple

import numpy as np

from escnn_attention.models.hamiltonian import rk4_step
from escnn_attention.training.data.base import integers, one_of
from escnn_attention.training.data.clouds.base import (
    Array,
    CloudsInMemory,
    GeneratedClouds,
    as_clouds,
    move_trajectories,
)

Solver = Literal["exact", "rk4"]

NUM_FRAMES, DURATION = 500, 5.0
STEP = DURATION / (NUM_FRAMES - 1)
"""Time from one frame to the next: 5/499."""


class Systems(NamedTuple):
    """Systems of n bodies at one time: masses m and stiffness k (S, n), positions q and momenta p (S, n, d).

    The spring between bodies i and j has the constant 2 k_i k_j.
    """

    masses: Array
    stiffness: Array
    positions: Array
    momenta: Array


def random_systems(count: int, generator: np.random.Generator, *, num_bodies: int = 6, dim: int = 2) -> Systems:
    """Systems as published: m ~ U[0.1, 3.1], k ~ U[0, 5], q ~ N(0, 0.4²), p ~ N(0, 0.6²).

    (The published code takes from the momenta their mean over all systems, about 0.006, which is left out here.)
    """
    return Systems(
        generator.uniform(0.1, 3.1, (count, num_bodies)),
        generator.uniform(0, 5, (count, num_bodies)),
        0.4 * generator.standard_normal((count, num_bodies, dim)),
        0.6 * generator.standard_normal((count, num_bodies, dim)),
    )


def potential(positions: Any, stiffness: Any) -> Any:
    """V = Σ_{i<j} k_i k_j ‖q_i − q_j‖², of an array or a tensor (…, n, d) and stiffness (…, n).

    >>> float(potential(np.array([[0.0, 0.0], [3.0, 4.0]]), np.array([2.0, 1.0])))
    50.0
    """
    differences = positions[..., :, None, :] - positions[..., None, :, :]
    pairs = stiffness[..., :, None] * stiffness[..., None, :] * (differences**2).sum(-1)
    return pairs.sum((-2, -1)) / 2


def energy(positions: Any, momenta: Any, masses: Any, stiffness: Any) -> Any:
    """H = Σ_i ‖p_i‖² / 2m_i + V, of arrays or tensors (…, n, d) and (…, n)."""
    return ((momenta**2).sum(-1) / (2 * masses)).sum(-1) + potential(positions, stiffness)


def simulate(systems: Systems, times: Array, solver: Solver = "exact") -> tuple[Array, Array]:
    """Positions and momenta, each (S, T, n, d), at ``times`` (T,) from 0 on.

    ``"exact"``, to rounding error, at any times, also (S, T): with q = M^{-1/2} y the equations of motion are linear,
    ÿ = −K y, with a symmetric K whose eigenvectors move as cos ωt and sin ωt. ``"rk4"`` takes the 3/8-rule, one step
    from each time to the next, as published.

    >>> systems = random_systems(2, np.random.default_rng(0))
    >>> q, p = simulate(systems, np.linspace(0, 5, 500))
    >>> h = energy(q, p, systems.masses[:, None], systems.stiffness[:, None])
    >>> q.shape, bool((abs(h / h[:, :1] - 1) < 1e-12).all())
    ((2, 500, 6, 2), True)
    """
    return {"exact": _exact, "rk4": _rk4}[solver](systems, np.asarray(times, dtype=np.float64))


def _exact(systems: Systems, times: Array) -> tuple[Array, Array]:
    masses, stiffness, positions, momenta = systems
    roots = np.sqrt(masses)
    pairs = stiffness[:, :, None] * stiffness[:, None]
    laplacian = np.eye(masses.shape[1]) * pairs.sum(axis=2)[:, None] - pairs
    squares, modes = np.linalg.eigh(2 * laplacian / (roots[:, :, None] * roots[:, None]))
    frequencies = np.sqrt(squares.clip(min=0))[:, None]  # (S, 1, n); the one that is 0 is that of the whole
    times = np.atleast_2d(times)[..., None]
    phases = frequencies * times  # (S, T, n)
    cos, sin = np.cos(phases)[..., None], np.sin(phases)[..., None]
    # sin(ωt)/ω, which is t where ω is 0
    over = times[..., None] * np.sinc(phases / np.pi)[..., None]
    across = modes.transpose(0, 2, 1)
    start = (across @ (roots[..., None] * positions))[:, None]
    speed = (across @ (momenta / roots[..., None]))[:, None]
    y = modes[:, None] @ (cos * start + over * speed)
    dy = modes[:, None] @ (cos * speed - frequencies[..., None] * sin * start)
    return y / roots[:, None, :, None], dy * roots[:, None, :, None]


def _rk4(systems: Systems, times: Array) -> tuple[Array, Array]:
    masses, stiffness = systems.masses[..., None], systems.stiffness[..., None]
    total = stiffness.sum(axis=-2, keepdims=True)

    def force(positions: Array) -> Array:
        # −∇V: −2 k_i Σ_j k_j (q_i − q_j), of all pairs at the cost of the bodies
        return -2 * stiffness * (total * positions - (stiffness * positions).sum(axis=-2, keepdims=True))

    frames = [(systems.positions, systems.momenta)]
    for step in np.diff(times):
        frames.append(rk4_step(lambda momenta: momenta / masses, force, *frames[-1], step))
    positions, momenta = np.stack(frames, axis=2)
    return positions, momenta


class Springs(GeneratedClouds):
    """Trajectories of bodies that pull at each other: V = Σ_{i<j} k_i k_j ‖q_i − q_j‖².

    A trajectory has 500 frames from time 0 to 5, ``step`` = 5/499 apart. A cloud is a piece of one: ``frames`` frames
    that follow each other, one of the pieces of this length that do not overlap, drawn once for each system. Every
    system is in one part only.

    A batch has n = 6 points for each of B systems:

    - ``coords`` (B·n, d): the positions in the first frame;
    - ``features`` (B·n, 2): mass m and constant k of each body;
    - ``targets`` (B,): the energy;
    - ``point_targets`` (B·n, T, 2, d): in each frame, the first included, position and momentum.

    Args:
        num_train, num_valid, num_test: systems of each part; as published 3,000, 2,000 and 2,000.
        frames: T of training and validation pieces, at least 2.
        test_frames: T of test pieces, for roll-outs; by default ``frames``. As published 5 and 100.
        solver: see :func:`simulate`.
        **options: of :class:`~.base.PointClouds`, such as ``batch_size`` and ``rotate_train``.

    The published trajectories are those of ``solver="rk4"``: a network that is rolled out by the same rule makes the
    same errors of integration.

    Source: Finzi, Stanton, Izmailov and Wilson, *Generalizing convolutional neural networks for equivariance to Lie
    groups on arbitrary continuous data*, ICML 2020; the protocol is that of the LieTransformer.

    Example:
        >>> data = Springs(num_train=4, batch_size=4)
        >>> data.setup("fit")
        >>> batch = next(iter(data.train_dataloader()))
        >>> batch.coords.shape, batch.point_targets.shape, batch.targets.shape
        (torch.Size([24, 2]), torch.Size([24, 5, 2, 2]), torch.Size([4]))
    """

    dim = 2
    in_channels = 2
    step = STEP

    def __init__(
        self,
        num_train: int = 3_000,
        num_valid: int = 2_000,
        num_test: int = 2_000,
        frames: int = 5,
        test_frames: int | None = None,
        solver: Solver = "exact",
        **options: Any,
    ) -> None:
        super().__init__(num_train, num_valid, num_test, **options)
        self.frames = {"train": frames, "valid": frames, "test": frames if test_frames is None else test_frames}
        integers(2, NUM_FRAMES, frames=frames, test_frames=self.frames["test"])
        one_of(("exact", "rk4"), solver=solver)
        self.mover = move_trajectories
        self.solver: Solver = solver

    def _make(self, part: str) -> CloudsInMemory:
        systems, frames = self._trajectories(part)
        energies = energy(frames[:, 0, 0], frames[:, 0, 1], systems.masses, systems.stiffness)
        return as_clouds(np.stack([systems.masses, systems.stiffness], axis=2), energies, frames)

    def _trajectories(self, part: str) -> tuple[Systems, Array]:
        """The systems of a part, and their pieces of a trajectory (S, T, 2, n, d)."""
        *systems, frames = self._in_blocks(part, functools.partial(self._block, self.frames[part]))
        return Systems(*systems), frames

    def _block(self, length: int, count: int, generator: np.random.Generator) -> tuple[Array, ...]:
        systems = random_systems(count, generator)
        pieces = generator.integers(NUM_FRAMES // length, size=count)
        chosen = pieces[:, None] * length + np.arange(length)
        times = np.linspace(0, DURATION, NUM_FRAMES)
        if self.solver == "exact":
            frames = np.stack(simulate(systems, times[chosen]), axis=2)
        else:
            every = np.stack(simulate(systems, times, self.solver), axis=2)
            frames = np.take_along_axis(every, chosen[:, :, None, None, None], axis=1)
        return *systems, frames
