"""What pytest leaves out of the package."""

import importlib.util

collect_ignore = [] if importlib.util.find_spec("triton") else ["escnn_attention/functional/backends/triton_kernels.py"]
