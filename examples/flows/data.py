"""Make trajectories of two-dimensional turbulence on a torus, by exponax: the extra "flows".

    python examples/flows/data.py flows.npz --kind decaying

Velocities ``(N, T, 2, size, size)`` of the incompressible Navier-Stokes equations on a torus of sides 2π, in the
components of :class:`escnn_attention.training.FieldData`. They are solved with twice as many positions along every
axis, in double precision, and their waves are then cut off at those of the grid. The root mean square speed is 1 at the
start. Further channels of the other kinds:

- ``forced``: the acceleration by a random force, another one for each trajectory, which does not change in time. A drag
  proportional to the velocity bounds the energy.
- ``tracer``: the concentration of what the flow carries along and diffuses as it does momentum, of mean square 1 at
  the start.
"""

import argparse
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

VISCOSITY = 1e-3
STEP = 0.6  # between frames: the fastest parcels cross a quarter of the torus
SUBSTEPS = 40
BURN_IN = 2  # frames before the first
WAVES = 6  # of the vorticity at the start: up to so many on a side
FORCE, FORCED_WAVES, DRAG = 0.3, 4, 0.1  # of the forced kind: the root mean square acceleration, and its waves
CHANNELS = {"decaying": 2, "forced": 4, "tracer": 3}

Array = npt.NDArray[np.float64]


def _waves(n: int) -> tuple[Array, Array]:
    """The wave numbers ``(n, n // 2 + 1)`` down the rows, and along them."""
    down, along = np.meshgrid(np.fft.fftfreq(n, 1 / n), np.fft.rfftfreq(n, 1 / n), indexing="ij")
    return down, along


def coarse(modes: npt.NDArray[np.complex128], size: int) -> Array:
    """The fields ``(..., size, size)`` of the waves that a smaller grid tells, of ``(..., n, n // 2 + 1)``."""
    n = modes.shape[-2]
    down, along = _waves(n)
    kept = (np.abs(down) < size / 2) & (along < size / 2)
    rows = np.fft.fftfreq(size, 1 / size).astype(int)
    return np.fft.irfft2((modes * kept)[..., rows, : size // 2 + 1], (size, size)) * (size / n) ** 2


def velocities(vorticity: Array, size: int) -> Array:
    """The velocities ``(..., 2, size, size)`` of vorticities ``(..., n, n)``: the waves that the smaller grid tells."""
    down, along = _waves(vorticity.shape[-1])
    squares = down**2 + along**2
    stream = np.fft.rfft2(vorticity) / np.where(squares == 0, np.inf, -squares)
    return coarse(np.stack([-1j * down * stream, -1j * along * stream], axis=-3), size)


def stepper(kind: str, n: int, dt: float) -> Any:
    """One step of exponax, from states ``(C, n, n)`` and forces of that shape: of the vorticity, then of a tracer."""
    import exponax
    import jax.numpy as jnp

    class Carried(exponax.nonlin_fun.VorticityConvection2d):
        """What the velocity carries along: every channel of the state."""

        def __call__(self, state: Any) -> Any:
            slope = self.derivative_operator * self.inv_laplacian * state[:1]
            velocity = self.ifft(jnp.stack((slope[1], -slope[0])))
            return -self.fft(sum(velocity[i] * self.ifft(self.derivative_operator[i] * state) for i in range(2)))

    class Flow(exponax.BaseStepper):
        def _build_linear_operator(self, derivative_operator: Any) -> Any:
            laplacian = (derivative_operator**2).sum(0, keepdims=True)
            return VISCOSITY * laplacian - (DRAG if kind == "forced" else 0)

        def _build_nonlinear_fun(self, derivative_operator: Any) -> Any:
            return Carried(2, n, derivative_operator=derivative_operator, dealiasing_fraction=2 / 3)

    channels = 2 if kind == "tracer" else 1
    return exponax.ForcedStepper(Flow(2, 2 * np.pi, n, dt, num_channels=channels, order=4))


def trajectories(number: int, frames: int, size: int, seed: int = 0, kind: str = "decaying") -> npt.NDArray[np.float32]:
    """Fields ``(number, frames, C, size, size)``; more trajectories leave the others as they are."""
    import exponax
    import jax

    jax.config.update("jax_enable_x64", True)
    fine = 2 * size
    step = exponax.repeat(stepper(kind, fine, STEP / SUBSTEPS), SUBSTEPS, takes_aux=True)
    run = jax.jit(exponax.rollout(step, BURN_IN + frames - 1, include_init=True, takes_aux=True))
    start = exponax.ic.RandomTruncatedFourierSeries(2, cutoff=WAVES)
    force = exponax.ic.RandomTruncatedFourierSeries(2, cutoff=FORCED_WAVES)
    result = np.empty((number, frames, CHANNELS[kind], size, size), dtype=np.float32)
    for i in range(number):
        key = jax.random.fold_in(jax.random.key(seed), i)
        state = _of_unit_speed(start(fine, key=key))
        other = jax.random.fold_in(key, 1)
        driven = FORCE * _of_unit_speed(force(fine, key=other)) if kind == "forced" else 0 * state
        if kind == "tracer":
            carried = np.asarray(start(fine, key=other))
            state = np.concatenate((state, carried / np.sqrt(np.mean(carried**2))))
            driven = 0 * state
        path = np.asarray(run(state, driven))[BURN_IN:]
        result[i, :, :2] = velocities(path[:, 0], size)
        if kind == "forced":
            result[i, :, 2:] = velocities(driven[0], size)
        elif kind == "tracer":
            result[i, :, 2] = coarse(np.fft.rfft2(path[:, 1]), size)
    return result


def _of_unit_speed(vorticity: Any) -> Array:
    found = np.asarray(vorticity)
    return found / np.sqrt(2 * np.mean(velocities(found, found.shape[-1]) ** 2))


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the file that the configurations read."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--kind", choices=CHANNELS, default="decaying")
    parser.add_argument("--number", type=int, default=192, help="128 to train, 32 to validate and 32 to test")
    parser.add_argument("--frames", type=int, default=21)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    if given.file.exists():
        parser.error(f"file: {given.file} exists and would be replaced; needed another name")
    given.file.parent.mkdir(parents=True, exist_ok=True)
    made = trajectories(given.number, given.frames, given.size, given.seed, given.kind)
    with given.file.open("xb") as file:
        np.savez(file, trajectories=made)
    print(f"{given.file}: {made.shape}, SHA-256 of the values {hashlib.sha256(made.tobytes()).hexdigest()}")


if __name__ == "__main__":
    main()
