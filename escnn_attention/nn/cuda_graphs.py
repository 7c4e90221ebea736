"""Networks whose passes are recorded as CUDA graphs."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from escnn_attention._checks import check_int
from escnn_attention.geometry.cache import Recording, kept
from escnn_attention.geometry.neighbours import array_of

_Memory = list[tuple[int, torch.dtype, bool]]


class CudaGraphs(nn.Module):
    """Runs a network from CUDA graphs: its forward and backward passes are recorded once and replayed.

    Replaying a graph is a single launch. The operations and their values are the same; only the Python code between
    them does not run.

    One graph is recorded for each combination of shapes, data types and modes (training or evaluation, gradients,
    autocast) when it is met for the second time, so that a smaller last batch costs nothing. A graph of a network on
    point clouds is one of their sizes, too: of the numbers in ``batch``, ``edge_index`` and ``mask``. These are read
    once for each tensor, and the device is waited for. The network runs without a graph

    - on tensors that are not on a CUDA device,
    - in evaluation without ``torch.no_grad()``,
    - for further combinations once there are ``max_graphs`` graphs,
    - while the backward pass of an earlier replay is pending, since a replay overwrites what that pass reads.

    Parameters may be trained in place and loaded with ``load_state_dict``. After the network is moved or converted, or
    ``requires_grad`` changes, graphs are recorded anew. Each graph keeps the memory of a step.

    Args:
        network: a module that takes and returns tensors, GeometricTensors, or lists, tuples and dictionaries of these.
            Hooks, checks of numbers, and Python code run while a graph is recorded, not when it is replayed.
        max_graphs: how many graphs are kept at most.

    Raises:
        ValueError: ``max_graphs`` is not positive.
        RuntimeError: when called, if the network reads numbers from the device, or draws random numbers on the CPU
            (samples of a continuous group that are transformed at random do), which a graph would repeat; in the
            backward pass, if its graph was replayed again in between.

    Example:
        >>> import torch
        >>> from escnn_attention import CudaGraphs
        >>> from escnn_attention.models import HybridNet
        >>> from escnn import gspaces
        >>> network = HybridNet(gspaces.rot2dOnR2(4), 1, 10, widths=(2, 2), convolutions=(1, 1), attention=(0, 1))
        >>> images = torch.randn(2, 1, 16, 16)
        >>> step = CudaGraphs(network).eval()  # shares the parameters; on a CPU it runs the network itself
        >>> torch.equal(step(images), network(images))
        True

    Source: Nvidia's CUDA graphs, as ``torch.cuda.make_graphed_callables`` records them.
    """

    def __init__(self, network: nn.Module, max_graphs: int = 4):
        super().__init__()
        self.network = network
        self.max_graphs = check_int("max_graphs", max_graphs)
        self._met: dict[Any, _Memory] = {}
        self._indices: dict[Any, list[int]] = {}
        self._graphs: dict[Any, tuple[_Memory, _Graph]] = {}

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Run the network, from a graph where there is one."""
        leaves, tree = tree_flatten((inputs, named))
        tensors = _tensors_of(leaves)
        if not tensors or not all(_is_on_cuda(t) for t in tensors) or torch.compiler.is_compiling():
            return self.network(*inputs, **named)
        if torch.is_grad_enabled() and not self.network.training:
            # escnn's convolutions keep filters then, which have gradients once only.
            return self.network(*inputs, **named)
        device, (training, memory) = tensors[0].device.type, _state_of(self.network)
        key = (
            tuple((t.shape, t.dtype, t.device, t.requires_grad) for t in tensors),
            training,
            torch.is_grad_enabled(),
            torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device),
        )
        if key in self._indices:
            graph = self._graph_of(key, memory, leaves, tree)
            return self.network(*inputs, **named) if graph is None else graph(tensors)
        with Recording() as notes:
            output = self.network(*inputs, **named)
        self._indices[key] = notes.indices_among(tensors)
        self._meet(self._with_numbers(key, tensors), memory)
        return output

    def _with_numbers(self, key: Any, tensors: list[Tensor]) -> Any:
        """A key, and the numbers of points and clouds by which networks choose their operations."""
        return key, tuple(kept(_digest, tensors[i]) for i in self._indices[key])

    def _meet(self, key: Any, memory: _Memory) -> None:
        """Note that a combination was met; the oldest of many are forgotten."""
        self._met.pop(key, None)
        self._met[key] = memory
        if len(self._met) > _MOST_MET:
            self._met.pop(next(iter(self._met)))

    def _graph_of(self, key: Any, memory: _Memory, leaves: list[Any], tree: TreeSpec) -> _Graph | None:
        """The graph for these inputs, recorded if need be; None where the network runs without one."""
        indices, key = self._indices[key], self._with_numbers(key, _tensors_of(leaves))
        found = self._graphs.get(key)
        if found is not None and found[0] != memory:
            del self._graphs[key]
            found = None
        if found is None and self._met.get(key) == memory and len(self._graphs) < self.max_graphs:
            found = self._graphs[key] = (memory, _record(self.network, leaves, tree, indices))
        self._meet(key, memory)
        return None if found is None or found[1].is_pending or not found[1].passes.takes(leaves, tree) else found[1]

    def __getstate__(self) -> dict[str, Any]:
        # Graphs belong to this process and to the memory of this copy.
        return self.__dict__ | {"_met": {}, "_indices": {}, "_graphs": {}}


_MOST_MET = 64
"""How many combinations are remembered that were met once."""


def _digest(indices: Tensor) -> bytes:
    """A number of 256 bits for those of a tensor, which are read."""
    return hashlib.blake2b(array_of("input", indices).tobytes(), digest_size=32).digest()


def _state_of(network: nn.Module) -> tuple[tuple[bool, ...], _Memory]:
    """Which modules are training, and where the numbers lie that a graph reads.

    escnn's convolutions make their filters anew whenever they stop training. This runs in every call, and walks the
    modules once.
    """
    training, memory, left = [], [], [network]
    while left:
        module = left.pop()
        training.append(module.training)
        for tensors in (module._parameters, module._buffers):
            memory += [(t.data_ptr(), t.dtype, t.requires_grad) for t in tensors.values() if t is not None]
        left += [child for child in module._modules.values() if child is not None]
    return tuple(training), memory


def _is_on_cuda(t: Tensor) -> bool:
    return t.device.type == "cuda"


def _tensors_of(leaves: list[Any]) -> list[Tensor]:
    """The tensors among the leaves of a tree."""
    return [t for t in leaves if isinstance(t, Tensor)]


def _with_tensors(leaves: list[Any], tensors: Iterable[Tensor]) -> list[Any]:
    """The leaves with other tensors in the places of theirs."""
    left = iter(tensors)
    return [next(left) if isinstance(t, Tensor) else t for t in leaves]


class HostReads(TorchDispatchMode):
    """Notes, by their addresses, tensors on a GPU whose numbers the host reads, for which it waits."""

    _OPERATIONS = (
        *("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero"),
        *("_unique2", "unique_dim", "unique_consecutive", "bincount"),
    )

    def __init__(self) -> None:
        super().__init__()
        self.places: set[int] = set()

    @staticmethod
    def waits_for(t: Tensor) -> bool:
        """Whether the host waits for a device to read a tensor."""
        return _is_on_cuda(t)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        # A mask in brackets is made the numbers of its places.
        masked = name.startswith("index") and any(
            isinstance(i, Tensor) and i.dtype == torch.bool for i in (args[1] if isinstance(args[1], list) else [])
        )
        copied = name == "_to_copy" and (kwargs or {}).get("device") == torch.device("cpu")
        if (masked or copied or name in self._OPERATIONS) and self.waits_for(args[0]):
            self.places.add(args[0].untyped_storage().data_ptr())
        return function(*args, **(kwargs or {}))


class _Passes:
    """The passes of a network as functions of tensors that stay where they are in memory: copies of some inputs.

    Those with the numbers ``indices`` have the same numbers in every replay.
    """

    def __init__(self, network: nn.Module, leaves: list[Any], tree: TreeSpec, indices: Sequence[int] = ()):
        self._network, self._tree = network, tree
        self.inputs = [t.detach().clone().requires_grad_(t.requires_grad) for t in _tensors_of(leaves)]
        self._leaves = _with_tensors(leaves, self.inputs)
        # Leaves of autograd, in the memory of the parameters: a graph must not meet what autograd keeps of these.
        self._own = {n: p.detach().requires_grad_(p.requires_grad) for n, p in network.named_parameters()}
        self.differentiated = [*self.inputs, *self._own.values()]
        self._output: tuple[list[Any], TreeSpec] = tree_flatten(None)
        self.outputs: list[Tensor] = []
        self.grad_outputs: list[Tensor] = []
        self.grads: list[Tensor | None] = []
        self._recording = Recording([t for i, t in enumerate(self.inputs) if i not in indices])
        self._indices = indices

    def fill(self, tensors: Sequence[Tensor]) -> None:
        """Copy other inputs into the places of these."""
        for i, (inside, outside) in enumerate(zip(self.inputs, tensors, strict=True)):
            if i not in self._indices:
                inside.detach().copy_(outside)

    def takes(self, leaves: list[Any], tree: TreeSpec) -> bool:
        """Whether inputs whose tensors have the same shapes are of the same types, and alike otherwise."""
        others = [(a, b) for a, b in zip(self._leaves, leaves, strict=True) if not isinstance(a, Tensor)]
        # Field types are compared field by field, unless they are one object.
        return tree == self._tree and all(type(a) is type(b) and a == b for a, b in others)

    def forward(self) -> None:
        """Run the network on the inputs, which fills ``outputs``."""
        inputs = tree_unflatten(self._leaves, self._tree)
        with self._recording:
            self._output = tree_flatten(functional_call(self._network, self._own, *inputs))
        self.outputs = _tensors_of(self._output[0])
        self.grad_outputs = [torch.empty_like(t) for t in self.outputs if t.requires_grad]

    def output_of(self, tensors: Iterable[Tensor]) -> Any:
        """The output of the network for such tensors."""
        leaves, tree = self._output
        return tree_unflatten(_with_tensors(leaves, tensors), tree)

    def backward(self) -> None:
        """Differentiate the outputs, which fills ``grads`` from ``grad_outputs``."""
        outputs = [t for t in self.outputs if t.requires_grad]
        wanted = [t for t in self.differentiated if t.requires_grad]
        with self._recording:
            found = iter(torch.autograd.grad(outputs, wanted, self.grad_outputs, allow_unused=True))
        self.grads = [next(found) if t.requires_grad else None for t in self.differentiated]

    def warm_up(self) -> None:
        """Run all that runs once only: kernels are compiled, libraries start, tables are made.

        Integers of the network that Python reads get copies on the host, such as the ends of slices of escnn's modules.
        """
        self.forward()
        with HostReads() as reads:
            self.forward()
        integers = {
            name: buffer
            for name, buffer in self._network.named_buffers(remove_duplicate=False)
            if not buffer.is_floating_point() and buffer.untyped_storage().data_ptr() in reads.places
        }
        self._own |= {name: buffer.cpu() for name, buffer in integers.items()}
        if reads.places - {buffer.untyped_storage().data_ptr() for buffer in integers.values()}:
            raise RuntimeError(
                f"network: {type(self._network).__name__} reads numbers of tensors on the host, for which it waits, "
                "and which a CUDA graph cannot hold; needed one whose operations do not depend on values"
            )
        for _ in range(3):
            self.forward()
            if self.have_gradients:
                self.backward()
            # With them goes what autograd keeps, which belongs to the stream of this pass.
            self.outputs, self.grads = [], []

    @property
    def have_gradients(self) -> bool:
        """Whether there is a backward pass, once the forward pass has run."""
        return bool(self.grad_outputs)


def _record(network: nn.Module, leaves: list[Any], tree: TreeSpec, indices: Sequence[int]) -> _Graph:
    """Record the passes of a network."""
    buffers, host = [b.clone() for b in network.buffers()], torch.get_rng_state()
    # Nothing is remembered in inference mode.
    differentiable, device = torch.is_grad_enabled(), _tensors_of(leaves)[0].device
    with torch.inference_mode(False), torch.set_grad_enabled(differentiable), _as_in_a_graph(device):
        passes = _Passes(network, leaves, tree, indices)
        graph = _Graph(passes, list(network.parameters()), *_capture(passes))
    if not torch.equal(host, torch.get_rng_state()):
        raise RuntimeError(
            f"network: {type(network).__name__} draws random numbers on the CPU, which a CUDA graph would repeat; "
            "needed one that draws on the device only"
        )
    with torch.no_grad():  # The warm-up has changed running statistics.
        for buffer, before in zip(network.buffers(), buffers, strict=True):
            buffer.copy_(before)
    return graph


def _capture(passes: _Passes) -> tuple[torch.cuda.CUDAGraph, torch.cuda.CUDAGraph]:
    """Replays of the forward and the backward pass."""
    forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.device(passes.inputs[0].device):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            passes.warm_up()
        torch.cuda.current_stream().wait_stream(stream)
        # Other threads, which load data, may use the device meanwhile.
        with torch.cuda.graph(forward, capture_error_mode="thread_local"):
            passes.forward()
        if passes.have_gradients:
            with torch.cuda.graph(backward, pool=forward.pool(), capture_error_mode="thread_local"):
                passes.backward()
    return forward, backward


def _as_in_a_graph(device: torch.device) -> torch.autocast:
    """Autocast as it is set, without its cache: a graph must convert the weights in every replay."""
    kind = device.type
    dtype = torch.get_autocast_dtype(kind)
    return torch.autocast(kind, dtype, enabled=torch.is_autocast_enabled(kind), cache_enabled=False)


class _Graph:
    """Recorded passes, and the parameters of the network, which get the gradients."""

    def __init__(self, passes: _Passes, parameters: list[nn.Parameter], forward: Any, backward: Any):
        self.passes, self.parameters, self.forward, self.backward = passes, parameters, forward, backward
        self._last: weakref.ref[_Pending] | None = None

    @property
    def is_pending(self) -> bool:
        """Whether the backward pass of the last replay may still come."""
        pending = None if self._last is None else self._last()
        return pending is not None and not pending.done

    def begin(self) -> _Pending:
        """Note that a backward pass is to come. It is given up when nobody holds what is returned."""
        pending = _Pending()
        self._last = weakref.ref(pending)
        return pending

    def is_last(self, pending: _Pending) -> bool:
        """Whether the graph holds what this backward pass reads."""
        return self._last is not None and self._last() is pending

    def __call__(self, tensors: list[Tensor]) -> Any:
        outputs: tuple[Tensor, ...] = _Replay.apply(self, len(tensors), *tensors, *self.parameters)
        return self.passes.output_of(outputs)


class _Pending:
    """A backward pass that has not run yet."""

    done = False


class _Replay(torch.autograd.Function):
    """The passes of a graph on new inputs.

    What leaves the graph is copied, because the next replay overwrites it: outputs, and gradients, which may become a
    parameter's ``grad`` as they are.
    """

    @staticmethod
    def forward(ctx: Any, graph: _Graph, number: int, *leaves: Tensor) -> tuple[Tensor, ...]:
        passes = graph.passes
        passes.fill(leaves[:number])
        graph.forward.replay()
        ctx.graph = graph
        if passes.have_gradients:
            ctx.pending = graph.begin()
        outputs = tuple(t.detach().clone() for t in passes.outputs)
        ctx.mark_non_differentiable(
            *(new for new, t in zip(outputs, passes.outputs, strict=True) if not t.requires_grad)
        )
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        graph, passes = ctx.graph, ctx.graph.passes
        if not graph.is_last(ctx.pending):
            raise RuntimeError(
                "CudaGraphs: got a backward pass after another replay of its graph, which has overwritten what it "
                "reads; run backward before the next forward pass"
            )
        wanted = [g for g, t in zip(grads, passes.outputs, strict=True) if t.requires_grad]
        for inside, outside in zip(passes.grad_outputs, wanted, strict=True):
            inside.copy_(outside)
        graph.backward.replay()
        ctx.pending.done = True
        copies = iter(torch._foreach_mul([g for g in passes.grads if g is not None], 1.0))  # few launches for all
        return (None, None, *(None if g is None else next(copies) for g in passes.grads))
