"""What pytest leaves out of the package, and what comes before all tests."""

import importlib.util

import escnn_attention  # noqa: F401  # before escnn, which it makes importable where there is no lie_learn

collect_ignore = [] if importlib.util.find_spec("triton") else ["escnn_attention/functional/backends/triton_kernels.py"]
