"""Averages of the weights along a training."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor

__all__ = ["AveragedWeights"]


class AveragedWeights(EMAWeightAveraging):
    r"""An exponential moving average of the weights, by which a network is measured and kept.

    After each step :math:`\bar\theta \leftarrow \gamma\bar\theta + (1 - \gamma)\theta`. Buffers are those of the
    network that trains: running statistics are averages already, and tables of a group are none to take averages of.

    It is Lightning's callback, for networks with buffers that come and go: escnn's convolutions make filters of their
    weights when they stop training. Filters are no part of what is averaged, and made anew where weights take the place
    of others.

    Args:
        decay: :math:`\gamma`.

    Example:
        >>> from escnn_attention.training.modules.averaging import AveragedWeights
        >>> AveragedWeights(0.999).should_update(step_idx=0)
        True
    """

    def __init__(self, decay: float) -> None:
        super().__init__(use_buffers=False, decay=decay)
        self._filters: set[str] = set()

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if self._average_model is not None:
            average = self._average_model.module
            evaluates = {name for name, _ in average.eval().named_buffers()}
            trains = {name for name, _ in average.train().named_buffers()}
            self._filters = evaluates - trains
            average.eval()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        with self._without_filters(pl_module):
            super().on_train_batch_end(trainer, pl_module, *args)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if self._average_model is not None:
            _make_filters(self._average_model.module)
        super().on_save_checkpoint(trainer, pl_module, checkpoint)

    def _swap_models(self, pl_module: pl.LightningModule) -> None:
        with self._without_filters(pl_module):
            super()._swap_models(pl_module)
        if not pl_module.training:
            _make_filters(pl_module)

    def _copy_average_to_current(self, pl_module: pl.LightningModule) -> None:
        with self._without_filters(pl_module):
            super()._copy_average_to_current(pl_module)
        if not pl_module.training:
            _make_filters(pl_module)

    @contextlib.contextmanager
    def _without_filters(self, pl_module: pl.LightningModule) -> Iterator[None]:
        """Take the buffers that are made of weights out of both networks, so that all others stand side by side."""
        assert self._average_model is not None
        taken: list[tuple[torch.nn.Module, str, Tensor | None]] = []
        for network in (pl_module, self._average_model.module):
            for name in self._filters:
                path, _, last = name.rpartition(".")
                owner = network.get_submodule(path)
                if last in owner._buffers:
                    taken.append((owner, last, owner._buffers.pop(last)))
        yield
        for owner, last, buffer in taken:
            owner._buffers[last] = buffer


def _make_filters(network: torch.nn.Module) -> None:
    """Have a network that evaluates make its filters of the weights that it has now."""
    network.train()
    network.eval()
