"""Transformer blocks on grids and on point clouds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

import torch
from escnn.group import GroupElement
from escnn.nn import EquivariantModule, FieldType, GeometricTensor, SequentialModule
from torch import Tensor
from typing_extensions import Unpack

from escnn_attention._checks import check_int, check_option, check_probability, check_unused
from escnn_attention.exporting.modules import exported_parts
from escnn_attention.geometry.cache import checked
from escnn_attention.geometry.points import Cloud, where_present
from escnn_attention.nn.arguments import (
    REQUIRED,
    AttentionLike,
    BlockOptions,
    PointBlockOptions,
    Required,
    check_options,
    check_passed_on,
    check_pointwise,
    check_type,
    choose_attention,
    option_names,
)
from escnn_attention.nn.conditioning import (
    ConditionedFieldNorm,
    ConditionedGate,
    block_norms,
    check_condition_size,
    condition_of,
)
from escnn_attention.nn.cross_attention import GroupCrossAttention
from escnn_attention.nn.heads import is_scalar
from escnn_attention.nn.memory import CrossAttentionBranch, check_cross_attention
from escnn_attention.nn.module import (
    GridModule,
    MaskedModule,
    PlainModule,
    PointModule,
    check_cloud,
    check_input,
    check_mask,
    check_memory,
    check_points,
    on_tensors,
)
from escnn_attention.nn.norms import BlockNorm, FieldBatchNorm, FieldLayerNorm, check_norm_kind
from escnn_attention.nn.point_attention import PointAttentiveConv, PointSelfAttention
from escnn_attention.nn.pointwise import (
    Activation,
    DropPath,
    activation_of,
    choose_hidden_fields,
    depth_rates,
    dropout_of,
    ends_of,
    pointwise_network,
    shortcut_of,
)
from escnn_attention.nn.resample import Crop
from escnn_attention.nn.self_attention import GroupSelfAttention
from escnn_attention.plain.blocks import PointTransformerBlock as PlainPointTransformerBlock
from escnn_attention.plain.blocks import TransformerBlock as PlainTransformerBlock
from escnn_attention.plain.norms import NormScope
from escnn_attention.plain.point_attention import PointModule as PlainPointModule

SHARED = ("projection", "bias", "samples")
"""Options of the attention of a block that its pointwise network has, too."""


class TransformerBlock(GridModule):
    r"""Group self-attention and a pointwise network, each with a residual connection.

    ``norm="gsa"`` is the block of GSA-Nets (Figure F.1, with the details of the published code), which activates in
    front of the attention and normalises after it:

    .. math::
        y &= \mathrm{shortcut}(x) + \mathrm{Dropout}(\sigma(\mathrm{LN}(\mathrm{Attention}(\sigma(\mathrm{LN}(x)))))) \\
        z &= y + \mathrm{LN}(W_2\,\sigma(\mathrm{LN}(W_1 y)))

    ``norm="pre"`` is the pre-norm transformer:

    .. math::
        y &= \mathrm{shortcut}(x) + \mathrm{Dropout}(\mathrm{Attention}(\mathrm{LN}(x))) \\
        z &= y + \mathrm{Dropout}(W_2\,\sigma(W_1\,\mathrm{LN}(y)))

    with LN a :class:`FieldLayerNorm`, :math:`\sigma` the activation and W equivariant maps. The shortcut is the
    identity where the types agree and an equivariant map elsewhere; the hidden fields of the pointwise network are
    regular. Over a continuous fiber group, with ``norm="pre"``, they are functions on the samples
    (:class:`escnn_attention.PoseFeedForward`).

    Args:
        in_type: the type of the input; for ``norm="gsa"`` fields with pointwise nonlinearities.
        out_type: the type of the output, likewise.
        num_heads: the number of heads.
        kernel_size: as in :class:`GroupSelfAttention`; omitted with another ``attention``.
        attention: another attention than :class:`GroupSelfAttention`: a module from ``in_type`` to ``out_type`` that
            keeps the grid, such as :class:`AttentiveConv`, or a function of the two types that makes one, with its own
            options.
        norm: ``"gsa"`` or ``"pre"``.
        norm_scope: the scope of the layer norms; by default ``"sample"`` for ``"gsa"``, as published, and
            ``"position"`` for ``"pre"``.
        norm_eps: what the norms add to the mean square.
        norm_kind: ``"layer"``, ``"rms"``, ``"fields"`` or ``"batch"``: LN is a :class:`FieldLayerNorm` of this
            kind, or a :class:`FieldBatchNorm`; None for the layer norm of the type.
        hidden_fields: the number of regular fields in the pointwise network; by default half of the output's channels
            for ``"gsa"`` and twice for ``"pre"``, in units of a regular field, and at least one.
        activation: :math:`\sigma`: ``"silu"``, ``"gelu"`` or ``"relu"``.
        last_activation: whether the pointwise network ends in :math:`\sigma`, too, as that of the LieTransformer; the
            fields of ``out_type`` then have pointwise nonlinearities.
        dropout: the dropout of the branches; whole fields where a field has no pointwise nonlinearities.
        layer_scale: the gains at first of a :class:`LayerScale` at the end of both branches; None for no gains.
        drop_path: the probability with which a branch is left out in training, for a sample as a whole
            (:class:`DropPath`).
        crop: the margin to take off every side of the grid once y is there, as the published GSA-Nets do.
        options: ``condition`` and ``cross_attention``, as below; ``attention_dropout``, the dropout of the attention
            probabilities; ``projection``, ``bias`` and ``samples`` of the attention and of the pointwise network; and
            the other options of :class:`GroupSelfAttention`.

    With ``condition=n`` and ``norm="pre"`` the block is that of adaLN-Zero. It is called with vectors c of n
    invariants, each LN is a :class:`ConditionedFieldNorm`, and a :class:`ConditionedGate` :math:`g_i(c)` multiplies
    each branch. It is its shortcut at first.

    .. math::
        y &= \mathrm{shortcut}(x) + g_1(c)\,\mathrm{Dropout}(\mathrm{Attention}(\mathrm{LN}(x; c))) \\
        z &= y + g_2(c)\,\mathrm{Dropout}(W_2\,\sigma(W_1\,\mathrm{LN}(y; c)))

    With a ``cross_attention``, a :class:`GroupCrossAttention` from and to ``out_type``, and ``norm="pre"`` it is a
    block of a decoder. It is called with a memory m, and in front of the pointwise network y becomes

    .. math:: y + g_3(c)\,\mathrm{Dropout}(\mathrm{CrossAttention}(\mathrm{LN}(y; c), m))

    Shape:
        ``(B, in_type.size, *space)`` to ``(B, out_type.size, *(n - 2 * crop for n in space))``.

    Raises:
        TypeError: there is no such option, or ``attention`` is no module and makes none.
        ValueError: ``attention`` is of other types, or as the layers inside raise.

    Example:
        >>> import torch
        >>> from escnn_attention import AttentiveConv, GroupCrossAttention, TransformerBlock
        >>> from escnn import gspaces, nn
        >>> g = gspaces.rot2dOnR2(4)
        >>> fields = nn.FieldType(g, 8 * [g.regular_repr])
        >>> block = TransformerBlock(fields, fields, num_heads=2, kernel_size=5, norm="pre")
        >>> block(fields(torch.randn(1, 32, 9, 9))).shape
        torch.Size([1, 32, 9, 9])
        >>> convolution = AttentiveConv(fields, fields, kernel_size=3, padding=1)
        >>> TransformerBlock(fields, fields, attention=convolution)(fields(torch.randn(1, 32, 9, 9))).shape
        torch.Size([1, 32, 9, 9])
        >>> block = TransformerBlock(fields, fields, 2, kernel_size=5, norm="pre", condition=16)
        >>> block(fields(torch.randn(3, 32, 9, 9)), condition=torch.randn(3, 16)).shape
        torch.Size([3, 32, 9, 9])
        >>> layer = GroupCrossAttention(fields, fields, fields, 2)
        >>> decoder = TransformerBlock(fields, fields, 2, kernel_size=5, norm="pre", cross_attention=layer)
        >>> decoder(fields(torch.randn(3, 32, 8, 8)), memory=fields(torch.randn(3, 32, 4, 4))).shape
        torch.Size([3, 32, 8, 8])

    Source: GSA-Nets (Romero and Cordonnier 2021), Figure F.1; Vaswani et al., "Attention Is All You Need", NeurIPS
    2017, for the decoder; Xiong et al., "On Layer Normalization in the Transformer Architecture", ICML 2020, for the
    pre-norm; Peebles and Xie, "Scalable Diffusion Models with Transformers", ICCV 2023, for adaLN-Zero.
    """

    condition: int | None
    memory_type: FieldType | None

    def __init__(
        self,
        in_type: FieldType,
        out_type: FieldType,
        num_heads: int = 1,
        kernel_size: int | None = REQUIRED,
        *,
        attention: AttentionLike | None = None,
        norm: Literal["gsa", "pre"] = "gsa",
        norm_scope: NormScope | None = None,
        norm_eps: float = 1e-5,
        norm_kind: BlockNorm | None = None,
        hidden_fields: int | None = None,
        activation: Activation = "silu",
        last_activation: bool = False,
        dropout: float = 0.0,
        layer_scale: float | None = None,
        drop_path: float = 0.0,
        crop: int = 0,
        **options: Unpack[BlockOptions],
    ):
        super().__init__(check_type("in_type", in_type), check_type("out_type", out_type))
        check_option("norm", norm, ("gsa", "pre"))
        dropout = check_probability("dropout", dropout)
        others = dict.fromkeys(("stride", "scale_factor"), "it keeps the grid")
        check_options(type(self).__name__, options, option_names(TransformerBlock), others)
        given: dict[str, Any] = {**options}
        attention_dropout = check_probability("attention_dropout", given.pop("attention_dropout", 0.0))
        self.condition = check_condition_size(given.pop("condition", None), norm_kind, norm)
        memory_attention = check_cross_attention(given.pop("cross_attention", None), out_type, norm)
        self.memory_type = None if memory_attention is None else memory_attention.key_type
        shared = {name: given.pop(name) for name in SHARED if name in given}
        kind = check_norm_kind(norm_kind, norm_scope)
        scope = _choose_scope(norm, norm_scope, in_type, out_type)
        norm_for = block_norms(kind, scope, norm_eps, self.condition)
        self.norm = norm
        if attention is None:
            layer: EquivariantModule = GroupSelfAttention(
                in_type, out_type, num_heads, kernel_size, dropout=attention_dropout, **shared, **given
            )
        else:
            size = None if isinstance(kernel_size, Required) else kernel_size
            own = {"num_heads": (num_heads, 1), "attention_dropout": (attention_dropout, 0.0)}
            layer = choose_attention(attention, in_type, out_type, given, kernel_size=(size, None), **own)
        nonlinear: dict[str, Any] = {"activation": activation, "last_activation": last_activation}
        feed_forward = _feed_forward(out_type, norm, norm_for, hidden_fields, **nonlinear, **shared)
        nonlinearity = [activation_of(in_type, activation)] if norm == "gsa" else []
        self.attention_gate = self.feed_forward_norm = self.feed_forward_gate = None
        if self.condition is None:
            self.before: EquivariantModule = SequentialModule(norm_for(in_type), *nonlinearity)
        else:
            self.before = norm_for(in_type)
            self.feed_forward_norm, *feed_forward = feed_forward
            self.attention_gate = ConditionedGate(out_type, self.condition)
            self.feed_forward_gate = ConditionedGate(out_type, self.condition)
        self.attention = layer
        after = [norm_for(out_type), activation_of(out_type, activation)] if norm == "gsa" else []
        self.after = SequentialModule(*after, dropout_of(out_type, dropout), *ends_of(out_type, layer_scale, drop_path))
        self.shortcut = shortcut_of(in_type, out_type, shared.get("projection", "group"))
        self.crop = Crop(out_type, check_int("crop", crop, least=0))
        self.cross_attention: CrossAttentionBranch | None = None
        if memory_attention is not None:
            ends = [dropout_of(out_type, dropout), *ends_of(out_type, layer_scale, drop_path)]
            self.cross_attention = CrossAttentionBranch(
                norm_for(out_type), memory_attention, SequentialModule(*ends), self.condition
            )
        tail = [dropout_of(out_type, dropout)] if norm == "pre" else []
        self.feed_forward = SequentialModule(*feed_forward, *tail, *ends_of(out_type, layer_scale, drop_path))

    def forward(
        self,
        input: GeometricTensor,
        mask: Tensor | None = None,
        condition: Tensor | GeometricTensor | None = None,
        memory: GeometricTensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        memory_batch: Tensor | None = None,
    ) -> GeometricTensor:
        """Apply the block.

        Args:
            input: features of type ``in_type`` on a grid.
            mask: ``(B, *space)``, False for positions that are not there: see :meth:`GroupSelfAttention.forward`. With
                norms at each position by itself.
            condition: of a block with a ``condition`` n: ``(B, n)``, or for each position ``(B, n, *space)`` or n
                trivial fields on the grid, where no margin is taken off.
            memory: of a block with a ``cross_attention``: the features that it attends to, of its ``key_type``.
            memory_key_padding_mask, memory_batch: ``key_padding_mask`` and ``key_batch`` of
                :meth:`GroupCrossAttention.forward`.

        Raises:
            TypeError: ``input`` is not a GeometricTensor, or ``condition`` no tensor of its precision.
            ValueError: nothing is left by ``crop``; a mask for norms over positions; a condition for a block that has
                none, or none for one that has; a memory likewise.
        """
        x = check_input(input, self.in_type, self)
        seen = check_memory(self, self.cross_attention, memory, memory_key_padding_mask, memory_batch)
        if mask is not None:
            self._check_mask(mask, x.tensor)
        rows = None
        if condition is not None or self.condition is not None:
            rows = condition_of(self, self.condition, condition, x)
            if self.crop.margin and rows.dim() > 2:
                raise ValueError(
                    f"condition: got one for each position, of which crop={self.crop.margin} takes some off; needed "
                    f"{(x.shape[0], self.condition)}"
                )
        y = on_tensors(self, PlainTransformerBlock.forward, x.tensor, mask, rows, *seen)
        return GeometricTensor(y, self.out_type)

    def _output_space(self, space: Sequence[int]) -> Sequence[int]:
        return self.crop._output_space(space)

    def attention_maps(
        self,
        input: GeometricTensor,
        positions: Sequence[Sequence[int]] | Tensor,
        poses: Sequence[int | GroupElement] | None = None,
        mask: Tensor | None = None,
        *,
        condition: Tensor | GeometricTensor | None = None,
    ) -> Tensor:
        """The attention of chosen queries of the block, for an input, a mask and a condition of the block.

        See :meth:`GroupSelfAttention.attention_maps`.

        Raises:
            TypeError: the attention is one without such maps.
            ValueError: a mask or a condition that :meth:`forward` refuses.
        """
        x = check_input(input, self.in_type, self)
        if not isinstance(self.attention, GroupSelfAttention):
            raise TypeError(f"attention: {type(self.attention).__name__} has no such maps, needed GroupSelfAttention")
        if mask is not None:
            self._check_mask(mask, x.tensor)
        rows = None if condition is self.condition is None else condition_of(self, self.condition, condition, x)
        normed = self.before(x) if rows is None else self.before(x, rows)
        return self.attention.attention_maps(normed, positions, poses, mask)

    def _check_mask(self, mask: Tensor, x: Tensor) -> None:
        """A mask is one of the positions of features, attention takes it, and norms are at each position by itself."""
        check_mask(mask, x)
        if isinstance(self.attention, PlainModule) and not isinstance(self.attention, MaskedModule):
            raise ValueError(
                f"mask: got one, and {type(self.attention).__name__} takes none; needed GroupSelfAttention, or None"
            )
        for norm in self.modules():
            layer_norm = isinstance(norm, (FieldLayerNorm, ConditionedFieldNorm))
            if isinstance(norm, FieldBatchNorm) or (layer_norm and not norm.pointwise):
                raise ValueError('mask: got one, and norms are over positions; needed norm_scope="position"')

    def export(self) -> torch.nn.Module:
        """A copy as a plain torch module in eval mode: see :meth:`GroupSelfAttention.export`.

        It maps ``(x, mask=None, condition=None)`` to features. Behind these a block with a cross-attention takes
        ``memory``, and perhaps ``key_padding_mask``, ``coords`` and ``batch`` of it.
        """
        return exported_parts(self, PlainTransformerBlock)

    def extra_repr(self) -> str:
        condition = "" if self.condition is None else f", condition={self.condition}"
        return f"norm={self.norm!r}, crop={self.crop.margin}{condition}"


def each_block(
    network: type, block: Mapping[str, Any] | None, blocks: int, taken: Collection[str]
) -> list[dict[str, Any]]:
    """The further options of each block of a network, without those ``taken``; ``drop_path`` is of the last block."""
    options = dict(block or {})
    # A network has no condition and no memory to call its blocks with.
    check_passed_on(network, "block", options, TransformerBlock, (*taken, "condition", "cross_attention"))
    rates = depth_rates(options.pop("drop_path", 0.0), blocks)
    return [{**options, "drop_path": rate} if rate else options for rate in rates]


def _choose_scope(
    norm: Literal["gsa", "pre"], norm_scope: NormScope | None, in_type: FieldType, out_type: FieldType
) -> NormScope:
    """The scope of the norms of a block, if it can be between these types."""
    if norm_scope is not None:
        check_option("norm_scope", norm_scope, ("position", "sample"))
    if norm == "gsa":
        for name, field_type in {"in_type": in_type, "out_type": out_type}.items():
            check_pointwise(name, field_type, 'norm="gsa"', '; give norm="pre", which takes any fields')
        if in_type.fibergroup.continuous:
            raise ValueError(
                f'norm: got "gsa", which needs regular fields inside, and the fiber group {in_type.fibergroup.name} is '
                'continuous and has none; needed "pre"'
            )
    return norm_scope or ("sample" if norm == "gsa" else "position")


def _feed_forward(
    out_type: FieldType,
    norm: Literal["gsa", "pre"],
    norm_for: Callable[[FieldType], EquivariantModule],
    hidden_fields: int | None,
    *,
    bias: bool = True,
    **options: Any,
) -> list[EquivariantModule]:
    """The pointwise network of a block, its norms included, by the arguments of :func:`pointwise_network`."""
    if norm == "pre":
        return [norm_for(out_type), *pointwise_network(out_type, hidden_fields, bias=bias, **options)]
    number = choose_hidden_fields(out_type, hidden_fields, share=0.5)
    hidden_norm = norm_for(FieldType(out_type.gspace, number * [out_type.gspace.regular_repr]))
    _check_hidden_norm(out_type, hidden_norm)
    biases = _biases(hidden_norm, bias)
    expand, nonlinearity, contract, *last = pointwise_network(out_type, number, bias=biases, **options)
    return [expand, hidden_norm, nonlinearity, contract, norm_for(out_type), *last]


def _check_hidden_norm(out_type: FieldType, norm: EquivariantModule) -> None:
    """Check that the norm leaves something of the hidden fields of scalars, which are the same number at every pose."""
    over_positions = isinstance(norm, FieldBatchNorm) or (not norm.pointwise and out_type.gspace.dimensionality)
    if over_positions or not is_scalar(out_type):
        return
    fields, least = len(norm.in_type), 2 if norm.plain.kind == "rms" else 3
    if fields < least:
        raise ValueError(
            f"hidden_fields: got {fields}, of which a norm leaves zero or a sign where out_type is scalars; needed at "
            f'least {least}, or norm_scope="sample" on a grid'
        )


def _biases(hidden_norm: EquivariantModule, bias: bool) -> tuple[bool, bool]:
    """Whether both maps of a pointwise network have biases, where no norm behind them takes these out.

    A layer norm takes out what all channels share, and of a single field that is a bias; a batch norm takes out what
    all components of a field share.
    """
    if isinstance(hidden_norm, FieldBatchNorm):
        return False, False
    return bias and (len(hidden_norm.in_type) > 1 or hidden_norm.plain.kind == "rms"), bias


class PointBlock(PointModule):
    """Base class of the transformer blocks on points, computed by the module ``plain_type`` with the same parts."""

    plain_type: type[PlainPointModule] = PlainPointTransformerBlock
    attention: EquivariantModule
    condition: int | None = None
    memory_type: FieldType | None = None

    def __init__(self, in_type: FieldType, out_type: FieldType):
        super().__init__(in_type, out_type)
        self.cross_attention: CrossAttentionBranch | None = None

    def forward(
        self,
        x: GeometricTensor,
        edge_index: Tensor | None = None,
        batch: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        measure: Tensor | None = None,
        edge_attr: Tensor | None = None,
        condition: Tensor | GeometricTensor | None = None,
        memory: GeometricTensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        memory_batch: Tensor | None = None,
    ) -> GeometricTensor:
        """Apply the block; its arguments are those of :meth:`PointSelfAttention.forward`, a condition and a memory.

        The output at points that a mask hides is zero. A block with a ``condition`` n needs one, as
        :meth:`ConditionedFieldNorm.forward` takes it, and one with a ``cross_attention`` a memory, as that of
        :class:`TransformerBlock`.
        """
        x = check_points(x, self.in_type, self)
        if mask is not None:
            checked(check_cloud, x.coords, edge_index, batch, mask, measure, edge_attr)
        rows = None if condition is self.condition is None else condition_of(self, self.condition, condition, x, batch)
        seen = check_memory(self, self.memory_type, memory, memory_key_padding_mask, memory_batch)
        cloud = Cloud(x.coords, edge_index, batch, measure, edge_attr, rows)
        y = where_present(lambda x, cloud: self._compute(x, cloud, *seen), x.tensor, cloud, mask)
        return GeometricTensor(y, self.out_type, x.coords if self.space.dimensionality else None)

    def _compute(self, x: Tensor, cloud: Cloud, *memory: Any) -> Tensor:
        """The block at points of which no mask hides any."""
        return on_tensors(self, self.plain_type.compute, x, cloud, *memory, coords=cloud.coords)

    @property
    def edge_dim(self) -> int | None:
        """The number of features of an edge, of the attention; None without."""
        return getattr(self.attention, "edge_dim", None)

    def export(self) -> torch.nn.Module:
        """A copy as a plain torch module in eval mode: see :meth:`PointSelfAttention.export`."""
        return exported_parts(self, self.plain_type)


class PointTransformerBlock(PointBlock):
    r"""Attention between points and a network at every point, each with a residual connection.

    It is the pre-norm :class:`TransformerBlock` between points,

    .. math::
        y = \mathrm{shortcut}(x) + \mathrm{Dropout}(\mathrm{Attention}(\mathrm{LN}(x))), \qquad
        z = y + \mathrm{Dropout}(W_2\,\sigma(W_1\,\mathrm{LN}(y)))

    Args:
        in_type: the type of the input. Any fields whose representations are orthogonal.
        out_type: the type of the output, likewise.
        num_heads: the number of heads.
        attention: another attention, as in :class:`TransformerBlock`, called as :class:`PointSelfAttention` is.
        kernel_features: None for self-attention; a number for :class:`PointAttentiveConv` with so many.
        hidden_fields, activation, last_activation, dropout, norm_kind, norm_eps, layer_scale: as in
            :class:`TransformerBlock` with ``norm="pre"``.
        drop_path: likewise, for a cloud as a whole.
        condition: as in :class:`TransformerBlock`: None, or the number of invariants of a block of adaLN-Zero.
        cross_attention: likewise: None, or the :class:`GroupCrossAttention` of a block of a decoder, which is called
            with a memory: at points, on a grid, or a sequence.
        options: ``attention_dropout``, the dropout of the attention probabilities; ``norm_scope``, by default
            ``"position"``, or ``"pose"`` for norms of each pose of regular fields by itself; ``projection``, ``bias``
            and ``samples`` of the attention and of the pointwise network; and the other options of
            :class:`PointSelfAttention`. With ``kernel_features`` there are no ``keys``, ``shared_scores``, ``poses``
            and ``backend``.

    Shape:
        ``(N, in_type.size)`` with ``coords`` ``(N, d)`` to ``(N, out_type.size)`` with the same coordinates.

    Raises:
        TypeError, ValueError: as :class:`TransformerBlock`.

    Example:
        >>> import torch
        >>> from escnn_attention import PointTransformerBlock
        >>> from escnn import gspaces, nn
        >>> g = gspaces.flipRot2dOnR2(3)
        >>> fields = nn.FieldType(g, 4 * [g.regular_repr] + 2 * [g.irrep(1, 1)])
        >>> block = PointTransformerBlock(fields, fields, num_heads=2, num_neighbours=6)
        >>> block(nn.GeometricTensor(torch.randn(9, fields.size), fields, torch.randn(9, 2))).shape
        torch.Size([9, 28])

    Source: Hutchinson et al., "LieTransformer", ICML 2021, Section 3.3; Xiong et al., "On Layer Normalization in the
    Transformer Architecture", ICML 2020.
    """

    def __init__(
        self,
        in_type: FieldType,
        out_type: FieldType,
        num_heads: int = 1,
        *,
        attention: AttentionLike | None = None,
        kernel_features: int | None = None,
        hidden_fields: int | None = None,
        activation: Activation = "silu",
        last_activation: bool = False,
        dropout: float = 0.0,
        norm_kind: BlockNorm | None = None,
        norm_eps: float = 1e-5,
        layer_scale: float | None = None,
        drop_path: float = 0.0,
        condition: int | None = None,
        cross_attention: GroupCrossAttention | None = None,
        **options: Unpack[PointBlockOptions],
    ):
        super().__init__(check_type("in_type", in_type), check_type("out_type", out_type))
        memory_attention = check_cross_attention(cross_attention, out_type, "pre")
        self.memory_type = None if memory_attention is None else memory_attention.key_type
        dropout = check_probability("dropout", dropout)
        self.condition = check_condition_size(condition, norm_kind)
        check_options(type(self).__name__, options, option_names(PointTransformerBlock))
        given: dict[str, Any] = {**options}
        attention_dropout = check_probability("attention_dropout", given.pop("attention_dropout", 0.0))
        shared: dict[str, Any] = {name: given.pop(name) for name in SHARED if name in given}
        norm_scope = given.pop("norm_scope", None)
        scope = check_option("norm_scope", "position" if norm_scope is None else norm_scope, ("position", "pose"))
        if attention is not None:
            own = {"num_heads": (num_heads, 1), "attention_dropout": (attention_dropout, 0.0)}
            layer: EquivariantModule = choose_attention(
                attention, in_type, out_type, given, kernel_features=(kernel_features, None), **own
            )
        elif kernel_features is None:
            layer = PointSelfAttention(in_type, out_type, num_heads, dropout=attention_dropout, **shared, **given)
        else:
            for name, default in (("keys", "all"), ("shared_scores", False), ("backend", "auto")):
                why = "an attentive convolution (kernel_features) has no such option"
                check_unused(name, given.pop(name, default), default, why)
            given["kernel_features"] = kernel_features
            layer = PointAttentiveConv(in_type, out_type, num_heads, dropout=attention_dropout, **shared, **given)
        nonlinear: dict[str, Any] = {"activation": activation, "last_activation": last_activation}
        network = pointwise_network(out_type, hidden_fields, **shared, **nonlinear)
        norm_for = block_norms(check_norm_kind(norm_kind, norm_scope), scope, norm_eps, condition)
        gains = ends_of(out_type, layer_scale)
        self.attention = layer
        self.norm = norm_for(in_type)
        self.after: EquivariantModule = dropout_of(out_type, dropout)
        if gains:
            self.after = SequentialModule(self.after, *gains)
        self.shortcut = shortcut_of(in_type, out_type, shared.get("projection", "group"))
        last_norm = [norm_for(out_type)]
        if condition is not None:
            self.feed_forward_norm = last_norm.pop()
            self.attention_gate = ConditionedGate(out_type, condition)
            self.feed_forward_gate = ConditionedGate(out_type, condition)
        self.feed_forward = SequentialModule(
            *last_norm, *network, dropout_of(out_type, dropout), *ends_of(out_type, layer_scale)
        )
        self.drop_path = DropPath(out_type, check_probability("drop_path", drop_path))
        if memory_attention is not None:
            ends = SequentialModule(dropout_of(out_type, dropout), *ends_of(out_type, layer_scale))
            self.cross_attention = CrossAttentionBranch(norm_for(out_type), memory_attention, ends, condition)
