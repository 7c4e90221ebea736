"""Files with mistakes, of published networks."""

import pytest
import torch

from escnn_attention.models import from_published


def changing(tensors, kind, **given):
    """What loads the network of some tensors, with changes to them, None for one that is missing, and to options."""

    def load(change, **options):
        return from_published({n: t for n, t in (tensors | change).items() if t is not None}, kind, **given | options)

    return load


def check_names(load, tensors, missing, longer):
    """That tensors are named which are missing, and which are twice as long."""
    changes = [({name: None}, f"{name}: missing") for name in missing]
    changes += [({name: torch.cat([tensors[name]] * 2)}, f"{name}: .*of shape") for name in longer]
    for change, message in changes:
        with pytest.raises(ValueError, match=f"^{message}"):
            load(change)
