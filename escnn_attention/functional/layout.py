"""The version of the layout in which modules keep their weights."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

LAYOUT = 1
"""The layout that the documentation describes ("Porting weights"); older state dicts say the same, or nothing."""


class Versioned(torch.nn.Module):
    """A module whose state dict says in which layout its weights are, and that refuses those it does not know.

    The version is torch's own: ``_version`` of the class, which ``state_dict()`` writes to its ``_metadata``. A state
    dict without, such as a plain dictionary, is taken to be of the layout of today.

    Raises:
        RuntimeError: from ``load_state_dict``, where weights are in a newer layout.
    """

    _version: int = LAYOUT

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *args: Any
    ) -> None:
        version = local_metadata.get("version")
        if isinstance(version, int) and version > self._version:
            *_, error_msgs = args
            error_msgs.append(
                f"{prefix.rstrip('.') or type(self).__name__}: its weights are in layout {version}, and this version "
                f"of escnn_attention knows those up to {self._version}: it needs a newer one"
            )
            return
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)
        if local_metadata.get("assign_to_params_buffers"):
            given = (t for name, t in state_dict.items() if name.startswith(prefix) and isinstance(t, Tensor))
            like = next(filter(torch.is_floating_point, given), None)
            for part in self.modules():
                if isinstance(part, Versioned):
                    part._follow(like)

    def _follow(self, assigned: Tensor | None) -> None:
        """Have constants that are in no state the precision and device of what ``load_state_dict`` assigns to it."""


def without_prefix(state_dict: Mapping[str, Any], prefix: str) -> OrderedDict[str, Any]:
    """The tensors whose names begin with a prefix, such as ``"network."``, without it; and the layouts they are in.

    Example:
        >>> network = torch.nn.ModuleDict({"network": torch.nn.Linear(2, 1)})
        >>> state = without_prefix(network.state_dict(), "network.")
        >>> list(state), state._metadata[""]
        (['weight', 'bias'], {'version': 1})
    """
    part = OrderedDict((n.removeprefix(prefix), t) for n, t in state_dict.items() if n.startswith(prefix))
    metadata = getattr(state_dict, "_metadata", None)
    if metadata is not None:
        start = prefix.rstrip(".")
        part._metadata = OrderedDict(  # type: ignore[attr-defined]
            (name.removeprefix(start).removeprefix("."), value)
            for name, value in metadata.items()
            if name == start or name.startswith(prefix)
        )
    return part
