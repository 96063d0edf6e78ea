"""Ranks that are started once for many tests: each check is run by all of them, in a process group of its own.

    test_on_two_ranks = on_each(2, checks_of(globals()))   # a test for each function check_... of the rank
    results = on_ranks(worker, 2, *arguments)              # what worker(rank, *arguments) returns on each
    results = spawn(worker, 2, *arguments)                 # the same, of ranks that nobody has used before

The ranks of a world size stay until this process ends, whichever file asks for them.
"""

import atexit
import gc
import multiprocessing.connection
import os
import pickle
import random
import socket
import threading
import time
import traceback
from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from cs336_systems.distributed.process_group import SHARE_GPUS, Rank, joined, rank_variables, take_place
from cs336_systems.processes import Died, FreshProcess

_KEY = b"ranks of tests"


class Ended(NamedTuple):
    """How a check ended on a rank."""

    failure: str | None
    """Its traceback."""
    returned: Any = None


def on_gpus(world_size, copies=False):
    """Parameters (world size, device) of a test that needs as many GPUs, or shared ones if it has no copies between."""
    present = torch.cuda.device_count()
    enough = present >= world_size or (present and not copies and os.environ.get(SHARE_GPUS) == "1")
    missing = pytest.mark.skipif(not enough, reason=f"needs {world_size} CUDA devices")
    return pytest.param(world_size, "cuda", marks=[pytest.mark.multigpu, missing])


def free_port() -> int:
    """A port at which nobody listens, below those that the kernel gives to whoever asks for any: it stays free."""
    while True:
        port = random.SystemRandom().randrange(20_000, 30_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class RankFailed(RuntimeError):
    """A rank raised or died; the message says which and how."""


def spawn(worker, world_size: int, *arguments, device: str = "cpu", apart: bool = False) -> list[Any]:
    """What ``worker(rank, *arguments)`` returns on each rank, a fresh process; the first failure ends them all.

    Args:
        apart: let each rank end by itself, and return how as ``Ended``.
    """
    store = dist.TCPStore("127.0.0.1", 0, world_size, is_master=True, wait_for_workers=False)
    ranks = [
        FreshProcess(_be_a_rank, rank_variables(number, world_size, store.port), worker, arguments, device)
        for number in range(world_size)
    ]
    ended: dict[int, Ended] = {}
    try:
        while len(ended) < world_size:
            waiting = {rank.connection: number for number, rank in enumerate(ranks) if number not in ended}
            for number in (waiting[one] for one in multiprocessing.connection.wait(list(waiting))):
                try:
                    ended[number] = ranks[number].receive()
                except Died as death:
                    ended[number] = Ended(str(death))
                if ended[number].failure and not apart:
                    raise RankFailed(f"rank {number} failed: {ended[number].failure}")
    finally:
        for rank in ranks:
            rank.end()
    return [ended[number] if apart else ended[number].returned for number in range(world_size)]


def _be_a_rank(connection, variables, worker, arguments, device) -> None:
    take_place(variables)
    try:
        with joined(device) as rank:
            report = pickle.dumps(Ended(None, worker(rank, *arguments)))
    except BaseException:
        report = pickle.dumps(Ended(traceback.format_exc()))
    connection.send_bytes(report)  # by value: multiprocessing's own pickler would share a tensor's memory


def _serve(rank: Rank, address: str) -> None:
    """Run what comes: each function with the rank, on its device and in a process group of its own.

    One that fails ends nothing else: its rank leaves the group, which ends the function on those that wait for it.
    Otherwise ranks leave together: one may still be connecting, or waiting for another's last message.
    """
    store = dist.distributed_c10d._get_default_store()

    def meet(place: str) -> None:
        store.add(place, 1)
        while store.add(place, 0) < rank.world_size:
            time.sleep(0.005)

    meet("start")
    dist.destroy_process_group()
    with Client(address, authkey=_KEY) as connection:
        connection.send(rank.rank)
        number = 0
        while True:
            try:
                function, arguments = connection.recv()
            except EOFError:
                return
            number += 1
            torch.manual_seed(0)
            torch.use_deterministic_algorithms(False)  # what the one before may have left
            try:
                with joined(rank.device.type) as own, own.device:
                    ended = Ended(None, function(own, *arguments))
                    meet(f"end {number}")
            except (Exception, pytest.fail.Exception):  # the latter, of pytest.raises, is no Exception
                ended = Ended(traceback.format_exc())
                store.add(f"end {number}", 1)
            gc.collect()  # groups that cycles keep have threads, which wake a hundred times a second
            connection.send_bytes(pickle.dumps(ended))  # by value: its own pickler would share a tensor's memory


class _World:
    def __init__(self, world_size: int, device: str) -> None:
        listener = Listener(authkey=_KEY)
        threading.Thread(
            target=_spawn_until_exit,
            args=(_serve, world_size, listener.address),
            kwargs={"device": device},
            daemon=True,
        ).start()
        accepted = [listener.accept() for _ in range(world_size)]
        self.connections: list[Connection] = [one for _, one in sorted((one.recv(), one) for one in accepted)]

    def run(self, function, arguments) -> list[Ended]:
        for connection in self.connections:
            connection.send((function, arguments))
        return [pickle.loads(connection.recv_bytes()) for connection in self.connections]


_worlds: dict[tuple[int, str, str], _World] = {}
_exiting = threading.Event()


def _spawn_until_exit(*arguments, **where) -> None:
    """``spawn``; ranks that are killed as the tests end are no failure."""
    try:
        spawn(*arguments, **where)
    except RankFailed:
        if not _exiting.is_set():
            raise


def _hang_up() -> None:
    """End the ranks, for which multiprocessing would wait."""
    _exiting.set()
    _worlds.clear()


atexit.register(_hang_up)


def run(function, world_size: int, *arguments, device: str = "cpu", world: str = "shared") -> list[Ended]:
    """How a module-level function of the rank and the arguments ends on each rank.

    Args:
        world: another name for ranks that other tests do not use.
    """
    key = world_size, device, world
    if key not in _worlds:
        _worlds[key] = _World(world_size, device)
    try:
        return _worlds[key].run(function, arguments)
    except EOFError:  # a rank has died; whoever comes next has others
        del _worlds[key]
        raise


def on_ranks(function, world_size: int, *arguments, **where: str) -> list[Any]:
    """What it returns on each rank; fails with the tracebacks of those on which it has failed."""
    ended = run(function, world_size, *arguments, **where)
    if failures := [one.failure for one in ended if one.failure]:
        pytest.fail("\n".join(failures), pytrace=False)
    return [one.returned for one in ended]


def checks_of(module: dict[str, Any]):
    """The functions named ``check_...`` that a test module, given as its ``globals()``, defines itself."""
    return [
        value for name, value in module.items() if name.startswith("check_") and value.__module__ == module["__name__"]
    ]


def name_of(check) -> str:
    return check.__name__.removeprefix("check_")


def on_each(world_size: int, checks, **where: str):
    """A test that is parametrized by checks, each of which the ranks run."""

    @pytest.mark.parametrize("check", checks, ids=name_of)
    def test(check):
        on_ranks(check, world_size, **where)

    return test
