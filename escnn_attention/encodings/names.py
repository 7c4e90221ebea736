"""The encodings by name."""

from __future__ import annotations

from typing import Any

from escnn_attention.encodings.base import AbsoluteEncoding, Encoding, MLPEncoding, NoEncoding, SeparableEncoding
from escnn_attention.encodings.convolutional import ConvolutionalEncoding
from escnn_attention.encodings.frequencies import FourierEncoding, RotaryEncoding

_NAMES: dict[str, type[Encoding]] = {
    "mlp": MLPEncoding,
    "separable": SeparableEncoding,
    "fourier": FourierEncoding,
    "rotary": RotaryEncoding,
    "absolute": AbsoluteEncoding,
    "convolutional": ConvolutionalEncoding,
    "none": NoEncoding,
}


def as_encoding(encoding: Encoding | str | None) -> Encoding:
    """The encoding that an argument names: an encoding, one of its names, or None for the default.

    Raises:
        ValueError: the name is not known.
        TypeError: anything else.

    Example:
        >>> from escnn_attention import FourierEncoding
        >>> from escnn_attention.encodings import as_encoding
        >>> isinstance(as_encoding("fourier"), FourierEncoding)
        True
    """
    if encoding is None:
        return MLPEncoding()
    if isinstance(encoding, Encoding):
        return encoding
    if isinstance(encoding, str):
        if encoding not in _NAMES:
            raise ValueError(f"encoding: got {encoding!r}, needed one of {', '.join(map(repr, _NAMES))}")
        return _NAMES[encoding]()
    raise TypeError(f"encoding: got {_named(encoding)}, needed an Encoding, a name or None")


def _named(given: Any) -> str:
    """What was given in place of an encoding, for an error."""
    return f"the class {given.__name__}, not {given.__name__}()" if isinstance(given, type) else type(given).__name__
