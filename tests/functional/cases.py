"""Random calls of the attention, which every backend is compared on."""

import pytest
import torch
from hypothesis import strategies as st

from escnn_attention.functional import BACKENDS, ON_GRIDS, PositionalBias, Waves, attention
from escnn_attention.functional.grid.call import GridCall
from escnn_attention.geometry.grid import Grid
from escnn_attention.geometry.windows import Window, shape_of


def case(
    order, key_poses, query_poses, shape, window, terms, heads=2, channels=3, batch=2, dtype=torch.float64, seed=0
):
    """Queries, keys and values that require gradients, a grid, and the terms that are named.

    ``terms`` has any of spatial, waves, pose, rotary, absolute, measure (of keys), weights (of offsets), and shared for
    terms that all heads share.
    """
    generator = torch.Generator().manual_seed(seed)
    grid = Grid(shape, window, dtype=dtype)

    def random(*size):
        return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    n = grid.num_positions
    q = random(heads, batch, n, query_poses, channels)
    k, v = random(heads, batch, n, key_poses, channels), random(heads, batch, n, key_poses, channels)
    table_heads = 1 if "shared" in terms else heads
    rows = n if "absolute" in terms else len(grid.averaged(grid.offsets))
    spatial = random(table_heads, order, rows, channels) if "spatial" in terms else None
    pose = random(table_heads, order, key_poses, channels) if "pose" in terms else None
    waves = rotary = None
    if "waves" in terms:
        waves = Waves(random(table_heads, order, 2, len(shape)), random(heads, channels, 4))
    if "rotary" in terms:
        rotary = random(table_heads, order, channels // 2, len(shape))
    measure = random(key_poses, n) if "measure" in terms else None
    weights = random(len(grid.averaged(grid.offsets))) if "weights" in terms else None
    return (q, k, v), grid, PositionalBias(order, spatial, pose, "absolute" in terms, waves, rotary, measure, weights)


def leaves(tensors, terms):
    """Everything there is a gradient for."""
    waves = () if terms.waves is None else (terms.waves.frequencies, terms.waves.readout)
    measures = (terms.log_measure, terms.log_window)
    return [t for t in (*tensors, terms.spatial, terms.pose, *waves, terms.rotary, *measures) if t is not None]


def doubled(tensors, terms):
    """The same numbers in float64, as new leaves."""

    def copy(t):
        return None if t is None else t.detach().double().requires_grad_()

    waves = terms.waves
    if waves is not None:
        waves = Waves(copy(waves.frequencies), copy(waves.readout))
    exact = PositionalBias(
        terms.num_poses,
        copy(terms.spatial),
        copy(terms.pose),
        terms.absolute,
        waves,
        copy(terms.rotary),
        copy(terms.log_measure),
        copy(terms.log_window),
    )
    return tuple(copy(t) for t in tensors), exact


def outputs_and_gradients(backend, tensors, grid, terms, query, keys="all", dropout=0.0):
    out = attention(*tensors, grid, terms, query=query, keys=keys, dropout=dropout, backend=backend)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(out.dtype)
    return [out, *torch.autograd.grad((out * weight).sum(), leaves(tensors, terms), allow_unused=True)]


def refusal(backend, tensors, grid, terms, query, keys="all", dropout=0.0):
    """Why a backend cannot serve a call, or None."""
    call, _ = ON_GRIDS.fold(GridCall(*tensors, terms, grid, grid, query=query, keys=keys, dropout=dropout))
    return BACKENDS[backend].why_unsupported(call)


def assert_same(got, expected, rtol=1e-10, atol=1e-11):
    """Outputs and gradients agree relative to their size."""
    for a, b in zip(got, expected, strict=True):
        if a is None or b is None:
            # A term that cannot change the output may be left out of the graph.
            assert all(t is None or t.abs().max() < 1e-12 for t in (a, b))
        else:
            assert a.shape == b.shape
            assert (a.double() - b.double()).norm() <= rtol * b.double().norm() + atol


def in_threads(numbers, function):
    """What a function returns in so many threads, one after the other."""
    before = torch.get_num_threads()
    try:
        found = []
        for number in numbers:
            torch.set_num_threads(number)
            found.append(function())
    finally:
        torch.set_num_threads(before)
    return found


def assert_independent(draw, rate, keys, of_neighbours=0.05):
    """Outputs ``(M, B, H, *space)`` of a draw are means of so many independent numbers, each 0 or 1 / (1 - rate)."""
    inside, again = draw(), draw()
    variance = rate / (1 - rate) / keys
    assert abs(inside.mean().item() - 1) < 5 * (variance / inside.numel()) ** 0.5
    assert inside.var().item() == pytest.approx(variance, rel=0.06)
    flat = (inside - inside.mean()).flatten(3)
    draws = {
        "neighbours": (flat[..., 1:], flat[..., :-1], of_neighbours),
        "heads": (flat[0], flat[1], 0.05),
        "images": (flat[:, 0], flat[:, 1], 0.05),
        "poses": (flat[:, :, 0], flat[:, :, 1], 0.05),
        "calls": (flat, (again - again.mean()).flatten(3), 0.05),
    }
    for name, (one, other, most) in draws.items():
        assert abs((one * other).mean().item()) < most * flat.square().mean().item(), name


@st.composite
def cases(draw, max_side=5, max_dim=3):
    """Arguments of :func:`outputs_and_gradients` after the backend."""
    order = draw(st.integers(1, 4))
    lifting = draw(st.booleans())
    poses = 1 if lifting else order
    shape = tuple(draw(st.lists(st.integers(1, max_side), min_size=0, max_size=max_dim)))
    terms = {draw(st.sampled_from(["spatial", "waves", "rotary", "absolute", "none"]))}
    if terms == {"absolute"}:
        terms.add("spatial")
    terms |= {t for t in ("pose", "shared") if draw(st.booleans())}
    terms |= draw(st.sampled_from([set(), {"measure"}, {"weights"}, {"measure", "weights"}]))
    if lifting:
        terms.discard("pose")
    kernel = draw(st.sampled_from([None, 1, 3, 5, 9]))
    form = draw(st.sampled_from(["square", "disc"])) if kernel else "square"
    causal, dilation = bool(shape) and draw(st.booleans()), draw(st.integers(1, 2)) if kernel else 1
    fits = kernel is None or dilation * (kernel - 1) < min(shape, default=0)
    circular = fits and not terms & {"rotary", "absolute"} and draw(st.booleans())
    window = Window(kernel, shape_of(form, causal=causal, circular=circular), dilation)
    query = "all" if lifting else draw(st.sampled_from(["own", "all"]))
    keys = "all" if lifting else draw(st.sampled_from(["all", "own"]))
    key_poses = poses * draw(st.integers(1, 2)) if keys == "all" else poses
    arguments = case(order, key_poses, poses, shape, window, terms, seed=draw(st.integers(0, 99)))
    return *arguments, query, keys
