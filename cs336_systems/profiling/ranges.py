"""Names on the time line: which module, direction, phase and attention stage every launch belongs to.

A range is emitted twice, as NVTX for nsys and as ``record_function`` for torch.profiler, so that one annotation serves
both. Nothing is attached unless it is asked for, so a step that is not profiled runs no line of this file:

    with annotate(step.model):                                        # modules and attention's stages, both directions
        time_phases(ranged_phases(step.phases(...), warmup=5), ...)   # phases, and "warmup" or "step" around them

Forward ranges carry the module's qualified name (``layers.0.attn``), backward ones ``layers.0.attn (backward)``.

**Backward.** Autograd runs a graph's nodes in the reverse of the order in which they were made. Each ranged call puts
one marker node before its first operation and one behind its last; run backwards, the second opens the range and the
first closes it, on whatever thread autograd uses, and ranges nest as they did in forward. The markers are tied to each
other and to the outputs, not to the inputs: a module whose inputs need no gradient, such as the embedding, is ranged
like any other (torch's own backward hooks would close it before its work begins). They launch nothing, copy nothing and
save nothing. Outputs pass through a marker as aliases: code that modifies a module's output in place does not work
under ``annotate``, as it does not under torch's backward hooks.

**Exceptions.** A step that raises leaves its ranges open, and what the process records afterwards lies inside them:
profile in a process of its own, as the sweep does.

**Blocks with a hand-written backward** call none of the modules that they hold. Their operations between matmuls are
ranged instead, by name (``layers.0.attention``, ``layers.0.swiglu (backward)``); the rest of a block is its matmuls.
What backward recomputes has forward's name, inside the block's backward. A head that takes its gradients in forward
shows them there.

**Compiled modules** are ranged as a whole, forward and backward, from outside the compiled code; their insides are not:
a range would break the graph, and the fused kernels in there belong to no single module. Where a compiled function
calls modules, their ranges are left out of it.
"""

import functools
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from typing import Any

import nvtx
import torch
from torch import Tensor, nn
from torch.autograd.profiler import record_function
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.hooks import RemovableHandle

from cs336_systems.blocks import BlockOps, WrittenOutBlock
from cs336_systems.blocks.ops import OPERATIONS, PRODUCTS
from cs336_systems.config import phase_of
from cs336_systems.model import ModelOps

BACKWARD = " (backward)"
"""Suffix of the ranges that backward opens."""

STEP, WARMUP = "step", "warmup"
"""Ranges around the phases of a recorded step and of a warm-up step."""

SCORES, SOFTMAX, VALUES = "scores matmul", "softmax", "values matmul"
"""Ranges of attention's stages, inside the module's."""


class _Range:
    """A range on the thread that makes it, which opens it."""

    def __init__(self, name: str) -> None:
        self._record = record_function(name) if torch.autograd._profiler_enabled() else None
        nvtx.push_range(name)
        if self._record is not None:
            self._record.__enter__()

    def close(self) -> None:
        """Close it; those inside it are closed already."""
        if self._record is not None:
            self._record.__exit__(None, None, None)
        nvtx.pop_range()


@contextmanager
def ranged(name: str) -> Iterator[None]:
    """A range of this name around what is inside, for nsys and for torch.profiler."""
    with closing(_Range(name)):
        yield


@functools.cache
def _anchor(device: torch.device) -> tuple[Tensor, Tensor]:
    """An empty leaf on the device, which markers hang on, and an empty gradient for it."""
    return torch.empty(0, device=device, requires_grad=True), torch.empty(0, device=device)


class _Call:
    """One ranged call, from its forward, which begins as it is made, to its backward."""

    backward: _Range

    def __init__(self, name: str, device: torch.device) -> None:
        self.name = name
        self.marker: Tensor | None = None
        if torch.is_grad_enabled():
            anchor, self.anchor_gradient = _anchor(device)
            self.marker = _First.apply(anchor, self)
        self.forward = _Range(name)

    def end(self, output: Any) -> Any:
        """After the last operation; returns the output, as the aliases that are to be used instead."""
        self.forward.close()
        marker, self.marker = self.marker, None
        leaves, structure = tree_flatten(output)
        wrapped = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if marker is None or not wrapped:
            return output
        for i, alias in zip(wrapped, _Last.apply(marker, self, *(leaves[i] for i in wrapped)), strict=True):
            leaves[i] = alias
        return tree_unflatten(leaves, structure)


class _First(torch.autograd.Function):
    """Made before a call's first operation, so it runs after the last one of its backward.

    Its tensor is empty, but on the call's device: autograd chooses the thread of a node by the device of its gradient.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, call: _Call) -> Tensor:
        ctx.call = call
        return anchor.view_as(anchor)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[None, None]:
        ctx.call.backward.close()
        return None, None


class _Last(torch.autograd.Function):
    """Made after a call's last operation, so it runs before the first one of its backward."""

    @staticmethod
    def forward(ctx: Any, marker: Tensor, call: _Call, *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        call = ctx.call
        call.backward = _Range(call.name + BACKWARD)
        return call.anchor_gradient, None, *gradients


def ranged_call(name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``function(*args, **kwargs)`` in a range of this name, and its backward in one with ``BACKWARD`` appended.

    The first tensor among ``args`` says on which device backward will run.
    """
    call = _Call(name, next((arg.device for arg in args if isinstance(arg, Tensor)), torch.device("cpu")))
    return call.end(function(*args, **kwargs))


def annotate(model: nn.Module, kind: type[nn.Module] = nn.Module) -> ExitStack:
    """Range every call of every module of ``model``, the stages of its attention, and their backward.

    It lasts until the returned stack is closed. The model itself is named by its class; a compiled module is ranged as
    a whole. A model that holds a compiled one must be annotated after it was compiled.

    Args:
        kind: range modules of this class alone, which costs the host less.
    """
    annotation = ExitStack()
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    compiled: list[str] = []
    for path, module in model.named_modules():
        if any(path.startswith(f"{outer}.") or not outer for outer in compiled):
            continue
        name = path or type(model).__name__
        implementation = module._compiled_call_impl
        if implementation is not None:
            compiled.append(path)
        if not issubclass(type(module), kind):
            continue
        if implementation is not None:  # hooks would be compiled into it
            module._compiled_call_impl = functools.partial(ranged_call, name, implementation)
            annotation.callback(setattr, module, "_compiled_call_impl", implementation)
            continue
        for handle in _range_calls(module, name, device):
            annotation.callback(handle.remove)
        if isinstance(module, WrittenOutBlock) and kind is nn.Module:
            annotation.callback(setattr, module, "block_ops", module.block_ops)
            module.block_ops = ranged_block_ops(module.block_ops, name)
        if isinstance(ops := getattr(module, "ops", None), ModelOps):
            module.ops = ranged_ops(ops)
            annotation.callback(setattr, module, "ops", ops)
    return annotation


def _range_calls(module: nn.Module, name: str, device: torch.device) -> Sequence[RemovableHandle]:
    calls: list[_Call] = []

    def before(module: nn.Module, args: tuple) -> None:
        if not torch.compiler.is_compiling():
            calls.append(_Call(name, device))

    def after(module: nn.Module, args: tuple, output: Any) -> Any:
        return None if torch.compiler.is_compiling() else calls.pop().end(output)

    return module.register_forward_pre_hook(before), module.register_forward_hook(after)


class _Stages(TorchFunctionMode):
    """Ranges attention's two matmuls and its softmax as they are called; everything else passes through."""

    _MATMULS = (torch.matmul, torch.bmm, Tensor.matmul, Tensor.bmm, Tensor.__matmul__)
    _SOFTMAXES = (torch.softmax, Tensor.softmax, torch.nn.functional.softmax)

    def __init__(self) -> None:
        super().__init__()
        self.product = SCORES

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func in self._MATMULS:
            return ranged_call(self.product, func, *args, **kwargs)
        if func in self._SOFTMAXES:
            self.product = VALUES
            return ranged_call(SOFTMAX, func, *args, **kwargs)
        return func(*args, **kwargs)


def ranged_ops(ops: ModelOps) -> ModelOps:
    """The same operations, with the stages of eager attention ranged: scores matmul, softmax, values matmul.

    The attention that runs is the one in ``ops``, call by call, so its numbers are the same bits. A fused attention has
    no such calls to range; the range of its module is all there is. Inside a compiled module this is ``ops.attention``.
    """

    def attention(*args: Tensor, **kwargs: Any) -> Tensor:
        if torch.compiler.is_compiling():
            return ops.attention(*args, **kwargs)
        with _Stages():
            return ops.attention(*args, **kwargs)

    return replace(ops, attention=attention)


def ranged_block_ops(ops: BlockOps, block: str) -> BlockOps:
    """The same operations of a written-out block, each in a range of its name behind the block's."""

    def wrap(operation: str) -> Callable[..., Any]:
        function, stage = getattr(ops, operation), re.sub("(_forward|_backward|_product)?_?$", "", operation)

        def run(*args: Any, **kwargs: Any) -> Any:
            back = operation.endswith(("_backward", "_backward_")) or kwargs.get("inverse", False)
            with ranged(f"{block}.{stage}{BACKWARD if back else ''}"):
                return function(*args, **kwargs)

        return run

    ranged_operations: dict[str, Any] = {name: wrap(name) for name in OPERATIONS - PRODUCTS}
    return replace(ops, **ranged_operations)


def ranged_phases(phases: Mapping[str, Callable[[], None]], *, warmup: int) -> dict[str, Callable[[], None]]:
    """The phases of a step, each in a range of its name; around them ``WARMUP``, after ``warmup`` times ``STEP``.

    The outer range opens with the first phase and closes with the last, so that a timing loop that knows nothing of
    ranges (``time_phases``) can run them.
    """
    names = list(phases)
    passes = itertools.count()
    outer: _Range | None = None

    def wrap(name: str, phase: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            nonlocal outer
            if name == names[0]:
                outer = _Range(WARMUP if next(passes) < warmup else STEP)
            assert outer is not None, f"phase {name} ran before {names[0]}"
            with ranged(phase_of(name)):
                phase()
            if name == names[-1]:
                outer.close()

        return run

    return {name: wrap(name, phase) for name, phase in phases.items()}
