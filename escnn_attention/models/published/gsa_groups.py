"""The group of a published GSA-Net or GE-ViT, and what its group layers make of pairs of poses."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from escnn import gspaces
from escnn.gspaces import GSpace

from escnn_attention.groups.fibers import Fibers, fibers
from escnn_attention.models.checkpoint import Checkpoint

__all__ = ["LIFTING", "gspace_of", "pose_term"]

LIFTING = "lifting_self_attention"
"""The published name of the lifting layer."""


def gspace_of(checkpoint: Checkpoint) -> tuple[GSpace, list[int]]:
    """The gspace, and which of its elements each published pose is.

    A published pose v sees the offset (row, column) as the matrix of its buffers maps it; here the pose h sees
    :math:`h^{-1}` of it, in coordinates that grow to the right and upwards.
    """
    rows, columns = (
        checkpoint.take(f"{LIFTING}.{kind}_indices", *checkpoint.shape(f"{LIFTING}.{kind}_indices", 3, 5)).double()
        for kind in ("row", "col")
    )
    poses, size = len(rows), rows.shape[-1]
    if size == 1:
        raise ValueError(f"{LIFTING}.row_indices: got windows of a single position, which say nothing of the group")
    middle = size // 2
    of_row, of_column = (
        ((slice(None), -1, middle), (slice(None), middle, -1))
        if rows.dim() == 3
        else ((slice(None), 0, 0, -1, 0), (slice(None), 0, 0, 0, -1))
    )
    seen = torch.stack([torch.stack([t[of_row], t[of_column]], dim=-1) for t in (rows, columns)], dim=1)
    axes = torch.tensor([[0.0, 1.0], [-1.0, 0.0]], dtype=torch.float64)  # x is the column, y minus the row.
    matrices = (axes @ seen @ axes.T).numpy()
    makers = [gspaces.trivialOnR2] if poses == 1 else [lambda: gspaces.rot2dOnR2(poses)]
    if poses == 2:
        makers += [lambda: gspaces.flip2dOnR2(axis=np.pi / 2), lambda: gspaces.flip2dOnR2(axis=0.0)]
    elif poses > 2 and poses % 2 == 0:
        makers.append(lambda: gspaces.flipRot2dOnR2(poses // 2))
    for make in makers:
        gspace = make()
        distances = np.abs(fibers(gspace).inverse_action[None] - matrices[:, None]).max((2, 3))
        elements = distances.argmin(1)
        if (distances.min(1) < 1e-3).all() and len(set(elements)) == poses:
            return gspace, elements.tolist()
    raise ValueError(
        f"{LIFTING}.row_indices: the {poses} maps of offsets are those of no group of rotations of the plane by equal "
        "angles, with or without a reflection, that escnn has"
    )


def pose_term(checkpoint: Checkpoint, name: str, group: Fibers, elements: Sequence[int]) -> tuple[np.ndarray, bool]:
    """Which entry of the published table over the poses a query reads.

    Returns:
        ``(|H|, |H|)``, by the query's pose and the key's, both relative to the output's; and whether that is all that
        the entry depends on. Where it is not, it is the one of the output at the pose of the identity.
    """
    order = group.order
    table = checkpoint.take(name, order, order, order).long().numpy()
    if table.min() < 0 or table.max() >= order:
        raise ValueError(f"{name}: got entries from {table.min()} to {table.max()}, needed 0 to {order - 1}")
    published = np.argsort(elements)  # of each element, its published pose
    table = table[np.ix_(published, published, published)]  # of output, query and key
    identity = next(h for h in range(order) if group.quotient[h, h] == h)
    relative = table[identity]
    exact = all((table[h] == relative[np.ix_(group.quotient[h], group.quotient[h])]).all() for h in range(order))
    return relative, exact
