"""Does the speed of a matmul depend on its data? Speed, power and clock on seven kinds of data.

``scripts/abstraction_leaks/matmul_data.py`` states the prediction and the method.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cs336_systems.config import PRECISIONS
from cs336_systems.declared import option, options_of
from cs336_systems.experiments.driver import Experiment, one_stage, presented
from cs336_systems.experiments.options import every
from cs336_systems.experiments.peers import Peer, PeerRun, interleaved
from cs336_systems.report.results import MAIN, Column, ResultTable

if TYPE_CHECKING:
    import pandas as pd
    import torch
    from matplotlib.figure import Figure
    from torch import Tensor

    from cs336_systems.harness.record import Metric

REFERENCE = "normal"
"""The kind of data that the others are compared with."""

KINDS = ("zeros", "ones", "sparse-bits", "integers", "subnormal", "uniform", REFERENCE)

_STATES = {"power_w": "W", "sm_mhz": "MHz"}
"""The unit of each state of a GPU that is sampled while matmuls run, by metric."""

_CHUNK_S = 0.02
"""Seconds for which a chunk of matmuls is queued, one chunk ahead of the device, so that it never waits."""


@dataclass(frozen=True)
class DataCell(Peer):
    """One kind of data, once."""

    WAY = "data"
    device: str = "cuda"
    data: str = option(REFERENCE, "Kinds of data; normal is always measured, as reference.", values=KINDS, asked=KINDS)
    size: int = option(8192, "Rows and columns of the square matrices.", sign="positive")
    dtype: str = option("bf16", "Dtype of the matrices.", values=("fp32", "tf32", "bf16"), several=False)
    seconds: float = option(1.0, "Time recorded per kind and repeat.", several=False, sign="positive")
    warmup_seconds: float = option(
        1.0, "Unrecorded time before that, so that power and clock settle.", several=False, sign="not negative"
    )
    repeat: int = 0
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.data} n={self.size} {self.dtype} repeat {self.repeat}"


CPU = {"size": (1024,), "dtype": "fp32", "seconds": 0.5, "warmup_seconds": 0.2}
Options: Any = options_of(DataCell, PeerRun, cpu=CPU, repeat=2)


def make_cells(options: Any) -> list[DataCell]:
    """Every kind at every size, interleaved."""
    return interleaved(every(DataCell, options, data=dict.fromkeys([*options.data, REFERENCE])), options.repeat)


def make_data(kind: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of one of ``KINDS``, from torch's seeded generator.

    zeros, ones; uniform in [0, 1); normal(0, 1); sparse-bits: normal with one mantissa bit kept and the others zero;
    integers: uniform in -8..8; subnormal: uniform below the least normal number, in steps that the dtype has.
    """
    import torch

    match kind:
        case "zeros" | "ones":
            return torch.full(shape, float(kind == "ones"), dtype=dtype, device=device)
        case "uniform":
            return torch.rand(shape, device=device).to(dtype)
        case "integers":
            return torch.randint(-8, 9, shape, device=device).to(dtype)
        case "subnormal":
            mantissa_bits = round(-torch.log2(torch.tensor(torch.finfo(dtype).eps)).item())
            words = torch.randint(1, 2**mantissa_bits, shape, device=device)
            return words.to(torch.int32 if dtype.itemsize == 4 else torch.int16).view(dtype)
    normal = torch.randn(shape, device=device)
    if kind == "sparse-bits":
        sign_exponent_and_one_bit = -(1 << 22)  # 0xFFC00000 as int32: the upper 10 bits of an fp32
        normal = (normal.view(torch.int32) & sign_exponent_and_one_bit).view(torch.float32)
    return normal.to(dtype)


def sustained_ms(a: Tensor, b: Tensor, seconds: float) -> list[float]:
    """Milliseconds per matmul ``a @ b`` while it runs back to back for about ``seconds``, one sample per chunk.

    The host stays one chunk ahead of a GPU, so the device has no gaps; at least two chunks run.
    """
    import torch

    from cs336_systems.harness.clock import Stopwatch, synchronize

    out, stopwatch = torch.empty_like(a), Stopwatch(a.device)
    started = time.perf_counter()
    torch.matmul(a, b, out=out)
    synchronize(a.device)
    per_chunk = max(1, round(_CHUNK_S / max(time.perf_counter() - started, 1e-6)))
    stopwatch.mark()
    n_chunks = 0
    while n_chunks < 2 or time.perf_counter() < started + seconds:
        for _ in range(per_chunk):
            torch.matmul(a, b, out=out)
        stopwatch.mark()
        n_chunks += 1
        if stopwatch.events:
            stopwatch.events[-2].synchronize()
    return [ms / per_chunk for ms in stopwatch.laps_ms()]


def measure(cell: DataCell) -> list[Metric]:
    """Time matmuls on one kind of data, with power (W) and clock (MHz) as they were meanwhile."""
    import torch

    from cs336_systems.harness.provenance import sampled_state
    from cs336_systems.harness.record import Metric
    from cs336_systems.training.precision import matmul_dtype, matmul_precision

    device, precision = torch.device(cell.device), PRECISIONS[cell.dtype]
    torch.manual_seed(cell.seed)
    shape = (cell.size, cell.size)
    a, b = (make_data(cell.data, shape, matmul_dtype(precision), device) for _ in range(2))
    with matmul_precision(precision):
        if cell.warmup_seconds:
            sustained_ms(a, b, cell.warmup_seconds)
        with sampled_state(device) as states:
            samples_ms = sustained_ms(a, b, cell.seconds)
    return [
        Metric("matmul", "ms", samples_ms),
        Metric("matmul_tflops", "TFLOP/s", [2 * cell.size**3 / ms / 1e9 for ms in samples_ms], derived=True),
        *(Metric(name, unit, found) for name, unit in _STATES.items() if (found := states.values(name))),
    ]


SPEEDS = ResultTable(
    settings=("gpu", "device", "size", "dtype", "data"),
    always=("data",),
    columns=(
        Column("TFLOP/s", "matmul_tflops", rank=MAIN),
        Column(
            "ratio to normal",
            lambda line: line.repeats_over("matmul_tflops", line.peer(data=REFERENCE)),
            ".3f",
            note="per repeat; median and range over repeats",
        ),
        *(Column(unit, name, ".0f", optional=True) for name, unit in _STATES.items()),
    ),
)


def speed_figure(rows: pd.DataFrame) -> Figure | None:
    """Speed by kind of data as bars at the largest size, with whiskers from p10 to p90 over all repeats."""
    from cs336_systems.report.figures import OKABE_ITO, panels

    rows = rows[(rows["metric"] == "matmul_tflops") & (rows["size"] == rows["size"].max())]
    if rows.empty:
        return None
    kinds = rows.groupby("data").agg({"median": "median", "p10": "min", "p90": "max"}).sort_values("median")
    whiskers = [kinds["median"] - kinds["p10"], kinds["p90"] - kinds["median"]]
    figure, (axes,) = panels(1, 1, 6, 3.9)
    colours = [OKABE_ITO[kind == REFERENCE] for kind in kinds.index]
    axes.barh(list(kinds.index), kinds["median"], xerr=whiskers, color=colours, ecolor="0.35", capsize=3)
    axes.set_xlabel("TFLOP/s (median, bar p10 to p90)")
    first = rows.iloc[0]
    title = f"{first['dtype']} matmuls of n = {first['size']} on {first['gpu'] or first['host']}, by what they multiply"
    axes.set_title(title, fontsize=10)
    return figure


EXPERIMENT = Experiment(
    "matmul_data",
    DataCell,
    make_cells,
    one_stage(measure, share=lambda cell: True),
    presented(SPEEDS.of, {"": speed_figure}),
    ("matmul_tflops", "power_w"),
    options=Options,
)
