"""A training that goes on is the training that was never stopped: every schedule, every number of workers, all data."""

import functools
import shutil

import lightning.pytorch as pl
import pytest
import torch
from escnn import gspaces
from lightning.pytorch.loggers import TensorBoardLogger

from escnn_attention.models import HybridNet
from escnn_attention.training import Classifier, Constellations, Digits, PointClassifier
from escnn_attention.training.errors import quiet_lightning
from escnn_attention.training.experiment.callbacks import ProgressLine, training_callbacks
from escnn_attention.training.experiment.checkpoints import AtomicCheckpointIO, read_checkpoint
from tests.training.experiment.runs import quiet_trainer, rows

EPOCHS = 4


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.1)


SCHEDULES = {
    "constant": {},
    "warm-up": {"schedule": "constant", "warm_up": 1.5},
    "cosine": {"schedule": "cosine", "warm_up": 1},
    "one-cycle": {"schedule": "one-cycle", "warm_up": 2},
    "steps": {"schedule": "steps", "milestones": [1, 3]},
    "plateau": {"schedule": "plateau"},
    "average": {"schedule": "cosine", "ema": 0.9},
    "average and plateau": {"schedule": "plateau", "ema": 0.5},
    "decay of weights": {"decay": "weights", "optimizer": adamw},
    "smooth labels": {"label_smoothing": 0.1},
}


class Pooled(torch.nn.Module):
    """A network on clouds: one linear layer of the points, summed."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 12)

    def forward(self, features, coords, batch):
        points = torch.tanh(self.linear(torch.cat([features, coords], 1)))
        return points.new_zeros(int(batch.max()) + 1, 12).index_add(0, batch, points)


def images(workers, **options):
    """Of a network with filters, which come and go, and with batch norms and dropout."""
    sizes = {"widths": (1, 2), "convolutions": (1, 1), "attention": (0, 1), "num_heads": 1, "block": {"dropout": 0.1}}
    network = HybridNet(gspaces.rot2dOnR2(2), 1, 10, **sizes)
    data = Digits(batch_size=8, limit_train=24, limit_valid=16, num_workers=workers, rotate_train=45.0)
    return Classifier(network, 10, **{"optimizer": sgd, **options}), data


def clouds(workers, **options):
    sizes = {"num_train": 12, "num_valid": 8, "num_test": 4, "batch_size": 4, "features": "constant"}
    data = Constellations(**sizes, rotate_train=True, translate_train=0.1, num_workers=workers)
    return PointClassifier(Pooled(), 3, 4, **{"optimizer": sgd, **options}), data


class Stop(pl.Callback):
    """The power fails in an epoch."""

    def __init__(self, epoch):
        self.epoch = epoch

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == self.epoch:
            raise InterruptedError


def train(folder, make, stop=None, epochs=EPOCHS, **options):
    """Train up to the end, or until the power fails, from the last checkpoint in ``folder`` if there is one."""
    torch.manual_seed(1)
    model, data = make()
    folder.mkdir(exist_ok=True)
    last = folder / "last.ckpt"
    _configuration, history, _provenance, *kept = training_callbacks(folder, {}, {}, model, data)
    options |= {"max_epochs": epochs, "callbacks": [Stop(stop), history, *kept], "plugins": [AtomicCheckpointIO()]}
    with quiet_lightning():
        trainer = quiet_trainer(enable_checkpointing=True, **options)
        try:
            trainer.fit(model, data, ckpt_path=last if last.exists() else None)
        except InterruptedError:
            assert stop is not None
        else:
            assert stop is None


def state(folder):
    """What the end of a training is compared by."""
    last, best = (read_checkpoint(folder / name) for name in ("last.ckpt", "best.ckpt"))
    names = ["state_dict", "optimizer_states", "lr_schedulers", "epoch", "global_step"]
    names += [name for name in ("current_model_state", "averaging_state") if name in last]
    found = {name: last[name] for name in names}
    found["best"] = {name: best[name] for name in ("state_dict", "epoch")}
    found["rows"] = [{k: v for k, v in row.items() if k not in ("seconds", "memory")} for row in rows(folder)]
    return found


def differences(one, other):
    """Where two nested values differ, by the last bit."""
    if isinstance(one, torch.Tensor):
        return [] if torch.equal(one, other) else ["tensor"]
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        return [f"{k}.{d}" for k in one for d in differences(one[k], other[k])]
    if isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        return [f"{i}.{d}" for i, (a, b) in enumerate(zip(one, other, strict=True)) for d in differences(a, b)]
    return [] if one == other else [f"{one} {other}"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A training that was never stopped and had no workers, as :func:`state` gives it."""

    @functools.cache
    def train_once(data, schedule):
        folder = tmp_path_factory.mktemp("whole")
        train(folder, functools.partial(data, 0, **SCHEDULES[schedule]))
        return state(folder)

    return train_once


@pytest.mark.sampled(2)  # of which each trains twice
@pytest.mark.parametrize("workers", [0, 1, pytest.param(2, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("data", [images, clouds])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_resumed_is_uninterrupted(tmp_path, one_thread, whole, data, schedule, workers):
    make = functools.partial(data, workers, **SCHEDULES[schedule])
    train(tmp_path, make, stop=2)
    train(tmp_path, make)
    found = differences(whole(data, schedule), state(tmp_path))
    assert not found


def test_other_batches_are_another_training(tmp_path, one_thread, whole):
    """The control: a training that goes on with the batches of another epoch is found out."""

    def make():
        model, data = images(0)
        data.train_dataloader = functools.partial(_of_the_first_epoch, data.train_dataloader)
        return model, data

    train(tmp_path, make, stop=2)
    train(tmp_path, make)
    found = differences(whole(images, "constant"), state(tmp_path))
    assert any(name.startswith("state_dict.") for name in found)


def _of_the_first_epoch(make):
    loader = make()
    loader.sampler.set_epoch = lambda epoch: None
    loader.sampler.epoch = 0
    return loader


@pytest.mark.sampled(1)
@pytest.mark.parametrize("stop", [1, 2, 3])
def test_epochs_without_validation_have_no_old_measurements(tmp_path, stop):
    train(tmp_path, functools.partial(images, 0), stop=stop, check_val_every_n_epoch=2)
    train(tmp_path, functools.partial(images, 0), check_val_every_n_epoch=2)
    assert [bool(row["valid_accuracy"]) for row in rows(tmp_path)] == [False, True, False, True]
    assert all(row["train_loss"] for row in rows(tmp_path))


class Scored(Classifier):
    """Its accuracies are known beforehand."""

    SCORES = (0.8, 0.1, 0.5, 0.9)

    def on_validation_epoch_end(self):
        self.log("valid_score", self.SCORES[self.current_epoch])

    monitor = "valid_score"


def scored():
    model, data = images(0)
    return Scored(model.network, 10, optimizer=sgd), data


def test_the_best_epoch_is_known_wherever_the_folder_goes(tmp_path):
    """Moved or copied, a folder keeps its best checkpoint until there is a better one."""
    train(tmp_path / "first", scored, epochs=2)
    best = (tmp_path / "first" / "best.ckpt").read_bytes()
    for name, how in (("copied", shutil.copytree), ("moved", shutil.move)):
        how(tmp_path / "first", tmp_path / name)
        train(tmp_path / name, scored, epochs=3)
        assert (tmp_path / name / "best.ckpt").read_bytes() == best
    shutil.copytree(tmp_path / "moved", tmp_path / "third")
    train(tmp_path / "third", scored, epochs=4)
    assert read_checkpoint(tmp_path / "third" / "best.ckpt")["epoch"] == 3


def test_without_its_best_checkpoint_a_folder_gets_a_new_one(tmp_path):
    train(tmp_path, scored, epochs=2)
    (tmp_path / "best.ckpt").unlink()
    train(tmp_path, scored, epochs=3)
    assert read_checkpoint(tmp_path / "best.ckpt")["epoch"] == 2


@pytest.mark.parametrize("make", [images, clouds])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.slow
def test_the_progress_line(tmp_path, capsys, monkeypatch, make, accumulate):
    """Shows the loss of the last step, and what was measured last, of any task, and nothing of the logger."""
    monkeypatch.setenv("COLUMNS", "150")
    losses = []

    class Watch(pl.Callback):
        def on_before_zero_grad(self, trainer, module, optimizer):
            losses.clear()

        def on_train_batch_end(self, trainer, module, outputs, *_):
            losses.append(outputs["loss"].item() * accumulate)

    model, data = make(0)
    logger = TensorBoardLogger(tmp_path, name=None, version="tensorboard")
    options = {"logger": logger, "enable_checkpointing": False, "enable_model_summary": False}
    options |= {"max_epochs": 2, "accelerator": "cpu", "accumulate_grad_batches": accumulate}
    with quiet_lightning():
        trainer = pl.Trainer(callbacks=[Watch(), ProgressLine()], **options)
        trainer.fit(model, data)
    line = capsys.readouterr().out.splitlines()[-1]
    assert f" loss: {losses[-1]:.4g} valid_accuracy: {float(trainer.callback_metrics['valid_accuracy']):.4g}" in line
    assert "v_num" not in line
