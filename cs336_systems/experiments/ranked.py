"""What experiments on several ranks share: one value from all ranks, the check at the end, tables and pictures."""

import functools
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import torch.distributed as dist

from cs336_systems.costs.communication import busbw_factor, cost
from cs336_systems.distributed.process_group import Rank
from cs336_systems.experiments.driver import Experiment, Stage
from cs336_systems.experiments.options import RankedCase
from cs336_systems.harness.clock import WHOLE, PhaseTimes
from cs336_systems.harness.isolation import Cell
from cs336_systems.harness.record import Metric, read_rows
from cs336_systems.harness.runs import pooled
from cs336_systems.harness.sweep import Outcome, outcome_rows
from cs336_systems.harness.traffic import Event, Traffic
from cs336_systems.profiling.traces import kineto
from cs336_systems.profiling.traces.tables import TraceError
from cs336_systems.report.block_timeline import draw_two_blocks
from cs336_systems.report.results import Line
from cs336_systems.report.show import show
from cs336_systems.report.tables import Table
from cs336_systems.report.timeline import draw_timeline
from cs336_systems.training import TrainStep, assemble, random_batch


def largest(value: float, rank: Rank) -> float:
    """The largest of the ranks' values, on every rank."""
    return _over_ranks(value, rank, dist.ReduceOp.MAX)


def total(value: float, rank: Rank) -> float:
    """The sum of the ranks' values, on every rank."""
    return _over_ranks(value, rank, dist.ReduceOp.SUM)


def _over_ranks(value: float, rank: Rank, operation: dist.ReduceOp.RedOpType) -> float:
    found = torch.tensor(float(value), dtype=torch.float64, device=rank.device)
    dist.all_reduce(found, op=operation)
    return found.item()


MIB = 1024**2

_COLLECTIVES = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "broadcast": "broadcast",
}
"""How c10d's names for collectives begin, and what ``costs`` calls them."""

SENT = "per rank and step, over a ring"
"""Note of a column of ``sent_mib``."""

_PAYLOAD = "before the algorithm's factor"
"""In the unit of earlier rows of all-reduces alone, whose metric ``sent`` was the size of the messages."""


def sent_metric(events: Iterable[Event], world_size: int) -> Metric:
    """MiB that a rank sends for these collectives on a ring, the one convention of what is sent.

    A ring carries (n - 1)/n of an all-gather's output or a reduce-scatter's input, twice that of an all-reduce: the
    message times ``busbw_factor``. An all-reduce between two ranks counts as its message, in a world of one as nothing.

    Raises:
        ValueError: a collective whose bytes on a ring are not known here.
    """
    total = 0.0
    for event in events:
        kind = next((name for start, name in _COLLECTIVES.items() if event.kind.lstrip("_").startswith(start)), None)
        if kind is None:
            raise ValueError(f"how much a ring sends for {event.kind!r} is not known")
        whole = event.n_bytes * (world_size if kind == "reduce_scatter" else 1)  # it is listed by its output
        total += cost(kind, world_size, whole).wire_bytes
    return Metric("sent_per_rank", "MiB per step, on a ring", [total / MIB])


def sent_mib(metrics: Mapping[str, pd.Series], world_size: int) -> float | None:
    """What ``sent_metric`` says, from a cell's rows by metric, earlier ones too; None if they say nothing of it."""
    if "sent_per_rank" in metrics:
        return float(metrics["sent_per_rank"]["median"])
    if "sent" not in metrics:
        return None
    sent = metrics["sent"]
    factor = busbw_factor("all_reduce", world_size) if _PAYLOAD in sent["unit"] else 1.0
    return factor * float(sent["median"])


SCALING = "tokens/s over those of one rank of the host and commit times the ranks"
"""Note of a column of ``scaling``."""

_TIMED = dict.fromkeys(("warmup", "steps"))


def scaling(line: Line, **alone: object) -> float | None:
    """Tokens/s over as many times those of the same settings on one rank, by the same commit on the same CPUs, in %.

    The two may differ in how many steps were timed.

    Args:
        alone: what else one rank is asked, as it sends nothing.
    """
    own, wanted = line.median("tokens_per_s"), line.settings | alone | {"world_size": 1} | _TIMED
    for other in line.lines.values():
        if own is not None and other.settings | _TIMED == wanted:
            one = pooled(other.run_beside(line, ("host", "commit")))
            for rate in one.loc[one["metric"] == "tokens_per_s", "median"]:
                return 100 * own / rate / line.settings["world_size"]
    return None


@dataclass(frozen=True)
class Effort:
    """What is asked of a cell besides its columns: how often it warms up again, and what is recorded of it.

    A turn after the first has fewer steps of warm-up, and only takes the times that are compared: it neither records
    nor counts bytes and messages, and has no steps without communication.
    """

    later_warmup: int | None = None
    """Steps of warm-up in turns after the first; as many as in that if None."""
    trace: Path | None = None
    """Folder for recordings."""
    recorded: tuple[str, ...] = ()
    """Variants that are recorded; empty for all."""
    local_steps: int | None = None
    """Timed steps without communication, of cells that have such; as many as with it if None."""

    @classmethod
    def of(cls, options: Any) -> "Effort":
        """What the options say."""
        said: dict[str, Any] = {field.name: getattr(options, field.name, field.default) for field in fields(cls)}
        return cls(**said)

    def warmup(self, cell: RankedCase) -> int:
        """Steps before those that are timed, in this turn."""
        return cell.warmup if cell.repeat == 0 or self.later_warmup is None else self.later_warmup

    def recording(self, cell: Any) -> Path | None:
        """Where a recording of the cell belongs, or None."""
        if self.trace is None or cell.repeat or cell.variant not in (self.recorded or (cell.variant,)):
            return None
        return self.trace / f"{cell.name}.json.gz"


EFFORT = Effort()
"""The whole of it, without recordings."""


class PreparedStep:
    """A cell's model, data and optimizer on this rank, ready to take steps."""

    def __init__(self, cell: RankedCase, rank: Rank) -> None:
        self.cell, self.rank = cell, rank
        self.step = assemble(cell, rank)
        self.batch = random_batch(cell, rank)

    def phases(self) -> dict[str, Callable[[], None]]:
        """Forward, backward and optimizer; backward holds whatever synchronising gradients adds to it."""
        return self.step.phases("step", *self.batch)

    def sent(self) -> list[Event]:
        """The collectives of one step."""
        with Traffic() as traffic:
            for phase in self.phases().values():
                phase()
        return traffic.sent


def check_losses(step: TrainStep, rank: Rank) -> None:
    """Raise FloatingPointError on every rank unless the last loss of each is finite."""
    assert step.loss is not None
    if largest(not math.isfinite(step.loss.item()), rank):
        raise FloatingPointError("the loss is not finite on every rank")


def time_metrics(times: PhaseTimes, cell: RankedCase) -> list[Metric]:
    """Each phase, the warm-up, and the rate of all ranks' tokens."""
    metrics = [Metric(name, "ms", samples) for name, samples in times.samples_ms.items()]
    if times.warmup_ms:
        metrics.append(Metric("warmup_step", "ms", times.warmup_ms))
    tokens = cell.world_size * cell.tokens_per_step
    rates = [tokens / ms * 1e3 for ms in times.samples_ms[WHOLE]]
    return [*metrics, Metric("tokens_per_s", "1/s, all ranks", rates, derived=True)]


def traced_experiment(
    name: str,
    cell: type,
    make_cells: Callable[[Any], Sequence[Cell]],
    measure: Callable[..., list[Metric]],
    table: Callable[[pd.DataFrame], Table],
    headlines: Sequence[str],
) -> Experiment:
    """One table of the outcomes and of earlier rows of the file; with ``--trace`` a picture beside each recording."""

    def stages(options: Any, cells: Sequence[Cell], outcomes: list[Outcome]) -> list[Stage]:
        return [Stage(cells, functools.partial(measure, effort=Effort.of(options)))]

    def present(outcomes: list[Outcome], options: Any, csv: Path | None) -> None:
        show(table(read_rows(csv) if csv else outcome_rows(outcomes)), options.format)
        draw_traces(outcomes, Effort.of(options))

    return Experiment(name, cell, make_cells, stages, present, headlines)


def draw_traces(outcomes: Sequence[Outcome], effort: Effort) -> None:
    """Draw the last step of each recording beside it, whole and close up; say on stderr where, or why not."""
    for outcome in outcomes:
        cell: Any = outcome.cell
        path = effort.recording(cell)
        if outcome.status != "ok" or path is None:
            continue
        picture = path.with_name(f"{cell.name}.png")
        try:
            trace = kineto.read(path)
            draw_timeline(trace, ["forward", "backward", "optimizer"], str(cell), picture)
            draw_two_blocks(trace, f"{cell}: backward of two blocks", path.with_name(f"{cell.name}-blocks.png"))
        except (TraceError, OSError) as error:
            print(f"no picture of {cell}: {error}", file=sys.stderr)
            continue
        limits = "" if trace.has_gpu else " (no GPU sections: a CPU's trace shows calls, not what gloo's threads send)"
        print(f"{picture}{limits}", file=sys.stderr)
