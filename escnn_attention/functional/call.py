"""The arguments that attention on grids and attention between points have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

QueryMode = Literal["own", "all"]
KeyMode = Literal["all", "own"]
Normalization = Literal["softmax", "count"]


@dataclass(frozen=True)
class Call(ABC):
    r"""One attention of N queries to N' keys: heads, images, positions, poses, channels.

    .. math::
        \mathrm{out}(x, h) = \sum_{\tilde h \in Q(h)} \; \sum_{(x', \hat h) \in N(x, \tilde h)}
            \mathrm{softmax}_{(x', \hat h)}(s_h(x, \tilde h; x', \hat h)) \; v(x', \hat h)

    Attributes:
        q: ``(M, B, N, J, C)``, the queries of M heads of C channels, in B images, at N positions and J poses.
        k, v: ``(M, B, N', P, C)``, keys and values at N' positions and P poses.
        query: the query poses Q(h) that contribute to an output pose h: ``"own"`` h, ``"all"`` all J.
        keys: the key poses that a query pose attends to: ``"all"``, or ``"own"``, only itself, where there are several.
        dropout: the probability with which a key is dropped from a query's attention.
        normalization: ``"softmax"``; or ``"count"``, scores divided by the measure of the keys.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    query: QueryMode = field(default="own", kw_only=True)
    keys: KeyMode = field(default="all", kw_only=True)
    dropout: float = field(default=0.0, kw_only=True)
    normalization: Normalization = field(default="softmax", kw_only=True)

    @property
    @abstractmethod
    def num_poses(self) -> int:
        """The number of output poses."""

    @property
    @abstractmethod
    def one_set(self) -> bool:
        """Whether queries and keys have the same positions."""

    @abstractmethod
    def key(self) -> Hashable | None:
        """All that the choice of a backend depends on; None where it depends on more than shapes and modes."""
