"""The SiLU nonlinearity."""

from __future__ import annotations

import torch
from escnn.nn import FieldType

from escnn_attention.nn.arguments import check_pointwise, check_type
from escnn_attention.nn.module import PlainModule

__all__ = ["SiLU"]


class SiLU(PlainModule):
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

    pointwise = True

    def __init__(self, in_type: FieldType):
        check_pointwise("in_type", check_type("in_type", in_type), "SiLU")
        super().__init__(in_type, in_type, torch.nn.SiLU())
