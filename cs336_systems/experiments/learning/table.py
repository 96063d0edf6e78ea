"""The table of ``benchmark_learning``: what was learned, how fast, and how much differences mean."""

from dataclasses import dataclass

import pandas as pd

from cs336_systems.report.results import MAIN, Column, Line, ResultTable, Spread


def by_seed(line: Line, metric: str) -> pd.Series:
    """What was measured with each seed; nothing if the line lacks the metric."""
    return line.run[line.run["metric"] == metric].drop_duplicates("seed", keep="last").set_index("seed")["median"]


def off_percent(line: Line) -> pd.Series:
    """By seed, how far the held-out loss is above that of stored products with the same seed, in percent."""
    stored = line.peer(recipe="stored")
    if stored is None:
        return pd.Series(dtype=float)
    return 100 * (by_seed(line, "evaluation_loss") / by_seed(stored, "evaluation_loss") - 1).dropna()


def speedup(line: Line) -> float | None:
    """Times as fast as stored products."""
    return line.over("tokens_per_s", line.peer(recipe="stored"))


def _spread(values: pd.Series) -> Spread | None:
    """Mean and ends."""
    return Spread(values.mean(), values.min(), values.max()) if len(values) else None


def _off(line: Line) -> Spread | None:
    return None if line.settings["recipe"] == "stored" else _spread(off_percent(line))


def _held_out(line: Line) -> Spread | None:
    return _spread(by_seed(line, "evaluation_loss"))


def _least_cosine(line: Line) -> float | None:
    cosines = by_seed(line, "least_cosine")
    return cosines.min() if len(cosines) else None


def _mean_cosine(line: Line) -> float | None:
    cosines = by_seed(line, "mean_cosine")
    return cosines.mean() if len(cosines) else None


LEARNING_TABLE = ResultTable(
    settings=(
        *("gpu", "device", "size", "batch_size", "context_length", "total_batch_tokens", "steps", "learning_rate"),
        *("dtype", "kernels", "keep", "attention", "cuda_graph", "data", "warmup", "recipe"),
    ),
    always=("recipe",),
    columns=(
        Column("seeds", lambda line: float(len(by_seed(line, "evaluation_loss"))), ".0f"),
        Column("learned tokens", "learned_tokens", ",.0f", rank=2, note="by each run"),
        Column("held-out loss", _held_out, ".4f", note="nats per token, mean and range over the seeds"),
        Column(
            "above stored %",
            _off,
            "+.3f",
            rank=MAIN,
            note="with the same seed, mean and range over the seeds",
        ),
        Column(
            "least cosine",
            _least_cosine,
            ".4f",
            note="of a parameter's gradient with that of fp32, at the end, over all seeds",
        ),
        Column("mean cosine", _mean_cosine, ".4f"),
        Column("tokens/s", "tokens_per_s", ",.0f", rank=MAIN),
        Column("x", speedup, ".3f", note="times as fast as stored"),
    ),
)


@dataclass(frozen=True)
class Deviations:
    """By how many percent held-out losses are above those of stored products with the same seed.

    Attributes:
        n: pairs of runs.
        n_above: of these, with the higher loss.
        error: of the mean, its standard error; NaN of one pair.
    """

    n: int
    n_above: int
    mean: float
    error: float
    least: float
    largest: float


def loss_deviations(rows: pd.DataFrame, *recipes: str) -> Deviations:
    """Of all recipes that are quantized, or of some.

    Raises:
        ValueError: no run of theirs stands beside one of stored products.
    """
    lines = [line for line in LEARNING_TABLE.lines(rows[rows["status"] == "ok"]) if line.settings["recipe"] != "stored"]
    off = [off_percent(line) for line in lines if not recipes or line.settings["recipe"] in recipes]
    if not any(map(len, off)):
        raise ValueError(f"no run of {', '.join(recipes) or 'any recipe'} stands beside one of stored products")
    every = pd.concat([each for each in off if len(each)])
    return Deviations(len(every), int((every > 0).sum()), every.mean(), every.sem(), every.min(), every.max())
