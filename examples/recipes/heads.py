"""The effective number of keys of a head before and after training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import escnn_attention  # noqa: F401  # isort: skip  # before escnn
import torch
from escnn.nn import EquivariantModule, GeometricTensor
from torch import Tensor

from escnn_attention import AttentionPool, GroupSelfAttention, LiftingSelfAttention
from escnn_attention.models import create, from_pretrained
from escnn_attention.training import recipe
from escnn_attention.training.files import atomic_file
from examples.experiments.runs import named

_ATTENTION = (GroupSelfAttention, LiftingSelfAttention, AttentionPool)
_QUERIES = 3
"""Positions along either axis whose queries are looked at, evenly spaced."""


def numbers_of_keys(maps: Tensor) -> Tensor:
    r"""The effective number of keys of a head, :math:`\exp(\text{mean entropy})`: 1 for a single key.

    Args:
        maps: ``(B, heads, ..., P, *space)``, probabilities over the last three axes.

    Returns:
        ``(heads,)``; the mean is over images, and over all other axes.
    """
    p = maps.flatten(-3)
    entropy = torch.special.entr(p).sum(-1)
    return entropy.transpose(0, 1).flatten(1).mean(1).exp()


def looked_at(network: torch.nn.Module, images: Tensor) -> dict[str, Tensor]:
    """The effective numbers of keys of each attention layer, by name, for some images."""
    found: dict[str, Tensor] = {}

    def note(name: str) -> Callable[[EquivariantModule, tuple[Any, ...]], None]:
        def hook(module: EquivariantModule, inputs: tuple[Any, ...]) -> None:
            found[name] = numbers_of_keys(_maps(module, inputs[0]))

        return hook

    layers = {name: module for name, module in network.named_modules() if isinstance(module, _ATTENTION)}
    handles = [module.register_forward_pre_hook(note(name)) for name, module in layers.items()]
    try:
        with torch.no_grad():
            network.eval()(images)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _maps(layer: EquivariantModule, x: GeometricTensor) -> Tensor:
    if isinstance(layer, AttentionPool):
        return layer.attention_maps(x)
    rows = [torch.linspace(0, n - 1, _QUERIES).round().long() for n in x.tensor.shape[2:]]
    maps: Tensor = layer.attention_maps(x, torch.cartesian_prod(*rows))  # type: ignore[operator]
    return maps


def measure(out: Path, names: list[str], count: int) -> str:
    """The table of networks of the package, with random and with trained weights.

    Args:
        out: the folder of ``heads.md``.
        names: of networks that have weights.
        count: the number of test images.
    """
    lines = ["| network | layer | untrained | trained |", "|---|---|---|---|"]
    for name in names:
        described = recipe(name)["data"]
        data = named(described["class_path"])(**{**described["init_args"], "eval_batch_size": count})
        data.prepare_data()
        data.setup("test")
        images = next(iter(data.test_dataloader()))[0]
        torch.manual_seed(0)
        untrained, trained = (looked_at(make(name), images) for make in (create, from_pretrained))
        lines += [
            f"| {name} | {layer} | {_listed(untrained[layer])} | {_listed(trained[layer])} |" for layer in trained
        ]
    text = "\n".join(lines) + "\n"
    out.mkdir(parents=True, exist_ok=True)
    with atomic_file(out / "heads.md") as file:
        file.write(text.encode())
    return text


def _listed(numbers: Tensor) -> str:
    return ", ".join(f"{number:.1f}" for number in numbers.sort().values.tolist())
