"""Published octic vision transformers, against their formulas written out between irreps."""

import math

import pytest
import torch
import torch.nn.functional as F

from escnn_attention import assert_equivariant
from escnn_attention.models import VisionTransformer, from_published
from tests.models.published.mistakes import changing, check_names

pytestmark = pytest.mark.usefixtures("double")

FIELDS, HEADS, CHANNELS, CLASSES, PATCH, GRID, HIDDEN = 4, 2, 2, 3, 4, 4, 3
WIDTH, IRREPS = 8 * FIELDS, ("A1", "A2", "B1", "B2")


def state(octic=1, ordinary=1, *, invariant=False, token=True, scale="gamma_", bias=True, dino=False, registers=0):
    """Tensors of a network: names and shapes of the published modules."""
    tensors = {}

    def linear(name, outs, ins, *, bias=True):
        tensors[f"{name}.weight"] = torch.randn(outs, ins) / math.sqrt(ins)
        if bias:
            tensors[f"{name}.bias"] = torch.randn(outs)

    def of_irreps(name, outs, ins, *, bias=True):
        for irrep in IRREPS:
            linear(f"{name}.lin_{irrep}", outs, ins, bias=bias and irrep == "A1")
        linear(f"{name}.lin_E", 2 * outs, 2 * ins, bias=False)

    def gains(name):
        for irrep in (*IRREPS, "E"):
            tensors[f"{name}.alpha_{irrep}"] = torch.randn(FIELDS * (1 + (irrep == "E")))

    for name in (*IRREPS, "E_left", "E_right"):
        tensors[f"patch_embed.lift8.conv_{name}.weight"] = torch.randn(FIELDS, CHANNELS, PATCH // 2, PATCH // 2)
    tensors["patch_embed.lift8.conv_A1.bias"] = torch.randn(FIELDS)
    tensors |= {f"pos_embed.{i}": torch.randn(GRID // 2, GRID // 2, FIELDS) for i in range(6)}
    if token:
        tensors["cls_token.0"] = torch.randn(1, 1, FIELDS)
        tensors |= {f"cls_token.{i}": torch.zeros(1, 1, FIELDS) for i in (1, 2, 3)}
        tensors["cls_token.4"] = torch.zeros(1, 1, 2, 2 * FIELDS)
    for name, shape in (("cls_token", (1, 1)), ("register_tokens", (1, registers)), ("mask_token", (1,))):
        if dino and 0 not in shape:
            tensors[f"{name}.0"] = torch.randn(*shape, FIELDS)
            tensors |= {f"{name}.{i}": torch.zeros(*shape, FIELDS) for i in range(1, 8)}
    for i in range(octic + ordinary):
        name, make = f"blocks.{i}", of_irreps if i < octic else linear
        parts = 1 if i < octic else 8
        make(f"{name}.attn.qkv", 3 * parts * FIELDS, parts * FIELDS, bias=bias)
        make(f"{name}.attn.proj", parts * FIELDS, parts * FIELDS)
        make(f"{name}.mlp.fc1", parts * HIDDEN, parts * FIELDS)
        make(f"{name}.mlp.fc2", parts * FIELDS, parts * HIDDEN)
        for number in (1, 2):
            if i < octic:
                gains(f"{name}.norm{number}.scaling")
                tensors[f"{name}.norm{number}.scaling.beta"] = torch.randn(FIELDS)
                if scale:
                    gains(f"{name}.{scale}{number}")
                continue
            tensors[f"{name}.norm{number}.weight"] = torch.randn(WIDTH)
            tensors[f"{name}.norm{number}.bias"] = torch.randn(WIDTH)
            if scale:
                tensors[f"{name}.{scale}{number}" + (".gamma" if scale == "ls" else "")] = torch.randn(WIDTH)
    if invariant:
        linear("invariant_proj", WIDTH, 6 * FIELDS)
    tensors |= {"norm.weight": torch.randn(WIDTH), "norm.bias": torch.randn(WIDTH)}
    if not dino:
        linear("head", CLASSES, WIDTH)
    return tensors


# ------------------------------------------------------------------------------------------------------ the formulas


def table(quarter, turn, flip):
    """A table of an irrep of one dimension: each number at the eight places of its orbit, by its sign there."""
    n, full = 2 * quarter.shape[-1], quarter.new_zeros(*quarter.shape[:-2], *[2 * quarter.shape[-1]] * 2)
    for i in range(n // 2):
        for j in range(n // 2):
            a, b = i, j
            for k in range(4):
                full[..., a, b] += turn**k * quarter[..., i, j]
                full[..., a, n - 1 - b] += turn**k * flip * quarter[..., i, j]
                a, b = n - 1 - b, a  # a quarter turn
    return full


def table_of_e(quarter):
    """The tables of both components of E, the second the first one rotated."""
    rows = torch.cat([quarter, quarter.flip(-2)], dim=-2)
    first = torch.cat([rows, -rows.flip(-1)], dim=-1)
    return first, first.rot90(1, (-2, -1))


def tables(quarters, gain, gain_of_e):
    """Those of A1, A2, B1, B2, and of E with its components in front of the fields."""
    signs = ((1, 1), (1, -1), (-1, 1), (-1, -1))
    ones = [gain * table(q, *sign) for q, sign in zip(quarters, signs, strict=False)]
    pairs = [torch.stack(table_of_e(q)) for q in quarters[4:]]
    return [*ones, gain_of_e * torch.cat(pairs, dim=1)]


def regular():
    """The matrix to the values of a regular field, of A1, A2, B1, B2 and both components of two fields of E."""
    turn, flip = torch.tensor([[0.0, -1.0], [1.0, 0.0]]), torch.tensor([[-1.0, 0.0], [0.0, 1.0]])
    first, rows = torch.tensor([1.0, 1, 1, 1, 1, 1, 1, -1]) / math.sqrt(8), []
    for f in (0, 1):
        for k in range(4):
            e = torch.matrix_power(turn, k) @ torch.matrix_power(flip, f)
            signs = [torch.tensor([[sign]]) for sign in (1.0, (-1.0) ** f, (-1.0) ** k, (-1.0) ** (k + f))]
            rows.append(first @ torch.block_diag(*signs, e, e))
    return torch.stack(rows)


def mapped(tensors, name, xs):
    ys = [F.linear(x, tensors[f"{name}.lin_{irrep}.weight"]) for irrep, x in zip((*IRREPS, "E"), xs, strict=True)]
    return [ys[0] + tensors.get(f"{name}.lin_A1.bias", torch.zeros(1)), *ys[1:]]


def scaled(tensors, name, xs):
    if f"{name}.alpha_A1" not in tensors:
        return xs
    return [x * tensors[f"{name}.alpha_{irrep}"] for irrep, x in zip((*IRREPS, "E"), xs, strict=True)]


def normed(tensors, name, xs):
    centred = [x - x.mean(-1, keepdim=True) for x in xs]
    variances = [x.square().mean(-1, keepdim=True) for x in centred]
    std = ((sum(variances[:4]) + variances[4].mean(-2) + 1e-5) / 8).sqrt()
    ys = scaled(tensors, f"{name}.scaling", [*(x / std for x in centred[:4]), centred[4] / std[..., None]])
    return [ys[0] + tensors[f"{name}.scaling.beta"], *ys[1:]]


def activated(xs):
    """GELU of the values at the eight poses; of E the first and the second half belong together."""
    of_e = torch.cat([x.movedim(-2, 0) for x in xs[4].chunk(2, dim=-1)])
    values = torch.einsum("gi,i...->g...", regular(), torch.stack([*xs[:4], *of_e]))
    back = torch.einsum("gi,g...->i...", regular(), F.gelu(values))
    return [*back[:4], torch.cat([back[4:6].movedim(0, -2), back[6:].movedim(0, -2)], dim=-1)]


def attended(tensors, name, xs):
    """Scores are sums over all irreps."""
    of_heads = []
    for x in mapped(tensors, f"{name}.qkv", xs):
        parts = x.unflatten(-1, (3, HEADS, -1))  # tokens, (components,) kinds, heads, channels
        of_heads.append(parts if x.dim() == 2 else parts.permute(0, 2, 3, 1, 4).flatten(-2))
    q, k, v = torch.cat(of_heads, dim=-1).unbind(1)
    y = F.scaled_dot_product_attention(*(t.transpose(0, 1) for t in (q, k, v))).transpose(0, 1)
    *ones, pairs = y.split([FIELDS // HEADS] * 4 + [4 * FIELDS // HEADS], dim=-1)
    pairs = pairs.unflatten(-1, (2, -1)).transpose(1, 2).flatten(2)
    return mapped(tensors, f"{name}.proj", [*(y.flatten(1) for y in ones), pairs])


def octic_block(tensors, name, xs):
    scale = "gamma_" if f"{name}.gamma_1.alpha_A1" in tensors else "ls"
    ys = attended(tensors, f"{name}.attn", normed(tensors, f"{name}.norm1", xs))
    xs = [x + y for x, y in zip(xs, scaled(tensors, f"{name}.{scale}1", ys), strict=True)]
    ys = activated(mapped(tensors, f"{name}.mlp.fc1", normed(tensors, f"{name}.norm2", xs)))
    ys = scaled(tensors, f"{name}.{scale}2", mapped(tensors, f"{name}.mlp.fc2", ys))
    return [x + y for x, y in zip(xs, ys, strict=True)]


def block(tensors, name, x):
    def linear(part, x):
        return F.linear(x, tensors[f"{name}.{part}.weight"], tensors.get(f"{name}.{part}.bias"))

    def norm(number, x):
        return F.layer_norm(x, (WIDTH,), *(tensors[f"{name}.norm{number}.{kind}"] for kind in ("weight", "bias")), 1e-6)

    gains = [tensors.get(f"{name}.gamma_{i}", tensors.get(f"{name}.ls{i}.gamma", torch.ones(1))) for i in (1, 2)]
    q, k, v = linear("attn.qkv", norm(1, x)).unflatten(-1, (3, HEADS, -1)).permute(1, 2, 0, 3)
    y = F.scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1)
    x = x + gains[0] * linear("attn.proj", y)
    return x + gains[1] * linear("mlp.fc2", F.gelu(linear("mlp.fc1", norm(2, x))))


def tokens(tensors, image):
    """The features of all tokens of one image."""
    names = (*IRREPS, "E_left", "E_right")
    kernels = tables([tensors[f"patch_embed.lift8.conv_{n}.weight"] for n in names], math.sqrt(2) / 4, 0.5)
    xs = [F.conv2d(image, kernel, stride=PATCH).flatten(1).T for kernel in kernels[:4]]
    xs[0] = xs[0] + tensors["patch_embed.lift8.conv_A1.bias"]
    xs.append(torch.stack([F.conv2d(image, kernel, stride=PATCH).flatten(1).T for kernel in kernels[4]], dim=1))
    positions = tables([tensors[f"pos_embed.{i}"].movedim(-1, 0) for i in range(6)], 1, 1)
    for i, position in enumerate(positions):
        xs[i] = xs[i] + (position.flatten(1).T if i < 4 else position.flatten(2).permute(2, 0, 1))
    for name in ("register_tokens", "cls_token"):  # the one behind the other
        if f"{name}.0" in tensors:
            first = tensors[f"{name}.0"][0]
            xs = [torch.cat([first if i == 0 else x.new_zeros(len(first), *x.shape[1:]), x]) for i, x in enumerate(xs)]
    number = 0
    while f"blocks.{number}.attn.qkv.lin_A1.weight" in tensors:
        xs = octic_block(tensors, f"blocks.{number}", xs)
        number += 1
    if "invariant_proj.weight" in tensors:
        x = torch.cat([xs[0], *(x.abs() for x in xs[1:4]), xs[4].norm(dim=1)], dim=-1)
        x = F.linear(x, tensors["invariant_proj.weight"], tensors["invariant_proj.bias"])
    else:
        x = torch.cat([*xs[:4], *(x.flatten(1) for x in xs[4].chunk(2, dim=-1))], dim=-1)
    while f"blocks.{number}.attn.qkv.weight" in tensors:
        x = block(tensors, f"blocks.{number}", x)
        number += 1
    return F.layer_norm(x, (WIDTH,), tensors["norm.weight"], tensors["norm.bias"], 1e-6)


def logits(tensors, image):
    """The logits of one image, or the features of its class token."""
    x = tokens(tensors, image)
    x = x[0] if "cls_token.0" in tensors else x.mean(0)
    return F.linear(x, tensors["head.weight"], tensors["head.bias"]) if "head.weight" in tensors else x


# ------------------------------------------------------------------------------------------------------------ the tests


@pytest.mark.sampled(2)
@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"octic": 2, "ordinary": 2},
        {"scale": "ls", "bias": False},
        {"token": False, "scale": ""},
        {"octic": 0, "ordinary": 2},
        {"octic": 2, "ordinary": 0},
        {"dino": True, "scale": "ls"},
        {"dino": True, "scale": "ls", "registers": 2},
    ],
    ids=["DeiT-III", "timm", "mean", "ordinary", "octic", "DINOv2", "registers"],
)
@pytest.mark.slow
def test_networks_give_the_published_outputs(options, invariant):
    tensors = state(invariant=invariant, **options)
    wrapper = "backbone." if "dino" in options else "module."
    ours = from_published({f"{wrapper}{n}": t for n, t in tensors.items()}, "octic_vit", num_heads=HEADS)
    assert isinstance(ours, VisionTransformer)
    x = torch.randn(2, CHANNELS, PATCH * GRID, PATCH * GRID)
    expected = torch.stack([logits(tensors, image) for image in x])
    torch.testing.assert_close(ours(x), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours.export()(x), expected, rtol=1e-12, atol=1e-12)
    everything = torch.stack([tokens(tensors, image) for image in x])
    torch.testing.assert_close(ours.tokens(x), everything, rtol=1e-12, atol=1e-12)
    if invariant:
        assert_equivariant(ours.as_fields(), x.shape, tolerance=1e-12)
    else:  # The negative control: the hybrid sees how the image lies.
        assert (ours(x.rot90(1, (-2, -1))) - expected).abs().max() > 1e-3


def test_bad_state_dicts():
    tensors = state()
    load = changing(tensors, "octic_vit", num_heads=HEADS)
    missing = ("patch_embed.lift8.conv_B1.weight", "pos_embed.5", "blocks.0.attn.proj.lin_E.weight", "head.weight")
    longer = ("blocks.0.norm1.scaling.beta", "blocks.1.mlp.fc2.weight", "norm.bias", "pos_embed.3")
    check_names(load, tensors, missing, longer)
    with pytest.raises(ValueError, match=r"^register_tokens.0: got registers"):
        load({"register_tokens.0": torch.ones(1, 2, FIELDS)})
    with pytest.raises(ValueError, match=r"^mask_token.0: missing|^mask_token.1: missing"):
        load({"mask_token.0": torch.ones(1, FIELDS)})
    of_dino = state(dino=True, token=False, registers=2)
    for name in ("register_tokens.5", "cls_token.7", "mask_token.1"):
        with pytest.raises(ValueError, match=rf"^{name}: .*zeros"):
            load(of_dino | {n: None for n in tensors if n not in of_dino} | {name: of_dino[name] + 1})
    with pytest.raises(ValueError, match=r"^cls_token.2: .*zeros"):
        load({"cls_token.2": torch.ones(1, 1, FIELDS)})
    with pytest.raises(ValueError, match=r"^num_heads: got 3"):
        load({}, num_heads=3)
