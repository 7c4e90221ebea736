"""Published GSA-Nets and GE-ViTs, against their formulas written out for each pair of poses."""

import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from escnn import gspaces

from escnn_attention.models import GSANet, from_published
from tests.models.published.mistakes import changing, check_names

pytestmark = pytest.mark.usefixtures("double")

HEADS, HIDDEN = 2, 5
PUBLISHED = {
    "rotmnist": ((2, 3), (1, 1), (True, False), False, 1, 8, 10),
    "cifar10": ((2, 2, 2), (1, 2, 1), (True, True, False), True, 3, 8, 10),
    "patch_camelyon": ((0, 1, 2, 1), (1, 2, 2, 2), (True,) * 4, True, 3, 8, 2),
}
"""Blocks, expansions, poolings, norms between, channels of the image, fields and classes."""


# --------------------------------------------------------------------------------------------- the group, as published


def rotation(angle):
    return torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])


def matrices(poses):
    """How rows and columns of offsets look from each pose."""
    return torch.stack([rotation(2 * math.pi * v / poses) for v in range(poses)])


def table(poses, kind):
    """The entry of the table of poses, of output v, query g and key m."""
    v, g, m = torch.meshgrid(*[torch.arange(poses)] * 3, indexing="ij")
    return ((m - g + v) if kind == "g_selfatt" else (2 * g - m - v)) % poses


def offsets(poses, size, kernel):
    """Rows and columns of offsets from each pose: of a window, or of all pairs of an image."""
    if kernel is not None:
        axis = torch.linspace(-1, 1, kernel)
        grid = torch.stack(torch.meshgrid(axis, axis, indexing="ij"))
    else:
        positions = torch.arange(size) / (size - 1)
        axis = positions[None] - positions[:, None]  # of a query, to a key
        shape = (size,) * 4
        grid = torch.stack([axis[:, None, :, None].expand(shape), axis[None, :, None, :].expand(shape)])
    return torch.einsum("voi,i...->vo...", matrices(poses), grid).unbind(1)


# -------------------------------------------------------------------------------------------- the tensors, by name


def linear(tensors, name, outs, ins, axes, *, bias=True):
    tensors[f"{name}.weight"] = torch.randn(outs, ins, *[1] * axes) / math.sqrt(ins)
    if bias:
        tensors[f"{name}.bias"] = torch.randn(outs)


def norm(tensors, name, fields):
    tensors[f"{name}.layer_norm.weight"], tensors[f"{name}.layer_norm.bias"] = torch.randn(fields), torch.randn(fields)


def attention(tensors, name, ins, outs, poses, size, kernel, kind, *, lifts=False):
    middle, axes = outs // 2, 2 if lifts else 3
    each = middle // 2 if lifts else middle // 3
    for what in ("query", "key", "value"):
        linear(tensors, f"{name}.{what}", middle * HEADS, ins, axes)
    linear(tensors, f"{name}.wout", outs, middle * HEADS, 3)
    for what in ("row", "col"):
        linear(tensors, f"{name}.{what}_embedding.0", HIDDEN, 1, 2)
        norm(tensors, f"{name}.{what}_embedding.1", HIDDEN)
        linear(tensors, f"{name}.{what}_embedding.3", each, HIDDEN, 2)
    tensors[f"{name}.row_indices"], tensors[f"{name}.col_indices"] = offsets(poses, size, kernel)
    tensors[f"{name}.group._elements"] = torch.arange(poses)[:, None]
    if not lifts:
        tensors[f"{name}.group_embedding.weight"] = 2 * torch.randn(poses, middle - 2 * each)
        tensors[f"{name}.g_indices"] = table(poses, kind)


def network(poses, kind, structure, *, size=4, kernel=3):
    """Tensors of a network: names and shapes of the published modules."""
    blocks, expansions, pools, between, channels, fields, classes = structure
    tensors = {"group._elements": torch.arange(poses)[:, None]}
    attention(tensors, "lifting_self_attention", channels, fields, poses, size, kernel, kind, lifts=True)
    norm(tensors, "lifting_normalization", fields)
    i = 0
    for number, expansion, pool in zip(blocks, expansions, pools, strict=True):
        for j in range(number):
            name, wider = f"transformer.{i}", fields * (expansion if j == 0 else 1)
            norm(tensors, f"{name}.attention.0", fields)
            attention(tensors, f"{name}.attention.2", fields, wider, poses, size, kernel, kind)
            norm(tensors, f"{name}.attention.3", wider)
            if wider != fields:
                linear(tensors, f"{name}.shortcut.0", wider, fields, 3)
            linear(tensors, f"{name}.mlp.0", wider // 2, wider, 3)
            norm(tensors, f"{name}.mlp.1", wider // 2)
            linear(tensors, f"{name}.mlp.3", wider, wider // 2, 3)
            norm(tensors, f"{name}.mlp.4", wider)
            fields, i = wider, i + 1
            if between:
                norm(tensors, f"transformer.{i}", fields)
                i += 2
        i += pool
        size //= 1 + pool
    linear(tensors, f"transformer.{i}", classes, fields, 3, bias=False)
    return tensors


# ------------------------------------------------------------------------------------------------------ the formulas


def mapped(tensors, name, x):
    """A map of channels, of features (B, C, ...)."""
    weight, bias = tensors[f"{name}.weight"].flatten(1), tensors.get(f"{name}.bias", torch.zeros(1))
    return torch.einsum("oc,bc...->bo...", weight, x) + bias.view(-1, *[1] * (x.dim() - 2))


def normed(tensors, name, x):
    return F.group_norm(x, 1, tensors[f"{name}.layer_norm.weight"], tensors[f"{name}.layer_norm.bias"], 1e-12)


def encoded(tensors, name, values):
    """The network of one coordinate, (..., channels)."""
    x = mapped(tensors, f"{name}.0", values.reshape(-1, 1))
    return mapped(tensors, f"{name}.3", F.silu(normed(tensors, f"{name}.1", x))).view(*values.shape, -1)


def attended(tensors, name, x):
    """GSA-Nets, Eqs. 14 and 16 with the table as published, of features (B, C, poses, rows, columns).

    Without a table it lifts features that have a single pose.
    """
    ins, height, width = x.shape[1], *x.shape[3:]
    rows, columns = tensors[f"{name}.row_indices"], tensors[f"{name}.col_indices"]
    q, k, v = (
        mapped(tensors, f"{name}.{what}", x).unflatten(1, (-1, HEADS)) for what in ("query", "key", "value")
    )  # B, channels, heads, poses, rows, columns
    lifts = f"{name}.g_indices" not in tensors
    each = q.shape[1] // (2 if lifts else 3)
    of_rows, of_columns, of_poses = q.split([each, each, q.shape[1] - 2 * each], dim=1)
    scores = torch.einsum("bchgij,bchmkl->bhgijmkl", q, k)[:, :, None]  # of output pose, query, key
    positions = torch.stack(torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij"))
    delta = positions[:, None, None] - positions[..., None, None]  # of query and key
    for part, what, values in ((of_rows, "row", rows), (of_columns, "col", columns)):
        encoding = encoded(tensors, f"{name}.{what}_embedding", values)
        if values.dim() == 3:
            reach = values.shape[-1] // 2
            outside = (delta.abs() > reach).any(0)
            encoding = encoding[:, (delta[0] + reach).clamp(0, 2 * reach), (delta[1] + reach).clamp(0, 2 * reach)]
            scores = scores.masked_fill(outside[:, :, None], -torch.inf)
        scores = scores + torch.einsum("bchgij,vijklc->bhvgijkl", part, encoding).unsqueeze(6)
    if not lifts:
        embedding = tensors[f"{name}.group_embedding.weight"][tensors[f"{name}.g_indices"]]
        scores = scores + torch.einsum("bchgij,vgmc->bhvgijm", of_poses, embedding)[..., None, None]
    weights = (scores / math.sqrt(ins)).flatten(-3).softmax(-1).view_as(scores)
    return mapped(tensors, f"{name}.wout", torch.einsum("bhvgijmkl,bchmkl->bchvij", weights, v).flatten(1, 2))


def block(tensors, name, x, crop):
    y = attended(tensors, f"{name}.attention.2", F.silu(normed(tensors, f"{name}.attention.0", x)))
    y = F.silu(normed(tensors, f"{name}.attention.3", y))
    y = y + (mapped(tensors, f"{name}.shortcut.0", x) if f"{name}.shortcut.0.weight" in tensors else x)
    y = y[..., crop : y.shape[-2] - crop, crop : y.shape[-1] - crop]
    z = F.silu(normed(tensors, f"{name}.mlp.1", mapped(tensors, f"{name}.mlp.0", y)))
    return y + normed(tensors, f"{name}.mlp.4", mapped(tensors, f"{name}.mlp.3", z))


def lifted(tensors, x):
    y = attended(tensors, "lifting_self_attention", x[:, :, None])
    return F.silu(normed(tensors, "lifting_normalization", y))


def logits(tensors, x, structure, crops):
    y, i, margins = lifted(tensors, x), 0, iter(crops)
    for number, _, pool in zip(*structure[:3], strict=True):
        for _ in range(number):
            y, i = block(tensors, f"transformer.{i}", y, next(margins)), i + 1
            if structure[3]:
                y, i = F.silu(normed(tensors, f"transformer.{i}", y)), i + 2
        if pool:
            y, i = F.max_pool3d(y, (1, 2, 2)), i + 1
    return mapped(tensors, f"transformer.{i}", y).sum((-2, -1)).amax(-1)


# ------------------------------------------------------------------------------------------------------------ the tests

SMALL = ((1, 1), (1, 2), (True, False), True, 2, 8, 3)


@pytest.mark.sampled
@pytest.mark.parametrize(("poses", "kind"), [(1, "g_selfatt"), (2, "gevit"), (4, "gevit")])
@pytest.mark.parametrize("kernel", [3, None])
@pytest.mark.slow
def test_equivariant_networks_give_the_published_logits(poses, kind, kernel):
    tensors, x = network(poses, kind, SMALL, kernel=kernel), torch.randn(2, 2, 4, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        ours = from_published(tensors, kind, crops=(0, 0))
    expected = logits(tensors, x, SMALL, (0, 0))
    torch.testing.assert_close(ours(x), expected, rtol=1e-12, atol=1e-12)
    # Every tensor has its place: another value of it is another output, but for constants of all scores of a query.
    constant = ("indices", "_elements", "key.bias", "embedding.3.bias", *["group_embedding.weight"][: poses == 1])
    others = [name for name in tensors if not name.endswith(constant)]
    for name in others[:: max(1, len(others) // 6)]:
        changed = from_published(tensors | {name: tensors[name] + torch.randn_like(tensors[name])}, kind, crops=(0, 0))(
            x
        )
        assert (changed - expected).abs().max() > 1e-9, name
    # And turned images give the same.
    turned = x.rot90(4 // poses if poses > 1 else 0, (-2, -1))
    torch.testing.assert_close(ours(turned), expected, rtol=1e-12, atol=1e-12)


def test_eighth_turns_of_a_global_network():
    tensors, x = network(8, "gevit", SMALL, kernel=None), torch.randn(1, 2, 4, 4)
    expected = logits(tensors, x, SMALL, (0, 0))
    torch.testing.assert_close(from_published(tensors, "gevit", crops=(0, 0))(x), expected, rtol=1e-12, atol=1e-12)


def test_group_layers_of_gsa_nets_agree_at_the_identity():
    structure = ((1,), (1,), (False,), False, 2, 8, 3)
    tensors, x = network(4, "g_selfatt", structure), torch.randn(1, 2, 5, 5)
    with pytest.warns(UserWarning, match=r"g_selfatt: .*does not commute"):
        ours = from_published(tensors, "g_selfatt", crops=(0,))
    maps = {name: y.tensor.unflatten(1, (-1, 4)) for name, y in ours.feature_maps(x).items()}
    theirs = lifted(tensors, x)
    order = [0, 3, 2, 1]  # They turn what is seen, and poses here are turned themselves.
    torch.testing.assert_close(maps["lifting"], theirs[:, :, order], rtol=1e-12, atol=1e-12)
    layer = ours.stages["attention_1_1"][0]
    y = F.silu(normed(tensors, "transformer.0.attention.0", theirs))
    theirs = attended(tensors, "transformer.0.attention.2", y)[:, :, order]
    y = layer.in_type(y[:, :, order].flatten(1, 2))
    difference = (layer.attention(y).tensor.unflatten(1, (-1, 4)) - theirs).abs().amax((0, 1, 3, 4))
    assert difference[0] < 1e-12
    assert difference[1:].min() > 1e-6
    # The published logits change when an image is turned, and those here do not.
    turned = x.rot90(1, (-2, -1))
    assert (logits(tensors, turned, structure, (0,)) - logits(tensors, x, structure, (0,))).abs().max() > 1e-6
    torch.testing.assert_close(ours(turned), ours(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", PUBLISHED)
def test_structures_of_the_published_networks_are_known(name):
    tensors = network(1, "g_selfatt", PUBLISHED[name])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        ours = from_published({f"module.{n}": t for n, t in tensors.items()}, "g_selfatt")
    assert [str(w.message) for w in caught if "pools 7" in str(w.message)] == [
        str(w.message) for w in caught if name == "patch_camelyon" and "commute" in str(w.message)
    ]
    assert len(caught) == (name == "patch_camelyon")
    same = getattr(GSANet, name)(gspaces.trivialOnR2(), channels=8, num_heads=HEADS, kernel_size=3)
    crops = [[m.margin for m in n.modules() if hasattr(m, "margin") and hasattr(m, "in_type")] for n in (ours, same)]
    assert crops[0] == crops[1]
    assert [stage for stage in ours.stages if stage != "sum"] == list(same.stages)


def test_groups_are_told_by_what_their_poses_see():
    def of(seen):
        tensors = network(len(seen), "gevit", SMALL)
        axis = torch.linspace(-1, 1, 3)
        grid = torch.stack(torch.meshgrid(axis, axis, indexing="ij"))
        rows, columns = torch.einsum("voi,ikl->vokl", seen, grid).unbind(1)
        name = "lifting_self_attention"
        return tensors | {f"{name}.row_indices": rows, f"{name}.col_indices": columns}

    flip = torch.diag(torch.tensor([1.0, -1.0]))
    for seen, gspace in (
        (torch.stack([torch.eye(2), flip]), gspaces.flip2dOnR2(axis=math.pi / 2)),
        (torch.stack([torch.eye(2), -flip]), gspaces.flip2dOnR2(axis=0.0)),
        (torch.cat([matrices(4), flip @ matrices(4)]), gspaces.flipRot2dOnR2(4)),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            assert from_published(of(seen), "gevit", crops=(0, 0)).gspace == gspace
    with pytest.raises(ValueError, match=r"row_indices: the 4 maps"):
        from_published(of(matrices(5)[:4]), "gevit", crops=(0, 0))


def test_bad_state_dicts():
    tensors = network(4, "gevit", SMALL)
    load, layer = changing(tensors, "gevit", crops=(0, 0)), "transformer.0.attention.2"
    missing = ("lifting_self_attention.wout.bias", f"{layer}.query.weight", f"{layer}.g_indices")
    longer = (f"{layer}.key.weight", "transformer.4.mlp.1.layer_norm.bias", f"{layer}.group_embedding.weight")
    check_names(load, tensors, missing, longer)
    for change, message in (
        ({"transformer.7.weight": None}, "transformer.N.weight: missing"),
        ({"transformer.9.mlp.7.bias": torch.ones(2)}, "transformer.9"),
        ({f"{layer}.scale": torch.ones(2)}, f"{layer}.scale: not a tensor of this network"),
        ({f"{layer}.g_indices": tensors[f"{layer}.g_indices"] + 1}, f"{layer}.g_indices: got entries from 1 to 4"),
        ({"lifting_normalization.running_mean": torch.ones(8)}, "lifting_normalization.running_mean: .* batch norms"),
        ({"lifting_self_attention.row_indices": torch.ones(4, 1, 1)}, "lifting_self_attention.row_indices: .* single"),
        ({"lifting_self_attention.query.weight": torch.ones(7, 2, 1, 1)}, "lifting_self_attention.query.weight: got 7"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            load(change)
    with pytest.raises(ValueError, match=r"^crops: .*none with \(1, 1\)"):
        from_published(tensors, "gevit")
    with pytest.raises(ValueError, match=r"^crops: got 1 values"):
        load({}, crops=(0,))
