"""Compare networks with published weights and the published code, by layer where useful.

    python examples/parity.py g_selfatt PATH
    python examples/parity.py gevit PATH
    python examples/parity.py lie_transformer PATH --lie-conv PATH
    python examples/parity.py octic_vit PATH
    python examples/parity.py platonic PATH
    python examples/parity.py att_gconvs PATH --weights p4cnn.npz

The path is a checkout of the code: dwromero/g_selfatt, ZJUCDSYangKaifan/GEVit, oxcsml/lie-transformer (with the fork
MJHutchinson/LieConv), davnords/octic-vits, niazoys/PlatonicTransformers or dwromero/att_gconvs. Each network is built
small and with random weights by that code, in float64, and its state dict is loaded here with
``models.from_published``. The agreement is the largest difference of the outputs, relative to their standard deviation.
The equivariance errors are the largest change of the outputs by elements of the group, relative to the same. The table
lists changes of their code, needed to run it in float64 and on the CPU.

The first three need einops, the octic ViTs timm. ``--weights`` takes files as ``examples/published_weights.py`` does;
their logits are compared with those of the network loaded from their tensors.
"""

from __future__ import annotations

import argparse
import importlib
import math
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from escnn_attention.geometry.relations import product, rotate
from escnn_attention.groups.fibers import fibers
from escnn_attention.models import from_published

Row = tuple[str, str, str, str, str]
Outputs = Callable[..., Tensor]


def error(a: Tensor, b: Tensor) -> float:
    """The largest difference, relative to the standard deviation of the expected values."""
    return float((a - b).abs().max() / b.std())


def row(what: str, agreement: float, adapted: str, theirs: float | None, ours: float | None) -> Row:
    """A row of the table."""
    numbers = ["" if value is None else f"{value:.1e}" for value in (theirs, ours)]
    return (what, f"{agreement:.1e}", adapted, numbers[0], numbers[1])


def randomise(network: torch.nn.Module, std: float) -> None:
    """Draw weights large enough to make attention sharp."""
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=std)


def quietly(load: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Load a network without the warning that its outputs differ; the table has the numbers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return load(*arguments, **options)


def module(root: Path, name: str) -> types.ModuleType:
    """A module of a checkout only."""
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    try:
        found = importlib.import_module(name)
    except ModuleNotFoundError as missing:
        raise SystemExit(
            f"{root} is no checkout of this code, or something that it needs is not installed: {missing}"
        ) from None
    if not Path(found.__file__ or "").resolve().is_relative_to(root):
        raise SystemExit(f"{name} was imported from {found.__file__}, and not from {root}")
    return found


# ------------------------------------------------------------------------------------------------- GSA-Nets and GE-ViT


@contextmanager
def double_offsets() -> Iterator[None]:
    """Keep offsets in float64 while a network is built, and allow views of non-contiguous tensors."""
    as_type, view = Tensor.type, Tensor.view

    def keep(tensor: Tensor, *kind: Any, **options: Any) -> Any:
        return tensor if kind == (torch.float32,) else as_type(tensor, *kind, **options)

    def reshaped(tensor: Tensor, *shape: Any) -> Tensor:
        return view(tensor, *shape) if isinstance(shape[0], torch.dtype) else tensor.reshape(*shape)

    with mock.patch.multiple(Tensor, type=keep, view=reshaped, float=Tensor.double):
        yield


def gsa(root: Path, kind: str, std: float) -> Iterator[Row]:
    """Networks of GSA-Nets and of GE-ViT, whose packages have the same name."""
    groups, models = module(root, "g_selfatt.groups"), module(root, "models")
    named = {
        "Z2": (groups.SE2, 1),
        "Z2M": (groups.E2, 2),
        "p4": (groups.SE2, 4),
        "p8": (groups.SE2, 8),
        "p4m": (groups.E2, 8),
    }
    options = {
        "in_channels": 2,
        "num_channels": 8,
        "num_heads": 2,
        "block_sizes": [1, 1],
        "expansion_per_block": [1, 2],
    }
    options |= {"normalize_between_layers": True, "maxpool_after_last_block": False, "num_classes": 3, "image_size": 8}
    options |= {"activation_function": "Swish", "attention_dropout_rate": 0.0, "value_dropout_rate": 0.0}
    for name, (group, order) in named.items():
        for window in (5, None):
            with double_offsets():
                made = group(order)
                made.matrix_mirror = lambda: torch.diag(torch.tensor([-1.0, 1.0]))
                theirs = models.GroupTransformer(group=made, crop_per_layer=0, patch_size=window, **options).eval()
                randomise(theirs, std)
                ours = quietly(from_published, theirs.state_dict(), kind, crops=(0, 0))
                x = torch.randn(2, 2, 8, 8)
                yield from _gsa_rows(name, window, theirs, ours, x)


def _gsa_rows(name: str, window: int | None, theirs: Any, ours: Any, x: Tensor) -> Iterator[Row]:
    turned = x.rot90(1, (-2, -1)) if name.startswith("p") else x.flip(-1)
    lifted = theirs.lifting_normalization(theirs.lifting_self_attention(x))
    # Poses are in another order here: by their values.
    lifted = (lifted * lifted.sigmoid()).sort(2).values
    own = ours.feature_maps(x)["lifting"].tensor.unflatten(1, (-1, ours.order)).sort(2).values
    where = "global" if window is None else f"window {window}"
    adapted = "offsets in float64"
    yield row(f"{name}, {where}: lifting", error(own, lifted), adapted, None, None)
    y, z = theirs(x), ours(x)
    errors = (None, None) if name == "Z2" else (error(theirs(turned), y), error(ours(turned), z))
    yield row(f"{name}, {where}: logits", error(z, y), adapted, *errors)


# ------------------------------------------------------------------------------------------------------ LieTransformer


def lie_groups(root: Path) -> types.ModuleType:
    """The groups of LieConv, with the comma that a tuple of one starred item lacks."""
    name = "lie_conv.lieGroups"
    module(root, "lie_conv")
    path = root.joinpath(*name.split(".")).with_suffix(".py")
    found = sys.modules[name] = types.ModuleType(name)
    exec(
        compile(path.read_text(encoding="utf-8").replace("(*p.shape[:2])", "(*p.shape[:2],)"), str(path), "exec"),
        found.__dict__,
    )
    return found


_LIE_KINDS = {
    "constellations": ({"kernel_type": "mlp", "attention_fn": "softmax", "architecture": "model_1"}, "softmax"),
    "dynamics": ({"kernel_type": "mlp", "attention_fn": "dot_product", "architecture": "model_1"}, "count"),
    "QM9": ({"kernel_type": "2232", "attention_fn": "softmax", "architecture": "lieconv"}, "count"),
}
_LIE_SIZES = {"dim_input": 3, "dim_output": 2, "dim_hidden": 24, "num_layers": 2, "num_heads": 2, "kernel_dim": 5}
_LIE_SIZES |= {"feature_embed_dim": 6}


def lie_transformer(root: Path, lie_conv: Path) -> Iterator[Row]:
    """The networks of the LieTransformer: on translations, fixed rotations, and random rotations."""
    groups = lie_groups(lie_conv)
    network = module(root, "eqv_transformer.eqv_attention").EquivariantTransformer
    yield from _of_fixed_lifts(groups, network)
    yield from _of_drawn_lifts(groups, network)


def _of_fixed_lifts(groups: types.ModuleType, network: Callable[..., Any]) -> Iterator[Row]:
    """Networks on groups with fixed lifts."""

    class Canonical(groups.LieGroup):  # type: ignore[misc,name-defined]
        """SE2_canonical, which cannot be instantiated because its number of coordinates is a property."""

        lie_dim, q_dim, rep_dim = 3, 0, 3
        matrixify, lift = groups.SE2_canonical.matrixify, groups.SE2_canonical.lift

    # The group, the dimension, the lifts of a point, and how many points are seen, 0 for all.
    spaces = [
        ("T(2)", groups.T(2), 2, 1, 0),
        ("T(2)", groups.T(2), 2, 1, 3),
        ("T(3)", groups.T(3), 3, 1, 0),
        ("SE(2)_canonical", Canonical(), 2, 4, 0),
    ]
    for group, made, dim, lifts, nearest in spaces:
        for what, (options, normalization) in _LIE_KINDS.items():
            theirs = network(group=made, liftsamples=lifts, mc_samples=nearest, **_LIE_SIZES, **options).eval()
            randomise(theirs, 0.4)
            given = {"normalization": normalization, "lift_samples": lifts, "mc_samples": nearest}
            ours = from_published(theirs.state_dict(), "lie_transformer", group=group, **given)
            x, f = torch.randn(2, 5, dim), torch.randn(2, 5, 3)
            there, batch = torch.ones(2, 5, dtype=torch.bool), torch.arange(2).repeat_interleave(5)

            networks, rest = (theirs, ours), (f, there, batch)
            y, z = _of_clouds(x, networks, rest)
            turned = x @ torch.tensor([[0.0, 1.0], [-1.0, 0.0]]) if lifts == 4 else x
            moved = _of_clouds(turned + 1, networks, rest)
            adapted = "a comma in LieConv" + ("; a subclass of the group, which cannot be made" if lifts == 4 else "")
            name = ", ".join([group, *([f"{nearest} nearest"] if nearest else []), what])
            yield row(f"{name}: output", error(z, y), adapted, error(moved[0], y), error(moved[1], z))


def _of_drawn_lifts(groups: types.ModuleType, network: Callable[..., Any]) -> Iterator[Row]:
    """Networks on all rotations of the plane and of space; both get the rotations drawn by theirs."""
    seven = {"use_pseudo": True, "dual_quaternions": False, "positive_quaternions": True}
    # The group, its options, the lifts of a point, what a hyperbolic tangent does, and how many lifts are seen.
    spaces: list[tuple[str, dict[str, bool], int, str | None, int]] = [
        ("SE(2)", {}, 2, None, 0),
        ("SE(2)", {}, 2, None, 4),
        ("SE(2)", {}, 3, "tanh", 0),
        ("SE(3)", {}, 2, None, 0),
        ("SE(3)", {}, 2, None, 4),
        ("SE(3)", seven, 4, None, 0),
        ("SE(3)", seven, 4, "tanh", 0),
        ("SE(3)", seven, 4, "tanh", 9),
    ]
    for group, of_group, lifts, nonlinearity, nearest in spaces:
        dim = int(group[3])
        for what, (options, normalization) in _LIE_KINDS.items():
            made = groups.SE2(**of_group) if dim == 2 else groups.SE3(**of_group)
            both = {"lie_algebra_nonlinearity": nonlinearity, "mc_samples": nearest}
            theirs = network(group=made, liftsamples=lifts, **_LIE_SIZES, **options, **both).eval()
            randomise(theirs, 0.4)
            both |= {"lift_samples": lifts, "positive_quaternions": "use_pseudo" in of_group}
            ours = from_published(
                theirs.state_dict(), "lie_transformer", group=group, normalization=normalization, **both
            )
            x, f = torch.randn(2, 5, dim), torch.randn(2, 5, 3)
            drawn = torch.rand(2, 5, 1) if dim == 2 else _of_one_half(torch.randn(2, 5, lifts, 4))
            y, z = _of_lifted(x, f, drawn, theirs, ours)
            turn = torch.rand(1) if dim == 2 else torch.randn(4)
            turn = turn if dim == 2 else turn / turn.norm()
            angle = 2 * math.pi * turn
            moved = rotate(angle if dim == 2 else turn, x) + 1, f, drawn + turn if dim == 2 else product(turn, drawn)
            errors = [error(*pair) for pair in zip(_of_lifted(*moved, theirs, ours), (y, z), strict=True)]
            parts = {"quaternions": of_group, nonlinearity: nonlinearity, f"{nearest} nearest": nearest}
            name = ", ".join([group, *(part for part, there in parts.items() if part and there), what])
            yield row(f"{name}: output", error(z, y), "rotations that are given to it", *errors)


def _of_one_half(q: Tensor) -> Tensor:
    return torch.where(q[..., :1] < 0, -q, q)


def _of_lifted(x: Tensor, f: Tensor, drawn: Tensor, theirs: Any, ours: Any) -> tuple[Tensor, Tensor]:
    """The outputs of both networks for given draws of theirs: parts of a turn, or quaternions of any length."""
    there, batch = torch.ones(x.shape[:2], dtype=torch.bool), torch.arange(2).repeat_interleave(5)
    with mock.patch.multiple(torch, rand=lambda *_, **__: drawn, randn=lambda *_, **__: drawn.clone()):
        y = theirs((x, f, there))
    lifts = drawn
    if x.shape[-1] == 2:
        lifts = 2 * math.pi * (drawn + torch.arange(1, ours.lift.num_samples + 1) / ours.lift.num_samples) - math.pi
    return y, ours(f.flatten(0, 1), x.flatten(0, 1), batch=batch, lifts=lifts.flatten(0, 1))


def _of_clouds(x: Tensor, networks: tuple[Any, Any], rest: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    f, there, batch = rest
    return networks[0]((x, f, there)), networks[1](f.flatten(0, 1), x.flatten(0, 1), batch=batch)


# ---------------------------------------------------------------------------------------------------------- octic ViTs


_GELU = "GELU without their kernel for GPUs"


def octic_vit(root: Path) -> Iterator[Row]:
    """Octic ViTs of DeiT-III, hybrid and invariant, with a class token and without."""
    models, layers, parts = (module(root, f"octic_vits.{name}") for name in ("model", "d8_layers", "d8_utils"))
    deit = module(root, "octic_vits.deit_models")

    class GELU(torch.nn.Module):
        """Their formula on tensors, instead of their GPU kernel."""

        def forward(self, xs: Any) -> Any:
            eight = layers.GeluD8()(parts.convert_5tuple_to_8tuple(xs))
            return parts.convert_8tuple_to_5tuple(eight)

    blocks = {
        "octic_block_layers": deit.Layer_scale_init_BlockD8,
        "standard_block_layers": deit.Layer_scale_init_Block,
    }
    sizes = {"img_size": 24, "patch_size": 4, "num_classes": 5, "embed_dim": 64, "depth": 4, "num_heads": 2}
    x = torch.randn(2, 3, 24, 24)
    for invariant in (False, True):
        for pool in (False, True):
            with mock.patch.object(models, "TritonGeluD8", GELU):
                options = {"qkv_bias": True, "invariant": invariant, "global_pool": pool}
                theirs = models.OcticVisionTransformer(**sizes, **options, **blocks).eval()
            for parameter in theirs.parameters():
                if parameter.requires_grad:  # the token is zero but for its invariants
                    torch.nn.init.normal_(parameter, std=0.3)
            ours = from_published(theirs.state_dict(), "octic_vit", num_heads=2)
            y, z, turned = theirs(x), ours(x), x.rot90(1, (-2, -1))
            errors = (error(theirs(turned), y), error(ours(turned), z)) if invariant else (None, None)
            what = f"{'invariant' if invariant else 'hybrid'}, {'mean over patches' if pool else 'class token'}: logits"
            yield row(what, error(z, y), _GELU, *errors)
    dino = module(root, "octic_vits.dinov2_models")
    for invariant in (False, True):
        for registers in (0, 3):
            with mock.patch.object(models, "TritonGeluD8", GELU):
                made = dino.OcticDinoVisionTransformer(
                    **sizes, invariant=invariant, num_register_tokens=registers
                ).eval()
            yield _of_dino(made, x, f"DINOv2, {'invariant' if invariant else 'hybrid'}, {registers} registers")


def _of_dino(theirs: Any, x: Tensor, what: str) -> Row:
    """The features of all tokens of a DINOv2 network, which has no head."""
    for parameter in theirs.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3)
    ours = from_published(theirs.state_dict(), "octic_vit", num_heads=2)
    parts = ("x_norm_clstoken", "x_norm_regtokens", "x_norm_patchtokens")

    def features(image: Tensor) -> Tensor:
        made = theirs.forward_features(image)
        return torch.cat([made[part] if made[part].dim() == 3 else made[part][:, None] for part in parts], dim=1)

    y, z, turned = features(x), ours.tokens(x), x.rot90(1, (-2, -1))
    errors: tuple[float | None, float | None] = (None, None)
    if "invariant" in what:  # of the tokens that no rotation moves
        number = 1 + theirs.num_register_tokens
        errors = tuple(error(of(turned)[:, :number], now[:, :number]) for of, now in ((features, y), (ours.tokens, z)))
    return row(f"{what}: tokens", error(z, y), _GELU, *errors)


# ----------------------------------------------------------------------------------------------- Platonic Transformers


def platonic(root: Path) -> Iterator[Row]:
    """Platonic Transformers for QM9 and CIFAR-10, and with the options that these do not use."""
    start = "platonic_transformers.models.platoformer"
    groups, network = module(root, f"{start}.groups"), module(root, f"{start}.platoformer").PlatonicTransformer
    named = {
        "trivial_3": 3,
        "cyclic_4": 2,
        "dihedral_4": 2,
        "flop_2d_1": 2,
        "cyclic_3d_4": 3,
        "tetrahedron": 3,
        "octahedron": 3,
        "icosahedron": 3,
    }
    kinds = {
        "QM9": {"ape_sigma": 0.5, "ffn_readout": True, "rope_on_values": True, "input_dim_vec": 0, "output_dim_vec": 0},
        "CIFAR-10": {"ape_sigma": 0.5, "ffn_readout": False, "use_key": False, "input_dim_vec": 1, "output_dim_vec": 0},
        "keys, vectors, layer scale": {
            "use_key": True,
            "input_dim_vec": 1,
            "output_dim_vec": 1,
            "layer_scale_init_value": 0.5,
        },
    }
    for name, dim in named.items():
        order = groups.PLATONIC_GROUPS[name].G
        sizes = {
            "input_dim": 3,
            "hidden_dim": 8 * order,
            "output_dim": 2,
            "nhead": 2 * order,
            "num_layers": 2,
            "spatial_dim": dim,
        }
        sizes |= {
            "solid_name": name,
            "dense_mode": True,
            "attention": True,
            "vector_task_level": "graph",
            "dropout": 0.0,
        }
        for what, options in kinds.items():
            theirs = network(**sizes, **options, freq_init="random").eval()
            vectors = int(options["input_dim_vec"])
            given_too = {"rope_on_values": bool(options.get("rope_on_values", False))}
            ours = from_published(theirs.state_dict(), "platonic", vectors=vectors, divisor=5.0, **given_too)
            elements = _exact(theirs, torch.tensor(fibers(ours.gspace).action))
            given = torch.randn(2, 5, 3), torch.randn(2, 5, vectors, dim), torch.randn(2, 5, dim)
            y, z = _of_points(torch.eye(dim), (theirs, ours), given)
            moved = _of_points(elements[-1], (theirs, ours), given)
            adapted = "matrices in float64"
            errors = (None, None) if name.startswith("trivial") else (error(moved[0], y), error(moved[1], z))
            yield row(f"{name}, {what}: output", error(z, y), adapted, *errors)


def _exact(theirs: Any, action: Tensor) -> Tensor:
    """Set the matrices of a network's group in float64, without rounding to float32."""
    elements = action[(action[None] - theirs.group.elements[:, None]).abs().amax((2, 3)).argmin(1)]
    theirs.group.elements = elements
    for layer in theirs.modules():
        if "group_elements" in layer._buffers:
            layer._buffers["group_elements"] = elements
    return elements


def _of_points(g: Tensor, networks: tuple[Any, Any], given: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """The outputs of both networks for the transformed input; vectors are rotated back."""
    x, v, points = given[0], given[1] @ g.T, given[2] @ g.T
    scalars, vectors = networks[0](x, points, vec=v if v.shape[2] else None, avg_num_nodes=5.0)
    features = torch.cat([x, v.flatten(2)], dim=-1).flatten(0, 1)
    y = networks[1](features, points.flatten(0, 1), batch=torch.arange(2).repeat_interleave(5))
    own = y[:, scalars.shape[1] :].unflatten(1, vectors.shape[1:]) if vectors.numel() else vectors
    theirs = torch.cat([scalars, (vectors @ g).flatten(1)], dim=1)
    return theirs, torch.cat([y[:, : scalars.shape[1]], (own @ g).flatten(1)], dim=1)


# --------------------------------------------------------------------------------------------- attentive convolutions


def att_gconvs(root: Path, files: Sequence[Path]) -> Iterator[Row]:
    """The networks of attentive group convolutions for rotated MNIST, and published weights."""
    models = module(root, "experiments.rot_mnist.models")
    x = torch.randn(2, 1, 28, 28)
    for name in ("P4CNN", "A_P4CNN", "A_Ch_P4CNN", "A_Sp_P4CNN", "fA_P4CNN"):
        theirs = getattr(models, name)().eval()
        for batch_norm in theirs.modules():
            if isinstance(batch_norm, torch.nn.BatchNorm3d):
                torch.nn.init.uniform_(batch_norm.running_var, 0.5, 1.5)
        ours = from_published(theirs.state_dict(), "att_gconvs")
        turned = x.rot90(1, (-2, -1))
        y, z = theirs(x), ours(x)
        yield row(f"{name}: logits", error(z, y), "nothing", error(theirs(turned), y), error(ours(turned), z))
    for path in files:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        ours = from_published(arrays, "att_gconvs")
        images, logits = (torch.from_numpy(arrays[name]).double() for name in ("input", "logits"))
        z = ours(images)
        own = error(ours(images.rot90(1, (-2, -1))), z)
        yield row(f"{path.stem}, published weights: logits", error(z, logits), "their logits are in float32", None, own)


def table(rows: Sequence[Row]) -> str:
    """The rows as a table in Markdown."""
    head = ("layer or network", "agreement", "adapted in their code", "their equivariance error", "ours")
    lines = [head, ("---",) * 5, *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    """Compare, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "peer", choices=("att_gconvs", "g_selfatt", "gevit", "lie_transformer", "octic_vit", "platonic")
    )
    parser.add_argument("path", type=Path, help="a checkout of the peer's code")
    parser.add_argument("--lie-conv", type=Path, help="a checkout of LieConv, for lie_transformer")
    parser.add_argument("--weights", type=Path, nargs="*", default=[], help="published weights (.npz), for att_gconvs")
    given = parser.parse_args()
    if not given.path.is_dir():
        raise SystemExit(f"{given.path}: there is no such folder")
    root = given.path.resolve()
    if given.peer == "lie_transformer" and given.lie_conv is None:
        raise SystemExit("lie_transformer needs a checkout of LieConv: --lie-conv PATH")
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    runs: dict[str, Callable[[], Iterator[Row]]] = {
        "att_gconvs": lambda: att_gconvs(root, given.weights),
        "g_selfatt": lambda: gsa(root, "g_selfatt", 1.0),
        "gevit": lambda: gsa(root, "gevit", 1.0),
        "lie_transformer": lambda: lie_transformer(root, given.lie_conv.resolve()),
        "octic_vit": lambda: octic_vit(root),
        "platonic": lambda: platonic(root),
    }
    with torch.no_grad():
        print(table(list(runs[given.peer]())))


if __name__ == "__main__":
    main()
