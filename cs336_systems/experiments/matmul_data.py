"""Does the speed of a matmul depend on its data? Speed, power and clock on seven kinds of data.

The prediction and the method are told by ``scripts/abstraction_leaks/matmul_data.py``.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, ClassVar

from cs336_systems.config import PRECISIONS
from cs336_systems.declared import option, options_of
from cs336_systems.experiments.findings import Findings, leak_experiment, where
from cs336_systems.experiments.options import RunOptions, cell_of
from cs336_systems.report.tables import Table, digits

if TYPE_CHECKING:
    from typing import Any

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

_CHUNK_S = 0.02
"""Matmuls are queued in chunks of about this long, one chunk ahead of the device, so that it never waits."""


@dataclass(frozen=True)
class DataCell:
    """One kind of data, once."""

    device: str = "cuda"
    data: str = option(REFERENCE, "Kinds of data; normal is always measured, as reference.", values=KINDS, asked=KINDS)
    size: int = option(8192, "Rows and columns of the square matrices.", sign="positive")
    dtype: str = option("bf16", "Dtype of the matrices.", values=("fp32", "tf32", "bf16"), several=False)
    seconds: float = option(1.0, "Time recorded per kind and repeat.", several=False)
    warmup_seconds: float = option(1.0, "Unrecorded time before that, so that power and clock settle.", several=False)
    repeat: int = 0
    seed: int = 0

    @property
    def variant(self) -> str:
        return self.data

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
    """Every kind at every size, every second repeat in reverse; raises ValueError for a time that no cell can have."""
    if not 0 < options.seconds <= 600 or not 0 <= options.warmup_seconds <= 600:
        raise ValueError(
            f"--seconds must lie in (0, 600] and --warmup-seconds in [0, 600], "
            f"got {options.seconds:g} and {options.warmup_seconds:g}"
        )
    kinds = list(dict.fromkeys([*options.data, REFERENCE]))
    return [
        cell_of(DataCell, options, data=data, size=size, repeat=repeat)
        for size in options.size
        for repeat in range(options.repeat)
        for data in (kinds if repeat % 2 == 0 else kinds[::-1])
    ]


def make_data(kind: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of one kind of data, from torch's seeded generator.

    zeros, ones; uniform in [0, 1); normal(0, 1); sparse-bits: normal with one mantissa bit kept and the others zero;
    integers: uniform in -8..8; subnormal: uniform below the least normal number, in steps that the dtype has.

    Raises:
        ValueError: no such kind.
    """
    import torch

    if kind == "zeros":
        return torch.zeros(shape, dtype=dtype, device=device)
    if kind == "ones":
        return torch.ones(shape, dtype=dtype, device=device)
    if kind == "uniform":
        return torch.rand(shape, device=device).to(dtype)
    if kind == "integers":
        return torch.randint(-8, 9, shape, device=device).to(dtype)
    if kind == "subnormal":
        mantissa_bits = round(-torch.log2(torch.tensor(torch.finfo(dtype).eps)).item())
        words = torch.randint(1, 2**mantissa_bits, shape, device=device)
        return words.to(torch.int32 if dtype.itemsize == 4 else torch.int16).view(dtype)
    if kind == "normal":
        return torch.randn(shape, device=device).to(dtype)
    if kind == "sparse-bits":
        sign_exponent_and_one_bit = -(1 << 22)  # 0xFFC00000 as int32: the upper 10 bits of an fp32
        bits = torch.randn(shape, device=device).view(torch.int32) & sign_exponent_and_one_bit
        return bits.view(torch.float32).to(dtype)
    raise ValueError(f"unknown data {kind!r}: known are {', '.join(KINDS)}")


def sustained_ms(a: Tensor, b: Tensor, seconds: float) -> list[float]:
    """Milliseconds per matmul ``a @ b`` while it runs back to back for about ``seconds``, one sample per chunk.

    On a GPU events separate the chunks and the host stays one chunk ahead, so the device has no gaps; at least two
    chunks run.
    """
    import torch

    from cs336_systems.harness.clock import synchronize

    device = a.device
    out = torch.empty_like(a)
    started = time.perf_counter()
    torch.matmul(a, b, out=out)
    synchronize(device)
    first_s = time.perf_counter() - started
    if device.type != "cuda":
        samples: list[float] = []
        while not samples or time.perf_counter() < started + seconds:
            before = time.perf_counter()
            torch.matmul(a, b, out=out)
            samples.append(1e3 * (time.perf_counter() - before))
        return samples
    per_chunk = max(1, round(_CHUNK_S / max(first_s, 1e-6)))
    events = [torch.cuda.Event(enable_timing=True)]
    events[0].record()
    while len(events) < 3 or time.perf_counter() < started + seconds:
        for _ in range(per_chunk):
            torch.matmul(a, b, out=out)
        events.append(torch.cuda.Event(enable_timing=True))
        events[-1].record()
        events[-2].synchronize()
    synchronize(device)
    return [events[i].elapsed_time(events[i + 1]) / per_chunk for i in range(len(events) - 1)]


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
    metrics = [
        Metric("matmul", "ms", samples_ms),
        Metric("matmul_tflops", "TFLOP/s", [2 * cell.size**3 / ms / 1e9 for ms in samples_ms], derived=True),
    ]
    clock = "sm_mhz" if device.type == "cuda" else "cpu_mhz"
    for name, unit in (("power_w", "W"), (clock, "MHz")):
        if values := states.values(name):
            metrics.append(Metric(name, unit, values))
    return metrics


def ratios_to_normal(rows: pd.DataFrame) -> dict[str, list[float]]:
    """Each kind's speed over that of normal data in the same repeat, by kind; rows of one size."""
    speeds = {
        (row["data"], row["repeat"]): row["median"]
        for row in rows[rows["metric"] == "matmul_tflops"].to_dict("records")
    }
    ratios: dict[str, list[float]] = {}
    for (data, repeat), speed in speeds.items():
        if reference := speeds.get((REFERENCE, repeat)):
            ratios.setdefault(str(data), []).append(speed / reference)
    return ratios


def analyse(rows: pd.DataFrame) -> Findings:
    """A table per size, the ratios as main figures, and a figure of the last size."""
    tables, figures = [], {}
    for size, own in rows.groupby("size", sort=True):
        ratios = ratios_to_normal(own)
        kinds = sorted(ratios, key=lambda kind: -median(ratios[kind]))
        tables.append(_table(own, ratios, kinds))
        figures[str(size)] = {kind: round(median(ratios[kind]), 3) for kind in kinds}
    if rows.empty:
        return Findings([], {"ratio_to_normal": {}})
    largest = rows[rows["size"] == rows["size"].max()]
    title = f"{largest['dtype'].iloc[0]} products of n = {largest['size'].iloc[0]} on {where(rows)}"
    return Findings(tables, {"ratio_to_normal": figures}, partial(_draw, largest), title)


def _medians(rows: pd.DataFrame, data: str) -> dict[str, float | None]:
    """TFLOP/s, watts and MHz of a kind of data, over the repeats; None for what the rows do not hold."""
    own = rows[rows["data"] == data].groupby("metric")["median"].median().to_dict()
    return {"TFLOP/s": own.get("matmul_tflops"), "W": own.get("power_w"), "MHz": own.get("sm_mhz", own.get("cpu_mhz"))}


def _table(rows: pd.DataFrame, ratios: dict[str, list[float]], kinds: list[str]) -> Table:
    import pandas as pd

    first = rows.iloc[0]
    lines = []
    for kind in kinds:
        found = _medians(rows, kind)
        on_cpu = "1.00 or far less" if kind == "subnormal" else "1.00"
        line = {"kind": kind, "TFLOP/s": "–" if found["TFLOP/s"] is None else digits(found["TFLOP/s"])}
        line |= {
            "ratio to normal": f"{median(ratios[kind]):.3f}",
            "lowest–highest": f"{min(ratios[kind]):.3f}–{max(ratios[kind]):.3f}",
            "predicted": f"{PREDICTED_ON_GPU[kind]:.2f}" if first["device"] == "cuda" else on_cpu,
        }
        lines.append(line | {unit: "–" if found[unit] is None else f"{found[unit]:.0f}" for unit in ("W", "MHz")})
    caption = (
        f"Products of {first['dtype']} matrices, n = {first['size']}, by what is in them, on {where(rows)}; ratios "
        "within a repeat."
    )
    return Table(caption, pd.DataFrame(lines))


def _draw(rows: pd.DataFrame, axes: Axes) -> None:
    """Speed by kind as bars, p10 to p90 over the repeats as whiskers, watts and MHz written beside each."""
    from cs336_systems.report.figures import OKABE_ITO

    found = {str(kind): _medians(rows, str(kind)) for kind in rows["data"].unique()}
    speeds = {kind: values["TFLOP/s"] or 0.0 for kind, values in found.items()}
    kinds = sorted(speeds, key=lambda kind: speeds[kind])
    own = rows[rows["metric"] == "matmul_tflops"].groupby("data")
    low, high = own["p10"].min(), own["p90"].max()
    errors = [
        [max(0.0, speeds[kind] - float(low[kind])) for kind in kinds],
        [max(0.0, float(high[kind]) - speeds[kind]) for kind in kinds],
    ]
    colours = [OKABE_ITO[1] if kind == REFERENCE else OKABE_ITO[0] for kind in kinds]
    axes.barh(kinds, [speeds[kind] for kind in kinds], xerr=errors, color=colours, ecolor="0.35", capsize=3)
    for i, kind in enumerate(kinds):
        note = ", ".join(f"{found[kind][unit]:.0f} {unit}" for unit in ("W", "MHz") if found[kind][unit] is not None)
        axes.text(0.01 * max(speeds.values()), i, note, va="center", color="white", fontsize=9)
    axes.set_xlabel("TFLOP/s (median, bar p10 to p90 over all repeats)")
    axes.set_ylabel("what both matrices hold")


EXPERIMENT = leak_experiment(
    NAME, DataCell, Options, make_cells, measure, analyse, lambda cell: cell.seconds + cell.warmup_seconds
)
