r"""Self-attention that is equivariant to dilations: scale as a further axis of the group.

The group is :math:`G = R^d \rtimes (S \times H)`: translations, the dilations of a set of scales S, and the rotations
and reflections of the fiber group H. A feature field :math:`f(x, s, h)` on it is, to escnn, the fields of one scale as
many times as there are scales, which H transforms like any others. A dilation enlarges space and moves features on
along the axis of scales. Of that axis there is a stretch only, so that equivariance holds away from its ends, as it
holds for translations away from the border.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, TypedDict, get_args

from escnn.nn import EquivariantModule, FieldType, GeometricTensor
from typing_extensions import Unpack

from escnn_attention._checks import check_int, check_option
from escnn_attention.encodings import Encoding, as_encoding
from escnn_attention.exporting.modules import exported
from escnn_attention.functional import ON_GRIDS, QueryMode
from escnn_attention.groups.fibers import fibers
from escnn_attention.nn.arguments import (
    check_options,
    check_pointwise,
    check_type,
    check_types,
    choose_window,
    option_names,
)
from escnn_attention.nn.heads import Heads, check_scalars
from escnn_attention.nn.module import GridModule, PlainModule, check_input, on_tensors
from escnn_attention.plain.dilation import (
    DilationAttention,
    Measure,
    WindowKind,
    scaled_window,
)
from escnn_attention.plain.dilation import PerScale as PlainPerScale
from escnn_attention.plain.dilation import ScalePooling as PlainScalePooling
from escnn_attention.plain.projections import AttentionMode, GroupTables, ProjectionKind


@dataclass(frozen=True)
class Scales:
    r"""A stretch of the dilation group: the scales :math:`1, b, b^2, \dots, b^{n-1}`.

    Args:
        base: b, the ratio of neighbouring scales; more than 1.
        count: n, the number of scales.

    Raises:
        ValueError: a base that is not more than 1, or no scales.

    Example:
        >>> from escnn_attention import Scales
        >>> from escnn import gspaces, nn
        >>> scales = Scales(base=2, count=3)
        >>> scales.values
        (1.0, 2.0, 4.0)
        >>> g = gspaces.rot2dOnR2(4)
        >>> scales.repeat(nn.FieldType(g, 8 * [g.regular_repr])).size
        96
    """

    base: float = 2.0
    count: int = 3

    def __post_init__(self) -> None:
        base: Any = self.base
        number = float(base) if not isinstance(base, bool) and isinstance(base, Real) else math.nan
        if not 1 < number < math.inf:
            raise ValueError(f"base: got {self.base!r}, needed a number above 1")
        check_int("count", self.count)

    @property
    def values(self) -> tuple[float, ...]:
        """The scales, from 1 on."""
        return tuple(float(self.base) ** i for i in range(self.count))

    def repeat(self, field_type: FieldType) -> FieldType:
        """The type of features that have fields of type ``field_type`` at every scale, one scale after the other.

        A tensor of it, ``(B, n · size, *space)``, can be viewed as ``(B, n, size, *space)``.
        """
        check_type("field_type", field_type)
        return FieldType(field_type.gspace, self.count * list(field_type.representations))

    def single(self, field_type: FieldType, name: str = "field_type") -> FieldType:
        """The type that ``field_type`` has at every scale; :meth:`repeat` backwards.

        Raises:
            ValueError: the scales do not have the same fields.
        """
        check_type(name, field_type)
        fields = list(field_type.representations)
        of_first = fields[: len(fields) // self.count]
        if not of_first or self.count * of_first != fields:
            raise ValueError(
                f"{name}: got {field_type}, needed the same fields at each of {self.count} scales, as Scales.repeat "
                "gives them"
            )
        return FieldType(field_type.gspace, of_first)


def check_scales(scales: object) -> Scales:
    """``scales``, if they are some."""
    if not isinstance(scales, Scales):
        raise TypeError(f"scales: got {type(scales).__name__}, needed Scales")
    return scales


class PerScale(GridModule):
    """A module applied to every scale separately, with the same parameters.

    A layer norm over a position, or a batch norm, mixes scales or learns parameters for each. Dilations move features
    to the next scale and bring others in at the ends, so such a layer is not equivariant. This one is, exactly.
    (Nonlinearities of single channels need no change.)

    Args:
        module: any module of escnn's, or of this package, on the fields of one scale.
        scales: the scales.

    Shape:
        ``(B, n · module.in_type.size, *space)`` to ``(B, n · module.out_type.size, *space)``, on the grid that the
        module gives.

    Example:
        >>> import torch
        >>> from escnn_attention import FieldLayerNorm, PerScale, Scales
        >>> from escnn import gspaces, nn
        >>> g = gspaces.rot2dOnR2(4)
        >>> fields, scales = nn.FieldType(g, 2 * [g.regular_repr]), Scales(base=2, count=3)
        >>> norm = PerScale(FieldLayerNorm(fields), scales)
        >>> norm(norm.in_type(torch.randn(1, 24, 5, 5))).shape
        torch.Size([1, 24, 5, 5])
    """

    def __init__(self, module: EquivariantModule, scales: Scales):
        if not isinstance(module, EquivariantModule):
            raise TypeError(f"module: got {type(module).__name__}, needed an escnn.nn.EquivariantModule")
        check_scales(scales)
        super().__init__(scales.repeat(module.in_type), scales.repeat(module.out_type))
        self.module = module
        self.scales = scales
        self.count = scales.count

    def forward(self, input: GeometricTensor) -> GeometricTensor:
        """Apply the module to every scale."""
        x = check_input(input, self.in_type, self)
        return GeometricTensor(on_tensors(self, PlainPerScale.forward, x.tensor), self.out_type)

    def _output_space(self, space: Sequence[int]) -> Sequence[int]:
        shape: Sequence[int] = self.module.evaluate_output_shape((1, self.module.in_type.size, *space))
        return shape[2:]

    def export(self) -> PlainPerScale:
        """A copy as a plain torch module in eval mode, on tensors."""
        self.eval()
        return PlainPerScale(exported(self.module), self.count).eval()

    def extra_repr(self) -> str:
        return f"{self.scales}"


class ScalePooling(PlainModule):
    """The maximum over scales, which a dilation changes by enlarging space only.

    Args:
        in_type: the type of the input: the same fields at every scale, with pointwise nonlinearities.
        scales: the scales.

    Attributes:
        out_type: the fields of one scale.

    Shape:
        ``(B, n · size, *space)`` to ``(B, size, *space)``.

    Raises:
        ValueError: fields that differ from scale to scale, or that do not allow the maximum.

    Example:
        >>> import torch
        >>> from escnn_attention import ScalePooling, Scales
        >>> from escnn import gspaces, nn
        >>> g = gspaces.rot2dOnR2(4)
        >>> scales = Scales(base=2, count=3)
        >>> pool = ScalePooling(scales.repeat(nn.FieldType(g, 2 * [g.regular_repr])), scales)
        >>> pool(pool.in_type(torch.randn(1, 24, 5, 5))).shape
        torch.Size([1, 8, 5, 5])
    """

    plain: PlainScalePooling

    def __init__(self, in_type: FieldType, scales: Scales):
        check_scales(scales)
        check_pointwise("in_type", check_type("in_type", in_type), "ScalePooling")
        super().__init__(in_type, scales.single(in_type, "in_type"), PlainScalePooling(scales.count))
        self.scales = scales


class DilationSelfAttention(PlainModule):
    r"""Self-attention on the group of translations, dilations and the fiber group H (GSA-Nets, Eq. 21).

    For every output pose (s, h), query :math:`(x, s, \tilde h)` and key :math:`(x', st, \hat h)`, with
    :math:`\Delta = x' - x` and heads of C channels:

    .. math::
        a(x, \tilde h; x', t, \hat h) &= \langle q(x, s, \tilde h),\; k(x', st, \hat h)
            + \rho((sh)^{-1}\Delta,\, h^{-1}\hat h,\, t) \rangle / \sqrt C + \log\mu(x', t) \\
        \mathrm{out}(x, s, h) &= \sum_{\tilde h \in Q(h)} \; \sum_{x' \in x + sN,\; t \in T,\; \hat h}
            \mathrm{softmax}_{(x', t, \hat h)}(a) \; v(x', st, \hat h)

    The window sN grows with the scale of the query, and the encoding is evaluated at its original size. t runs over
    ``interval`` scales from 1 on. Keys beyond the last scale are left out, like positions outside the grid.

    **The measure.** Attention is an average over the keys with respect to a measure, and the invariant measure of G is
    Haar's, :math:`dx\, ds / s^{d+1}`. For scales in equal ratios, and relative to the scale of the query, this is
    :math:`t^{-d} dx'`: ``measure="haar"`` adds its logarithm to the scores, where dx' is the share of a position that
    lies in the window. Eqs. 20 and 21 print the factor of the query's scale outside a softmax that is already
    normalised; with it the response to an image enlarged by b is smaller by :math:`b^{-(d+1)}`.

    **Equivariance.** The layer is equivariant to translations and to H as :class:`GroupSelfAttention` is, and to
    dilations away from the last scales: the features of an image enlarged by b at scale bs are those of the image at
    scale s. With
    ``windows="dilated"`` this is exact at the positions that both grids have; with ``"scaled"`` it holds for smooth
    features to the error of a sum over the window, away from the border.

    Args:
        in_type: the type of the input, with the same fields at every scale: see :meth:`Scales.repeat`.
        out_type: the type of the output, likewise, over the same gspace.
        scales: S.
        num_heads: the number of heads.
        kernel_size: the odd width of the window at scale 1, in positions. Global attention has no scale and is not
            supported.
        head_fields: the number C of regular fields of a head; by default from the output of one scale, as in
            :class:`GroupSelfAttention`.
        interval: the number of scales of the keys, from that of the query on; by default 2, or 1 if there is one scale.
        query: the query poses Q(h) in H: ``"own"`` or ``"all"``.
        encoding: a relative positional encoding, as in :class:`GroupSelfAttention`. Its table over the poses has a row
            for every t and pose of H.
        windows: ``"scaled"``, all positions of the scaled window, at a cost that grows with :math:`s^d`, for any base;
            ``"dilated"``, the positions of the window of scale 1 at s times the distance, at the same cost for every
            scale, for whole bases (App. E.1); or ``"fixed"``, the window of scale 1 at every scale, which gives up the
            equivariance and is there to compare with.
        window: ``"square"``, ``"disc"`` or ``"auto"``, as in :class:`GroupSelfAttention`.
        measure: ``"haar"``; ``"counting"``, with equal weights of all keys; or ``"printed"``, the same with the output
            multiplied by :math:`s^{-(d+1)}` before the projection, as printed.
        projection, dropout, bias, backend: as in :class:`GroupSelfAttention`.

    Shape:
        ``(B, in_type.size, *space)`` to ``(B, out_type.size, *space)``.

    Raises:
        ValueError: types that differ from scale to scale, a gspace without base space, an interval of more scales than
            there are, an absolute encoding, dilated windows for a base that is not whole, and as
            :class:`GroupSelfAttention`.

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

    Source: GSA-Nets (Romero and Cordonnier 2021), App. E, Eq. 21; Worrall and Welling, "Deep Scale-spaces", NeurIPS
    2019, for dilation.
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
        group = fibers(in_type.gspace)
        if group.dimension == 0:
            raise ValueError(f"in_type: its gspace {in_type.gspace.name} has no base space, needed one to enlarge")
        of_scale = check_scales(scales).single(out_type, "out_type")
        # One query without a pose contributes to every output pose.
        mode = AttentionMode("all" if self._lifts else query, "all", dropout, ON_GRIDS.check(backend))
        check_option("windows", windows, get_args(WindowKind))
        check_option("measure", measure, get_args(Measure))
        if windows == "dilated" and scales.base != round(scales.base):
            raise ValueError(f'windows: got "dilated" for scales of base {scales.base}, needed a whole number as base')
        heads = Heads(of_scale, num_heads, group, head_fields=head_fields, projection=projection, bias=bias)
        if check_int("kernel_size", kernel_size) % 2 == 0:
            raise ValueError(f"kernel_size: got {kernel_size}, needed an odd number")
        shape = choose_window(group, in_type, kernel_size, window, 1).shape
        encoding = as_encoding(encoding)
        if encoding.absolute:
            name = type(encoding).__name__
            raise ValueError(f"encoding: got {name}, which sees positions and not offsets; needed a relative encoding")
        seen = None if self._lifts else _choose_interval(interval, scales)
        needs = encoding.needs(heads.channels, group.dimension)
        single = scales.single(in_type, "in_type") if seen else in_type
        num_poses = seen * group.order if seen else 1
        dimension, values, haar = group.dimension, scales.values, measure == "haar"
        super().__init__(
            in_type,
            out_type,
            DilationAttention(
                heads.read(single, needs, scalars=not seen),
                heads.write(of_scale),
                encoding.bind(dimension, heads.number, heads.channels, num_poses),
                GroupTables(group.action[group.inverse], group.quotient),
                mode,
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


def _choose_interval(interval: int | None, scales: Scales) -> int:
    """The number of scales that a query sees: as asked for, or two where there are."""
    count = check_scales(scales).count
    if interval is None:
        return min(2, count)
    if check_int("interval", interval) > count:
        raise ValueError(f"interval: got {interval}, needed at most the number of scales, {count}")
    return interval


class DilationLiftingOptions(TypedDict, total=False):
    """Options of :class:`DilationLiftingSelfAttention`."""

    head_fields: int | None
    encoding: Encoding | str | None
    windows: WindowKind
    window: str
    measure: Measure
    projection: ProjectionKind
    dropout: float
    bias: bool
    backend: str


class DilationLiftingSelfAttention(DilationSelfAttention):
    r"""Lifting self-attention: from scalar fields on the plane to features on the group with dilations (Eq. 20).

    .. math::
        a(x; x') &= \langle q(x),\; k(x') + \rho((sh)^{-1}\Delta) \rangle / \sqrt C + \log\mu(x') \\
        \mathrm{out}(x, s, h) &= \sum_{x' \in x + sN} \mathrm{softmax}_{x'}(a) \; v(x')

    Of the Haar measure there remains the share of a position that lies in the window: :math:`s^{-d}` drops out.

    Args:
        in_type: trivial fields only, without scales.
        out_type, scales, num_heads, kernel_size: as in :class:`DilationSelfAttention`.
        options: those of :class:`DilationSelfAttention` but ``interval`` and ``query``. ``projection`` is that of the
            output; ``measure="printed"`` multiplies it by :math:`s^{-d}`.

    Shape:
        ``(B, in_type.size, *space)`` to ``(B, out_type.size, *space)``.

    Raises:
        ValueError: ``in_type`` has a field that is not trivial, and all that :class:`DilationSelfAttention` raises.

    Example:
        >>> import torch
        >>> from escnn_attention import DilationLiftingSelfAttention, Scales
        >>> from escnn import gspaces, nn
        >>> g = gspaces.rot2dOnR2(4)
        >>> scales = Scales(base=2, count=3)
        >>> image, hidden = nn.FieldType(g, [g.trivial_repr]), scales.repeat(nn.FieldType(g, 2 * [g.regular_repr]))
        >>> layer = DilationLiftingSelfAttention(image, hidden, scales, kernel_size=3)
        >>> layer(image(torch.randn(1, 1, 9, 9))).shape
        torch.Size([1, 24, 9, 9])

    Source: GSA-Nets (Romero and Cordonnier 2021), App. E, Eq. 20.
    """

    _lifts = True

    def __init__(
        self,
        in_type: FieldType,
        out_type: FieldType,
        scales: Scales,
        num_heads: int = 1,
        kernel_size: int = 5,
        **options: Unpack[DilationLiftingOptions],
    ):
        name = type(self).__name__
        check_options(name, options, option_names(DilationLiftingSelfAttention))
        check_scalars(check_type("in_type", in_type), name)
        super().__init__(in_type, out_type, scales, num_heads, kernel_size, **options)
