"""Speed of a matrix product on seven kinds of data, with power and clock."""

import time
from functools import partial
from statistics import median
from typing import get_args

import pandas as pd
import torch
from matplotlib.axes import Axes
from torch import Tensor

from cs336_systems.config import PRECISIONS
from cs336_systems.experiments.leaks.findings import Findings, leak_experiment, where
from cs336_systems.experiments.leaks.matmul_data_cells import REFERENCE, Data, DataCell, make_cells
from cs336_systems.harness.clock import synchronize
from cs336_systems.harness.provenance import sampled_state
from cs336_systems.harness.record import Metric
from cs336_systems.report.figures import OKABE_ITO
from cs336_systems.report.tables import Table, digits
from cs336_systems.training.precision import matmul_dtype, matmul_precision

NAME = "matmul_data"
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

_CHUNK_S = 0.02
"""Products are queued in chunks of about this long, one chunk ahead of the device, so that it never waits."""


def make_data(kind: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of one kind of data, from torch's seeded generator.

    zeros, ones; uniform in [0, 1); normal(0, 1); sparse-bits: normal with one mantissa bit kept and the others zero;
    integers: uniform in -8..8; subnormal: uniform below the least normal number, in steps that the dtype has.

    Raises:
        ValueError: no such kind.
    """
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
        return (
            (torch.randn(shape, device=device).view(torch.int32) & sign_exponent_and_one_bit)
            .view(torch.float32)
            .to(dtype)
        )
    raise ValueError(f"unknown data {kind!r}: known are {', '.join(get_args(Data))}")


def sustained_ms(a: Tensor, b: Tensor, seconds: float) -> list[float]:
    """Milliseconds per product ``a @ b`` while it runs back to back for about ``seconds``, one sample per chunk.

    On a GPU events part the chunks and the host stays one chunk ahead, so the device has no gaps; at least two chunks.
    """
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
    """Time products on one kind of data, with power (W) and clock (MHz) as they were meanwhile."""
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


def _of(rows: pd.DataFrame, data: str, *metrics: str) -> float | None:
    """Median over the repeats of the first of the metrics that the rows hold."""
    for metric in metrics:
        found = rows[(rows["data"] == data) & (rows["metric"] == metric)]["median"]
        if len(found):
            return float(found.median())
    return None


def _table(rows: pd.DataFrame, ratios: dict[str, list[float]], kinds: list[str]) -> Table:
    first = rows.iloc[0]
    on_gpu = first["device"] == "cuda"
    lines = []
    for kind in kinds:
        speed, watts, mhz = (
            _of(rows, kind, *names) for names in (("matmul_tflops",), ("power_w",), ("sm_mhz", "cpu_mhz"))
        )
        predicted = f"{PREDICTED_ON_GPU[kind]:.2f}" if on_gpu else "1.00 or far less" if kind == "subnormal" else "1.00"
        lines.append(
            {
                "kind": kind,
                "TFLOP/s": "–" if speed is None else digits(speed),
                "ratio to normal": f"{median(ratios[kind]):.3f}",
                "lowest–highest": f"{min(ratios[kind]):.3f}–{max(ratios[kind]):.3f}",
                "predicted": predicted,
                "W": "–" if watts is None else f"{watts:.0f}",
                "MHz": "–" if mhz is None else f"{mhz:.0f}",
            }
        )
    caption = (
        f"Products of {first['dtype']} matrices, n = {first['size']}, by what is in them, on {where(rows)}; ratios "
        "within a repeat."
    )
    return Table(caption, pd.DataFrame(lines))


def _draw(rows: pd.DataFrame, axes: Axes) -> None:
    """Speed by kind as bars, p10 to p90 over the repeats as whiskers, watts and MHz written beside each."""
    speeds = {str(kind): _of(rows, str(kind), "matmul_tflops") or 0.0 for kind in rows["data"].unique()}
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
        watts, mhz = _of(rows, kind, "power_w"), _of(rows, kind, "sm_mhz", "cpu_mhz")
        note = ", ".join(f"{value:.0f} {unit}" for value, unit in ((watts, "W"), (mhz, "MHz")) if value is not None)
        axes.text(0.01 * max(speeds.values()), i, note, va="center", color="white", fontsize=9)
    axes.set_xlabel("TFLOP/s (median, bar p10 to p90 over all repeats)")
    axes.set_ylabel("what both matrices hold")


EXPERIMENT = leak_experiment(
    NAME, DataCell, make_cells, measure, analyse, lambda cell: cell.seconds + cell.warmup_seconds
)
