"""Weights of a network in a file of safetensors."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from escnn_attention._escnn.buffers import derived_buffers

WEIGHTS = "model.safetensors"
DIGEST = "sha256"
_SAME = "same"


def write_weights(network: torch.nn.Module, folder: Path) -> None:
    """Write the weights and buffers of a network atomically, without the buffers that escnn derives.

    Equal buffers, such as bases of steerable convolutions, are written once; the metadata (``"same"``, JSON) map the
    names of the others to the name of the one that is written.
    """
    from safetensors.torch import save

    derived, parameters = derived_buffers(network), dict(network.named_parameters(remove_duplicate=False))
    tensors: dict[str, Tensor] = {}
    same: dict[str, str] = {}
    buffers: dict[tuple[object, ...], str] = {}
    for name, tensor in network.state_dict().items():
        if name in derived:
            continue
        kept = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        if name not in parameters:
            content = (kept.dtype, kept.shape, kept.reshape(-1).view(torch.uint8).numpy().tobytes())
            if content in buffers:
                same[name] = buffers[content]
                continue
            buffers[content] = name
        tensors[name] = kept
    metadata = {"format": "pt"} | ({_SAME: json.dumps(same)} if same else {})
    with tempfile.TemporaryDirectory(prefix=".saving-", dir=folder) as place:
        # save_file makes files that only the owner may read.
        (Path(place) / WEIGHTS).write_bytes(save(tensors, metadata=metadata))
        os.replace(Path(place) / WEIGHTS, folder / WEIGHTS)


def read_weights(path: Path, device: str | torch.device = "cpu") -> dict[str, Tensor]:
    """The weights that :func:`write_weights` wrote."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
            metadata = file.metadata() or {}
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged, or not a safetensors file: {error}") from error
    for name, other in _names(metadata, path).items():
        if name in tensors or other not in tensors:
            raise ValueError(f"{path} is damaged: {name} is marked as equal to {other}")
        tensors[name] = tensors[other]
    return tensors


def digest_of(configuration: Mapping[str, Any], weights: Path) -> str:
    """The SHA-256 of a configuration, without its entry :data:`DIGEST`, and of the file of the weights."""
    content = {name: value for name, value in sorted(configuration.items()) if name != DIGEST}
    digest = hashlib.sha256(json.dumps(content).encode())
    with weights.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def check_finite(tensors: Mapping[str, Tensor], source: object) -> None:
    """Check that weights are finite."""
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"{source}: {name} has a value that is infinite or not a number, needed finite weights")


def _names(metadata: Mapping[str, str], path: Path) -> dict[str, str]:
    """The names of equal buffers, with the name of the one that is written."""
    try:
        names = json.loads(metadata.get(_SAME, "{}"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {_SAME!r} in its metadata is not JSON: {error}") from error
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise ValueError(f"{path} is damaged: {_SAME!r} in its metadata is no object of names")
    return names
