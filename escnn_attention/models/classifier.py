"""Classifiers: equivariant stages that end in invariant logits, and the last stages of some."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping
from typing import cast

import torch
from escnn.gspaces import GSpace
from escnn.nn import EquivariantModule, FieldType, GeometricTensor
from torch import Tensor

from escnn_attention.exporting.modules import exported
from escnn_attention.models.pretrained import PretrainedMixin
from escnn_attention.nn.arguments import check_regular, check_type
from escnn_attention.nn.heads import is_scalar
from escnn_attention.nn.module import PlainModule, check_input, check_shape
from escnn_attention.plain.image_networks import Classifier
from escnn_attention.plain.image_networks import PoseMean as PlainPoseMean
from escnn_attention.plain.image_networks import PositionSum as PlainPositionSum


class EquivariantClassifier(PretrainedMixin, Classifier):
    r"""Equivariant stages, a maximum over poses, a mean over positions, and a linear map to the classes.

    .. math:: \mathrm{logits} = W \operatorname{mean}_x \max_h f(x, h) + b

    The logits are invariant under the fiber group, exactly for the elements that map the grid onto itself.

    Args:
        stages: by name, in order; the last gives regular fields, or scalars, which have no poses.
        num_classes: the number of classes; None if the last stage gives one regular field per class, whose pooled
            values are the logits.

    Attributes:
        stages: the stages, by name.

    Shape:
        ``(B, in_type.size, *space)`` to ``(B, num_classes)``.

    Raises:
        ValueError: the last stage gives fields that are neither regular nor scalars.

    Example:
        >>> import torch
        >>> from escnn_attention import LiftingSelfAttention
        >>> from escnn_attention.models import EquivariantClassifier
        >>> from escnn import gspaces, nn
        >>> g = gspaces.rot2dOnR2(4)
        >>> image, fields = nn.FieldType(g, [g.trivial_repr]), nn.FieldType(g, 8 * [g.regular_repr])
        >>> network = EquivariantClassifier({"lifting": LiftingSelfAttention(image, fields, 2, 5)}, num_classes=10)
        >>> network(torch.randn(2, 1, 9, 9)).shape
        torch.Size([2, 10])
    """

    stages: torch.nn.ModuleDict

    def __init__(self, stages: Mapping[str, EquivariantModule], num_classes: int | None):
        if not stages:
            raise ValueError("stages: got none, needed at least one")
        first, *_ = stages.values()
        *_, last = stages.values()
        scalars = is_scalar(last.out_type)
        if not scalars:
            check_regular("stages", last.out_type, "the maximum over poses")
        fields = len(last.out_type)
        head = torch.nn.Identity() if num_classes is None else torch.nn.Linear(fields, num_classes)
        super().__init__(torch.nn.ModuleDict(stages), 1 if scalars else last.out_type.gspace.fibergroup.order(), head)
        self.in_type: FieldType = first.in_type
        self.gspace: GSpace = first.in_type.gspace
        self.num_classes = fields if num_classes is None else num_classes

    def forward(self, input: GeometricTensor | Tensor) -> Tensor:
        """The logits ``(B, num_classes)`` of images, as a GeometricTensor of type ``in_type`` or as a plain tensor."""
        x = images_of(input, self.in_type, self)
        for stage in self.stages.values():
            x = stage(x)
        return self.read(x.tensor)

    def feature_maps(self, input: GeometricTensor | Tensor) -> dict[str, GeometricTensor]:
        """The features of each stage, by its name."""
        x = images_of(input, self.in_type, self)
        maps = {}
        for name, stage in self.stages.items():
            maps[name] = x = stage(x)
        return maps

    def as_fields(self) -> InvariantLogits:
        """The network as an equivariant module, for :func:`escnn_attention.equivariance_report`."""
        return InvariantLogits(self, self.in_type, self.num_classes)

    def export(self) -> torch.nn.Module:
        """A copy as a plain torch module in eval mode, from images ``(B, in_type.size, *space)`` to logits."""
        self.eval()
        stages = OrderedDict((name, exported(cast(EquivariantModule, stage))) for name, stage in self.stages.items())
        return Classifier(torch.nn.Sequential(stages), self.order, copy.deepcopy(self.head)).eval()


def images_of(input: GeometricTensor | Tensor, in_type: FieldType, network: torch.nn.Module) -> GeometricTensor:
    """The input of a network, if it is images of a type, as a GeometricTensor or as a tensor."""
    if isinstance(input, Tensor):
        dim = in_type.gspace.dimensionality
        if input.dim() != 2 + dim or input.shape[1] != in_type.size:
            raise ValueError(
                f"input: {type(network).__name__} got a tensor of shape {tuple(input.shape)}, needed "
                f"(batch, {in_type.size}{', size' * dim})"
            )
        input = GeometricTensor(input, in_type)
    return check_input(input, in_type, network)


class InvariantLogits(EquivariantModule):
    """A classifier as a map between fields: images to one scalar field per class, at a single position.

    It makes the equivariance error of a whole network measurable, and comparable between networks of any kind.

    Args:
        network: images ``(B, in_type.size, *space)`` to logits ``(B, num_classes)``.
        in_type: the type of the images; its gspace is the symmetry that is tested.
        num_classes: the number of classes.

    Example:
        >>> from escnn_attention import assert_equivariant
        >>> from escnn_attention.models import HybridNet
        >>> from escnn import gspaces
        >>> network = HybridNet(gspaces.rot2dOnR2(4), 1, 10, widths=(4, 4), convolutions=(1, 0), attention=(0, 1))
        >>> logits = network.as_fields()  # an InvariantLogits
        >>> logits.evaluate_output_shape((1, 1, 9, 9))
        (1, 10, 1, 1)
        >>> assert_equivariant(logits, (1, 1, 9, 9), tolerance=1e-5)
    """

    def __init__(self, network: torch.nn.Module, in_type: FieldType, num_classes: int):
        super().__init__()
        self.network = network
        self.in_type = in_type
        self.out_type = FieldType(in_type.gspace, num_classes * [in_type.gspace.trivial_repr])

    def forward(self, input: GeometricTensor) -> GeometricTensor:
        """The logits as scalar fields, ``(B, num_classes, 1, ..., 1)``."""
        logits = self.network(input.tensor)
        return GeometricTensor(logits[(..., *[None] * self.in_type.gspace.dimensionality)], self.out_type)

    def evaluate_output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        return (input_shape[0], self.out_type.size, *[1] * self.in_type.gspace.dimensionality)


class PoseMean(PlainModule):
    r"""Replaces a regular field by its mean over the poses, at every pose.

    .. math:: \mathrm{out}(x, h) = \frac{1}{|H|} \sum_{h'} f(x, h')

    As the last stage of an :class:`EquivariantClassifier` it turns the maximum over the poses into a mean.

    Args:
        in_type: the type of the input and of the output: regular fields.

    Shape:
        ``(B, in_type.size, *space)`` to the same.

    Raises:
        ValueError: fields that are not regular.

    Example:
        >>> import torch
        >>> from escnn_attention.models import PoseMean
        >>> from escnn import gspaces, nn
        >>> g = gspaces.rot2dOnR2(4)
        >>> fields = nn.FieldType(g, [g.regular_repr])
        >>> PoseMean(fields)(fields(torch.tensor([0.0, 1.0, 2.0, 5.0]).view(1, 4, 1, 1))).tensor.flatten()
        tensor([2., 2., 2., 2.])

    Source: Romero et al., "Attentive Group Equivariant Convolutional Networks", ICML 2020: the published networks for
    CIFAR-10 and PatchCamelyon end in a mean over the poses.
    """

    def __init__(self, in_type: FieldType):
        check_regular("in_type", check_type("in_type", in_type), "the mean over the poses")
        super().__init__(in_type, in_type, PlainPoseMean(in_type.gspace.fibergroup.order()))


class PositionSum(PlainModule):
    r"""Sums a field over all positions of a grid.

    .. math:: \mathrm{out}(h) = \sum_x f(x, h)

    As the last stage of an :class:`EquivariantClassifier` it gives the maximum over the poses of the sum over the
    positions, in place of the mean over the positions of the maximum over the poses.

    Args:
        in_type: the type of the input and of the output.

    Shape:
        ``(B, in_type.size, *space)`` to ``(B, in_type.size, 1, ..., 1)``.

    Example:
        >>> import torch
        >>> from escnn_attention.models import PositionSum
        >>> from escnn import gspaces, nn
        >>> g = gspaces.rot2dOnR2(4)
        >>> fields = nn.FieldType(g, [g.regular_repr])
        >>> PositionSum(fields)(fields(torch.ones(1, 4, 3, 5))).tensor.flatten()
        tensor([15., 15., 15., 15.])

    Source: the published implementation of GSA-Nets, which sums over the positions before the maximum over the poses.
    """

    def __init__(self, in_type: FieldType):
        super().__init__(check_type("in_type", in_type), in_type, PlainPositionSum())

    def evaluate_output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        batch, channels, *space = check_shape(input_shape, self.in_type, type(self).__name__)
        return (batch, channels, *(1 for _ in space))
