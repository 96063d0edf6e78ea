"""Ranks on this machine, without a launcher: ``spawn`` plays torchrun's part.

    losses = spawn(worker, 2, config)                  # worker(rank, config), a module-level function

It hosts the store itself, on a port that the kernel picks and nobody can take in between, and sets the variables that
torchrun would; every rank is a fresh process and joins as it would under torchrun. The first rank that fails is named,
and the others are killed.
"""

import multiprocessing.connection
import os
import pickle
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from cs336_systems.distributed.process_group import check_device, joined
from cs336_systems.processes import Died, FreshProcess

T = TypeVar("T")


class RankFailed(RuntimeError):
    """A rank of ``spawn`` raised or died; the message names the first one and holds its traceback.

    ``rank`` is its number, ``error`` what it raised: None if it died (then ``Died`` is the cause), or if the exception
    does not pickle.
    """

    def __init__(self, rank: int, message: str, error: BaseException | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.error = error


def spawn(
    worker: Callable[..., T],
    world_size: int,
    *args: Any,
    device: str = "cpu",
    timeout_s: float = 600.0,
    limit_s: float | None = None,
    hear: Callable[[int, Any], None] | None = None,
) -> list[T]:
    """Run ``worker(rank, *args)`` on ``world_size`` ranks of this machine, each a fresh process; results by rank.

    Args:
        worker: a module-level function; what it takes and returns must pickle and stay on the CPU.
        device: as of ``joined``. On a CPU the cores are divided among the ranks.
        timeout_s: how long a collective may wait for the other ranks.
        limit_s: how long the whole may take; by default without end.
        hear: called here with a rank's number and what it tells before its result; the worker is then given ``tell``,
            a function, as a keyword.

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
    ranks: list[FreshProcess] = []
    try:
        for number in range(world_size):
            places = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
            # as torchrun would; the last one says that the launcher hosts the store
            hosts = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "TORCHELASTIC_USE_AGENT_STORE": True}
            ranks.append(FreshProcess(_be_a_rank, places | hosts, worker, args, device, timeout_s, hear is not None))
        return _results(ranks, deadline, hear)
    finally:
        for rank in ranks:
            rank.end()


def _results(ranks: list[FreshProcess], deadline: float | None, hear: Callable[[int, Any], None] | None) -> list[Any]:
    """What each rank returned, once all have; the first report of a failure, or death without a report, ends it."""
    results: dict[int, Any] = {}
    while len(results) < len(ranks):
        waiting = {rank.connection: number for number, rank in enumerate(ranks) if number not in results}
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = multiprocessing.connection.wait(list(waiting), left)
        if not ready:
            silent = ", ".join(map(str, waiting.values()))
            raise TimeoutError(f"ranks {silent} had not finished in time and were killed")
        for number in (waiting[connection] for connection in ready):  # type: ignore[index]
            try:
                kind, value = ranks[number].receive()
            except Died as death:
                raise RankFailed(number, f"rank {number} {death}") from death
            if kind == "failed":
                text, error = value
                raise RankFailed(number, f"rank {number} failed:\n{text}", error) from error
            if kind == "told":
                assert hear is not None
                hear(number, value)
            else:
                results[number] = value
    return [results[number] for number in range(len(ranks))]


def _be_a_rank(
    connection: Connection,
    environment: dict[str, Any],
    worker: Callable[..., Any],
    args: tuple[Any, ...],
    device: str,
    timeout_s: float,
    tells: bool,
) -> None:
    """Body of a rank: join, work, report: ("told", ...) at will, then ("result", ...) or ("failed", ...)."""
    os.environ.update({name: str(value) for name, value in environment.items()})
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(max(1, cores // environment["WORLD_SIZE"]))

    def tell(value: Any) -> None:
        connection.send(("told", value))

    try:
        with joined(device, timeout_s=timeout_s) as rank:
            result = worker(rank, *args, **({"tell": tell} if tells else {}))
        report = pickle.dumps(("result", result))
    except BaseException as error:
        text = traceback.format_exc()
        report = pickle.dumps(("failed", (text, None)))
        with suppress(Exception):  # not every exception survives the journey
            pickle.loads(whole := pickle.dumps(("failed", (text, error))))
            report = whole
    connection.send_bytes(report)  # by value: multiprocessing's own pickler would share a tensor's memory
