"""Patches of images and learned positions, on plain tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from escnn_attention._checks import check_grid
from escnn_attention.encodings import Encoding
from escnn_attention.functional.autograd import PRECISE, exactly
from escnn_attention.geometry.grid import Grid
from escnn_attention.geometry.windows import Window
from escnn_attention.plain.buffers import ExactBuffers
from escnn_attention.plain.cloud_pooling import count_clouds, offsets_from_mean
from escnn_attention.plain.irreps import Segment
from escnn_attention.plain.projections import Frames, FromPoses


class InvariantTable(ExactBuffers):
    r"""Learned fields with :math:`p(h u) = \rho(h)\, p(u)`, and as free as that leaves them.

    Args:
        segments, channels: the representation of the fields, with ``dual=True``, and its channels.
        places: ``(K, |H|)``, where each element takes the first position u of each orbit, on a grid of this ``shape``.
        bases: for some orbits, ``(k,)``, the basis ``(channels, m)`` of what p(u) may be; None for everything.
        copies, std: how many fields there are, and the standard deviation of their numbers at first.
    """

    places: Tensor
    stays: Tensor

    def __init__(
        self,
        segments: Sequence[Segment],
        channels: int,
        places: np.ndarray,
        shape: tuple[int, ...],
        bases: Sequence[tuple[np.ndarray, np.ndarray | None]],
        *,
        copies: int = 1,
        std: float = 0.02,
    ):
        super().__init__()
        self.shape, self.channels, self.copies = shape, channels, copies
        self.frames = Frames(segments)
        self.register_exact("places", places)
        self.register_exact("stays", (places == places[:, :1]).sum(1).astype(float))
        self.weights = torch.nn.ParameterList()
        for i, (orbits, basis) in enumerate(bases):
            self.register_exact(f"orbits_{i}", orbits)
            self.register_exact(f"basis_{i}", basis)
            numbers = channels if basis is None else basis.shape[1]
            self.weights.append(Parameter(std * torch.randn(copies, len(orbits), numbers)))

    def forward(self) -> Tensor:
        """The fields, ``(copies, channels, *shape)``, in the precision of the weights."""
        rows = self.stays.new_zeros(self.copies, len(self.stays), self.channels)
        with exactly(rows.device.type):
            for i, weight in enumerate(self.weights):
                basis = getattr(self, f"basis_{i}")
                first = weight if basis is None else weight @ basis.T.to(weight.dtype)
                rows = rows.to(weight.dtype).index_copy(1, getattr(self, f"orbits_{i}"), first)
            seen = self.frames(rows.flatten(0, 1), 1)[0].unflatten(0, rows.shape[:2])
        seen = seen / self.stays.to(rows.dtype)[:, None, None]
        field = rows.new_zeros(self.copies, math.prod(self.shape), self.channels)
        return field.index_add(1, self.places.flatten(), seen.flatten(1, 2)).transpose(1, 2).unflatten(2, self.shape)

    @torch.no_grad()
    def fill(self, fields: Tensor) -> None:
        """Take the numbers of such fields, ``(copies, channels, *shape)``."""
        first = fields.flatten(2)[..., self.places[:, 0]].transpose(1, 2)
        for i, weight in enumerate(self.weights):
            basis, values = getattr(self, f"basis_{i}"), first[:, getattr(self, f"orbits_{i}")]
            weight.copy_(values if basis is None else values @ basis.to(values.dtype))


class PositionTable(torch.nn.Module):
    """Adds the field of a table to features ``(B, channels, *space)``."""

    def __init__(self, table: InvariantTable):
        super().__init__()
        self.table = table

    def forward(self, x: Tensor) -> Tensor:
        check_grid(x.shape[2:])
        field = self.table()
        mode = "bicubic" if field.dim() == 4 else "bilinear"
        for axis, n in enumerate(x.shape[2:], start=2):
            if n != field.shape[axis]:
                # Products, as PyTorch's own interpolation has no deterministic derivative on CUDA.
                one_hot = torch.eye(field.shape[axis], dtype=field.dtype, device=field.device)[None, None]
                weights = F.interpolate(one_hot, (field.shape[axis], n), mode=mode, align_corners=False)[0, 0]
                with exactly(field.device.type):
                    field = (field.movedim(axis, -1) @ weights).movedim(-1, axis)
        return x + field.to(x.dtype)


class _Patches(ExactBuffers):
    """A kernel between fields at one position and those on a patch, and a bias along the invariants ``(channels, k)``.

    For each representation of the input there is a table with a field for each of its fields, and their columns.
    """

    invariants: Tensor
    order: Tensor

    def __init__(self, tables: Sequence[InvariantTable], columns: Sequence[np.ndarray], invariants: np.ndarray):
        super().__init__()
        self.table = tables[0]
        self.further = torch.nn.ModuleList(tables[1:])
        self.size = self.table.shape[0]
        self.components = [c.shape[1] for c in columns]
        self.register_exact("order", np.argsort(np.concatenate([c.flatten() for c in columns])))
        self.register_exact("invariants", invariants)
        self.bias = Parameter(torch.zeros(invariants.shape[1])) if invariants.shape[1] else None

    def kernel_and_bias(self, like: Tensor) -> tuple[Tensor, Tensor | None]:
        """The kernel ``(channels of the input, of the output, *patch)`` and the bias, in the precision of features."""
        parts = []
        for table, n in zip((self.table, *self.further), self.components, strict=True):
            parts.append(table().unflatten(1, (-1, n)).transpose(1, 2).flatten(0, 1))
        kernel = torch.cat(parts)[self.order] if self.further else parts[0]
        bias = None if self.bias is None else (self.invariants @ self.bias).to(like.dtype)
        return kernel.to(like.dtype), bias

    def extra_repr(self) -> str:
        return f"size={self.size}"


class PatchEmbedding(_Patches):
    """A convolution of images ``(B, C, *space)`` by patches that do not overlap: ``(B, channels, *(n / size))``."""

    def forward(self, x: Tensor) -> Tensor:
        self.check_space(x.shape[2:])
        kernel, bias = self.kernel_and_bias(x)
        convolve = F.conv2d if x.dim() == 4 else F.conv3d
        return convolve(x, kernel.transpose(0, 1), bias, stride=self.size)

    def check_space(self, space: Sequence[int]) -> None:
        """Patches divide a grid of this shape."""
        check_grid(space)
        if any(n % self.size for n in space):
            raise ValueError(f"input: patches of {self.size} do not divide a grid of {'×'.join(map(str, space))}")


class PatchDecoder(_Patches):
    """A patch for each position of features ``(B, C, *space)``, without overlap: ``(B, channels, *(n · size))``."""

    def forward(self, x: Tensor) -> Tensor:
        check_grid(x.shape[2:])
        kernel, bias = self.kernel_and_bias(x)
        convolve = F.conv_transpose2d if x.dim() == 4 else F.conv_transpose3d
        return convolve(x, kernel, bias, stride=self.size)


class PositionEmbedding(ExactBuffers):
    """Adds a learned function of the position to features ``(B, size, *space)``, or ``(N, size)`` at points.

    It is an encoding, bound with one head and one pose, of points in units of ``length_scale``, and ``project_out``.
    """

    inverse_action: Tensor

    def __init__(self, encoding: Encoding, project_out: FromPoses, inverse_action: np.ndarray, length_scale: float):
        super().__init__()
        self.encoding = encoding
        self.project_out = project_out
        self.length_scale = length_scale
        self.register_exact("inverse_action", inverse_action)

    def forward(
        self, x: Tensor, coords: Tensor | None = None, batch: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """Features with their positions: see :meth:`escnn_attention.PositionEmbedding.forward`."""
        if coords is None:
            grid = Grid(tuple(x.shape[2:]), Window(), dtype=self.inverse_action.dtype, device=x.device)
            field = self._field(grid.coordinates).to(x.dtype)
            return x + field.T.unflatten(1, x.shape[2:])
        precise = coords.to(PRECISE[self.inverse_action.dtype])
        offsets = offsets_from_mean(precise, batch, count_clouds(batch, coords, mask), mask)
        y = x + self._field((offsets / self.length_scale).to(self.inverse_action.dtype)).to(x.dtype)
        return y if mask is None else torch.where(mask[:, None], y, 0.0)

    def _field(self, points: Tensor) -> Tensor:
        """The field at points ``(N, d)``: ``(N, size)``."""
        seen = self.encoding.offsets(points @ self.inverse_action.transpose(-1, -2))  # 1, |H|, N, C
        assert seen is not None
        field: Tensor = self.project_out(seen.transpose(1, 2).unsqueeze(1))
        return field.squeeze(0)
