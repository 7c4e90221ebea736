"""Random elements of a continuous group, on plain tensors."""

import numpy as np
import torch

from escnn_attention.groups.random_transformation import (
    FieldTransformation,
    LieElement,
    LieRepresentation,
    RandomTransformation,
)

QUARTER = np.array([[0.0, -1.0], [1.0, 0.0]])


def plane(frequency: int = 1) -> LieRepresentation:
    """Vectors of the plane under rotations and reflections."""
    return LieRepresentation(frequency * QUARTER[None], np.stack([np.eye(2), np.diag([1.0, -1.0])]))


def test_fields_are_transformed_by_their_representations():
    trivial = LieRepresentation(np.zeros((1, 1, 1)), np.ones((2, 1, 1)))
    fields = FieldTransformation([np.array([[0], [3]]), np.array([[1, 2]])], [trivial, plane(2)])
    assert not fields.state_dict()
    x, element = torch.randn(2, 4, 3), LieElement(torch.tensor([0.4]).double(), 1)
    y = fields(x, element)
    assert torch.equal(y[:, [0, 3]], x[:, [0, 3]])
    matrix = plane(2)(element).float()
    torch.testing.assert_close(y[:, 1:3], torch.einsum("ij,bjn->bin", matrix, x[:, 1:3]))
    assert (y[:, 1:3] - x[:, 1:3]).abs().max() > 0.1
    torch.testing.assert_close(fields(y, element, inverse=True), x)


def test_draws_cover_both_components():
    fields = FieldTransformation([], [])
    random = RandomTransformation(fields, fields, plane())
    torch.manual_seed(0)
    drawn = [random.draw() for _ in range(1000)]
    assert {element.component for element in drawn} == {0, 1}
    assert torch.stack([random.space(element) for element in drawn]).mean(0).abs().max() < 0.1
    torch.manual_seed(0)
    assert torch.equal(random.draw().vector, drawn[0].vector)
