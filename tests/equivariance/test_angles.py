"""The error against the angle, and the images it is measured with."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from escnn import gspaces, nn

from escnn_attention import GroupSelfAttention, LiftingSelfAttention
from escnn_attention.equivariance.angles import equivariance_errors, rotate_images, rotations_of, smooth_images
from escnn_attention.models import EquivariantClassifier, InvariantLogits

QUARTERS = [0, 90, 180, 270, 360]


def lifting(gspace, fields=2):
    image = nn.FieldType(gspace, [gspace.trivial_repr])
    return LiftingSelfAttention(image, nn.FieldType(gspace, fields * [gspace.regular_repr]), 1, 5)


def classifier(order):
    gspace = gspaces.rot2dOnR2(order)
    first = lifting(gspace)
    return EquivariantClassifier(
        {"lifting": first, "attention": GroupSelfAttention(first.out_type, first.out_type, 1, 3)}, 3
    )


def convolutions(channels=1):
    return torch.nn.Sequential(torch.nn.Conv2d(channels, 4, 3, padding=1), torch.nn.ReLU())


def logits_of_convolutions():
    return torch.nn.Sequential(convolutions(), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())


@pytest.mark.parametrize("name", ["size", "number", "channels"])
def test_numbers_are_integers(name):
    for wrong, error in ((9.5, TypeError), (True, TypeError), (0, ValueError)):
        with pytest.raises(error, match=f"{name}: got {wrong}"):
            smooth_images(**{"size": 9, name: wrong})


def test_turns_of_groups():
    assert rotations_of(lifting(gspaces.rot2dOnR2(8))) == tuple(45.0 * i for i in range(8))
    assert rotations_of(lifting(gspaces.flip2dOnR2())) == (0.0,)
    assert rotations_of(classifier(2)) == (0.0, 180.0)
    assert rotations_of(convolutions()) == ()
    assert rotations_of(nn.ReLU(nn.FieldType(gspaces.rot2dOnR3(2), [gspaces.rot2dOnR3(2).regular_repr]))) == ()


@pytest.mark.parametrize("size", [9, 12])
def test_errors_vanish_at_the_turns_of_the_group_that_keep_the_grid(size):
    models = {"maps": lifting(gspaces.rot2dOnR2(4)).double(), "logits": classifier(4).double()}
    errors = equivariance_errors(models, angles=[*QUARTERS, 45], size=size)
    assert errors.angles.tolist() == [0, 45, 90, 180, 270, 360]
    for values in errors.errors.values():
        assert values[[0, 2, 3, 4, 5]].max() < 1e-12
        assert 1e-4 < values[1] < 1
    assert errors.interpolation[[0, 2, 3, 4, 5]].max() < 1e-12
    # A smaller group is exact at fewer angles.
    (half,) = equivariance_errors({"C2": classifier(2).double()}, angles=QUARTERS, size=size).errors.values()
    assert half[[0, 2, 4]].max() < 1e-12
    assert half[[1, 3]].min() > 1e-3


def test_networks_that_are_not_equivariant_are_caught():
    models = {"maps": convolutions(), "logits": logits_of_convolutions()}
    errors = equivariance_errors(models, angles=QUARTERS, size=12)
    for values in errors.errors.values():
        assert values[0] == 0
        assert values[1:4].min() > 1e-2
    assert errors.rotations == {"maps": (), "logits": ()}


def test_a_function_of_the_plane_has_the_error_of_interpolation_and_no_more():
    """The identity commutes with every turn: what is measured then is how maps are turned back."""
    errors = equivariance_errors({"identity": torch.nn.Identity()}, angles=[15, 45, 100], size=28)
    assert 1e-5 < errors.errors["identity"].max() < 1e-2
    assert 1e-5 < errors.interpolation.max() < 1e-2
    finer = equivariance_errors({"identity": torch.nn.Identity()}, angles=[15, 45, 100], size=56)
    assert (finer.errors["identity"] < errors.errors["identity"] / 4).all()


def test_the_formula():
    model = lifting(gspaces.rot2dOnR2(4)).double()
    size, angle, disc = 11, 30.0, 0.7
    (value,) = equivariance_errors({"": model}, angles=[angle], size=size, disc=disc).errors[""]
    with torch.no_grad():
        upright, turned = (
            model(model.in_type(smooth_images(size, a, number=4))).tensor.unflatten(1, (2, 4)).amax(2)
            for a in (0.0, angle)
        )
    axis = (np.arange(size) - (size - 1) / 2) / (size / 2)
    inside = np.hypot(axis[:, None], axis) <= disc
    difference = (rotate_images(turned, -angle) - upright).numpy()[..., inside]
    sizes = [np.linalg.norm(part.reshape(4, -1), axis=1) for part in (difference, upright.numpy()[..., inside])]
    assert value == pytest.approx(np.mean(sizes[0] / sizes[1]))


def test_layers_and_kinds_of_fields():
    space = gspaces.rot2dOnR2(4)
    scalar = nn.FieldType(space, [space.trivial_repr])
    mixed = nn.FieldType(space, [space.irrep(1), space.regular_repr, space.trivial_repr, space.quotient_repr(2)])
    model = LiftingSelfAttention(scalar, mixed, 1, 3, head_fields=4).double()
    assert equivariance_errors({"mixed": model}, angles=QUARTERS, size=9).errors["mixed"].max() < 1e-12

    network = classifier(4).double()
    inside = equivariance_errors({"net": network}, angles=[30], size=9, layer="stages.lifting")
    alone = equivariance_errors({"net": network.stages["lifting"]}, angles=[30], size=9)
    assert inside.errors["net"] == alone.errors["net"]
    fields = InvariantLogits(network, network.in_type, 3)
    assert equivariance_errors({"": fields}, angles=[30], size=9).errors[""] == pytest.approx(
        equivariance_errors({"": network}, angles=[30], size=9).errors[""]
    )


@pytest.mark.slow
def test_images_of_ones_own():
    images = torch.randn(3, 1, 8, 8)
    network = classifier(4)
    network.train()
    errors = equivariance_errors({"net": network}, images, angles=QUARTERS)
    assert errors.errors["net"].max() < 1e-5
    assert network.training
    # Images may have something else than zeros around them.
    white = torch.ones(1, 1, 8, 8)
    (constant,) = equivariance_errors({"": network}, white, angles=[30], background=1.0).errors.values()
    (framed,) = equivariance_errors({"": network}, white, angles=[30]).errors.values()
    assert constant < 1e-5 < 1e-3 < framed
    # By default the turns of all groups are among the angles, once.
    every = equivariance_errors({"C7": lifting(gspaces.rot2dOnR2(7)), "C4": network}, images[:1])
    assert len(every.angles) == 73 + 6
    assert np.isclose(every.angles[:, None], [360 / 7, 720 / 7], atol=1e-5).any(0).all()


def test_one_model_goes_by_its_class():
    model = lifting(gspaces.rot2dOnR2(4))
    one = equivariance_errors(model, angles=[30], size=9)
    by_name = equivariance_errors(torch.nn.ModuleDict({"LiftingSelfAttention": model}), angles=[30], size=9)
    assert one.errors == by_name.errors
    assert one.rotations == {"LiftingSelfAttention": (0.0, 90.0, 180.0, 270.0)}


def test_mistakes_are_named():
    network = classifier(4)
    for models, error, message in (
        ([network], TypeError, "models: got list, needed a torch.nn.Module or a mapping"),
        ({"net": 1}, TypeError, "models: got int for 'net'"),
        ({}, ValueError, "models: got none"),
    ):
        with pytest.raises(error, match=message):
            equivariance_errors(models)
    with pytest.raises(TypeError, match=r"size: got 9\.5"):
        equivariance_errors(network, size=9.5)
    for images, error, message in (
        (torch.randn(1, 1, 5, 6), ValueError, "square images"),
        (torch.randn(1, 2, 8, 8), ValueError, "images: got 2 channels, and 'net' takes 1"),
        ([1], TypeError, "images: got list"),
    ):
        with pytest.raises(error, match=message):
            equivariance_errors({"net": network}, images)
    for options, message in (
        ({"angles": []}, "angles"),
        ({"angles": [math.inf]}, "angles"),
        ({"angles": math.inf}, "angles: got inf"),
        ({"disc": 0}, "disc: got 0"),
        ({"disc": 1.5}, "disc: got 1.5"),
        ({"layer": "nothing"}, "has no module 'nothing'"),
        ({"size": 0}, "size: got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            equivariance_errors({"net": network}, **{"angles": [0], **options})
    space = gspaces.rot2dOnR2(4)
    vectors = nn.FieldType(space, [space.irrep(1)])
    with pytest.raises(ValueError, match=r"'v' takes .*needed scalar"):
        equivariance_errors({"v": GroupSelfAttention(vectors, vectors, 1, 3)})
    with pytest.raises(ValueError, match="'flat' gives shape"):
        equivariance_errors({"flat": torch.nn.Flatten(2)}, angles=[0])
    two = {"one": network, "two": convolutions(2)}
    with pytest.raises(RuntimeError):
        equivariance_errors(two, angles=[0])


def test_quarters_move_pixels_and_others_interpolate():
    images = torch.randn(2, 3, 7, 7)
    for quarters in range(-4, 5):
        assert torch.equal(rotate_images(images, 90 * quarters), images.rot90(quarters % 4, (-2, -1)))
    smooth = smooth_images(41)
    rotated = rotate_images(smooth, 30)
    # As escnn turns images.
    space = gspaces.rot2dOnR2(12)
    scalar = nn.FieldType(space, [space.trivial_repr])
    assert (scalar(smooth).transform(space.fibergroup.element(1)).tensor - rotated).abs().max() < 5e-2
    assert (smooth_images(41, 30) - rotated).abs().max() < 5e-3
    assert (smooth_images(41, -30) - rotated).abs().max() > 0.5
    around = rotate_images(torch.zeros(1, 9, 9), 45, background=2.0)
    assert (around[0, 0, 0], around[0, 4, 4]) == (pytest.approx(2.0, abs=0.3), pytest.approx(0.0, abs=1e-6))
    assert rotate_images(images, 30).dtype == images.dtype
    with pytest.raises(ValueError, match="square images"):
        rotate_images(torch.zeros(1, 4, 5), 30)


def test_smooth_images():
    images = smooth_images(33, number=2, channels=3)
    assert images.shape == (2, 3, 33, 33)
    assert images.dtype == torch.float64
    assert torch.equal(images, smooth_images(33, number=2, channels=3))
    assert not torch.allclose(images, smooth_images(33, number=2, channels=3, seed=1))
    # The same functions on a finer grid, whose points include those of the coarser one.
    assert torch.allclose(smooth_images(99)[..., 1::3, 1::3], smooth_images(33))
    assert (images[..., 0, :] == 0).all()
    assert 0.3 < images[..., 12:21, 12:21].std() < 2
    # Band-limited: next to nothing beyond twice the periods of its waves.
    spectrum = torch.fft.fft2(smooth_images(64)[0, 0]).abs().square()
    frequency = torch.fft.fftfreq(64, 1 / 64)
    high = frequency[:, None].square() + frequency.square() > 8**2
    assert spectrum[high].sum() < 1e-3 * spectrum.sum()
