"""Attentive convolutions on tensors: the formula written out, what is held in memory, and precisions."""

import pytest
import torch
import torch.nn.functional as F
from escnn import gspaces

from escnn_attention import working_memory
from escnn_attention.functional.responses import attentive, responses
from escnn_attention.groups.fibers import fibers
from tests.layers import assert_formula
from tests.nn.attentive import VARIANTS, input_of, layer_on


def written_out(layer, x):
    """The formula, one output field and one pair of poses at a time, with all responses at once."""
    plain, gspace = layer.plain, layer.in_type.gspace
    group = fibers(gspace)
    kernel = plain.kernel()
    outs, out_poses, ins, in_poses = kernel.shape[:4]
    stride, padding, dilation, attention_dilation, circular = plain.geometry

    def conv(x, kernel, padding, **options):
        mode = "circular" if circular else "constant"
        x = F.pad(x, 2 * gspace.dimensionality * (padding,), mode)
        return [F.conv2d, F.conv3d][gspace.dimensionality - 2](x, kernel, **options)

    x = x.unflatten(1, (ins, in_poses))
    shared = min(out_poses, in_poses) == 1
    rows = []
    for c in range(outs):
        poses = []
        for h in range(out_poses):
            total = 0
            for g in range(in_poses):
                options = {"stride": stride, "dilation": dilation}
                responses = [
                    conv(x[:, i, g, None], kernel[c, h, i, g][None, None], padding, **options) for i in range(ins)
                ]
                f = torch.cat(responses, dim=1)
                alpha = torch.ones_like(f)
                relative = 0 if shared else int(group.quotient[h, g])
                if plain.squeeze is not None:
                    first = plain.squeeze.weight.unflatten(0, (outs, -1))[c, :, :, relative]
                    second = plain.excite.weight.unflatten(0, (outs, -1))[c, :, :, relative]
                    z = sum((s @ first.T).relu() @ second.T for s in (f.flatten(2).mean(2), f.flatten(2).amax(2)))
                    alpha = alpha * z.sigmoid().view(*z.shape, *[1] * gspace.dimensionality)
                if plain.spatial is not None:
                    attended = alpha * f
                    statistics = torch.stack([attended.mean(1), attended.amax(1)], dim=1)
                    psi = plain.spatial()[c, h, :, g][None]
                    reach = attention_dilation * (psi.shape[-1] // 2)
                    alpha = alpha * conv(statistics, psi, reach, dilation=attention_dilation).sigmoid()
                if plain.squeeze is None and plain.spatial is None:
                    alpha = 0 * f if plain.residual else alpha
                total = total + ((1 - alpha if plain.residual else alpha) * f).sum(1)
            poses.append(total)
        rows.append(torch.stack(poses, dim=1) + (0 if plain.bias is None else plain.bias[c]))
    return torch.stack(rows, dim=1).flatten(1, 2)


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    "options",
    [
        *({"residual": residual, **variant} for residual in (True, False) for variant in VARIANTS.values()),
        {"stride": 2},
        {"size": 4},
        {"attention_size": 5},
        {"padding_mode": "circular", "padding": 2, "dilation": 2, "attention_dilation": 2},
        {"padding_mode": "circular", "size": 4, "stride": 2, "padding": 1},
    ],
)
@pytest.mark.parametrize("kinds", [("regular", "regular"), ("trivial", "regular"), ("regular", "trivial")])
def test_values_and_gradients_are_those_of_the_formula(kinds, options):
    layer = layer_on(gspaces.flipRot2dOnR2(2), (3, 2), kinds, ratio=2, **options)
    x = input_of(layer, 6).tensor.requires_grad_()
    with working_memory(2**14):  # many chunks
        y = layer.plain(x)
        assert_formula(y, written_out(layer, x), [x, *layer.parameters()], 1e-11, 1e-11)
    assert y.shape == layer.evaluate_output_shape(tuple(x.shape))


def test_responses_are_never_all_there(monkeypatch):
    layer = layer_on(gspaces.rot2dOnR2(4), (4, 4)).float()
    x = input_of(layer, 12, batch=8, dtype=torch.float32)
    everything, sizes = 8 * 16 * 16 * 100, []
    make = responses._Chunk.__init__

    def watched(chunk, *arguments):
        make(chunk, *arguments)
        sizes.append(chunk.responses.numel())

    monkeypatch.setattr(responses._Chunk, "__init__", watched)
    with working_memory(attentive.COPIES * 4 * 10_000):
        layer(x).tensor.sum().backward()
    assert max(sizes) <= 10_000
    assert sum(sizes) == 2 * everything  # forward, and again in the backward pass
    assert len(sizes) > 1


def test_autograd_keeps_no_responses():
    """What is saved for the backward pass does not grow with the number of pairs of poses and fields."""
    layer = layer_on(gspaces.rot2dOnR2(4), (4, 4)).float()
    x = input_of(layer, 12, batch=8, dtype=torch.float32).tensor.requires_grad_()
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = layer.plain(x)
    assert y.requires_grad
    assert sum(kept.values()) < 4 * (8 * 16 * 16 * 100) / 4
