"""torchft's process groups and manager, as replicas need them (``replica_agreement.py``)."""

import faulthandler
import gc
import math
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import ExitStack, suppress
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions
from torch.nn.functional import pad
from torchft.manager import Manager, _ManagedWork
from torchft.process_group import (
    ProcessGroup,
    ProcessGroupGloo,
    ProcessGroupNCCL,
    _WorkAcceleratorTimeout,
    create_store_client,
)
from torchft.work import _DummyWork

from cs336_systems.costs.communication import cost
from cs336_systems.costs.parallelism.local_steps import SCALED
from cs336_systems.pretraining.agreement import StoppedWaiting

_RETRIES = 20
"""Failed attempts in a row to form a group before a step is tried without one."""
_LARGEST = torch.finfo(torch.float8_e4m3fn).max
_JOIN_S = 1.0
"""Seconds for which gloo waits, five times, until another member of a new group connects. One may have died since they
agreed; and a lighthouse that is started again counts its groups from the beginning, so that the first finds addresses
of an older one in the store."""
_CONNECT_S = 20.0
"""Seconds for which NCCL waits for the connections of a new group, whose members have all been there just before."""

_LOOK_S = 0.2
"""Seconds between two looks at whether a replica that waits for a quorum is to end, or the group of a collective."""
_NOTICE_S = 0.5
"""Seconds from a member's death until gloo's collectives are given up: most end by themselves within 0.1 s."""
_GRACE_S = 5.0
"""Seconds for which one that is to end still waits: mostly the others come, and all end after the same step."""


class _Watched(ProcessGroup):
    """Knows whether its members have changed since somebody looked, and how many bytes have left.

    Attributes:
        sent_bytes: bytes that this rank has sent, if each collective went around a ring (``costs/communication.py``).
    """

    changed = False
    sent_bytes = 0.0

    def configure(self, *args: Any, **kwargs: Any) -> None:
        self.changed = True
        super().configure(*args, **kwargs)

    def allreduce(self, tensors: list[Tensor], opts: Any) -> Any:
        self._count("all_reduce", tensors)
        return super().allreduce(tensors, opts)

    def allgather(self, output_tensors: list[list[Tensor]], input_tensor: list[Tensor], opts: Any) -> Any:
        self._count("all_gather", output_tensors[0])
        return super().allgather(output_tensors, input_tensor, opts)

    def _count(self, collective: str, tensors: list[Tensor]) -> None:
        n_bytes = sum(tensor.nbytes for tensor in tensors)
        self.sent_bytes += cost(collective, self.size(), n_bytes).wire_bytes


class Lookout:
    """Idle connections of a member of a group to all others: when one ends, the member at its other end has gone.

    The constructor waits until all members run it.

    Args:
        store: the group's key-value store, by which members find each other.
        lost: called once, in a thread, with the rank of a member that has died or has closed its connections.

    Raises:
        OSError, RuntimeError: another member did not come within five seconds.
    """

    def __init__(self, store: Any, rank: int, world_size: int, lost: Callable[[int], None]) -> None:
        self._others: dict[socket.socket, int] = {}
        with socket.create_server(("", 0)) as door:
            door.settimeout(5 * _JOIN_S)
            store.set(f"lookout {rank}", f"{socket.gethostname()}:{door.getsockname()[1]}")
            for other in range(rank):
                host, _, port = store.get(f"lookout {other}").decode().rpartition(":")
                connection = socket.create_connection((host, int(port)), timeout=5 * _JOIN_S)
                connection.sendall(rank.to_bytes(4))
                self._others[connection] = other
            for _ in range(rank + 1, world_size):
                connection = door.accept()[0]
                connection.settimeout(5 * _JOIN_S)
                self._others[connection] = int.from_bytes(connection.recv(4, socket.MSG_WAITALL))
        self._closed = False
        threading.Thread(target=self._watch, args=(lost,), name="lookout", daemon=True).start()

    def _watch(self, lost: Callable[[int], None]) -> None:
        """Wait in a thread for the first connection that ends."""
        if not self._others:
            return
        with selectors.DefaultSelector() as selector:
            for connection, other in self._others.items():
                selector.register(connection, selectors.EVENT_READ, other)
            ended = selector.select()[0][0]
        if not self._closed:
            lost(ended.data)

    def close(self) -> None:
        """End the connections; the others notice."""
        self._closed = True
        for connection in self._others:
            with suppress(OSError):  # the other side has ended it
                connection.shutdown(socket.SHUT_RDWR)


class LookedAfter(ProcessGroup):
    """A process group that has a lookout and aborts itself when a member dies.

    On one host nothing tells NCCL's kernels of a death: they would wait for the dead member until the timeout. ``Gloo``
    notices most deaths, but not all.
    """

    _timeout: timedelta
    _lookout: Lookout | None = None
    _gone: RuntimeError | None = None
    turn = 0
    """The number of groups that there have been."""

    def __init__(self, timeout: timedelta) -> None:
        super().__init__(timeout)
        self._lock = threading.RLock()

    def configure(self, store_addr: str, replica_id: str, rank: int, world_size: int, *args: Any) -> None:
        with self._lock:
            self.turn += 1  # from now on members that leave the old group have not died
            self.abort(errored=False)
            self._gone = None
        store = create_store_client(store_addr, timeout=timedelta(seconds=5 * _JOIN_S))
        # Before NCCL's connections: these wait for the whole timeout for a member that died since all agreed, or at the
        # address of a group that is long gone.
        lookout = Lookout(store, rank, world_size, partial(self._lost, self.turn))
        try:
            super().configure(store_addr, replica_id, rank, world_size, *args)
        except BaseException:
            lookout.close()
            raise
        with self._lock:
            self._lookout = lookout
            if self._gone is not None:  # when there was nothing to abort yet
                self.abort()
                raise self._gone

    def _lost(self, turn: int, member: int) -> None:
        with self._lock:
            if turn == self.turn:
                self._gone = RuntimeError(f"member {member} of the group has gone")
                self.abort()

    def abort(self, errored: bool = True) -> None:
        with self._lock:  # NCCL's abort is not for two threads at a time
            lookout, self._lookout = self._lookout, None
            if lookout is not None:
                lookout.close()
            # A process whose group cannot be aborted would stand still for ever. Started again, it takes over a state.
            within_s = self._timeout.total_seconds() + _CONNECT_S
            faulthandler.dump_traceback_later(within_s, exit=True, file=2)
            with ExitStack() as last:
                last.callback(faulthandler.cancel_dump_traceback_later)
                last.callback(super().errored)  # waits for the device, whose kernels wait for nobody now
                super().abort(errored)

    def errored(self) -> Exception | None:
        error = super().errored()
        return self._gone or error

    @property
    def parent(self) -> Any:
        if self._gone is not None:
            raise RuntimeError(str(self._gone))
        return super().parent


class _UntilItsEnd(dist.Work):
    """A collective of gloo, for which nobody waits longer than its group is there."""

    def __init__(self, work: dist.Work, group: "Gloo") -> None:
        super().__init__()
        self._work, self._group, self._of = work, group, group._pg

    def wait(self, timeout: timedelta | None = None) -> bool:
        while not self._work.is_completed() and self._group._pg is self._of:
            with suppress(RuntimeError):  # which says that it is not complete yet
                self._work.wait(timedelta(seconds=_LOOK_S))
        if not self._work.is_completed():
            # Who frees the group waits for its collectives: a thread does, which holds this one.
            threading.Thread(target=self._see_out, daemon=True).start()
            raise RuntimeError(str(self._group._gone or "the group has ended"))
        return self._work.wait()

    def get_future(self) -> Any:
        return self._work.get_future()

    def _see_out(self) -> None:
        with suppress(RuntimeError):
            self._work.wait()


class Gloo(LookedAfter, _Watched, ProcessGroupGloo):
    """Gives up soon on a member that does not connect, and on collectives that do not notice that one has gone.

    gloo reads a connection message by message. If a collective fails because the member that it sends to has died, a
    message for it may still come from the member on its other side: that one has no place any more, so that gloo never
    reads on to those of another collective, or to the end of the connection (``Pair::prepareRead``). Nor does it tell
    who waits for a message of which a part has come or gone (``Pair::signalException``, gloo/transport/tcp/pair.cc).
    """

    def _create_pg(self, *args: Any, **kwargs: Any) -> Any:
        whole, self._timeout = self._timeout, min(self._timeout, timedelta(seconds=_JOIN_S))
        try:
            group = super()._create_pg(*args, **kwargs)
        finally:
            self._timeout = whole
        group._get_backend(torch.device("cpu")).set_timeout(whole)
        return group

    def _wrap_work(self, work: dist.Work, opts: Any) -> dist.Work:
        return _UntilItsEnd(work, self)

    def _lost(self, turn: int, member: int) -> None:
        time.sleep(_NOTICE_S)
        super()._lost(turn, member)

    def errored(self) -> None:
        """Its collectives raise their errors; one that is complete is so although a member has gone since."""


class Nccl(LookedAfter, _Watched, ProcessGroupNCCL):
    """NCCL's process group, for replicas on GPUs."""

    def __init__(self, timeout: timedelta) -> None:
        # An abort waits until a member's first connections are made or given up; torchft would wait for the timeout.
        seconds = math.ceil(min(timeout.total_seconds(), _CONNECT_S))
        os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", str(seconds))
        super().__init__(timeout)

    def _wrap_work(self, work: Any, opts: object) -> Any:
        """The work with torchft's timer, which may abort the group that the work is of, but none that came after."""
        wrapped = super()._wrap_work(work, opts)
        if isinstance(wrapped, _WorkAcceleratorTimeout):
            wrapped._pg = _AsOfNow(self)
        return wrapped


class _AsOfNow:
    """A group for a timer, which fires long after a collective that failed: by then there is another group."""

    def __init__(self, group: LookedAfter) -> None:
        self._group, self._turn = group, group.turn

    def abort(self) -> None:
        if self._group.turn == self._turn:
            self._group.abort()


class Reported(Protocol):
    """The calls that a ``ReportingManager`` makes to its replica."""

    def before_quorum(self) -> None:
        """Called before one is asked for."""

    def after_quorum(self, seconds: float) -> None:
        """Called when the state is that of the others, after so many seconds."""

    def is_behind(self) -> bool:
        """Whether this replica still lacks pieces of the others' state, which it fetches while it steps with them."""

    def is_to_end(self) -> bool:
        """Asked every ``_LOOK_S`` seconds while a quorum is awaited; True gives it up after ``_GRACE_S``."""


class _DaemonThreads(Executor):
    """Makes each call in a daemon thread: a process that ends does not wait for a quorum that nobody answers for."""

    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(call(*args, **kwargs))
            except Exception as error:
                future.set_exception(error)

        threading.Thread(target=run, name="quorum", daemon=True).start()
        return future


class ReportingManager(Manager):
    """torchft's manager, which tells its replica of each quorum and each verdict."""

    replica: "Reported"
    _healing: bool
    _executor: Executor
    verdict: bool | None = None
    """The last ``should_commit``, until somebody has looked."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._executor.shutdown()
        self._executor = _DaemonThreads()

    def start_quorum(self, *args: Any, **kwargs: Any) -> None:
        began = time.perf_counter()
        self.replica.before_quorum()
        for _ in range(_RETRIES):
            if self.replica.is_behind():
                self._step = 0  # by which the quorum knows that it lacks state
            super().start_quorum(*args, **kwargs)
            if self._use_async_quorum:  # torchft then counts only replicas that have the state as participants
                self.wait_quorum()
                if self._healing:
                    self._apply_pending_state_dict()
                    self._healing = False
            if self.errored() is None:
                break
            self._hang_up()
            super().should_commit()  # no, which makes the lighthouse form another group
        self.replica.after_quorum(time.perf_counter() - began)

    def wait_quorum(self) -> None:
        """Wait for the quorum, or until the replica is to end and nobody comes; raises ``StoppedWaiting`` then."""
        assert self._quorum_future is not None
        gives_up_at = math.inf
        while time.monotonic() < gives_up_at:
            try:
                return self._quorum_future.result(_LOOK_S)
            except TimeoutError:
                if self._quorum_future.done():  # it is the quorum's own
                    raise
            if gives_up_at == math.inf and self.replica.is_to_end():
                gives_up_at = time.monotonic() + _GRACE_S
        raise StoppedWaiting(f"asked to end, and no quorum came within {_GRACE_S:g} s")

    def should_commit(self, *args: Any, **kwargs: Any) -> bool:
        self._hang_up()
        self.verdict = super().should_commit(*args, **kwargs)
        return self.verdict

    def _hang_up(self) -> None:
        """After an error that not all replicas have met, close this one's connections, so that all meet one.

        Of four on a ring one is not connected with the one that died, and would wait for neighbours that have given up.
        """
        error = self.errored()
        if error is None or isinstance(error.original_exception, FloatingPointError):
            return
        error.original_exception.with_traceback(None)  # whose frames hold works, and these gloo's connections
        self._pg.abort(errored=False)
        gc.collect()

    def allreduce(self, tensor: Tensor, should_quantize: bool = False, *args: Any, **kwargs: Any) -> Any:
        """As torchft's, but in 8 bits on all devices: each rank gathers the bytes of all and takes their mean itself,
        in one order, so that all have the same bits."""
        if not should_quantize:
            return super().allreduce(tensor, False, *args, **kwargs)
        if self.errored():
            return _DummyWork(tensor)
        if not self.is_participating():
            tensor.zero_()
        own, n_there = in_8_bits(tensor), self.num_participants()
        of_all = [torch.empty_like(own) for _ in range(self._pg.size())]

        def mean(_: Any) -> Tensor:
            return tensor.copy_(torch.stack([from_8_bits(each, tensor) for each in of_all]).sum(0) / n_there)

        try:
            work = _ManagedWork(self, self._pg.allgather([of_all], [own], AllgatherOptions()), tensor)
        except RuntimeError as error:
            self.report_error(error)
            return _DummyWork(tensor)
        work.get_future().then(mean)
        return work


def in_8_bits(tensor: Tensor) -> Tensor:
    """A float32 scale for each ``SCALED`` elements, and then all elements in float8 e4m3: (n bytes,) uint8."""
    flat = tensor.detach().flatten().float()
    rows = pad(flat, (0, -len(flat) % SCALED)).view(-1, SCALED)
    scales = (rows.abs().amax(1, keepdim=True) / _LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
    values = (rows / scales).to(torch.float8_e4m3fn).flatten()[: len(flat)]
    return torch.cat([scales.flatten().view(torch.uint8), values.view(torch.uint8)])


def from_8_bits(sent: Tensor, like: Tensor) -> Tensor:
    """What ``in_8_bits`` has made of a tensor of the shape and dtype of ``like``."""
    scales, values = sent.tensor_split([len(sent) - like.numel()])
    each = scales.view(torch.float32).repeat_interleave(SCALED)[: like.numel()]
    return (values.view(torch.float8_e4m3fn).float() * each).view(like.shape).to(like.dtype)
