"""Nonlinearities that act on every channel by itself."""

from __future__ import annotations

from typing import ClassVar, Literal, get_args

import torch
from escnn.nn import EquivariantModule, FieldType, ReLU

from escnn_attention._checks import check_option
from escnn_attention.nn.arguments import check_pointwise, check_type
from escnn_attention.nn.module import PlainModule

__all__ = ["GELU", "Activation", "SiLU", "activation_of", "plain_activation"]

Activation = Literal["silu", "gelu", "relu"]


class _Pointwise(PlainModule):
    """A function of numbers, applied to every channel."""

    pointwise = True
    function: ClassVar[type[torch.nn.Module]]

    def __init__(self, in_type: FieldType):
        check_pointwise("in_type", check_type("in_type", in_type), type(self).__name__)
        super().__init__(in_type, in_type, self.function())


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
    """The nonlinearity of this name: :class:`SiLU`, :class:`GELU`, or escnn's ReLU.

    Raises:
        ValueError: there is none, or a field does not support it.
    """
    check_option("activation", name, get_args(Activation))
    if name == "relu":
        check_pointwise("activation", field_type, "ReLU")
        return ReLU(field_type)
    return {"silu": SiLU, "gelu": GELU}[name](field_type)


def plain_activation(name: Activation) -> torch.nn.Module:
    """The nonlinearity of this name on tensors.

    Raises:
        ValueError: there is none.
    """
    check_option("activation", name, get_args(Activation))
    return {"silu": torch.nn.SiLU, "gelu": torch.nn.GELU, "relu": torch.nn.ReLU}[name]()
