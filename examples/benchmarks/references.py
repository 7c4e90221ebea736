"""What is measured of other people's code, from checkouts of it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import ModuleType

import torch

from examples.benchmarks.measure import Build, Conditions, Place, Step, gradient_step, measure, training_step

_GROUPS = "lie_conv.lieGroups"
_P4_CNNS = {None: "P4CNN", "channel": "A_Ch_P4CNN", "spatial": "A_Sp_P4CNN", "full": "A_P4CNN", "features": "fA_P4CNN"}


class CheckoutError(Exception):
    """A checkout that cannot be used, and why."""


def import_from(checkout: str, *names: str) -> tuple[ModuleType, ...]:
    """The modules of these names, from a checkout only.

    Raises:
        CheckoutError: the folder does not contain them, or one of their imports is not installed.
    """
    root = Path(checkout).resolve()
    package = names[0].split(".")[0]
    if not (root / package).is_dir():
        raise CheckoutError(f"{checkout} is no checkout of {package}: it has no folder {package}")
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    try:
        modules = tuple(importlib.import_module(name) for name in names)
    except ModuleNotFoundError as error:
        raise CheckoutError(f"{package} in {checkout} needs the module {error.name}, which is not installed") from error
    for module in modules:
        if not Path(module.__file__ or "").resolve().is_relative_to(root):
            raise CheckoutError(f"{module.__name__} was imported from {module.__file__}, not from {checkout}")
    return modules


def check(checkouts: Mapping[str, str], conditions: Conditions) -> None:
    """Run every reference once on tiny inputs, to find missing requirements early.

    Raises:
        CheckoutError: one does not run.
    """
    probes = {"platonic": partial(platonic, 2, 1, 48, 2), "att_gconvs": partial(att_gconvs, None, 2)}
    probes["lie_transformer"] = partial(lie_transformer, 3, 2, 1, channels=4, num_layers=1, num_heads=2)
    probes["octic_vits"] = partial(octic_block, 1, 2, 48)
    probes |= dict.fromkeys(("g_selfatt", "gevit"), partial(gsa, 2, 3, 1, 3))
    subjects = {n: partial(probe, checkout=checkouts[n]) for n, probe in probes.items() if n in checkouts}
    for result in measure(subjects, conditions.hurried()).values():
        if result.failure is not None:
            raise CheckoutError(result.failure)


def gsa(rotations: int, size: int, batch: int, kernel_size: int | None = None, *, checkout: str) -> Build:
    """The group self-attention of GSA-Nets, and of GE-ViT, whose package has the same name and the same layers.

    For rotations of the plane, between 20 fields, with 9 heads of 10 channels; global without a kernel size. Its
    queries are always those of all poses.
    """
    nn, groups = import_from(checkout, "g_selfatt.nn", "g_selfatt.groups")

    def build(place: Place) -> Step:
        make = nn.GroupSelfAttention if kernel_size is None else nn.GroupLocalSelfAttention
        # The window, or the size of the image whose offsets are encoded.
        layer = make(groups.SE2(rotations), 20, 10, 20, 9, kernel_size or size, 0.0).to(**place)
        x = torch.randn(batch, 20, rotations, size, size, **place)
        return gradient_step(layer, [x], layer.parameters())

    return build


def platonic(points: int, batch: int, channels: int, head_channels: int, *, checkout: str) -> Build:
    """``PlatonicConv`` with softmax attention in its dense mode, octahedral, with keys of the query's own frame."""
    (conv,) = import_from(checkout, "platonic_transformers.models.platoformer.conv")
    options = {"solid_name": "octahedron", "attention": True, "use_key": True}

    def build(place: Place) -> Step:
        heads = channels // head_channels
        layer = conv.PlatonicConv(channels, channels, embed_dim=channels, num_heads=heads, **options).to(**place)
        x = torch.randn(batch, points, channels, **place)
        positions = torch.randn(batch, points, 3, **place)
        return gradient_step(lambda x: layer(x, positions), [x], layer.parameters())

    return build


def octic_block(batch: int, tokens: int, channels: int, *, checkout: str) -> Build:
    """``BlockD8`` of octic ViTs with 6 heads and hidden layers twice as wide; on a CPU with PyTorch's GELU."""
    layers, utils = import_from(checkout, "octic_vits.d8_layers", "octic_vits.d8_utils")

    class Gelu(torch.nn.Module):
        def forward(self, xs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            return utils.convert_8tuple_to_5tuple(layers.GeluD8()(utils.convert_5tuple_to_8tuple(xs)))

    def build(place: Place) -> Step:
        options = {} if place["device"] == "cuda" else {"act_layer": Gelu}
        block = layers.BlockD8(channels, num_heads=6, mlp_ratio=2, qkv_bias=True, **options).to(**place)
        # The irreps of dimension 1, and that of dimension 2, whose multiplicity is its dimension.
        shapes = [(batch, tokens, channels // 8)] * 4 + [(batch, tokens, 2, channels // 4)]
        xs = [torch.randn(shape, **place) for shape in shapes]
        return gradient_step(lambda *xs: block(xs), xs, block.parameters())

    return build


def att_gconvs(attention: str | None, batch: int, *, checkout: str) -> Build:
    """A training step of the p4-CNN of attentive group convolutions for rotated MNIST, with a kind of attention."""
    _, models = import_from(checkout, "attgconv", "experiments.rot_mnist.models")
    # The first optimizer of a process imports torch's compiler.
    importlib.import_module("torch._dynamo")

    def build(place: Place) -> Step:
        network = getattr(models, _P4_CNNS[attention])().to(**place)
        return training_step(network, torch.randn(batch, 1, 28, 28, **place), 10, network.parameters())

    return build


def lie_transformer(points: int, poses: int, batch: int, *, checkout: str, **sizes: int) -> Build:
    """``EquivariantTransformer`` on SE(2): its own kernel, dot product plus MLP of the location, under a softmax.

    Each point has 2 features and is lifted to a number of poses; the MLP of the location has 16 channels. The required
    fork of LieConv is the submodule of the checkout. The sizes are ``channels``, ``num_layers`` and
    ``num_heads``.
    """
    import_from(checkout, "eqv_transformer")
    folder = Path(checkout, "LieConv")
    if not (folder / "lie_conv").is_dir():
        raise CheckoutError(f"{checkout} has no folder LieConv/lie_conv: get the submodule")
    import_from(str(folder), "lie_conv")
    groups = _import_groups(folder.resolve())
    (network,) = import_from(checkout, "eqv_transformer.eqv_attention")
    sizes |= {"dim_hidden": sizes.pop("channels"), "kernel_dim": 16}

    def build(place: Place) -> Step:
        make = network.EquivariantTransformer
        module = make(dim_input=2, dim_output=1, group=groups.SE2(), liftsamples=poses, **sizes).to(**place)
        coords, x = torch.randn(2, batch, points, 2, **place)
        there = torch.ones(batch, points, dtype=torch.bool, device=place["device"])
        return gradient_step(lambda x: module((coords, x, there)), [x], module.parameters())

    return build


def _import_groups(root: Path) -> ModuleType:
    """The groups of LieConv, with the comma that a tuple of one starred item lacks."""
    if _GROUPS in sys.modules:
        return sys.modules[_GROUPS]
    path = root.joinpath(*_GROUPS.split(".")).with_suffix(".py")
    if not path.is_file():
        raise CheckoutError(f"{root} is no checkout of LieConv: it has no file {path.relative_to(root)}")
    module = sys.modules[_GROUPS] = ModuleType(_GROUPS)
    source = path.read_text(encoding="utf-8").replace("(*p.shape[:2])", "(*p.shape[:2],)")
    exec(compile(source, str(path), "exec"), module.__dict__)
    return module
