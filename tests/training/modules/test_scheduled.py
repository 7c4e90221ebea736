"""The schedules of the learning rate that fall in steps."""

import lightning.pytorch as pl
import pytest
import torch

from escnn_attention.training import Digits
from escnn_attention.training.modules.classifier import Classifier


def rates(peak, epochs=6, **options):
    """The learning rate at the start of each epoch."""
    data = torch.utils.data.TensorDataset(torch.randn(32, 1, 4, 4), torch.randint(0, 3, (32,)))
    loader = torch.utils.data.DataLoader(data, batch_size=8)
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 3))
    model = Classifier(network, 3, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=peak), **options)
    seen = []

    class Watch(pl.Callback):
        def on_train_epoch_start(self, trainer, module):
            seen.append(trainer.optimizers[0].param_groups[0]["lr"])

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(max_epochs=epochs, accelerator="cpu", enable_model_summary=False, callbacks=[Watch()], **quiet)
    trainer.fit(model, loader, loader)
    return seen


def test_steps():
    assert rates(1.0, schedule="steps", milestones=[2, 4]) == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01])
    assert rates(1.0, schedule="steps", milestones=[1], gamma=0.5, epochs=3) == pytest.approx([1, 0.5, 0.5])


def test_plateau():
    # So low a rate changes no prediction: the accuracy never rises after the first epoch.
    found = rates(1e-6, schedule="plateau", gamma=0.5, patience=1)
    assert found == pytest.approx([1e-6, 1e-6, 1e-6, 5e-7, 5e-7, 2.5e-7])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "steps"}, r"milestones: got \(\) for the schedule 'steps'"),
        ({"milestones": [3]}, r"milestones: got \(3,\) for the schedule 'constant'"),
        ({"schedule": "steps", "milestones": [3, 2]}, "needed ascending numbers"),
        ({"schedule": "plateau", "warm_up": 1}, "warm_up: got 1, needed 0"),
        ({"schedule": "cosine", "warm_up": None}, "warm_up: got None, needed a number of epochs"),
        ({"gamma": 2}, "gamma: got 2"),
        ({"patience": -1}, "patience: got -1"),
    ],
)
def test_mistakes_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        Classifier(torch.nn.Flatten(), 3, **options)


def test_a_plateau_needs_something_to_validate():
    class Everything(Digits):
        validates = False

    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    trainer = pl.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False)
    with pytest.raises(ValueError, match=r"schedule: got 'plateau', which needs a part of the data that validates"):
        trainer.fit(Classifier(network, 10, schedule="plateau"), datamodule=Everything(limit_train=64))
