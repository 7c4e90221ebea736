"""Check that the package, installed from a wheel, has its loops compiled and needs no compiler for them.

::

    python tests/functional/native/drivers/wheel.py

In an environment with the wheel and escnn. Layers on a grid and between points are compared with the formula, in both
precisions, for every kind of instructions that came with the wheel and that the processor has.
"""

import os
import subprocess
import sys
import tempfile

CHECK = """
import sys, torch
import escnn_attention
from escnn import gspaces, nn
from escnn_attention.functional.native import shipped
from escnn_attention.functional.grid.native import why_not_built

assert shipped.FOLDER.is_dir(), f"{shipped.FOLDER}: no libraries came with the package"
assert torch.backends.cpu.get_cpu_capability() == sys.argv[1]
space = gspaces.rot2dOnR2(4)
fields = nn.FieldType(space, 2 * [space.regular_repr])
point_fields = nn.FieldType(space, 2 * [space.regular_repr])
for dtype, tolerance in ((torch.float32, 1e-4), (torch.float64, 1e-10)):
    assert why_not_built(dtype) is None, why_not_built(dtype)
    for make in (
        lambda **o: escnn_attention.GroupSelfAttention(fields, fields, kernel_size=3, backend=o["grid"]),
        lambda **o: escnn_attention.GroupSelfAttention(
            fields, fields, kernel_size=None, encoding="fourier", backend=o["grid"]
        ),
        lambda **o: escnn_attention.PointSelfAttention(
            fields, fields, radius=2.0, encoding=escnn_attention.PairKernel(hidden=4), backend=o["points"]
        ),
    ):
        found = []
        for options in ({"grid": "native", "points": "native"}, {"grid": "reference", "points": "neighbours"}):
            torch.manual_seed(0)
            layer = make(**options).to(dtype)
            if isinstance(layer, escnn_attention.PointSelfAttention):
                x = torch.randn(20, 8, dtype=dtype, requires_grad=True)
                out = layer(fields(x, coords=torch.randn(20, 2, dtype=dtype))).tensor
            else:
                x = torch.randn(2, 8, 7, 9, dtype=dtype, requires_grad=True)
                out = layer(fields(x)).tensor
            found.append([out, *torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])])
        for ours, expected in zip(*found):
            error = (ours - expected).norm() / expected.norm().clamp_min(1e-3)
            assert error < tolerance, float(error)
print(sys.argv[1], "as the formula has it")
"""

ASK = "import torch; print(torch.backends.cpu.get_cpu_capability())"


def main() -> int:
    """Run the check for this processor, and as if it had less."""
    found = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, check=True).stdout.strip()
    capabilities = {"AVX512": ["AVX512", "AVX2", "DEFAULT"], "AVX2": ["AVX2", "DEFAULT"]}.get(found, [found])
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        for capability in capabilities:
            variables = {"CXX": "/nonexistent", "ESCNN_ATTENTION_CACHE": folder}
            if capability != found:
                variables["ATEN_CPU_CAPABILITY"] = capability.lower()
            done = subprocess.run(
                [sys.executable, "-W", "ignore", "-c", CHECK, capability],
                env={**os.environ, **variables},
                cwd=folder,  # where the package of a checkout is not found
                check=False,
            )
            failed += done.returncode != 0
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
