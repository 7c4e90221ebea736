"""Measure the accuracy of published attentive group convolutional networks on rotated MNIST.

    python examples/published_weights.py p4cnn.npz alpha_f_p4cnn.npz --data rotmnist.npz

Each file contains the tensors of a checkpoint as arrays, by their names, optionally after ``weight/``. From the
authors' own files they are made by

    tensors = torch.load("model.pth", map_location="cpu", weights_only=True)
    numpy.savez("p4cnn.npz", **{name: tensor.numpy() for name, tensor in tensors.items()})

If a file also contains the arrays ``input`` and ``logits``, the network's logits are compared with them. Images are
used as stored, transposed in the published files, and normalised with the mean and the standard deviation of all pixels
of the training images, as in the published training. A plain network takes half a minute on one core, one with
attention on the responses some minutes. Needs typer: the extra "train".
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer

from escnn_attention.models import EquivariantClassifier, from_published

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

Arrays = dict[str, np.ndarray]


def read(path: Path) -> Arrays:
    """The arrays of an .npz file. Nothing is unpickled."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (OSError, ValueError, zipfile.BadZipFile, AttributeError) as error:
        raise typer.BadParameter(f"{path}: not a file of arrays (.npz): {error}") from error


def load(arrays: Arrays) -> EquivariantClassifier:
    """The network of the weights in some arrays."""
    try:
        network = from_published(arrays, kind="att_gconvs")
    except (TypeError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    assert isinstance(network, EquivariantClassifier)
    return network


def test_images(data: Path, limit: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalised test images (N, 1, 28, 28) and their labels."""
    arrays = read(data)
    for name in ("train_images", "test_images", "test_labels"):
        if name not in arrays:
            raise typer.BadParameter(f"{data}: has no array {name}")
    pixels = arrays["train_images"].astype(np.float64) / 255
    images = arrays["test_images"][:limit].astype(np.float64) / 255
    normalised = torch.from_numpy((images - pixels.mean()) / pixels.std()).float()
    return normalised.unsqueeze(1), torch.from_numpy(arrays["test_labels"][:limit].astype(np.int64))


@torch.no_grad()
def predict(network: torch.nn.Module, images: torch.Tensor, batch_size: int) -> torch.Tensor:
    """The logits of all images."""
    return torch.cat([network(batch) for batch in images.split(batch_size)])


@app.command()
def main(
    weights: Annotated[list[Path], typer.Argument(help="Files of weights.", exists=True, dir_okay=False)],
    data: Annotated[Path, typer.Option(help="rotmnist.npz.", exists=True, dir_okay=False)],
    limit: Annotated[int | None, typer.Option(min=1, help="Use only the first so many test images.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Images in a batch.")] = 250,
) -> None:
    """Measure the test accuracy of published networks on rotated MNIST."""
    images, labels = test_images(data, limit)
    for path in weights:
        arrays = read(path)
        network = load(arrays)
        parameters = sum(p.numel() for p in network.parameters())
        typer.echo(f"{path.name}: {type(network).__name__} on {network.gspace.name}, {parameters:,} parameters")
        if {"input", "logits"} <= arrays.keys():
            ours = predict(network, torch.from_numpy(arrays["input"]), batch_size)
            difference = (ours - torch.from_numpy(arrays["logits"])).abs().max().item()
            typer.echo(f"  logits: at most {difference:.1e} from those of the file, for {len(ours)} images")
        right = (predict(network, images, batch_size).argmax(1) == labels).sum().item()
        typer.echo(f"  accuracy: {right / len(labels):.2%}, {right:,} of {len(labels):,} test images")


if __name__ == "__main__":
    app()
