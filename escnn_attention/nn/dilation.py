r"""Self-attention that is equivariant to dilations: scale as a further axis of the group.

The group is :math:`G = R^d \rtimes (S \times H)`: translations, the dilations of a set of scales S, and the rotations
and reflections of the fiber group H. A feature field :math:`f(x, s, h)` on it is, to escnn, the fields of one scale as
many times as there are scales, which H transforms like any others. A dilation enlarges space and moves features on
along the axis of scales. Of that axis there is a stretch only, so that equivariance holds away from its ends, as it
holds for translations away from the border.
"""

from __future__ import annotations

import math
from typing import Any

from escnn.nn import FieldType

from escnn_attention._checks import check_int, check_option, check_probability
from escnn_attention.encodings import Encoding, as_encoding
from escnn_attention.functional import QueryMode, check_backend
from escnn_attention.geometry.windows import WindowShape
from escnn_attention.groups.fibers import Fibers, fibers
from escnn_attention.nn.arguments import check_type, check_types, choose_window
from escnn_attention.nn.heads import Heads, check_scalars
from escnn_attention.nn.module import PlainModule
from escnn_attention.nn.options import check_options, option_names
from escnn_attention.nn.scales import Scales, check_scales
from escnn_attention.plain.dilation import DilationAttention, Measure, WindowKind, scaled_window
from escnn_attention.plain.projections import ProjectionKind
from escnn_attention.plain.self_attention import AttentionMode, GroupTables

__all__ = ["DilationLiftingSelfAttention", "DilationSelfAttention"]


class DilationSelfAttention(PlainModule):
    r"""Self-attention on the group of translations, dilations and the fiber group H (GSA-Nets, Eq. 21).

    For every output pose (s, h), query :math:`(x, s, \tilde h)` and key :math:`(x', st, \hat h)`, with
    :math:`\Delta = x' - x` and heads of C channels:

    .. math::
        a(x, \tilde h; x', t, \hat h) &= \langle q(x, s, \tilde h),\; k(x', st, \hat h)
            + \rho((sh)^{-1}\Delta,\, h^{-1}\hat h,\, t) \rangle / \sqrt C + \log\mu(x', t) \\
        \mathrm{out}(x, s, h) &= \sum_{\tilde h \in Q(h)} \; \sum_{x' \in x + sN,\; t \in T,\; \hat h}
            \mathrm{softmax}_{(x', t, \hat h)}(a) \; v(x', st, \hat h)

    The window sN grows with the scale of the query, and the encoding sees it at its original size. t runs over
    ``interval`` scales from 1 on. Keys beyond the last scale do not exist and are left out, as positions outside the
    grid are.

    **The measure.** Attention is an average over the keys, against a measure, and the measure that G leaves as it is is
    Haar's, :math:`dx\, ds / s^{d+1}`. For scales in equal ratios, and relative to the scale of the query, that is
    :math:`t^{-d} dx'`: ``measure="haar"`` adds its logarithm to the scores, where dx' is the share of a position that
    lies in the window. Eqs. 20 and 21 print the factor of the query's scale, in front of a softmax that is normalised
    already. There it balances nothing; the response to an image enlarged by b is smaller by :math:`b^{-(d+1)}`.

    **Equivariance.** To translations and to H as in :class:`GroupSelfAttention`. To dilations away from the end of the
    range of scales: an image enlarged by b has at scale bs what the image has at scale s. With ``windows="dilated"``
    this is exact at the positions that the two grids have in common; with ``"scaled"`` it holds for smooth features to
    the error of a sum over the window, away from the border.

    Args:
        in_type: the type of the input, with the same fields at every scale: see :meth:`Scales.repeat`.
        out_type: the type of the output, likewise, over the same gspace.
        scales: S.
        num_heads: the number of heads.
        kernel_size: the odd width of the window at scale 1, in positions. Attention to the whole grid, which has no
            scale, is not offered.
        head_fields: the number C of regular fields of a head; by default from the output of one scale, as in
            :class:`GroupSelfAttention`.
        interval: the number of scales that a query sees, from its own on; by default 2, or 1 where there is one only.
        query: the query poses Q(h) in H: ``"own"`` or ``"all"``.
        encoding: a relative positional encoding, as in :class:`GroupSelfAttention`. Its table over the poses has a row
            for every t and pose of H.
        windows: ``"scaled"``, all positions of the scaled window, at a cost that grows with :math:`s^d`, for any base;
            ``"dilated"``, the positions of the window of scale 1 at s times the distance, at the same cost for every
            scale, for whole bases (App. E.1); or ``"fixed"``, the window of scale 1 at every scale, which gives up the
            equivariance and is there to compare with.
        window: ``"square"``, ``"disc"`` or ``"auto"``, as in :class:`GroupSelfAttention`.
        measure: ``"haar"``; ``"counting"``, where all keys weigh the same; or ``"printed"``, the same with the output
            multiplied by :math:`s^{-(d+1)}` in front of the projection, as printed.
        projection, dropout, bias, backend: as in :class:`GroupSelfAttention`.

    Shape:
        ``(B, in_type.size, *space)`` to ``(B, out_type.size, *space)``.

    Raises:
        TypeError: a type, number or set of scales is none.
        ValueError: types that differ from scale to scale, another gspace, one without base space, an even
            ``kernel_size``, an interval of more scales than there are, an absolute encoding, dilated windows for a base
            that is not whole, and all that :class:`GroupSelfAttention` raises.
        NotImplementedError: the fiber group is continuous.

    Example:
        >>> import torch
        >>> from escnn_attention import DilationSelfAttention, Scales
        >>> from escnn import gspaces, nn
        >>> g = gspaces.rot2dOnR2(4)
        >>> scales = Scales(base=2, count=3)
        >>> hidden = scales.repeat(nn.FieldType(g, 2 * [g.regular_repr]))
        >>> layer = DilationSelfAttention(hidden, hidden, scales, kernel_size=3)
        >>> layer(hidden(torch.randn(1, 24, 9, 9))).shape
        torch.Size([1, 24, 9, 9])

    Source: Romero and Cordonnier, "Group Equivariant Stand-Alone Self-Attention For Vision", ICLR 2021, App. E, Eq. 21;
    Worrall and Welling, "Deep Scale-spaces", NeurIPS 2019, for dilation.
    """

    plain: DilationAttention

    _lifts = False
    """Whether the input has no scales and no poses."""

    def __init__(
        self,
        in_type: FieldType,
        out_type: FieldType,
        scales: Scales,
        num_heads: int = 1,
        kernel_size: int = 5,
        *,
        head_fields: int | None = None,
        interval: int | None = None,
        query: QueryMode = "own",
        encoding: Encoding | str | None = None,
        windows: WindowKind = "scaled",
        window: str = "auto",
        measure: Measure = "haar",
        projection: ProjectionKind = "group",
        dropout: float = 0.0,
        bias: bool = True,
        backend: str = "auto",
    ):
        check_types(in_type, out_type)
        group = _check_space(in_type)
        of_scale = check_scales(scales).single(out_type, "out_type")
        check_option("query", query, ("own", "all"))
        _check_windows(windows, measure, scales)
        heads = Heads.choose(of_scale, num_heads, head_fields, group, projection, bias)
        shape = _choose_shape(group, in_type, kernel_size, window)
        encoding = _check_encoding(encoding)
        seen = None if self._lifts else _choose_interval(interval, scales)
        needs = encoding.needs(heads.channels, group.dimension)
        single = scales.single(in_type, "in_type") if seen else in_type
        num_poses = seen * group.order if seen else 1
        dimension, values, haar = group.dimension, scales.values, measure == "haar"
        query = "all" if self._lifts else query  # One query without a pose contributes to every output pose.
        super().__init__(
            in_type,
            out_type,
            DilationAttention(
                heads.read(single, needs, scalars=not seen),
                heads.write(of_scale),
                encoding.bind(dimension, heads.number, heads.channels, num_poses),
                GroupTables(group.action[group.inverse], group.quotient),
                AttentionMode(query, "all", check_probability("dropout", dropout), check_backend(backend)),
                [scaled_window(kernel_size, shape, s, dimension, kind=windows, weighted=haar) for s in values],
                needs,
                interval=seen,
                # For scales in equal ratios ds is in proportion to s.
                log_measure=[-dimension * math.log(t) for t in values[:seen]] if haar and seen else None,
                factors=[s ** -(dimension + (seen is not None)) for s in values] if measure == "printed" else None,
            ),
        )
        self.scales = scales
        self.num_heads = heads.number
        self.head_fields = heads.channels
        self.kernel_size = kernel_size
        self.window = shape
        self.windows = windows
        self.measure = measure

    def extra_repr(self) -> str:
        core = self.plain
        parts = [
            super().extra_repr(),
            f"{self.scales}",
            f"num_heads={self.num_heads}",
            f"head_fields={self.head_fields}",
            f"kernel_size={self.kernel_size} ({self.window}, {self.windows})",
            *([] if core.interval is None else [f"interval={core.interval}", f"query={core.query!r}"]),
            f"measure={self.measure!r}",
            f"encoding={type(core.encoding).__name__}({core.encoding.extra_repr()})",
            *([f"dropout={core.dropout}"] if core.dropout else []),
            f"backend={core.backend!r}",
        ]
        return ", ".join(parts)


def _check_space(in_type: FieldType) -> Fibers:
    """The fiber group, if there is a space to enlarge."""
    group = fibers(in_type.gspace)
    if group.dimension == 0:
        raise ValueError(f"in_type: its gspace {in_type.gspace.name} has no base space, needed one to enlarge")
    return group


def _choose_shape(group: Fibers, in_type: FieldType, kernel_size: int, window: str) -> WindowShape:
    """The shape of the windows, which are not the whole grid."""
    if check_int("kernel_size", kernel_size) % 2 == 0:
        raise ValueError(f"kernel_size: got {kernel_size}, needed an odd number")
    return choose_window(group, in_type, kernel_size, window, 1).shape


def _check_windows(windows: str, measure: str, scales: Scales) -> None:
    """The windows and the measure are some that there are for these scales."""
    check_option("windows", windows, ("scaled", "dilated", "fixed"))
    check_option("measure", measure, ("haar", "counting", "printed"))
    if windows == "dilated" and scales.base != round(scales.base):
        raise ValueError(f'windows: got "dilated" for scales of base {scales.base}, needed a whole number as base')


def _check_encoding(encoding: Encoding | str | None) -> Encoding:
    """The encoding, if it is a relative one."""
    encoding = as_encoding(encoding)
    if encoding.absolute:
        raise ValueError(
            f"encoding: got {type(encoding).__name__}, which sees positions and not offsets; needed a relative encoding"
        )
    return encoding


def _choose_interval(interval: int | None, scales: Scales) -> int:
    """The number of scales that a query sees: as asked for, or two where there are."""
    count = check_scales(scales).count
    if interval is None:
        return min(2, count)
    if check_int("interval", interval) > count:
        raise ValueError(f"interval: got {interval}, needed at most the number of scales, {count}")
    return interval


class DilationLiftingSelfAttention(DilationSelfAttention):
    r"""Lifting self-attention: from scalar fields on the plane to features on the group with dilations (Eq. 20).

    .. math::
        a(x; x') &= \langle q(x),\; k(x') + \rho((sh)^{-1}\Delta) \rangle / \sqrt C + \log\mu(x') \\
        \mathrm{out}(x, s, h) &= \sum_{x' \in x + sN} \mathrm{softmax}_{x'}(a) \; v(x')

    The factor :math:`s^{-d}` of the Haar measure is the same for all keys of a query and drops out of the softmax; of
    the measure dx' there remains the share of a position that lies in the window.

    Args:
        in_type: trivial fields only, without scales.
        out_type, scales, num_heads, kernel_size: as in :class:`DilationSelfAttention`.
        options: ``head_fields``, ``encoding``, ``windows``, ``window``, ``measure``, ``projection``, ``dropout``,
            ``bias`` and ``backend`` as in :class:`DilationSelfAttention`. ``projection`` is that of the output, and
            with ``measure="printed"`` it is multiplied by :math:`s^{-d}`. With ``windows="dilated"``, ``"haar"`` and
            ``"counting"`` are the same.

    Shape:
        ``(B, in_type.size, *space)`` to ``(B, out_type.size, *space)``.

    Raises:
        TypeError: there is no such option.
        ValueError: ``in_type`` has a field that is not trivial, and all that :class:`DilationSelfAttention` raises.

    Example:
        >>> import torch
        >>> from escnn_attention import DilationLiftingSelfAttention, Scales
        >>> from escnn import gspaces, nn
        >>> g = gspaces.rot2dOnR2(4)
        >>> scales = Scales(base=2, count=3)
        >>> image = nn.FieldType(g, [g.trivial_repr])
        >>> hidden = scales.repeat(nn.FieldType(g, 2 * [g.regular_repr]))
        >>> layer = DilationLiftingSelfAttention(image, hidden, scales, kernel_size=3)
        >>> layer(image(torch.randn(1, 1, 9, 9))).shape
        torch.Size([1, 24, 9, 9])

    Source: Romero and Cordonnier, "Group Equivariant Stand-Alone Self-Attention For Vision", ICLR 2021, App. E, Eq. 20.
    """

    _lifts = True

    def __init__(
        self,
        in_type: FieldType,
        out_type: FieldType,
        scales: Scales,
        num_heads: int = 1,
        kernel_size: int = 5,
        **options: Any,
    ):
        name = type(self).__name__
        known = [n for n in option_names(DilationSelfAttention) if n not in ("interval", "query")]
        check_options(name, options, known)
        check_scalars(check_type("in_type", in_type), name)
        super().__init__(in_type, out_type, scales, num_heads, kernel_size, **options)
