"""Machine code for a GPU, of launches on tensors without numbers: what it needs, and how far it fills the GPU."""

from types import SimpleNamespace

import pytest
import torch

from escnn_attention.functional import autograd
from escnn_attention.functional.grid import triton, triton_tiles
from escnn_attention.functional.grid.call import Arguments


def passes(compiled, chip, query, dtype, *, poses=4, channels=10, heads=9, size=24, window=5, batch=64, **options):
    """What the kernels of both passes need of a GPU of 80 GB."""
    tiles = triton.tiled(not window, channels, dtype)
    shape = (heads, batch, size**2, poses, channels)
    q = torch.empty(shape, dtype=dtype, device="meta")
    q = triton_tiles.room_for(q) if tiles else triton.positions_side_by_side(q)
    rows = window**2 if window else (2 * size - 1) ** 2
    exact = autograd.PRECISE[dtype]
    tables = [torch.empty(heads, poses, count, channels, dtype=exact, device="meta") for count in (rows, poses)]
    seed = torch.empty(1, dtype=torch.long, device="meta") if options.get("dropout") else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80 * 10**9))
        chunk = triton._products_per_chunk(torch.device("cuda", 80), 4)
    arguments = Arguments(
        *(q, q, q, *tables, None, None, None, seed, poses, [size, size], [size, size], [], window),
        *(options.get("shape", "square"), 1, query == "all", options.get("dropout", 0.0), chunk),
    )
    found = compiled("grid.triton:_tiles.operator" if tiles else "grid.triton:_loop.operator", arguments, chip)
    return [one for one in found if one.kernel in ("forward", "backward_queries", "backward_keys")]


WIDE = {"size": 32, "window": 7, "batch": 16}
SIZES = {
    "C4": {},
    "C8": {"poses": 8},
    "torus": {"shape": "circular square", "dropout": 0.1, "batch": 1},
    "wide": {"channels": 32, "heads": 3} | WIDE,
    "wider": {"channels": 64, "heads": 2} | WIDE,
    "widest": {"channels": 128, "heads": 2} | WIDE,
    "global": {"size": 28, "window": 0, "batch": 1},
}


DTYPES = [torch.float32, torch.float64, torch.bfloat16]
NARROW = [(80, torch.float32, name) for name in ("C4", "torus")]


@pytest.mark.sampled(3, of="machine code for GPUs")
@pytest.mark.parametrize("query", ["own", "all"])
@pytest.mark.parametrize(("chip", "dtype", "name"), [(90, dtype, name) for dtype in DTYPES for name in SIZES] + NARROW)
def test_registers_hold_what_kernels_work_on(compiled, query, chip, dtype, name):
    """Where a thread has all channels of a position, there is nothing to exchange either."""
    found = passes(compiled, chip, query, dtype, **SIZES[name])
    if dtype == torch.float32 or (query, dtype) == ("own", torch.bfloat16):
        assert all(one.spilled <= 16 and one.occupancy >= 2 for one in found), found  # bytes
    if name in ("C4", "C8") and dtype != torch.float64:
        # In half precision four, of which the last may be a part.
        assert all(one.waves > (4 if dtype == torch.float32 else 3) for one in found), found
    numbers = SIZES[name].get("channels", 10) * dtype.itemsize // 4
    if name in ("C4", "C8", "torus") and dtype.itemsize > 2 and numbers <= (12 if query == "all" else 40):
        assert not any(one.shared for one in found), found
