"""Trained networks of experiments."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from escnn.nn import FieldType

from escnn_attention._checks import reason_of
from escnn_attention.functional.layout import without_prefix
from escnn_attention.models.description import DescriptionError, build, named
from escnn_attention.models.limits import within
from escnn_attention.training.data.fields import GridFields
from escnn_attention.training.errors import UserError
from escnn_attention.training.experiment.checkpoints import BEST, LAST, provenance_of, read_checkpoint
from escnn_attention.training.modules.classifier import Classifier
from escnn_attention.training.modules.points import PointClassifier
from escnn_attention.training.modules.scheduled import Scheduled


def load_network(folder: str | Path, network: torch.nn.Module | None = None) -> torch.nn.Module:
    """The trained network of an experiment: that of the highest validation accuracy, in eval mode.

    Nothing from the checkpoint is executed. It names the class of the network and its arguments; if all of them belong
    to this package, and the gspace to escnn, the network is built from these, on the CPU.

    Args:
        folder: that was given to ``escnn-attention fit --folder``; or a checkpoint in it.
        network: one of the same kind, which gets the weights, where it is not a network of this package.

    Raises:
        TypeError: ``network`` is not a module.
        UserError: there is no checkpoint in the folder, it cannot be read or is of another network, or no ``network``
            is given and it is of a class from elsewhere or larger than its weights.

    Example:
        >>> from escnn_attention.training import load_network
        >>> from escnn_attention.training.errors import UserError
        >>> try:
        ...     load_network("nowhere")
        ... except UserError as error:
        ...     print(str(error).partition(":")[0])
        nowhere holds no trained network, neither best.ckpt nor last.ckpt
    """
    if network is not None and not isinstance(network, torch.nn.Module):
        raise TypeError(f"network: got {type(network).__name__}, needed a torch.nn.Module")
    path = checkpoint_of(folder)
    content = read_checkpoint(path)
    state = content.get("state_dict") or {}
    if network is None:
        trained = provenance_of(content)
        if trained is None:
            raise UserError(f"{path} does not say what network it is of: build it, and give it as `network`")
        described = trained["configuration"]["model"]["network"]
        try:
            with within(described, path.stat().st_size, len(state)):
                network = build_described(described)
        except (DescriptionError, UserError) as error:
            raise UserError(f"{path}: {error}") from error
    weights = without_prefix(state, "network.")
    if not weights:
        raise UserError(f"{path} holds no weights of a network")
    load_weights(network, weights, str(path))
    return network.eval()


def load_weights(network: torch.nn.Module, weights: Mapping[str, Any], name: str) -> None:
    """Load weights of a checkpoint that errors call by its ``name``: one from elsewhere may be of another network."""
    try:
        network.load_state_dict(weights)
    except RuntimeError as error:
        _, *reasons = str(error).splitlines()
        newer = next((reason.strip() for reason in reasons if "are in layout" in reason), None)
        if newer is not None:
            raise UserError(f"{name} is of a newer version: {newer}") from error
        raise UserError(f"{name} is of another network: {reasons[0].strip()}") from error


def checkpoint_of(folder: str | Path) -> Path:
    """The checkpoint of the trained network of an experiment, or the one that is given instead of its folder."""
    if Path(folder).is_file():
        return Path(folder)
    if path := next(filter(Path.exists, (Path(folder, BEST), Path(folder, LAST))), None):
        return path
    way_out = "run 'escnn-attention fit' with this --folder first"
    raise UserError(f"{folder} holds no trained network, neither {BEST} nor {LAST}: {way_out}")


def build_described(description: Any) -> torch.nn.Module:
    """The network of a description, which may come from anywhere: see :func:`escnn_attention.models.description.build`.

    It is a :class:`UserError` if it names anything else than modules of this package and what they take, is no
    description, or its arguments are not those of the class.
    """
    if not (isinstance(description, Mapping) and "class_path" in description):
        raise UserError("it does not say of which class its network is")
    try:
        found = named(description["class_path"])
        if not (inspect.isclass(found) and issubclass(found, torch.nn.Module)):
            raise DescriptionError(f"it names {description['class_path']!r}, which is no network")
        return build(description)
    except DescriptionError as error:
        raise UserError(str(error)) from error
    except Exception as error:  # the arguments in a file can make a constructor fail in any way
        reason = reason_of(error)
        raise UserError(f"this version cannot build the network {description['class_path']}: {reason}") from error


def check_fit(model: Scheduled, data: Any, name: str) -> None:
    """Check that the network ``name`` of a module has the channels, classes and fields of the data, where both tell.

    Fields are the scalars and vectors of grids, in the order of the data's channels.
    """
    network: Any = model.network
    # The channels of somebody's network of points may be features and coordinates.
    channels = getattr(network, "in_channels", None) if isinstance(model, Classifier) else None
    channels = getattr(getattr(network, "in_type", None), "size", channels)
    told = {"num_classes": getattr(model, "num_classes", None), "num_targets": getattr(model, "num_targets", None)}
    for attribute, needed in {"in_channels": channels, **told}.items():
        given, what = getattr(data, attribute, None), attribute.partition("_")[2]
        classifies = isinstance(model, (Classifier, PointClassifier))
        if classifies and isinstance(given, int) and isinstance(needed, int) and given != needed:
            raise UserError(f"{name}: it is for {needed} {what}, but {type(data).__name__} has {given} ({attribute})")
    of_data = ((data.inputs, "in_type"), (data.targets, "out_type")) if isinstance(data, GridFields) else ()
    for kinds, attribute in of_data:
        field_type = getattr(network, attribute, None)
        if not isinstance(field_type, FieldType):
            continue
        dim = field_type.gspace.dimensionality
        given = [dim if kind == "vector" else 1 for kind, count in kinds.items() for _ in range(count)]
        sizes = [representation.size for representation in field_type.representations]
        if sizes != given and sorted(sizes) == sorted(given):
            raise UserError(
                f"{name}: {attribute} has its fields in another order than the channels of {type(data).__name__};"
                f" needed {dict(kinds)}"
            )
