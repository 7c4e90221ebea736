"""Rotations of pairs of channels, one node of autograd: on CUDA by one kernel in every pass, which Triton compiles."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from escnn_attention.functional.autograd import Operator, Passes, needs_operators
from escnn_attention.functional.launch import has_kernels, kernels, on_device, power_of_two

_PROGRAMS, _LEAST = 512, 8
"""How many programs of the backward pass there are for few angles, and how many vectors each rotates at least."""


def rotate(x: Tensor, angle: Tensor, pose: Tensor | None = None) -> Tensor:
    """Rotate pairs of channels, the first F with the second F of ``x``, by ``angle`` ``(..., F)``.

    Args:
        x: vectors.
        angle: their angles.
        pose: what is added to the vectors first.

    Example:
        >>> rotate(torch.tensor([1.0, 0.0, 5.0]), torch.tensor([math.pi / 2])).round(decimals=4)
        tensor([-0., 1., 5.])
    """
    return _compute(_Arguments(x, angle, None, pose, False, x.shape[-1]))


def attach_waves(
    x: Tensor, angle: Tensor, amplitudes: Tensor | None = None, pose: Tensor | None = None, width: int = 0
) -> Tensor:
    r"""Vectors with waves behind them: :math:`x, a\cos\varphi - b\sin\varphi, a\sin\varphi + b\cos\varphi`.

    Args:
        x: vectors.
        angle: :math:`\varphi`, ``(..., F)``.
        amplitudes: a and b, ``(..., 2F)``; None for 1 and 0, the cosine and the sine themselves.
        pose: what is added to the vectors.
        width: the number of channels to which zeros fill up the result.

    Example:
        >>> attach_waves(torch.tensor([5.0]), torch.zeros(2), width=6)
        tensor([5., 1., 1., 0., 0., 0.])
    """
    return _compute(_Arguments(x, angle, amplitudes, pose, True, max(width, x.shape[-1] + 2 * angle.shape[-1])))


class _Arguments(NamedTuple):
    """Vectors, and angles of their pairs: six axes each in kernels, the first five of which broadcast.

    Attributes:
        x, angle, amplitudes, pose: as above.
        waves: whether pairs are amplitudes, and not the first channels of the vectors.
        width: the number of channels of the result.
    """

    x: Tensor
    angle: Tensor
    amplitudes: Tensor | None
    pose: Tensor | None
    waves: bool
    width: int

    @property
    def shape(self) -> torch.Size:
        """The axes of the result."""
        given = [t.shape[:-1] for t in self[:4] if t is not None]
        return torch.Size((*torch.broadcast_shapes(*given), self.width))

    @property
    def pairs(self) -> Tensor | None:
        """What is rotated; None for pairs (1, 0)."""
        return self.amplitudes if self.waves else self.x

    @property
    def first_pair(self) -> int:
        """The channel of the result where pairs begin."""
        return self.x.shape[-1] if self.waves else 0


def _compute(call: _Arguments) -> Tensor:
    if needs_operators(*call[:4]):
        return _plainly(call)
    if _on_cpu(call) and not torch.compiler.is_compiling():
        return _operator(call)
    if not has_kernels(call.x.device):
        return _plainly(call)
    # Gradients of angles of more than three axes on each side: those of attention.
    if any(t is not None and (t.dim() != 6 or t.stride(-1) != 1) for t in (call.x, call.amplitudes, call.pose)):
        return _plainly(call)
    if call.angle.dim() != 6:
        return _plainly(call)
    reach = 1 + sum((n - 1) * step for n, step in zip(call.angle.shape, call.angle.stride(), strict=True))
    dense = call.angle.stride(-1) == 1 and reach == call.angle.numel()
    return _operator(call if dense else call._replace(angle=call.angle.contiguous()))


def _plainly(call: _Arguments) -> Tensor:
    x, angle, pairs = call.x if call.pose is None else call.x + call.pose, call.angle, call.angle.shape[-1]
    cos, sin = angle.cos().to(call.x.dtype), angle.sin().to(call.x.dtype)
    source = call.amplitudes if call.waves else x
    if source is not None:
        a, b = source[..., :pairs], source[..., pairs : 2 * pairs]
        cos, sin = a * cos - b * sin, a * sin + b * cos
    parts = [x, cos, sin] if call.waves else [cos, sin, x[..., 2 * pairs :]]
    # Channels that are left stay as they are, for every pose and position that the angle brings in.
    shape = torch.broadcast_shapes(*(t.shape[:-1] for t in parts))
    out = torch.cat([t.to(call.x.dtype).expand(*shape, -1) for t in parts], dim=-1)
    return out if out.shape[-1] == call.width else F.pad(out, (0, call.width - out.shape[-1]))


def _on_cpu(call: _Arguments) -> bool:
    return call.x.device.type == "cpu" and not has_kernels(call.x.device)


def _turn(a: Tensor, b: Tensor, cos: Tensor, sin: Tensor, out: Tensor, direction: int = 1) -> None:
    """Write the pairs (a, b), rotated by an angle, to ``out``, the first numbers of all pairs before the second."""
    first, second = out.chunk(2, dim=-1)
    torch.mul(a.expand_as(first), cos, out=first).addcmul_(b, sin, value=-direction)
    torch.mul(b.expand_as(second), cos, out=second).addcmul_(a, sin, value=direction)


def _cos_and_sin(angle: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines that lie in memory as vectors do, whose positions may be side by side."""
    if like.dim() == angle.dim() == 6 and like.stride(3) == 1:
        angle = angle.transpose(3, 5).contiguous().transpose(3, 5)
    return angle.cos().to(like.dtype), angle.sin().to(like.dtype)


def _forward_on_cpu(call: _Arguments) -> tuple[Tensor, Tensor]:
    x, pairs = call.x if call.pose is None else call.x + call.pose, call.angle.shape[-1]
    out, nothing = _empty(call)
    cos, sin = _cos_and_sin(call.angle, out)
    channels, behind = x.shape[-1], call.first_pair + 2 * pairs
    turned, source = out[..., call.first_pair : behind], call.amplitudes if call.waves else x
    if source is None:
        turned[..., :pairs], turned[..., pairs:] = cos, sin
    else:
        _turn(source[..., :pairs], source[..., pairs : 2 * pairs], cos, sin, turned)
    if call.waves:
        out[..., :channels], out[..., behind:] = x, 0
    elif behind < channels:
        out[..., behind:] = x[..., behind:]
    return out, nothing


def _backward_on_cpu(call: _Arguments, grad: Tensor, needed: list[bool]) -> list[Tensor | None]:
    """The gradients, of more axes where a tensor was broadcast."""
    pairs, first = call.angle.shape[-1], call.first_pair
    cos, sin = _cos_and_sin(call.angle, grad)
    turned, of_x = grad[..., first : first + 2 * pairs], grad[..., : call.x.shape[-1]]
    back = torch.empty_like(turned if call.waves else of_x)
    of_pairs = back[..., : 2 * pairs]
    _turn(turned[..., :pairs], turned[..., pairs:], cos, sin, of_pairs, direction=-1)
    if not call.waves:
        if 2 * pairs < of_x.shape[-1]:
            back[..., 2 * pairs :] = of_x[..., 2 * pairs :]
        of_x = back
    of_angle = None
    if needed[1]:
        of_angle, source = of_pairs[..., pairs:], call.pairs
        if source is not None:
            # Of the vectors themselves, what is added to them included.
            source = source if call.waves or call.pose is None else source + call.pose
            of_angle = (of_angle * source[..., :pairs]).addcmul_(
                of_pairs[..., :pairs], source[..., pairs : 2 * pairs], value=-1
            )
    return [of_x, of_angle, back if call.waves else None, of_x]


def _empty(call: _Arguments) -> tuple[Tensor, Tensor]:
    """Room for the result, on CUDA in the order in which fused attention reads it."""
    if _on_cpu(call):
        out = torch.empty_like(call.x) if call.x.shape == call.shape else call.x.new_empty(call.shape)
        return out, call.x.new_empty(0)
    m, h, b, n, j, c = call.shape
    if call.waves:
        out = call.x.new_empty(m, b, h, n, j, c).permute(0, 2, 1, 3, 4, 5)
    elif j > 1:
        out = call.x.new_empty(call.shape)
    else:  # heads and poses side by side
        out = call.x.new_empty(b, n, m, h, j, c).permute(2, 3, 0, 1, 4, 5)
    return out, call.x.new_empty(0)


def _forward_pass(call: _Arguments) -> tuple[Tensor, Tensor]:
    if _on_cpu(call):
        return _forward_on_cpu(call)
    out, nothing = _empty(call)
    rows, frequencies = call.shape[:-1].numel(), call.angle.shape[-1]
    tile = max(1, 1024 // power_of_two(frequencies))
    # What there is none of is not read.
    tensors = [call.x if t is None else t for t in (call.x, call.pairs, call.pose)]
    strides = _strides(call, *tensors, call.angle, out)
    start = 0 if call.waves else 2 * frequencies
    with on_device(out.device):
        kernels("rotate_kernels").rotate[(-(-rows // tile),)](
            *(*tensors, call.angle, out, rows, *call.shape[1:5], *strides),
            **_constants(call),
            START=start,
            WIDTH=call.width,
            BR=tile,
        )
    return out, nothing


def _backward_pass(
    call: _Arguments, grad: Tensor, _: Tensor | None, __: Tensor, needed: list[bool]
) -> list[Tensor | None]:
    found = (_backward_on_cpu if _on_cpu(call) else _backward_by_kernel)(call, grad, needed)
    alike = zip(found, call[:4], needed, strict=True)
    return [
        t.sum_to_size(given.shape).to(given) if need and t is not None and given is not None else None
        for t, given, need in alike
    ]


def _backward_by_kernel(call: _Arguments, grad: Tensor, needed: list[bool]) -> list[Tensor | None]:
    """The gradients, of more axes where a tensor was broadcast."""
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    pairs, found = call.pairs, grad[..., : call.x.shape[-1]]
    of_pairs = None
    if pairs is not None and call.waves:
        of_pairs = pairs.new_empty(*call.shape[:-1], pairs.shape[-1])
    elif pairs is not None:
        of_pairs = found = _empty(call)[0]
    of_angle = _turn_back(call, grad, of_pairs) if needed[1] or of_pairs is not None else None
    return [found, of_angle, of_pairs if call.waves else None, found]


def _turn_back(call: _Arguments, grad: Tensor, of_pairs: Tensor | None) -> Tensor:
    """The gradient of the angles; that of pairs is written to ``of_pairs``."""
    angle, width = call.angle, power_of_two(call.angle.shape[-1])
    rows, tile = angle.shape[:-1].numel(), max(1, 256 // width)
    # The axes along which an angle is that of several vectors.
    shared = [1 if n == all_ else all_ for n, all_ in zip(angle.shape[:-1], call.shape[:-1], strict=True)]
    count, tiles = math.prod(shared), -(-rows // tile)
    stretches = max(1, min(count // _LEAST, _PROGRAMS // tiles))
    # In the order of the angles.
    of_angle = torch.empty_strided(
        (stretches, *angle.shape), (angle.numel(), *angle.stride()), dtype=angle.dtype, device=angle.device
    )
    # What there is none of is not read.
    pairs, to = grad if call.pairs is None else call.pairs, grad if of_pairs is None else of_pairs
    pose = grad if call.pose is None or call.waves else call.pose
    with on_device(angle.device):
        kernels("rotate_kernels").rotate_back[tiles, stretches](
            *(pairs, pose, angle, grad, to, of_angle, rows, angle.numel(), count, -(-count // stretches)),
            *(*angle.shape[1:5], *shared[1:], *angle.stride()[:-1], *_strides(call, pairs, pose, grad, to)),
            **(_constants(call) | {"POSE": call.pose is not None and not call.waves}),
            BR=tile,
        )
    return of_angle[0] if stretches == 1 else of_angle.sum(0)


def _strides(call: _Arguments, *tensors: Tensor) -> list[int]:
    """The steps of every tensor along the first five axes."""
    return [s for t in tensors for s in t.expand(*call.shape[:-1], -1).stride()[:-1]]


def _constants(call: _Arguments) -> dict[str, int]:
    """The constants that both kernels are compiled for."""
    frequencies = call.angle.shape[-1]
    return {
        **{"F": frequencies, "FP": power_of_two(frequencies), "C": call.x.shape[-1], "AT": call.first_pair},
        **{"UNIT": call.pairs is None, "POSE": call.pose is not None},
    }


_operator = Operator("rotate", _Arguments, 4, Passes(_forward_pass, _backward_pass, _empty, _plainly))
