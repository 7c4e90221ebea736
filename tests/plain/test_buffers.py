import copy
import math
import pickle

import numpy as np
import pytest
import torch
from escnn.nn.modules.conv.rd_convolution import _RdConv

from escnn_attention.plain.buffers import Derived, ExactBuffers
from tests.layers import CASES


def values():
    return np.cos(np.arange(1.0, 13.0)).reshape(3, 4)


class Parent(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
        self.child = ExactBuffers()
        self.child.register_exact("values", values())


def assert_rounded_once(buffer, dtype):
    assert buffer.dtype == dtype
    assert torch.equal(buffer.cpu(), torch.tensor(values()).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("through", [torch.float32, torch.bfloat16, torch.float16])
def test_every_change_of_precision_starts_from_the_exact_values(through, dtype):
    module = Parent().to(through)
    assert_rounded_once(module.child.values, through)
    module = module.to(dtype)
    assert_rounded_once(module.child.values, dtype)
    assert module.linear.weight.dtype == dtype


def test_an_ordinary_buffer_would_not_keep_them():
    module = torch.nn.Module()
    module.register_buffer("values", torch.tensor(values(), dtype=torch.float32))
    assert not torch.equal(module.double().values, torch.tensor(values()))


def test_constants_of_any_kind():
    constants = {
        "array": values(),
        "number": np.array(math.pi),
        "tensor": torch.tensor(1 / 3, dtype=torch.float64),
        "integers": np.array([2, 0, 1]),
    }
    module = ExactBuffers()
    for name, value in constants.items():
        module.register_exact(name, value)
    module.register_exact("none", None)
    module.double()
    assert module.none is None
    for name, value in constants.items():
        assert torch.equal(getattr(module, name), torch.as_tensor(value))


def of_escnn(module):
    """Whether a part of it cannot be made on the meta device: escnn's convolutions, and random transformations."""
    return any(isinstance(m, _RdConv) or getattr(m, "transformation", None) is not None for m in module.modules())


@pytest.mark.sampled(8)
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("name", sorted(CASES.keys() - {"attention_from_convolution"}))
def test_made_on_the_meta_device(name, assign):
    case = CASES[name]
    expected = case.drawn().eval()
    if of_escnn(expected):
        pytest.skip("escnn makes its filters from numbers")
    with torch.device("meta"):
        module = case.make().double().eval()
    if not assign:
        module.to_empty(device="cpu")
    module.load_state_dict(expected.state_dict(), assign=assign)
    inputs = case.inputs(expected)
    torch.testing.assert_close(case.output(module, *inputs), case.output(expected, *inputs), rtol=1e-12, atol=1e-12)


def test_constants_follow_weights_that_are_assigned():
    case = CASES["GroupSelfAttention, rotary"]
    expected, module = case.drawn(), case.make()
    module.load_state_dict(expected.state_dict(), assign=True)
    inputs = case.inputs(expected)
    torch.testing.assert_close(case.output(module, *inputs), case.output(expected, *inputs), rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("double")
def test_made_in_the_default_dtype():
    module = Parent()
    assert_rounded_once(module.child.values, torch.float64)
    assert_rounded_once(module.float().child.values, torch.float32)


def test_exact_values_share_no_memory_with_their_source_and_the_buffer():
    source = values()
    module = ExactBuffers()
    module.register_exact("values", source)
    module.double().values.mul_(2)
    np.testing.assert_array_equal(source, values())
    source[:] = 0
    assert_rounded_once(module.float().values, torch.float32)


def test_state_dict_does_not_hold_them():
    module = Parent()
    assert set(module.state_dict()) == {"linear.weight", "linear.bias"}
    other = Parent().double()
    other.load_state_dict(module.state_dict())
    assert_rounded_once(other.child.values, torch.float64)


copies = pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])


@copies
def test_copies_keep_them(copied):
    module = Parent().bfloat16()
    other = copied(module)
    assert_rounded_once(other.child.values, torch.bfloat16)
    assert_rounded_once(other.double().child.values, torch.float64)
    assert_rounded_once(module.child.values, torch.bfloat16)


def test_files_hold_equal_values_once():
    numbers, layers = torch.arange(1000), torch.nn.ModuleList(ExactBuffers() for _ in range(3))
    for layer in layers:
        layer.register_exact("first", None)
        layer.register_exact("numbers", numbers)
        layer.register_exact("halves", numbers / 2)
    file = pickle.dumps(layers)
    assert len(file) < 2.5 * 8 * len(numbers)
    for layer in (*pickle.loads(file), copy.deepcopy(layers)[0]):
        assert [*layer._buffers] == ["first", "numbers", "halves"]
        assert layer.first is None
        assert layer.numbers.equal(numbers)
        assert layer.halves.equal(numbers / 2)
        layer.numbers.zero_()
        assert layer.half().halves.equal((numbers / 2).half())


@copies
def test_copies_keep_what_was_written_to_a_buffer(copied):
    module = Parent()
    module.child.values.mul_(2)
    assert copied(module).child.values.equal(module.child.values)
    assert_rounded_once(copied(module).double().child.values, torch.float64)


def test_through_the_meta_device_and_back():
    module = Parent().to("meta")
    assert module.child.values.device.type == "meta"
    assert_rounded_once(module.to_empty(device="cpu").child.values, torch.float32)
    with torch.device("meta"):
        made = Parent()
    assert made.child.values.device.type == "meta"
    assert_rounded_once(made.to_empty(device="cpu").child.values, torch.float32)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_through_a_gpu_and_back():
    module = Parent().half().cuda()
    assert_rounded_once(module.child.values, torch.float16)
    assert_rounded_once(module.double().child.values, torch.float64)
    assert module.child.values.is_cuda
    assert_rounded_once(module.cpu().child.values, torch.float64)


CHANGES = {
    "in place": lambda linear: linear.weight.mul_(2),
    "of the data": lambda linear: linear.weight.data.mul_(2),
    "another tensor": lambda linear: setattr(linear.weight, "data", 2 * linear.weight.data),
    "a state dict": lambda linear: linear.load_state_dict({"weight": 2 * linear.weight}),
    "a step": lambda linear: (
        setattr(linear.weight, "grad", linear.weight.clone()),
        torch.optim.SGD(linear.parameters(), lr=1.0).step(),
    ),
    "the precision": lambda linear: linear.double(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@torch.no_grad()
def test_what_follows_from_weights_is_kept_until_they_change(change):
    linear, squares, made = torch.nn.Linear(3, 2, bias=False), Derived(), []

    def square(weight):
        made.append(weight.square())
        return made[-1]

    for _ in range(2):
        assert squares.of(linear.weight, square, training=False) is made[0]
    change(linear)
    found = squares.of(linear.weight, square, training=False)
    assert torch.equal(found, linear.weight.square())
    assert found.dtype == linear.weight.dtype
    assert len(made) == 2


def test_nothing_is_kept_where_gradients_are_needed_or_a_program_is_made():
    weight, squares = torch.ones(3, requires_grad=True), Derived()
    assert squares.of(weight, torch.square, training=False).requires_grad
    with torch.no_grad():
        of_training = [squares.of(weight, torch.square, training=True) for _ in range(2)]
        assert of_training[0] is not of_training[1]
        squares.of(weight, torch.square, training=False)
        assert copy.deepcopy(squares)._known is None
        traced = torch.jit.trace(lambda w: squares.of(w, torch.square, False), weight.detach())
        assert torch.equal(traced(2 * weight), 4 * torch.ones(3))
