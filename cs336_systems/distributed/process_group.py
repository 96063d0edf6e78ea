"""Who this process is among its peers: joining a process group, and starting one on this machine.

A process joins the group that its environment describes, in the variables that torchrun sets (RANK, LOCAL_RANK,
WORLD_SIZE, MASTER_ADDR, MASTER_PORT); without them it is a group of one. ``spawn`` plays torchrun's part for one
machine: it hosts the store itself, on a port that the kernel picks and nobody can take in between, sets the same
variables, and every rank joins as it would under torchrun.

    with joined("cuda") as rank:                       # torchrun --nproc-per-node 8 script.py, or python script.py
        dist.all_reduce(torch.ones(1, device=rank.device))

    losses = spawn(worker, 2, config)                  # worker(rank, config), a module-level function

Failures. The first rank that fails is the one worth reading about; its peers fail a moment later because it is gone.
``joined`` therefore holds an error of the latter kind back for ``PEER_LOST_HOLD_S``, so that launchers (``spawn``;
torchrun, whose records resolve whole seconds) see the cause first and end the rest. A rank that fails closes or aborts
its group on the way out and never waits for peers. Ranks of ``spawn`` lead process groups of their own, are killed with
everything that they started, and end by themselves when their parent is gone.
"""

import itertools
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")

PEER_LOST_HOLD_S = 2.0
"""How long a rank keeps quiet about a lost peer: above the one second to which torchrun's error records resolve."""

_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
_PRELOADED = ("torch.distributed", "torch._dynamo")
"""Imported once by the fork server; every optimizer's constructor needs the latter, and it takes seconds."""

_PEER_LOST_SIGNS = (
    *("Connection closed by peer", "Connection reset by peer", "Broken pipe"),
    *("Timed out waiting", "Application timeout caused pair closure"),
)
"""How gloo, whose errors are plain RuntimeErrors, says that another rank has gone."""


@dataclass(frozen=True)
class Rank:
    """This process in the default group, which is initialised."""

    rank: int
    local_rank: int
    """Among the ranks of this node; the index of its GPU."""
    world_size: int
    device: torch.device
    backend: str


class RankFailed(RuntimeError):
    """A rank of ``spawn`` raised or died; the message names the first one and holds its traceback.

    ``rank`` is its number, ``error`` what it raised: None if it died, or if the exception does not pickle.
    """

    def __init__(self, rank: int, message: str, error: BaseException | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.error = error


def launched() -> bool:
    """Whether a launcher such as torchrun has described a process group in this process's environment."""
    return "RANK" in os.environ or "WORLD_SIZE" in os.environ


def launched_world_size() -> int | None:
    """The launcher's world size, or None where there is no launcher.

    Raises:
        ValueError: the launcher has left a variable out, or set one that is no number.
    """
    return _environment()[2] if launched() else None


def per_rank(total: int, world_size: int, what: str = "global batch size") -> int:
    """``total`` over ``world_size``.

    Raises:
        ValueError: it does not divide, or one of them is not positive.
    """
    if total < 1 or world_size < 1 or total % world_size:
        raise ValueError(f"{what} {total} cannot be divided evenly over {world_size} ranks")
    return total // world_size


def check_same_across_ranks(value: Any, what: str, group: dist.ProcessGroup | None = None) -> None:
    """Raise ValueError on every rank of the group unless all hold an equal ``value``; a collective.

    Args:
        value: small and picklable, such as a list of shapes; for a sequence the error names the first difference.
        what: its name in the error, a plural.
        group: the default group if None.
    """
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    other = next((i for i, theirs in enumerate(values) if theirs != values[0]), None)
    if other is None:
        return
    first, second, place = values[0], values[other], ""
    if isinstance(first, Sequence) and isinstance(second, Sequence) and not isinstance(first, str):
        if len(first) != len(second):
            first, second, place = len(first), len(second), " in number"
        else:
            i = next(i for i, (a, b) in enumerate(zip(first, second, strict=True)) if a != b)
            first, second, place = first[i], second[i], f" at index {i}"
    raise ValueError(f"{what} differ across ranks{place}: rank 0 has {first}, rank {other} has {second}")


def check_device(device: str, ranks_here: int) -> None:
    """Raise ValueError unless this machine has the device, once for each of ``ranks_here`` ranks if it is a GPU."""
    if device not in _BACKENDS:
        raise ValueError(f"no backend for device {device!r}: known are {', '.join(_BACKENDS)}")
    if device == "cpu":
        return
    if not dist.is_nccl_available():
        raise ValueError("device cuda needs the NCCL backend, and this build of torch has none; use device cpu (gloo)")
    if not torch.cuda.is_available():
        raise ValueError("device cuda needs a GPU for NCCL, and torch finds none here; use device cpu (gloo)")
    if ranks_here > (present := torch.cuda.device_count()):
        raise ValueError(f"{ranks_here} ranks on this machine need a GPU each, and torch finds {present}")


@contextmanager
def joined(device: str = "cpu", *, timeout_s: float = 600.0) -> Iterator[Rank]:
    """Be a rank of the default process group: NCCL on ``cuda``, gloo on ``cpu``; leave it whatever happens.

    A process may join again after it has left, if all ranks do.

    Args:
        device: ``cpu`` or ``cuda``; a GPU is the one of index LOCAL_RANK and becomes the current device.
        timeout_s: how long a collective, and joining, may wait for the other ranks.

    Raises:
        ValueError: a variable of the launcher is missing or no number, there is no such device, or too few of it.
        RuntimeError: the port of the rendezvous is taken, or the other ranks did not come in time.
    """
    number, local_rank, world_size = _environment() if launched() else (0, 0, 1)
    check_device(device, local_rank + 1)
    bound = torch.device("cuda", local_rank) if device == "cuda" else torch.device("cpu")
    if bound.type == "cuda":
        torch.cuda.set_device(bound)
    rank = Rank(number, local_rank, world_size, bound, _BACKENDS[device])
    timeout = timedelta(seconds=timeout_s)
    store = dist.PrefixStore(f"group {next(_groups)}", launcher_store(timeout)) if launched() else dist.HashStore()
    store.set_timeout(timeout)
    try:
        dist.init_process_group(
            rank.backend,
            store=store,
            rank=rank.rank,
            world_size=rank.world_size,
            timeout=timeout,
            device_id=bound if bound.type == "cuda" else None,  # makes communicators now: errors show here
        )
        yield rank
    except BaseException as error:
        _leave(rank, failed=True)
        if is_peer_lost(error):
            time.sleep(PEER_LOST_HOLD_S)
        raise
    _leave(rank, failed=False)


def _environment() -> tuple[int, int, int]:
    """Rank, local rank and world size as the launcher set them."""
    if missing := [name for name in _VARIABLES if not os.environ.get(name)]:
        raise ValueError(f"the environment describes a process group without {', '.join(missing)}: use torchrun")
    try:
        rank, local_rank, world_size = (int(os.environ[name]) for name in _VARIABLES[:3])
    except ValueError as error:
        raise ValueError(f"RANK, LOCAL_RANK and WORLD_SIZE must be numbers: {error}") from error
    if not (0 <= rank < world_size and 0 <= local_rank <= rank):
        raise ValueError(f"RANK {rank}, LOCAL_RANK {local_rank} and WORLD_SIZE {world_size} contradict each other")
    return rank, local_rank, world_size


_groups = itertools.count()
"""Groups that this process has joined: a later one must not read the addresses of an earlier one from the store."""

_stores: dict[str, dist.Store] = {}
"""The launcher's store by its address; kept, for the process that hosts it must not close it between groups."""


def launcher_store(timeout: timedelta = timedelta(minutes=10)) -> dist.Store:
    """The key-value store of the launcher, which outlives groups; rank 0 hosts it where the launcher does not.

    Raises:
        RuntimeError: the port is in use, or nobody listens there in time.
    """
    address, rank = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}", os.environ["RANK"]
    if address not in _stores:
        try:
            _stores[address] = next(dist.rendezvous("env://", timeout=timeout))[0]
        except dist.DistError as error:
            if "EADDRINUSE" in str(error):
                raise RuntimeError(f"rank {rank} cannot listen at {address}: the port is in use") from error
            raise RuntimeError(f"rank {rank} found no store or not all ranks at {address}: {error}") from error
    return _stores[address]


def _leave(rank: Rank, failed: bool) -> None:
    """Leave the group; after a failure without waiting for work that peers may never finish."""
    if not dist.is_initialized():
        return
    if failed and rank.backend == "nccl":
        with suppress(Exception):
            dist.distributed_c10d._abort_process_group()
    if dist.is_initialized():
        dist.destroy_process_group()


def is_peer_lost(error: BaseException) -> bool:
    """Whether an error, or what caused it, says no more than that another rank has gone."""
    return any(
        isinstance(each, dist.DistError) or any(sign in str(each) for sign in _PEER_LOST_SIGNS)
        for each in (error, error.__cause__)
    )


def spawn(
    worker: Callable[..., T],
    world_size: int,
    *args: Any,
    device: str = "cpu",
    timeout_s: float = 600.0,
    limit_s: float | None = None,
) -> list[T]:
    """Run ``worker(rank, *args)`` on ``world_size`` ranks of this machine, each a fresh process; results by rank.

    Args:
        worker: a module-level function; what it takes and returns must pickle and stay on the CPU.
        device: as of ``joined``. On a CPU the cores are divided among the ranks.
        timeout_s: how long a collective may wait for the other ranks.
        limit_s: how long the whole may take; by default without end.

    Raises:
        ValueError: ``world_size`` is not positive, or the machine lacks the devices.
        RankFailed: a rank raised or died; the others have been killed.
        TimeoutError: ``limit_s`` has passed; all ranks have been killed.
    """
    if world_size < 1:
        raise ValueError(f"world size must be positive, got {world_size}")
    check_device(device, world_size)
    deadline = None if limit_s is None else time.monotonic() + limit_s
    store = dist.TCPStore("127.0.0.1", 0, world_size, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    ours = sorted(name for name in sys.modules if name.startswith("cs336_systems."))
    context.set_forkserver_preload([*ours, *_PRELOADED])
    processes: list[BaseProcess] = []
    connections: list[Connection] = []
    try:
        for number in range(world_size):
            ours_end, theirs = context.Pipe(duplex=False)
            connections.append(ours_end)
            environment = _launch_variables(number, world_size, store.port)
            process: BaseProcess = context.Process(
                target=_serve, args=(theirs, environment, worker, args, device, timeout_s)
            )
            process.start()
            theirs.close()
            processes.append(process)
        return _results(processes, connections, deadline)
    finally:
        for process in processes:
            _kill(process)
        for connection in connections:
            connection.close()


def _launch_variables(number: int, world_size: int, port: int) -> dict[str, str]:
    """What torchrun would set; the last one says that the launcher hosts the store."""
    return {
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def _results(processes: list[BaseProcess], connections: list[Connection], deadline: float | None) -> list[Any]:
    """What each rank returned, once all have; the first report of a failure, or death without a report, ends it."""
    results: dict[int, Any] = {}
    while len(results) < len(connections):
        waiting = [connection for number, connection in enumerate(connections) if number not in results]
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = multiprocessing.connection.wait(waiting, left)
        if not ready:
            silent = [str(number) for number in range(len(connections)) if number not in results]
            raise TimeoutError(f"ranks {', '.join(silent)} had not finished in time and were killed")
        for connection in ready:
            number = connections.index(connection)  # type: ignore[arg-type]
            try:
                results[number], failure = pickle.loads(connections[number].recv_bytes())
            except (EOFError, OSError):  # the latter where it died in the middle of its report
                raise RankFailed(number, f"rank {number} {_death(processes[number])}") from None
            if failure is not None:
                text, pickled = failure
                error = pickle.loads(pickled) if pickled else None
                raise RankFailed(number, f"rank {number} failed:\n{text}", error) from error
    return [results[number] for number in range(len(connections))]


def _death(process: BaseProcess) -> str:
    """How a process ended that has reported nothing."""
    process.join(5.0)
    code = process.exitcode
    if code is None:
        return "hung up without a report"
    return f"died without a report: {signal.Signals(-code).name if code < 0 else f'exit code {code}'}"


def _kill(process: BaseProcess) -> None:
    """End a rank and whatever it has started; returns once it is gone."""
    assert process.pid is not None
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


def _serve(
    connection: Connection,
    environment: dict[str, str],
    worker: Callable[..., Any],
    args: tuple[Any, ...],
    device: str,
    timeout_s: float,
) -> None:
    """Body of a rank: join, work, report (result, None) or (None, (traceback, pickled exception))."""
    os.setsid()  # a group of its own, which can be killed as a whole and does not hear the terminal's Ctrl-C
    threading.Thread(target=_die_with_parent, daemon=True).start()
    os.environ.update(environment)
    if device == "cpu":
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(max(1, cores // int(environment["WORLD_SIZE"])))
    try:
        with joined(device, timeout_s=timeout_s) as rank:
            result = worker(rank, *args)
        report = pickle.dumps((result, None))
    except BaseException as error:
        report = pickle.dumps((None, (traceback.format_exc(), _pickled(error))))
    connection.send_bytes(report)


def _pickled(error: BaseException) -> bytes | None:
    """The exception, if it survives the journey."""
    try:
        pickle.loads(data := pickle.dumps(error))
    except Exception:
        return None
    return data


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os.killpg(os.getpid(), signal.SIGKILL)
