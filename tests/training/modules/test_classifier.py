"""The losses of classifiers."""

import pytest
import torch

from escnn_attention import CudaGraphs
from escnn_attention.training import Classifier, PointClassifier


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
    runs = []
    monkeypatch.setattr(CudaGraphs, "_graph_of", lambda self, *inputs: runs.append(self.network))
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
