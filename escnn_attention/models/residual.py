"""Residual blocks of group convolutions."""

from __future__ import annotations

import torch
from escnn.nn import EquivariantModule, FieldType, GeometricTensor, IdentityModule

from escnn_attention._checks import check_bool, check_int
from escnn_attention.models.convolutions import Attention, attended, check_attention, norm_and_relu, sequence
from escnn_attention.models.exports import exported
from escnn_attention.nn.arguments import check_input, check_regular, check_same_gspace, check_type
from escnn_attention.nn.module import GridModule
from escnn_attention.nn.resample import HalvingPool
from escnn_attention.plain.blocks import ResidualBlock as PlainResidualBlock

__all__ = ["ResidualBlock"]


class ResidualBlock(GridModule):
    r"""Two group convolutions with a shortcut, activated in front of the convolutions.

    .. math::
        \mathrm{out} = \mathrm{shortcut}(f)
            + [\mathrm{BN}([\mathrm{BN}(f)]^+ \star_G \psi_1)]^+ \star_G \psi_2

    The shortcut is the identity; where the block halves the grid or changes the type it is a 1×1 group convolution of
    f. Halving is exact: the convolutions have no stride, and a maximum over 2×2 positions is taken behind the first and
    behind the shortcut (:class:`HalvingPool`).

    Args:
        in_type: the type of the input: regular fields.
        out_type: the type of the output, likewise.
        kernel_size: the odd width of the kernels, padded such that they keep the grid.
        halve: whether the grid is halved.
        attention: where all the convolutions attend, that of the shortcut included; see :class:`GroupCNN`.
        hidden: the number of hidden fields of channel attention; as nearly as a ratio of integers comes to it.
            Only with channel attention.
        attention_size: the odd width of the kernels of spatial attention. Only with that.

    Shape:
        ``(B, in_type.size, *space)`` to ``(B, out_type.size, *space)``, or to half the space.

    Raises:
        TypeError: an argument is of another type.
        ValueError: fields that are not regular, another gspace, an even ``kernel_size``, an unknown attention, an
            option that the attention does not have.

    Example:
        >>> import torch
        >>> from escnn_attention.models import ResidualBlock
        >>> from escnn import gspaces, nn
        >>> g = gspaces.rot2dOnR2(4)
        >>> narrow, wide = nn.FieldType(g, 2 * [g.regular_repr]), nn.FieldType(g, 4 * [g.regular_repr])
        >>> ResidualBlock(narrow, wide, halve=True)(narrow(torch.randn(1, 8, 10, 10))).shape
        torch.Size([1, 16, 5, 5])

    Source: He et al., "Identity Mappings in Deep Residual Networks", 2016, as in Cohen and Welling, "Group Equivariant
    Convolutional Networks", ICML 2016; the exact halving is Appendix C of Romero et al., ICML 2020.
    """

    def __init__(
        self,
        in_type: FieldType,
        out_type: FieldType,
        kernel_size: int = 3,
        *,
        halve: bool = False,
        attention: Attention | None = None,
        hidden: int = 2,
        attention_size: int = 7,
    ):
        check_regular("in_type", check_type("in_type", in_type), "a residual block")
        check_regular("out_type", check_type("out_type", out_type), "a residual block")
        check_same_gspace(in_type, out_type)
        if check_int("kernel_size", kernel_size) % 2 == 0:
            raise ValueError(f"kernel_size: got {kernel_size}, needed an odd width, which keeps the grid")
        check_bool("halve", halve)
        check_attention(attention, hidden=(hidden, 2), attention_size=(attention_size, 7))
        super().__init__(in_type, out_type)

        def convolution(fields: FieldType, size: int) -> dict[str, EquivariantModule]:
            return attended(
                fields,
                out_type,
                size,
                attention,
                padding=size // 2,
                ratio=max(1, len(fields) // hidden),
                attention_size=attention_size,
            )

        pool: dict[str, EquivariantModule] = {"pool": HalvingPool(out_type)} if halve else {}
        self.branch = sequence(
            norm_and_relu(in_type),
            convolution(in_type, kernel_size),
            pool,
            norm_and_relu(out_type),
            convolution(out_type, kernel_size),
        )
        self.shortcut: EquivariantModule = IdentityModule(in_type)
        if halve or in_type != out_type:
            self.shortcut = sequence(convolution(in_type, 1), {"pool": HalvingPool(out_type)} if halve else {})
        self.halve = halve

    def forward(self, input: GeometricTensor) -> GeometricTensor:
        x = check_input(input, self.in_type, self)
        return self.shortcut(x) + self.branch(x)

    def evaluate_output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the output for an input of this shape."""
        return tuple(self.branch.evaluate_output_shape(input_shape))

    def export(self) -> torch.nn.Module:
        """A copy as a plain torch module in eval mode, on tensors ``(B, in_type.size, *space)``."""
        self.eval()
        return PlainResidualBlock(exported(self.branch), exported(self.shortcut)).eval()

    def extra_repr(self) -> str:
        return super().extra_repr() + (", halve=True" if self.halve else "")
