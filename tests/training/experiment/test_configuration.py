"""What of a configuration may change, and what may not."""

import importlib
import json
import math

import pytest
import torch
import yaml

from escnn_attention import models
from escnn_attention.models import GSANet
from escnn_attention.models.registry import description_of
from escnn_attention.training import recipe
from escnn_attention.training.errors import UserError
from escnn_attention.training.experiment import run_experiment
from escnn_attention.training.experiment.checkpoints import provenance_of, read_checkpoint
from escnn_attention.training.experiment.configuration import differences, network_facts
from escnn_attention.training.modules.classifier import Classifier
from tests.training.experiment.runs import ROOT, SHORT, call, of, rows, weights


@pytest.mark.slow
def test_another_training_is_refused_and_nothing_is_lost(configuration, fitted, tmp_path):
    folder = tmp_path / "run"
    fitted(configuration(), folder)
    before = (folder / "last.ckpt").read_bytes()
    with pytest.raises(UserError, match=r"seed_everything \(3 there, 4"):
        call("fit", configuration(seed_everything=4), folder)
    options = ["--trainer.precision", "bf16-mixed", "--trainer.gradient_clip_val", 0.1]
    options += ["--data.init_args.batch_size", 4, "--model.network.init_args.kernel_size", 5]
    with pytest.raises(UserError) as caught:
        call("fit", configuration(), folder, *options)
    for name in options[::2]:
        assert f"{name.removeprefix('--')} (" in str(caught.value)
    assert "model.network.init_args.kernel_size (3 there, 5 now)" in str(caught.value)
    assert (folder / "last.ckpt").read_bytes() == before


@pytest.mark.slow
def test_what_may_change(configuration, fitted, tmp_path, data):
    folder = tmp_path / "run"
    file = configuration(**SHORT)
    fitted(file, folder)
    call("fit", file, folder, "--trainer.max_epochs", 2)
    assert len(rows(folder)) == 2
    with pytest.raises(UserError, match=r"got 1, .*has finished 2"):
        call("fit", file, folder)
    renamed = of("escnn_attention.training.data.images.mnist.RotMNIST", folder=str(data))
    other = configuration(data=renamed, model__schedule="constant")  # the same class by its other name
    block = "--model.network.init_args.block"
    elsewhere = '{"encoding": "mlp", "backend": "reference"}'
    call("test", other, folder, block, elsewhere, "--data.init_args.limit_test", 1)
    with pytest.raises(UserError, match=r"model\.network\.init_args\.kernel_size"):
        call("test", file, folder, "--model.network.init_args.kernel_size", 5)
    for changed, message in (
        ({"encoding": "fourier"}, r'encoding \("mlp" there, "fourier" now\)'),
        ({"encoding": "mlp", "layer_scale": 0.1}, r"layer_scale \(null there, 0\.1 now\)"),
    ):
        with pytest.raises(UserError, match=rf"model\.network\.init_args\.block\.{message}"):
            call("test", file, folder, block, json.dumps(changed))


@pytest.mark.parametrize(
    ("there", "now", "found"),
    [
        ({"dropout": 0.1}, {}, "dropout (0.1 there, null now)"),
        ({"dropout": 0.1}, None, "dropout (0.1 there, null now)"),
        ({"dropout": 0.1, "encoding": "mlp"}, {"encoding": "mlp"}, "dropout (0.1 there, null now)"),
        (None, {"dropout": 0.1}, "dropout (null there, 0.1 now)"),
        ({"encoding": "mlp"}, {"encoding": {"class_path": "a.B"}}, 'encoding.class_path (null there, "a.B" now)'),
        ({"dropout": 0.1}, {"dropout": 0.1, "backend": "reference"}, ""),
        ({"backend": "reference"}, None, ""),
        (None, {}, ""),
        (..., {"dropout": 0.1}, ""),  # of a version without this option
    ],
)
def test_options_of_blocks_that_one_side_leaves_out(there, now, found):
    old, new = (
        {"model": {"network": {"class_path": "a.Net", "init_args": {} if block is ... else {"block": block}}}}
        for block in (there, now)
    )
    assert differences(old, new, network_facts) == (found and f"model.network.init_args.block.{found}")


def test_fields_in_another_order_are_another_network():
    first, other, same = (
        {"model": {"network": {"class_path": "a.Net", "init_args": {"in_type": dict(kinds)}}}}
        for kinds in ((("vector", 1), ("scalar", 2)), (("scalar", 2), ("vector", 1)), (("vector", 1), ("scalar", 2)))
    )
    found = 'model.network.init_args.in_type ({"vector": 1, "scalar": 2} there, {"scalar": 2, "vector": 1} now)'
    assert differences(first, other, network_facts) == found
    assert not differences(first, same, network_facts)


STEPS = {"model__schedule": "steps", "model__milestones": [1, 3]}


@pytest.mark.sampled(1, of="longer trainings")
@pytest.mark.parametrize(
    "changes", [{"model__schedule": "constant"}, STEPS, {"model__schedule": "plateau", "model__warm_up": 0}]
)
def test_a_training_can_be_made_longer(configuration, fitted, tmp_path, capsys, changes):
    """A schedule that does not ask how many epochs there are gives the weights of the longer training."""
    longer, whole = tmp_path / "longer", tmp_path / "whole"
    fitted(configuration(**changes), longer)
    call("fit", configuration(**changes), longer, "--trainer.max_epochs", 4)
    call("fit", configuration(**changes, trainer__max_epochs=4), whole)
    one, other = weights(longer), weights(whole)
    assert all(torch.equal(one[name], other[name]) for name in other)
    assert len(rows(longer)) == 4
    assert "max_epochs" not in capsys.readouterr().err
    facts = provenance_of(read_checkpoint(longer / "last.ckpt"))
    assert facts["configuration"]["trainer"]["max_epochs"] == 4
    assert "earlier_max_epochs" not in facts


@pytest.mark.sampled(1, of="longer trainings")
@pytest.mark.parametrize("schedule", ["cosine", "one-cycle"])
def test_a_schedule_is_laid_out_anew_over_a_longer_training(configuration, fitted, tmp_path, capsys, schedule):
    """Its learning rate goes on as in a training of that length, and it is kept that it was another one before."""
    longer, whole, short = tmp_path / "longer", tmp_path / "whole", tmp_path / "short"
    file = configuration(model__schedule=schedule)
    fitted(file, longer)
    fitted(file, short)
    call("fit", file, longer, "--trainer.max_epochs", 5)
    assert f"3 before, 5 now: the schedule '{schedule}' is laid out over 5 from epoch 4 on" in capsys.readouterr().err
    call("fit", configuration(model__schedule=schedule, trainer__max_epochs=5), whole)
    rates, expected, before = ([float(row["learning_rate"]) for row in rows(path)] for path in (longer, whole, short))
    assert rates == [*before, *expected[3:]]
    assert before != expected[:3]
    call("test", file, longer)
    result = json.loads((longer / "test.json").read_text(encoding="utf-8"))
    if result["epoch"] > 3:
        assert result["trained"]["earlier_max_epochs"] == [3]
    assert provenance_of(read_checkpoint(longer / "last.ckpt"))["earlier_max_epochs"] == [3]
    call("fit", file, longer, "--trainer.max_epochs", 5)  # finished, and the same
    assert "before" not in capsys.readouterr().err
    assert [float(row["learning_rate"]) for row in rows(longer)] == rates


@pytest.mark.slow
def test_the_first_step_of_a_longer_training(configuration, fitted, tmp_path, monkeypatch):
    """Is at the rate of the longer schedule, though the optimiser was left at that of the end of the shorter one."""
    fitted(configuration(), tmp_path / "run")
    seen = []
    monkeypatch.setattr(
        Classifier, "on_train_batch_end", lambda module, *_: seen.append(module.lr_schedulers().get_last_lr()[0])
    )
    monkeypatch.setattr(
        Classifier, "on_train_epoch_start", lambda module: seen.append(module.optimizers().param_groups[0]["lr"])
    )
    call("fit", configuration(), tmp_path / "run", "--trainer.max_epochs", 4)
    # Warm over the first 3 of 12 steps, then like half a cosine: the first rate is that of step 9.
    assert seen[0] == pytest.approx(0.05 * 0.5 * (1 + math.cos(math.pi * 6 / 9)))
    assert len(seen) == 4


@pytest.mark.slow
def test_nulls_are_kept(configuration, tmp_path):
    """A null in place of another default, here that of global attention in place of windows of 5×5."""
    folder = tmp_path / "run"
    limits = ["--data.init_args.limit_valid=1", "--data.init_args.limit_test=1"]
    file = configuration(model__network__init_args__kernel_size=None, **SHORT)
    call("fit", file, folder, *limits)
    kept = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    assert kept["model"]["network"]["init_args"]["kernel_size"] is None
    call("test", file, folder, *limits)
    result = (folder / "test.json").read_bytes()
    run_experiment(["test", "--folder", str(folder)])
    assert (folder / "test.json").read_bytes() == result
    with pytest.raises(UserError, match=r"kernel_size \(null there"):
        call("test", configuration(**SHORT), folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe\x00\x01", "is not a text file"),
        (b"a: \x00b", "is not YAML"),
        (b"a: [", "is not YAML: while parsing"),
    ],
)
def test_configurations_that_are_none(tmp_path, content, message):
    (tmp_path / "experiment.yaml").write_bytes(content)
    with pytest.raises(UserError, match=rf"^--config: .*experiment\.yaml {message}.*$"):
        call("fit", tmp_path / "experiment.yaml", tmp_path / "run")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "path", sorted((ROOT / "examples" / "gsa_nets" / "configurations").glob("*.yaml")), ids=lambda p: p.stem
)
@pytest.mark.slow
def test_configurations_of_the_paper(path):
    """Every file is understood, and builds the network of the paper that it names."""
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    arguments = config["model"]["network"]["init_args"]
    gspace = arguments.pop("gspace")
    module, _, name = gspace["class_path"].rpartition(".")
    space = getattr(importlib.import_module(module), name)(**gspace.get("init_args", {}))
    preset = {"rotmnist": GSANet.rotmnist, "cifar10": GSANet.cifar10, "pcam": GSANet.patch_camelyon}
    described, named = GSANet(space, **arguments), preset[path.stem.split("_")[0]](space)
    assert str(described) == str(named)
    assert {n: p.shape for n, p in described.named_parameters()} == {n: p.shape for n, p in named.named_parameters()}


@pytest.mark.parametrize("name", models.list_models(pretrained=True))
def test_every_shipped_network_has_a_recipe(name):
    found = recipe(name)
    assert {"trainer", "model", "data"} <= found.keys() <= {"trainer", "model", "data", "task", "seed_everything"}
    described, network = description_of(name), found["model"]["network"]
    assert network["class_path"] == described["class_path"]
    changed = {key for key, value in network["init_args"].items() if value != described["init_args"][key]}
    assert changed <= {"even_in"}  # which is no part of the training


@pytest.mark.slow
def test_a_recipe_is_trained_with_changes(tmp_path):
    options = ["--trainer.max_epochs", "1", "--trainer.accelerator", "cpu", "--trainer.enable_progress_bar", "false"]
    options += ["--model.warm_up", "0", "--data.init_args.limit_train", "64"]
    options += ["--model.network.init_args.widths", "[2, 2]"]
    run_experiment(["fit", "--recipe", "hybrid-digits", "--folder", str(tmp_path), *options])
    kept = yaml.safe_load((tmp_path / "config.yaml").read_text(encoding="utf-8"))
    expected = recipe("hybrid-digits")
    assert "recipe" not in kept
    assert kept["model"]["optimizer"]["init_args"]["lr"] == expected["model"]["optimizer"]["init_args"]["lr"]
    assert kept["model"]["network"]["init_args"]["widths"] == [2, 2]
    assert kept["model"]["network"]["init_args"]["features"] == expected["model"]["network"]["init_args"]["features"]


def test_an_unknown_recipe(tmp_path):
    with pytest.raises(UserError, match=r"--recipe: got hybrid, .*gsa-net-digits"):
        run_experiment(["fit", "--recipe", "hybrid", "--folder", str(tmp_path)])
