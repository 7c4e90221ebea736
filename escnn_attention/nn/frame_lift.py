"""A lifting to regular fields by any network of images or volumes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from escnn.gspaces import GSpace
from escnn.nn import FieldType, GeometricTensor

from escnn_attention._checks import check_bool, check_int
from escnn_attention.groups.fibers import fibers
from escnn_attention.groups.sequences import sequence_space
from escnn_attention.nn.arguments import check_type
from escnn_attention.nn.module import PlainModule, check_input
from escnn_attention.plain.frame_lift import FrameLift as PlainFrameLift
from escnn_attention.plain.frame_lift import tensor_axes


class FrameLift(PlainModule):
    r"""An equivariant layer from any network :math:`\phi` of images or volumes, evaluated in the frame of every pose.

    .. math:: F(x)(p, h) = \phi(h^{-1} x)(h^{-1} p)

    The outputs for all poses h are the channels of regular fields at the positions p, which group elements permute: the
    layer is exactly equivariant, for any network, such as a pretrained backbone, at :math:`|H|` times its cost. Groups
    that do not map the grid onto itself are refused.

    The network returns feature maps ``(B, D, *grid)`` or tokens ``(B, R + N, D)``: R prefix tokens, such as class and
    register tokens, and one token for every square patch, row by row. Networks of timm are called by their
    ``forward_features`` and declare D and R.

    Dropout, and batch norms in training mode, are equivariant in expectation only; ``frozen=True`` keeps the network in
    eval mode.

    Args:
        module: the network. Its parameters are those of the layer.
        gspace: the gspace of the images or volumes.
        channels: D, the number of features; by default the attribute ``num_features`` of the network.
        in_type: the type of the input; by default the three colours of an image as scalars.
        prefix_tokens: R; by default the attribute ``num_prefix_tokens`` of the network, or 0.
        frozen: whether the network stays in eval mode, without gradients.
        poses_at_once: the number of poses in one batch of the network; by default all. Fewer need less memory.

    Attributes:
        prefix_type: the type of prefix tokens, over the sequences of the fiber group.

    Shape:
        ``(B, in_type.size, *space)`` to ``(B, D * |H|, *grid)``.

    Raises:
        TypeError: an argument is of another type, or the network does not declare its number of features.
        ValueError: the group does not map the grid onto itself, or a type of another gspace; on application, an output
            of the network that is neither feature maps nor tokens of square patches.

    Example:
        >>> import torch
        >>> from escnn_attention import FrameLift, assert_equivariant
        >>> from escnn import gspaces
        >>> backbone = torch.nn.Sequential(torch.nn.Conv2d(3, 6, 4, stride=4), torch.nn.ReLU())
        >>> lift = FrameLift(backbone, gspaces.flipRot2dOnR2(4), channels=6)
        >>> lift.out_type.size, lift(lift.in_type(torch.randn(1, 3, 12, 16))).shape
        (48, torch.Size([1, 48, 3, 4]))
        >>> assert_equivariant(lift, (1, 3, 12, 16), tolerance=1e-6)

    Source: Basu et al., "Equi-Tuning: Group Equivariant Fine-Tuning of Pretrained Models", AAAI 2023; with the poses
    kept as fields in place of their mean, as in a lifting layer.
    """

    plain: PlainFrameLift

    def __init__(
        self,
        module: torch.nn.Module,
        gspace: GSpace,
        channels: int | None = None,
        *,
        in_type: FieldType | None = None,
        prefix_tokens: int | None = None,
        frozen: bool = False,
        poses_at_once: int | None = None,
    ):
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"module: got {module!r}, needed a torch.nn.Module")
        if not isinstance(gspace, GSpace):
            raise TypeError(f"gspace: got {gspace!r}, needed a gspace of escnn")
        group = fibers(gspace)
        if not group.dimension or not group.preserves_square:
            raise ValueError(
                f"gspace: {gspace.name} does not map a square grid onto itself, needed a group that does, such as that "
                "of gspaces.flipRot2dOnR2(4)"
            )
        in_type = FieldType(gspace, 3 * [gspace.trivial_repr]) if in_type is None else check_type("in_type", in_type)
        if in_type.gspace != gspace:
            raise ValueError(f"in_type: its gspace is {in_type.gspace.name}, needed {gspace.name}")
        number = check_int("channels", _said("channels", channels, module, "num_features", None))
        out_type = FieldType(gspace, number * [gspace.regular_repr])
        scalars = all(r.is_trivial() for r in in_type.representations)
        matrices = np.stack([np.asarray(in_type.representation(~h)) for h in group.elements])
        plain = PlainFrameLift(
            module,
            tensor_axes(group.action),
            None if scalars else matrices,
            prefix_tokens=check_int("prefix_tokens", _said("", prefix_tokens, module, "num_prefix_tokens", 0), least=0),
            frozen=check_bool("frozen", frozen),
            poses_at_once=None if poses_at_once is None else check_int("poses_at_once", poses_at_once),
            method="forward_features" if hasattr(module, "forward_features") else "forward",
        )
        super().__init__(in_type, out_type, plain)
        tokens = sequence_space(gspace.fibergroup)
        self.prefix_type = FieldType(tokens, number * [tokens.regular_repr])

    def with_prefix(self, input: GeometricTensor) -> tuple[GeometricTensor, GeometricTensor]:
        """The feature maps, and the prefix tokens ``(B, D * |H|, R)`` as fields over sequences."""
        x = check_input(input, self.in_type, self)
        maps, prefix = self.plain.lift(x.tensor)
        return GeometricTensor(maps, self.out_type), GeometricTensor(prefix, self.prefix_type)

    @torch.no_grad()
    def _output_space(self, space: Sequence[int]) -> Sequence[int]:
        like = next(self.plain.parameters(), torch.empty(0))
        training = self.training
        output = self.plain.eval()(like.new_zeros(1, self.in_type.size, *space))
        self.plain.train(training)
        return output.shape[2:]


def _said(name: str, value: Any, module: torch.nn.Module, attribute: str, otherwise: Any) -> Any:
    """An argument, or what the network says of it."""
    value = getattr(module, attribute, otherwise) if value is None else value
    if value is None:
        raise TypeError(f"{name}: got None, and {type(module).__name__} has no {attribute}; needed an integer")
    return value
