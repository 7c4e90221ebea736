"""Machine code for a GPU, of launches on tensors without numbers: what it needs, and how far it fills the GPU."""

from types import SimpleNamespace

import pytest
import torch

from escnn_attention.functional import PositionalBias, autograd
from escnn_attention.functional.grid import triton, triton_tiles
from escnn_attention.functional.grid.call import Arguments, GridCall
from escnn_attention.geometry.grid import Grid
from escnn_attention.geometry.windows import Window


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
    if tiles:
        grid = Grid((size, size), Window(window or None))
        most = triton_tiles.shared_memory(GridCall(q, q, q, PositionalBias(poses), grid, grid))
        assert all(one.shared <= most for one in found), (most, found)
    return [one for one in found if one.kernel in ("forward", "backward_queries", "backward_keys")]


WIDE = {"size": 32, "window": 7, "batch": 16}
SIZES = {
    "C4": {},
    "C8": {"poses": 8},
    "12 poses": {"poses": 12},
    "torus": {"shape": "circular square", "dropout": 0.1, "batch": 1},
    "wide": {"channels": 32, "heads": 3} | WIDE,
    "wider": {"channels": 64, "heads": 2} | WIDE,
    "widest": {"channels": 128, "heads": 2} | WIDE,
    "global": {"size": 28, "window": 0, "batch": 1},
}


DTYPES = [torch.float32, torch.float64, torch.bfloat16]
NARROW = ["C4", "C8", "12 poses", "torus"]
OLDER = [(80, torch.float32, name) for name in NARROW]


@pytest.mark.sampled(1, of="large kernels for GPUs")
@pytest.mark.parametrize("query", ["own", "all"])
@pytest.mark.parametrize(("chip", "dtype", "name"), [(90, dtype, name) for dtype in DTYPES for name in SIZES] + OLDER)
def test_registers_hold_what_kernels_work_on(compiled, query, chip, dtype, name):
    """Where a thread has all channels of a position, there is nothing to exchange either."""
    found = passes(compiled, chip, query, dtype, **SIZES[name])
    if dtype == torch.float32 or (query, dtype) == ("own", torch.bfloat16):
        most = 0 if name in NARROW and dtype == torch.float32 else 16  # bytes
        assert all(one.spilled <= most and one.occupancy >= 2 for one in found), found
    if name in NARROW and dtype.itemsize > 2:
        # One pass over the keys: over their offsets and poses, beside one over the query poses and one over a table.
        loops = {one.kernel: one.loops for one in found}
        assert loops["forward"] <= 4 < loops["backward_queries"], found
        if dtype == torch.float32 and not SIZES[name].get("dropout"):
            assert found[0].occupancy >= 3, found
    if name in ("C4", "C8") and dtype != torch.float64:
        # In half precision four, of which the last may be a part.
        assert all(one.waves > (4 if dtype == torch.float32 else 3) for one in found), found
    numbers = SIZES[name].get("channels", 10) * dtype.itemsize // 4
    if name in NARROW and dtype.itemsize > 2 and numbers <= (12 if query == "all" else 40):
        assert not any(one.shared for one in found), found


@pytest.mark.sampled(1, of="large kernels for GPUs")
@pytest.mark.parametrize("dtype", DTYPES)
def test_shared_memory_of_programs_with_many_poses(compiled, dtype):
    """No less is needed than is counted on: tiles of 64 rows go another way through tensor cores."""
    found = passes(compiled, 90, "own", dtype, poses=48, channels=32, heads=1, size=4, batch=1)
    assert max(one.shared for one in found) > 30 * 2**10
