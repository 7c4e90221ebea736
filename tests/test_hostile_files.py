"""Files that run code in a careless reader, and files that are not what they should be: none runs any in ours.

A test is named after its seed: ``--seed`` with that number draws the same file as the first of its kind.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import random
import shutil
import subprocess
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

pytest.importorskip("jsonargparse")

from escnn_attention.training import load_network
from escnn_attention.training.data.files import npz_file
from escnn_attention.training.errors import UserError
from escnn_attention.training.experiment.checkpoints import read_checkpoint
from escnn_attention.training.experiment.configuration import find_task
from tests.layers import packed
from tests.sampling import seeds

FEW = 6
CONTENT = {
    "state_dict": {"network.w": torch.arange(6.0)},
    "epoch": 2,
    "callbacks": {"EpochHistory": {"rows": [{"loss": 0.5}]}},
    "loops": {"fit_loop": {}},
    "optimizer_states": [{"state": {}, "param_groups": []}],
    "lr_schedulers": [],
    "pytorch-lightning_version": "2.4",
}


class Trap:
    """Calls a function where it is unpickled."""

    def __init__(self, function: Callable[..., Any], *arguments: Any):
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


class State:
    """Calls a function with its state, where it is unpickled."""

    def __init__(self, trap: Trap):
        self.trap = trap

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, (), {"x": self.trap}


def trap(draw: random.Random, mark: Path) -> Any:
    """What makes the folder ``mark`` where it is unpickled."""
    name = str(mark)
    found: Any = draw.choice(
        [
            Trap(os.mkdir, name),
            Trap(os.makedirs, name),
            Trap(os.system, f"mkdir '{name}'"),
            Trap(Path.mkdir, mark),
            Trap(exec, f"import os; os.mkdir({name!r})"),
            Trap(eval, f"__import__('os').mkdir({name!r})"),
            Trap(subprocess.call, ["mkdir", name]),
            Trap(shutil.copytree, str(Path(__file__).parent / "training" / "comparison"), name),
            Trap(partial(os.mkdir, name)),
            Trap(list, Trap(map, os.mkdir, [name])),
        ]
    )
    for _ in range(draw.randint(0, 3)):
        found = draw.choice([lambda x: [x], lambda x: {"x": x}, lambda x: (1, x), State])(found)
    return found


def checkpoint_of(draw: random.Random, hidden: Any) -> Any:
    """A checkpoint with something hidden in it."""
    places: list[Callable[[], Any]] = [
        lambda: hidden,
        lambda: {**CONTENT, "state_dict": hidden},
        lambda: {**CONTENT, "state_dict": {"network.w": hidden}},
        lambda: {**CONTENT, "state_dict": {"network._extra_state": hidden}},
        lambda: {**CONTENT, "hyper_parameters": hidden},
        lambda: {**CONTENT, "callbacks": {"_Provenance": {"configuration": hidden}}},
        lambda: {**CONTENT, "optimizer_states": [hidden]},
        lambda: {**CONTENT, "loops": {"fit_loop": {"state_dict": hidden}}},
        lambda: {(1, 2): hidden},
    ]
    return draw.choice(places)()


def of_old_kind(content: Any) -> bytes:
    return packed(content, _use_new_zipfile_serialization=False)


def checkpoints(draw: random.Random, mark: Path, path: Path) -> Callable[[], Any]:
    """A checkpoint that runs code; returns the careless reader."""
    content = checkpoint_of(draw, trap(draw, mark))
    protocol = draw.randint(0, 5)
    writers: list[Callable[[Any], bytes]] = [packed, of_old_kind]
    writer = draw.choice([*writers, partial(pickle.dumps, protocol=protocol)])
    path.write_bytes(writer(content))
    if isinstance(writer, partial):
        return lambda: pickle.loads(path.read_bytes())
    return lambda: torch.load(path, weights_only=False)


def arrays(draw: random.Random, mark: Path, path: Path) -> Callable[[], Any]:
    """An archive of arrays that runs code; returns the careless reader."""
    hidden = np.empty(1, dtype=object)
    hidden[0] = trap(draw, mark)
    draw.choice([np.savez, np.savez_compressed])(path.with_suffix(".npz"), images=hidden, labels=np.arange(3))
    path.with_suffix(".npz").rename(path)
    return lambda: np.load(path, allow_pickle=True)["images"]


def configurations(draw: random.Random, mark: Path, path: Path) -> Callable[[], Any]:
    """A configuration that runs code; returns the careless reader."""
    tag, name = draw.choice(["apply", "new"]), draw.choice(["os.mkdir", "os.makedirs", "posix.mkdir"])
    hidden = f"!!python/object/{tag}:{name} ['{mark}']"
    if tag == "new":
        hidden = f"!!python/object/apply:builtins.exec [\"import os; os.mkdir('{mark}')\"]"
    key = draw.choice(["task", "seed_everything", "trainer", "model"])
    path.write_text(draw.choice([f"{key}: {hidden}\n", f"{key}: [1, {hidden}]\n", f"? {hidden}\n: 1\n"]))
    return lambda: yaml.unsafe_load(path.read_text())


def read_run(path: Path) -> Any:
    """The network of a folder whose only checkpoint is the file."""
    folder = path.with_name("run")
    folder.mkdir()
    shutil.copy(path, folder / "best.ckpt")
    return load_network(folder)


def read_arrays(path: Path) -> dict[str, Any]:
    with npz_file(path) as found:
        return {name: found[name] for name in found.files}


KINDS = {
    "checkpoints": (checkpoints, (read_checkpoint, read_run), 120),
    "arrays": (arrays, (read_arrays,), 40),
    "configurations": (configurations, (lambda path: find_task(["fit", "--config", str(path)]),), 40),
}


DAMAGES: dict[str, Callable[[random.Random], bytes]] = {
    "anywhere": lambda draw: mutated(draw, draw.choice([packed, of_old_kind])(CONTENT)),
    "records": lambda draw: with_other_records(draw, packed(CONTENT)),
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "damage" in metafunc.fixturenames:
        metafunc.parametrize(("damage", "seed"), seeds(metafunc.config, dict.fromkeys(DAMAGES, 100), FEW))
    else:
        counts = {kind: count for kind, (*_, count) in KINDS.items()}
        metafunc.parametrize(("kind", "seed"), seeds(metafunc.config, counts, FEW))


def test_no_code_runs(kind, seed, tmp_path):
    write, readers, _ = KINDS[kind]
    mark, path = tmp_path / "it ran", tmp_path / "file"
    careless = write(random.Random(f"{seed} {kind}"), mark, path)
    for reader in readers:
        with pytest.raises(UserError):
            reader(path)
        assert not mark.exists()
    # The control: it would have run.
    with contextlib.suppress(Exception):
        careless()
    assert mark.exists()


def mutated(draw: random.Random, content: bytes) -> bytes:
    """The content with some bytes changed, left out, put in or moved."""
    some = bytearray(content)
    for _ in range(draw.randint(1, 6)):
        start, other, length = draw.randrange(len(some)), draw.randrange(len(some)), draw.randint(1, 8)
        change = draw.choice(["flip", "set", "cut", "insert", "copy", "end"])
        if change == "flip":
            some[start] ^= 1 << draw.randrange(8)
        elif change == "set":
            some[start] = draw.choice(b"\x00\xff.R(c}]tsb\x85\x86\x87\x93\x94\x80")
        elif change == "cut":
            del some[max(1, start) : start + length]
        elif change == "insert":
            some[start:start] = draw.randbytes(length)
        elif change == "copy":
            some[start : start + length] = some[other : other + length]  # which may be shorter
        elif draw.random() < 0.2:
            del some[max(1, start) :]
    return bytes(some)


def with_other_records(draw: random.Random, content: bytes) -> bytes:
    """The archive with some of its records changed, whose own sums are right."""
    changed = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as archive, zipfile.ZipFile(changed, "w") as other:
        names = archive.namelist()
        chosen = draw.choice([{next(n for n in names if n.endswith("data.pkl"))}, {draw.choice(names)}, set(names)])
        for name in names:
            record = archive.read(name)
            other.writestr(name, mutated(draw, record) if name in chosen and record else record)
    return changed.getvalue()


def test_damage_is_an_error_that_says_so(damage, seed, tmp_path):
    draw, path = random.Random(f"{seed} {damage}"), tmp_path / "last.ckpt"
    content = DAMAGES[damage](draw)
    path.write_bytes(content)
    try:
        read = read_checkpoint(path)
    except UserError as error:
        refused = str(error)
    else:
        refused = ""
        assert isinstance(read, dict)
        assert all(isinstance(t, torch.Tensor) for t in read.get("state_dict", {}).values())
    assert not refused or refused.startswith(f"cannot read the checkpoint {path}: ")
    assert "\n" not in refused
