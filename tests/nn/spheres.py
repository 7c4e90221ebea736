"""Fields on the sphere, and how equivariant layers on them are."""

from __future__ import annotations

import numpy as np
import torch
from escnn import gspaces
from escnn.nn import FieldType, GeometricTensor

from tests.nn.points import cloud, error_of

ROTATIONS = gspaces.rot3dOnR3()
ALL = gspaces.flipRot3dOnR3()
SPACES = {"SO(3)": ROTATIONS, "O(3)": ALL}


def irrep(space, degree: int):
    """Of the harmonics of this degree."""
    group = space.fibergroup
    return group.irrep(degree) if space is ROTATIONS else group.irrep(degree % 2, degree)


def mixed(space) -> FieldType:
    return FieldType(space, [irrep(space, 1), space.trivial_repr, irrep(space, 2)])


def scalars(space, number: int = 2) -> FieldType:
    return FieldType(space, number * [space.trivial_repr])


def on_sphere(field_type: FieldType, number: int, seed: int = 0) -> GeometricTensor:
    x = cloud(field_type, number, seed)
    return GeometricTensor(x.tensor, field_type, torch.nn.functional.normalize(x.coords, dim=-1))


def elements(space, number: int = 2) -> list:
    """Random ones; those of O(3) with reflections among them."""
    group = space.fibergroup
    random = np.random.default_rng(0)
    out = []
    for i in range(number):
        q = random.normal(size=4)
        q /= np.linalg.norm(q)
        out.append(group.element(q if space is ROTATIONS else (i % 2, q), "Q"))
    return out


def error(layer, x: GeometricTensor) -> float:
    return error_of(layer, x, elements(layer.space))
