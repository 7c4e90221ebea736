"""The arguments that every backend takes, apart from queries, keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

__all__ = ["QueryMode", "Terms"]

QueryMode = Literal["own", "all"]


@dataclass(frozen=True)
class Terms:
    r"""A positional encoding, evaluated from every output pose h. M may be 1, shared by all heads.

    Attributes:
        num_poses: :math:`|H|`, the number of output poses.
        spatial: :math:`\rho_x`; ``(M, |H|, L, C)``, at :math:`h^{-1}\Delta` for every row of the table of offsets, or
            with ``absolute`` ``(M, |H|, N, C)``, at :math:`h^{-1}x` for every position. None for no such term.
        pose: :math:`E[h^{-1}\hat h]`; ``(M, |H|, P, C)`` for every pose of the keys. None for no such term.
        absolute: whether the terms are added to the queries as well as to the keys.
    """

    num_poses: int
    spatial: Tensor | None = None
    pose: Tensor | None = None
    absolute: bool = False

    def of_head(self, head: int) -> Terms:
        """The terms of one head, without the leading dimension."""

        def pick(table: Tensor | None) -> Tensor | None:
            return None if table is None else table[head if len(table) > 1 else 0]

        return Terms(self.num_poses, pick(self.spatial), pick(self.pose), self.absolute)
