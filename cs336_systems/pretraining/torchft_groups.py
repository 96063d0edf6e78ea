"""torchft's process groups for replicas, which notice soon that a member has died (``replica_agreement.py``)."""

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
"""Seconds for which gloo waits, five times, until another member of a new group connects. That member may have died
since all agreed. Or the lighthouse was started again and numbers its groups from the beginning, so that the store still
has the addresses of an older group."""
_LOOK_S = 0.2
"""Seconds after which a replica that waits for a collective of gloo looks whether the connections still stand."""
_LOOKS = 3
"""Looks that find a connection ended until the group is closed: what has ended stays so. Most collectives end by
themselves within 0.1 s, and those that do not need the member that has gone end well."""
_LOOK_TAG = 1
"""The tag of receives to which nothing is ever sent."""
_STORE_S = 15.0
"""Seconds for a connection to the store, in which its name is looked up: three times what resolvers wait by default."""
_CONNECT_S = 20.0
"""Seconds for which NCCL waits for the connections of a new group, whose members have all just passed the lookout."""


class _Watched(ProcessGroup):
    """A process group that notes whether its members have changed, and counts the bytes sent.

    Attributes:
        changed: whether the group was formed anew since somebody reset this.
        n_members: of the last group, with those who lack the others' state.
        connecting: when the members of the last group began to connect, and were connected, by ``time.perf_counter``.
        sent_bytes: bytes that this rank has sent, if each collective went around a ring (``costs/communication.py``).
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
    """Idle connections from one member of a group to all others; when one ends, the member at its other end has gone.

    The constructor returns once all members have called it.

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
        """Wait for the first connection that ends; runs in a thread."""
        if not self._others:
            return
        with selectors.DefaultSelector() as selector:
            for connection, other in self._others.items():
                selector.register(connection, selectors.EVENT_READ, other)
            ended = selector.select()[0][0]
        if not self._closed:
            lost(ended.data)

    def close(self) -> None:
        """End the connections, which the other members notice."""
        self._closed = True
        for connection in self._others:
            with suppress(OSError):  # the other side has ended it
                connection.shutdown(socket.SHUT_RDWR)


class LookedAfter(ProcessGroup):
    """A process group that has a lookout and aborts itself when a member dies.

    NCCL's kernels on one host do not notice a death and would wait until the timeout; gloo notices most deaths.
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
            self.turn += 1  # members that leave the old group from now on have not died
            self.abort(errored=False)
            self._gone = None
        store = create_store_client(store_addr, timeout=timedelta(seconds=_STORE_S))
        store.set_timeout(timedelta(seconds=5 * _JOIN_S))
        # The lookout comes first: NCCL would wait for the whole timeout for a member that has died since all agreed, or
        # at the address of an older group.
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
    """The connections of one group of gloo, by which this member knows that another has gone.

    gloo tells of a connection's end only those who wait for a message of it of which nothing has come or gone yet
    (``Pair::signalException``, gloo/transport/tcp/pair.cc). And it reads no further in a connection, not even to its
    end, once there is a message in it for a collective that has failed (``Pair::prepareRead``); then another connection
    of this member has ended, which has made the collective fail.
    """

    closed = False
    _n_ended = 0

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def look(self) -> None:
        """Look whether all connections stand, and close the group at the third look at which one does not."""
        try:
            for other in set(range(self._group.size())) - {self._group.rank()}:
                self._group.recv([torch.empty(1)], other, _LOOK_TAG)  # refused if the connection has ended
        except RuntimeError:
            self._n_ended += 1
            if self._n_ended == _LOOKS:
                self.close()
                time.sleep(_LOOK_S)  # until collectives have ended, which write to their tensors

    def close(self) -> None:
        """End all connections and so the collectives, as a receive does whose time is up; gloo's own abort does not."""
        self.closed = True
        with suppress(RuntimeError):
            self._group.recv_anysource([torch.empty(1)], _LOOK_TAG).wait(timedelta(milliseconds=1))


class _Looking(dist.Work):
    """A collective of gloo, for which nobody waits longer than its group's connections stand."""

    def __init__(self, work: dist.Work, connections: _Connections) -> None:
        super().__init__()
        self._work, self._connections = work, connections

    def wait(self, timeout: timedelta | None = None) -> bool:
        """True once it is complete; its group's time-out ends it, and ``timeout`` is not looked at.

        Raises:
            RuntimeError: it failed, or a member of the group has gone.
        """
        while not self._connections.closed:
            try:
                return self._work.wait(timedelta(seconds=_LOOK_S))
            except RuntimeError:  # its own, or it is not complete yet
                if self._work.is_completed():
                    return self._work.wait()
            self._connections.look()
        raise RuntimeError("a member of the group has gone")

    def get_future(self) -> Any:
        return self._work.get_future()


class Gloo(_Watched, ProcessGroupGloo):
    """gloo's process group, which gives up soon on a member that does not connect or has gone."""

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
            return work  # of a send or receive, which would close the group when a wait for it is over
        return _Looking(work, self._connections)

    def abort(self, errored: bool = True) -> None:
        connections, self._connections = self._connections, None
        if connections is not None:
            connections.close()
            # Who frees a group waits for its collectives, and some may end only with their time-out.
            now, lasts_s = time.monotonic(), self._timeout.total_seconds() + _JOIN_S
            self._closed = [each for each in self._closed if now - each[0] < lasts_s] + [(now, connections)]
        super().abort(errored)


class Nccl(_Watched, LookedAfter, ProcessGroupNCCL):
    """NCCL's process group, for replicas on GPUs."""

    def __init__(self, timeout: timedelta) -> None:
        # An abort waits until the first connections are made or given up, by default for the whole timeout.
        seconds = math.ceil(min(timeout.total_seconds(), _CONNECT_S))
        os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", str(seconds))
        super().__init__(timeout)

    @contextmanager
    def _run_context(self) -> Iterator[None]:
        """Abort the group if a call lasts for the whole time-out: torchft's timer outlives a call that raises, too."""
        with context_timeout(_AsOfNow(self).abort, self._timeout):
            yield

    def _wrap_work(self, work: Any, opts: object) -> Any:
        """Wrap the work in torchft's timer, which may abort the work's own group but no later one."""
        wrapped = super()._wrap_work(work, opts)
        if isinstance(wrapped, _WorkAcceleratorTimeout):
            wrapped._pg = _AsOfNow(self)
        return wrapped


class _AsOfNow:
    """A group as it is now, for a timer that may fire when there is another one: only this one is aborted."""

    def __init__(self, group: LookedAfter) -> None:
        self._group, self._turn = group, group.turn

    def abort(self) -> None:
        if self._group.turn == self._turn:
            self._group.abort()
