"""Modules that treat every position by itself: nonlinearities, linear maps, gains, stochastic depth."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, get_args

import numpy as np
import torch
from escnn.nn import (
    EquivariantModule,
    FieldDropout,
    FieldType,
    GeometricTensor,
    IdentityModule,
    ReLU,
    SequentialModule,
)
from torch import Tensor

from escnn_attention._checks import check_bool, check_int, check_length, check_option, check_probability
from escnn_attention.groups.fibers import (
    count_irreps,
    fibers,
    frames,
    invariant_vectors,
    is_pointwise,
    mass,
    regular_fields,
)
from escnn_attention.groups.lie_algebra import random_transformation
from escnn_attention.groups.samples import Samples, as_samples
from escnn_attention.nn.arguments import check_pointwise, check_regular, check_type, check_types
from escnn_attention.nn.module import PlainModule, check_field, check_no_batch
from escnn_attention.nn.norms import field_of_channels
from escnn_attention.plain.blocks import DropPath as PlainDropPath
from escnn_attention.plain.blocks import LayerScale as PlainLayerScale
from escnn_attention.plain.irreps import FieldLinear as PlainFieldLinear
from escnn_attention.plain.irreps import Isotypic
from escnn_attention.plain.projections import FromPoses, ProjectionKind, ToPoses
from escnn_attention.plain.projections import PoseFeedForward as PlainPoseFeedForward
from escnn_attention.plain.projections import PoseLinear as PlainPoseLinear

Activation = Literal["silu", "gelu", "relu"]


class _Pointwise(PlainModule):
    """A function of numbers, applied to every channel."""

    pointwise = True
    function: ClassVar[type[torch.nn.Module]]

    def __init__(self, in_type: FieldType):
        check_pointwise("in_type", check_type("in_type", in_type), type(self).__name__)
        super().__init__(in_type, in_type, self.function())


class _Dropout(PlainModule):
    """Dropout of single channels; escnn's refuses trivial representations of products of groups."""

    pointwise = True

    def __init__(self, in_type: FieldType, p: float):
        super().__init__(in_type, in_type, torch.nn.Dropout(p))

    def export(self) -> torch.nn.Module:
        """The identity, as for escnn's own dropout."""
        self.eval()
        return torch.nn.Identity().eval()


class SiLU(_Pointwise):
    r"""The nonlinearity :math:`x \mapsto x\,\sigma(x)` (also Swish), on every channel.

    Args:
        in_type: the type of the input and of the output: fields that support pointwise nonlinearities, which are
            those that the group acts on by permuting channels (regular, quotient, trivial).

    Shape:
        ``(B, in_type.size, *space)`` to the same; ``(N, in_type.size)`` at scattered points.

    Raises:
        ValueError: a field does not support pointwise nonlinearities.

    Example:
        >>> import torch
        >>> from escnn_attention import SiLU
        >>> from escnn import gspaces, nn
        >>> g = gspaces.rot2dOnR2(4)
        >>> fields = nn.FieldType(g, [g.regular_repr])
        >>> SiLU(fields)(fields(torch.zeros(1, 4, 3, 3))).shape
        torch.Size([1, 4, 3, 3])

    Source: Ramachandran, Zoph and Le, "Searching for Activation Functions", 2017.
    """

    function = torch.nn.SiLU


class GELU(_Pointwise):
    r"""The nonlinearity :math:`x \mapsto x\,\Phi(x)`, with the normal distribution function, on every channel.

    Args:
        in_type: the type of the input and of the output: fields that support pointwise nonlinearities, as for
            :class:`SiLU`.

    Shape:
        ``(B, in_type.size, *space)`` to the same; ``(N, in_type.size)`` at scattered points.

    Raises:
        ValueError: a field does not support pointwise nonlinearities.

    Example:
        >>> import torch
        >>> from escnn_attention import GELU
        >>> from escnn import gspaces, nn
        >>> g = gspaces.rot2dOnR2(4)
        >>> fields = nn.FieldType(g, [g.regular_repr])
        >>> GELU(fields)(fields(torch.ones(1, 4, 1, 1))).tensor.flatten()
        tensor([0.8413, 0.8413, 0.8413, 0.8413])

    Source: Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016.
    """

    function = torch.nn.GELU


def activation_of(field_type: FieldType, name: Activation) -> EquivariantModule:
    """The nonlinearity of this name: :class:`SiLU`, :class:`GELU`, or escnn's ReLU."""
    check_option("activation", name, get_args(Activation))
    if name == "relu":
        check_pointwise("activation", field_type, "ReLU")
        return ReLU(field_type)
    return {"silu": SiLU, "gelu": GELU}[name](field_type)


def plain_activation(name: Activation) -> torch.nn.Module:
    """The nonlinearity of this name on tensors."""
    check_option("activation", name, get_args(Activation))
    return {"silu": torch.nn.SiLU, "gelu": torch.nn.GELU, "relu": torch.nn.ReLU}[name]()


class PoseLinear(PlainModule):
    r"""A linear map at every position, to or from regular fields: escnn's 1×1 convolution, exact in any precision.

    To regular fields :math:`y(h) = W \rho(h)^{-1} x + b`, from regular fields :math:`y = \sum_h \rho(h) W x(h) + b`;
    these are all equivariant maps. escnn expands a basis stored in float32; here the group acts on the weight itself,
    so ``.double()`` is equivariant to 1e-15.

    Args:
        in_type: the type of the input.
        out_type: the type of the output. One of the two consists of regular fields.
        projection: ``"group"``, or ``"pointwise"`` to mix fields and leave the poses alone (both types regular).
        bias: whether to add a bias, where it is invariant.

    Shape:
        ``(B, in_type.size, *space)`` to ``(B, out_type.size, *space)``, or ``(N, size)`` at scattered points.

    Raises:
        ValueError: two gspaces, or neither type consists of regular fields.

    Example:
        >>> import torch
        >>> from escnn_attention import PoseLinear
        >>> from escnn import gspaces, nn
        >>> g = gspaces.rot2dOnR2(6)
        >>> hidden, vectors = nn.FieldType(g, 4 * [g.regular_repr]), nn.FieldType(g, 2 * [g.irrep(1)])
        >>> PoseLinear(hidden, vectors)(hidden(torch.randn(1, 24, 5, 5))).shape
        torch.Size([1, 4, 5, 5])
    """

    plain: PlainPoseLinear
    pointwise = True

    def __init__(
        self, in_type: FieldType, out_type: FieldType, *, projection: ProjectionKind = "group", bias: bool = True
    ):
        check_types(in_type, out_type)
        check_option("projection", projection, ("group", "pointwise"))
        order = fibers(in_type.gspace).order
        if projection == "pointwise":
            check_regular("in_type", in_type, 'projection="pointwise"')
            check_regular("out_type", out_type, 'projection="pointwise"')
        map_: ToPoses | FromPoses
        if regular_fields(out_type) == len(out_type):
            fields = len(out_type)
            map_ = ToPoses(frames(in_type), in_type.size, fields, order, kind=projection, bias=fields if bias else 0)
        else:
            check_regular("in_type", in_type, f"a map to {out_type}, which is not regular,")
            map_ = FromPoses(
                frames(out_type, dual=True),
                out_type.size,
                len(in_type),
                order,
                kind=projection,
                invariants=invariant_vectors(out_type) if bias else None,
            )
        super().__init__(in_type, out_type, PlainPoseLinear(map_, order))

    def extra_repr(self) -> str:
        projection = self.plain.projection
        return f"{super().extra_repr()}, projection={projection.kind!r}, bias={projection.bias is not None}"


class PoseFeedForward(PlainModule):
    r"""A pointwise network of one hidden layer: to regular fields, a nonlinearity, and to any fields.

    .. math:: y = \sum_h \rho_\mathrm{out}(h)\, W_2\, \sigma(W_1 \rho_\mathrm{in}(h)^{-1} x + b_1) + b_2

    For a continuous fiber group the hidden fields are functions on its :class:`escnn_attention.Samples`, and the sum is
    a quadrature: exact for the elements of a subgroup that is sampled, and otherwise up to an error that falls with the
    number of samples.

    Args:
        in_type: the type of the input.
        out_type: the type of the output.
        hidden_fields: the number of hidden fields; by default twice the channels of the output, in units of what a
            field holds.
        samples: for a continuous fiber group, its samples or their number.
        bias: whether there are biases; that of the output where it is invariant.
        activation: :math:`\sigma`, ``"silu"``, ``"gelu"`` or ``"relu"``.

    Shape:
        ``(B, in_type.size, *space)`` to ``(B, out_type.size, *space)``, or ``(N, size)`` at scattered points.

    Raises:
        ValueError: two gspaces, or samples that the fiber group has not.

    Example:
        >>> import torch
        >>> from escnn_attention import PoseFeedForward
        >>> from escnn import gspaces, nn
        >>> g = gspaces.rot3dOnR3()
        >>> vectors = nn.FieldType(g, 4 * [g.irrep(1)])
        >>> PoseFeedForward(vectors, vectors, samples=24)(vectors(torch.randn(1, 12, 3, 3, 3))).shape
        torch.Size([1, 12, 3, 3, 3])
    """

    plain: PlainPoseFeedForward
    pointwise = True

    def __init__(
        self,
        in_type: FieldType,
        out_type: FieldType,
        hidden_fields: int | None = None,
        *,
        samples: Samples | int | None = None,
        bias: bool = True,
        activation: Activation = "silu",
    ):
        check_types(in_type, out_type)
        group = fibers(in_type.gspace, as_samples(samples))
        fields = choose_hidden_fields(out_type, hidden_fields)
        expand = ToPoses(frames(in_type, group=group), in_type.size, fields, group.order, bias=fields if bias else 0)
        contract = FromPoses(
            frames(out_type, group=group, dual=True),
            out_type.size,
            fields,
            group.order,
            invariants=invariant_vectors(out_type) if bias else None,
            mass=mass(out_type),
        )
        super().__init__(
            in_type,
            out_type,
            PlainPoseFeedForward(
                expand, plain_activation(activation), contract, random_transformation(in_type, out_type, group)
            ),
        )
        self.hidden_fields = fields
        self.samples = group.samples

    def extra_repr(self) -> str:
        samples = "" if self.samples is None else f", samples={self.samples!r}"
        return f"{super().extra_repr()}, hidden_fields={self.hidden_fields}{samples}"


def choose_hidden_fields(out_type: FieldType, hidden_fields: int | None, share: float = 2.0) -> int:
    """The hidden fields of a network: as asked for, or a share of the channels of the output in units of a field."""
    default = max(1, int(share * out_type.size / mass(out_type)))
    return check_int("hidden_fields", default if hidden_fields is None else hidden_fields)


class FieldLinear(PlainModule):
    r"""Every equivariant linear map between two types at every position, exact for every fiber group.

    By Schur's lemma it mixes the copies of an irrep among each other, by maps of the irrep to itself, which for a
    rotation of the plane are complex numbers. escnn's 1×1 convolution is the same map, with a basis in float32.

    Args:
        in_type: the type of the input.
        out_type: the type of the output.
        bias: whether to add a bias, where it is invariant.

    Shape:
        ``(B, in_type.size, *space)`` to ``(B, out_type.size, *space)``, or ``(N, size)`` at scattered points.

    Example:
        >>> import torch
        >>> from escnn_attention import FieldLinear
        >>> from escnn import gspaces, nn
        >>> g = gspaces.rot2dOnR2(-1)
        >>> one, other = nn.FieldType(g, 3 * [g.irrep(1)]), nn.FieldType(g, [g.irrep(1), g.trivial_repr])
        >>> FieldLinear(one, other)(one(torch.randn(1, 6, 5, 5))).shape
        torch.Size([1, 3, 5, 5])
    """

    plain: PlainFieldLinear
    pointwise = True

    def __init__(self, in_type: FieldType, out_type: FieldType, *, bias: bool = True):
        check_types(in_type, out_type)
        sources, targets = _irreps(in_type), _irreps(out_type)
        parts = [
            Isotypic(
                source=np.stack([reads for reads, _ in sources[id]]),
                target=np.stack([writes for _, writes in targets[id]], axis=1),
                endomorphisms=in_type.fibergroup.irrep(*id).endomorphism_basis(),
            )
            for id in sources
            if id in targets
        ]
        invariants = invariant_vectors(out_type) if bias else None
        super().__init__(in_type, out_type, PlainFieldLinear(parts, out_type.size, invariants))


def _irreps(field_type: FieldType) -> dict[tuple, list[tuple[np.ndarray, np.ndarray]]]:
    """The matrices that read each copy of an irrep off a type, ``(d, size)``, and that write it, ``(size, d)``."""
    found: dict[tuple, list[tuple[np.ndarray, np.ndarray]]] = {}
    start = 0
    for representation in field_type.representations:
        channels, position = slice(start, start + representation.size), 0
        for id in representation.irreps:
            here = slice(position, position + field_type.fibergroup.irrep(*id).size)
            reads = np.zeros((here.stop - here.start, field_type.size))
            reads[:, channels] = representation.change_of_basis_inv[here]
            writes = np.zeros((field_type.size, here.stop - here.start))
            writes[channels] = representation.change_of_basis[:, here]
            found.setdefault(id, []).append((reads, writes))
            position = here.stop
        start = channels.stop
    return found


class LayerScale(PlainModule):
    r"""A learned gain for every field, initially small: :math:`y_f = \lambda_f x_f`.

    All components of a field have the same gain, which commutes with every representation.

    Args:
        in_type: the type of the input and of the output: any fields.
        initial: the gains at first.

    Shape:
        ``(B, in_type.size, *space)`` to the same; ``(N, in_type.size)`` at scattered points.

    Example:
        >>> import torch
        >>> from escnn_attention import LayerScale
        >>> from escnn import gspaces, nn
        >>> g = gspaces.rot2dOnR2(4)
        >>> fields = nn.FieldType(g, [g.regular_repr, g.irrep(1)])
        >>> LayerScale(fields, 0.5)(fields(torch.ones(1, 6, 1, 1))).tensor.flatten().tolist()
        [0.5, 0.5, 0.5, 0.5, 0.5, 0.5]

    Source: Touvron et al., "Going deeper with Image Transformers", ICCV 2021, Eq. 4.
    """

    plain: PlainLayerScale
    pointwise = True

    def __init__(self, in_type: FieldType, initial: float = 1e-4):
        check_type("in_type", in_type)
        gain = check_length("initial", initial, "gain")
        super().__init__(in_type, in_type, PlainLayerScale(field_of_channels(in_type), gain))


class DropPath(PlainModule):
    r"""Stochastic depth: in training a sample is zero with probability p, and else divided by :math:`1 - p`.

    A sample is an image, or at points a cloud: it is dropped as a whole, with every pose and position. In eval mode
    it changes nothing.

    Args:
        in_type: the type of the input and of the output: any fields.
        p: the probability.

    Shape:
        ``(B, in_type.size, *space)`` to the same; ``(N, in_type.size)`` at scattered points.

    Example:
        >>> import torch
        >>> from escnn_attention import DropPath
        >>> from escnn import gspaces, nn
        >>> g = gspaces.rot2dOnR2(4)
        >>> fields = nn.FieldType(g, [g.regular_repr])
        >>> y = DropPath(fields, 0.5)(fields(torch.ones(64, 4, 2, 2))).tensor.flatten(1)
        >>> sorted(y.mean(1).unique().tolist()), bool((y == y[:, :1]).all())
        ([0.0, 2.0], True)

    Source: Huang et al., "Deep Networks with Stochastic Depth", ECCV 2016.
    """

    plain: PlainDropPath
    pointwise = True

    def __init__(self, in_type: FieldType, p: float):
        super().__init__(check_type("in_type", in_type), in_type, PlainDropPath(check_probability("p", p)))

    def forward(self, input: GeometricTensor, batch: Tensor | None = None) -> GeometricTensor:
        """Drop some samples.

        Args:
            input: features of type ``in_type``, on a grid or at points.
            batch: ``(N,)``, the number of the cloud of each point; None for a single cloud, and on grids.
        """
        x = check_field(input, self.in_type, self)
        check_no_batch(x, batch)
        y = self.plain(x.tensor, batch, points=x.coords is not None)
        return GeometricTensor(y, self.out_type, x.coords)


def ends_of(out_type: FieldType, layer_scale: float | None, drop_path: float = 0.0) -> list[EquivariantModule]:
    """The end of a branch: gains, unless they are None, and stochastic depth, unless its rate is 0."""
    gains = [] if layer_scale is None else [LayerScale(out_type, check_length("layer_scale", layer_scale, "gain"))]
    return [*gains, *([DropPath(out_type, drop_path)] if check_probability("drop_path", drop_path) else [])]


def depth_rates(drop_path: float, blocks: int) -> list[float]:
    """The rate of each block: from 0 of the first to ``drop_path`` of the last, or of a single one, by equal steps."""
    rate = check_probability("drop_path", drop_path)
    return [rate * (i / (blocks - 1) if blocks > 1 else 1.0) for i in range(blocks)]


def pointwise_network(
    out_type: FieldType,
    hidden_fields: int | None,
    *,
    activation: Activation = "silu",
    last_activation: bool = False,
    projection: ProjectionKind = "group",
    bias: bool | tuple[bool, bool] = True,
    samples: Samples | int | None = None,
) -> list[EquivariantModule]:
    """An equivariant map to regular fields, a nonlinearity and a map back; by way of samples of a continuous group."""
    last_ones: list[EquivariantModule] = []
    if check_bool("last_activation", last_activation):
        check_pointwise("last_activation", out_type, "a nonlinearity of out_type")
        last_ones.append(activation_of(out_type, activation))
    if out_type.fibergroup.continuous:
        options: dict[str, Any] = {"samples": samples, "bias": bool(bias), "activation": activation}
        return [PoseFeedForward(out_type, out_type, hidden_fields, **options), *last_ones]
    first, last = bias if isinstance(bias, tuple) else (bias, bias)
    number = choose_hidden_fields(out_type, hidden_fields)
    hidden = FieldType(out_type.gspace, number * [out_type.gspace.regular_repr])
    return [
        PoseLinear(out_type, hidden, projection=projection, bias=first),
        activation_of(hidden, activation),
        PoseLinear(hidden, out_type, projection=projection, bias=last),
        *last_ones,
    ]


def shortcut_of(in_type: FieldType, out_type: FieldType, projection: ProjectionKind) -> EquivariantModule:
    """The identity, or an equivariant pointwise map where the types differ."""
    if in_type == out_type:
        return IdentityModule(in_type)
    if in_type.fibergroup.continuous:
        return FieldLinear(in_type, out_type)
    if len(in_type) == regular_fields(in_type) or len(out_type) == regular_fields(out_type):
        return PoseLinear(in_type, out_type, projection=projection)
    # Between two types that are not regular: through so few regular fields, if they have each irrep often enough.
    fields = -(-min(in_type.size, out_type.size) // in_type.fibergroup.order())
    between = FieldType(in_type.gspace, fields * [in_type.gspace.regular_repr])
    sources, targets, room = map(count_irreps, (in_type, out_type, between))
    if any(count > room[irrep] for irrep, count in (sources & targets).items()):
        return FieldLinear(in_type, out_type)
    return SequentialModule(PoseLinear(in_type, between, bias=False), PoseLinear(between, out_type))


def dropout_of(field_type: FieldType, p: float) -> EquivariantModule:
    """Dropout of channels where that is equivariant, else of whole fields; the identity for p = 0."""
    if p == 0:
        return IdentityModule(field_type)
    return (_Dropout if all(map(is_pointwise, field_type.representations)) else FieldDropout)(field_type, p)
