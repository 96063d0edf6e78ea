"""Tables of attention benchmarks: one line per implementation and shape."""

import pandas as pd

from cs336_systems.measurement.attention import TILE
from cs336_systems.report.tables import Table, digits, settings_split

_SETTINGS = ("gpu", "device", "grid", "dtype", "batch_size", "heads", "d_head", "length", "causal", "mask", "impl")

_EXTRA = {"seen_scores": "scores seen %", "skipped_blocks": "blocks skipped %", "mask_memory": "mask GiB"}


def attention_table(rows: pd.DataFrame) -> Table:
    """Time, rate, memory and largest error of every cell of ``benchmark_attention.py`` rows; failures as they are."""
    settings = [column for column in _SETTINGS if column in rows.columns]
    extra = [name for name in _EXTRA if (rows["metric"] == name).any()]
    lines = []
    for _, cell in rows.groupby(settings, sort=False, dropna=False):
        first = cell.iloc[0]
        median = {row["metric"]: row["median"] for _, row in cell.iterrows() if row["metric"]}
        errors = [value for name, value in median.items() if name.startswith("error_")]
        line = {column: first[column] for column in settings}
        for name in ("forward", "backward", "both"):
            line[f"{name} ms"] = digits(median[name]) if name in median else "–"
        for name in ("forward", "backward", "both"):
            line[f"{name} TFLOP/s"] = digits(median[f"{name}_tflops"]) if name in median else "–"
        line |= {_EXTRA[name]: digits(median[name]) if name in median else "–" for name in extra}
        line |= {
            "kept GiB": digits(median["kept_for_backward"]) if median else "–",
            "peak GiB": digits(median["peak_memory"]) if median else "–",
            "predicted GiB": digits(median["predicted_peak_memory"]) if median else "–",
            "largest error": f"{max(errors):.1e}" if errors else "–",
            "status": "ok" if first["status"] == "ok" else f"{first['status']}: {first['message']}",
        }
        lines.append(line)
    frame = pd.DataFrame(lines)
    caption, varying = settings_split(frame, settings, always="impl")
    return Table(caption, frame[varying + [column for column in frame.columns if column not in settings]])


def tile_table(rows: pd.DataFrame) -> Table:
    """Every tile that ``--autotune`` timed, fastest first for each kernel and shape, beside the committed table's."""
    tiles = rows[rows["metric"].astype(str).str.startswith(TILE)]
    lines = []
    for shape, at_shape in tiles.groupby(["dtype", "batch_size", "heads", "d_head", "length"], sort=False):
        named = at_shape["metric"].str.removeprefix(TILE).str.split(" ", n=1, expand=True)
        for kernel, of_kernel in at_shape.assign(kernel=named[0], tile=named[1]).groupby("kernel", sort=False):
            committed = of_kernel["median"].iloc[0]
            for _, row in of_kernel.sort_values("median").iterrows():
                lines.append(
                    dict(zip(("dtype", "batch", "heads", "d", "length"), shape, strict=True))
                    | {"kernel": kernel, "tile": row["tile"], "ms": digits(row["median"])}
                    | {"of the committed tile's": f"{row['median'] / committed:.3f}"}
                )
    return Table("tiles of flash; the committed one has ratio 1", pd.DataFrame(lines))
