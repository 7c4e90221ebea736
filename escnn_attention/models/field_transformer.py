"""Transformers from fields to fields on a sequence or a grid, such as the head of a diffusion policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

import torch
from escnn.gspaces import GSpace
from escnn.nn import FieldType, GeometricTensor
from torch import Tensor
from typing_extensions import Unpack

from escnn_attention._checks import check_int, check_unused
from escnn_attention.exporting.modules import exported_parts
from escnn_attention.groups.sequences import sequence_space
from escnn_attention.models.convolutions import regular_type
from escnn_attention.models.pretrained import PretrainedMixin
from escnn_attention.nn.arguments import check_passed_on, check_type, check_types
from escnn_attention.nn.conditioning import ConditionedFieldNorm, condition_of
from escnn_attention.nn.cross_attention import GroupCrossAttention
from escnn_attention.nn.module import GridModule, check_field, check_input, check_mask, check_memory, on_tensors
from escnn_attention.nn.norms import FieldLayerNorm
from escnn_attention.nn.pointwise import PoseLinear
from escnn_attention.nn.transformer import TransformerBlock
from escnn_attention.plain.image_networks import FieldTransformer as PlainFieldTransformer

_TAKEN = ("condition", "cross_attention", "crop", "norm", "norm_kind", "norm_scope")
_TYPES = ("query_type", "key_type", "out_type", "value_type")


class FieldTransformerOptions(TypedDict, total=False):
    """Options of :class:`FieldTransformer`."""

    memory_type: FieldType | None
    fields: int
    num_heads: int
    num_encoder_layers: int
    num_decoder_layers: int
    kernel_size: int | None
    condition: int | None
    block: Mapping[str, Any] | None
    encoder_block: Mapping[str, Any] | None
    cross_attention: Mapping[str, Any] | None


class FieldTransformer(PretrainedMixin, GridModule):
    r"""A transformer between fields of any types on sequences and grids: an encoder, a decoder, or both.

    .. math:: y = W'\, \mathrm{LN}(\mathrm{Block}_L(\cdots \mathrm{Block}_1(W x; c, m)); c)

    W and W' are equivariant maps to and from regular fields. The blocks are
    :class:`escnn_attention.TransformerBlock` with ``norm="pre"``.

    - With a ``memory_type`` the network is called with a memory m, to which every block attends by
      :class:`escnn_attention.GroupCrossAttention`: a sequence, a grid, or points, over any gspace with the same fiber
      group. The blocks are those of a decoder, and m passes through ``num_encoder_layers`` blocks of an encoder.
    - Without, it is an encoder alone; or a decoder alone, with the option ``causal=True`` of the blocks.
    - With a ``condition`` n it is called with vectors c of n invariants, on which all blocks of the decoder and the
      last norm depend (adaLN-Zero).

    On :func:`escnn_attention.sequence_space` it is the head of a diffusion or flow policy. An element of the group that
    transforms input and memory transforms the output.

    Args:
        in_type: the type of the input: any fields over a finite group.
        out_type: the type of the output: any fields.
        memory_type: the type of the memory: any fields over the same fiber group; None for a network without.
        fields: the width: the number of regular fields.
        num_heads: the number of heads.
        num_encoder_layers: the number of blocks through which the memory passes, on a sequence or a grid; with 0 it is
            attended to as it is.
        num_decoder_layers: the number of blocks through which the input passes.
        kernel_size: the odd width of the windows of the decoder's self-attention; None for the whole sequence or grid.
        condition: the number of components of the condition; None for a network without.
        block: further options of every block of the decoder, such as ``encoding``, ``causal``, ``dropout`` and
            ``hidden_fields``.
        encoder_block: options of every block of the encoder, likewise, with ``kernel_size``.
        cross_attention: options of every cross-attention, such as ``encoding``, ``kernel_size`` and ``length_scale``.

    Shape:
        ``(B, in_type.size, *space)`` and ``(B, memory_type.size, *memory_space)`` to ``(B, out_type.size, *space)``,
        with a condition ``(B, n)`` or ``(B, n, *space)``. A memory at points is ``(N, memory_type.size)``.

    Raises:
        ValueError: another fiber group of the memory, options of a part that is not there, or as the layers inside.

    Example:
        >>> import torch
        >>> from escnn_attention import sequence_space
        >>> from escnn_attention.models import FieldTransformer
        >>> from escnn import gspaces, nn
        >>> plane = gspaces.rot2dOnR2(8)
        >>> tokens = sequence_space(plane.fibergroup)
        >>> action = nn.FieldType(tokens, [tokens.irrep(1), tokens.trivial_repr])  # a velocity and a gripper
        >>> image = nn.FieldType(plane, 3 * [plane.trivial_repr])
        >>> sizes = {"fields": 4, "num_heads": 2, "num_decoder_layers": 2}
        >>> head = FieldTransformer(action, action, memory_type=image, condition=16, **sizes)
        >>> noisy = action(torch.randn(5, 3, 10))  # 5 sequences of 10 actions
        >>> head(noisy, image(torch.randn(5, 3, 9, 9)), torch.randn(5, 16)).shape
        torch.Size([5, 3, 10])

    Source: Vaswani et al., "Attention Is All You Need", NeurIPS 2017; Peebles and Xie, "Scalable Diffusion Models with
    Transformers", ICCV 2023; Chi et al., "Diffusion Policy: Visuomotor Policy Learning via Action Diffusion", RSS 2023.
    """

    def __init__(
        self,
        in_type: FieldType,
        out_type: FieldType,
        *,
        memory_type: FieldType | None = None,
        fields: int,
        num_heads: int,
        num_encoder_layers: int = 0,
        num_decoder_layers: int,
        kernel_size: int | None = None,
        condition: int | None = None,
        block: Mapping[str, Any] | None = None,
        encoder_block: Mapping[str, Any] | None = None,
        cross_attention: Mapping[str, Any] | None = None,
    ):
        check_types(in_type, out_type)
        if in_type.fibergroup.continuous:
            name = in_type.fibergroup.name
            raise NotImplementedError(f"in_type: the fiber group {name} is continuous; needed a finite one")
        super().__init__(in_type, out_type)
        check_int("fields", fields)
        options, encoding, attending = (dict(given or {}) for given in (block, encoder_block, cross_attention))
        check_passed_on(FieldTransformer, "block", options, TransformerBlock, _TAKEN)
        for name, given, layer, taken in (
            ("encoder_block", encoding, TransformerBlock, _TAKEN),
            ("cross_attention", attending, GroupCrossAttention, _TYPES),
        ):
            others = {option: value for option, value in given.items() if option != "kernel_size"}
            check_passed_on(FieldTransformer, name, others, layer, taken)
        if memory_type is None:
            check_unused("num_encoder_layers", num_encoder_layers, 0, "there is no memory_type")
            check_unused("cross_attention", attending, {}, "there is no memory_type")
        elif check_type("memory_type", memory_type).fibergroup != in_type.fibergroup:
            got, needed = memory_type.fibergroup.name, in_type.fibergroup.name
            raise ValueError(f"memory_type: its fiber group is {got}, needed that of in_type, {needed}")
        if not check_int("num_encoder_layers", num_encoder_layers, least=0):
            check_unused("encoder_block", encoding, {}, "there are no encoder layers")
        self.gspace = in_type.gspace
        self.memory_type = memory_type
        self.condition = None if condition is None else check_int("condition", condition)
        hidden = regular_type(in_type.gspace, fields)
        self.memory_embedding = self.encoder = self.memory_norm = None
        self._encoded_type = memory_type
        if memory_type is not None and num_encoder_layers:
            self._encoded_type = encoded = regular_type(memory_type.gspace, fields)
            self.memory_embedding = PoseLinear(memory_type, encoded)
            encoding.setdefault("kernel_size", None)
            self.encoder = torch.nn.ModuleList(
                TransformerBlock(encoded, encoded, num_heads, norm="pre", **encoding) for _ in range(num_encoder_layers)
            )
            self.memory_norm = FieldLayerNorm(encoded)

        def attention() -> GroupCrossAttention | None:
            if self._encoded_type is None:
                return None
            return GroupCrossAttention(hidden, self._encoded_type, hidden, num_heads, **attending)

        self.embedding = PoseLinear(in_type, hidden)
        shared = {"norm": "pre", "condition": condition, **options}
        self.blocks = torch.nn.ModuleList(
            TransformerBlock(hidden, hidden, num_heads, kernel_size, cross_attention=attention(), **shared)
            for _ in range(check_int("num_decoder_layers", num_decoder_layers))
        )
        self.norm = FieldLayerNorm(hidden) if condition is None else ConditionedFieldNorm(hidden, condition)
        self.readout = PoseLinear(hidden, out_type)

    @classmethod
    def policy(
        cls,
        gspace: GSpace,
        *,
        vectors: int = 1,
        scalars: int = 1,
        channels: int = 3,
        **options: Unpack[FieldTransformerOptions],
    ) -> FieldTransformer:
        """The head of a policy: actions of vectors and scalars attend to an image, under the embedding of a step.

        Args:
            gspace: of the image.
            vectors, scalars: the fields of an action.
            channels: the scalar fields of the image.
            options: of the network, in place of 16 fields, 4 heads, 2 encoder and 4 decoder layers, a causal decoder,
                ``condition=64``, and an encoding of places in the image, ``"fourier"``.

        Example:
            >>> from escnn_attention.models import FieldTransformer
            >>> from escnn import gspaces
            >>> head = FieldTransformer.policy(gspaces.rot2dOnR2(8), vectors=2, scalars=1)
            >>> head.in_type.size, head.memory_type.size
            (5, 3)

        Source: the time-series diffusion transformer of Chi et al., "Diffusion Policy", RSS 2023, Section III-A, with
        adaLN-Zero in place of a token of the step.
        """
        tokens = sequence_space(gspace.fibergroup)
        action = FieldType(tokens, vectors * [gspace.basespace_action] + scalars * [tokens.trivial_repr])
        given: FieldTransformerOptions = {
            "memory_type": FieldType(gspace, channels * [gspace.trivial_repr]),
            "fields": 16,
            "num_heads": 4,
            "num_encoder_layers": 2,
            "num_decoder_layers": 4,
            "condition": 64,
            "block": {"causal": True},
            "encoder_block": {"kernel_size": 3},
            "cross_attention": {"encoding": "fourier"},
        }
        return cls(action, action, **(given | options))

    def forward(
        self,
        input: GeometricTensor,
        memory: GeometricTensor | None = None,
        condition: Tensor | GeometricTensor | None = None,
        mask: Tensor | None = None,
        *,
        memory_key_padding_mask: Tensor | None = None,
        memory_batch: Tensor | None = None,
    ) -> GeometricTensor:
        """Apply the network.

        Args:
            input: features of type ``in_type`` on a sequence or a grid.
            memory: of a network that has one: features of type ``memory_type`` on a sequence or a grid, as many as of
                the input, or at points, without an encoder.
            condition: of a network that has one: ``(B, n)``, ``(B, n, *space)``, or n trivial fields.
            mask: ``(B, *space)``, False for positions that are not there; the output is zero there.
            memory_key_padding_mask: ``(B, *memory_space)``, or ``(N,)`` at points, True for positions of the memory
                that are to be ignored, as in ``torch.nn.Transformer``.
            memory_batch: ``(N,)``, for a memory at points the number of the sample of each.
        """
        if memory is not None:
            memory = self.encode(memory, memory_key_padding_mask)
        return self.decode(
            input,
            memory,
            condition,
            mask,
            memory_key_padding_mask=memory_key_padding_mask,
            memory_batch=memory_batch,
        )

    def encode(self, memory: GeometricTensor, key_padding_mask: Tensor | None = None) -> GeometricTensor:
        """What :meth:`decode` attends to, of a memory: it does not depend on the input, nor on the condition.

        So the steps of a diffusion share it.

        Args:
            memory, key_padding_mask: as ``memory`` and ``memory_key_padding_mask`` of :meth:`forward`.
        """
        if self.memory_type is None:
            raise ValueError(f"memory: {type(self).__name__} got one and was made without a memory_type; leave it out")
        memory = check_field(memory, self.memory_type, self, "memory")
        if self.encoder is None:
            return memory
        if memory.coords is not None:
            raise ValueError(
                "memory: got scattered points (coords are set), and the encoder needs a sequence or a grid"
            )
        if key_padding_mask is not None:
            check_mask(key_padding_mask, memory.tensor, "memory_key_padding_mask")
        y = on_tensors(self, PlainFieldTransformer.encode, memory.tensor, key_padding_mask)
        return GeometricTensor(y, self._encoded_type)

    def decode(
        self,
        input: GeometricTensor,
        memory: GeometricTensor | None = None,
        condition: Tensor | GeometricTensor | None = None,
        mask: Tensor | None = None,
        *,
        memory_key_padding_mask: Tensor | None = None,
        memory_batch: Tensor | None = None,
    ) -> GeometricTensor:
        """The output for a memory that :meth:`encode` has encoded; the arguments are those of :meth:`forward`."""
        x = check_input(input, self.in_type, self)
        seen = check_memory(self, self.memory_type, memory, memory_key_padding_mask, memory_batch)
        if mask is not None:
            check_mask(mask, x.tensor)
        rows = None
        if condition is not None or self.condition is not None:
            rows = condition_of(self, self.condition, condition, x)
        y = on_tensors(self, PlainFieldTransformer.decode, x.tensor, rows, mask, *seen)
        return GeometricTensor(y, self.out_type)

    def export(self) -> torch.nn.Module:
        """A copy as a plain torch module in eval mode.

        It maps ``(x, memory=None, condition=None, mask=None, memory_key_padding_mask=None, memory_coords=None,
        memory_batch=None)``, tensors, to the tensor of the output.
        """
        return exported_parts(self, PlainFieldTransformer)

    def extra_repr(self) -> str:
        parts = [super().extra_repr()]
        parts += [f"{name}={value}" for name in ("memory_type", "condition") if (value := getattr(self, name))]
        return ", ".join(parts)
