"""Which images make up a batch, and which of them a process gets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler


class Draw(NamedTuple):
    """A batch, or a process's share of one.

    Attributes:
        indices: of the images.
        epoch: in which it is drawn.
    """

    indices: Sequence[int]
    epoch: int = 0


def epoch_order(length: int, seed: int, epoch: int) -> Tensor:
    """A permutation of ``range(length)`` that depends on the seed and the epoch and on nothing else."""
    return torch.randperm(length, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))


# To Lightning a DistributedSampler is one that knows the processes: it is left as it is whether or not the trainer was
# made with use_distributed_sampler=False.


class TrainingSampler(DistributedSampler[Draw]):
    """Shuffled batches of one size, of which each process gets an equal share.

    The order of epoch t is :func:`epoch_order`; its batch b holds places bB, ..., bB + B − 1 of it, where B is
    ``batch_size``, and process r of W gets places rB/W, ..., (r + 1)B/W − 1 of every batch: together the processes see
    the batches that one process sees. What does not fill a batch at the end is left out of the epoch.

    Args:
        length: number of images.
        batch_size: images in a batch over all processes, a multiple of ``world_size``.
        seed: of the order.
        rank: of this process.
        world_size: number of processes.
        drop_last: whether that is so; if not, one process gets it as a smaller batch.

    >>> first, second = TrainingSampler(length=10, batch_size=4, seed=0)
    >>> shares = [next(iter(TrainingSampler(10, 4, 0, rank, world_size=2))).indices for rank in (0, 1)]
    >>> [*shares[0], *shares[1]] == first.indices
    True
    """

    def __init__(
        self, length: int, batch_size: int, seed: int, rank: int = 0, world_size: int = 1, drop_last: bool = True
    ) -> None:
        self.length, self.batch_size, self.seed = length, batch_size, seed
        self.count = length // batch_size if drop_last else -(-length // batch_size)
        self.rank, self.num_replicas, self.epoch = rank, world_size, 0

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Draw]:
        batches = epoch_order(self.length, self.seed, self.epoch).split(self.batch_size)
        share = self.batch_size // self.num_replicas
        for batch in batches[: len(self)]:
            yield Draw(batch[self.rank * share : (self.rank + 1) * share].tolist(), self.epoch)


class EvaluationSampler(DistributedSampler[Draw]):
    """Batches in order; every image belongs to exactly one process.

    Batch b holds images bB, ..., bB + B − 1, where B is ``batch_size``, and process r of W gets those that leave the
    remainder r when they are divided by W. All processes have the same number of batches: fewer than W images at the
    end are added to the batch before.

    Args:
        length: number of images.
        batch_size: images in a batch over all processes, a multiple of ``world_size``.
        rank: of this process.
        world_size: number of processes.

    >>> [list(draw.indices) for draw in EvaluationSampler(length=9, batch_size=4)]
    [[0, 1, 2, 3], [4, 5, 6, 7], [8]]
    >>> [list(draw.indices) for draw in EvaluationSampler(length=9, batch_size=4, rank=0, world_size=2)]
    [[0, 2], [4, 6, 8]]
    """

    def __init__(self, length: int, batch_size: int, rank: int = 0, world_size: int = 1) -> None:
        self.length, self.batch_size = length, batch_size
        self.rank, self.num_replicas, self.epoch = rank, world_size, 0

    def __len__(self) -> int:
        whole, rest = divmod(self.length, self.batch_size)
        return max(1, whole + (rest >= self.num_replicas))

    def __iter__(self) -> Iterator[Draw]:
        for batch in range(len(self)):
            end = self.length if batch == len(self) - 1 else (batch + 1) * self.batch_size
            yield Draw(range(batch * self.batch_size + self.rank, end, self.num_replicas))
