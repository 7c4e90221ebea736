"""What the scores of an encoding or of a kernel are made of, which a layer makes of its features."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Needs"]


@dataclass(frozen=True)
class Needs:
    """What a layer makes of its features for the scores, besides values.

    Attributes:
        queries: whether scores depend on queries.
        keys: whether they depend on keys; without, keys are 1 in every channel.
        key_bias: how many of the first channels of a head have keys whose bias changes what is attended to. The others
            add the same to all scores of a query, which drops out of a softmax.

    Example:
        >>> from escnn_attention import MLPEncoding, RotaryEncoding
        >>> RotaryEncoding().needs(channels=5, dim=2)
        Needs(queries=True, keys=True, key_bias=4)
        >>> MLPEncoding().needs(channels=5, dim=2).key_bias, MLPEncoding().needs(5, 2, "count").key_bias
        (0, 5)
    """

    queries: bool = True
    keys: bool = True
    key_bias: int = 0

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of what is made, in the order of the rows of a projection's weight."""
        return (*(("queries",) if self.queries else ()), "values", *(("keys",) if self.keys else ()))
