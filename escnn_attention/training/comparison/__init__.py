"""The comparison of four networks: its options, configurations of experiments, and one table of what they measure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

TITLES = {"cnn": "plain CNN", "steerable": "steerable CNN", "hybrid": "hybrid", "gsa-net": "GSA-Net"}
"""The networks in the order of the table, with their names in it."""

DEFAULT_EPOCHS = {"digits": 15, "rotmnist": 10}
"""Epochs by data set, where none are asked for."""


def unset(about: str, default: str, **options: Any) -> Any:
    """An option that is None by default, which stands for something else."""
    return typer.Option(help=f"{about} (default: {default})", show_default=False, **options)


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
        unset("Folder of rotmnist.npz, or to download it into.", "$ESCNN_ATTENTION_DATA, or one in the user's cache"),
    ] = None
    group: Annotated[str, typer.Option(help="Symmetry: cN, rotations by 360°/N; dN, these and reflections.")] = "c16"
    networks: Annotated[str, typer.Option(help="Which networks, with commas between them.")] = ",".join(TITLES)
    parameters: Annotated[int, typer.Option(min=1, help="About how many parameters each network gets.")] = 20_000
    epochs: Annotated[
        int | None,
        unset("Epochs.", ", ".join(f"{count} for {name}" for name, count in DEFAULT_EPOCHS.items()), min=1),
    ] = None
    batch_size: Annotated[int, typer.Option(min=1, help="Images in a batch.")] = 32
    learning_rate: Annotated[float, typer.Option(min=0, help="The highest learning rate.")] = 6e-3
    seed: Annotated[int, typer.Option(help="Of the initial weights and of the order of the images.")] = 0
    limit_train: Annotated[int | None, unset("Train on the first so many images only.", "all", min=1)] = None
    limit_test: Annotated[int | None, unset("Test on the first so many images only.", "all", min=1)] = None
    output: Annotated[Path | None, unset("Folder for tables and trainings.", "runs/compare-DATA")] = None
    restart: Annotated[
        bool, typer.Option("--restart", help="Train again; earlier trainings are moved aside, not deleted.")
    ] = False
    accelerator: Annotated[Literal["auto", "cpu", "cuda", "mps"], typer.Option(help="Where to compute.")] = "auto"
    threads: Annotated[int | None, unset("CPU threads.", "$OMP_NUM_THREADS, or 1", min=1)] = None

    @property
    def epoch_count(self) -> int:
        """``epochs``, or the default of the data set."""
        return DEFAULT_EPOCHS[self.data] if self.epochs is None else self.epochs

    @property
    def folder(self) -> Path:
        """The folder of the run: ``output``, or ``runs/compare-DATA``."""
        return Path("runs") / f"compare-{self.data}" if self.output is None else self.output
