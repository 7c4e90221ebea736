"""Group self-attention and its lifting layer, on grids."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from escnn.group import GroupElement
from escnn.gspaces import GSpace
from escnn.nn import FieldType, GeometricTensor
from torch import Tensor
from typing_extensions import Unpack

from escnn_attention._checks import check_bool, check_int
from escnn_attention.encodings import Encoding, PairKernel, as_encoding
from escnn_attention.functional import ON_GRIDS, KeyMode, QueryMode
from escnn_attention.functional.call import Normalization
from escnn_attention.geometry.orbits import Orbits
from escnn_attention.geometry.windows import Window
from escnn_attention.groups.fibers import Fibers, fibers, mass, subgroup_id
from escnn_attention.groups.lie_algebra import random_transformation
from escnn_attention.groups.samples import Samples, as_samples
from escnn_attention.nn.arguments import (
    REQUIRED,
    GridOptions,
    PaddingMode,
    Subgroup,
    WindowOptions,
    check_options,
    check_type,
    check_types,
    choose_window,
    option_names,
    shown,
)
from escnn_attention.nn.field_convolution import export_parts, field_convolution
from escnn_attention.nn.heads import (
    Heads,
    check_poses,
    check_scalars,
    check_weights,
    is_scalar,
    shown_heads,
)
from escnn_attention.nn.module import MaskedModule, check_input, check_mask
from escnn_attention.plain.projections import AttentionMode, GroupTables, padded, with_registers
from escnn_attention.plain.self_attention import FieldConvolution, Resampling, SelfAttention


def sees_scalars(in_type: FieldType, encoding: Encoding, heads: Heads, query: QueryMode, keys: KeyMode) -> bool:
    """Whether keys differ from pose to pose by a summand of the scores only, which is the same at all positions.

    Against values without a pose such a summand drops out of the softmax. Rotary encodings rotate the term of the pose,
    absolute ones add it to queries of several poses, too.
    """
    added = not encoding.rotates or keys == "own"
    drops_out = query == "own" if encoding.absolute else added
    return is_scalar(in_type) and heads.group.order > 1 and drops_out


def tables_of(group: Fibers, num_poses: int, registers: int, *, poses: bool, weighs: bool) -> GroupTables:
    """The tables of a group for a layer whose keys have ``num_poses``, registers included.

    ``poses``: whether keys have a term of the pose; ``weighs``: whether their measure matters.
    """
    return GroupTables(
        group.inverse_action,
        quotient=with_registers(group.quotient, registers) if poses and group.samples is None else None,
        relative=padded(group.relative, num_poses) if poses and num_poses > 1 else None,
        log_measure=padded(group.log_measure, num_poses) if weighs else None,
        stabilizer=group.stabilizer,
    )


def check_shared(
    shared_scores: bool, query: QueryMode, keys: KeyMode, encoding: Encoding | PairKernel, group: Fibers
) -> bool:
    """Whether all poses attend by the sum of their scores, if they may."""
    if not check_bool("shared_scores", shared_scores):
        return False
    if (query, keys) != ("own", "own"):
        raise ValueError(f'shared_scores: got True with query={query!r} and keys={keys!r}, needed "own" of both')
    if isinstance(encoding, PairKernel) or not encoding.adds_to_keys or encoding.has_start:
        raise ValueError(
            f"shared_scores: got True, but a {type(encoding).__name__} is evaluated per pose; needed an encoding "
            "that is added to the keys: mlp, separable, fourier, none"
        )
    if group.samples is not None:
        raise ValueError("shared_scores: got True, but samples of a continuous group; leave it at False")
    return True


def has_pose_term(encoding: Encoding, query: QueryMode, keys: KeyMode, *, lifts: bool) -> bool:
    """Whether the encoding has a term of the pose, which differs from key to key.

    Where a query sees keys of one pose it is the same for all of them; absolute encodings add it to queries, whose bias
    covers one pose.
    """
    return not lifts and (keys == "all" or (encoding.absolute and query == "all"))


def query_weight(out_type: FieldType, group: Fibers, query: QueryMode, *, lifts: bool) -> float:
    """The factor of the sum over the query poses, which together weigh as many poses as there are."""
    if query == "own":
        return 1.0
    if not lifts:
        check_weights(group)
    whole = mass(out_type) if group.cosets is None else group.order
    return whole / (1 if lifts else group.order)


def bind(encoding: Encoding, heads: Heads, window: Window, num_poses: int) -> Encoding:
    """The encoding for these heads, and keys of so many poses."""
    group = heads.group
    relative = group.relative if num_poses > 1 else None
    features = 0 if relative is None else torch.tensor(padded(relative, num_poses))
    orbits = _orbits(heads, window, num_poses)
    return encoding.bind(group.dimension, heads.number, heads.channels, num_poses, features, orbits)


def _orbits(heads: Heads, window: Window, num_poses: int) -> Orbits | None:
    """The places that heads can look at: one of each orbit, or all where projections do not distinguish poses."""
    group = heads.group
    if group.samples is not None or not group.dimension:
        return None
    ball = not group.preserves_square
    if heads.projection == "pointwise":
        return Orbits(window, np.eye(group.dimension)[None], tuple(range(num_poses)), ball)
    own = int(group.quotient[0, 0]) if num_poses > 1 else 0
    return Orbits(window, group.action, (own,), ball)


def check_on_torus(encoding: Encoding, window: Window) -> None:
    """Check that an encoding is a function of the offset, on a torus of the shortest ones."""
    if window.circular and not encoding.adds_to_keys:
        raise ValueError(
            f'encoding: got a {type(encoding).__name__} with padding_mode="circular", whose frequencies or origin no '
            "torus keeps; needed one that is added to the keys: mlp, separable, fourier, convolutional, none"
        )


def flat_positions(positions: Sequence[Sequence[int]] | Sequence[int] | Tensor, shape: Sequence[int]) -> Tensor:
    """The numbers of positions ``(n, d)`` of a grid, or ``(n,)`` of points; negative ones count from the end."""
    given = torch.as_tensor(positions)
    if not given.numel() or given.is_floating_point():
        raise ValueError(f"positions: got {positions}, needed whole numbers, of one query or more")
    index = given.long().reshape(len(positions), -1)
    if index.shape[1] != len(shape):
        raise ValueError(f"positions: got {index.shape[1]} indices each, needed {len(shape)}")
    size = torch.tensor(shape, dtype=torch.long)
    if ((index < -size) | (index >= size)).any():
        raise ValueError(
            f"positions: got {index.tolist()}, needed indices below {tuple(shape)}, or negative ones from the end"
        )
    flat = torch.zeros(len(index), dtype=torch.long)
    for axis, n in enumerate(shape):
        flat = flat * n + index[:, axis] % n
    return flat


def pose_indices(
    poses: Sequence[int | GroupElement] | None, space: GSpace, samples: Samples | None, subgroup: Subgroup = None
) -> list[int] | None:
    """The indices of poses, or of cosets of a subgroup, given as elements or as indices; None for all."""
    if poses is None:
        return None
    group = fibers(space, samples, subgroup)

    def index_of(pose: int | GroupElement) -> int:
        if isinstance(pose, GroupElement):
            if pose.group != space.fibergroup:
                raise ValueError(f"poses: got an element of {pose.group.name}, needed {space.fibergroup.name}")
            if group.cosets is None and pose not in group.elements:
                raise ValueError(f"poses: got {pose}, which is none of the {group.order} samples of {pose.group.name}")
            return group.index(pose)
        if not hasattr(pose, "__index__") or not 0 <= operator.index(pose) < group.order:
            raise ValueError(f"poses: got {pose!r}, needed an element or an index from 0 to {group.order - 1}")
        return operator.index(pose)

    if not len(poses):
        raise ValueError("poses: got none, needed one or more, or None for all")
    return [index_of(pose) for pose in poses]


class GroupSelfAttention(MaskedModule):
    r"""Group self-attention: from any fields to any fields, equivariant to translations and to the fiber group H.

    For every output pose h, query :math:`(x, \tilde h)` and key :math:`(x', \hat h)`, with
    :math:`\Delta = x' - x` and heads of C channels:

    .. math::
        s_h(x, \tilde h; x', \hat h) &= \langle q(x, \tilde h),\; k(x', \hat h)
            + \rho(h^{-1}\Delta,\, h^{-1}\hat h) \rangle / \sqrt C \\
        \mathrm{out}(x, h) &= \sum_{\tilde h \in Q(h)} \; \sum_{(x', \hat h) \in N(x, \tilde h)}
            \mathrm{softmax}_{(x', \hat h)}(s_h) \; v(x', \hat h)

    and an equivariant projection of all heads to ``out_type``. Queries, keys and values are regular fields, computed
    from ``in_type`` by all equivariant pointwise maps, so scalar, vector, quotient and regular fields are supported as
    input and output. The positional encoding :math:`\rho` is a continuous function, evaluated at the offset in the
    frame of h.

    Scalar fields are the same in every pose. For trivial fields alone, keys of different poses differ only by the pose
    term of the encoding, which the softmax cancels:

    .. math::
        s_h(x; x') = \langle q(x),\; k(x') + \rho_x(h^{-1}\Delta) \rangle / \sqrt C, \qquad
        \mathrm{out}(x, h) = |Q(h)| \sum_{x' \in N(x)} \mathrm{softmax}_{x'}(s_h) \; v(x')

    There are :math:`|H|^2` times fewer content scores than for other fields. (With rotary encodings, unless
    ``keys="own"``, and with absolute ones, unless ``query="own"``, the term does not cancel.)

    This is Eq. 16 of GSA-Nets with the encoding at an invariant argument; as printed, it is not. Equivariance is exact
    under translations away from the border, and under every element of H that maps the grid onto itself, about its
    centre; one that swaps the sides maps features of shape (n, m) to features of shape (m, n).

    A continuous fiber group is represented by S samples :math:`h_s` (:class:`Samples`), with quadrature weights
    :math:`\mu_s` whose logarithms are added to the scores, and the pose term of the encoding is a network. The layer is
    exactly equivariant to a sampled subgroup, and to other elements up to an error that falls with S, on which no
    parameter depends.

    Args:
        in_type: the type of the input. Any fields, over any gspace.
        out_type: the type of the output, over the same gspace.
        num_heads: the number of heads.
        kernel_size: the odd width of the window in positions, or None for global attention, whose cost grows with the
            square of the positions; must be given. The output has the grid of the input. Omitted without a base space.
        head_fields: the number C of regular fields of a head. By default the regular fields of ``out_type`` divided by
            ``num_heads``, or, if it has none, the least number for which all heads have as many channels.
        query: the query poses Q(h) that contribute to a pose. ``"own"`` is h itself, at a cost in :math:`|H|^2`, the
            form of LieSelfAttention; ``"all"`` is H, at a cost in :math:`|H|^3`, the form of GSA-Nets.
        keys: the key poses that a query pose :math:`\tilde h` attends to: ``"all"``, or ``"own"``, only
            :math:`\tilde h` itself, at the cost of :math:`|H|` ordinary attentions.
        shared_scores: with ``query="own"`` and ``keys="own"``: whether all poses share one score, the sum of their
            scores, :math:`\sum_h \langle q(x, h),\, k(x', h) + \rho(h^{-1}\Delta) \rangle / \sqrt{C |H|}`, which is
            invariant. There are :math:`|H|` times fewer scores, as in transformers whose features are irreps.
        encoding: the positional encoding, as an object or as one of ``"mlp"``, ``"separable"``, ``"fourier"``,
            ``"rotary"``, ``"absolute"``, ``"convolutional"``, ``"none"``; None is :class:`MLPEncoding`.
        window: ``"square"``, ``"disc"`` (the disc or ball whose diameter is ``kernel_size``), or ``"auto"``: the square
            if the group preserves it (subgroups of D4 and of the full octahedral group), otherwise the disc.
        dilation: the step between the positions of the window.
        causal: over :func:`sequence_space` or :func:`space_time`: whether a query at time t attends to keys at times
            :math:`t' \le t` only, with ``kernel_size=n`` to the n last times, its own included; n is odd where there
            are axes of space, of which it is the width of the window.
        padding_mode: ``"none"``: there is nothing beyond the grid; or ``"circular"``: the grid is a torus, and
            :math:`\Delta` the shortest offset, or the encoding the mean over all shortest ones. The layer then commutes
            with all rolls. For groups that map the lattice onto itself, windows that fit into the torus, and encodings
            that are added to the keys. A causal time has no other side.
        is_causal: another name of ``causal``, that of ``torch.nn.MultiheadAttention``.
        stride: outputs are at every so many positions along each axis, from the first to the last, and equal those of
            ``stride=1`` there. Exact on sizes of which it divides :math:`n - 1`; others are refused when called. On a
            torus it is odd and divides the sides, and outputs are in the middle of every so many positions; the layer
            then commutes with rolls by its multiples.
        scale_factor: so many outputs along each axis in place of one: the grid is as much finer, of the same extent.
            Each has the query of the position in whose cell it lies, and offsets and windows about its own place.
            Exact on all sizes.
        projection: ``"group"`` for all equivariant pointwise maps, ``"pointwise"`` for maps that mix fields but not
            poses, as in the published GSA-Nets (regular fields only).
        dropout: the probability of dropping an attention weight in training.
        registers: the number of learned constant fields that queries also attend to: their keys and values are equal at
            every position and pose. With ``keys="all"``.
        qk_norm: whether queries and keys are divided by their root mean square over the channels of a head, at each
            pose, and multiplied by learned gains of each head and channel, which bounds the scores.
        bias: whether queries, keys, values and the output have biases, where these are invariant. Keys have a bias only
            where the softmax does not cancel it: with :class:`RotaryEncoding`, which rotates it by the offset, or with
            ``qk_norm`` or ``normalization="count"``.
        normalization: ``"softmax"``, or ``"count"``: scores divided by the measure of all keys, which may be negative.
            The cost then grows linearly with the number of positions. For global attention without ``dropout``, with an
            encoding that factorises: Fourier, rotary, absolute, none.
        projection_kernel_size: the odd width of a steerable convolution :math:`\psi` of escnn in front of the
            projections, which read :math:`\psi \star f` in place of f, so that queries, keys and values see the
            neighbours of their position; 1 for none. Beyond the grid are zeros, or the other side of a torus.
        projection_filters: the number of filters of each field, each of this field alone: a depthwise convolution. None
            for a single one from all fields to all.
        poses: the id of a subgroup K of a finite fiber group, as of ``gspace.quotient_repr``: queries, keys and values
            are functions on the cosets H/K, so that there are :math:`|K|` times fewer poses. The encoding is its mean
            :math:`\frac1{|K|}\sum_k \rho(k^{-1}\delta)`, with a table over the double cosets :math:`K h^{-1}\hat h K`;
            a rotary one has frequencies along the directions that K keeps. A field in which K keeps no vector is not
            read, and is zero in the output. None for all elements.
        backend: ``"auto"`` or a name from ``escnn_attention.functional.ON_GRIDS``.
        samples: for a continuous fiber group, its :class:`Samples` or their number, for example 8 in the plane and 24
            in space; None for a finite one.

    Shape:
        ``(B, in_type.size, *space)`` to ``(B, out_type.size, *space)``, or with ``stride`` or ``scale_factor`` to the
        grid of the outputs.

    Raises:
        TypeError: there is no ``kernel_size``.
        ValueError: heads that do not divide the fields, an even kernel, a window that the group does not preserve, or
            options that do not go together, as above; in the forward pass a window that reaches around the torus, a
            size that the stride does not fit.

    Example:
        >>> import torch
        >>> from escnn_attention import GroupSelfAttention
        >>> from escnn import gspaces, nn
        >>> g = gspaces.flipRot2dOnR2(4)
        >>> vectors = nn.FieldType(g, 3 * [g.irrep(1, 1)])
        >>> hidden = nn.FieldType(g, 8 * [g.regular_repr])
        >>> layer = GroupSelfAttention(vectors, hidden, num_heads=2, kernel_size=5)
        >>> layer(vectors(torch.randn(1, 6, 12, 12))).shape
        torch.Size([1, 64, 12, 12])

    Source: Romero and Cordonnier, "Group Equivariant Stand-Alone Self-Attention For Vision", ICLR 2021, Eq. 16; Bekkers
    et al., "Fast, Expressive SE(n) Equivariant Networks through Weight-Sharing in Position-Orientation Space", ICLR
    2024, for poses that are cosets; Hutchinson et al., "LieTransformer", ICML 2021, for ``query="own"``; Darcet et al.,
    "Vision Transformers Need Registers", ICLR 2024; Henry et al., "Query-Key Normalization for Transformers", 2020; Wu
    et al., "CvT: Introducing Convolutions to Vision Transformers", ICCV 2021, and Zaheer et al., "REViT:
    Roto-reflection Equivariant Convolutional Vision Transformer", ICML 2026, for projections with convolutions.
    """

    plain: SelfAttention

    _scalars_only = False
    """Whether the layer is for scalar fields only, whose encoding has no term for the poses."""

    def __init__(
        self,
        in_type: FieldType,
        out_type: FieldType,
        num_heads: int = 1,
        kernel_size: int | None = REQUIRED,
        *,
        query: QueryMode = "own",
        keys: KeyMode = "all",
        shared_scores: bool = False,
        encoding: Encoding | str | None = None,
        window: str = "auto",
        dilation: int = 1,
        causal: bool = False,
        padding_mode: PaddingMode = "none",
        dropout: float = 0.0,
        backend: str = "auto",
        samples: Samples | int | None = None,
        **options: Unpack[GridOptions],
    ):
        check_options(type(self).__name__, options, option_names(GroupSelfAttention))
        check_types(in_type, out_type)
        given: dict[str, Any] = {**options}
        normalization: Normalization = given.pop("normalization", "softmax")
        mode = AttentionMode(query, keys, dropout, ON_GRIDS.check(backend), shared_scores, normalization)
        causal = check_bool("is_causal", given.pop("is_causal", False)) or causal
        resizing = given.pop("stride", 1), given.pop("scale_factor", 1)
        filters = given.pop("projection_kernel_size", 1), given.pop("projection_filters", 1)
        whole, subgroup = fibers(in_type.gspace, as_samples(samples)), subgroup_id(given.pop("poses", None))
        group = whole if subgroup is None else fibers(in_type.gspace, subgroup=subgroup)
        heads = Heads(out_type, num_heads, group, **given)
        encoding = as_encoding(encoding)
        check_poses(heads, encoding)
        needs = heads.needs(encoding, mode)
        check_shared(shared_scores, query, keys, encoding, group)
        seen = choose_window(whole, in_type, kernel_size, window, dilation, causal=causal, padding_mode=padding_mode)
        resampling = _choose_resampling(*resizing, seen, group.dimension)
        convolution, read = field_convolution(in_type, *filters, circular=seen.circular)
        lifts = self._scalars_only or (
            not shared_scores and heads.projection == "group" and sees_scalars(read, encoding, heads, query, keys)
        )
        weight = query_weight(out_type, group, query, lifts=lifts)
        poses = has_pose_term(encoding, query, keys, lifts=lifts)
        num_poses = group.relations + heads.registers if poses else 1
        check_on_torus(encoding, seen)
        _check_count(mode, seen, encoding)
        tables = tables_of(group, num_poses, heads.registers, poses=poses, weighs=keys == "all" and not lifts)
        plain = SelfAttention(
            heads.read(read, needs, scalars=lifts),
            heads.write(out_type),
            bind(encoding, heads, seen, num_poses),
            tables,
            seen,
            mode,
            needs,
            query_weight=weight,
            transformation=random_transformation(read, out_type, group),
            resampling=resampling,
            convolution=convolution,
        )
        super().__init__(in_type, out_type, heads.complete(plain))
        self.num_heads = heads.number
        self.head_fields = heads.channels
        self.samples, self.poses = group.samples, subgroup
        self.projection_kernel_size, self.projection_filters = filters

    def attention_maps(
        self,
        input: GeometricTensor,
        positions: Sequence[Sequence[int]] | Tensor,
        poses: Sequence[int | GroupElement] | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        r"""The attention of chosen queries.

        Args:
            input: features of type ``in_type``.
            positions: ``(n, d)``, the positions of the queries, as indices along the axes of the grid of outputs;
                negative ones count from the end.
            poses: the output poses h, as elements or as their indices; all by default.
            mask: as in :meth:`forward`.

        Returns:
            Probabilities ``(B, num_heads, poses, positions, query poses, key poses, *space)``, of samples of a
            continuous group without a random turn. The query poses are :math:`Q(h)`, one for ``query="own"``
            and :math:`|H|` for ``"all"``. Key poses are :math:`|H|`, and registers behind them. Where scalars have no
            poses, and in :class:`LiftingSelfAttention`, there is one of either. Each map sums to 1 over the
            key poses and the space, except with ``normalization="count"`` and for queries that the mask hides, whose
            maps are zero. Dropout is not applied.

        Raises:
            TypeError, ValueError: as :meth:`forward`; a position or pose that does not exist.

        Example:
            >>> import torch
            >>> from escnn_attention import GroupSelfAttention
            >>> from escnn import gspaces, nn
            >>> g = gspaces.rot2dOnR2(4)
            >>> fields = nn.FieldType(g, 2 * [g.regular_repr])
            >>> layer = GroupSelfAttention(fields, fields, num_heads=2, kernel_size=3)
            >>> maps = layer.attention_maps(fields(torch.randn(1, 8, 5, 5)), positions=[(2, 2), (0, 4)], poses=[0])
            >>> maps.shape
            torch.Size([1, 2, 1, 2, 1, 4, 5, 5])
        """
        x = check_input(input, self.in_type, self)
        flat = flat_positions(positions, self.plain.resampling.shape(x.tensor.shape[2:]))
        chosen = pose_indices(poses, self.space, self.samples, self.poses)
        return self.plain.attention_maps(x.tensor, flat, chosen, None if mask is None else check_mask(mask, x.tensor))

    def _output_space(self, space: Sequence[int]) -> Sequence[int]:
        return self.plain.resampling.shape(space)

    def export(self) -> torch.nn.Module:
        plain = super().export()
        if isinstance(plain.convolution, FieldConvolution):
            export_parts(plain.convolution)
        return plain

    def extra_repr(self) -> str:
        core = self.plain
        window = core.window
        kernel = "global" if window.kernel_size is None else f"kernel_size={window.kernel_size} ({window.form})"
        parts = [super().extra_repr(), f"num_heads={self.num_heads}", f"head_fields={self.head_fields}", kernel]
        parts += shown(dilation=(window.dilation, 1), causal=(window.causal, False))
        parts += shown(padding_mode=("circular" if window.circular else "none", "none"))
        parts += shown(stride=(core.resampling.stride, 1), scale_factor=(core.resampling.scale_factor, 1))
        parts += shown(projection_kernel_size=(self.projection_kernel_size, 1))
        parts += shown(projection_filters=(self.projection_filters, 1), poses=(self.poses, None))
        parts += [*shown_heads(core), *shown(samples=(self.samples, None), backend=(core.backend, None))]
        return ", ".join(parts)


def _check_count(mode: AttentionMode, window: Window, encoding: Encoding) -> None:
    """Without a softmax there is a sum over all keys, which all queries read."""
    if mode.normalization == "softmax":
        return
    factorises = encoding.absolute or encoding.rotates or encoding.form in (None, "waves")
    others = {
        f"kernel_size={window.kernel_size}": window.kernel_size is not None,
        "causal": window.causal,
        "padding_mode": window.circular,
        f"dropout={mode.dropout}": mode.dropout > 0,
        f"a {type(encoding).__name__}, which does not factorise": not factorises,
    }
    for other, given in others.items():
        if given:
            raise ValueError(
                f'normalization: got "count" with {other}; needed global attention without dropout, and an encoding '
                "that factorises: fourier, rotary, absolute, none"
            )


def _choose_resampling(stride: Any, scale_factor: Any, window: Window, dimension: int) -> Resampling:
    """The grid of the outputs, if a window can be about any place, and there are places between positions."""
    chosen = Resampling(check_int("stride", stride), check_int("scale_factor", scale_factor), window.circular)
    if chosen.stride > 1 and chosen.scale_factor > 1:
        raise ValueError(f"stride: got {stride} with scale_factor={scale_factor}, needed one of them")
    name, number = ("stride", chosen.stride) if chosen.stride > 1 else ("scale_factor", chosen.scale_factor)
    others = {"causal": window.causal, "dilation": window.dilation > 1}
    others["a gspace without a base space"] = not dimension
    for other, given in others.items():
        if chosen.resizes and given:
            raise ValueError(f"{name}: got {number} with {other}, which it does not have; needed {name}=1")
    if window.circular and chosen.stride % 2 == 0:
        raise ValueError(
            f'stride: got {chosen.stride} with padding_mode="circular", needed an odd one: of an even number of '
            "positions none is in the middle. GroupCrossAttention takes queries from a HalvingPool"
        )
    return chosen


class LiftingOptions(WindowOptions, total=False):
    """Options of :class:`LiftingSelfAttention`."""

    stride: int
    scale_factor: int
    dropout: float


class LiftingSelfAttention(GroupSelfAttention):
    r"""Lifting self-attention: from scalar fields to regular fields, and on to any ``out_type``.

    .. math::
        s_h(x; x') &= \langle q(x),\; k(x') + \rho(h^{-1}\Delta) \rangle / \sqrt C \\
        \mathrm{out}(x, h) &= \sum_{x' \in N(x)} \mathrm{softmax}_{x'}(s_h) \; v(x')

    It is :class:`GroupSelfAttention` on scalars, with every encoding and without a pose term. Outputs of different
    poses differ only by the encoding of the offset: with ``encoding="none"`` all are equal.

    Args:
        in_type: trivial fields only. :class:`GroupSelfAttention` lifts every other type.
        out_type, num_heads, kernel_size: as in :class:`GroupSelfAttention`.
        options: those of :class:`GroupSelfAttention` but ``query``, ``keys`` and ``shared_scores``; ``projection`` is
            that of the output.

    Shape:
        ``(B, in_type.size, *space)`` to ``(B, out_type.size, *space)``.

    Raises:
        ValueError: ``in_type`` has a field that is not trivial, and all that :class:`GroupSelfAttention` raises.

    Example:
        >>> import torch
        >>> from escnn_attention import LiftingSelfAttention
        >>> from escnn import gspaces, nn
        >>> g = gspaces.rot2dOnR2(8)
        >>> image, hidden = nn.FieldType(g, 3 * [g.trivial_repr]), nn.FieldType(g, 4 * [g.regular_repr])
        >>> layer = LiftingSelfAttention(image, hidden, num_heads=2, kernel_size=5)
        >>> layer(image(torch.randn(1, 3, 16, 16))).shape
        torch.Size([1, 32, 16, 16])

    Source: GSA-Nets (Romero and Cordonnier 2021), Eq. 14.
    """

    _scalars_only = True

    def __init__(
        self,
        in_type: FieldType,
        out_type: FieldType,
        num_heads: int = 1,
        kernel_size: int | None = REQUIRED,
        **options: Unpack[LiftingOptions],
    ):
        name = type(self).__name__
        check_options(name, options, option_names(LiftingSelfAttention))
        check_scalars(check_type("in_type", in_type), name, "; GroupSelfAttention lifts any fields")
        super().__init__(in_type, out_type, num_heads, kernel_size, **options)
