r"""Makes escnn's convolutions exact in float64.

escnn samples the bases of its kernels in float32, so that a convolution in float64 commutes with the group to 1e-7
only. :func:`register` has a convolution that is cast from float32 to float64 project its bases onto the equivariant
kernels, where S are the elements g of the fiber group that map the points of the kernel onto themselves:

.. math:: K(x) \leftarrow \frac{1}{|S|} \sum_{g \in S} \rho_\text{out}(g)^{-1} K(gx) \rho_\text{in}(g)

The names and shapes of buffers stay, and float32 networks do not change. A state dict of one mode, training or not,
can be loaded in the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from escnn.group import O3, SO3, Group, GroupElement
from escnn.gspaces import GSpace
from escnn.nn import Linear
from escnn.nn.modules.basismanager.basisexpansion_singleblock import SingleBlockBasisExpansion
from escnn.nn.modules.conv.rd_convolution import _RdConv
from escnn.nn.modules.conv.rd_transposed_convolution import _RdConvTransposed
from torch import Tensor, nn

from escnn_attention._escnn.buffers import DERIVED

_ROUNDING = 1e-5  # of a basis in float32


def register() -> None:
    """Have bases projected in float64. Called when :mod:`escnn_attention` is imported."""
    for kind in (_RdConv, _RdConvTransposed, Linear):
        kind._apply = _apply
        kind._load_from_state_dict = _load_map
    SingleBlockBasisExpansion._load_from_state_dict = _load_basis


def elements_of(group: Group) -> list[GroupElement]:
    """All elements of a finite group; for a continuous one escnn's testing elements and the rotations of a cube."""
    if not group.continuous:
        return list(group.elements)
    elements = list(group.testing_elements())
    if isinstance(group, (SO3, O3)):
        # escnn tests with the rotations of an icosahedron, which lack half of those of a cube.
        elements += [g for g in group.grid("cube") if g not in elements]
    return elements


def _apply(self: Any, function: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
    before = self.weights.dtype
    nn.Module._apply(self, function, recurse)
    if before != torch.float64 and self.weights.dtype == torch.float64 and not self.weights.is_meta:
        _project(self)
        _expand_again(self)
    return self


def _load_map(self: Any, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
    """Load the state of a module in any mode; what one in eval mode makes of weights and bases, it makes anew."""
    for name in DERIVED:
        if self._buffers.get(name) is None:
            state_dict.pop(prefix + name, None)
        else:
            state_dict[prefix + name] = self._buffers[name]
    nn.Module._load_from_state_dict(self, state_dict, prefix, *arguments)
    if self.training:
        return
    for name, part in self.named_modules():
        if isinstance(part, SingleBlockBasisExpansion):  # PyTorch loads them later
            part._load_from_state_dict(state_dict, f"{prefix}{name}.", *arguments[:2], [], [], [])
    _expand_again(self)


def _load_basis(self: SingleBlockBasisExpansion, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
    """Load the basis, unless it is the one that is there, rounded."""
    name, own = f"{prefix}sampled_basis", self.sampled_basis
    given: Any = state_dict.get(name)
    same_shape = isinstance(given, Tensor) and given.shape == own.shape
    if same_shape and own.dtype == torch.float64 and torch.allclose(given.to(own), own, atol=_ROUNDING):
        state_dict[name] = own
    nn.Module._load_from_state_dict(self, state_dict, prefix, *arguments)


def _expand_again(module: Any) -> None:
    """Make the filter anew, which a module in eval mode has made of its basis."""
    if not module.training:
        module.train().eval()


@torch.no_grad()
def _project(module: Any) -> None:
    expansion, group = module.basisexpansion, module.in_type.fibergroup
    elements = elements_of(group)

    def matrices(fields: Any, chosen: list[Any], like: Tensor) -> Tensor:
        return torch.from_numpy(np.stack([fields(g) for g in chosen])).to(like)

    kept, moves = _stabiliser(module.space, elements, expansion.points)
    if module.bias is not None:
        expanded, those = module.bias_expansion, kept if group.continuous else elements
        module.bias_expansion = matrices(module.out_type.representation, those, expanded).mean(0) @ expanded
    sources, targets = ({r.name: r for r in fields} for fields in (expansion._in_reprs, expansion._out_reprs))
    for pair in expansion._representations_pairs:
        block = getattr(expansion, f"block_expansion_{expansion._escape_pair(pair)}")
        basis = block.sampled_basis.movedim(-1, 0)
        before = matrices(sources[pair[0]], kept, basis)
        behind = matrices(targets[pair[1]], [~g for g in kept], basis)
        total = torch.zeros_like(basis)
        for rho_in, rho_out, move in zip(before, behind, moves, strict=True):
            total += (rho_out @ basis[move]) @ rho_in
        block.sampled_basis = (total / len(kept)).movedim(0, -1)


def _stabiliser(space: GSpace, elements: list[Any], points: np.ndarray) -> tuple[list[Any], list[np.ndarray]]:
    """The elements that map points onto each other, and the number of the point to which each takes each.

    Of a continuous group those that map a grid onto itself, which are a group for the centre alone, too.
    """
    kept, moves = [], []
    for element in elements:
        moved = points
        if space.dimensionality:
            action = space.basespace_action(element)
            if space.fibergroup.continuous and not np.isclose(np.abs(action), np.abs(action).round(), atol=1e-6).all():
                continue
            moved = points @ action.T if points.any() else points
        met = np.isclose(moved[:, None], points, atol=1e-6).all(-1)
        if met.any(1).all():
            kept.append(element)
            moves.append(met.argmax(1))
    return kept, moves
