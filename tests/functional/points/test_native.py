"""The compiled loop of attention between points: the formula written out, gradients, threads, refusals."""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable

import pytest
import torch
from escnn import gspaces
from escnn.nn import FieldType, GeometricTensor
from hypothesis import given
from hypothesis import strategies as st

from escnn_attention import PointSelfAttention, working_memory
from escnn_attention.functional.native import build as compiled
from escnn_attention.functional.points import native as native_points
from escnn_attention.functional.points.native import Arguments, attend
from escnn_attention.geometry.neighbours import Lists, WholeClouds
from tests.functional.cases import in_threads
from tests.functional.points.calls import of_offsets_too, offsets, point_attention
from tests.functional.precise import EXTENDED, errors, exact, mean_ratio

if reason := native_points.why_not_built(torch.float32):
    pytest.skip(reason, allow_module_level=True)


LEAVES = len(native_points._LEAVES)
"""How many arguments have gradients: the first ones."""


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


ALL = frozenset({"q", "features", "pose", "extra", "factors", "envelope", "measure"})
TERMS = {"one": ALL, "own": ALL, "layer": ALL - {"features"} | {"layer"}}


def case(
    groups: tuple[int, ...] = (5, 3),
    queries: tuple[int, ...] = (2, 3),
    *,
    heads: int = 2,
    num_poses: int = 3,
    query_poses: int = 3,
    key_poses: int = 3,
    channels: int = 4,
    sum_query_poses: bool = False,
    normalize_by_count: bool = False,
    terms: set[str] = ALL,
    own_features: bool = False,
    shared_pose: bool = False,
    extra_poses: int | None = None,
    functions: int = 5,
    repeats: int = 1,
) -> Arguments:
    """Groups of so many keys and queries, filled up to the largest, of which no two have keys in common.

    So many groups that follow each other have the same features, which are given ("features") or made of a relation
    ("layer").
    """
    number, most = max(groups), max(queries)
    order, place = torch.randperm(sum(groups)), 0
    keys, asking = torch.full((len(groups), number), -1), torch.full((len(groups), most), -1)
    for i, (n, a) in enumerate(zip(groups, queries, strict=True)):
        keys[i, :n], asking[i, :a] = order[place : place + n], torch.arange(a)
        place += n
    rows = asking.numel()
    scores = num_poses * query_poses if sum_query_poses else num_poses
    given, made = "features" in terms, "layer" in terms
    tables = (len(groups) // repeats, most, number)
    return Arguments(
        q=draw(heads, rows, query_poses, channels) if "q" in terms else None,
        k=draw(heads, len(order), key_poses, channels) if "q" in terms else None,
        v=draw(heads, len(order), key_poses, channels),
        reads=draw(heads, rows, query_poses, functions) if given or made else None,
        features=draw(heads if own_features else 1, num_poses, functions, *tables) if given else None,
        pose=draw(1 if shared_pose else heads, num_poses, channels, key_poses) if "pose" in terms else None,
        extra=draw(heads, scores, extra_poses or key_poses, len(groups), most, number) if "extra" in terms else None,
        factors=draw(heads, len(groups), most, number) if "factors" in terms else None,
        envelope=torch.rand(len(groups), most, number, dtype=torch.float64, requires_grad=True)
        if "envelope" in terms
        else None,
        layer=draw(functions, 3) if made else None,
        shift=draw(functions) if made else None,
        relation=torch.randn(num_poses, 3, *tables, dtype=torch.float64) if made else None,
        queries=asking,
        keys=keys,
        log_measure=torch.randn(len(order), key_poses, dtype=torch.float64) if "measure" in terms else None,
        seed=None,
        num_poses=num_poses,
        query_poses=query_poses,
        exclusive_keys=True,
        ring=0,
        padded=len({*groups}) > 1 or len({*queries}) > 1,
        sum_query_poses=sum_query_poses,
        normalize_by_count=normalize_by_count,
        dropout=0.0,
    )


def leaves_of(call: Arguments) -> list[torch.Tensor]:
    """The tensors that there are gradients for."""
    return [t for t in call[:LEAVES] if t is not None]


def with_leaves(call: Arguments, function: Callable[[torch.Tensor], torch.Tensor]) -> Arguments:
    """The same, where there is something else in place of each of these tensors."""
    return call._replace(**{n: function(t) for n, t in zip(call._fields, call[:LEAVES], strict=False) if t is not None})


def written_out(call: Arguments) -> torch.Tensor:
    """The formula, query by query."""
    v = call.v
    nothing = v.new_zeros(len(v), call.num_poses, v.shape[-1])
    out = []
    for row in range(call.queries.numel()):
        g, a = divmod(row, call.queries.shape[1])
        keys = call.keys[g][call.keys[g] >= 0]
        if call.queries[g, a] < 0 or not len(keys):
            out.append(nothing)
            continue
        s = scores_written_out(call, row, keys)
        mu = s.new_zeros(1) if call.log_measure is None else call.log_measure[keys].T
        if call.envelope is not None:
            mu = mu + call.envelope[g, a, : len(keys)].log()
        if call.normalize_by_count:
            p = s * (mu.exp() / mu.exp().expand_as(s[0, 0, 0]).sum())
        else:
            p = (s + mu).flatten(-2).softmax(-1).view_as(s)
        if call.factors is not None:
            p = p * call.factors[:, g, a, : len(keys)].unflatten(0, (-1, 1, 1, 1))
        out.append(torch.einsum("mhjpk,mkpc->mhc", p, v[:, keys]))
    return torch.stack(out, dim=1)


def scores_written_out(call: Arguments, row: int, keys: torch.Tensor) -> torch.Tensor:
    """The scores ``(M, H, J, P, K)`` of a query; J is 1 where query poses are not summed over."""
    q, k, v, reads, features, pose, extra = call[:7]
    g, a = divmod(row, call.queries.shape[1])
    size = (len(v), call.num_poses, call.summed_poses)

    def of_poses(t: torch.Tensor) -> torch.Tensor:
        """From all query poses ``(M, J, X)`` to those of every output pose."""
        return t.unsqueeze(1 if call.sum_query_poses else 2).expand(*size, -1)

    if call.layer is not None:
        inner = torch.einsum("fd,hdgak->hfgak", call.layer, call.relation) + call.shift.view(-1, 1, 1, 1)
        features = (inner / (1 + (-inner).exp())).unsqueeze(0)
    s = v.new_zeros(*size, v.shape[2], len(keys))
    if q is not None:
        s = s + torch.einsum("mhjc,mkpc->mhjpk", of_poses(q[:, row]), k[:, keys])
    if pose is not None:
        table = pose[..., : v.shape[2]].expand(len(v), -1, -1, -1)
        s = s + torch.einsum("mhjc,mhcp->mhjp", of_poses(q[:, row]), table).unsqueeze(-1)
    if reads is not None:
        repeats = len(call.keys) // features.shape[3]
        table = features[:, :, :, g // repeats, 0 if call.ring else a, : len(keys)].expand(len(v), -1, -1, -1)
        if call.ring:
            table = table.unflatten(-1, (-1, call.ring)).roll(int(call.queries[g, a]), -1).flatten(-2)
        s = s + torch.einsum("mhjf,mhfk->mhjk", of_poses(reads[:, row]), table).unsqueeze(-2)
    if extra is not None:
        s = s + extra[:, :, :, g, a, : len(keys)].unflatten(1, size[1:])
    return s


def outcomes(function, call: Arguments) -> list[torch.Tensor]:
    """Output and gradients."""
    out = function(call)
    leaves = leaves_of(call)
    torch.manual_seed(1)
    return [out, *torch.autograd.grad(out, leaves, torch.randn(out.shape, dtype=torch.float64).to(out))]


def assert_close(call: Arguments) -> None:
    for several in (call, call._replace(exclusive_keys=False)):
        torch.testing.assert_close(outcomes(attend, several), outcomes(written_out, call), rtol=1e-11, atol=1e-11)


@pytest.mark.sampled(11)
@pytest.mark.parametrize("normalize_by_count", [False, True])
@pytest.mark.parametrize("sum_query_poses", [False, True])
@pytest.mark.parametrize(
    "terms",
    [
        {"q"},
        {"q", "features"},
        {"q", "layer"},
        {"q", "pose", "measure"},
        {"extra"},
        {"q", "extra", "measure"},
        {"q", "factors"},
        {"q", "envelope"},
        {"q", "features", "envelope", "measure"},
        {"q", "features", "pose", "extra", "factors", "envelope", "measure"},
        {"q", "layer", "pose", "extra", "factors", "envelope", "measure"},
    ],
)
def test_the_formula(terms, sum_query_poses, normalize_by_count):
    assert_close(case(terms=terms, sum_query_poses=sum_query_poses, normalize_by_count=normalize_by_count))
    options = {"sum_query_poses": sum_query_poses, "normalize_by_count": normalize_by_count, "channels": 9}
    # Eight groups are as many as it takes to have the pass over keys follow group by group.
    assert_close(case((17, 1, 8, 4, 3, 2, 9, 1), (1, 2, 1, 2, 1, 1, 2, 1), terms=terms, **options))


@given(st.data())
@pytest.mark.slow
def test_random_shapes(data):
    torch.manual_seed(data.draw(st.integers(0, 2**16)))
    number = data.draw(st.integers(1, 9))
    small = st.integers(1, 6)
    num_poses = data.draw(small)
    sum_query_poses = data.draw(st.booleans())
    key_poses = data.draw(small)
    terms = data.draw(
        st.sets(st.sampled_from(["q", "features", "extra", "factors", "envelope", "measure"]), min_size=1)
    )
    if "features" in terms and data.draw(st.booleans()):
        terms = terms - {"features"} | {"layer"}
    if not terms & {"q", "extra"}:
        terms = terms | {"q"}
    if "q" in terms and data.draw(st.booleans()):
        terms = terms | {"pose"}
    call = case(
        tuple(data.draw(st.lists(st.integers(1, 40), min_size=number, max_size=number))),
        tuple(data.draw(st.lists(small, min_size=number, max_size=number))),
        heads=data.draw(small),
        num_poses=num_poses,
        query_poses=data.draw(small) if sum_query_poses else data.draw(st.sampled_from([1, num_poses])),
        key_poses=key_poses,
        channels=data.draw(st.integers(1, 11)),
        sum_query_poses=sum_query_poses,
        normalize_by_count=data.draw(st.booleans()),
        terms=terms,
        own_features=data.draw(st.booleans()),
        shared_pose=data.draw(st.booleans()),
        extra_poses=data.draw(st.sampled_from([1, key_poses])),
        functions=data.draw(st.integers(1, 18)),
    )
    # A sum over a single query pose is none.
    assert_close(call._replace(sum_query_poses=sum_query_poses and call.query_poses > 1))


@pytest.mark.parametrize("kind", ["one", "own", "layer"])
@pytest.mark.parametrize(
    ("groups", "queries", "repeats"), [((9, 9, 9, 5, 5, 5), 6 * (1,), 3), (8 * (3,), 8 * (2,), 4), ((7, 7), (3, 3), 2)]
)
def test_groups_share_features(groups, queries, repeats, kind):
    name = "relation" if kind == "layer" else "features"
    for modes in ({"query_poses": 1}, {"sum_query_poses": True}):
        call = case(groups, queries, repeats=repeats, terms=TERMS[kind], own_features=kind == "own", **modes)
        assert_close(call)
        # What one group sees is not what the next one does.
        shared = getattr(call, name)
        other = call._replace(**{name: shared.flip(-3)})
        assert shared.shape[-3] == 1 or not torch.allclose(attend(call), attend(other))


@pytest.mark.parametrize("kind", ["one", "own", "layer"])
@pytest.mark.parametrize("images", [1, 2])
@pytest.mark.parametrize(("ring", "rings", "queries"), [(1, 5, 1), (5, 3, 5), (5, 4, 2), (16, 2, 16), (20, 1, 13)])
def test_queries_on_a_ring_share_features(ring, rings, queries, images, kind):
    name = "relation" if kind == "layer" else "features"
    for modes in ({"query_poses": 1, "num_poses": 5}, {"sum_query_poses": True}):
        options = {"channels": 2, "own_features": kind == "own", "terms": TERMS[kind], "repeats": images, **modes}
        call = case((ring * rings,) * images, (queries,) * images, **options)
        shared = getattr(call, name)[..., :1, :].detach().requires_grad_(kind != "layer")
        call = call._replace(**{name: shared}, queries=call.queries + 3, ring=ring)
        assert_close(call)
        torch.testing.assert_close(
            outcomes(native_points._plainly, call), outcomes(written_out, call), rtol=1e-11, atol=1e-11
        )


@pytest.mark.parametrize("sum_query_poses", [False, True])
@pytest.mark.slow
def test_many_queries_of_the_same_keys(sum_query_poses):
    """Parts of the queries add to gradients of keys of their own."""
    assert_close(case((7,), (40,), channels=2, sum_query_poses=sum_query_poses))
    assert_close(case((7, 5, 7), (40, 30, 40), channels=2, sum_query_poses=sum_query_poses))


@pytest.mark.parametrize("terms", [{"q"}, {"q", "measure"}, {"q", "pose"}, {"q", "factors", "envelope"}])
@pytest.mark.parametrize("num_poses", [2, 3, 5])
def test_output_poses_share_the_products_of_their_query(num_poses, terms):
    """Queries meet in one block of rows, which ends between the poses of another."""
    assert_close(case((5, 3), (4, 2), num_poses=num_poses, query_poses=1, terms=terms))


@pytest.mark.parametrize("moves", [False, True])
def test_the_loop_makes_features_of_what_has_no_gradient(monkeypatch, moves):
    called: list[Arguments] = []
    monkeypatch.setattr(native_points, "attend", lambda call: called.append(call) or attend(call))
    kind = FieldType(space := gspaces.rot2dOnR2(4), 2 * [space.regular_repr])
    layer = PointSelfAttention(kind, kind, num_heads=2, backend="native")
    coords = torch.randn(5, 2, requires_grad=moves)
    layer(GeometricTensor(torch.randn(5, kind.size), kind, coords))
    (call,) = called
    assert (call.features is not None, call.relation is not None) == (moves, not moves)


def test_queries_that_see_nothing_get_nothing():
    call = case((4, 2), (2, 2))
    call.keys[1] = -1
    assert_close(call)
    assert not attend(call)[:, 2:].any()


def test_keys_of_several_groups():
    """Their gradients are sums over all that see them."""
    call = case((6, 4, 5), (2, 1, 2))
    call.keys[1, :4] = call.keys[0, :4].flip(0)
    call.keys[2, :5] = call.keys[0, 1:6]
    call = call._replace(exclusive_keys=False)
    torch.testing.assert_close(outcomes(attend, call), outcomes(written_out, call), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("sum_query_poses", [False, True])
@pytest.mark.parametrize("frozen", Arguments._fields[:LEAVES])
def test_only_gradients_that_are_asked_for(frozen, sum_query_poses):
    """What needs none has its part in those of the others all the same."""
    terms = TERMS["layer" if frozen in ("layer", "shift") else "one"]
    call = case(sum_query_poses=sum_query_poses, terms=terms)
    call = call._replace(**{frozen: getattr(call, frozen).detach()})
    leaves = [t for t in leaves_of(call) if t.requires_grad]
    grads = torch.autograd.grad(attend(call).sin().sum(), leaves)
    torch.testing.assert_close(
        grads, torch.autograd.grad(written_out(call).sin().sum(), leaves), rtol=1e-11, atol=1e-11
    )
    # And the other way round.
    call = with_leaves(call, torch.Tensor.detach)
    leaf = getattr(call, frozen).requires_grad_()
    (a,) = torch.autograd.grad(attend(call).sin().sum(), leaf)
    (b,) = torch.autograd.grad(written_out(call).sin().sum(), leaf)
    torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_indices_of_other_types():
    call = case()
    narrow = call._replace(queries=call.queries.int(), keys=call.keys.int())
    assert torch.equal(attend(narrow), attend(call))


@pytest.mark.parametrize("kind", ["one", "layer"])
@pytest.mark.slow
def test_derivatives_of_the_second_order(kind):
    sizes = {"heads": 1, "num_poses": 2, "query_poses": 2, "key_poses": 2, "channels": 2, "functions": 1}
    call = case((2, 1), (1, 1), **sizes, terms=TERMS[kind])
    leaves = leaves_of(call)

    def function(*tensors):
        return attend(with_leaves(call, dict(zip(leaves, tensors, strict=True)).get))

    assert torch.autograd.gradcheck(function, leaves)
    assert torch.autograd.gradgradcheck(function, leaves)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("normalize_by_count", [False, True])
@pytest.mark.parametrize("sum_query_poses", [False, True])
def test_derivatives_drop_the_same_keys(sum_query_poses, normalize_by_count):
    sizes = {"heads": 2, "num_poses": 2, "query_poses": 2, "key_poses": 2, "channels": 2, "functions": 1}
    call = case((2, 1), (2, 1), **sizes, sum_query_poses=sum_query_poses, normalize_by_count=normalize_by_count)
    leaves = leaves_of(call)

    def function(*tensors):
        torch.manual_seed(3)
        return attend(with_leaves(call, dict(zip(leaves, tensors, strict=True)).get)._replace(dropout=0.4))

    assert torch.autograd.gradcheck(function, leaves)
    assert torch.autograd.gradgradcheck(function, leaves, fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rate", [0.3, 1.0])
@pytest.mark.parametrize("normalize_by_count", [False, True])
@pytest.mark.parametrize("sum_query_poses", [False, True])
def test_gradients_of_a_measure_drop_the_same_keys(sum_query_poses, normalize_by_count, rate, dtype):
    """Which are made by operations of PyTorch, by the counter of the loop."""
    call = case(sum_query_poses=sum_query_poses, normalize_by_count=normalize_by_count)
    call = with_leaves(call, lambda t: t.detach().to(dtype).requires_grad_())._replace(dropout=rate)
    torch.manual_seed(5)
    expected = attend(call)
    torch.manual_seed(5)
    measure = call.log_measure.detach().requires_grad_()
    found = attend(call._replace(log_measure=measure))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 if dtype == torch.float32 else 1e-13)
    assert (torch.autograd.grad(found.sin().sum(), measure)[0].abs().max() > 0) == (rate < 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("exclusive_keys", [False, True])
@pytest.mark.parametrize(
    ("groups", "queries", "sizes"),
    [
        (6 * (5,) + 6 * (20,), 12 * (4,), {}),
        ((9, 9), (90, 70), {"query_poses": 1, "channels": 9, "terms": {"q", "pose"}}),
        ((40,), (140,), {}),
        ((40,), (140,), {"channels": 1}),
    ],
)
def test_the_same_for_any_number_of_threads(groups, queries, sizes, exclusive_keys, dtype):
    call = case(groups, queries, **sizes)
    call = call._replace(exclusive_keys=exclusive_keys)
    call = with_leaves(call, lambda t: t.detach().to(dtype).requires_grad_())
    first, *others = in_threads((1, 2, 3, 7), lambda: outcomes(attend, call))
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_single_precision():
    call = case((33, 20), (7, 8))
    exact = outcomes(attend, call)
    single = outcomes(attend, with_leaves(call, lambda t: t.detach().float().requires_grad_()))
    for a, b in zip(single, exact, strict=True):
        assert (a.double() - b).norm() < 1e-5 * b.norm()


@pytest.mark.parametrize("normalize_by_count", [False, True])
@pytest.mark.parametrize("sum_query_poses", [False, True])
def test_dropout(sum_query_poses, normalize_by_count):
    """Probabilities are kept at the rate, scaled up, and alike in both passes."""
    call = case(
        (200, 180),
        (15, 12),
        terms={"q"},
        heads=3,
        channels=1,
        sum_query_poses=sum_query_poses,
        normalize_by_count=normalize_by_count,
        num_poses=2,
        query_poses=2,
    )
    ones = with_leaves(call, torch.zeros_like)
    if normalize_by_count:
        # All scores 1.
        ones = ones._replace(q=torch.ones_like(call.q), k=torch.ones_like(call.k))
    v = torch.ones_like(call.v, requires_grad=True)
    ones = ones._replace(v=v)
    rate, torch_seed = 0.3, 5
    torch.manual_seed(torch_seed)
    out = attend(ones._replace(dropout=rate))
    seen = call.queries.flatten() >= 0
    expected = 2.0 if sum_query_poses else 1.0
    assert abs(float(out[:, seen].detach().mean()) - expected) < 0.01
    assert float(out[:, seen].detach().std()) > 0
    # Linear in the values, with the same mask again.
    torch.manual_seed(torch_seed)
    assert torch.equal(attend(ones._replace(dropout=rate)), out)
    (grad,) = torch.autograd.grad(out.sum(), v)
    assert math.isclose(float(grad.sum()), float(out.detach().sum()), rel_tol=1e-10)


def test_not_a_number_reaches_those_who_see_it():
    x, q = torch.randn(6, 2, dtype=torch.float64), torch.randn(6, 1, 3, 3, dtype=torch.float64)
    bad = q.clone()
    bad[1] = torch.nan
    edges = torch.tensor([[0, 1, 2, 3, 4, 4, 0], [0, 0, 1, 2, 2, 3, 4]])
    for neighbours in (Lists(edges, 6), WholeClouds(torch.tensor([0, 1, 0, 0, 1, 2]))):
        outputs = (point_attention(q, q, bad, x, neighbours, backend=name) for name in ("native", "neighbours"))
        spoilt = [out.isnan().flatten(1).any(1) for out in outputs]
        assert torch.equal(*spoilt)
        assert spoilt[0].any()
        assert not spoilt[0].all()


def test_not_a_number_in_what_others_read():
    """A vector of the functions of one query reaches into those of the next."""
    call = case((5, 5), (2, 2), heads=1, num_poses=1, query_poses=1, key_poses=1, terms={"q", "features"})
    with torch.no_grad():
        call.features[:, :, :, 1] = torch.nan
    out = attend(call)
    assert out[:, :2].isfinite().all()
    assert out[:, 2:].isnan().all()
    grads = torch.autograd.grad(out[:, :2].sum(), [call.q, call.reads])
    assert all(grad[:, :2].isfinite().all() for grad in grads)


def test_measures_that_are_too_small_to_count():
    call = case(normalize_by_count=True, terms={"q"})
    call = with_leaves(call, lambda t: t.detach().float())
    call = call._replace(log_measure=torch.full((8, 3), -110.0))
    assert not attend(call).any()


@pytest.mark.parametrize("backend", ["neighbours", "native"])
def test_what_is_seen_does_not_outlive_a_piece(backend):
    q, alive = torch.randn(12, 1, 3, 3, requires_grad=True), []

    def relate(a, b):
        seen = offsets(a, b).clone()
        alive.append(weakref.ref(seen))
        return seen

    with working_memory(1):
        cloud = WholeClouds(torch.zeros(12, dtype=torch.long))
        out = point_attention(q, q, q, torch.randn(12, 2), cloud, relate, of_offsets_too, backend=backend)
    assert len(alive) > 2
    assert not any(seen() is not None for seen in alive)
    out.sum().backward()
    assert not any(seen() is not None for seen in alive)


def test_refuses_what_it_cannot_serve(monkeypatch):
    cloud = WholeClouds(torch.zeros(3, dtype=torch.long))

    def attention(backend, device="cpu", **others):
        q = torch.zeros(3, 1, 3, 4, device=device)
        return point_attention(q, q, q, torch.zeros(3, 2, device=device), cloud, backend=backend, **others)

    for message, others in (
        ("queries see keys of their own pose only", {"keys": "own"}),
        ("values pass through a kernel", {"mix": lambda p, v, seen: v}),
        ("the measure requires a gradient", {"log_measure": torch.zeros(3, 1, requires_grad=True)}),
    ):
        with pytest.raises(ValueError, match=f"backend: 'native' cannot serve this call: {message}"):
            attention("native", **others)
    with pytest.raises(ValueError, match=r"'native' .*on the CPU"):
        attention("native", "meta")
    # Without a compiler others serve.
    monkeypatch.setattr(native_points.KERNEL, "_found", {torch.float32: compiled.NotBuilt("there is no compiler")})
    with pytest.raises(ValueError, match=r"'native' .*is no compiler"):
        attention("native")
    assert not attention("auto").any()
    # And nothing is built for those who name another.
    monkeypatch.setattr(native_points, "why_unsupported", lambda _: pytest.fail("asked for"))
    assert not attention("neighbours").any()


def test_memory_that_is_not_there(monkeypatch):
    monkeypatch.setattr(native_points.KERNEL, "_found", {torch.float64: lambda _: 1})
    with pytest.raises(RuntimeError, match="can't allocate memory for attention between points"):
        attend(case())


@pytest.mark.sampled(2)
@pytest.mark.skipif(not EXTENDED, reason="there is no precision beyond float64")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("own", [True, False])
def test_is_as_exact_as_operations_of_pytorch_however_large_scores_are(dtype, own):
    results = {native_points.attend: [], native_points._plainly: []}
    rows = torch.arange(12 * 11).view(12, 11)
    for scale, seed in itertools.product((1, 10, 30, 100, 1000), range(3)):
        torch.manual_seed(seed)
        q, k, v = (scale * torch.randn(n, 3, 8, dtype=torch.float64) for n in (12, 11, 11))
        features, pose = torch.randn(3, 8, 12, 11), torch.randn(3, 8, 3)
        q, k, v, features, pose = (t.to(dtype) for t in (q, k, v, features, pose))
        table = features.flatten(2).transpose(1, 2)
        grad = torch.randn(12, 3, 8, dtype=dtype)
        expected = exact(q, k, v, grad, own, (table, rows), pose.transpose(1, 2))
        for attention, found in results.items():
            leaves = [t.detach().requires_grad_() for t in (q, k, v, features, pose)]
            asking, asked, given, poses = (t[None] for t in (leaves[0] / math.sqrt(8), *leaves[1:3], leaves[4]))
            call = case((11,), (12,), terms=set(), sum_query_poses=not own)._replace(
                **{"q": asking, "k": asked, "v": given, "reads": asking, "pose": poses},
                features=leaves[3][None, :, :, None],
                queries=torch.arange(12)[None] % 11,
                keys=torch.arange(11)[None],
            )
            out = attention(call)[0]
            *got, of_features, of_pose = torch.autograd.grad((out * grad).sum(), leaves)
            of_table = of_features.flatten(2).transpose(1, 2)
            found.append(errors([out, *got, of_table, of_pose.transpose(1, 2)], expected))
    assert mean_ratio(*results.values(), dtype) < 2
