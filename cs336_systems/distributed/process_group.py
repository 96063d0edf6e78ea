"""Joining the process group that the environment describes, and agreeing with its other ranks.

The variables are those that torchrun sets (RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT); without them it is
a group of one. ``rank_variables`` describes ranks that a process of this machine starts itself.

    with joined("cuda") as rank:                       # torchrun --nproc-per-node 8 script.py, or python script.py
        dist.all_reduce(torch.ones(1, device=rank.device))

When a rank fails, its peers fail a moment later because it is gone. ``joined`` delays such a peer's error by
``PEER_LOST_HOLD_S``, so that launchers report the first error and end the other ranks. A rank that fails closes or
aborts its group as it leaves, and never waits for peers.
"""

import itertools
import os
import socket
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from cs336_systems.case import Unsupported
from cs336_systems.distributed.presence import leave
from cs336_systems.processes import n_cores

T = TypeVar("T")

PEER_LOST_HOLD_S = 2.0
"""Seconds by which a rank delays the error of a lost peer: more than the one second that torchrun's records resolve."""

_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}

SHARE_GPUS = "CS336_SYSTEMS_SHARE_GPUS"
"""The environment variable that, set to 1, lets more ranks than GPUs share GPUs: for trials, not for timing."""

_RANKS_PER_CORE = 16
"""The most ranks per CPU core: 16 on one core take minutes for a tiny model, and some 150 MB of memory each."""

_PEER_LOST_SIGNS = (
    *("Connection closed by peer", "Connection reset by peer", "Broken pipe"),
    *("Timed out waiting", "Application timeout caused pair closure"),
)
"""Messages by which gloo, whose errors are plain RuntimeErrors, reports that another rank has gone."""


@dataclass(frozen=True)
class Rank:
    """This process in the initialised default group."""

    rank: int
    local_rank: int  # the rank within this node
    world_size: int
    device: torch.device
    backend: str
    timeout_s: float = field(default=600.0, compare=False)
    """Seconds that a collective, or joining, may wait for the other ranks."""
    group: int = field(default=0, compare=False)
    """The number of this group among those that the process has joined under its launcher, from 0."""


def launched() -> bool:
    """Whether a launcher such as torchrun has described a process group in this process's environment."""
    return "RANK" in os.environ or "WORLD_SIZE" in os.environ


def launched_world_size() -> int | None:
    """The launcher's world size, or None where there is none; raises ValueError as ``joined``."""
    return _environment()[2] if launched() else None


def per_rank(total: int, world_size: int, what: str = "global batch size") -> int:
    """``total / world_size``; ValueError unless that is an integer and both are positive."""
    if total < 1 or world_size < 1 or total % world_size:
        raise ValueError(f"{what} {total} cannot be divided evenly over {world_size} ranks")
    return total // world_size


def check_same_across_ranks(value: Any, what: str, group: dist.ProcessGroup | None = None) -> None:
    """Raise ValueError on every rank of the group unless all hold an equal ``value``; a collective.

    The value must be picklable; for a sequence the error names the first difference. ``what`` is its name, a plural.
    """
    if dist.get_backend(group) == "fake":  # a dry run's group, whose other ranks do not exist
        return
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


def on_every_rank(action: Callable[[], T], group: dist.ProcessGroup | None = None) -> list[T]:
    """Run ``action`` on each rank of the group; all get all results or one exception, by pickle; a collective."""
    result, raised = None, None
    try:
        result = action()
    except Exception as error:  # the other ranks wait for this rank's result
        raised = error
    outcomes: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(outcomes, (result, raised), group=group)
    for _, raised in outcomes:
        if raised is not None:
            raise raised
    return [result for result, _ in outcomes]


def on_rank_0(action: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Run ``action`` on the group's first rank; all ranks get its result or exception, by pickle; a collective."""
    results: list[Any] = on_every_rank(lambda: action() if dist.get_rank(group) == 0 else None, group)
    return results[0]


def check_device(device: str, ranks_here: int) -> None:
    """Raise Unsupported unless this machine has the device, and enough GPUs or cores for the ranks."""
    if device not in _BACKENDS:
        raise ValueError(f"no backend for device {device!r}: known are {', '.join(_BACKENDS)}")
    if device == "cpu":
        if ranks_here > (most := _RANKS_PER_CORE * (os.cpu_count() or 1)):
            raise Unsupported(f"{ranks_here:,} ranks are too many: at most {most:,} here, {_RANKS_PER_CORE} a core")
        return
    if not dist.is_nccl_available():
        raise Unsupported("device cuda needs the NCCL backend, and this build of torch has none; use device cpu (gloo)")
    if not torch.cuda.is_available():
        raise Unsupported("device cuda needs a GPU for NCCL, and torch finds none here; use device cpu (gloo)")
    if ranks_here > (present := torch.cuda.device_count()) and os.environ.get(SHARE_GPUS) != "1":
        complaint = f"{ranks_here} ranks on this machine need a GPU each, and torch finds {present}"
        raise Unsupported(f"{complaint}; with {SHARE_GPUS}=1 they share, slowly")


@contextmanager
def joined(device: str = "cpu", *, timeout_s: float = 600.0) -> Iterator[Rank]:
    """Join the default process group, NCCL on ``cuda`` or gloo on ``cpu``; leave it when the body ends or raises.

    A process may join again after it has left, if all ranks do. A rank uses the GPU of index LOCAL_RANK; if
    ``SHARE_GPUS`` allows more ranks than GPUs, ranks are assigned round-robin.

    Args:
        timeout_s: seconds that a collective, or joining, may wait for the other ranks.

    Raises:
        ValueError: a variable of the launcher is missing or not a number, or there are too few such devices.
        RuntimeError: the port of the rendezvous is taken, or the other ranks did not join in time.
    """
    number, local_rank, world_size = _environment() if launched() else (0, 0, 1)
    check_device(device, local_rank + 1)
    bound = torch.device("cpu")
    if device == "cuda":
        turn, index = divmod(local_rank, torch.cuda.device_count())
        bound = torch.device("cuda", index)
        torch.cuda.set_device(bound)
        if turn:  # NCCL refuses two ranks of one host on one GPU; with this it takes them for ranks of two hosts
            os.environ.setdefault("NCCL_HOSTID", f"{socket.gethostname()} {turn}")
    group = next(_groups) if launched() else 0
    rank = Rank(number, local_rank, world_size, bound, _BACKENDS[device], timeout_s, group)
    store = _store_of(rank)
    try:
        _join(rank, store)
        yield rank
    except BaseException as error:
        leave(f"{type(error).__name__}: {error}")
        _leave(rank, failed=True)
        if is_peer_lost(error):
            time.sleep(PEER_LOST_HOLD_S)
        raise
    _leave(rank, failed=False)


@contextmanager
def alone(rank: Rank) -> Iterator[Rank]:
    """Leave the group for the body, in which each rank is alone in a group on the same device; then join again.

    Raises:
        torch.distributed.DistError: another rank's body has raised, or has not ended within the group's timeout.
    """
    store = _store_of(rank)
    again = dist.PrefixStore(f"absence {store.add(f'absences of {rank.rank}', 1)}", store)
    again.set_timeout(timedelta(seconds=rank.timeout_s))
    own = replace(rank, rank=0, world_size=1)
    try:
        _leave(rank, failed=False)
        _join(own, dist.HashStore())
        yield own
        _leave(own, failed=False)
    except BaseException:
        again.set(f"word of {rank.rank}", "failed")
        raise
    again.set(f"word of {rank.rank}", "back")
    words = [again.get(f"word of {each}").decode() for each in range(rank.world_size)]  # waits for each rank
    if "failed" in words:
        raise dist.DistError(f"rank {words.index('failed')} has failed by itself")
    _join(rank, again)


_limited: dict[int, dist.ProcessGroup] = {}
"""The groups of ``limited_group`` by their limit; they are left together with the default group that made them."""
divisions: dict[tuple[dist.ProcessGroup, tuple[int, ...]], Any] = {}
"""The meshes of ``mesh.py`` by default group and shape; their groups are left together with that group."""


captured: "weakref.WeakSet[Any]" = weakref.WeakSet()
"""CUDA graphs that contain collectives. They are reset before their groups are left, as NCCL would wait for them."""


def limited_group(rank: Rank, max_ctas: int) -> dist.ProcessGroup:
    """Make another group of all ranks, whose NCCL kernels have at most ``max_ctas`` thread blocks each.

    A thread block takes a multiprocessor from concurrent work; with fewer, collectives by themselves may be slower. The
    first call for a number is a collective. Source: ``maxCTAs`` of ``ncclConfig_t`` in NCCL's documentation.

    Raises:
        ValueError: the number is not positive, or the backend is not NCCL.
    """
    if max_ctas < 1:
        raise ValueError(f"a group needs at least one thread block, got {max_ctas}")
    if rank.backend != "nccl":
        raise ValueError(f"thread blocks are NCCL's, and the ranks' backend is {rank.backend}")
    if max_ctas not in _limited:
        options = nccl_options(rank, max_ctas)
        _limited[max_ctas] = dist.new_group(timeout=timedelta(seconds=rank.timeout_s), pg_options=options)
    return _limited[max_ctas]


def nccl_options(rank: Rank, max_ctas: int) -> dist.ProcessGroupNCCL.Options:
    """Options of a group whose kernels have at most ``max_ctas`` thread blocks each."""
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = max_ctas
    options._timeout = timedelta(seconds=rank.timeout_s)  # the value given to ``new_group``, which warns if they differ
    return options


def _store_of(rank: Rank) -> dist.Store:
    """The store through which this group's ranks rendezvous; the launcher's outlives a restart, which its keys name."""
    if not launched():
        return dist.HashStore()
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"restart {restart} group {rank.group}", launcher_store(timedelta(seconds=rank.timeout_s)))


def _join(rank: Rank, store: dist.Store) -> None:
    """Make the default group once all ranks have joined."""
    timeout = timedelta(seconds=rank.timeout_s)
    store.set_timeout(timeout)
    dist.init_process_group(
        rank.backend,
        store=store,
        rank=rank.rank,
        world_size=rank.world_size,
        timeout=timeout,
        device_id=rank.device if rank.device.type == "cuda" else None,  # makes communicators now: errors show here
    )
    # A rank that left at once would break the connections of one that is still connecting.
    store.set(f"joined {rank.rank}", "")
    store.wait([f"joined {each}" for each in range(rank.world_size)])


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


def rank_variables(number: int, world_size: int, port: int) -> dict[str, str]:
    """The variables that torchrun would set for a rank on this machine, with a store of the launcher's at ``port``.

    The cores of this process are divided among the ranks.
    """
    own = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
    threads = {"OMP_NUM_THREADS": max(1, n_cores() // world_size)}
    return {name: str(value) for name, value in (own | store | threads).items()}


def take_place(variables: dict[str, str]) -> None:
    """Make this new process the rank that the variables describe, with their number of threads."""
    os.environ.update(variables)
    if n_threads := os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(n_threads))  # the fork server has imported torch, which reads the variable at import


_groups = itertools.count()
"""The number of groups that this process has joined: a later group must not read an earlier one's addresses."""

_stores: dict[str, dist.Store] = {}
"""The launcher's store by its address; it is kept, as the process that hosts it must not close it between groups."""


def launcher_store(timeout: timedelta) -> dist.Store:
    """The key-value store of the launcher, which outlives groups; rank 0 hosts it if the launcher does not.

    Raises RuntimeError if the port is in use, or if no store answers there in time.
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
    _limited.clear()
    divisions.clear()
    for graph in tuple(captured):
        graph.reset()
    captured.clear()
    leave("it has left the process group")
    if failed and rank.backend == "nccl":
        with suppress(Exception):
            dist.distributed_c10d._abort_process_group()
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def peer_errors_as(sentence: str) -> Iterator[None]:
    """Turn an error of a message in the body into a DistError that begins with the sentence.

    Gloo's errors name only the other rank's address. Gloo raises when a message begins if the other rank has already
    gone, else when the message is waited for, so both calls belong in the body.
    """
    try:
        yield
    except RuntimeError as error:
        raise dist.DistError(f"{sentence}: {error}") from error


def is_peer_lost(error: BaseException) -> bool:
    """Whether an error, or its cause, only reports that another rank has gone."""
    return any(
        isinstance(each, dist.DistError) or any(sign in str(each) for sign in _PEER_LOST_SIGNS)
        for each in (error, error.__cause__)
    )
