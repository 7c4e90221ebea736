"""The Lightning module that trains a network to classify point clouds."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from escnn_attention.training.data.clouds.batch import Clouds
from escnn_attention.training.modules.point_module import PointModule

__all__ = ["PointClassifier"]


class PointClassifier(PointModule):
    """Trains a network that gives the logits of clouds, by cross-entropy: of one classification, or of several.

    Args:
        network: of ``(features, coords, batch=batch)`` to ``(B, num_targets * num_classes)``.
        num_classes: of each classification.
        num_targets: the number of classifications, such as counts of several things. The accuracy is the mean over all
            of them, and ``exact`` the part of the clouds in which all are right.
        label_smoothing: of the cross-entropy, see :class:`~.classifier.Classifier`.
        **options: of the training, such as ``optimizer`` and ``schedule``: see :class:`~.scheduled.Scheduled`.

    Raises:
        ValueError: a smoothing that is not between 0 and 1; as :class:`~.scheduled.Scheduled` raises; on a batch, an
            output or targets of another shape.

    Example:
        >>> import torch
        >>> from escnn_attention.models import PointTransformer
        >>> from escnn_attention.training import Clouds, PointClassifier
        >>> from escnn import gspaces
        >>> network = PointTransformer(gspaces.rot2dOnR2(4), 1, 4 * 3, fields=4, num_blocks=1)
        >>> batch = Clouds(torch.randn(5, 2), torch.ones(5, 1), torch.tensor([0, 0, 0, 1, 1]), torch.zeros(2, 4))
        >>> PointClassifier(network, num_classes=3, num_targets=4)(batch).shape
        torch.Size([2, 4, 3])
    """

    def __init__(
        self,
        network: nn.Module,
        num_classes: int,
        num_targets: int = 1,
        *,
        label_smoothing: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.network = network
        self.num_classes, self.num_targets = num_classes, num_targets
        if not 0 <= label_smoothing < 1:
            raise ValueError(f"label_smoothing: got {label_smoothing}, needed a number of at least 0, below 1")
        self.loss = nn.CrossEntropyLoss(label_smoothing=label_smoothing)
        self.valid_accuracy = MulticlassAccuracy(num_classes, average="micro")
        self.test_accuracy = MulticlassAccuracy(num_classes, average="micro")

    def forward(self, clouds: Clouds) -> Tensor:
        """The logits ``(B, num_targets, num_classes)``."""
        output = super().forward(clouds)
        if output.shape[1:] != (self.num_targets * self.num_classes,):
            raise ValueError(
                f"network: got an output {tuple(output.shape)}, needed {len(clouds.targets)} clouds of "
                f"{self.num_targets} · {self.num_classes}"
            )
        return output.unflatten(1, (self.num_targets, self.num_classes))

    def predict_step(self, batch: Clouds, batch_index: int) -> Tensor:
        """The probabilities ``(B, num_targets, num_classes)``."""
        return self(batch).softmax(dim=2)

    def truth(self, batch: Clouds) -> Tensor:
        """The classes ``(B, num_targets)``."""
        return self._labels(batch)

    def describe(self, predictions: Tensor, truth: Tensor | None = None) -> list[dict[str, Any]]:
        """One row a cloud: its number, and of each classification the class, the label and the probabilities of all."""
        rows = []
        for i, cloud in enumerate(predictions):
            row: dict[str, Any] = {"cloud": i}
            for t, probabilities in enumerate(cloud):
                mark = "" if self.num_targets == 1 else f"{t}_"
                row[f"{mark}class"] = int(probabilities.argmax())
                if truth is not None:
                    row[f"{mark}label"] = int(truth[i, t])
                row.update({f"{mark}p{j}": float(p) for j, p in enumerate(probabilities)})
            rows.append(row)
        return rows

    def _loss(self, output: Tensor, batch: Clouds) -> Tensor:
        loss: Tensor = self.loss(output.flatten(0, 1), self._labels(batch).flatten())
        return loss

    def _labels(self, batch: Clouds) -> Tensor:
        """The classes of a batch, ``(B, num_targets)``."""
        labels = batch.targets if batch.targets.dim() > 1 else batch.targets[:, None]
        if labels.shape[1:] != (self.num_targets,):
            raise ValueError(f"num_targets: got {self.num_targets}, but targets are {tuple(batch.targets.shape)}")
        return labels

    def _measure(self, part: str, output: Tensor, batch: Clouds) -> None:
        labels = self._labels(batch)
        accuracy = getattr(self, f"{part}_accuracy")
        accuracy(output.flatten(0, 1), labels.flatten())
        self.log(f"{part}_accuracy", accuracy, on_step=False, on_epoch=True, batch_size=len(labels))
        if self.num_targets > 1:
            exact = (output.argmax(2) == labels).all(1).float()
            self.log_mean(f"{part}_exact", exact.mean(), len(labels))
