"""Checks that all ranks of a world run: it is started once for many of them, and each reports under its own name."""

import traceback
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist

from cs336_systems.distributed.process_group import Rank, joined
from cs336_systems.distributed.spawn import spawn


class Ended(NamedTuple):
    """How a check ended on a rank."""

    failure: str | None
    """Its traceback."""
    returned: Any = None


def run_checks(rank: Rank, checks) -> dict[str, Ended]:
    """Call each check with the rank, on its device and in a process group of its own: one that fails ends nothing else.

    A rank that fails leaves the group, which ends the check on those that wait for it.
    """
    ended = {}
    dist.destroy_process_group()
    for check in checks:
        try:
            with joined(rank.device.type, timeout_s=60) as own, own.device:
                ended[check.__name__] = Ended(None, check(own))
        except (Exception, pytest.fail.Exception):  # the latter, of pytest.raises, is no Exception
            ended[check.__name__] = Ended(traceback.format_exc())
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
