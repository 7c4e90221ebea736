"""Constants of a layer: exact through changes of precision, or derived from weights and kept while these stay."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from typing import Any, Generic, TypeVar
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from escnn_attention.exporting.mode import refuse_scripting
from escnn_attention.functional.autograd import is_followed
from escnn_attention.functional.layout import Versioned


class ExactBuffers(Versioned):
    """A module whose constants are rounded once, from float64, to whatever precision the module has.

    An ordinary buffer that was made in float32 stays rounded to float32 after ``module.double()``, and with it every
    sine and cosine of the group: equivariance then holds to 1e-7 and not to 1e-15. The constants follow from the
    group and are not part of the ``state_dict``: a module that was made on the meta device has them after
    ``module.to_empty(device=...)``, or after ``module.load_state_dict(state, assign=True)``.
    """

    __prepare_scriptable__ = refuse_scripting

    def __init__(self) -> None:
        super().__init__()
        self._exact: dict[str, Tensor] = {}

    def register_exact(self, name: str, value: np.ndarray | Tensor | None) -> None:
        """Register ``value`` as the constant ``self.name``, which is None where there is none; integers stay such."""
        if value is None:
            self.register_buffer(name, None, persistent=False)
            return
        # A copy with data, also where tensors are made on the meta device: what happens to the buffer, or to the value,
        # does not reach it. Contiguous, as torch.export.save warns of others.
        given = torch.as_tensor(value, device="cpu")
        exact = given.double() if given.is_floating_point() else given
        self._exact[name] = exact = _one_of(exact.clone(memory_format=torch.contiguous_format))
        dtype = torch.get_default_dtype() if given.is_floating_point() else given.dtype
        rounded = torch.empty_like(exact, dtype=dtype, device=torch.empty(0).device)
        self.register_buffer(name, rounded.copy_(exact), persistent=False)

    def __getstate__(self) -> dict[str, Any]:
        """The state without constants that equal their exact values, rounded: copies and files hold them once."""
        buffers = {**self._buffers}
        found = {name: b for name, exact in self._exact.items() if (b := buffers[name]) is not None and _is(b, exact)}
        rounded = {name: buffer.dtype for name, buffer in found.items()}
        return {**self.__dict__, "_buffers": {**buffers, **dict.fromkeys(found)}, "_rounded": rounded}

    def __setstate__(self, state: dict[str, Any]) -> None:
        rounded = state.pop("_rounded", {})
        super().__setstate__(state)
        for name, dtype in rounded.items():
            self._buffers[name] = self._exact[name].to(dtype, copy=True)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> ExactBuffers:
        before = {name: self._buffers[name] for name in self._exact}
        super()._apply(fn, recurse)
        for name, exact in self._exact.items():
            rounded, was = self._buffers[name], before[name]
            assert rounded is not None
            assert was is not None
            if exact.is_floating_point() or was.is_meta:
                self._buffers[name] = exact.to(device=rounded.device, dtype=rounded.dtype, copy=True)
        return self

    def _follow(self, assigned: Tensor | None) -> None:
        for name, exact in self._exact.items():
            rounded = self._buffers[name]
            assert rounded is not None
            like = torch.empty(0, dtype=rounded.dtype) if assigned is None and rounded.is_meta else assigned
            if like is None:
                continue
            dtype = like.dtype if exact.is_floating_point() else exact.dtype
            if (rounded.dtype, rounded.device) != (dtype, like.device):
                self._buffers[name] = exact.to(device=like.device, dtype=dtype, copy=True)


_exact_values: WeakValueDictionary[tuple[Any, ...], Tensor] = WeakValueDictionary()


def _one_of(exact: Tensor) -> Tensor:
    """An equal tensor that another module already holds, or this one; nobody writes to either."""
    if not _is_plain(exact):
        return exact
    digest = blake2b(exact.numpy().tobytes()).digest()
    return _exact_values.setdefault((exact.dtype, tuple(exact.shape), digest), exact)


def _is(buffer: Tensor, exact: Tensor) -> bool:
    """Whether a buffer on the CPU holds these values, rounded."""
    return _is_plain(buffer) and _is_plain(exact) and torch.equal(buffer, exact.to(buffer.dtype))


def _is_plain(x: Tensor) -> bool:
    """Whether this is an ordinary tensor on the CPU, and none of an export or a transform."""
    apart = is_in_torch_dispatch_mode() or torch._C._are_functorch_transforms_active()
    return type(x) is Tensor and x.device.type == "cpu" and not x.is_inference() and not apart


_T = TypeVar("_T")


class Derived(Generic[_T]):
    """What follows from the weights of a module, kept in evaluation without gradients while the weights are equal.

    Values are compared and not versions, which do not count what is written to ``weight.data``. On a GPU, which would
    have to wait for a comparison, nothing is kept. What autocast rounds is kept for that autocast only.
    """

    def __init__(self) -> None:
        self._known: tuple[Tensor, torch.dtype, _T] | None = None

    def of(self, weight: Tensor, make: Callable[[Tensor], _T], training: bool) -> _T:
        """``make(weight)``."""
        if training or torch.is_grad_enabled() or weight.device.type != "cpu" or is_followed(weight):
            return make(weight)
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else weight.dtype
        known = self._known
        if known is None or known[1] != dtype or known[0].dtype != weight.dtype or not torch.equal(known[0], weight):
            self._known = known = weight.clone(), dtype, make(weight)
        return known[2]

    def __reduce__(self) -> tuple[type[Derived[_T]], tuple[()]]:
        """Nothing of it in copies and files."""
        return type(self), ()
