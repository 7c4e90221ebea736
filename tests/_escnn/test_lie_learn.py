"""What stands in for lie_learn, beside lie_learn where it can be imported, and by itself."""

import sys

import numpy as np
import pytest
from escnn.group import so3_group

from escnn_attention._escnn import lie_learn

needs_lie_learn = pytest.mark.skipif(not lie_learn.is_usable(), reason="lie_learn cannot be imported here")

DEGREES = range(13)
NUMBERS = {"equiangular": (2, 4, 12, 64), "Clenshaw-Curtis": (3, 5, 13, 65), "Gauss-Legendre": (2, 3, 8, 13, 64)}
GRIDS = [(number, kind) for kind, numbers in NUMBERS.items() for number in numbers]


def angles(number, seed=0):
    """Euler angles at random, and those at which rotations are about one axis only."""
    drawn = np.random.default_rng(seed).uniform([0, 0, 0], [2 * np.pi, np.pi, 2 * np.pi], (number, 3))
    return [*drawn, (0.0, 0.0, 0.0), (1.0, 0.0, -2.0), (0.0, np.pi, 0.0), (0.5, np.pi / 2, 7.0)]


def rotation(alpha, beta, gamma):
    """The matrix of R³, in the order (y, z, x) in which real harmonics of degree 1 are."""

    def about_z(angle):
        return np.array([[np.cos(angle), -np.sin(angle), 0], [np.sin(angle), np.cos(angle), 0], [0, 0, 1]])

    about_y = np.array([[np.cos(beta), 0, np.sin(beta)], [0, 1, 0], [-np.sin(beta), 0, np.cos(beta)]])
    return (about_z(alpha) @ about_y @ about_z(gamma))[np.ix_([1, 2, 0], [1, 2, 0])]


def euler_angles(matrix):
    """The angles ZYZ of a matrix as above."""
    r = matrix[np.ix_([2, 0, 1], [2, 0, 1])]
    return np.arctan2(r[1, 2], r[0, 2]), np.arccos(np.clip(r[2, 2], -1, 1)), np.arctan2(r[2, 1], -r[2, 0])


@needs_lie_learn
@pytest.mark.parametrize("degree", DEGREES)
def test_the_matrices_are_those_of_lie_learn(degree):
    from lie_learn.representations.SO3.wigner_d import wigner_D_matrix

    for triple in angles(20):
        expected = wigner_D_matrix(degree, *triple, field="real")
        np.testing.assert_allclose(
            lie_learn.wigner_D_matrix(degree, *triple, field="real"), expected, rtol=0, atol=1e-12
        )
        if degree:  # lie_learn at other angles is found to be another
            assert np.abs(lie_learn.wigner_D_matrix(degree, *np.add(triple, 1e-6)) - expected).max() > 1e-9


@needs_lie_learn
@pytest.mark.parametrize(("number", "kind"), GRIDS)
def test_the_grids_are_those_of_lie_learn(number, kind):
    from lie_learn.spaces import S2, S3

    band = number - 1 if kind == "Gauss-Legendre" else number // 2
    angles = S2.linspace(band, "SOFT" if kind == "equiangular" else kind)[0]
    weights = S3.quadrature_weights(band) if kind == "equiangular" else S2.quadrature_weights(band, kind)[:, 0]
    order, (colatitude, weight) = np.argsort(angles), lie_learn.latitudes(number, kind)
    np.testing.assert_allclose(colatitude, angles[order], rtol=0, atol=1e-12)
    np.testing.assert_allclose(weight / weight.sum(), weights[order] / weights.sum(), rtol=0, atol=1e-12)


def test_matrices_of_degree_1_are_rotations():
    for triple in angles(20):
        np.testing.assert_allclose(lie_learn.wigner_D_matrix(1, *triple), rotation(*triple), rtol=0, atol=1e-14)


@pytest.mark.parametrize("degree", [0, 1, 2, 5, 12, 20])
def test_matrices_are_an_orthogonal_representation(degree):
    for a, b in zip(angles(10), reversed(angles(10, seed=1)), strict=True):
        first, second = (lie_learn.wigner_D_matrix(degree, *triple) for triple in (a, b))
        np.testing.assert_allclose(first @ first.T, np.eye(2 * degree + 1), rtol=0, atol=1e-12)
        product = lie_learn.wigner_D_matrix(degree, *euler_angles(rotation(*a) @ rotation(*b)))
        # Near the poles the angles of a product are less exact, and then its matrix.
        np.testing.assert_allclose(first @ second, product, rtol=0, atol=1e-6)
        if degree and not np.allclose(rotation(*a) @ rotation(*b), rotation(*b) @ rotation(*a)):
            assert np.abs(second @ first - product).max() > 1e-6


@pytest.mark.parametrize(("number", "kind"), GRIDS)
def test_quadratures_are_exact_for_polynomials(number, kind):
    colatitude, weight = lie_learn.latitudes(number, kind)
    assert (np.diff(colatitude) > 0).all()
    degrees = 2 * number if kind == "Gauss-Legendre" else number
    weight = weight * 2 / weight.sum()
    errors = [weight @ np.cos(colatitude) ** n - (1 + (-1) ** n) / (n + 1) for n in range(degrees + 1)]
    assert np.abs(errors[:degrees]).max() < 1e-13
    if number < 10 and degrees % 2 == 0:  # beyond it is not
        assert abs(errors[degrees]) > 1e-5


def test_another_field_is_refused():
    with pytest.raises(ValueError, match=r"field: .*'real'"):
        lie_learn.wigner_D_matrix(1, 0.0, 0.0, 0.0, field="complex")


def test_irreps_of_escnn_are_those_of_the_stand_in():
    element = so3_group(4).sample()
    for degree in range(5):
        expected = lie_learn.wigner_D_matrix(degree, *element.to("ZYZ"))
        np.testing.assert_allclose(so3_group(4).irrep(degree)(element), expected, rtol=0, atol=1e-12)


# Modules that cannot be imported, in place of lie_learn: there is none, or it was compiled for another NumPy.
MISSING = "sys.modules['lie_learn'] = None"
BROKEN = """
from pathlib import Path
folder = Path(sys.argv[1], "lie_learn")
folder.mkdir()
(folder / "__init__.py").write_text("")
(folder / "representations.py").write_text(
    "import sys; print('compiled for another', file=sys.stderr); raise ValueError('numpy.dtype size changed')"
)
sys.path.insert(0, sys.argv[1])
"""
ESCNN_FIRST = """
try:
    import escnn
    from escnn import gspaces
except (ImportError, ValueError) as error:
    print("escnn:", error)
"""
WORKS = """
import escnn_attention
from escnn_attention._escnn import lie_learn as ours
assert not ours.is_usable()
import escnn
assert escnn_attention.escnn is escnn
assert escnn.group.groups.so3_utils.wigner_D_matrix is ours.wigner_D_matrix
assert not any(name.startswith("lie_learn.") for name in sys.modules)
so3 = escnn.group.so3_group(2)
a, b = so3.sample(), so3.sample()
for irrep in so3.irreps():
    assert abs(irrep(a @ b) - irrep(a) @ irrep(b)).max() < 1e-10
space = escnn.gspaces.rot3dOnR3(1)
fields = escnn.nn.FieldType(space, [space.irrep(1)])
assert escnn.nn.R3Conv(fields, fields, 3).basisexpansion.dimension() > 0
assert escnn_attention.SphereGrid(4).coords.shape == (32, 3)
print("works")
"""


@pytest.mark.parametrize(
    ("state", "first"), [(MISSING, ESCNN_FIRST), (BROKEN, "")], ids=["missing, escnn first", "broken, plugin first"]
)
@pytest.mark.slow
def test_escnn_is_imported_without_lie_learn(state, first, fresh_python, tmp_path):
    done = fresh_python.run("\n".join([state, first, WORKS]), tmp_path)
    assert done.status == 0, done.errors
    assert done.output.endswith("works\n")
    assert done.output.startswith("escnn: ") == bool(first)  # without the package escnn cannot be imported
    assert "compiled for another" not in done.errors


def test_what_is_imported_is_left_alone():
    before = dict(sys.modules)
    lie_learn.import_escnn()
    assert sys.modules == before
