"""Published weights, against the formulas of the published networks written out for each pair of poses."""

import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from escnn_attention.models import AllCNNC, GroupCNN, GroupDenseNet, ResNet44, from_published

DATA = Path(os.environ.get("ESCNN_ATTENTION_DATA", ""))
MNIST = [None, "full", "channel", "spatial", "features", "poses"]


pytestmark = pytest.mark.usefixtures("double")


def loaded(tensors):
    return from_published(tensors, kind="att_gconvs")


# ------------------------------------------------------------------------------------------------ the tensors, by name


def convolution(tensors, name, kind, outs, ins, size, poses, lifting=False, hidden=1, attention_size=7):
    """Random tensors of one convolution."""
    axis = () if lifting or poses == 1 else (poses,)
    scale = 1 / math.sqrt(ins * size**2)
    tensors[f"{name}.weight"] = scale * torch.randn(outs, ins, *axis, size, size)
    channel, spatial = f"{name}.channel_attention.weight_fc", f"{name}.spatial_attention.weight"
    if kind in ("full", "channel"):
        tensors[f"{channel}1"] = torch.randn(outs, hidden, ins, *axis)
        tensors[f"{channel}2"] = torch.randn(outs, ins, hidden, *axis)
    if kind == "features":
        tensors[f"{channel}1"] = torch.randn(hidden, ins, *axis)
        tensors[f"{channel}2"] = torch.randn(ins, hidden, *axis)
    if kind in ("full", "spatial"):
        tensors[spatial] = 0.3 * torch.randn(outs, 2, *axis, attention_size, attention_size)
    if kind == "features":
        tensors[spatial] = 0.3 * torch.randn(1, 2, *axis, attention_size, attention_size)
    if kind == "poses":
        tensors[spatial] = torch.randn(1, ins, *axis, 1, 1)


def norm(tensors, name, fields):
    for kind in ("weight", "running_var"):
        tensors[f"{name}.{kind}"] = 0.5 + torch.rand(fields)
    for kind in ("bias", "running_mean"):
        tensors[f"{name}.{kind}"] = 0.3 * torch.randn(fields)
    tensors[f"{name}.num_batches_tracked"] = torch.tensor(7)


def rotated_mnist(kind=None, poses=4, width=4, channels=1, classes=3, hidden=2):
    tensors = {}
    convolution(tensors, "c1", kind, width, channels, 3, poses, True, channels)
    for i in range(2, 7):
        convolution(tensors, f"c{i}", kind, width, width, 3, poses, hidden=hidden)
    convolution(tensors, "c7", kind, classes, width, 4, poses, hidden=hidden)
    for i in range(1, 7):
        norm(tensors, f"bn{i}", width)
    return tensors


def all_cnn_c(kind, poses, width=2):
    tensors, ins = {}, 3
    for i, (factor, size) in enumerate(
        [(1, 3), (1, 3), (1, 3), (2, 3), (2, 3), (2, 3), (2, 3), (2, 1), (0, 1)], start=1
    ):
        outs = factor * width or 5
        convolution(tensors, f"c{i}", kind, outs, ins, size, poses, i == 1, ins if i == 1 else ins // 2, 5)
        norm(tensors, f"bn{i}", outs)
        ins = outs
    return tensors


def resnet(kind, poses, widths=(2, 3, 5), blocks=2):
    tensors, ins = {}, widths[0]
    convolution(tensors, "c1", kind, ins, 3, 3, poses, True, 3)
    for stage, outs in zip(("layers_nc32", "layers_nc16", "layers_nc8"), widths, strict=True):
        for i in range(blocks):
            name = f"{stage}.{i}"
            norm(tensors, f"{name}.bn1", ins)
            norm(tensors, f"{name}.bn2", outs)
            hidden = [n // max(1, n // 2) for n in (ins, outs)]
            convolution(tensors, f"{name}.c1", kind, outs, ins, 3, poses, hidden=hidden[0])
            convolution(tensors, f"{name}.c2", kind, outs, outs, 3, poses, hidden=hidden[1])
            if i == 0 and stage != "layers_nc32":
                convolution(tensors, f"{name}.fiber_map", kind, outs, ins, 1, poses, hidden=hidden[0])
            ins = outs
    norm(tensors, "bn_out", ins)
    convolution(tensors, "c_out", kind, 5, ins, 1, poses, hidden=ins // max(1, ins // 2))
    return tensors


def dense_net(kind, poses, width=2, blocks=3):
    tensors, ins = {}, width
    convolution(tensors, "c1", kind, width, 3, 3, poses, True, 3)
    for i in range(blocks):
        last = i == blocks - 1
        hidden = ins // max(1, ins // 2)
        norm(tensors, f"block_layers.{i}.bn", ins)
        sizes = {"hidden": hidden, "attention_size": 5 if last else 7}
        convolution(tensors, f"block_layers.{i}.conv", kind, width, ins, 3, poses, **sizes)
        ins += width
        if not last:
            norm(tensors, f"trans_layers.{i}.bn", ins)
            convolution(tensors, f"trans_layers.{i}.conv", kind, ins, ins, 1, poses, hidden=ins // max(1, ins // 2))
    norm(tensors, "bn_out", ins)
    convolution(tensors, "c_out", kind, 2, ins, 1, poses, hidden=ins // max(1, ins // 2), attention_size=3)
    return tensors


# ---------------------------------------------------------------------------------------------------- the formulas


def turned(kernel, h):
    """What pose h makes of a kernel: a quarter turn h times, and from 4 on a flip after it."""
    kernel = torch.rot90(kernel, h % 4, (-2, -1))
    return kernel.flip(-2) if h >= 4 else kernel


def relative(h, g):
    """The pose g seen from the pose h."""
    if h >= 4:  # both are flipped back
        h, g = h - 4, (g + 4) % 8
    return (g - h) % 4 if g < 4 else 4 + (g - 4 + h) % 4


def poses_of(tensors):
    """The poses of the output of every convolution."""
    return next((t.shape[2] for n, t in tensors.items() if t.dim() == 5 and "attention" not in n), 1)


def responses(x, psi, padding, poses):
    """``(B, c, h, c̃, h̃, *space)`` of features ``(B, c̃, h̃, *space)``."""
    if psi.dim() == 4:
        psi = psi.unsqueeze(2)
    seen = range(x.shape[2])
    kernels = torch.stack(
        [
            torch.stack([turned(psi[:, :, relative(h, g) if len(seen) > 1 else 0], h) for g in seen], 2)
            for h in range(poses)
        ],
        1,
    )  # c, h, c̃, h̃, *kernel
    channels = x.shape[1] * x.shape[2]
    filters = kernels.flatten(0, 1).flatten(1, 2).transpose(0, 1).flatten(0, 1).unsqueeze(1)
    y = F.conv2d(x.flatten(1, 2), filters, padding=padding, groups=channels)
    return y.unflatten(1, (x.shape[1], x.shape[2], len(psi), poses)).permute(0, 3, 4, 1, 2, 5, 6)


def group_mlp(weight, s):
    """``Σ_h̃ W(h⁻¹h̃) s(h̃)`` of ``(B, fields, poses)``."""
    if weight.dim() == 2:
        return torch.einsum("oi,bih->boh", weight, s)
    poses = range(s.shape[2])
    table = torch.stack([torch.stack([weight[..., relative(h, g)] for g in poses], -1) for h in poses], 1)
    return torch.einsum("ohig,big->boh", table, s)


def convolve(t, name, x, padding=0, dilation=1):
    """One convolution with its attention: features ``(B, c̃, h̃, *space)`` to ``(B, c, h, *space)``."""
    psi, order = t[f"{name}.weight"], poses_of(t)
    lifting = x.shape[2] == 1
    factor = 1.0 if lifting else {4: math.pi / 2, 8: math.pi}[order]
    first, second = (t.get(f"{name}.channel_attention.weight_fc{i}") for i in (1, 2))
    spatial = t.get(f"{name}.spatial_attention.weight")
    dimensions = psi.dim() - 1
    of_responses = spatial is not None and len(spatial) == len(psi) and spatial.shape[-1] > 1 and first is None
    if (first is not None and first.dim() == dimensions) or of_responses:
        f = responses(x, psi, padding, order)
        attended = f
        if first is not None:
            table = [[0 if lifting else relative(h, g) for g in range(x.shape[2])] for h in range(order)]
            w1, w2 = (w.unsqueeze(-1) if lifting else w for w in (first, second))
            w1, w2 = w1[..., table], w2[..., table]  # c, out, in, h, h̃
            scores = 0
            for s in (f.mean((-2, -1)), f.amax((-2, -1))):  # B, c, h, c̃, h̃
                hidden = torch.einsum("cmihg,bchig->bcmhg", w1, s).relu()
                scores = scores + torch.einsum("cimhg,bcmhg->bchig", w2, hidden)
            attended = scores.sigmoid()[..., None, None] * f
        if spatial is not None:
            reach = spatial.shape[-1] // 2
            alpha = torch.zeros_like(f[:, :, :, 0])  # B, c, h, h̃, *space
            for c in range(f.shape[1]):
                for h in range(order):
                    for g in range(x.shape[2]):
                        kernel = spatial[c] if lifting else spatial[c][:, relative(h, g)]
                        statistics = torch.stack([attended[:, c, h, :, g].mean(1), attended[:, c, h, :, g].amax(1)], 1)
                        alpha[:, c, h, g] = F.conv2d(statistics, turned(kernel, h)[None], padding=reach)[:, 0].sigmoid()
            attended = alpha.unsqueeze(3) * attended
        return factor * (f - attended).sum((3, 4))
    if first is not None:
        scores = sum(group_mlp(second, group_mlp(first, s).relu()) for s in (x.mean((-2, -1)), x.amax((-2, -1))))
        attended = scores.sigmoid()[..., None, None] * x
        statistics = torch.stack([attended.mean(1), attended.amax(1)], 1)
        reach = dilation * (spatial.shape[-1] // 2)
        maps = dilated(statistics, spatial, reach, dilation, order)
        maps = maps.amax(2, keepdim=True) if lifting else factor * maps
        x = x - maps.sigmoid() * attended
    elif spatial is not None:
        maps = responses(x, spatial, 0, order).sum((3, 4))
        x = x - (maps.amax(2, keepdim=True) if lifting else factor * maps).sigmoid() * x
    return factor * responses(x, psi, padding, order).sum((3, 4))


def dilated(x, psi, padding, dilation, poses):
    """A group convolution with a dilated kernel."""
    wide = psi.new_zeros(*psi.shape[:-2], *[dilation * (n - 1) + 1 for n in psi.shape[-2:]])
    wide[..., ::dilation, ::dilation] = psi
    return responses(x, wide, padding, poses).sum((3, 4))


def normed(t, name, x):
    mean, variance, weight, bias = (
        t[f"{name}.{kind}"].view(-1, 1, 1, 1) for kind in ("running_mean", "running_var", "weight", "bias")
    )
    return ((x - mean) / (variance + 2e-5).sqrt() * weight + bias).relu()


def pooled(x, pool=F.max_pool2d):
    return pool(x.flatten(1, 2), 2).unflatten(1, x.shape[1:3])


def mnist_logits(t, images):
    x = images.unsqueeze(2)
    for i in range(1, 7):
        of_features = t.get("c1.channel_attention.weight_fc1", torch.zeros(1, 1, 1)).dim() == 2
        x = normed(t, f"bn{i}", convolve(t, f"c{i}", x, dilation=4 if i == 1 and of_features else 1))
        x = pooled(x) if i == 2 else x
    return convolve(t, "c7", x).amax(2).mean((-2, -1))


def all_cnn_c_logits(t, images):
    x = images.unsqueeze(2)
    for i in range(1, 10):
        x = convolve(t, f"c{i}", x, padding=1 if i < 8 else 0)
        x = normed(t, f"bn{i}", pooled(x) if i in (3, 6) else x)
    return x.mean((2, 3, 4))


def resnet_logits(t, images):
    x = convolve(t, "c1", images.unsqueeze(2), padding=1)
    for stage in ("layers_nc32", "layers_nc16", "layers_nc8"):
        for i in range(2):
            name = f"{stage}.{i}"
            y = convolve(t, f"{name}.c1", normed(t, f"{name}.bn1", x), padding=1)
            if f"{name}.fiber_map.weight" in t:
                x, y = pooled(convolve(t, f"{name}.fiber_map", x)), pooled(y)
            x = x + convolve(t, f"{name}.c2", normed(t, f"{name}.bn2", y), padding=1)
    return convolve(t, "c_out", normed(t, "bn_out", x).mean((-2, -1), keepdim=True)).mean((2, 3, 4))


def dense_net_logits(t, images):
    x = convolve(t, "c1", images.unsqueeze(2), dilation=4)
    for i in range(3):
        y = convolve(t, f"block_layers.{i}.conv", normed(t, f"block_layers.{i}.bn", x), dilation=(3, 2, 1)[i])
        x = torch.cat([y, x[..., 1:-1, 1:-1]], 1)
        if i < 2:
            x = convolve(t, f"trans_layers.{i}.conv", normed(t, f"trans_layers.{i}.bn", x), dilation=(3, 1)[i])
            x = pooled(x, F.avg_pool2d)
    return convolve(t, "c_out", normed(t, "bn_out", x)).mean((2, 3, 4))


def assert_same_logits(tensors, formula, poses, *images):
    network = loaded(tensors)
    assert network.gspace.fibergroup.order() == poses
    x = torch.randn(2, *images)
    with torch.no_grad():
        expected = formula(tensors, x)
        size = expected.abs().max().item()  # up to 1e9, with random weights
        torch.testing.assert_close(network(network.in_type(x)), expected, atol=1e-12 * size, rtol=0)
    assert expected.std() > 1e-3
    return network


# ------------------------------------------------------------------------------------------------------------- tests


@pytest.mark.parametrize("kind", MNIST)
def test_rotated_mnist(kind):
    network = assert_same_logits(rotated_mnist(kind), mnist_logits, 4, 1, 28, 28)
    assert isinstance(network, GroupCNN)
    assert not network.training


@pytest.mark.parametrize(("kind", "poses"), [(None, 1), (None, 8), ("features", 8)])
def test_rotated_mnist_on_other_groups(kind, poses):
    assert_same_logits(rotated_mnist(kind, poses, 2, channels=2, hidden=1), mnist_logits, poses, 2, 28, 28)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("kind", "poses"), [(None, 1), ("features", 4), ("features", 8)])
@pytest.mark.parametrize(
    ("make", "formula", "size", "network"),
    [
        (all_cnn_c, all_cnn_c_logits, 8, AllCNNC),
        (resnet, resnet_logits, 8, ResNet44),
        (dense_net, dense_net_logits, 20, GroupDenseNet),
    ],
)
def test_the_other_networks(make, formula, size, network, kind, poses):
    got = assert_same_logits(make(kind, poses), formula, poses, 3, size, size)
    assert isinstance(got, network)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["full", "features"])
def test_every_tensor_matters(kind):
    """So that a tensor that is not read, or read twice, is found out."""
    tensors, x = rotated_mnist(kind, width=2, hidden=1), torch.randn(1, 1, 28, 28)
    for name, tensor in tensors.items():
        if "channel_attention" in name:
            tensor.abs_().mul_(0.1)  # so that no hidden field is 0, and no sigmoid is 1
    logits = loaded(tensors)(x)
    for name, tensor in tensors.items():
        if not name.endswith("num_batches_tracked") and name.split(".")[0] in ("c1", "c2", "bn6"):
            other = loaded(tensors | {name: tensor.abs() + 0.1})(x)
            assert not torch.allclose(other, logits, atol=1e-9, rtol=0), name


def test_arrays_prefixes_and_precisions():
    tensors, x = rotated_mnist("features"), torch.randn(2, 1, 28, 28)
    logits = loaded(tensors)(x)
    arrays = {f"module.{name}": tensor.numpy() for name, tensor in tensors.items()}
    torch.testing.assert_close(loaded(arrays)(x), logits)
    few = {name: tensor for name, tensor in tensors.items() if not name.endswith("num_batches_tracked")}
    torch.testing.assert_close(loaded(few)(x), logits)
    torch.set_default_dtype(torch.float32)
    network = loaded(tensors)
    assert {p.dtype for p in network.parameters()} == {torch.float32}
    torch.testing.assert_close(network(x.float()).double(), logits, atol=1e-3, rtol=1e-3)


def test_files_that_hold_more_than_the_tensors():
    tensors, x = rotated_mnist("full", width=2, hidden=1), torch.randn(2, 1, 28, 28)
    logits = loaded(tensors)(x)
    for front in ("weight/", "weight/module."):
        arrays = {f"{front}{name}": tensor.numpy() for name, tensor in tensors.items()}
        others = {"input": x.numpy(), "labels": np.array(["one", "two"])}
        torch.testing.assert_close(loaded(arrays | others)(x), logits)
        with pytest.raises(ValueError, match=f"^{front}c3.weight: missing"):
            loaded({n: a for n, a in arrays.items() if n != f"{front}c3.weight"} | others)


def test_arrays_of_any_order_and_precision():
    tensors, x = rotated_mnist("spatial", width=2), torch.randn(2, 1, 28, 28)
    logits = loaded(tensors)(x)
    for kind in (">f8", np.longdouble):
        arrays = {
            name: tensor.numpy().astype(kind) if tensor.is_floating_point() else tensor.numpy()
            for name, tensor in tensors.items()
        }
        torch.testing.assert_close(loaded(arrays)(x), logits)
    backwards = {name: tensor.numpy()[::-1] if tensor.dim() else tensor.numpy() for name, tensor in tensors.items()}
    turned = {name: tensor.flip(0) if tensor.dim() else tensor for name, tensor in tensors.items()}
    torch.testing.assert_close(loaded(backwards)(x), loaded(turned)(x))


def changed(tensors, **options):
    for name, value in options.items():
        key = name.replace("__", ".")
        tensors.pop(key, None)
        if value is not None:
            tensors[key] = value
    return tensors


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", MNIST)
def test_a_tensor_that_is_missing_or_of_another_shape_is_named(kind):
    tensors = rotated_mnist(kind)
    for name, tensor in tensors.items():
        if name.split(".")[0] in ("c1", "c2", "c4", "c7", "bn3") and not name.endswith("num_batches_tracked"):
            with pytest.raises(ValueError, match=rf"^{name}: missing"):
                loaded({k: v for k, v in tensors.items() if k != name})
            if name.split(".")[0] in ("c2", "c4", "bn3"):
                with pytest.raises(ValueError, match=rf"^{name}: .*shape \({len(tensor) + 1},"):
                    loaded(tensors | {name: torch.cat([tensor, tensor[:1]])})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"c8__weight": torch.ones(1)}, r"^c8.weight: not a tensor of this network"),
        ({"a": torch.ones(1), "b": torch.ones(1)}, r"^a: not a tensor of this network, nor are 1 others: b"),
        ({"c3__bias": torch.ones(3)}, r"^c3.bias: not a tensor"),
        ({"c4__spatial_attention__weight": torch.ones(1, 2, 4, 7, 7)}, r"^c4.spatial_attention.weight: not a tensor"),
        ({"c1__weight": None}, r"^c1.weight: missing; got 36 tensors: c2.weight, "),
        ({"c1__weight": torch.ones(4, 1, 4, 3, 3)}, r"^c1.weight: .* \(4, 1, 4, 3, 3\), needed 4 dim"),
        ({"c2__weight": torch.full((4, 4, 4, 3, 3), math.nan)}, r"^c2.weight: got numbers that are not finite"),
        ({"bn2__running_var": -torch.ones(4)}, r"^bn2.running_var: got a variance that is negative"),
        ({"c7__weight": np.ones((0, 4, 4, 4, 4))}, r"^c7.weight: got an empty tensor of shape \(0, 4, 4, 4, 4\)"),
    ],
)
def test_mistakes(change, message):
    with pytest.raises(ValueError, match=message):
        loaded(changed(rotated_mnist(), **change))


def test_other_mistakes():
    ones = torch.ones(1)
    for value, message in (
        ([1.0], "got list"),
        *((np.ones(1).astype(kind), ".*needed real numbers") for kind in (object, "U1", complex)),
        *((tensor, ".*needed a dense") for tensor in (ones.to("meta"), ones.to_sparse(), ones + 0j)),
    ):
        with pytest.raises(TypeError, match=f"^c3.weight: {message}"):
            loaded(changed(rotated_mnist(), c3__weight=value))
    even = {n: t[..., :6, :6] if "spatial" in n else t for n, t in rotated_mnist("features").items()}
    for tensors, message in (
        (even, "c2.spatial_attention.weight: got a kernel"),
        ({}, "c7.weight: missing"),
        (rotated_mnist(poses=6), "c2.weight: got .*6 poses"),
        (rotated_mnist("features", width=6, hidden=4), "c2.channel_attention.weight_fc1: got 4 hidden"),
        (rotated_mnist("full", poses=8), "c2: .*'full', .* p4m"),
        (all_cnn_c("spatial", 4), "c2: .*'spatial', .* p4"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            loaded(tensors)


@pytest.mark.parametrize("name", ["p4cnn", "alpha_f_p4cnn"])
@pytest.mark.skipif(not (DATA / "authors").is_dir(), reason="ESCNN_ATTENTION_DATA names no folder with authors/")
def test_the_published_weights_give_the_published_logits(name):
    torch.set_default_dtype(torch.float32)
    with np.load(DATA / "authors" / f"{name}.npz") as file:
        arrays = {key: file[key] for key in file.files}
    network = loaded({k[7:]: v for k, v in arrays.items() if k.startswith("weight/")})
    with torch.no_grad():
        logits = network(network.in_type(torch.from_numpy(arrays["input"])))
    assert np.abs(logits.numpy() - arrays["logits"]).max() < 1e-4
    assert (logits.argmax(1).numpy() == arrays["labels"]).mean() > 0.9
