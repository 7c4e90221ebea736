"""Every layer and network, and what each of them takes."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from escnn import gspaces
from escnn.nn import FieldType, GeometricTensor, R2Conv
from torch import Tensor, nn

import escnn_attention as ea
from escnn_attention import models
from escnn_attention.functional import BETWEEN_POINTS, ON_GRIDS
from tests import spaces

C4, D4 = gspaces.rot2dOnR2(4), gspaces.flipRot2dOnR2(4)
SO2, SO3, ON_R3 = gspaces.rot2dOnR2(-1), gspaces.rot3dOnR3(), gspaces.rot2dOnR3(3)
TOKENS = ea.sequence_space(D4.fibergroup)
FIELDS, SCALARS, SCALES = spaces.regular(D4, 2), spaces.scalars(D4, 2), ea.Scales(2, 2)
EDGES = torch.tensor([[0, 1, 2, 2, 4, 5, 6, 7, 8, 1], [1, 2, 0, 3, 5, 6, 7, 8, 4, 1]])
BATCH = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 1])
TABLES = torch.linspace(-1, 1, 50).view(2, 5, 5, 1)
CONDITION = torch.linspace(-1, 1, 6).view(2, 3)
MASK = torch.tensor([True, True, True, False, True, True, True, False, True])


@dataclass(frozen=True)
class Case:
    """A module, the shape of its features, and what else it takes.

    Attributes:
        make: makes it.
        shape: ``(B, *space)`` of its features, or ``(N,)`` of queries at points.
        keys: those of a second set of features, of a module on two sets.
        arguments: what else it takes.
        points: whether it is for 9 points, on the unit sphere where ``unit`` holds.
        training: whether it is in training mode.
    """

    make: Callable[[], nn.Module]
    shape: tuple[int, ...] = (2, 9, 9)
    keys: tuple[int, ...] = ()
    arguments: dict[str, Any] = field(default_factory=dict)
    points: bool = False
    unit: bool = False
    training: bool = False

    @property
    def on_grids(self) -> bool:
        """Whether all features are on grids."""
        return not self.points and 1 not in (len(self.shape), len(self.keys))

    @property
    def on_one_plane(self) -> bool:
        """Whether images are all that it takes."""
        return self.on_grids and not self.keys and not self.arguments and len(self.shape) == 3

    def drawn(self) -> nn.Module:
        """The module in float64, with weights that are all in use."""
        torch.manual_seed(0)
        module = self.make().double()
        for layer in module.modules():
            # In eval mode escnn keeps kernels, which would belong to other weights.
            layer.train(self.training or isinstance(layer, R2Conv))
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        return module

    def inputs(self, module: nn.Module, device: str = "cpu", dtype: torch.dtype = torch.float64) -> list[Tensor]:
        """Tensors that the module has gradients for: features, those at points with coordinates; of keys behind."""
        generator = torch.Generator().manual_seed(1)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        if isinstance(module, models.HamiltonianNetwork):
            found = [drawn(9, 2), drawn(9, 2), drawn(9, 2).abs() + 0.5]
        elif self.points:
            features, coords = drawn(9, module.in_type.size), drawn(9, module.in_type.gspace.dimensionality)
            found = [features, coords / coords.norm(dim=1, keepdim=True) if self.unit else coords]
        else:
            found = []
            for of_type, shape in ((module.in_type, self.shape), (getattr(module, "key_type", None), self.keys)):
                found += [drawn(shape[0], of_type.size, *shape[1:])] if shape else []
                d = of_type.gspace.dimensionality if len(shape) == 1 else 0
                found += [drawn(*shape, d)] if d else []
        return [t.to(device, dtype) for t in found]

    def output(self, module: nn.Module, *inputs: Tensor, run: nn.Module | None = None) -> Tensor:
        """The output of the module for such tensors, with the other arguments in their precision, on their device.

        It is that of ``run``, where this is given: what runs the module.
        """
        like = inputs[0]
        if self.keys:
            sets = zip((module.in_type, module.key_type), self._of_sets(inputs), strict=True)
            inputs = tuple(GeometricTensor(x, of_type, *coords) for of_type, (x, *coords) in sets)
        elif not isinstance(module, models.HamiltonianNetwork):
            inputs = (GeometricTensor(inputs[0], module.in_type, *inputs[1:]),)
        out = (run or module)(*inputs, **self.named(like))
        return out.tensor if isinstance(out, GeometricTensor) else out

    def exported(self, plain: nn.Module, *inputs: Tensor) -> Tensor:
        """The output of what the module is exported to."""
        named = self.named(inputs[0])
        if self.keys:
            names = ("queries", "query_coords"), ("keys", "key_coords")
            for some, tensors in zip(names, self._of_sets(inputs), strict=True):
                named |= dict(zip(some, tensors, strict=False))
            inputs = ()
        return plain(*inputs, **named)

    def named(self, like: Tensor) -> dict[str, Any]:
        """The other arguments, in the precision and on the device of a tensor."""

        def there(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return value.to(like.device, like.dtype if value.is_floating_point() else value.dtype)

        return {name: there(value) for name, value in self.arguments.items()}

    def _of_sets(self, inputs: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Those of queries, and those of keys."""
        number = 2 if len(self.shape) == 1 else 1
        return inputs[:number], inputs[number:]


def drawn(module: nn.Module) -> nn.Module:
    """A module in float64 and eval mode, with weights that are all in use."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return module.double().eval()


def redrawn(module: nn.Module, std: float = 1.0) -> nn.Module:
    """A module in float64 with other weights, that are all in use."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=std)
    return module.double()


def gradients(loss: Tensor, wanted: list[Tensor]) -> list[Tensor]:
    """The gradients of a loss; zeros by what it does not depend on."""
    found = torch.autograd.grad(loss, wanted, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for g, t in zip(found, wanted, strict=True)]


def assert_formula(
    found: Tensor, expected: Tensor, wanted: Iterable[Tensor], rtol: float = 1e-10, atol: float = 1e-11
) -> None:
    """The values are those of a formula, and so are the gradients of a random sum of them."""
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)
    weight, wanted = torch.randn_like(expected), list(wanted)
    options = {"allow_unused": True, "materialize_grads": True, "retain_graph": True}
    for a, b in zip(*(torch.autograd.grad(y, wanted, weight, **options) for y in (found, expected)), strict=True):
        torch.testing.assert_close(a, b, rtol=10 * rtol, atol=10 * atol)


def packed(content: Any, **options: Any) -> bytes:
    """What ``torch.save`` writes."""
    file = io.BytesIO()
    torch.save(content, file, **options)
    return file.getvalue()


def unpacked(content: bytes, *, weights_only: bool = False) -> Any:
    return torch.load(io.BytesIO(content), weights_only=weights_only)


# Interpreted, "triton" takes seconds for each layer.
BACKENDS = sorted({*ON_GRIDS.backends, *BETWEEN_POINTS.backends} - {"triton"})


def compute_by(module: nn.Module, backend: str) -> bool:
    """Have all parts of a module compute by a backend; whether there are any that can."""
    parts = [part for part in module.modules() if hasattr(part, "backend")]
    for part in parts:
        part.backend = backend
    return bool(parts)


def served(run: Callable[[], Any], module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The backends that serve a call of a module, which has each of them in turn, with the results."""
    for backend in BACKENDS if compute_by(module, "auto") else ():
        compute_by(module, backend)
        try:
            found = run()
        except ValueError as refused:
            if "cannot serve this call" in str(refused) or "needed 'auto'" in str(refused):
                continue
            raise
        yield backend, found


def on_points(make: Callable[[], nn.Module], unit: bool = False, **arguments: Any) -> Case:
    return Case(make, arguments=arguments, points=True, unit=unit)


def points(encoding: Any = None, space: Any = None, layer: Any = ea.PointSelfAttention, **options: Any):
    def make() -> nn.Module:
        fields = spaces.regular(space or D4, 2)
        return layer(fields, fields, 2, head_fields=3, encoding=encoding, **options)

    return make


def vectors(space: Any) -> FieldType:
    return FieldType(space, [space.trivial_repr, space.fibergroup.irrep(1), space.trivial_repr])


def attention(encoding: Any = None, size: int | None = 3, **options: Any):
    return lambda: ea.GroupSelfAttention(spaces.mixed(D4), FIELDS, 2, size, head_fields=3, encoding=encoding, **options)


def between(query_space: Any, key_space: Any, size: int | None = None, **options: Any):
    types = spaces.mixed(query_space), spaces.mixed(key_space), spaces.regular(query_space, 2)
    return lambda: ea.GroupCrossAttention(*types, 2, size, head_fields=3, **options)


def from_convolution() -> nn.Module:
    fields = spaces.regular(C4, 1)
    return ea.attention_from_convolution(copy.deepcopy(R2Conv(fields, fields, 3, padding=1)))


def point_transformer(out_type: Any = 3, **options: Any):
    return lambda: models.PointTransformer(ON_R3, 2, out_type, fields=2, num_blocks=2, num_heads=2, **options)


def lie_transformer(space: Any = C4, **options: Any):
    return lambda: models.LieTransformer(space, 2, 3, fields=4, num_blocks=1, num_heads=2, **options)


def vision_transformer(in_type: Any = 2, out_type: Any = 3, **options: Any):
    sizes = {"image_size": 8, "patch_size": 4, "fields": 4, "num_heads": 2, "num_blocks": (1, 1), "hidden_fields": 2}
    return lambda: models.VisionTransformer(D4, in_type, out_type, **sizes | options)


def hamiltonian() -> nn.Module:
    potential = models.PointTransformer(C4, 2, 1, fields=2, num_blocks=1, num_heads=2, pool="sum")
    return models.HamiltonianNetwork(potential)


CASES = {
    "AttentionPool": Case(lambda: ea.AttentionPool(spaces.mixed(D4), 3, 2, head_fields=2, tokens=2)),
    "AttentiveConv": Case(lambda: ea.AttentiveConv(FIELDS, FIELDS, 3, attention_size=3, ratio=1)),
    "AttentiveConv, channel": Case(lambda: ea.AttentiveConv(FIELDS, FIELDS, 3, spatial=False, ratio=1)),
    "AttentiveConv, spatial": Case(lambda: ea.AttentiveConv(SCALARS, FIELDS, 3, channel=False)),
    "AttentiveConv, torus": Case(
        lambda: ea.AttentiveConv(FIELDS, FIELDS, 3, attention_size=3, padding=1, padding_mode="circular"),
        shape=(2, 5, 5),
    ),
    "AntialiasedPool": Case(lambda: ea.AntialiasedPool(FIELDS)),
    "ConditionedFieldNorm": Case(
        lambda: ea.ConditionedFieldNorm(spaces.mixed(D4), 3), arguments={"condition": CONDITION}
    ),
    "ConditionedGate": Case(lambda: ea.ConditionedGate(FIELDS, 3), arguments={"condition": CONDITION}),
    "Crop": Case(lambda: ea.Crop(FIELDS, 1)),
    "DilationLiftingSelfAttention": Case(
        lambda: ea.DilationLiftingSelfAttention(SCALARS, FIELDS, SCALES, 1, 3), shape=(2, 5, 5)
    ),
    "DilationSelfAttention": Case(lambda: ea.DilationSelfAttention(FIELDS, FIELDS, SCALES, 1, 3), shape=(2, 5, 5)),
    "DropPath": Case(lambda: ea.DropPath(FIELDS, 0.5)),
    "FeatureAttention": Case(lambda: ea.FeatureAttention(FIELDS, kernel_size=3)),
    "FieldLayerNorm": Case(lambda: ea.FieldLayerNorm(spaces.mixed(D4))),
    "FieldLayerNorm, fields": Case(lambda: ea.FieldLayerNorm(FIELDS, kind="fields")),
    "FieldLayerNorm, groups": Case(lambda: ea.FieldLayerNorm(FIELDS + FIELDS, "sample", num_groups=2)),
    "FieldLayerNorm, groups of a mixture": Case(
        lambda: ea.FieldLayerNorm(spaces.mixed(D4), "sample", kind="layer", num_groups=2)
    ),
    "FieldLayerNorm, poses": Case(lambda: ea.FieldLayerNorm(FIELDS, "pose", kind="rms")),
    "FieldBatchNorm": Case(lambda: ea.FieldBatchNorm(spaces.mixed(D4))),
    "FieldLinear": Case(lambda: ea.FieldLinear(spaces.mixed(D4), FIELDS)),
    "GroupCrossAttention, coarse keys": Case(between(D4, D4, 3), shape=(2, 4, 4), keys=(2, 2, 2)),
    "GroupCrossAttention, fine keys": Case(
        between(D4, D4, encoding=ea.FourierEncoding(4), query="all"), shape=(2, 2, 2), keys=(2, 4, 4)
    ),
    "GroupCrossAttention, torus": Case(between(D4, D4, 3, padding_mode="circular"), shape=(2, 6, 6), keys=(2, 3, 3)),
    "GroupCrossAttention, causal": Case(between(TOKENS, TOKENS, 2, causal=True), shape=(2, 5), keys=(2, 5)),
    "GroupCrossAttention, sequence to grid": Case(
        between(TOKENS, D4, encoding="mlp", registers=2), shape=(2, 3), keys=(2, 4, 4)
    ),
    "GroupCrossAttention, sequence to points": Case(
        between(TOKENS, D4, encoding="mlp"), shape=(2, 3), keys=(9,), arguments={"key_batch": BATCH}
    ),
    "GroupCrossAttention, points to grid": Case(
        between(D4, D4, 3, encoding="separable"), shape=(9,), keys=(2, 3, 3), arguments={"query_batch": BATCH}
    ),
    "GroupCrossAttention, grid to points": Case(
        between(D4, D4, encoding="rotary", num_neighbours=3), shape=(2, 2, 2), keys=(9,), arguments={"key_batch": BATCH}
    ),
    "GroupCrossAttention, points": Case(
        between(D4, D4, radius=1.5, cutoff=True), shape=(5,), keys=(9,), arguments={"key_padding_mask": ~MASK}
    ),
    "GroupCrossAttention, period": Case(between(D4, D4, period=3.0), shape=(5,), keys=(9,)),
    "GroupCrossAttention, edges": Case(
        between(D4, D4, qk_norm=True), shape=(9,), keys=(9,), arguments={"edge_index": EDGES}
    ),
    "GroupSelfAttention": Case(attention()),
    "GroupSelfAttention, causal": Case(
        lambda: ea.GroupSelfAttention(spaces.mixed(TOKENS), spaces.mixed(TOKENS), 2, 3, head_fields=3, causal=True),
        shape=(2, 7),
    ),
    "GroupSelfAttention, dilated": Case(attention(dilation=2), shape=(2, 7, 7)),
    "GroupSelfAttention, torus": Case(attention(padding_mode="circular"), shape=(2, 5, 5)),
    "GroupSelfAttention, global torus": Case(attention(size=None, padding_mode="circular"), shape=(2, 4, 4)),
    "GroupSelfAttention, stride": Case(attention(stride=2), shape=(2, 5, 5)),
    "GroupSelfAttention, scale factor": Case(attention(scale_factor=2), shape=(2, 4, 4)),
    "GroupSelfAttention, shared": Case(attention(keys="own", shared_scores=True)),
    "GroupSelfAttention, convolved": Case(attention(projection_kernel_size=3), shape=(2, 5, 5)),
    "GroupSelfAttention, convolved torus": Case(
        attention(projection_kernel_size=3, padding_mode="circular"), shape=(2, 5, 5)
    ),
    "GroupSelfAttention, registers": Case(attention(registers=2)),
    "GroupSelfAttention, normalised": Case(attention(qk_norm=True)),
    "GroupSelfAttention, all": Case(attention(query="all"), shape=(2, 5, 5)),
    "GroupSelfAttention, global": Case(attention(size=None, query="all"), shape=(2, 5, 5)),
    "GroupSelfAttention, separable": Case(attention("separable", query="all"), shape=(2, 5, 5)),
    "GroupSelfAttention, Fourier": Case(attention(ea.FourierEncoding(4), None), shape=(2, 5, 5)),
    "GroupSelfAttention, rotary": Case(attention("rotary", None, keys="own"), shape=(2, 5, 5)),
    "GroupSelfAttention, rotary values": Case(
        attention(ea.RotaryEncoding(values=True), None, query="all"), shape=(2, 5, 5)
    ),
    "GroupSelfAttention, convolutional": Case(attention("convolutional"), shape=(2, 5, 5)),
    "GroupSelfAttention, absolute": Case(attention("absolute", None), shape=(2, 5, 5)),
    "GroupSelfAttention, SO(2)": Case(lambda: ea.GroupSelfAttention(vectors(SO2), vectors(SO2), 2, 3, samples=6)),
    "GroupSelfAttention, turned": Case(
        lambda: ea.GroupSelfAttention(vectors(SO2), vectors(SO2), 2, 3, samples=ea.Samples(6, turn="random")),
        training=True,
    ),
    "GELU": Case(lambda: ea.GELU(FIELDS)),
    "FrameLift": Case(lambda: ea.FrameLift(torch.nn.Conv2d(SCALARS.size, 2, 3), D4, 2, in_type=SCALARS)),
    "HalvingPool": Case(lambda: ea.HalvingPool(FIELDS)),
    "LayerScale": Case(lambda: ea.LayerScale(spaces.mixed(D4))),
    "LiftingSelfAttention": Case(lambda: ea.LiftingSelfAttention(SCALARS, FIELDS, 2, 3)),
    "PatchDecoder": Case(lambda: ea.PatchDecoder(spaces.mixed(D4), spaces.mixed(D4), 2)),
    "PatchEmbedding": Case(lambda: ea.PatchEmbedding(SCALARS, spaces.mixed(D4), 3)),
    "PatchEmbedding, of fields": Case(lambda: ea.PatchEmbedding(spaces.mixed(D4), FIELDS, 3)),
    "PerScale": Case(lambda: ea.PerScale(ea.SiLU(FIELDS), SCALES), shape=(2, 9, 9)),
    "PointAttentionPool": on_points(
        lambda: ea.PointAttentionPool(spaces.mixed(D4), 3, 2, head_fields=2, tokens=2),
        batch=BATCH,
        mask=MASK,
        measure=torch.linspace(1, 2, 9),
    ),
    "PointAttentiveConv": on_points(points(layer=ea.PointAttentiveConv, kernel_features=3), batch=BATCH),
    "PointSelfAttention": on_points(points(), batch=BATCH),
    "PointSelfAttention, all": on_points(points(query="all")),
    "PointSelfAttention, radius": on_points(points(radius=1.5), batch=BATCH, mask=MASK),
    "PointSelfAttention, cutoff": on_points(points(radius=1.5, cutoff=True), batch=BATCH, mask=MASK),
    "PointSelfAttention, period": on_points(points(radius=1.2, cutoff=True, period=2.5), batch=BATCH, mask=MASK),
    "PointSelfAttention, neighbours": on_points(points(num_neighbours=3, space=ON_R3), batch=BATCH, mask=MASK),
    "PointSelfAttention, edges": on_points(points("separable"), edge_index=EDGES),
    "PointSelfAttention, features of edges": on_points(
        points(edge_dim=2), edge_index=EDGES, edge_attr=torch.linspace(-1, 1, 20).view(10, 2)
    ),
    "PointSelfAttention, tables": on_points(
        points("rotary", keys="own", edge_dim=1), batch=BATCH, mask=MASK, edge_attr=TABLES
    ),
    "PointSelfAttention, Fourier": on_points(points(ea.FourierEncoding(4)), measure=torch.linspace(1, 2, 9)),
    "PointSelfAttention, rotary": on_points(points("rotary", keys="own")),
    "PointSelfAttention, rotary values": on_points(points(ea.RotaryEncoding(values=True)), batch=BATCH),
    "PointSelfAttention, sums": on_points(points(ea.FourierEncoding(4), normalization="count"), batch=BATCH, mask=MASK),
    "PointSelfAttention, sums in frames": on_points(points("rotary", keys="own", normalization="count"), batch=BATCH),
    "PointSelfAttention, registers": on_points(points(registers=2), batch=BATCH),
    "PointSelfAttention, shared": on_points(
        points(ea.FourierEncoding(4), keys="own", shared_scores=True), batch=BATCH, mask=MASK
    ),
    "PointSelfAttention, motions": on_points(
        points(ea.PairKernel(hidden=4), space=C4, relation=ea.LogMotion()), batch=BATCH
    ),
    "PointSelfAttention, absolute": on_points(points("absolute", num_neighbours=4)),
    "PointSelfAttention, kernel": on_points(points(ea.PairKernel(hidden=4), normalization="count", radius=2.0)),
    "PointSelfAttention, SO(3)": on_points(
        lambda: ea.PointSelfAttention(vectors(SO3), vectors(SO3), 2, head_fields=1, samples=12), batch=BATCH
    ),
    "PointTransformerBlock": on_points(lambda: ea.PointTransformerBlock(FIELDS, SCALARS, num_heads=2, radius=2.0)),
    "PointTransformerBlock, parts": on_points(
        lambda: ea.PointTransformerBlock(
            FIELDS,
            SCALARS,
            num_heads=2,
            layer_scale=0.1,
            drop_path=0.1,
            norm_kind="batch",
            qk_norm=True,
            last_activation=True,
        )
    ),
    "PointTransformerBlock, condition": on_points(
        lambda: ea.PointTransformerBlock(FIELDS, SCALARS, num_heads=2, drop_path=0.1, condition=3),
        batch=BATCH,
        mask=MASK,
        condition=CONDITION,
    ),
    "PoseAttention": Case(lambda: ea.PoseAttention(FIELDS)),
    "PoseFeedForward": Case(lambda: ea.PoseFeedForward(FIELDS, FIELDS, 2)),
    "PositionEmbedding": Case(lambda: ea.PositionEmbedding(spaces.mixed(D4), channels=3)),
    "PositionTable": Case(lambda: ea.PositionTable(spaces.mixed(D4), 4)),
    "PowerSpectrum": Case(lambda: ea.PowerSpectrum(spaces.mixed(D4))),
    "PoseLinear": Case(lambda: ea.PoseLinear(spaces.mixed(D4), FIELDS)),
    "ScalePooling": Case(lambda: ea.ScalePooling(FIELDS, SCALES), shape=(2, 9, 9)),
    "SiLU": Case(lambda: ea.SiLU(FIELDS)),
    "SphereSelfAttention": on_points(
        lambda: ea.SphereSelfAttention(vectors(SO3), vectors(SO3), samples=4, head_fields=1), unit=True
    ),
    "SphereTransformerBlock": on_points(
        lambda: ea.SphereTransformerBlock(vectors(SO3), vectors(SO3), num_heads=2, samples=4, head_fields=1), unit=True
    ),
    "TransformerBlock, parts": Case(
        lambda: ea.TransformerBlock(
            FIELDS, FIELDS, 2, 3, layer_scale=0.1, drop_path=0.1, norm_kind="rms", norm="pre", qk_norm=True
        )
    ),
    "TransformerBlock, condition": Case(
        lambda: ea.TransformerBlock(FIELDS, spaces.mixed(D4), 2, 3, norm="pre", head_fields=3, condition=3),
        arguments={"condition": CONDITION},
    ),
    "TransformerBlock": Case(lambda: ea.TransformerBlock(FIELDS, FIELDS, 2, 3)),
    "attention_from_convolution": Case(from_convolution),
    "AllCNNC": Case(lambda: models.AllCNNC(C4, 2, 3, width=1), shape=(2, 16, 16)),
    "FieldTransformer": Case(
        lambda: models.FieldTransformer(
            spaces.mixed(D4), SCALARS, fields=2, num_decoder_layers=1, num_heads=1, kernel_size=3, condition=3
        ),
        arguments={"condition": CONDITION},
    ),
    "GSANet": Case(
        lambda: models.GSANet(C4, 2, 3, channels=6, blocks=(1, 1), pool=(True, False), num_heads=2, kernel_size=3)
    ),
    "GroupCNN": Case(lambda: models.GroupCNN(C4, 2, 3, width=2, attention="full", ratio=1), shape=(2, 28, 28)),
    "GroupDenseNet": Case(lambda: models.GroupDenseNet(C4, 2, 3, width=2, blocks=2), shape=(2, 32, 32)),
    "HybridNet": Case(
        lambda: models.HybridNet(C4, 2, 3, widths=(2, 3), convolutions=(1, 1), attention=(0, 1), num_heads=1)
    ),
    "FieldUNet": Case(
        lambda: models.FieldUNet(C4, 2, FieldType(C4, [C4.irrep(1)]), widths=(2, 3), attention=(0, 1), num_heads=1)
    ),
    "FieldUNet, patches": Case(
        lambda: models.FieldUNet(
            D4,
            spaces.mixed(D4),
            FieldType(D4, [D4.irrep(1, 1)]),
            widths=(1, 2),
            convolutions=0,
            attention=(1, 1),
            num_heads=1,
            patch_size=2,
        ),
        shape=(2, 8, 8),
    ),
    "ResNet44": Case(
        lambda: models.ResNet44(C4, 2, 3, width=(1, 2, 3), blocks=1, attention="features"), shape=(2, 16, 16)
    ),
    "VisionTransformer": Case(vision_transformer(), shape=(2, 8, 8)),
    "VisionTransformer, invariant": Case(vision_transformer(invariant=True, class_token=False), shape=(2, 8, 8)),
    "VisionTransformer, registers": Case(vision_transformer(registers=2), shape=(2, 8, 8)),
    "VisionTransformer, fields": Case(
        vision_transformer(
            spaces.mixed(D4), FieldType(D4, [D4.irrep(1, 1), D4.trivial_repr]), num_blocks=(1, 0), class_token=False
        ),
        shape=(2, 8, 8),
    ),
    "LieTransformer": on_points(lie_transformer(), batch=BATCH, mask=MASK),
    "LieTransformer, points": on_points(lie_transformer(normalization="count", readout="points"), batch=BATCH),
    "LieTransformer, nearest lifts": on_points(
        lie_transformer(SO2, lift_samples=2, num_neighbours=4), batch=BATCH, mask=MASK
    ),
    "LieTransformer, lifts": on_points(lie_transformer(SO2, lift_samples=2), batch=BATCH, mask=MASK),
    "PlatonicTransformer": on_points(
        lambda: models.PlatonicTransformer(
            ON_R3, 2, 3, fields=8, num_blocks=1, num_heads=2, block={"hidden_fields": 3}
        ),
        batch=BATCH,
    ),
    "HamiltonianNetwork": on_points(hamiltonian, batch=BATCH, num_frames=2, step=0.1),
    "PointTransformer": on_points(point_transformer(), batch=BATCH, mask=MASK),
    "PointTransformer, features of edges": on_points(
        point_transformer(attention={"edge_dim": 1}), batch=BATCH, mask=MASK, edge_attr=TABLES
    ),
    "PointTransformer, even": on_points(point_transformer(even_in=[0]), batch=BATCH, mask=MASK),
    "PointTransformer, spectrum": on_points(point_transformer(head={"poses": "spectrum"}), batch=BATCH, mask=MASK),
    "PointTransformer, tensors": on_points(
        point_transformer(FieldType(ON_R3, [models.symmetric_tensor_repr(ON_R3)])), batch=BATCH
    ),
}
