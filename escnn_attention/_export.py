"""Whether PyTorch is writing down what is done, for a file that runs where this package is not."""

from __future__ import annotations

import torch

__all__ = ["exporting"]


def exporting() -> bool:
    """Whether ``torch.export``, or what stands on it such as ``torch.onnx.export``, is following what is done.

    What it writes down is to run anywhere, for any number of images: no operator but those of PyTorch, and no decision
    by that number.
    """
    return torch.compiler.is_exporting()
