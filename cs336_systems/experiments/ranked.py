"""Shared by benchmarks on several ranks: a value from all ranks, bytes on a ring, checks, tables and pictures.

Importing this module imports no torch, pandas or matplotlib.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cs336_systems.config import PHASES
from cs336_systems.costs.communication import cost
from cs336_systems.experiments.driver import Present, Stage, Stages, presented
from cs336_systems.experiments.options import RankedCase
from cs336_systems.hardware import MIB
from cs336_systems.report.results import Column

if TYPE_CHECKING:
    import pandas as pd

    from cs336_systems.distributed.process_group import Rank
    from cs336_systems.harness.clock import PhaseTimes
    from cs336_systems.harness.memory import PeakMeter
    from cs336_systems.harness.record import Metric
    from cs336_systems.harness.sweep import Outcome
    from cs336_systems.harness.traffic import Event
    from cs336_systems.report.results import Line
    from cs336_systems.report.tables import Table
    from cs336_systems.training import TrainStep

_COLLECTIVES = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "broadcast": "broadcast",
}
"""The name of a collective in ``costs``, by how c10d's name for it begins."""

SENT = "per rank and step, over a ring"
"""Note of a column of ``sent_metric``."""

OVERLAP = (
    Column(
        *("hidden %", "hidden_share", ".1f"),
        rank=2,
        optional=True,
        note="communication overlapped with other kernels",
    ),
    Column("waited ms", "waited", ".2f", rank=2, optional=True, note="only communication runs"),
)
"""Columns of a recorded step's communication."""

SCALING = "tokens/s / (ranks x tokens/s of one rank, same host and commit)"
"""Note of a column of ``scaling``."""


def largest(value: float, rank: Rank) -> float:
    """The largest of the ranks' values, on every rank; a collective."""
    import torch
    import torch.distributed as dist

    found = torch.tensor(float(value), dtype=torch.float64, device=rank.device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found.item()


def sent_metric(events: Iterable[Event], world_size: int) -> Metric:
    """MiB that a rank sends for these collectives on a ring, the one convention of what is sent.

    A ring carries (n - 1)/n of an all-gather's output or a reduce-scatter's input, twice that of an all-reduce: the
    message times ``busbw_factor``. An all-reduce between two ranks counts as its message, in a world of one as nothing.

    Raises:
        ValueError: a collective whose bytes on a ring are not known here.
    """
    from cs336_systems.harness.record import Metric

    n_bytes = 0.0
    for event in events:
        kind = next((name for start, name in _COLLECTIVES.items() if event.kind.lstrip("_").startswith(start)), None)
        if kind is None:
            raise ValueError(f"how much a ring sends for {event.kind!r} is not known")
        whole = event.n_bytes * (world_size if kind == "reduce_scatter" else 1)  # it is listed by its output
        n_bytes += cost(kind, world_size, whole).wire_bytes
    return Metric("sent_per_rank", "MiB per step, on a ring", [n_bytes / MIB])


def scaling(line: Line, **alone: object) -> float | None:
    """Tokens/s over as many times those of the same settings on one rank, by the same commit on the same CPUs, in %.

    The two may differ in how many steps were timed.

    Args:
        alone: settings of one rank that differ from the line's, as one rank sends nothing.
    """
    from cs336_systems.harness.runs import pooled

    timed = dict.fromkeys(("warmup", "steps"))
    own, wanted = line.median("tokens_per_s"), line.settings | alone | {"world_size": 1} | timed
    for other in line.lines.values():
        if own is not None and other.settings | timed == wanted:
            rates = pooled(other.run_beside(line, ("host", "commit"))).set_index("metric")["median"]
            if "tokens_per_s" in rates:
                return 100 * own / rates["tokens_per_s"] / line.settings["world_size"]
    return None


@dataclass(frozen=True)
class Effort:
    """How a cell is measured, besides its columns: warm-up of later repeats, and recordings.

    Repeats after the first only measure the compared times: they neither record nor count bytes and messages.
    """

    later_warmup: int | None = None
    """Steps of warm-up in turns after the first; as many as in that if None."""
    trace: Path | None = None
    """Folder for recordings."""
    recorded: tuple[str, ...] = ()
    """Variants that are recorded; empty for all."""

    @staticmethod
    def check(options: Any, cells: Iterable[Any]) -> None:
        """Raise ValueError if ``--recorded`` names what will not be recorded of these cells."""
        variants = dict.fromkeys(str(cell.variant) for cell in cells)
        for name in options.recorded:
            if options.trace is None:
                raise ValueError(f"--recorded {name} needs --trace, the folder for recordings")
            if name not in variants:
                raise ValueError(f"--recorded {name}: only {', '.join(variants)} are measured")

    @classmethod
    def of(cls, options: Any) -> Effort:
        return cls(options.later_warmup, getattr(options, "trace", None), getattr(options, "recorded", ()))

    def warmup(self, cell: RankedCase) -> int:
        """Steps before those that are timed, in this turn."""
        return cell.warmup if cell.repeat == 0 or self.later_warmup is None else self.later_warmup

    def recording(self, cell: Any) -> Path | None:
        """Where a recording of the cell belongs, or None."""
        if self.trace is None or cell.repeat or cell.variant not in (self.recorded or (cell.variant,)):
            return None
        return self.trace / f"{cell.name}.json.gz"


EFFORT = Effort()
"""Every measurement of a cell, without recordings."""


def with_effort(measure: Callable[..., Any]) -> Stages:
    """All cells by ``measure(cell, rank, effort=...)``."""
    return lambda options, cells, outcomes: [Stage(cells, functools.partial(measure, effort=Effort.of(options)))]


def recording_name(cell: RankedCase, *words: str) -> str:
    """The stem of a cell's recordings: model, dtype, how blocks run, words of the question, ranks."""
    blocks = "compiled" if cell.compiled else f"{cell.kernels}-keep-{cell.keep}" if cell.written_out else ""
    several = f"{cell.accumulate}x" if cell.accumulate != 1 else ""
    names = (str(cell.size), cell.dtype, blocks, several, *words, f"{cell.world_size}ranks")
    return "-".join(filter(None, names))


class PreparedStep:
    """A cell's model, data and optimizer on this rank, ready to take steps."""

    def __init__(self, cell: Any, rank: Rank) -> None:
        from cs336_systems.training import assemble, random_batch

        self.cell, self.rank = cell, rank
        self.step = assemble(cell, rank)
        self.batch = random_batch(cell, rank)

    def phases(self) -> dict[str, Callable[[], None]]:
        """Forward, backward and optimizer; backward holds whatever synchronising gradients adds to it."""
        return self.step.phases("step", *self.batch)

    def sent(self) -> list[Event]:
        """The collectives of one step."""
        from cs336_systems.harness.traffic import Traffic

        with Traffic() as traffic:
            for phase in self.phases().values():
                phase()
        return traffic.sent


def check_losses(step: TrainStep, rank: Rank) -> None:
    """Raise FloatingPointError on every rank unless the last loss of each is finite."""
    assert step.loss is not None
    if largest(not math.isfinite(step.loss.item()), rank):
        raise FloatingPointError("the loss is not finite on every rank")


def check_replicas(prepared: PreparedStep) -> None:
    """Raise on every rank unless parameters are bit-identical on ranks that hold copies, and losses are finite."""
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor

    from cs336_systems.distributed.fsdp import FSDP
    from cs336_systems.distributed.pipeline import on_two_stages
    from cs336_systems.distributed.tensor import tensor_dim
    from cs336_systems.training.assemble import mesh_of
    from cs336_systems.training.pipelined import PipelinedStep

    model, mesh, differing = prepared.step.model, mesh_of(prepared.cell, prepared.rank), 0
    module = getattr(model, "module", model)
    whole = model.gather_full_params() if isinstance(model, FSDP) else dict(module.named_parameters())
    for name, parameter in whole.items():
        groups = [mesh.same_weights if mesh is not None else None]
        if mesh is not None and mesh.size("tensor") > 1 and tensor_dim(name) is None:
            groups.append(mesh.group("tensor"))
        full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        bits = full.detach().reshape(-1).view(torch.uint8)
        for group in groups:
            of_the_first = bits.clone()
            dist.broadcast(of_the_first, group_src=0, group=group)
            differing += not torch.equal(bits, of_the_first)
        if isinstance(prepared.step, PipelinedStep) and name in on_two_stages(module):
            differing += not torch.equal(bits, prepared.step.pipeline.exchange_ends(bits))
    if found := int(largest(differing, prepared.rank)):
        raise RuntimeError(f"{found} parameters are not the same bits on all ranks after training")
    check_losses(prepared.step, prepared.rank)


def time_metrics(times: PhaseTimes, cell: RankedCase) -> list[Metric]:
    """Each phase, the warm-up, and the rate of all ranks' tokens."""
    from cs336_systems.harness.clock import WHOLE, phase_metrics, rate

    tokens = cell.world_size // cell.parallel.ranks_per_batch * cell.tokens_per_step
    return [*phase_metrics(times), rate("tokens_per_s", "1/s, all ranks", tokens, times.samples_ms[WHOLE])]


def peak_metrics(meter: PeakMeter, rank: Rank) -> list[Metric]:
    """Return the fullest rank's peak and requested GiB, and the allocator's retries, if the device reports them."""
    from cs336_systems.harness.clock import in_gib
    from cs336_systems.harness.record import Metric

    found = {"peak_memory": meter.peak_bytes(), "peak_requested": meter.requested_bytes()}
    known = {name: largest(n_bytes, rank) for name, n_bytes in found.items() if n_bytes is not None}
    metrics = in_gib(**known)
    if (retries := meter.allocation_retries()) is not None:
        unit = "in all steps and the warm-up"
        metrics.append(Metric("allocation_retries", unit, [largest(retries, rank)]))
    return metrics


def with_earlier_rows(table: Callable[[pd.DataFrame], Table]) -> Present:
    """Shows the outcomes and earlier rows of the file in one table, and draws the recordings beside them."""

    shown = presented(table, earlier=True)

    def present(outcomes: list[Outcome], options: Any, csv: Path | None) -> None:
        shown(outcomes, options, csv)
        effort = Effort.of(options)
        for outcome in outcomes:
            in_stages = outcome.cell.parallel.pipeline > 1  # drawn where it was measured
            if outcome.status == "ok" and not in_stages and (path := effort.recording(outcome.cell)):
                _draw_recording(str(outcome.cell), path)

    return present


def _draw_recording(title: str, path: Path) -> None:
    """Draw the last step of a recording beside it, whole and close up; say on stderr where, or why not."""
    from cs336_systems.profiling.traces import kineto
    from cs336_systems.profiling.traces.tables import TraceError
    from cs336_systems.report.timeline import draw_timeline, draw_two_blocks

    stem = path.name.removesuffix(".json.gz")
    what = "picture"
    try:
        trace = kineto.read(path)
        draw_timeline(trace, PHASES, title, path.with_name(f"{stem}.png"))
        print(path.with_name(f"{stem}.png"), file=sys.stderr)
        what = "close-up"
        draw_two_blocks(trace, f"{title}: backward of two blocks", path.with_name(f"{stem}-blocks.png"))
    except (TraceError, OSError) as error:
        print(f"no {what} of {title}: {error}", file=sys.stderr)
