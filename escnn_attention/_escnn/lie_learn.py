r"""Stands in for lie_learn where that cannot be imported: with NumPy 2, and after Python 3.12.

escnn 1.0.11 imports one function of lie_learn, the Wigner D matrices, and is of no use without it. lie_learn 0.0.2 is
compiled against NumPy 1, for Python up to 3.12. It serves escnn wherever it can be imported, and elsewhere the function
of this file, which agrees with it to rounding errors. The grids on the sphere (:class:`~escnn_attention.SphereGrid`)
are those of lie_learn, to rounding errors, and are always made here.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import sys
from collections.abc import Iterator
from functools import cache
from types import ModuleType

import numpy as np
from numpy.polynomial.legendre import leggauss

_WIGNER = "lie_learn.representations.SO3.wigner_d"


@cache
def is_usable() -> bool:
    """Whether lie_learn is installed and can be imported with this Python and this NumPy."""
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # to which NumPy 2 says a lot of modules made for NumPy 1
            importlib.import_module(_WIGNER)
    except Exception:  # a module compiled for another NumPy fails with any of ImportError, ValueError, AttributeError
        return False
    return True


def import_escnn() -> None:
    """Import escnn, which finds :func:`wigner_D_matrix` of this file under lie_learn's name where that is unusable.

    lie_learn's names are taken only while escnn is imported: whoever else asks for lie_learn gets it, or the error that
    says why not. An ``import escnn`` that came before, and left escnn without its groups, is made up for.
    """
    if "escnn.group" in sys.modules:
        return
    # Submodules that are left of such an import refer to modules that are no more.
    for name in [name for name in sys.modules if name.startswith("escnn.")]:
        del sys.modules[name]
    with contextlib.nullcontext() if is_usable() else _taken_names():
        if "escnn" in sys.modules:  # and perhaps in the hands of whoever imported it
            importlib.reload(sys.modules["escnn"])
        else:
            importlib.import_module("escnn")


@contextlib.contextmanager
def _taken_names() -> Iterator[None]:
    """Modules under the names of lie_learn's that escnn imports, within a ``with`` block."""
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "lie_learn"}
    parts = _WIGNER.split(".")
    taken = {name: ModuleType(name) for name in (".".join(parts[:stop]) for stop in range(1, len(parts) + 1))}
    taken[_WIGNER].wigner_D_matrix = wigner_D_matrix  # type: ignore[attr-defined]
    sys.modules.update(taken)
    try:
        yield
    finally:
        for name in taken:
            del sys.modules[name]
        sys.modules.update(before)


def wigner_D_matrix(degree: int, alpha: float, beta: float, gamma: float, field: str = "real") -> np.ndarray:
    r"""The irrep of SO(3) of degree l, on real spherical harmonics of orders −l, ..., l, at Euler angles ZYZ.

    .. math:: D^l(α, β, γ) = e^{α L_z}\, e^{β L_y}\, e^{γ L_z}

    Args:
        degree: l ≥ 0.
        alpha, beta, gamma: the angles in radians.
        field: ``"real"``, the one that escnn asks for.

    Returns:
        an orthogonal matrix, ``(2l + 1, 2l + 1)``.

    Raises:
        ValueError: another field.

    Example:
        >>> quarter = wigner_D_matrix(1, 0.0, 0.0, np.pi / 2)  # about z; harmonics of degree 1 are y, z and x
        >>> np.allclose(quarter @ np.array([0, 0, 1]), [1, 0, 0])
        True

    Source: lie_learn, ``wigner_D_matrix`` (real, quantum-normalized, centered, with the phase of Condon and Shortley).
    """
    if field != "real":
        raise ValueError(f"field: got {field!r}, needed 'real', which is all that escnn asks of lie_learn")
    order = np.arange(-degree, degree + 1)
    vectors = _rotation_axes(degree)
    about_y = (vectors * np.exp(-1j * beta * order) @ vectors.conj().T).real

    def about_z(angle: float) -> np.ndarray:
        return np.diag(np.cos(order * angle)) - np.fliplr(np.diag(np.sin(order * angle)))

    return about_z(alpha) @ about_y @ about_z(gamma)


@cache
def _rotation_axes(degree: int) -> np.ndarray:
    """Eigenvectors of the angular momentum about y for the eigenvalues −l, ..., l, in the basis of real harmonics."""
    order = np.arange(-degree, degree + 1)
    step = np.sqrt(degree * (degree + 1) - order[:-1] * (order[:-1] + 1)) / 2
    momentum = 1j * (np.diag(step, 1) - np.diag(step, -1))
    # Rows are real harmonics, columns complex ones, of the same orders.
    real = np.zeros((2 * degree + 1, 2 * degree + 1), dtype=complex)
    real[degree, degree] = 1
    for m in range(1, degree + 1):
        sign = (-1) ** m
        columns = [degree - m, degree + m]
        real[degree + m, columns] = np.array([1, sign]) / np.sqrt(2)
        real[degree - m, columns] = np.array([1j, -1j * sign]) / np.sqrt(2)
    return real.conj() @ np.linalg.eigh(momentum)[1]


def latitudes(number: int, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Colatitudes of a grid on the sphere, from the north, and their quadrature weights up to a factor.

    Args:
        number: of latitudes; even for ``"equiangular"``, odd for ``"Clenshaw-Curtis"``.
        kind: ``"equiangular"``, ``"Clenshaw-Curtis"`` or ``"Gauss-Legendre"``.

    Returns:
        colatitudes and weights, float64, ``(number,)`` each.

    Example:
        >>> colatitude, weight = latitudes(3, "Clenshaw-Curtis")
        >>> (colatitude / np.pi).tolist(), (weight / weight.sum()).round(12).tolist()
        ([0.0, 0.5, 1.0], [0.166666666667, 0.666666666667, 0.166666666667])

    Source: lie_learn, ``S2.linspace``, ``S2.quadrature_weights`` and ``S3.quadrature_weights``.
    """
    return _GRIDS[kind](number)


def _equiangular(number: int) -> tuple[np.ndarray, np.ndarray]:
    """Driscoll and Healy's weights at colatitudes (j + ½)π / n."""
    colatitude = (np.arange(number) + 0.5) * np.pi / number
    odd = np.arange(1, number, 2)
    return colatitude, np.sin(colatitude) * (np.sin(np.outer(colatitude, odd)) / odd).sum(axis=1)


def _clenshaw_curtis(number: int) -> tuple[np.ndarray, np.ndarray]:
    """Clenshaw and Curtis' weights at colatitudes jπ / (n − 1)."""
    colatitude = np.linspace(0, np.pi, number)
    even = np.arange(0, number, 2)
    factor = 2 / (1 - even**2)
    factor[[0, -1]] /= 2
    weight = np.cos(np.outer(colatitude, even)) @ factor
    weight[[0, -1]] /= 2
    return colatitude, weight


def _gauss_legendre(number: int) -> tuple[np.ndarray, np.ndarray]:
    """Gauss' weights at the zeros of the Legendre polynomial."""
    zeros, weight = leggauss(number)
    return np.arccos(zeros)[::-1], weight[::-1]


_GRIDS = {"equiangular": _equiangular, "Clenshaw-Curtis": _clenshaw_curtis, "Gauss-Legendre": _gauss_legendre}
