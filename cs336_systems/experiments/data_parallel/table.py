"""The rows of ``benchmark_ddp.py`` as a table: a line per rung, the step beside the one without communication."""

import pandas as pd

from cs336_systems.report.tables import Table, digits, settings_split

SETTINGS = (
    *("gpu", "device", "size", "dtype", "compile", "optimizer", "batch_size", "context_length", "warmup", "steps"),
    *("communication_dtype", "world_size", "ddp", "bucket_size_mb"),
)
"""Columns that tell one cell from another; all but the last three stand in the caption where they are the same."""

_LABELS = {
    "batch_size": "batch per rank",
    "context_length": "context",
    "communication_dtype": "sent as",
    "world_size": "ranks",
    "bucket_size_mb": "bucket MiB",
}
_ALWAYS = ("ddp", "bucket_size_mb", "world_size")


def data_parallel_table(rows: pd.DataFrame) -> Table:
    """Times with their 10th and 90th percentile, exposed communication, throughput, and scaling from one rank.

    ``scaling %`` is tokens/s over as many times those of the same rung on one rank, where the rows hold that cell; of
    cells measured several times the last counts. ``exposed`` is the step less the step without communication;
    ``hidden`` and ``slowed`` (other kernels, by communication beside them) are read from traces.
    """
    settings = [column for column in SETTINGS if column in rows.columns]
    filled = rows.assign(bucket_size_mb=[_bucket(value) for value in rows["bucket_size_mb"]])
    cells = {}
    for key, cell in filled.groupby(settings, sort=False, dropna=False):
        last = cell[cell["timestamp"] == cell["timestamp"].iloc[-1]]
        metrics = {row["metric"]: row for _, row in last.iterrows() if row["metric"]}
        cells[key] = (dict(zip(settings, key, strict=True)), metrics, last.iloc[-1])
    lines = [values | _line(metrics, last) | {"scaling %": ""} for values, metrics, last in cells.values()]
    for line, (values, metrics, _) in zip(lines, cells.values(), strict=True):
        alone = cells.get(tuple((values | {"world_size": 1})[column] for column in settings))
        if metrics and alone is not None and alone[1]:
            ideal = values["world_size"] * alone[1]["tokens_per_s"]["median"]
            line["scaling %"] = f"{100 * metrics['tokens_per_s']['median'] / ideal:.1f}"
    frame = pd.DataFrame(lines)
    caption, varying = settings_split(frame, [column for column in settings if column not in _ALWAYS])
    order = [*varying, *(column for column in _ALWAYS if column in settings)]
    results = [column for column in frame.columns if column not in settings and column != "status"]
    if not frame["scaling %"].any():
        results.remove("scaling %")
    return Table(caption, frame[[*order, *results, "status"]].rename(columns=_LABELS))


def _bucket(value: object) -> str:
    """A bucket size as it is shown: empty for rungs that have none."""
    number = pd.to_numeric(pd.Series([value]), errors="coerce").iloc[0]
    return "" if pd.isna(number) else f"{number:g}"


def _line(metrics: dict[str, pd.Series], last: pd.Series) -> dict[str, str]:
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
        "forward ms": median("forward"),
        "backward ms": spread("backward"),
        "optimizer ms": median("optimizer"),
        "without communication ms": spread("local_step"),
        "exposed ms": median("exposed", ".2f"),
        "exposed %": median("exposed_share", ".1f"),
        "hidden %": median("hidden_share", ".1f"),
        "slowed ms": median("slowed", ".2f"),
        "tokens/s": median("tokens_per_s", ",.0f"),
        "collectives": median("collectives", ".0f"),
        "sent MiB": median("sent"),
        "peak GiB": median("peak_memory"),
        "status": last["status"] if last["status"] == "ok" else f"{last['status']}: {last['message']}",
    }
