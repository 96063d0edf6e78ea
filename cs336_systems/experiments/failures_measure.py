"""Runs whose processes are killed, and the cost of each kill as read from their logs (``failures.py``).

Replicas are those of ``train.py --agree every-step``. A restarted run is data-parallel training whose ranks a watcher
here ends and starts again as soon as one of them is dead, each in a new interpreter, as torchrun does.
"""

import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from itertools import pairwise
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import fmean
from typing import Any

import torch.distributed as dist

from cs336_systems.case import Unsupported
from cs336_systems.distributed.process_group import joined, rank_variables, take_place
from cs336_systems.experiments.failures import REPLICAS, FailureCell
from cs336_systems.harness.record import Metric
from cs336_systems.pretraining.options import TrainOptions
from cs336_systems.pretraining.replica_options import Fault
from cs336_systems.pretraining.replicas import train_replicas
from cs336_systems.pretraining.run_log import LOG, Sink
from cs336_systems.pretraining.run_records import (
    Dropped,
    Evaluation,
    Healing,
    Joined,
    LoggedCheckpoint,
    LoggedStep,
    Membership,
    Record,
    Session,
    from_line,
)
from cs336_systems.pretraining.trainer import train
from cs336_systems.processes import end_with_parent


@dataclass(frozen=True)
class Kill:
    """The cost of a kill; seconds are counted from the signal.

    Attributes:
        notice_s: until all other replicas had noticed that the step was lost; None if no log says so.
        stop_s: until the last of the others began the step again.
        next_step_s: until that replica had finished it.
        healed_s: until the killed replica had rejoined with the others' state; None if the run ended before.
        took_s: the time in which it fetched their state; None as for ``healed_s``.
        beside_s: the longest time between two steps of the others meanwhile; None as for ``healed_s``.
        lost_steps: steps, or parts of one, that were repeated.
        lost_tokens: the tokens in them.
    """

    stop_s: float
    next_step_s: float
    lost_steps: int
    lost_tokens: int
    notice_s: float | None = None
    healed_s: float | None = None
    took_s: float | None = None
    beside_s: float | None = None


def records_in(log: Path) -> list[Record]:
    """All whole records of a log, also those that a resumed run has overtaken."""
    found = map(from_line, log.read_bytes().split(b"\n")[:-1])
    return [record for record in found if record is not None]


def kills_of_replicas(
    logs: Mapping[str, Sequence[Record]], hits: Sequence[tuple[Fault, float]], context_length: int
) -> list[Kill]:
    """The cost of each kill after which the others finished their step.

    Args:
        logs: the records of each replica, by its name.
        hits: the kills, and when each came.
    """
    found = []
    for fault, at in hits:
        others = [log for name, log in logs.items() if name != str(fault.replica)]
        later = [[record for record in log if record.at >= at] for log in others]
        ends = [_first(log, LoggedStep, fault.step) for log in later]
        begins = [_first(log, Membership, fault.step) for log in later]
        made, begun = max(filter(None, ends), default=None), max(filter(None, begins), default=None)
        if made is None or begun is None:
            continue
        lost = [[each for each in log if isinstance(each, Dropped) and each.at < made] for log in later]
        longest = max(lost, key=len)
        own = [each for each in logs[str(fault.replica)] if each.at >= at and isinstance(each, Membership)]
        back = next((each for each in own if each.number >= 0), None)  # before, it still fetches state
        tokens = context_length * sum(last - first for first, last in (each.sequences for each in longest))
        noticed = [each[0].at for each in lost if each]
        times = {"notice_s": max(noticed, default=None), "healed_s": None if back is None else back.at}
        after = {name: None if when is None else when - at for name, when in times.items()}
        if back is not None:
            steps = [each.at for each in later[0] if isinstance(each, LoggedStep)]
            pairs = [now - before for before, now in pairwise(steps) if own[0].at < now and before < back.at]
            after |= {"took_s": back.healed_seconds, "beside_s": max(pairs, default=None)}
        found.append(Kill(begun - at, made - at, len(longest), tokens, **after))
    return found


def _first(log: Sequence[Record], kind: type[LoggedStep] | type[Membership], step: int) -> float | None:
    """When the first record of a kind about this step was written."""
    return next((record.at for record in log if isinstance(record, kind) and record.step == step), None)


def of_the_run(logs: Sequence[Sequence[Record]], n_steps: int) -> list[Metric]:
    """Tokens per second, mean step and goodput as ``failures.py`` says, held-out loss at the end, stalls of saves.

    Args:
        logs: the records of each replica, or of the one log that there is.

    Raises:
        RuntimeError: a step or the loss at the end is in no log, or somebody died in every step.
    """
    kept: dict[int, LoggedStep] = {}
    for log in logs:
        own = {record.step: record for record in log if isinstance(record, LoggedStep)}  # of a step made again the last
        kept |= {step: own[step] for step in own if step not in kept or own[step].at < kept[step].at}
    hit = {each.step for log in logs for each in log if isinstance(each, Dropped)}
    hit |= {each.first_step for log in logs for each in log if isinstance(each, Session)}
    losses = [each.loss for log in logs for each in log if isinstance(each, Evaluation) and each.step == n_steps]
    if missing := [step for step in range(n_steps) if step not in kept]:
        raise RuntimeError(f"step {missing[0]} of {n_steps} is in no log")
    if not losses:
        raise RuntimeError("the run did not end with an evaluation")
    steps = [kept[step] for step in range(n_steps)]
    seconds, whole = steps[-1].at - steps[0].at, max(step.tokens for step in steps)
    learned = sum(step.tokens for step in steps[1:])
    pairs = [(before, now) for before, now in pairwise(steps) if now.step not in hit and now.tokens == whole]
    if not pairs:
        raise RuntimeError(f"there is no step of {n_steps} in which no process died")
    plain = fmean(now.at - before.at for before, now in pairs)
    stalls = [each.stall_seconds for log in logs for each in log if isinstance(each, LoggedCheckpoint)]
    return [
        Metric("run_tokens_per_s", "1/s", [learned / seconds]),
        Metric("mean_step", "ms", [1000 * plain]),
        Metric("goodput", "%", [100 * plain * learned / whole / seconds]),
        Metric("loss", "nats", losses[-1:]),
        *([Metric("stall", "s", stalls)] if stalls else []),
    ]


def measure(cell: FailureCell) -> list[Metric]:
    """Run the cell, and read the times from its logs.

    Raises:
        Unsupported: torchft is not installed, or there are fewer GPUs than ranks.
        RuntimeError: the run did not come to its end, or none of its kills came.
    """
    with tempfile.TemporaryDirectory() as name:
        options = replace(cell.train_options, out=Path(name) / "run")
        logs, kills = (_replicas if cell.how == REPLICAS else _restarted)(cell, options)
    if cell.kills and not kills:
        raise RuntimeError(f"no kill came: {options.fail}")
    metrics = of_the_run(logs, cell.steps)
    for each in fields(Kill):
        unit = "s" if each.name.endswith("_s") else each.name.removeprefix("lost_")
        if samples := [value for kill in kills if (value := getattr(kill, each.name)) is not None]:
            metrics.append(Metric(each.name.removesuffix("_s"), unit, samples))
    return metrics


class _Silent(Sink):
    """A sink that shows nothing."""

    def write(self, record: Record) -> None:
        pass


def _parts(record: Record) -> str:
    """The seconds and bytes in a record by name."""
    named = {name.removesuffix("_seconds"): value for name, value in vars(record).items() if name.endswith("_seconds")}
    told = [f"{name} {value:.2f} s" for name, value in named.items()]
    return ", ".join(told + [f"{name} {value:,}" for name, value in vars(record).items() if name.startswith("n_bytes")])


_TOLD_S = 5.0
"""Seconds between two steps that are told while nobody dies."""


class Progress:
    """Reports events of processes on stderr as they happen, in seconds since the run began.

    So even a run that is cut off has reported when a process was killed, when each of the others noticed and finished
    its next step, and when the killed one rejoined.
    """

    def __init__(self) -> None:
        self._began = time.time()
        self._told_at: dict[str, float] = {}

    def tell(self, sentence: str, at: float | None = None) -> None:
        print(f"{(at or time.time()) - self._began:7.2f} s: {sentence}", file=sys.stderr, flush=True)

    def hear(self, name: str, record: Record) -> None:
        """Take a record of the processes of that name."""
        if isinstance(record, LoggedStep):
            if record.at < self._told_at.get(name, 0.0) + _TOLD_S:
                return
            said, self._told_at[name] = f"has made step {record.step}", record.at
        else:
            self._told_at[name] = 0.0  # so that the next step is told
            if isinstance(record, Dropped):
                said = f"drops step {record.step}: {record.reason}"
            elif isinstance(record, Membership):
                healed = f", has their state, which took {record.healed_seconds:.2f} s" if record.healed_seconds else ""
                healed = ", fetches their state" if record.number < 0 else healed
                said = f"step {record.step}, {', '.join(record.there)} there{healed}; {_parts(record)}"
            elif isinstance(record, Joined | Healing):
                said = f"{record.kind}: {_parts(record)}"
            elif isinstance(record, Session):
                said = f"begins with step {record.first_step}"
            else:
                return
        self.tell(f"{name}: {said}", record.at)


def _replicas(cell: FailureCell, options: TrainOptions) -> tuple[list[list[Record]], list[Kill]]:
    progress = Progress()

    def hear(name: str, record: Record) -> None:
        progress.hear(f"replica {name}", record)

    try:
        ended = train_replicas(options, _Silent, progress.tell, hear=hear)
    except ValueError as error:
        raise Unsupported(str(error)) from error
    if (end := ended.outcome).reason != "done" or end.steps < cell.steps:
        raise RuntimeError(f"the replicas ended after {end.steps} steps: {end.reason}, {end.complaint}")
    paths = {name: options.out / f"replica-{name}" / LOG for name in ended.logs}
    logs = {name: records_in(path) for name, path in paths.items() if path.exists()}
    return list(logs.values()), kills_of_replicas(logs, ended.hits, cell.context_length)


def kills_of_restarts(log: Sequence[Record], hits: Sequence[float], tokens_per_step: int) -> list[Kill]:
    """The cost of each kill that was followed by a step; the steps after the checkpoint are lost.

    Args:
        log: the records of all sessions.
        hits: when each kill came.
    """
    found = []
    for at in hits:
        made = max((each.step + 1 for each in log if isinstance(each, LoggedStep) and each.at < at), default=0)
        later = [record for record in log if record.at >= at]
        session = next((each for each in later if isinstance(each, Session)), None)
        step = next((each for each in later if isinstance(each, LoggedStep)), None)
        if session is not None and step is not None:
            lost = made - session.first_step
            found.append(Kill(session.at - at, step.at - at, lost, lost * tokens_per_step))
    return found


def _restarted(cell: FailureCell, options: TrainOptions) -> tuple[list[list[Record]], list[Kill]]:
    """Train to the end, in as many sessions as there are kills and one more."""
    told: list[Record] = []
    hits: list[float] = []
    progress = Progress()
    for step, number in cell.at:
        with _ranks(cell.n_ranks, options) as ranks:
            if _listen(ranks[0][1], told, progress, until=step):
                progress.tell(f"fault: kill {number} at {step}, and start all again")
                hits.append(time.time())
                ranks[number][0].kill()
                ranks[number][0].join()
    with _ranks(cell.n_ranks, options) as ranks:
        _listen(ranks[0][1], told, progress)
    return [told], kills_of_restarts(told, hits, options.tokens_per_step(cell.n_ranks))


@contextmanager
def _ranks(n: int, options: TrainOptions) -> Iterator[list[tuple[BaseProcess, Connection]]]:
    """The ranks of a run and how to hear them, which are ended however this is left."""
    store = dist.TCPStore("127.0.0.1", 0, n, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=600))
    context, ranks = get_context("spawn"), list[tuple[BaseProcess, Connection]]()
    try:
        for number in range(n):
            ours, theirs = context.Pipe(duplex=False)
            variables = rank_variables(number, n, store.port)
            ranks.append((context.Process(target=_be_a_rank, args=(theirs, variables, options), daemon=True), ours))
            ranks[-1][0].start()
            theirs.close()
        yield ranks
    finally:
        for process, connection in ranks:
            process.kill()
            process.join()
            connection.close()


def _listen(rank: Connection, told: list[Record], progress: Progress, until: int | None = None) -> bool:
    """Take what the first rank logs, until this step is under way or the run ends; returns whether it is the step.

    Raises:
        RuntimeError: the run has failed.
    """
    while True:
        try:
            said = rank.recv()
        except EOFError:
            raise RuntimeError("the first rank died without a report") from None
        if said is None:
            return False
        if isinstance(said, str):
            raise RuntimeError(said)
        told.append(said)
        progress.hear("all ranks", said)
        if isinstance(said, LoggedStep) and until is not None and said.step + 1 >= until:
            return True


class _Sender(Sink):
    """A sink that hands records on to the watcher."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def write(self, record: Record) -> None:
        self._connection.send(record)


def _be_a_rank(connection: Any, variables: dict[str, str], options: TrainOptions) -> None:
    """Be a rank of the restarted run; the first one sends its records, and at the end None or what went wrong."""
    end_with_parent()
    take_place(variables)
    said: str | None = None
    try:
        with joined(options.device) as rank:
            train(options, rank, *([] if rank.rank else [_Sender(connection)]))
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    connection.send(said)
