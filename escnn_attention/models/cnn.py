"""An ordinary convolutional network, to hold equivariant ones against."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from escnn_attention._checks import check_bool, check_int, check_ints, check_sequence
from escnn_attention.models.hybrid import check_odd_widths
from escnn_attention.models.pretrained import PretrainedMixin
from escnn_attention.plain.resample import AntialiasedPool

__all__ = ["CNN"]


class CNN(PretrainedMixin, nn.Module):
    r"""Convolutions with batch norm and ReLU, a mean over the positions and a linear map.

    The outline of :class:`HybridNet` without a group: stages of convolutions, each on half as many positions along
    every axis as the one before (2×2 maximum), and a last pointwise convolution.

    .. math:: \mathrm{logits} = W \operatorname{mean}_x f(x) + b

    Args:
        in_channels: the channels of the images.
        num_classes: the number of classes.
        widths: the number of channels in each stage.
        convolutions: the number of convolutions in each stage.
        features: the number of channels that the last pointwise convolution gives.
        stem_kernel: the odd width of the first convolution.
        conv_kernel: the odd width of the others.
        antialiased: whether a blur follows the maximum, of windows of 3×3 then, as in :class:`HybridNet`.

    Shape:
        ``(B, in_channels, H, W)`` to ``(B, num_classes)``.

    Raises:
        TypeError: an argument is of another type.
        ValueError: a number that is not positive, lists whose lengths do not agree, or an even width of a kernel.

    Example:
        >>> import torch
        >>> from escnn_attention.models import CNN
        >>> CNN(1, 10, widths=(4, 8), convolutions=(2, 1), features=8)(torch.randn(2, 1, 8, 8)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        in_channels: int,
        num_classes: int,
        *,
        widths: Sequence[int],
        convolutions: Sequence[int],
        features: int,
        stem_kernel: int = 5,
        conv_kernel: int = 3,
        antialiased: bool = False,
    ):
        super().__init__()
        self.in_channels = channels = check_int("in_channels", in_channels)
        self.num_classes = check_int("num_classes", num_classes)
        counts = check_sequence("convolutions", convolutions, "one number for each stage")
        sizes = check_ints("widths", widths, len(counts), "one for each stage")
        check_odd_widths(stem_kernel=stem_kernel, conv_kernel=conv_kernel)
        check_bool("antialiased", antialiased)
        stages: dict[str, nn.Module] = {}
        for stage, (width, count) in enumerate(zip(sizes, counts, strict=True), start=1):
            if stage > 1:
                stages[f"pool_{stage - 1}"] = AntialiasedPool("max", 2) if antialiased else nn.MaxPool2d(2)
            for i in range(1, check_int("convolutions", count) + 1):
                kernel = conv_kernel if stages else stem_kernel
                stages[f"convolution_{stage}_{i}"] = nn.Sequential(
                    nn.Conv2d(channels, width, kernel, padding=kernel // 2, bias=False),
                    nn.BatchNorm2d(width),
                    nn.ReLU(inplace=True),
                )
                channels = width
        stages["features"] = nn.Conv2d(channels, check_int("features", features), 1)
        self.stages = nn.ModuleDict(stages)
        self.head = nn.Linear(features, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """The logits ``(B, num_classes)`` of images ``(B, in_channels, H, W)``."""
        x = images
        for stage in self.stages.values():
            x = stage(x)
        logits: Tensor = self.head(x.mean(dim=(-2, -1)))
        return logits
