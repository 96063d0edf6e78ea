"""torchft's process groups for replicas, extended to detect a dead member quickly (``replica_agreement.py``)."""

import faulthandler
import math
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchft.futures import context_timeout
from torchft.process_group import (
    ProcessGroup,
    ProcessGroupGloo,
    ProcessGroupNCCL,
    _WorkAcceleratorTimeout,
    create_store_client,
)

from cs336_systems.costs.communication import cost

_JOIN_S = 1.0
"""Seconds that gloo waits, five times, for another member of a new group to connect. That member may have died since
the quorum. Or a restarted lighthouse numbers its groups from the beginning, so that the store still has the addresses
of an older group."""
_LOOK_S = 0.2
"""Seconds between checks of the connections while a replica waits for a gloo collective."""
_LOOKS = 3
"""The group is closed after this many checks found a closed connection; a closed connection stays closed. Meanwhile
most collectives end by themselves, within 0.1 s, and those that do not need the dead member complete."""
_LOOK_TAG = 1
"""The tag of receives that check a connection; nothing is ever sent with it."""
_STORE_S = 15.0
"""Seconds to connect to the store, name lookup included: three times the default time-out of resolvers."""
_CONNECT_S = 20.0
"""Seconds for which NCCL waits for the connections of a new group, whose members have all just joined the lookout."""


class _Watched(ProcessGroup):
    """A process group that records whether it was reconfigured, and counts the bytes sent.

    Attributes:
        changed: whether the group was reconfigured since the caller reset this.
        n_members: size of the last group, including members that still lack the others' state.
        connecting: when the last group's members began to connect, and when they were connected
            (``time.perf_counter``).
        sent_bytes: bytes that this rank has sent, assuming ring collectives (``costs/communication.py``).
    """

    changed = False
    n_members = 0
    connecting = 0.0, 0.0
    sent_bytes = 0.0

    def configure(self, store_addr: str, replica_id: str, rank: int, world_size: int, *args: Any) -> None:
        self.changed, self.n_members, began = True, world_size, time.perf_counter()
        super().configure(store_addr, replica_id, rank, world_size, *args)
        self.connecting = began, time.perf_counter()

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
    """Idle connections from one member of a group to all others; a connection that closes shows that its peer has gone.

    The constructor returns once all members have called it.

    Args:
        store: the group's key-value store, through which members exchange addresses.
        lost: called once, in a thread, with the rank of a member that has died or has closed its connections.

    Raises:
        OSError, RuntimeError: another member did not connect within five seconds.
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
        """Wait for the first connection to close; runs in a thread."""
        if not self._others:
            return
        with selectors.DefaultSelector() as selector:
            for connection, other in self._others.items():
                selector.register(connection, selectors.EVENT_READ, other)
            ended = selector.select()[0][0]
        if not self._closed:
            lost(ended.data)

    def close(self) -> None:
        """Close the connections; the other members notice it."""
        self._closed = True
        for connection in self._others:
            with suppress(OSError):  # the other side has closed it
                connection.shutdown(socket.SHUT_RDWR)


class LookedAfter(ProcessGroup):
    """A process group that has a ``Lookout`` and aborts itself when a member dies.

    NCCL's kernels on one host do not detect a dead member and would wait for the time-out; gloo detects most.
    """

    _timeout: timedelta
    _lookout: Lookout | None = None
    _gone: RuntimeError | None = None
    turn = 0
    """The number of the current group, from 1."""

    def __init__(self, timeout: timedelta) -> None:
        super().__init__(timeout)
        self._lock = threading.RLock()

    def configure(self, store_addr: str, replica_id: str, rank: int, world_size: int, *args: Any) -> None:
        with self._lock:
            self.turn += 1  # from now on, closed connections of the old group are no deaths
            self.abort(errored=False)
            self._gone = None
        store = create_store_client(store_addr, timeout=timedelta(seconds=_STORE_S))
        store.set_timeout(timedelta(seconds=5 * _JOIN_S))
        # The lookout comes first: NCCL would wait for the whole time-out if a member has died since the quorum, or if
        # the store has the address of an older group.
        lookout = Lookout(store, rank, world_size, partial(self._lost, self.turn))
        try:
            super().configure(store_addr, replica_id, rank, world_size, *args)
        except BaseException:
            lookout.close()
            raise
        with self._lock:
            self._lookout = lookout
            if self._gone is not None:  # a member died before there was a group to abort
                self.abort()
                raise self._gone

    def _lost(self, turn: int, member: int) -> None:
        with self._lock:
            if turn == self.turn:
                self._gone = RuntimeError(f"member {member} of the group has gone")
                self.abort()

    def abort(self, errored: bool = True) -> None:
        with self._lock:  # two threads must not abort NCCL at once
            lookout, self._lookout = self._lookout, None
            if lookout is not None:
                lookout.close()
            # A process whose abort hangs ends itself; started again, it takes over the state of another replica.
            within_s = self._timeout.total_seconds() + _CONNECT_S
            faulthandler.dump_traceback_later(within_s, exit=True, file=2)
            with ExitStack() as last:
                last.callback(faulthandler.cancel_dump_traceback_later)
                last.callback(super().errored)  # waits for the device; its kernels end after the abort
                super().abort(errored)

    def errored(self) -> Exception | None:
        error = super().errored()
        return self._gone or error


class _Connections:
    """The connections of one gloo group, which are checked to detect that a member has gone.

    gloo reports a closed connection only to operations on it that have transferred nothing yet
    (``Pair::signalException``, gloo/transport/tcp/pair.cc). It also stops reading a connection, and so does not see it
    close, once that holds a message for a failed collective (``Pair::prepareRead``); in that case another connection of
    this member has closed and made the collective fail.
    """

    closed = False
    _n_ended = 0

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def look(self) -> None:
        """Check that all connections are open; close the group at the third check that finds a closed one."""
        try:
            for other in set(range(self._group.size())) - {self._group.rank()}:
                self._group.recv([torch.empty(1)], other, _LOOK_TAG)  # raises if the connection is closed
        except RuntimeError:
            self._n_ended += 1
            if self._n_ended == _LOOKS:
                self.close()
                time.sleep(_LOOK_S)  # until the collectives have ended: they write to their tensors

    def close(self) -> None:
        """Close all connections, which ends the collectives, by letting a receive time out; gloo's abort does not."""
        self.closed = True
        with suppress(RuntimeError):
            self._group.recv_anysource([torch.empty(1)], _LOOK_TAG).wait(timedelta(milliseconds=1))


class _Looking(dist.Work):
    """A gloo collective whose ``wait`` also ends when a connection of its group is closed."""

    def __init__(self, work: dist.Work, connections: _Connections) -> None:
        super().__init__()
        self._work, self._connections = work, connections

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return True once the collective is complete. The group's time-out applies; ``timeout`` is ignored.

        Raises:
            RuntimeError: the collective failed, or a member of the group has gone.
        """
        while not self._connections.closed:
            try:
                return self._work.wait(timedelta(seconds=_LOOK_S))
            except RuntimeError:  # the collective failed, or is not complete yet
                if self._work.is_completed():
                    return self._work.wait()
            self._connections.look()
        raise RuntimeError("a member of the group has gone")

    def get_future(self) -> Any:
        return self._work.get_future()


class Gloo(_Watched, ProcessGroupGloo):
    """gloo's process group, which fails quickly when a member does not connect or has gone."""

    _timeout: timedelta
    _connections: _Connections | None = None

    def __init__(self, timeout: timedelta) -> None:
        super().__init__(timeout)
        self._closed: list[tuple[float, _Connections]] = []

    def _create_pg(self, *args: Any, **kwargs: Any) -> Any:
        whole, self._timeout = self._timeout, min(self._timeout, timedelta(seconds=_JOIN_S))
        try:
            group = super()._create_pg(*args, **kwargs)
        finally:
            self._timeout = whole
        group._get_backend(torch.device("cpu")).set_timeout(whole)
        self._connections = _Connections(group)
        return group

    def _wrap_work(self, work: dist.Work, opts: Any) -> dist.Work:
        if opts is None or self._connections is None:
            return work  # a send or receive: a wait that times out would close the group
        return _Looking(work, self._connections)

    def abort(self, errored: bool = True) -> None:
        connections, self._connections = self._connections, None
        if connections is not None:
            connections.close()
            # Freeing a group waits for its collectives, some of which may end only at their time-out.
            now, lasts_s = time.monotonic(), self._timeout.total_seconds() + _JOIN_S
            self._closed = [each for each in self._closed if now - each[0] < lasts_s] + [(now, connections)]
        super().abort(errored)


class Nccl(_Watched, LookedAfter, ProcessGroupNCCL):
    """NCCL's process group, for replicas on GPUs."""

    def __init__(self, timeout: timedelta) -> None:
        # An abort waits until the first connections are made or have failed, by default for the whole time-out.
        seconds = math.ceil(min(timeout.total_seconds(), _CONNECT_S))
        os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", str(seconds))
        super().__init__(timeout)

    @contextmanager
    def _run_context(self) -> Iterator[None]:
        """Abort the group if a call lasts for the whole time-out. torchft's own timer goes on after a call raises."""
        with context_timeout(_AsOfNow(self).abort, self._timeout):
            yield

    def _wrap_work(self, work: Any, opts: object) -> Any:
        """Wrap the work in torchft's timer, which may abort the work's own group but no later one."""
        wrapped = super()._wrap_work(work, opts)
        if isinstance(wrapped, _WorkAcceleratorTimeout):
            wrapped._pg = _AsOfNow(self)
        return wrapped


class _AsOfNow:
    """The current configuration of a group, for a timer: a later configuration is not aborted."""

    def __init__(self, group: LookedAfter) -> None:
        self._group, self._turn = group, group.turn

    def abort(self) -> None:
        if self._group.turn == self._turn:
            self._group.abort()
