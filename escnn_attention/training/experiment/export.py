"""Trained networks as files: ONNX and programs of ``torch.export``, which run anywhere, and compiled packages."""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from escnn.nn import EquivariantModule, FieldType, GeometricTensor
from torch import Tensor
from torch.export import Dim

from escnn_attention._checks import reason_of
from escnn_attention._escnn.bases import elements_of
from escnn_attention.equivariance.report import EquivarianceReport, equivariance_report
from escnn_attention.exporting.loops import why_no_loops
from escnn_attention.exporting.packaged import why_not_linked
from escnn_attention.models import HamiltonianNetwork, compile_package, from_pretrained, list_models
from escnn_attention.models.cloud_network import CloudNetwork
from escnn_attention.models.pretrained import CONFIGURATION
from escnn_attention.models.registry import recipe_file
from escnn_attention.plain.cloud_pooling import pool_clouds
from escnn_attention.plain.point_network import SymmetricTensors
from escnn_attention.training.errors import UserError, as_user_error
from escnn_attention.training.experiment.checkpoints import provenance_of, read_checkpoint
from escnn_attention.training.experiment.configuration import recipe
from escnn_attention.training.experiment.network import checkpoint_of, load_network
from escnn_attention.training.files import atomic_file

Run = Callable[..., Tensor]
"""The function in a file, of its inputs in their order."""

Size: TypeAlias = int | Sequence[int] | None
"""The positions of a grid along every axis, or along each."""

_MOST_IMAGES = 2**31 - 1
"""Without a bound PyTorch 2.7 asks whether there are as many as its slices have for an end, and stops."""


class Subject(NamedTuple):
    """A network that is written to a file.

    Attributes:
        plain: the network as a module of the inputs, without escnn, in float32.
        inputs, output: the names of these.
        things: the inputs of which the file takes any number.
        shapes: the axes of the inputs whose size is free.
        trials: inputs of several sizes, the first of them to write the file by.
        equivariance: from the function in the file and a tolerance to its equivariance; None without a group.
    """

    plain: torch.nn.Module
    inputs: tuple[str, ...]
    output: str
    things: str
    shapes: tuple[dict[int, Any], ...]
    trials: Sequence[tuple[Tensor, ...]]
    equivariance: Callable[[Run, float], EquivarianceReport | None]


def subject_of_grids(network: Any, shape: tuple[int, ...]) -> Subject:
    """A network of features ``(channels, *space)``: a classifier of images, or a network from fields to fields."""

    def equivariance(run: Run, tolerance: float) -> EquivarianceReport | None:
        fields = getattr(network, "in_type", None)
        if fields is None:
            return None
        # A file of unequal sides takes no grid with the sides swapped.
        x = GeometricTensor(torch.zeros(1, *shape), fields)
        kept = [g for g in elements_of(fields.fibergroup) if x.transform(g).shape == x.shape]
        file = _GridsInFile(run, network)
        return equivariance_report(file, (2, *shape), layers=False, tolerance=tolerance, elements=kept)

    plain = network.export() if hasattr(network, "export") else copy.deepcopy(network).eval()
    free = {0: Dim("batch", max=_MOST_IMAGES)}
    trials = [(torch.randn(count, *shape, generator=torch.Generator().manual_seed(count)),) for count in (2, 1, 3)]
    thing, output = ("images", "logits") if _classifies(network) else ("fields", "output")
    return Subject(
        plain.float(), (thing,), output, f"{thing} {'×'.join(map(str, shape))}", (free,), trials, equivariance
    )


def subject_of_clouds(network: CloudNetwork) -> Subject:
    """A network of points, all clouds end to end, with the number of the cloud of each, and features of pairs if any.

    Random clouds are about as large as what points see of each other.
    """
    dim, channels = network.gspace.dimensionality, network.in_type.size
    edge_dim: int | None = getattr(network.blocks[0], "edge_dim", None)
    rules = (getattr(module, "neighbourhood", None) for module in network.modules())
    scale = min((rule.length for rule in rules if rule is not None), default=1.0)

    def drawn(*sizes: int) -> tuple[Tensor, ...]:
        generator, number = torch.Generator().manual_seed(len(sizes)), sum(sizes)
        features = torch.randn(number, channels, generator=generator)
        coords = scale * torch.randn(number, dim, generator=generator)
        batch = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
        if edge_dim is None:
            return features, coords, batch
        pairs = len(sizes), max(sizes), max(sizes), edge_dim
        return features, coords, batch, torch.randn(pairs, generator=generator)

    trials = [drawn(4, 3), drawn(5), drawn(1, 6, 2)]

    def equivariance(run: Run, tolerance: float) -> EquivarianceReport | None:
        first, coords, *others = trials[0]
        file, shape = _CloudsInFile(run, network, others), tuple(first.shape)
        return equivariance_report(file, shape, layers=False, tolerance=tolerance, coords=coords.double())

    count = len(trials[0])
    inputs = ("features", "coords", "batch", "edge_attr")[:count]
    shapes = (*3 * [{0: Dim.AUTO}], dict.fromkeys(range(3), Dim.AUTO))[:count]
    things = f"points in {dim} dimensions with {channels} features"
    return Subject(_OfInputs(network.export().float()), inputs, "output", things, shapes, trials, equivariance)


def _classifies(network: Any) -> bool:
    return isinstance(getattr(network, "num_classes", None), int)


class _OfInputs(torch.nn.Module):
    """A plain network of points as a function of the inputs of a file."""

    def __init__(self, network: torch.nn.Module):
        super().__init__()
        self.network = network

    def forward(self, features: Tensor, coords: Tensor, batch: Tensor, edge_attr: Tensor | None = None) -> Tensor:
        of_pairs = {} if edge_attr is None else {"edge_attr": edge_attr}
        return self.network(features, coords, batch=batch, **of_pairs)


def _out_type(network: Any) -> FieldType:
    """The fields of an output; logits and other numbers are scalars."""
    numbers = getattr(network, "num_classes", getattr(network, "num_outputs", None))
    scalar = network.in_type.gspace.trivial_repr
    return network.out_type if numbers is None else FieldType(network.in_type.gspace, numbers * [scalar])


class _GridsInFile(EquivariantModule):
    """The output of a file for features on a grid, logits at one position, in any precision; copies share the file."""

    def __init__(self, run: Run, network: Any):
        super().__init__()
        self._run = lambda x: run(x)  # no module, which would be copied and change its precision
        self.in_type, self.out_type = network.in_type, _out_type(network)

    def forward(self, x: GeometricTensor) -> GeometricTensor:
        y = self._run(x.tensor.float().contiguous()).to(x.tensor.dtype)
        return GeometricTensor(y[(..., *[None] * (x.tensor.dim() - y.dim()))], self.out_type)

    def evaluate_output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        return (input_shape[0], self.out_type.size, *input_shape[2:])


class _CloudsInFile(EquivariantModule):
    """The output of a file for clouds, at their points or at their means, in any precision; copies share the file."""

    def __init__(self, run: Run, network: CloudNetwork, others: list[Tensor]):
        super().__init__()
        self._run, self._others = lambda *inputs: run(*inputs), others
        self.in_type, self.out_type = network.in_type, _out_type(network)
        gives_matrices = getattr(network.head, "tensors", None) is not None
        self._numbers_of = SymmetricTensors(network.gspace.dimensionality).from_matrices if gives_matrices else None

    def forward(self, x: GeometricTensor) -> GeometricTensor:
        y = self._run(x.tensor.float().contiguous(), x.coords.float().contiguous(), *self._others).to(x.tensor.dtype)
        batch = self._others[0]
        coords = x.coords if len(y) == len(batch) else pool_clouds(x.coords, batch, len(y), "mean")
        return GeometricTensor(y if self._numbers_of is None else self._numbers_of(y), self.out_type, coords)

    def evaluate_output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        return (input_shape[0], self.out_type.size)


def _subject_of(network: torch.nn.Module, source: str | Path, size: Size, data: Any) -> Subject:
    """A network from ``source``, with grids of ``size``, by default of that in the ``data``."""
    if isinstance(network, HamiltonianNetwork):
        raise UserError(
            f"{source}: a HamiltonianNetwork takes gradients while it runs, which no file does; its energy is"
            " network.potential, which has an export()"
        )
    if not isinstance(network, CloudNetwork):
        return subject_of_grids(network, _shape_of(network, source, size_of_data(data) if size is None else size))
    if size is not None:
        raise UserError(f"--size: got {size}, and {type(network).__name__} is a network of points; leave it out")
    if reason := why_no_loops():
        raise UserError(f"{source}: {type(network).__name__} is a network of points; {reason}")
    return subject_of_clouds(network)


def _shape_of(network: torch.nn.Module, source: str | Path, size: Size) -> tuple[int, ...]:
    """The channels and the grid of an input of the network, which it is tried with."""
    in_type, name = getattr(network, "in_type", None), type(network).__name__
    channels = getattr(network, "in_channels", getattr(in_type, "size", None))
    of_fields = isinstance(getattr(network, "out_type", None), FieldType)
    things = "fields" if of_fields else "images"
    if not isinstance(channels, int) or not (of_fields or _classifies(network)):
        needed = "a classifier of images or a network on fields or points"
        raise UserError(f"{source}: got {name}, needed {needed}; use its export() by hand")
    if size is None:
        raise UserError(f"--size: {source} does not say how large its {things} are; give it")
    dim = 2 if in_type is None else in_type.gspace.dimensionality
    sides = [size] * dim if isinstance(size, int) else [*size]
    if len(sides) != dim or min(sides) < 1:
        got = "×".join(map(str, [size] if isinstance(size, int) else sides))
        raise UserError(f"--size: got {got}, needed a positive number, or {dim}, one for each axis")
    shape = channels, *sides
    x = torch.zeros(2, *shape)
    try:
        with torch.no_grad():
            y = network(GeometricTensor(x, in_type) if of_fields else x)
    except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        given = "×".join(map(str, shape))
        raise UserError(f"{source}: {name} refuses {things} {given} alone: {reason_of(error)}") from error
    if not isinstance(y, (Tensor, GeometricTensor)):
        raise UserError(f"{source}: {name} gives features of several levels; use its export() by hand")
    return shape


def size_from(text: str) -> Size:
    """The size in a text: a number, or one for each axis with an x between them.

    >>> size_from("28"), size_from("32x64")
    (28, [32, 64])
    """
    try:
        sides = [int(part) for part in text.replace("×", "x").split("x")]
    except ValueError:
        raise UserError(f"--size: got {text}, needed a number such as 28, or one for each axis: 32x64") from None
    return sides if len(sides) > 1 else sides[0]


def size_of_data(description: Any) -> int | None:
    """The height and width of the images of a data module of this package; None of any other."""
    from escnn_attention import training

    described = description if isinstance(description, Mapping) else {}
    package, _, name = str(described.get("class_path")).rpartition(".")
    if package.partition(".data")[0] != training.__name__ or name not in training.__all__:
        return None
    made = getattr(training, name)
    option = inspect.signature(made).parameters.get("size")  # of those that can be had in several
    if option is not None:
        return (described.get("init_args") or {}).get("size", option.default)
    return getattr(made, "size", None)


OLDEST_OPSET, DEFAULT_OPSET = 18, 20
"""The versions of ONNX's operators: the first that PyTorch writes, and that of files by default."""

_TOLERANCE = 1e-4
"""The largest accepted difference between outputs of the file and of the network, relative to the largest output."""


class Exported(NamedTuple):
    """A file that was written.

    Attributes:
        file: the file.
        num_bytes: its size.
        things: the inputs of which it takes any number, such as ``"images 1×28×28"``.
        inputs: the names of its inputs, in their order.
        error: the largest difference between the outputs of the file and of the network, relative to the largest.
        report: the equivariance of the file, which was given transformed inputs; None for a network without a group.
    """

    file: Path
    num_bytes: int
    things: str
    inputs: tuple[str, ...]
    error: float
    report: EquivarianceReport | None


def export_network(
    source: str | Path,
    file: str | Path,
    *,
    size: Size = None,
    opset: int | None = None,
    compiled: bool = False,
    replace: bool = False,
) -> Exported:
    """Write a trained network to a file that needs neither this package nor escnn.

    The file is read again and given random images, fields or clouds, as they are and transformed by the group, before
    it takes its place: one whose outputs are not those of the network is not written.

    That of a network of images takes ``images`` ``(B, channels, height, width)``, that of a network from fields to
    fields ``fields`` ``(B, channels, *space)``. That of a network of points takes ``features`` ``(N, C)``, ``coords``
    ``(N, d)``, ``batch`` ``(N,)``, the number of the cloud of each point, and where the network has an ``edge_dim`` F
    ``edge_attr`` ``(B, n, n, F)``. It is the network alone: what a task makes of its output, such as the positions of
    :class:`~escnn_attention.training.PointForecast`, is left to you.

    Args:
        source: the folder that was given to ``escnn-attention fit --folder``, a checkpoint of it, a folder that
            ``save_pretrained`` wrote, or a name of :func:`escnn_attention.models.list_models` that has weights.
        file: what to write: ``.onnx``, or ``.pt2`` for :func:`torch.export.load`, or with ``compiled`` for
            ``torch._inductor.aoti_load_package``.
        size: the positions of images or fields along every axis, or a number for each axis; by default what the data
            of the training, or of the name, have.
        opset: the version of ONNX's operators, 20 by default.
        compiled: whether the file is a package of :func:`escnn_attention.models.compile_package`, for processors like
            the one that is there.
        replace: whether a file that is there may be replaced.

    Raises:
        UserError: no trained network of images, fields or points, another suffix, a version of the operators that there
            is not, packages, a compiler or a folder that are missing, a file that is there already, no size of images
            or fields, or one that the network does not take, a network that takes more than fields, a network of points
            and a PyTorch before 2.13, or outputs that are not those of the network.

    Example:
        >>> from escnn_attention.training.errors import UserError
        >>> from escnn_attention.training.experiment.export import export_network
        >>> try:
        ...     export_network("runs/r4", "network.tflite")
        ... except UserError as error:
        ...     print(error)
        FILE: got network.tflite, needed a name that ends in .onnx or .pt2
    """
    path = Path(file)
    kind = _checked_kind(path, opset, compiled, replace)
    subject = _subject(source, size)
    content = _written(kind, subject, opset or DEFAULT_OPSET)
    try:
        run = _loaded(kind, subject, content)
    except Exception as caught:  # onnxruntime has many
        first, *_ = str(caught).splitlines() or [type(caught).__name__]
        raise UserError(f"{path}: it cannot be read again, and is not written: {first}") from caught
    error = _largest_error(run, subject)
    if not error <= _TOLERANCE:
        raise UserError(
            f"{path}: its outputs are off by {error:.1e} of the largest, more than {_TOLERANCE:.0e}: it is not written"
        )
    report = subject.equivariance(run, _TOLERANCE)
    with as_user_error(), atomic_file(path) as stream:
        stream.write(content)
    return Exported(path, len(content), subject.things, subject.inputs, error, report)


def _subject(source: str | Path, size: Size) -> Subject:
    """The subject of a training, or of a folder or name of pretrained weights."""
    path, names = Path(source), list_models(pretrained=True)
    if (path / CONFIGURATION).is_file() or (not path.exists() and str(source) in names):
        with as_user_error(OSError, ImportError, TypeError, ValueError):
            data = recipe(str(source))["data"] if recipe_file(str(source)).is_file() else None
            network = from_pretrained(str(source))
        return _subject_of(network, source, size, data)
    try:
        checkpoint = checkpoint_of(path)
    except UserError as error:
        if path.exists():
            raise
        needed = f"a folder, a checkpoint, or one of {', '.join(names)}"
        raise UserError(f"RUN_OR_NAME: got {source}, needed {needed}") from error
    network, trained = load_network(path), provenance_of(read_checkpoint(checkpoint))
    return _subject_of(network, checkpoint, size, trained["configuration"].get("data") if trained else None)


def _checked_kind(path: Path, opset: int | None, compiled: bool, replace: bool) -> str:
    """The kind of a file that may be written: its suffix, or ``"compiled"``."""
    if path.suffix not in (".onnx", ".pt2"):
        raise UserError(f"FILE: got {path}, needed a name that ends in .onnx or .pt2")
    if path.is_dir():
        raise UserError(f"FILE: {path} is a folder")
    if not path.parent.is_dir():
        raise UserError(f"FILE: got {path}, but there is no folder {path.parent}")
    if path.exists() and not replace:
        raise UserError(f"FILE: {path} is there already: give it another name, or --replace")
    needed = ("onnx", "onnxscript", "onnxruntime") if path.suffix == ".onnx" else ()
    if missing := [name for name in needed if find_spec(name) is None]:
        raise UserError(f"FILE: .onnx needs {', '.join(missing)}: the extra export has them, or write .pt2")
    if opset is not None:
        if path.suffix != ".onnx":
            raise UserError(f"--opset: got {opset} for {path.name}, which has none; leave it out, or write .onnx")
        import onnx

        newest = onnx.defs.onnx_opset_version()
        if not OLDEST_OPSET <= opset <= newest:
            raise UserError(f"--opset: got {opset}, needed one from {OLDEST_OPSET} to {newest}")
    if not compiled:
        return path.suffix
    if path.suffix != ".pt2":
        raise UserError(f"--compiled: got {path.name}, needed a name that ends in .pt2")
    if reason := why_not_linked():
        raise UserError(f"--compiled: {reason}")
    return "compiled"


def _written(kind: str, subject: Subject, opset: int) -> bytes:
    """The content of a file."""
    with _quietly(), tempfile.TemporaryDirectory(prefix="escnn_attention") as folder:
        file, example = Path(folder, "network.pt2"), subject.trials[0]
        if kind == "compiled":
            return compile_package(subject.plain, example, file, dynamic_shapes=subject.shapes).read_bytes()
        # As newer versions of PyTorch do by default: trace the network instead of reading its code.
        program = torch.export.export(subject.plain, example, dynamic_shapes=subject.shapes, strict=False)
        if kind == ".pt2":
            torch.export.save(program, file)
            return file.read_bytes()
        names: dict[str, Any] = {"input_names": list(subject.inputs), "output_names": [subject.output]}
        exported = torch.onnx.export(program, dynamo=True, opset_version=opset, verbose=False, **names)
        assert exported is not None
        return exported.model_proto.SerializeToString()


def _loaded(kind: str, subject: Subject, content: bytes) -> Run:
    """The function in a file."""
    if kind == ".onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])

        def run(*inputs: Tensor) -> Tensor:
            given = {name: t.numpy() for name, t in zip(subject.inputs, inputs, strict=True)}
            return torch.from_numpy(session.run(None, given)[0])

        return run
    with _quietly(), tempfile.TemporaryDirectory(prefix="escnn_attention") as folder:
        file = Path(folder, "network.pt2")
        file.write_bytes(content)
        return torch._inductor.aoti_load_package(str(file)) if kind == "compiled" else torch.export.load(file).module()


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Hide messages for developers of PyTorch."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@torch.no_grad()
def _largest_error(run: Run, subject: Subject) -> float:
    """The largest difference between the outputs of a file and of a network, relative to the largest output."""
    worst = 0.0
    for inputs in subject.trials:
        expected = subject.plain(*inputs)
        difference = (run(*inputs) - expected).abs().max() / expected.abs().max().clamp(min=1e-6)
        worst = max(worst, float(difference.nan_to_num(torch.inf)))
    return worst
