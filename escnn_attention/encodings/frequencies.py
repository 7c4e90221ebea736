"""What the encodings by frequencies share."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter

from escnn_attention._checks import check_int
from escnn_attention.encodings.base import Encoding

__all__ = ["FrequencyEncoding"]


class FrequencyEncoding(Encoding):
    """What encodings by frequencies share: options, and the frequencies themselves."""

    frequencies: Tensor

    def __init__(self, num_frequencies: int | None, scale: float, learned: bool):
        super().__init__()
        if num_frequencies is not None:
            check_int("num_frequencies", num_frequencies)
        if not scale > 0:
            raise ValueError(f"scale: got {scale!r}, needed a positive number")
        self.num_frequencies, self.scale, self.learned = num_frequencies, scale, learned

    def _draw_frequencies(self, *shape: int) -> None:
        frequencies = self.scale * torch.randn(shape)
        if self.learned:
            self.frequencies = Parameter(frequencies)
        else:
            self.register_buffer("frequencies", frequencies)

    def extra_repr(self) -> str:
        return f"num_frequencies={self.num_frequencies}, learned={self.learned}"
