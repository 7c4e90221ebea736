"""What is written to a file: of images and of points."""

import json

import pytest

pytest.importorskip("jsonargparse")

from escnn import gspaces

from escnn_attention.models import PointTransformer
from escnn_attention.training.experiment.subjects import CloudSubject, size_of_data


def test_clouds_are_as_large_as_neighbourhoods():
    def spread(**attention):
        network = PointTransformer(gspaces.rot2dOnR2(2), 2, 1, fields=1, num_blocks=1, num_heads=1, attention=attention)
        subject = CloudSubject(network)
        return [float(coords.std()) for _, coords, *_ in subject.trials()]

    assert spread(radius=100.0) == pytest.approx([100 * x for x in spread()])
    assert spread(num_neighbours=2) == spread()


@pytest.mark.parametrize(
    ("description", "size"),
    [
        ({"class_path": "escnn_attention.training.CIFAR10"}, 32),
        ({"class_path": "escnn_attention.training.Digits", "init_args": {"batch_size": 4}}, 8),
        ({"class_path": "escnn_attention.training.Digits", "init_args": {"size": 16}}, 16),
        ({"class_path": "escnn_attention.training.Springs", "init_args": {"size": 16}}, None),
        ({"class_path": "os.path"}, None),
        ({"class_path": 3}, None),
        (None, None),
    ],
)
def test_the_size_of_images(description, size):
    assert size_of_data(json.loads(json.dumps(description))) == size
