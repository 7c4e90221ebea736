"""Trained networks as files: ONNX and programs of ``torch.export``, which run anywhere, and compiled packages."""

from __future__ import annotations

import contextlib
import io
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.export import ExportedProgram

from escnn_attention.equivariance.report import EquivarianceReport
from escnn_attention.functional.native.packaged import why_not_linked
from escnn_attention.models import compile_package, from_pretrained, list_models
from escnn_attention.models.pretrained import CONFIGURATION
from escnn_attention.models.registry import data_of
from escnn_attention.training.errors import UserError, told
from escnn_attention.training.experiment.checkpoints import provenance_of, read_checkpoint
from escnn_attention.training.experiment.network import checkpoint_of, load_network
from escnn_attention.training.experiment.pretrained import as_told
from escnn_attention.training.experiment.subjects import Run, Subject, subject_of
from escnn_attention.training.files import atomic_file

__all__ = ["DEFAULT_OPSET", "OLDEST_OPSET", "Exported", "export_network"]

OLDEST_OPSET, DEFAULT_OPSET = 18, 20
"""The versions of ONNX's operators: the first that PyTorch writes, and that of files by default."""

_TOLERANCE = 1e-4
"""How far the outputs of a file may be from those of the network, relative to the largest."""

_PACKAGES = ("onnx", "onnxscript", "onnxruntime")


class Exported(NamedTuple):
    """What was written.

    Attributes:
        file: the file.
        num_bytes: its size.
        things: what it takes any number of, such as ``"images 1×28×28"``.
        inputs: the names of what it takes, in their order.
        error: the largest difference between the outputs of the file and of the network, relative to the largest.
        report: the equivariance of the file, which was given transformed inputs; None for a network without a group.

    Example:
        >>> from pathlib import Path
        >>> from escnn_attention.training.experiment.export import Exported
        >>> Exported(Path("r4.onnx"), 612_000, "images 1×28×28", ("images",), 4.8e-07, None).file.suffix
        '.onnx'
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
    size: int | None = None,
    opset: int | None = None,
    compiled: bool = False,
    replace: bool = False,
) -> Exported:
    """Write a trained network to a file that needs neither this package nor escnn.

    The file is read again and given random images or clouds, as they are and transformed by the group, before it takes
    its place: one whose outputs are not those of the network is not written.

    That of a network of images takes ``images`` ``(B, channels, height, width)``. That of a network of points takes
    ``features`` ``(N, C)``, ``coords`` ``(N, d)``, ``batch`` ``(N,)``, the number of the cloud of each point, and where
    the network has an ``edge_dim`` F ``edge_attr`` ``(B, n, n, F)``. It is the network alone: what a task makes of its
    output, such as the positions of :class:`~escnn_attention.training.PointForecast`, is left to you.

    Args:
        source: the folder that was given to ``escnn-attention fit --folder``, a checkpoint of it, a folder that
            ``save_pretrained`` wrote, or a name of :func:`escnn_attention.models.list_models` that has weights.
        file: what to write: ``.onnx``, or ``.pt2`` for :func:`torch.export.load`, or with ``compiled`` for
            ``torch._inductor.aoti_load_package``.
        size: the height and width of the images; by default what the data of the training, or of the name, have.
        opset: the version of ONNX's operators, 20 by default.
        compiled: whether the file is a package for processors like the one that is there, with the compiled loop of
            attention on grids inside (:func:`escnn_attention.models.compile_package`).
        replace: whether a file that is there may be replaced.

    Raises:
        UserError: no trained network, another suffix, a version of the operators that there is not, packages that are
            missing, no compiler for ``compiled``, a file that is there already, no folder for it, no size of images, a
            network neither of images nor of points, one of points and a PyTorch before 2.13, or outputs that are not
            those of it.

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
    _check_file(path, replace)
    _check_opset(path, opset)
    kind = _kind(path, compiled)
    subject = _subject(source, size)
    plain = subject.plain()
    content = _WRITERS[kind](subject, plain, opset or DEFAULT_OPSET)
    run = _read(path, kind, subject, content)
    error = _largest_error(run, plain, subject)
    if not error <= _TOLERANCE:
        raise UserError(
            f"{path}: its outputs are off by {error:.1e} of the largest, more than {_TOLERANCE:.0e}: it is not written"
        )
    report = subject.equivariance(run, _TOLERANCE)
    with told(), atomic_file(path) as stream:
        stream.write(content)
    return Exported(path, len(content), subject.things(), subject.inputs, error, report)


def _subject(source: str | Path, size: int | None) -> Subject:
    """What is to be written: the network of a training, or one that ``save_pretrained`` wrote."""
    path, names = Path(source), list_models(pretrained=True)
    if (path / CONFIGURATION).is_file() or (not path.exists() and str(source) in names):
        with as_told():
            return subject_of(from_pretrained(str(source)), source, size, data_of(source))
    try:
        checkpoint = checkpoint_of(path)
    except UserError as error:
        if path.exists():
            raise
        raise UserError(
            f"RUN_OR_NAME: got {source}, needed a folder, a checkpoint, or one of {', '.join(names)}"
        ) from error
    network, trained = load_network(path), provenance_of(read_checkpoint(checkpoint))
    return subject_of(network, checkpoint, size, trained["configuration"].get("data") if trained else None)


def _check_file(path: Path, replace: bool) -> None:
    """The file may be written."""
    if path.suffix not in (".onnx", ".pt2"):
        raise UserError(f"FILE: got {path}, needed a name that ends in .onnx or .pt2")
    if path.is_dir():
        raise UserError(f"FILE: {path} is a folder")
    if not path.parent.is_dir():
        raise UserError(f"FILE: got {path}, but there is no folder {path.parent}")
    if path.exists() and not replace:
        raise UserError(f"FILE: {path} is there already: give it another name, or --replace")
    missing = [name for name in _PACKAGES if find_spec(name) is None] if path.suffix == ".onnx" else []
    if missing:
        raise UserError(f"FILE: .onnx needs {', '.join(missing)}: the extra export has them, or write .pt2")


def _kind(path: Path, compiled: bool) -> str:
    """Which of the writers and readers is for a file."""
    if not compiled:
        return path.suffix
    if path.suffix != ".pt2":
        raise UserError(f"--compiled: got {path.name}, needed a name that ends in .pt2")
    if reason := why_not_linked():
        raise UserError(f"--compiled: {reason}")
    return "compiled"


def _check_opset(path: Path, opset: int | None) -> None:
    """The version of the operators is one that can be written."""
    if opset is None:
        return
    if path.suffix != ".onnx":
        raise UserError(f"--opset: got {opset} for {path.name}, which has none; leave it out, or write .onnx")
    import onnx

    newest = onnx.defs.onnx_opset_version()
    if not OLDEST_OPSET <= opset <= newest:
        raise UserError(f"--opset: got {opset}, needed one from {OLDEST_OPSET} to {newest}")


def _write_program(subject: Subject, plain: torch.nn.Module, _: int) -> bytes:
    with io.BytesIO() as stream, _quietly():
        torch.export.save(_program(subject, plain), stream)
        return stream.getvalue()


def _program(subject: Subject, plain: torch.nn.Module) -> ExportedProgram:
    """The network as PyTorch writes it down."""
    # As newer versions of PyTorch do by default, run and not read.
    return torch.export.export(plain, next(subject.trials()), dynamic_shapes=subject.shapes(), strict=False)


def _read_program(_: Subject, content: bytes) -> Run:
    with _quietly():
        return torch.export.load(io.BytesIO(content)).module()


def _write_package(subject: Subject, plain: torch.nn.Module, _: int) -> bytes:
    with tempfile.TemporaryDirectory(prefix="escnn_attention") as folder, _quietly():
        file, example = Path(folder, "network.pt2"), next(subject.trials())
        return compile_package(plain, example, file, dynamic_shapes=subject.shapes()).read_bytes()


def _read_package(_: Subject, content: bytes) -> Run:
    with tempfile.TemporaryDirectory(prefix="escnn_attention") as folder, _quietly():
        file = Path(folder, "network.pt2")
        file.write_bytes(content)
        loaded: Run = torch._inductor.aoti_load_package(str(file))
    return loaded


def _write_onnx(subject: Subject, plain: torch.nn.Module, opset: int) -> bytes:
    names: dict[str, Any] = {"input_names": list(subject.inputs), "output_names": [subject.output]}
    with _quietly():
        program = torch.onnx.export(_program(subject, plain), dynamo=True, opset_version=opset, verbose=False, **names)
    assert program is not None
    content: bytes = program.model_proto.SerializeToString()
    return content


def _read_onnx(subject: Subject, content: bytes) -> Run:
    import onnxruntime

    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])

    def run(*inputs: Tensor) -> Tensor:
        given = {name: t.numpy() for name, t in zip(subject.inputs, inputs, strict=True)}
        return torch.from_numpy(session.run(None, given)[0])

    return run


def _read(path: Path, kind: str, subject: Subject, content: bytes) -> Run:
    """What the file will say of its inputs."""
    try:
        return _READERS[kind](subject, content)
    except Exception as error:  # onnxruntime has many
        first, *_ = str(error).splitlines() or [type(error).__name__]
        raise UserError(f"{path}: it cannot be read again, and is not written: {first}") from error


_WRITERS: dict[str, Callable[[Subject, torch.nn.Module, int], bytes]] = {
    ".onnx": _write_onnx,
    ".pt2": _write_program,
    "compiled": _write_package,
}
_READERS: dict[str, Callable[[Subject, bytes], Run]] = {
    ".onnx": _read_onnx,
    ".pt2": _read_program,
    "compiled": _read_package,
}


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Hide what PyTorch says to those who develop it."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@torch.no_grad()
def _largest_error(run: Run, plain: torch.nn.Module, subject: Subject) -> float:
    """The largest difference between what a file and a network say, relative to the largest output."""
    worst = 0.0
    for inputs in subject.trials():
        expected = plain(*inputs)
        difference = (run(*inputs) - expected).abs().max() / expected.abs().max().clamp(min=1e-6)
        worst = max(worst, float(difference.nan_to_num(torch.inf)))
    return worst
