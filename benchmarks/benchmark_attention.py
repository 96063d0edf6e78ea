"""Which attention for these shapes? Time, memory and error of every implementation, beside the limit.

    uv run benchmarks/benchmark_attention.py                                  # the grid that fits this machine
    uv run benchmarks/benchmark_attention.py --grid training --impl flash sdpa-flash sdpa-cudnn flex
    uv run benchmarks/benchmark_attention.py --grid flash --d-head 64 --length 1024 4096 --dtype bf16 --out results/

Grids: ``pytorch``, the handout's first (batch 8, no head dimension, plain and compiled); ``flash``, its second (batch
1, causal, every implementation); ``training``, the shapes at which training runs. Forward, backward and both are timed
separately, backward as backward, with a cold L2 cache. TFLOP/s use the FlashAttention convention. Errors are relative
Frobenius norms of one head against fp64. What a cell would need is predicted first; what cannot fit is a row, and is
not run. Cells that share implementation, dtype and head dimension share a process, so that kernels are compiled once.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from rich.console import Console
from torch import Tensor

from cs336_systems.attention.dispatch import IMPLEMENTATIONS, attention, unsupported_reason
from cs336_systems.attention.reference import reference_attention
from cs336_systems.costs.attention import AttentionWork
from cs336_systems.hardware import find_hardware
from cs336_systems.measurement.clock import time_kernel
from cs336_systems.measurement.memory import PeakMeter, free_bytes
from cs336_systems.measurement.process import PredictedOutOfMemory, Unsupported
from cs336_systems.measurement.record import Metric, RowFile
from cs336_systems.measurement.sweep import Outcome, cell_columns, outcome_rows, run_sweep
from cs336_systems.report.attention import TILE, attention_table, tile_table
from cs336_systems.report.console import Format, check_device, complain, exit_with, finish, parse_for_device, show

BENCHMARK = "benchmark_attention"
GIB = 1024**3
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TRAINING_SHAPES = (
    (1, 16, 16_384, 64),
    (1, 32, 16_384, 128),
    (4, 32, 4096, 128),
    (8, 16, 2048, 64),
    (2, 32, 32_768, 128),
)
"""(batch, heads, length, d_head); the first is the 2025 leaderboard's."""

_ORACLE_LENGTH = {"cuda": 16_384, "cpu": 2048}
"""Longest sequence whose fp64 scores of one head are worth their memory (2 GiB) and time."""

_MATERIALISED = ("reference", "reference-compiled")


@dataclass(frozen=True)
class Options:
    """Which attention for these shapes?"""

    grid: tuple[Literal["pytorch", "flash", "training"], ...] = ("pytorch", "flash")
    """Sets of shapes; see above."""
    impl: tuple[str, ...] = ()
    """Implementations; by default those that the grid compares."""
    length: tuple[int, ...] = ()
    """Only these sequence lengths of the grids; by default all."""
    d_head: tuple[int, ...] = ()
    """Only these head dimensions of the grids; by default all."""
    dtype: tuple[Literal["fp32", "bf16"], ...] = ()
    """By default fp32 for pytorch, both for flash, bf16 for training."""
    device: Literal["cpu", "cuda"] = "cuda"
    """Where to run."""
    autotune: bool = False
    """Search the tiles of flash again at each shape, list them, and measure with the fastest."""
    seed: int = 0
    """Of the data."""
    out: Path | None = None
    """Folder to which rows are appended (benchmark_attention.csv)."""
    format: Format = "auto"
    """Of the table."""
    timeout: float = 300.0
    """Seconds after which a cell is killed."""


@dataclass(frozen=True)
class AttentionCell:
    """One implementation at one shape; ``heads`` 0 means inputs without a head dimension."""

    device: str
    grid: str
    impl: str
    dtype: str
    d_head: int
    length: int
    batch_size: int
    heads: int
    causal: bool
    autotune: bool
    seed: int

    @property
    def variant(self) -> str:
        return self.impl

    @property
    def work(self) -> AttentionWork:
        heads = self.heads or 1
        return AttentionWork(self.batch_size, heads, heads, self.length, self.length, self.d_head, self.causal)


def default_options(device: str) -> Options:
    """The defaults on a device; a CPU gets the short lengths."""
    if device == "cuda":
        return Options()
    return Options(device="cpu", length=(256, 1024))


def parse_options(arguments: list[str] | None = None) -> Options:
    """Options from the command line, with the defaults of the device that they name."""
    return parse_for_device(default_options, arguments, __doc__)


def make_cells(options: Options) -> list[AttentionCell]:
    """The grids, ordered so that cells which can share a process follow each other.

    Raises:
        ValueError: a value that no cell can have.
    """
    check_device(options.device)
    for impl in options.impl:
        if impl not in IMPLEMENTATIONS:
            raise ValueError(f"--impl {impl}: known are {', '.join(IMPLEMENTATIONS)}")
    for name, values in (("length", options.length), ("d-head", options.d_head)):
        if bad := [value for value in values if value < 1]:
            raise ValueError(f"--{name} must be positive, got {bad[0]}")
    cells: list[AttentionCell] = []
    for grid in options.grid:
        impls, dtypes, shapes, causal = _grid(grid)
        kept = [
            (batch, heads, length, d_head)
            for batch, heads, length, d_head in shapes
            if (not options.length or length in options.length) and (not options.d_head or d_head in options.d_head)
        ]
        for impl, dtype in itertools.product(options.impl or impls, options.dtype or dtypes):
            for batch, heads, length, d_head in sorted(kept, key=lambda shape: shape[3]):
                autotune = options.autotune and impl == "flash"
                cells.append(
                    AttentionCell(
                        options.device, grid, impl, dtype, d_head, length, batch, heads, causal, autotune, options.seed
                    )
                )
    if not cells:
        raise ValueError(
            f"no shape of the grids {', '.join(options.grid)} has the lengths and head dimensions asked for"
        )
    return cells


def _grid(name: str) -> tuple[tuple[str, ...], tuple[str, ...], list[tuple[int, int, int, int]], bool]:
    """Implementations, dtypes, (batch, heads, length, d_head) shapes and causality of a grid."""
    if name == "pytorch":
        lengths = (256, 1024, 4096, 8192, 16_384)
        shapes = [(8, 0, length, d) for d in (16, 32, 64, 128) for length in lengths]
        return _MATERIALISED, ("fp32",), shapes, False
    if name == "flash":
        shapes = [(1, 0, 2**power, d) for d in (16, 32, 64, 128) for power in range(7, 17)]
        return IMPLEMENTATIONS, ("bf16", "fp32"), shapes, True
    fast = ("flash", "sdpa-flash", "sdpa-cudnn", "sdpa-efficient", "flex")
    return fast, ("bf16",), list(TRAINING_SHAPES), True


def measure(cell: AttentionCell) -> list[Metric]:
    """Time, memory and error of one cell.

    Raises:
        Unsupported: the implementation cannot serve the shape on this device.
        PredictedOutOfMemory: the predicted peak is more than what is free.
    """
    device, dtype, work = torch.device(cell.device), DTYPES[cell.dtype], cell.work
    needed = (work.materialised_bytes if cell.impl in _MATERIALISED else work.tiled_bytes)(dtype.itemsize)
    free = free_bytes(device)
    if needed > free:
        raise PredictedOutOfMemory(f"needs {needed / GIB:.1f} GiB, {free / GIB:.1f} GiB are free")
    torch.manual_seed(cell.seed)
    shape = (cell.batch_size, *((cell.heads,) if cell.heads else ()), cell.length, cell.d_head)
    q, k, v, do = (torch.randn(shape, device=device, dtype=dtype) for _ in range(4))
    inputs = tuple(x.requires_grad_() for x in (q, k, v))
    if reason := unsupported_reason(cell.impl, q, k, v, causal=cell.causal):
        raise Unsupported(reason)
    searched = tune(q, k, v, do, causal=cell.causal) if cell.autotune else []

    def forward() -> Tensor:
        return attention(q, k, v, causal=cell.causal, impl=cell.impl)

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(forward(), inputs, do)

    torch._functorch.config.donated_buffer = False  # backward is run many times on one graph
    both()  # compiles and autotunes outside of every clock and meter
    meter = PeakMeter(device)
    before = _allocated(device)
    o = forward()
    kept = _allocated(device) - before
    gradients = torch.autograd.grad(o, inputs, do, retain_graph=True)
    metrics = [
        Metric("kept_for_backward", "GiB", [kept / GIB]),
        Metric("peak_memory", "GiB", [meter.peak_bytes() / GIB]),
        Metric("predicted_peak_memory", "GiB", [needed / GIB]),
        *errors(cell, q, k, v, do, o, gradients),
        *searched,
    ]
    del gradients
    flops = {"forward": work.forward_flops, "backward": work.backward_flops}
    flops["both"] = flops["forward"] + flops["backward"]
    passes: dict[str, Callable[[], object]] = {
        "forward": forward,
        "backward": lambda: torch.autograd.grad(o, inputs, do, retain_graph=True),
        "both": both,
    }
    hardware = find_hardware(torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu")
    peak = hardware.peak("bf16" if cell.dtype == "bf16" else "fp32") if hardware else None
    for name, run in passes.items():
        samples = timed(run, device)
        metrics.append(Metric(name, "ms", samples))
        metrics.append(Metric(f"{name}_tflops", "TFLOP/s", [flops[name] / ms / 1e9 for ms in samples], derived=True))
        if peak:
            shares = [100 * flops[name] / (ms / 1e3) / peak for ms in samples]
            metrics.append(Metric(f"{name}_peak_share", "% of datasheet peak", shares, derived=True))
    return metrics


def tune(q: Tensor, k: Tensor, v: Tensor, do: Tensor, *, causal: bool) -> list[Metric]:
    """Search the tiles of flash at this shape and let this process use the fastest; one metric per tile timed."""
    from cs336_systems.attention.flash.tiles import use_tile
    from cs336_systems.measurement.tile_search import search_tiles  # Triton is not on every machine

    metrics = []
    for timing in search_tiles(
        *(x.detach() if x.dim() == 4 else x.detach()[:, None] for x in (q, k, v, do)), causal=causal
    ):
        use_tile(timing.kernel, q.shape[-1], q.element_size(), timing.best)
        metrics += [Metric(f"{TILE}{timing.kernel} {tile}", "ms", times) for tile, times in timing.samples_ms.items()]
    return metrics


def timed(run: Callable[[], object], device: torch.device) -> list[float]:
    """At least ten samples, and about a third of a second of them."""
    first = sorted(time_kernel(run, device=device, warmup=1, samples=3))[1]
    return time_kernel(run, device=device, warmup=2, samples=int(min(100, max(10, 300 / first))))


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def errors(
    cell: AttentionCell, q: Tensor, k: Tensor, v: Tensor, do: Tensor, o: Tensor, gradients: tuple[Tensor, ...]
) -> list[Metric]:
    """Relative errors of output and gradients of the first head of the first sequence against fp64.

    Empty beyond the length whose fp64 scores fit comfortably.
    """
    if cell.length > _ORACLE_LENGTH[cell.device]:
        return []
    first = (slice(0, 1), 0) if cell.heads else (slice(0, 1),)
    leaves = [x.detach()[first].double().requires_grad_() for x in (q, k, v)]
    exact, _ = reference_attention(*leaves, causal=cell.causal)
    wanted = (exact.detach(), *torch.autograd.grad(exact, leaves, do[first].double()))
    return [
        Metric(f"error_{name}", "relative", [((got.detach()[first].double() - want).norm() / want.norm()).item()])
        for name, got, want in zip(("o", "dq", "dk", "dv"), (o, *gradients), wanted, strict=True)
    ]


def describe(cell: AttentionCell) -> str:
    """A cell in a few words."""
    heads = f" heads {cell.heads}" if cell.heads else ""
    return f"{cell.impl} {cell.dtype} batch {cell.batch_size}{heads} length {cell.length} d {cell.d_head}"


def main() -> int:
    """Run every cell, print a table per grid."""
    options = parse_options()
    csv = options.out / f"{BENCHMARK}.csv" if options.out else None
    try:
        cells = make_cells(options)
        row_file = RowFile(csv, cell_columns(AttentionCell)) if csv else None
    except ValueError as error:
        return complain(BENCHMARK, str(error))
    except OSError as error:
        return complain(BENCHMARK, f"{error.filename}: {error.strerror}")
    outcomes: list[Outcome] = []
    try:
        outcomes.extend(
            run_sweep(
                BENCHMARK,
                cells,
                measure,
                row_file=row_file,
                timeout_s=options.timeout,
                describe=describe,
                cost=lambda cell: cell.work.forward_flops + 1e11,
                console=Console(stderr=True),
                share=lambda cell: (cell.grid, cell.impl, cell.dtype, cell.d_head),
            )
        )
    except OSError as error:
        return complain(BENCHMARK, f"rows could not be written to {csv}: {error.strerror}; every earlier row is there")
    rows = outcome_rows(outcomes)
    for grid in dict.fromkeys(rows["grid"]):
        show(attention_table(rows[rows["grid"] == grid]), options.format)
    if options.autotune:
        show(tile_table(rows), options.format)
    metrics = ("forward", "backward", "both", "both_tflops", "peak_memory")
    return finish(BENCHMARK, outcomes, describe, metrics, csv)


if __name__ == "__main__":
    exit_with(BENCHMARK, main)
