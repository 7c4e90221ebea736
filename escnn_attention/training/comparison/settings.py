"""The options of a comparison."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

NETWORK_NAMES = ("cnn", "steerable", "hybrid", "gsa-net")

DEFAULT_EPOCHS = {"digits": 15, "rotmnist": 10}
"""Epochs by data set, where none are asked for."""

LARGEST_SEED = 2**32 - 1
"""The largest seed of Lightning, and of NumPy."""


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _folder(name: str) -> Path:
    """The folder of a name; an empty name does not mean the current folder."""
    if not name:
        raise typer.BadParameter("got an empty name, needed a folder")
    return Path(name)


@dataclass(frozen=True)
class Settings:
    """The options of ``escnn-attention compare``, whose command line describes each.

    More than one of ``jobs`` trains networks at the same time, in new processes, which import the main module: a script
    that asks for it does so below ``if __name__ == "__main__":``. ``epochs`` and ``output`` have defaults that depend
    on the data: see :meth:`epoch_count` and :meth:`folder`.
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
    networks: Annotated[
        tuple[str, ...],
        typer.Option(
            parser=_names,
            help="Which networks, with commas between them.",
            metavar="NAMES",
        ),
    ] = NETWORK_NAMES
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
    learning_rate: Annotated[float, typer.Option(help="The highest learning rate.")] = 6e-3
    seed: Annotated[
        int, typer.Option(min=0, max=LARGEST_SEED, help="Of the initial weights and of the order of the images.")
    ] = 0
    limit_train: Annotated[
        int | None, typer.Option(min=1, help="Train on the first so many images only.", show_default="all")
    ] = None
    limit_test: Annotated[
        int | None, typer.Option(min=1, help="Test on the first so many images only.", show_default="all")
    ] = None
    output: Annotated[
        Path | None,
        typer.Option(
            parser=_folder,
            metavar="<path>",
            help="Folder for tables, checkpoints and figures. (default: runs/compare-DATA)",
            show_default=False,
        ),
    ] = None
    restart: Annotated[
        bool, typer.Option("--restart", help="Start afresh; a run that the folder holds is moved aside, not deleted.")
    ] = False
    accelerator: Annotated[Literal["auto", "cpu", "cuda", "mps"], typer.Option(help="Where to compute.")] = "auto"
    jobs: Annotated[
        int,
        typer.Option(
            min=1,
            help="Networks that are trained at the same time. (default: as there are cores, one on a GPU)",
            show_default=False,
        ),
    ] = 1

    @property
    def epoch_count(self) -> int:
        """``epochs``, or the default of the data set."""
        return DEFAULT_EPOCHS[self.data] if self.epochs is None else self.epochs

    @property
    def folder(self) -> Path:
        """The folder of the run: ``output``, or ``runs/compare-DATA``."""
        return Path("runs") / f"compare-{self.data}" if self.output is None else self.output

    def configuration(self, images: list[float]) -> dict[str, str | int | float | list[float] | None]:
        """The options that the result of a network depends on, by their names on the command line.

        Args:
            images: numbers that identify the images: the same name may stand for different images.
        """
        return {
            "data": self.data,
            "images": images,
            "group": self.group.lower(),
            "parameters": self.parameters,
            "epochs": self.epoch_count,
            "batch-size": self.batch_size,
            "learning-rate": self.learning_rate,
            "seed": self.seed,
            "limit-train": self.limit_train,
            "limit-test": self.limit_test,
        }
