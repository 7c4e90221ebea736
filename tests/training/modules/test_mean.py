import os
import re
import socket

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


def measure(**options):
    """Losses, accuracies and errors of 49 images, and of 21 clouds, by name."""
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    images = Digits(batch_size=8, limit_valid=49, limit_test=49)
    clouds = Springs(num_train=1, num_valid=21, num_test=21, batch_size=4, frames=3)
    found = {}
    for model, data in ((WithLightnings(network, 10), images), (PointRegression(Moments()), clouds)):
        trainer = pl.Trainer(
            accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False, **options
        )
        for measured in (trainer.validate, trainer.test):
            found |= {f"{type(data).__name__}.{k}": v for k, v in measured(model, data, verbose=False)[0].items()}
    return found


_RUN = f"""
import sys
sys.path.insert(0, {os.path.dirname(__file__)!r})
from test_mean import measure
print("MEASURED", measure(devices=2, strategy="ddp"))
"""


def test_two_processes_measure_what_one_does(start_python, monkeypatch):
    """Also where what is measured does not divide among them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(2):
        for name, value in {
            "LOCAL_RANK": rank,
            "NODE_RANK": 0,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }.items():
            monkeypatch.setenv(name, str(value))
        processes.append(start_python(_RUN))
    monkeypatch.undo()
    one = measure(devices=1)
    (output, errors), _ = (process.communicate(timeout=200) for process in processes)
    assert all(process.returncode == 0 for process in processes), errors
    two = eval(re.search("MEASURED (.*)", output)[1])
    assert one.keys() == two.keys() >= {"Digits.valid_loss", "Springs.test_mae_target0", "Springs.test_error"}
    for name, value in one.items():
        if name.endswith("control"):
            assert two[name] == pytest.approx(value * 49 / 48)
        else:
            assert two[name] == pytest.approx(value, rel=1e-6), name
