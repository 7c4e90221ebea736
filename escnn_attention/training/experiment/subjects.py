"""What is written to a file: a network of images, or of points, with what it is given to be looked at."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from escnn.nn import EquivariantModule, FieldType, GeometricTensor
from torch import Tensor
from torch.export import Dim

from escnn_attention._export import why_no_loops
from escnn_attention.equivariance.report import EquivarianceReport, equivariance_report
from escnn_attention.models import HamiltonianNetwork
from escnn_attention.models.classifier import InvariantLogits
from escnn_attention.models.cloud_network import CloudNetwork
from escnn_attention.plain.cloud_pooling import pool_clouds
from escnn_attention.plain.point_network import SymmetricTensors
from escnn_attention.training.errors import UserError

__all__ = ["CloudSubject", "ImageSubject", "Run", "Subject", "size_of_data", "subject_of"]

Run = Callable[..., Tensor]
"""What a file says of its inputs, in their order."""

_MOST_IMAGES = 2**31 - 1
"""Without a bound PyTorch 2.7 asks whether there are as many as its slices have for an end, and stops."""


class Subject(ABC):
    """A network that is written to a file.

    Attributes:
        inputs: the names of what the file takes.
        output: the name of what it gives.
    """

    inputs: tuple[str, ...]
    output: ClassVar[str]

    @abstractmethod
    def things(self) -> str:
        """What the file takes any number of."""

    @abstractmethod
    def plain(self) -> torch.nn.Module:
        """The network as a module of the inputs, without escnn, in float32."""

    @abstractmethod
    def shapes(self) -> tuple[dict[int, Any], ...]:
        """Which axes of the inputs have any size."""

    @abstractmethod
    def trials(self) -> Iterator[tuple[Tensor, ...]]:
        """Inputs of several sizes, the first of them to write the file by."""

    @abstractmethod
    def equivariance(self, run: Run, tolerance: float) -> EquivarianceReport | None:
        """How equivariant the file is; None for a network without a group."""


class ImageSubject(Subject):
    """A classifier of images.

    Args:
        network: the classifier.
        shape: of an image, ``(channels, *space)``.
    """

    inputs = ("images",)
    output = "logits"

    def __init__(self, network: torch.nn.Module, shape: tuple[int, ...]):
        self.network: Any = network
        self.shape = shape

    def things(self) -> str:
        return f"images {'×'.join(map(str, self.shape))}"

    def plain(self) -> torch.nn.Module:
        network = self.network
        plain = network.export() if hasattr(network, "export") else copy.deepcopy(network).eval()
        return cast(torch.nn.Module, plain.float())

    def shapes(self) -> tuple[dict[int, Any], ...]:
        return ({0: Dim("batch", max=_MOST_IMAGES)},)

    def trials(self) -> Iterator[tuple[Tensor, ...]]:
        for number in (2, 1, 3):
            yield (torch.randn(number, *self.shape, generator=torch.Generator().manual_seed(number)),)

    def equivariance(self, run: Run, tolerance: float) -> EquivarianceReport | None:
        network = self.network
        if getattr(network, "in_type", None) is None:
            return None
        logits = InvariantLogits(_ImagesInFile(run), network.in_type, network.num_classes)
        return equivariance_report(logits, (2, *self.shape), layers=False, tolerance=tolerance)


class CloudSubject(Subject):
    """A network of points.

    Its file takes the points of all clouds end to end, with the number of the cloud of each, and the features of pairs
    of points if the network takes some.

    Args:
        network: the network.
    """

    output = "output"

    def __init__(self, network: CloudNetwork):
        self.network = network
        self.edge_dim: int | None = getattr(network.blocks[0], "edge_dim", None)
        self.inputs = ("features", "coords", "batch", *(() if self.edge_dim is None else ("edge_attr",)))

    def things(self) -> str:
        network = self.network
        return f"points in {network.gspace.dimensionality} dimensions with {network.in_type.size} features"

    def plain(self) -> torch.nn.Module:
        return _OfInputs(self.network.export().float())

    def shapes(self) -> tuple[dict[int, Any], ...]:
        first = {0: Dim.AUTO}
        of_pairs = dict.fromkeys(range(3), Dim.AUTO)
        return (first, first, first, *(() if self.edge_dim is None else (of_pairs,)))

    def trials(self) -> Iterator[tuple[Tensor, ...]]:
        for sizes in ((4, 3), (5,), (1, 6, 2)):
            yield self._drawn(torch.tensor(sizes))

    def _drawn(self, sizes: Tensor) -> tuple[Tensor, ...]:
        """Random clouds of so many points, about as large as what points see of each other."""
        generator, number = torch.Generator().manual_seed(len(sizes)), int(sizes.sum())
        rules = (getattr(module, "neighbourhood", None) for module in self.network.modules())
        scale = min((rule.length for rule in rules if rule is not None), default=1.0)
        features = torch.randn(number, self.network.in_type.size, generator=generator)
        coords = scale * torch.randn(number, self.network.gspace.dimensionality, generator=generator)
        found = [features, coords, torch.arange(len(sizes)).repeat_interleave(sizes)]
        if self.edge_dim is not None:
            most = int(sizes.max())
            found.append(torch.randn(len(sizes), most, most, self.edge_dim, generator=generator))
        return tuple(found)

    def equivariance(self, run: Run, tolerance: float) -> EquivarianceReport | None:
        first, coords, *others = next(self.trials())
        file = _CloudsInFile(run, self.network, others)
        shape = tuple(first.shape)
        return equivariance_report(file, shape, layers=False, tolerance=tolerance, coords=coords.double())


class _OfInputs(torch.nn.Module):
    """A plain network of points as a function of the inputs of a file."""

    def __init__(self, network: torch.nn.Module):
        super().__init__()
        self.network = network

    def forward(self, features: Tensor, coords: Tensor, batch: Tensor, edge_attr: Tensor | None = None) -> Tensor:
        """The output of the network."""
        of_pairs = {} if edge_attr is None else {"edge_attr": edge_attr}
        y: Tensor = self.network(features, coords, batch=batch, **of_pairs)
        return y


class _ImagesInFile(torch.nn.Module):
    """What a file says of images, in any precision; copies have the same file."""

    def __init__(self, run: Run):
        super().__init__()
        self._run = (run,)  # not as a module, whose precision would be changed

    def __deepcopy__(self, _: dict[int, Any]) -> _ImagesInFile:
        return _ImagesInFile(*self._run)

    def forward(self, images: Tensor) -> Tensor:
        (run,) = self._run
        return run(images.float().contiguous()).to(images.dtype)


class _CloudsInFile(EquivariantModule):
    """What a file says of clouds, at their points or at their means, in any precision; copies have the same file.

    Args:
        run: the file.
        network: the network that is in it.
        others: what it takes besides features and coordinates.
    """

    def __init__(self, run: Run, network: CloudNetwork, others: list[Tensor]):
        super().__init__()
        self._arguments = (run, network, others)
        self.in_type = network.in_type
        numbers = getattr(network, "num_outputs", None)
        scalars = None if numbers is None else FieldType(network.gspace, numbers * [network.gspace.trivial_repr])
        self.out_type: FieldType = cast(Any, network).out_type if scalars is None else scalars
        tensors = getattr(network.head, "tensors", None)
        self._numbers_of = (
            SymmetricTensors(network.gspace.dimensionality).from_matrices if tensors is not None else None
        )

    def __deepcopy__(self, _: dict[int, Any]) -> _CloudsInFile:
        return _CloudsInFile(*self._arguments)

    def forward(self, x: GeometricTensor) -> GeometricTensor:
        run, _, others = self._arguments
        y = run(x.tensor.float().contiguous(), x.coords.float().contiguous(), *others).to(x.tensor.dtype)
        batch = others[0]
        coords = x.coords if len(y) == len(batch) else pool_clouds(x.coords, batch, len(y), "mean")
        return GeometricTensor(y if self._numbers_of is None else self._numbers_of(y), self.out_type, coords)

    def evaluate_output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        return (input_shape[0], self.out_type.size)


def subject_of(network: torch.nn.Module, source: str | Path, size: int | None, data: Any) -> Subject:
    """What is to be written of a network.

    Args:
        network: of images or of points.
        source: from which it comes, for errors.
        size: the height and width of the images; None for those of the data.
        data: what it was trained on, as a configuration has it; None if that is not known.

    Raises:
        UserError: a network of neither, or no size of images, or one of points; or a network of points and a PyTorch
            before 2.13.
    """
    if isinstance(network, HamiltonianNetwork):
        raise UserError(
            f"{source}: a HamiltonianNetwork takes gradients while it runs, which no file does; its energy is"
            " network.potential, which has an export()"
        )
    if not isinstance(network, CloudNetwork):
        return ImageSubject(network, _image_shape(network, source, size_of_data(data) if size is None else size))
    if size is not None:
        raise UserError(f"--size: got {size}, and {type(network).__name__} is a network of points; leave it out")
    if reason := why_no_loops():
        raise UserError(f"{source}: {type(network).__name__} is a network of points; {reason}")
    return CloudSubject(network)


def _image_shape(network: torch.nn.Module, source: str | Path, size: int | None) -> tuple[int, ...]:
    """The shape of an image that the network takes."""
    in_type = getattr(network, "in_type", None)
    channels = getattr(network, "in_channels", getattr(in_type, "size", None))
    if not isinstance(channels, int) or not isinstance(getattr(network, "num_classes", None), int):
        raise UserError(f"{source}: {type(network).__name__} is a network neither of images nor of points")
    if size is None:
        raise UserError(f"--size: {source} does not say how large its images are; give their height and width")
    if size < 1:
        raise UserError(f"--size: got {size}, needed a positive number")
    return (channels, *[size] * (2 if in_type is None else in_type.gspace.dimensionality))


def size_of_data(description: Any) -> int | None:
    """The height and width of the images of a data module of this package; None of any other."""
    from escnn_attention import training

    path = description.get("class_path") if isinstance(description, Mapping) else None
    package, _, name = str(path).rpartition(".")
    if package != training.__name__ and not package.startswith(f"{training.__name__}.data"):
        return None
    size = getattr(getattr(training, name, None), "size", None) if name in training.__all__ else None
    if size is not None:
        size = (description.get("init_args") or {}).get("size", size)  # of images that can be had in several
    return size if isinstance(size, int) else None
