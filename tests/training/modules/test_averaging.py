"""Averages of the weights: those that a network is measured with, and those that are kept."""

import copy

import lightning.pytorch as pl
import pytest
import torch
from escnn import gspaces
from lightning.pytorch.callbacks import EMAWeightAveraging

from escnn_attention.models import HybridNet
from escnn_attention.training import Classifier
from escnn_attention.training.modules.averaging import AveragedWeights

DECAY = 0.6


def network():
    """Convolutions with batch norms, which have filters where they do not train, and attention with tables."""
    g = gspaces.rot2dOnR2(2)
    return HybridNet(g, 1, 3, widths=(2, 2), convolutions=(1, 1), attention=(0, 1), num_heads=1, kernel_size=3)


class Watch(pl.Callback):
    """Keeps the weights after each step, and what validation sees of fixed images."""

    def __init__(self, images):
        self.images, self.steps, self.seen = images, [], []

    def on_train_batch_end(self, trainer, module, *_):
        self.steps.append(copy.deepcopy(module.network.state_dict()))

    def on_validation_batch_start(self, trainer, module, *_):
        with torch.no_grad():
            self.seen.append(module.network(self.images))


def fit(tmp_path, callbacks=(), **options):
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(24, 1, 7, 7), torch.randint(0, 3, (24,)))
    loader, once = (torch.utils.data.DataLoader(data, batch_size=size) for size in (8, 24))
    watch = Watch(torch.randn(4, 1, 7, 7))
    module = Classifier(network(), 3, optimizer=lambda p: torch.optim.SGD(p, lr=0.5), **options)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(
        max_epochs=2, accelerator="cpu", num_sanity_val_steps=0, callbacks=[*callbacks, watch],
        enable_checkpointing=False, **quiet
    )  # fmt: skip
    trainer.fit(module, loader, once)
    trainer.save_checkpoint(tmp_path / "kept.ckpt")
    return module, watch, torch.load(tmp_path / "kept.ckpt", weights_only=True)


def evaluating(state):
    fresh = network()
    fresh.load_state_dict(state)
    return fresh.eval()


def said(state, images):
    with torch.no_grad():
        return evaluating(state)(images)


def averaged(steps):
    """The average, by its formula; buffers are those of the last step."""
    names = [name for name, _ in network().named_parameters()]
    found = steps[0]
    for state in steps[1:]:
        mean = {name: DECAY * found[name] + (1 - DECAY) * state[name] for name in names}
        found = {**state, **mean}
    return found


@pytest.mark.filterwarnings("ignore")
def test_what_is_measured_and_kept_is_the_average(tmp_path):
    module, watch, kept = fit(tmp_path, ema=DECAY)
    for epoch in (1, 2):
        expected = said(averaged(watch.steps[: 3 * epoch]), watch.images)
        torch.testing.assert_close(watch.seen[epoch - 1], expected, rtol=1e-4, atol=1e-5)
        # The control: the last weights say something else.
        assert (expected - said(watch.steps[3 * epoch - 1], watch.images)).abs().max() > 1e-3
    expected = averaged(watch.steps)
    whole = evaluating(expected).state_dict()  # with the filters of these weights
    assert any(name.endswith("filter") for name in whole)
    for name, value in whole.items():
        torch.testing.assert_close(kept["state_dict"][f"network.{name}"], value, rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(
            module.network.eval()(watch.images), said(expected, watch.images), rtol=1e-4, atol=1e-5
        )


@pytest.mark.filterwarnings("ignore")
def test_training_itself_is_as_without(tmp_path):
    _, one, _ = fit(tmp_path, ema=DECAY)
    _, other, _ = fit(tmp_path)
    for a, b in zip(one.steps, other.steps, strict=True):
        assert all(torch.equal(a[name], b[name]) for name in a)
    assert (one.seen[0] - other.seen[0]).abs().max() > 1e-3


@pytest.mark.filterwarnings("ignore")
def test_filters_are_made_anew(tmp_path):
    """The control: what Lightning has for modules whose buffers stay measures filters of other weights, if any."""
    try:
        _, watch, _ = fit(tmp_path, [EMAWeightAveraging(use_buffers=False, decay=DECAY)])
    except RuntimeError:
        return  # a filter took the place of another buffer
    expected = said(averaged(watch.steps[:3]), watch.images)
    assert (watch.seen[0] - expected).abs().max() > 1e-3


@pytest.mark.parametrize("value", [0, 1, -0.5, 1.5, float("nan")])
def test_decays_that_are_none(value):
    with pytest.raises(ValueError, match=r"ema: got .*, needed a number between 0 and 1"):
        Classifier(network(), ema=value)
    assert AveragedWeights(0.5)._use_buffers is False
