"""The Lightning module that trains a network to say of every pixel what it belongs to."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.classification import MulticlassJaccardIndex

from escnn_attention.training.modules.classifier import Classifier


class SegmentationModule(Classifier):
    r"""Trains a network that gives the logits of every pixel, by cross-entropy.

    It is measured by the intersection over union, the mean over the classes c of

    .. math:: \mathrm{IoU}_c = \frac{|\{x : y(x) = c\} \cap \{x : \hat y(x) = c\}|}
        {|\{x : y(x) = c\} \cup \{x : \hat y(x) = c\}|}

    over all pixels x of a part of the data, with labels y and predictions :math:`\hat y`.

    Args:
        network: images ``(B, C, H, W)`` to logits ``(B, num_classes, H, W)``, such as a
            :class:`~escnn_attention.models.FieldUNet`.
        num_classes: the number of classes, the background included; by default the channels of ``network.out_type``.
        **options: as of :class:`~.classifier.Classifier`, such as ``label_smoothing``, ``optimizer`` and ``schedule``.

    Raises:
        ValueError: as :class:`~.classifier.Classifier` raises; on a batch, logits of another shape.

    Example:
        >>> import torch
        >>> from escnn_attention.models import FieldUNet
        >>> from escnn_attention.training import SegmentationModule
        >>> from escnn import gspaces
        >>> network = FieldUNet(gspaces.rot2dOnR2(4), 1, 11, widths=(2, 2), attention=(0, 1), num_heads=1)
        >>> SegmentationModule(network)(torch.randn(2, 1, 8, 8)).shape
        torch.Size([2, 11, 8, 8])
    """

    measure: ClassVar[str] = "iou"
    monitor: ClassVar[str] = "valid_iou"
    keeps_arrays: ClassVar[bool] = True

    @staticmethod
    def _classes_of(network: Any) -> Any:
        return getattr(getattr(network, "out_type", None), "size", None)

    @staticmethod
    def _new_measure(num_classes: int) -> Metric:
        return MulticlassJaccardIndex(num_classes)

    @staticmethod
    def _positions(images: Tensor) -> tuple[int, ...]:
        return tuple(images.shape[2:])

    def predict_step(self, batch: Any, batch_index: int) -> Tensor:
        """The class of every pixel, ``(B, H, W)``."""
        images = batch[0] if isinstance(batch, (tuple, list)) else batch
        return self(images).argmax(dim=1)

    def describe(self, predictions: Tensor, truth: Tensor | None = None) -> list[dict[str, Any]]:
        """One row an image: its number, the pixels of each class, and the part that is right if labels are known."""
        rows = []
        for i, classes in enumerate(predictions):
            counts = torch.bincount(classes.long().flatten(), minlength=self.num_classes).tolist()
            right = {} if truth is None else {"right": float((classes == truth[i]).double().mean())}
            rows.append({"image": i, **right, **{f"pixels_{c}": count for c, count in enumerate(counts)}})
        return rows
