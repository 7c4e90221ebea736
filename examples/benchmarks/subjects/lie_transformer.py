"""The published network of the LieTransformer."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING

from examples.benchmarks.subjects.checkouts import CheckoutError, import_from
from examples.benchmarks.subjects.subject import Step, Subject, gradient_step, place

if TYPE_CHECKING:
    from examples.benchmarks.conditions import Conditions

_NETWORK = "eqv_transformer.eqv_attention"
_GROUPS = "lie_conv.lieGroups"


@dataclass(frozen=True)
class LieTransformer(Subject):
    """``EquivariantTransformer`` on SE(2): its own kernel, dot product plus MLP of the location, under a softmax.

    Attributes:
        path: the checkout.
        lie_conv: the checkout of the fork of LieConv that it needs; None for the submodule of the first.
        points: the number of points of a cloud.
        poses: the number of rotations to which each point is lifted.
        batch: the number of clouds.
        channels, num_layers, num_heads: of the network.
        hidden: the width of the MLP of the location.
        features: the numbers at each point.
    """

    path: str
    lie_conv: str | None
    points: int
    poses: int
    batch: int
    channels: int
    num_layers: int
    num_heads: int
    hidden: int = 16
    features: int = 2

    def __str__(self) -> str:
        return f"{self.path} {self.batch} clouds of {self.points} points"

    @property
    def checkout(self) -> str:
        return self.path

    def load(self) -> None:
        import_from(self.path, "eqv_transformer")
        folder = self.path + "/LieConv" if self.lie_conv is None else self.lie_conv
        if self.lie_conv is None and not Path(folder, "lie_conv").is_dir():
            raise CheckoutError(
                f"{self.path} has no folder LieConv/lie_conv: get the submodule, or name a checkout with --lie-conv"
            )
        import_from(folder, "lie_conv")
        _import_groups(Path(folder).resolve())
        import_from(self.path, _NETWORK)

    def build(self, conditions: Conditions) -> Step:
        import torch

        (network,) = import_from(self.path, _NETWORK)
        module = network.EquivariantTransformer(
            dim_input=self.features,
            dim_output=1,
            dim_hidden=self.channels,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            group=sys.modules[_GROUPS].SE2(),
            liftsamples=self.poses,
            kernel_dim=self.hidden,
        ).to(**place(conditions))
        coords = torch.randn(self.batch, self.points, 2, **place(conditions))
        x = torch.randn(self.batch, self.points, self.features, **place(conditions))
        there = torch.ones(self.batch, self.points, dtype=torch.bool, device=conditions.device)
        return gradient_step(lambda x: module((coords, x, there)), [x], module.parameters())


class _Mended(SourceFileLoader):
    """Reads a module in which a tuple of one starred item lacks its comma, which Python no longer takes."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        # Nothing of what is compiled here is left behind in the checkout.
        return self.source_to_code(self.get_data(path).replace(b"(*p.shape[:2])", b"(*p.shape[:2],)"), path)


def _import_groups(root: Path) -> None:
    if _GROUPS in sys.modules:
        return
    path = root.joinpath(*_GROUPS.split(".")).with_suffix(".py")
    if not path.is_file():
        raise CheckoutError(f"{root} is no checkout of LieConv: it has no file {path.relative_to(root)}")
    spec = importlib.util.spec_from_file_location(_GROUPS, path, loader=_Mended(_GROUPS, str(path)))
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[_GROUPS] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[_GROUPS]
        raise
