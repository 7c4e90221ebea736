"""Networks by name, made anew or with the weights that come with the package."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from escnn import gspaces
from escnn.gspaces import GSpace

from escnn_attention._checks import check_bool
from escnn_attention.encodings import PairKernel
from escnn_attention.models.group_cnns import AllCNNC, GroupCNN, GroupDenseNet, ResNet44
from escnn_attention.models.gsa_net import GSANet
from escnn_attention.models.hybrid import HybridNet
from escnn_attention.models.point_transformer import PointTransformer
from escnn_attention.models.pretrained import CONFIGURATION, check_source, from_folder
from escnn_attention.models.weights_file import WEIGHTS

__all__ = ["create", "data_of", "from_pretrained", "list_models", "task_of"]

_WEIGHTS = Path(__file__).with_name("weights")
"""A folder for each name with weights, as ``save_pretrained`` writes it."""


@dataclass(frozen=True)
class _Named:
    """A network: the function that makes it, of which gspace, with which options, and what it is for.

    Data are a class of :mod:`escnn_attention.training` and its arguments, a task is one of ``escnn-attention fit``.
    """

    make: Callable[..., torch.nn.Module]
    gspace: Callable[[], GSpace]
    data: str
    options: Mapping[str, Any] = field(default_factory=dict)
    data_options: Mapping[str, Any] = field(default_factory=dict)
    task: str = "classification"


def _rotations() -> GSpace:
    return gspaces.rot2dOnR2(4)


def _rotations_and_flips() -> GSpace:
    return gspaces.flipRot2dOnR2(4)


def _some_rotations() -> GSpace:
    return gspaces.rot2dOnR2(8)


def _many_rotations() -> GSpace:
    return gspaces.rot2dOnR2(16)


# The networks of `escnn-attention compare`, and its images.
_OF_DIGITS = {"in_channels": 1, "num_classes": 10}
_HEADS = {
    "num_heads": 4,
    "kernel_size": 5,
    "block": {
        "encoding": "convolutional",
        "head_fields": 2,
        "keys": "own",
        "projection": "group",
        "norm_scope": "sample",
    },
    "last_norm": False,
}
_STEERABLE_DIGITS = {**_OF_DIGITS, "widths": (8, 8), "convolutions": (1, 3), "attention": (0, 0), "features": 10}
_HYBRID_DIGITS = {**_OF_DIGITS, **_HEADS, "widths": (7, 7), "convolutions": (1, 2), "attention": (0, 1), "features": 30}
_GSA_DIGITS = {
    **_OF_DIGITS,
    **_HEADS,
    "stem": {"num_heads": 9, "kernel_size": 5},
    "widths": (7, 7),
    "convolutions": (1, 0),
    "attention": (0, 2),
    "features": 34,
}
_DIGITS = {"size": 16, "mean": [0.3075791001319885], "std": [0.3515421450138092]}
_GSA_ROTMNIST = {
    **_OF_DIGITS,
    **_HEADS,
    "stem": {"num_heads": 9, "kernel_size": 5},
    "widths": (20, 20, 20),
    "convolutions": (1, 0, 0),
    "attention": (0, 2, 1),
    "num_heads": 10,
}
_GSA_R8_ROTMNIST = {**_GSA_ROTMNIST, "widths": (13, 13, 13)}
_STEERABLE_ROTMNIST = {
    **_OF_DIGITS,
    "widths": (8, 10, 18),
    "convolutions": (1, 2, 2),
    "attention": (0, 0, 0),
    "conv_kernel": 5,
}
_HYBRID_ROTMNIST = {
    **_STEERABLE_ROTMNIST,
    "widths": (8, 10, 16),
    "class_token": {"num_heads": 4, "head_fields": 6},
}
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
_PARTICLES = {
    "in_type": {"scalar": 1, "vector": 1},
    "out_type": "vector",
    "fields": {"scalar": 32, "vector": 32},
    "num_blocks": 4,
    "num_heads": 2,
    "attention": {"norm_kind": "layer"},
    "positions": True,
    "head": {"fields": 5},
    "even_in": (0,),
    "pool": None,
}
_PATTERNS = {
    "in_type": 1,
    "out_type": 12,
    "fields": 12,
    "num_blocks": 2,
    "num_heads": 4,
    "attention": {"length_scale": 0.03, "radius": 0.1, "kernel_features": 8, "norm_kind": "layer"},
    "encoding": PairKernel(hidden=16),
    "pool": "sum",
    "head": {"fields": 32, "layers": 2},
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
_NETWORKS = {
    "all-cnn-c-cifar10": _Named(AllCNNC.cifar10, _rotations, "CIFAR10"),
    "attentive-all-cnn-c-cifar10": _Named(AllCNNC.cifar10, _rotations, "CIFAR10", {"attention": "features"}),
    "attentive-dense-net-pcam": _Named(
        GroupDenseNet.patch_camelyon, _rotations_and_flips, "PatchCamelyon", {"attention": "features"}
    ),
    "attentive-p4-cnn-rotmnist": _Named(GroupCNN.rotmnist, _rotations, "RotMNIST", {"attention": "full"}),
    "attentive-resnet44-cifar10": _Named(ResNet44.cifar10, _rotations_and_flips, "CIFAR10", {"attention": "features"}),
    "dense-net-pcam": _Named(GroupDenseNet.patch_camelyon, _rotations_and_flips, "PatchCamelyon"),
    "gsa-net-cifar10": _Named(GSANet.cifar10, gspaces.flip2dOnR2, "CIFAR10"),
    "gsa-net-digits": _Named(HybridNet, _many_rotations, "Digits", _GSA_DIGITS, _DIGITS),
    "gsa-net-pcam": _Named(GSANet.patch_camelyon, _rotations_and_flips, "PatchCamelyon"),
    "gsa-net-r8-rotmnist": _Named(HybridNet, _some_rotations, "RotMNIST", _GSA_R8_ROTMNIST),
    "gsa-net-rotmnist": _Named(HybridNet, _rotations, "RotMNIST", _GSA_ROTMNIST),
    "hybrid-digits": _Named(HybridNet, _many_rotations, "Digits", _HYBRID_DIGITS, _DIGITS),
    "hybrid-rotmnist": _Named(HybridNet, _some_rotations, "RotMNIST", _HYBRID_ROTMNIST),
    "p4-cnn-rotmnist": _Named(GroupCNN.rotmnist, _rotations, "RotMNIST"),
    "point-transformer-charged-particles": _Named(
        PointTransformer, gspaces.octaOnR3, "ChargedParticles", _PARTICLES, task="point-forecast"
    ),
    "point-transformer-constellations": _Named(
        PointTransformer,
        _rotations,
        "Constellations",
        _PATTERNS,
        {"features": "constant", "published": True},
        "point-classification",
    ),
    "point-transformer-modelnet40": _Named(
        PointTransformer, gspaces.octaOnR3, "ModelNet40", _SOLIDS, task="point-classification"
    ),
    "point-transformer-qm9": _Named(PointTransformer, gspaces.octaOnR3, "QM9", _MOLECULES, task="point-regression"),
    "resnet44-cifar10": _Named(ResNet44.cifar10, _rotations_and_flips, "CIFAR10"),
    "steerable-digits": _Named(HybridNet, _many_rotations, "Digits", _STEERABLE_DIGITS, _DIGITS),
    "steerable-rotmnist": _Named(HybridNet, _some_rotations, "RotMNIST", _STEERABLE_ROTMNIST),
}


def list_models(*, pretrained: bool = False) -> list[str]:
    """The names that :func:`create` knows.

    Args:
        pretrained: only those with weights.

    Raises:
        TypeError: ``pretrained`` is not True or False.

    Example:
        >>> from escnn_attention import models
        >>> [name for name in models.list_models() if name.endswith("rotmnist") and "p4" not in name]
        ['gsa-net-r8-rotmnist', 'gsa-net-rotmnist', 'hybrid-rotmnist', 'steerable-rotmnist']
    """
    check_bool("pretrained", pretrained)
    with_weights = {path.parent.name for path in _WEIGHTS.glob(f"*/{WEIGHTS}")}
    return sorted(with_weights if pretrained else with_weights.union(_NETWORKS))


def create(name: str, pretrained: bool | None = None, **options: Any) -> torch.nn.Module:
    """A network by its name.

    Args:
        name: one of :func:`list_models`.
        pretrained: whether it gets the weights that come with the package, and is in eval mode.
        **options: arguments of the network, in place of those of the name, such as another ``gspace``.

    Returns:
        a network of :mod:`escnn_attention.models`.

    Raises:
        TypeError: an argument is of another type, or the network has none of this name.
        ValueError: an unknown name, or ``pretrained=True`` for a name without weights.

    Example:
        >>> from escnn_attention import models
        >>> from escnn import gspaces
        >>> network = models.create("gsa-net-rotmnist", gspace=gspaces.rot2dOnR2(8))
        >>> type(network).__name__, network.gspace.fibergroup.name
        ('HybridNet', 'C8')

    Source: each name is a network of the paper that its class cites, with the options given there, but for
    ``gsa-net-rotmnist`` and ``gsa-net-r8-rotmnist``, which have fewer parameters than the paper's R4 and R8 networks
    (:meth:`GSANet.rotmnist`), ``hybrid-rotmnist`` and its twin ``steerable-rotmnist``, and the networks of digits,
    which are those that ``escnn-attention compare`` trains.
    """
    _check_name(name, list_models())
    if pretrained is not None and check_bool("pretrained", pretrained):
        return from_pretrained(name, **options)
    if name not in _NETWORKS:  # one of which there are weights only
        raise ValueError(f"name: {name!r} comes with weights only; needed pretrained=True")
    chosen = _NETWORKS[name]
    return chosen.make(**{"gspace": options.pop("gspace", None) or chosen.gspace(), **chosen.options, **options})


def from_pretrained(name_or_folder: str | Path, **options: Any) -> torch.nn.Module:
    """A trained network: by its name, of a folder that ``save_pretrained`` wrote, or of a repository on the Hub.

    Args:
        name_or_folder: one of ``list_models(pretrained=True)``, a folder, or ``"owner/name"`` of a repository.
        **options: of :meth:`PretrainedMixin.from_pretrained
            <escnn_attention.models.pretrained.PretrainedMixin.from_pretrained>`.

    Returns:
        the network in eval mode, of whichever class it was saved.

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
    return from_folder(_source(name_or_folder), **options)


def data_of(name_or_folder: str | Path) -> dict[str, Any] | None:
    """The data that a named network is for, as a configuration file has them; None of folders.

    Example:
        >>> from escnn_attention.models.registry import data_of
        >>> data_of("hybrid-rotmnist")
        {'class_path': 'escnn_attention.training.RotMNIST', 'init_args': {}}
    """
    found = _NETWORKS.get(str(name_or_folder))
    if found is None:
        return None
    return {"class_path": f"escnn_attention.training.{found.data}", "init_args": dict(found.data_options)}


def task_of(name_or_folder: str | Path) -> str | None:
    """The task of ``escnn-attention fit`` that a named network is for; None of folders.

    Example:
        >>> from escnn_attention.models.registry import task_of
        >>> task_of("hybrid-rotmnist")
        'classification'
    """
    found = _NETWORKS.get(str(name_or_folder))
    return None if found is None else found.task


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
