"""A step under memory caps, for prose: cells by hand, as measured, simulated and published; goals, and what stands
between them and what was measured.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import pandas as pd

from cs336_systems.answers.outside import outside
from cs336_systems.answers.streaming_by_hand import ByHand, streamed_work
from cs336_systems.config import resolve_size
from cs336_systems.report.results import MISSING
from cs336_systems.report.tables import Table

PEER = "ml_dataflow"
"""Of whose cells ``outside.csv`` holds tokens per second: ``ml_dataflow 8192 24/75``."""


@dataclass(frozen=True)
class Goal:
    """For one cell of llama3-8b, set before the first run."""

    context_length: int
    device_gib: int
    host_gib: int
    tokens_per_s: int
    of_uncapped: float | None = None
    """Of what is measured without caps, at least."""
    for_host_gib: int | None = None
    """The cap that the goal was set for, where the cell has a smaller one."""


UNCAPPED = 132, 16
"""GiB of device and host that hold llama3-8b with all that forward keeps."""
GOALS = (
    Goal(8192, *UNCAPPED, 12_400),
    Goal(8192, 24, 75, 10_600, 0.86),
    Goal(8192, 24, 115, 11_400, 0.92, for_host_gib=120),
    Goal(32_768, 24, 80, 7_400),
    Goal(32_768, 24, 120, 7_400),
    Goal(131_072, 78, 115, 3_600, for_host_gib=120),
    Goal(524_288, 130, 120, 1_000),
)


def by_hand_table(rows: pd.DataFrame) -> Table:
    """Sums beside simulations of llama3-8b in chunks of 8,192 tokens, where there is room for all at ``attention``."""
    lines = []
    found = rows[(rows["size"] == "llama3-8b") & rows["context_length"].isin([8192, 32_768]) & (rows["status"] == "ok")]
    for length, device, host in found[["context_length", "device_gib", "host_gib"]].drop_duplicates().to_numpy():
        cell = _Cell(rows, int(length), device, host)
        tokens, chunk = cell("planned_tokens_per_step"), int(cell("planned_chunk"))
        chunks = round(tokens / cell("planned_rounds") / chunk)
        hand = ByHand(streamed_work(cell.size, cell.context_length, chunk), chunks, device, host)
        if hand.by_memory < 0:
            continue
        rate, simulated = hand.tokens_per_s(tokens), cell("simulated_tokens_per_s")
        lines.append(
            {
                "length": f"{cell.context_length:,}",
                "device / host GiB": cell.caps,
                "chunks": chunks,
                "room %": f"{100 * hand.by_memory:.0f}",
                "link %": f"{100 * hand.by_link:.0f}",
                "again %, by hand": f"{100 * hand.again_share:.1f}",
                "again %, simulated": f"{cell('simulated_recompute'):.1f}",
                "tokens/s, by hand": f"{rate:,.0f}",
                "tokens/s, simulated": f"{simulated:,.0f}",
                "by hand / simulated": f"{rate / simulated:.3f}",
            }
        )
    notes = {"room %": "of pairs whose products both memories hold", "link %": "of pairs whose products can come in"}
    return Table("llama3-8b, the same sums with each plan's chunks and tokens of a step.", pd.DataFrame(lines), notes)


def beside_peer_table(rows: pd.DataFrame) -> Table:
    """A line for each measured cell of llama3-8b that the peer publishes too, and ours without caps."""
    lines = []
    capped = rows[(rows["size"] == "llama3-8b") & (rows["device_gib"] > 0)]
    measured = capped[capped["metric"] == "tokens_per_s"]
    for _, row in measured.drop_duplicates(["context_length", "device_gib", "host_gib"], keep="last").iterrows():
        caps = f"{row['device_gib']:g}/{row['host_gib']:g}"
        try:
            theirs = outside(f"{PEER} {int(row['context_length'])} {caps}")
        except LookupError:
            theirs = MISSING
        lines.append(
            {
                "length": f"{int(row['context_length']):,}",
                "device / host GiB": caps.replace("/", " / "),
                "tokens/s": f"{row['median']:,.0f}",
                f"{PEER} on an H100": theirs,
            }
        )
    return Table("llama3-8b, tokens per second; the peer's as it publishes them, of another GPU.", pd.DataFrame(lines))


def goals_table(rows: pd.DataFrame) -> Table:
    """A line for each goal: tokens per second, and where the goal says so, as a share of those without caps."""
    uncapped = _Cell(rows, 8192, *UNCAPPED).tokens_per_s
    lines = []
    for goal in GOALS:
        cell = _Cell.of(rows, goal)
        of_uncapped = goal.of_uncapped is not None
        lines.append(
            {
                "length": f"{goal.context_length:,}",
                "device / host GiB": cell.caps
                + (f", goal for {goal.device_gib} / {goal.for_host_gib}" if goal.for_host_gib else ""),
                "goal": f"{goal.tokens_per_s:,}",
                "measured": f"{cell.tokens_per_s:,.0f}",
                "simulated": f"{cell('simulated_tokens_per_s'):,.0f}",
                "goal, of uncapped": f"{goal.of_uncapped:.2f}" if of_uncapped else MISSING,
                "measured, of uncapped": f"{cell.tokens_per_s / uncapped:.3f}" if of_uncapped else MISSING,
            }
        )
    return Table("llama3-8b, tokens per second; uncapped: with caps that hold all.", pd.DataFrame(lines))


def kernels_table(rows: pd.DataFrame) -> Table:
    """A line for each goal: how fast kernels alone would be that nothing waits for, and how much faster they must be.

    Kernels alone: a chunk's embedding, forward, head and backward, in the mean of measured or simulated milliseconds;
    nothing is computed again and there is no optimizer.
    """
    lines = []
    for goal in GOALS:
        cell = _Cell.of(rows, goal)
        alone = cell.kernels_alone("")
        lines.append(
            {
                "length": f"{goal.context_length:,}",
                "device / host GiB": cell.caps,
                "goal": f"{goal.tokens_per_s:,}",
                "measured": f"{cell.tokens_per_s:,.0f}",
                "kernels alone, simulated": f"{cell.kernels_alone('simulated_'):,.0f}",
                "kernels alone, measured": f"{alone:,.0f}",
                "beside them % of the step": f"{100 * (1 - cell.tokens_per_s / alone):.1f}",
                "goal / kernels alone": f"{goal.tokens_per_s / alone:.3f}",
                "goal / measured": f"{goal.tokens_per_s / cell.tokens_per_s:.3f}",
            }
        )
    notes = {
        "beside them % of the step": "what is computed again, waits, clipping and optimizer",
        "goal / kernels alone": "by how much kernels must be faster if nothing else took time",
        "goal / measured": "the same if everything else keeps its share of the step",
    }
    return Table("llama3-8b, tokens per second.", pd.DataFrame(lines), notes)


def beyond_simulation_table(rows: pd.DataFrame) -> Table:
    """A line for each measured cell: the time of its step beyond the simulated one, by what took it, in ms."""
    lines = []
    for cell in _Cell.measured(rows):
        config = resolve_size(cell.size)
        chunks = cell("planned_tokens_per_step") / cell("planned_chunk")
        pairs = config.n_layers * chunks
        parts = {
            "forward": pairs * cell.beyond("forward_operation"),
            "backward": pairs * cell.beyond("backward_operation"),
            "head": chunks * cell.beyond("head_operation"),
            "embedding's backward": chunks * cell.beyond("embed_backward_operation"),
            "again": cell.beyond("recompute", of_step=True),
            "no kernel": cell.beyond("compute_idle", of_step=True),
        }
        beyond = cell.beyond("step")
        lines.append(
            {
                "size": cell.size,
                "length": f"{cell.context_length:,}",
                "device / host GiB": cell.caps,
                "step, s": f"{cell('step') / 1e3:.2f}",
                "beyond, ms": f"{beyond:+,.0f}",
                **{name: f"{ms:+,.0f}" for name, ms in parts.items()},
                "rest": f"{beyond - sum(parts.values()):+,.0f}",
            }
        )
    notes = {"rest": "embedding, clipping and optimizer; of several steps also that times by kind are the last one's"}
    return Table("ms of a step beyond the simulated one, by what took them.", pd.DataFrame(lines), notes)


@dataclass(frozen=True)
class _Cell:
    """A measured cell."""

    rows: pd.DataFrame
    context_length: int
    device_gib: float
    host_gib: float
    size: str = "llama3-8b"

    @classmethod
    def of(cls, rows: pd.DataFrame, goal: Goal) -> "_Cell":
        return cls(rows, goal.context_length, goal.device_gib, goal.host_gib)

    @classmethod
    def measured(cls, rows: pd.DataFrame) -> Iterator["_Cell"]:
        """All under caps, from the shortest sequences on."""
        names = ["size", "context_length", "device_gib", "host_gib"]
        capped = rows[(rows["device_gib"] > 0) & (rows["metric"] == "tokens_per_s")]
        for size, length, device, host in capped[names].drop_duplicates().sort_values(names).itertuples(index=False):
            yield cls(rows, int(length), device, host, size)

    def __call__(self, metric: str) -> float:
        """Raises LookupError if it was not measured."""
        settings = {name: getattr(self, name) for name in ("size", "context_length", "device_gib", "host_gib")}
        found = self.rows[self.rows["metric"] == metric]
        for name, value in settings.items():
            found = found[found[name] == value]
        if found.empty:
            raise LookupError(f"no row has {metric} of {settings}")
        return float(found["median"].iloc[-1])

    @property
    def caps(self) -> str:
        return f"{self.device_gib:g} / {self.host_gib:g}"

    @property
    def tokens_per_s(self) -> float:
        return self("tokens_per_s")

    def kernels_alone(self, prefix: str) -> float:
        """Tokens per second if nothing else took time."""
        of = partial(self._ms, prefix=prefix)
        ends = of("embed") + of("head") + of("embed_backward")
        chunk_ms = resolve_size(self.size).n_layers * (of("forward") + of("backward")) + ends
        return self("planned_chunk") / chunk_ms * 1e3

    def _ms(self, kind: str, prefix: str) -> float:
        return self(f"{prefix}{kind}_operation")

    def beyond(self, metric: str, *, of_step: bool = False) -> float:
        """Measured less simulated; with ``of_step`` of the step's time, where the metric is a percentage of it."""
        after, before = self(metric), self(f"simulated_{metric}")
        return (after * self("step") - before * self("simulated_step")) / 100 if of_step else after - before
