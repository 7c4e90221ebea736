from __future__ import annotations

import atexit
import faulthandler
import gc
import multiprocessing
import os
import random
import sys
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

from tests.sampling import long_first, mark_undrawn, one_in, seed_of_the_commit

if TYPE_CHECKING:
    from tests.fresh_python import FreshPython

ROOT = Path(__file__).parents[1]

# The first use of a group or a kernel basis takes escnn seconds: no limit on the time of a single example.
_SLOW = [hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.function_scoped_fixture]
hypothesis.settings.register_profile("quick", max_examples=10, deadline=None, suppress_health_check=_SLOW)
hypothesis.settings.register_profile("exhaustive", max_examples=100, deadline=None, suppress_health_check=_SLOW)


@pytest.hookimpl(tryfirst=True)  # before hypothesis reads its options
def pytest_configure(config: pytest.Config) -> None:
    """Choose the seed of all draws: ``--seed``, a random one of an exhaustive run, else that of the commit."""
    exhaustive = config.option.markexpr == "exhaustive"
    profile = "exhaustive" if exhaustive else "quick"
    hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", profile))
    option = config.option
    if option.hypothesis_seed is None:
        option.hypothesis_seed = option.seed
    if option.hypothesis_seed is None:
        option.hypothesis_seed = random.randrange(2**31) if exhaustive else seed_of_the_commit(ROOT)
    shared = getattr(config, "workerinput", {})  # of the process that distributes the tests
    option.hypothesis_seed = shared.get("seed", option.hypothesis_seed)


@pytest.hookimpl(optionalhook=True)  # where pytest-xdist is installed
def pytest_configure_node(node: Any) -> None:
    """Give all processes the same seed."""
    node.workerinput["seed"] = node.config.option.hypothesis_seed


def pytest_pycollect_makeitem(collector: pytest.Collector, obj: Any) -> list[pytest.Item] | None:
    """Make no tests of functions that an ordinary run leaves out as a whole."""
    marks = {mark.name for mark in getattr(obj, "pytestmark", ())} if callable(obj) else set()
    return [] if "exhaustive" in marks and collector.config.option.markexpr == "not exhaustive" else None


def pytest_report_header(config: pytest.Config) -> str:
    return f"rerun with --seed={config.option.hypothesis_seed} to draw the same examples"


@pytest.fixture(autouse=True)
def _choose_anew() -> None:
    """Let no test compute by a backend that was chosen where another had changed something."""
    if functional := sys.modules.get("escnn_attention.functional"):
        functional.ON_GRIDS.forget()
        functional.BETWEEN_POINTS.forget()


@pytest.fixture(autouse=True)
def _seed() -> None:
    import torch

    # Where there are no other devices, their seeds would be noted with the stack of calls: a millisecond for each test.
    (torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed)(0)


@pytest.fixture
def interpreted_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that Triton interprets replace PyTorch's operations on the CPU, as elsewhere on a GPU."""
    pytest.importorskip("triton")
    from escnn_attention.functional import launch

    if not launch.interpreted():
        pytest.skip("kernels are compiled")
    from tests.functional.interpreter import hasten

    hasten()
    monkeypatch.setattr(launch, "DEVICES", {"cpu"})


@pytest.fixture
def double() -> Iterator[None]:
    """PyTorch's default precision is float64, in which formulas are compared."""
    import torch

    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(default)


@pytest.fixture(autouse=True)
def bases_in_single_precision() -> Iterator[None]:
    """Convolutions of escnn that are alike share a basis, in the precision of the last that was converted."""
    yield
    if escnn := sys.modules.get("escnn.nn.modules.basismanager.basisexpansion_singleblock"):
        kept = escnn._stored_filters
        for key in [key for key, basis in kept.items() if basis.sampled_basis.element_size() != 4]:
            del kept[key]


@pytest.fixture(scope="session")
def compiler() -> list[str]:
    """The C++ compiler of this machine."""
    from escnn_attention.functional.native import build

    try:
        return build.find_compiler()
    except build.NotBuilt as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="session")
def quick_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder where escnn finds no torch_geometric, which takes longer to import than all else."""
    folder = tmp_path_factory.mktemp("path")
    (folder / "torch_geometric.py").write_text("raise ImportError\n")
    return folder


@pytest.fixture(scope="session")
def quick_path(quick_folder: Path) -> str:
    """A PYTHONPATH with the package, that begins with this folder."""
    paths = [str(quick_folder), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]
    return os.pathsep.join(filter(None, paths))


@pytest.fixture(scope="session")
def fresh_python(quick_folder: Path) -> FreshPython:
    """Starts processes that have imported neither the package nor escnn."""
    from tests.fresh_python import FreshPython

    return FreshPython(quick_folder)


@pytest.fixture(scope="session")
def run_python(fresh_python: FreshPython) -> Callable[..., str]:
    """Run code in a fresh Python that can import the package, and return what it prints."""

    def run(code: str, *arguments: object) -> str:
        done = fresh_python.run(code, *arguments)
        assert done.status == 0, done.errors
        return done.output

    return run


def _on_one_thread(function: Callable, arguments: tuple, environment: dict) -> None:
    faulthandler.dump_traceback_later(200, exit=True)  # What hangs tells where, and its test fails.
    os.environ.update(environment)
    import torch

    torch.set_num_threads(1)
    function(*arguments)


@pytest.fixture
def fork() -> Iterator[Callable[..., BaseProcess]]:
    """Starts a function in a fork of this process, which has imported what takes seconds, with more in its environment.

    What the function leaves behind has to be in a file.
    """
    if "fork" not in multiprocessing.get_all_start_methods():
        pytest.skip("needs fork")
    started = []

    def start(function: Callable, *arguments: object, **environment: str) -> BaseProcess:
        context = multiprocessing.get_context("fork")
        started.append(context.Process(target=_on_one_thread, args=(function, arguments, environment)))
        started[-1].start()
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.join()


# The file of a network and what it is called with gets what the network gives.
_WITHOUT_ESCNN = """
sys.modules["escnn"] = None
import torch
network, arguments, named = torch.load(sys.argv[1], weights_only=False)
with torch.no_grad():
    found = network(*arguments, **named)
assert not any(name.startswith("escnn.") for name in sys.modules)
torch.save(found, sys.argv[1])
"""


@pytest.fixture
def without_escnn(run_python: Callable[..., str], tmp_path: Path) -> Callable[..., Any]:
    """Calls an exported network where escnn is not installed, without gradients."""
    import torch

    def call(network: Any, *arguments: Any, **named: Any) -> Any:
        torch.save((network, arguments, named), tmp_path / "call.pt")
        run_python(_WITHOUT_ESCNN, tmp_path / "call.pt")
        return torch.load(tmp_path / "call.pt")

    return call


def pytest_collection_finish() -> None:
    """Spare the garbage collector what tests have imported, which stays: each pass takes part of a second."""
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # as libraries that look for leaks at exit expect


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before and after pytest picks by markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Draw from the sweeps, leave out what needs a C++ compiler where there is none, and draw of what is left."""
    named = (Path(config.invocation_params.dir, argument.split("::")[0]) for argument in config.args)
    draw, whole = config.option.markexpr != "exhaustive", any(path.is_file() for path in named)
    mark_undrawn(items, config.option.hypothesis_seed, draw=draw, whole=whole)
    import torch

    from escnn_attention.functional.grid.native import why_not_built
    from tests import representations

    representations.hasten()
    reason = why_not_built(torch.float64)
    for item in items:
        if reason and getattr(item, "callspec", None) and item.callspec.params.get("backend") == "native":
            item.add_marker(pytest.mark.skip(reason=reason))
    yield
    if config.option.one_in > 1:
        drawn = one_in(config.option.one_in, items, config.option.hypothesis_seed)
        config.hook.pytest_deselected(items=[item for i, item in enumerate(items) if i not in drawn])
        items[:] = [items[i] for i in sorted(drawn)]
    if not whole:
        long_first(items)
