"""Networks in folders: weights as safetensors, and the arguments of the network as JSON, by huggingface_hub's mixin."""

from __future__ import annotations

import inspect
import json
import re
import warnings
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from escnn_attention._checks import reason_of
from escnn_attention.functional.layout import LAYOUT
from escnn_attention.models.description import DescriptionError, build, class_path, describe, named
from escnn_attention.models.limits import check_numbers, within
from escnn_attention.models.weights_file import DIGEST, WEIGHTS, check_finite, digest_of, read_weights, write_weights

CONFIGURATION = "config.json"

_PICKLES = ("pytorch_model.bin", "model.bin", "model.pt", "model.pth")
_CARD = """---
{{ card_data }}
---

A network of the Python package escnn_attention: equivariant attention for escnn. Its weights are in
`model.safetensors`, and its arguments in `config.json`.

```python
from escnn_attention import models

network = models.from_pretrained("path/to/this/folder")
```
"""

if TYPE_CHECKING or find_spec("huggingface_hub") is not None:
    with warnings.catch_warnings():
        # In notebooks tqdm warns on import that it shows no progress bars.
        warnings.filterwarnings("ignore", message="IProgress not found")
        from huggingface_hub import PyTorchModelHubMixin as _HubMixin
else:

    class _HubMixin:
        """The base class of networks without huggingface_hub."""

        def __init_subclass__(cls, **information: Any) -> None:
            super().__init_subclass__()

        def save_pretrained(self, *arguments: Any, **options: Any) -> str | None:
            raise _missing("huggingface_hub")

        push_to_hub = save_pretrained
        from_pretrained = classmethod(save_pretrained)


_Self = TypeVar("_Self", bound="PretrainedMixin")


class PretrainedMixin(
    _HubMixin, library_name="escnn_attention", tags=["equivariance", "attention", "escnn"], model_card_template=_CARD
):
    """Networks that are saved to a folder or to the Hugging Face Hub, and loaded from there.

    It is huggingface_hub's ``PyTorchModelHubMixin``, with three differences: nothing is ever unpickled, the
    configuration holds all arguments of the constructor or the network is not saved, and loaded weights have the
    precision in which they were saved. It needs the extra ``hub``; without it these methods raise an ImportError.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from escnn_attention.models import HybridNet
        >>> from escnn import gspaces
        >>> network = HybridNet(gspaces.rot2dOnR2(4), 1, 10, widths=(4,), convolutions=(1,), attention=(1,)).eval()
        >>> folder = tempfile.mkdtemp()
        >>> network.save_pretrained(folder)  # of the PretrainedMixin
        >>> images = torch.randn(2, 1, 9, 9)
        >>> torch.equal(HybridNet.from_pretrained(folder)(images), network(images))
        True

    Source: huggingface_hub, ``PyTorchModelHubMixin``; https://huggingface.co/docs/safetensors for the format.
    """

    _undescribed: dict[str, str]

    def __new__(cls: type[_Self], *args: Any, **kwargs: Any) -> _Self:
        network: _Self = super().__new__(cls)
        described: dict[str, Any] = {}
        undescribed: dict[str, str] = {}
        for name, value in _bound(cls, args, kwargs).items():
            try:
                described[name] = describe(value)
            except DescriptionError as error:
                undescribed[name] = f"{name}: {error}"
        object.__setattr__(network, "_hub_mixin_config", described)
        object.__setattr__(network, "_undescribed", undescribed)
        return network

    def __repr__(self) -> str:
        assert isinstance(self, torch.nn.Module)
        name, _, inside = shortened(super().__repr__()).partition("\n")
        parameters = f"{sum(p.numel() for p in self.parameters()):,} parameters"
        space = getattr(self, "gspace", None)
        return "\n".join([name, f"  {parameters}" if space is None else f"  {space.name}, {parameters}", inside])

    def save_pretrained(self, save_directory: str | Path, **options: Any) -> str | None:
        """Write ``model.safetensors``, ``config.json`` and, where there is none, a model card ``README.md``.

        Args:
            save_directory: the folder, which is made where it is missing.
            **options: of huggingface_hub's mixin: ``push_to_hub``, ``repo_id``, ``model_card_kwargs`` and, with
                ``push_to_hub``, those of :meth:`push_to_hub`.

        Returns:
            the address of the commit with ``push_to_hub=True``, otherwise None.

        Raises:
            ImportError: huggingface_hub or safetensors is not installed.
            ValueError: an argument of the network has no description in JSON, a weight is infinite or not a number, a
                size is one that :meth:`from_pretrained` refuses, such as a group of 256 rotations, or the folder holds
                another kind of configuration, which is left as it is.
        """
        assert isinstance(self, torch.nn.Module)
        _need_safetensors()
        folder = Path(save_directory)
        configuration = self._configuration()
        if options.pop("config", None) not in (None, configuration):
            raise ValueError("config: got one, but it follows from how the network was made; leave it out")
        state = self.state_dict()
        check_finite(state, type(self).__name__)
        check_numbers(configuration, sum(tensor.nbytes for tensor in state.values()))
        _check_target(folder)
        return super().save_pretrained(folder, config=configuration, **options)

    @classmethod
    def from_pretrained(cls: type[_Self], pretrained_model_name_or_path: str | Path, **options: Any) -> _Self:
        """The network of a folder, or of a repository on the Hub, in eval mode.

        Args:
            pretrained_model_name_or_path: the folder, or ``"owner/name"``.
            **options: of huggingface_hub's mixin (``revision``, ``token``, ``cache_dir``, ``force_download``,
                ``local_files_only``); ``map_location``, the device, by default the CPU; and arguments of the network in
                place of those in the folder.

        Raises:
            ImportError: huggingface_hub or safetensors is not installed.
            FileNotFoundError: there is no such folder, or a file is missing in it; weights as pickles are not read.
            ValueError: the folder is of another network; its network would be larger than its weights; a weight is
                infinite or not a number; or a file is not as :meth:`save_pretrained` wrote it.
        """
        _need_safetensors()
        source = check_source(pretrained_model_name_or_path)
        files = {name: options[name] for name in _OF_THE_HUB if name in options}
        read_configuration(source if isinstance(source, Path) else _download(source, CONFIGURATION, files).parent)
        return super().from_pretrained(source, **options)

    @classmethod
    def _from_pretrained(  # type: ignore[override]
        cls: type[_Self],
        *,
        model_id: str,
        config: Any = None,
        map_location: str | torch.device = "cpu",
        **options: Any,
    ) -> _Self:
        files = {name: options.pop(name) for name in _OF_THE_HUB if name in options}
        configuration = _checked_configuration(config, model_id)
        found = _network_class(configuration, cls, model_id)
        arguments = {name: value for name, value in (configuration | options).items() if name not in _ABOUT}
        file = _weights_file(model_id, files)
        tensors = read_weights(file, map_location)
        if configuration.get(DIGEST) != digest_of(configuration, file):
            what = "is not that of its files: one of them has changed" if DIGEST in configuration else "is missing"
            raise ValueError(
                f"{model_id}: the {DIGEST} in its {CONFIGURATION} {what} since save_pretrained wrote it; other "
                "arguments of the network can be given to from_pretrained"
            )
        check_finite(tensors, model_id)
        try:
            with within(arguments, file.stat().st_size, len(tensors)):
                network: _Self = found(**build(arguments))
        except Exception as error:  # a file can make a constructor fail in any way
            reason = reason_of(error)
            raise ValueError(f"{model_id}: this version cannot build its {found.__name__}: {reason}") from error
        _load(network, tensors, model_id)
        return network.to(map_location).eval()  # type: ignore[attr-defined, no-any-return]

    def _save_pretrained(self, save_directory: Path) -> None:
        assert isinstance(self, torch.nn.Module)
        write_weights(self, save_directory)
        content = self._configuration()
        content[DIGEST] = digest_of(content, save_directory / WEIGHTS)
        # Values are not sorted: numbers of fields by name stand in the order of these fields.
        text = json.dumps(dict(sorted(content.items())), indent=2)
        (save_directory / CONFIGURATION).write_text(text, encoding="utf-8")

    def _configuration(self) -> dict[str, Any]:
        """The arguments of the constructor, the class, and the layout of the weights."""
        if self._undescribed:
            reason = next(iter(self._undescribed.values()))
            raise ValueError(
                f"{reason}. {type(self).__name__} cannot be written as JSON: save its state_dict, or export() it"
            )
        arguments = self._hub_mixin_config
        assert isinstance(arguments, Mapping)
        return {"class_path": class_path(type(self)), "layout": LAYOUT, **arguments}


_ABOUT = ("class_path", "layout", DIGEST)
_LONGEST = 1 << 20  # bytes of a configuration
_OF_THE_HUB = ("revision", "cache_dir", "force_download", "local_files_only", "token")


def check_source(source: str | Path) -> Path | str:
    """The folder of a network, or the name of a repository on the Hub."""
    if not isinstance(source, (str, Path)):
        raise TypeError(f"pretrained_model_name_or_path: got {type(source).__name__}, needed a folder or a name")
    path = Path(source)
    if path.is_dir():
        return path
    owner, slash, name = str(source).partition("/")
    if isinstance(source, str) and slash and owner not in ("", ".", "..", "~") and name and "/" not in name:
        return source
    raise FileNotFoundError(f"pretrained_model_name_or_path: there is no folder {str(source)!r}")


def read_configuration(folder: Path) -> dict[str, Any]:
    """The configuration in a folder that :meth:`PretrainedMixin.save_pretrained` wrote."""
    path = folder / CONFIGURATION
    if not path.exists():
        raise FileNotFoundError(
            f"{folder}: there is no {CONFIGURATION} in it, needed a folder that save_pretrained wrote"
        )
    if not path.is_file():  # a pipe or a device may never end
        raise ValueError(f"{folder}: its {CONFIGURATION} is not a file")
    with path.open("rb") as file:
        text = file.read(_LONGEST + 1)
    if len(text) > _LONGEST:
        raise ValueError(f"{folder}: its {CONFIGURATION} is longer than {_LONGEST} bytes, which no network needs")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:  # not JSON, or not text
        raise ValueError(f"{folder}: its {CONFIGURATION} is not JSON: {reason_of(error)}") from error
    return _checked_configuration(content, folder)


def described_network(configuration: Mapping[str, Any]) -> dict[str, Any]:
    """The network of a configuration as ``class_path`` and ``init_args``, as the configuration of a training has it."""
    arguments = {name: value for name, value in configuration.items() if name not in _ABOUT}
    return {"class_path": configuration["class_path"], "init_args": arguments}


def _bound(cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a constructor by name, with defaults; none if the constructor will refuse them."""
    try:
        bound = inspect.signature(cls.__init__).bind(None, *args, **kwargs)  # type: ignore[misc]
    except TypeError:
        return {}
    bound.apply_defaults()
    _, *names = bound.arguments
    found = {name: bound.arguments[name] for name in names}
    kinds = inspect.signature(cls.__init__).parameters  # type: ignore[misc]
    for name in names:
        if kinds[name].kind is inspect.Parameter.VAR_KEYWORD:
            found |= found.pop(name)
    return found


def _checked_configuration(content: Any, source: object) -> dict[str, Any]:
    if not isinstance(content, dict) or not isinstance(content.get("class_path"), str):
        raise ValueError(
            f"{source}: its {CONFIGURATION} names no class_path, needed a network that save_pretrained of "
            "escnn_attention wrote"
        )
    layout = content.get("layout")
    if not isinstance(layout, int) or layout > LAYOUT:
        raise ValueError(
            f"{source}: its weights are in layout {layout}, and this version of escnn_attention knows those up to "
            f"{LAYOUT}: it needs a newer one"
        )
    return content


def _network_class(configuration: Mapping[str, Any], cls: type[_Self], source: object) -> type[_Self]:
    """The class that a configuration names: ``cls`` or a subclass."""
    path = configuration["class_path"]
    if path == class_path(cls):
        return cls
    try:
        found = named(path)
    except DescriptionError as error:
        raise ValueError(f"{source}: {error}") from error
    if not (inspect.isclass(found) and issubclass(found, PretrainedMixin)):
        raise ValueError(f"{source}: it names {path!r}, which is no network that is saved to folders")
    if not issubclass(found, cls):
        raise ValueError(
            f"{source}: it is a {path.rpartition('.')[2]}, not a {cls.__name__}; models.from_pretrained takes either"
        )
    return found


def _weights_file(model_id: str, options: Mapping[str, Any]) -> Path:
    """The file of the weights in a folder or a repository, if it is safetensors."""
    folder = Path(model_id)
    if folder.is_dir():
        if (folder / WEIGHTS).is_file():
            return folder / WEIGHTS
        pickles = [name for name in _PICKLES if (folder / name).is_file()]
        why = f"{pickles[0]} in it is a pickle, which can run code and is not read" if pickles else "it has no weights"
        raise FileNotFoundError(f"{folder}: there is no {WEIGHTS} in it; {why}")
    return _download(model_id, WEIGHTS, options)


def _download(repository: str, name: str, options: Mapping[str, Any]) -> Path:
    """A file of a repository on the Hub, or of the cache of what was downloaded before."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import LocalEntryNotFoundError, RemoteEntryNotFoundError

    try:
        return Path(hf_hub_download(repo_id=repository, filename=name, **options))
    except RemoteEntryNotFoundError as error:
        pickles = "; weights as pickles, which can run code, are not read" if name == WEIGHTS else ""
        raise FileNotFoundError(f"{repository}: there is no {name} in it{pickles}") from error
    except (LocalEntryNotFoundError, OSError, ValueError) as error:
        raise FileNotFoundError(
            f"pretrained_model_name_or_path: there is no folder {repository!r}, and the Hub lacks it or cannot be "
            f"reached: {reason_of(error)}"
        ) from error


def _load(network: Any, tensors: Mapping[str, Tensor], source: object) -> None:
    """Load weights into a network in their precision, if the names and shapes are those of the network."""
    network.train()  # in this mode escnn's convolutions hold only weights
    needed = network.state_dict()
    problem = next((f"{name} is missing" for name in needed if name not in tensors), None)
    problem = problem or next((f"{name} is no tensor of this network" for name in tensors if name not in needed), None)
    for name, tensor in needed.items():
        if problem is None and tensor.shape != tensors[name].shape:
            problem = f"{name} has shape {tuple(tensors[name].shape)}, needed {tuple(tensor.shape)}"
        if problem is None and tensor.is_floating_point() != tensors[name].is_floating_point():
            problem = f"{name} is of {tensors[name].dtype}, needed {tensor.dtype}"
    if problem is not None:
        raise ValueError(f"{source}: its {WEIGHTS} is of another network than its {CONFIGURATION}: {problem}")
    floats = (tensors[name].dtype for name, _ in network.named_parameters() if tensors[name].is_floating_point())
    network.to(next(floats, torch.get_default_dtype())).load_state_dict(tensors)


def _check_target(folder: Path) -> None:
    """Check that saving would replace only files of a network."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"save_directory: {folder} is not a folder")
    if (folder / CONFIGURATION).exists():
        try:
            read_configuration(folder)
        except ValueError as error:
            raise ValueError(
                f"save_directory: {folder} holds a {CONFIGURATION} of something else, which would be replaced: choose "
                "another folder"
            ) from error
    elif (folder / WEIGHTS).exists():
        raise ValueError(
            f"save_directory: {folder} holds a {WEIGHTS} of something else, which would be replaced: choose another "
            "folder"
        )


def _need_safetensors() -> None:
    for name in ("huggingface_hub", "safetensors"):
        if find_spec(name) is None:
            raise _missing(name)


def _missing(name: str) -> ImportError:
    return ImportError(
        f"save_pretrained, from_pretrained and push_to_hub need {name}: pip install huggingface_hub safetensors (the "
        "extra hub)"
    )


# A field type as escnn prints it: [C4_on_R2[(None, 4)]: {irrep_0 (x3), regular (x2)}(11)]
_TYPE = re.compile(r"\[[^\[\]{}]*(?:\[[^{}]*\])?: \{([^{}]*)\}\(\d+\)\]")
_FIELDS = re.compile(r"([^{}]+?) \(x(\d+)\)(?:, )?")
_NOTHING = re.compile(
    r"^ *\(\w+\): (?:Identity(?:Module)?\(\)|Crop\([^\n]*margin=0\)|SequentialModule\(\s*\))\n", re.MULTILINE
)
_ALONE = re.compile(r"^( *\(\w+\): )SequentialModule\(\n *\(\w+\): ([^\n]*\))\n *\)$", re.MULTILINE)
_INPLACE = re.compile(r"\(inplace=True, type=")
_DEFAULTS = re.compile(r", (?:stride=1|momentum=0\.1|track_running_stats=True|affine=True|eps=1e-05)\b")


def shortened(text: str) -> str:
    """PyTorch's text of a module, with field types by their fields, and without modules that do nothing.

    >>> shortened("R2Conv([C4_on_R2[(None, 4)]: {irrep_0 (x3), regular (x2)}(11)], stride=1, bias=False)")
    'R2Conv(3 irrep_0, 2 regular, bias=False)'
    """
    text = _TYPE.sub(lambda found: ", ".join(f"{count} {name}" for name, count in _FIELDS.findall(found[1])), text)
    text = _INPLACE.sub("(", _DEFAULTS.sub("", text))
    while (shorter := _ALONE.sub(r"\1\2", _NOTHING.sub("", text))) != text:
        text = shorter
    return text
