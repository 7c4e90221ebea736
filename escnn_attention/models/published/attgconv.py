"""The published weights of attentive group convolutional networks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from escnn import gspaces
from escnn.gspaces import GSpace
from escnn.nn import EquivariantModule, InnerBatchNorm, SequentialModule

from escnn_attention.models.checkpoint import Checkpoint
from escnn_attention.models.classifier import EquivariantClassifier
from escnn_attention.models.convolutions import Attention
from escnn_attention.models.group_cnns import AllCNNC, GroupCNN, GroupDenseNet, ResNet44
from escnn_attention.nn.attentive import AttentiveConv, FeatureAttention, PoseAttention
from escnn_attention.plain.attentive import PoseKernel


def from_attgconv(checkpoint: Checkpoint) -> EquivariantClassifier:
    r"""The network of a checkpoint of attentive group convolutions, by the names and shapes of its tensors.

    It loads every network that the published scripts train. All-CNN-Cs with attention on responses, which are never
    trained, are refused. The published layers multiply their responses by a constant: :math:`\pi/2` on p4, :math:`\pi`
    on p4m. Here it is part of the weights; those of the attention on responses are divided by it.
    """
    if checkpoint.any("block_layers."):
        network, parts = _dense_net(checkpoint)
    elif checkpoint.any("layers_nc"):
        network, parts = _resnet(checkpoint)
    elif checkpoint.any("c9."):
        network, parts = _all_cnn_c(checkpoint)
    else:
        network, parts = _group_cnn(checkpoint)
    factor = _FACTORS[network.order]
    with torch.no_grad():
        for name, attention, module in parts:
            if isinstance(module, InnerBatchNorm):
                _load_norm(checkpoint, name, module)
            else:
                assert isinstance(module, AttentiveConv)
                _load_convolution(checkpoint, name, attention, module, factor)
    checkpoint.check_used()
    return network.eval()


_Part = tuple[str, EquivariantModule | None, EquivariantModule]
"""A published name, and the modules with its weights: an attention, if any, and a convolution or batch norm."""

_GSPACES: dict[int, Callable[[], GSpace]] = {
    1: gspaces.trivialOnR2,
    4: lambda: gspaces.rot2dOnR2(4),
    8: lambda: gspaces.flipRot2dOnR2(4),
}
_FACTORS = {1: 1.0, 4: math.pi / 2, 8: math.pi}
# Where the published poses are among those of escnn, whose reflection number k is the quarter turn by k after the flip
# of the last axis; there it is the flip of the axis before after that quarter turn.
_POSES = {1: [0], 4: [0, 1, 2, 3], 8: [0, 1, 2, 3, *(4 + (2 - k) % 4 for k in range(4))]}


# ------------------------------------------------------------------------------------------------------- the networks


def _group_cnn(checkpoint: Checkpoint) -> tuple[EquivariantClassifier, list[_Part]]:
    names = [f"c{i}" for i in range(1, 8)]
    classes, *_, last = checkpoint.shape("c7.weight", 4, 5)
    gspace, options = _common(checkpoint, names, on_responses=True)
    network = GroupCNN(
        gspace,
        checkpoint.shape("c1.weight", 4)[1],
        classes,
        width=checkpoint.common([f"{name}.weight" for name in names[:-1]], 0),
        last_kernel=last,
        **options,
        **_ratio(checkpoint, names, options["attention"]),
    )
    return network, list(_numbered(network, norms=6))


def _all_cnn_c(checkpoint: Checkpoint) -> tuple[EquivariantClassifier, list[_Part]]:
    names = [f"c{i}" for i in range(1, 10)]
    gspace, options = _common(checkpoint, names)
    network = AllCNNC(
        gspace,
        checkpoint.shape("c1.weight", 4)[1],
        checkpoint.shape("c9.weight", 4, 5)[0],
        width=checkpoint.common([f"{name}.weight" for name in names[:3]], 0),
        **options,
        **_ratio(checkpoint, names[:4], options["attention"]),
    )
    return network, list(_numbered(network, norms=9))


def _numbered(network: EquivariantClassifier, norms: int) -> Iterator[_Part]:
    """The parts of a chain of convolutions, c1, c2, ..., and their batch norms, bn1, bn2, ..."""
    stages = [stage for stage in network.stages.values() if isinstance(stage, SequentialModule)]
    for i, stage in enumerate(stages, start=1):
        modules = _modules(stage)
        yield _convolution(f"c{i}", modules)
        if i <= norms:
            yield f"bn{i}", None, modules["norm"]


def _resnet(checkpoint: Checkpoint) -> tuple[EquivariantClassifier, list[_Part]]:
    stages = ("layers_nc32", "layers_nc16", "layers_nc8")
    blocks = max(checkpoint.count(f"{stage}.") for stage in stages)
    convolutions = [[f"{stage}.{i}.c{j}" for i in range(blocks) for j in (1, 2)] for stage in stages]
    shortcuts = [f"{stage}.0.fiber_map" for stage in stages[1:]]
    gspace, options = _common(
        checkpoint, ["c1", *convolutions[0], *convolutions[1], *convolutions[2], *shortcuts, "c_out"]
    )
    network = ResNet44(
        gspace,
        checkpoint.shape("c1.weight", 4)[1],
        checkpoint.shape("c_out.weight", 4, 5)[0],
        width=[checkpoint.common([f"{name}.weight" for name in names], 0) for names in convolutions],
        blocks=blocks,
        **options,
    )
    parts: list[_Part] = [_convolution("c1", _modules(network.stages["stem"]))]
    for stage, published in enumerate(stages, start=1):
        for i in range(blocks):
            block: Any = network.stages[f"residual_{stage}_{i + 1}"]
            name, branch = f"{published}.{i}", _modules(block.branch)
            parts += [(f"{name}.bn1", None, branch["norm"]), (f"{name}.bn2", None, branch["norm_2"])]
            parts += [_convolution(f"{name}.c1", branch), _convolution(f"{name}.c2", branch, "_2")]
            if isinstance(block.shortcut, SequentialModule):
                parts.append(_convolution(f"{name}.fiber_map", _modules(block.shortcut)))
    return network, [*parts, *_head(network)]


def _dense_net(checkpoint: Checkpoint) -> tuple[EquivariantClassifier, list[_Part]]:
    blocks = checkpoint.count("block_layers.")
    names = [f"block_layers.{i}.conv" for i in range(blocks)]
    transitions = [f"trans_layers.{i}.conv" for i in range(blocks - 1)]
    gspace, options = _common(checkpoint, ["c1", *names, *transitions, "c_out"])
    network = GroupDenseNet(
        gspace,
        checkpoint.shape("c1.weight", 4)[1],
        checkpoint.shape("c_out.weight", 4, 5)[0],
        width=checkpoint.common([f"{name}.weight" for name in ("c1", *names)], 0),
        blocks=blocks,
        **options,
    )
    parts: list[_Part] = [_convolution("c1", _modules(network.stages["stem"]))]
    for i in range(blocks):
        block: Any = network.stages[f"dense_{i + 1}"]
        parts += _normed(f"block_layers.{i}", _modules(block.branch))
    for i in range(blocks - 1):
        parts += _normed(f"trans_layers.{i}", _modules(network.stages[f"transition_{i + 1}"]))
    return network, [*parts, *_head(network)]


def _normed(name: str, modules: Mapping[str, EquivariantModule]) -> list[_Part]:
    return [(f"{name}.bn", None, modules["norm"]), _convolution(f"{name}.conv", modules)]


def _head(network: EquivariantClassifier) -> list[_Part]:
    modules = _modules(network.stages["classes"])
    return [("bn_out", None, modules["norm"]), _convolution("c_out", modules)]


def _convolution(name: str, modules: Mapping[str, EquivariantModule], number: str = "") -> _Part:
    return name, modules.get(f"attention{number}"), modules[f"convolution{number}"]


def _modules(sequence: torch.nn.Module) -> dict[str, Any]:
    return dict(sequence.named_children())


# ------------------------------------------------------------------------------------------- what the shapes say of it


def _common(
    checkpoint: Checkpoint, names: Sequence[str], *, on_responses: bool = False
) -> tuple[GSpace, dict[str, Any]]:
    """The gspace, and the common options of all networks: the kind of attention, and the width of the spatial kernels.

    The first of the convolutions ``names`` is the one on the image. ``on_responses`` says whether the network is
    published with attention on responses and over poses, too.
    """
    image, *rest = names
    group = [f"{name}.weight" for name in rest]
    dimensions = Counter(checkpoint.tensors[name].dim() for name in group if name in checkpoint.tensors)
    has_poses = bool(dimensions) and dimensions.most_common(1)[0][0] == 5
    poses = checkpoint.common(group, 2) if has_poses else 1
    if has_poses and poses not in _GSPACES:
        raise ValueError(
            f"{checkpoint.prefix}{group[0]}: got a tensor of shape {checkpoint.shape(group[0], 5)} with {poses} poses "
            "(axis 2), needed 4 (p4), 8 (p4m) or no such axis"
        )
    kinds = [_kind(checkpoint, image, True), *(_kind(checkpoint, name, not has_poses) for name in rest)]
    kind = Counter(kinds).most_common(1)[0][0]
    if kind is not None and (not has_poses or (kind != "features" and not (on_responses and poses == 4))):
        raise ValueError(
            f"{checkpoint.prefix}{rest[0]}: its tensors are those of attention {kind!r}, with which this network is "
            f"not published on {('Z2', 'p4', 'p4m')[[1, 4, 8].index(poses)]}"
        )
    options: dict[str, Any] = {"attention": kind}
    if kind in ("full", "spatial", "features"):
        kernels = [f"{name}.spatial_attention.weight" for name in rest]
        options["attention_size"] = size = checkpoint.common(kernels, -1)
        if size % 2 == 0:
            raise ValueError(f"{checkpoint.prefix}{kernels[0]}: got a kernel of width {size}, needed an odd one")
    return _GSPACES[poses](), options


def _kind(checkpoint: Checkpoint, name: str, of_image: bool) -> Attention | None:
    """The kind of attention of a convolution, by the tensors that are there."""
    layer, kernel = (
        checkpoint.tensors.get(f"{name}.{kind}_attention.{weight}")
        for kind, weight in (("channel", "weight_fc1"), ("spatial", "weight"))
    )
    if layer is not None:
        # One network for each output field, or a single one.
        if layer.dim() < (3 if of_image else 4):
            return "features"
        return "channel" if kernel is None else "full"
    if kernel is None:
        return None
    return "poses" if kernel.dim() > 1 and kernel.shape[0] == kernel.shape[-1] == 1 else "spatial"


def _ratio(checkpoint: Checkpoint, names: Sequence[str], kind: Attention | None) -> dict[str, Any]:
    """The factor by which the hidden layers of channel attention are narrower than the inputs."""
    if kind not in ("full", "channel", "features"):
        return {}
    layers = [f"{name}.channel_attention.weight_fc1" for name in names[1:]]
    width, hidden = checkpoint.common(layers, -2), checkpoint.common(layers, -3)
    if not 1 <= hidden <= width or width // (width // hidden) != hidden:
        raise ValueError(
            f"{checkpoint.prefix}{layers[0]}: got {hidden} hidden fields for {width}, needed {width} divided by an "
            "integer and rounded down"
        )
    return {"ratio": width // hidden}


# -------------------------------------------------------------------------------------------------------- the weights


def _load_norm(checkpoint: Checkpoint, name: str, module: InnerBatchNorm) -> None:
    (norm,) = module.children()
    for kind in ("weight", "bias", "running_mean", "running_var"):
        tensor = getattr(norm, kind)
        tensor.copy_(checkpoint.take(f"{name}.{kind}", len(tensor)))
        if kind == "running_var" and (tensor < 0).any():
            raise ValueError(f"{checkpoint.prefix}{name}.{kind}: got a variance that is negative")
    if checkpoint.any(f"{name}.num_batches_tracked"):
        norm.get_buffer("num_batches_tracked").copy_(checkpoint.take(f"{name}.num_batches_tracked"))


def _load_convolution(
    checkpoint: Checkpoint, name: str, attention: EquivariantModule | None, module: AttentiveConv, factor: float
) -> None:
    plain = module.plain
    outs, ins = plain.kernel.weight.shape[:2]
    if plain.kernel.orbits.shape[1] == 1:
        factor = 1.0  # lifting

    def load(
        kernel: PoseKernel, kind: str, *fields: int, places: Sequence[int] | None = None, factor: float = 1.0
    ) -> None:
        """A tensor whose axes are those of some fields, the poses of the input if it has any, and places."""
        poses = kernel.orbits.shape[1]
        shape = (*fields, *([poses] if poses > 1 else []), *(kernel.orbits.shape[2:] if places is None else places))
        tensor = checkpoint.take(f"{name}.{kind}", *shape).reshape(*kernel.weight.shape[:2], poses, -1)
        kernel.weight.view_as(tensor)[:, :, _POSES[poses]] = factor * tensor

    first, second, spatial = "channel_attention.weight_fc1", "channel_attention.weight_fc2", "spatial_attention.weight"
    load(plain.kernel, "weight", outs, ins, factor=factor)
    if plain.squeeze is not None and plain.excite is not None:
        hidden = plain.excite.weight.shape[1]
        load(plain.squeeze, first, outs, hidden, ins, factor=1 / factor)
        load(plain.excite, second, outs, ins, hidden)
    if plain.spatial is not None:
        load(plain.spatial, spatial, outs, 2, factor=1 / factor)
    if isinstance(attention, FeatureAttention):
        of_input: Any = attention.plain
        hidden = len(of_input.squeeze.weight)
        load(of_input.squeeze, first, hidden, ins)
        load(of_input.excite, second, ins, hidden)
        load(of_input.spatial, spatial, 1, 2, factor=factor)
    elif isinstance(attention, PoseAttention):
        load(attention.plain.weight, spatial, 1, ins, places=(1, 1), factor=factor)
