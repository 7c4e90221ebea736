"""Class tokens: invariants that attention reads of a feature map."""

from __future__ import annotations

from escnn.nn import FieldType

from escnn_attention._checks import check_int
from escnn_attention.groups.fibers import fibers, frames
from escnn_attention.groups.samples import Samples, as_samples
from escnn_attention.nn.arguments import check_shape, check_type
from escnn_attention.nn.module import MaskedModule
from escnn_attention.plain.attention_pool import AttentionPool as PlainAttentionPool
from escnn_attention.plain.projections import ToPoses

__all__ = ["AttentionPool"]


class AttentionPool(MaskedModule):
    r"""Class tokens: learned queries attend to all positions and poses of a feature map, and give invariants.

    .. math::
        y_t = W \Big( \sum_{x, \hat h} \mathrm{softmax}_{(x, \hat h)}\big( \langle q_t, k(x, \hat h) \rangle / \sqrt C
            \big)\, v(x, \hat h) \Big)_{\text{heads}} + b

    with keys and values as of :class:`GroupSelfAttention`. A token is the same from every pose, so that an element
    permutes what it sees, positions and poses, and changes nothing. As the last stage of an
    :class:`~escnn_attention.models.EquivariantClassifier` it takes the place of the maximum over the poses and the mean
    over the positions.

    Args:
        in_type: the type of the input: any fields.
        out: the number of invariants of each token.
        num_heads: the number M of heads.
        head_fields: the number C of regular fields of a head.
        tokens: the number of tokens.
        samples: which elements stand for a continuous fiber group; None where it is finite.

    Shape:
        ``(B, in_type.size, *space)`` to ``(B, tokens * out, 1, ..., 1)``: scalar fields at a single position.

    Raises:
        TypeError: an argument is of another type.
        ValueError: a number that is not positive.
        NotImplementedError: the fiber group is continuous, and there are no ``samples``.

    Example:
        >>> import torch
        >>> from escnn_attention import AttentionPool
        >>> from escnn import gspaces, nn
        >>> g = gspaces.rot2dOnR2(4)
        >>> fields = nn.FieldType(g, [g.regular_repr, g.irrep(1)])
        >>> AttentionPool(fields, 10, num_heads=2)(fields(torch.randn(3, 6, 7, 7))).shape
        torch.Size([3, 10, 1, 1])

    Source: Touvron et al., "Going deeper with Image Transformers", ICCV 2021, Section 3 (class attention).
    """

    plain: PlainAttentionPool

    def __init__(
        self,
        in_type: FieldType,
        out: int,
        num_heads: int = 1,
        *,
        head_fields: int = 8,
        tokens: int = 1,
        samples: Samples | int | None = None,
    ):
        check_type("in_type", in_type)
        out, tokens = check_int("out", out), check_int("tokens", tokens)
        group, groups = fibers(in_type.gspace, as_samples(samples)), 2 * check_int("num_heads", num_heads)
        fields = groups * check_int("head_fields", head_fields)
        # A bias of the keys adds the same to all scores of a token; values have one in the readout.
        project_in = ToPoses(frames(in_type, group=group), in_type.size, fields, group.order, groups=groups)
        scalars = FieldType(in_type.gspace, tokens * out * [in_type.gspace.trivial_repr])
        super().__init__(in_type, scalars, PlainAttentionPool(project_in, group.log_measure, tokens, out))

    def evaluate_output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the output for an input of this shape: a single position."""
        batch, _, *space = check_shape(input_shape, self.in_type, type(self).__name__)
        return (batch, self.out_type.size, *(1 for _ in space))
