"""The elements that stand for all others where equivariance is measured."""

import pytest

from tests.spaces import ALL, LARGE, POINT, generated, generators, grid_elements, grid_generators


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", [*ALL, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in LARGE)])
def test_generators_make_all_elements_and_no_others(name):
    space = (ALL | LARGE)[name]()
    assert generated(generators(space)) == set(space.fibergroup.elements)
    assert generated([space.fibergroup.identity]) == {space.fibergroup.identity}
    if name not in POINT:
        assert generated(grid_generators(space)) == set(grid_elements(space))
