"""Attention over samples of continuous fiber groups, on grids."""

import itertools
import math

import numpy as np
import pytest
import torch
from escnn import gspaces
from escnn.group import so3_group
from escnn.gspaces import no_base_space
from escnn.nn import FieldType

from escnn_attention import (
    GroupSelfAttention,
    Samples,
    TransformerBlock,
    equivariance_report,
)
from escnn_attention.equivariance.report import maps_grid
from escnn_attention.geometry.grid import Grid
from escnn_attention.groups.fibers import fibers, mass
from escnn_attention.groups.random_transformation import LieElement
from escnn_attention.nn.pointwise import FieldLinear, PoseFeedForward, PoseLinear, SiLU
from tests import spaces
from tests.layers import drawn


def vectors_and_tensors(gspace):
    """Scalars, all irreps up to the second and, where escnn has one, a band-limited regular field; out of order."""
    irreps = [r for r in gspace.fibergroup.irreps() if max(np.ravel(r.attributes.get("frequency", 1))) <= 2][:6]
    fields = [irreps[-1], gspace.trivial_repr, *irreps, irreps[1]]
    if hasattr(gspace.fibergroup, "bl_regular_representation"):
        fields.append(gspace.fibergroup.bl_regular_representation(1))
    return FieldType(gspace, fields)


SPACES = {
    "SO(2)": (lambda: gspaces.rot2dOnR2(-1), 6),
    "O(2)": (lambda: gspaces.flipRot2dOnR2(-1), 6),
    "O(2) about an odd axis": (lambda: gspaces.flipRot2dOnR2(-1, axis=0.3), 6),
    "SO(3)": (gspaces.rot3dOnR3, 12),
    "O(3)": (gspaces.flipRot3dOnR3, 24),
    "about an axis": (lambda: gspaces.rot2dOnR3(-1), 5),
    "cone": (lambda: gspaces.conicalOnR3(-1), 6),
    "dihedral": (lambda: gspaces.dihedralOnR3(-1), 6),
    "cylinder": (lambda: gspaces.cylindricalOnR3(-1), 6),
    "full cylinder": (lambda: gspaces.fullCylindricalOnR3(-1), 12),
}


def grid_of(gspace):
    return (3, 4) if gspace.dimensionality == 2 else (2, 3, 2)


def on_turned_grid(layer, x, element, *, matrix=None):
    """The layer on features whose grid is turned by an element, or by a matrix."""
    plain = layer.plain
    frame = torch.tensor(layer.space.basespace_action(element)) if matrix is None else matrix
    turned = layer.in_type(x).transform_fibers(element).tensor
    return plain.attend(turned, Grid(tuple(x.shape[2:]), plain.window, frame=frame))


def error(layer, x, element, **options):
    """The relative equivariance error for one element, on a grid that turns with it."""
    with torch.no_grad():
        expected = layer(layer.in_type(x)).transform_fibers(element).tensor
        return ((on_turned_grid(layer, x, element, **options) - expected).norm() / expected.norm()).item()


def sampled_layer(name, **options):
    make, number = SPACES[name]
    gspace = make()
    field_type = vectors_and_tensors(gspace)
    options = {"num_heads": 2, "head_fields": 2, "kernel_size": 3, "samples": number} | options
    layer = drawn(GroupSelfAttention(field_type, field_type, **options))
    return layer, torch.randn(1, field_type.size, *grid_of(gspace), dtype=torch.float64)


def some_elements(gspace, number=3):
    np.random.seed(0)
    return [gspace.fibergroup.sample() for _ in range(number)]


@pytest.mark.parametrize("encoding", ["mlp", "fourier", "rotary"])
@pytest.mark.slow
def test_the_error_falls_with_the_number_of_samples(encoding):
    """For any elements; the parameters are the same whatever the number of samples."""
    gspace = gspaces.rot2dOnR2(-1)
    field_type = vectors_and_tensors(gspace)
    x = torch.randn(1, field_type.size, 3, 3, dtype=torch.float64)
    reference, errors, outputs = None, [], []
    for number in (4, 8, 16, 32, 64):
        layer = GroupSelfAttention(field_type, field_type, 2, 3, head_fields=4, encoding=encoding, samples=number)
        reference = reference or layer.state_dict()
        layer.load_state_dict(reference)
        layer = layer.double().eval()
        elements = some_elements(gspace, 2)
        errors.append(max(error(layer, x, h) for h in elements))
        outputs.append(layer(field_type(x)).tensor.detach())
    assert all(after < 0.8 * before for before, after in itertools.pairwise(errors)), errors
    assert errors[0] > 1e-2
    assert errors[-1] < {"mlp": 1e-6, "fourier": 1e-3, "rotary": 1e-2}[encoding], errors
    # What is approached is one layer, and with a wrong action nothing is.
    assert (outputs[-2] - outputs[-1]).norm() < 5e-2 * outputs[-1].norm()
    turned_twice = torch.tensor(gspace.basespace_action(elements[0] @ elements[0]))
    assert error(layer, x, elements[0], matrix=turned_twice) > 0.1


def test_exact_for_the_polyhedron_whose_cosets_are_sampled():
    layer, x = sampled_layer("SO(3)", samples=Samples(24, "tetra"))
    tetrahedron = fibers(layer.space, Samples(12)).elements
    assert max(error(layer, x, h) for h in tetrahedron[::4]) < 1e-9
    assert error(layer, x, some_elements(layer.space, 1)[0]) > 1e-4


def test_the_error_falls_in_space():
    gspace = gspaces.rot3dOnR3()
    field_type = FieldType(gspace, [gspace.trivial_repr, gspace.irrep(1), gspace.irrep(2)])
    x = torch.randn(1, 9, 2, 2, 2, dtype=torch.float64)
    reference, errors = None, {}
    for samples in (4, 12, 24, 60, Samples(100)):
        layer = GroupSelfAttention(field_type, field_type, 2, head_fields=3, samples=samples, kernel_size=None)
        reference = reference or layer.state_dict()
        layer.load_state_dict(reference)
        errors[layer.samples.num_samples] = np.mean([error(layer.double().eval(), x, h) for h in some_elements(gspace)])
    assert errors[4] > errors[12] > errors[24] > 3 * errors[60], errors
    assert errors[60] < 0.1 * errors[4], errors


def by_definition(layer, x, elements, weights):
    """The formula written out, with escnn's matrices of every element."""
    core, gspace = layer.plain, layer.space
    heads, channels, count = layer.num_heads, layer.head_fields, len(elements)
    positions = Grid(tuple(x.shape[2:]), core.window)
    flat = x.flatten(2)

    def representation(field_type, h):
        blocks = [torch.tensor(np.asarray(r(h))) for r in field_type.representations]
        return torch.block_diag(*blocks)

    to_poses = core.project_in
    bias = torch.zeros(3 * heads * channels, dtype=torch.float64)
    bias[: len(to_poses.bias)] = to_poses.bias
    fields = torch.stack(
        [
            torch.einsum("fi,bin->bfn", to_poses.weight @ representation(layer.in_type, ~h), flat) + bias[:, None]
            for h in elements
        ]
    )
    q, v, k = fields.unflatten(2, (3, heads, channels)).unbind(2)  # S, B, M, C, N
    index = torch.arange(positions.num_positions)
    rows = positions.rows(index[:, None], index)
    out = torch.zeros(x.shape[0], layer.out_type.size, len(index), dtype=torch.float64)
    places = core.project_out.weight.unflatten(0, (heads, channels))
    for s, (h, weight) in enumerate(zip(elements, weights, strict=True)):
        # The positions and poses of all keys as h sees them.
        inverse = torch.tensor(gspace.basespace_action(~h))
        offset = core.encoding.offsets(positions.offsets @ inverse.T)[:, rows.clamp(min=0)]  # M, N, N, C
        relative = np.stack([np.asarray(gspace.basespace_action(~h @ other)).ravel() for other in elements])
        features = torch.tensor(math.sqrt(gspace.dimensionality) * relative)
        features = features[:, :2] if gspace.dimensionality == 2 else features
        pose = core.encoding.poses(features)  # M, S, C
        score = torch.einsum("bmcn,pbmck->bmnpk", q[s], k)
        score = score + torch.einsum("bmcn,mnkc->bmnk", q[s], offset)[:, :, :, None]
        score = score + torch.einsum("bmcn,mpc->bmnp", q[s], pose)[..., None]
        score = score / math.sqrt(channels) + torch.tensor(np.log(weights))[:, None]
        score = score.masked_fill((rows < 0)[None, None, :, None], -torch.inf)
        attention = score.flatten(3).softmax(-1).unflatten(3, (count, -1))
        head = torch.einsum("bmnpk,pbmck->bmcn", attention, v)
        back = torch.einsum("mci,oi->omc", places, representation(layer.out_type, h))
        out = out + mass(layer.out_type) / count * weight * torch.einsum("omc,bmcn->bon", back, head)
    constant = core.project_out.invariants @ core.project_out.bias
    return (out + constant[:, None]).unflatten(2, x.shape[2:])


CASES = {
    "SO(2)": (lambda: gspaces.rot2dOnR2(-1), Samples(5), 3),
    "SO(2), random samples": (lambda: gspaces.rot2dOnR2(-1), Samples(9, "rand"), None),
    "SO(3)": (gspaces.rot3dOnR3, Samples(12), None),
    "SO(3), weights that differ": (gspaces.rot3dOnR3, Samples(14), 3),
}


def case(name, **options):
    make, samples, kernel_size = CASES[name]
    gspace = make()
    in_type = FieldType(gspace, [gspace.irrep(1), gspace.trivial_repr, gspace.irrep(2), gspace.irrep(1)])
    out_type = FieldType(gspace, [gspace.trivial_repr, gspace.irrep(2), gspace.irrep(1)])
    options = {"head_fields": 3, "samples": samples} | options
    layer = drawn(GroupSelfAttention(in_type, out_type, 2, kernel_size, **options))
    shape = (3, 3) if gspace.dimensionality == 2 else (2, 2, 2)
    return layer, torch.randn(2, in_type.size, *shape, dtype=torch.float64)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.slow
def test_vectors_and_tensors_by_the_definition(name):
    layer, x = case(name)
    group = fibers(layer.space, layer.samples)
    expected = by_definition(layer, x, group.elements, group.weights)
    torch.testing.assert_close(layer(layer.in_type(x)).tensor, expected, atol=1e-9, rtol=1e-9)
    if group.log_measure is not None:
        ignored = by_definition(layer, x, group.elements, np.ones(group.order))
        assert (ignored - expected).norm() > 1e-3 * expected.norm()


@pytest.mark.parametrize("query", ["own", "all"])
@pytest.mark.parametrize("encoding", ["mlp", "separable", "fourier", "rotary", "absolute"])
def test_equals_the_layer_of_the_subgroup(query, encoding):
    """C8 and eight samples of SO(2): the same numbers from the same weights, and the table that the network makes."""
    plane = gspaces.rot2dOnR2(-1)
    in_type = FieldType(plane, [plane.irrep(1), plane.trivial_repr, plane.irrep(2)])
    out_type = FieldType(plane, [plane.irrep(1), plane.irrep(2), plane.trivial_repr])
    options = {"num_heads": 2, "kernel_size": 3, "head_fields": 4, "query": query, "encoding": encoding}
    continuous = drawn(GroupSelfAttention(in_type, out_type, samples=8, **options))
    types = [t.restrict(8) for t in (in_type, out_type)]
    finite = GroupSelfAttention(*types, **options).double().eval()
    state = dict(continuous.state_dict())
    core = continuous.plain
    table = core.encoding.poses(core.relative[0]).detach()
    table = table[..., -finite.plain.encoding.pose_embedding.shape[-1] :]
    state = {k: v for k, v in state.items() if "pose_network" not in k}
    state["plain.encoding.pose_embedding"] = table
    # What a sum over the poses weighs: |H| for a finite group, the degrees of freedom for samples.
    scale = mass(out_type) / 8
    state["plain.project_out.weight"] = scale ** (2 if query == "all" else 1) * state["plain.project_out.weight"]
    finite.load_state_dict(state)
    x = torch.randn(1, in_type.size, 4, 3, dtype=torch.float64)
    expected = finite(types[0](x)).tensor
    torch.testing.assert_close(continuous(in_type(x)).tensor, expected, atol=1e-11, rtol=1e-11)


def test_tables_of_samples_are_exact_and_in_no_state():
    layer, x = case("SO(3), weights that differ", samples=Samples(14, turn="random"))
    names = ("relative", "measure", "transformation", "columns")
    assert not any(name in key for key in layer.state_dict() for name in names)
    expected, relative = layer(layer.in_type(x)).tensor, layer.plain.relative
    single = layer.float()(layer.in_type(x.float())).tensor
    torch.testing.assert_close(single.double(), expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(layer.double().plain.relative, relative)


def test_maps_of_what_is_attended_to():
    layer, x = case("SO(3), weights that differ")
    group = fibers(layer.space, layer.samples)
    maps = layer.attention_maps(layer.in_type(x), [(0, 1, 1)], poses=[group.elements[2], 0])
    assert maps.shape == (2, 2, 2, 1, 1, 14, 2, 2, 2)
    torch.testing.assert_close(maps.sum(dim=(-4, -3, -2, -1)), torch.ones(2, 2, 2, 1, 1, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"(?s)poses: .*of the 14 samples"):
        layer.attention_maps(layer.in_type(x), [(0, 0, 0)], poses=[some_elements(layer.space, 1)[0]])


def element_of(gspace, drawn):
    """The same element of escnn's group."""
    angle = drawn.vector.numpy()
    name = type(gspace.fibergroup).__name__
    if name == "SO2":
        return gspace.fibergroup.element(float(angle[0]), "radians")
    if name == "O2":
        return gspace.fibergroup.element((drawn.component, 0.0), "radians") @ gspace.fibergroup.element(
            (0, float(angle[0])), "radians"
        )
    if name == "SO3":
        return gspace.fibergroup.element(angle, "EV")
    return gspace.fibergroup.element((drawn.component, angle), "EV")


@pytest.mark.parametrize(
    ("make", "number"),
    [
        (lambda: gspaces.rot2dOnR2(-1), 5),
        (lambda: gspaces.flipRot2dOnR2(-1), 4),
        (gspaces.rot3dOnR3, 14),
        (gspaces.flipRot3dOnR3, 8),
        (lambda: gspaces.conicalOnR3(-1), 4),
    ],
    ids=["SO(2)", "O(2)", "SO(3)", "O(3)", "cone"],
)
def test_turned_samples(make, number):
    """A turned layer is the layer of turned samples, and the turn goes along with the input."""
    gspace = make()
    irreps = [r for r in gspace.fibergroup.irreps() if r.attributes["frequency"] <= 2]
    field_type = FieldType(gspace, [irreps[-1], *irreps])
    layer = drawn(
        GroupSelfAttention(field_type, field_type, 2, 3, head_fields=2, samples=Samples(number, turn="random"))
    )
    core, shape = layer.plain, grid_of(gspace)
    x = torch.randn(1, field_type.size, *shape, dtype=torch.float64)
    positions = Grid(shape, core.window)
    for _ in range(2):
        element = core.transformation.draw()
        g = element_of(gspace, element)
        matrix = core.transformation.space(element)
        torch.testing.assert_close(matrix, torch.tensor(np.asarray(gspace.basespace_action(g))), atol=1e-9, rtol=0)
        torch.testing.assert_close(core.transformation.space(element, inverse=True), matrix.T, atol=1e-12, rtol=0)
        turned = layer.in_type(x).transform_fibers(g).tensor
        torch.testing.assert_close(core.transformation.inputs(x, element), turned, atol=1e-9, rtol=1e-9)
        torch.testing.assert_close(core.transformation.inputs(turned, element, inverse=True), x, atol=1e-9, rtol=1e-9)
        # Samples g h_s on what g did to x: everything is turned, and so is the output.
        y = core.attend(turned, Grid(shape, core.window, frame=matrix), element)
        expected = layer(layer.in_type(x)).transform_fibers(g).tensor
        torch.testing.assert_close(y, expected, atol=1e-9, rtol=1e-8)
        if number < 8 and gspace.dimensionality == 2 and type(gspace.fibergroup).__name__ == "SO2":
            elements = [g @ h for h in fibers(gspace, layer.samples).elements]
            torch.testing.assert_close(
                core.attend(x, positions, element),
                by_definition(layer, x, elements, np.ones(number)),
                atol=1e-9,
                rtol=1e-9,
            )
        # The negative control: another element does not.
        other = core.attend(turned, Grid(shape, core.window, frame=matrix), core.transformation.draw())
        assert (other - expected).norm() > 1e-6 * expected.norm()


def test_turns_are_drawn_in_training_with_the_generator_of_torch(without_escnn):
    layer, x = case("SO(3)", samples=Samples(12, turn="random"))
    x = layer.in_type(x)
    still = layer(x).tensor
    torch.testing.assert_close(layer(x).tensor, still, atol=0, rtol=0)
    layer.train()
    outputs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        outputs.append(layer(x).tensor)
    torch.testing.assert_close(outputs[0], outputs[1], atol=0, rtol=0)
    assert not torch.equal(outputs[0], outputs[2])
    assert not torch.equal(outputs[0], still)
    assert (without_escnn(layer.export().train(), x.tensor) - still).abs().max() > 1e-6
    fixed, _ = case("SO(3)")
    assert fixed.plain.transformation is None


@pytest.mark.slow
def test_draws_are_uniform():
    """Means of the matrices of a random element vanish, squares are those of the Haar measure."""
    layer, _ = case("SO(3)", samples=Samples(12, turn="random"))
    torch.manual_seed(0)
    matrices = torch.stack([layer.plain.transformation.space(layer.plain.transformation.draw()) for _ in range(1000)])
    assert matrices.mean(0).abs().max() < 0.08
    assert (matrices.square().mean(0) - 1 / 3).abs().max() < 0.05
    assert (matrices.diagonal(dim1=1, dim2=2).sum(1).square().mean() - 1).abs() < 0.2  # the character of an irrep
    plain = layer.plain.transformation
    halves = LieElement(torch.tensor([0.0, 0.0, math.pi], dtype=torch.float64))
    torch.testing.assert_close(plain.space(halves).diagonal().sum(), torch.tensor(-1.0, dtype=torch.float64))


def test_on_a_point():
    gspace = no_base_space(so3_group(2))
    field_type = FieldType(gspace, [gspace.irrep(1), gspace.trivial_repr, gspace.irrep(2)])
    layer = drawn(
        GroupSelfAttention(field_type, field_type, head_fields=3, samples=Samples(12, turn="random"), kernel_size=None)
    )
    x = field_type(torch.randn(2, 9, dtype=torch.float64))
    for h in fibers(gspace, layer.samples).elements[1:4]:
        torch.testing.assert_close(
            layer(x.transform_fibers(h)).tensor, layer(x).transform_fibers(h).tensor, atol=1e-10, rtol=1e-10
        )
    layer.train()(x)


@pytest.mark.parametrize("name", ["SO(2)", "O(2)", "SO(3)", "full cylinder"])
def test_linear_maps_and_networks_between_fields(name):
    make, number = SPACES[name]
    gspace = make()
    in_type = vectors_and_tensors(gspace)
    out_type = FieldType(gspace, in_type.representations[::-1][:4])
    x = in_type(torch.randn(2, in_type.size, *grid_of(gspace), dtype=torch.float64))
    samples = [h for h in fibers(gspace, Samples(number)).elements if h != gspace.fibergroup.identity]
    linear = drawn(FieldLinear(in_type, out_type))
    network = drawn(PoseFeedForward(in_type, out_type, 3, samples=number))
    finite = network.export()
    for module, elements in ((linear, some_elements(gspace)), (network, samples[:3])):
        y = module(x)
        for h in elements:
            expected = y.transform_fibers(h).tensor
            torch.testing.assert_close(module(x.transform_fibers(h)).tensor, expected, atol=1e-8, rtol=1e-8)
            assert (y.tensor - expected).norm() > 1e-3 * expected.norm()
    torch.testing.assert_close(finite(x.tensor), network(x).tensor, atol=0, rtol=0)
    turned = drawn(PoseFeedForward(in_type, out_type, 3, samples=Samples(number, turn="random")))
    assert not torch.equal(turned.train()(x).tensor, turned.eval()(x).tensor)


def test_linear_maps_are_all_there_are():
    """As many parameters as a group has maps between two types."""
    plane, volume = gspaces.rot2dOnR2(-1), gspaces.rot3dOnR3()
    for gspace, numbers in ((plane, 2), (volume, 1)):
        one, two = FieldType(gspace, 2 * [gspace.irrep(1)]), FieldType(gspace, 3 * [gspace.irrep(1)])
        layer = FieldLinear(one, two)
        assert sum(p.numel() for p in layer.parameters()) == 6 * numbers
    c4 = gspaces.rot2dOnR2(4)
    regular = spaces.regular(c4, 2)
    assert sum(p.numel() for p in FieldLinear(regular, regular, bias=False).parameters()) == 2 * 2 * 4
    assert spaces.grid_error(drawn(FieldLinear(regular, regular)), spaces.random_field(regular, 3, 3)) < 1e-12


def test_a_network_of_a_finite_group_is_two_linear_maps():
    gspace = gspaces.rot2dOnR2(4)
    in_type, out_type, hidden = spaces.mixed(gspace), spaces.mixed(gspace), spaces.regular(gspace, 3)
    network = drawn(PoseFeedForward(in_type, out_type, 3))
    expand, contract = PoseLinear(in_type, hidden).double(), PoseLinear(hidden, out_type).double()
    expand.plain.projection.load_state_dict(network.plain.expand.state_dict())
    contract.plain.projection.load_state_dict(network.plain.contract.state_dict())
    x = spaces.random_field(in_type, 3, 3)
    torch.testing.assert_close(network(x).tensor, contract(SiLU(hidden)(expand(x))).tensor)
    torch.manual_seed(3)
    drawn_alone = PoseFeedForward(in_type, out_type, 3)
    torch.manual_seed(3)
    first, second = PoseLinear(in_type, hidden), PoseLinear(hidden, out_type)
    torch.testing.assert_close(drawn_alone.plain.expand.weight, first.plain.projection.weight)
    torch.testing.assert_close(drawn_alone.plain.contract.weight, second.plain.projection.weight)


@pytest.mark.parametrize("name", ["SO(2)", "SO(3)"])
def test_a_transformer_block(name):
    make, number = SPACES[name]
    gspace = make()
    in_type = vectors_and_tensors(gspace)
    out_type = FieldType(gspace, [gspace.irrep(1), gspace.irrep(2), gspace.trivial_repr])
    x = torch.randn(2, in_type.size, *[3] * gspace.dimensionality, dtype=torch.float64)
    for other in in_type, out_type:
        block = TransformerBlock(in_type, other, 2, 3, norm="pre", head_fields=2, dropout=0.1, samples=number)
        block = drawn(block)
        y = block(in_type(x))
        torch.testing.assert_close(block.export()(x), y.tensor)
    # A quarter of a turn is an element of both grids.
    quarter = gspaces.rot2dOnR2(-1) if name == "SO(2)" else gspaces.rot3dOnR3()
    block = drawn(
        TransformerBlock(
            in_type, out_type, 2, 3, norm="pre", head_fields=2, samples=8 if name == "SO(2)" else Samples(12)
        )
    )
    elements = [h for h in fibers(quarter, block.attention.samples).elements if maps_grid(gspace, h)]
    assert len(elements) > 3
    for h in elements[1:4]:
        x_turned, expected = in_type(x).transform(h), block(in_type(x)).transform(h).tensor
        torch.testing.assert_close(block(x_turned).tensor, expected, atol=1e-8, rtol=1e-8)
    block.train()(in_type(x)).tensor.sum().backward()


@pytest.mark.slow
def test_the_report_says_what_is_exact():
    gspace = gspaces.rot2dOnR2(-1)
    field_type = FieldType(gspace, [gspace.irrep(1), gspace.trivial_repr])
    layer = GroupSelfAttention(field_type, field_type, kernel_size=3, head_fields=2, samples=8)
    report = equivariance_report(layer, (1, 3, 5, 5))
    assert sum(row.exact for row in report.rows) == 4
    assert report.relative_error < 1e-10
    assert any(not row.exact for row in report.rows)
    assert "interpolated" in str(report)
    of_three = GroupSelfAttention(field_type, field_type, kernel_size=3, head_fields=2, samples=3)
    assert equivariance_report(of_three, (1, 3, 5, 5)).relative_error > 1e-4


def test_windows_are_discs():
    layer, _ = sampled_layer("SO(2)", samples=4)
    assert layer.plain.window.shape == "disc"
    with pytest.raises(ValueError, match='window: got "square"'):
        sampled_layer("SO(2)", samples=4, window="square")


def test_representation_says_what_was_sampled():
    layer, _ = sampled_layer("SO(2)", samples=4)
    assert "samples=Samples(num_samples=4, kind='auto', turn='fixed')" in repr(layer)
    assert "samples" not in repr(GroupSelfAttention(*2 * [spaces.regular(gspaces.rot2dOnR2(4), 2)], kernel_size=3))


PLANE = gspaces.rot2dOnR2(-1)
VECTORS, SCALARS = FieldType(PLANE, [PLANE.irrep(1)]), spaces.scalars(PLANE, 2)
FINITE = spaces.regular(gspaces.rot2dOnR2(4), 1)
UNEQUAL = {"samples": Samples(9, "rand"), "head_fields": 2}


@pytest.mark.parametrize(
    ("layer", "types", "options", "exception", "message"),
    [
        (GroupSelfAttention, VECTORS, {}, NotImplementedError, r"gspace: .* continuous.* samples=8 in the plane"),
        (GroupSelfAttention, VECTORS, {"samples": "8"}, TypeError, "samples: got '8'"),
        (
            GroupSelfAttention,
            VECTORS,
            {"samples": 8, "projection": "pointwise"},
            ValueError,
            "needs regular fields only",
        ),
        (GroupSelfAttention, VECTORS, UNEQUAL | {"query": "all"}, ValueError, 'query: "all" .* different weights'),
        (GroupSelfAttention, FINITE, {"samples": 4}, ValueError, "samples: the fiber group C4 is finite"),
        (TransformerBlock, VECTORS, {"norm": "pre"}, NotImplementedError, "samples=8"),
        (TransformerBlock, VECTORS, {"samples": 8}, ValueError, 'norm="gsa"'),
        (TransformerBlock, SCALARS, {"samples": 8}, ValueError, 'norm: got "gsa".* needed "pre"'),
    ],
)
def test_errors(layer, types, options, exception, message):
    with pytest.raises(exception, match=message):
        layer(types, types, kernel_size=None, **options)
    with pytest.raises(NotImplementedError, match="samples=8"):
        PoseFeedForward(VECTORS, VECTORS)
