"""Power spectra of fields."""

import numpy as np
import pytest
import torch
from escnn import gspaces
from escnn.nn import FieldType

from escnn_attention import PowerSpectrum
from tests import spaces
from tests.nn.points import cloud

C4, D4 = gspaces.rot2dOnR2(4), gspaces.flipRot2dOnR2(4)
SO3 = gspaces.rot3dOnR3()


@pytest.mark.sampled(8)
@pytest.mark.parametrize("kind", ["norm", "square"])
@pytest.mark.parametrize("make", spaces.ALL.values(), ids=spaces.ALL)
def test_no_element_changes_it(make, kind):
    gspace = make()
    fields = spaces.mixed(gspace)
    layer = PowerSpectrum(fields, kind).double()
    x = spaces.random_field(fields, *spaces.shape_of(gspace, 3))
    y = layer(x)
    assert y.type == spaces.scalars(gspace, sum(len(r.irreps) for r in fields.representations))
    for g in gspace.fibergroup.elements:
        torch.testing.assert_close(layer(x.transform_fibers(g)).tensor, y.tensor, rtol=1e-10, atol=1e-11)
    assert spaces.grid_error(layer, x) < 1e-11
    torch.testing.assert_close(layer.export()(x.tensor), y.tensor)


def test_parts_in_another_basis_change():
    """Coordinates that are not those of the irreps have lengths that elements change."""
    fields = spaces.regular(D4, 1)
    layer, x = PowerSpectrum(fields).double(), spaces.random_field(fields, 2, 2)
    layer.plain.matrix_0 = torch.linalg.qr(torch.randn(8, 8).double())[0]
    g = D4.fibergroup.generators[0]
    assert (layer(x.transform_fibers(g)).tensor - layer(x).tensor).abs().max() > 1e-2


def test_is_the_formula_field_by_field():
    fields = FieldType(D4, [D4.irrep(1, 1), D4.trivial_repr, D4.regular_repr, D4.irrep(1, 0), D4.irrep(1, 1)])
    x = spaces.random_field(fields, 2, 3)
    expected, start = [], 0
    for representation in fields.representations:
        part = np.einsum(
            "ij,bjyx->biyx",
            representation.change_of_basis_inv,
            x.tensor[:, start : start + representation.size].numpy(),
        )
        start, place = start + representation.size, 0
        for name in representation.irreps:
            irrep = D4.irrep(*name)
            of_irrep = part[:, place : place + irrep.size]
            place += irrep.size
            expected.append(of_irrep[:, 0] if irrep.is_trivial() else np.sqrt((of_irrep**2).sum(1)))
    torch.testing.assert_close(PowerSpectrum(fields).double()(x).tensor, torch.from_numpy(np.stack(expected, 1)))
    squares = PowerSpectrum(fields, "square").double()(x).tensor[:, 0]
    torch.testing.assert_close(squares, torch.from_numpy(expected[0] ** 2 / 2))


def test_vectors_at_points_and_zeros():
    vectors = FieldType(SO3, 2 * [SO3.fibergroup.irrep(1)])
    x = cloud(vectors, 5)
    y = PowerSpectrum(vectors).double()(x)
    torch.testing.assert_close(y.tensor, x.tensor.unflatten(1, (2, 3)).norm(dim=2))
    assert y.coords is x.coords
    zeros = torch.zeros(1, 6, requires_grad=True)
    PowerSpectrum(vectors).plain(zeros).sum().backward()
    assert zeros.grad.isfinite().all()


def test_bad_arguments():
    with pytest.raises(ValueError, match="kind: got 'power'"):
        PowerSpectrum(spaces.scalars(C4, 1), "power")
