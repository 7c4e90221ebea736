"""Dense blocks of group convolutions."""

from __future__ import annotations

import torch
from escnn.nn import FieldType, GeometricTensor, tensor_directsum

from escnn_attention._checks import check_int
from escnn_attention.models.convolutions import Attention, attended, check_attention, norm_and_relu, sequence
from escnn_attention.models.exports import exported
from escnn_attention.nn.arguments import check_input, check_regular, check_type
from escnn_attention.nn.module import GridModule
from escnn_attention.nn.resample import Crop
from escnn_attention.plain.blocks import DenseBlock as PlainDenseBlock

__all__ = ["DenseBlock"]


class DenseBlock(GridModule):
    r"""A group convolution whose fields are put in front of those it came from.

    .. math::
        \mathrm{out} = \big( [\mathrm{BN}(f)]^+ \star_G \psi,\; \mathrm{crop}(f) \big)

    The convolution has no padding, and f is cropped to the size that it leaves.

    Args:
        in_type: the type of the input: regular fields.
        growth: the number of regular fields that the block adds.
        kernel_size: the odd width of the kernel.
        attention: where the convolution attends; see :class:`GroupCNN`.
        hidden: the number of hidden fields of channel attention; as nearly as a ratio of integers comes to it.
            Only with channel attention.
        attention_size, attention_dilation: of the kernel of spatial attention. Only with that.

    Shape:
        ``(B, in_type.size, *space)`` to ``(B, in_type.size + growth * |H|, *(n - kernel_size + 1 for n in space))``.

    Raises:
        TypeError: an argument is of another type.
        ValueError: fields that are not regular, an even ``kernel_size``, an unknown attention, an option that the
            attention does not have, or, on application, a grid that is too small.

    Example:
        >>> import torch
        >>> from escnn_attention.models import DenseBlock
        >>> from escnn import gspaces, nn
        >>> g = gspaces.rot2dOnR2(4)
        >>> fields = nn.FieldType(g, 2 * [g.regular_repr])
        >>> DenseBlock(fields, growth=3)(fields(torch.randn(1, 8, 9, 9))).shape
        torch.Size([1, 20, 7, 7])

    Source: Huang et al., "Densely Connected Convolutional Networks", CVPR 2017, as in Veeling et al., "Rotation
    Equivariant CNNs for Digital Pathology", MICCAI 2018.
    """

    def __init__(
        self,
        in_type: FieldType,
        growth: int,
        kernel_size: int = 3,
        *,
        attention: Attention | None = None,
        hidden: int = 2,
        attention_size: int = 7,
        attention_dilation: int = 1,
    ):
        check_regular("in_type", check_type("in_type", in_type), "a dense block")
        if check_int("kernel_size", kernel_size) % 2 == 0:
            raise ValueError(f"kernel_size: got {kernel_size}, needed an odd width, whose margin can be cropped")
        check_attention(
            attention,
            hidden=(hidden, 2),
            attention_size=(attention_size, 7),
            attention_dilation=(attention_dilation, 1),
        )
        new = FieldType(in_type.gspace, check_int("growth", growth) * [in_type.gspace.regular_repr])
        super().__init__(in_type, new + in_type)
        self.branch = sequence(
            norm_and_relu(in_type),
            attended(
                in_type,
                new,
                kernel_size,
                attention,
                ratio=max(1, len(in_type) // hidden),
                attention_size=attention_size,
                attention_dilation=attention_dilation,
            ),
        )
        self.crop = Crop(in_type, kernel_size // 2)

    def forward(self, input: GeometricTensor) -> GeometricTensor:
        x = check_input(input, self.in_type, self)
        return tensor_directsum([self.branch(x), self.crop(x)])

    def evaluate_output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the output for an input of this shape."""
        batch, _, *space = self.crop.evaluate_output_shape(input_shape)
        return (batch, self.out_type.size, *space)

    def export(self) -> torch.nn.Module:
        """A copy as a plain torch module in eval mode, on tensors ``(B, in_type.size, *space)``."""
        self.eval()
        return PlainDenseBlock(exported(self.branch), self.crop.export()).eval()
