"""Batches for Lightning, in an order that is a function of the seed and the epoch."""

from __future__ import annotations

from collections.abc import Iterator

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler, TensorDataset

from escnn_attention.training.images import ImageData, Split


def as_tensors(split: Split, normalisation: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """Images (N, 1, H, W) float32, normalised with the (mean, standard deviation) given, and labels (N,) int64."""
    mean, deviation = normalisation
    return (torch.from_numpy(split.images)[:, None] - mean) / deviation, torch.from_numpy(split.labels)


class EpochSampler(Sampler[list[int]]):
    """Shuffled batches of indices; the order depends on the seed and the epoch and on nothing else.

    So epoch 7 sees the same batches whether or not the process was restarted after epoch 6. Lightning calls
    :meth:`set_epoch`. The last batch of an epoch holds what is left.
    """

    def __init__(self, length: int, batch_size: int, seed: int) -> None:
        self.length, self.batch_size, self.seed, self.epoch = length, batch_size, seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return -(-self.length // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        yield from (part.tolist() for part in torch.randperm(self.length, generator=generator).split(self.batch_size))


class ImageDataModule(pl.LightningDataModule):
    """Batches of ``(images, labels)``: images (B, 1, H, W) float32, normalised; labels (B,) int64.

    Args:
        data: the images.
        batch_size: images in a batch.
        seed: of the order of the training images.
    """

    def __init__(self, data: ImageData, batch_size: int, seed: int) -> None:
        super().__init__()
        normalisation = data.normalisation()
        self.batch_size = batch_size
        self.train = TensorDataset(*as_tensors(data.train, normalisation))
        self.valid = TensorDataset(*as_tensors(data.valid, normalisation))
        self.sampler = EpochSampler(len(self.train), batch_size, seed)

    # The images are in memory, so a worker process would cost more than it does. With batch_size=None a whole list of
    # indices goes to the data set, which answers with one indexed copy.

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.train, sampler=self.sampler, batch_size=None)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        order = torch.arange(len(self.valid)).split(4 * self.batch_size)
        return DataLoader(self.valid, sampler=[part.tolist() for part in order], batch_size=None)
