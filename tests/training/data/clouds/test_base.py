from __future__ import annotations

import itertools

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from jsonargparse import ArgumentParser

from escnn_attention.training import QM9, ChargedParticles, Clouds, Constellations, ModelNet40, Springs
from escnn_attention.training.data.clouds.base import (
    CloudsInMemory,
    move,
    random_motions,
    random_rotations,
    rotated,
)
from escnn_attention.training.errors import UserError
from tests import samples


def source(sizes=(3, 1, 4, 2), dim=3, table=None):
    total = sum(sizes)
    return CloudsInMemory(
        torch.tensor(sizes),
        torch.randn(total, dim),
        torch.randn(total, 2) if table is None else torch.arange(total) % len(table),
        torch.arange(len(sizes)),
        torch.randn(total, 5),
        table,
    )


@pytest.mark.parametrize("table", [None, torch.randn(3, 7)])
def test_clouds_are_laid_end_to_end(table):
    sizes = (3, 1, 4, 2)
    memory = source(sizes, table=table)
    starts = np.cumsum(sizes) - sizes
    order = [2, 0, 0, 3, 1]
    found = memory.take(order)
    places = [place for cloud in order for place in range(starts[cloud], starts[cloud] + sizes[cloud])]
    assert torch.equal(found.coords, memory.coords[places])
    features = memory.features if table is None else table[memory.features]
    assert torch.equal(found.features, features[places])
    assert torch.equal(found.point_targets, memory.point_targets[places])
    assert found.targets.tolist() == order
    assert found.batch.tolist() == [n for n, cloud in enumerate(order) for _ in range(sizes[cloud])]
    assert found.batch.dtype == torch.int64


def test_tensors_of_different_lengths():
    ones = torch.ones(3)
    with pytest.raises(ValueError, match="coords: got 4"):
        CloudsInMemory(torch.tensor([1, 2]), torch.ones(4, 2), torch.ones(3, 1), ones[:2])
    with pytest.raises(ValueError, match="targets: got 3"):
        CloudsInMemory(torch.tensor([1, 2]), torch.ones(3, 2), torch.ones(3, 1), ones)


def clouds(sizes, dim, targets, point_targets=None):
    batch = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    return Clouds(torch.randn(len(batch), dim).double(), torch.ones(len(batch), 1), batch, targets, point_targets)


def motions(count, dim, seed=0):
    generator = np.random.default_rng(seed)
    rotations = random_rotations(count, dim, True, generator)
    return torch.from_numpy(rotations), torch.from_numpy(generator.standard_normal((count, dim)))


@pytest.mark.parametrize(("dim", "rotate"), [(2, True), (3, True), (3, "z")])
def test_rotations(dim, rotate):
    found = random_rotations(4_000, dim, rotate, np.random.default_rng(0))
    np.testing.assert_allclose(found @ found.transpose(0, 2, 1), np.broadcast_to(np.eye(dim), found.shape), atol=1e-14)
    np.testing.assert_allclose(np.linalg.det(found), 1)
    turning = found[:, :2, :2] if rotate == "z" else found
    # A uniform rotation takes a direction to a uniform one.
    np.testing.assert_allclose(turning.mean(0), 0, atol=0.05)
    np.testing.assert_allclose((turning**2).mean(0), 1 / turning.shape[1], atol=0.03)
    assert (found[:, 2, 2] == 1).all() if rotate == "z" else True
    np.testing.assert_array_equal(random_rotations(2, dim, False, np.random.default_rng(0)), [np.eye(dim)] * 2)


def test_rotations_in_space_are_uniform_by_haars_measure():
    def mean_angle(rotations):
        return np.arccos(((rotations.trace(axis1=1, axis2=2) - 1) / 2).clip(-1, 1)).mean()

    generator = np.random.default_rng(0)
    expected = np.pi / 2 + 2 / np.pi  # of the density (1 − cos θ)/π
    assert abs(mean_angle(random_rotations(20_000, 3, True, generator)) - expected) < 0.02
    # The control: uniform angles about a uniform axis.
    axes = generator.standard_normal((20_000, 3))
    axes /= np.linalg.norm(axes, axis=1, keepdims=True)
    cross = np.cross(np.eye(3)[None], axes[:, None])
    angles = generator.uniform(0, np.pi, (20_000, 1, 1))
    control = np.eye(3) + np.sin(angles) * cross + (1 - np.cos(angles)) * cross @ cross
    np.testing.assert_allclose(
        control @ control.transpose(0, 2, 1), np.broadcast_to(np.eye(3), control.shape), atol=1e-9
    )
    assert abs(mean_angle(control) - expected) > 0.3


@pytest.mark.parametrize("dim", [2, 3])
def test_motions_are_those_of_the_formula(dim):
    sizes = (4, 1, 3)
    before = clouds(sizes, dim, torch.randn(3, dim, dim).double())
    moving = motions(3, dim)
    vectors, after = (move(before, *moving, order) for order in (1, 2))
    for n, (r, t) in enumerate(zip(*moving, strict=True)):
        of = before.batch == n
        x = before.coords[of]
        c = x.mean(0)
        torch.testing.assert_close(after.coords[of], (x - c) @ r.T + c + t, rtol=0, atol=1e-13)
        torch.testing.assert_close(vectors.targets[n], before.targets[n] @ r.T, rtol=0, atol=1e-13)
        torch.testing.assert_close(after.targets[n], r @ before.targets[n] @ r.T, rtol=0, atol=1e-13)
    assert after.features is before.features
    # The control: about another point is another motion.
    turned = torch.einsum("nij,nj->ni", moving[0][before.batch], before.coords)
    assert (after.coords - turned - moving[1][before.batch]).abs().max() > 0.1
    assert torch.equal(move(before, *moving).targets, before.targets)


def test_orders_that_there_are_not():
    with pytest.raises(ValueError, match=r"order: got 3"):
        rotated(torch.ones(1, 3, 3, 3), torch.eye(3)[None], 3)


@pytest.mark.parametrize("rotate", [False, "z", True])
def test_half_of_the_motions_are_reflections(rotate):
    drawn = [
        map(torch.from_numpy, random_motions(200, 3, rotate, 0.5, reflect, np.random.default_rng(2)))
        for reflect in (True, False)
    ]
    (mirrored, moved), (plain, expected) = drawn
    assert torch.equal(moved, expected)
    assert (torch.linalg.det(plain) - 1).abs().max() < 1e-12
    determinants = torch.linalg.det(mirrored)
    assert (determinants.abs() - 1).abs().max() < 1e-12
    assert 60 < (determinants < 0).sum() < 140
    axis = torch.tensor([1.0, 0.0, 0.0]).double()
    mirror = torch.eye(3).double() - 2 * torch.outer(axis, axis)
    changed = torch.where((determinants < 0)[:, None, None], plain @ mirror, plain)
    assert (changed - mirrored).abs().max() < 1e-12


MADE = [Constellations, Springs, ChargedParticles]
ALL = [*MADE, ModelNet40, QM9]


def loaded(rank=0, world_size=1, stage=None, kind=Constellations, **options):
    small = {ChargedParticles: {"start_frame": 0, "end_frame": 1}}.get(kind, {})
    module = kind(**{"num_train": 20, "num_valid": 7, "num_test": 9, "batch_size": 6, **small, **options})
    module.trainer = samples.process(rank, world_size)
    module.prepare_data()
    module.setup(stage)
    return module


def drawn(loader, epoch=0):
    loader.sampler.set_epoch(epoch)
    return list(loader)


def same(one, other):
    return all(a is b or torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize("world_size", [2, 3])
def test_processes_see_together_what_one_sees(kind, world_size):
    options = {"kind": kind, "seed": 5, "rotate_train": True, "translate_train": 0.5}
    single = drawn(loaded(**options).train_dataloader(), epoch=2)
    assert [len(batch.targets) for batch in single] == [6, 6, 6]  # 20 clouds: two are left out
    shares = [drawn(loaded(rank, world_size, **options).train_dataloader(), epoch=2) for rank in range(world_size)]
    for number, batch in enumerate(single):
        parts = [share[number] for share in shares]
        assert torch.equal(torch.cat([part.coords for part in parts]), batch.coords)
        assert torch.equal(torch.cat([part.targets for part in parts]), batch.targets)
        assert torch.equal(torch.cat([part.batch.bincount() for part in parts]), batch.batch.bincount())
    assert not same(drawn(loaded(**options).train_dataloader(), epoch=3)[0], single[0])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", MADE)
@pytest.mark.slow
def test_a_batch_is_the_same_from_another_process(kind):
    options = {"kind": kind, "rotate_train": True, "rotate_test": True}
    here, there = loaded(**options), loaded(**options, num_workers=2)
    for loader in ("train_dataloader", "test_dataloader"):
        for one, other in zip(drawn(getattr(here, loader)(), 1), drawn(getattr(there, loader)(), 1), strict=True):
            assert same(one, other)


@pytest.mark.parametrize("kind", MADE)
def test_rotated_test_clouds(kind):
    plain = loaded(kind=kind, eval_batch_size=30)
    turned = loaded(kind=kind, eval_batch_size=30, rotate_test=True, translate_test=0.3)
    for name in ("val", "train"):
        one, other = (drawn(getattr(data, f"{name}_dataloader")())[0] for data in (plain, turned))
        assert same(one, other)
    (before,), (after,), (again,) = (drawn(data.test_dataloader()) for data in (plain, turned, turned))
    assert same(after, again)
    assert torch.equal(before.features, after.features)
    assert torch.equal(before.targets, after.targets)
    sizes = before.batch.bincount().tolist()
    shifts = []
    for one, other in zip(before.coords.split(sizes), after.coords.split(sizes), strict=True):
        torch.testing.assert_close(torch.cdist(one, one), torch.cdist(other, other), rtol=0, atol=2e-3)
        assert (one - one.mean(0) - other + other.mean(0)).abs().max() > 1e-2
        shifts.append(other.mean(0) - one.mean(0))
    assert 0.1 < torch.stack(shifts).std() < 0.6
    # What is asked for afterwards holds, too.
    turned.rotate_test, turned.translate_test = False, 0.0
    assert same(drawn(turned.test_dataloader())[0], before)


def test_rotations_about_the_third_axis():
    before, after = (loaded(kind=ChargedParticles, rotate_test=rotate, batch_size=9) for rotate in (False, "z"))
    (one,), (other,) = (list(data.test_dataloader()) for data in (before, after))
    torch.testing.assert_close(one.coords[:, 2], other.coords[:, 2], rtol=0, atol=1e-6)
    assert (one.coords - other.coords).abs().max() > 0.5


@pytest.mark.parametrize("kind", MADE)
def test_the_parts_have_nothing_in_common_and_the_first_stay_the_same(kind):
    def everything(**options):
        parts = {}
        for part, source in loaded(kind=kind, **options)._sources.items():
            taken = source.take(range(len(source)))
            found = taken.coords.split(taken.batch.bincount().tolist())
            parts[part] = {tuple(cloud.flatten().tolist()) for cloud in found}
        return parts

    some, more, others = everything(), everything(num_train=300), everything(seed=1)
    assert {part: len(found) for part, found in some.items()} == {"train": 20, "valid": 7, "test": 9}
    for one, other in itertools.combinations(some.values(), 2):
        assert not one & other
    assert len(more["train"]) == 300
    assert some["train"] < more["train"]
    assert (some["valid"], some["test"]) == (more["valid"], more["test"])
    assert not more["train"] & more["test"]
    assert not some["train"] & others["train"]


OF_ALL = [
    ({"rotate_train": "x"}, "rotate_train must be one of False, True, 'z', got 'x'"),
    ({"rotate_test": 1}, "rotate_test must be one of False, True, 'z', got 1"),
    ({"translate_train": -0.1}, "translate_train must be at least 0, got -0.1"),
    ({"translate_test": float("nan")}, "translate_test must be at least 0, got nan"),
    ({"reflect_train": "x"}, "reflect_train must be one of False, True, got 'x'"),
]


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        *((kind, *row) for kind in ALL for row in OF_ALL),
        (Constellations, {"features": "none"}, "features must be one of 'presence'"),
        (Constellations, {"rotate_test": "z"}, 'rotate_test: got "z", but the clouds have 2 dimensions'),
        (Springs, {"rotate_train": "z"}, 'rotate_train: got "z", but the clouds have 2 dimensions'),
        (Springs, {"frames": 1}, "frames must be at least 2, got 1"),
        (Springs, {"test_frames": 1}, "test_frames must be at least 2, got 1"),
        (Springs, {"test_frames": 501}, "test_frames must be at most 500, got 501"),
        (Springs, {"solver": "Euler"}, "solver must be one of 'exact', 'rk4', got 'Euler'"),
        (ChargedParticles, {"conjugate_train": 2}, "conjugate_train must be one of False, True, got 2"),
        (ChargedParticles, {"reverse_train": "no"}, "reverse_train must be one of False, True, got 'no'"),
        (ChargedParticles, {"start_frame": 2.5}, "start_frame must be an integer, got 2.5"),
        (ChargedParticles, {"start_frame": -1}, "start_frame must be at least 0, got -1"),
        (ChargedParticles, {"start_frame": 40}, "end_frame must be after start_frame, got 40 for 40"),
        (ModelNet40, {"num_points": 2049}, "num_points must be at most 2048, got 2049"),
        (ModelNet40, {"num_points": 1}, "num_points must be at least 2, got 1"),
        (ModelNet40, {"limit_train": 0}, "limit_train must be at least 1, got 0"),
    ],
)
def test_arguments_are_checked_at_once(kind, options, message):
    with pytest.raises(UserError, match=message):
        kind(**options)


@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize("part", ["train", "valid", "test"])
def test_parts_are_not_empty(kind, part):
    with pytest.raises(UserError, match=f"num_{part} .*at least 1"):
        kind(**{f"num_{part}": 0})


def test_batches_that_cannot_be_had():
    data = loaded(0, 2, batch_size=5, eval_batch_size=3)
    with pytest.raises(UserError, match=r"batch_size .*a multiple"):
        data.train_dataloader()
    with pytest.raises(UserError, match=r"eval_batch_size .*a multiple"):
        data.val_dataloader()
    with pytest.raises(UserError, match=r"batch_size .*at most"):
        loaded(batch_size=21).train_dataloader()
    with pytest.raises(UserError, match=r"test clouds .*at least"):
        loaded(0, 3, num_test=2).test_dataloader()
    with pytest.raises(UserError, match=r"valid clouds .*not loaded"):
        loaded(stage="test").val_dataloader()
    with pytest.raises(UserError, match=r"stage .*one of fit"):
        loaded(stage="train")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ALL)
def test_in_a_configuration_file(kind):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(pl.LightningDataModule, "data")
    options = {"batch_size": 7, "seed": 3, "rotate_train": "z" if kind.__dict__.get("dim") == 3 else True}
    options |= {"rotate_test": True, "translate_test": 0.5, "reflect_train": True}
    options |= {"num_train": 10} if kind in MADE else {"limit_train": 10, "folder": "somewhere", "download": False}
    name = f"escnn_attention.training.{kind.__name__}"
    parsed = parser.parse_object({"data": {"class_path": name, "init_args": options}})
    data = parser.instantiate_classes(parsed).data
    assert type(data) is kind
    assert (data.batch_size, data.seed, data.rotate_test) == (7, 3, True)
    assert (data.rotate_train, data.reflect_train) == (options["rotate_train"], True)
    # Everything can be written down and read again.
    again = parser.parse_string(parser.dump(parsed))
    assert again.data.init_args == parsed.data.init_args
    assert "limits" not in parsed.data.init_args
