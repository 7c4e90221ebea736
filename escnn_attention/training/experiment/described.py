"""Networks as checkpoints describe them, built without running anything that a checkpoint brings along."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from escnn_attention._checks import reason_of
from escnn_attention.models.description import DescriptionError, build, named
from escnn_attention.training.errors import UserError


def build_described(description: Any) -> torch.nn.Module:
    """The network of a description: ``class_path`` and ``init_args``, which may hold descriptions in turn.

    A description can come from anywhere: :func:`escnn_attention.models.description.build` says what of it is built.

    Raises:
        UserError: it names anything else than modules of this package and what they take, is no description, or its
            arguments are not those of the class.
    """
    if not (isinstance(description, Mapping) and "class_path" in description):
        raise UserError("it does not say of which class its network is")
    try:
        found = named(description["class_path"])
        if not (inspect.isclass(found) and issubclass(found, torch.nn.Module)):
            raise UserError(f"it names {description['class_path']!r}, which is no network")
        network: torch.nn.Module = build(description)
    except DescriptionError as error:
        raise UserError(str(error)) from error
    except UserError:
        raise
    except Exception as error:  # what is written in a file can lead a constructor anywhere
        reason = reason_of(error)
        raise UserError(f"this version cannot build the network {description['class_path']}: {reason}") from error
    return network
