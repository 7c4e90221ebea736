"""The backends, and the choice among them."""

from dataclasses import replace

import pytest
import torch

from escnn_attention.functional import BACKENDS, ON_GRIDS, Backend, PositionalBias, attention
from escnn_attention.geometry.grid import Grid
from escnn_attention.geometry.windows import Window


def arguments(n=5, window=None):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 1, n, 1, 2, dtype=torch.float64)
    grid = Grid((n,), window or Window(3))
    return q, k, v, grid, PositionalBias(1, torch.randn(1, 1, len(grid.offsets), 2, dtype=torch.float64))


def test_unknown_backend_is_named():
    with pytest.raises(ValueError, match=r"backend: got 'fast'.*'auto'.*'reference'.*'blocked'"):
        attention(*arguments(), backend="fast")


def test_a_backend_that_refuses_says_why_and_auto_passes_it_over(monkeypatch):
    def fail(*_, **__):
        raise AssertionError("called all the same")

    monkeypatch.setitem(BACKENDS, "picky", Backend(fail, lambda *_: "there is no Tuesday in the input"))
    monkeypatch.setattr(ON_GRIDS, "preference", lambda _: ("picky", "blocked"))
    with pytest.raises(ValueError, match=r"backend: .*no Tuesday"):
        attention(*arguments(), backend="picky")
    torch.testing.assert_close(attention(*arguments()), attention(*arguments(), backend="reference"))


def test_own_poses_are_those_of_the_output():
    q, k, v, grid, _ = arguments()
    with pytest.raises(ValueError, match=r"query: .*needed the 3"):
        attention(q, k, v, grid, PositionalBias(3))
    assert attention(q, k, v, grid, PositionalBias(3), query="all").shape[3] == 3


@pytest.mark.parametrize(
    ("device", "names"),
    [("cpu", ("native", "blocked")), ("cuda", ("triton", "dense", "blocked")), ("mps", ("blocked",))],
)
def test_what_is_tried_first_on_a_device(device, names):
    assert ON_GRIDS.preference(device) == (*names, "linear")


def test_a_backend_is_chosen_once_for_calls_of_a_kind(monkeypatch):
    asked = []
    watched = replace(BACKENDS["blocked"], why_unsupported=lambda call: asked.append(call.q.shape))
    monkeypatch.setitem(BACKENDS, "blocked", watched)
    for n in (5, 5, 6, 5):
        attention(*arguments(n), backend="blocked")
    assert [shape[2] for shape in asked] == [5, 6]
    with torch.no_grad():
        attention(*arguments(), backend="blocked")
    assert len(asked) == 3
    monkeypatch.setitem(BACKENDS, "blocked", replace(watched, why_unsupported=lambda _: "it is closed"))
    with pytest.raises(ValueError, match="it is closed"):
        attention(*arguments(), backend="blocked")


@pytest.mark.sampled(10)
@pytest.mark.parametrize("backend", sorted(set(ON_GRIDS.backends) - {"linear"}))
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_values_that_are_not_finite_reach_those_who_see_them_and_no_others(backend, value, which):
    q, k, v, grid, terms = arguments(7)
    clean = attention(q, k, v, grid, terms, backend=backend)
    tensors = {"q": q.clone(), "k": k.clone(), "v": v.clone()}
    tensors[which][..., 2, :, 0] = value
    out = attention(*tensors.values(), grid, terms, backend=backend)
    reached = {2} if which == "q" else {1, 2, 3}
    for position in range(7):
        if position not in reached:
            assert torch.equal(out[:, :, position], clean[:, :, position]) or torch.allclose(
                out[:, :, position], clean[:, :, position], rtol=1e-12
            )
        elif which == "v" or value != value:
            assert not torch.isfinite(out[:, :, position]).all()


@pytest.mark.parametrize("backend", sorted(set(ON_GRIDS.backends) - {"linear"}))
def test_one_position(backend):
    q, k, v, grid, terms = arguments(1, Window(9))
    torch.testing.assert_close(attention(q, k, v, grid, terms, backend=backend), v)
