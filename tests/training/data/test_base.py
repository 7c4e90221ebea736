from __future__ import annotations

import itertools
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

from escnn_attention.training.data.base import Draw, EvaluationSampler, RandomChange, TrainingSampler, epoch_order
from escnn_attention.training.data.images.base import random_crops


def shares(sampler, world_size, *arguments, epoch=0):
    """The batches of each process."""
    all_batches = []
    for rank in range(world_size):
        one = sampler(*arguments, rank=rank, world_size=world_size)
        one.set_epoch(epoch)
        batches = list(one)
        assert len(batches) == len(one)
        all_batches.append([list(batch.indices) for batch in batches])
    return all_batches


def flat(lists):
    return list(itertools.chain(*lists))


@given(
    world_size=st.integers(1, 5),
    share=st.integers(1, 4),
    length=st.integers(0, 60),
    seed=st.integers(0, 2**31),
    epoch=st.integers(0, 300),
)
def test_processes_train_together_on_the_batches_of_one(world_size, share, length, seed, epoch):
    batch_size = world_size * share
    (single,) = shares(TrainingSampler, 1, length, batch_size, seed, epoch=epoch)
    together = shares(TrainingSampler, world_size, length, batch_size, seed, epoch=epoch)
    assert [flat(parts) for parts in zip(*together, strict=True)] == single
    assert all(len(part) == share for process in together for part in process)
    # What is left out is less than a batch, and nothing comes twice.
    seen = flat(single)
    assert len(seen) == length - length % batch_size
    assert len(set(seen)) == len(seen)
    assert set(seen) <= set(range(length))


def test_what_does_not_fill_a_batch_can_be_a_smaller_one():
    sampler = TrainingSampler(10, 4, 0, drop_last=False)
    assert [len(draw.indices) for draw in sampler] == [4, 4, 2]
    assert len(sampler) == 3
    assert sorted(flat(draw.indices for draw in sampler)) == list(range(10))
    assert [draw.indices for draw in TrainingSampler(10, 4, 0)] == [draw.indices for draw in sampler][:2]


def test_the_order_is_a_function_of_seed_and_epoch():
    def order(seed, epoch):
        return shares(TrainingSampler, 1, 50, 10, seed, epoch=epoch)

    assert order(0, 3) == order(0, 3)
    assert order(0, 3) != order(0, 4)
    assert order(0, 3) != order(1, 3)
    assert sorted(epoch_order(50, 5, 7).tolist()) == list(range(50))


def test_what_happens_to_a_thing_depends_on_its_index_seed_and_epoch_only():
    def changed(indices, epoch=0, *seeds):
        return change(*seeds)(torch.zeros(len(indices), 2), Draw(indices, epoch))

    def change(*seeds):
        return RandomChange(torch.add, lambda generator: [generator.random((30, 2))], *seeds or (0, 1))

    everything, some = changed(range(30)), [7, 29, 2]
    assert torch.equal(changed(some), everything[some])
    for other in (
        changed(range(30), 1),
        changed(range(30), 0, 1, 1),
        changed(range(30), 0, 0),
        changed(range(30), 0, 0, 2),
    ):
        assert (everything - other).abs().amax(1).min() > 1e-3
    # One object that goes through the epochs does what new ones do.
    one = pickle.loads(pickle.dumps(random_crops(30, 4, 0)))
    images = torch.arange(64).repeat(30, 1).view(30, 1, 8, 8)
    for epoch in (0, 1, 0):
        assert torch.equal(one(images, Draw(range(30), epoch)), random_crops(30, 4, 0)(images, Draw(range(30), epoch)))


@given(world_size=st.integers(1, 5), share=st.integers(1, 4), length=st.integers(5, 60))
def test_every_image_is_evaluated_once(world_size, share, length):
    together = shares(EvaluationSampler, world_size, length, world_size * share)
    assert sorted(flat(map(flat, together))) == list(range(length))
    counts = [sum(map(len, process)) for process in together]
    assert max(counts) - min(counts) <= 1
    # As many batches for each process, and none of them empty.
    assert len({len(process) for process in together}) == 1
    assert all(batch for process in together for batch in process)


def test_one_process_evaluates_in_order():
    assert shares(EvaluationSampler, 1, 10, 4) == [[[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]]
    assert shares(EvaluationSampler, 1, 8, 4) == [[[0, 1, 2, 3], [4, 5, 6, 7]]]


@pytest.mark.parametrize("sampler", [TrainingSampler(8, 4, 0), EvaluationSampler(8, 4)])
def test_lightning_takes_the_samplers_for_distributed_ones(sampler):
    assert isinstance(sampler, DistributedSampler)
