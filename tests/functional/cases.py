"""Random calls of the attention, which every backend is compared on."""

from dataclasses import replace

import pytest
import torch
from hypothesis import strategies as st

from escnn_attention.functional import BACKENDS, ON_GRIDS, PositionalBias, Waves, attention
from escnn_attention.functional.grid.call import GridCall
from escnn_attention.geometry.grid import Grid
from escnn_attention.geometry.grid_pair import GridPair
from escnn_attention.geometry.windows import Window, shape_of

TABLES = ("spatial", "query_spatial", "pose", "rotary", "log_measure", "log_window")


def call_of(query_grid, key_grid, poses, terms, heads=2, channels=3, batch=2, dtype=torch.float64, seed=0, **modes):
    """A call whose tensors require gradients, with the terms that are named.

    Args:
        query_grid, key_grid: the same where queries and keys are on one grid.
        poses: how many the output, the keys and the queries have.
        terms: any of spatial, waves, pose, rotary, absolute, measure (of keys), weights (of offsets), and shared for
            terms that all heads share.
        heads, channels, batch, dtype, seed: of the tensors.
        modes: of the call.
    """
    generator = torch.Generator().manual_seed(seed)
    order, key_poses, query_poses = poses
    offsets = query_grid if key_grid is query_grid else GridPair(query_grid, key_grid)
    positions, keys, dim = query_grid.num_positions, key_grid.num_positions, len(query_grid.shape)

    def random(*size):
        return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    q = random(heads, batch, positions, query_poses, channels)
    k, v = random(heads, batch, keys, key_poses, channels), random(heads, batch, keys, key_poses, channels)
    table_heads, absolute = 1 if "shared" in terms else heads, "absolute" in terms
    rows, given = len(offsets.averaged(offsets.offsets)), {}
    if "spatial" in terms:
        given["spatial"] = random(table_heads, order, keys if absolute else rows, channels)
    if "pose" in terms:
        given["pose"] = random(table_heads, order, key_poses, channels)
    if "waves" in terms:
        given["waves"] = Waves(random(table_heads, order, 2, dim), random(heads, channels, 4))
    if "rotary" in terms:
        given["rotary"] = random(table_heads, order, channels // 2, dim)
    if "measure" in terms:
        given["log_measure"] = random(key_poses, keys)
    if "weights" in terms:
        given["log_window"] = random(rows)
    if absolute and key_grid is not query_grid:
        given["query_spatial"] = random(table_heads, order, positions, channels)
    return GridCall(q, k, v, PositionalBias(order, absolute=absolute, **given), query_grid, key_grid, **modes)


def case(
    order, key_poses, query_poses, shape, window, terms, heads=2, channels=3, batch=2, dtype=torch.float64, seed=0
):
    """Queries, keys and values of :func:`call_of`, the one grid of this shape and window, and the bias."""
    grid = Grid(shape, window, dtype=dtype)
    call = call_of(grid, grid, (order, key_poses, query_poses), terms, heads, channels, batch, dtype, seed)
    return (call.q, call.k, call.v), grid, call.bias


def changed(bias, function):
    """The bias with what a function makes of each of its tensors."""
    waves = bias.waves and Waves(function(bias.waves.frequencies), function(bias.waves.readout))
    return replace(bias, waves=waves).map_tables(function, *TABLES)


def leaves(tensors, bias):
    """Everything there is a gradient for."""
    waves = () if bias.waves is None else (bias.waves.frequencies, bias.waves.readout)
    return [t for t in (*tensors, *waves, *(getattr(bias, name) for name in TABLES)) if t is not None]


def with_leaves(call, tensors):
    """The call with other leaves, in the order of :func:`leaves`."""
    left = iter(tensors)
    return replace(call, q=next(left), k=next(left), v=next(left), bias=changed(call.bias, lambda _: next(left)))


def doubled(tensors, bias, dtype=torch.float64):
    """The same numbers in float64, or another precision, as new leaves."""

    def copy(t):
        return t.detach().to(dtype).requires_grad_()

    return tuple(map(copy, tensors)), changed(bias, copy)


def outcome(call, backend):
    """The output of a call, and the gradients of its leaves."""
    out = ON_GRIDS.compute(call, backend)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(out.dtype)
    wanted = leaves((call.q, call.k, call.v), call.bias)
    return [out, *torch.autograd.grad((out * weight).sum(), wanted, allow_unused=True)]


def outputs_and_gradients(backend, tensors, grid, terms, query, keys="all", dropout=0.0):
    return outcome(GridCall(*tensors, terms, grid, grid, query=query, keys=keys, dropout=dropout), backend)


def twice_differentiated(backend, tensors, grid, terms, query):
    """Gradients of the square of the gradients."""
    out = attention(*tensors, grid, terms, query=query, backend=backend)
    grads = torch.autograd.grad(out.square().sum(), leaves(tensors, terms), create_graph=True)
    return torch.autograd.grad(sum(g.square().sum() for g in grads), leaves(tensors, terms))


def refusal(backend, tensors, grid, terms, query, keys="all", dropout=0.0):
    """Why a backend cannot serve a call, or None."""
    call, _ = ON_GRIDS.fold(GridCall(*tensors, terms, grid, grid, query=query, keys=keys, dropout=dropout))
    return BACKENDS[backend].why_unsupported(call)


def assert_as_exact(backend, tensors, grid, terms, query, tolerance):
    """In the precision of the tensors, outputs and gradients are those of the formula in float64, up to a tolerance."""
    exact, exact_terms = doubled(tensors, terms)
    got = outputs_and_gradients(backend, tensors, grid, terms, query)
    assert all(t is None or t.dtype == tensors[0].dtype for t in got)
    assert_same(got, outputs_and_gradients("reference", exact, grid, exact_terms, query), tolerance)


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


def assert_independent(backend, grid, poses, channels, query, rate, dtype=torch.float32, of_neighbours=0.05):
    """Equal scores over n keys of value 1 give means of n independent numbers, each 0 or 1 / (1 - rate)."""
    copies, margin = poses if query == "all" else 1, grid.window.kernel_size // 2
    q, k, v = torch.zeros(3, 2, 2, grid.num_positions, poses, channels, dtype=dtype)
    inside = (..., *len(grid.shape) * [slice(margin, -margin)])

    def draw():
        out = attention(q, k, v + 1, grid, PositionalBias(poses), query=query, dropout=rate, backend=backend) / copies
        return out[..., 0].transpose(2, 3).unflatten(-1, grid.shape)[inside]

    found, again = draw(), draw()
    variance = rate / (1 - rate) / (copies * poses * len(grid.offsets))
    assert abs(found.mean().item() - 1) < 5 * (variance / found.numel()) ** 0.5
    assert found.var().item() == pytest.approx(variance, rel=0.06)
    flat = (found - found.mean()).flatten(3)
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
    circular, dilation = not terms & {"rotary", "absolute"} and draw(st.booleans()), draw(st.integers(1, 2))
    around = min(shape, default=0) if circular else 99  # windows reach around no torus
    kernel = draw(st.sampled_from([None, *(n for n in (1, 3, 5, 9) if dilation * (n - 1) < around)]))
    form = draw(st.sampled_from(["square", "disc"])) if kernel else "square"
    causal, dilation = bool(shape) and draw(st.booleans()), dilation if kernel else 1
    window = Window(kernel, shape_of(form, causal=causal, circular=circular), dilation)
    query = "all" if lifting else draw(st.sampled_from(["own", "all"]))
    keys = "all" if lifting else draw(st.sampled_from(["all", "own"]))
    key_poses = poses * draw(st.integers(1, 2)) if keys == "all" else poses
    arguments = case(order, key_poses, poses, shape, window, terms, seed=draw(st.integers(0, 99)))
    return *arguments, query, keys
