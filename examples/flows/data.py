"""Make trajectories of decaying turbulence on a torus, by exponax: the extra "flows".

    python examples/flows/data.py flows.npz

Velocities ``(N, T, 2, size, size)`` of the incompressible Navier-Stokes equations on a torus of sides 2π, in the
components of :class:`escnn_attention.training.FieldData`. They are solved with twice as many positions along every
axis, in double precision, and their waves are then cut off at those of the grid. The root mean square speed is 1 at the
start.
"""

import argparse
import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

VISCOSITY = 1e-3
STEP = 0.6  # between frames: the fastest parcels cross a quarter of the torus
SUBSTEPS = 40
BURN_IN = 2  # frames before the first
WAVES = 6  # of the vorticity at the start: up to so many on a side

Array = npt.NDArray[np.float64]


def velocities(vorticity: Array, size: int) -> Array:
    """The velocities ``(..., 2, size, size)`` of vorticities ``(..., n, n)``: the waves that the smaller grid tells."""
    n = vorticity.shape[-1]
    down, along = np.meshgrid(np.fft.fftfreq(n, 1 / n), np.fft.rfftfreq(n, 1 / n), indexing="ij")
    squares = down**2 + along**2
    stream = np.fft.rfft2(vorticity) / np.where(squares == 0, np.inf, -squares)
    modes = np.stack([-1j * down * stream, -1j * along * stream], axis=-3)
    kept = (np.abs(down) < size / 2) & (along < size / 2)
    rows = np.fft.fftfreq(size, 1 / size).astype(int)
    return np.fft.irfft2((modes * kept)[..., rows, : size // 2 + 1], (size, size)) * (size / n) ** 2


def trajectories(number: int, frames: int, size: int, seed: int = 0) -> npt.NDArray[np.float32]:
    """Velocities ``(number, frames, 2, size, size)``; more trajectories leave the others as they are."""
    import exponax
    import jax

    jax.config.update("jax_enable_x64", True)
    fine = 2 * size
    stepper = exponax.stepper.NavierStokesVorticity(2, 2 * np.pi, fine, STEP / SUBSTEPS, diffusivity=VISCOSITY, order=4)
    run = jax.jit(exponax.rollout(exponax.repeat(stepper, SUBSTEPS), BURN_IN + frames - 1, include_init=True))
    start = exponax.ic.RandomTruncatedFourierSeries(2, cutoff=WAVES)
    result = np.empty((number, frames, 2, size, size), dtype=np.float32)
    for i in range(number):
        vorticity = start(fine, key=jax.random.fold_in(jax.random.key(seed), i))
        speed = np.sqrt(2 * np.mean(velocities(np.asarray(vorticity), fine) ** 2))
        result[i] = velocities(np.asarray(run(vorticity / speed))[BURN_IN:, 0], size)
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the file that the configurations read."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--number", type=int, default=192, help="128 to train, 32 to validate and 32 to test")
    parser.add_argument("--frames", type=int, default=21)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    made = trajectories(given.number, given.frames, given.size, given.seed)
    np.savez(given.file, trajectories=made)
    print(f"{given.file}: {made.shape}, SHA-256 of the values {hashlib.sha256(made.tobytes()).hexdigest()}")


if __name__ == "__main__":
    main()
