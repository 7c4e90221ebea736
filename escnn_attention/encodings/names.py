"""The encodings by name."""

from __future__ import annotations

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
    if isinstance(encoding, type) and issubclass(encoding, Encoding):
        name = encoding.__name__
        raise TypeError(f"encoding: got the class {name}, needed an Encoding, such as {name}(), a name or None")
    raise TypeError(f"encoding: got {type(encoding).__name__}, needed an Encoding, a name or None")
