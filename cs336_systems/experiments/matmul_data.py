"""Does the speed of a matmul depend on its data? Speed, power and clock on seven kinds of data.

``scripts/abstraction_leaks/matmul_data.py`` states the prediction and the method.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from cs336_systems.config import PRECISIONS
from cs336_systems.declared import option, options_of
from cs336_systems.experiments.findings import Findings, leak_experiment, medians, where
from cs336_systems.experiments.options import RunOptions
from cs336_systems.experiments.peers import Peer, every, interleaved
from cs336_systems.report.tables import Table, digits

if TYPE_CHECKING:
    import pandas as pd
    import torch
    from matplotlib.axes import Axes
    from torch import Tensor

    from cs336_systems.harness.record import Metric

NAME = "matmul_data"

REFERENCE = "normal"
"""The kind of data that the others are compared with."""

PREDICTED_ON_GPU: dict[str, float] = {
    "zeros": 1.13,
    "ones": 1.12,
    "sparse-bits": 1.06,
    "integers": 1.06,
    "subnormal": 1.06,
    "uniform": 1.03,
    "normal": 1.0,
}
"""Ratio to normal data at the power limit; zeros from an earlier measurement, the rest placed between by bits that
flip: ones have one pattern, subnormals lose the exponent's flips, uniform numbers the sign's and most exponents'."""

KINDS = tuple(PREDICTED_ON_GPU)

_STATES = {"power_w": "W", "sm_mhz": "MHz", "cpu_mhz": "MHz"}
"""The unit of each state of the device that is sampled while matmuls run, by metric."""

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
    seconds: float = option(1.0, "Time recorded per kind and repeat.", several=False)
    warmup_seconds: float = option(1.0, "Unrecorded time before that, so that power and clock settle.", several=False)
    repeat: int = 0
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.data} n={self.size} {self.dtype} repeat {self.repeat}"


@dataclass(frozen=True)
class Asked(RunOptions):
    """Does the speed of a matrix product depend on its data?"""

    CPU_DEFAULTS: ClassVar = {"size": (1024,), "dtype": "fp32", "seconds": 0.5, "warmup_seconds": 0.2}
    repeat: int = 2
    """How often all kinds are run, every second time in reverse order."""


Options: Any = options_of(DataCell, Asked)


def make_cells(options: Any) -> list[DataCell]:
    """Every kind at every size, interleaved; raises ValueError for a time that no cell can have."""
    if not 0 < options.seconds <= 600 or not 0 <= options.warmup_seconds <= 600:
        raise ValueError(
            f"--seconds must lie in (0, 600] and --warmup-seconds in [0, 600], "
            f"got {options.seconds:g} and {options.warmup_seconds:g}"
        )
    return interleaved(every(DataCell, options, data=dict.fromkeys([*options.data, REFERENCE])), options.repeat)


def make_data(kind: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of one kind of data, from torch's seeded generator.

    zeros, ones; uniform in [0, 1); normal(0, 1); sparse-bits: normal with one mantissa bit kept and the others zero;
    integers: uniform in -8..8; subnormal: uniform below the least normal number, in steps that the dtype has.

    Raises:
        ValueError: no such kind.
    """
    import torch

    match kind:
        case "zeros":
            return torch.zeros(shape, dtype=dtype, device=device)
        case "ones":
            return torch.ones(shape, dtype=dtype, device=device)
        case "uniform":
            return torch.rand(shape, device=device).to(dtype)
        case "integers":
            return torch.randint(-8, 9, shape, device=device).to(dtype)
        case "subnormal":
            mantissa_bits = round(-torch.log2(torch.tensor(torch.finfo(dtype).eps)).item())
            words = torch.randint(1, 2**mantissa_bits, shape, device=device)
            return words.to(torch.int32 if dtype.itemsize == 4 else torch.int16).view(dtype)
        case "normal":
            return torch.randn(shape, device=device).to(dtype)
        case "sparse-bits":
            sign_exponent_and_one_bit = -(1 << 22)  # 0xFFC00000 as int32: the upper 10 bits of an fp32
            bits = torch.randn(shape, device=device).view(torch.int32) & sign_exponent_and_one_bit
            return bits.view(torch.float32).to(dtype)
    raise ValueError(f"unknown data {kind!r}: known are {', '.join(KINDS)}")


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
    sampled = {name: states.values(name) for name in _STATES if (name == "cpu_mhz") == (device.type == "cpu")}
    return [
        Metric("matmul", "ms", samples_ms),
        Metric("matmul_tflops", "TFLOP/s", [2 * cell.size**3 / ms / 1e9 for ms in samples_ms], derived=True),
        *(Metric(name, _STATES[name], values) for name, values in sampled.items() if values),
    ]


def ratios_to_normal(rows: pd.DataFrame) -> pd.DataFrame:
    """Each kind's speed (columns) over that of normal data in the same repeat (lines); rows of one size."""
    speeds = medians(rows[rows["metric"] == "matmul_tflops"], "repeat", "data")
    return speeds.div(speeds[REFERENCE], axis=0)


def analyse(rows: pd.DataFrame) -> Findings:
    """A table per size, the ratios as main figures, and a figure of the last size."""
    if rows.empty or REFERENCE not in set(rows["data"]):
        return Findings([], {"ratio_to_normal": {}})
    tables, figures = [], {}
    for size, own in rows.groupby("size", sort=True):
        ratios = ratios_to_normal(own)
        ratios = ratios[ratios.median().sort_values(ascending=False, kind="stable").index]
        tables.append(_table(own, ratios))
        figures[str(size)] = ratios.median().round(3).to_dict()
    title = f"{own['dtype'].iloc[0]} products of n = {size} on {where(rows)}"
    return Findings(tables, {"ratio_to_normal": figures}, partial(_draw, own), title)


def _table(rows: pd.DataFrame, ratios: pd.DataFrame) -> Table:
    import pandas as pd

    first, found = rows.iloc[0], medians(rows, "data").loc[ratios.columns]
    frame = pd.DataFrame({"kind": found.index, "TFLOP/s": found["matmul_tflops"].map(digits)})
    frame["ratio to normal"] = ratios.median().map("{:.3f}".format)
    frame["lowest–highest"] = [f"{ratio.min():.3f}–{ratio.max():.3f}" for _, ratio in ratios.items()]
    if first["device"] == "cuda":
        frame["predicted"] = [f"{PREDICTED_ON_GPU[kind]:.2f}" for kind in frame["kind"]]
    for name, unit in _STATES.items():
        if name in found:
            frame[unit] = found[name].map("{:.0f}".format)
    caption = (
        f"Products of {first['dtype']} matrices, n = {first['size']}, by what is in them, on {where(rows)}; ratios "
        "within a repeat."
    )
    return Table(caption, frame)


def _draw(rows: pd.DataFrame, axes: Axes) -> None:
    """Speed by kind as bars, p10 to p90 over the repeats as whiskers, watts and MHz written beside each."""
    from cs336_systems.report.figures import OKABE_ITO

    found = medians(rows, "data").sort_values("matmul_tflops")
    speeds, spread = found["matmul_tflops"], rows[rows["metric"] == "matmul_tflops"].groupby("data")
    whiskers = [(speeds - spread["p10"].min()).clip(lower=0), (spread["p90"].max() - speeds).clip(lower=0)]
    colours = [OKABE_ITO[kind == REFERENCE] for kind in found.index]
    errors = [ends[found.index] for ends in whiskers]
    axes.barh(list(found.index), speeds, xerr=errors, color=colours, ecolor="0.35", capsize=3)
    for i, (_, kind) in enumerate(found.iterrows()):
        note = ", ".join(f"{kind[name]:.0f} {unit}" for name, unit in _STATES.items() if name in found)
        axes.text(0.01 * speeds.max(), i, note, va="center", color="white", fontsize=9)
    axes.set_xlabel("TFLOP/s (median, bar p10 to p90 over all repeats)")
    axes.set_ylabel("what both matrices hold")


EXPERIMENT = leak_experiment(
    NAME, DataCell, Options, make_cells, measure, analyse, lambda cell: cell.seconds + cell.warmup_seconds
)
