"""Networks from CUDA graphs: on a GPU as they are, and here with replays that run the passes again."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from escnn import gspaces, nn
from escnn.nn import FieldType, GeometricTensor
from torch.utils._pytree import tree_flatten

import escnn_attention as ea
from escnn_attention import CudaGraphs, models
from escnn_attention.geometry import cache
from escnn_attention.geometry.cache import constant_tables, kept
from escnn_attention.geometry.neighbours import Neighbourhood
from escnn_attention.models import HybridNet
from escnn_attention.nn import cuda_graphs
from tests.functional.cuda import needs_cuda
from tests.layers import CASES
from tests.test_host_reads import Refused

G = gspaces.rot2dOnR2(4)


def network() -> HybridNet:
    torch.manual_seed(0)
    return HybridNet(
        G, 1, 3, widths=(2, 2), convolutions=(1, 1), attention=(0, 1), num_heads=2, block={"backend": "blocked"}
    )


class Replay:
    """A pass that runs again on the tensors of the graph, and is counted."""

    def __init__(self, run):
        self.run, self.count, self.within = run, 0, nullcontext()

    def replay(self):
        self.count += 1
        with torch.inference_mode(False), torch.enable_grad(), self.within:
            self.run()


@pytest.fixture
def recordings(monkeypatch):
    """The graphs that are recorded, on a CPU that is taken for a GPU."""
    made = []

    def capture(passes):
        passes.warm_up()
        passes.forward()
        made.append((Replay(passes.forward), Replay(passes.backward)))
        return made[-1]

    monkeypatch.setattr(cuda_graphs, "_is_on_cuda", lambda t: True)
    monkeypatch.setattr(cuda_graphs, "_capture", capture)
    # What lies on the host in truth cannot be told from the rest here.
    monkeypatch.setattr(cuda_graphs.HostReads, "waits_for", staticmethod(lambda t: False))
    return made


def train(module: torch.nn.Module, of: torch.nn.Module, device: str = "cpu", steps: int = 4) -> list[torch.Tensor]:
    """The losses of some steps, then the parameters and the buffers of a network, which a module runs."""
    optimizer = torch.optim.SGD(of.parameters(), lr=0.1)
    generator, losses = torch.Generator().manual_seed(1), []
    for step in range(steps):
        x = torch.randn(3 if step < steps - 1 else 2, 1, 12, 12, generator=generator).to(device)
        optimizer.zero_grad()
        loss = module(x).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *of.state_dict().values()]


def test_a_training_is_the_same(recordings):
    plain, graphed = network(), network()
    expected = train(plain, plain)
    for a, b in zip(train(CudaGraphs(graphed), graphed), expected, strict=True):
        assert torch.equal(a, b)
    (forward, backward), *others = recordings
    assert not others  # The first batch runs as it is, and so does the last one, which is smaller.
    assert forward.count == backward.count == 2


def test_gradients_add_up_over_replays(recordings):
    plain, graphed = network(), network()
    step = CudaGraphs(graphed)
    x = torch.randn(3, 4, 1, 12, 12)
    for part in x:
        plain(part).sum().backward()
        step(part).sum().backward()
    for a, b in zip(plain.parameters(), graphed.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    assert recordings[0][1].count == 2


def test_fields_and_gradients_of_inputs(recordings):
    regular = FieldType(G, 2 * [G.regular_repr])
    layer = ea.GroupSelfAttention(regular, regular, num_heads=2, kernel_size=3, backend="blocked")
    step = CudaGraphs(layer)
    for _ in range(3):
        x = torch.randn(1, 8, 5, 5, requires_grad=True)
        (expected,) = torch.autograd.grad(layer(regular(x)).tensor.square().sum(), x)
        out = step(regular(x))
        assert isinstance(out, GeometricTensor)
        assert out.type == layer.out_type
        out.tensor.square().sum().backward()
        torch.testing.assert_close(x.grad, expected)
    assert len(recordings) == 1


def test_points_keep_their_coordinates(recordings):
    space = gspaces.rot2dOnR2(4)
    scalars = FieldType(space, 2 * [space.regular_repr])
    step = CudaGraphs(nn.ReLU(scalars))
    for _ in range(2):
        x = GeometricTensor(torch.randn(5, 8), scalars, torch.randn(5, 2))
        out = step(x)
    assert len(recordings) == 1
    assert torch.equal(out.tensor, x.tensor.relu())
    assert torch.equal(out.coords, x.coords)


class Pair(torch.nn.Module):
    def forward(self, pair, scale):
        return {"sum": scale * (pair[0] + pair[1]), "none": None}


def test_trees_of_tensors(recordings):
    step = CudaGraphs(Pair())
    for scale in (2, 2, 3):
        a, b = torch.randn(2, 4, requires_grad=True)
        out = step((a, b), scale)
        assert out["none"] is None
        assert torch.equal(out["sum"], scale * (a + b))
    assert len(recordings) == 1
    assert recordings[0][0].count == 1  # the third has another number


def test_outputs_are_not_overwritten(recordings):
    step = CudaGraphs(network().eval())
    with torch.no_grad():
        first, second, third = (step(torch.full((1, 1, 12, 12), float(i))) for i in range(3))
    assert recordings[0][0].count == 2
    assert not torch.equal(second, third)
    assert torch.equal(third, step.network(torch.full((1, 1, 12, 12), 2.0)))
    assert first.shape == (1, 3)


def test_what_a_pending_backward_pass_reads_is_not_overwritten(recordings):
    plain, graphed = network(), network()
    step = CudaGraphs(graphed)
    x, y, z = torch.randn(3, 2, 1, 12, 12)
    step(x).sum().backward()
    plain(x).sum().backward()
    (step(y) * step(z)).sum().backward()  # the second of both runs without the graph
    (plain(y) * plain(z)).sum().backward()
    assert recordings[0][0].count == 1
    for a, b in zip(plain.parameters(), graphed.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_an_output_that_nobody_holds_frees_the_graph(recordings):
    step = CudaGraphs(network())
    for _ in range(4):
        step(torch.randn(2, 1, 12, 12))
    assert recordings[0][0].count == 3


def test_a_late_backward_pass_is_refused(recordings):
    step = CudaGraphs(network())
    x = torch.randn(2, 1, 12, 12)
    step(x)
    late = step(x).sum()
    late.backward(retain_graph=True)
    step(x).sum().backward()
    with pytest.raises(RuntimeError, match="after another replay"):
        late.backward()


def test_a_mode_has_its_graph(recordings):
    step, x = CudaGraphs(network()), torch.randn(2, 1, 12, 12)
    for _ in range(2):
        for _ in range(3):
            step.train()(x).sum().backward()
        step.eval()
        with torch.no_grad():
            step.network.head.bias.add_(1.0)
            outputs = [step(x) for _ in range(3)]
        for out in outputs:
            torch.testing.assert_close(out, step.network(x))
    assert recordings[0][1].count == 5


def test_running_statistics_have_not_seen_the_warm_up(recordings):
    plain, graphed = network(), network()
    step = CudaGraphs(graphed)
    x = torch.randn(2, 1, 12, 12)
    step(x), step(x)
    plain(x), plain(x)
    for a, b in zip(plain.buffers(), graphed.buffers(), strict=True):
        assert torch.equal(a, b)
    assert len(recordings) == 1


@pytest.mark.parametrize("change", ["double", "freeze", "swap", "replace"])
@pytest.mark.slow
def test_a_change_of_the_network_is_recorded_anew(recordings, change):
    graphed = network()
    step, x = CudaGraphs(graphed), torch.randn(2, 1, 12, 12)
    for _ in range(2):
        step(x)
    if change == "double":
        graphed.double()
        x = x.double()
    elif change == "freeze":
        next(graphed.parameters()).requires_grad_(False)
    elif change == "replace":
        graphed.head = torch.nn.Linear(graphed.head.in_features, 5)
    else:
        weight = next(graphed.parameters())
        weight.data = torch.randn_like(weight)
    for _ in range(2):
        out = step(x)
    assert len(recordings) == 2
    torch.testing.assert_close(out, graphed(x))


def test_no_more_graphs_than_asked_for(recordings):
    step = CudaGraphs(network(), max_graphs=1)
    for size in (2, 2, 3, 3, 3, 2):
        step(torch.randn(size, 1, 12, 12)).sum().backward()
    assert len(recordings) == 1
    assert recordings[0][0].count == 2


def test_random_numbers_of_the_cpu_are_refused(recordings):
    space = gspaces.rot2dOnR2(-1)
    scalars = FieldType(space, [space.trivial_repr])
    layer = ea.LiftingSelfAttention(
        scalars, scalars, kernel_size=3, samples=ea.Samples(4, turn="random"), backend="blocked"
    )
    step = CudaGraphs(layer)
    x = scalars(torch.randn(1, 1, 5, 5))
    step(x)
    with pytest.raises(RuntimeError, match=r"network: .*the CPU"):
        step(x)


# Of the others numbers are drawn on the CPU.
DRAWN = ("LieTransformer, lifts", "LieTransformer, nearest lifts")
DRAWN += ("PointTransformerBlock, parts", "PointTransformerBlock, condition")


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.on_grids and name not in DRAWN])
def test_clouds_that_move(name, recordings, monkeypatch):
    """Replays find the neighbours of each batch, and read nothing on the host."""
    monkeypatch.setattr(Neighbourhood, "_by_tree_on", lambda self, x: False)
    case, module = CASES[name], CASES[name].drawn().train()
    for part in module.modules():
        if getattr(part, "backend", None) == "auto":
            part.backend = "neighbours"
    inputs, step = case.inputs(module), CudaGraphs(module)
    case = replace(case, arguments=case.named(inputs[0]))
    reads, outputs = Refused(), []
    for _ in range(4):
        moved = [x + 0.3 * torch.randn_like(x) for x in inputs]
        moved[1] = moved[1] / moved[1].norm(dim=1, keepdim=True) if case.unit else moved[1]
        moved, found = [x.requires_grad_() for x in moved], []
        for run in (module, step):
            out = case.output(module, *moved, run=run)
            unknowns = [*moved, *module.parameters()]
            found.append([out, *torch.autograd.grad(out.square().sum(), unknowns, materialize_grads=True)])
        torch.testing.assert_close(*found, atol=1e-10, rtol=1e-10)
        outputs.append(out.detach())
        for replay in recordings[0] if recordings else ():
            replay.within = reads
    ((forward, backward),) = recordings
    assert forward.count == backward.count == 3
    assert not reads.places
    assert not torch.allclose(outputs[2], outputs[3])


def clouds(sizes: list[int]) -> dict[str, torch.Tensor]:
    return {"coords": torch.randn(sum(sizes), 2), "batch": torch.repeat_interleave(torch.tensor(sizes))}


def test_sizes_of_clouds_have_their_graphs(recordings):
    torch.manual_seed(0)
    network = models.PointTransformer(G, 1, 3, fields=4, num_blocks=1, num_heads=2)
    step = CudaGraphs(network)
    for sizes in ([2, 5], [3, 4], [3, 4], [2, 5], [3, 4], [5, 2]):
        x = torch.randn(7, 1)
        of_clouds = clouds(sizes)
        torch.testing.assert_close(step(x, **of_clouds), network(x, **of_clouds))
    assert [forward.count for forward, _ in recordings] == [2, 1]


def test_clouds_in_inference_mode(reads):
    step, x = (
        CudaGraphs(models.PointTransformer(G, 1, 3, fields=4, num_blocks=1, num_heads=2)).eval(),
        torch.randn(7, 1),
    )
    for _ in range(3):
        of_clouds = clouds([3, 4])
        with torch.inference_mode():
            torch.testing.assert_close(step(x, **of_clouds), step.network(x, **of_clouds))
    assert len(step._graphs) == 1


def test_no_check_runs_in_a_graph(recordings):
    step = CudaGraphs(models.PointTransformer(G, 1, 3, fields=4, num_blocks=1, num_heads=2))
    of_clouds, x = clouds([3, 4]), torch.randn(7, 1)
    nowhere = of_clouds | {"coords": of_clouds["coords"] / 0}
    with pytest.raises(ValueError, match=r"coords: .*finite"):
        step(x, **nowhere)
    for _ in range(2):
        step(x, **of_clouds)
    assert step(x, **nowhere).isnan().all()


class Kept(torch.nn.Module):
    def forward(self, x, index):
        return x + kept(torch.square, index) + table(3, x.device)


@constant_tables
def table(number, device):
    return torch.arange(number, device=device)


def test_a_graph_holds_what_it_reads(recordings, monkeypatch):
    monkeypatch.setattr(cache, "_tables", OrderedDict())
    monkeypatch.setattr(cache, "_of_tensors", {})
    step, index = CudaGraphs(Kept()), torch.arange(3)
    for _ in range(2):
        step(torch.randn(3), index)
    ((_, graph),) = step._graphs.values()
    read = {t.data_ptr() for _, t in graph.passes._recording.found}
    assert table(3, torch.device("cpu")).data_ptr() in read
    assert kept(torch.square, graph.passes.inputs[1]).data_ptr() in read
    assert kept(torch.square, index).data_ptr() not in read  # as of a tensor that may be gone


def test_integers_that_choose_nothing_change(recordings):
    class Embedding(torch.nn.Module):
        def forward(self, x, index):
            return x.index_select(0, index)

    step, x = CudaGraphs(Embedding()), torch.randn(5, 2)
    for _ in range(4):
        index = torch.randint(5, (3,))
        assert torch.equal(step(x, index), x[index])
    assert recordings[0][0].count == 3


@pytest.fixture
def reads(monkeypatch, recordings):
    """All reads are from a device."""
    monkeypatch.setattr(cuda_graphs.HostReads, "waits_for", staticmethod(lambda t: True))


def test_integers_that_python_reads_are_on_the_host(reads):
    fields = FieldType(G, 4 * [G.regular_repr])
    norm = nn.NormBatchNorm(FieldType(G, 3 * [G.irrep(1)]))
    pool = nn.SequentialModule(nn.InnerBatchNorm(fields), nn.GroupPooling(fields))
    for module, x in [(pool, fields(torch.randn(2, 16, 3, 3))), (norm, norm.in_type(torch.randn(2, 6, 3, 3)))]:
        step = CudaGraphs(module)
        step(x)
        passes = cuda_graphs._Passes(module, *tree_flatten((x,)))
        passes.warm_up()
        with cuda_graphs.HostReads() as found:
            passes.forward()
        on_host = {t.untyped_storage().data_ptr() for t in passes._own.values()}
        assert found.places
        assert found.places <= on_host


class Reader(torch.nn.Module):
    def forward(self, x):
        return x * x.max().item()


class Selecting(torch.nn.Module):
    def forward(self, x):
        return x[x > 0]


@pytest.mark.parametrize("module", [Reader(), Selecting()])
def test_numbers_that_python_reads_are_refused(reads, module):
    step = CudaGraphs(module)
    step(torch.randn(5))
    with pytest.raises(RuntimeError, match=f"network: {type(module).__name__} reads numbers of tensors on the host"):
        step(torch.randn(5))


def test_on_a_cpu_it_is_the_network():
    step = CudaGraphs(network().eval())
    x = torch.randn(2, 1, 12, 12)
    for _ in range(3):
        assert torch.equal(step(x), step.network(x))
    assert not step._graphs


def test_copies_have_no_graphs(recordings):
    step, x = CudaGraphs(network()), torch.randn(2, 1, 12, 12)
    for _ in range(2):
        step(x).sum().backward()
    for copied in (copy.deepcopy(step), pickle.loads(pickle.dumps(step))):
        assert step._graphs
        assert not copied._graphs
        torch.testing.assert_close(copied(x), step(x))


@pytest.mark.parametrize("number", [0, -1])
def test_max_graphs_is_checked(number):
    with pytest.raises(ValueError, match=f"max_graphs: got {number}, needed at least 1"):
        CudaGraphs(network(), max_graphs=number)


def test_other_types_of_one_size_run_the_network(recordings):
    a, b = FieldType(G, [G.regular_repr]), FieldType(G, 4 * [G.trivial_repr])
    step = CudaGraphs(nn.IdentityModule(a))
    for _ in range(2):
        step(a(torch.randn(1, 4, 3, 3)))
    with pytest.raises(AssertionError):
        step(b(torch.randn(1, 4, 3, 3)))
    assert step(FieldType(G, [G.regular_repr])(torch.randn(1, 4, 3, 3))).type == a


@needs_cuda
@pytest.mark.parametrize("name", ["GSANet", "HybridNet", "VisionTransformer"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_steps_on_a_gpu_are_the_same(name, dtype):
    torch.manual_seed(0)
    plain = {
        "GSANet": lambda: models.GSANet.rotmnist(G),
        "HybridNet": lambda: HybridNet(G, 1, 10, widths=(2, 2), convolutions=(1, 1), attention=(1, 1), num_heads=2),
        "VisionTransformer": lambda: models.VisionTransformer(
            G, 1, 10, image_size=28, patch_size=4, fields=8, num_heads=2, num_blocks=(1, 1)
        ),
    }[name]().cuda()
    for module in plain.modules():
        if hasattr(module, "p"):
            module.p = 0.0  # dropout
    graphed = copy.deepcopy(plain)
    step, tolerance = CudaGraphs(graphed), 1e-4 if dtype is None else 5e-2
    for _ in range(4):
        x = torch.randn(3, 1, 28, 28, device="cuda")
        found = []
        for run, network in ((plain, plain), (step, graphed)):
            network.zero_grad()
            with torch.autocast("cuda", dtype or torch.float16, enabled=dtype is not None):
                out = run(x)
            out.float().square().sum().backward()
            grads = torch.cat([p.grad.flatten() for p in network.parameters() if p.grad is not None])
            found.append((out.detach().float(), grads, [b.float() for b in network.buffers()]))
        (out, grads, buffers), (out_, grads_, buffers_) = found
        assert (out - out_).norm() <= tolerance * out.norm()
        assert (grads - grads_).norm() <= tolerance * grads.norm()
        torch.testing.assert_close(buffers, buffers_, atol=tolerance, rtol=tolerance)
    assert len(step._graphs) == 1
