"""Regression of fields: the relative error of every field, and training by the command."""

import json

import numpy as np
import pytest
import torch
from escnn import gspaces

from escnn_attention.models import FieldUNet
from escnn_attention.training import FieldData, FieldModule, load_network
from escnn_attention.training.errors import UserError
from escnn_attention.training.experiment import run_experiment
from escnn_attention.training.experiment.network import check_fit
from tests.training.experiment.runs import call, of, write_task


class Given(torch.nn.Module):
    """A network that gives what it is given."""

    def forward(self, x):
        return x


def test_relative_errors_over_the_whole_part():
    torch.manual_seed(0)
    module = FieldModule(Given(), fields=(1, 2))
    outputs, targets = torch.randn(5, 3, 4, 6), torch.randn(5, 3, 4, 6) * torch.tensor([3.0, 1, 1]).view(3, 1, 1)
    squares = [(outputs - targets).square().sum((0, 2, 3)), targets.square().sum((0, 2, 3))]
    expected = torch.stack([squares[0][0] / squares[1][0], squares[0][1:].sum() / squares[1][1:].sum()])
    for part in (slice(0, 3), slice(3, 5)):  # batches of two sizes
        module._evaluate("valid", (outputs[part], targets[part]))
    errors, rmse, _ = module.valid_squares.compute()
    torch.testing.assert_close(errors.float(), expected)
    torch.testing.assert_close(rmse.float(), torch.stack([squares[0][0], squares[0][1:].sum()]).div(5 * 24).sqrt())
    module.log_mean = lambda *arguments: None
    torch.testing.assert_close(module.training_step((outputs, targets), 0), expected.mean())
    # The control: fields that are divided in another way.
    other = FieldModule(Given(), fields=(2, 1)).requires_grad_(False)
    other.log_mean = lambda *arguments: None
    assert (other.training_step((outputs, targets), 0) - expected.mean()).abs() > 1e-3


@pytest.mark.parametrize("precision", [torch.float16, torch.bfloat16])
def test_sums_of_numbers_of_half_precision(precision):
    """More squares than the precision has numbers for."""
    x = torch.full((2, 1, 200, 200), 1.375, dtype=precision)
    module = FieldModule(Given(), fields=(1,))
    errors, squares = module._squares(x, 2 * x)
    assert errors.item() == squares.item() / 4 == 2 * 200**2 * 1.375**2


def test_a_field_that_is_zero_in_a_batch_moves_no_weights():
    """It is left out, where what is not a number stays one."""
    module, outputs = FieldModule(Given(), fields=(1, 2)), torch.randn(2, 3, 4, 4, requires_grad=True)
    targets = torch.randn(2, 3, 4, 4) * torch.tensor([0.0, 1, 1]).view(3, 1, 1)
    loss = module._loss(outputs, (outputs, targets))
    errors, squares = module._squares(outputs, targets)
    torch.testing.assert_close(loss, errors[1] / squares[1] / 2)
    (gradient,) = torch.autograd.grad(loss, outputs)
    assert gradient.isfinite().all()
    assert not gradient[:, 0].any()
    assert gradient[:, 1:].all()
    assert module._loss(outputs, (outputs, torch.full_like(targets, torch.nan))).isnan()


def test_a_field_that_is_zero_in_validation_is_left_out_of_the_error():
    """By which the best epoch is chosen; what is not a number stays one."""
    module, found = FieldModule(Given(), fields=(1, 2)), {}
    module.log = lambda name, value, **_: found.update({name: value})
    outputs, targets = torch.randn(2, 3, 4, 4), torch.randn(2, 3, 4, 4)
    targets[:, 0] = 0
    for first in (1.0, 0.0, torch.nan):
        outputs[0, 0, 0, 0] = first
        module._evaluate("valid", (outputs, targets))
        module.on_validation_epoch_end()
        torch.testing.assert_close(found["valid_error"], found["valid_error_1"])
        assert found["valid_error"].isfinite()
        assert found["valid_error_0"].isnan()
        outputs[:, 0] = 0
    outputs[0, 1, 0, 0] = torch.nan
    module._evaluate("valid", (outputs, targets))
    module.on_validation_epoch_end()
    assert found["valid_error"].isnan()


def test_what_does_not_fit():
    with pytest.raises(ValueError, match=r"fields: .* Given"):
        FieldModule(Given())
    with pytest.raises(ValueError, match=r"network: .*same shape"):
        FieldModule(Given(), (2,)).training_step((torch.zeros(1, 2, 4, 4), torch.zeros(1, 2, 4, 5)), 0)
    with pytest.raises(ValueError, match=r"network: .* 3 channels"):
        FieldModule(Given(), (3,)).training_step((torch.zeros(1, 2, 4, 4), torch.zeros(1, 2, 4, 4)), 0)


def test_the_network_tells_the_fields():
    network = FieldUNet(gspaces.rot2dOnR2(4), 1, {"vector": 1, "scalar": 2}, widths=(1,), attention=(1,), num_heads=1)
    assert FieldModule(network).fields == (2, 1, 1)


@pytest.mark.parametrize("in_type", [{"vector": 2, "scalar": 1}, {"vector": 2, "scalar": 2}, 5, {"scalar": 5}])
def test_fields_in_the_order_of_the_channels_of_the_data(in_type):
    """Of the same fields; others may have a reason."""
    network = FieldUNet(gspaces.rot2dOnR2(4), in_type, {"vector": 1}, widths=(1,), attention=(1,), num_heads=1)
    data = FieldData("x.npz", {"vector": 2, "scalar": 1}, {"vector": 1})
    check_fit(FieldModule(network), data, "network")
    check_fit(FieldModule(Given(), [2]), data, "network")


@pytest.mark.parametrize(("place", "name"), [("inputs", "in_type"), ("targets", "out_type")])
def test_fields_in_another_order_are_refused(place, name, tmp_path):
    kinds = {"inputs": {"scalar": 1}, "targets": {"vector": 1}, place: {"vector": 1, "scalar": 1}}
    data = of("escnn_attention.training.FieldData", path="x.npz", **kinds)
    network = {"in_type": {"scalar": 1}, "out_type": {"vector": 1}, name: {"scalar": 1, "vector": 1}}
    network |= {"gspace": of("escnn.gspaces.rot2dOnR2", N=4), "widths": [1], "attention": [1], "num_heads": 1}
    path = write_task(tmp_path, "fields", {"network": of("escnn_attention.models.FieldUNet", **network)}, data)
    with pytest.raises(UserError, match=rf"network: {name} .*FieldData; needed .*'vector': 1, 'scalar': 1"):
        call("fit", path, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_training_and_testing_by_the_command(tmp_path):
    network = {"gspace": of("escnn.gspaces.flipRot2dOnR2", N=4), "in_type": {"scalar": 1}, "out_type": {"vector": 1}}
    network |= {"widths": [1, 1], "convolutions": 1, "attention": [0, 0], "padding_mode": "circular"}
    sizes = {"size": 8, "num_train": 8, "num_valid": 4, "num_test": 6, "batch_size": 4}
    data = of("escnn_attention.training.PoissonOnTorus", turn_train="all", **sizes)
    folder = tmp_path / "run"
    model = {"network": of("escnn_attention.models.FieldUNet", **network)}
    call("fit", write_task(tmp_path, "fields", model, data), folder)
    run_experiment(["test", "--folder", str(folder)])
    measured = json.loads((folder / "test.json").read_text())
    assert measured["error"] == measured["error_0"] > 0
    run_experiment(["predict", "--folder", str(folder)])
    header, *rows = (folder / "predictions.csv").read_text().splitlines()
    assert header == "sample,rms_0,error_0"
    assert len(rows) == 6
    with np.load(folder / "predictions.npz") as file:
        fields = torch.from_numpy(file["predictions"])
    run_experiment(["predict", "--folder", str(folder), "--trainer.precision", "bf16-true"])
    with np.load(folder / "predictions.old-1.npz") as old, np.load(folder / "predictions.npz") as file:
        assert np.array_equal(old["predictions"], fields)
        assert 0 < np.abs(file["predictions"] - old["predictions"]).max() < 0.1
    assert float(rows[2].split(",")[1]) == pytest.approx(fields[2].square().sum(0).mean().sqrt().item())
    assert load_network(folder).out_type.size == 2
