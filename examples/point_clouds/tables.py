"""The experiments: configurations, twins, small versions, and the published figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from examples.experiments.runs import DATA, NETWORK, Run
from examples.experiments.twins import parameters

_CONFIGURATIONS = Path(__file__).parent / "configurations"
_POTENTIAL = f"{NETWORK}.potential.init_args"
_TRIVIAL = {"class_path": "escnn.gspaces.trivialOnR2"}, {"class_path": "escnn.gspaces.trivialOnR3"}


@dataclass(frozen=True)
class Experiment:
    """A table.

    Attributes:
        name: of the table.
        base: its configuration, or the name of weights, for their recipe.
        group: the displayed group of the equivariant networks.
        measures: compared quantities: names in ``test.json`` and displayed names; fractions are given in percent.
        small: changes of the small version.
        dim: of the points.
        variants: networks beside the equivariant one: changes by their labels.
        changes: of all versions.
        network: the place of the transformer in the configuration.
        published: results of the LieTransformer's authors, for the text of the table.
    """

    name: str
    base: str
    group: str
    measures: Mapping[str, str]
    small: Mapping[str, Any]
    dim: int
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    changes: Mapping[str, Any] = field(default_factory=dict)
    network: str = NETWORK
    published: str = ""

    def runs(self, small: bool) -> list[Run]:
        """The equivariant network, its variants, and the twin with the trivial group and about as many parameters."""
        base = self._configuration()
        common = {**self.changes, **(self.small if small else {})}
        mark = f"{self.name.partition('-')[2]}: " if "-" in self.name else ""
        twin = self._twin(f"{mark}twin", Run("", base, common))
        return [
            Run(f"{mark}{self.group} attention", base, common, self.group),
            *(
                Run(f"{mark}{self.group} {label}", base, {**common, **changes}, self.group, kind=label)
                for label, changes in self.variants.items()
            ),
            twin,
        ]

    def _configuration(self) -> Path | str:
        path = _CONFIGURATIONS / f"{self.base}.yaml"
        return path if path.exists() else self.base

    def _twin(self, label: str, run: Run) -> Run:
        changes = {**run.changes, f"{self.network}.gspace": _TRIVIAL[self.dim - 2]}
        budget = parameters(run)

        def twin(fields: int) -> Run:
            return Run(label, run.base, {**changes, f"{self.network}.fields": fields}, "trivial", kind="twin")

        heads = _at(run.configuration(), f"{self.network}.num_heads")
        fields = heads
        while parameters(twin(fields + heads)) <= budget:
            fields += heads
        candidates = [twin(fields), twin(fields + heads)]
        return min(candidates, key=lambda candidate: abs(parameters(candidate) - budget))


def _at(config: Any, path: str) -> Any:
    for key in path.split("."):
        config = config[key]
    return config


SMALL = "few clouds, few epochs, narrow networks: not the published protocol, and far from what the networks can do"
"""The description of the small versions."""

# A head on few fields learns slowly, so fields are widened before pooling. Scalars and vectors have low frequencies, so
# that they change little under rotations between those of the group.
_WIDE_HEAD: dict[str, Any] = {
    "model.optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.005, "weight_decay": 0.01}},
    "model.schedule": "one-cycle",
    f"{NETWORK}.num_blocks": 2,
    f"{NETWORK}.num_heads": 2,
    f"{NETWORK}.head.fields": 32,
}
_QM9 = {
    **_WIDE_HEAD,
    f"{NETWORK}.fields": {"scalar": 48, "vector": 32},
    "trainer.max_epochs": 12,
    "model.warm_up": 3,
    f"{NETWORK}.encoding.init_args.hidden": 12,
    f"{DATA}.limit_train": 1000,
    f"{DATA}.limit_valid": 200,
    f"{DATA}.limit_test": 500,
    f"{DATA}.batch_size": 16,
    f"{DATA}.rotate_train": False,
    f"{DATA}.num_workers": 0,
}
_UNITS = {"mu": "D", "alpha": "bohr³", "homo": "eV"}
_PUBLISHED_QM9 = {"mu": ".061 D", "alpha": ".104 bohr³", "homo": ".033 eV"}


def _qm9(targets: list[str]) -> Experiment:
    published = ", ".join(f"{target} {_PUBLISHED_QM9[target]}" for target in targets)
    return Experiment(
        f"qm9-{targets[0] if len(targets) == 1 else 'invariants'}",
        "qm9_octahedral",
        "octahedral",
        {f"mae_{target}": f"{target} ({_UNITS[target]})" for target in targets},
        {**_QM9, "trainer.max_epochs": 20, f"{NETWORK}.out_type": len(targets)},
        3,
        changes={f"{DATA}.targets": targets},
        published=f"LieTransformer (SE(3), 100,000 molecules, 500 epochs, a network for each target): {published}",
    )


_POLARIZABILITY = Experiment(
    "qm9-polarizability",
    "polarizability_octahedral",
    "octahedral",
    {"mae_polarizability": "entry (bohr³)"},
    _QM9,
    3,
)
_CONSTELLATIONS = Experiment(
    "constellations",
    "point-transformer-constellations",
    "C4",
    {"accuracy": "accuracy (%)"},
    {f"{DATA}.num_train": 2000, f"{DATA}.num_valid": 200, f"{DATA}.num_test": 300},
    2,
    published="LieTransformer (10,000 clouds, 200 epochs, 10.0 million parameters; accuracy in %, trained → tested): "
    "T(2) D→D 75, D→SE(2) 63; SE(2) D→D 71, D→SE(2) 69; a set transformer D→D 58, D→SE(2) 44",
)
_SPRINGS = Experiment(
    "springs",
    "springs_c4",
    "C4",
    {"error": "square error, 5 frames"},
    {
        "model.optimizer": {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.01}},
        "model.warm_up": 1,
        "trainer.max_epochs": 16,
        f"{_POTENTIAL}.fields": 4,
        f"{_POTENTIAL}.num_blocks": 1,
        f"{_POTENTIAL}.num_heads": 2,
        f"{_POTENTIAL}.attention.norm_kind": "layer",
        f"{_POTENTIAL}.encoding": {"class_path": "escnn_attention.PairKernel", "init_args": {"hidden": 8}},
        f"{DATA}.solver": "exact",
        f"{DATA}.num_train": 160,
        f"{DATA}.num_valid": 50,
        f"{DATA}.num_test": 100,
        f"{DATA}.batch_size": 10,
        f"{DATA}.eval_batch_size": 50,
    },
    2,
    {"attentive convolution": {f"{_POTENTIAL}.attention.kernel_features": 4}},
    network=_POTENTIAL,
    published="LieTransformer (T(2), 10,000 systems, 842 thousand parameters; mean square errors, read off a figure): "
    "1.7e-7 after 1 step, 5e-5 after 20, 7.5e-4 after 99; LieConv: 8e-7, 3.3e-4, 3.4e-3",
)


def experiments(name: str, small: bool) -> list[Experiment]:
    """The tables of ``"constellations"``, ``"springs"`` or ``"qm9"``.

    The small version of QM9 has one network for all invariant targets.
    """
    if name == "qm9":
        groups = [["mu", "alpha", "homo"]] if small else [["mu"], ["alpha"], ["homo"]]
        return [*map(_qm9, groups), _POLARIZABILITY]
    return [{"constellations": _CONSTELLATIONS, "springs": _SPRINGS}[name]]
