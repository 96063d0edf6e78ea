"""Fault-tolerant replicas: torchft determines which are alive, and a replica that rejoins fetches another's state.

``every-step`` (``every_step.py``) averages gradients in each step over the live replicas; if one dies during a step,
the step is dropped and its sequences are divided again among the others: nothing is lost or trained twice. ``diloco``
(``diloco.py``; Douillard et al. 2023, arXiv 2311.08105; in fragments and with a delay, 2501.18512) lets each replica
train independently for H steps and averages the changes of weights as gradients of an outer optimizer: the training of
a replica that dies is lost since the last average, and a failed average takes all replicas back to the previous one.

Both wait for the quorum, because the set of live replicas determines which sequences each takes. A replica that joins,
or has missed steps, fetches the state of another (``healing.py``): weights, moments, outer state, position in the data.
All wait for every replica that sends heartbeats, so a replica sends none until it is ready to train. Peers find each
other by host name, on ports of all interfaces and without passwords: keep replicas on a trusted network.

torchft has its own count of steps, from 0 in each session of the replicas; the trainer's number of steps is in the
state. All begin with the state of the replica with the most steps; one with more steps that joins later reports which
steps it drops.
"""

import fcntl
import logging
import os
import re
import secrets
import socket
import time
from abc import ABC, abstractmethod
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cs336_systems.distributed.checkpoint_state import OPTIMIZER, NamedState
from cs336_systems.distributed.process_group import Rank, on_rank_0
from cs336_systems.distributed.shards import wait_for_parameters
from cs336_systems.distributed.stretches import Stretch
from cs336_systems.pretraining.agreement import Agreement, StoppedWaiting, Trouble, checksum
from cs336_systems.pretraining.healing import Transport
from cs336_systems.pretraining.options import TrainOptions
from cs336_systems.pretraining.preparation import PreparedRun, data_identity, must_be_alike
from cs336_systems.pretraining.run_records import Joined, Membership, Message, Record
from cs336_systems.pretraining.sources import sources_of
from cs336_systems.pretraining.stop_requests import REASONS
from cs336_systems.pretraining.torchft_groups import Gloo, Nccl
from cs336_systems.pretraining.torchft_manager import ReportingManager
from cs336_systems.processes import age_s
from cs336_systems.training.clipping import GradientGuard, gradients_of
from cs336_systems.training.step import TrainStep

HEARTBEAT_S = 0.1
"""Seconds between two heartbeats to the lighthouse."""
CONNECT_S = 10.0
"""Seconds for which torchft waits for a connection."""
_QUORUM_S = 3600
"""The longest wait for a quorum; under DiLoCo other replicas may still be training. Heartbeats tell which are gone."""
_LIGHTHOUSE_RETRIES = _QUORUM_S
"""Attempts to reach a lighthouse that has died: torchft spreads them over the time of the quorum, one a second."""
_NAME_BYTES = 64
"""The longest name of a replica."""
_MAY_DIFFER = ("--out", "--replica", "--lighthouse", "--fail")
"""Options that may differ between replicas, but not between ranks of one."""


class ReplicaAgreement(Agreement, ABC):
    """The common part of both kinds of agreement: the quorum, the live replicas, and the state that a replica fetches.

    Making one is a collective of the replica's ranks.

    Raises:
        ValueError: the name is too long, or, when it joins, the lighthouse is gone.
    """

    on = True
    in_pieces = False
    """Whether a replica fetches the others' state in pieces, while they train (``healing.py``)."""

    def __init__(self, options: TrainOptions, rank: Rank, lighthouse: str, name: str, trouble: Trouble) -> None:
        if not 0 < len(name.encode()) <= _NAME_BYTES or "/" in name:
            raise ValueError(f"--replica needs a name of at most {_NAME_BYTES} bytes without /, got {name!r}")
        for each in ("torchft", "torchft.manager", "torchft.process_group", "torchft.local_sgd"):
            logging.getLogger(each).setLevel(logging.CRITICAL)  # its log repeats the records at length
        self.number, self._options, self._rank, self._name, self._trouble = -1, options, rank, name, trouble
        self.reasons = torch.zeros(len(REASONS), device=rank.device)
        self._life = f"{name}/{on_rank_0(lambda: secrets.token_hex(4))}"
        self._lives: list[str] = []
        self._records: list[Record] = []
        self._made = self._first_step = 0
        self._healed = self._joined = False
        self._group = Nccl(self._timeout) if rank.device.type == "cuda" else Gloo(self._timeout)
        self._lighthouse = lighthouse
        self._started_s = age_s()
        self._manager: ReportingManager | None = None
        self._claimed: int | None = None

    @property
    def _timeout(self) -> timedelta:
        return timedelta(seconds=self._options.agree_timeout)

    @property
    def manager(self) -> ReportingManager:
        """torchft's manager, which exists once this replica sends heartbeats."""
        assert self._manager is not None
        return self._manager

    def _send_heartbeats(self) -> None:
        """Make the manager; from now on the others wait for this replica.

        Raises:
            ValueError: the lighthouse is gone.
        """
        host = socket.gethostname()
        self._store: dist.TCPStore | None = None

        def host_store() -> int:
            self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
            return self._store.port

        port = on_rank_0(host_store)
        self._transport = Transport(self._timeout, self._rank.device)
        try:
            self._manager = ReportingManager(
                pg=self._group,
                load_state_dict=self._load,
                state_dict=self._state,
                min_replica_size=1,
                use_async_quorum=self.in_pieces,
                timeout=self._timeout,
                quorum_timeout=timedelta(seconds=_QUORUM_S),
                connect_timeout=timedelta(seconds=CONNECT_S),
                rank=self._rank.rank,
                world_size=self._rank.world_size,
                store_addr=host,
                store_port=port,
                lighthouse_addr=self._lighthouse,
                replica_id=self._name,
                heartbeat_interval=timedelta(seconds=HEARTBEAT_S),
                checkpoint_transport=self._transport,
                quorum_retries=_LIGHTHOUSE_RETRIES,
            )
        except RuntimeError as error:
            if not str(error).startswith(f"failed to connect to {self._lighthouse} "):
                raise
            raise ValueError(f"no lighthouse answers at {self._lighthouse} any more") from None
        self._manager.replica = self

    def folder(self, out: Path) -> Path:
        return out / f"replica-{self._name}"

    def join(self, prepared: PreparedRun, made: int) -> int:
        """Join the others, and wait until there are --replicas of them, or some that have trained.

        Raises:
            ValueError: another process is this replica, with the same --out.
        """
        prepared_s = age_s()
        on_rank_0(lambda: self._claim(self.folder(prepared.options.out)))
        self._prepared, self._made, self._first_step = prepared, made, made
        assert isinstance(prepared.step, TrainStep)
        self._step = prepared.step
        self._warm_up()
        self._step.before_update = self.before_update
        alike = {name: repr(value) for name, value in must_be_alike(self._options).items() if name not in _MAY_DIFFER}
        sources = sources_of(self._options.data or [prepared.dataset.folder])
        alike |= {name: repr(value) for name, value in data_identity(self._options, sources).items()}
        alike["the number of ranks"] = repr(self._rank.world_size)
        weights = checksum([stretch.values for stretch in NamedState(self._step.model).model().values()])
        alike[f"the checksum of weights after {made} steps"] = repr(weights)
        self._alike = alike
        self._send_heartbeats()
        ages = 0.0, self._started_s, prepared_s, age_s()
        self._come()
        joined = Joined(*(now - before for before, now in pairwise(ages)))
        said = [each for each in self._records[:-1] if isinstance(each, Message)]
        self._records = [joined, *said, *self._records[-1:]]  # and the last membership, with which training begins
        self._joined = True
        return self._made

    def _claim(self, folder: Path) -> None:
        """Lock the replica's folder until it leaves, or its process ends."""
        folder.mkdir(parents=True, exist_ok=True)
        self._claimed = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(self._claimed, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"another command writes to {folder} as replica {self._name}: give this one its own --replica or --out"
            ) from None

    def _warm_up(self) -> None:
        """Run a step whose loss is NaN, so that it changes nothing: it loads or compiles kernels and allocates the
        optimizer's states, for which the others would wait later."""
        step, guard = self._step, self._step.guard
        assert guard is not None
        batch = [self._prepared.own(each) for each in next(self._prepared.loader)]
        self._prepared.loader.go_back()
        step.before_update = self.rehearse
        step.guard = GradientGuard(guard.max_norm, guard.mesh)  # after a NaN the original would skip all later steps
        step(*batch)
        step.guard = guard
        wait_for_parameters(step.model)

    def rehearse(self, step: TrainStep) -> bool:
        """Called instead of ``before_update`` by the step of the warm-up."""
        step.loss = torch.full((), torch.nan, device=self._rank.device)
        return True

    @property
    def sent_bytes(self) -> float:
        return self._group.sent_bytes

    @abstractmethod
    def _come(self) -> None:
        """Wait for the first quorum of this session."""

    @abstractmethod
    def before_update(self, step: TrainStep) -> bool:
        """Called by the step when its gradients are ready; returns whether the step counts."""

    @property
    def _all_there(self) -> bool:
        """Whether training may begin, or has begun; some live replicas may still fetch state."""
        return self._group.n_members >= self._options.replicas or self._made > self._first_step

    def told(self) -> list[Record]:
        told, self._records = self._records, []
        return told

    def leave(self) -> None:
        if self._manager is not None:
            self._manager.shutdown(wait=False)
            self._group.abort(errored=False)
        if hasattr(self, "_transport"):
            self._transport.close()
        if self._claimed is not None:
            os.close(self._claimed)
            self._claimed = None

    def before_quorum(self) -> None:
        """Called by the manager before it asks for a quorum."""
        if not self._joined and self.is_to_end():
            raise StoppedWaiting(f"replica {self._name} was asked to end before the others came")
        wait_for_parameters(self._step.model)
        if self._rank.device.type == "cuda":
            self._updated = torch.cuda.current_stream().record_event()
        self._healed, self._transport.seconds = False, 0.0

    def is_behind(self) -> bool:
        """Called by the manager before it asks for a quorum: whether pieces of the others' state are missing."""
        return False

    def is_to_end(self) -> bool:
        """Called repeatedly by the manager while it waits for a quorum; True makes it give up after some seconds."""
        return self.stop is not None and self.stop.asked is not None

    def after_quorum(self, seconds: float) -> None:
        """Called by the manager when this replica has the others' state, or has begun to fetch it in pieces.

        Args:
            seconds: time since the manager requested the quorum.
        """
        now = time.perf_counter()
        n_before, place = self.n_there, self.manager.participating_rank()
        self.number, self.n_there = -1 if place is None else place, self.manager.num_participants()
        self._prepared.loader.deal(max(0, self.number), self.n_there)
        if self._group.changed or self.n_there != n_before or (self._healed and not self.in_pieces):
            self._group.changed = False
            before, self._lives = self._lives, self._exchange_lives()
            gone = [] if self._healed else [name_of(life) for life in before if life not in self._lives]
            there, healed = list(map(name_of, self._lives)), self._transport.seconds if self._healed else 0.0
            step, sequence = self._made if self._healed else self._made_by_peer(), self._prepared.loader.taken
            where, asked_at = (step, there, self.number, sequence), now - seconds
            met, connected = (max(0.0, at - asked_at) for at in self._group.connecting)
            times = met, connected - met, time.perf_counter() - now
            self._records.append(Membership(*where, seconds, healed, gone, self._apart_for(), *times))

    def _apart_for(self) -> tuple[int, int]:
        """The sequences of all replicas that are not yet part of the common weights."""
        return 0, 0

    def _exchange_lives(self) -> list[str]:
        """Return ``name/id`` of each live replica; a restarted replica has a new id."""
        rows = torch.zeros(self.n_there, _NAME_BYTES + 10, dtype=torch.int32, device=self._rank.device)
        own = self._life.encode()
        if self.number >= 0:
            rows[self.number, : len(own)] = torch.tensor(list(own), dtype=torch.int32)
        self.manager.allreduce(rows, reduce_op=dist.ReduceOp.SUM).wait()
        if self.manager.errored() is not None:
            return [f"?/{number}" for number in range(self.n_there)]
        return [bytes(row).rstrip(b"\0").decode() for row in rows.tolist()]

    def _state(self) -> dict[str, Any]:
        """This rank's state that a peer fetches; a copy on a CPU, where training goes on in the original memory."""
        self._wait_for_update()
        tensors, settings = self._tensors()
        if self._rank.device.type == "cpu":
            tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        return self._description(settings) | {"tensors": tensors}

    def _wait_for_update(self) -> None:
        """Wait until the last update of weights and moments is done, as threads read them on other streams."""
        if self._rank.device.type == "cuda":
            self._updated.synchronize()

    def _tensors(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Weights, buffers and optimizer state of this rank by name, and the optimizer's settings."""
        view, settings = NamedState(self._step.model), dict[str, Any](scalars={})
        stretches = view.model() | view.optimizer(self._step.optimizer, settings)
        return {name: each.values.detach() for name, each in stretches.items()}, settings

    def _description(self, settings: dict[str, Any]) -> dict[str, Any]:
        """State besides tensors that a peer fetches."""
        about = {"alike": self._alike, "made": self._made_by_peer(), "loader": self._prepared.loader.state_dict()}
        return about | {"settings": settings, "trains": self._joined and self.manager.current_step() > 0}

    def _made_by_peer(self) -> int:
        """Return the number of steps that a peer that loads this state has made."""
        return self._made

    @property
    def newness(self) -> int:
        """A number that grows with the steps made and differs between replicas. So among replicas with the most steps
        one is the peer of all others, which compare their weights with its."""
        return (self._made << 16) + int(self._life[-4:], 16)

    def prefers_its_own(self, state: dict[str, Any]) -> bool:
        """Whether this replica keeps its state instead of fetching a peer's, because it has more steps and no replica
        trains yet; once others train it drops those steps, and reports it."""
        n_more = self._made - state["made"]
        if n_more > 0 and state["trains"]:
            said = f"replica {self._name} drops the last {n_more:,} of its {self._made:,} steps: "
            self._records.append(Message(said + "the others train already", "warning"))
        return n_more > 0 and not state["trains"]

    def _load(self, state: dict[str, Any]) -> None:
        """Load a peer's state; raises ValueError if it trains something else."""
        self._check_alike(state)
        self._load_tensors(state["tensors"], state["settings"])
        self._prepared.loader.load_state_dict(state["loader"])
        self._healed = state["made"] != self._made
        self._made = state["made"]

    def _check_alike(self, state: dict[str, Any]) -> None:
        """Raise ValueError if the peer trains something else."""
        for name, theirs in state["alike"].items():
            if name in self._alike and self._alike[name] != theirs:
                own = self._alike[name]
                raise ValueError(f"replica {self._name} is unlike the others: {name} is {own}, theirs {theirs}")

    @torch.no_grad()
    def _load_tensors(self, tensors: dict[str, Tensor], settings: dict[str, Any]) -> None:
        """Load the complete optimizer state, and those of the model's tensors that are among ``tensors``."""
        view = NamedState(self._step.model)
        for name, stretch in view.model().items():
            if name in tensors:
                stretch.values.copy_(tensors[name])
        of_optimizer = {name: Stretch.whole(each) for name, each in tensors.items() if name.startswith(OPTIMIZER)}
        view.restore_optimizer(self._step.optimizer, settings, of_optimizer)
        torch.autograd.graph.increment_version(tuple(self._step.model.parameters()))

    def _gradients(self, step: TrainStep) -> list[Tensor]:
        """This rank's gradients, or shards of them, after injecting any fault that is due now."""
        gradients = own_gradients(step)
        if self._trouble(self._made):
            for gradient in gradients:
                gradient.fill_(torch.nan)
        return gradients


def own_gradients(step: TrainStep) -> list[Tensor]:
    """This rank's gradients, or shards of them."""
    shares, whole = gradients_of(step.model, step.optimizer)
    return [*(shares or {}).values(), *whole.values()]


def name_of(life: str) -> str:
    return life.rpartition("/")[0]


def said_of(error: Exception | None) -> str:
    """Return an error's first line, without the source location that gloo puts first."""
    if error is None:
        return "another rank of this replica has failed"
    return re.sub(r"^\[\S+:\d+\] ", "", str(error).splitlines()[0])
