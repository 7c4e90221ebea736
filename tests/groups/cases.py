"""Samples of continuous groups, and the frequency up to which they integrate exactly."""

from escnn import group, gspaces

from escnn_attention import Samples

EXACT = {
    "SO(2)": (lambda: gspaces.rot2dOnR2(-1), Samples(8), 7),
    "O(2)": (lambda: gspaces.flipRot2dOnR2(-1), Samples(8), 3),
    "tetrahedron": (gspaces.rot3dOnR3, Samples(12), 2),
    "cube": (gspaces.rot3dOnR3, Samples(24), 3),
    "icosahedron": (gspaces.rot3dOnR3, Samples(60), 5),
    "cosets of the icosahedron": (gspaces.rot3dOnR3, Samples(120), 5),
    "spiral": (gspaces.rot3dOnR3, Samples(40), 2),
    "hopf": (gspaces.rot3dOnR3, Samples(60, "hopf"), 1),
    "random rotations": (gspaces.rot3dOnR3, Samples(40, "rand"), 1),
    "O(3)": (gspaces.flipRot3dOnR3, Samples(48), 3),
    "O(3) on a spiral": (gspaces.flipRot3dOnR3, Samples(36), 1),
    "random in O(2)": (lambda: gspaces.flipRot2dOnR2(-1), Samples(12, "rand"), 1),
    "about an axis": (lambda: gspaces.rot2dOnR3(-1), Samples(6), 5),
    "cone": (lambda: gspaces.conicalOnR3(-1), Samples(12), 5),
    "dihedral": (lambda: gspaces.dihedralOnR3(-1), Samples(12), 5),
    "cylinder": (lambda: gspaces.cylindricalOnR3(-1), Samples(12), 5),
    "full cylinder": (lambda: gspaces.fullCylindricalOnR3(-1), Samples(24), 5),
    "on a point": (lambda: gspaces.no_base_space(group.so3_group(2)), Samples(12), 2),
}
