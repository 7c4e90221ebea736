"""The comparison of four networks: its options, configurations of experiments, and one table of what they measure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

TITLES = {"cnn": "plain CNN", "steerable": "steerable CNN", "hybrid": "hybrid", "gsa-net": "GSA-Net"}
"""The networks in the order of the table, with their names in it."""

DEFAULT_EPOCHS = {"digits": 15, "rotmnist": 10}
"""Epochs by data set, where none are asked for."""


@dataclass(frozen=True)
class Settings:
    """The options of ``escnn-attention compare``, whose command line describes each.

    ``epochs`` and ``output`` have defaults that depend on the data: see :meth:`epoch_count` and :meth:`folder`.
    """

    data: Annotated[
        Literal["digits", "rotmnist"],
        typer.Option(
            help="Images: scikit-learn's digits (16×16, upright), or rotated MNIST (28×28, rotated already: there"
            " 'upright' means as the data set gives them, 'rotated' rotated further)."
        ),
    ] = "digits"
    data_dir: Annotated[
        Path | None,
        typer.Option(
            help="Folder that holds rotmnist.npz; it is downloaded into it if it is not there. (default:"
            " $ESCNN_ATTENTION_DATA, or a folder in the user's cache)",
            show_default=False,
        ),
    ] = None
    group: Annotated[str, typer.Option(help="Symmetry: cN, rotations by 360°/N; dN, these and reflections.")] = "c16"
    networks: Annotated[str, typer.Option(help="Which networks, with commas between them.")] = ",".join(TITLES)
    parameters: Annotated[int, typer.Option(min=1, help="About how many parameters each network gets.")] = 20_000
    epochs: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"Epochs (default: {', '.join(f'{count} for {name}' for name, count in DEFAULT_EPOCHS.items())}).",
            show_default=False,
        ),
    ] = None
    batch_size: Annotated[int, typer.Option(min=1, help="Images in a batch.")] = 32
    learning_rate: Annotated[float, typer.Option(min=0, help="The highest learning rate.")] = 6e-3
    seed: Annotated[int, typer.Option(help="Of the initial weights and of the order of the images.")] = 0
    limit_train: Annotated[
        int | None, typer.Option(min=1, help="Train on the first so many images only.", show_default="all")
    ] = None
    limit_test: Annotated[
        int | None, typer.Option(min=1, help="Test on the first so many images only.", show_default="all")
    ] = None
    output: Annotated[
        Path | None,
        typer.Option(help="Folder for tables and trainings. (default: runs/compare-DATA)", show_default=False),
    ] = None
    restart: Annotated[
        bool, typer.Option("--restart", help="Train again; earlier trainings are moved aside, not deleted.")
    ] = False
    accelerator: Annotated[Literal["auto", "cpu", "cuda", "mps"], typer.Option(help="Where to compute.")] = "auto"
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads. (default: $OMP_NUM_THREADS, or 1)", show_default=False)
    ] = None

    @property
    def epoch_count(self) -> int:
        """``epochs``, or the default of the data set."""
        return DEFAULT_EPOCHS[self.data] if self.epochs is None else self.epochs

    @property
    def folder(self) -> Path:
        """The folder of the run: ``output``, or ``runs/compare-DATA``."""
        return Path("runs") / f"compare-{self.data}" if self.output is None else self.output
