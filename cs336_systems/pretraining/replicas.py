"""Start, supervise and restart a lighthouse and the replicas of a run on this machine.

    ended = train_replicas(options, functools.partial(RunConsole, options.log_every))

Each replica is a world of fresh processes, as torchrun would start it. If one of its ranks dies, the others are ended
and the replica is restarted and loads the state of one that trains. A lighthouse that dies is restarted on its port.
Ctrl-C and SIGTERM end all replicas after the same step. No process outlives this one, however it ends.

Faults of ``--fail`` are real signals: in the middle of a step a replica requests its fault, SIGKILL, SIGSTOP or SIGUSR1
(NaN), and waits until this process has sent it.
"""

import heapq
import math
import multiprocessing.connection
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from types import FrameType
from typing import Any

from cs336_systems.pretraining.options import TrainOptions
from cs336_systems.pretraining.replica_options import LIGHTHOUSE, Fault, faults_of, require_torchft
from cs336_systems.pretraining.run_log import Sink
from cs336_systems.pretraining.run_records import Dropped, Healing, Joined, LoggedStep, Membership, Record, Session
from cs336_systems.pretraining.stop_requests import Outcome, StopRequests
from cs336_systems.processes import Died, FreshProcess, n_cores, start_server

HEARTBEAT_TIMEOUT_S = 1.5
"""A replica counts as dead after this many seconds without a heartbeat; it sends ten a second."""
_IMPORTED = tuple(
    f"cs336_systems.{name}"
    for name in ("pretraining.trainer", "pretraining.every_step", "pretraining.diloco", "training.fused_adamw")
)
"""Modules that the fork server imports, so that restarted replicas need not."""
_IMPORTED_FOR_GPUS = "cs336_systems.blocks.fused", "cs336_systems.attention.hopper", "pynvml"
_TICK_MS = 20
_START_S = 60.0
"""Seconds within which a lighthouse must report its port."""
_LAST_S = 30.0
"""Seconds, besides --agree-timeout, for which replicas may go on after another one has ended."""
_MOST_FAILURES = 3
"""A replica is given up after more than this many failed starts in a row: starts that do not reach training."""


@dataclass(frozen=True)
class Ended:
    """How the replicas ended.

    Attributes:
        outcome: that of the replica with the most steps; its complaint may be another replica's.
        logs: names of the replicas; each has a log in a folder of the run.
        trained: whether any replica reported an outcome.
        hits: the injected faults, each with its time in seconds since 1970, as in logs.
    """

    outcome: Outcome
    logs: tuple[str, ...]
    trained: bool
    hits: tuple[tuple[Fault, float], ...]


class Refused(ValueError):
    """A replica rejected its options or data."""


def train_replicas(
    options: TrainOptions,
    console: Callable[[], Sink],
    tell: Callable[[str], None] = print,
    hear: Callable[[str, Record], None] = lambda name, record: None,
) -> Ended:
    """Train with all replicas on this machine until they end.

    Args:
        console: makes the sink that prints the first replica's records; must be picklable.
        tell: receives sentences about restarts, deaths and injected faults.
        hear: receives a replica's name and each of its records of sessions, steps, dropped steps, membership and
            healing.

    Raises:
        ValueError: torchft is not installed, the machine has too few GPUs, or a replica refuses options or data.
        OSError: default data cannot be written.
    """
    require_torchft()
    from cs336_systems.distributed.process_group import check_device
    from cs336_systems.pretraining.preparation import default_data

    check_device(options.device, options.replicas * options.ranks_per_replica)
    if not options.data:
        default_data()  # else each replica would write them
    start_server(*_IMPORTED, *(_IMPORTED_FOR_GPUS if options.device == "cuda" else ()), "torch._dynamo")
    return _Watch(options, console, tell, hear).to_the_end()


class _Replica:
    """A replica's processes, one per rank."""

    def __init__(self, number: int) -> None:
        self.number, self.name = number, str(number)
        self.ranks: list[FreshProcess] = []
        self.trains = False
        self.ended: Outcome | None = None
        self.n_failures = 0

    def start(self, options: TrainOptions, console: Callable[[], Sink], lighthouse: str, faults: list[Fault]) -> None:
        import torch.distributed as dist

        n, n_all = options.ranks_per_replica, options.replicas * options.ranks_per_replica
        timeout = timedelta(seconds=600)
        self._store = dist.TCPStore("127.0.0.1", 0, n, is_master=True, wait_for_workers=False, timeout=timeout)
        self.trains = False
        for rank in range(n):  # appended one by one, so that an interrupt can end those already started
            variables = _variables(rank, self.number, n, n_all, self._store.port)
            self.ranks.append(FreshProcess(_be_a_rank, variables, (options, lighthouse, self.name, faults), console))

    def end(self) -> None:
        for rank in self.ranks:
            rank.end()
        self.ranks = []

    def send_signal(self, number: signal.Signals) -> None:
        for rank in self.ranks:
            rank.send_signal(number)


def _variables(rank: int, replica: int, n: int, n_all: int, port: int) -> dict[str, str]:
    """Return the environment of a rank, with this rank's share of the machine's cores and GPUs."""
    import torch

    from cs336_systems.distributed.process_group import rank_variables

    shared = {"OMP_NUM_THREADS": max(1, n_cores() // n_all), "LOCAL_WORLD_SIZE": n_all}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else [str(number) for number in range(torch.cuda.device_count() or n_all)]
    own = dict.fromkeys(gpus[number % len(gpus)] for number in range(replica * n, (replica + 1) * n))
    gpu = {"CUDA_VISIBLE_DEVICES": ",".join(own)}
    if len(gpus) < n_all:
        gpu["NCCL_HOSTID"] = f"replica {replica} rank {rank}"  # as in ``joined``
    return rank_variables(rank, n, port) | {name: str(value) for name, value in shared.items()} | gpu


class _Watch:
    """Supervises the lighthouse and the replicas."""

    def __init__(
        self,
        options: TrainOptions,
        console: Callable[[], Sink],
        tell: Callable[[str], None],
        hear: Callable[[str, Record], None],
    ) -> None:
        self._options, self._console, self._tell = options, console, tell
        self._hear_record = hear
        self._replicas = [_Replica(number) for number in range(options.replicas)]
        self._faults = list(faults_of(options.fail))
        self._hits: list[tuple[Fault, float]] = []
        self._waking: list[tuple[float, int, FreshProcess]] = []  # when to continue which stopped process
        self._lighthouse: FreshProcess | None = None
        self._port = 0
        self._stop_requests = StopRequests(heard=self._stop)
        self._stopping = False
        self._ends_at: float | None = None
        self._done_at = math.inf  # when the first replica had made the last step, in seconds since 1970
        self._complaint: str | None = None
        self._alone: str | None = None
        """Why no lighthouse could be started, or None."""

    def to_the_end(self) -> Ended:
        with self._stop_requests as stop:
            try:
                self._start_lighthouse()
                for replica in self._replicas:
                    self._start(replica)
                while any(replica.ranks for replica in self._replicas):
                    self._look()
            finally:
                for replica in self._replicas:
                    replica.end()
                if self._lighthouse is not None:
                    self._lighthouse.end()
        for fault in self._faults:
            self._tell(f"{fault}: it did not come to that")
        ended = [replica.ended for replica in self._replicas if replica.ended is not None]
        complaint = self._alone or self._complaint or (None if stop.asked else "no replica is left")
        nobody = Outcome(self._options.out, 0, 0, stop.asked or "failed", complaint)
        last = max(ended, key=lambda outcome: outcome.steps, default=nobody)
        complaint = self._alone or next((outcome.complaint for outcome in ended if outcome.complaint), last.complaint)
        reason = stop.asked if stop.asked and last.reason == "terminated" else last.reason
        names = tuple(replica.name for replica in self._replicas)
        return Ended(replace(last, reason=reason, complaint=complaint), names, bool(ended), tuple(self._hits))

    def _start_lighthouse(self) -> None:
        """Start or restart the lighthouse, on its earlier port if any; if that fails, ask replicas to save and end."""
        if self._lighthouse is not None:
            self._lighthouse.end()
        self._lighthouse = FreshProcess(be_the_lighthouse, self._port, round(1000 * self._options.agree_timeout))
        try:
            said = self._lighthouse.receive(time.monotonic() + _START_S)
        except (Died, TimeoutError) as error:
            said = str(error) or "nothing was heard of it"
        if isinstance(said, int):
            self._port = said
            return
        self._lighthouse.end()
        self._lighthouse = None
        self._alone = f"no lighthouse could be started at port {self._port}: {said}"
        self._tell(self._alone)
        self._stop()

    def _start(self, replica: _Replica) -> None:
        if not self._stopping:
            faults = [fault for fault in self._faults if fault.replica == replica.number]
            replica.start(self._options, self._console, f"http://127.0.0.1:{self._port}", faults)
        if self._stopping:
            replica.end()  # a stop request came before all its ranks were started

    def _look(self) -> None:
        """Wait up to half a second for messages or deaths of processes, and act on them."""
        speakers = {rank.connection: (one, rank) for one in self._replicas for rank in one.ranks}
        now = time.monotonic()
        while self._waking and self._waking[0][0] <= now:
            heapq.heappop(self._waking)[2].send_signal(signal.SIGCONT)
        if self._ends_at is not None and now >= self._ends_at:
            for replica in self._replicas:
                replica.end()
            return
        pause = max(0.0, min(0.5, self._waking[0][0] - now)) if self._waking else 0.5
        heard = [] if self._lighthouse is None else [self._lighthouse.connection]
        ready = multiprocessing.connection.wait([*heard, *speakers], pause)
        if heard and heard[0] in ready:
            self._tell("the lighthouse has died and is started again")
            self._start_lighthouse()
        for replica, rank in (speakers[each] for each in ready if each in speakers):
            if rank in replica.ranks:
                self._hear(replica, rank)

    def _hear(self, replica: _Replica, rank: FreshProcess) -> None:
        try:
            kind, said = rank.receive()
        except Died as death:
            self._lost(replica, f"has died: {death}")
            return
        if kind == "record":
            if isinstance(said, Session):
                replica.trains, replica.n_failures = True, 0
            self._hear_record(replica.name, said)
            if isinstance(said, Membership) and said.at > self._done_at:  # it would overwrite the others' checkpoint
                self._tell(f"replica {replica.name} was away when the others made the last step: it is ended")
                replica.end()
        elif kind == "fault":
            self._hit(rank, said)
        elif kind == "refused":
            if not any(one.trains for one in self._replicas):
                raise Refused(said)
            replica.end()
            self._complaint = f"replica {replica.name} does not come back: {said}"
            self._tell(self._complaint)
        elif kind == "failed":
            self._lost(replica, f"has failed: {said}")
        elif kind == "ended" and replica.ended is None:
            replica.ended = said
            if said.reason == "done":
                self._done_at = min(self._done_at, time.time())
            for one in replica.ranks:
                one.end(grace_s=10.0)
            replica.ranks = []
            self._let_end()

    def _let_end(self) -> None:
        """After a replica has ended, let those that train make their last step, and end the others."""
        self._stopping = True
        self._ends_at = self._ends_at or time.monotonic() + _LAST_S + self._options.agree_timeout
        for replica in self._replicas:
            if replica.ranks and not replica.trains:
                replica.end()

    def _lost(self, replica: _Replica, how: str) -> None:
        """End a replica that has died or failed, and restart it unless it has failed too often or the run stops."""
        replica.end()
        if self._stopping and not replica.trains:  # it was asked to end and had nothing to save
            return
        replica.n_failures += not replica.trains
        self._complaint = f"replica {replica.name} {how.splitlines()[0]}"
        if self._stopping or replica.n_failures > _MOST_FAILURES:
            self._tell(self._complaint)
            return
        self._tell(f"{self._complaint}; it is started again")
        self._start(replica)

    def _hit(self, rank: FreshProcess, fault: Fault) -> None:
        """Send the signal that a replica has requested, and let it continue."""
        self._faults.remove(fault)
        self._hits.append((fault, time.time()))
        self._tell(f"fault: {fault}")
        number = {"kill": signal.SIGKILL, "stall": signal.SIGSTOP, "nan": signal.SIGUSR1}[fault.kind]
        if fault.kind == "stall":
            heapq.heappush(self._waking, (time.monotonic() + fault.seconds, id(rank), rank))
        hit = self._lighthouse if fault.whom == LIGHTHOUSE else rank
        if hit is not None:
            hit.send_signal(number)
        with suppress(OSError):
            rank.connection.send("go on")

    def _stop(self) -> None:
        """Ask all replicas to save and end; those that train are told this process's reason."""
        self._stopping = True
        interrupted = self._stop_requests.asked == "interrupted"
        for replica in self._replicas:  # one that does not train yet ignores SIGINT
            replica.send_signal(signal.SIGINT if interrupted and replica.trains else signal.SIGTERM)


def be_the_lighthouse(connection: Any, port: int, join_timeout_ms: int) -> None:
    """Run a lighthouse until the connection is closed; send its port or an error message. Port 0 means any port."""
    from torchft.coordination import LighthouseServer

    times = {"join_timeout_ms": join_timeout_ms, "heartbeat_timeout_ms": round(1000 * HEARTBEAT_TIMEOUT_S)}
    try:
        server = LighthouseServer(bind=f"[::]:{port}", min_replicas=1, quorum_tick_ms=_TICK_MS, **times)
    except RuntimeError as error:
        connection.send(str(error))
        return
    connection.send(int(server.address().rsplit(":", 1)[1]))
    with suppress(EOFError):
        connection.recv()
    server.shutdown()


class _Speaker(Sink):
    """A sink that sends records of this replica's progress to the supervising process."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def write(self, record: Record) -> None:
        if isinstance(record, Session | Joined | LoggedStep | Dropped | Membership | Healing):
            self._connection.send(("record", record))


class _Trouble:
    """Injects this replica's faults: requests each one from the supervising process in the middle of its step."""

    def __init__(self, connection: Any, faults: list[Fault]) -> None:
        self._connection, self._faults, self._nan = connection, list(faults), False
        signal.signal(signal.SIGUSR1, self._hear)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._nan = True

    def __call__(self, step: int) -> bool:
        for fault in [each for each in self._faults if each.step == step]:
            self._faults.remove(fault)
            self._connection.send(("fault", fault))
            self._connection.recv()
        nan, self._nan = self._nan, False
        return nan


def _be_a_rank(
    connection: Any,
    variables: dict[str, str],
    asked: tuple[TrainOptions, str, str, list[Fault]],
    console: Callable[[], Sink],
) -> None:
    """Train as a rank of a replica, and send how it ended."""
    from cs336_systems.distributed.process_group import joined, take_place
    from cs336_systems.pretraining.agreement import FirstAlone, agreement_of
    from cs336_systems.pretraining.trainer import NonFiniteStep, train

    take_place(variables)
    options, lighthouse, name, faults = asked
    said: tuple[str, Any]
    try:
        with joined(options.device) as rank:
            alone = rank.rank > 0
            trouble = _Trouble(connection, [] if alone else faults)
            agreement = agreement_of(options, rank, lighthouse, name, trouble)
            sinks: list[Sink] = [] if alone else [_Speaker(connection), FirstAlone(console(), agreement)]
            said = "ended", train(options, rank, *sinks, agreement=agreement)
    except (ValueError, OSError) as error:
        said = "refused", str(error)
    except NonFiniteStep as error:
        said = "failed", str(error)
    except RuntimeError as error:  # from torch and torchft: a peer has gone
        said = "failed", f"{type(error).__name__}: {str(error).splitlines()[0]}"
    with suppress(BrokenPipeError):  # the other ranks' connections are closed once one rank has ended
        connection.send(said)
