"""The file that QM9 is read from, and how the published archive is converted to it."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from escnn_attention.training.data.clouds.qm9_targets import NAMES, TARGETS
from escnn_attention.training.data.files import Published, npz_file
from escnn_attention.training.errors import UserError

DOWNLOADS = (
    Published(
        "dsgdb9nsd.xyz.tar.bz2",
        "https://springernature.figshare.com/ndownloader/files/3195389",
        "ad1ebd51ee7f5b3a6e32e974e5d54012",
    ),
    Published(
        "uncharacterized.txt",
        "https://springernature.figshare.com/ndownloader/files/3195404",
        "a361887bacb427b8a0ce7903d92a53b4",
    ),
)
"""The archive of the molecules, and the list of those that failed the consistency check."""

FILE = "qm9.npz"
"""The file that is looked for, and that a download is converted to.

Arrays of the M molecules that passed the consistency check: ``num_atoms`` (M,); ``charges`` (N,) and ``positions``
(N, 3), ångström, of all atoms laid end to end; ``index`` (M,) the published numbers; ``targets`` (M, T) and
``target_names`` (T,), which say the units; and where it has them ``polarizability`` (M, 6), bohr³, in the order of
``polarizability_names`` (6,).
"""

ENTRIES = ("A_xx", "A_xy", "A_yy", "A_xz", "A_yz", "A_zz")

ELEMENTS = {"H": 1, "C": 6, "N": 7, "O": 8, "F": 9}
"""The charges of the elements."""

_NUM_EXCLUDED = 3_054


class Molecules(NamedTuple):
    """What a :data:`FILE` holds.

    Attributes:
        sizes: (M,) atoms of each molecule.
        charges: (N,) of all atoms, laid end to end.
        positions: (N, 3), ångström.
        targets: (M, T).
        names: of the targets.
        tensors: (M, 6) in the order of :data:`ENTRIES`, if asked for.
    """

    sizes: npt.NDArray[np.int64]
    charges: npt.NDArray[np.int64]
    positions: npt.NDArray[np.float64]
    targets: npt.NDArray[np.float64]
    names: tuple[str, ...]
    tensors: npt.NDArray[np.float64] | None


def read(path: Path, tensors: bool = False) -> Molecules:
    """What a :data:`FILE` holds. Nothing in the file is unpickled.

    Raises:
        UserError: not such a file; the message names the array that is wrong.
    """
    with npz_file(path) as arrays:
        sizes, charges, positions = (arrays[name] for name in ("num_atoms", "charges", "positions"))
        _check(path, "num_atoms", sizes, "iu", (np.size(sizes),))
        values, names = arrays["targets"], tuple(str(name) for name in arrays["target_names"])
        entries = None
        if tensors:
            if "polarizability" not in arrays:
                raise UserError(
                    f"{path} does not have polarizability, which the published archive does not have either: choose"
                    f" among the other targets, {', '.join(TARGETS)}"
                )
            order = [str(name) for name in arrays["polarizability_names"]]
            if sorted(order) != sorted(ENTRIES):
                raise UserError(f"{path}: polarizability_names must be {', '.join(ENTRIES)}, found {', '.join(order)}")
            entries = arrays["polarizability"]
            _check(path, "polarizability", entries, "f", (len(sizes), 6))
            entries = entries[:, [order.index(name) for name in ENTRIES]].astype(np.float64)
    if not len(sizes) or sizes.min() < 1:
        raise UserError(f"{path}: num_atoms must be at least 1 of at least one molecule")
    atoms = int(sizes.sum(dtype=np.int64))
    _check(path, "charges", charges, "iu", (atoms,))
    _check(path, "positions", positions, "f", (atoms, 3))
    _check(path, "targets", values, "f", (len(sizes), len(names)))
    if not np.isin(charges, list(ELEMENTS.values())).all():
        raise UserError(f"{path}: charges must be those of {', '.join(ELEMENTS)}")
    missing = [target.name for target in TARGETS.values() if target.name not in names]
    if missing:
        raise UserError(f"{path}: target_names must have {', '.join(missing)}, found {', '.join(names)}")
    return Molecules(
        sizes.astype(np.int64),
        charges.astype(np.int64),
        positions.astype(np.float64),
        values.astype(np.float64),
        names,
        entries,
    )


def _check(path: Path, name: str, values: npt.NDArray[Any], kinds: str, shape: tuple[int, ...]) -> None:
    if values.dtype.kind not in kinds or values.shape != shape:
        kind = "floats" if kinds == "f" else "integers"
        raise UserError(f"{path}: {name} must be {kind} {shape}, found {values.dtype} {values.shape}")
    if kinds == "f" and not np.isfinite(values).all():
        raise UserError(f"{path}: {name} must be finite")


def convert(out: IO[bytes], archive: Path, excluded: Path) -> None:
    """Write a :data:`FILE` from the published archive of texts, which is read in place.

    Raises:
        ValueError: the files are not what they should be.
    """
    failed = parse_excluded(excluded.read_text(encoding="ascii", errors="replace"))
    molecules = {}
    with tarfile.open(archive, "r|bz2") as members:
        for member in members:
            if member.name.endswith(".xyz") and (file := members.extractfile(member)) is not None:
                index, charges, positions, targets = parse_xyz(file.read().decode("ascii"))
                if index not in failed:
                    molecules[index] = charges, positions, targets
    if not molecules:
        raise ValueError("no molecules in it")
    kept = [molecules[index] for index in sorted(molecules)]
    np.savez_compressed(
        out,
        num_atoms=np.array([len(charges) for charges, _, _ in kept], dtype=np.uint8),
        charges=np.concatenate([charges for charges, _, _ in kept]),
        positions=np.concatenate([positions for _, positions, _ in kept]),
        targets=np.stack([targets for _, _, targets in kept]),
        target_names=np.array(NAMES),
        index=np.array(sorted(molecules), dtype=np.int32),
    )


def parse_excluded(text: str) -> set[int]:
    """The numbers of the molecules that failed the consistency check: lines that begin with one.

    Raises:
        ValueError: it is not the published list.
    """
    numbers = {int(line.split()[0]) for line in text.splitlines() if line.split() and line.split()[0].isdecimal()}
    if len(numbers) != _NUM_EXCLUDED:
        raise ValueError(f"{len(numbers)} molecules are listed, expected {_NUM_EXCLUDED}")
    return numbers


def parse_xyz(
    text: str,
) -> tuple[int, npt.NDArray[np.uint8], npt.NDArray[np.float32], npt.NDArray[np.float64]]:
    """Number, charges (n,), positions (n, 3) and properties (15,) of a published text.

    Its lines: the number of atoms; ``gdb``, the number of the molecule, and the properties; for each atom its element,
    coordinates and charge; others. Powers of ten are written ``1.5*^-6``.

    Raises:
        ValueError: not such a text.

    >>> lines = ["1", "gdb 7 " + " ".join(map(str, range(15))), "F 0.5 1.*^-1 0 -0.4"]
    >>> index, charges, positions, targets = parse_xyz(chr(10).join(lines))
    >>> index, charges.tolist(), positions[0, 1].item(), targets[-1].item()
    (7, [9], 0.10000000149011612, 14.0)
    """
    lines = text.splitlines()
    count = int(lines[0])
    if len(lines) < 2 + count:
        raise ValueError(f"{len(lines)} lines, expected {2 + count} at least")
    tag, index, *values = lines[1].split()
    if tag != "gdb" or len(values) != len(NAMES):
        raise ValueError(f"{tag} and {len(values)} properties, expected gdb and {len(NAMES)}")
    atoms = [line.split() for line in lines[2 : 2 + count]]
    if any(len(atom) != 5 or atom[0] not in ELEMENTS for atom in atoms):
        raise ValueError(f"molecule {index} has an atom that is not one of {', '.join(ELEMENTS)} with five columns")
    return (
        int(index),
        np.array([ELEMENTS[atom[0]] for atom in atoms], dtype=np.uint8),
        np.array([[_number(value) for value in atom[1:4]] for atom in atoms], dtype=np.float32),
        np.array([_number(value) for value in values]),
    )


def _number(text: str) -> float:
    return float(text.replace("*^", "e"))
