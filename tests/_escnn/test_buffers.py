import copy
import pickle

import pytest
import safetensors.torch
import torch
from escnn import gspaces, nn
from torch.nn.utils.parametrizations import weight_norm

import escnn_attention
from escnn_attention._escnn.buffers import derived_buffers


def fields(g):
    return nn.FieldType(g, [g.trivial_repr]), nn.FieldType(g, 2 * [g.regular_repr])


def grid(g):
    """Convolutions that share a basis, and one of each kind that keeps what it makes of its weights."""
    image, hidden = fields(g)
    shared = [nn.R2Conv(hidden, hidden, 3, padding=1) for _ in range(2)]
    return nn.SequentialModule(nn.R2Conv(image, hidden, 3), nn.InnerBatchNorm(hidden), nn.ReLU(hidden), *shared)


def linear(g):
    image, hidden = fields(gspaces.no_base_space(g.fibergroup))
    return nn.SequentialModule(nn.Linear(image, hidden), nn.Linear(hidden, hidden))


@pytest.fixture(params=[grid, linear], ids=["grid", "linear"])
def network(request):
    torch.manual_seed(0)
    made = request.param(gspaces.rot2dOnR2(4))
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter)
    return made


def features(network):
    space = network.in_type.gspace.dimensionality * [7]
    return network.in_type(torch.randn(2, network.in_type.size, *space))


@pytest.mark.parametrize("training", [True, False])
def test_copies_give_the_same_and_share_nothing(network, training):
    network.train(training)
    x = features(network)
    copied = copy.deepcopy(network)
    assert [module.training for module in copied.modules()] == [module.training for module in network.modules()]
    before = copy.deepcopy(copied)(x).tensor
    assert torch.equal(before, copy.deepcopy(network)(x).tensor)
    assert not {t.data_ptr() for t in copied.parameters()} & {t.data_ptr() for t in network.parameters()}
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.zero_()
    network.train().train(training)
    assert torch.equal(copy.deepcopy(copied)(x).tensor, before)
    assert not torch.equal(network(x).tensor, before)


@pytest.mark.parametrize("training", [True, False])
def test_parametrized_weights_are_copied(network, training):
    weight_norm(network[0], "weights")
    network.train(training)
    copied, x = copy.deepcopy(network), features(network)
    assert torch.equal(copied(x).tensor, network(x).tensor)
    assert network[0].parametrizations.weights.original0 is not copied[0].parametrizations.weights.original0
    torch.testing.assert_close(copied.export()(x.tensor), network.eval()(x).tensor)


def test_a_copy_learns_where_it_trains(network):
    copied = copy.deepcopy(network.eval()).train()
    copied(features(network)).tensor.square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in copied.parameters())
    assert all(parameter.grad is None for parameter in network.parameters())


def test_gradients_in_eval_mode_are_as_they_were(network):
    network.eval()
    copy.deepcopy(network)
    network.state_dict()
    network(features(network)).tensor.square().sum().backward()
    assert all(parameter.grad is not None for parameter in network.parameters() if parameter.dim() == 1)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
@pytest.mark.parametrize("training", [True, False])
def test_gradients_of_copies(network, copied, training):
    """Of copies in eval mode once they have trained again."""
    x, found = features(network), []
    for module in (network.train(training), copied(network).train()):
        module.zero_grad()
        module.train(training)(x).tensor.square().sum().backward()
        found.append({name: p.grad for name, p in module.named_parameters()})
    assert any(g.any() for g in found[0].values())
    torch.testing.assert_close(found[1], found[0])


def test_a_shared_module_is_copied_once():
    g = gspaces.rot2dOnR2(4)
    _, hidden = fields(g)
    layer = nn.R2Conv(hidden, hidden, 3, padding=1)
    copied = copy.deepcopy(nn.SequentialModule(layer, layer).eval())
    assert copied[0] is copied[1]


@pytest.mark.parametrize("training", [True, False])
def test_safetensors_takes_the_state(network, training, tmp_path):
    network.train(training)
    x, path = features(network), tmp_path / "model.safetensors"
    safetensors.torch.save_file(network.state_dict(), path)
    stored = safetensors.torch.load_file(path)
    expected = copy.deepcopy(network)(x).tensor
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.zero_()
    network.load_state_dict(stored)
    assert torch.equal(copy.deepcopy(network)(x).tensor, expected)
    safetensors.torch.save_model(network, path)
    assert not safetensors.torch.load_model(network, path)[0]


def test_what_is_saved_is_a_copy_of_the_basis_and_else_the_tensor_itself(network):
    state, kept = network.state_dict(), network.state_dict(keep_vars=True)
    bases = [name for name in state if name.endswith("sampled_basis")]
    assert bases
    assert all(state[name].is_contiguous() and torch.equal(state[name], kept[name]) for name in bases)
    assert len({state[name].data_ptr() for name in bases}) == len(bases)
    assert all(state[name].data_ptr() == kept[name].data_ptr() for name in state if name not in bases)


def test_derived_buffers_are_those_that_come_and_go(network):
    evaluates = {name for name, _ in network.eval().named_buffers()}
    assert derived_buffers(network) == evaluates - {name for name, _ in network.train().named_buffers()} != set()
    assert derived_buffers(escnn_attention.FieldLayerNorm(fields(gspaces.rot2dOnR2(4))[1])) == set()
