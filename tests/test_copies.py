"""Every layer and network: what is copied, saved or exported computes the same."""

import copy
import pickle

import pytest
import torch
from escnn.nn import R2Conv

from escnn_attention.models import HamiltonianNetwork
from tests.layers import CASES, Case, packed, unpacked

EXPORTED = [name for name, case in CASES.items() if not case.training and name != "HamiltonianNetwork"]


def output(case: Case, module: torch.nn.Module) -> torch.Tensor:
    torch.manual_seed(2)  # for turns and lifts that are drawn
    with torch.no_grad():
        return case.output(module, *case.inputs(module))


def saved(module: torch.nn.Module) -> torch.nn.Module:
    """A module that was written by ``torch.save`` and read again."""
    return unpacked(packed(module))


def pickled(module: torch.nn.Module) -> torch.nn.Module:
    return pickle.loads(pickle.dumps(module))


def of_state(module: torch.nn.Module, case: Case) -> torch.nn.Module:
    """A new module with the weights of another, which are all that a state dict needs to hold."""
    new = case.make().double()
    for part, model in zip(new.modules(), module.modules(), strict=True):
        part.training = model.training
        if isinstance(part, R2Conv):
            part.train(model.training)  # its state dict has a filter where it does not train
    if list(module.parameters()):
        assert not torch.equal(output(case, new), output(case, module))
    new.load_state_dict(module.state_dict())
    return new


@pytest.mark.sampled(20)
@pytest.mark.parametrize("way", [copy.deepcopy, pickled, saved, of_state])
@pytest.mark.parametrize("name", CASES)
def test_copies_compute_the_same_and_share_no_weights(name, way):
    case = CASES[name]
    module = case.drawn()
    expected = output(case, module)
    new = way(module, case) if way is of_state else way(module)
    assert torch.equal(output(case, new), expected)
    assert repr(new) == repr(module)
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.mul_(2)
    assert torch.equal(output(case, module), expected)


@pytest.mark.sampled(20)
@pytest.mark.parametrize("name", EXPORTED)
def test_exports_compute_the_same_and_hold_no_module_of_escnn(name):
    case = CASES[name]
    module = case.drawn().train()
    exported = saved(module.export())
    assert not exported.training
    assert not module.training  # escnn's convention
    assert not any(type(part).__module__.startswith("escnn.") for part in exported.modules())
    torch.testing.assert_close(case.exported(exported, *case.inputs(module)), output(case, module.eval()))


@pytest.mark.sampled(40)
@pytest.mark.parametrize("name", CASES)
def test_shapes_are_known_before(name):
    case = CASES[name]
    module = case.drawn()
    if not hasattr(module, "evaluate_output_shape"):
        pytest.skip("its outputs are no fields")
    assert not isinstance(module, HamiltonianNetwork)
    torch.manual_seed(2)
    x = case.inputs(module)
    assert module.evaluate_output_shape(tuple(x[0].shape)) == tuple(case.output(module, *x).shape)
