"""Cross-attention: the features of one set attend to those of another."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import torch
from escnn.group import GroupElement
from escnn.gspaces import GSpace
from escnn.nn import FieldType, GeometricTensor
from torch import Tensor
from typing_extensions import Unpack

from escnn_attention._checks import check_bool, check_length
from escnn_attention.encodings import Encoding, as_encoding
from escnn_attention.functional import BETWEEN_POINTS, ON_GRIDS, KeyMode, QueryMode
from escnn_attention.geometry.cache import checked, kept
from escnn_attention.geometry.lattice import longest_square
from escnn_attention.geometry.neighbours import Neighbourhood, largest_step, numbers_of
from escnn_attention.geometry.relations import Offset
from escnn_attention.geometry.windows import Window
from escnn_attention.groups.fibers import Fibers, fibers
from escnn_attention.groups.samples import Samples, as_samples
from escnn_attention.groups.sequences import SpaceTime
from escnn_attention.nn.arguments import (
    CrossOptions,
    check_options,
    check_type,
    choose_window,
    option_names,
    shown,
)
from escnn_attention.nn.heads import Heads, is_scalar
from escnn_attention.nn.module import GridModule, Wrapper, check_field, check_index, check_mask, check_shape
from escnn_attention.nn.point_attention import check_box, choose_cutoff, choose_kernel, choose_neighbourhood
from escnn_attention.nn.self_attention import (
    bind,
    check_on_torus,
    flat_positions,
    has_pose_term,
    pose_indices,
    query_weight,
    sees_scalars,
    tables_of,
)
from escnn_attention.plain.cross_attention import MOST_STEPS, CrossAttention, Places, Projections, number_of_clouds
from escnn_attention.plain.projections import AttentionMode


class GroupCrossAttention(Wrapper, GridModule):
    r"""Cross-attention: the features of one set attend to those of another, over one fiber group H.

    For every output pose h, query :math:`(x, \tilde h)` and key :math:`(x', \hat h)`, with heads of C channels:

    .. math::
        s_h(x, \tilde h; x', \hat h) &= \langle q(x, \tilde h),\; k(x', \hat h)
            + \rho(h^{-1}\Delta,\, h^{-1}\hat h) \rangle / \sqrt C \\
        \mathrm{out}(x, h) &= \sum_{\tilde h \in Q(h)} \; \sum_{(x', \hat h) \in N(x, \tilde h)}
            \mathrm{softmax}_{(x', \hat h)}(s_h) \; v(x', \hat h)

    It is :class:`GroupSelfAttention` with queries from one set, and keys and values from another: with the same
    features for both, and the same weights, the outputs are equal. Queries, keys and values are regular fields,
    computed by all equivariant pointwise maps from fields of any types. If an element of H transforms queries, keys and
    values, it transforms the output; the layer is exactly equivariant.

    The offset :math:`\Delta` depends on where the two sets are:

    - Both are grids of the same gspace, which share their centre. Then :math:`\Delta = x' - x`. Grids of other sizes
      have the same extent: the distance of neighbouring positions is inversely proportional to their number, unless
      ``spacing`` says otherwise. ``kernel_size`` is a window about the place of the query.
    - Both are points, ``coords`` of a GeometricTensor, or one of them is a grid, whose positions are points then, with
      its centre at the origin and neighbouring positions 1 apart. Then :math:`\Delta = (x' - x) / \ell` with the
      ``length_scale`` :math:`\ell`. ``radius``, ``num_neighbours`` or ``edge_index`` choose the keys of a query, or a
      ``kernel_size`` about its place where one set is a grid; the heads give zero for a query without keys.
    - They are of different gspaces, such as the tokens of a sequence and an image. A query has no place among the keys.
      :math:`\Delta = x'` is the place of the key relative to the centre of its own grid, in units of half the longest
      side; of points it is their place relative to the mean of their cloud, in units of the ``length_scale``. With
      ``encoding="none"``, the default there, the keys are a set.

    Args:
        query_type: the type of the queries: any fields, over any gspace.
        key_type: the type of the keys: any fields, over any gspace with the same fiber group.
        out_type: the type of the output, over the gspace of ``query_type``.
        num_heads: the number of heads.
        kernel_size: the odd width of the window in positions of the grid of the keys, or of the queries where the keys
            are points; None for all keys. A window needs a grid, and sets of the same gspace.
        value_type: the type of the values, over the gspace of ``key_type``; None for ``key_type``.
        query, keys: which poses attend to which, as in :class:`GroupSelfAttention`.
        encoding: the positional encoding, as in :class:`GroupSelfAttention`; one that reads queries and keys. By
            default ``"mlp"`` between grids, and ``"none"`` between sequences and between different gspaces.
        window: as in :class:`GroupSelfAttention`.
        spacing: the distance of neighbouring keys, in steps of the grid of the queries: a number, such as 2 for keys
            that a stride of 2 has left; None for grids of the same extent.
        length_scale: the unit of length of the encoding between points, in the units of their coordinates; by default
            ``radius``, or 1.
        dropout, backend, samples: as in :class:`GroupSelfAttention`.
        options: ``head_fields``, ``projection``, ``bias``, ``qk_norm`` and ``registers`` as in
            :class:`GroupSelfAttention`; ``dilation`` and ``causal`` (or ``is_causal``) as there, for grids with the
            same positions; ``padding_mode`` as there, for grids that cover the same torus; ``radius``,
            ``num_neighbours``, ``cutoff`` and ``period`` as in :class:`PointSelfAttention`, for points, also beside a
            grid.

    Shape:
        ``(B, query_type.size, *space)`` and ``(B, key_type.size, *key_space)`` to ``(B, out_type.size, *space)``.
        Either may be at points, ``(N, query_type.size)`` or ``(N', key_type.size)`` with coordinates.

    Raises:
        ValueError: different fiber groups, a window or radius between different gspaces, both of them, an encoding
            without queries or keys, and as :class:`GroupSelfAttention` and :class:`PointSelfAttention`.

    Example:
        >>> import torch
        >>> from escnn_attention import GroupCrossAttention, sequence_space
        >>> from escnn import gspaces, nn
        >>> plane = gspaces.rot2dOnR2(4)
        >>> tokens = sequence_space(plane.fibergroup)
        >>> action, image = nn.FieldType(tokens, 2 * [tokens.irrep(1)]), nn.FieldType(plane, 4 * [plane.regular_repr])
        >>> layer = GroupCrossAttention(action, image, action, num_heads=2, head_fields=4, encoding="mlp")
        >>> layer(action(torch.randn(1, 4, 7)), image(torch.randn(1, 16, 9, 9))).shape  # 7 tokens, 81 positions
        torch.Size([1, 4, 7])

    Source: Vaswani et al., "Attention Is All You Need", NeurIPS 2017, Section 3.2.3; GSA-Nets (Romero and Cordonnier
    2021), Eq. 16, for attention of poses.
    """

    plain: CrossAttention

    def __init__(
        self,
        query_type: FieldType,
        key_type: FieldType,
        out_type: FieldType,
        num_heads: int = 1,
        kernel_size: int | None = None,
        *,
        value_type: FieldType | None = None,
        query: QueryMode = "own",
        keys: KeyMode = "all",
        encoding: Encoding | str | None = None,
        window: str = "auto",
        spacing: float | None = None,
        length_scale: float | None = None,
        dropout: float = 0.0,
        backend: str = "auto",
        samples: Samples | int | None = None,
        **options: Unpack[CrossOptions],
    ):
        check_options(type(self).__name__, options, option_names(GroupCrossAttention))
        value_type = key_type if value_type is None else value_type
        _check_types(query_type, key_type, value_type, out_type)
        super().__init__(query_type, out_type)
        if backend not in BETWEEN_POINTS.backends:
            ON_GRIDS.check(backend)
        mode = AttentionMode(query, keys, dropout, backend)
        given: dict[str, Any] = {**options}
        one_space = query_type.gspace == key_type.gspace
        group = fibers(key_type.gspace, as_samples(samples))
        if group.samples is not None and group.samples.turn == "random":
            raise ValueError('samples: got turn="random", which cross-attention does not have; needed turn="fixed"')
        is_causal = check_bool("is_causal", given.pop("is_causal", False))
        grid_options = {name: given.pop(name) for name in ("dilation", "causal", "padding_mode") if name in given}
        grid_options |= {"causal": True} if is_causal else {}
        seen = _choose_window(group, key_type, kernel_size, window, one_space, **grid_options)
        point_options = {n: value for n in _POINT_OPTIONS if (value := given.pop(n, None)) is not None}
        heads = Heads(out_type, num_heads, group, **given)
        bound = _choose_encoding(encoding, query_type.gspace, one_space)
        check_on_torus(bound, seen)
        places = _choose_places(group, bound, seen, one_space, spacing, length_scale, point_options)
        needs = heads.needs(bound, mode)
        if bound.has_start or not (needs.queries and needs.keys):
            raise ValueError(
                f"encoding: got {type(bound).__name__}, whose scores do not read queries and keys as they are; needed "
                "mlp, separable, fourier, rotary, absolute, none or an Encoding that does"
            )
        # Keys and values that all poses have alike need none, nor do queries that look at such keys, or at all poses.
        lifts = (
            is_scalar(value_type) and heads.projection == "group" and sees_scalars(key_type, bound, heads, query, keys)
        )
        asks_alike = heads.projection == "group" and group.order > 1 and is_scalar(query_type)
        asks_alike = asks_alike and (lifts or (keys == "all" and not bound.absolute))
        poses = has_pose_term(bound, query, keys, lifts=lifts)
        num_poses = group.order + heads.registers if poses else 1
        plain = CrossAttention(
            Projections(
                heads.read_one(query_type, heads.channels, scalars=asks_alike),
                heads.read_one(key_type, needs.key_bias, scalars=lifts),
                heads.read_one(value_type, heads.channels, scalars=lifts),
                heads.write(out_type),
            ),
            bind(bound, heads, seen, num_poses),
            tables_of(group, num_poses, heads.registers, poses=poses, weighs=keys == "all" and not lifts),
            places,
            mode,
            query_weight=query_weight(out_type, group, query, lifts=asks_alike),
        )
        self.query_type, self.key_type, self.value_type = query_type, key_type, value_type
        self.plain = heads.complete(plain)
        self.num_heads, self.head_fields = heads.number, heads.channels
        self.samples = group.samples

    def forward(
        self,
        queries: GeometricTensor,
        keys: GeometricTensor,
        values: GeometricTensor | None = None,
        key_padding_mask: Tensor | None = None,
        *,
        query_batch: Tensor | None = None,
        key_batch: Tensor | None = None,
        edge_index: Tensor | None = None,
    ) -> GeometricTensor:
        """Apply the layer to two sets of features.

        Args:
            queries: features of type ``query_type``, on a grid, or at points: ``(N, query_type.size)`` with ``coords``.
            keys: features of type ``key_type``, on a grid, of as many images, or at points.
            values: features of type ``value_type`` where the keys are; None for those of the keys.
            key_padding_mask: ``(B, *key_space)``, or ``(N',)`` for points; True for keys that are to be ignored,
                whatever they hold, as in ``torch.nn.MultiheadAttention``. Where all keys are ignored, queries attend to
                zeros on grids, and to nothing at points.
            query_batch, key_batch: ``(N,)`` and ``(N',)``, for points the number of the cloud of each; queries attend
                to keys of the same number, image number b of a grid to cloud number b. None for a single cloud.
            edge_index: ``(2, E)``, where either are points: the edges from keys (first row) to queries (second row).
                Positions of grids count on from image to image. None for the keys that the layer chooses.

        Raises:
            TypeError: an argument is no GeometricTensor, of another precision, or the mask is no tensor of bool.
            ValueError: other numbers of images or clouds, values on another grid, grids whose sizes have no ratio, do
                not cover the same torus, or differ for a layer that is causal or dilated; a window between points or
                that reaches around a torus, a radius between grids, edges for a layer that chooses keys.
        """
        x, y, z = self._check_sets(queries, keys, values)
        mask = None if key_padding_mask is None else check_mask(key_padding_mask, y, "key_padding_mask")
        sets, batches = (queries, keys), (query_batch, key_batch)
        if queries.coords is None and keys.coords is None:
            _check_no_batch(batches)
            self._check_grids(x, y, edge_index)
            return GeometricTensor(self.plain(x, y, z, mask), self.out_type)
        self._check_points(sets, batches, mask, edge_index)
        out = self.plain(x, y, z, mask, queries.coords, keys.coords, *batches, edge_index)
        return GeometricTensor(out, self.out_type, queries.coords)

    def attention_maps(
        self,
        queries: GeometricTensor,
        keys: GeometricTensor,
        positions: Sequence[Sequence[int]] | Sequence[int] | Tensor,
        poses: Sequence[int | GroupElement] | None = None,
        key_padding_mask: Tensor | None = None,
        *,
        query_batch: Tensor | None = None,
        key_batch: Tensor | None = None,
        edge_index: Tensor | None = None,
    ) -> Tensor:
        r"""The attention of chosen queries.

        Args:
            queries, keys, key_padding_mask, query_batch, key_batch, edge_index: as in :meth:`forward`.
            positions: ``(n, d)``, the positions of the queries, as indices along the axes of their grid; of points
                their numbers, ``(n,)``; negative ones count from the end.
            poses: the output poses h, as elements or as their indices; all by default.

        Returns:
            Probabilities ``(B, num_heads, poses, positions, query poses, key poses, *key_space)``, as those of
            :meth:`GroupSelfAttention.attention_maps`. Each map sums to 1 over the key poses and the space of the keys.
            For queries at points B is 1, and for keys at points ``*key_space`` is N'; a query without keys has zeros.

        Raises:
            TypeError, ValueError: as :meth:`forward`; a position or pose that does not exist.
        """
        x, y = self._check_queries_and_keys(queries, keys)
        # Whatever values are, they are attended to alike.
        z = None if self.value_type == self.key_type else y.new_zeros(len(y), self.value_type.size, *y.shape[2:])
        mask = None if key_padding_mask is None else check_mask(key_padding_mask, y, "key_padding_mask")
        coords, batches = (queries.coords, keys.coords), (query_batch, key_batch)
        if coords == (None, None):
            _check_no_batch(batches)
            self._check_grids(x, y, edge_index)
        else:
            self._check_points((queries, keys), batches, mask, edge_index)
        flat = flat_positions(positions, x.shape[2:] if coords[0] is None else x.shape[:1])
        chosen = pose_indices(poses, self.space, self.samples)
        return self.plain.attention_maps((x, y, z), flat, chosen, mask, coords, batches, edge_index)

    def evaluate_output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the output for queries of this shape, on a grid or at points."""
        if len(input_shape) == 2 and input_shape[1] == self.query_type.size:
            return (input_shape[0], self.out_type.size)
        batch, _, *space = check_shape(input_shape, self.query_type, type(self).__name__)
        return (batch, self.out_type.size, *space)

    @property
    def shape_to_check(self) -> tuple[int, ...]:
        size, dimension = self.query_type.size, self.query_type.gspace.dimensionality
        return (9, size) if dimension and self.is_for_points else (2, size, *[4] * dimension)

    def random_keys(self, x: GeometricTensor) -> dict[str, Any]:
        """Random ``keys`` for queries like ``x``, and ``values`` and a ``key_batch`` where the layer needs them."""
        keys, batch = self.random_set(self.key_type, x)
        found = {"keys": keys} if batch is None else {"keys": keys, "key_batch": batch}
        if self.value_type != self.key_type:
            shape = (len(keys.tensor), self.value_type.size, *keys.tensor.shape[2:])
            found["values"] = GeometricTensor(torch.randn(shape).to(x.tensor), self.value_type, keys.coords)
        return found

    def random_set(self, field_type: FieldType, x: GeometricTensor) -> tuple[GeometricTensor, Tensor | None]:
        """Random features of a type where keys for queries like ``x`` may be; at points the number of each cloud."""
        one_space, dimension = x.type.gspace == field_type.gspace, field_type.gspace.dimensionality
        images, space = (1, ()) if x.coords is not None else (len(x.tensor), x.tensor.shape[2:])
        near = one_space and x.coords is not None and self.plain.window.kernel_size is None
        if not (near or (dimension and self.is_for_points)):
            y = torch.randn(images, field_type.size, *(space if space and one_space else dimension * [4]))
            return GeometricTensor(y.to(x.tensor), field_type), None
        y, coords = (torch.randn(5 * images, n).to(x.tensor) for n in (field_type.size, dimension))
        numbers = torch.arange(images, device=y.device).repeat_interleave(5)
        return GeometricTensor(y, field_type, coords), numbers

    @property
    def is_for_points(self) -> bool:
        """Whether the layer is for points alone."""
        places = self.plain.places
        near = self.plain.window.kernel_size is None and not places.rule.is_global
        return near or places.relation.period is not None

    def _check_queries_and_keys(self, queries: Any, keys: Any) -> tuple[Tensor, Tensor]:
        """The tensors of queries and keys, if they fit the layer and each other."""
        x: Tensor = check_field(queries, self.query_type, self, "queries").tensor
        y: Tensor = check_field(keys, self.key_type, self, "keys").tensor
        if queries.coords is keys.coords is None and len(x) != len(y):
            raise ValueError(f"keys: got {len(y)} images, and there are {len(x)} of queries; needed as many")
        return x, y

    def _check_sets(self, queries: Any, keys: Any, values: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        """The tensors of queries, keys and values, if they fit the layer and each other."""
        x, y = self._check_queries_and_keys(queries, keys)
        if values is None and self.value_type == self.key_type:
            return x, y, None
        if values is None:
            raise ValueError(f"values: got None, needed features of type {self.value_type}; keys are of another type")
        z: Tensor = check_field(values, self.value_type, self, "values").tensor
        if len(z) != len(y) or z.shape[2:] != y.shape[2:] or (values.coords is None) != (keys.coords is None):
            shape = (len(y), self.value_type.size, *y.shape[2:])
            raise ValueError(f"values: got shape {tuple(z.shape)}, needed {shape}, where the keys are")
        return x, y, z

    def _check_grids(self, queries: Tensor, keys: Tensor, edge_index: Tensor | None) -> None:
        """The layer is for grids, and for those of these sizes."""
        places, window = self.plain.places, self.plain.window
        of_points = {"radius, num_neighbours or period": self.is_for_points, "edge_index": edge_index is not None}
        for name, given in of_points.items():
            if given:
                raise ValueError(f"{name}: got two sets on grids, needed points (coords), or a layer with kernel_size")
        if queries.shape[2:] == keys.shape[2:] and places.spacing in (None, (1, 1)):
            return
        if window.causal or window.dilation > 1:
            word, shapes = "causal" if window.causal else "dilation", (tuple(x.shape[2:]) for x in (queries, keys))
            raise ValueError(
                f"{word}: {type(self).__name__} got grids of {' and '.join(map(str, shapes))} positions with "
                f"spacing={places.spacing}, needed the same positions for queries and keys"
            )

    def _check_points(
        self,
        sets: tuple[GeometricTensor, GeometricTensor],
        batches: tuple[Tensor | None, Tensor | None],
        mask: Tensor | None,
        edge_index: Tensor | None,
    ) -> None:
        """Points are finite where no mask hides them, and the numbers of clouds are those of images."""
        window, rule = self.plain.window, self.plain.places.rule
        on_grid = any(x.coords is None for x in sets)
        if window.kernel_size is not None and not on_grid:
            raise ValueError(
                f"kernel_size: got {window.kernel_size}, which is a window on a grid, and scattered points (coords are "
                "set); needed kernel_size=None, and radius or num_neighbours for points that are near"
            )
        for name, given, instead in (
            ("causal", window.causal, "sequences"),
            ("padding_mode", window.circular, "period= for points on a torus, or grids"),
            ("dilation", window.dilation > 1, "grids"),
        ):
            if given:
                raise ValueError(
                    f"{name}: {type(self).__name__} got scattered points (coords are set), needed {instead}"
                )
        if edge_index is not None:
            if not rule.is_global:
                raise ValueError(f"edge_index: got edges, and the layer chooses keys itself ({rule}); leave out one")
            checked(check_index, "edge_index", edge_index, (2, edge_index.shape[-1] if edge_index.dim() else 0), None)
            checked(_check_edges, edge_index, *batches, *(tuple(x.tensor[:, 0].shape) for x in sets))
        images = {len(x.tensor) for x in sets if x.coords is None}
        for name, x, batch, hidden in zip(("query", "key"), sets, batches, (None, mask), strict=True):
            if x.coords is None:
                _check_no_batch((batch,), name)
                continue
            checked(_check_cloud, name, x.coords, batch, hidden)
            number = 1 if batch is None else kept(number_of_clouds, batch)
            if images and number > min(images):
                raise ValueError(f"{name}_batch: got clouds up to number {number - 1}, needed {min(images)}, as images")
            if batch is None and images and min(images) > 1:
                raise ValueError(
                    f"{name}_batch: got None, needed the number of the image of each point, of {min(images)}"
                )

    def extra_repr(self) -> str:
        core, window = self.plain, self.plain.window
        kernel = "global" if window.kernel_size is None else f"kernel_size={window.kernel_size} ({window.form})"
        parts = [f"{self.query_type}, {self.key_type} -> {self.out_type}", f"num_heads={self.num_heads}"]
        parts += [f"head_fields={self.head_fields}", kernel, f"query={core.query!r}", f"keys={core.keys!r}"]
        parts.append(f"encoding={type(core.encoding).__name__}({core.encoding.extra_repr()})")
        rule = core.places.rule if window.kernel_size is None else Neighbourhood()
        registers, spacing = core.registers and core.registers.keys.shape[1], core.places.spacing
        parts += shown(qk_norm=(core.qk_norm is not None, False), registers=(registers, None))
        parts += shown(dilation=(window.dilation, 1), causal=(window.causal, False))
        parts += shown(padding_mode=("circular" if window.circular else "none", "none"))
        parts += shown(spacing=(spacing and spacing[1] / spacing[0], None), radius=(rule.radius, None))
        parts += shown(num_neighbours=(rule.num_neighbours, None), period=(core.places.relation.period, None))
        parts += [] if core.cutoff is None else [f"cutoff={core.cutoff.name}"]
        parts += shown(length_scale=(core.places.length_scale, rule.length))
        parts += shown(samples=(self.samples, None), dropout=(core.dropout, 0.0))
        return ", ".join([*parts, f"backend={core.backend!r}"])


def _check_no_batch(batches: Sequence[Tensor | None], *names: str) -> None:
    """Grids have images, and no numbers of clouds."""
    for name, batch in zip(names or ("query", "key"), batches, strict=True):
        if batch is not None:
            raise ValueError(f"{name}_batch: got a tensor for features on a grid, which has images; needed None")


def _check_types(query_type: Any, key_type: Any, value_type: Any, out_type: Any) -> None:
    """All are types over one fiber group; the output is where the queries are, values are where the keys are."""
    given = {"query_type": query_type, "key_type": key_type, "value_type": value_type, "out_type": out_type}
    for name, value in given.items():
        check_type(name, value)
    asking, asked = query_type.gspace, key_type.gspace
    if asking.fibergroup != asked.fibergroup:
        raise ValueError(
            f"key_type: its fiber group is {asked.fibergroup.name}, needed that of query_type, {asking.fibergroup.name}"
        )
    for name, other, gspace in (("value_type", "key_type", asked), ("out_type", "query_type", asking)):
        if given[name].gspace != gspace:
            raise ValueError(f"{name}: its gspace is {given[name].gspace.name}, needed that of {other}, {gspace.name}")


def _choose_encoding(encoding: Encoding | str | None, asking: GSpace, one_space: bool) -> Encoding:
    """The encoding; by default that of offsets where there are some in space."""
    is_sequence = isinstance(asking, SpaceTime) and asking.base.dimensionality == 0
    if encoding is None and (is_sequence or not one_space):
        return as_encoding("none")
    return as_encoding(encoding)


def _choose_window(
    group: Fibers, key_type: FieldType, kernel_size: int | None, window: str, one_space: bool, **options: Any
) -> Window:
    """The window that is asked for, if queries have a place among the keys."""
    given = {"kernel_size": kernel_size, "causal": options.get("causal"), "padding_mode": options.get("padding_mode")}
    for name, value in given.items():
        if value not in (None, False, "none") and not one_space:
            raise ValueError(
                f"{name}: got {value!r}, but queries have no place in {key_type.gspace.name}, the gspace of the "
                "keys; leave it out, or give keys of the gspace of the queries"
            )
    return choose_window(group, key_type, kernel_size, window, options.pop("dilation", 1), **options)


_POINT_OPTIONS = ("radius", "num_neighbours", "cutoff", "period")


def _choose_places(
    group: Fibers,
    encoding: Encoding,
    window: Window,
    one_space: bool,
    spacing: float | None,
    length_scale: float | None,
    options: dict[str, Any],
) -> Places:
    """Where queries and keys are, and which keys a query sees."""
    for name, value in options.items():
        if value is not False and not one_space:
            raise ValueError(f"{name}: got {value!r}, but queries and keys are of different gspaces; leave it out")
        if value is not False and window.kernel_size is not None:
            raise ValueError(f"{name}: got {value!r} with kernel_size={window.kernel_size}; needed one of them")
    relation = Offset(options.get("period"))
    check_box(relation, group, "the keys")
    choose_kernel(encoding, relation)
    rule = choose_neighbourhood(options.get("radius"), options.get("num_neighbours"), relation, group.dimension)
    cutoff = choose_cutoff(options.get("cutoff", False), rule)
    length = check_length("length_scale", rule.length if length_scale is None else length_scale)
    if window.kernel_size is not None:
        rule = _rule_of(window)
    return Places(one_space, window, rule, relation, length, _choose_spacing(spacing, one_space), cutoff)


def _rule_of(window: Window) -> Neighbourhood:
    """By which a window about a point has positions of a grid, 1 apart, or the other way round."""
    assert window.kernel_size is not None
    longest = longest_square(window.kernel_size, window.shape)
    if longest is not None:
        return Neighbourhood(math.sqrt(longest))
    # Less than half the width away along each axis, as between grids.
    return Neighbourhood(math.nextafter(window.kernel_size / 2, 0.0), metric=largest_step)


def _choose_spacing(spacing: float | None, one_space: bool) -> tuple[int, int] | None:
    """The spacings of queries and keys, in the largest unit that both have."""
    if spacing is None:
        return None
    if not one_space:
        raise ValueError(f"spacing: got {spacing!r}, but queries and keys are of different gspaces; leave it at None")
    step = check_length("spacing", spacing)
    found = Fraction(step).limit_denominator(MOST_STEPS)
    if abs(float(found) - step) > 1e-6 or not 0 < found <= MOST_STEPS:
        raise ValueError(
            f"spacing: got {spacing!r}, needed a ratio of whole numbers from 1 to {MOST_STEPS}, such as 2 or 0.5"
        )
    return found.denominator, found.numerator


def _check_cloud(name: str, coords: Tensor, batch: Tensor | None, hidden: Tensor | None) -> None:
    """The coordinates of queries or keys are finite where no mask hides them, and their clouds have numbers."""
    if len(coords) == 0:
        raise ValueError(f"{'queries' if name == 'query' else 'keys'}: got no points, needed at least one")
    finite = numbers_of("coords", coords).isfinite().all(-1)
    if not bool((finite if hidden is None else finite | hidden).all()):
        hint = "; leave keys out by key_padding_mask" if name == "key" else ""
        raise ValueError(f"coords of {name}: got numbers that are not finite{hint}")
    if batch is not None:
        check_index(f"{name}_batch", batch, (len(coords),), None)


def _check_edges(
    edge_index: Tensor,
    query_batch: Tensor | None,
    key_batch: Tensor | None,
    queries: tuple[int, ...],
    keys: tuple[int, ...],
) -> None:
    """Edges lead from keys to queries of the same cloud or image, of sets ``(N,)`` or ``(B, *space)``."""
    clouds = []
    for row, batch, shape in ((0, key_batch, keys), (1, query_batch, queries)):
        index = numbers_of("edge_index", edge_index[row])
        check_index("edge_index", index, (len(index),), math.prod(shape))
        if batch is None:
            clouds.append(index // math.prod(shape[1:]) if len(shape) > 1 else torch.zeros_like(index))
        else:
            clouds.append(numbers_of("batch", batch)[index])
    if not bool((clouds[0] == clouds[1]).all()):
        raise ValueError("edge_index: got edges from keys of one cloud or image to queries of another")
