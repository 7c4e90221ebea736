"""What can be measured, by name.

A subject is plain data until it is loaded, so that the process that starts the others needs neither torch nor escnn.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from examples.benchmarks.subjects.att_gconvs import AttGConvs
from examples.benchmarks.subjects.attention import Attention
from examples.benchmarks.subjects.ceiling import Copy, Product
from examples.benchmarks.subjects.classifier import Classifier
from examples.benchmarks.subjects.convolution import Convolution
from examples.benchmarks.subjects.dense import Dense
from examples.benchmarks.subjects.functional import Functional
from examples.benchmarks.subjects.gsa import GSA
from examples.benchmarks.subjects.lie_transformer import LieTransformer
from examples.benchmarks.subjects.platonic import Platonic
from examples.benchmarks.subjects.points import PointAttention, PointConvolution, PointNetwork
from examples.benchmarks.subjects.subject import Subject
from examples.benchmarks.subjects.training import TrainingStep

__all__ = [
    "GSA",
    "AttGConvs",
    "Attention",
    "Classifier",
    "Convolution",
    "Copy",
    "Dense",
    "Functional",
    "LieTransformer",
    "Platonic",
    "PointAttention",
    "PointConvolution",
    "PointNetwork",
    "Product",
    "Subject",
    "TrainingStep",
]

_KINDS: dict[str, type[Subject]] = {
    kind.__name__: kind
    for kind in (
        AttGConvs,
        Attention,
        Classifier,
        Convolution,
        Copy,
        Dense,
        Functional,
        GSA,
        LieTransformer,
        Platonic,
        PointAttention,
        PointConvolution,
        PointNetwork,
        Product,
        TrainingStep,
    )
}


def to_json(subject: Subject) -> dict[str, Any]:
    """A subject as JSON can hold it."""
    return {"kind": type(subject).__name__, **dataclasses.asdict(subject)}


def from_json(data: dict[str, Any]) -> Subject:
    """The subject that :func:`to_json` was given."""
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}
    kind = _KINDS[data["kind"]]
    del values["kind"]
    return kind(**values)
