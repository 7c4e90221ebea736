"""Descriptions of networks and their arguments as plain values, which JSON can hold and which run no code."""

from __future__ import annotations

import importlib
import inspect
import itertools
import math
import sys
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np
import torch
from escnn import group as groups
from escnn import gspaces
from escnn.group import Group, IrreducibleRepresentation, Representation
from escnn.gspaces import GSpace
from escnn.nn import FieldType

from escnn_attention.geometry.relations import Relation
from escnn_attention.groups.samples import Samples
from escnn_attention.groups.sequences import SpaceTime
from escnn_attention.groups.spaces import MotionSpace, TetrahedralSpace, tetraOnR3

_PACKAGE = "escnn_attention"
_SPACES = "escnn.gspaces"
_GROUPS = "escnn.group"
_FIELDS = "escnn.nn.FieldType"
_ARGUMENTS = ("init_args", "dict_kwargs")
_KEYS = {"class_path", *_ARGUMENTS}

# Arguments that an object keeps under another name.
_ATTRIBUTES = {
    ("ConvolutionalEncoding", "encoding"): "rest",
    ("ConvolutionalEncoding", "sharpness"): "initial_sharpness",
    ("QuadraticEncoding", "sharpness"): "initial_sharpness",
    ("RotaryEncoding", "values"): "rotates_values",
}


class DescriptionError(ValueError):
    """A value without a description, or a description of nothing in this package."""


def describe(value: Any) -> Any:
    """An argument of a network as plain values.

    Numbers, strings, lists and dictionaries of these are themselves. Gspaces, field types, encodings, relations,
    samples and networks become ``{"class_path": ..., "init_args": {...}}``, as in the configuration of a training.
    Anything else, such as a tensor, a function, or a class of another package, is a :class:`DescriptionError`.

    >>> describe(gspaces.flipRot2dOnR2(4))
    {'class_path': 'escnn.gspaces.flipRot2dOnR2', 'init_args': {'N': 4}}
    >>> build(describe(gspaces.flipRot2dOnR2(4))) == gspaces.flipRot2dOnR2(4)
    True
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        raise DescriptionError(f"got {value}, which JSON does not have")
    if isinstance(value, np.generic):
        return describe(value.item())
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value) and "class_path" not in value:
        return {key: describe(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [describe(part) for part in value]
    if isinstance(value, GSpace):
        return _described_space(value)
    if isinstance(value, FieldType):
        fields = [
            [_described_field(r, value.gspace.fibergroup), len(list(n))]
            for r, n in itertools.groupby(value.representations)
        ]
        return {"class_path": _FIELDS, "init_args": {"gspace": describe(value.gspace), "fields": fields}}
    config = getattr(value, "_hub_mixin_config", None)
    if isinstance(config, Mapping):  # a network, which was described when it was made
        for reason in getattr(value, "_undescribed", {}).values():
            raise DescriptionError(reason)
        return {"class_path": class_path(type(value)), "init_args": dict(config)}
    return _described_object(value)


def build(value: Any) -> Any:
    """Build the value of a description; it runs nothing but constructors of known classes.

    Only modules, relations and samples of this package, the gspaces of escnn and its field types are imported. The
    whole description is checked before the first of them is built. Everything else in it stays a plain value.
    """
    _check(value)
    return _built(value)


def class_path(cls: type) -> str:
    """The name of a class by which users import it.

    >>> from escnn_attention.models import HybridNet
    >>> class_path(HybridNet)
    'escnn_attention.models.HybridNet'
    """
    package = ".".join(cls.__module__.split(".")[:2])
    public = getattr(sys.modules.get(package), cls.__name__, None) is cls
    return f"{package if public else cls.__module__}.{cls.__qualname__}"


def named(path: Any) -> Callable[..., Any]:
    """The object that a description names: a class of this package, a function of escnn, or field types."""
    folder, _, name = path.rpartition(".") if isinstance(path, str) else ("", "", "")
    if path == _FIELDS:
        return _build_fields
    if path == f"{_PACKAGE}.{tetraOnR3.__name__}":
        return tetraOnR3
    if folder == _SPACES or folder.startswith(f"{_SPACES}."):
        # Looked up by its name: nothing is imported.
        space = getattr(gspaces, name) if name in gspaces.__all__ else None
        if inspect.isfunction(space):
            return space
    elif folder == _GROUPS and name in _MAKERS_OF_GROUPS.values():
        return getattr(groups, name)  # type: ignore[no-any-return]
    elif (folder == _PACKAGE or folder.startswith(f"{_PACKAGE}.")) and path.replace(".", "_").isidentifier():
        try:
            found = getattr(importlib.import_module(folder), name)
        except (ImportError, AttributeError) as error:
            raise DescriptionError(f"this version has no {path}") from error
        ours = inspect.isclass(found) and issubclass(
            found, (torch.nn.Module, Relation, Samples, TetrahedralSpace, MotionSpace, SpaceTime)
        )
        if ours and found.__module__.partition(".")[0] == _PACKAGE:
            return found  # type: ignore[no-any-return]
    raise DescriptionError(
        f"it names {path!r}, and only networks of {_PACKAGE} and gspaces of {_SPACES} are built from a checkpoint:"
        " build this one yourself, and give it as `network`"
    )


# By the number of dimensions and the beginning of escnn's id of a subgroup of O(2) or O(3): the function that makes the
# gspace, the function for order 1, and the name of the first one's argument.
_MAKERS: dict[tuple[Any, ...], tuple[str, str, str]] = {
    (2, False): ("rot2dOnR2", "trivialOnR2", "N"),
    (2, True): ("flipRot2dOnR2", "flip2dOnR2", "N"),
    (3, False, False): ("rot2dOnR3", "trivialOnR3", "n"),
    (3, False, True): ("dihedralOnR3", "", "n"),
    (3, "cone"): ("conicalOnR3", "mirOnR3", "n"),
    (3, True, False): ("cylindricalOnR3", "invOnR3", "n"),
    (3, True, True): ("fullCylindricalOnR3", "", "n"),
}
_WHOLE = {
    "so3": ("rot3dOnR3", "flipRot3dOnR3"),
    "octa": ("octaOnR3", "fullOctaOnR3"),
    "ico": ("icoOnR3", "fullIcoOnR3"),
}


def _described_space(space: GSpace) -> dict[str, Any]:
    """What makes a gspace, and its arguments."""
    if isinstance(space, SpaceTime):
        return {"class_path": class_path(SpaceTime), "init_args": {"base": _described_space(space.base)}}
    if space.dimensionality:
        return _described_base_space(space)
    return {"class_path": f"{_SPACES}.no_base_space", "init_args": {"G": _described_group(space.fibergroup)}}


@cache
def _described_base_space(space: GSpace) -> dict[str, Any]:
    """The function of escnn that makes a gspace, and its arguments, after a trial."""
    if isinstance(space, TetrahedralSpace):
        return {"class_path": class_path(TetrahedralSpace)}
    if isinstance(space, MotionSpace):
        return {"class_path": class_path(MotionSpace), "init_args": {"dim": space.dim}}
    identity: Any = getattr(space, "_sg_id", None)
    name, arguments = "", dict[str, Any]()
    if space.dimensionality == 2:
        axis, number = identity
        several, single, argument = _MAKERS[2, axis is not None]
        name, arguments = (single, {}) if number == 1 else (several, {argument: number})
        if axis is not None and not math.isclose(axis, math.pi):
            arguments["axis"] = axis / 2
    elif space.dimensionality == 3 and identity[1] in _WHOLE:
        name = _WHOLE[identity[1]][identity[0]]
    elif space.dimensionality == 3:
        *kind, number, _ = identity
        several, single, argument = _MAKERS[(3, *kind)]
        name, arguments = (single, {}) if number == 1 and single else (several, {argument: number})
    if name and getattr(gspaces, name)(**arguments) == space:
        return {"class_path": f"{_SPACES}.{name}", **({"init_args": arguments} if arguments else {})}
    raise DescriptionError(f"got the gspace {space.name}, which no function of {_SPACES} makes of a number")


# By the name of the class, or of a product: the function of escnn that makes a finite group.
_MAKERS_OF_GROUPS = {
    "CyclicGroup": "cyclic_group",
    "DihedralGroup": "dihedral_group",
    "Octahedral": "octa_group",
    "Icosahedral": "ico_group",
    "FullOctahedral": "full_octa_group",
    "FullIcosahedral": "full_ico_group",
}


def _described_group(value: Group) -> dict[str, Any]:
    """The function of escnn that makes a group, and its argument, after a trial."""
    name = _MAKERS_OF_GROUPS.get(type(value).__name__) or _MAKERS_OF_GROUPS.get(value.name)
    if name:
        arguments = {"N": value._keys["N"]} if "N" in value._keys else {}
        if getattr(groups, name)(**arguments) == value:
            return {"class_path": f"{_GROUPS}.{name}", **({"init_args": arguments} if arguments else {})}
    raise DescriptionError(f"got the group {value.name}, needed one of {', '.join(_MAKERS_OF_GROUPS.values())}")


def _described_field(r: Representation, group: Group) -> Any:
    """The kind of a representation, which is unique for the fiber group; of any other the irreps that it is made of."""
    if r == group.trivial_representation:
        return "trivial"
    if not group.continuous and r == group.regular_representation:
        return "regular"
    if isinstance(r, IrreducibleRepresentation):
        return {"irrep": describe(r.id)}
    if group.continuous and r.name.startswith("regular_") and r.name[8:].isdigit():
        level = int(r.name[8:])
        if r == group.bl_regular_representation(level):
            return {"bl_regular": level}
    kind = {"name": r.name, "irreps": describe(r.irreps), "change_of_basis": r.change_of_basis.tolist()}
    return {**kind, "supported_nonlinearities": sorted(r.supported_nonlinearities)}


def _build_fields(gspace: GSpace, fields: list[list[Any]]) -> FieldType:
    group = gspace.fibergroup
    made: list[Representation] = []
    for kind, count in fields:
        if isinstance(kind, Mapping) and set(kind) == {"irrep"}:
            r = group.irrep(*_tuples(kind["irrep"]))
        elif isinstance(kind, Mapping) and set(kind) == {"bl_regular"}:
            r = group.bl_regular_representation(kind["bl_regular"])
        elif kind in ("trivial", "regular"):
            r = getattr(group, f"{kind}_representation")
        elif isinstance(kind, Mapping) and set(kind) == _MADE_OF_IRREPS:
            r = _build_representation(group, **kind)
        else:
            raise DescriptionError(f"fields: got {kind!r}, which is no kind of field")
        made += count * [r]
    return FieldType(gspace, made)


_MADE_OF_IRREPS = {"name", "irreps", "change_of_basis", "supported_nonlinearities"}


def _build_representation(
    group: Group, name: str, irreps: Any, change_of_basis: Any, supported_nonlinearities: list[str]
) -> Representation:
    parts, basis = [group.irrep(*_tuples(part)) for part in irreps], np.array(change_of_basis, dtype=np.float64)
    if basis.shape != 2 * (sum(part.size for part in parts),):
        raise DescriptionError(f"fields: got a change of basis of shape {basis.shape} for irreps {irreps}")
    made = Representation(group, f"{name} of a file", [part.id for part in parts], basis, supported_nonlinearities)
    made.name = name  # which escnn has for itself, perhaps
    return made


def _tuples(value: Any) -> Any:
    return tuple(_tuples(part) for part in value) if isinstance(value, list) else value


def _described_object(value: Any) -> dict[str, Any]:
    """An encoding, a relation, or samples: each keeps its arguments as attributes."""
    cls = type(value)
    known = isinstance(value, (torch.nn.Module, Relation, Samples)) and cls.__module__.partition(".")[0] == _PACKAGE
    parameters = list(inspect.signature(cls).parameters) if known else []
    names = [_ATTRIBUTES.get((cls.__name__, name), name) for name in parameters]
    if not known or not all(hasattr(value, name) for name in names):
        raise DescriptionError(
            f"got a {cls.__name__}, needed numbers, strings, lists and dictionaries, gspaces, field types, or "
            f"encodings, relations, samples and networks of {_PACKAGE}"
        )
    arguments = zip(parameters, names, strict=True)
    return {
        "class_path": class_path(cls),
        "init_args": {argument: describe(getattr(value, name)) for argument, name in arguments},
    }


def _check(value: Any) -> None:
    """Check everything that would be imported."""
    if isinstance(value, Mapping):
        if "class_path" in value:
            named(value["class_path"])
            if not all(isinstance(value.get(key, {}), Mapping) for key in _ARGUMENTS) or value.keys() - _KEYS:
                raise DescriptionError(
                    f"{value['class_path']!r} comes with {', '.join(map(str, value))}, needed init_args"
                )
        for part in value.values():
            _check(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            _check(part)


def _built(value: Any) -> Any:
    if isinstance(value, Mapping):
        if "class_path" in value:
            arguments = {**value.get("init_args", {}), **value.get("dict_kwargs", {})}
            return named(value["class_path"])(**{name: _built(part) for name, part in arguments.items()})
        return {name: _built(part) for name, part in value.items()}
    return [_built(part) for part in value] if isinstance(value, (list, tuple)) else value
