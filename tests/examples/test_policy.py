"""The policy of the example: exact with trained weights, and what counts as a success."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from escnn.nn import GeometricTensor

from examples import policy


def test_scenes_turn_with_their_images_and_demonstrations():
    scenes = policy.Scenes.drawn(8, math.pi, seed=0)
    actions = scenes.demonstrations()
    assert scenes.successes(actions).all()
    turned = scenes.turned(math.pi / 2)
    torch.testing.assert_close(turned.images(), scenes.images().rot90(1, (2, 3)), rtol=0, atol=1e-12)
    positions = torch.einsum("ij,bjt->bit", policy.rotation(math.pi / 2), actions[:, :2])
    torch.testing.assert_close(turned.demonstrations()[:, :2], positions, rtol=0, atol=1e-12)
    assert not scenes.successes(actions.roll(1, 0)).any()
    straight = actions.clone()
    straight[:, :2, : policy.GRASP] = scenes.target[:, :, None]
    assert not scenes.successes(straight).all()  # some pass through the obstacle
    assert not scenes.successes(actions * torch.tensor([1.0, 1.0, -1.0])[:, None]).any()  # it opens and does not close


@pytest.fixture(scope="module")
def trained():
    torch.manual_seed(0)
    network = policy.Policy(policy.C8, 2)
    before = policy.error(network, math.pi / 2)
    weights = [p.clone() for p in network.parameters()]
    policy.train(network, policy.Scenes.drawn(32, policy.SECTOR, seed=0), steps=4, seed=0, batch=8)
    assert all((p - q).abs().max() > 0 for p, q in zip(network.parameters(), weights, strict=True))
    return network.eval(), before


@pytest.mark.slow
def test_it_is_exact_before_and_after_training(trained, monkeypatch):
    network, before = trained
    assert before < 1e-12
    for quarter in (1, 2, 3):
        assert policy.error(network, quarter * math.pi / 2) < 1e-12
    assert policy.error(network, 0.3) > 1e-6  # no element of the group

    def shuffled(memory: GeometricTensor) -> GeometricTensor:
        return GeometricTensor(memory.tensor.flip(1), memory.type)

    # The negative control: a memory whose components are in another order.
    monkeypatch.setattr(network.network, "encode", lambda memory, *_: shuffled(memory))
    assert policy.error(network, math.pi / 2) > 1e-4


def test_the_network_without_a_group_is_as_large_and_not_equivariant():
    ours = policy.parameters(policy.Policy(policy.C8, 8))
    other = policy.Policy(policy.TRIVIAL, policy.width_without_group(8))
    assert abs(policy.parameters(other) / ours - 1) < 0.05
    assert policy.error(other, math.pi / 2) > 1e-3


@pytest.mark.sampled(4, of="commands of the examples")
def test_the_command(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setattr(policy, "by_angle", lambda network: [0.0, 1.0])
    policy.main(out=tmp_path, seeds=1, steps=2, width=2)
    assert (tmp_path / "policy.png").stat().st_size > 10_000
    assert "| no group |" in (tmp_path / "policy.md").read_text()
    assert "C8, seed 0" in capsys.readouterr().out
