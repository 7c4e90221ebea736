"""The Lightning modules that train classifiers of images and of their pixels."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy, MulticlassJaccardIndex

from escnn_attention._checks import check_probability
from escnn_attention.training.modules.scheduled import Scheduled


def class_columns(probabilities: Tensor, label: Tensor | None, mark: str = "") -> dict[str, Any]:
    """The class of the highest probability, the label if it is known, and all probabilities, by names with a mark."""
    labelled = {} if label is None else {f"{mark}label": int(label)}
    each = {f"{mark}p{j}": float(value) for j, value in enumerate(probabilities)}
    return {f"{mark}class": int(probabilities.argmax()), **labelled, **each}


class Classifier(Scheduled):
    r"""Trains a network that gives logits, by cross-entropy.

    Args:
        network: images ``(B, C, H, W)`` to logits ``(B, num_classes)``.
        num_classes: the number of classes; by default ``network.num_classes``.
        label_smoothing: the part ε of each target that is spread evenly over all classes: the loss is
            −Σ_c ((1 − ε)·[c = label] + ε/K) log p_c for K classes.
        **options: of :class:`~.scheduled.Scheduled`, such as ``optimizer`` and ``schedule``.

    Raises:
        ValueError: as :class:`~.scheduled.Scheduled` raises, no number of classes, or a smoothing outside [0, 1); on a
            batch, an output of another shape.

    Example:
        >>> import torch
        >>> from escnn_attention.training import Classifier
        >>> network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
        >>> Classifier(network, 10, schedule="cosine", warm_up=1)(torch.randn(2, 1, 8, 8)).shape
        torch.Size([2, 10])
    """

    monitor: ClassVar[str] = "valid_accuracy"
    mode: ClassVar[Literal["max", "min"]] = "max"
    measure: ClassVar[str] = "accuracy"
    _metric: ClassVar[Any] = partial(MulticlassAccuracy, average="micro")

    def __init__(
        self, network: nn.Module, num_classes: int | None = None, *, label_smoothing: float = 0.0, **options: Any
    ) -> None:
        super().__init__(network, **options)
        num_classes = self._classes_of(network) if num_classes is None else num_classes
        if not isinstance(num_classes, int):
            raise ValueError(f"num_classes: {type(network).__name__} does not tell, so it has to be given")
        self.num_classes = num_classes
        self.loss = nn.CrossEntropyLoss(label_smoothing=check_probability("label_smoothing", label_smoothing))
        for part in ("valid", "test"):
            setattr(self, f"{part}_{self.measure}", self._metric(num_classes))

    @staticmethod
    def _classes_of(network: Any) -> Any:
        """The number of classes that a network tells, if it does."""
        return getattr(network, "num_classes", None)

    def predict_step(self, batch: Any, batch_index: int) -> Tensor:
        """The probabilities of the classes, ``(B, num_classes)``."""
        return super().predict_step(batch, batch_index).softmax(dim=1)

    def describe(self, predictions: Tensor, truth: Tensor | None = None) -> list[dict[str, Any]]:
        """One row an image: its number, the class, the label if it is known, and the probabilities of all classes."""
        labels = [None] * len(predictions) if truth is None else truth
        return [{"image": i, **class_columns(*both)} for i, both in enumerate(zip(predictions, labels, strict=True))]

    def _loss(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        needed = (len(images), self.num_classes, *self._positions(images))
        if output.shape != needed:
            raise ValueError(
                f"network: got {tuple(output.shape)} for images {tuple(images.shape)}, needed the logits of"
                f" {self.num_classes} classes, {needed}"
            )
        return self.loss(output, labels)

    @staticmethod
    def _positions(images: Tensor) -> tuple[int, ...]:
        """The grid whose positions are classified; none of whole images."""
        return ()

    def _measure(self, part: str, output: Tensor, batch: tuple[Tensor, Tensor]) -> None:
        self.log_metric(f"{part}_{self.measure}", len(batch[1]), output, batch[1])


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
        **options: of :class:`Classifier`, such as ``label_smoothing`` and ``schedule``.

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
    _metric: ClassVar[Any] = MulticlassJaccardIndex
    monitor: ClassVar[str] = "valid_iou"
    keeps_arrays: ClassVar[bool] = True

    @staticmethod
    def _classes_of(network: Any) -> Any:
        return getattr(getattr(network, "out_type", None), "size", None)

    @staticmethod
    def _positions(images: Tensor) -> tuple[int, ...]:
        return tuple(images.shape[2:])

    def predict_step(self, batch: Any, batch_index: int) -> Tensor:
        """The class of every pixel, ``(B, H, W)``."""
        return self(self._inputs(batch)).argmax(dim=1)

    def describe(self, predictions: Tensor, truth: Tensor | None = None) -> list[dict[str, Any]]:
        """One row an image: its number, the pixels of each class, and the part that is right if labels are known."""
        rows = []
        for i, classes in enumerate(predictions):
            counts = torch.bincount(classes.long().flatten(), minlength=self.num_classes).tolist()
            right = {} if truth is None else {"right": float((classes == truth[i]).double().mean())}
            rows.append({"image": i, **right, **{f"pixels_{c}": count for c, count in enumerate(counts)}})
        return rows
