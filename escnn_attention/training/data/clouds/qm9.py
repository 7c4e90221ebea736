"""QM9."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from escnn_attention.training.data.clouds.batch import Clouds, CloudsInMemory, CloudSource
from escnn_attention.training.data.clouds.data_module import PublishedClouds
from escnn_attention.training.data.clouds.motions import Motions, move
from escnn_attention.training.data.clouds.orientation import in_frame_of_positions
from escnn_attention.training.data.clouds.qm9_file import DOWNLOADS, ELEMENTS, FILE, Molecules, convert, read
from escnn_attention.training.data.clouds.qm9_targets import TARGETS, TENSOR
from escnn_attention.training.data.files import make_from_downloads
from escnn_attention.training.errors import UserError

_CHARGES = np.array(list(ELEMENTS.values()))
_KIND = np.full(256, -1)  # by charge
_KIND[_CHARGES] = np.arange(len(_CHARGES))

_NUM_TRAIN, _NUM_VALID = 100_000, 17_748  # the rest, 13,083, are to test
_SPLIT_SEED = 0  # of the order that the molecules are put in, which is part of the data set


def atom_features() -> Tensor:
    """The features of each element, (5, 15) float32: one-hot ⊗ (1, c, c²), where c = Z/9.

    Channel 3e + k of element e, of H, C, N, O, F, is cᵏ; the others are 0.

    >>> atom_features()[1].nonzero().flatten().tolist()
    [3, 4, 5]
    """
    c = torch.from_numpy(_CHARGES / 9)
    powers = torch.stack([torch.ones_like(c), c, c**2], dim=1)
    return torch.einsum("ab,ak->abk", torch.eye(len(c), dtype=c.dtype), powers).flatten(1).float()


class QM9(PublishedClouds):
    """QM9: properties of small organic molecules, of up to nine atoms of C, N, O, F and what H they have.

    100,000 molecules to train, 17,748 to validate and 13,083 to test: the 130,831 that passed the published consistency
    check, in the order of numpy's permutation with seed 0. Looks for ``qm9.npz`` in the folder; if it is not there, the
    published archive is downloaded (86 MB), verified and converted, which takes some minutes.

    Coordinates are in ångström. Features are :func:`atom_features`. The twelve targets are ``mu`` (dipole moment, D),
    ``alpha`` (bohr³), ``homo``, ``lumo``, ``gap`` (eV), ``r2`` (bohr²), ``zpve`` (meV), ``U0``, ``U``, ``H``, ``G``
    (eV) and ``Cv`` (cal/(mol K)); the last five less what the atoms have by themselves. Batches hold them standardised,
    (B, T) float32. (The published code rounds the hartree to 27.2114 eV, and leaves out the last batch of every part.)

    ``targets=["polarizability"]`` is the polarisability as a tensor, (B, 3, 3), bohr³, which rotates with the molecule.
    The published archive does not have it; ``qm9.npz`` may. Its entries are in the standard orientation that Gaussian
    rotated a molecule to, so they are rotated back first: see :func:`~.orientation.in_frame_of_positions`, which takes
    some 15 seconds for all molecules. The trace is exact, and so are the eigenvalues. The directions of the axes are
    inferred, and for about one molecule in twelve they are likely to be wrong; those are the molecules where it makes
    little difference. The error that this leaves is estimated at 0.06 bohr³ an entry, averaged over all molecules (the
    anisotropic part has a typical norm of 22 bohr³): no network can be shown to be better than that.

    Args:
        targets: names of targets, by default all twelve, or ``["polarizability"]`` alone.
        standardise: subtract the mean of the training molecules in use, and divide by their standard deviation. A
            tensor stays equivariant: of it, ``mean`` is the mean of a third of the trace, times the identity, and
            ``std`` is the root of the mean square of all entries of what is left.
        centred: move the mean of the atoms of each molecule to the origin.
        folder, limit_train, limit_valid, limit_test, download: see :class:`~.data_module.PublishedClouds`.
        **options: ``batch_size``, ``seed``, ``num_workers``, ``eval_batch_size``, ``rotate_train``, ``rotate_test``,
            ``translate_train``, ``translate_test``, ``rotate_about``, ``reflect_train``: see
            :class:`~.data_module.PointClouds`.
            The published augmentation is ``rotate_train`` with ``translate_train`` 0.5.

    Attributes:
        units: of each target.
        mean, std: of the targets, once :meth:`setup` was called: (T,), or (3, 3) and () for the tensor; 0 and 1 unless
            ``standardise``.

    In a configuration file::

        data:
          class_path: escnn_attention.training.data.QM9
          init_args:
            targets: [alpha]
            batch_size: 100
            rotate_train: true

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
        self,
        folder: Path | None = None,
        targets: Sequence[str] | None = None,
        standardise: bool = True,
        centred: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(folder, **options)
        names = tuple(TARGETS) if targets is None else (targets,) if isinstance(targets, str) else tuple(targets)
        unknown = [name for name in names if name not in TARGETS]
        if not names or len(set(names)) < len(names) or (unknown and names != (TENSOR,)):
            raise UserError(
                f"targets: got {list(names)}, needed different ones of {', '.join(TARGETS)}, or {TENSOR} alone"
            )
        self.targets = names
        self.is_tensor = names == (TENSOR,)
        self.units = ("bohr³",) if self.is_tensor else tuple(TARGETS[name].unit for name in names)
        self.standardise = standardise
        self.centred = centred
        self.mean: Tensor | None = None
        self.std: Tensor | None = None

    def original(self, targets: Tensor) -> Tensor:
        """Standardised targets, or predictions of them, in their units."""
        if self.mean is None or self.std is None:
            raise UserError("the mean and the standard deviation of the targets are not known before setup()")
        return targets * self.std.to(targets) + self.mean.to(targets)

    def _mover(self) -> Callable[[Clouds, Motions], Clouds]:
        return functools.partial(move, about=self.rotate_about, target_order=2 if self.is_tensor else 0)

    def _prepare_folder(self, folder: Path) -> None:
        make_from_downloads(folder / FILE, DOWNLOADS, convert, allowed=self.download)

    def _read(self, folder: Path, parts: Mapping[str, int | None]) -> Mapping[str, CloudSource] | None:
        if not (folder / FILE).exists():
            return None
        molecules = read(folder / FILE, tensors=self.is_tensor)
        count = len(molecules.sizes)
        if count <= _NUM_TRAIN + _NUM_VALID:
            raise UserError(
                f"{folder / FILE}: {count} molecules, of which {_NUM_TRAIN} train and {_NUM_VALID} validate: too few"
            )
        order = np.random.RandomState(_SPLIT_SEED).permutation(count)
        chosen = {
            "train": order[:_NUM_TRAIN],
            "valid": order[_NUM_TRAIN : _NUM_TRAIN + _NUM_VALID],
            "test": order[_NUM_TRAIN + _NUM_VALID :],
        }
        chosen = {part: numbers[: self.limits[part]] for part, numbers in chosen.items()}
        # Of the training molecules, whatever parts are wanted: their mean and standard deviation are.
        wanted = {part: chosen[part] for part in dict.fromkeys(["train", *parts])}
        values = self._values(molecules, wanted)
        self._standardise(values["train"])
        return {part: self._source(molecules, chosen[part], values[part]) for part in parts}

    def _values(
        self, molecules: Molecules, chosen: Mapping[str, npt.NDArray[np.int64]]
    ) -> dict[str, npt.NDArray[np.float64]]:
        """The targets of each part, in their units."""
        every = np.concatenate(list(chosen.values()))
        if molecules.tensors is None:
            values = in_units(molecules, self.targets, every)
        else:
            values = in_frame_of_positions(
                molecules.sizes, molecules.charges, molecules.positions, molecules.tensors, every
            )
        ends = np.cumsum([len(numbers) for numbers in chosen.values()])
        return dict(zip(chosen, np.split(values, ends[:-1]), strict=True))

    def _standardise(self, values: npt.NDArray[np.float64]) -> None:
        """Set the mean and the standard deviation to those of ``values``."""
        found = torch.from_numpy(values)
        mean, std = torch.zeros(found.shape[1:]), torch.ones(found.shape[1:2])
        if self.is_tensor:
            std = torch.ones(())
        if self.standardise and self.is_tensor:
            mean = found.diagonal(dim1=1, dim2=2).mean() * torch.eye(3, dtype=found.dtype)
            std = (found - mean).square().mean().sqrt()
        elif self.standardise:
            mean, std = found.mean(dim=0), found.std(dim=0, correction=0)
        if not (std > 0).all():
            raise UserError(f"limit_train: {len(values)} molecules do not differ in {', '.join(self.targets)}")
        self.mean, self.std = mean.float(), std.float()
        self._exact = mean.double(), std.double()

    def _source(
        self, molecules: Molecules, chosen: npt.NDArray[np.int64], values: npt.NDArray[np.float64]
    ) -> CloudsInMemory:
        sizes = molecules.sizes[chosen]
        starts = (np.cumsum(molecules.sizes) - molecules.sizes)[chosen]
        owners = np.repeat(np.arange(len(chosen)), sizes)
        atoms = np.arange(len(owners)) + (starts - (np.cumsum(sizes) - sizes))[owners]
        coords = molecules.positions[atoms]
        if self.centred:
            sums = np.stack([np.bincount(owners, coords[:, axis], len(chosen)) for axis in range(3)], axis=1)
            coords = coords - (sums / sizes[:, None])[owners]
        mean, std = self._exact
        return CloudsInMemory(
            torch.from_numpy(sizes),
            torch.from_numpy(coords).float(),
            torch.from_numpy(_KIND[molecules.charges[atoms]].astype(np.uint8)),
            ((torch.from_numpy(values) - mean) / std).float(),
            table=atom_features(),
        )


def in_units(molecules: Molecules, targets: Iterable[str], chosen: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
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
