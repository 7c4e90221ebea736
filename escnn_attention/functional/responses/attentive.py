r"""Attention on the responses of a group convolution, on plain tensors.

There are :math:`|H|^2` responses for each pair of fields and each position, and
:mod:`~escnn_attention.functional.responses.responses` says how they are never all there at once. This module calls
it: it has the operators that compilers see, derivatives of the second order, and the maps.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from escnn_attention.exporting.mode import in_programs
from escnn_attention.functional.autograd import PRECISE, Operator, Passes
from escnn_attention.functional.registry import chunk_size
from escnn_attention.functional.responses.convolution import convolve, views, wrapped
from escnn_attention.functional.responses.responses import Arguments, backward_pass, forward_pass, room

RESPONSES_PER_CHUNK = 2**20
"""The number of responses that are worked on at once on a CPU: 4 MB in float32, up to five times over."""

COPIES = 5
"""The number of tensors as large as a chunk of responses that the backward pass holds at once."""

RESPONSES_PER_IMAGE = 2**19
"""The number of responses of an image that an exported program works on at once, or those of a pair of poses."""

_RESPONSES_PER_WIDE_CHUNK = 2**24  # On other devices, where starting an operation is what costs.


class Geometry(NamedTuple):
    """How kernels move over the grid.

    Attributes:
        stride, padding, dilation: of the convolution.
        attention_dilation: of the kernel of spatial attention, which keeps the grid.
        circular: whether the grid, of outputs too, is a torus; else both are padded with zeros.
    """

    stride: int = 1
    padding: int = 0
    dilation: int = 1
    attention_dilation: int = 1
    circular: bool = False


_PLAIN = Geometry()


def attended_sum(
    x: Tensor,
    kernel: Tensor,
    squeeze: Tensor | None,
    excite: Tensor | None,
    spatial: Tensor | None,
    geometry: Geometry = _PLAIN,
) -> Tensor:
    r"""The responses of a group convolution times their attention, summed over the input fields and poses.

    With the responses :math:`\tilde f_{c,\tilde c}(x, h, \tilde h)` of output fields c and poses h to input fields
    :math:`\tilde c` and poses :math:`\tilde h`,

    .. math:: \mathrm{out}_c(x, h) = \sum_{\tilde c, \tilde h} \alpha^X_c\,\alpha^C_{c,\tilde c}\,
        \tilde f_{c,\tilde c}(x, h, \tilde h),

    where the attention is that of :class:`~escnn_attention.AttentiveConv`, for each pair of poses by itself.

    Args:
        x: ``(B, in_fields * in_poses, *space)``.
        kernel: ``(out_fields, out_poses, in_fields, in_poses, *kernel)``.
        squeeze: the first layer of channel attention, ``(out_fields, hidden, out_poses, in_fields, in_poses)``, or None
            for no channel attention.
        excite: the second, ``(out_fields, in_fields, out_poses, hidden, in_poses)``, or None.
        spatial: the kernel of spatial attention, ``(out_fields, out_poses, 2, in_poses, *kernel)``, for mean and
            maximum, or None for no spatial attention.
        geometry: how both kinds of kernels move over the grid.

    Returns:
        ``(B, out_fields, out_poses, *space)``. Inside the transforms of ``torch.func``, and for derivatives in forward
        mode, all responses are there at once.

    Example:
        >>> x, kernel = torch.randn(2, 3 * 4, 9, 9), torch.randn(5, 4, 3, 4, 3, 3)
        >>> out = attended_sum(x, kernel, None, None, None)  # no attention: a convolution
        >>> torch.allclose(out.flatten(1, 2), convolve(x, kernel.flatten(2, 3).flatten(0, 1)), atol=1e-4)
        True
    """
    call = _call(x, kernel, squeeze, excite, spatial, geometry)
    return _attended(call).to(x.dtype)


def attention_maps(*arguments: Any) -> tuple[Tensor | None, Tensor | None]:
    r"""The maps :math:`\alpha^C` and :math:`\alpha^X` of :func:`attended_sum`, of its arguments; None where one is off.

    Returns:
        ``(B, out_fields, out_poses, in_fields, in_poses)`` and ``(B, out_fields, out_poses, in_poses, *space)``.
    """
    found = [written_out(part)[1:] for part in _by_images(_call(*arguments))]
    channel, spatial = (None if m[0] is None else torch.cat(m) for m in zip(*found, strict=True))
    return channel, spatial


def written_out(call: Arguments) -> tuple[Tensor, Tensor | None, Tensor | None]:
    r"""The formula of :func:`attended_sum` with all responses at once, by operations that autograd follows.

    Returns:
        the sum ``(B, out_fields, out_poses, *space)`` and both maps, as :func:`attention_maps` gives them.
    """
    fields, poses, in_fields, in_poses, size, *_ = call.kernel.shape
    dimensions = call.x.dim() - 2
    x = torch.nn.functional.pad(call.x, [call.padding] * (2 * dimensions))
    seen = torch.stack(list(views(x, size, stride=call.stride, dilation=call.dilation, dimensions=dimensions)), dim=-1)
    seen = seen.unflatten(1, (in_fields, in_poses))
    # Out fields, out poses, in fields, in poses, and positions.
    responses = torch.einsum("bij...k,chijk->bchij...", seen, call.kernel.flatten(4))
    channel = maps = None
    if call.squeeze is not None:
        assert call.excite is not None
        statistics = torch.stack([responses.flatten(5).mean(-1), responses.flatten(5).amax(-1)])
        hidden = torch.einsum("cnhij,sbchij->sbchnj", call.squeeze, statistics).relu().sum(0)
        channel = torch.einsum("cihnj,bchnj->bchij", call.excite, hidden).sigmoid()
        responses = responses * channel.view(*channel.shape, *[1] * dimensions)
    if call.spatial is None:
        return responses.sum((3, 4)), channel, maps
    kernels = call.spatial.transpose(2, 3).flatten(0, 2)
    statistics = torch.stack([responses.mean(3), responses.amax(3)], dim=4)
    options: dict[str, Any] = {"dilation": call.attention_dilation, "groups": len(kernels), "circular": call.circular}
    padding = call.attention_dilation * (kernels.shape[-1] // 2)
    scores = convolve(statistics.flatten(1, 4), kernels, padding=padding, **options)
    maps = scores.unflatten(1, (fields, poses, in_poses)).sigmoid()
    return (maps * responses.sum(3)).sum(3), channel, maps


def _call(x: Tensor, kernel: Tensor, squeeze: Any, excite: Any, spatial: Any, geometry: Geometry = _PLAIN) -> Arguments:
    """The arguments of the operators, in the precision in which they work."""
    if geometry.circular:
        x, geometry = wrapped(x, geometry.padding, x.dim() - 2), geometry._replace(padding=0)
    exact = PRECISE[kernel.dtype]
    tensors = (None if t is None else t.to(exact) for t in (x, kernel, squeeze, excite, spatial))
    fastest = RESPONSES_PER_CHUNK if x.device.type == "cpu" else _RESPONSES_PER_WIDE_CHUNK
    chunk = chunk_size(fastest, x.element_size(), copies=COPIES)
    return Arguments(*tensors, *geometry, chunk)  # type: ignore[arg-type, call-arg]


def _by_images(call: Arguments) -> Iterator[Arguments]:
    """The call for so many images that all their responses make one chunk, and at least one image."""
    responses = call.kernel.flatten(4)[..., 0].numel() * torch.Size(call.space).numel()
    return (call._replace(x=x) for x in call.x.split(max(1, call.chunk // max(1, responses))))


def _in_parts(call: Arguments) -> Tensor:
    """The output by operators of PyTorch alone, for any number of images: by a few output fields or poses at a time."""
    fields, poses, in_fields, in_poses = call.kernel.shape[:4]
    limit = chunk_size(RESPONSES_PER_IMAGE, call.x.element_size(), copies=COPIES)
    of_pair = max(1, in_fields * math.prod(call.space))  # the responses of an output field between two poses
    sizes = []
    for number in (in_poses, poses, fields):
        sizes.append(max(1, min(number, limit // of_pair)))
        of_pair *= sizes[-1]
    keys, rows, some = (
        [slice(i, i + n) for i in range(0, total, n)] for n, total in zip(sizes, (in_poses, poses, fields), strict=True)
    )
    return torch.cat([torch.cat([_part(call, c, h, keys) for h in rows], dim=2) for c in some], dim=1)


def _part(call: Arguments, fields: slice, poses: slice, in_poses: list[slice]) -> Tensor:
    """The output of some fields at some poses, summed over the input poses."""
    x = call.x.unflatten(1, call.kernel.shape[2:4])
    out = []
    for some in in_poses:
        part = call._replace(
            x=x[:, :, some].flatten(1, 2),
            kernel=call.kernel[fields, poses, :, some],
            squeeze=None if call.squeeze is None else call.squeeze[fields, :, poses, :, some],
            excite=None if call.excite is None else call.excite[fields, :, poses, :, some],
            spatial=None if call.spatial is None else call.spatial[fields, poses, :, some],
        )
        out.append(written_out(part)[0])
    return functools.reduce(torch.add, out)


@in_programs(_in_parts)
def _attended(call: Arguments) -> Tensor:
    return _operator(call)


def _plainly(call: Arguments) -> Tensor:
    return written_out(call)[0]


_operator = Operator("attentive", Arguments, 5, Passes(forward_pass, backward_pass, room, _plainly))
