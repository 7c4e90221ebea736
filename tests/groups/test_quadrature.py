"""The weights of samples."""

import numpy as np
import pytest

from escnn_attention.groups.fibers import fibers
from escnn_attention.groups.representations import faithful, irreps_of, is_subgroup, matrices_of
from tests.groups.cases import EXACT


def largest_mean(gspace, samples, frequency):
    """The largest mean of a matrix element of an irrep of this frequency other than the trivial one."""
    tables = fibers(gspace, samples)
    means = [
        np.abs(np.einsum("s,sij->ij", tables.weights, matrices_of(irrep, tables.elements))).max() / tables.order
        for irrep in irreps_of(gspace.fibergroup, frequency)
        if not irrep.is_trivial()
    ]
    return max(means, default=0.0)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("make", "samples", "frequency"), EXACT.values(), ids=EXACT)
def test_irreps_integrate_to_zero_up_to_a_frequency(make, samples, frequency):
    gspace = make()
    assert max(largest_mean(gspace, samples, f) for f in range(frequency + 1)) < 1e-9
    assert max(largest_mean(gspace, samples, f) for f in range(frequency + 1, frequency + 3)) > 1e-2
    weights = fibers(gspace, samples).weights
    assert weights.min() >= 0
    assert weights.sum() == pytest.approx(len(weights))


@pytest.mark.parametrize("name", ["spiral", "hopf", "random rotations", "random in O(2)"])
def test_equal_weights_would_not_do(name):
    make, samples, frequency = EXACT[name]
    tables = fibers(make(), samples)
    assert not is_subgroup(matrices_of(faithful(make().fibergroup), tables.elements))
    assert tables.log_measure is not None
    irreps = [i for f in range(frequency + 1) for i in irreps_of(make().fibergroup, f) if not i.is_trivial()]
    assert max(np.abs(matrices_of(irrep, tables.elements).mean(0)).max() for irrep in irreps) > 1e-3


@pytest.mark.parametrize("name", ["SO(2)", "O(2)", "cube", "O(3)", "cylinder", "full cylinder"])
def test_subgroups_weigh_alike(name):
    make, samples, _ = EXACT[name]
    tables = fibers(make(), samples)
    assert (tables.weights == 1).all()
    assert tables.log_measure is None
    index = set(tables.elements)
    assert all(~a @ b in index for a in tables.elements[:5] for b in tables.elements[-5:])
