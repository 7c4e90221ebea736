"""Attention between points by operations of PyTorch, in bounded chunks: every device, encoding and kernel."""

from __future__ import annotations

from torch import Tensor

from escnn_attention.functional.call import Call
from escnn_attention.functional.points.chunks import Chunks, attend_in_chunks

__all__ = ["attention"]

# The least numbers of a chunk: fewer pay for more operations, and more leave the cache. A GPU wants much at once.
_NUMBERS_PER_CHUNK, _NUMBERS_PER_WIDE_CHUNK = 2**21, 2**26


def attention(call: Call) -> Tensor:
    """Attention between points in bounded chunks: see :func:`escnn_attention.functional.attention`."""
    return attend_in_chunks(
        call, Chunks, _NUMBERS_PER_CHUNK if call.q.device.type == "cpu" else _NUMBERS_PER_WIDE_CHUNK
    )
