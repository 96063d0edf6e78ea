"""Places below this package are told from others, whatever the clone's folder is called."""

import pytest

from cs336_systems.profiling.memory_history import reconstruct
from cs336_systems.profiling.places import own_place, short_place
from tests.profiling.snapshots import EventLog


@pytest.mark.parametrize("clone", ["/home/me/clone", "/home/me/a clone", "/x/cs336_systems", "/site-packages", "."])
def test_a_line_of_this_package_is_its_own(clone):
    place = f"{clone}/cs336_systems/model/ops.py:29 linear"
    assert own_place(place) == "model/ops.py:29 linear"
    assert short_place(place) == "cs336_systems/model/ops.py:29 linear"


@pytest.mark.parametrize("clone", ["/home/me/a clone", "/x/cs336_systems"])
def test_packages_installed_in_a_clone_are_not_its_own(clone):
    place = f"{clone}/.venv/lib/python3.12/site-packages/torch/nn/functional.py:8 linear"
    assert own_place(place) == ""
    assert short_place(place) == "site-packages/torch/nn/functional.py:8 linear"


def test_other_places_are_shown_by_their_file():
    assert (own_place("/a b/run.py:1 main"), short_place("/a b/run.py:1 main")) == ("", "run.py:1 main")
    assert short_place("/tmp/torchinductor_me/ab/cd.py:3 call") == "torchinductor_me/ab/cd.py:3 call"


def test_a_stack_in_a_folder_with_a_space_is_read():
    log = EventLog()
    log.alloc(
        1, 10, ("/x/site-packages/torch/nn/functional.py:8 linear", "/a clone/cs336_systems/model/ops.py:29 linear")
    )
    (allocation,) = reconstruct(log.snapshot()).allocations
    assert allocation.source == "model/ops.py:29 linear"
