"""U-shaped networks from fields to fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from escnn.gspaces import GSpace
from escnn.nn import EquivariantModule, FieldType, GeometricTensor, SequentialModule
from torch import Tensor

from escnn_attention._checks import check_bool, check_int, check_ints, check_sequence
from escnn_attention.exporting.modules import exported_parts
from escnn_attention.groups.fibers import fibers
from escnn_attention.models.classifier import images_of
from escnn_attention.models.convolutions import check_odd_widths, field_type_of, image_type, regular_type
from escnn_attention.models.hybrid import block_defaults, head_fields_of, steerable_convolution
from escnn_attention.models.pretrained import PretrainedMixin
from escnn_attention.nn.arguments import PaddingMode, check_padding_mode
from escnn_attention.nn.embeddings import PatchDecoder, PatchEmbedding
from escnn_attention.nn.module import GridModule, on_tensors
from escnn_attention.nn.pointwise import PoseLinear
from escnn_attention.nn.resample import AntialiasedPool, HalvingPool
from escnn_attention.nn.transformer import TransformerBlock, each_block
from escnn_attention.plain.image_networks import UNet, Upsample


class FeatureInfo(list[dict[str, Any]]):
    """What a backbone gives at each level, the finest first, in the form of timm's ``feature_info``.

    Each entry has ``num_chs``, the number of channels; ``reduction``, how many positions of the input along an axis
    become one; and ``module``, the name of the layers.

    Example:
        >>> from escnn import gspaces
        >>> backbone = FieldUNet(gspaces.rot2dOnR2(4), 3, None, widths=(2, 4), attention=(0, 0), features_only=True)
        >>> backbone.feature_info.channels(), backbone.feature_info.reduction()
        ([8, 16], [1, 2])
    """

    def channels(self) -> list[int]:
        """The number of channels at each level."""
        return [level["num_chs"] for level in self]

    def reduction(self) -> list[int]:
        """How many positions of the input along an axis become one, at each level."""
        return [level["reduction"] for level in self]


class FieldUNet(PretrainedMixin, GridModule):
    r"""A U-shaped network from any fields to any fields on the same grid: segmentation, flows, dense regression.

    An encoder of levels, each on half as many positions along every axis as the one above, and a decoder back:

    .. math::
        e_l &= E_l(\mathrm{pool}(e_{l-1})), \qquad d_L = e_L \\
        d_l &= D_l(e_l \oplus \mathrm{up}(d_{l+1})), \qquad y = W d_1

    :math:`E_l` and :math:`D_l` are steerable convolutions (with batch norm and ReLU) and then
    :class:`TransformerBlock`\ s, between regular fields; W is an equivariant linear map at every position. By
    default the coarsest level has attention in place of convolutions, in windows, which costs about as much as they do;
    global attention (``kernel_size=None``) sees the whole image.

    The network commutes with every element of the fiber group that maps the grid onto itself, at every size, and away
    from the border with translations by multiples of :math:`2^{L-1}` positions.

    With a ``patch_size`` p the levels are on the grid of patches: :math:`E_1` reads a :class:`PatchEmbedding` of the
    input, and W is a :class:`PatchDecoder`. Levels of attention alone are then a hierarchical vision transformer.

    Args:
        gspace: the symmetry, of the plane or of space.
        in_type: the type of the input: any fields, a number of scalars, or numbers of scalars and vectors, in their
            order, such as ``{"scalar": 1, "vector": 2}``.
        out_type: the type of the output, likewise: scores of classes are scalars, velocities are vectors. None with
            ``features_only``.
        widths: the number of regular fields at each level, the finest first.
        convolutions: the number of convolutions at each level, of the encoder and of the decoder; by default two at
            the finest level and at those without attention, and none at the others.
        attention: the number of attention blocks behind them, likewise.
        conv_kernel: the odd width of the convolutions.
        num_heads: the number of heads of the blocks.
        kernel_size: the odd width of their windows, in positions of their level; None for global attention.
        block: further options of every :class:`TransformerBlock`, such as ``encoding``, ``keys``, ``dropout`` and
            ``drop_path`` (of the last block; from 0 of the first it rises by equal steps). By default ``norm`` is
            ``"pre"``, ``keys`` are ``"own"``, ``head_fields`` is the width divided by the number of heads, rounded up
            and at least 2, and the ``encoding`` is ``"convolutional"`` in windows, and for global attention
            ``"rotary"``, on a torus ``"mlp"``.
        antialiased: whether the grid is halved by :class:`AntialiasedPool`, a blur, or by the means of
            :class:`HalvingPool`.
        padding_mode: ``"none"``, or ``"circular"`` for tori, whose opposite sides are neighbours: for sides that are
            multiples of :math:`2^{L-1}` patches or positions. The network then commutes with all rolls by such
            multiples.
        patch_size: the positions along every axis of a patch, for a group that maps a square onto itself; None for
            levels on the grid of the input.
        features_only: whether the network gives the features of the decoder at all levels, the finest first, and has
            ``feature_info``, as a backbone of timm.

    Attributes:
        feature_info: the channels and the reduction at each level.

    Shape:
        ``(B, in_type.size, *space)`` to ``(B, out_type.size, *space)``. A tensor gives a tensor, a ``GeometricTensor``
        gives one.

    Raises:
        ValueError: a type over another gspace, lists whose lengths do not agree, a level with nothing in it, an even
            width of a kernel, patches for a group that does not map a square onto itself; on application, a grid that
            patches do not divide, or that cannot be halved so often.

    Example:
        >>> import torch
        >>> from escnn_attention import assert_equivariant
        >>> from escnn_attention.models import FieldUNet
        >>> from escnn import gspaces, nn
        >>> g = gspaces.rot2dOnR2(4)
        >>> velocity = nn.FieldType(g, [g.irrep(1)])
        >>> network = FieldUNet(g, velocity, velocity, widths=(2, 4), attention=(0, 1), num_heads=2)
        >>> network(velocity(torch.randn(1, 2, 8, 8))).shape
        torch.Size([1, 2, 8, 8])
        >>> assert_equivariant(network, (1, 2, 9, 9), tolerance=1e-5)

    Source: Ronneberger et al., "U-Net", MICCAI 2015; with attention at the coarse levels Dhariwal and Nichol,
    "Diffusion Models Beat GANs on Image Synthesis", NeurIPS 2021; with steerable convolutions Weiler and Cesa, 2019.
    """

    def __init__(
        self,
        gspace: GSpace,
        in_type: int | Mapping[str, int] | FieldType,
        out_type: int | Mapping[str, int] | FieldType | None,
        *,
        widths: Sequence[int] = (8, 16, 32),
        convolutions: Sequence[int] | int | None = None,
        attention: Sequence[int] = (0, 0, 1),
        conv_kernel: int = 3,
        num_heads: int = 4,
        kernel_size: int | None = 5,
        block: Mapping[str, Any] | None = None,
        antialiased: bool = True,
        padding_mode: PaddingMode = "none",
        patch_size: int | None = None,
        features_only: bool = False,
    ):
        image_type(gspace, 1)
        given = field_type_of("in_type", in_type, gspace)
        number = len(check_sequence("widths", widths, "one number for each level"))
        check_ints("widths", widths, max(1, number), "one for each level")
        blocks = check_ints("attention", attention, number, "one for each level", least=0)
        if convolutions is None:
            convolutions = [0 if level and some else 2 for level, some in enumerate(blocks)]
        convs = number * (convolutions,) if isinstance(convolutions, int) else convolutions
        convs = check_ints("convolutions", convs, number, "one for each level", least=0)
        for level, counts in enumerate(zip(convs, blocks, strict=True), start=1):
            if not any(counts):
                raise ValueError(f"convolutions, attention: level {level} has neither, needed one of them")
        check_odd_widths(conv_kernel=conv_kernel)
        check_int("num_heads", num_heads)
        if check_bool("features_only", features_only) == (out_type is not None):
            raise ValueError(
                f"out_type: got {out_type!r} with features_only={features_only}, needed a type of the output, or None "
                "with features_only=True"
            )
        types = [regular_type(gspace, width) for width in widths]
        target = types[0] if out_type is None else field_type_of("out_type", out_type, gspace)
        super().__init__(given, target)
        self.gspace = gspace
        circular = check_padding_mode(fibers(gspace), gspace, padding_mode)
        self.padding_mode = padding_mode
        taken = ("samples", "attention", "condition", "padding_mode", "crop")
        usual = block_defaults(kernel_size, circular)
        options = iter(each_block(FieldUNet, {**usual, **(block or {})}, 2 * sum(blocks) - blocks[-1], taken))
        shared: dict[str, Any] = {"num_heads": num_heads, "kernel_size": kernel_size, "padding_mode": padding_mode}
        beyond = "circular" if circular else "zeros"

        def layers(source: FieldType, level: int) -> SequentialModule:
            wide, modules = types[level], list[EquivariantModule]()
            for _ in range(convs[level]):
                modules.append(steerable_convolution(source, wide, conv_kernel, beyond))
                source = wide
            for _ in range(blocks[level]):
                own = {"head_fields": head_fields_of(len(wide), num_heads), **shared, **next(options)}
                modules.append(TransformerBlock(source, wide, **own))
                source = wide
            return SequentialModule(*modules)

        self.embedding = None if patch_size is None else PatchEmbedding(given, types[0], patch_size)
        sources = [given if patch_size is None else types[0], *types[:-1]]
        self.encoder = torch.nn.ModuleList(layers(source, level) for level, source in enumerate(sources))
        check_bool("antialiased", antialiased)
        self.pools = torch.nn.ModuleList(
            (AntialiasedPool if antialiased else HalvingPool)(fields, "avg", padding_mode=padding_mode)
            for fields in types[:-1]
        )
        self.decoder = torch.nn.ModuleList(
            layers(types[level] + types[level + 1], level) for level in reversed(range(number - 1))
        )
        self.upsample = Upsample(circular)
        self.head: EquivariantModule | None = None
        if not features_only:
            self.head = PatchDecoder(types[0], target, patch_size) if patch_size else PoseLinear(types[0], target)
        self.feature_info = FeatureInfo(
            {
                "num_chs": fields.size,
                "reduction": (patch_size or 1) * 2**level,
                "module": f"decoder.{number - 2 - level}" if level < number - 1 else f"encoder.{level}",
            }
            for level, fields in enumerate(types)
        )
        self._types = types

    def forward(self, input: GeometricTensor | Tensor) -> Any:
        """The output, a ``GeometricTensor`` or a tensor as the input; with ``features_only`` a list of them.

        Raises:
            ValueError: a tensor of another type or shape, or a grid that patches do not divide, or that cannot be
                halved so often.
        """
        x = images_of(input, self.in_type, self)
        self.evaluate_output_shape(tuple(x.shape))
        y = on_tensors(self, UNet.forward, x.tensor)
        if isinstance(input, Tensor):
            return y
        if isinstance(y, Tensor):
            return GeometricTensor(y, self.out_type)
        return [GeometricTensor(t, fields) for t, fields in zip(y, self._types, strict=True)]

    def evaluate_output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        shape = super().evaluate_output_shape(input_shape)
        on_levels = shape if self.embedding is None else self.embedding.evaluate_output_shape(input_shape)
        space, least = on_levels[2:], 2 ** (len(self._types) - 1)
        if min(space) < least:
            raise ValueError(
                f"input: a grid of {'×'.join(map(str, space))} cannot be halved {len(self._types) - 1} times, needed "
                f"{least} positions or more along every axis"
            )
        if self.padding_mode == "circular" and any(n % least for n in space):
            raise ValueError(
                f"input: a torus of {'×'.join(map(str, space))} cannot be halved {len(self._types) - 1} times, needed "
                f"multiples of {least}"
            )
        return shape

    def export(self) -> torch.nn.Module:
        """A copy as a plain torch module in eval mode, on tensors ``(B, in_type.size, *space)``."""
        return exported_parts(self, UNet)
