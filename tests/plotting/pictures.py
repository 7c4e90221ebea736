"""What the tests of the pictures share: small systems, and what can be read off a figure."""

import io

import numpy as np
import torch
from escnn import gspaces, nn

from escnn_attention import GroupSelfAttention, LiftingSelfAttention, PointSelfAttention


def system(gspace=None):
    """An image, a lifting layer and a group layer with two heads."""
    gspace = gspace or gspaces.rot2dOnR2(4)
    image = nn.FieldType(gspace, [gspace.trivial_repr])
    hidden = nn.FieldType(gspace, 2 * [gspace.regular_repr])
    lifting = LiftingSelfAttention(image, hidden, 2, 3)
    attention = GroupSelfAttention(hidden, hidden, 2, 3)
    return image(torch.randn(1, 1, 6, 6)), lifting, attention


def texts(figure):
    found = [text.get_text() for text in figure.texts]
    for ax in figure.axes:
        found += [ax.get_title(), *(text.get_text() for text in ax.texts)]
    return found


def drawn(figure):
    """The number of bytes of the picture; drawing must not fail."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=40)
    return len(file.getvalue())


def shown(ax):
    return np.asarray(ax.images[-1].get_array())


def opacity(ax):
    return shown(ax)[..., 3]


def number(ax):
    """The number in the frame of a panel."""
    return int(next(text.get_text() for text in ax.texts if text.get_text()))  # arrows are empty texts


class Wrapped(torch.nn.Module):
    """A network of plain tensors around equivariant modules, as users write it."""

    def __init__(self, *modules):
        super().__init__()
        self.body = nn.SequentialModule(*modules)
        self.head = torch.nn.Linear(self.body.out_type.size, 3)

    def forward(self, x):
        features = self.body(nn.GeometricTensor(x, self.body.in_type))
        return self.head(features.tensor.mean((-2, -1)))


def layer_on(gspace, cls=PointSelfAttention, heads=2, fields=4, **options):
    """Attention between points with regular fields."""
    hidden = nn.FieldType(gspace, fields * [gspace.regular_repr])
    return cls(hidden, hidden, heads, **options)


def cloud_for(module, number=7, seed=0):
    torch.manual_seed(seed)
    dimension = module.in_type.gspace.dimensionality
    return nn.GeometricTensor(torch.randn(number, module.in_type.size), module.in_type, torch.randn(number, dimension))
