"""Hamiltonian networks: forces, trajectories, what is conserved, second derivatives, integrators."""

from __future__ import annotations

import copy

import pytest
import torch
from escnn import gspaces
from torch import Tensor

from escnn_attention import PairKernel, working_memory
from escnn_attention.models import HamiltonianNetwork, PointTransformer
from escnn_attention.models.hamiltonian import leapfrog_step, rk4_step
from tests.spaces import generators

BATCH = torch.tensor([0, 0, 0, 0, 1, 1, 1])


class Springs(torch.nn.Module):
    """V = Σ_{i<j} k_i k_j |q_i − q_j|², with a factor to learn."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, features: Tensor, coords: Tensor, batch: Tensor) -> Tensor:
        same = batch[:, None] == batch
        pairs = features[:, 1, None] * features[:, 1] * (coords[:, None] - coords).square().sum(-1) * same
        return self.factor * torch.stack([pairs[batch == i].sum() for i in range(2)])[:, None] / 2


def system(d: int = 2, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, p = torch.randn(2, len(BATCH), d, generator=generator, dtype=torch.float64)
    return q, p, torch.rand(len(BATCH), 2, generator=generator, dtype=torch.float64) + 0.5


def attentive(space=None, **options) -> HamiltonianNetwork:
    space = space or gspaces.rot2dOnR2(3)
    arguments = {"fields": 2, "num_blocks": 2, "num_heads": 2, "pool": "sum", "encoding": PairKernel(hidden=4)}
    potential = PointTransformer(space, 2, 1, **arguments, attention={"normalization": "count", **options})
    return HamiltonianNetwork(potential).double()


@pytest.mark.slow
def test_known_springs():
    """The motion of a known potential is that of the equations that scipy integrates."""
    from scipy.integrate import solve_ivp

    q, p, features = system()
    network = HamiltonianNetwork(Springs())
    same = (BATCH[:, None] == BATCH).double()

    def slope(_, flat):
        x, y = torch.as_tensor(flat).view(2, -1, 2)
        springs = features[:, 1, None] * features[:, 1] * same
        force = -2 * (springs.sum(1, keepdim=True) * x - springs @ x)
        return torch.stack([y / features[:, :1], force]).flatten().numpy()

    found = solve_ivp(
        slope, (0, 0.5), torch.stack([q, p]).flatten().numpy(), rtol=1e-12, atol=1e-12, t_eval=[0.25, 0.5]
    )
    expected = torch.as_tensor(found.y.T.copy()).view(2, 2, -1, 2).permute(2, 0, 1, 3)
    frames = network(q, p, features, BATCH, num_frames=3, step=0.25, substeps=50)
    torch.testing.assert_close(frames[:, 0], torch.stack([q, p], dim=1))
    torch.testing.assert_close(frames[:, 1:].detach(), expected, rtol=1e-6, atol=1e-7)
    energies = [network.energy(frames[:, t, 0], frames[:, t, 1], features, BATCH) for t in range(3)]
    torch.testing.assert_close(energies[2], energies[0], rtol=1e-6, atol=0)
    # The 3/8-rule is of fourth order, leapfrog of second.
    for integrator, order in (("rk4", 4), ("leapfrog", 2)):
        network.integrator = integrator
        errors = []
        for substeps in (20, 40):
            last = network(q, p, features, BATCH, num_frames=2, step=0.5, substeps=substeps)[:, 1]
            errors.append((last - expected[:, 1]).norm())
        assert abs((errors[0] / errors[1]).log2() - order) < 0.3


def test_leapfrog_keeps_the_energy_for_long():
    q, p = torch.tensor(1.0, dtype=torch.float64), torch.tensor(0.0, dtype=torch.float64)
    energies = {}
    for name, step in (("leapfrog", leapfrog_step), ("rk4", rk4_step)):
        x, y = q, p
        for _ in range(2000):
            x, y = step(lambda y: y, lambda x: -x, x, y, 1.0)
        energies[name] = float(x**2 + y**2)
    assert abs(energies["leapfrog"] - 1) < 0.35  # bounded, though steps are as long as a sixth of the period
    assert abs(energies["rk4"] - 1) > 0.9


@pytest.mark.sampled(1)
@pytest.mark.parametrize("space", [gspaces.flipRot2dOnR2(3), gspaces.dihedralOnR3(2)])
@pytest.mark.slow
def test_symmetry_and_conservation(space):
    """Turned systems move in turned ways, moved ones the same way, and momentum and energy are conserved."""
    torch.manual_seed(0)
    network = attentive(space)
    q, p, features = system(space.dimensionality)
    frames = network(q, p, features, BATCH, num_frames=4, step=0.05).detach()
    force = network.forces(q, features, BATCH)
    assert force.norm() > 1e-4
    assert (frames[:, -1, 1] - p).norm() > 1e-5
    for h in generators(space):
        turn = torch.as_tensor(space.basespace_action(h), dtype=torch.float64)
        other = network(q @ turn.T + 5.0, p @ turn.T, features, BATCH, num_frames=4, step=0.05).detach()
        # Both systems are moved alike; their velocities are not changed by that.
        torch.testing.assert_close(other[:, :, 0] - 5.0, frames[:, :, 0] @ turn.T, rtol=1e-9, atol=1e-10)
        torch.testing.assert_close(other[:, :, 1], frames[:, :, 1] @ turn.T, rtol=1e-9, atol=1e-10)
    for number in range(2):
        own = number == BATCH
        torch.testing.assert_close(force[own].sum(0), torch.zeros_like(force[0]), rtol=0, atol=1e-12)
        alone = network(q[own], p[own], features[own], num_frames=4, step=0.05).detach()
        torch.testing.assert_close(alone, frames[own])
    start, end = (network.energy(frames[:, t, 0], frames[:, t, 1], features, BATCH) for t in (0, -1))
    torch.testing.assert_close(end, start, rtol=1e-6, atol=1e-8)
    # Another motion of the same system has another energy.
    assert (network.energy(q, 2 * p, features, BATCH) - start).abs().min() > 1e-2


def test_a_potential_without_symmetry_is_found_out():
    network = attentive(gspaces.trivialOnR2())
    q, _, features = system()
    turn = torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=torch.float64)
    force = network.forces(q, features, BATCH)
    assert (network.forces(q @ turn.T, features, BATCH) - force @ turn.T).norm() > 1e-4 * force.norm()


@pytest.mark.slow
def test_forces_are_the_gradient_and_have_one():
    """Against differences of the energy; and the gradient of a loss of the trajectory against differences of it."""
    network = attentive()
    q, p, features = system()
    assert torch.autograd.gradcheck(
        lambda x: network.potential_energy(x, features, BATCH), (q.requires_grad_(),), atol=1e-6
    )
    assert torch.autograd.gradgradcheck(
        lambda x: network.potential_energy(x, features, BATCH), (q.requires_grad_(),), atol=1e-5
    )
    q = q.detach()

    def loss() -> Tensor:
        return network(q, p, features, BATCH, num_frames=3, step=0.1).square().sum()

    loss().backward()
    weight = network.potential.head.perceptron[-1].weight
    gradient, eps = weight.grad[0, 0].clone(), 1e-6
    with torch.no_grad():
        weight[0, 0] += eps
        more = loss()
        weight[0, 0] -= 2 * eps
        less = loss()
    torch.testing.assert_close(gradient, (more - less) / (2 * eps), rtol=1e-4, atol=1e-8)


@pytest.mark.slow
def test_gradients_in_small_pieces_are_the_same():
    """Attention that is computed again in the backward pass has second derivatives, too."""
    gradients = []
    for limit in (None, 1):
        torch.manual_seed(0)
        network = attentive()
        q, p, features = system()
        with working_memory(limit):
            network(q, p, features, BATCH, num_frames=2, step=0.1).square().sum().backward()
        gradients.append([w.grad for w in network.parameters() if w.grad is not None])
    torch.testing.assert_close(*gradients)


def test_without_gradients():
    """The same trajectory where gradients are switched off, also in inference mode, and nothing is kept."""
    network = attentive()
    q, p, features = system()
    expected = network(q, p, features, BATCH, num_frames=3, step=0.1)
    assert expected.requires_grad
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            found = network(q.clone(), p.clone(), features.clone(), BATCH.clone(), num_frames=3, step=0.1)
            assert not found.requires_grad
            torch.testing.assert_close(found, expected.detach())


def test_scale():
    q, _, features = system()
    one, ten = HamiltonianNetwork(Springs()), HamiltonianNetwork(Springs(), scale=10.0)
    torch.testing.assert_close(ten.potential_energy(q, features, BATCH), 10 * one.potential_energy(q, features, BATCH))
    torch.testing.assert_close(ten.forces(q, features, BATCH), 10 * one.forces(q, features, BATCH))


def test_backends():
    space = gspaces.rot2dOnR2(3)
    potential = PointTransformer(space, 2, 1, fields=2, num_blocks=1, num_heads=1, encoding="fourier")
    assert potential.blocks[0].attention.plain.backend == "auto"
    assert HamiltonianNetwork(potential).potential.blocks[0].attention.plain.backend == "neighbours"
    (q, p, features), found = system(), []
    for backend in ("dense", "neighbours"):
        torch.manual_seed(0)
        options = {"num_blocks": 1, "num_heads": 1, "encoding": "fourier", "attention": {"backend": backend}}
        network = HamiltonianNetwork(PointTransformer(space, 2, 1, fields=2, **options).double())
        network(q, p, features, BATCH, num_frames=2, step=0.1).square().sum().backward()
        found.append([w.grad for w in network.parameters() if w.grad is not None])
    assert network.potential.blocks[0].attention.plain.backend == "neighbours"
    torch.testing.assert_close(*found)


def test_bad_arguments():
    network = attentive()
    q, p, features = system()
    three = PointTransformer(gspaces.rot2dOnR2(3), 2, 3, fields=2, num_blocks=1, num_heads=1).double()
    frames = {"num_frames": 2, "step": 0.1}
    for call, message in (
        (lambda: HamiltonianNetwork(network.potential, integrator="euler"), "integrator: got 'euler'"),
        (lambda: HamiltonianNetwork(network.potential, mass=-1), "mass"),
        (lambda: HamiltonianNetwork(network.potential, mass=2)(q, p, features, **frames), "features: got shape"),
        (lambda: network(q, p[:3], features, BATCH, **frames), "momenta"),
        (lambda: network(q, p, features, BATCH, num_frames=0, step=0.1), "num_frames"),
        (lambda: HamiltonianNetwork(three).energy(q, p, features, BATCH), "potential: got an output"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    for scale in (0, -1.0, "a", None, True, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"scale: .*positive energy"):
            HamiltonianNetwork(network.potential, scale=scale)
    with pytest.raises(TypeError, match=r"potential: .*torch\.nn\.Module"):
        HamiltonianNetwork(lambda features, coords, batch: coords.sum())
    assert copy.deepcopy(network).extra_repr() == "scale=1.0, mass=0, integrator='rk4'"


@pytest.mark.parametrize("known", [True, False])
def test_bad_systems(known):
    """Told at once, by every method, whatever the potential would make of them."""
    network = HamiltonianNetwork(Springs()) if known else attentive()
    q, p, features = system()
    methods = {
        "potential_energy": lambda q, p, features, batch: network.potential_energy(q, features, batch),
        "energy": network.energy,
        "forces": lambda q, p, features, batch: network.forces(q, features, batch),
        "rollout": lambda *bodies: network.rollout(*bodies, num_frames=1, step=0.1),
    }
    for method in methods.values():
        for message, batch in (("got -1", BATCH - 1), ("cloud 1 has no points", 2 * BATCH)):
            with pytest.raises(ValueError, match=f"batch: {message}"):
                method(q, p, features, batch)
        with pytest.raises(ValueError, match=r"features: .*\(7, channels\)"):
            method(q, p, features[:6], BATCH)
        with pytest.raises(ValueError, match=r"positions: .*\(bodies, d\)"):
            method(q.flatten(), p.flatten(), features, BATCH)
        assert method(q, p, features, BATCH).isfinite().all()


def test_there_is_no_file_of_forces():
    potential = PointTransformer(gspaces.rot2dOnR2(4), 1, 1, fields=2, num_blocks=1, num_heads=1, pool="sum")
    network = HamiltonianNetwork(potential)
    with pytest.raises(NotImplementedError, match=r"HamiltonianNetwork: .*needed .*network\.potential\.export"):
        network.export()
    inputs = (torch.randn(3, 2), torch.randn(3, 2), torch.ones(3, 1))
    with pytest.raises(Exception, match=r"network\.potential\.export"):
        torch.export.export(network, inputs, {"num_frames": 2, "step": 0.1}, strict=False)
