"""The properties of QM9, and the units that they are predicted in."""

from __future__ import annotations

from typing import NamedTuple

NAMES = (
    "RotA_GHz",
    "RotB_GHz",
    "RotC_GHz",
    "Dipole_debye",
    "Polarizability_bohr3",
    "HOMO_au",
    "LUMO_au",
    "HOMO_LUMO_gap_au",
    "R2_bohr2",
    "ZPVE_au",
    "InternalEnergy_0K_au",
    "InternalEnergy_298K_au",
    "Enthalphy_298K_au",
    "GibbsFreeEnergy_298K_au",
    "Heatcapacity_Cv_cal_mol_K",
)
"""The published properties, in the order of the published files."""

HARTREE = 27.211386245988
"""In electronvolts."""


class Target(NamedTuple):
    """A property to predict.

    Attributes:
        name: of the column in :data:`FILE`.
        factor: by which it is multiplied.
        unit: that it then has.
        atoms: what is taken away for each atom before that: of H, C, N, O and F.
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
