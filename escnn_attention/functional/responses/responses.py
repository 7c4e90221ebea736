r"""The passes of attention over the responses of a group convolution, in chunks that stay in the cache.

The responses of output fields and poses (*rows*) to the input fields of one input pose at a time are products of
matrices. What costs is reading and writing them, and the convolutions of spatial attention:

- The mean of the responses over the positions is that of what kernels see.
- The backward pass makes the responses again, and writes their gradient over them.
- The gradient of the kernels of spatial attention is a convolution itself.

Equal maxima share the gradient, which keeps it equivariant.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from escnn_attention.functional.responses.convolution import depthwise, depthwise_kernels, output_size, views


class Arguments(NamedTuple):
    """Arguments of one call, as numbers and tensors that an operator takes.

    Attributes:
        x: ``(B, in_fields * in_poses, *space)``.
        kernel: ``(out_fields, out_poses, in_fields, in_poses, *kernel)``.
        squeeze: ``(out_fields, hidden, out_poses, in_fields, in_poses)``, or None without channel attention.
        excite: ``(out_fields, in_fields, out_poses, hidden, in_poses)``, or None.
        spatial: ``(out_fields, out_poses, 2, in_poses, *kernel)``, or None without spatial attention.
        stride, padding, dilation: of the convolution.
        attention_dilation: of the kernel of spatial attention, which keeps the grid.
        circular: whether that kernel is on a torus, rather than padded with zeros.
        chunk: how many responses are worked on at once.
    """

    x: Tensor
    kernel: Tensor
    squeeze: Tensor | None
    excite: Tensor | None
    spatial: Tensor | None
    stride: int
    padding: int
    dilation: int
    attention_dilation: int
    circular: bool
    chunk: int

    @property
    def space(self) -> list[int]:
        """The grid of the output."""
        size, options = self.kernel.shape[-1], {"stride": self.stride, "padding": self.padding}
        return [output_size(n, size, dilation=self.dilation, **options) for n in self.x.shape[2:]]


class _Call:
    """Kernels in the layout of products, and buffers, for the passes of one call.

    Attributes:
        kernels: ``(in_poses, in_fields, rows, places of the kernel)``.
        squeeze: ``(in_poses, rows, hidden, in_fields)``, or None.
        excite: ``(in_poses, rows, in_fields, hidden)``, or None.
        spatial: ``(in_poses, 2, rows, 1, *kernel)``, or None.
    """

    def __init__(self, arguments: Arguments):
        self.arguments = arguments
        self.fields, self.poses, self.in_fields, self.in_poses, *size = arguments.kernel.shape
        self.size, self.dimensions = size[-1], len(size)
        self.space = arguments.space
        self.places = math.prod(self.space)
        self.rows = self.fields * self.poses
        self.kernels = arguments.kernel.flatten(4).permute(3, 2, 0, 1, 4).flatten(2, 3)
        self.squeeze = self.excite = self.spatial = None
        if arguments.squeeze is not None and arguments.excite is not None:
            self.squeeze = arguments.squeeze.permute(4, 0, 2, 1, 3).flatten(1, 2)
            self.excite = arguments.excite.permute(4, 0, 2, 1, 3).flatten(1, 2)
        if arguments.spatial is not None:
            self.spatial = arguments.spatial.movedim((3, 2), (0, 1)).flatten(2, 3).unsqueeze(3)
        padding = arguments.padding
        self.x = torch.nn.functional.pad(arguments.x, [padding] * (2 * self.dimensions))
        self.x = self.x.unflatten(1, (self.in_fields, self.in_poses))
        self.buffers: dict[str, Tensor] = {}

    def chunks(self) -> Iterator[tuple[int, slice, list[slice]]]:
        """All chunks: an input pose, some images, and the rows of these that are worked on one after the other."""
        number = max(1, self.arguments.chunk // max(1, self.in_fields * self.places))
        rows = min(number, self.rows)
        images = max(1, number // rows)
        for pose in range(self.in_poses):
            for start in range(0, len(self.x), images):
                some = slice(start, min(start + images, len(self.x)))
                yield pose, some, [slice(r, min(r + rows, self.rows)) for r in range(0, self.rows, rows)]

    def views(self, x: Tensor) -> Iterator[Tensor]:
        """Views of an input, one for each place of a kernel."""
        stride, dilation = self.arguments.stride, self.arguments.dilation
        return views(x, self.size, stride=stride, dilation=dilation, dimensions=self.dimensions)

    def seen(self, pose: int, images: slice) -> Tensor:
        """Columns of the input under the kernels: ``(in_fields, places of the kernel, b, positions)``."""
        x = self.x[images, :, pose].transpose(0, 1)
        seen = self.take("seen", self.in_fields, self.size**self.dimensions, x.shape[1], *self.space)
        for place, view in enumerate(self.views(x)):
            seen[:, place].copy_(view)
        return seen.flatten(3)

    def take(self, name: str, *shape: int) -> Tensor:
        """A buffer that is used over and over: fresh memory is filled many times more slowly than cached memory."""
        size = math.prod(shape)
        if name not in self.buffers or self.buffers[name].numel() < size:
            self.buffers[name] = self.x.new_empty(size)
        return self.buffers[name][:size].view(shape)


class _Channel:
    """Channel attention of some rows.

    Attributes:
        largest: ``(in_fields, rows, b)``; the largest response of all positions.
        alpha: ``(in_fields, rows, b)``; the map.
    """

    def __init__(self, call: _Call, pose: int, rows: slice, kernels: Tensor, mean_seen: Tensor, responses: Tensor):
        assert call.squeeze is not None
        assert call.excite is not None
        self.kernels, self.mean_seen = kernels, mean_seen
        self.squeeze, self.excite = call.squeeze[pose, rows], call.excite[pose, rows]
        self.largest = responses.amax(-1)
        statistics = torch.stack([kernels @ mean_seen, self.largest])
        # By row, with the images of both statistics side by side.
        self.statistics = statistics.permute(2, 1, 0, 3).flatten(2)
        self.hidden = (self.squeeze @ self.statistics).relu_()
        self.number = responses.shape[2]
        maps = (self.excite @ self._both(self.hidden).sum(2)).sigmoid_()
        self.alpha = maps.transpose(0, 1).contiguous()

    def _both(self, x: Tensor) -> Tensor:
        """Split the images of mean and maximum: ``(..., 2 b)`` becomes ``(..., 2, b)``."""
        return x.unflatten(-1, (2, self.number))

    def backward(self, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The gradients of both layers, and of mean and largest response, from that of the map."""
        grad = (grad * self.alpha * (1 - self.alpha)).transpose(0, 1)
        grad_excite = grad @ self._both(self.hidden).sum(2).transpose(1, 2)
        grad_hidden = (self.excite.transpose(1, 2) @ grad).repeat(1, 1, 2).mul_(self.hidden > 0)
        grad_squeeze = grad_hidden @ self.statistics.transpose(1, 2)
        grad_statistics = self._both(self.squeeze.transpose(1, 2) @ grad_hidden)
        mean, largest = grad_statistics.permute(2, 1, 0, 3)
        return grad_squeeze, grad_excite, mean, largest


class _Spatial:
    """Spatial attention of some rows.

    Attributes:
        total: ``(b, rows, positions)``; the sum of the attended responses of all input fields.
        statistics: ``(2, b, rows, positions)``; their mean and maximum.
        maps: ``(b, rows, positions)``.
    """

    def __init__(self, call: _Call, pose: int, rows: slice, attended: Tensor):
        assert call.spatial is not None
        self.call, self.kernels, self.fields = call, call.spatial[pose, :, rows], len(attended)
        arguments = call.arguments
        self.options: dict[str, Any] = {"dilation": arguments.attention_dilation, "circular": arguments.circular}
        self.total = attended.sum(0).transpose(0, 1)
        self.statistics = call.take("statistics", 2, *self.total.shape)
        torch.div(self.total, self.fields, out=self.statistics[0])
        self.statistics[1].copy_(attended.amax(0).transpose(0, 1))
        images = self.statistics.unflatten(-1, call.space)
        mean, largest = (depthwise(x, kernels, **self.options) for x, kernels in zip(images, self.kernels, strict=True))
        self.maps = mean.add_(largest).flatten(2).sigmoid_()

    def backward(self, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients that follow from the gradient of the output, ``(b, rows, positions)``.

        Returns:
            the gradient of the kernels, ``(2, rows, 1, *kernel)``; that of every attended response, and what the
            largest ones have besides, both ``(rows, b, positions)``.
        """
        call = self.call
        of_scores = (grad * self.total * self.maps * (1 - self.maps)).unflatten(-1, call.space)
        images = self.statistics.unflatten(-1, call.space)
        of_kernels = depthwise_kernels(images, of_scores, kernel_size=self.kernels.shape[-1], **self.options)
        flipped = self.kernels.flip(list(range(3, self.kernels.dim())))
        of_mean, of_largest = (depthwise(of_scores, kernels, **self.options).flatten(2) for kernels in flipped)
        of_each = of_mean.div_(self.fields).addcmul_(grad, self.maps)
        return of_kernels.unsqueeze(2), of_each.transpose(0, 1), of_largest.transpose(0, 1)


class _Chunk:
    """The responses of some rows to some images in one input pose, and what attention makes of them."""

    def __init__(self, call: _Call, pose: int, rows: slice, seen: Tensor):
        self.call, self.pose, self.rows, self.seen = call, pose, rows, seen
        self.kernels = call.kernels[pose, :, rows]
        fields, number, _ = self.kernels.shape
        responses = call.take("responses", fields, number, seen[0, 0].numel())
        torch.bmm(self.kernels, seen.flatten(2), out=responses)
        self.responses = responses.view(fields, number, *seen.shape[2:])
        self.channel: _Channel | None = None
        if call.squeeze is not None:
            self.channel = _Channel(call, pose, rows, self.kernels, seen.mean(-1), self.responses)

    def take(self, name: str) -> Tensor:
        """A buffer of the size of the responses."""
        return self.call.take(name, *self.responses.shape)

    def attended(self, name: str) -> Tensor:
        """The responses times the map of channel attention, in a buffer."""
        if self.channel is None:
            return self.responses
        return torch.mul(self.responses, self.channel.alpha.unsqueeze(-1), out=self.take(name))

    def forward(self) -> Tensor:
        """The sum of the attended responses, ``(b, rows, positions)``."""
        attended = self.attended("responses")
        if self.call.spatial is None:
            return attended.sum(0).transpose(0, 1)
        spatial = _Spatial(self.call, self.pose, self.rows, attended)
        return spatial.total * spatial.maps

    def backward(self, grad: Tensor, grads: _Gradients, grad_seen: Tensor) -> None:
        """Add what the gradient of the output means for the parameters and for what kernels see."""
        pose, rows, responses = self.pose, self.rows, self.responses
        of_kernels = grads.kernels[pose, :, rows]
        if self.call.spatial is None:
            of_responses = grad.transpose(0, 1).expand_as(responses)
        else:
            assert grads.spatial is not None
            attended = self.attended("attended")
            spatial = _Spatial(self.call, pose, rows, attended)
            of_spatial, of_each, of_largest = spatial.backward(grad)
            grads.spatial[pose, :, rows] += of_spatial
            there = attended.eq_(spatial.statistics[1].transpose(0, 1))
            of_responses = torch.addcmul(of_each, there, of_largest / there.sum(0), out=attended)
        if self.channel is not None:
            assert grads.squeeze is not None
            assert grads.excite is not None
            there = torch.eq(responses, self.channel.largest.unsqueeze(-1), out=self.take("there"))
            of_alpha = responses.mul_(of_responses).sum(-1)
            of_squeeze, of_excite, of_mean, of_largest = self.channel.backward(of_alpha)
            grads.squeeze[pose, rows] += of_squeeze
            grads.excite[pose, rows] += of_excite
            of_kernels += of_mean @ self.channel.mean_seen.transpose(1, 2)
            grad_seen += (self.kernels.transpose(1, 2) @ of_mean).unsqueeze(-1) / grad.shape[-1]
            of_responses = torch.mul(of_responses, self.channel.alpha.unsqueeze(-1), out=self.take("attended"))
            of_responses.addcmul_(there, (of_largest / there.sum(-1)).unsqueeze(-1))
        of_responses = of_responses.flatten(2)
        # This way round the product takes a half of the time.
        of_kernels += (self.seen.flatten(2) @ of_responses.transpose(1, 2)).transpose(1, 2)
        grad_seen.flatten(2).baddbmm_(self.kernels.transpose(1, 2), of_responses)


class _Gradients:
    """The gradients of the tensors of a :class:`_Call`, in the shapes that these have there."""

    def __init__(self, call: _Call):
        self.x, self.kernels = torch.zeros_like(call.x), torch.zeros_like(call.kernels)
        self.squeeze, self.excite, self.spatial = (
            None if t is None else torch.zeros_like(t) for t in (call.squeeze, call.excite, call.spatial)
        )

    def of_arguments(self, call: _Call) -> list[Tensor | None]:
        """The gradients of the tensors among the arguments, in their order and shapes."""
        fields, padding = (call.fields, call.poses), call.arguments.padding
        x = self.x.flatten(1, 2)
        for axis in range(2, x.dim()):
            x = x.narrow(axis, padding, x.shape[axis] - 2 * padding)
        kernel = self.kernels.unflatten(2, fields).permute(2, 3, 1, 0, 4).reshape(call.arguments.kernel.shape)
        squeeze, excite = (
            None if t is None else t.unflatten(1, fields).permute(1, 3, 2, 4, 0) for t in (self.squeeze, self.excite)
        )
        spatial = None if self.spatial is None else self.spatial.squeeze(3).unflatten(2, fields).movedim((0, 1), (3, 2))
        return [None if t is None else t.contiguous() for t in (x, kernel, squeeze, excite, spatial)]


def forward_pass(arguments: Arguments) -> tuple[Tensor, Tensor]:
    """The sum of the attended responses, ``(B, out_fields, out_poses, *space)``; the backward pass needs no more."""
    call, (out, nothing) = _Call(arguments), room(arguments)
    out.zero_()
    by_row = out.flatten(1, 2).flatten(2)
    for pose, images, parts in call.chunks():
        seen = call.seen(pose, images)
        for rows in parts:
            by_row[images, rows] += _Chunk(call, pose, rows, seen).forward()
    return out, nothing


def backward_pass(arguments: Arguments, grad: Tensor, *_: Any) -> list[Tensor | None]:
    """The gradients of the tensors among the arguments."""
    call = _Call(arguments)
    grads = _Gradients(call)
    grad = grad.flatten(1, 2).flatten(2)
    for pose, images, parts in call.chunks():
        seen = call.seen(pose, images)
        grad_seen = call.take("grad_seen", *seen.shape).zero_()
        for rows in parts:
            _Chunk(call, pose, rows, seen).backward(grad[images, rows], grads, grad_seen)
        grad_x = grads.x[images, :, pose].transpose(0, 1)
        for view, addition in zip(call.views(grad_x), grad_seen.unflatten(-1, call.space).unbind(1), strict=True):
            view.add_(addition)
    return grads.of_arguments(call)


def room(arguments: Arguments) -> tuple[Tensor, Tensor]:
    """Room for what the forward pass returns."""
    x, (fields, poses, *_) = arguments.x, arguments.kernel.shape
    return x.new_empty(len(x), fields, poses, *arguments.space), x.new_empty(0)
