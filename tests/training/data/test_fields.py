"""Pairs of fields: files, windows of trajectories, parts, elements that keep the grid, and the Poisson problem."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from escnn import gspaces
from escnn.nn import FieldType

from escnn_attention.models import FieldUNet
from escnn_attention.training import FieldData, PoissonOnTorus
from escnn_attention.training.data.base import Draw, InMemory
from escnn_attention.training.data.fields import electric_field, grid_elements, turned
from escnn_attention.training.errors import UserError

BOTH = {"scalar": 1, "vector": 2}


@pytest.mark.parametrize("space", [gspaces.flipRot2dOnR2(4), gspaces.fullOctaOnR3()], ids=["D4", "full octahedral"])
def test_turned_as_escnn_transforms(space):
    dim = space.dimensionality
    fields = FieldType(space, [space.trivial_repr, *2 * [space.basespace_action]])
    x = torch.randn(2, fields.size, *dim * [4], dtype=torch.float64)
    elements = {g.tobytes(): g for g in grid_elements(dim, "all")}
    generator = np.random.default_rng(0)
    for g in generator.choice(np.array(space.fibergroup.elements, dtype=object), 6):
        matrix = elements.pop(space.basespace_action(g).round().astype(np.int64).tobytes(), None)
        if matrix is None:  # drawn twice
            continue
        torch.testing.assert_close(turned(x, matrix, BOTH), fields(x).transform(g).tensor, rtol=0, atol=1e-12)
        frames = turned(torch.cat([x, 2 * x], 1), matrix, BOTH)
        torch.testing.assert_close(frames, torch.cat([turned(x, matrix, BOTH), 2 * turned(x, matrix, BOTH)], 1))
    quarter = grid_elements(2, "rotations")[2]
    if dim == 2:  # the negative control: vectors that stay
        assert (turned(x, quarter, {"scalar": 5}) - turned(x, quarter, BOTH)).abs().max() > 0.1


@pytest.mark.parametrize("dim", [2, 3])
@pytest.mark.parametrize("size", [6, 7])
def test_the_field_of_charges(dim, size):
    generator = torch.Generator().manual_seed(0)
    density = torch.randn(dim * [size], dtype=torch.float64, generator=generator)
    field = torch.from_numpy(electric_field(density.numpy()))
    for g in grid_elements(dim, "all")[:: 5 if dim == 3 else 1]:
        other = electric_field(turned(density[None, None], g, {"scalar": 1})[0, 0].numpy())
        expected = turned(field[None], g, {"vector": 1})[0]
        torch.testing.assert_close(torch.from_numpy(other), expected, rtol=0, atol=1e-12)
    # One wave along x: E = sin, which points away from the charge, along the first component.
    x = 2 * np.pi * np.arange(size) / size
    wave = np.broadcast_to(np.cos(x), dim * [size])
    np.testing.assert_allclose(electric_field(wave)[0], np.broadcast_to(np.sin(x), dim * [size]), atol=1e-12)
    # A wave along y, which falls from row to row.
    rows = np.moveaxis(wave, -1, -2)
    np.testing.assert_allclose(
        electric_field(rows)[1], -np.moveaxis(np.broadcast_to(np.sin(x), dim * [size]), -1, -2), atol=1e-12
    )


@pytest.mark.slow
def test_generated_pairs_are_of_unit_variance_and_of_their_seed():
    data, again, other = (PoissonOnTorus(seed=seed, num_train=200, num_test=3) for seed in (0, 0, 1))
    for each in (data, again, other):
        each.setup("fit")
    inputs, targets = data.source("train").take(range(200))
    assert abs(inputs.std() - 1) < 0.1
    assert abs(targets.std() - 1) < 0.15
    expected = electric_field(inputs[0, 0].double().numpy())
    ratio = targets[0].double().numpy() / expected
    np.testing.assert_allclose(ratio, ratio.mean(), rtol=1e-2)
    assert torch.equal(again.source("train").take([5])[0], inputs[5:6])
    assert not torch.equal(other.source("train").take([5])[0], inputs[5:6])


def test_pairs_turn_together_in_each_epoch_anew():
    data = PoissonOnTorus(size=8, num_train=6, batch_size=6, turn_train="all")
    data.setup("fit")
    batches, (inputs, targets) = data._batches("train"), data.source("train").take(range(6))
    seen = set()
    for epoch in range(4):
        x, y = batches[Draw(list(range(6)), epoch)]
        for i in range(6):
            found = [
                k
                for k, g in enumerate(grid_elements(2, "all"))
                if torch.equal(turned(inputs[i : i + 1], g, data.inputs), x[i : i + 1])
            ]
            assert len(found) == 1
            g = grid_elements(2, "all")[found[0]]
            torch.testing.assert_close(turned(targets[i : i + 1], g, data.targets), y[i : i + 1])
            seen.add(found[0])
        assert torch.equal(batches[Draw([3], epoch)][0], x[3:4])
    assert len(seen) > 4
    assert torch.equal(data.source("train").tensors[0], inputs)


def test_a_grid_that_is_not_square_turns_by_halves():
    data = FieldData("x.npz", {"scalar": 1}, {"scalar": 1}, turn_train="rotations")
    x = torch.randn(9, 1, 3, 4)
    data._sources["train"] = InMemory(x, x)
    turned_x, _ = data._batches("train")[Draw(list(range(9)))]
    same, half = (turned_x == x).flatten(1).all(1), (turned_x == x.flip(2, 3)).flatten(1).all(1)
    assert (same ^ half).all()
    assert same.any()
    assert half.any()


def written(tmp_path, **arrays):
    np.savez(path := tmp_path / "some.npz", **arrays)
    return path


def test_windows_of_trajectories(tmp_path):
    generator = np.random.default_rng(0)
    frames = generator.standard_normal((7, 6, 3, 4, 5))
    path = written(tmp_path, trajectories=frames)
    options = {"num_valid": 2, "num_test": 1}
    data = FieldData(path, {"scalar": 1, "vector": 1}, frames=2, step=3, **options)
    data.setup()
    order = np.random.default_rng(0).permutation(7)
    for part, rows in (("test", order[:1]), ("valid", order[1:3]), ("train", order[3:])):
        source = data.source(part)
        assert len(source) == 2 * len(rows)
        inputs, targets = source.take(range(len(source)))
        for i in range(len(source)):
            n, t = rows[i // 2], i % 2
            scalars, vectors = frames[n, t : t + 2, :1], frames[n, t : t + 2, 1:]
            expected = torch.from_numpy(np.concatenate([*scalars, *vectors])).float()
            torch.testing.assert_close(inputs[i], expected)
            torch.testing.assert_close(targets[i], torch.from_numpy(frames[n, t + 4]).float())
    fewer = FieldData(path, {"scalar": 1, "vector": 1}, num_train=1, **options)
    fewer.setup()
    assert torch.equal(fewer.source("test").trajectories, data.source("test").trajectories)
    assert torch.equal(fewer.source("train").trajectories, data.source("train").trajectories[:1])


@pytest.mark.parametrize("kinds", [{"scalar": 1, "vector": 2}, {"vector": 1, "scalar": 2}])
def test_windows_have_the_type_that_a_network_has_for_their_fields(kinds, tmp_path):
    """Frames that are turned one by one are the input, turned as a field of that type."""
    space = gspaces.rot2dOnR2(4)
    quarter = space.fibergroup.element(1)
    matrix = np.rint(space.basespace_action(quarter)).astype(int)
    channels = kinds["scalar"] + 2 * kinds["vector"]
    frames = torch.randn(3, 5, channels, 4, 4)
    inputs = []
    for number, moved in enumerate((frames, turned(frames.flatten(0, 1), matrix, kinds).view_as(frames))):
        (folder := tmp_path / str(number)).mkdir()
        data = FieldData(written(folder, trajectories=moved.numpy()), kinds, frames=3)
        data.setup()
        inputs.append(data.source("train").take([0])[0])
    assert data.inputs == {kind: 3 * count for kind, count in kinds.items()}
    network = FieldUNet(space, data.inputs, 1, widths=(1,), attention=(1,), num_heads=1)
    torch.testing.assert_close(network.in_type(inputs[0]).transform(quarter).tensor, inputs[1])
    assert (turned(inputs[0], matrix, {"scalar": inputs[0].shape[1]}) - inputs[1]).abs().max() > 0.1


def test_pairs_of_a_file(tmp_path):
    inputs, targets = np.random.rand(5, 1, 4, 4), np.random.rand(5, 2, 4, 4)
    data = FieldData(written(tmp_path, inputs=inputs, targets=targets), {"scalar": 1}, {"vector": 1}, batch_size=3)
    data.setup()
    parts = [data.source(part).take(range(len(data.source(part)))) for part in ("train", "valid", "test")]
    x, y = (torch.cat(values) for values in zip(*parts, strict=True))
    order = np.argsort(x[:, 0, 0, 0].numpy())
    np.testing.assert_allclose(x.numpy()[order], inputs[np.argsort(inputs[:, 0, 0, 0])].astype(np.float32))
    np.testing.assert_allclose(y.numpy()[order], targets[np.argsort(inputs[:, 0, 0, 0])].astype(np.float32))


GOOD = np.zeros((5, 1, 4, 4))


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"inputs": GOOD}, "no array 'targets'"),
        ({"inputs": GOOD, "targets": np.zeros((4, 2, 4, 4))}, "must be as many"),
        ({"inputs": GOOD, "targets": np.zeros((5, 2, 4, 5))}, "on one grid"),
        ({"inputs": GOOD, "targets": np.zeros((5, 3, 4, 4))}, "targets have 3 channels, needed 2"),
        ({"inputs": GOOD.astype(int), "targets": np.zeros((5, 2, 4, 4))}, "floating-point"),
        ({"inputs": GOOD + np.nan, "targets": np.zeros((5, 2, 4, 4))}, "finite"),
        ({"inputs": GOOD + 1e39, "targets": np.zeros((5, 2, 4, 4))}, "finite .* single precision"),
        ({"inputs": GOOD[:2], "targets": np.zeros((2, 2, 4, 4))}, "needed 3 together"),
        ({"inputs": np.array([object()]), "targets": GOOD}, "cannot read"),
    ],
)
def test_files_that_do_not_fit(tmp_path, arrays, message):
    data = FieldData(written(tmp_path, **arrays), {"scalar": 1}, {"vector": 1})
    with pytest.raises(UserError, match=message):
        data.setup()


def test_bad_arguments(tmp_path):
    (tmp_path / "no.npz").write_bytes(b"nothing")
    for path in (tmp_path / "no.npz", tmp_path / "missing.npz"):
        with pytest.raises(UserError, match=r"cannot read .*\. Give `path`"):
            FieldData(path, {"scalar": 1}).setup()
    with pytest.raises(UserError, match="needed trajectories, or `targets`"):
        FieldData(written(tmp_path, inputs=GOOD, targets=GOOD), {"scalar": 1}).setup()
    short = FieldData(written(tmp_path, trajectories=np.zeros((4, 3, 1, 4, 4))), {"scalar": 1}, frames=2, step=2)
    with pytest.raises(UserError, match=r"frames, step: .* 3 frames"):
        short.setup()
    for options, message in (
        ({"inputs": {"tensor": 1}}, "inputs: got .*, needed numbers"),
        ({"inputs": {"scalar": 0}}, r"inputs\['scalar'\] must be at least 1"),
        ({"targets": {"scalar": 1}, "frames": 2}, "frames, step: .* pairs"),
        ({"num_train": 0}, "num_train must be at least 1"),
        ({"turn_train": "some"}, "turn_train must be one of"),
    ):
        with pytest.raises(UserError, match=message):
            FieldData("x.npz", **{"inputs": {"scalar": 1}, **options})
    for options, message in (({"size": 2}, "size"), ({"dimensions": 1}, "dimensions")):
        with pytest.raises(UserError, match=message):
            PoissonOnTorus(**options)
