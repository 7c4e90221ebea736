"""What is worked out once for a whole network."""

import gc
from functools import lru_cache

import numpy as np
import pytest
import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.func import grad

from escnn_attention.geometry import cache
from escnn_attention.geometry.cache import cached, constant_result, constant_tables, kept, shared_geometry
from escnn_attention.geometry.neighbours import Neighbourhood


def test_what_is_shared_is_found_once():
    made = []

    def make(a, b, c):
        made.append((a, b, c))
        return len(made)

    x, y = torch.zeros(3), torch.zeros(3)
    assert [cached(make, x, None, 1), cached(make, x, None, 1)] == [1, 2]
    with shared_geometry():
        assert [cached(make, x, None, 1), cached(make, x, None, 1), cached(make, y, None, 1)] == [3, 3, 4]
        assert [cached(make, x, None, 2), cached(make, x, None, 1)] == [5, 3]
        with shared_geometry():
            assert cached(make, x, None, 1) == 3
        # The identity of a tensor that is gone is not taken for another.
        first = cached(make, torch.zeros(3), None, 1)
        assert all(cached(make, torch.zeros(3), None, 1) > first for _ in range(20))
        points = torch.randn(6, 2)
        rule = Neighbourhood(num_neighbours=2)
        found = cached(Neighbourhood.__call__, rule, points, None)
        assert cached(Neighbourhood.__call__, Neighbourhood(num_neighbours=2), points, None) is found
        assert found.chunks(100) is found.chunks(100)
        assert found.chunks(2) is not found.chunks(100)
    assert cached(make, x, None, 1) == len(made)
    with pytest.raises(RuntimeError, match="stop"), shared_geometry():
        raise RuntimeError("stop")
    assert cached(make, x, None, 1) == len(made)


def squares(number: int) -> tuple[torch.Tensor, int]:
    return torch.arange(number).double().square(), number


def export(find) -> torch.Tensor:
    class Times(torch.nn.Module):
        def forward(self, x):
            return x * find(3)[0]

    x = torch.ones(3, dtype=torch.float64)
    return torch.export.export(Times(), (x,)).module()(x)


def fake(find) -> None:
    with FakeTensorMode():
        assert isinstance(find(3)[0] + torch.ones(3), FakeTensor)


def within(context):
    def ask(find) -> None:
        with context:
            find(3)

    return ask


MODES = {
    "inference": within(torch.inference_mode()),
    "default device": within(torch.device("meta")),
    "export": export,
    "fake": fake,
    "grad": lambda find: torch.func.grad(lambda x: (x * find(3)[0]).sum())(torch.ones(3)),
}


def is_plain(table: torch.Tensor) -> bool:
    """Whether the table has its numbers, and can be saved for a backward pass."""
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    try:
        (x * table).sum().backward()
        return table.tolist() == x.grad.tolist() == [0, 1, 4] and type(table) is torch.Tensor
    except (AssertionError, RuntimeError):
        return False


@pytest.mark.parametrize("mode", MODES)
def test_tables_are_plain_whoever_asks_first(mode):
    find = constant_tables(squares)
    MODES[mode](find)
    table, number = find(3)
    assert is_plain(table)
    assert number == 3
    assert find(3)[0] is table
    assert find(4)[0] is not table


@pytest.mark.parametrize("mode", ["inference", "default device", "fake"])
def test_a_table_that_was_made_in_a_mode_is_noticed(mode):
    find = lru_cache(squares)
    MODES[mode](find)
    assert not is_plain(find(3)[0])


def test_constant_results_are_marked_as_torch_marks_them():
    def one():
        return 1

    def other():
        return 1

    assert vars(one) == {}
    assert constant_result(one) is one
    assert vars(one) == vars(torch.compiler.assume_constant_result(other)) != {}


def test_compilers_do_not_look_inside_what_is_shared():
    seen = []

    def see(graph, inputs):
        seen.append([node.name for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    def function(x):
        return (x + 1) * cached(torch.tanh, x)

    x = torch.eye(3)
    with shared_geometry():
        assert torch.equal(torch.compile(function, backend=see)(x), function(x))
    assert seen == [["add"], ["mul"]]


def test_errors_of_tables_reach_who_asks():
    find = constant_tables(squares)
    for _ in range(2):
        with pytest.raises(TypeError):
            find("three")


def test_tables_of_many_sizes_take_bounded_memory(monkeypatch):
    made = []
    numbers = constant_tables(lambda size: made.append(size) or (torch.zeros(size), size))
    monkeypatch.setattr(cache, "_tables", cache.OrderedDict())
    monkeypatch.setattr(cache, "_MOST_BYTES", 4 * 1000)
    for size in range(100, 160):
        assert numbers(size)[0].numel() == size
        assert numbers(100)[1] == 100  # asked for again and again, and kept
        assert sum(size for _, size in cache._tables.values()) <= 4 * 1000
    assert made == list(range(100, 160))
    assert numbers(159)[0] is numbers(159)[0]
    numbers(120)
    assert made[-1] == 120
    # What is larger than all that may be kept is kept until something else is asked for.
    assert numbers(2000)[0] is numbers(2000)[0]


class Counter:
    """How often something is worked out of a tensor."""

    def __init__(self):
        self.times = 0

    def __call__(self, x, factor=1):
        self.times += 1
        return factor * x.sum().item()


def test_what_is_kept_is_found_once_for_each_tensor_and_number():
    total, x = Counter(), torch.ones(3)
    assert [kept(total, x), kept(total, x), kept(total, x, 2), kept(total, x.clone())] == [3, 3, 6, 3]
    assert total.times == 3


CHANGES = {
    "in place": lambda x: x.add_(1),
    "by a view": lambda x: x[1:].fill_(5),
    "in place without gradients": lambda x: torch.no_grad()(x.detach().zero_)(),
    "of its memory": lambda x: x.set_(torch.full((3,), 7.0)),
    "of its size": lambda x: x.resize_(2),
    "by an operation": lambda x: torch.mul(x, 2, out=x),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_tensor_that_has_changed_is_noticed(change):
    total, x = Counter(), torch.ones(3)
    before = kept(total, x)
    CHANGES[change](x)
    assert kept(total, x) == x.sum().item() != before
    assert kept(total, x) == x.sum().item()
    assert total.times == 2


def test_memory_that_others_may_write_is_read_every_time():
    array = np.ones(3)
    x, y = torch.from_numpy(array), torch.ones(3)
    shared, total = y.numpy(), Counter()
    assert kept(total, x) == kept(total, y) == 3
    array[0] = shared[0] = 5
    assert kept(total, x) == kept(total, y) == 7


def test_what_is_kept_lives_as_long_as_its_tensor():
    total, x, found = Counter(), torch.ones(3), len(cache._of_tensors)
    kept(total, x)
    assert len(cache._of_tensors) == found + 1
    del x
    gc.collect()
    assert len(cache._of_tensors) == found
    some = [torch.ones(3) for _ in range(2 * cache._MOST_KEPT)]
    assert all(kept(total, x) == 3 for x in some)
    assert len(cache._of_tensors) <= cache._MOST_KEPT


def test_another_thread_may_forget_meanwhile(monkeypatch):
    class Changing(dict):
        def __iter__(self):
            raise RuntimeError("dictionary changed size during iteration")

    monkeypatch.setattr(cache, "_of_tensors", Changing())
    total = Counter()
    some = [torch.ones(3) for _ in range(2 * cache._MOST_KEPT)]
    assert all(kept(total, x) == 3 for x in some)


def test_what_inference_makes_is_not_kept():
    x = torch.arange(3.0)
    for make in (torch.sin, torch.cos):
        with torch.inference_mode():
            kept(make, x)
            kept(make, torch.ones(3))
        assert not kept(make, x).is_inference()


def test_what_a_transform_makes_is_not_kept():
    x = torch.ones(3)

    def function(y):
        return (y * kept(torch.exp, x)).sum()

    grad(function)(x)
    assert not is_functorch_wrapped_tensor(kept(torch.exp, x))


def test_stand_ins_of_a_mode_are_not_kept():
    x = torch.ones(3)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert isinstance(kept(torch.exp, x), FakeTensor)
    assert not isinstance(kept(torch.exp, x), FakeTensor)


def test_compilers_do_not_look_inside_what_is_kept():
    total, x = Counter(), torch.eye(3)

    def function(x):
        return (x + 1) * kept(total, x)

    run = torch.compile(function, backend="eager")
    assert torch.equal(run(x), 3 * (x + 1))
    assert torch.equal(run(x), 3 * (x + 1))
    assert total.times == 1
