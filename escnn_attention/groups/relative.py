"""The element between two samples of a continuous group as numbers, of which a network can be a function."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from escnn.group import SO2, SO3, DirectProductGroup, Group, GroupElement, Representation

from escnn_attention.groups.representations import factors_of, matrices_of
from escnn_attention.groups.samples import Samples, sampled

__all__ = ["relative_features"]


def relative_features(action: Representation, elements: Sequence[GroupElement]) -> np.ndarray:
    r"""The elements :math:`h_s^{-1} h_t` as numbers, ``(S, S, F)``: the entries of their matrices.

    Entries that are the same for all elements, or that differ in sign only, are left out, and the others have mean 0
    and variance 1 over the group: what they are does not depend on the samples.
    """
    fine, _ = sampled(action.group, _fine(action.group))
    entries = matrices_of(action, fine).reshape(len(fine), -1)
    kept: list[int] = []
    for i, entry in enumerate(entries.T):
        known = any(np.allclose(entry, sign * entries[:, j], atol=1e-8) for j in kept for sign in (1, -1))
        if np.ptp(entry) > 1e-8 and not known:
            kept.append(i)
    matrices = matrices_of(action, elements)
    relative = np.einsum("sji,tjk->stik", matrices, matrices)
    chosen = entries[:, kept]
    return (relative.reshape(*relative.shape[:2], -1)[..., kept] - chosen.mean(0)) / chosen.std(0)


def _fine(group: Group) -> Samples:
    """Samples on which squares of the entries of rotations are integrated exactly."""
    if isinstance(group, DirectProductGroup):
        finite, continuous = factors_of(group)
        return Samples(finite.order() * _fine(continuous).num_samples)
    return Samples(60 if isinstance(group, (SO3, SO2)) else 120)
