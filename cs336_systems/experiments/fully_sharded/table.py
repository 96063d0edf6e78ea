"""The rows of ``benchmark_fsdp.py`` as a table: a line per implementation, memory by kind, waits, ratio to FSDP2."""

import pandas as pd

from cs336_systems.report.tables import Table, digits, settings_split

SETTINGS = (
    *("gpu", "device", "size", "dtype", "attention", "checkpoint", "compile", "optimizer", "batch_size"),
    *("context_length", "warmup", "steps", "world_size", "fsdp", "prefetch"),
)
"""Columns that tell one cell from another; all but the last three stand in the caption where they are the same."""

_LABELS = {"batch_size": "batch per rank", "context_length": "context", "world_size": "ranks", "fsdp": "implementation"}
_ALWAYS = ("world_size", "fsdp", "prefetch")
_PEER = "torch"


def fully_sharded_table(rows: pd.DataFrame) -> Table:
    """Step times with their 10th and 90th percentile, states and peak, communication and waits for weights.

    Repeats of a cell are pooled: the median of their medians, between the lowest p10 and the highest p90. ``/ FSDP2``
    is the ratio of the step to that of torch's implementation under the same settings.
    """
    settings = [column for column in SETTINGS if column in rows.columns]
    shown = rows.assign(prefetch=[_number(value) for value in rows["prefetch"]])
    cells = {}
    for key, cell in shown.groupby(settings, sort=False, dropna=False):
        values = dict(zip(settings, key, strict=True))
        metrics = {name: _pooled(cell[cell["metric"] == name]) for name in cell["metric"].unique() if name}
        cells[key] = (values, metrics, cell.iloc[-1])
    lines = []
    for values, metrics, last in cells.values():
        peer = cells.get(tuple((values | {"fsdp": _PEER, "prefetch": ""})[column] for column in settings))
        ratio = ""
        if "step" in metrics and peer is not None and "step" in peer[1] and values["fsdp"] != _PEER:
            ratio = f"{metrics['step']['median'] / peer[1]['step']['median']:.3f}"
        lines.append(values | _line(metrics, ratio, last))
    frame = pd.DataFrame(lines)
    caption, varying = settings_split(frame, [column for column in settings if column not in _ALWAYS])
    order = [*varying, *(column for column in _ALWAYS if column in settings)]
    results = [column for column in frame.columns if column not in settings]
    return Table(caption, frame[[*order, *results]].rename(columns=_LABELS))


def _number(value: object) -> str:
    number = pd.to_numeric(pd.Series([value]), errors="coerce").iloc[0]
    return "" if pd.isna(number) else f"{number:g}"


def _pooled(rows: pd.DataFrame) -> pd.Series:
    return pd.Series({"median": rows["median"].median(), "p10": rows["p10"].min(), "p90": rows["p90"].max()})


def _line(metrics: dict[str, pd.Series], ratio: str, last: pd.Series) -> dict[str, str]:
    def spread(name: str) -> str:
        if name not in metrics:
            return "–"
        row = metrics[name]
        return f"{digits(row['median'])} ({digits(row['p10'])}–{digits(row['p90'])})"

    def median(name: str, form: str = "") -> str:
        if name not in metrics:
            return "–"
        return format(metrics[name]["median"], form) if form else digits(metrics[name]["median"])

    return {
        "step ms": spread("step"),
        "/ FSDP2": ratio or "–",
        "forward ms": median("forward"),
        "backward ms": median("backward"),
        "optimizer ms": median("optimizer"),
        "tokens/s": median("tokens_per_s", ",.0f"),
        "parameters GiB": median("parameters"),
        "gradients GiB": median("gradients"),
        "optimizer GiB": median("optimizer_state"),
        "states to predicted %": median("state_error", "+.2f"),
        "peak GiB": median("peak_memory"),
        "collectives": median("collectives", ".0f"),
        "sent MiB": median("sent"),
        "predicted MiB": median("predicted_sent"),
        "gathers": median("gathers", ".0f"),
        "late": median("late_gathers", ".0f"),
        "waited ms": median("gather_wait", ".3f"),
        "hidden %": median("hidden_share", ".1f"),
        "status": last["status"] if last["status"] == "ok" else f"{last['status']}: {last['message']}",
    }
