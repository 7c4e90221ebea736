"""What kernels of Triton need of a GPU, read from the machine code that launches compile: there need not be a GPU."""

from __future__ import annotations

import json
import math
import pickle
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

_SHARED, _MULTIPROCESSORS = {80: 164, 90: 228}, {80: 108, 90: 132}  # of an A100 and an H100; kB


class Launch(NamedTuple):
    """A launch: a kernel, how many programs there are, and what each of them needs.

    Attributes:
        kernel: its name.
        programs: how many there are.
        warps: of a program.
        registers: of a thread.
        spilled: bytes of a thread that registers do not hold.
        shared: bytes of shared memory of a program.
        loops: how many loops the kernel has, as it is written.
        chip: the compute capability.
    """

    kernel: str
    programs: int
    warps: int
    registers: int
    spilled: int
    shared: int
    loops: int
    chip: int

    @property
    def resident(self) -> int:
        """How many programs a multiprocessor has at once."""
        # Each of four schedulers has 512 stretches of 32 registers, of which a warp gets a multiple of eight.
        warps = 4 * min(16, 512 // (8 * -(-self.registers // 8)))
        return min(32, warps // self.warps, 1024 * _SHARED[self.chip] // (1024 + self.shared))

    @property
    def occupancy(self) -> float:
        """How many warps a scheduler has at once."""
        return self.resident * self.warps / 4

    @property
    def waves(self) -> float:
        """How often the programs fill the GPU."""
        return self.programs / (self.resident * _MULTIPROCESSORS[self.chip])


@contextmanager
def compiled(chip: int) -> Iterator[list[Launch]]:
    """Compile kernels at their launches on tensors of the device "meta", and give what they need."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from escnn_attention.functional import launch

    found, run = [], JITFunction.run

    def compile(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        built = run(kernel, *args, grid=grid, warmup=True, **options)
        needs = built.metadata.num_warps, *_registers(built.asm["cubin"]), built.metadata.shared
        needs = *needs, built.asm["ttir"].count("scf.for")
        found.append(Launch(kernel.__name__, math.prod(grid), *needs, chip))

    gpu = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", chip, 32),
        get_current_device=lambda: chip,
        get_current_stream=lambda _: 0,
    )
    with (
        mock.patch.object(driver, "_active", gpu),
        mock.patch.object(JITFunction, "run", compile),
        mock.patch.object(launch, "DEVICES", {"meta"}),
        mock.patch.object(launch, "why_not_run", return_value=None),
    ):
        yield found


def _registers(cubin: bytes) -> tuple[int, int]:
    """The registers of a thread, and its bytes of other memory."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        text = subprocess.check_output([tool, "--dump-resource-usage", file.name], text=True)
    found = {name: int(n) for name, n in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return found["REG"], found["STACK"] + found["LOCAL"]


def main() -> None:
    """Print what the passes of an operator launch: its place in functional, its arguments, and the GPU are given."""
    sys.modules["escnn"] = None  # type: ignore[assignment]  # importing it takes longer than a kernel
    import torch

    place, arguments, chip = sys.argv[1], pickle.loads(bytes.fromhex(sys.argv[2])), int(sys.argv[3])
    module, name = place.split(":")
    operator = attrgetter(name)(import_module(f"escnn_attention.functional.{module}"))
    with compiled(chip) as found:
        out, kept = operator.passes.forward(arguments)
        operator.passes.backward(arguments, torch.empty_like(out), out, kept, [True] * operator.leaves)
    print(json.dumps(found))
