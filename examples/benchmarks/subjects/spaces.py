"""Gspaces by name."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from escnn.gspaces import GSpace
    from escnn.nn import FieldType


def gspace(name: str) -> GSpace:
    """The plane with the group ``cN`` or ``dN``, or space with the group ``octahedral``."""
    from escnn import gspaces

    if name == "octahedral":
        return gspaces.octaOnR3()
    match = re.fullmatch(r"([cd])(\d+)", name)
    if match is None:
        raise ValueError(f"space: got {name!r}, needed cN, dN or octahedral")
    fold = int(match[2])
    if match[1] == "d":
        return gspaces.flipRot2dOnR2(fold)
    return gspaces.rot2dOnR2(fold) if fold > 1 else gspaces.trivialOnR2()


def order(name: str) -> int:
    """The number of elements of the group of :func:`gspace`."""
    if name == "octahedral":
        return 24
    return int(name[1:]) * (2 if name[0] == "d" else 1)


def regular(name: str, fields: int) -> FieldType:
    """So many regular fields."""
    from escnn.nn import FieldType

    space = gspace(name)
    return FieldType(space, fields * [space.regular_repr])
