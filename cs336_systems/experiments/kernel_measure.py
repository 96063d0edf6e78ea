"""One kernel, computed in one way: its errors, time, bandwidth, and the memory of a call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch._functorch.config
from torch import Tensor

from cs336_systems.case import Unsupported
from cs336_systems.experiments.kernels import LOSSES, KernelCell
from cs336_systems.experiments.peers import error_metric, relative_error
from cs336_systems.harness.clock import in_gib, measure_copy, rate, time_kernel
from cs336_systems.harness.memory import PeakMeter, allocated_bytes
from cs336_systems.harness.record import Metric

ANYWHERE = ("eager", "compiled", "torch", "torch-foreach")
"""Ways that run on a CPU: they are neither Triton's nor CuTe DSL's."""

Function = Callable[..., Tensor | tuple[Tensor, ...]]


@dataclass(frozen=True)
class Subject:
    """The inputs and functions of one kernel's measurement.

    Attributes:
        inputs: tensors by name, in the order in which the functions take them; backward is that to those that require a
            gradient, and there is none if none does.
        ours: the fused kernel, which may overwrite its inputs; returns what it computes.
        reference: the formula in plain PyTorch, of any dtype; overwrites nothing. Errors are told from it in fp64.
        forward_bytes, backward_bytes: bytes that any implementation must read and write.
    """

    inputs: Mapping[str, Tensor]
    ours: Function
    reference: Function
    forward_bytes: int
    backward_bytes: int = 0


def measure(cell: KernelCell) -> list[Metric]:
    """Error, time, bandwidth and, on a GPU, memory of one cell.

    Raises:
        Unsupported: a Triton kernel on a CPU, a peer that is not installed, or a shape that a kernel does not take.
    """
    from cs336_systems.experiments.kernel_peers import PEERS  # which imports what stands here
    from cs336_systems.experiments.kernel_subjects import SUBJECTS

    if cell.how not in ANYWHERE and cell.device != "cuda":
        raise Unsupported(f"kernels of {cell.how} need a CUDA device, got {cell.device}")
    torch.manual_seed(cell.seed)
    device, long = torch.device(cell.device), cell.kernel in LOSSES
    subject = SUBJECTS[cell.kernel](cell, device)
    inputs = list(subject.inputs.values())
    function = {"ours": subject.ours, "eager": subject.reference}.get(cell.how)
    if cell.how == "compiled":
        torch._functorch.config.donated_buffer = False  # backward is run many times on one graph
        torch.compiler.reset()  # every shape is compiled for itself, and cells share a process
        function = torch.compile(subject.reference, fullgraph=True, dynamic=False)
    function = function or PEERS[cell.how][cell.kernel]()
    leaves = [x for x in inputs if x.requires_grad]
    gradients = [torch.randn_like(x) for x in _outputs(subject.reference(*inputs))] if leaves else []
    try:
        metrics = errors(subject, function, gradients)  # compiles, outside of every clock
    except NotImplementedError as refusal:
        raise Unsupported(f"{cell.how}: {refusal}") from refusal
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
        gigabytes, copied = n_bytes / 1e9, copy.statistics()["median"]
        metrics.append(Metric(name, "ms", samples_ms))
        metrics.append(rate(f"{name}_bandwidth", "GB/s", gigabytes, samples_ms))
        metrics.append(rate(f"{name}_copy_share", "% of copy", 100 * gigabytes / copied, samples_ms))
        if device.type == "cuda":
            metrics.extend(in_gib(**{f"{name}_extra": extra_bytes(run, device)}))

    add("forward", functools.partial(function, *inputs), subject.forward_bytes)
    if leaves:
        out, arriving = _outputs(function(*inputs)), [gradient.clone() for gradient in gradients]
        backward = functools.partial(torch.autograd.grad, out, leaves, arriving, retain_graph=True)
        restore = functools.partial(torch._foreach_copy_, arriving, gradients)  # some write gradients over these
        add("backward", backward, subject.backward_bytes, restore)
    return [*metrics, copy]


def extra_bytes(run: Callable[[], object], device: torch.device) -> int:
    """Bytes at a call's peak beyond what was there and what it leaves: its results and what backward needs."""
    meter = PeakMeter(device)
    left = run()  # noqa: F841 (it is there while memory is read)
    return (meter.peak_bytes() or 0) - allocated_bytes(device)


def errors(subject: Subject, function: Function, gradients: Sequence[Tensor]) -> list[Metric]:
    """Relative errors against fp64 of every output that the function returns, and of every gradient."""

    def results(function: Function, dtype: torch.dtype | None) -> dict[str, Tensor]:
        inputs = {
            name: x.detach().to(dtype if x.is_floating_point() else None, copy=True).requires_grad_(x.requires_grad)
            for name, x in subject.inputs.items()
        }
        out = _outputs(function(*inputs.values()))
        found = {f"out{i or ''}": x for i, x in enumerate(out)}
        if leaves := {f"grad_{name}": x for name, x in inputs.items() if x.requires_grad}:
            arriving = [gradient.to(x.dtype, copy=True) for gradient, x in zip(gradients, out, strict=True)]
            found |= zip(leaves, torch.autograd.grad(out, list(leaves.values()), arriving), strict=True)
        return {name: x.detach() for name, x in found.items()}

    got, exact = results(function, None), results(subject.reference, torch.float64)
    return [error_metric(name, relative_error(x, exact[name])) for name, x in got.items()]


def _outputs(found: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return found if isinstance(found, tuple) else (found,)
