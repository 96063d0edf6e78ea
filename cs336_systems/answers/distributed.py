"""Blocks and quoted numbers about several GPUs: collectives, data parallelism, sharded state, FSDP."""

from collections.abc import Callable
from pathlib import Path

import pandas as pd

from cs336_systems.answers.committed import Committed, NotMeasured
from cs336_systems.answers.predictions import (
    DATASHEET,
    collectives_predictions,
    ddp_predictions,
    exposed_ms,
    fitted_link,
    fsdp_predictions,
    gradient_sizes,
    rung_messages,
    sharded_predictions,
)
from cs336_systems.answers.quotes import Term
from cs336_systems.config import resolve_size
from cs336_systems.costs.communication import cost
from cs336_systems.costs.fsdp import model_units, state_bytes, step_traffic
from cs336_systems.costs.sharding import link_bytes_per_step, state_bytes_by_rank
from cs336_systems.experiments.collectives.table import collectives_table, draw_collectives
from cs336_systems.experiments.data_parallel.table import data_parallel_table
from cs336_systems.experiments.fully_sharded.table import fully_sharded_table
from cs336_systems.experiments.sharded_optimizer.table import draw_memory, memory_table, time_table
from cs336_systems.harness.runs import median_of

GIB, MIB = 2**30, 2**20
COLLECTIVES, DDP, SHARDED, FSDP = "collectives", "ddp", "sharded-optimizer", "fsdp"
"""Parts; the file in each is ``benchmark_<part>.csv`` with underscores."""

TRACES = "traces"
"""The part of the recorded steps, with a file of each benchmark."""

CPU = "cpu"
"""The machine without a GPU on which gloo was measured."""

DEFAULT_BUCKET_MIB = 25.0
"""Of ``benchmark_ddp.py``, and of torch's DDP."""

PICTURES = {
    COLLECTIVES: ("h200_collectives.png", "time and bus bandwidth of all-reduce against size, two and four GPUs"),
    SHARDED: ("h200_sharded_optimizer.png", "memory of one rank by category, at four moments of a step"),
}


def rows_of(committed: Committed, part: str) -> pd.DataFrame:
    """The rows of one part."""
    return committed.rows(part, f"benchmark_{part.replace('-', '_')}")


def blocks(committed: Committed) -> dict[str, Callable[[], str]]:
    """Tables by the names of their markers."""

    def rows(part: str) -> pd.DataFrame:
        return rows_of(committed, part)

    def links() -> pd.DataFrame | None:
        try:
            return rows(COLLECTIVES)
        except NotMeasured:
            return None

    def picture(part: str) -> str:
        rows(part)
        name, what = PICTURES[part]
        return f"![{what}](profiles/figures/{name})"

    return {
        "collectives": lambda: collectives_table(rows(COLLECTIVES)).markdown(),
        "collectives-gloo": lambda: collectives_table(rows_of(committed.beside(CPU), COLLECTIVES)).markdown(),
        "collectives-figure": lambda: picture(COLLECTIVES),
        "collectives-predictions": lambda: collectives_predictions(rows(COLLECTIVES)).markdown(),
        "ddp": lambda: data_parallel_table(_ladder(rows(DDP))).markdown(),
        "ddp-all": lambda: data_parallel_table(rows(DDP)).markdown(),
        "ddp-buckets": lambda: data_parallel_table(_bucketed(rows(DDP))).markdown(),
        "ddp-predictions": lambda: ddp_predictions(_ladder(rows(DDP)), links()).markdown(),
        "ddp-recorded": lambda: data_parallel_table(committed.rows(TRACES, "benchmark_ddp")).markdown(),
        "ddp-traces": lambda: traces(committed, DDP, "-naive-", "-overlapped-"),
        "sharded-memory": lambda: memory_table(rows(SHARDED)).markdown(),
        "sharded-time": lambda: time_table(rows(SHARDED)).markdown(),
        "sharded-figure": lambda: picture(SHARDED),
        "sharded-predictions": lambda: sharded_predictions(rows(SHARDED), links()).markdown(),
        "fsdp": lambda: fully_sharded_table(rows(FSDP)).markdown(),
        "fsdp-recorded": lambda: fully_sharded_table(committed.rows(TRACES, "benchmark_fsdp")).markdown(),
        "fsdp-traces": lambda: traces(committed, FSDP, "-ours-"),
        "training-leaderboard": lambda: fully_sharded_table(
            committed.rows("fsdp-leaderboard", "benchmark_fsdp")
        ).markdown(),
        "fsdp-predictions": lambda: fsdp_predictions(rows(FSDP), links()).markdown(),
    }


def figures(committed: Committed, folder: Path) -> dict[Path, Callable[[Path], object]]:
    """What to call with a figure's path; raises ``NotMeasured`` where the rows are missing."""

    def collectives(path: Path) -> None:
        draw_collectives(_all_reduces(rows_of(committed, COLLECTIVES)), path)

    def sharded(path: Path) -> None:
        draw_memory(rows_of(committed, SHARDED), path)

    draw = {COLLECTIVES: collectives, SHARDED: sharded}
    return {folder / name: draw[part] for part, (name, _) in PICTURES.items()}


def terms(committed: Committed) -> dict[str, Term]:
    """Numbers that prose quotes, by the first word of the quote."""

    def collective(metric: str, name: str, ranks: str, size_mb: str) -> float:
        rows = rows_of(committed, COLLECTIVES)
        rows = rows[(rows["device"] == "cuda") & (rows["collective"] == name) & (rows["dtype"] == "fp32")]
        return median_of(rows[(rows["world_size"] == int(ranks)) & (rows["size_mb"] == float(size_mb))], metric)

    def gloo(metric: str, ranks: str, size_mb: str) -> float:
        rows = rows_of(committed.beside(CPU), COLLECTIVES)
        return median_of(rows[(rows["world_size"] == int(ranks)) & (rows["size_mb"] == float(size_mb))], metric)

    def of_bucket(rows: pd.DataFrame, mib: str) -> pd.DataFrame:
        """Those whose buckets have the size, all of them if it is "any"."""
        return rows if mib == "any" else rows[pd.to_numeric(rows["bucket_size_mb"], errors="coerce") == float(mib)]

    def ddp(
        metric: str, rung: str, dtype: str = "fp32", bucket: str = "any", size: str = "xl", ranks: str = "2"
    ) -> float:
        rows = rows_of(committed, DDP)
        rows = rows[(rows["size"] == size) & (rows["world_size"] == int(ranks)) & (rows["ddp"] == rung)]
        rows = rows[(rows["dtype"] == dtype) & (rows["communication_dtype"] == "same") & (rows["compile"] == "off")]
        return _median(of_bucket(rows, bucket), metric)

    def ddp_part(part: str, metric: str, rung: str, bucket: str = "any", size: str = "xl") -> float:
        """Of a part that holds one experiment with data parallelism."""
        rows = committed.rows(part, "benchmark_ddp")
        return _median(of_bucket(rows[(rows["ddp"] == rung) & (rows["size"] == size)], bucket), metric)

    def sharded(metric: str, sharding: str, size: str = "xl") -> float:
        rows = rows_of(committed, SHARDED)
        rows = rows[(rows["size"] == size) & (rows["world_size"] == 2) & (rows["dtype"] == "fp32")]
        rows = rows[(rows["sharding"] == sharding) & (rows["metric"] == metric)]
        return _median(rows, metric)

    def fsdp(
        metric: str, name: str, dtype: str = "fp32", ahead: str = "any", size: str = "xl", ranks: str = "2"
    ) -> float:
        rows = rows_of(committed, FSDP)
        rows = rows[(rows["size"] == size) & (rows["world_size"] == int(ranks)) & (rows["fsdp"] == name)]
        rows = rows[(rows["dtype"] == dtype) & (rows["compile"] == "off")]
        if ahead != "any":
            rows = rows[pd.to_numeric(rows["prefetch"], errors="coerce") == float(ahead)]
        return _median(rows, metric)

    def leaderboard(metric: str, name: str, attention: str = "hopper") -> float:
        rows = committed.rows("fsdp-leaderboard", "benchmark_fsdp")
        return _median(rows[(rows["fsdp"] == name) & (rows["attention"] == attention)], metric)

    def link_share(name: str, ranks: str, size_mb: str) -> float:
        """Of bus bandwidth in what the link carries in one direction by its datasheet."""
        return collective("busbw", name, ranks, size_mb) * 1e9 / DATASHEET.bytes_per_s

    def predicted_exposed(rung: str, ranks: str = "2", size: str = "xl", bucket: str = "25") -> float:
        """At the datasheet's bandwidth; backward taken to be long enough to hide what it can."""
        messages = rung_messages(rung, gradient_sizes(size), float(bucket))
        return exposed_ms(rung, messages, int(ranks), DATASHEET, float("inf"))

    def messages(rung: str, size: str = "xl", bucket: str = "25") -> float:
        return len(rung_messages(rung, gradient_sizes(size), float(bucket)))

    def predicted_state(form: str, size: str = "xl", ranks: str = "2") -> float:
        return max(state_bytes_by_rank(form, gradient_sizes(size), int(ranks))) / GIB

    def link_bytes(form: str, size: str = "xl", ranks: str = "2") -> float:
        """GiB that cross each link in a step."""
        n_bytes = sum(gradient_sizes(size))
        return link_bytes_per_step(form, n_bytes, int(ranks)) / GIB

    def fsdp_states(size: str = "xl", ranks: str = "2") -> float:
        return state_bytes(model_units(resolve_size(size)), int(ranks)).total / GIB

    def fsdp_sent(size: str = "xl", ranks: str = "2") -> float:
        return step_traffic(model_units(resolve_size(size)), int(ranks)).sent_per_rank / GIB

    def block_forward(size: str, dtype: str) -> float:
        """Forward on one GPU, over the number of blocks."""
        rows = committed.rows("context-512")
        rows = rows[(rows["size"] == size) & (rows["dtype"] == dtype) & (rows["mode"] == "step")]
        return median_of(rows, "forward") / resolve_size(size).n_layers

    def copies_ms(size: str = "xl") -> float:
        """Reading and writing every gradient twice, at the bandwidth of a measured copy."""
        bandwidth = median_of(committed.rows("context-512"), "copy_ceiling")
        return 4 * sum(gradient_sizes(size)) / bandwidth / 1e6

    def block_gather(ranks: str = "2", size: str = "xl", bytes_per_element: str = "4") -> float:
        n_bytes = int(bytes_per_element) * resolve_size(size).n_block_parameters
        return 1e3 * DATASHEET.seconds(cost("all_gather", int(ranks), n_bytes))

    def fitted(what: str, ranks: str) -> float:
        link = fitted_link(rows_of(committed, COLLECTIVES), int(ranks))
        if link is None:
            raise NotMeasured(f"no link of {ranks} ranks can be fitted")
        return {"latency-us": 1e6 * link.alpha_s, "gb-per-s": link.bytes_per_s / 1e9}[what]

    def best_bucket(ranks: str = "2", size: str = "xl") -> float:
        """sqrt(s w o) in MiB with the fitted link: o its latency per call, w its all-reduce bandwidth."""
        link = fitted_link(rows_of(committed, COLLECTIVES), int(ranks))
        if link is None:
            raise NotMeasured(f"no link of {ranks} ranks can be fitted")
        call = cost("all_reduce", int(ranks), 1.0)
        overhead, bandwidth = call.steps * link.alpha_s, 1 / (call.wire_bytes * link.beta_s_per_byte)
        return (sum(gradient_sizes(size)) * bandwidth * overhead) ** 0.5 / MIB

    return {
        "collective": Term(collective),
        "gloo": Term(gloo),
        "link-share": Term(link_share, "%.0f"),
        "ddp": Term(ddp),
        "ddp-part": Term(ddp_part),
        "ddp-difference": Term(lambda metric, one, other: ddp(metric, one) - ddp(metric, other), ".1f"),
        "sharded": Term(sharded),
        "sharded-slowdown": Term(
            lambda how, size="xl": sharded("step", how, size) / sharded("step", "replicated", size) - 1, "%.1f"
        ),
        "fsdp": Term(fsdp),
        "training-leaderboard": Term(leaderboard),
        "fsdp-difference": Term(lambda metric, one, other: fsdp(metric, one) - fsdp(metric, other), ".1f"),
        "predicted-exposed": Term(predicted_exposed),
        "messages": Term(messages, ".0f"),
        "states-gib": Term(lambda size: 4 * sum(gradient_sizes(size)) / GIB),
        "block-forward-ms": Term(block_forward),
        "flat-copies-ms": Term(copies_ms),
        "parameter-gib": Term(lambda size="xl": sum(gradient_sizes(size)) / GIB),
        "predicted-state": Term(predicted_state),
        "link-gib": Term(link_bytes),
        "fsdp-states": Term(fsdp_states),
        "fsdp-sent": Term(fsdp_sent),
        "block-gather-ms": Term(block_gather),
        "fitted-link": Term(fitted),
        "best-bucket-mib": Term(best_bucket),
    }


def _median(rows: pd.DataFrame, metric: str) -> float:
    """Over repeats, the median of medians."""
    found = rows[rows["metric"] == metric]["median"]
    if found.empty:
        raise NotMeasured(f"no row holds {metric}")
    return float(found.median())


def _all_reduces(rows: pd.DataFrame) -> pd.DataFrame:
    """The handouts' collective between GPUs in fp32, of every world, on whichever host of the same GPU it ran."""
    rows = rows[(rows["device"] == "cuda") & (rows["dtype"] == "fp32") & (rows["collective"] == "all_reduce")]
    return rows.assign(host="")


def _two_ranks(rows: pd.DataFrame) -> pd.DataFrame:
    """Cells of the handouts' setting: fp32 on two GPUs, sent as they are."""
    found = rows[(rows["world_size"] == 2) & (rows["dtype"] == "fp32") & (rows["communication_dtype"] == "same")]
    if found.empty:
        raise NotMeasured("no row of two ranks in fp32 is committed")
    return found


def _ladder(rows: pd.DataFrame) -> pd.DataFrame:
    """Every rung, those with buckets at the default size; both model sizes."""
    buckets = pd.to_numeric(rows["bucket_size_mb"], errors="coerce")
    return _two_ranks(rows[buckets.isna() | (buckets == DEFAULT_BUCKET_MIB)])


def _bucketed(rows: pd.DataFrame) -> pd.DataFrame:
    """The xl model under every bucket size, smallest first."""
    rows = _two_ranks(rows[(rows["ddp"] == "bucketed") & (rows["size"] == "xl")])
    order = pd.to_numeric(rows["bucket_size_mb"]).sort_values(kind="stable").index
    return rows.loc[order]


def traces(committed: Committed, part: str, *names: str) -> str:
    """Pictures of a recorded step of xl, by what its file's name holds.

    Raises:
        NotMeasured: a picture is not committed.
    """
    pictures = []
    for name in names:
        found = sorted((committed.digests / part).glob(f"xl-*{name}*.png"))
        if not found:
            raise NotMeasured(
                f"no picture of {name.strip('-')} below `profiles/digests/{committed.digests.name}/{part}`"
            )
        pictures += [
            f"![one step of xl, {path.stem}](profiles/digests/{committed.digests.name}/{part}/{path.name})"
            for path in found
        ]
    return "\n\n".join(pictures)
