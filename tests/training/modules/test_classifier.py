"""The losses of classifiers."""

import pytest
import torch

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
