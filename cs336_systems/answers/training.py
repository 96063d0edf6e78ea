"""Whole training runs: rates by size beside peers and published ones, and scaling over ranks.

Runs in fp8 have lines of their own: with the run in bf16 of the same command, torchao's, and llm.q's in fp8. Figures of
others are in ``outside.csv``, each with its source and the date on which the source gave it.
"""

import csv
import functools
import math
from pathlib import Path
from typing import Any

import pandas as pd

from cs336_systems.answers.committed import NotMeasured
from cs336_systems.config import MODEL_SIZES
from cs336_systems.experiments.training import TORCHAO, UNSHARDED, fastest
from cs336_systems.report.results import COMMAND, MISSING
from cs336_systems.report.tables import Table, digits

OUTSIDE = Path(__file__).with_name("outside.csv")

_SIZES = ("qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b", "qwen2.5-7b", "qwen2.5-14b")
APART = "ranks apart"
WAYS: dict[str, dict[str, object]] = {
    "ZeRO-1": {"zero": 1, "apart": "off"},
    "ZeRO-3, collectives": {"zero": 3, "gather_by": "collectives", "apart": "off"},
    "ZeRO-3, copies": {"zero": 3, "gather_by": "copies", "apart": "off"},
    APART: {"apart": "on"},
}
"""How ranks share a step, by the settings of a row; ranks apart are independent replicas."""

_PEERS = {
    "transformers, Liger": ("transformers-liger", "transformers-liger-cudnn", "transformers-liger-whole"),
    "transformers": ("transformers", "transformers-cudnn"),
}
"""The ways in which each peer was tried, by its name."""


@functools.cache
def _published() -> dict[str, dict[str, str]]:
    with OUTSIDE.open(newline="", encoding="utf-8") as file:
        return {line.pop("name"): line for line in csv.DictReader(file)}


def outside(name: str) -> str:
    """A figure that no row holds, with its unit: published by others, a goal of ours, or a prediction before a run.

    Raises:
        LookupError: ``outside.csv`` holds none of this name.
    """
    if name not in _published():
        raise LookupError(f"outside.csv holds no {name!r}, only {', '.join(_published())}")
    return _published()[name]["figure"]


def outside_table() -> Table:
    """All of them, with source and date."""
    return Table("As their sources gave them on the date.", pd.DataFrame(_published().values()))


def _figures(what: str, *, fp8: bool) -> dict[str, float]:
    """Tokens per second by size, of the lines of ``outside.csv`` named ``what``, the size and, in fp8, fp8."""
    suffix = " fp8" if fp8 else ""
    return {size: 1000 * float(outside(f"{what} {size}{suffix}").removesuffix("k tokens/s")) for size in _SIZES}


def llmq_rates(*, fp8: bool = False) -> dict[str, float]:
    """Tokens per second by size, as its authors give them of one H100."""
    return _figures("llm.q", fp8=fp8)


def llmq_ways() -> dict[str, dict[str, float]]:
    """``llmq_rates`` of both dtypes, by the labels of their bars in a figure."""
    return {"llm.q, published": llmq_rates(), "llm.q, e4m3, published": llmq_rates(fp8=True)}


def llmq_table(rows: pd.DataFrame) -> Table:
    """Our fastest run on one H100 of each size and dtype of matmuls, beside llm.q's rate there and the goal.

    Args:
        rows: runs of ``train.py`` on one H100.
    """
    lines = []
    for run in _fastest(rows[rows["how"] == "ours"]):
        fp8, size, rate = run["recipe"] != "stored", run["size"], run["tokens_per_s"]
        if size not in _SIZES:
            continue
        goal = _figures("goal H100", fp8=fp8)[size]
        line = {"size": size, "matmuls": run["recipe"] if fp8 else "bf16", "tokens/s": f"{rate:,.0f}"}
        line |= {"llm.q, published": _beside(llmq_rates(fp8=fp8)[size], rate), "goal": f"{goal:,.0f}"}
        line |= {"of the goal %": f"{100 * rate / goal:.1f}", "speed of light %": f"{run['speed_of_light']:.1f}"}
        line |= {"batch": f"{run['batch_size']:g}", "tokens a step": f"{run['total_batch_tokens']:,.0f}"}
        line |= {"keep": run["keep"], "on the host": run["offload"], "matmul kernels": run["matmul_kernels"]}
        lines.append(line | {"peak GiB": digits(run["peak_memory"])})
    lines.sort(key=lambda line: line["matmuls"] != "bf16")
    return Table("One H100 (80 GB); in brackets ours over llm.q's.", pd.DataFrame(lines))


def training_rates_table(rows: pd.DataFrame) -> Table:
    """A line for each size: our fastest run in bf16, how it ran, and the others' tokens per second in the way in which
    each was fastest, with ours over them."""
    runs = _fastest(of_bf16_commands(rows))
    rates = {(run["size"], run["how"]): run["tokens_per_s"] for run in runs}
    lines = []
    for run in runs:
        if run["how"] == "ours":
            size, own = run["size"], run["tokens_per_s"]
            others = {
                name: _beside(max((rates.get((size, way), 0.0) for way in ways), default=0.0), own)
                for name, ways in _PEERS.items()
            }
            lines.append(_line(run, others))
    return _table(lines, runs[0])


def fp8_rates_table(rows: pd.DataFrame) -> Table:
    """A line for each size and recipe in fp8: our fastest run, in bf16 and torchao's, each of a command with ours.

    Raises:
        NotMeasured: no run in fp8 is among the rows.
    """
    runs = _fastest(rows[(rows["how"] == "ours") & (rows["recipe"] != "stored")])
    if not runs:
        raise NotMeasured("training, runs in fp8")
    lines = []
    for run in runs:
        others = {"bf16": _in_one_command(run, rows, how="ours", recipe="stored")}
        others |= {how.replace("-", ", "): _in_one_command(run, rows, how=how) for how in TORCHAO}
        line = _line(run, others)
        lines.append({"size": line.pop("size"), "products": run["recipe"]} | line)
    smaller = "whose steps and micro-batches may be smaller than those of our fastest run"
    return _table(lines, runs[0], f"; bf16's and torchao's runs are of one command with ours, {smaller}")


def of_bf16_commands(rows: pd.DataFrame) -> pd.DataFrame:
    """Runs of commands that quantize nothing: elsewhere one in bf16 stands beside those in fp8, not beside the peers of
    another day."""
    quantizes = (rows["recipe"] != "stored").groupby([rows[name] for name in COMMAND], sort=False).transform("any")
    return rows[~quantizes]


def _in_one_command(run: dict[str, Any], rows: pd.DataFrame, **other: str) -> str:
    """Another's rate at the same size beside ours of the same recipe, of the command that has both and in which ours is
    fastest."""
    found = []
    for _, command in rows[rows["size"] == run["size"]].groupby(list(COMMAND), sort=False):
        own = _fastest(command[(command["how"] == "ours") & (command["recipe"] == run["recipe"])])
        peer = _fastest(command[(command[[*other]] == [*other.values()]).all(axis=1)])
        found += [(own[0]["tokens_per_s"], peer[0]["tokens_per_s"])] if own and peer else []
    own_rate, rate = max(found, default=(0.0, None))
    return _beside(rate, own_rate)


def _fastest(rows: pd.DataFrame) -> list[dict[str, Any]]:
    """The lines of ``fastest``, from small to large sizes."""
    runs = [{str(name): value for name, value in run.items()} for run in fastest(rows).to_dict("records")]
    return sorted(runs, key=lambda run: list(MODEL_SIZES).index(run["size"]))


def _beside(rate: float | None, own: float) -> str:
    """Another's tokens per second, and ours over them."""
    return f"{rate:,.0f} ({own / rate:.2f})" if rate else MISSING


def _line(run: dict[str, Any], others: dict[str, str]) -> dict[str, str]:
    return {
        **{"size": run["size"], "tokens/s": f"{run['tokens_per_s']:,.0f}"},
        **{"speed of light %": f"{run['speed_of_light']:.1f}"},
        **others,
        **{"peak GiB": digits(run["peak_memory"]), "predicted": digits(run["predicted_peak_memory"])},
        **{"batch": f"{run['batch_size']:g}", "tokens a step": f"{run['total_batch_tokens']:,.0f}"},
        **{"kernels": run["kernels"], "keep": run["keep"]},
    }


def _table(lines: list[dict[str, str]], first: dict[str, Any], compared: str = "") -> Table:
    said = (
        f"{first['gpu']}, {first['dtype']}, sequences of {first['context_length']:,}, {first['data']}; medians without "
        f"the first two steps; in brackets ours over theirs{compared}."
    )
    frame = pd.DataFrame(lines)
    return Table(said, frame[[name for name in frame if (frame[name] != MISSING).any()]])


def over_one_rank(rows: pd.DataFrame) -> pd.DataFrame:
    """Tokens per second over those of one rank: a line for each size, recipe, number of ranks and command, not only the
    newest, so that commands of several hosts stand below each other.

    Returns:
        ``size``, ``products`` (the recipe, bf16 where they are stored), ``ranks``, ``commit`` (its first seven digits)
        and a column for each of ``WAYS``, NaN where it was not measured; no line for a command without one rank.
    """
    rates = rows[(rows["status"] == "ok") & (rows["metric"] == "tokens_per_s")]
    lines = []
    for (size, recipe, *command), runs in rates.groupby(["size", "recipe", *COMMAND], sort=False):
        one = runs.loc[(runs["world_size"] == 1) & runs["zero"].isin(UNSHARDED), "median"]
        if one.empty:
            continue
        commit = str(dict(zip(COMMAND, command, strict=True))["commit"])[:7]
        products = "bf16" if recipe == "stored" else recipe
        for ranks, shared in runs[runs["world_size"] > 1].groupby("world_size"):
            ratios = {way: _rate(shared, settings) / one.iloc[0] for way, settings in WAYS.items()}
            lines.append({"size": size, "products": products, "ranks": ranks, "commit": commit} | ratios)
    lines.sort(key=lambda line: (list(MODEL_SIZES).index(line["size"]), line["products"], line["ranks"]))
    return pd.DataFrame(lines)


def _rate(runs: pd.DataFrame, settings: dict[str, object]) -> float:
    found = runs.loc[(runs[list(settings)] == list(settings.values())).all(axis=1), "median"]
    return found.iloc[0] if len(found) else math.nan


def scaling_table(rows: pd.DataFrame) -> Table:
    """The lines of ``over_one_rank``, and ZeRO-1 over ranks that send nothing.

    Raises:
        NotMeasured: no command has measured one rank and several.
    """
    lines = over_one_rank(rows)
    if lines.empty:
        raise NotMeasured("training on several ranks beside one")
    ratios = lines[[*WAYS]].assign(**{"ZeRO-1 over apart": lines["ZeRO-1"] / lines[APART]})
    shown = ratios.map(lambda ratio: MISSING if pd.isna(ratio) else f"{ratio:.3f}")
    frame = pd.concat([lines[["size", "products", "ranks"]], shown, lines["commit"]], axis=1)
    return Table("Tokens/s over those of one rank in the same command.", frame)
