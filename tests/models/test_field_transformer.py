"""Transformers from fields to fields."""

import numpy as np
import pytest
import torch
from escnn import group, gspaces
from escnn.nn import FieldType, GeometricTensor

from escnn_attention import equivariance_report, sequence_space
from escnn_attention.models import FieldTransformer
from tests import spaces
from tests.layers import drawn
from tests.packages import in_onnx

C8 = sequence_space(group.cyclic_group(8))
ACTION = FieldType(C8, [C8.irrep(1), C8.trivial_repr])
N = 4


def head(in_type=ACTION, out_type=ACTION, **options):
    return drawn(
        FieldTransformer(
            in_type, out_type, **{"fields": 2, "num_decoder_layers": 2, "num_heads": 1, "condition": N, **options}
        )
    )


def test_causal_outputs_do_not_see_later_inputs():
    network, x, condition = head(block={"causal": True}), spaces.random_field(ACTION, 6), torch.randn(2, N).double()
    later = ACTION(torch.cat([x.tensor[..., :3], torch.randn(2, 3, 3).double()], 2))
    same = (network(x, condition=condition).tensor - network(later, condition=condition).tensor)[..., :3]
    assert same.abs().max() < 1e-12
    other = head()
    assert (other(x, condition=condition).tensor - other(later, condition=condition).tensor)[..., :3].abs().max() > 1e-3


@pytest.mark.sampled(1, of="programs")
@pytest.mark.parametrize("condition", [None, N])
def test_exports_and_masks(condition):
    network, x = head(condition=condition, block={"encoding": "none"}), spaces.random_field(ACTION, 5)
    c = None if condition is None else torch.randn(2, N).double()
    mask = torch.tensor([[True] * 5, [True, True, True, False, False]])
    plain = network.export()
    for hidden in (None, mask):
        torch.testing.assert_close(plain(x.tensor, None, c, hidden), network(x, condition=c, mask=hidden).tensor)
    y = network(x, condition=c, mask=mask).tensor
    assert not y[1, :, 3:].any()
    alone = network(ACTION(x.tensor[1:, :, :3]), condition=None if c is None else c[1:]).tensor
    torch.testing.assert_close(y[1:, :, :3], alone)
    arguments = (x.tensor, None, c)
    program = torch.export.export(plain, arguments, strict=False).module()
    np.testing.assert_allclose(program(*arguments).detach(), network(x, condition=c).tensor.detach(), atol=1e-10)


D4, OCTAHEDRAL = gspaces.flipRot2dOnR2(4), gspaces.octaOnR3()


def points(fields, number):
    coords = torch.randn(number, fields.gspace.dimensionality).double()
    return GeometricTensor(torch.randn(number, fields.size).double(), fields, coords)


MEMORIES = {
    "image": (D4, lambda fields: spaces.random_field(fields, 4, 4), {}),
    "encoded image": (D4, lambda fields: spaces.random_field(fields, 4, 4), {"num_encoder_layers": 1}),
    "volume": (OCTAHEDRAL, lambda fields: spaces.random_field(fields, 2, 2, 2), {"fields": 1}),
    "sequence": (
        sequence_space(group.dihedral_group(4)),
        lambda fields: spaces.random_field(fields, 6),
        {"num_encoder_layers": 1},
    ),
    "points": (OCTAHEDRAL, lambda fields: points(fields, 7), {"fields": 1}),
}


def decoder(name, **options):
    """A network with a memory, its input, memory and condition, and further arguments."""
    space, make, own = MEMORIES[name]
    fibers, mixture = space.fibergroup, spaces.mixed(space)
    tokens = sequence_space(fibers)
    action = FieldType(tokens, [fibers.irreps()[-1], tokens.trivial_repr])
    sizes = {"num_decoder_layers": 1, "memory_type": mixture, "cross_attention": {"encoding": "mlp"}}
    network = head(action, action, **{**sizes, **own, **options})
    batch = {"memory_batch": torch.tensor([0, 0, 0, 1, 1, 1, 1])} if name == "points" else {}
    x, c = spaces.random_field(action, 5), torch.randn(2, N).double()
    return network, x, {"memory": make(mixture), "condition": c, **batch}


def test_a_memory_of_shuffled_poses_is_noticed():
    network, x, others = decoder("encoded image")
    encoded = network.encode(others["memory"])
    with torch.no_grad():
        torch.testing.assert_close(network.decode(x, encoded, others["condition"]).tensor, network(x, **others).tensor)
    assert equivariance_report(network, x.shape, arguments=others).relative_error < 1e-10
    assert network.check_equivariance(1e-10, 0)  # for a memory and a condition of its own

    class Shuffled(FieldTransformer):
        def encode(self, memory, key_padding_mask=None):
            y = super().encode(memory, key_padding_mask)
            tensor = y.tensor.clone()
            tensor[:, :8] = tensor[:, [1, 0, *range(2, 8)]]
            return GeometricTensor(tensor, y.type)

    network.__class__ = Shuffled
    assert equivariance_report(network, x.shape, arguments=others).relative_error > 1e-4
    with pytest.raises(AssertionError, match="the error is"):
        network.check_equivariance()


def test_a_causal_decoder_sees_all_of_its_memory():
    network, x, others = decoder("image", block={"causal": True})
    later = network.in_type(torch.cat([x.tensor[..., :3], torch.randn(2, x.shape[1], 2).double()], 2))
    y = network(x, **others).tensor
    assert (y - network(later, **others).tensor)[..., :3].abs().max() < 1e-12
    memory = others["memory"].tensor.clone()
    memory[..., -1, -1] += 1
    other = network(x, **{**others, "memory": GeometricTensor(memory, network.memory_type)}).tensor
    assert (y - other).abs().amax(1).min() > 1e-6  # at every time


def test_a_grid_sees_windows_of_a_finer_one():
    fields = FieldType(gspaces.rot2dOnR2(4), [gspaces.rot2dOnR2(4).irrep(1)])
    options = {"memory_type": fields, "kernel_size": 1, "num_decoder_layers": 1, "condition": None}
    x, memory = (fields(torch.randn(2, 2, n, n).double()) for n in (3, 6))
    changed = memory.tensor.clone()
    changed[:, :, -1, -1] += 1
    for cross_attention, places in (({"kernel_size": 3}, 1), ({}, 9)):
        network = head(fields, fields, cross_attention=cross_attention, **options)
        y = network(x, memory)
        assert ((network(x, fields(changed)).tensor - y.tensor).abs().amax((0, 1)) > 1e-9).sum() == places
        turn = fields.fibergroup.element(1)
        turned = network(x.transform(turn), memory.transform(turn)).tensor
        torch.testing.assert_close(turned, y.transform(turn).tensor, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", MEMORIES)
def test_masked_memory_reaches_nothing(name):
    """Also in what the network exports."""
    network, x, others = decoder(name)
    memory = others["memory"]
    mask = torch.zeros(len(memory.tensor), *memory.shape[2:], dtype=torch.bool)
    mask[-1:] = mask.new_tensor(True) if memory.coords is not None else mask[-1:]
    mask[..., -1:] = True
    y = network(x, **others, memory_key_padding_mask=mask).tensor
    assert (y - network(x, **others).tensor).abs().max() > 1e-6
    at = {"memory_coords": memory.coords, "memory_batch": others.get("memory_batch")}
    exported = network.export()(x.tensor, memory.tensor, others["condition"], memory_key_padding_mask=mask, **at)
    torch.testing.assert_close(exported, y)
    hidden = memory.tensor.masked_fill(mask.unsqueeze(1), torch.nan).requires_grad_()
    changed = {**others, "memory": GeometricTensor(hidden, memory.type, memory.coords)}
    found = network(x, **changed, memory_key_padding_mask=mask).tensor
    torch.testing.assert_close(found, y)
    gradients = torch.autograd.grad(found.sum(), [hidden, *network.parameters()], allow_unused=True)
    assert all(g.isfinite().all() for g in gradients if g is not None)
    assert not gradients[0].masked_select(mask.unsqueeze(1)).any()


@pytest.mark.sampled(1, of="exported files")
def test_a_decoder_in_onnx():
    network, x, others = decoder("encoded image")
    plain = network.export().float()
    arguments = tuple(t.float() for t in (x.tensor, others["memory"].tensor, others["condition"]))
    program = torch.export.export(plain, arguments, strict=False)
    (found,) = in_onnx(program)(*arguments)
    torch.testing.assert_close(found, plain(*arguments), rtol=1e-4, atol=1e-4)


@pytest.mark.sampled(1, of="compiled graphs")
def test_a_decoder_is_compiled_to_one_graph():
    network, x, others = decoder("image")
    compiled = torch.compile(network, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, **others).tensor, network(x, **others).tensor)


def test_a_memory_that_does_not_fit():
    network, x, others = decoder("encoded image")
    memory, c = others["memory"], others["condition"]
    volume = spaces.random_field(spaces.mixed(OCTAHEDRAL), 2, 2, 2)
    mask = torch.zeros(2, 4, 3, dtype=torch.bool)
    scattered = points(network.memory_type, 3)
    for arguments, message in (
        ({"memory": None}, "memory: FieldTransformer got None"),
        ({"memory": volume}, "memory: .*gspace"),
        ({"memory": scattered}, "memory: got scattered points"),
        ({"memory": memory, "memory_key_padding_mask": mask}, "memory_key_padding_mask: .*shape"),
        ({"memory": GeometricTensor(memory.tensor[:1], memory.type)}, "keys: got 1 images"),
    ):
        with pytest.raises(ValueError, match=message):
            network(x, condition=c, **arguments)
    with pytest.raises(ValueError, match=r"memory: .*made without"):
        head(condition=None)(spaces.random_field(ACTION, 5), spaces.random_field(ACTION, 5))
    scalars = FieldType(D4, [D4.trivial_repr])
    for options, error, message in (
        ({"memory_type": scalars}, ValueError, "memory_type: its fiber group is D4"),
        ({"memory_type": "image"}, TypeError, "memory_type: "),
        ({"num_encoder_layers": 1}, ValueError, "num_encoder_layers: .*no memory_type"),
        ({"cross_attention": {"encoding": "mlp"}}, ValueError, "cross_attention: .*no memory_type"),
        ({"encoder_block": {"keys": "own"}}, ValueError, "encoder_block: .*no encoder layers"),
        ({"memory_type": ACTION, "cross_attention": {"key_type": ACTION}}, TypeError, "key_type: cross_attention"),
    ):
        with pytest.raises(error, match=message):
            head(**options)


def test_bad_arguments():
    with pytest.raises(NotImplementedError, match=r"in_type: .*continuous"):
        head(spaces.scalars(gspaces.rot2dOnR2(-1), 2), spaces.scalars(gspaces.rot2dOnR2(-1), 2))
    with pytest.raises(TypeError, match=r"crop: .*no such option"):
        head(block={"crop": 1})
    for name in ("block", "encoder_block", "cross_attention"):
        with pytest.raises(TypeError, match=f"num_heads: {name} has no such option .*FieldTransformer has it"):
            head(**{name: {"num_heads": 1}})
    with pytest.raises(ValueError, match="condition: FieldTransformer got None"):
        head()(spaces.random_field(ACTION, 5))
    with pytest.raises(ValueError, match=r"condition: FieldTransformer .*has none"):
        head(condition=None)(spaces.random_field(ACTION, 5), condition=torch.randn(2, N).double())
    network, x, c = head(), spaces.random_field(ACTION, 5), torch.randn(2, N).double()
    others = sequence_space(group.cyclic_group(4))
    for arguments, error, message in (
        ((spaces.random_field(FieldType(others, [others.irrep(1)]), 5), None, c), ValueError, "input: .*gspace"),
        ((x, None, c[:, 1:]), ValueError, "condition: got .*2, 3"),
        ((x, None, c[:1]), ValueError, "condition: got .*1, 4"),
        ((x, None, c.float()), TypeError, "condition: got .*float32"),
        ((x, None, "step"), TypeError, "condition: got str"),
        ((x, None, c, torch.ones(2, 4, dtype=torch.bool)), ValueError, r"mask: got shape .*needed \(2, 5\)"),
        ((x.tensor, None, c), TypeError, "input: .*Tensor"),
    ):
        with pytest.raises(error, match=message):
            network(*arguments)
    for options, error, message in (
        ({"num_heads": 3}, ValueError, "num_heads"),
        ({"fields": 0}, ValueError, "fields"),
        ({"num_decoder_layers": 0}, ValueError, "num_decoder_layers"),
        ({"kernel_size": 4}, ValueError, "kernel_size: .*odd"),
        ({"out_type": FieldType(others, [others.irrep(1)])}, ValueError, "gspace"),
    ):
        with pytest.raises(error, match=message):
            head(**options)
