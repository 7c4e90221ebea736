"""No encoding."""

from __future__ import annotations

from torch import Tensor

from escnn_attention.encodings.base import Encoding

__all__ = ["NoEncoding"]


class NoEncoding(Encoding):
    """No positions at all: the attention is equivariant to every permutation of the positions (Prop. 4.1).

    Ask for it by name, ``encoding="none"``. Poses are told apart no more than positions are.

    Source: GSA-Nets (Romero and Cordonnier 2021), Eqs. 3 and 8.
    """

    def _build(self) -> None:
        pass

    def _build_offsets(self) -> None:
        pass

    def offsets(self, delta: Tensor) -> Tensor | None:
        return None
