import functools
import json

import lightning.pytorch as pl
import pytest
import torch

from escnn_attention.training import Classifier, Digits, PointRegression, Springs
from escnn_attention.training.modules.mean import Mean


def test_weighted():
    mean = Mean()
    mean.update(torch.tensor(1.0), 3)
    mean.update(torch.tensor(5.0, dtype=torch.bfloat16), 1)
    assert (mean.compute(), mean.compute().dtype) == (2.0, torch.float32)
    mean.update(torch.tensor(2.0, dtype=torch.float64), 1)
    assert mean.compute().dtype == torch.float64
    mean.update(torch.tensor(torch.nan), 1)
    assert mean.compute().isnan()
    mean.reset()
    mean.update(torch.tensor(7.0), 2)
    assert mean.compute() == 7.0


class WithLightnings(Classifier):
    """Logs the mean that Lightning takes beside the right one."""

    def _evaluate(self, part, accuracy, batch):
        super()._evaluate(part, accuracy, batch)
        loss = self.loss(self(batch[0]), batch[1])
        self.log(f"{part}_control", loss, on_epoch=True, batch_size=len(batch[1]), sync_dist=True)


class Moments(torch.nn.Module):
    """A network on clouds that learns nothing: means of the coordinates, times a number."""

    def __init__(self):
        super().__init__()
        self.factor = torch.nn.Parameter(torch.tensor(0.5))

    def forward(self, features, coords, batch):
        count = batch.bincount()[:, None]
        return self.factor * torch.zeros(len(count), 2).index_add(0, batch, coords).mean(1, keepdim=True) / count


def measure(found, **options):
    """Losses, accuracies and errors of 49 images, and of 21 clouds, by name; added to a file."""
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    images = Digits(batch_size=8, limit_valid=49, limit_test=49)
    clouds = Springs(num_train=1, num_valid=21, num_test=21, batch_size=4, frames=3)
    for model, data in ((WithLightnings(network, 10), images), (PointRegression(Moments()), clouds)):
        trainer = pl.Trainer(
            accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False, **options
        )
        for measured in (trainer.validate, trainer.test):
            new = {f"{type(data).__name__}.{k}": v for k, v in measured(model, data, verbose=False)[0].items()}
            if trainer.is_global_zero:
                found.write_text(json.dumps({**json.loads(found.read_text()), **new}))


def test_two_processes_measure_what_one_does(in_two_processes, tmp_path):
    """Also where what is measured does not divide among them."""
    files = tmp_path / "one.json", tmp_path / "two.json"
    for file in files:
        file.write_text("{}")
    measure(files[0], devices=1)
    in_two_processes(functools.partial(measure, devices=2, strategy="ddp"), files[1])
    one, two = (json.loads(file.read_text()) for file in files)
    assert one.keys() == two.keys() >= {"Digits.valid_loss", "Springs.test_mae_target0", "Springs.test_error"}
    for name, value in one.items():
        if name.endswith("control"):
            assert two[name] == pytest.approx(value * 49 / 48)
        else:
            assert two[name] == pytest.approx(value, rel=1e-6), name
