"""QM9: its properties, its file, and the data module."""

from __future__ import annotations

import functools
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from escnn_attention.plain.cloud_pooling import offsets_from_mean
from escnn_attention.training.data.base import PARTS, PublishedData, Source
from escnn_attention.training.data.clouds.base import CloudsInMemory, PointClouds, move
from escnn_attention.training.data.clouds.orientation import Array, Integers, in_frame_of_positions
from escnn_attention.training.data.files import Published, check_array, make_from_downloads, npz_file
from escnn_attention.training.errors import UserError

_NAMES = """
RotA_GHz RotB_GHz RotC_GHz Dipole_debye Polarizability_bohr3 HOMO_au LUMO_au HOMO_LUMO_gap_au R2_bohr2 ZPVE_au
InternalEnergy_0K_au InternalEnergy_298K_au Enthalphy_298K_au GibbsFreeEnergy_298K_au Heatcapacity_Cv_cal_mol_K
"""
NAMES = tuple(_NAMES.split())
"""The published properties, in the order of the published files."""

HARTREE = 27.211386245988
"""In electronvolts."""


class Target(NamedTuple):
    """A property to predict: its column in :data:`FILE`, a factor for its values, and the unit that they then have.

    ``atoms`` are the values of single atoms of H, C, N, O and F, which are subtracted for each atom before that.
    """

    name: str
    factor: float
    unit: str
    atoms: tuple[float, float, float, float, float] = (0.0, 0.0, 0.0, 0.0, 0.0)


TARGETS = {
    "mu": Target(NAMES[3], 1.0, "D"),
    "alpha": Target(NAMES[4], 1.0, "bohr³"),
    "homo": Target(NAMES[5], HARTREE, "eV"),
    "lumo": Target(NAMES[6], HARTREE, "eV"),
    "gap": Target(NAMES[7], HARTREE, "eV"),
    "r2": Target(NAMES[8], 1.0, "bohr²"),
    "zpve": Target(NAMES[9], 1000 * HARTREE, "meV"),
    "U0": Target(NAMES[10], HARTREE, "eV", (-0.500273, -37.846772, -54.583861, -75.064579, -99.718730)),
    "U": Target(NAMES[11], HARTREE, "eV", (-0.498857, -37.845355, -54.582445, -75.063163, -99.717314)),
    "H": Target(NAMES[12], HARTREE, "eV", (-0.497912, -37.844411, -54.581501, -75.062219, -99.716370)),
    "G": Target(NAMES[13], HARTREE, "eV", (-0.510927, -37.861317, -54.598897, -75.079532, -99.733544)),
    "Cv": Target(NAMES[14], 1.0, "cal/(mol K)", (2.981, 2.981, 2.981, 2.981, 2.981)),
}
"""The twelve targets. Energies, and the heat capacity, are those of the molecule less those of its atoms."""
TENSOR = "polarizability"
"""The target that is a tensor."""

_PLACE = "https://springernature.figshare.com/ndownloader/files"
DOWNLOADS = (
    Published("dsgdb9nsd.xyz.tar.bz2", f"{_PLACE}/3195389", "ad1ebd51ee7f5b3a6e32e974e5d54012"),
    Published("uncharacterized.txt", f"{_PLACE}/3195404", "a361887bacb427b8a0ce7903d92a53b4"),
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
    """The content of a :data:`FILE`, with the ``tensors`` (M, 6) in the order of :data:`ENTRIES` if asked for."""

    sizes: Integers
    charges: Integers
    positions: Array
    targets: Array
    names: tuple[str, ...]
    tensors: Array | None


def read(path: Path, tensors: bool = False) -> Molecules:
    """Read a :data:`FILE`, unpickling nothing; a :class:`UserError` names an array that is wrong."""
    with npz_file(path) as arrays:
        sizes, charges, positions = (arrays[name] for name in ("num_atoms", "charges", "positions"))
        check_array(path, "num_atoms", sizes, "integers", np.size(sizes))
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
            check_array(path, "polarizability", entries, "floats", len(sizes), 6)
            entries = entries[:, [order.index(name) for name in ENTRIES]].astype(np.float64)
    if not len(sizes) or sizes.min() < 1:
        raise UserError(f"{path}: num_atoms must be at least 1 of at least one molecule")
    atoms = int(sizes.sum(dtype=np.int64))
    check_array(path, "charges", charges, "integers", atoms)
    check_array(path, "positions", positions, "floats", atoms, 3)
    check_array(path, "targets", values, "floats", len(sizes), len(names))
    if not np.isin(charges, list(ELEMENTS.values())).all():
        raise UserError(f"{path}: charges must be those of {', '.join(ELEMENTS)}")
    if missing := [target.name for target in TARGETS.values() if target.name not in names]:
        raise UserError(f"{path}: target_names must have {', '.join(missing)}, found {', '.join(names)}")
    sizes, charges = sizes.astype(np.int64), charges.astype(np.int64)
    return Molecules(sizes, charges, positions.astype(np.float64), values.astype(np.float64), names, entries)


def convert(out: IO[bytes], archive: Path, excluded: Path) -> None:
    """Write a :data:`FILE` from the published archive of texts, which is read in place."""
    words = map(str.split, excluded.read_text(encoding="ascii", errors="replace").splitlines())
    failed = {int(first) for first, *_ in filter(None, words) if first.isdecimal()}
    if len(failed) != _NUM_EXCLUDED:
        raise ValueError(f"{len(failed)} molecules are listed, expected {_NUM_EXCLUDED}")
    molecules = {}
    with tarfile.open(archive, "r|bz2") as members:
        for member in members:
            if member.name.endswith(".xyz") and (file := members.extractfile(member)) is not None:
                index, *content = parse_xyz(file.read().decode("ascii"))
                if index not in failed:
                    molecules[index] = content
    if not molecules:
        raise ValueError("no molecules in it")
    charges, positions, targets = zip(*(molecules[index] for index in sorted(molecules)), strict=True)
    np.savez_compressed(
        out,
        num_atoms=np.array([len(atoms) for atoms in charges], dtype=np.uint8),
        charges=np.concatenate(charges),
        positions=np.concatenate(positions),
        targets=np.stack(targets),
        target_names=np.array(NAMES),
        index=np.array(sorted(molecules), dtype=np.int32),
    )


def parse_xyz(text: str) -> tuple[int, npt.NDArray[np.uint8], npt.NDArray[np.float32], Array]:
    """Number, charges (n,), positions (n, 3) and properties (15,) of a published text; else a :class:`ValueError`.

    Its lines: the number of atoms; ``gdb``, the number of the molecule, and the properties; for each atom its element,
    coordinates and charge; others. Powers of ten are written ``1.5*^-6``.

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


_CHARGES = np.array(list(ELEMENTS.values()))
_KIND = np.full(256, -1)  # by charge
_KIND[_CHARGES] = np.arange(len(_CHARGES))

_NUM_TRAIN, _NUM_VALID = 100_000, 17_748  # the rest, 13,083, are to test
_SPLIT_SEED = 0  # of the order that the molecules are put in, which is part of the data set


def atom_features() -> Tensor:
    """The features of the elements H, C, N, O, F, (5, 15) float32: one-hot ⊗ (1, c, c²), where c = Z/9.

    Channel 3e + k of element e is cᵏ; the others are 0.

    >>> atom_features()[1].nonzero().flatten().tolist()
    [3, 4, 5]
    """
    c = torch.from_numpy(_CHARGES / 9)
    powers = torch.stack([torch.ones_like(c), c, c**2], dim=1)
    return torch.einsum("ab,ak->abk", torch.eye(len(c), dtype=c.dtype), powers).flatten(1).float()


class QM9(PublishedData, PointClouds):
    """QM9: properties of small organic molecules, of up to nine atoms of C, N, O, F and what H they have.

    100,000 molecules to train, 17,748 to validate and 13,083 to test: the 130,831 that passed the published consistency
    check, in the order of numpy's permutation with seed 0. Looks in the folder for ``qm9.npz``; if it is not there, the
    published archive is downloaded (86 MB), verified and converted, which takes some minutes.

    Coordinates are in ångström, from the mean of the atoms of a molecule. Features are :func:`atom_features`. The
    twelve targets are ``mu`` (dipole moment, D), ``alpha`` (bohr³), ``homo``, ``lumo``, ``gap`` (eV), ``r2`` (bohr²),
    ``zpve`` (meV), ``U0``, ``U``, ``H``, ``G`` (eV) and ``Cv`` (cal/(mol K)); the last five less those of the atoms.
    Batches hold them standardised, (B, T) float32.

    ``targets=["polarizability"]`` is the polarisability as a tensor, (B, 3, 3), bohr³, which rotates with the molecule.
    The published archive does not have it; ``qm9.npz`` may. Its entries are in the standard orientation that Gaussian
    rotated a molecule to, and are rotated back by :func:`~.orientation.in_frame_of_positions`, in some 15 seconds for
    all molecules. The trace and the eigenvalues are exact. The directions of the axes are inferred, and likely to be
    wrong for about one molecule in twelve, where it matters little. This leaves an error of an estimated 0.06 bohr³ an
    entry, averaged over all molecules (the anisotropic part has a typical norm of 22 bohr³), which no network can beat.

    Args:
        targets: names of targets, by default all twelve, or ``["polarizability"]`` alone.
        standardise: subtract the mean of the training molecules in use, and divide by their standard deviation. A
            tensor stays equivariant: of it, ``mean`` is the mean of a third of the trace, times the identity, and
            ``std`` is the root of the mean square of all entries of what is left.
        folder, options: of :class:`~escnn_attention.training.data.base.PublishedData` and
            :class:`~.base.PointClouds`. As published: ``rotate_train`` with ``translate_train`` 0.5.

    Attributes:
        units: of each target.
        mean, std: of the targets, once :meth:`setup` was called: (T,), or (3, 3) and () for the tensor; 0 and 1 unless
            ``standardise``.

    Source: Ramakrishnan, Dral, Rupp and von Lilienfeld, *Quantum chemistry structures and properties of 134 kilo
    molecules*, Scientific Data 2014. The protocol is that of the LieTransformer and of Cormorant.

    Example:
        >>> data = QM9(targets=["mu", "homo"])
        >>> data.dim, data.in_channels, data.units
        (3, 15, ('D', 'eV'))
    """

    dim = 3
    in_channels = 3 * len(ELEMENTS)
    files = FILE

    def __init__(
        self, folder: Path | None = None, targets: Sequence[str] | None = None, standardise: bool = True, **options: Any
    ) -> None:
        super().__init__(folder, **options)
        names = tuple(TARGETS) if targets is None else (targets,) if isinstance(targets, str) else tuple(targets)
        if not names or len(set(names)) < len(names) or not (names == (TENSOR,) or TARGETS.keys() >= set(names)):
            raise UserError(
                f"targets: got {list(names)}, needed different ones of {', '.join(TARGETS)}, or {TENSOR} alone"
            )
        self.targets, self.standardise = names, standardise
        self.is_tensor = names == (TENSOR,)
        self.units = ("bohr³",) if self.is_tensor else tuple(TARGETS[name].unit for name in names)
        self.mover = functools.partial(move, target_order=2 if self.is_tensor else 0)
        self.mean: Tensor | None = None
        self.std: Tensor | None = None

    def original(self, targets: Tensor) -> Tensor:
        """Standardised targets, or predictions of them, in their units."""
        if self.mean is None or self.std is None:
            raise UserError("the mean and the standard deviation of the targets are not known before setup()")
        return targets * self.std.to(targets) + self.mean.to(targets)

    def _prepare_folder(self, folder: Path) -> None:
        make_from_downloads(folder / FILE, DOWNLOADS, convert, allowed=self.download)

    def _read(self, folder: Path, parts: Mapping[str, int | None]) -> Mapping[str, Source]:
        molecules = read(folder / FILE, tensors=self.is_tensor)
        count = len(molecules.sizes)
        if count <= _NUM_TRAIN + _NUM_VALID:
            raise UserError(
                f"{folder / FILE}: {count} molecules, of which {_NUM_TRAIN} train and {_NUM_VALID} validate: too few"
            )
        order = np.random.RandomState(_SPLIT_SEED).permutation(count)
        split = dict(zip(PARTS, np.split(order, [_NUM_TRAIN, _NUM_TRAIN + _NUM_VALID]), strict=True))
        # Of the training molecules, whatever parts are wanted: their mean and standard deviation are.
        chosen = {part: split[part][: self.limits[part]] for part in dict.fromkeys(["train", *parts])}
        every = np.concatenate(list(chosen.values()))
        if molecules.tensors is None:
            targets = in_units(molecules, self.targets, every)
        else:
            targets = in_frame_of_positions(*molecules[:3], molecules.tensors, every)
        ends = np.cumsum([len(numbers) for numbers in chosen.values()])
        values = dict(zip(chosen, np.split(targets, ends[:-1]), strict=True))
        self._standardise(values["train"])
        return {part: self._source(molecules, chosen[part], values[part]) for part in parts}

    def _standardise(self, values: Array) -> None:
        """Set the mean and the standard deviation to those of ``values``."""
        found = torch.from_numpy(values)
        if not self.standardise:
            mean, std = torch.zeros(found.shape[1:]), torch.ones(() if self.is_tensor else found.shape[1:])
        elif self.is_tensor:
            mean = found.diagonal(dim1=1, dim2=2).mean() * torch.eye(3, dtype=found.dtype)
            std = (found - mean).square().mean().sqrt()
        else:
            mean, std = found.mean(dim=0), found.std(dim=0, correction=0)
        if not (std > 0).all():
            raise UserError(f"limit_train: {len(values)} molecules do not differ in {', '.join(self.targets)}")
        self.mean, self.std = mean.float(), std.float()
        self._exact = mean.double(), std.double()

    def _source(self, molecules: Molecules, chosen: Integers, values: Array) -> CloudsInMemory:
        sizes, kinds = torch.from_numpy(molecules.sizes), torch.from_numpy(_KIND[molecules.charges].astype(np.uint8))
        found = CloudsInMemory(sizes, torch.from_numpy(molecules.positions), kinds, sizes).take(chosen)
        mean, std = self._exact
        return CloudsInMemory(
            found.targets,
            offsets_from_mean(found.coords, found.batch, len(chosen)).float(),
            found.features,
            ((torch.from_numpy(values) - mean) / std).float(),
            table=atom_features(),
        )


def in_units(molecules: Molecules, targets: Iterable[str], chosen: Integers) -> Array:
    """Targets (len(chosen), T) of molecules, in the units of :data:`TARGETS`, less what their atoms have."""
    owners = np.repeat(np.arange(len(molecules.sizes)), molecules.sizes)
    pairs = owners * len(ELEMENTS) + _KIND[molecules.charges]
    atoms = np.bincount(pairs, minlength=len(molecules.sizes) * len(ELEMENTS)).reshape(-1, len(ELEMENTS))[chosen]
    columns = []
    for name in targets:
        target = TARGETS[name]
        values = molecules.targets[chosen, molecules.names.index(target.name)]
        columns.append((values - atoms @ np.array(target.atoms)) * target.factor)
    return np.stack(columns, axis=1)
