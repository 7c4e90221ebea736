"""Under which conditions everything is measured."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Conditions:
    """What all measurements of a run have in common.

    Attributes:
        device: ``"cpu"`` or ``"cuda"``.
        dtype: the precision, by its name in torch.
        threads: the threads torch may use.
        seed: of weights and inputs.
        repeats: the number of processes in which each subject is measured.
        warmup: steps that are not timed, at most; fewer where they take more than a third of ``seconds``.
        steps: timed steps of a process, at most.
        seconds: the time after which a process starts no further step; two are timed however long they take.
        patience: the seconds after which a process is given up.
        quick: whether this run only shows that everything works: one process for all subjects, tiny sizes.
    """

    device: str = "cpu"
    dtype: str = "float32"
    threads: int = 2
    seed: int = 0
    repeats: int = 3
    warmup: int = 3
    steps: int = 10
    seconds: float = 8.0
    patience: float = 1800.0
    quick: bool = False

    def hurried(self) -> Conditions:
        """These conditions for a quick run."""
        return replace(self, threads=1, repeats=1, warmup=1, steps=2, quick=True)
