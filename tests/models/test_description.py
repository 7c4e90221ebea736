import json

import numpy as np
import pytest
import torch
from escnn import group, gspaces, nn

from escnn_attention import (
    ConvolutionalEncoding,
    FourierEncoding,
    LiftedMotion,
    LogPolar,
    MLPEncoding,
    Offset,
    Pair,
    PairKernel,
    QuadraticEncoding,
    RotaryEncoding,
    Samples,
    SeparableEncoding,
    encodings,
    sequence_space,
    space_time,
    tetraOnR3,
)
from escnn_attention.models import HybridNet
from escnn_attention.models.description import DescriptionError, build, class_path, describe

SPACES = {
    "flip2dOnR2": [{}, {"axis": 0.0}],
    "flipRot2dOnR2": [{"N": 4}, {"N": 3, "axis": 0.1}, {}],
    "rot2dOnR2": [{"N": 8}, {}],
    "trivialOnR2": [{}],
    "conicalOnR3": [{"n": 4}],
    "cylindricalOnR3": [{"n": 4}],
    "dihedralOnR3": [{"n": 3}],
    "fullCylindricalOnR3": [{"n": 2}],
    "invOnR3": [{}],
    "mirOnR3": [{}],
    "octaOnR3": [{}],
    "rot2dOnR3": [{"n": 4}],
    "rot3dOnR3": [{}],
    "trivialOnR3": [{}],
}


def by_json(value):
    return json.loads(json.dumps(value, allow_nan=False))


@pytest.mark.parametrize(("name", "arguments"), [(name, a) for name, each in SPACES.items() for a in each])
def test_gspaces_are_described_by_escnn_names(name, arguments):
    space = getattr(gspaces, name)(**arguments)
    described = by_json(describe(space))
    assert described["class_path"] == f"escnn.gspaces.{name}"
    assert build(described) == space


def test_the_tetrahedral_space_is_built_by_its_function():
    """As configurations of trainings name it."""
    described = by_json(describe(tetraOnR3()))
    assert build(described) == build({"class_path": "escnn_attention.tetraOnR3"}) == tetraOnR3()


GROUPS = [
    lambda: group.cyclic_group(8),
    lambda: group.dihedral_group(4),
    group.octa_group,
    group.ico_group,
    group.full_octa_group,
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("make", GROUPS, ids=["C8", "D4", "octahedral", "icosahedral", "full octahedral"])
def test_sequences_and_video(make):
    fiber = make()
    assert build(by_json(describe(sequence_space(fiber)))) == sequence_space(fiber)
    assert build(by_json(describe(space_time(gspaces.octaOnR3())))) == space_time(gspaces.octaOnR3())


def test_field_types():
    plane, space = gspaces.flipRot2dOnR2(4), gspaces.rot3dOnR3()
    fields = [plane.trivial_repr, plane.regular_repr, plane.regular_repr, plane.irrep(1, 1), plane.irrep(1, 2)]
    bands = [space.fibergroup.bl_regular_representation(2), space.irrep(1)]
    # Vectors of two rotations are no irrep, and on a sequence are no representation of its space.
    turns, octic = gspaces.rot2dOnR2(2), plane.quotient_repr((None, 2))
    others = [turns.basespace_action, turns.regular_repr + turns.irrep(1), turns.basespace_action]
    symmetric = plane.basespace_action.tensor(plane.basespace_action)
    for field_type in (
        nn.FieldType(plane, [*fields, octic, symmetric, plane.basespace_action]),
        nn.FieldType(space, [*bands, space.basespace_action]),
        nn.FieldType(sequence_space(turns.fibergroup), others),
    ):
        again = build(by_json(describe(field_type)))
        assert again == field_type
        for a, b in zip(again.representations, field_type.representations, strict=True):
            assert np.array_equal(a.change_of_basis, b.change_of_basis)
            for g in a.group.testing_elements():
                np.testing.assert_allclose(a(g), b(g), rtol=0, atol=1e-13)
    assert len(describe(nn.FieldType(plane, 16 * [plane.regular_repr]))["init_args"]["fields"]) == 1


ENCODINGS = [
    MLPEncoding(8, 2, per_head=False, normalize_hidden=True),
    SeparableEncoding(per_head=False),
    FourierEncoding(5, scale=2.0, learned=False),
    RotaryEncoding(3, scale=1.5, learned=False, constant_keys=True, values=True),
    QuadraticEncoding(sharpness=3.0),
    ConvolutionalEncoding(FourierEncoding(4), sharpness=2.0, content=0.5, width=3, reach=0.5),
    PairKernel("concat", "raw", "mlp", hidden=6, biases=True, last_activation=True),
    *(encodings.NoEncoding(), encodings.AbsoluteEncoding(7)),
    *(Offset(), Pair(), LogPolar(), LiftedMotion("quaternion", limit=2.0), Samples(12, "ico", turn="random")),
]


@pytest.mark.parametrize("value", ENCODINGS, ids=lambda value: type(value).__name__)
def test_what_networks_are_made_of_comes_back_with_every_argument(value):
    described = by_json(describe(value))
    again = build(described)
    assert type(again) is type(value) is not None
    assert describe(again) == described
    mine, others = ({k: v for k, v in vars(v).items() if isinstance(v, (int, float, str))} for v in (again, value))
    assert mine == others


def test_all_public_encodings_are_tried():
    public = {getattr(encodings, name) for name in encodings.__all__}
    classes = {c for c in public if isinstance(c, type) and issubclass(c, encodings.Encoding)} - {encodings.Encoding}
    assert classes <= {type(value) for value in ENCODINGS}


def test_plain_values_are_themselves():
    value = {"a": [1, 2.5, None, True], "b": {"c": "d"}}
    assert describe(value) == build(value) == value
    assert describe((1, np.int64(2), np.float64(0.5))) == [1, 2, 0.5]


class Mine(MLPEncoding):
    """Of somebody else."""


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (float("nan"), "nan"),
        (torch.zeros(2), "got a Tensor"),
        (torch.nn.ReLU, "got a type"),
        (torch.nn.ReLU(), "got a ReLU"),
        (Mine(), "got a Mine"),
        (len, "got a builtin"),
        ({1: 2}, "got a dict"),
        ({"class_path": "os.mkdir"}, "got a dict"),
        (gspaces.no_base_space(group.so2_group()), "got the group"),
        (gspaces.dihedralOnR3(1), "gspace"),
    ],
    ids=str,
)
def test_what_json_cannot_hold_is_refused(value, message):
    with pytest.raises(DescriptionError, match=message):
        describe(value)


def test_fields_of_no_kind_are_refused():
    plane = gspaces.rot2dOnR2(4)
    described = describe(nn.FieldType(plane, [plane.quotient_repr(2)]))
    described["init_args"]["fields"][0][0]["irreps"] = [[0]]
    with pytest.raises(DescriptionError, match=r"fields: .*shape \(2, 2\)"):
        build(described)
    described["init_args"]["fields"] = [["os.mkdir", 1]]
    with pytest.raises(DescriptionError, match=r"os\.mkdir"):
        build(described)


@pytest.mark.parametrize(
    "path",
    [
        "os.mkdir",
        "torch.nn.Linear",
        "escnn.gspaces.GSpace2D",
        "torch.fx.graph_module.reduce_graph_module",
        "escnn.nn.R2Conv",
        "escnn.gspaces.os.mkdir",
        "escnn_attention..models.GSANet",
        "escnn_attention.training.experiment.command.Path",
        "escnn_attention.training.experiment.run_experiment",
        "escnn_attention.models.description.build",
        "escnn_attention.models.description.json",
        "escnn_attention.equivariance.EquivarianceReport",
        3,
    ],
)
def test_nothing_else_is_built(path):
    with pytest.raises(DescriptionError):
        build({"a": [{"class_path": path}]})


def test_classes_are_named_as_users_import_them():
    assert class_path(HybridNet) == "escnn_attention.models.HybridNet"
    assert class_path(Mine).endswith("test_description.Mine")
