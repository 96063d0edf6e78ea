"""One kernel, computed in one way: its errors, time, bandwidth, and the memory of a call. And how peers' are called.

Each peer runs in the best configuration that it supports; ``kernel_subjects.py`` says which arguments these are.

Liger (liger-kernel):

* RMSNorm with ``casting_mode="llama"``, which rounds as the reference does, and ``in_place=True``, its default: dx is
  written over the gradient that arrives. The other way it would first fill dx with zeros. What was overwritten is
  restored between samples, outside of the clock.
* RMSNorm with the residual add with ``in_place=False``, its default, which writes as much as in place.
* SwiGLU of one merged matrix of gates and ups, for which it has kernels of its own; the gradient is written beside it,
  as the forward's input could serve one backward alone otherwise. The bytes are the same.
* Rotary positions in place, of q and k in memory of their own: in a merged q | k | v it would copy them first.
* The head's loss in chunks whose logits take as much memory as the head's input, its default, and in chunks four times
  as large (``chunk_mem_const=4``), which at 32,768 x 4096 are as large as ours. Gradients are computed in forward, in
  the parameters' dtype, and backward finds that the gradient of the loss is 1. ``ours-small-chunks`` is ours in chunks
  of 1,024 tokens, as many as Liger's default takes there.

Apple's cut cross entropy computes logits block by block in forward, and recomputes them in backward. By default it
leaves out gradients of words whose probability rounds to nothing. Exact (``filter_eps=None``) it is the same
computation as ours; ``filtered`` is the default. On random data every probability is near 1 / words, so it leaves out
nearly everything: its time there is a lower bound of what training would see, and its error says so.

Torch: ``F.rms_norm``, which has a fused kernel; fused AdamW through its functional form, so that no optimizer object is
part of the time; the norm of ``clip_grad_norm_(foreach=True)``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor

from cs336_systems.case import Unsupported
from cs336_systems.experiments.kernels import BY_FLOPS, KernelCell
from cs336_systems.experiments.peers import error_metric, installed, relative_error
from cs336_systems.hardware import GIB
from cs336_systems.harness.clock import measure_copy, time_kernel
from cs336_systems.harness.memory import PeakMeter, allocated_bytes
from cs336_systems.harness.record import Metric

ANYWHERE = ("eager", "compiled", "torch")
"""Ways that are not Triton's, and run on a CPU."""

Function = Callable[..., Tensor | tuple[Tensor, ...]]


@dataclass(frozen=True)
class Subject:
    """The inputs and functions of one kernel's measurement.

    Attributes:
        inputs: floating-point tensors by name, in the order in which the functions take them; backward is that to those
            that require a gradient, and there is none if none does.
        ours: the fused kernel, which may overwrite its inputs; returns what it computes.
        reference: the formula in plain PyTorch, of any dtype; overwrites nothing.
        forward_bytes, backward_bytes: bytes that any implementation must read and write.
        peers: by their name in ``kernels.PEERS``, functions that import and return a peer's kernel, which may overwrite
            its inputs and arriving gradients, and returns what ours does or the first of it.
        exact: computes in fp64 what errors are told from, if ``reference`` does not.
    """

    inputs: Mapping[str, Tensor]
    ours: Function
    reference: Function
    forward_bytes: int
    backward_bytes: int = 0
    peers: Mapping[str, Callable[[], Function]] = field(default_factory=dict)
    exact: Function | None = None


def measure_kernel(cell: KernelCell) -> list[Metric]:
    """Error, time, bandwidth and, on a GPU, memory of one cell.

    Raises:
        Unsupported: a Triton kernel on a CPU, a peer that is not installed, or a shape that a kernel does not take.
    """
    from cs336_systems.experiments.kernel_subjects import SUBJECTS  # which import what stands here

    if cell.how not in ANYWHERE and cell.device != "cuda":
        raise Unsupported("Triton kernels need a CUDA device")
    torch.manual_seed(cell.seed)
    device, long = torch.device(cell.device), cell.kernel in BY_FLOPS
    subject = SUBJECTS[cell.module](cell, device)
    function, inputs = _function(cell, subject), list(subject.inputs.values())
    leaves = [x for x in inputs if x.requires_grad]
    gradients = [torch.randn_like(x) for x in _outputs(subject.reference(*inputs))] if leaves else []
    metrics = errors(subject, function, gradients)  # compiles, outside of every clock
    copy = Metric("copy", "GB/s", measure_copy(device))
    time = functools.partial(
        time_kernel,
        device=device,
        warmup=3 if long else 10,
        samples=cell.n_samples,
        # Some wait for the device: it would spin as long as they run, and rest from the power that they take.
        host_first=not long,
    )

    def add(name: str, run: Callable[[], object], n_bytes: int, prepare: Callable[[], object] | None = None) -> None:
        samples_ms = time(run, prepare=prepare)
        bandwidth = [n_bytes / ms / 1e6 for ms in samples_ms]
        shares = [100 * rate / copy.statistics()["median"] for rate in bandwidth]
        metrics.append(Metric(name, "ms", samples_ms))
        metrics.append(Metric(f"{name}_bandwidth", "GB/s", bandwidth, derived=True))
        metrics.append(Metric(f"{name}_copy_share", "% of copy", shares, derived=True))
        if device.type == "cuda":
            metrics.append(Metric(f"{name}_extra", "GiB", [extra_bytes(run, device) / GIB]))

    add("forward", functools.partial(function, *inputs), subject.forward_bytes)
    if leaves:
        out, arriving = _outputs(function(*inputs)), [gradient.clone() for gradient in gradients]
        backward = functools.partial(torch.autograd.grad, out, leaves, arriving, retain_graph=True)
        restore = functools.partial(torch._foreach_copy_, arriving, gradients)  # some write gradients over these
        add("backward", backward, subject.backward_bytes, restore)
    return [*metrics, copy]


def _function(cell: KernelCell, subject: Subject) -> Function:
    match cell.how:
        case "ours":
            return subject.ours
        case "eager":
            return subject.reference
        case "compiled":
            torch._functorch.config.donated_buffer = False  # backward is run many times on one graph
            torch.compiler.reset()  # every shape is compiled for itself, and cells share a process
            return torch.compile(subject.reference, fullgraph=True, dynamic=False)
        case peer:
            return subject.peers[peer]()


def extra_bytes(run: Callable[[], object], device: torch.device) -> int:
    """Bytes at a call's peak beyond what was there and what it leaves: its results and what backward needs."""
    meter = PeakMeter(device)
    left = run()
    peak = meter.peak_bytes()
    extra = (peak or 0) - allocated_bytes(device)
    del left
    return extra


def errors(subject: Subject, function: Function, gradients: Sequence[Tensor]) -> list[Metric]:
    """Relative errors against fp64 of every output that the function returns, and of every gradient."""

    def results(function: Function, dtype: torch.dtype | None) -> dict[str, Tensor]:
        inputs = {
            name: x.detach().to(dtype or x.dtype, copy=True).requires_grad_(x.requires_grad)
            for name, x in subject.inputs.items()
        }
        out = _outputs(function(*inputs.values()))
        found = {f"out{i or ''}": x for i, x in enumerate(out)}
        if leaves := {f"grad_{name}": x for name, x in inputs.items() if x.requires_grad}:
            arriving = [gradient.to(x.dtype, copy=True) for gradient, x in zip(gradients, out, strict=True)]
            found |= zip(leaves, torch.autograd.grad(out, list(leaves.values()), arriving), strict=True)
        return {name: x.detach() for name, x in found.items()}

    got, exact = results(function, None), results(subject.exact or subject.reference, torch.float64)
    return [error_metric(name, relative_error(x, exact[name])) for name, x in got.items()]


def _outputs(found: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return found if isinstance(found, tuple) else (found,)


def liger(name: str, *options: Any) -> Callable[[], Function]:
    """Imports and returns one of Liger's autograd Functions, with these options behind the inputs."""

    def load() -> Function:
        function = getattr(installed("liger_kernel.ops", "liger-kernel"), name).apply
        return lambda *inputs: function(*inputs, *options)

    return load


def liger_loss(targets: Tensor, chunk_mem_const: int) -> Callable[[], Function]:
    """Liger's head and loss, in chunks of so many times its usual memory."""
    defaults = (None, None, -100, 0.0, 0.0, "mean", None, False, None, False, False, False, None, None)

    def load() -> Function:
        function = liger("LigerFusedLinearCrossEntropyFunction", targets, *defaults, chunk_mem_const)()
        return _gradients_of(lambda x, weight: function(x, weight)[0])

    return load


def cut_cross_entropy(targets: Tensor, **options: Any) -> Callable[[], Function]:
    """Apple's head and loss."""

    def load() -> Function:
        function = installed("cut_cross_entropy", "cut-cross-entropy").linear_cross_entropy
        return _gradients_of(lambda x, weight: function(x, weight, targets, impl="cce", **options))

    return load


def _gradients_of(loss: Callable[..., Tensor]) -> Function:
    """(x, weight) -> the gradients of a loss, forward and backward in one call, as ours computes them."""

    def gradients(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        leaves = [tensor.detach().requires_grad_() for tensor in (x, weight)]
        return torch.autograd.grad(loss(*leaves), leaves)

    return gradients
