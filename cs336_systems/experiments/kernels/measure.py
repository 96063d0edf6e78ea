"""One kernel, computed in one way: its errors, time, bandwidth, and the memory that a call takes beyond its results."""

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch._functorch.config
from torch import Tensor

from cs336_systems.case import Unsupported
from cs336_systems.experiments.kernels.cells import BY_FLOPS, KernelCell
from cs336_systems.hardware import GIB
from cs336_systems.harness.clock import measure_copy, time_kernel
from cs336_systems.harness.memory import PeakMeter, allocated_bytes
from cs336_systems.harness.record import Metric

ANYWHERE = ("eager", "compiled", "torch")
"""Ways that are not Triton's, and run on a CPU."""

Function = Callable[..., Tensor | tuple[Tensor, ...]]


@dataclass(frozen=True)
class Subject:
    """On what a kernel is measured.

    Attributes:
        inputs: floating-point tensors by name, in the order in which the functions take them; backward is that to those
            that require a gradient, and there is none if none does.
        ours: the fused kernel, which may overwrite its inputs; returns what it computes.
        reference: the formula in plain PyTorch, of any dtype; overwrites nothing.
        forward_bytes, backward_bytes: what must be read and written, whoever computes it.
        peers: by their name in ``cells.PEERS``, what imports and returns others' kernel, which may overwrite its
            inputs and arriving gradients, and returns what ours does or the first of it.
    """

    inputs: Mapping[str, Tensor]
    ours: Function
    reference: Function
    forward_bytes: int
    backward_bytes: int = 0
    peers: Mapping[str, Callable[[], Function]] = field(default_factory=dict)


def measure(cell: KernelCell) -> list[Metric]:
    """Error, time, bandwidth and, on a GPU, memory of one cell.

    Raises:
        Unsupported: a Triton kernel on a CPU, a peer that is not installed, or a shape that a kernel does not take.
    """
    if cell.how not in ANYWHERE and cell.device != "cuda":
        raise Unsupported("Triton kernels need a CUDA device")
    torch.manual_seed(cell.seed)
    device = torch.device(cell.device)
    module = importlib.import_module(f"cs336_systems.experiments.kernels.{cell.module}")
    subject: Subject = module.subject(cell, device)
    function = _function(cell, subject)
    inputs = list(subject.inputs.values())
    leaves = [x for x in inputs if x.requires_grad]
    gradients = [torch.randn_like(x) for x in _outputs(subject.reference(*inputs))] if leaves else []
    metrics = errors(subject, function, gradients)  # compiles, outside of every clock
    passes: dict[str, tuple[Callable[[], object], Callable[[], object] | None, int]] = {}
    passes["forward"] = (functools.partial(function, *inputs), None, subject.forward_bytes)
    if leaves:
        out, arriving = _outputs(function(*inputs)), [gradient.clone() for gradient in gradients]
        backward = functools.partial(torch.autograd.grad, out, leaves, arriving, retain_graph=True)
        passes["backward"] = (backward, functools.partial(_restore, arriving, gradients), subject.backward_bytes)
    copy, long = Metric("copy", "GB/s", measure_copy(device)), cell.kernel in BY_FLOPS
    for name, (run, prepare, n_bytes) in passes.items():
        samples_ms = time_kernel(
            run,
            device=device,
            warmup=3 if long else 10,
            samples=cell.n_samples,
            # Some wait for the device: it would spin as long as they run, and rest from the power that they take.
            host_first=not long,
            prepare=prepare,
        )
        bandwidth = [n_bytes / ms / 1e6 for ms in samples_ms]
        shares = [100 * rate / copy.statistics()["median"] for rate in bandwidth]
        metrics += [
            Metric(name, "ms", samples_ms),
            Metric(f"{name}_bandwidth", "GB/s", bandwidth, derived=True),
            Metric(f"{name}_copy_share", "% of copy", shares, derived=True),
        ]
        if device.type == "cuda":
            metrics.append(Metric(f"{name}_extra", "GiB", [extra_bytes(run, device) / GIB]))
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
    """What a call takes at its peak, beyond what was there and what it leaves: its results and what backward needs."""
    meter = PeakMeter(device)
    left = run()
    peak = meter.peak_bytes()
    extra = (peak or 0) - allocated_bytes(device)
    del left
    return extra


def errors(subject: Subject, function: Function, gradients: Sequence[Tensor]) -> list[Metric]:
    """Relative Frobenius errors against the reference in fp64, of every output that the function returns and of every
    input's gradient."""

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

    got, exact = results(function, None), results(subject.reference, torch.float64)
    return [
        Metric(f"error_{name}", "relative", [((x.double() - exact[name]).norm() / exact[name].norm()).item()])
        for name, x in got.items()
    ]


def _restore(written_over: Sequence[Tensor], originals: Sequence[Tensor]) -> None:
    """Some kernels write an input's gradient over the one that arrives."""
    for tensor, original in zip(written_over, originals, strict=True):
        tensor.copy_(original)


def _outputs(found: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return found if isinstance(found, tuple) else (found,)
