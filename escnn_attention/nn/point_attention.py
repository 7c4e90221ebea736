"""Self-attention and attentive convolution on point clouds."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from escnn.group import GroupElement
from escnn.nn import FieldType, GeometricTensor
from torch import Tensor
from typing_extensions import Unpack

from escnn_attention._checks import check_int, check_length
from escnn_attention.encodings import Encoding, as_encoding
from escnn_attention.encodings.pair_kernel import PairKernel
from escnn_attention.functional import BETWEEN_POINTS, KeyMode, QueryMode
from escnn_attention.functional.call import Normalization
from escnn_attention.geometry.neighbours import Neighbourhood
from escnn_attention.geometry.points import Cloud
from escnn_attention.geometry.relations import Offset, Relation, periods_of
from escnn_attention.groups.fibers import Fibers, fibers, subgroup_id
from escnn_attention.groups.lie_algebra import random_transformation
from escnn_attention.groups.samples import Samples, as_samples
from escnn_attention.nn.arguments import PairOptions, PointSelfOptions, check_options, check_types, option_names
from escnn_attention.nn.heads import Heads, check_poses, is_scalar
from escnn_attention.nn.module import PointLayer, check_edge_dim
from escnn_attention.nn.self_attention import check_shared, flat_positions, pose_indices, query_weight
from escnn_attention.plain.cutoff import Cutoff, polynomial_envelope
from escnn_attention.plain.point_attention import ConvolvedValues, PointAttention
from escnn_attention.plain.projections import AttentionMode, GroupTables, padded, with_registers


class PointSelfAttention(PointLayer):
    r"""Self-attention between the points of a cloud: from any fields to any fields, equivariant to the isometries
    :math:`R^d \rtimes H`.

    For every output pose h, query :math:`(x_i, \tilde h)` and key :math:`(x_j, \hat h)`, with
    :math:`\Delta = x_j - x_i` and heads of C channels:

    .. math::
        s_h(i, \tilde h; j, \hat h) &= \langle q_i(\tilde h),\; k_j(\hat h)
            + \rho(h^{-1}\Delta,\, h^{-1}\hat h) \rangle / \sqrt C + \log\mu_j \\
        \mathrm{out}_i(h) &= \sum_{\tilde h \in Q(h)} \; \sum_{j \in N(i),\, \hat h}
            \mathrm{softmax}_{(j, \hat h)}(s_h) \; v_j(\hat h)

    and an equivariant projection of all heads to ``out_type``. It is :class:`GroupSelfAttention` between points. Points
    are transformed and never resampled, so the layer is exact for every element of the fiber group, for translations,
    and for permutations of the points.

    For trivial fields alone (atoms, masses) queries and keys have no poses, and lifting costs :math:`|H|` times less.

    Args:
        in_type: the type of the input. Any fields, over a gspace on R² or R³; or over one without a base space, for
            sets of tokens ``(N, in_type.size)`` without coordinates, which ``batch`` tells apart.
        out_type: the type of the output, over the same gspace.
        num_heads: the number of heads.
        head_fields: the number C of regular fields of a head: see :class:`GroupSelfAttention`.
        radius: points attend to points within this distance, in the units of the coordinates, or for lifted points by
            :meth:`LiftedMotion.distance <escnn_attention.LiftedMotion.distance>`; None for any distance.
        num_neighbours: points attend to this number of nearest points, themselves included; None for all. Without both
            a point attends to its whole cloud, or to the edges given on application. The choice among points at equal
            distances is arbitrary: where there are such, as on lattices, only a ``radius`` is exactly equivariant.
        cutoff: whether weights go to zero smoothly at the radius, so that energies and forces do not jump when a point
            crosses it: True for the polynomial :math:`u(t) = 1 - 28t^6 + 48t^7 - 21t^8`, whose first two derivatives
            vanish at t = 1, or a function of :math:`t = r / \mathrm{radius}` in [0, 1] that is 0 at 1, such as a module
            (each layer has a copy). The measure :math:`\mu_j` becomes :math:`\mu_j\, u(r_{ij} / \mathrm{radius})`, with
            the distance that ``radius`` is one of. Numbers below 0 count as 0.
        period: the side of a periodic box, or its sides along the axes of the coordinates: :math:`\Delta` is the
            shortest of the offsets between images of two points, by which neighbours are searched, too. The fiber group
            has to map the box onto itself, and a ``radius`` is at most half a side. None for space itself.
        query, keys, projection, dropout, qk_norm, registers: as in :class:`GroupSelfAttention`. For a register, too,
            an encoding or kernel gets the relation of the points, and its number in place of a pose (without samples).
        shared_scores, poses: as in :class:`GroupSelfAttention`, between offsets (``relation=None``).
        bias: likewise. Keys have a bias with ``normalization="count"``, too, and in a :class:`PairKernel` where it does
            not drop out: unless that is a sum with :math:`\langle q, k \rangle`.
        encoding: the positional encoding, as in :class:`GroupSelfAttention`, or a :class:`PairKernel`.
        relation: the argument of the encoding, a function of two points, :class:`Offset` (None), :class:`Pair`,
            :class:`LogPolar`, :class:`LogMotion`, or one of your own.
        length_scale: the unit of length of the encoding, in the units of the coordinates; by default ``radius``, or 1.
            Encodings vary on lengths of about 1, so choose the distance that matters.
        edge_dim: the number of invariant features :math:`e_{ij}` of an edge from key j to query i, such as the type of
            a bond or the product of two charges: ``edge_attr`` on application. For each head m they add :math:`w_m
            \cdot e_{ij}` to the scores and multiply the weight of the value by :math:`1 + u_m \cdot e_{ij}`, which may
            change its sign; w and u are learned. None for no features.
        samples: for a continuous fiber group, its :class:`Samples` or their number; None for a finite one.
        normalization: ``"softmax"``, or ``"count"``: scores divided by the number of keys, which may be negative. In
            whole clouds, with an encoding that factorises, the cost then grows linearly with the number of points.
        backend: ``"auto"``, or a name from ``escnn_attention.functional.BETWEEN_POINTS``: ``"native"`` on the CPU and
            ``"triton"`` on CUDA, loops over queries and their keys; ``"neighbours"``, the same by PyTorch operations;
            ``"dense"``, PyTorch's fused attention, for whole clouds with an encoding that factorises (Fourier, rotary,
            absolute, none), whose second derivatives take memory for every score; ``"linear"``, one sum of keys and
            values for all points, with ``normalization="count"`` and such an encoding; ``"reference"``, the formula.
            ``"auto"`` takes ``"dense"`` from 64 points a cloud on, where coordinates require no gradient; if losses
            have gradients by features, ``"neighbours"`` takes the least memory.

    Shape:
        ``(N, in_type.size)`` with ``coords`` ``(N, d)`` to ``(N, out_type.size)`` with the same coordinates.

    Raises:
        ValueError: another gspace, heads that do not divide the fields, an unknown option, places without a base
            space, a ``cutoff`` without a ``radius`` or that is not 0 there, a ``period`` of a box that the fiber group
            does not map onto itself, that a ``radius`` does not fit into, or with a rotary or absolute encoding.

    Example:
        >>> import torch
        >>> from escnn_attention import PointSelfAttention
        >>> from escnn import gspaces, nn
        >>> g = gspaces.rot2dOnR3(4)
        >>> atoms = nn.FieldType(g, 5 * [g.trivial_repr])
        >>> hidden = nn.FieldType(g, 8 * [g.regular_repr])
        >>> layer = PointSelfAttention(atoms, hidden, num_heads=2, radius=3.0)
        >>> x = nn.GeometricTensor(torch.randn(7, 5), atoms, torch.randn(7, 3))
        >>> layer(x, batch=torch.tensor([0, 0, 0, 0, 1, 1, 1])).shape
        torch.Size([7, 32])

    Source: Hutchinson et al., "LieTransformer", ICML 2021; "Equivariant Attention on Homogeneous Spaces" (slides).
    """

    kernel_features: int | None = None
    """The number of functions in the kernel that values pass through; None where they pass as they are."""

    def __init__(
        self,
        in_type: FieldType,
        out_type: FieldType,
        num_heads: int = 1,
        *,
        radius: float | None = None,
        num_neighbours: int | None = None,
        query: QueryMode = "own",
        keys: KeyMode = "all",
        shared_scores: bool = False,
        encoding: Encoding | PairKernel | str | None = None,
        relation: Relation | None = None,
        length_scale: float | None = None,
        normalization: Normalization = "softmax",
        dropout: float = 0.0,
        edge_dim: int | None = None,
        samples: Samples | int | None = None,
        backend: str = "auto",
        **options: Unpack[PointSelfOptions],
    ):
        check_options(type(self).__name__, options, option_names(PointSelfAttention))
        check_types(in_type, out_type)
        BETWEEN_POINTS.check(backend)
        mode = AttentionMode(query, keys, dropout, backend, shared_scores, normalization)
        given: dict[str, Any] = {**options}
        places: dict[str, Any] = {"radius": radius, "num_neighbours": num_neighbours, "length_scale": length_scale}
        places["encoding"] = encoding if isinstance(encoding, PairKernel) else None
        relation = self._check_space(in_type, relation, given.pop("period", None), **places)
        group, subgroup = fibers(in_type.gspace, as_samples(samples)), subgroup_id(given.pop("poses", None))
        check_box(relation, group, in_type.gspace.name)
        if subgroup is not None:
            group = fibers(in_type.gspace, subgroup=subgroup)
            if not relation.is_offset:
                raise ValueError(f"poses: got {subgroup} with {relation}, needed the offset, relation=None")
        cutoff = given.pop("cutoff", False)
        heads = Heads(out_type, num_heads, group, **given)
        kernel = choose_kernel(encoding, relation)
        check_poses(heads, kernel)
        rule = choose_neighbourhood(radius, num_neighbours, relation, group.dimension)
        lifts = not check_shared(shared_scores, query, keys, kernel, group) and _lifts(in_type, heads, relation)
        needs, registers = heads.needs(kernel, mode), heads.registers
        tables = _tables(group, lifts, registers)
        size, num_poses = relation.size(group.dimension), 1 if lifts else group.order + registers
        alike = lifts or relation.sees_poses or _drops_out(kernel, query, keys, normalization)
        seen = 1 if alike else group.relations + registers
        relative = tables.relative
        sizes = (size, heads.number, heads.channels, seen, 0 if relative is None else torch.as_tensor(relative))
        plain = PointAttention(
            project_in=heads.read(in_type, needs, scalars=lifts),
            values=self._values(size, heads, num_poses, relative),
            project_out=heads.write(out_type),
            encoding=bind_kernel(kernel, normalization, *sizes),
            relation=relation,
            neighbourhood=rule,
            tables=tables,
            mode=replace(mode, backend=_check_motion(relation, keys, backend, shared_scores)),
            needs=needs,
            length_scale=check_length("length_scale", rule.length if length_scale is None else length_scale),
            query_weight=query_weight(out_type, group, query, lifts=lifts),
            transformation=random_transformation(in_type, out_type, group),
            edge_dim=check_edge_dim(edge_dim),
            cutoff=choose_cutoff(cutoff, rule),
        )
        super().__init__(in_type, out_type, heads.complete(plain), heads.channels)
        self.poses = subgroup
        self.samples = group.samples

    def attention_maps(
        self,
        x: GeometricTensor,
        positions: Sequence[int] | Tensor,
        poses: Sequence[int | GroupElement] | None = None,
        edge_index: Tensor | None = None,
        batch: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        measure: Tensor | None = None,
        edge_attr: Tensor | None = None,
    ) -> Tensor:
        r"""The attention of chosen points.

        Args:
            x, edge_index, batch, mask, measure, edge_attr: as in :meth:`forward`.
            positions: ``(n,)``, the numbers of the points that are queries; negative ones count from the end.
            poses: the output poses h, as elements or as their indices; all by default.

        Returns:
            Probabilities ``(1, num_heads, poses, positions, query poses, key poses, N)``, with the axes of
            :meth:`GroupSelfAttention.attention_maps`, zeros for points that are not seen or not there, and times the
            factors of edge features. With ``normalization="count"`` they are shares of the scores. Dropout is not
            applied.

        Raises:
            TypeError, ValueError: as :meth:`forward`; a point or pose that does not exist.
        """
        x = self._check(x, edge_index, batch, mask, measure, edge_attr)
        of_poses = pose_indices(poses, self.space, self.samples, self.poses)
        chosen = flat_positions(positions, x.tensor.shape[:1]), of_poses
        cloud = Cloud(x.coords, edge_index, batch, measure, edge_attr)
        return self.plain.attention_maps(x.tensor, cloud, *chosen, mask)

    def _check_space(self, in_type: FieldType, relation: Relation | None, period: Any, **places: Any) -> Relation:
        """The relation, by default the offset; ``places`` are options for points that have a place."""
        if in_type.gspace.dimensionality == 0:
            others = {"relation": relation, "period": period, "kernel_features": self.kernel_features, **places}
            for name, value in others.items():
                if value is not None:
                    instead = "use PointSelfAttention" if name == "kernel_features" else "leave it out"
                    raise ValueError(
                        f"{name}: {type(self).__name__} got {value}, but {in_type.gspace.name} has no base space, in "
                        f"which points would have places; {instead}"
                    )
        if relation is not None and not isinstance(relation, Relation):
            raise TypeError(f"relation: got {type(relation).__name__}, needed a Relation or None")
        if period is None:
            return relation or Offset()
        if relation is not None and repr(relation) not in (repr(Offset()), repr(Offset(period))):
            raise ValueError(f"period: got {period} with relation={relation}, needed the offset, relation=None")
        return Offset(period)

    def _values(self, size: int, heads: Heads, num_poses: int, relative: np.ndarray | None) -> ConvolvedValues | None:
        """The kernel of values of ``num_poses`` poses, as a function of ``size`` numbers; None without a kernel."""
        if self.kernel_features is None:
            return None
        return ConvolvedValues(
            size,
            heads.number,
            heads.channels,
            num_poses,
            features=check_int("kernel_features", self.kernel_features),
            pose_features=0 if relative is None else relative.shape[-1],
        )


class ConvOptions(PairOptions, total=False):
    """Options of :class:`PointAttentiveConv`."""

    dropout: float


class PointAttentiveConv(PointSelfAttention):
    r"""Attentive convolution on points: attention in which the values pass through a kernel of the location.

    .. math::
        \mathrm{out}_i(h) = \sum_{\tilde h \in Q(h)} \; \sum_{j \in N(i),\, \hat h}
            \alpha_h(i, \tilde h; j, \hat h) \; W(h^{-1}\Delta,\, h^{-1}\hat h) \, v_j(\hat h)

    with the attention :math:`\alpha` of :class:`PointSelfAttention`. The kernel of a head is :math:`W(\delta, p) =
    \sum_f \phi_f(\delta)\, W_f[p]`, with functions :math:`\phi_f` computed by a small network and matrices
    :math:`W_f[p]` of size C × C. With constant attention it is a continuous group convolution, with a constant kernel
    self-attention.

    Args:
        in_type, out_type, num_heads: as in :class:`PointSelfAttention`.
        kernel_features: the number of functions :math:`\phi_f`.
        encoding: as in :class:`PointSelfAttention`, but neither rotary nor absolute.
        options: those of :class:`PointSelfAttention` but ``keys``, ``shared_scores``, ``poses`` and ``backend``.

    Shape:
        ``(N, in_type.size)`` with ``coords`` ``(N, d)`` to ``(N, out_type.size)`` with the same coordinates.

    Example:
        >>> import torch
        >>> from escnn_attention import PointAttentiveConv
        >>> from escnn import gspaces, nn
        >>> g = gspaces.rot2dOnR2(6)
        >>> scalars, vectors = nn.FieldType(g, 3 * [g.trivial_repr]), nn.FieldType(g, 2 * [g.irrep(1)])
        >>> layer = PointAttentiveConv(scalars, vectors, num_heads=2, num_neighbours=5)
        >>> layer(nn.GeometricTensor(torch.randn(9, 3), scalars, torch.randn(9, 2))).shape
        torch.Size([9, 4])

    Source: "Equivariant Attention on Homogeneous Spaces" (slides), "Attentive Convolution".
    """

    def __init__(
        self,
        in_type: FieldType,
        out_type: FieldType,
        num_heads: int = 1,
        *,
        kernel_features: int = 8,
        encoding: Encoding | PairKernel | str | None = None,
        **options: Unpack[ConvOptions],
    ):
        check_options(type(self).__name__, options, option_names(PointAttentiveConv))
        kernel = relative_kernel(encoding, "PointAttentiveConv", "the relation of two points")
        self.kernel_features = kernel_features
        super().__init__(in_type, out_type, num_heads, encoding=kernel, **options)


def choose_neighbourhood(
    radius: float | None, num_neighbours: int | None, relation: Relation, dim: int
) -> Neighbourhood:
    """The rule by which points of R^dim are neighbours, by the metric or period of the relation where it has one."""
    if num_neighbours is not None:
        check_int("num_neighbours", num_neighbours)
    periods = periods_of(relation.period, dim)
    if radius is not None and periods is not None and check_length("radius", radius) > min(periods) / 2:
        raise ValueError(
            f"radius: got {radius} in a periodic box of sides {periods}, where several images of a point may lie "
            f"within it; needed at most half a side, {min(periods) / 2:g}"
        )
    metric = relation.metric
    return Neighbourhood(
        None if radius is None else check_length("radius", radius),
        num_neighbours,
        metric,
        periods if metric is None else None,
    )


def check_box(relation: Relation, group: Fibers, name: str) -> None:
    """Check that the fiber group maps the periodic box of a relation onto itself, if there is one."""
    periods = periods_of(relation.period, group.dimension)
    if periods is None:
        return
    sides = np.array(periods)
    # What an element makes of the side along each axis, in periods: whole numbers.
    images = group.action * sides / sides[:, None]
    if group.samples is not None or not np.allclose(images, images.round(), atol=1e-9):
        raise ValueError(
            f"period: got a box of sides {periods}, which the fiber group of {name} does not map onto itself; needed "
            "equal sides along axes that the group exchanges, and a finite group of quarter turns, reflections and "
            "inversions along the axes of the box"
        )


def choose_cutoff(cutoff: Any, rule: Neighbourhood) -> Cutoff | None:
    """The envelope within the radius of a rule: of True, the polynomial, or of a function; None for False."""
    if cutoff is False:
        return None
    if cutoff is not True and not callable(cutoff):
        raise TypeError(f"cutoff: got {cutoff!r}, needed True, False, or a function of r / radius in [0, 1]")
    if rule.radius is None:
        raise ValueError("cutoff: got one without a radius, at which it would be 0; needed radius=..., too")
    if cutoff is True:
        return Cutoff(polynomial_envelope, rule)
    _check_envelope(cutoff)
    return Cutoff(copy.deepcopy(cutoff) if isinstance(cutoff, torch.nn.Module) else cutoff, rule)


_VANISHES = 1e-5
"""Up to here an envelope is 0 to rounding error."""


@torch.no_grad()
def _check_envelope(function: Callable[[torch.Tensor], Any]) -> None:
    """A function is one of distances in units of the radius, and vanishes at 1."""
    parameters = list(function.parameters()) if isinstance(function, torch.nn.Module) else []
    own = next((p for p in parameters if p.is_floating_point()), torch.zeros(()))
    x = torch.linspace(0, 1, 5).to(own).view(1, 1, 5)
    y = function(x)
    if not isinstance(y, torch.Tensor):
        raise TypeError(f"cutoff: the function gave {type(y).__name__}, needed a tensor")
    if y.shape != x.shape:
        raise ValueError(f"cutoff: the function gave shape {tuple(y.shape)} for {tuple(x.shape)}, needed the same")
    if not (y.isfinite().all() and y.min() >= -_VANISHES and y[..., -1].abs() <= _VANISHES):
        values = ", ".join(f"{number:.3g}" for number in y.flatten().tolist())
        raise ValueError(
            f"cutoff: the function gave {values} at 0, 1/4, 1/2, 3/4 and 1, needed finite numbers of at least 0, and 0 "
            "at 1, the radius"
        )


def bind_kernel(kernel: Encoding | PairKernel, normalization: Normalization, *sizes: Any) -> Encoding | PairKernel:
    """The encoding or kernel for heads of these sizes and this normalisation."""
    options: dict[str, Any] = {"normalization": normalization} if isinstance(kernel, PairKernel) else {}
    return kernel.bind(*sizes, **options)


def choose_kernel(encoding: Encoding | PairKernel | str | None, relation: Relation) -> Encoding | PairKernel:
    """The encoding or kernel, if it can see this relation."""
    kernel = encoding if isinstance(encoding, PairKernel) else as_encoding(encoding)
    if (kernel.absolute or kernel.rotates) and (not isinstance(relation, Offset) or relation.period is not None):
        name = "relation" if relation.period is None else "period"
        raise ValueError(
            f"{name}: got {relation}, but a {type(kernel).__name__} is a function of the positions themselves; "
            "leave it at None"
        )
    return kernel


def relative_kernel(encoding: Encoding | PairKernel | str | None, layer: str, argument: str) -> Encoding | PairKernel:
    """The encoding or kernel of a layer, if it is a function of the argument, and not of the positions themselves."""
    kernel = encoding if isinstance(encoding, PairKernel) else as_encoding(encoding)
    if kernel.absolute or kernel.rotates:
        raise ValueError(
            f"encoding: {layer} got {type(kernel).__name__}, needed a function of {argument}: mlp, separable, fourier, "
            "none or a PairKernel"
        )
    return kernel


def _lifts(in_type: FieldType, heads: Heads, relation: Relation) -> bool:
    """Whether queries, keys and values are made of scalars alone, which look the same from every pose and need none."""
    there = heads.projection == "group" and heads.group.order > 1 and not relation.sees_poses
    return there and is_scalar(in_type)


def _drops_out(kernel: Encoding | PairKernel, query: QueryMode, keys: KeyMode, normalization: Normalization) -> bool:
    """Whether the term of the pose of a key is the same for all keys of a query, and nothing is left of it.

    With ``keys="own"`` it drops out of a softmax; as on grids, the rotary encoding goes without it, too. Where queries
    are of the output's pose it is a constant, which the bias of queries or keys covers, or a constant of the kernel.
    """
    added = kernel.is_linear if isinstance(kernel, PairKernel) else not kernel.absolute
    return keys == "own" and (query == "own" or (normalization == "softmax" and added))


def _tables(group: Fibers, lifts: bool, registers: int) -> GroupTables:
    """The tables of a group that :class:`~escnn_attention.plain.point_attention.PointAttention` needs."""
    return GroupTables(
        group.inverse_action,
        quotient=np.zeros((group.order, 1), dtype=np.int64) if lifts else with_registers(group.quotient, registers),
        relative=None if lifts else padded(group.relative, group.order + registers),
        log_measure=padded(group.log_measure, group.order + registers),
        opposite=None if registers else opposite_poses(group),  # registers have no opposites
        stabilizer=group.stabilizer,
    )


def _check_motion(relation: Relation, keys: KeyMode, backend: str, shared_scores: bool) -> str:
    """The backend for a relation that may see poses, if keys have some; scores are shared where it is the offset."""
    if shared_scores and not relation.is_offset:
        raise ValueError(f"shared_scores: got True with {relation}, needed the offset, relation=None")
    if not relation.sees_poses:
        return backend
    if keys == "own":
        raise ValueError(f'keys: got "own", between which {relation} is the offset; needed "all", or relation=None')
    if backend not in ("auto", "neighbours"):
        raise ValueError(f'backend: got {backend!r}, and {relation} sees poses, too; needed "auto" or "neighbours"')
    return "neighbours"


def opposite_poses(group: Fibers) -> np.ndarray | None:
    """The index of -h for every element h of a finite group that has the inversion of space, else None."""
    if group.samples is not None or group.cosets is not None:
        return None
    for opposite in group.quotient:  # h to g⁻¹h
        inverts = np.allclose(group.inverse_action[opposite], -group.inverse_action, atol=1e-12)
        # g is its own inverse: -h sees ĥ as h sees -ĥ.
        if inverts and (group.quotient[opposite] == group.quotient[:, opposite]).all():
            return opposite
    return None
