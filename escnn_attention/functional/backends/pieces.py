r"""The passes of the attention over tiles, in pieces that stay in the cache.

Reading and writing scores is what costs, so the scores of a few tiles of one head are worked on at a time, in buffers
that are used over and over, and the backward pass makes them again from the logarithms of their sums. Every other trick
saves a pass over them:

- Scores are in units of log 2, because :math:`2^x` is the cheapest exponential, and the largest of a row is
  subtracted only where the sums say that one overflowed.
- Constants in a few more channels let a product do more than one thing. Queries have 1 and :math:`-\log_2` of the sum;
  keys have a large negative number outside the grid, and 1; values have 1, which makes the sum, and meets minus
  :math:`\langle dO, O\rangle` in the gradient of the softmax.
- The function of the offset is a product of the queries at one place of a tile with the offsets to its halo; the scores
  of all key poses start from it, and the query poses of a place share it.
- With ``query="all"`` the probabilities are summed over the query poses before they meet the values, and the gradients
  of the scores over the output poses before they meet the keys. The exponentials of the content are shared by all
  output poses, and multiplied with those of their terms, where queries and keys are short enough for neither to
  overflow.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from escnn_attention.functional.backends.grid_loop import LOG2E, Arguments
from escnn_attention.functional.backends.tiles import Chunks, Piece, Tiles, chunks_of, tile_counts, tiles_of

__all__ = ["backward_pass", "empty_sums", "forward_pass"]


def _padded(call: Arguments) -> list[int]:
    """The shape of a buffer for whole tiles of queries."""
    if call.kernel_size:
        size = _tile_size(call.kernel_size)
        return [call.dilation * size * n for n in tile_counts(call.shape, call.dilation, size)]
    return _chunks(call).padded(0)


def _chunks(call: Arguments) -> Chunks:
    """Stretches of queries, where everything is seen."""
    positions = call.q.shape[3]
    return chunks_of(positions, call.q.shape[2] * call.k.shape[2] * positions, call.chunk)


class _Call:
    """What the passes of one call work with.

    Rows of a tile are its query poses and queries, columns its key poses and the places of its halo. The output poses
    are the frames in which a tile is seen: one by one if each has all query poses, and else all together, each row in
    the frame of its own pose.
    """

    def __init__(self, arguments: Arguments):
        q, k = self.q, self.k = arguments.q, arguments.k
        self.v, self.spatial, self.pose = arguments.v, arguments.spatial, arguments.pose
        self.cos, self.sin, self.readout = arguments.cos, arguments.sin, arguments.readout
        self.num_poses, self.summed, self.dropout = arguments.num_poses, arguments.summed, arguments.dropout
        self.everything, self.limit = arguments.kernel_size == 0, arguments.chunk
        self.tiles = _chunks(arguments) if self.everything else _tiles(arguments)
        self.num_images, self.num_heads, self.query_poses, _, self.channels = q.shape
        self.key_poses = k.shape[2]
        self.num_queries, self.num_places = self.tiles.rows.shape
        self.rows, self.columns = self.query_poses * self.num_queries, self.key_poses * self.num_places
        self.num_frames = self.num_poses if self.summed else 1
        # What is added to the scores of a row is a product with a table, of the offsets and then of the key poses. A
        # table belongs to a frame, and in a window to a place of the tile.
        self.num_tables = (1 if self.summed else self.num_poses) * (1 if self.everything else self.num_queries)
        self.table_size = self.num_places + (0 if self.pose is None else self.key_poses)
        self.width, self.value_width = _width(self.channels + 2), _width(self.channels + 1)
        # Queries are followed by what waves make of them.
        self.num_waves = 0 if self.cos is None else self.cos.shape[-1]
        self.query_width = self.width + 2 * self.num_waves
        self.has_terms = any(t is not None for t in (self.spatial, self.pose, self.cos)) or not self.everything
        self.masked = -1e30 if q.dtype == torch.float32 else -1e300
        self.seed = 0 if arguments.seed is None else int(arguments.seed)
        self.generator = torch.Generator()
        self.words = torch.empty(0, dtype=torch.int64)
        self.buffers: dict[str, Tensor] = {}

    def work(self, backward: bool) -> Iterator[tuple[int, slice, _Images, _Head]]:
        """The heads and, for each, the images that are worked on together."""
        images, pieces = self.tiles.pieces(self.num_images, self.rows * self.columns, self.limit)
        places = {n: _Images(self, n, pieces, backward) for n in {i.stop - i.start for i in images}}
        try:
            for number in range(self.num_heads):
                head = _Head(self, number)
                for some in images:
                    yield number, some, places[some.stop - some.start], head
        finally:
            # Images and pieces refer to each other, and would keep all buffers until garbage is collected.
            for place in places.values():
                place.pieces.clear()

    def take(self, name: str, *shape: int) -> Tensor:
        """A buffer that is used over and over: fresh memory is filled many times more slowly than cached memory."""
        size = math.prod(shape)
        if name not in self.buffers or self.buffers[name].numel() < size:
            self.buffers[name] = self.q.new_empty(size)
        return self.buffers[name][:size].view(shape)

    def drop(self, shape: torch.Size, place: tuple[int, ...]) -> Tensor:
        """What dropout multiplies probabilities with: the same in both passes.

        16 random bits decide about a probability, which takes a quarter of the time of torch's Bernoulli numbers. The
        rate is thereby rounded to a multiple of 2⁻¹⁶; what is kept is divided by its exact complement.
        """
        self.generator.manual_seed(hash((self.seed, *place)) % 2**63)
        size = math.prod(shape)
        words = -(-size // 4)
        if len(self.words) < words:
            self.words = torch.empty(words, dtype=torch.int64)
        bits = self.words[:words].random_(-(2**63), None, generator=self.generator).view(torch.int16)[:size]
        dropped = min(round(self.dropout * 2**16), 2**16 - 1)
        mask = self.take("mask", *shape)
        torch.ge(bits.view(shape), dropped - 2**15, out=mask)
        return mask.mul_(2**16 / (2**16 - dropped))


class _Head:
    """What the function of the offset and the poses add to the scores of one head, as tables, and their gradients."""

    def __init__(self, call: _Call, number: int):
        self.call, self.number = call, number
        rows, c, w = call.tiles.rows, call.channels, call.width

        def pick(table: Tensor | None) -> Tensor | None:
            return None if table is None else _of_head(table, number)

        spatial, pose, self.cos, self.sin, self.readout = map(
            pick, (call.spatial, call.pose, call.cos, call.sin, call.readout)
        )
        places = 1 if call.everything else call.num_queries
        table = call.q.new_zeros(call.num_poses, places, call.table_size, call.query_width)
        offsets, poses = table.split([call.num_places, call.table_size - call.num_places], dim=2)
        if spatial is not None:
            offsets[..., :c] = spatial[:, rows.clamp(min=0)]
        if not call.everything:
            offsets[..., c] = call.masked * (rows < 0).to(table.dtype)
        if self.cos is not None:
            assert self.sin is not None
            assert self.readout is not None
            offsets[:, 0, :, w:] = torch.cat([self.cos, self.sin], dim=-1)
            self.grad_cos, self.grad_sin = torch.zeros_like(self.cos), torch.zeros_like(self.sin)
            self.grad_readout = torch.zeros_like(self.readout)
        if pose is not None:
            poses[..., :c] = pose.unsqueeze(1)
        # For each frame ``(tables, offsets and poses, width)``.
        self.table = table if call.summed else table.flatten(0, 1).unsqueeze(0)
        self.grad = torch.zeros_like(self.table.transpose(2, 3), memory_format=torch.contiguous_format)
        # No score of a query is longer than it times this; a sum of waves is largest where they all agree.
        self.longest = sum(float(_longest(t)) for t in (spatial, pose) if t is not None)
        if self.readout is not None:
            self.longest += math.sqrt(call.num_waves) * float(torch.linalg.vector_norm(self.readout))

    def add_gradients(
        self,
        spatial: Tensor | None,
        pose: Tensor | None,
        cos: Tensor | None,
        sin: Tensor | None,
        readout: Tensor | None,
    ) -> None:
        """Add the gradients of the terms, in the shapes of a head, once all pieces are done."""
        call, c = self.call, self.call.channels
        rows = call.tiles.rows.flatten()
        grad = self.grad.view(call.num_poses, -1, call.query_width, call.table_size).transpose(2, 3)
        offsets, poses = grad.split([call.num_places, call.table_size - call.num_places], dim=2)
        if spatial is not None:
            of_rows = offsets[..., :c].flatten(1, 2)
            spatial.index_add_(1, rows[rows >= 0], of_rows[:, rows >= 0], alpha=1 / LOG2E)
        if pose is not None:
            pose.add_(poses[..., :c].sum(1), alpha=1 / LOG2E)
        if cos is not None and sin is not None and readout is not None:
            of_cos, of_sin = offsets[:, 0, :, call.width :].chunk(2, dim=-1)
            cos.add_(self.grad_cos.add_(of_cos), alpha=1 / LOG2E)
            sin.add_(self.grad_sin.add_(of_sin), alpha=1 / LOG2E)
            readout.add_(self.grad_readout, alpha=1 / LOG2E)


class _Images:
    """Padded buffers for one head of some images, of which the pieces are views."""

    def __init__(self, call: _Call, number: int, pieces: list[Piece], backward: bool):
        self.call, tiles = call, call.tiles
        outer, inner = tiles.padded(tiles.radius), tiles.padded(0)
        self.q = call.q.new_zeros(number, call.query_poses, *inner, call.query_width)
        self.k_v = call.q.new_zeros(number, call.key_poses, *outer, call.width + call.value_width)
        k, v = self.k_v.split([call.width, call.value_width], dim=-1)
        self.inner_q, self.inner_k, self.inner_v = (
            tiles.inner(self.q, 0),
            *(tiles.inner(t, tiles.radius) for t in (k, v)),
        )
        c = call.channels
        self.inner_q[..., c] = 1
        k[..., c], k[..., c + 1] = call.masked, 1
        self.inner_k[..., c] = 0
        self.inner_v[..., c] = 1
        self.sums = call.q.new_zeros(number, call.num_frames, call.query_poses, *inner)
        self.out = call.q.new_zeros(number, call.num_poses, *inner, call.value_width)
        if backward:
            self.grad_q = torch.empty_like(self.q)
            self.grad_k, self.grad_v = (call.q.new_empty(*t.shape) for t in (k, v))
        self.pieces = [_Piece(self, piece, backward) for piece in pieces]

    def load(self, head: _Head, images: slice) -> None:
        """Queries, keys and values. What is not on the grid, and the constants, are there from the last time."""
        call = self.call
        for x, inner in ((call.q, self.inner_q), (call.k, self.inner_k), (call.v, self.inner_v)):
            inner[..., : call.channels] = x[images, head.number].unflatten(2, call.tiles.shape)
        self.factorised = False
        if call.summed:
            queries, keys = (float(_longest(t[..., : call.channels])) for t in (self.inner_q, self.inner_k))
            self.factorised = queries * (keys + head.longest) < (100 if call.q.dtype == torch.float32 else 800)

    def load_gradient(self, grad: Tensor, out: Tensor, sums: Tensor) -> None:
        """The gradient of the output, in its place."""
        call = self.call
        c, shape, inner = call.channels, call.tiles.shape, call.tiles.inner(self.out, 0)
        inner[..., :c] = grad.unflatten(2, shape)
        self.sums.copy_(sums)
        if not call.summed:
            # Queries times keys then is the logarithm of the probability, and gradients times values are dP − D.
            torch.neg(self.sums[:, 0], out=self.q[..., c + 1])
            torch.neg((grad * out).sum(-1).unflatten(2, shape), out=inner[..., c])
        self.grad_k.zero_()
        self.grad_v.zero_()

    def store_output(self, target: Tensor) -> None:
        """The features divided by their sum, to ``(b, H, N, C)``."""
        inner, c = self.call.tiles.inner(self.out, 0), self.call.channels
        torch.div(inner[..., :c], inner[..., c : c + 1], out=target.unflatten(2, self.call.tiles.shape))

    def store(self, target: Tensor, buffer: Tensor, margin: int) -> None:
        """The features in a buffer, to ``(b, P, N, C)``."""
        inner = self.call.tiles.inner(buffer, margin)
        target.unflatten(2, self.call.tiles.shape).copy_(inner[..., : self.call.channels])


class _Piece:
    """t tiles, with all views of buffers that working on them takes: making views costs more than small products."""

    def __init__(self, images: _Images, piece: Piece, backward: bool):
        self.call = call = images.call
        tiles, c, take = call.tiles, call.channels, call.take
        self.images, self.place = images, tuple(s.start for s in piece)

        def part(buffer: Tensor, margin: int) -> Tensor:
            return tiles.view(buffer, margin)[(slice(None), *piece)]

        self.q_there, self.k_v_there = part(images.q, 0), part(images.k_v, tiles.radius)
        self.q_here, self.k_v_here = take("q", *self.q_there.shape), take("k v", *self.k_v_there.shape)
        self.all_q = self.q_here.view(-1, call.rows, call.query_width)
        self.q = self.all_q[..., : call.width]
        t = len(self.q)
        self.k, self.v = self.k_v_here.view(t, call.columns, -1).split([call.width, call.value_width], dim=-1)
        self.k_turned, self.v_turned = self.k.transpose(1, 2), self.v.transpose(1, 2)
        self.q_by_table = self.by_table(self.all_q)
        self.added = take("added", *self.q_by_table.shape[:2], call.table_size)
        self.offset, self.pose = self.added.split([call.num_places, call.table_size - call.num_places], dim=-1)
        self.scores = take("scores", t, call.rows, call.columns)
        self.sums_there = [part(images.sums[:, i].unsqueeze(-1), 0) for i in range(call.num_frames)]
        self.start = self.by_key_pose(self.scores)
        if call.num_waves:
            first = piece[0].start * tiles.size
            self.stretch = slice(first, min(first + tiles.size, tiles.shape[0]))
            self.wide = self.by_position(self.all_q)[..., call.width :]
        if call.summed:
            self.summed = take("summed", t, call.num_poses * call.num_queries, call.columns)
            self.summed_by_frame = self.summed.view(t, call.num_poses, call.num_queries, call.columns).unbind(1)
            self.scores_by_pose = self.scores.view(t, call.query_poses, call.num_queries, call.columns)
            self.content = take("content", *self.scores.shape)
            self.content_by_table = self.by_key_pose(self.content)
        self.out = take("out", t, call.num_poses * call.num_queries, call.value_width)
        self.out_there = part(images.out, 0)
        self.out_here = self.out.view(self.out_there.shape)
        if not backward:
            return
        self.minus_sums = self.q[..., c + 1].view(self.sums_there[0].shape[:-1])
        self.grad = take("grad", *self.scores.shape)
        self.all_grad_q = take("grad_q", *self.all_q.shape)
        self.grad_q = self.all_grad_q[..., : call.width]
        self.grad_q_by_table = self.by_table(self.all_grad_q)
        self.grad_q_there = part(images.grad_q, 0)
        self.grad_k = take("grad_k", t, call.columns, call.width)
        self.grad_v = take("grad_v", t, call.columns, call.value_width)
        self.additions = [
            pair
            for buffer, mine in ((images.grad_k, self.grad_k), (images.grad_v, self.grad_v))
            for pair in tiles.overlaps(buffer, mine, piece, tiles.radius)
        ]
        if call.summed:
            self.total = take("total", *self.scores.shape)
            self.grad_p = take("grad_p", *self.summed.shape)
            self.grad_p_by_frame = self.grad_p.view(t, call.num_poses, 1, call.num_queries, call.columns).unbind(1)

    def by_table(self, rows: Tensor) -> Tensor:
        """Rows ``(t, R, width)`` with those together that have one table, ``(tables, rows, width)``."""
        number, width = self.call.num_tables, rows.shape[-1]
        # Over everything a table is that of a query pose, in a window that of a place, which every tile has.
        return rows.view(number, -1, width) if self.call.everything else rows.view(-1, number, width).transpose(0, 1)

    def by_key_pose(self, scores: Tensor) -> Tensor:
        """Scores ``(t, R, P · S)`` as ``(tables, rows, P, S)``."""
        return self.by_table(scores).unflatten(-1, (self.call.key_poses, self.call.num_places))

    def gather(self, head: _Head) -> None:
        self.q_here.copy_(self.q_there)
        self.k_v_here.copy_(self.k_v_there)
        if self.images.factorised:
            torch.bmm(self.q, self.k_turned, out=self.content).exp2_()
        if head.readout is not None:
            self.amplitudes = self.by_position(self.all_q)[..., : self.call.channels] @ head.readout

    def score(self, head: _Head, frame: int) -> Tensor:
        """The scores in units of log 2."""
        if not self.call.has_terms:
            return torch.bmm(self.q, self.k_turned, out=self.scores)
        if self.call.num_waves:
            self.widen(head, frame)
        torch.bmm(self.q_by_table, head.table[frame].transpose(1, 2), out=self.added)
        if self.call.pose is None:
            self.start.copy_(self.offset.unsqueeze(2).expand_as(self.start))
        else:
            torch.add(self.offset.unsqueeze(2), self.pose.unsqueeze(3), out=self.start)
        return self.scores.baddbmm_(self.q, self.k_turned)

    def product(self, head: _Head, frame: int, logarithm: Tensor | None = None) -> Tensor:
        """The exponentials as products of those of the content, which all frames share, and of the terms.

        With the logarithms of their sums ``(t, R, 1)`` they are probabilities.
        """
        if self.call.num_waves:
            self.widen(head, frame)
        torch.bmm(self.q_by_table, head.table[frame].transpose(1, 2), out=self.added)
        if logarithm is not None:
            smaller = self.offset if self.call.pose is None else self.pose
            smaller.sub_(self.by_table(logarithm))
        self.added.exp2_()
        torch.mul(self.content_by_table, self.offset.unsqueeze(2), out=self.start)
        if self.call.pose is not None:
            self.start.mul_(self.pose.unsqueeze(3))
        return self.scores

    def widen(self, head: _Head, frame: int) -> None:
        """Queries as waves see them: turned by the phase of their own position."""
        a, b, cos, sin = self.waves(head, frame)
        of_cos, of_sin = self.wide.chunk(2, dim=-1)
        torch.sub(a * cos, b * sin, out=of_cos)
        torch.add(a * sin, b * cos, out=of_sin)

    def waves(self, head: _Head, frame: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Amplitudes of the queries, ``(J, n, F)``, and cosine and sine at their positions, ``(J or 1, n, F)``."""
        assert head.cos is not None
        assert head.sin is not None
        (a, b), here = self.amplitudes.chunk(2, dim=-1), self.frames(frame)
        return a, b, head.cos[here], head.sin[here]

    def frames(self, frame: int) -> tuple[slice, slice]:
        """The frame, or those of all rows, and the stretch of queries, in a table ``(H, N, ...)``."""
        return slice(frame, frame + 1) if self.call.summed else slice(None), self.stretch

    def by_position(self, rows: Tensor) -> Tensor:
        """Rows ``(1, R, width)`` of a stretch without what fills it up, ``(J, n, width)``."""
        number = self.stretch.stop - self.stretch.start
        return rows[0].view(self.call.query_poses, self.call.num_queries, -1)[:, :number]

    def widen_backward(self, head: _Head, frame: int, grad: Tensor) -> None:
        """From the gradient of what waves made of the queries, ``(J, n, 2F)``, to queries and waves."""
        assert head.readout is not None
        a, b, cos, sin = self.waves(head, frame)
        grad_a, grad_b = grad.chunk(2, dim=-1)
        for target, value in ((head.grad_cos, grad_a * a + grad_b * b), (head.grad_sin, grad_b * a - grad_a * b)):
            target[self.frames(frame)].add_(value.sum(0, keepdim=True) if self.call.summed else value)
        amplitudes = torch.cat([grad_a * cos + grad_b * sin, grad_b * cos - grad_a * sin], dim=-1)
        c = self.call.channels
        self.by_position(self.all_grad_q)[..., :c].add_(amplitudes @ head.readout.T)
        queries = self.by_position(self.all_q)[..., :c]
        head.grad_readout.add_(queries.flatten(0, 1).T @ amplitudes.flatten(0, 1))

    def exponentials(self, head: _Head, frame: int) -> tuple[Tensor, Tensor]:
        """Numbers in proportion to the probabilities and their sums, of which the logarithms are noted."""
        p = self.product(head, frame) if self.images.factorised else self.score(head, frame).exp2_()
        total = p.sum(-1, keepdim=True)
        logarithm = total.log2()
        if not _moderate(logarithm):
            shift = self.score(head, frame).amax(-1, keepdim=True)
            p.sub_(shift).exp2_()
            total = p.sum(-1, keepdim=True)
            logarithm = total.log2().add_(shift)
        self.sums_there[frame].copy_(logarithm.view(self.sums_there[frame].shape))
        return p, total

    def forward(self, head: _Head, place: tuple[int, ...]) -> None:
        call = self.call
        self.gather(head)
        for frame in range(call.num_frames):
            p, total = self.exponentials(head, frame)
            if call.dropout:
                p.mul_(call.drop(p.shape, (*place, *self.place, frame)))
            if call.summed:
                weights = total.reciprocal_().view(*self.scores_by_pose.shape[:3], 1).unbind(1)
                _add_up(self.scores_by_pose.unbind(1), self.summed_by_frame[frame], weights)
        torch.bmm(self.summed if call.summed else p, self.v, out=self.out)
        self.out[..., call.channels] = 1 if call.summed else total.squeeze(-1)
        self.out_there.copy_(self.out_here)

    def backward(self, head: _Head, place: tuple[int, ...]) -> None:
        call = self.call
        self.gather(head)
        self.out_here.copy_(self.out_there)  # The gradient of the output is where the output was.
        self.all_grad_q.zero_()
        place = (*place, *self.place)
        grad, p = self._backward_all(head, place) if call.summed else self._backward_own(head, place)
        if call.num_waves:
            self.grad_q.add_(torch.bmm(grad, self.k))
        else:
            self.grad_q.baddbmm_(grad, self.k)
        self.grad_q_there.copy_(self.all_grad_q.view(self.grad_q_there.shape))
        torch.bmm(grad.transpose(1, 2), self.q, out=self.grad_k)
        torch.bmm(p.transpose(1, 2), self.out, out=self.grad_v)
        for there, here in self.additions:
            there.add_(here)

    def _backward_own(self, head: _Head, place: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """The gradient of the scores, and the probabilities that met the values."""
        call, c = self.call, self.call.channels
        p = kept = self.score(head, 0).exp2_()
        if call.dropout:
            minus_inner = self.out[..., c : c + 1].clone()
            self.out[..., c] = 0
            mask = call.drop(p.shape, (*place, 0))
            torch.bmm(self.out, self.v_turned, out=self.grad).mul_(mask).add_(minus_inner)
            kept = mask.mul_(p)
        else:
            torch.bmm(self.out, self.v_turned, out=self.grad)
        self.grad.mul_(p)
        self._backward_terms(head, 0, self.grad)
        return self.grad, kept

    def _backward_all(self, head: _Head, place: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """The backward pass of all query poses: summed over the output poses, and over the query poses."""
        call, p = self.call, self.scores_by_pose
        torch.bmm(self.out, self.v_turned, out=self.grad_p)
        for frame in range(call.num_frames):
            logarithm = self.sums_there[frame]
            if self.images.factorised:
                self.product(head, frame, logarithm.reshape(len(p), -1, 1))
            else:
                torch.neg(logarithm.squeeze(-1), out=self.minus_sums)
                self.score(head, frame).exp2_()
            grad = (self.grad if frame else self.total).view(p.shape)
            torch.mul(p, self.grad_p_by_frame[frame], out=grad)
            kept = p
            if call.dropout:
                mask = call.drop(p.shape, (*place, frame))
                grad.mul_(mask)
                kept = mask.mul_(p)
            grad.addcmul_(p, grad.sum(-1, keepdim=True), value=-1)
            _add_up(kept.unbind(1), self.summed_by_frame[frame])
            self._backward_terms(head, frame, grad)
            if frame:
                self.total.add_(self.grad)
        return self.total, self.summed

    def _backward_terms(self, head: _Head, frame: int, grad: Tensor) -> None:
        """Add what the gradient of the scores means for the tables, and by them for the queries."""
        call, table = self.call, head.table[frame]
        if call.spatial is None and call.pose is None and call.cos is None:
            return
        by_key_pose = self.by_key_pose(grad.view(self.scores.shape))
        # Slab by slab: a reduction of an axis that is not the last takes several times longer.
        _add_up(by_key_pose.unbind(2), self.offset)
        if call.pose is not None:
            self.pose.copy_(by_key_pose.sum(-1))
        product = torch.bmm(self.added, table)
        self.grad_q_by_table.add_(product)
        head.grad[frame].baddbmm_(self.q_by_table.transpose(1, 2), self.added)
        if call.num_waves:
            self.widen_backward(head, frame, self.by_position(product.view(self.all_q.shape))[..., call.width :])


def forward_pass(arguments: Arguments) -> tuple[Tensor, Tensor]:
    """The output ``(B, M, H, N, C)``, and the logarithms of the sums ``(B, M, frames, J, *padded)``."""
    call = _Call(arguments)
    out, sums = empty_output(arguments), empty_sums(arguments)
    for number, some, images, head in call.work(backward=False):
        images.load(head, some)
        for piece in images.pieces:
            piece.forward(head, (number, some.start))
        images.store_output(out[some, number])
        sums[some, number] = images.sums
    return out, sums


def backward_pass(arguments: Arguments, grad: Tensor, out: Tensor, sums: Tensor) -> list[Tensor | None]:
    """The gradients of the tensors among the arguments, from queries to waves."""
    call = _Call(arguments)
    grad_q, grad_k, grad_v, *terms = empty_gradients(arguments)
    assert grad_q is not None
    assert grad_k is not None
    assert grad_v is not None
    for term in terms:
        if term is not None:
            term.zero_()
    radius = call.tiles.radius
    for number, some, images, head in call.work(backward=True):
        images.load(head, some)
        images.load_gradient(grad[some, number], out[some, number], sums[some, number])
        for piece in images.pieces:
            piece.backward(head, (number, some.start))
        images.store(grad_q[some, number], images.grad_q.div_(LOG2E), 0)
        images.store(grad_k[some, number], images.grad_k.div_(LOG2E), radius)
        images.store(grad_v[some, number], images.grad_v, radius)
        if some.stop == call.num_images:
            head.add_gradients(*(None if t is None else _of_head(t, number) for t in terms))
    return [grad_q, grad_k, grad_v, *terms]


def empty_sums(arguments: Arguments) -> Tensor:
    """Room for the logarithms of the sums ``(B, M, frames, J, *padded)``."""
    q = arguments.q
    frames = arguments.num_poses if arguments.summed else 1
    return q.new_empty(*q.shape[:2], frames, q.shape[2], *_padded(arguments))


def _add_up(slabs: Sequence[Tensor], out: Tensor, weights: Sequence[Tensor] | None = None) -> None:
    """The sum of the slabs, each times its weight."""
    if weights is not None:
        torch.mul(slabs[0], weights[0], out=out)
        for slab, weight in zip(slabs[1:], weights[1:], strict=True):
            out.addcmul_(slab, weight)
    elif len(slabs) == 1:
        out.copy_(slabs[0])
    else:
        torch.add(slabs[0], slabs[1], out=out)
        for slab in slabs[2:]:
            out.add_(slab)


def _of_head(table: Tensor, head: int) -> Tensor:
    """The table of a head, among those of all or one that all share."""
    return table[head if len(table) > 1 else 0]


def _longest(vectors: Tensor) -> Tensor:
    return torch.linalg.vector_norm(vectors, dim=-1).amax() if vectors.numel() else vectors.new_zeros(())


def _width(channels: int) -> int:
    """Channels are padded to a multiple of 8: products of other widths are several times slower."""
    return -(-channels // 8) * 8


def _moderate(logarithm: Tensor) -> bool:
    """Whether no exponential came near the largest number, and the largest of each row not near the smallest."""
    low, high = torch.aminmax(logarithm)
    limit = 60 if logarithm.dtype == torch.float32 else 500
    return bool(low > -limit and high < limit)


def _tile_size(kernel_size: int) -> int:
    # Neighbouring queries share most of their keys. Larger tiles read fewer of them and compute more scores in vain.
    return 1 if kernel_size == 1 else 2


def _tiles(arguments: Arguments) -> Tiles:
    size, window = arguments.kernel_size, arguments.window
    return tiles_of(tuple(arguments.shape), size, window, arguments.dilation, _tile_size(size))


def empty_output(call: Arguments) -> Tensor:
    """Room for the output, as projections read it."""
    batch, heads, _, positions, channels = call.q.shape
    return call.q.new_empty(heads, batch, positions, call.num_poses, channels).permute(1, 0, 3, 2, 4)


def empty_gradients(call: Arguments) -> list[Tensor | None]:
    """Room for the gradients of the leaves, as projections read them."""

    def room(t: Tensor) -> Tensor:
        batch, heads, poses, positions, channels = t.shape
        return t.new_empty(heads, batch, positions, poses, channels).permute(1, 0, 3, 2, 4)

    return [
        *(room(t) for t in (call.q, call.k, call.v)),
        *(None if t is None else torch.empty_like(t) for t in call.leaves[3:]),
    ]
