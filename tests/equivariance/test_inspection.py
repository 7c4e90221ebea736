import pytest
import torch
from escnn import gspaces, nn

from escnn_attention import (
    AttentiveConv,
    DilationLiftingSelfAttention,
    DilationSelfAttention,
    GroupSelfAttention,
    Scales,
    TransformerBlock,
)
from escnn_attention.equivariance.inspection import (
    attention_layers,
    evaluating,
    find_attention,
    find_layer,
    gspace_of,
    on_fields,
    watch,
)
from escnn_attention.models import EquivariantClassifier


def system():
    g = gspaces.rot2dOnR2(4)
    fields = nn.FieldType(g, 2 * [g.regular_repr])
    attention = GroupSelfAttention(fields, fields, 2, 3)
    return fields, attention, nn.SequentialModule(nn.ReLU(fields), attention, TransformerBlock(fields, fields, 2, 3))


def test_layers_are_found_by_name_and_as_they_are():
    _, attention, model = system()
    assert list(attention_layers(model)) == ["1", "2.attention"]
    assert attention_layers(attention) == {"": attention}
    assert find_attention(model) is find_attention(model, "1") is find_attention(model, attention) is attention
    assert find_attention(model, "2") is find_attention(model, model[2]) is model[2].attention
    assert find_layer(model, "0") is model[0]
    with pytest.raises(ValueError, match=r"needed .*'1', '2.attention'"):
        find_attention(model, "0")
    with pytest.raises(ValueError, match="no attention layer"):
        find_attention(torch.nn.ReLU())
    with pytest.raises(ValueError, match="not a part"):
        find_layer(model, torch.nn.ReLU())
    with pytest.raises(ValueError, match=r"no module 'x', needed .*'2.before'"):
        find_layer(model, "x")
    with pytest.raises(TypeError, match="layer: got float"):
        find_layer(model, 1.0)
    with pytest.raises(TypeError, match="model: got list"):
        find_attention([model])


def test_modes_are_restored_module_by_module():
    fields, _, model = system()
    model.add_module("norm", nn.InnerBatchNorm(fields))
    conv = nn.R2Conv(fields, fields, 3, padding=1)
    whole = torch.nn.ModuleList([model, conv])
    conv.eval()
    filters = conv.filter
    model[0].eval()
    modes = [m.training for m in whole.modules()]

    def fails():
        with evaluating(whole, print):
            assert not any(m.training for m in whole.modules())
            assert not torch.is_grad_enabled()
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fails()
    assert [m.training for m in whole.modules()] == modes
    assert torch.is_grad_enabled()
    assert torch.equal(conv.filter, filters)
    whole.train()
    with evaluating(whole):
        assert not conv.filter.requires_grad
    assert not hasattr(conv, "filter")


def test_inputs_and_outputs_are_caught_in_order():
    fields, attention, model = system()
    x = fields(torch.randn(1, 8, 5, 5))
    named = {"block": model[2], "attention": attention, "never": nn.ReLU(fields), "whole": model}
    inputs = watch(lambda: model(x), named, inputs=True)
    assert list(inputs) == ["whole", "attention", "block"]
    assert torch.equal(inputs["attention"].tensor, x.tensor.relu())
    outputs = watch(lambda: model(x), named)
    assert list(outputs) == ["attention", "block", "whole"]
    assert torch.equal(outputs["attention"].tensor, inputs["block"].tensor)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_the_first_call_counts_and_copies_are_kept():
    relu = torch.nn.ReLU(inplace=True)
    x = torch.tensor([-1.0, 2.0])
    caught = watch(lambda: (relu(input=x), relu(x + 5)), {"relu": relu}, inputs=True)
    assert caught["relu"].tolist() == [-1.0, 2.0]
    assert x.tolist() == [0.0, 2.0]
    arguments, named = watch(lambda: relu(input=x), {"relu": relu}, inputs="all")["relu"]
    assert (arguments, list(named), named["input"].tolist()) == ((), ["input"], [0.0, 2.0])

    def fails():
        raise KeyError

    with pytest.raises(KeyError):
        watch(fails, {"relu": relu})
    assert not relu._forward_hooks


def test_models_are_called_with_what_they_take():
    fields, _, model = system()
    tensor = torch.randn(1, 8, 5, 5)
    call, x = on_fields(model, tensor)
    assert x.type == fields
    assert torch.equal(call(x).tensor, model(fields(tensor)).tensor)
    g = fields.gspace
    image = nn.FieldType(g, [g.trivial_repr])
    network = EquivariantClassifier({"lift": GroupSelfAttention(image, fields, 2, 3)}, 3)
    call, x = on_fields(network, tensor[:, :1])
    assert x.type == image
    assert torch.equal(call(x), network(tensor[:, :1]))

    class Plain(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.network = network

        def forward(self, x):
            assert isinstance(x, torch.Tensor)
            return self.network(x)

    call, x = on_fields(Plain(), tensor[:, :1])
    assert x.type == image
    assert torch.equal(call(x), network(tensor[:, :1]))
    given = image(tensor[:, :1])
    assert on_fields(network, given)[1] is given
    assert gspace_of(Plain()) == g
    assert gspace_of(torch.nn.ReLU()) is None
    with pytest.raises(ValueError, match="ReLU has a gspace"):
        on_fields(torch.nn.ReLU(), tensor)
    with pytest.raises(ValueError, match="needed 8 channels"):
        on_fields(model, tensor[:, :3])
    with pytest.raises(TypeError, match="x: got int"):
        on_fields(model, 3)
    for module in (model, Plain()):
        with pytest.raises(ValueError, match=r"x: .*\(B, C, \*space\)"):
            on_fields(module, torch.zeros(5))
        with pytest.raises(ValueError, match=r"x: .*8 channels"):
            on_fields(model, torch.zeros(2, 8, 5))


def test_of_dilation_layers_it_is_said_that_they_have_no_maps():
    g = gspaces.rot2dOnR2(4)
    scales = Scales(count=2)
    image, fields = nn.FieldType(g, [g.trivial_repr]), scales.repeat(nn.FieldType(g, 2 * [g.regular_repr]))
    lifting = DilationLiftingSelfAttention(image, fields, scales, 1, 3)
    dilation = DilationSelfAttention(fields, fields, scales, 1, 3)
    every = "DilationLiftingSelfAttention, DilationSelfAttention"
    for model, names in ((lifting, "DilationLiftingSelfAttention"), (nn.SequentialModule(lifting, dilation), every)):
        assert attention_layers(model) == {}
        message = rf"^model: .*has no attention layer.*; of {names} there are no attention maps$"
        with pytest.raises(ValueError, match=message):
            find_attention(model)
    both = torch.nn.ModuleList([dilation, GroupSelfAttention(fields, fields, 1, 3)])
    for layer in ("0", dilation):
        with pytest.raises(ValueError, match=r"^layer: .*of DilationSelfAttention"):
            find_attention(both, layer)
    with pytest.raises(ValueError, match=r"LiftingSelfAttention\)$"):
        find_attention(torch.nn.ReLU())


def test_a_convolution_in_evaluation_mode_is_expanded_anew():
    """What the docstring says of weights that were changed since."""
    fields, _, _ = system()
    conv = nn.R2Conv(fields, fields, 3)
    model = torch.nn.Sequential(conv)
    conv.eval()
    filters = conv.filter.clone()
    torch.nn.init.zeros_(conv.weights)
    assert torch.equal(conv.filter, filters)
    with evaluating(model):
        pass
    assert (model.training, conv.training) == (True, False)
    assert (conv.filter == 0).all()


def test_a_layer_of_ones_own_is_found_by_what_it_offers():
    """And no other that has a part of it."""

    class Own(torch.nn.Module):
        def __init__(self, attention):
            super().__init__()
            self.plain, self.in_type, self.num_heads = attention.plain, attention.in_type, attention.num_heads

        def attention_maps(self, x, queries=None, poses=None):
            return self.plain.attention_maps(x, queries, poses)

    fields, attention, _ = system()
    own = Own(attention)
    assert attention_layers(torch.nn.Sequential(own)) == {"0": own}
    # Attention on responses has maps and no encoding; a plain module belongs to a layer.
    others = torch.nn.ModuleList([AttentiveConv(fields, fields, 3), attention.plain])
    assert attention_layers(others) == {}
    with pytest.raises(ValueError, match=r"LiftingSelfAttention\)$"):
        find_attention(others)
