"""Checks that all ranks of a world run: it is started once for many of them, and each reports under its own name."""

import traceback
from typing import Any, NamedTuple

import pytest

from cs336_systems.distributed.process_group import Rank
from cs336_systems.distributed.spawn import spawn


class Ended(NamedTuple):
    """How a check ended on a rank."""

    failure: str | None
    """Its traceback."""
    returned: Any = None


def run_checks(rank: Rank, checks) -> dict[str, Ended]:
    """Call each check with the rank, on the rank's device; one that fails does not keep the others from running."""
    ended = {}
    for check in checks:
        try:
            with rank.device:
                ended[check.__name__] = Ended(None, check(rank))
        except Exception:
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
