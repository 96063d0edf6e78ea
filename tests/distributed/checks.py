"""Checks that all ranks of a world run: it is started once for many of them, and each reports under its own name."""

import time
import traceback
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from cs336_systems.distributed.process_group import Rank, joined
from cs336_systems.distributed.spawn import spawn


class Ended(NamedTuple):
    """How a check ended on a rank."""

    failure: str | None
    """Its traceback."""
    returned: Any = None


def on_gpus(world_size):
    """Parameters (world size, device) of a test that needs as many GPUs."""
    missing = pytest.mark.skipif(torch.cuda.device_count() < world_size, reason=f"needs {world_size} CUDA devices")
    return pytest.param(world_size, "cuda", marks=[pytest.mark.multigpu, missing])


def run_checks(rank: Rank, checks) -> dict[str, Ended]:
    """Call each check with the rank, on its device and in a process group of its own: one that fails ends nothing else.

    A rank that fails leaves the group, which ends the check on those that wait for it. Otherwise ranks leave together:
    one may still be connecting, or waiting for another's last message.
    """
    store = dist.distributed_c10d._get_default_store()

    def meet(place: str) -> None:
        store.add(place, 1)
        while store.add(place, 0) < rank.world_size:
            time.sleep(0.005)

    meet("start")
    dist.destroy_process_group()
    ended = {}
    for check in checks:
        name = check.__name__
        try:
            with joined(rank.device.type, timeout_s=60) as own, own.device:
                ended[name] = Ended(None, check(own))
                meet(name)
        except (Exception, pytest.fail.Exception):  # the latter, of pytest.raises, is no Exception
            ended[name] = Ended(traceback.format_exc())
            store.add(name, 1)
    return ended


def failures(world, check) -> list[str]:
    """The tracebacks of a check, of those ranks on which it failed."""
    return [ended[check.__name__].failure for ended in world if ended[check.__name__].failure is not None]


def world_of(world_size: int, checks):
    """A fixture: by rank, how each check ended."""

    @pytest.fixture(scope="module")
    def world():
        return spawn(run_checks, world_size, checks, timeout_s=120)

    return world
