"""``benchmark_kernels``: time, bandwidth and error of each fused kernel, of its formula eager, and compiled."""

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch._functorch.config
from torch import Tensor

from cs336_systems.case import Unsupported
from cs336_systems.experiments.driver import Experiment, Stage
from cs336_systems.experiments.kernels.cells import KernelCell, Options, make_cells
from cs336_systems.harness.ceilings import measure_copy
from cs336_systems.harness.clock import time_kernel
from cs336_systems.harness.record import Metric
from cs336_systems.harness.sweep import Outcome, outcome_rows
from cs336_systems.report.results import MAIN, Column, Line, ResultTable
from cs336_systems.report.show import show

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
    """

    inputs: Mapping[str, Tensor]
    ours: Function
    reference: Function
    forward_bytes: int
    backward_bytes: int = 0


def measure(cell: KernelCell) -> list[Metric]:
    """Error, time and bandwidth of one cell.

    Raises:
        Unsupported: our kernel on a CPU, where Triton cannot run.
    """
    if cell.how == "ours" and cell.device != "cuda":
        raise Unsupported("Triton kernels need a CUDA device")
    torch.manual_seed(cell.seed)
    device = torch.device(cell.device)
    module = importlib.import_module(f"cs336_systems.experiments.kernels.{cell.kernel}")
    subject: Subject = module.subject(cell, device)
    function = subject.ours if cell.how == "ours" else subject.reference
    if cell.how == "compiled":
        torch._functorch.config.donated_buffer = False  # backward is run many times on one graph
        torch.compiler.reset()  # every shape is compiled for itself, and cells share a process
        function = torch.compile(function, fullgraph=True, dynamic=False)
    inputs = list(subject.inputs.values())
    gradients = [torch.randn_like(x) for x in _outputs(subject.reference(*inputs))]
    metrics = errors(subject, function, gradients)  # compiles, outside of every clock
    passes: dict[str, tuple[Callable[[], object], int]] = {}
    passes["forward"] = (functools.partial(function, *inputs), subject.forward_bytes)
    if leaves := [x for x in inputs if x.requires_grad]:
        out = _outputs(function(*inputs))
        backward = functools.partial(torch.autograd.grad, out, leaves, gradients, retain_graph=True)
        passes["backward"] = (backward, subject.backward_bytes)
    copy = Metric("copy", "GB/s", measure_copy(device))
    for name, (run, n_bytes) in passes.items():
        samples_ms = time_kernel(run, device=device, samples=cell.n_samples, host_first=True)
        bandwidth = [n_bytes / ms / 1e6 for ms in samples_ms]
        shares = [100 * rate / copy.statistics()["median"] for rate in bandwidth]
        metrics += [
            Metric(name, "ms", samples_ms),
            Metric(f"{name}_bandwidth", "GB/s", bandwidth, derived=True),
            Metric(f"{name}_copy_share", "% of copy", shares, derived=True),
        ]
    return [*metrics, copy]


def errors(subject: Subject, function: Function, gradients: Sequence[Tensor]) -> list[Metric]:
    """Relative Frobenius errors of every output and every input's gradient against the reference in fp64."""

    def results(function: Function, dtype: torch.dtype | None) -> dict[str, Tensor]:
        inputs = {
            name: x.detach().to(dtype or x.dtype, copy=True).requires_grad_(x.requires_grad)
            for name, x in subject.inputs.items()
        }
        out = _outputs(function(*inputs.values()))
        found = {f"out{i or ''}": x for i, x in enumerate(out)}
        if leaves := {f"grad_{name}": x for name, x in inputs.items() if x.requires_grad}:
            arriving = [gradient.to(x.dtype) for gradient, x in zip(gradients, out, strict=True)]
            found |= zip(leaves, torch.autograd.grad(out, list(leaves.values()), arriving), strict=True)
        return {name: x.detach().double() for name, x in found.items()}

    got, exact = results(function, None), results(subject.reference, torch.float64)
    return [
        Metric(f"error_{name}", "relative", [((got[name] - want).norm() / want.norm()).item()])
        for name, want in exact.items()
    ]


def _outputs(found: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return found if isinstance(found, tuple) else (found,)


def _worst(line: Line, prefix: str) -> str | None:
    """The largest of the metrics whose names begin so."""
    found = [row["median"] for name, row in line.metrics.items() if name.startswith(prefix)]
    return f"{max(found):.1e}" if found else None


TABLE = ResultTable(
    settings=("gpu", "device", "kernel", "dtype", "rows", "width", "how", "n_samples"),
    always=("kernel", "how"),
    labels={"n_samples": "samples"},
    columns=(
        Column("forward ms", "forward", spread=True, rank=MAIN),
        Column("forward GB/s", "forward_bandwidth", ",.0f", rank=2, note="bytes that must move, over the time"),
        Column("forward % of copy", "forward_copy_share", ".0f", note="GB/s over those of a large copy, same process"),
        Column("backward ms", "backward", spread=True, rank=MAIN),
        Column("backward GB/s", "backward_bandwidth", ",.0f", rank=2),
        Column("backward % of copy", "backward_copy_share", ".0f"),
        Column("error", lambda line: _worst(line, "error_out"), note="relative Frobenius norm against fp64"),
        Column("gradients' error", lambda line: _worst(line, "error_grad"), note="of the worst gradient"),
    ),
)


def present(outcomes: list[Outcome], options: Options, csv: Path | None) -> None:
    show(TABLE.of(outcome_rows(outcomes)), options.format)


EXPERIMENT = Experiment(
    "benchmark_kernels",
    KernelCell,
    make_cells,
    lambda options, cells, outcomes: [Stage(cells, measure, share=lambda cell: cell.kernel)],
    present,
    ("forward", "forward_copy_share", "backward", "backward_copy_share"),
)
