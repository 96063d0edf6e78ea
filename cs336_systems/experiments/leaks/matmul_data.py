"""Does a matrix product care what is in its matrices? Its speed on seven kinds of data, with power and clock beside it.

    uv run scripts/abstraction_leaks/matmul_data.py                        # bf16 on a GPU, fp32 on a CPU
    uv run scripts/abstraction_leaks/matmul_data.py --data zeros normal --size 4096 8192 --out results/

The abstraction says no: 2 n^3 operations, whatever the numbers. It leaks through the power limit. A transistor costs
energy when it switches; multiplying zeros switches next to nothing, multiplying random numbers switches about every
second wire each cycle. A GPU whose large products already sit at the power limit pays for that with its clock
(H. He 2024, "Strangely, Matrix Multiplications on GPUs Run Faster When Given Predictable Data").

**Prediction, before measuring.** On a GPU at its limit, for n = 8192: the fewer bits flip, the higher the clock, so
zeros >= ones > sparse-bits and integers > uniform > normal, and *watts do not differ while MHz do*. Zeros: 13 % above
normal data, the one figure known from an H200 before (894 against 788 TFLOP/s). Below the limit (a small n, a GPU with
a generous limit) the speeds agree and the watts differ instead. On a CPU nothing differs, as its clock follows the
instructions (vector width) and not the operands; except subnormal numbers, which many x86 cores multiply by microcode:
anything from no difference to a hundred times slower, by vendor and by whether the library flushes them to zero.

**Method.** Products run back to back for ``--seconds``, after ``--warmup-seconds`` of the same (NVML's power is an
average over a second); a thread reads power and clock meanwhile. The kinds alternate, the order turning round each
repeat, and a kind's ratio is against normal data *of the same repeat*. The L2 cache is not flushed between products:
flushing would write zeros and rest the multipliers. Both matrices are of the kind; a CPU reports no watts.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Literal, get_args

import pandas as pd
import torch
from matplotlib.axes import Axes
from torch import Tensor

from cs336_systems.config import PRECISIONS
from cs336_systems.experiments.leaks.findings import Findings, run_experiment, where
from cs336_systems.harness.clock import synchronize
from cs336_systems.harness.record import Metric
from cs336_systems.harness.state_sampler import StateSampler
from cs336_systems.report.console import check_device, complain, parse_for_device
from cs336_systems.report.figures import OKABE_ITO
from cs336_systems.report.show import Format
from cs336_systems.report.tables import Table, digits
from cs336_systems.training.precision import matmul_dtype, matmul_precision, unsupported_reason

NAME = "matmul_data"
REFERENCE = "normal"
"""What the other kinds are compared with."""

Data = Literal["zeros", "ones", "sparse-bits", "integers", "subnormal", "uniform", "normal"]
Dtype = Literal["fp32", "tf32", "bf16"]

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


@dataclass(frozen=True)
class Options:
    """Does a matrix product care what is in its matrices?"""

    data: tuple[Data, ...] = get_args(Data)
    """Kinds of data; normal is always measured, as the others are compared with it."""
    size: tuple[int, ...] = (8192,)
    """Rows and columns of the square matrices."""
    dtype: Dtype = "bf16"
    """Of the product."""
    seconds: float = 1.0
    """Time recorded per kind and repeat."""
    warmup_seconds: float = 1.0
    """The same before, unrecorded, so that power and clock settle."""
    repeat: int = 2
    """Times that all kinds are run, every second time backwards."""
    device: Literal["cpu", "cuda"] = "cuda"
    """Where to run."""
    seed: int = 0
    """Of the data."""
    out: Path | None = None
    """Folder to which rows are appended (matmul_data.csv) and where the figure is drawn."""
    format: Format = "auto"
    """Of the table."""


@dataclass(frozen=True)
class DataCell:
    """One kind of data, once."""

    device: str
    data: str
    size: int
    dtype: str
    seconds: float
    warmup_seconds: float
    repeat: int
    seed: int

    @property
    def variant(self) -> str:
        return self.data


def default_options(device: str) -> Options:
    """The defaults on a device; a CPU gets fp32, smaller matrices and less time."""
    if device == "cuda":
        return Options()
    return Options(device="cpu", size=(1024,), dtype="fp32", seconds=0.5, warmup_seconds=0.2)


def make_cells(options: Options) -> list[DataCell]:
    """Every kind at every size, in turning order.

    Raises:
        ValueError: a value that no cell can have.
    """
    check_device(options.device)
    if not options.size or min(options.size) < 1:
        raise ValueError(f"--size must be positive, got {list(options.size)}")
    if options.repeat < 1 or not 0 <= options.seed < 2**63:
        raise ValueError(
            f"--repeat must be positive and --seed lie in 0..2^63-1, got {options.repeat} and {options.seed}"
        )
    if not 0 < options.seconds <= 600 or not 0 <= options.warmup_seconds <= 600:
        raise ValueError(
            f"--seconds must lie in (0, 600] and --warmup-seconds in [0, 600], "
            f"got {options.seconds:g} and {options.warmup_seconds:g}"
        )
    if reason := unsupported_reason(PRECISIONS[options.dtype], torch.device(options.device)):
        raise ValueError(f"--dtype {options.dtype}: {reason}")
    kinds = list(dict.fromkeys([*options.data, REFERENCE]))
    return [
        DataCell(
            options.device,
            data,
            size,
            options.dtype,
            options.seconds,
            options.warmup_seconds,
            repeat,
            options.seed,
        )
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
        with StateSampler(device) as sampler:
            samples_ms = sustained_ms(a, b, cell.seconds)
    metrics = [
        Metric("matmul", "ms", samples_ms),
        Metric("matmul_tflops", "TFLOP/s", [2 * cell.size**3 / ms / 1e9 for ms in samples_ms], derived=True),
    ]
    clock = "sm_mhz" if device.type == "cuda" else "cpu_mhz"
    for name, unit in (("power_w", "W"), (clock, "MHz")):
        if values := sampler.values(name):
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

    def draw(axes: Axes) -> None:
        _draw(axes, largest)

    title = f"{largest['dtype'].iloc[0]} products of n = {largest['size'].iloc[0]} on {where(rows)}"
    return Findings(tables, {"ratio_to_normal": figures}, draw, title)


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
                "subject": kind,
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
    return Table(caption, pd.DataFrame(lines).rename(columns={"subject": "kind"}))


def _draw(axes: Axes, rows: pd.DataFrame) -> None:
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


def describe(cell: DataCell) -> str:
    """A cell in a few words."""
    return f"{cell.data} n={cell.size} {cell.dtype} repeat {cell.repeat}"


def main(arguments: list[str] | None = None) -> int:
    """Measure every kind, print the table."""
    options = parse_for_device(default_options, arguments, __doc__)
    try:
        cells = make_cells(options)
    except ValueError as error:
        return complain(NAME, str(error))
    return run_experiment(
        NAME,
        cells,
        measure,
        analyse,
        describe=describe,
        expected_s=lambda cell: cell.seconds + cell.warmup_seconds,
        out=options.out,
        form=options.format,
        timeout_s=60 + 10 * (options.seconds + options.warmup_seconds),
    )
