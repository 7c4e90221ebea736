import copy
import pickle

import numpy as np
import pytest
import torch
from escnn import group, gspaces, nn

from escnn_attention import FieldLayerNorm, GroupSelfAttention, LiftingSelfAttention, TransformerBlock
from tests import spaces
from tests.test_copies import saved


def product_space():
    """escnn's products of groups cannot be hashed."""
    return gspaces.no_base_space(group.direct_product(group.dihedral_group(3), group.cyclic_group(2)))


GSPACES = spaces.ALL | {
    "SO(2)": gspaces.rot2dOnR2,
    "O(2)": gspaces.flipRot2dOnR2,
    "SO(3)": gspaces.rot3dOnR3,
    "a product": product_space,
    "a double": lambda: gspaces.no_base_space(group.double_group(group.cyclic_group(3))),
}
COPIES = {
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "deepcopy": copy.deepcopy,
    "torch": saved,
}
copies = pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
every_gspace = pytest.mark.parametrize(
    "make",
    [
        *(pytest.param(make, id=name) for name, make in GSPACES.items()),
        pytest.param(gspaces.fullOctaOnR3, id="full octahedral", marks=pytest.mark.exhaustive),  # built for seconds
    ],
)


def representations(gspace):
    """One of each way escnn has to make them."""
    irreps = gspace.fibergroup.irreps()
    second = irreps[min(1, len(irreps) - 1)]
    made = [gspace.trivial_repr, irreps[-1], second.tensor(second), group.directsum([*irreps[:2], irreps[-1]])]
    basis = np.triu(np.ones((irreps[-1].size,) * 2))
    made.append(group.change_basis(irreps[-1], basis, name="oblique", supported_nonlinearities=["norm"]))
    if not gspace.fibergroup.continuous:
        made.append(gspace.regular_repr)
    if isinstance(gspace.fibergroup, group.CyclicGroup) and gspace.fibergroup.order() % 2 == 0:
        made += [gspace.quotient_repr(2), gspace.induced_repr(2, group.cyclic_group(2).irrep(1))]
    if gspace.fibergroup == group.dihedral_group(4):
        made += [gspace.quotient_repr((0, 2)), gspace.induced_repr((None, 4), group.cyclic_group(4).irrep(1))]
    return made


def same(a, b):
    """What escnn's equality leaves out counts too."""
    assert b == a
    assert b.name == a.name
    assert b.supported_nonlinearities == a.supported_nonlinearities
    assert b.irreps == a.irreps
    np.testing.assert_array_equal(b.change_of_basis, a.change_of_basis)
    np.testing.assert_array_equal(b.change_of_basis_inv, a.change_of_basis_inv)
    for g in list(a.group.testing_elements())[:6]:
        np.testing.assert_array_equal(b(g), a(g))


@copies
@pytest.mark.sampled(10)
@every_gspace
def test_types_are_copied_by_what_they_are(make, copied):
    gspace = make()
    field_type = nn.FieldType(gspace, representations(gspace))
    new_space, new_type = copied((gspace, field_type))
    assert new_space == gspace
    assert new_space.name == gspace.name
    assert new_type == field_type
    if gspace.dimensionality:  # escnn can hash no others
        assert (hash(new_space), hash(new_type)) == (hash(gspace), hash(field_type))
    assert new_type is not field_type
    # Groups are singletons, and a copy must not make a second one.
    assert new_type.fibergroup is gspace.fibergroup
    if gspace.dimensionality:
        same(gspace.basespace_action, new_space.basespace_action)
    for old, new in zip(field_type.representations, new_type.representations, strict=True):
        same(old, new)


@copies
@pytest.mark.sampled
@every_gspace
def test_elements_are_copied(make, copied):
    elements = list(make().fibergroup.testing_elements())[:10]
    for old, new in zip(elements, copied(elements), strict=True):
        assert new == old
        assert new @ ~old == old.group.identity


@copies
def test_axes_of_reflections_are_kept(copied):
    for axis in 0.0, 0.3, 1.2:
        gspace = gspaces.flipRot2dOnR2(3, axis=axis)
        new = copied(gspace)
        assert new == gspace
        assert new != gspaces.flipRot2dOnR2(3, axis=axis + 0.2)
        for g in gspace.fibergroup.elements:
            np.testing.assert_array_equal(new.basespace_action(g), gspace.basespace_action(g))


@pytest.fixture(scope="module")
def networks():
    """Modules with inputs."""
    made = []
    for gspace in gspaces.flipRot2dOnR2(3, axis=0.3), gspaces.rot2dOnR2(4):
        image, hidden = spaces.scalars(gspace, 3), spaces.regular(gspace, 4)
        vectors = nn.FieldType(gspace, [gspace.fibergroup.irreps()[-1]])
        network = nn.SequentialModule(
            nn.R2Conv(image, hidden, 3, padding=1),
            nn.InnerBatchNorm(hidden),
            nn.ReLU(hidden),
            GroupSelfAttention(hidden, hidden, 2, 3, query="all"),
            TransformerBlock(hidden, hidden, 2, 3),
            FieldLayerNorm(hidden),
            nn.SequentialModule(GroupSelfAttention(hidden, vectors, head_fields=2, kernel_size=None)),
        )
        made.append((network, image, (5, 5)))
    for gspace, space in (gspaces.octaOnR3(), (3, 3, 3)), (product_space(), ()), (gspaces.conicalOnR3(4), (3, 3, 3)):
        image, hidden = spaces.scalars(gspace, 2), spaces.regular(gspace, 2)
        kernel_size = 3 if space else None
        network = nn.SequentialModule(
            LiftingSelfAttention(image, hidden, 2, kernel_size),
            GroupSelfAttention(hidden, spaces.mixed(gspace), kernel_size=kernel_size, encoding="fourier"),
        )
        made.append((network, image, space))
    with torch.no_grad():  # what escnn's convolutions keep in eval mode can then be copied
        return [(network.eval(), torch.randn(2, image.size, *space)) for network, image, space in made]


@copies
@pytest.mark.slow
def test_networks_are_copied_and_interoperate(copied, networks):
    with torch.no_grad():
        for network, tensor in networks:
            new = copied(network)
            expected = network(network.in_type(tensor))
            got = new(network.in_type(tensor))  # a tensor of the original type goes through the copy
            assert got.type == expected.type
            torch.testing.assert_close(got.tensor, expected.tensor, rtol=0, atol=0)
            torch.testing.assert_close(network(new.in_type(tensor)).tensor, expected.tensor, rtol=0, atol=0)
            (got + expected).tensor.sum()
            # The parameters are copies.
            next(new.parameters()).add_(1)
            torch.testing.assert_close(network(network.in_type(tensor)).tensor, expected.tensor, rtol=0, atol=0)


LOAD = """
import sys, torch
import escnn_attention
for network, types, tensor, expected in torch.load(sys.argv[1], weights_only=False):
    with torch.no_grad():
        got = network(types[0](tensor))
        assert got.type == types[1], (got.type, types[1])
        torch.testing.assert_close(got.tensor, expected)
    print(types[1].gspace)
"""


@pytest.mark.slow
def test_networks_are_loaded_by_another_process(networks, run_python, tmp_path):
    saved = []
    with torch.no_grad():
        for network, tensor in networks:
            types = network.in_type, network[len(network) - 1].out_type
            saved.append((network, types, tensor, network(network.in_type(tensor)).tensor))
    torch.save(saved, tmp_path / "networks.pt")
    printed = run_python(LOAD, tmp_path / "networks.pt").splitlines()
    names = [str(types[1].gspace) for _, types, _, _ in saved]
    assert [line for line in printed if line in names] == names
