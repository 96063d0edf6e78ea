"""Replicas that may die agree through torchft: who is there (Lighthouse, Manager), and on one model (this file).

``every-step`` averages gradients in each step over the replicas that are there; if one dies in it, the step is dropped,
and its sequences are dealt again among the others: nothing is lost or trained twice. ``diloco`` (Douillard et al. 2023,
arXiv 2311.08105; in fragments and with a delay, 2501.18512) lets each replica train by itself for H steps and averages
the changes of weights as gradients of an outer optimizer: what a replica that dies has learned since the last average
is lost, and a failed average takes all replicas back to the one before.

Both ask for the quorum and wait for it (``use_async_quorum=False``): who is there decides which sequences a replica
takes. A replica that comes, or has missed steps, takes over the state of one that is there, over HTTP: weights,
moments, outer state, place in the data; of what it fetches only tensors and plain values are unpickled. Peers find each
other by host name, on ports of all interfaces and without passwords: keep replicas on a trusted network.

torchft counts steps of its own, from 0 in each session of the replicas; the trainer's number of steps is in the state.
"""

import logging
import re
import secrets
import socket
import time
import urllib.request
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._serialization import _streaming_load
from torch.utils._pytree import tree_map_only
from torchft.checkpointing import HTTPTransport
from torchft.local_sgd import DiLoCo
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo, ProcessGroupNCCL

from cs336_systems.distributed.checkpoint_state import OPTIMIZER, NamedState
from cs336_systems.distributed.process_group import Rank, on_rank_0
from cs336_systems.distributed.shards import wait_for_parameters
from cs336_systems.distributed.stretches import Stretch
from cs336_systems.pretraining.agreement import OUTER_MOMENTUM, Agreement, Trouble, checksum
from cs336_systems.pretraining.options import TrainOptions
from cs336_systems.pretraining.preparation import PreparedRun, data_identity, must_be_alike
from cs336_systems.pretraining.run_records import Dropped, Membership, Record
from cs336_systems.pretraining.sources import sources_of
from cs336_systems.pretraining.stop_requests import REASONS
from cs336_systems.training.clipping import gradients_of
from cs336_systems.training.step import TrainStep

HEARTBEAT_S = 0.1
CONNECT_S = 10.0
_QUORUM_S = 3600
"""The longest wait for a quorum: under DiLoCo, for those who are still training. Who is gone is known by heartbeats."""
_LIGHTHOUSE_RETRIES = _QUORUM_S
"""Attempts to reach a lighthouse that has died: torchft spreads them over the time of the quorum, one a second."""
_RETRIES = 20
"""Failed attempts in a row to form a group before a step is tried without."""
_JOIN_S = 1.0
"""Seconds for which gloo waits, five times, until another member of a new group connects. One may have died since they
agreed; and a lighthouse that is started again counts its groups from the beginning, so that the first finds addresses
of an older one in the store."""
_BUCKET_BYTES = 25 * 1024**2
_NAME_BYTES = 64
_MIX = 0.5
"""The share of a replica's own weights in those that follow a delayed average, without which the steps of the delay
would be lost; that of Streaming DiLoCo (arXiv 2501.18512, section 2.3)."""

_MAY_DIFFER = ("--out", "--replica", "--lighthouse", "--fail")
"""Options that may differ between replicas, but not between ranks of one."""


def agreement_of(options: TrainOptions, rank: Rank, lighthouse: str, name: str, trouble: Trouble) -> Agreement:
    """As ``agreement.agreement_of``."""
    if not 0 < len(name.encode()) <= _NAME_BYTES:
        raise ValueError(f"--replica needs a name of at most {_NAME_BYTES} bytes, got {name!r}")
    on_rank_0(lambda: _check_reachable(lighthouse))
    kind = {"every-step": EveryStep, "diloco": OuterSteps}[cast(str, options.agree)]
    return kind(options, rank, lighthouse, name, trouble)


def _check_reachable(lighthouse: str) -> None:
    """Raise ValueError unless something listens at the address."""
    parts = urlsplit(lighthouse)
    try:
        port = parts.port
    except ValueError:
        port = None
    if parts.scheme != "http" or not parts.hostname or port is None:
        raise ValueError(f"--lighthouse must be an address such as http://node0:29510, got {lighthouse!r}")
    try:
        socket.create_connection((parts.hostname, port), timeout=CONNECT_S).close()
    except OSError as error:
        raise ValueError(f"no lighthouse answers at {lighthouse}: {error}") from None


class _Transport(HTTPTransport[Any]):
    """Fetches a peer's state, of which nothing but tensors and plain values is unpickled, and takes the time."""

    seconds = 0.0

    def __init__(self, timeout: timedelta) -> None:
        super().__init__(timeout, num_chunks=0)
        self._server.RequestHandlerClass.log_message = lambda *_: None

    @classmethod
    def _load_from_address(cls, address: str, timeout: timedelta) -> object:
        with warnings.catch_warnings(), urllib.request.urlopen(address, timeout=timeout.total_seconds()) as response:
            warnings.filterwarnings("ignore", "The given buffer is not writable")  # so tensors get memory of their own
            return tree_map_only(Tensor, torch.clone, _streaming_load(response, weights_only=True))

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Any:
        began = time.perf_counter()
        try:
            return super().recv_checkpoint(src_rank, metadata, step, timeout)
        finally:
            self.seconds = time.perf_counter() - began


class _Gloo(ProcessGroupGloo):
    """Knows whether its members have changed since somebody looked."""

    changed = False
    _timeout: timedelta

    def configure(self, *args: Any, **kwargs: Any) -> None:
        self.changed = True
        super().configure(*args, **kwargs)

    def _create_pg(self, *args: Any, **kwargs: Any) -> Any:
        whole, self._timeout = self._timeout, min(self._timeout, timedelta(seconds=_JOIN_S))
        try:
            group = super()._create_pg(*args, **kwargs)
        finally:
            self._timeout = whole
        group._get_backend(torch.device("cpu")).set_timeout(whole)
        return group


class _Nccl(ProcessGroupNCCL):
    """As ``_Gloo``."""

    changed = False

    def configure(self, *args: Any, **kwargs: Any) -> None:
        self.changed = True
        super().configure(*args, **kwargs)


class _Manager(Manager):
    """torchft's manager, which tells its replica of each quorum and each verdict."""

    replica: "ReplicaAgreement"
    verdict: bool | None = None
    """The last ``should_commit``, until somebody has looked."""

    def start_quorum(self, *args: Any, **kwargs: Any) -> None:
        began = time.perf_counter()
        self.replica.before_quorum()
        for _ in range(_RETRIES):
            super().start_quorum(*args, **kwargs)
            if self.errored() is None:
                break
            super().should_commit()  # no, which makes the lighthouse form another group
        self.replica.after_quorum(time.perf_counter() - began)

    def should_commit(self, *args: Any, **kwargs: Any) -> bool:
        self.verdict = super().should_commit(*args, **kwargs)
        return self.verdict


class ReplicaAgreement(Agreement):
    """What both ways to agree share: the quorum, who is there, and the state that a replica takes over."""

    on = True

    def __init__(self, options: TrainOptions, rank: Rank, lighthouse: str, name: str, trouble: Trouble) -> None:
        for each in ("torchft", "torchft.manager", "torchft.process_group", "torchft.local_sgd"):
            logging.getLogger(each).setLevel(logging.CRITICAL)  # it says at length what the records say
        self.number, self._options, self._rank, self._name, self._trouble = -1, options, rank, name, trouble
        self.reasons = torch.zeros(len(REASONS), device=rank.device)
        self._life = f"{name}/{on_rank_0(lambda: secrets.token_hex(4))}"
        self._lives: list[str] = []
        self._records: list[Record] = []
        self._made = self._first_step = 0
        self._healed = False
        timeout, host = timedelta(seconds=options.agree_timeout), socket.gethostname()
        self._store: dist.TCPStore | None = None

        def host_store() -> int:
            self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
            return self._store.port

        port = on_rank_0(host_store)
        self._transport = _Transport(timeout)
        self._group = _Nccl(timeout) if rank.device.type == "cuda" else _Gloo(timeout)
        self._manager = _Manager(
            pg=self._group,
            load_state_dict=self._load,
            state_dict=self._state,
            min_replica_size=1,
            use_async_quorum=False,
            timeout=timeout,
            quorum_timeout=timedelta(seconds=_QUORUM_S),
            connect_timeout=timedelta(seconds=CONNECT_S),
            rank=rank.rank,
            world_size=rank.world_size,
            store_addr=host,
            store_port=port,
            lighthouse_addr=lighthouse,
            replica_id=name,
            heartbeat_interval=timedelta(seconds=HEARTBEAT_S),
            checkpoint_transport=self._transport,
            quorum_retries=_LIGHTHOUSE_RETRIES,
        )
        self._manager.replica = self

    def folder(self, out: Path) -> Path:
        return out / f"replica-{self._name}"

    def join(self, prepared: PreparedRun, made: int) -> int:
        """Come to the others, and wait until there are as many as --replicas, or some that have trained."""
        self._prepared, self._made, self._first_step = prepared, made, made
        assert isinstance(prepared.step, TrainStep)
        self._step = prepared.step
        self._step.before_update = self.before_update
        alike = {name: repr(value) for name, value in must_be_alike(self._options).items() if name not in _MAY_DIFFER}
        sources = sources_of(self._options.data or [prepared.dataset.folder])
        alike |= {name: repr(value) for name, value in data_identity(self._options, sources).items()}
        alike["the number of ranks"] = repr(self._rank.world_size)
        weights = checksum([stretch.values for stretch in NamedState(self._step.model).model().values()])
        alike[f"the checksum of weights after {made} steps"] = repr(weights)
        self._alike = alike
        self._come()
        return self._made

    def _come(self) -> None:
        raise NotImplementedError

    def before_update(self, step: TrainStep) -> bool:
        raise NotImplementedError

    @property
    def _all_there(self) -> bool:
        """Whether training may begin, or has begun."""
        return self.n_there >= self._options.replicas or self._made > self._first_step

    def told(self) -> list[Record]:
        told, self._records = self._records, []
        return told

    def leave(self) -> None:
        self._manager.shutdown(wait=False)
        self._group.abort(errored=False)

    def before_quorum(self) -> None:
        """Called by the manager."""
        wait_for_parameters(self._step.model)
        self._healed, self._transport.seconds = False, 0.0

    def after_quorum(self, seconds: float) -> None:
        """Called by the manager, when the state is that of the others."""
        self.number, self.n_there = self._manager.participating_rank() or 0, self._manager.num_participants()
        self._prepared.loader.deal(self.number, self.n_there)
        if self._group.changed or self._healed:
            self._group.changed = False
            before, self._lives = self._lives, self._exchange_lives()
            gone = [] if self._healed else [name_of(life) for life in before if life not in self._lives]
            there, healed = list(map(name_of, self._lives)), self._transport.seconds if self._healed else 0.0
            step, sequence = self._made if self._healed else self._made_by_peer(), self._prepared.loader.taken
            where = step, there, self.number, sequence
            self._records.append(Membership(*where, seconds, healed, gone, self._apart_for()))

    def _apart_for(self) -> tuple[int, int]:
        """The sequences of all replicas that are not in the weights of all."""
        return 0, 0

    def _exchange_lives(self) -> list[str]:
        """Name and life of each who is there; a replica that comes back has another life."""
        rows = torch.zeros(self.n_there, _NAME_BYTES + 10, dtype=torch.int32, device=self._rank.device)
        own = self._life.encode()
        rows[self.number, : len(own)] = torch.tensor(list(own), dtype=torch.int32)
        self._manager.allreduce(rows, reduce_op=dist.ReduceOp.SUM).wait()
        if self._manager.errored() is not None:
            return [f"?/{number}" for number in range(self.n_there)]
        return [bytes(row).rstrip(b"\0").decode() for row in rows.tolist()]

    def _state(self) -> dict[str, Any]:
        """All that a peer takes over, of this rank; memory of its own on a CPU, where training goes on in it."""
        view, settings = NamedState(self._step.model), dict[str, Any](scalars={})
        stretches = view.model() | view.optimizer(self._step.optimizer, settings)
        tensors = {name: each.values.detach() for name, each in stretches.items()}
        if self._rank.device.type == "cpu":
            tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        about = {"alike": self._alike, "made": self._made_by_peer(), "loader": self._prepared.loader.state_dict()}
        return about | {"settings": settings, "tensors": tensors}

    def _made_by_peer(self) -> int:
        """The steps that are in this state."""
        return self._made

    @torch.no_grad()
    def _load(self, state: dict[str, Any]) -> None:
        """Take over a peer's state; raises ValueError if it trains something else."""
        for name, theirs in state["alike"].items():
            if name in self._alike and self._alike[name] != theirs:
                own = self._alike[name]
                raise ValueError(f"replica {self._name} is unlike the others: {name} is {own}, theirs {theirs}")
        view, tensors = NamedState(self._step.model), state["tensors"]
        for name, stretch in view.model().items():
            stretch.values.copy_(tensors[name])
        of_optimizer = {name: Stretch.whole(each) for name, each in tensors.items() if name.startswith(OPTIMIZER)}
        view.restore_optimizer(self._step.optimizer, state["settings"], of_optimizer)
        torch.autograd.graph.increment_version(tuple(self._step.model.parameters()))
        self._prepared.loader.load_state_dict(state["loader"])
        self._healed = state["made"] != self._made
        self._made = state["made"]

    def _gradients(self, step: TrainStep) -> list[Tensor]:
        """This rank's gradients, or shards of them, after whatever is to befall this replica now."""
        shares, whole = gradients_of(step.model, step.optimizer)
        gradients = [*(shares or {}).values(), *whole.values()]
        if self._trouble(self._made):
            for gradient in gradients:
                gradient.fill_(torch.nan)
        return gradients


class EveryStep(ReplicaAgreement):
    """Gradients are averaged in each step; all replicas hold the same bits."""

    _come_to = False
    _n_not_finite = 0

    def _come(self) -> None:
        while True:
            self._manager.start_quorum()
            if self._all_there:
                self._come_to = True  # this quorum is the first step's
                return
            time.sleep(0.05)

    def begin(self, made: int) -> int:
        self._made, self._began = made, time.perf_counter()
        if not self._come_to:
            self._manager.start_quorum()
        self._come_to = False
        return self._made

    def before_update(self, step: TrainStep) -> bool:
        assert step.loss is not None
        gradients = self._gradients(step)
        loss = step.loss.detach().float().reshape(1)
        flats = list(_packed(gradients))
        sent = [torch.cat([loss, self.reasons.to(loss)]), *(flat for flat, _ in flats)]
        own_is_finite = _finite(sent)
        for work in [self._manager.allreduce(flat) for flat in sent]:
            work.wait()
        if self._manager.errored() is None and not _finite(sent):
            self._manager.report_error(FloatingPointError("a loss or a gradient is not finite"))
        error = self._manager.errored()
        self.kept = self._manager.should_commit()
        if self.kept:
            for flat, parts in flats:
                for part, values in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
                    if part.data_ptr() != values.data_ptr():
                        part.copy_(values.view_as(part))
            step.loss, self.reasons, self._n_not_finite = sent[0][0], sent[0][1:], 0
        else:
            self._drop(error.original_exception if error else None, own_is_finite)
        return self.kept

    def _drop(self, error: Exception | None, own_is_finite: bool) -> None:
        """Note why the step is dropped."""
        reason = _said(error)
        if isinstance(error, FloatingPointError):
            whose = "" if own_is_finite else f": that of replica {self._name}"
            reason, self._n_not_finite = reason + whose, self._n_not_finite + 1
            if self._n_not_finite > 1 and not own_is_finite:
                self.hopeless = f"step {self._made}: a loss or a gradient of replica {self._name} is not finite again"
        loader = self._prepared.loader
        loader.go_back()
        last = loader.taken + self.n_there * loader.batch_size
        seconds = time.perf_counter() - self._began
        self._records.append(Dropped(self._made, reason, (loader.taken, last), True, seconds))


class OuterSteps(ReplicaAgreement):
    """DiLoCo: each replica takes its own steps, and an outer optimizer some on the mean of what they have changed.

    A replica begins with a round of steps without gradients, which change nothing: at its end it takes over the state
    of the others, or those that begin together meet. In this one average it stands for the peer whose state it has.
    """

    def _come(self) -> None:
        options, optimizer = self._options, self._step.optimizer
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        fragments = _fragments(parameters, options.agree_fragments)
        how: dict[str, Any] = {"lr": options.outer_learning_rate, "momentum": options.outer_momentum}
        how |= {"nesterov": options.outer_momentum > 0}
        self._outer = [torch.optim.SGD(fragment.parameters(), **how) for fragment in fragments]
        for outer in self._outer:
            for parameter in outer.param_groups[0]["params"]:
                if (momentum := optimizer.state.get(parameter, {}).pop(OUTER_MOMENTUM, None)) is not None:
                    outer.state[parameter]["momentum_buffer"] = momentum
        self._diloco = DiLoCo(
            self._manager,
            fragments,
            optimizer,
            self._outer,
            options.agree_every,
            backup_device=self._rank.device,
            should_quantize=options.agree_dtype == "fp8",
            fragment_sync_delay=options.agree_delay,
            fragment_update_alpha=_MIX if options.agree_delay else 0.0,
        )
        self._asked = torch.zeros_like(self.reasons)
        self._diloco.__enter__()
        optimizer.register_step_post_hook(self._after_step)
        self._coming, self._averaged_at = True, self._prepared.loader.taken
        apart = options.agree_every // options.agree_fragments
        while True:
            for _ in range(apart - options.agree_delay):
                optimizer.step()
            if self._made > self._first_step:  # from others, which train on
                break
            for _ in range(options.agree_delay):
                optimizer.step()
            if self._all_there and self.at_average:
                break
            time.sleep(0.05)
        self._coming = False

    def begin(self, made: int) -> int:
        self._made, self.at_average = made, False
        return made

    def before_update(self, step: TrainStep) -> bool:
        self._gradients(step)
        self._asked = self.reasons.clone()
        self.reasons = torch.zeros_like(self.reasons)
        return True

    def end(self, made: int) -> int:
        return self._made if self._healed and self._made != made else made + 1

    def _made_by_peer(self) -> int:
        return self._made + (not self._coming)

    def _apart_for(self) -> tuple[int, int]:
        taken = self._prepared.loader.taken
        return (taken if self._healed else self._averaged_at), taken

    def _after_step(self, *_: Any) -> None:
        """After an inner step, and the average that it may have brought."""
        verdict, self._manager.verdict = self._manager.verdict, None
        if verdict is None:
            return
        self.at_average = verdict
        first, self._averaged_at = self._averaged_at, self._prepared.loader.taken
        if verdict:
            asked = self._asked.float()
            self._manager.allreduce(asked).wait()
            if self._manager.errored() is None:
                self.reasons = asked
        elif not self._coming:
            error = self._manager.errored()
            reason = _said(error.original_exception if error else None)
            sequences = first, self._averaged_at
            self._records.append(Dropped(self._made, reason, sequences, False, 0.0))

    @contextmanager
    def saving(self) -> Iterator[None]:
        states = self._step.optimizer.state
        held = [
            (states[parameter], state["momentum_buffer"])
            for outer in self._outer
            for parameter, state in outer.state.items()
            if state.get("momentum_buffer") is not None
        ]
        for state, momentum in held:
            state[OUTER_MOMENTUM] = momentum
        try:
            yield
        finally:
            for state, _ in held:
                del state[OUTER_MOMENTUM]

    def leave(self) -> None:
        if hasattr(self, "_diloco"):
            self._diloco.__exit__(None, None, None)
        super().leave()


def name_of(life: str) -> str:
    """The name of a replica by its life."""
    return life.rpartition("/")[0]


def _said(error: Exception | None) -> str:
    """An error in a line, without the place in the source with which gloo begins."""
    if error is None:
        return "another rank of this replica has failed"
    return re.sub(r"^\[\S+:\d+\] ", "", str(error).splitlines()[0])


def _finite(tensors: list[Tensor]) -> bool:
    """Whether all numbers are; waits for the device."""
    return bool(torch.stack(torch._foreach_norm(tensors, ord=float("inf"))).isfinite().all())


def _packed(tensors: list[Tensor]) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """Buckets of one dtype, flat, each with its parts; a large tensor that is contiguous is a bucket itself."""
    waiting: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.nbytes >= _BUCKET_BYTES and tensor.is_contiguous():
            yield tensor.view(-1), [tensor]
            continue
        parts = waiting.setdefault(tensor.dtype, [])
        parts.append(tensor)
        if sum(part.nbytes for part in parts) >= _BUCKET_BYTES:
            yield torch.cat([part.reshape(-1) for part in parts]), waiting.pop(tensor.dtype)
    for parts in waiting.values():
        yield torch.cat([part.reshape(-1) for part in parts]), parts


def _fragments(parameters: list[nn.Parameter], n: int) -> list[nn.Module]:
    """Parameters, in their order, divided into so many modules of about as many elements.

    Raises:
        ValueError: there are fewer parameters.
    """
    if n > len(parameters):
        raise ValueError(f"--agree-fragments {n} of {len(parameters)} parameters")
    total, before, place = sum(parameter.numel() for parameter in parameters), 0, -1
    fragments = [nn.Module() for _ in range(n)]
    for number, parameter in enumerate(parameters):
        place = max(min(before * n // total, place + 1), n - len(parameters) + number)  # none is empty
        fragments[place].register_parameter(str(number), parameter)
        before += parameter.numel()
    return fragments
