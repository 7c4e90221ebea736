"""Classifiers of images and of pixels: losses, measures, and training by the command."""

import json

import pytest
import torch
from escnn import gspaces

from escnn_attention import CudaGraphs
from escnn_attention.models import FieldUNet
from escnn_attention.training import Classifier, PointClassifier, SegmentationModule, load_network
from escnn_attention.training.experiment import run_experiment
from tests.training.experiment.runs import call, of, write_task


@pytest.mark.parametrize("make", [Classifier, PointClassifier])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_smoothed_labels(make, smoothing):
    module = make(torch.nn.Identity(), 4, label_smoothing=smoothing)
    logits, labels = torch.randn(7, 4).double(), torch.randint(0, 4, (7,))
    targets = (1 - smoothing) * torch.eye(4).double()[labels] + smoothing / 4
    expected = -(targets * logits.log_softmax(1)).sum(1).mean()
    torch.testing.assert_close(module.loss(logits, labels), expected)
    # The control: labels that are smoothed by something else.
    other = make(torch.nn.Identity(), 4, label_smoothing=0.1)
    assert (other.loss(logits, labels) - expected).abs() > 1e-3


def test_cuda_graphs_run_the_network_and_are_not_saved(monkeypatch):
    runs, forward = [], CudaGraphs.forward
    monkeypatch.setattr(CudaGraphs, "forward", lambda self, *x: runs.append(self.network) or forward(self, *x))
    module = Classifier(torch.nn.Linear(4, 3), 3, cuda_graphs=True)
    assert set(module.state_dict()) == {"network.weight", "network.bias"}
    x = torch.randn(2, 4)
    for _ in range(2):
        assert torch.equal(module(x), module.network(x))
        module.network = torch.nn.Linear(4, 3)
    assert len(set(runs)) == 2
    plain = Classifier(torch.nn.Linear(4, 3), 3)
    plain(x)
    assert len(runs) == 2


def test_cuda_graphs_is_checked():
    with pytest.raises(TypeError, match=r"cuda_graphs: .*True or False"):
        Classifier(torch.nn.Linear(4, 3), 3, cuda_graphs="yes")


def module_of(logits):
    """A module whose network gives these logits, whatever the images."""
    network = torch.nn.Identity()
    network.forward = lambda images: logits
    return SegmentationModule(network, num_classes=logits.shape[1])


def test_loss_and_intersection_over_union():
    torch.manual_seed(0)
    logits, labels = torch.randn(3, 4, 5, 6), torch.randint(0, 4, (3, 5, 6))
    module = module_of(logits)
    expected = -logits.log_softmax(1).gather(1, labels[:, None]).mean()
    torch.testing.assert_close(module.loss(logits, labels), expected)
    predicted = logits.argmax(1)
    pairs = [((labels == c) & (predicted == c), (labels == c) | (predicted == c)) for c in range(4)]
    each = torch.stack([both.sum() / either.sum() for both, either in pairs])
    module.valid_iou(module.predict_step(torch.zeros(3, 1, 5, 6), 0), labels)
    torch.testing.assert_close(module.valid_iou.compute(), each.mean())
    # The control: shifted predictions.
    module.test_iou(predicted.roll(1, 2), labels)
    assert (module.test_iou.compute() - each.mean()).abs() > 1e-3


def test_rows_of_predictions():
    classes = torch.tensor([[[0, 2], [2, 2]]])
    rows = module_of(torch.randn(1, 3, 2, 2)).describe(classes, torch.tensor([[[0, 1], [2, 2]]]))
    assert rows == [{"image": 0, "right": 0.75, "pixels_0": 1, "pixels_1": 0, "pixels_2": 3}]


def test_the_network_tells_the_number_of_classes():
    network = FieldUNet(gspaces.rot2dOnR2(4), 1, 5, widths=(1,), attention=(1,), num_heads=1)
    assert SegmentationModule(network).num_classes == 5
    with pytest.raises(ValueError, match="num_classes"):
        SegmentationModule(torch.nn.Identity())
    with pytest.raises(ValueError, match=r"network: .*needed .*\(2, 3, 5, 5\)"):
        module_of(torch.randn(2, 3, 4, 4)).training_step((torch.zeros(2, 1, 5, 5), torch.zeros(2, 5, 5).long()), 0)


@pytest.mark.slow
def test_training_and_testing_by_the_command(tmp_path):
    network = {"gspace": of("escnn.gspaces.rot2dOnR2", N=4), "widths": [1, 1], "convolutions": 1, "attention": [0, 0]}
    model = {"network": of("escnn_attention.models.FieldUNet", in_type=1, out_type=11, **network)}
    data = of("escnn_attention.training.DigitCanvas", num_train=8, num_valid=4, num_test=4, batch_size=4)
    folder = tmp_path / "run"
    call("fit", write_task(tmp_path, "segmentation", model, data), folder)
    run_experiment(["test", "--folder", str(folder)])
    assert 0 <= json.loads((folder / "test.json").read_text())["iou"] <= 1
    run_experiment(["predict", "--folder", str(folder)])
    header, *rows = (folder / "predictions.csv").read_text().splitlines()
    assert header.startswith("image,right,pixels_0")
    assert len(rows) == 4
    assert load_network(folder)(torch.zeros(1, 1, 40, 40)).shape == (1, 11, 40, 40)
