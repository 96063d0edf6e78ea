"""What does a failure cost? Replicas that go on without the one that died, beside a restart from the newest checkpoint.

Three runs of ``train.py``'s trainer on the same tokens per step: replicas that average gradients in every step, left
alone; the same with processes killed at random steps; and as many data-parallel ranks, all of which are started again
from the newest checkpoint when one is killed. ``failures_measure.py`` runs them and reads seconds from their logs.

Goodput is the share of time spent on steps that count: their number times the mean time of a step without a death, over
the time from the end of the first step to the end of the last. ``costs/parallelism/failures.py`` predicts it from the
median cost and the number of kills, for this run and for jobs on more nodes with the same number of replicas. Limits:
all processes are on one machine. A replica is forked from a server with all imports done (as ``train.py --replicas``
does), while restarted ranks are new interpreters. Replacing a node would take longer; meanwhile the other replicas
would train, and the restarted job would wait.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from cs336_systems.config import resolve_size
from cs336_systems.costs.parallelism.failures import (
    FAILURES_PER_1000_NODE_DAYS,
    Job,
    ReplicatedJob,
    mean_time_between_failures,
)
from cs336_systems.declared import option, options_of
from cs336_systems.experiments.driver import Experiment, measured_by, one_stage, presented
from cs336_systems.experiments.options import RunOptions, cell_of
from cs336_systems.pretraining.options import TrainOptions
from cs336_systems.report.results import MAIN, Column, Line, ResultTable
from cs336_systems.report.tables import Table

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

REPLICAS, RESTART = "replicas", "restart"
NODES = (1, 100, 1_000, 10_000)
"""Nodes of the jobs whose goodput is predicted."""
_DRAWN = (10, 30, 100, 300, 1_000, 3_000, 10_000, 30_000, 100_000)
"""Nodes in the figure."""
_AGREE_TIMEOUT_S = 20.0
"""--agree-timeout of the replicas: none stalls, so a longer wait would be in vain."""
_QUIET_STEPS = 2
"""Steps at the beginning and at the end of a run without kills."""


@dataclass(frozen=True)
class FailureCell:
    """A run; the fields are columns."""

    device: str = "cuda"
    size: str = option("qwen2.5-0.5b", "Named model size.", several=False)
    how: str = option(
        REPLICAS,
        "replicas: those that are left go on, and the killed one takes over their state; restart: data-parallel ranks, "
        "all of which go on from the newest checkpoint.",
        values=(REPLICAS, RESTART),
        asked=(REPLICAS, RESTART),
    )
    replicas: int = option(
        2, "Replicas; the restarted run has as many ranks as all of them together.", several=False, sign="positive"
    )
    ranks_per_replica: int = option(1, "Ranks of each replica, a process each.", several=False, sign="positive")
    zero: int = option(
        0, "As for train.py: what the ranks of a replica, or those of the restarted run, divide.", several=False
    )
    context_length: int = option(1024, "Tokens per sequence.", several=False, sign="positive")
    batch_size: int = option(8, "Sequences of each rank in a step.", several=False, sign="positive")
    steps: int = option(200, "Steps of the replicas.", several=False, sign="positive")
    kills: int = option(4, "Replicas that are killed at random steps.", several=False, sign="not negative")
    save_every: int = option(
        50, "Steps between checkpoints; 0 saves none, and needs --how replicas.", several=False, sign="not negative"
    )
    data: str = option(
        "", "Folder written by tokenize_data.py; by default Python's standard library, as in train.py.", several=False
    )
    seed: int = 0

    @property
    def variant(self) -> str:
        return self.how

    @property
    def at(self) -> list[tuple[int, int]]:
        """The kills by step: (step, number of the replica). Restarts: in each interval but the first and last."""
        chance = random.Random(self.seed)
        if self.how == RESTART:
            starts = [self.save_every * interval for interval in range(1, self.kills + 1)]
            steps = [start + chance.randrange(1, self.save_every) for start in starts]
        else:
            steps = sorted(chance.sample(range(_QUIET_STEPS, self.steps - _QUIET_STEPS), self.kills))
        return [(step, chance.randrange(self.replicas if self.how == REPLICAS else self.n_ranks)) for step in steps]

    @property
    def n_ranks(self) -> int:
        """Processes that train."""
        return self.replicas * self.ranks_per_replica

    @property
    def train_options(self) -> TrainOptions:
        """The run as train.py would be asked for it, without its folder."""
        asked: dict[str, Any] = {}
        if self.how == REPLICAS:
            asked = {"replicas": self.replicas, "agree": "every-step", "agree_timeout": _AGREE_TIMEOUT_S}
            asked["ranks_per_replica"] = self.ranks_per_replica
        if asked and self.kills:
            asked["fail"] = "; ".join(f"kill {number} at {step}" for step, number in self.at)
        names = ("size", "context_length", "batch_size", "steps", "save_every", "seed", "zero")
        asked |= {name: getattr(self, name) for name in names} | {"data": Path(self.data) if self.data else None}
        asked["save_every"] = self.save_every or None
        asked |= {"attention": "flash"} if self.device == "cuda" else {}  # which all rows have
        return replace(
            TrainOptions.default(self.device), cuda_graph="off", evaluate_every=self.steps, export=False, **asked
        )

    def __str__(self) -> str:
        shape = f"{self.size} {self.batch_size} x {self.context_length}, {self.steps:,} steps of {self.replicas}"
        shape += f" x {self.ranks_per_replica} by ZeRO {self.zero}" * (self.ranks_per_replica > 1)
        return f"{shape}, {self.how}, {self.kills} killed" if self.kills else f"{shape}, nobody killed"


@dataclass(frozen=True)
class Asked(RunOptions):
    """What does a failure cost?"""

    CPU_DEFAULTS: ClassVar = {
        **{"size": "tiny", "replicas": 2, "context_length": 128, "batch_size": 2, "steps": 100, "kills": 3},
        "save_every": 20,
    }

    restarts: int = option(
        1, "Kills of the run that is restarted, each after a random part of a --save-every.", sign="positive"
    )


Options: Any = options_of(FailureCell, Asked)


def make_cells(options: Any) -> list[FailureCell]:
    """Replicas left alone, replicas with kills, and the run that is restarted, which is as short as its kills allow.

    Raises:
        ValueError: a value that no run can have.
        OSError: the data cannot be read.
    """
    resolve_size(options.size).at_context(options.context_length)
    if options.replicas < 2:
        raise ValueError(f"--replicas must be at least 2, of which one may die, got {options.replicas}")
    if options.kills > (most := max(0, options.steps - 2 * _QUIET_STEPS)):
        raise ValueError(f"--kills {options.kills} of --steps {options.steps}, of which {most} can have one")
    if options.save_every < 2 and (options.save_every or RESTART in options.how):
        raise ValueError(f"--save-every must leave steps to lose, at least 2, got {options.save_every}")
    cells = []
    if REPLICAS in options.how:
        of_replicas = cell_of(FailureCell, options, how=REPLICAS)
        cells += [replace(of_replicas, kills=kills) for kills in dict.fromkeys((0, options.kills))]
    if RESTART in options.how:
        steps = (options.restarts + 2) * options.save_every
        cells.append(cell_of(FailureCell, options, how=RESTART, steps=steps, kills=options.restarts))
    for cell in cells:
        cell.train_options.check()
    if options.data:
        from cs336_systems.pretraining.dataset import Dataset

        Dataset.open(Path(options.data))
    return cells


def _replicated(line: Line, mtbf_s: float) -> ReplicatedJob | None:
    """Return a job of such replicas with the line's costs of a kill, or None if it has none."""
    stop, back, step = line.median("stop"), line.median("healed"), line.median("mean_step")
    if stop is None or step is None:
        return None
    return ReplicatedJob(mtbf_s, int(line.settings["replicas"]), step / 1000, stop, stop if back is None else back)


def _predicted(line: Line) -> float | None:
    """Return the predicted goodput of replicas that are killed as often as in this run."""
    step = line.median("mean_step")
    if line.settings["how"] != REPLICAS or not line.median("stop") or step is None:
        return None
    up_s = int(line.settings["steps"]) * step / 1000
    job = _replicated(line, up_s / int(line.metrics["stop"]["n"]))
    return 100 * job.goodput if job else None


def _undisturbed(line: Line) -> Line | None:
    return line.peer(kills=0) if line.settings["how"] == REPLICAS and line.settings["kills"] else None


def _of_undisturbed(line: Line) -> float | None:
    ratio = line.over("run_tokens_per_s", _undisturbed(line))
    return None if ratio is None else 100 * ratio


def _loss_change(line: Line) -> float | None:
    ratio = line.over("loss", _undisturbed(line))
    return None if ratio is None else 100 * (ratio - 1)


_JOB = ("gpu", "device", "size", "batch_size", "context_length", "replicas", "ranks_per_replica", "zero")
"""Columns in which a restarted run must agree with the replicas that it is compared with."""

RUNS = ResultTable(
    settings=(*_JOB, "save_every", "how", "steps", "kills"),
    always=("how", "steps", "kills"),
    columns=(
        Column("noticed s", "notice", ".2f", spread=True, note="from the kill until all other replicas had noticed it"),
        Column(
            "next step s", "next_step", ".2f", spread=True, rank=MAIN, note="from the kill to the end of the next step"
        ),
        Column(
            "healed s",
            "healed",
            ".2f",
            spread=True,
            note="from the kill until the restarted replica had its state",
        ),
        Column("its state took s", "took", ".2f", optional=True, note="time to receive it, while the others trained"),
        Column("their step s", "beside", ".2f", optional=True, note="the others' longest step meanwhile"),
        Column("steps lost", "lost_steps", ".0f", spread=True, note="steps repeated per kill"),
        Column("tokens lost", "lost_tokens", ",.0f", note="tokens in the lost steps"),
        Column("step ms", "mean_step", ",.0f", note="mean of steps without a kill"),
        Column("goodput %", "goodput", ".1f", rank=MAIN),
        Column("predicted %", _predicted, ".1f", optional=True, note="goodput from the median kill"),
        Column("tokens/s of undisturbed %", _of_undisturbed, ".1f", optional=True),
        Column("loss", "loss", ".5f", note="held-out loss at the end"),
        Column("change %", _loss_change, "+.3f", optional=True, note="of the loss, against the run without kills"),
    ),
)


def _pairs(rows: pd.DataFrame) -> Iterator[tuple[Line, Line]]:
    """Lines of replicas with kills, each with the one of the restarted run of the same size."""
    lines = RUNS.lines(rows)
    for line in lines:
        for other in lines:
            alike = all(line.settings.get(name) == other.settings.get(name) for name in _JOB)
            ways = line.settings["how"], other.settings["how"]
            if alike and ways == (REPLICAS, RESTART) and line.median("stop") and other.median("stop"):
                yield line, other


def _goodputs(line: Line, restarted: Line, n_nodes: int) -> tuple[float | None, float, float]:
    """Return goodput of replicas (None for one node), goodput of restarts, and their seconds between checkpoints."""
    mtbf_s = mean_time_between_failures(n_nodes)
    job = _replicated(line, mtbf_s)
    stop, stall = restarted.median("stop"), restarted.median("stall")
    assert job is not None and stop is not None and stall is not None
    single = Job(mtbf_s, stall, stop)
    return job.goodput if n_nodes > 1 else None, single.goodput(single.optimal_s), single.optimal_s


def tables(rows: pd.DataFrame) -> Iterator[Table]:
    """The runs, and the goodput that their kills predict of jobs on many nodes."""
    yield RUNS.of(rows)
    for line, restarted in _pairs(rows):
        yield _goodput_of(line, restarted)


def goodput_table(rows: pd.DataFrame) -> Table:
    """The goodput that the newest pair of runs predicts of jobs on many nodes; raises ValueError if there is none."""
    pairs = list(_pairs(rows))
    if not pairs:
        raise ValueError("no run of replicas has a restarted run for comparison")
    return _goodput_of(*pairs[-1])


def _goodput_of(line: Line, restarted: Line) -> Table:
    found = []
    for n in NODES:
        replicas, restart, every_s = _goodputs(line, restarted, n)
        hours = mean_time_between_failures(n) / 3600
        shown = "–" if replicas is None else f"{100 * replicas:.2f}"
        found.append((f"{n:,}", f"{hours:,.4g}", shown, f"{100 * restart:.2f}", f"{every_s:,.3g}"))
    columns = ("nodes", "hours between failures", "replicas: goodput %", "restart: goodput %", "saving every s")
    rate = f"{FAILURES_PER_1000_NODE_DAYS:g} failures per 1,000 node-days"
    caption = f"Predicted from these kills of {line.settings['size']}: {rate}, {line.settings['replicas']} replicas"
    notes = {"saving every s": "the interval between checkpoints that is best for the restart"}
    return Table.of(caption, columns, found, notes=notes)


def goodput_figure(rows: pd.DataFrame) -> Figure | None:
    """Time lost to failures against nodes, for replicas and for restarts, as the newest pair of runs predicts."""
    import pandas as pd

    from cs336_systems.report.figures import WITH_COMMAS, lines

    pairs = list(_pairs(rows))
    if not pairs:
        return None
    line, restarted = pairs[-1]
    points = []
    for n in _DRAWN:
        goodputs = _goodputs(line, restarted, n)
        points += [
            {"nodes": n, "way": way, "median": 100 * (1 - goodput)}
            for way, goodput in zip(("replicas that go on", "restart from a checkpoint"), goodputs[:2], strict=True)
            if goodput is not None
        ]
    figure, axes = lines(pd.DataFrame(points), x="nodes", colour="way", log="xy", width=6)
    axes[""].set_xlabel(f"nodes, of which {FAILURES_PER_1000_NODE_DAYS:g} in 1,000 fail each day")
    axes[""].set_ylabel("time lost to failures, %")
    axes[""].yaxis.set_major_formatter(WITH_COMMAS)
    seconds = line.median("next_step"), restarted.median("next_step")
    what = f"{line.settings['size']} on {line.settings['replicas']} {line.last['gpu'] or 'CPU'} replicas"
    axes[""].set_title(f"{what}: next step after {seconds[0]:.1f} s, restarted after {seconds[1]:.1f} s", fontsize=10)
    return figure


EXPERIMENT = Experiment(
    *(
        "benchmark_failures",
        FailureCell,
        make_cells,
        one_stage(measured_by("failures_measure")),
        presented(tables, {"": goodput_figure}),
    ),
    ("next_step", "healed", "goodput", "loss"),
    options=Options,
)
