"""The Lightning module that trains a classifier."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

LABEL_SMOOTHING = 0.05
WEIGHT_DECAY = 1e-2
WARM_UP = 0.2  # part of the steps in which the learning rate grows to its maximum


class Classifier(pl.LightningModule):
    """Cross-entropy with label smoothing, AdamW, one cycle of the learning rate with cosine flanks.

    Args:
        network: images (B, 1, H, W) to logits (B, ``num_classes``).
        num_classes: number of classes.
        learning_rate: the highest learning rate of the cycle.
        seed: of the random numbers drawn while training (dropout); each epoch starts from one of its own, so that an
            epoch is the same whether or not the process was restarted before it.
    """

    def __init__(self, network: nn.Module, num_classes: int, learning_rate: float, seed: int) -> None:
        super().__init__()
        self.network = network
        self.learning_rate = learning_rate
        self.seed = seed
        self.loss = nn.CrossEntropyLoss(label_smoothing=LABEL_SMOOTHING)
        self.accuracy = MulticlassAccuracy(num_classes, average="micro")

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.network(images)
        return logits

    def on_train_epoch_start(self) -> None:
        torch.manual_seed(self.seed * 1_000_003 + self.current_epoch)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_index: int) -> Tensor:
        images, labels = batch
        loss: Tensor = self.loss(self(images), labels)
        self.log("train_loss", loss, on_step=False, on_epoch=True, batch_size=len(labels))
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_index: int) -> None:
        images, labels = batch
        logits = self(images)
        self.accuracy(logits, labels)
        self.log("valid_accuracy", self.accuracy, on_step=False, on_epoch=True, batch_size=len(labels))
        self.log("valid_loss", self.loss(logits, labels), on_step=False, on_epoch=True, batch_size=len(labels))

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        optimiser = torch.optim.AdamW(self.parameters(), lr=self.learning_rate, weight_decay=WEIGHT_DECAY)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimiser, self.learning_rate, total_steps=steps, pct_start=WARM_UP, cycle_momentum=False
        )
        return {"optimizer": optimiser, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
