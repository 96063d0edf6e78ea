"""Every run's figures in one table, and the fastest of each size."""

from typing import Any

import pandas as pd

from cs336_systems.harness.runs import newest_run, pooled
from cs336_systems.report.results import MAIN, Column, Line, ResultTable, Spread

UNSHARDED = (0, 1, 2)
"""ZeRO levels in rows of ranks that share nothing. Today's say 0; earlier ones say what was asked for, of which 1 and 2
did nothing there, while 3 gathered on one rank what was whole."""


def _speedup(line: Line) -> Spread | None:
    stored = None if line.settings["recipe"] == "stored" else line.peer(recipe="stored")
    return line.repeats_over("tokens_per_s", stored)


def _scaling(line: Line) -> Spread | None:
    return None if line.settings["world_size"] == 1 else _over_unsharded(line, world_size=1, apart="off")


def _over_apart(line: Line) -> Spread | None:
    shares = line.settings["world_size"] > 1 and line.settings["apart"] == "off"
    return _over_unsharded(line, apart="on") if shares else None


def _over_unsharded(line: Line, **settings: Any) -> Spread | None:
    """Tokens/s over those of the line with these settings, whose ranks share nothing."""
    peers = (line.peer(zero=zero, gather_by="collectives", **settings) for zero in UNSHARDED)
    return next(filter(None, (line.repeats_over("tokens_per_s", peer) for peer in peers)), None)


def _of_ranks(line: Line) -> str | None:
    """The median step of each rank that trained apart."""
    return ", ".join(f"{ms:,.1f}" for ms in _samples(line, "step_of_ranks")) or None


def _around(line: Line) -> float | None:
    around, step = line.median("around"), line.median("step")
    return None if around is None or not step else 100 * around / step


def _first_loss(line: Line) -> float | None:
    return next(iter(_samples(line, "loss")), None)


def _samples(line: Line, metric: str) -> list[float]:
    """Of the newest repeat; none of a metric that was not measured."""
    found = line.run.loc[line.run["metric"] == metric, "samples"]
    return (found.iloc[-1] or []) if len(found) else []


def _library(line: Line) -> str | None:
    return line.last.get("library") or None


TRAINING_TABLE = ResultTable(
    settings=(
        *("gpu", "device", "size", "batch_size", "context_length", "total_batch_tokens", "dtype", "how"),
        *("world_size", "zero", "gather_by", "apart", "recipe"),
        *("kernels", "keep", "attention", "cuda_graph", "lmhead_chunks", "data", "warmup", "seconds"),
    ),
    always=("size", "how", "recipe"),
    columns=(
        Column("step ms", "step", ",.1f"),
        Column("tokens/s", "tokens_per_s", ",.0f", rank=MAIN, note="median of the steps after the first few"),
        Column("x", _speedup, ".3f", optional=True, note="times as fast as stored products in the same command"),
        Column("x one rank", _scaling, ".3f", optional=True, note="times as fast as one, in the same command"),
        Column("x apart", _over_apart, ".3f", optional=True, note="times as fast as ranks apart, in the same command"),
        Column("ranks' steps ms", _of_ranks, optional=True, note="medians of ranks that train apart"),
        Column("speed of light %", "speed_of_light", ".1f", optional=True),
        Column("around %", _around, ".2f", optional=True, note="of a step: loader, log, checks, late host"),
        Column(
            "host ahead ms", "host_lead", ".0f", optional=True, note="of the device where a block begins, last steps"
        ),
        Column(
            "late %", "late_blocks", ".1f", optional=True, note="of blocks, where the host is less than a block ahead"
        ),
        Column("peak GiB", "peak_memory", ".1f", optional=True),
        Column("predicted GiB", "predicted_peak_memory", ".1f", optional=True),
        Column("loss", _first_loss, ".4f", optional=True, note="nats per token, of the first step after the warm-up"),
        Column("library", _library, optional=True),
    ),
)

MEDIANS = ("tokens_per_s", "speed_of_light", "peak_memory", "predicted_peak_memory")
COMMAND = ("argv", "commit", "host")


def fastest(rows: pd.DataFrame) -> pd.DataFrame:
    """Of the runs of one rank that are ok the fastest of each size, way and recipe: their settings, ``MEDIANS`` as
    columns, and ``COMMAND``, of those that ran in one.

    In the order in which they were first measured; what a run has no row of is NaN.
    """
    alone = rows[(rows["status"] == "ok") & (rows["world_size"].astype(int) == 1)]
    settings = [name for name in TRAINING_TABLE.settings if name in rows]
    best: dict[tuple[Any, ...], dict[str, Any]] = {}
    for values, cell in alone.groupby(settings, sort=False, dropna=False):
        run: dict[str, Any] = dict(zip(settings, values, strict=True))
        newest = newest_run(cell)
        medians = pooled(newest).set_index("metric")["median"]
        run |= {name: float(medians.get(name, float("nan"))) for name in MEDIANS}
        run |= {name: newest[name].iloc[-1] for name in COMMAND}
        way = run["size"], run["how"], run["recipe"]
        if way not in best or run["tokens_per_s"] > best[way]["tokens_per_s"]:
            best[way] = run
    return pd.DataFrame(best.values())
