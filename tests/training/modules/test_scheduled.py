from __future__ import annotations

import copy
import functools
import json

import lightning.pytorch as pl
import pytest
import torch
from escnn import gspaces, nn
from lightning.pytorch.callbacks import EMAWeightAveraging

from escnn_attention import (
    AttentionPool,
    AttentiveConv,
    ConvolutionalEncoding,
    FourierEncoding,
    PairKernel,
    PoseAttention,
    PositionTable,
    QuadraticEncoding,
    RotaryEncoding,
    TransformerBlock,
    models,
)
from escnn_attention.models import CNN, HybridNet, PlatonicTransformer, PointTransformer
from escnn_attention.training import Classifier, Digits, PointRegression, Springs
from escnn_attention.training.modules.scheduled import (
    AveragedWeights,
    Mean,
    _factor,
    decayed_parameters,
    parameter_groups,
)
from tests.layers import CASES
from tests.training.experiment.runs import quiet_trainer


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

    def _evaluate(self, part, batch):
        super()._evaluate(part, batch)
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
        trainer = quiet_trainer(**options)
        for measured in (trainer.validate, trainer.test):
            new = {f"{type(data).__name__}.{k}": v for k, v in measured(model, data, verbose=False)[0].items()}
            if trainer.is_global_zero:
                found.write_text(json.dumps({**json.loads(found.read_text()), **new}))


@pytest.mark.sampled(1, of="trainings in two processes")
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
    trainer = quiet_trainer(max_epochs=2, num_sanity_val_steps=0, callbacks=[*callbacks, watch])
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
@pytest.mark.slow
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
@pytest.mark.slow
def test_training_itself_is_as_without(tmp_path):
    _, one, _ = fit(tmp_path, ema=DECAY)
    _, other, _ = fit(tmp_path)
    for a, b in zip(one.steps, other.steps, strict=True):
        assert all(torch.equal(a[name], b[name]) for name in a)
    assert (one.seen[0] - other.seen[0]).abs().max() > 1e-3


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_filters_are_made_anew(tmp_path):
    """The control: what Lightning has for modules whose buffers stay measures filters of other weights."""
    _, watch, _ = fit(tmp_path, [EMAWeightAveraging(use_buffers=False, decay=DECAY)])
    expected = said(averaged(watch.steps[:3]), watch.images)
    assert (watch.seen[0] - expected).abs().max() > 1e-3


@pytest.mark.parametrize("value", [0, 1, -0.5, 1.5, float("nan")])
def test_decays_that_are_none(value):
    with pytest.raises(ValueError, match=r"ema: got .*"):
        Classifier(network(), ema=value)
    assert AveragedWeights(0.5)._use_buffers is False


C2 = gspaces.rot2dOnR2(2)
POINTS = {"fields": 2, "num_blocks": 1, "num_heads": 1}


def hybrid(encoding):
    options = {"widths": (2, 4), "convolutions": (1, 1), "attention": (0, 1), "num_heads": 1, "kernel_size": 3}
    return HybridNet(C2, 1, 3, **options, features=2, block={"encoding": encoding})


def sequence():
    """Layers of escnn, and ours that no network has."""
    fields = nn.FieldType(C2, 2 * [C2.regular_repr])
    return nn.SequentialModule(
        nn.R2Conv(fields, fields, 3, padding=1),
        nn.InnerBatchNorm(fields),
        nn.IIDBatchNorm2d(fields),
        nn.GNormBatchNorm(fields),
        nn.NormNonLinearity(fields, bias=True),
        AttentiveConv(fields, fields, 3, padding=1),
        PoseAttention(fields),
        PositionTable(fields, 4),
        TransformerBlock(fields, fields, num_heads=1, kernel_size=3, qk_norm=True, layer_scale=0.1),
    )


NETWORKS = {
    **{name: case.make for name, case in CASES.items() if hasattr(models, name) and name != "VisionTransformer"},
    "hybrid, Fourier": lambda: hybrid(FourierEncoding(3)),
    "hybrid, rotary": lambda: hybrid(RotaryEncoding()),
    "hybrid, quadratic": lambda: hybrid(QuadraticEncoding()),
    "hybrid, convolutional": lambda: hybrid(ConvolutionalEncoding(FourierEncoding(3))),
    "attention alone": lambda: HybridNet(C2, 1, 3, widths=(4,), convolutions=(1,), attention=(1,), stem={}),
    "CNN": lambda: CNN(1, 3, widths=(2,), convolutions=(1,), features=2),
    "clouds": lambda: PointTransformer(C2, 2, 3, head={"batch_norm": True}, **POINTS),
    "clouds, kernel": lambda: PointTransformer(C2, 2, "vector", encoding=PairKernel(), **POINTS),
    "clouds, convolved": lambda: PointTransformer(C2, 2, 3, attention={"kernel_features": 3}, **POINTS),
    "platonic, positions": lambda: PlatonicTransformer(C2, 2, 3, fields=4, num_blocks=1, num_heads=2, positions=True),
    "layers": sequence,
}

# The last part of the name of a parameter, and the class that has it: all that is not to decay, and all that is.
SPARED = {
    ("IIDBatchNorm2d", "regular_weight"),
    ("LayerNorm", "weight"),
    ("LayerNorm", "bias"),
    ("BatchNorm1d", "weight"),
    ("BatchNorm1d", "bias"),
    ("BatchNorm2d", "weight"),
    ("BatchNorm2d", "bias"),
    ("BatchNorm3d", "weight"),
    ("BatchNorm3d", "bias"),
    ("GNormBatchNorm", "regular_weight"),
    ("NormNonLinearity", "eps"),
    ("QueryKeyNorm", "queries"),
    ("QueryKeyNorm", "keys"),
    ("LayerScale", "gain"),
    ("PoseWaves", "frequencies"),
}
DECAYED = {"weight", "weights"}


def kind(network, name):
    """What an encoding is part of is one whatever it is made of."""
    *path, last = name.split(".")
    modules = [network.get_submodule(".".join(path[:i])) for i in range(len(path) + 1)]
    names = [type(m).__name__ for m in modules]
    of_encoding = any(n.endswith("Encoding") or n in ("PairKernel", "PositionTable") for n in names)
    return "encoding" if of_encoding else (names[-1], last)


@pytest.mark.parametrize("name", NETWORKS)
def test_weights_decay_and_nothing_else(name):
    network = NETWORKS[name]()
    decayed = set(decayed_parameters(network))
    assert decayed
    for parameter, _ in network.named_parameters():
        found = kind(network, parameter)
        spared = found == "encoding" or found in SPARED or "bias" in found[1]
        assert (parameter not in decayed) == spared, (parameter, found)
        assert spared or found[1] in DECAYED, (parameter, found)


def test_tokens_do_not_decay():
    network = CASES["VisionTransformer, registers"].make()
    fields = nn.FieldType(C2, [C2.regular_repr])
    registers = TransformerBlock(fields, fields, kernel_size=3, norm="pre", registers=2)
    for tokens, module in (
        (["token.weight", "token.registers"], network),
        (["attention.plain.registers.keys", "attention.plain.registers.values"], registers),
        (["plain.tokens"], AttentionPool(fields, 3)),
    ):
        decayed = decayed_parameters(module)
        assert decayed
        assert set(tokens) <= {name for name, _ in module.named_parameters()} - set(decayed)


def test_groups_hold_every_parameter_once():
    network = hybrid(None)
    groups = parameter_groups(network)
    held = [id(p) for group in groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in network.parameters())
    assert [group.get("weight_decay") for group in groups] == [None, 0.0]
    assert len(parameter_groups(torch.nn.Linear(2, 3, bias=False))) == 1


def test_what_does_not_decay_stays_where_it_is():
    """Without gradients a step of AdamW is decay alone: weights shrink by 1 − lr · decay."""
    network = hybrid(None)
    before = {name: p.detach().clone() for name, p in network.named_parameters()}
    optimiser = torch.optim.AdamW(parameter_groups(network), lr=0.1, weight_decay=0.5)
    for p in network.parameters():
        p.grad = torch.zeros_like(p)
    optimiser.step()
    decayed = set(decayed_parameters(network))
    for name, p in network.named_parameters():
        torch.testing.assert_close(p.detach(), before[name] * (0.95 if name in decayed else 1.0))


def rates(peak, epochs=6, trainer=None, **options):
    """The learning rate at the start of each epoch of four batches."""
    data = torch.utils.data.TensorDataset(torch.randn(32, 1, 4, 4), torch.randint(0, 3, (32,)))
    loader = torch.utils.data.DataLoader(data, batch_size=8)
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 3))
    model = Classifier(network, 3, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=peak), **options)
    seen = []

    class Watch(pl.Callback):
        def on_train_epoch_start(self, trainer, module):
            seen.append(trainer.optimizers[0].param_groups[0]["lr"])

    quiet_trainer(max_epochs=epochs, callbacks=[Watch()], **(trainer or {})).fit(model, loader, loader)
    return seen


@pytest.mark.slow
def test_steps():
    assert rates(1.0, schedule="steps", milestones=[2, 4]) == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01])
    assert rates(1.0, schedule="steps", milestones=[1], gamma=0.5, epochs=3) == pytest.approx([1, 0.5, 0.5])


@pytest.mark.parametrize("batches", [3, 8])
def test_epochs_whose_last_step_is_of_fewer_batches(batches):
    """Of four batches three make a step, and the one that is left another; of eight there is one step only."""
    trainer = {"accumulate_grad_batches": batches}
    assert rates(1.0, 4, trainer, schedule="steps", milestones=[1, 3]) == pytest.approx([1, 0.1, 0.1, 0.01])
    assert rates(1.0, 4, trainer, schedule="cosine", warm_up=2) == pytest.approx([0, 0.5, 1, 0.5])
    with pytest.raises(ValueError, match="warm_up: got 5 epochs, but the training has 4"):
        rates(1.0, 4, trainer, schedule="cosine", warm_up=5)


def test_a_number_of_steps_in_place_of_epochs():
    assert rates(1.0, -1, {"max_steps": 12}, schedule="cosine") == pytest.approx([1, 0.75, 0.25])
    with pytest.raises(ValueError, match=r"schedule: got 'cosine', .*max_epochs"):
        rates(1.0, -1, schedule="cosine")


def test_data_without_a_length_need_a_number_of_batches():
    class Endless(torch.utils.data.IterableDataset):
        def __iter__(self):
            while True:
                yield torch.randn(4), torch.tensor(1)

    def fit(**options):
        model = Classifier(torch.nn.Linear(4, 3), num_classes=3, schedule="cosine", warm_up=0.5)
        quiet_trainer(max_epochs=1, **options).fit(model, torch.utils.data.DataLoader(Endless(), batch_size=2))

    fit(limit_train_batches=2)
    with pytest.raises(ValueError, match=r"schedule: got 'cosine' .*limit_train_batches"):
        fit(max_steps=2)


@pytest.mark.parametrize("rising", [0, 0.4, 1, 2.5, 12, 23.5, 24])
def test_one_cycle_is_that_of_torch(rising):
    """Whose flanks cannot be empty: it divides by zero after the last step, or before the first."""
    optimiser = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    expected, part = [], 1 + 1e-6 if rising == 1 else rising
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 1.0, 24, pct_start=part / 24, cycle_momentum=False)
    for step in range(24):
        expected.append(optimiser.param_groups[0]["lr"])
        optimiser.step()
        if step < 23:
            schedule.step()
    found = [_factor("one-cycle", rising, 24, (), 0.1, step) for step in range(24)]
    assert found[1:] == pytest.approx(expected[1:], rel=1e-5)
    assert found[0] == pytest.approx({0: expected[0], 0.4: expected[0], 1: 1.0}.get(rising, 1 / 25))


def test_plateau():
    # So low a rate changes no prediction: the accuracy never rises after the first epoch.
    found = rates(1e-6, schedule="plateau", gamma=0.5, patience=1)
    assert found == pytest.approx([1e-6, 1e-6, 1e-6, 5e-7, 5e-7, 2.5e-7])
    # Epochs without a measure do not count.
    found = rates(1e-6, 7, {"check_val_every_n_epoch": 2}, schedule="plateau", gamma=0.5, patience=1)
    assert found == pytest.approx([*6 * [1e-6], 5e-7])


def test_a_plateau_resumes_within_an_epoch(tmp_path):
    """Whose start has passed, and which validates nothing."""
    found, path = [], tmp_path / "within.ckpt"

    class Save(pl.Callback):
        def on_train_batch_end(self, trainer, *args):
            if trainer.global_step == 2:
                trainer.save_checkpoint(path)

    data = torch.utils.data.DataLoader([(torch.randn(4), torch.tensor(1))] * 4)
    for callbacks, start in (([Save()], None), ([], path)):
        optimizer = functools.partial(torch.optim.SGD, lr=1e-5)
        model = Classifier(torch.nn.Linear(4, 3), optimizer=optimizer, num_classes=3, schedule="plateau", patience=0)
        trainer = quiet_trainer(max_epochs=6, check_val_every_n_epoch=2, callbacks=callbacks)
        trainer.fit(model, data, data, ckpt_path=start)
        found.append(trainer.optimizers[0].param_groups[0]["lr"])
    assert found[0] == found[1] == pytest.approx(1e-7)


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
    for make, options in ((Everything, {}), (Digits, {"limit_val_batches": 0})):
        trainer = quiet_trainer(max_epochs=1, **options)
        with pytest.raises(ValueError, match=r"schedule: got 'plateau', .*validates"):
            trainer.fit(Classifier(network, 10, schedule="plateau"), datamodule=make(limit_train=64))
