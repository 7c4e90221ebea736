"""Hamiltonian networks: attention gives the energy of a cloud, and its gradient gives the motion."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor

from escnn_attention._checks import check_int, check_length, check_option
from escnn_attention.exporting.mode import in_programs
from escnn_attention.functional.autograd import is_transformed
from escnn_attention.models.pretrained import PretrainedMixin
from escnn_attention.plain.cloud_pooling import count_clouds, offsets_from_mean, pool_clouds
from escnn_attention.plain.point_attention import PointAttention

Integrator = Literal["rk4", "leapfrog"]

Derivative = Callable[[Any], Any]
State = tuple[Any, Any]


def _refuse(*_: Any) -> NoReturn:
    raise NotImplementedError(
        "HamiltonianNetwork: its forces are gradients that are taken while it runs, of which no file can be made;"
        " needed an export of the energy alone, network.potential.export()"
    )


class HamiltonianNetwork(PretrainedMixin, torch.nn.Module):
    r"""Bodies that move by the gradient of a learned energy.

    .. math::
        H(q, p) = \sum_i \frac{|p_i|^2}{2 m_i} + V, \quad V = \epsilon\, f_\theta(q - \bar q;\, \text{features}),
        \qquad \dot q_i = \frac{p_i}{m_i}, \quad \dot p_i = -\frac{\partial V}{\partial q_i}

    The kinetic energy is known. The potential is a network that gives one number per cloud, from positions relative to
    their mean and from features, one of which is the mass. Total momentum is conserved, H up to the error of the
    integrator, and with an invariant network rotated systems have rotated trajectories.

    Everything is differentiable, by second derivatives of V: :class:`PointSelfAttention` layers in the network are set
    from ``backend="auto"`` to ``"neighbours"``, which takes the least memory for them.

    Args:
        potential: of ``(features, coords, batch=batch)`` to ``(B, 1)``, smooth in the coordinates: a
            :class:`PointTransformer` with one invariant, pooled by ``"mean"`` or ``"sum"``, or any other module.
        scale: :math:`\epsilon`, the unit of energy of the network's output, in the units of the data. Choose the range
            of the potential energies: a network with large outputs learns slowly.
        mass: the channel of the features that is the mass.
        integrator: ``"rk4"``, the 3/8-rule of fourth order; ``"leapfrog"``, of second order and symplectic: its error
            of the energy does not grow with time.

    Shape:
        Positions and momenta ``(N, d)`` to trajectories ``(N, T, 2, d)``: see :meth:`rollout`.

    Raises:
        ValueError: an unknown integrator, or a scale that is not positive.

    Example:
        >>> import torch
        >>> from escnn_attention.models import HamiltonianNetwork, PointTransformer
        >>> from escnn import gspaces
        >>> potential = PointTransformer(gspaces.rot2dOnR2(4), 2, 1, fields=4, num_blocks=2, num_heads=2, pool="sum")
        >>> network = HamiltonianNetwork(potential)
        >>> q, p, features = torch.randn(6, 2), torch.randn(6, 2), torch.rand(6, 2) + 0.5
        >>> network(q, p, features, torch.tensor([0, 0, 0, 1, 1, 1]), num_frames=5, step=0.01).shape
        torch.Size([6, 5, 2, 2])

    Source: Hutchinson et al., "LieTransformer", ICML 2021, Section 5.3, after Greydanus, Dzamba and Yosinski,
    "Hamiltonian Neural Networks", NeurIPS 2019.
    """

    def __init__(
        self, potential: torch.nn.Module, *, scale: float = 1.0, mass: int = 0, integrator: Integrator = "rk4"
    ):
        super().__init__()
        if not isinstance(potential, torch.nn.Module):
            raise TypeError(f"potential: got {type(potential).__name__}, needed a torch.nn.Module")
        self.scale = check_length("scale", scale, "energy")
        check_int("mass", mass, least=0)
        check_option("integrator", integrator, ("rk4", "leapfrog"))
        for module in potential.modules():
            if isinstance(module, PointAttention) and module.backend == "auto":
                module.backend = "neighbours"
        self.potential = potential
        self.mass = mass
        self.integrator: Integrator = integrator

    def potential_energy(self, positions: Tensor, features: Tensor, batch: Tensor | None = None) -> Tensor:
        """The potential energy V ``(B,)`` of each cloud, of positions ``(N, d)`` and features ``(N, C)``."""
        self._check(positions, features)
        num_clouds = count_clouds(batch, positions)
        value: Tensor = self.potential(features, offsets_from_mean(positions, batch, num_clouds), batch=batch)
        if value.shape != (num_clouds, 1):
            raise ValueError(f"potential: got an output {tuple(value.shape)}, needed ({num_clouds}, 1)")
        return self.scale * value.squeeze(1)

    def energy(self, positions: Tensor, momenta: Tensor, features: Tensor, batch: Tensor | None = None) -> Tensor:
        """H ``(B,)``, of positions and momenta ``(N, d)``."""
        self._check(positions, features, momenta)
        num_clouds = count_clouds(batch, positions)
        kinetic = momenta.square().sum(1, keepdim=True) / (2 * self._masses(features))
        total = pool_clouds(kinetic, batch, num_clouds, "sum").squeeze(1)
        return total + self.potential_energy(positions, features, batch)

    @in_programs(_refuse)
    def forces(self, positions: Tensor, features: Tensor, batch: Tensor | None = None) -> Tensor:
        """The forces −∂V/∂q ``(N, d)``, also where gradients are switched off; differentiable where they are not."""
        if is_transformed():  # which know no gradients but their own
            return -torch.func.grad(lambda x: self.potential_energy(x, features, batch).sum())(positions)
        differentiable = torch.is_grad_enabled()
        with torch.inference_mode(False), torch.enable_grad():
            positions, features = _ordinary(positions), _ordinary(features)
            batch = None if batch is None else _ordinary(batch)
            x = positions if positions.requires_grad else positions.detach().requires_grad_()
            energy = self.potential_energy(x, features, batch).sum()
            (gradient,) = torch.autograd.grad(energy, x, create_graph=differentiable)
        return -gradient

    def export(self) -> NoReturn:
        """Refuse with a NotImplementedError: there is no export."""
        _refuse()

    def rollout(
        self,
        positions: Tensor,
        momenta: Tensor,
        features: Tensor,
        batch: Tensor | None = None,
        *,
        num_frames: int,
        step: float,
        substeps: int = 1,
    ) -> Tensor:
        """Positions and momenta ``(N, T, 2, d)`` at times 0, ``step``, 2 · ``step``, …

        Args:
            positions, momenta, features: ``(N, d)`` at time 0, and ``(N, C)``.
            batch: ``(N,)``, the number of the cloud of each body; None for a single one.
            num_frames: T, the first included.
            step, substeps: the time from one frame to the next, and the steps of the integrator between them.
        """
        check_int("num_frames", num_frames)
        check_int("substeps", substeps)
        self._check(positions, features, momenta)
        count_clouds(batch, positions)
        masses = self._masses(features)

        def velocity(p: Tensor) -> Tensor:
            return p / masses

        def force(q: Tensor) -> Tensor:
            return self.forces(q, features, batch)

        advance = rk4_step if self.integrator == "rk4" else leapfrog_step
        frames = [torch.stack([positions, momenta], dim=1)]
        for _ in range(num_frames - 1):
            for _ in range(substeps):
                positions, momenta = advance(velocity, force, positions, momenta, step / substeps)
            frames.append(torch.stack([positions, momenta], dim=1))
        return torch.stack(frames, dim=1)

    forward = rollout

    def _check(self, positions: Tensor, features: Tensor, momenta: Tensor | None = None) -> None:
        """Positions, features and momenta of the bodies fit together."""
        if positions.dim() != 2:
            raise ValueError(f"positions: got shape {tuple(positions.shape)}, needed (bodies, d)")
        if momenta is not None and positions.shape != momenta.shape:
            raise ValueError(f"momenta: got shape {tuple(momenta.shape)}, needed {tuple(positions.shape)}")
        if features.dim() != 2 or len(features) != len(positions) or features.shape[1] <= self.mass:
            raise ValueError(
                f"features: got shape {tuple(features.shape)}, needed ({len(positions)}, channels) with the mass in "
                f"channel {self.mass}"
            )

    def _masses(self, features: Tensor) -> Tensor:
        """The mass of each body, ``(N, 1)``."""
        return features[:, self.mass : self.mass + 1]

    def extra_repr(self) -> str:
        return f"scale={self.scale}, mass={self.mass}, integrator={self.integrator!r}"


def rk4_step(velocity: Derivative, force: Derivative, positions: Any, momenta: Any, step: float) -> State:
    """One step of the 3/8-rule, of tensors or arrays."""

    def slope(state: State) -> State:
        return velocity(state[1]), force(state[0])

    def moved(*parts: tuple[float, State]) -> State:
        q, p = positions, momenta
        for weight, (dq, dp) in parts:
            q, p = q + step * weight * dq, p + step * weight * dp
        return q, p

    one = slope((positions, momenta))
    two = slope(moved((1 / 3, one)))
    three = slope(moved((-1 / 3, one), (1.0, two)))
    four = slope(moved((1.0, one), (-1.0, two), (1.0, three)))
    return moved((1 / 8, one), (3 / 8, two), (3 / 8, three), (1 / 8, four))


def leapfrog_step(velocity: Derivative, force: Derivative, positions: Tensor, momenta: Tensor, step: float) -> State:
    """One step of the leapfrog rule (velocity Verlet), of second order, symplectic and reversible."""
    momenta = momenta + step / 2 * force(positions)
    positions = positions + step * velocity(momenta)
    return positions, momenta + step / 2 * force(positions)


def _ordinary(x: Tensor) -> Tensor:
    """A tensor that autograd may keep: not one of inference mode."""
    return x.clone() if x.is_inference() else x
