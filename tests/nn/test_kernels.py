import numpy as np
import pytest
import torch
from escnn import gspaces
from escnn.nn import R2Conv, R3Conv

from escnn_attention.groups.fibers import fibers
from escnn_attention.nn.kernels import complete_basis, kernel_orbits, pose_kernel
from tests import spaces

C4 = gspaces.rot2dOnR2(4)

SPACES = spaces.PLANE | {n: spaces.VOLUME[n] for n in ("trivial 3D", "mirror", "C4 3D", "C3 3D", "octahedral")}


def types_of(gspace, in_poses, out_poses, fields=(1, 1)):
    make = [spaces.regular if n > 1 else spaces.scalars for n in (in_poses, out_poses)]
    return make[0](gspace, fields[0]), make[1](gspace, fields[1])


def pairs_of_poses(gspace):
    order = fibers(gspace).order
    return {(o, i) for o in (1, order) for i in (1, order)}


def filter_of(kernel):
    """``(out, in, *kernel)``, as PyTorch's convolutions have it."""
    return kernel.flatten(0, 1).flatten(1, 2)


def distance(convolution, kernel):
    """How far a kernel is from the span of the basis of a convolution between single fields, relative to its norm."""
    expand = convolution.basisexpansion
    elements = torch.stack([expand(w).flatten() for w in torch.eye(expand.dimension())]).double()
    kernel = kernel.detach().double().flatten()
    return (kernel - elements.T @ (torch.linalg.pinv(elements.T, rtol=1e-6) @ kernel)).norm() / kernel.norm()


# ----------------------------------------------------------------------------------------------- the complete basis


def sizes_of_groups():
    for name in ("flip", "C2", "C4", "D4"):
        for size in range(1, 8):
            slow = size > (3 if name == "D4" else 5)
            yield pytest.param(name, size, marks=[pytest.mark.exhaustive] if slow else [])


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("name", "size"), list(sizes_of_groups()))
def test_the_basis_has_the_rank_of_all_equivariant_kernels(name, size):
    gspace = spaces.PLANE[name]()
    for out_poses, in_poses in pairs_of_poses(gspace):
        number = kernel_orbits(gspace, out_poses, in_poses, size).max() + 1
        if in_poses > 1 and out_poses > 1:
            assert number == in_poses * size**2
        convolution = R2Conv(
            *types_of(gspace, in_poses, out_poses), size, bias=False, initialize=False, **complete_basis(size, 2)
        )
        expand = convolution.basisexpansion
        elements = torch.func.vmap(expand)(torch.eye(expand.dimension())).flatten(1).double()
        squares = torch.linalg.eigvalsh(elements @ elements.T)
        assert (squares > 1e-4 * squares.max()).sum() == number
        assert (squares > 1e-10 * squares.max()).sum() == number  # the rest is rounding


@pytest.mark.sampled(3)
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", ["trivial 3D", "mirror", "C4 3D"])
@pytest.mark.slow
def test_the_basis_is_complete_in_space(name, size):
    gspace = spaces.VOLUME[name]()
    order = fibers(gspace).order
    for out_poses, in_poses in ((order, order), (order, 1)):
        convolution = R3Conv(*types_of(gspace, in_poses, out_poses), size, initialize=False, **complete_basis(size, 3))
        kernel = filter_of(pose_kernel(gspace, 1, out_poses, 1, in_poses, size, gain=1.0)())
        assert distance(convolution, kernel) < 1e-4


def test_the_defaults_of_escnn_are_not_complete():
    """The negative control, and the reason for the function."""
    fields = spaces.regular(C4, 1)
    assert R2Conv(fields, fields, 3, initialize=False).basisexpansion.dimension() == 24
    for size in (3, 4, 5, 7):
        kernel = filter_of(pose_kernel(C4, 1, 4, 1, 4, size, gain=1.0)())
        assert distance(R2Conv(fields, fields, size, initialize=False), kernel) > 0.01


def test_an_empty_basis_is_refused():
    with pytest.raises(ValueError, match=r"kernel_size: .*is empty"):
        pose_kernel(gspaces.rot2dOnR2(8), 1, 8, 1, 8, 2, gain=1.0)


# ------------------------------------------------------------------------------------------- kernels between poses


def equivariance_error(gspace, kernel, in_poses, out_poses, fields):
    in_type, out_type = types_of(gspace, in_poses, out_poses, fields)
    convolve = [torch.nn.functional.conv2d, torch.nn.functional.conv3d][gspace.dimensionality - 2]
    x = spaces.random_field(in_type, *[4] * gspace.dimensionality)
    return spaces.grid_error(lambda x: out_type(convolve(x.tensor, kernel)), x)


def test_a_kernel_that_is_not_turned_is_found_out():
    """The negative control."""
    kernel = filter_of(pose_kernel(C4, 2, 4, 1, 4, 3, gain=1.0).double()())
    assert equivariance_error(C4, kernel, 4, 4, (1, 2)) < 1e-12
    assert equivariance_error(C4, kernel.flip(-1), 4, 4, (1, 2)) > 0.1


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_weights_are_the_kernel_of_the_first_pose(size):
    """The published layout: pose i turns ψ by i quarters, and input pose j is seen from it as j - i."""
    kernel = pose_kernel(C4, 2, 4, 3, 4, size, gain=1.0)
    psi = kernel.weight.unflatten(2, (4, size, size))
    lifting = pose_kernel(C4, 2, 4, 3, 1, size, gain=1.0)
    for i in range(4):
        turned = lifting.weight.unflatten(2, (size, size)).rot90(i, (-2, -1))
        assert torch.equal(lifting()[:, i, :, 0], turned)
        for j in range(4):
            assert torch.equal(kernel()[:, i, :, j], psi[:, :, (j - i) % 4].rot90(i, (-2, -1)))


@pytest.mark.parametrize("make", [lambda: gspaces.flipRot2dOnR2(4), gspaces.octaOnR3, gspaces.mirOnR3])
def test_weights_are_what_the_identity_sees(make):
    gspace = make()
    order = fibers(gspace).order
    e = fibers(gspace).index(gspace.fibergroup.identity)
    size = (3,) * gspace.dimensionality
    kernel = pose_kernel(gspace, 1, order, 1, order, 3, gain=1.0)
    assert torch.equal(kernel()[0, e, 0], kernel.weight.view(order, *size))
    for out_poses, in_poses in ((order, 1), (1, order)):
        kernel = pose_kernel(gspace, 1, out_poses, 1, in_poses, 3, gain=1.0)
        seen = kernel()[0, e, 0, 0] if out_poses > 1 else kernel()[0, 0, 0, e]
        assert torch.equal(seen, kernel.weight.view(size))


def test_maps_without_places_are_group_matrices():
    gspace = gspaces.flipRot2dOnR2(3)
    table = fibers(gspace).quotient
    kernel = pose_kernel(gspace, 2, 6, 3, 6, None, gain=1.0)
    assert np.array_equal(kernel.orbits, table)
    assert kernel().shape == (2, 6, 3, 6)
    assert torch.equal(kernel()[1, :, 2], kernel.weight[1, 2][torch.as_tensor(table)])


@pytest.mark.parametrize("basis", ["complete", "bandlimited"])
@pytest.mark.parametrize("name", ["C4", "C8"])
def test_drawn_kernels_have_the_gain(name, basis):
    gspace = spaces.PLANE[name]()
    kernel = pose_kernel(gspace, 300, fibers(gspace).order, 2, fibers(gspace).order, 3, basis=basis, gain=2.0)()
    assert abs(kernel.flatten(2).square().sum(-1).mean().item() / 2.0 - 1) < 0.15


def test_the_state_holds_the_basis():
    gspace = gspaces.rot2dOnR2(8)
    source, copy = (pose_kernel(gspace, 1, 8, 1, 8, 3, gain=1.0) for _ in range(2))
    assert set(source.state_dict()) == {"weight", "basis"}
    copy.basis.zero_()
    copy.load_state_dict(source.state_dict())
    assert torch.equal(copy(), source())
    assert set(pose_kernel(C4, 1, 4, 1, 4, 3, gain=1.0).state_dict()) == {"weight"}


def test_the_precision_of_other_convolutions_does_not_matter():
    """escnn gives all convolutions that are alike one basis, which changes its precision with any of them."""
    gspace = gspaces.rot2dOnR2(8)
    expected = pose_kernel(gspace, 1, 8, 1, 8, 3, gain=1.0)
    fields = spaces.regular(gspace, 1)
    other = R2Conv(fields, fields, 3, bias=False, initialize=False)
    try:
        other.double()
        found = pose_kernel(gspace, 1, 8, 1, 8, 3, gain=1.0)
    finally:
        other.float()
    assert found.basis.dtype == torch.float32
    torch.testing.assert_close(found.basis, expected.basis, atol=0, rtol=0)
