"""Stand-ins for data sets: other images, the same format."""

import numpy as np


def rotmnist(train: int, valid: int, test: int) -> dict[str, np.ndarray]:
    """The arrays of rotmnist.npz, with so many images in each part."""
    draw = np.random.default_rng(0)
    arrays = {}
    for part, count in (("train", train), ("valid", valid), ("test", test)):
        arrays[f"{part}_images"] = draw.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        arrays[f"{part}_labels"] = draw.integers(0, 10, count)
    return arrays
