"""The Lightning module that trains a network to say of every pixel what it belongs to."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torchmetrics.classification import MulticlassJaccardIndex

from escnn_attention.training.modules.scheduled import Scheduled


class SegmentationModule(Scheduled):
    r"""Trains a network that gives the logits of every pixel, by cross-entropy.

    It is measured by the intersection over union, the mean over the classes c of

    .. math:: \mathrm{IoU}_c = \frac{|\{x : y(x) = c\} \cap \{x : \hat y(x) = c\}|}
        {|\{x : y(x) = c\} \cup \{x : \hat y(x) = c\}|}

    over all pixels x of a part of the data, with labels y and predictions :math:`\hat y`.

    Args:
        network: images ``(B, C, H, W)`` to logits ``(B, num_classes, H, W)``, such as a
            :class:`~escnn_attention.models.FieldUNet`.
        num_classes: the number of classes, the background included; by default the channels of ``network.out_type``.
        **options: of the training, such as ``optimizer`` and ``schedule``: see :class:`~.scheduled.Scheduled`.

    Raises:
        ValueError: no number of classes, or as :class:`~.scheduled.Scheduled` raises; on a batch, logits of another
            shape.

    Example:
        >>> import torch
        >>> from escnn_attention.models import FieldUNet
        >>> from escnn_attention.training import SegmentationModule
        >>> from escnn import gspaces
        >>> network = FieldUNet(gspaces.rot2dOnR2(4), 1, 11, widths=(2, 2), attention=(0, 1), num_heads=1)
        >>> SegmentationModule(network)(torch.randn(2, 1, 8, 8)).shape
        torch.Size([2, 11, 8, 8])
    """

    monitor: ClassVar[str] = "valid_iou"
    mode: ClassVar[Literal["max", "min"]] = "max"
    keeps_arrays: ClassVar[bool] = True

    def __init__(self, network: nn.Module, num_classes: int | None = None, **options: Any) -> None:
        super().__init__(**options)
        if num_classes is None:
            num_classes = getattr(getattr(network, "out_type", None), "size", None)
        if not isinstance(num_classes, int):
            raise ValueError(f"num_classes: {type(network).__name__} does not tell, so it has to be given")
        self.network = network
        self.num_classes = num_classes
        self.loss = nn.CrossEntropyLoss()
        self.valid_iou = MulticlassJaccardIndex(num_classes)
        self.test_iou = MulticlassJaccardIndex(num_classes)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.network(images)
        return logits

    def training_step(self, batch: tuple[Tensor, Tensor], batch_index: int) -> Tensor:
        images, labels = batch
        loss: Tensor = self.loss(self._logits(images), labels)
        self.log_mean("train_loss", loss, len(labels))
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_index: int) -> None:
        self._evaluate("valid", self.valid_iou, batch)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_index: int) -> None:
        self._evaluate("test", self.test_iou, batch)

    def predict_step(self, batch: Any, batch_index: int) -> Tensor:
        """The class of every pixel, ``(B, H, W)``."""
        images = batch[0] if isinstance(batch, (tuple, list)) else batch
        return self(images).argmax(dim=1)

    def truth(self, batch: Any) -> Tensor | None:
        """The labels ``(B, H, W)``, if the batch has some."""
        return batch[1] if isinstance(batch, (tuple, list)) and len(batch) > 1 else None

    def describe(self, predictions: Tensor, truth: Tensor | None = None) -> list[dict[str, Any]]:
        """One row an image: its number, the pixels of each class, and the part that is right if labels are known."""
        rows = []
        for i, classes in enumerate(predictions):
            counts = torch.bincount(classes.long().flatten(), minlength=self.num_classes).tolist()
            right = {} if truth is None else {"right": float((classes == truth[i]).double().mean())}
            rows.append({"image": i, **right, **{f"pixels_{c}": count for c, count in enumerate(counts)}})
        return rows

    def _logits(self, images: Tensor) -> Tensor:
        logits = self(images)
        needed = (len(images), self.num_classes, *images.shape[2:])
        if logits.shape != needed:
            raise ValueError(
                f"network: got {tuple(logits.shape)} for images {tuple(images.shape)}, needed the logits of"
                f" {self.num_classes} classes at every pixel, {needed}"
            )
        return logits

    def _evaluate(self, part: str, iou: MulticlassJaccardIndex, batch: tuple[Tensor, Tensor]) -> None:
        images, labels = batch
        logits = self._logits(images)
        iou(logits.argmax(dim=1), labels)
        self.log(f"{part}_iou", iou, on_step=False, on_epoch=True, batch_size=len(labels))
        self.log_mean(f"{part}_loss", self.loss(logits, labels), len(labels))
