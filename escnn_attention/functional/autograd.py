"""Registration of compiled loops with autograd and compilers, for all loops alike.

Whoever computes passes itself has to tell autograd its gradients, and compilers that there is one node whose loops are
not to be followed. It gives :class:`Operator` its passes, and the same by operations of PyTorch.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode, is_in_torch_dispatch_mode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from escnn_attention.exporting.mode import exporting, packaging

Arguments = TypeVar("Arguments", bound=tuple)  # type: ignore[type-arg]

# The types of the fields of a named tuple, in the schema of an operator.
_TYPES: dict[Any, str] = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    list[int]: "int[]",
    int: "int",
    bool: "bool",
    float: "float",
    str: "str",
}


_ORDINARY = {Tensor, torch.nn.Parameter, type(None)}


PRECISE = {torch.float64: torch.float64, **dict.fromkeys((torch.float32, torch.bfloat16, torch.float16), torch.float32)}
"""The precision of sums of numbers of some precision: at least single."""


def needs_operators(*tensors: Tensor | None) -> bool:
    """Whether each operation on the tensors has to be one of PyTorch's own.

    An export follows all of them. Derivatives in forward mode and transforms of ``torch.func`` know no derivatives in
    reverse mode of our own: they would take a tangent for zero, or stop.
    """
    if exporting() or torch._C._are_functorch_transforms_active():
        return True
    return forward_ad._current_level >= 0 and is_transformed(*tensors)


def is_followed(*tensors: Tensor | None) -> bool:
    """Whether somebody sees the operations on the tensors, of which a loop that is called directly is none.

    These are compilers, exports, transforms, modes of dispatch, and tensors that stand for something else.
    """
    if torch.compiler.is_compiling() or is_in_torch_dispatch_mode() or needs_operators(*tensors):
        return True
    return not _ORDINARY.issuperset(map(type, tensors))


def is_transformed(*tensors: Tensor | None) -> bool:
    """Whether derivatives in forward mode or transforms of ``torch.func`` follow what is done with the tensors."""
    if torch._C._are_functorch_transforms_active():
        return True
    if forward_ad._current_level < 0:
        return False
    return any(t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors)


def recompute(
    function: Callable[..., Tensor], *arguments: Any, draws: bool = False, keep: Sequence[Any] = ()
) -> Tensor:
    """The result of a function whose intermediate tensors are computed again in the backward pass.

    Args:
        function: what is computed.
        arguments: its arguments.
        draws: whether it draws random numbers, which have to be the same again.
        keep: the operators whose outputs are kept.
    """
    if torch._C._are_functorch_transforms_active():  # which know no such thing
        return function(*arguments)
    # Compilers support PyTorch's own contexts only, which allow one backward pass.
    contexts = create_selective_checkpoint_contexts if torch.compiler.is_compiling() else _keeping
    options: dict[str, Any] = {"context_fn": partial(contexts, [*keep])} if keep else {}
    out: Tensor = checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=draws, **options)
    return out


def _keeping(operators: Sequence[Any]) -> tuple[_Kept, _Kept]:
    found: list[Any] = []
    return _Kept(operators, found, again=False), _Kept(operators, found, again=True)


class _Kept(TorchDispatchMode):
    """Keeps the outputs of some operators; ``again`` gives them in place of computing them, as often as it is entered.

    Args:
        operators: whose outputs.
        found: the outputs, in the order of the calls.
        again: whether they are there.
    """

    def __init__(self, operators: Sequence[Any], found: list[Any], *, again: bool):
        super().__init__()
        self._operators, self._found, self._again = operators, found, again

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __enter__(self) -> Any:
        self._left = iter(self._found)
        return super().__enter__()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function not in self._operators:
            return function(*args, **(kwargs or {}))
        out = next(self._left) if self._again else function(*args, **(kwargs or {}))
        if not self._again:
            self._found.append(tree_map_only(Tensor, Tensor.detach, out))
        return tree_map_only(Tensor, Tensor.detach, out) if self._again else out


@dataclass(frozen=True)
class Passes(Generic[Arguments]):
    """How a loop and its derivatives are computed.

    Attributes:
        forward: gives the output, and numbers that the backward pass needs: an empty tensor where it needs none.
        backward: from the arguments, the gradient of the output, the output (None unless ``keeps_output``), those
            numbers, and for which of the leaves there has to be a gradient, to the gradients of the leaves; None, or
            anything, for those that need none.
        empty: room for what the forward pass gives.
        plainly: the output by operations that autograd looks through, for all that the passes do not know:
            derivatives of the second order, in forward mode, and the transforms of ``torch.func``.
        packaged: the output by an operator of a package, where there is one.
        keeps_output: whether the backward pass reads the output.
        pair: whether these numbers are a second output: the backward pass has their gradient in their place, and
            ``plainly`` gives both.
        backend: its name, for an error.
        instead: the backend that has derivatives of the second order with dropout, for the same error; empty where
            ``plainly`` drops what the passes drop.
    """

    forward: Callable[[Arguments], tuple[Tensor, Tensor]]
    backward: Callable[[Arguments, Tensor, Tensor | None, Tensor, list[bool]], list[Tensor | None]]
    empty: Callable[[Arguments], tuple[Tensor, Tensor]]
    plainly: Callable[[Arguments], Any]
    packaged: Callable[[Arguments], Tensor] | None = None
    keeps_output: bool = False
    pair: bool = False
    backend: str = ""
    instead: str = ""


class Operator(Generic[Arguments]):
    """Passes as an operator of PyTorch: differentiable any number of times, and one node for compilers.

    The arguments are the fields of a named tuple, from whose annotations the schema of the operator follows: first all
    tensors, of which the first few, the *leaves*, have gradients, then numbers. A field ``dropout`` is a probability.

    Args:
        name: of the operator, ``escnn_attention::name``; its backward pass is ``name_backward``.
        kind: the named tuple.
        leaves: how many of the fields have gradients.
        passes: what it does.
    """

    def __init__(self, name: str, kind: type[Arguments], leaves: int, passes: Passes[Arguments]):
        self.name, self.kind, self.leaves, self.passes = name, kind, leaves, passes
        types = [_TYPES[t] for t in typing.get_type_hints(kind).values()]
        self._tensors = sum(t in ("Tensor", "Tensor?") for t in types)
        fields = ", ".join(f"{t} {field}" for t, field in zip(types, kind._fields, strict=True))  # type: ignore[attr-defined]

        def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
            return self.run_forward(kind(*arguments))

        def empty(*arguments: Any) -> tuple[Tensor, Tensor]:
            return passes.empty(kind(*arguments))

        def backward(grad: Tensor, out: Tensor | None, kept: Tensor, needed: list[bool], *rest: Any) -> list[Tensor]:
            grads = self._pass_back(grad, out, kept, needed, kind(*rest))
            alike = [t for t, need in zip(rest[: self.leaves], needed, strict=True) if need]
            # Compilers take the gradients to lie in memory as empty_backward says.
            return [
                t if t.stride() == torch.empty_like(leaf, device="meta").stride() else torch.empty_like(leaf).copy_(t)
                for t, leaf in zip(grads, alike, strict=True)
            ]

        def empty_backward(_: Tensor, __: Tensor | None, ___: Tensor, needed: list[bool], *rest: Any) -> list[Tensor]:
            leaves = zip(rest[: self.leaves], needed, strict=True)
            return [torch.empty_like(t) for t, need in leaves if need]

        self.forward = torch.library.custom_op(
            f"escnn_attention::{name}", forward, mutates_args=(), schema=f"({fields}) -> (Tensor, Tensor)"
        )
        self.backward = torch.library.custom_op(
            f"escnn_attention::{name}_backward",
            backward,
            mutates_args=(),
            schema=f"(Tensor grad, Tensor? out, Tensor kept, bool[] needed, {fields}) -> Tensor[]",
        )
        self.forward.register_fake(empty)
        self.backward.register_fake(empty_backward)
        self.forward.register_autograd(self._differentiate_traced, setup_context=self.save)

    def __call__(self, arguments: Arguments) -> Any:
        """The output of the loop, or both where there are two."""
        tensors = arguments[: self._tensors]
        if needs_operators(*tensors):
            packaged = self.passes.packaged
            return (packaged if packaged is not None and packaging() else self.passes.plainly)(arguments)
        # What PyTorch does for an operator takes as long as a small layer: it is for those who follow it, and for
        # tensors that stand for something else.
        followed = torch.compiler.is_compiling() or is_in_torch_dispatch_mode()
        if followed or not _ORDINARY.issuperset(map(type, tensors)):
            found = self.forward(*arguments)
        elif torch.is_grad_enabled():
            found = _Direct.apply(self, arguments[self._tensors :], *tensors)
        else:
            found = self.run_forward(arguments)
        return found if self.passes.pair else found[0]

    def run_forward(self, arguments: Arguments) -> tuple[Tensor, Tensor]:
        """The forward pass, in the precision of the arguments."""
        # The devices of loops; of which of them a call is takes as long to find out.
        if not torch.is_autocast_enabled("cpu") and not torch.is_autocast_enabled("cuda"):
            return self.passes.forward(arguments)
        with exactly(self._device(arguments)):
            return self.passes.forward(arguments)

    def _pass_back(
        self, grad: Tensor, out: Tensor | None, kept: Tensor, needed: list[bool], arguments: Arguments
    ) -> list[Tensor]:
        """The gradients of the leaves that need one."""
        with exactly(self._device(arguments)):
            grads = self.passes.backward(arguments, grad, out, kept, needed)
        return [t for t, need in zip(grads, needed, strict=True) if need and t is not None]

    def _device(self, arguments: Arguments) -> str:
        return next(t.device.type for t in arguments[: self._tensors] if t is not None)

    def save(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        """Keep what the backward pass needs."""
        tensors, ctx.options = inputs[: self._tensors], inputs[self._tensors :]
        out, kept = output
        ctx.save_for_backward(out if self.passes.keeps_output or self.passes.pair else None, kept, *tensors)
        ctx.set_materialize_grads(False)

    def _differentiate_traced(self, ctx: Any, grad: Tensor | None, second: Tensor | None) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad
        grads = self.differentiate(ctx, grad, second, list(needed[: self.leaves]), self._run_backward)
        return (*grads, *[None] * (len(needed) - self.leaves))

    def _run_backward(
        self, grad: Tensor, out: Tensor | None, kept: Tensor, needed: list[bool], arguments: Arguments
    ) -> list[Tensor]:
        found: list[Tensor] = self.backward(grad, out, kept, needed, *arguments)
        return found

    def differentiate(
        self,
        ctx: Any,
        grad: Tensor | None,
        second: Tensor | None,
        needed: list[bool],
        run: Callable[[Tensor, Tensor | None, Tensor, list[bool], Arguments], list[Tensor]],
    ) -> tuple[Tensor | None, ...]:
        """The gradients of the leaves, by the backward pass or an operator of it."""
        second = second if self.passes.pair else None
        if grad is second is None:
            return (None,) * self.leaves
        out, kept, *tensors = ctx.saved_tensors
        grad = torch.zeros_like(out) if grad is None else grad
        if self.passes.pair:
            kept = torch.zeros_like(kept) if second is None else second
        arguments = self.kind(*tensors, *ctx.options)
        if torch.is_grad_enabled() or is_transformed(grad, second):
            found = self._differentiate_twice((grad, kept), needed, arguments)
        else:
            found = iter(run(grad, out, kept, needed, arguments))
        return tuple(next(found) if need else None for need in needed)

    def _differentiate_twice(
        self, grads: tuple[Tensor, Tensor], needed: list[bool], arguments: Arguments
    ) -> Iterator[Tensor | None]:
        """Gradients that have gradients of their own, by operations that autograd looks through."""
        got, instead = self.passes.backend, self.passes.instead
        if getattr(arguments, "dropout", 0.0) and instead:
            raise RuntimeError(f"backend {got!r} has no second derivatives with dropout; needed backend={instead!r}")
        again = torch.is_grad_enabled()  # or derivatives in forward mode alone
        with torch.enable_grad():
            # Views, since a leaf may have been computed from another, as in a layer that is used twice: the gradient of
            # the other would count this way too.
            leaves = [t.view_as(t) if need else t for t, need in zip(arguments[: self.leaves], needed, strict=True)]
            wanted = [t for t, need in zip(leaves, needed, strict=True) if need]
            found = self.passes.plainly(self.kind(*leaves, *arguments[self.leaves :]))
        given = zip(found if self.passes.pair else (found,), grads, strict=False)
        outs, of_outs = zip(*((t, grad) for t, grad in given if t.requires_grad), strict=True)
        return iter(torch.autograd.grad(outs, wanted, of_outs, create_graph=again, allow_unused=True))


def exactly(device: str) -> AbstractContextManager[Any]:
    """Where products have the precision of what is multiplied, whatever autocast says."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


class _Direct(torch.autograd.Function):
    """The passes of an operator without the operator around them.

    There is no ``setup_context``, which transforms ask for: they never come here, and with it PyTorch would look up the
    signature of the forward pass at every call.
    """

    @staticmethod
    def forward(
        ctx: Any, operator: Operator[Any], options: tuple[Any, ...], *tensors: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        ctx.operator = operator
        arguments = operator.kind(*tensors, *options)
        out, kept = operator.run_forward(arguments)
        operator.save(ctx, arguments, (out, kept))
        if not operator.passes.pair:
            ctx.mark_non_differentiable(kept)
        return out, kept

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, second: Tensor | None) -> tuple[Tensor | None, ...]:
        operator, needed = ctx.operator, list(ctx.needs_input_grad[2 : 2 + ctx.operator.leaves])
        grads = operator.differentiate(ctx, grad, second, needed, operator._pass_back)
        return (None, None, *grads, *[None] * (operator._tensors - operator.leaves))
