"""Constants of a layer that keep their exact values through changes of precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from escnn_attention.exporting.mode import refuse_scripting
from escnn_attention.functional.layout import Versioned

__all__ = ["ExactBuffers"]


class ExactBuffers(Versioned):
    """A module whose constants are rounded once, from float64, to whatever precision the module has.

    An ordinary buffer that was made in float32 stays rounded to float32 after ``module.double()``, and with it every
    sine and cosine of the group: equivariance then holds to 1e-7 and not to 1e-15. The constants follow from the
    group and are not part of the ``state_dict``.
    """

    __prepare_scriptable__ = refuse_scripting

    def __init__(self) -> None:
        super().__init__()
        self._exact: dict[str, Tensor] = {}

    def register_exact(self, name: str, value: np.ndarray | Tensor | None) -> None:
        """Register the float64 ``value`` as the constant ``self.name``, which is None where there is none."""
        if value is None:
            self.register_buffer(name, None, persistent=False)
            return
        # A copy with data, also where tensors are made on the meta device: what happens to the buffer, or to the value,
        # does not reach it. Contiguous, as torch.export.save warns of others.
        given = torch.as_tensor(value, dtype=torch.float64, device="cpu")
        self._exact[name] = given.clone(memory_format=torch.contiguous_format)
        rounded = torch.empty_like(self._exact[name], dtype=torch.get_default_dtype(), device=torch.empty(0).device)
        self.register_buffer(name, rounded.copy_(self._exact[name]), persistent=False)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> ExactBuffers:
        super()._apply(fn, recurse)
        for name, exact in self._exact.items():
            rounded = self._buffers[name]
            assert rounded is not None
            self._buffers[name] = exact.to(device=rounded.device, dtype=rounded.dtype, copy=True)
        return self
