"""How much memory an attention may use, and what to do when there is not enough."""

from __future__ import annotations

import math
import os
from contextlib import AbstractContextManager
from types import TracebackType

import torch

from escnn_attention.functional.call import Call

_limit: int | None = None


class working_memory(AbstractContextManager["working_memory"]):
    """Bound the memory that attention holds for scores and widened vectors, beyond its inputs and outputs.

    The backends work in chunks, and this decides how large they are: never larger than what is fastest, and never
    smaller than what belongs to one tile or one query. It is a setting of the process, which holds inside a ``with``
    statement, or until it is set again. Results differ by rounding only.

    By default chunks are as large as is fastest, 2 MB a thread for ``"native"``, 64 MB for ``"blocked"`` and
    ``"dense"``, and 1/64 of the GPU's memory for ``"triton"``, but at least 128 MB. ``"reference"`` works in one chunk,
    whatever is set.

    Args:
        num_bytes: the bound; None for the default.

    Raises:
        ValueError: it is not positive.

    Example:
        >>> import torch
        >>> from escnn_attention import GroupSelfAttention, working_memory
        >>> from escnn import gspaces, nn
        >>> g = gspaces.rot2dOnR2(4)
        >>> fields = nn.FieldType(g, 2 * [g.regular_repr])
        >>> layer = GroupSelfAttention(fields, fields, kernel_size=None)
        >>> x = fields(torch.randn(1, 8, 9, 9))
        >>> y = layer(x)
        >>> with working_memory(2**20):
        ...     same = layer(x)
        >>> torch.allclose(y.tensor, same.tensor, atol=1e-5)
        True
    """

    def __init__(self, num_bytes: int | None):
        if num_bytes is not None and not num_bytes > 0:
            raise ValueError(f"num_bytes: got {num_bytes!r}, needed a positive number of bytes or None")
        global _limit
        self._before = _limit
        _limit = num_bytes

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _limit
        _limit = self._before


def chunk_size(fastest: int, bytes_each: int, copies: int) -> int:
    """The entries of a chunk, where ``fastest`` is best and ``copies`` of a chunk are held at once.

    An entry takes ``bytes_each``, or four where it is worked on in single precision.
    """
    if _limit is None:
        return fastest
    return max(1, min(fastest, _limit // (copies * max(4, bytes_each))))


def refuse_the_impossible(call: Call) -> None:
    """Raise an error if all scores at once are more than the machine could hold."""
    device = call.q.device
    if device.type == "cpu":
        available = _physical_memory()
    elif device.type == "cuda":
        available = torch.cuda.get_device_properties(device).total_memory
    else:
        available = None
    if available is not None and _scores(call) > available:
        raise MemoryError(_advice(call, "reference"))


def explain_shortage(error: RuntimeError, call: Call, backend: str) -> Exception | None:
    """An error that says which settings would fit, if an allocation failed; None for other errors."""
    if isinstance(error, torch.OutOfMemoryError):
        # Of the same kind, so that what halves batches on it still does.
        return torch.OutOfMemoryError(f"{_advice(call, backend)}\n{error}")
    if "can't allocate memory" in str(error):
        return MemoryError(f"{_advice(call, backend)}\n{error}")
    return None


def _scores(call: Call) -> int:
    """The bytes of all scores."""
    heads, batch, positions, poses, _ = call.q.shape
    pairs = call.num_poses * (poses if call.query == "all" else 1)
    return batch * heads * pairs * positions * math.prod(call.k.shape[2:4]) * max(4, call.q.element_size())


def _advice(call: Call, backend: str) -> str:
    scores = _scores(call)
    linear = (3 * call.q.numel() + 3 * call.k.numel()) * call.q.element_size()
    _, batch, positions, poses, _ = call.q.shape
    advice = []
    if backend == "reference":
        advice.append(f'backend="auto" holds about {_readable(linear)} and chunks of the scores')
    else:
        advice.append("a bound for the chunks: escnn_attention.working_memory(2**24)")
    if call.query == "all" and poses > 1:
        own = scores // poses
        advice.append(f'query="own" has 1/{poses} of the scores, {_readable(own)}')
    if batch > 1:
        advice.append(f"one image instead of {batch} has {_readable(scores // batch)} of scores")
    advice.append('a smaller kernel_size, or keys="own", has fewer of them')
    return (
        f"attention: out of memory with backend {backend!r}: the scores of {batch} x {positions} positions are "
        f"{_readable(scores)}. What takes less: {'; '.join(advice)}."
    )


def _physical_memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def _readable(num_bytes: int) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes = num_bytes / 1000  # type: ignore[assignment]
    return f"{num_bytes:.3g} TB"
