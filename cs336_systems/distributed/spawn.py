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
    ranks: list[FreshProcess] = []
    try:
        for number in range(world_size):
            variables = rank_variables(number, world_size, store.port)
            ranks.append(FreshProcess(_be_a_rank, variables, worker, args, device, timeout_s))
        return _results(ranks, deadline)
    finally:
        for rank in ranks:
            rank.end()


def rank_variables(number: int, world_size: int, port: int) -> dict[str, str]:
    """What torchrun would set for a rank on this machine, whose launcher hosts the store at ``port``.

    The cores of this process are divided among the ranks.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    own = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
    threads = {"OMP_NUM_THREADS": max(1, cores // world_size)}
    return {name: str(value) for name, value in (own | store | threads).items()}


def take_place(variables: dict[str, str]) -> None:
    """Make this fresh process the rank that the variables describe, with as many threads as they say."""
    os.environ.update(variables)
    if n_threads := os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(n_threads))  # the fork server has imported torch, which reads the variable then


def _results(ranks: list[FreshProcess], deadline: float | None) -> list[Any]:
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
            results[number] = value
    return [results[number] for number in range(len(ranks))]


def _be_a_rank(
    connection: Connection,
    variables: dict[str, str],
    worker: Callable[..., Any],
    args: tuple[Any, ...],
    device: str,
    timeout_s: float,
) -> None:
    """Body of a rank: join, work, report ("result", ...) or ("failed", ...)."""
    take_place(variables)
    try:
        with joined(device, timeout_s=timeout_s) as rank:
            result = worker(rank, *args)
        report = pickle.dumps(("result", result))
    except BaseException as error:
        text = traceback.format_exc()
        report = pickle.dumps(("failed", (text, None)))
        with suppress(Exception):  # not every exception survives the journey
            pickle.loads(whole := pickle.dumps(("failed", (text, error))))
            report = whole
    connection.send_bytes(report)  # by value: multiprocessing's own pickler would share a tensor's memory
