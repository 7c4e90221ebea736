"""Suppress irrelevant warnings of Lightning."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator

_BESIDE_THE_POINT = (
    # The images are in memory; a worker process would only slow the loading down.
    ".*does not have many workers.*",
    ".*Checkpoint directory .* exists.*",
    # escnn shares the bases of its convolutions, which have no modes, between this network and tested ones.
    ".*in eval mode at the start of training.*",
    # Between Lightning and torch, and between Lightning and jsonargparse.
    ".*LeafSpec.*",
    ".*jsonargparse.*|.*JsonargparseDeprecationWarning.*|.*deprecated in v4.*",
    # The command line is typer's, which hands its words on.
    ".*LightningCLI's args parameter.*",
    # What tests and predicts needs the weights only.
    ".*Be aware that when using `ckpt_path`.*",
    # Where all images train, none validate.
    ".*Total length of `list` across ranks is zero.*",
    # Steps are logged by epoch.
    ".*number of training batches .* smaller than the logging interval.*",
)


@contextlib.contextmanager
def quiet_lightning() -> Iterator[None]:
    """Suppress advice, advertisement and irrelevant warnings of Lightning."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            for message in _BESIDE_THE_POINT:
                warnings.filterwarnings("ignore", message=f"(?s){message}")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
