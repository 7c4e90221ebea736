"""The layers that are measured, what they are compared with, and the targets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from examples.benchmarks.subjects import GSA, Attention, Convolution, Dense, Subject
from examples.benchmarks.subjects.dense import widened
from examples.benchmarks.subjects.subject import Poses


@dataclass(frozen=True)
class Case:
    """A layer between 20 regular fields with 9 heads of 10 channels, as in the rotMNIST network of GSA-Nets.

    Turns by 45° do not map a square window onto itself: for C8 ours is the disc of 21 positions in the reference's 25.

    Attributes:
        rotations: the group, C4 or C8.
        size, batch: the images.
        kernel_size: the window; None for global attention.
        query, encoding: of our layer. The reference has one kind of each, all query poses and separable MLPs.
        faster: how many times less time than the reference it should take on a CPU.
        smaller: how many times less memory there.
        slower: how many times the time of the convolution it may take there; None for as many as it takes.
    """

    rotations: int
    size: int
    batch: int
    kernel_size: int | None
    query: Poses
    encoding: str | None
    faster: float
    smaller: float
    slower: float | None = None

    @property
    def name(self) -> str:
        """For tables."""
        window = f"{self.kernel_size}×{self.kernel_size}" if self.kernel_size else f"global {self.size}×{self.size}"
        return f"p{self.rotations}, {window}, {self.query}" + (", Fourier" if self.encoding == "fourier" else "")

    def targets(self, device: str) -> tuple[float, float, float | None]:
        """How many times faster and smaller than the reference it should be, and how many times slower it may be."""
        if device == "cuda":
            return 10, 10, None if self.slower is None else 3
        return self.faster, self.smaller, self.slower

    def ours(self, backend: str = "auto") -> Attention:
        """Our layer."""
        return Attention(
            f"c{self.rotations}",
            (self.size, self.size),
            self.batch,
            kernel_size=self.kernel_size,
            query=self.query,
            encoding=self.encoding,
            backend=backend,
        )

    def reference(self, checkout: str) -> GSA:
        """The published layer."""
        return GSA(checkout, self.rotations, self.size, self.batch, kernel_size=self.kernel_size)

    def convolution(self) -> Convolution:
        """The steerable convolution between the same fields."""
        return Convolution(f"c{self.rotations}", (self.size, self.size), self.batch)

    def dense(self) -> Dense | None:
        """Plain attention on the vectors that the Fourier identity makes, for global attention."""
        if self.kernel_size is not None:
            return None
        ours, tokens = self.ours(), self.rotations * self.size**2
        queries = tokens if self.query == "all" else self.size**2
        return Dense(self.batch, ours.num_heads, self.rotations, queries, tokens, widened(ours.head_fields))

    def subjects(self, checkouts: Mapping[str, str]) -> list[Subject]:
        """All that is measured for this case."""
        dense = self.dense()
        references = [self.reference(path) for path in checkouts.values()]
        return [*references, self.ours(), self.convolution(), *([] if dense is None else [dense])]


CASES = (
    Case(4, 24, 8, 5, "all", "mlp", faster=4, smaller=6),
    Case(4, 24, 8, 9, "all", "mlp", faster=5, smaller=20),
    Case(8, 24, 8, 5, "all", "mlp", faster=4, smaller=25),
    Case(4, 28, 1, None, "all", "fourier", faster=10, smaller=15),
    Case(4, 24, 8, 5, "own", None, faster=10, smaller=6, slower=10),
    Case(8, 24, 8, 5, "own", None, faster=22, smaller=25, slower=9),
)

QUICK = tuple(replace(CASES[i], size=6, batch=1) for i in (0, 3))
