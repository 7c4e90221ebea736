"""Networks by name, made anew or with the weights that come with the package."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from escnn import gspaces
from escnn.gspaces import GSpace

from escnn_attention._checks import check_bool
from escnn_attention.encodings import PairKernel
from escnn_attention.models.description import build, named
from escnn_attention.models.field_transformer import FieldTransformer
from escnn_attention.models.field_unet import FieldUNet
from escnn_attention.models.group_cnns import AllCNNC, GroupCNN, GroupDenseNet, ResNet44
from escnn_attention.models.gsa_net import GSANet
from escnn_attention.models.point_transformer import PointTransformer
from escnn_attention.models.pretrained import (
    CONFIGURATION,
    PretrainedMixin,
    check_source,
    described_network,
    read_configuration,
)
from escnn_attention.models.vision_transformer import VisionTransformer
from escnn_attention.models.weights_file import WEIGHTS

_WEIGHTS = Path(__file__).with_name("weights")
"""A folder for each name with weights, as ``save_pretrained`` writes it, with the recipe of their training."""


@dataclass(frozen=True)
class _Named:
    """A network without weights: the function that makes it, its gspace, and its other options."""

    make: Callable[..., torch.nn.Module]
    gspace: Callable[[], GSpace]
    options: Mapping[str, Any] = field(default_factory=dict)


_P4, _P4M = partial(gspaces.rot2dOnR2, 4), partial(gspaces.flipRot2dOnR2, 4)
_MOLECULES = {
    "in_type": 15,
    "out_type": 1,
    "fields": 32,
    "num_blocks": 6,
    "num_heads": 8,
    "attention": {"keys": "own", "normalization": "count", "length_scale": 3.0},
    "encoding": PairKernel("concat", "raw", "mlp", hidden=6),
    "pool": "sum",
    "readout": "points",
}
_SOLIDS = {
    "in_type": 1,
    "out_type": 40,
    "fields": 32,
    "num_blocks": 4,
    "num_heads": 8,
    "positions": True,
    "attention": {"keys": "own", "num_neighbours": 32, "length_scale": 0.5},
    "head": {"poses": "max", "batch_norm": True},
}
_CANVAS = {
    "in_type": 1,
    "out_type": 11,
    "widths": (4, 6, 8),
    "convolutions": (2, 2, 1),
    "attention": (0, 0, 1),
    "num_heads": 2,
    "kernel_size": 5,
    "block": {"keys": "own", "encoding": "convolutional"},
}
_OCTIC_SMALL = {
    "in_channels": 3,
    "num_classes": 1000,
    "image_size": 224,
    "patch_size": 16,
    "fields": 48,
    "num_heads": 6,
}
_WITHOUT_WEIGHTS = {
    "all-cnn-c-cifar10": _Named(AllCNNC.cifar10, _P4),
    "attentive-all-cnn-c-cifar10": _Named(AllCNNC.cifar10, _P4, {"attention": "features"}),
    "attentive-dense-net-pcam": _Named(GroupDenseNet.patch_camelyon, _P4M, {"attention": "features"}),
    "attentive-p4-cnn-rotmnist": _Named(GroupCNN.rotmnist, _P4, {"attention": "full"}),
    "attentive-resnet44-cifar10": _Named(ResNet44.cifar10, _P4M, {"attention": "features"}),
    "dense-net-pcam": _Named(GroupDenseNet.patch_camelyon, _P4M),
    "diffusion-policy": _Named(FieldTransformer.policy, partial(gspaces.rot2dOnR2, 8)),
    "field-unet-digits": _Named(FieldUNet, partial(gspaces.rot2dOnR2, 8), _CANVAS),
    "gsa-net-cifar10": _Named(GSANet.cifar10, gspaces.flip2dOnR2),
    "gsa-net-pcam": _Named(GSANet.patch_camelyon, _P4M),
    "octic-vit-small-imagenet": _Named(VisionTransformer, _P4M, _OCTIC_SMALL),
    "p4-cnn-rotmnist": _Named(GroupCNN.rotmnist, _P4),
    "point-transformer-modelnet40": _Named(PointTransformer, gspaces.octaOnR3, _SOLIDS),
    "point-transformer-qm9": _Named(PointTransformer, gspaces.octaOnR3, _MOLECULES),
    "resnet44-cifar10": _Named(ResNet44.cifar10, _P4M),
}


def list_models(*, pretrained: bool = False) -> list[str]:
    """The names that :func:`create` knows; with ``pretrained`` those that have weights.

    Example:
        >>> from escnn_attention import models
        >>> [name for name in models.list_models() if name.endswith("rotmnist") and "p4" not in name]
        ['gsa-net-r8-rotmnist', 'gsa-net-rotmnist', 'hybrid-rotmnist', 'steerable-rotmnist']
    """
    check_bool("pretrained", pretrained)
    with_weights = {path.parent.name for path in _WEIGHTS.glob(f"*/{WEIGHTS}")}
    return sorted(with_weights if pretrained else with_weights.union(_WITHOUT_WEIGHTS))


def create(name: str, pretrained: bool | None = None, **options: Any) -> torch.nn.Module:
    """A network by its name.

    Args:
        name: one of :func:`list_models`.
        pretrained: whether it gets the weights that come with the package, and is in eval mode.
        **options: arguments of the network, in place of those of the name, such as another ``gspace``.

    Raises:
        ValueError: an unknown name, or ``pretrained=True`` for a name without weights.

    Example:
        >>> from escnn_attention import models
        >>> from escnn import gspaces
        >>> network = models.create("gsa-net-rotmnist", gspace=gspaces.rot2dOnR2(8))
        >>> type(network).__name__, network.gspace.fibergroup.name
        ('HybridNet', 'C8')

    Source: each name without weights is a network of the paper that its class cites, with the options given there.
    Names with weights are networks of this package, described in the folder of their weights. ``gsa-net-rotmnist`` and
    ``gsa-net-r8-rotmnist`` have fewer parameters than the paper's R4 and R8 networks (:meth:`GSANet.rotmnist`).
    """
    _check_name(name, list_models())
    if pretrained is not None and check_bool("pretrained", pretrained):
        return from_pretrained(name, **options)
    if name in _WITHOUT_WEIGHTS:
        chosen = _WITHOUT_WEIGHTS[name]
        return chosen.make(**{"gspace": options.pop("gspace", None) or chosen.gspace(), **chosen.options, **options})
    described = description_of(name)
    make = cast(Callable[..., torch.nn.Module], named(described["class_path"]))
    return make(**{**build(described["init_args"]), **options})


def from_pretrained(name_or_folder: str | Path, **options: Any) -> torch.nn.Module:
    """A trained network: by its name, of a folder that ``save_pretrained`` wrote, or of a repository on the Hub.

    Args:
        name_or_folder: one of ``list_models(pretrained=True)``, a folder, or ``"owner/name"`` of a repository.
        **options: of :meth:`PretrainedMixin.from_pretrained
            <escnn_attention.models.pretrained.PretrainedMixin.from_pretrained>`.

    Raises:
        FileNotFoundError: there is no such folder, or it lacks a file.
        ImportError: huggingface_hub or safetensors is not installed (extra ``hub``).
        ValueError: an unknown name, one without weights, or a folder of something else.

    Example:
        >>> import tempfile
        >>> from escnn_attention import models
        >>> folder = tempfile.mkdtemp()
        >>> models.create("p4-cnn-rotmnist", width=2).save_pretrained(folder)
        >>> type(models.from_pretrained(folder)).__name__
        'GroupCNN'
    """
    return PretrainedMixin.from_pretrained(_source(name_or_folder), **options)  # type: ignore[return-value]


def description_of(name: str) -> dict[str, Any]:
    """The network of weights that come with the package, by its name, as a configuration file describes it.

    >>> network = description_of("hybrid-rotmnist")
    >>> network["class_path"], network["init_args"]["widths"]
    ('escnn_attention.models.HybridNet', [8, 10, 16])
    """
    return described_network(read_configuration(_WEIGHTS / name))


def recipe_file(name: str) -> Path:
    """The file with the training of the weights of a name; :func:`~escnn_attention.training.recipe` reads it."""
    return _WEIGHTS / name / "recipe.yaml"


def _source(name_or_folder: str | Path) -> Path | str:
    """Where the files of a network are."""
    if isinstance(name_or_folder, str) and not set("/\\.~").intersection(name_or_folder):
        if Path(name_or_folder).is_dir() and name_or_folder not in list_models():
            return Path(name_or_folder)
        _check_name(name_or_folder, list_models(pretrained=True), " or a folder that is there")
        folder = _WEIGHTS / name_or_folder
        if not ((folder / WEIGHTS).is_file() and (folder / CONFIGURATION).is_file()):
            having = ", ".join(list_models(pretrained=True)) or "no network has yet"
            raise ValueError(f"pretrained: there are no weights of {name_or_folder!r}; those that have some: {having}")
        return folder
    return check_source(name_or_folder)


def _check_name(name: Any, offered: Sequence[str], otherwise: str = "") -> None:
    if not isinstance(name, str):
        raise TypeError(f"name: got {type(name).__name__}, needed a string")
    if name not in list_models():
        close = difflib.get_close_matches(name, offered, 1)
        perhaps = f" (perhaps {close[0]!r}?)" if close else ""
        raise ValueError(f"name: got {name!r}{perhaps}, needed one of {', '.join(offered)}{otherwise}")
