"""Run the C++ of the package under sanitizers of the compiler, which watch memory, arithmetic and threads.

::

    python tests/functional/native/drivers/sanitize.py            # all loops: address and undefined, then thread
    python tests/functional/native/drivers/sanitize.py thread grids

Every loop has a program here, ``run_<loop>.cpp``, that calls it in all its modes, on memory of exactly the size that
it needs. The compiler is that of the package. It needs nothing else.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = HERE.parents[3] / "escnn_attention" / "functional" / "native"

LOOPS = ("grids", "points", "pair_mlp", "irreps")
SANITIZERS = {
    "address": "-fsanitize=address,undefined",
    "thread": "-fsanitize=thread",
}


class NotSupported(OSError):
    """The compiler has no such sanitizer."""


def build(compiler: list[str], sanitizer: str, loop: str, folder: Path, number: str = "float", *options: str) -> Path:
    """The program of a loop, watched.

    Raises:
        NotSupported: the compiler cannot link the sanitizer.
        RuntimeError: it cannot compile the program.
    """
    base = [*compiler, "-std=c++17", "-pthread", SANITIZERS[sanitizer], "-fno-sanitize-recover=all"]
    empty, program = folder / "empty.cpp", folder / f"{sanitizer}-{loop}"
    empty.write_text("int main() {}\n")
    if _run([*base, str(empty), "-o", str(folder / "empty")]).returncode:
        raise NotSupported(f"{compiler[0]} has no {SANITIZERS[sanitizer]}")
    source = [f"-DNUMBER={number}", "-I", str(SOURCES), str(HERE / f"run_{loop}.cpp")]
    done = _run([*base, "-g1", *options, *source, "-o", str(program)])
    if done.returncode:
        raise RuntimeError(f"{source[-1]}: {done.stderr[-2000:]}")
    return program


def run(program: Path, every: int = 1, first: int = 0, missing: int = 0) -> subprocess.CompletedProcess[str]:
    """What a program says, and whether it failed, with all memory too small by ``missing``.

    It runs one of ``every`` so many modes, from the ``first`` on.
    """
    return _run([str(program), str(every), str(first)], MISSING=str(missing))


def _run(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environment})


def main() -> int:
    """Run what the command line names."""
    sys.path.insert(0, str(HERE.parents[3]))
    from escnn_attention.functional.native.build import find_compiler

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="sanitizers and loops; all by default")
    names = parser.parse_args().names
    if unknown := set(names) - {*SANITIZERS, *LOOPS}:
        parser.error(f"names: got {', '.join(sorted(unknown))}, needed of {', '.join([*SANITIZERS, *LOOPS])}")
    failed = 0
    for sanitizer in [s for s in SANITIZERS if s in names] or SANITIZERS:
        for loop in [name for name in LOOPS if name in names] or LOOPS:
            for number in ("float", "double"):
                with tempfile.TemporaryDirectory() as folder:
                    done = run(build(find_compiler(), sanitizer, loop, Path(folder), number, "-O1"))
                print(f"{sanitizer}, {loop}, {number}: {'failed' if done.returncode else 'nothing found'}", flush=True)
                print(done.stdout + done.stderr, end="")
                failed += done.returncode != 0
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
