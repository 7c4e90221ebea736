"""Trained networks as files that run anywhere: ONNX, and programs of ``torch.export``."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.export import Dim

from escnn_attention.equivariance.report import EquivarianceReport, equivariance_report
from escnn_attention.models.classifier import InvariantLogits
from escnn_attention.training.errors import UserError, told
from escnn_attention.training.experiment.checkpoints import provenance_of, read_checkpoint
from escnn_attention.training.experiment.network import checkpoint_of, load_network
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
        shape: of the images in it, ``(channels, height, width)``; their number is free.
        error: the largest difference between the outputs of the file and of the network, relative to the largest.
        report: the equivariance of the file, which was given transformed images; None for a network without a group.

    Example:
        >>> from pathlib import Path
        >>> from escnn_attention.training.experiment.export import Exported
        >>> Exported(Path("r4.onnx"), 612_000, (1, 28, 28), error=4.8e-07, report=None).file.suffix
        '.onnx'
    """

    file: Path
    num_bytes: int
    shape: tuple[int, ...]
    error: float
    report: EquivarianceReport | None


def export_network(
    source: str | Path,
    file: str | Path,
    *,
    size: int | None = None,
    opset: int | None = None,
    replace: bool = False,
) -> Exported:
    """Write the trained network of an experiment to a file that needs neither this package nor escnn.

    The file is read again and given random images, as they are and transformed by the group, before it takes its place:
    one whose outputs are not those of the network is not written.

    Args:
        source: the folder that was given to ``escnn-attention fit --folder``, or a checkpoint of it.
        file: what to write: ``.onnx``, or ``.pt2`` for :func:`torch.export.load`.
        size: the height and width of the images; by default what the data of the training have.
        opset: the version of ONNX's operators, 20 by default.
        replace: whether a file that is there may be replaced.

    Raises:
        UserError: another suffix, a version of the operators that there is not, packages that are missing, a file that
            is there already, no size, a network that is not one of images, or outputs that are not those of it.

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
    network: Any = load_network(source)
    shape = _image_shape(network, checkpoint_of(source), size)
    plain = network.export() if hasattr(network, "export") else copy.deepcopy(network).eval()
    plain = plain.float()
    content = _WRITERS[path.suffix](plain, torch.randn(2, *shape), opset or DEFAULT_OPSET)
    run = _read(path, content)
    error = _largest_error(run, plain, shape)
    if not error <= _TOLERANCE:
        raise UserError(
            f"{path}: its outputs are off by {error:.1e} of the largest, more than {_TOLERANCE:.0e}: it is not written"
        )
    report = None
    if getattr(network, "in_type", None) is not None:
        logits = InvariantLogits(_InFile(run), network.in_type, network.num_classes)
        report = equivariance_report(logits, (2, *shape), layers=False, tolerance=_TOLERANCE)
    with told():
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as stream:
            stream.write(content)
    return Exported(path, len(content), shape, error, report)


def _check_file(path: Path, replace: bool) -> None:
    """The file may be written."""
    if path.suffix not in _WRITERS:
        raise UserError(f"FILE: got {path}, needed a name that ends in .onnx or .pt2")
    if path.is_dir():
        raise UserError(f"FILE: {path} is a folder")
    if path.exists() and not replace:
        raise UserError(f"FILE: {path} is there already: give it another name, or --replace")
    missing = [name for name in _PACKAGES if find_spec(name) is None] if path.suffix == ".onnx" else []
    if missing:
        raise UserError(f"FILE: .onnx needs {', '.join(missing)}: pip install 'escnn-attention[export]', or write .pt2")


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


def _image_shape(network: torch.nn.Module, checkpoint: Path, size: int | None) -> tuple[int, ...]:
    """The shape of an image that the network takes."""
    in_type = getattr(network, "in_type", None)
    channels = getattr(network, "in_channels", getattr(in_type, "size", None))
    if not isinstance(channels, int) or not isinstance(getattr(network, "num_classes", None), int):
        raise UserError(f"{checkpoint}: {type(network).__name__} is not a network of images, and this exports no other")
    if size is None:
        trained = provenance_of(read_checkpoint(checkpoint))
        size = _size_of_data(trained["configuration"].get("data")) if trained else None
    if size is None:
        raise UserError(f"--size: {checkpoint} does not say how large its images are; give their height and width")
    if size < 1:
        raise UserError(f"--size: got {size}, needed a positive number")
    return (channels, *[size] * (2 if in_type is None else in_type.gspace.dimensionality))


def _size_of_data(description: Any) -> int | None:
    """The height and width of the images of a data module of this package; None of any other."""
    from escnn_attention import training

    path = description.get("class_path") if isinstance(description, Mapping) else None
    package, _, name = str(path).rpartition(".")
    if package != training.__name__ and not package.startswith(f"{training.__name__}.data"):
        return None
    size = getattr(getattr(training, name, None), "size", None) if name in training.__all__ else None
    return size if isinstance(size, int) else None


_Run = Callable[[Tensor], Tensor]


def _write_program(plain: torch.nn.Module, images: Tensor, _: int) -> bytes:
    with io.BytesIO() as stream, _quietly():
        torch.export.save(torch.export.export(plain, (images,), dynamic_shapes=({0: Dim("batch")},)), stream)
        return stream.getvalue()


def _read_program(content: bytes) -> _Run:
    with _quietly():
        return torch.export.load(io.BytesIO(content)).module()


def _write_onnx(plain: torch.nn.Module, images: Tensor, opset: int) -> bytes:
    options: dict[str, Any] = {"dynamic_shapes": ({0: Dim("batch")},), "input_names": ["images"]}
    options |= {"output_names": ["logits"], "opset_version": opset, "verbose": False}
    with _quietly():
        program = torch.onnx.export(plain, (images,), dynamo=True, **options)
    assert program is not None
    content: bytes = program.model_proto.SerializeToString()
    return content


def _read_onnx(content: bytes) -> _Run:
    import onnxruntime

    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])

    def run(images: Tensor) -> Tensor:
        return torch.from_numpy(session.run(None, {"images": images.numpy()})[0])

    return run


def _read(path: Path, content: bytes) -> _Run:
    """What the file will say of images."""
    try:
        return _READERS[path.suffix](content)
    except Exception as error:  # onnxruntime has many
        first, *_ = str(error).splitlines() or [type(error).__name__]
        raise UserError(f"{path}: it cannot be read again, and is not written: {first}") from error


_WRITERS: dict[str, Callable[[torch.nn.Module, Tensor, int], bytes]] = {".onnx": _write_onnx, ".pt2": _write_program}
_READERS: dict[str, Callable[[bytes], _Run]] = {".onnx": _read_onnx, ".pt2": _read_program}


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
def _largest_error(run: _Run, plain: torch.nn.Module, shape: tuple[int, ...]) -> float:
    """The largest difference between two functions of images, relative to the largest output."""
    worst = 0.0
    for number in (1, 3):
        images = torch.randn(number, *shape, generator=torch.Generator().manual_seed(number))
        expected = plain(images)
        difference = (run(images) - expected).abs().max() / expected.abs().max().clamp(min=1e-6)
        worst = max(worst, float(difference.nan_to_num(torch.inf)))
    return worst


class _InFile(torch.nn.Module):
    """What a file says of images, in any precision; copies have the same file."""

    def __init__(self, run: _Run):
        super().__init__()
        self._run = (run,)  # not as a module, whose precision would be changed

    def __deepcopy__(self, _: dict[int, Any]) -> _InFile:
        return _InFile(*self._run)

    def forward(self, images: Tensor) -> Tensor:
        (run,) = self._run
        return run(images.float().contiguous()).to(images.dtype)
