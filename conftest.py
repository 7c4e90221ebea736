"""What pytest leaves out of the package, and what comes before all tests."""

import importlib.util
import os
import warnings

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--seed`` and ``--one-in``."""
    parser.addoption("--seed", type=int, help="draw the examples of this number, not those of the commit")
    parser.addoption("--one-in", type=int, default=1, help="of each file, draw one test in so many")


def pytest_configure(config: pytest.Config) -> None:
    """Import what all tests do, but in a process that only hands them out: its imports would delay the others."""
    if config.getoption("numprocesses", None):
        return
    import torch

    # Without a GPU Triton's kernels are interpreted; it looks when it is first imported, which escnn's imports do.
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch")
        import escnn_attention  # noqa: F401  # before escnn, which it makes importable where there is no lie_learn
        from escnn_attention.functional import launch

    # Interpreted, kernels take long: they replace operations in tests that ask for it, with ``interpreted_kernels``.
    launch.DEVICES = frozenset({"cuda"})


collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["escnn_attention/*_kernels*.py"]
