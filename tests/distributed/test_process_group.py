"""Joining and spawning process groups, and every way in which one can fail: an error that says why, and no orphans."""

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from cs336_systems.distributed import process_group
from cs336_systems.distributed.process_group import (
    PEER_LOST_HOLD_S,
    Rank,
    check_device,
    joined,
    launched_world_size,
    per_rank,
)
from cs336_systems.distributed.spawn import RankFailed, spawn
from tests.distributed.checks import on_gpus
from tests.distributed.worlds import (
    add_up,
    add_up_alone,
    compare,
    fail_alone,
    hang,
    train_until,
    unpicklable,
    wait_after_being_alone,
    who_is_there,
)

ROOT = Path(__file__).resolve().parents[2]
VARIABLES = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}


@pytest.fixture(scope="module", autouse=True)
def parent(tmp_path_factory):
    """(process, folder) of a program whose ranks hang; it needs seconds to import, so it starts with the first test."""
    folder = tmp_path_factory.mktemp("parent")
    program = [sys.executable, "-m", "tests.distributed.worlds", "spawn", str(folder)]
    process = subprocess.Popen(program, cwd=ROOT, start_new_session=True)
    try:
        yield process, folder
    finally:
        process.kill()
        process.wait()


def all_gone(folder, within_s=10.0):
    """Whether every process that the ranks noted in the folder has ended."""
    ids = [number for note in folder.glob("*.json") for number in json.loads(note.read_text())]
    assert len(ids) == 4
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not [number for number in ids if psutil.pid_exists(number) and not is_zombie(number)]:
            return True
        time.sleep(0.05)
    return False


def is_zombie(number):
    try:
        return psutil.Process(number).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
def described(monkeypatch):
    """Set the variables of a launcher, some of them changed or (None) left out."""

    def describe(**changes):
        for name, value in (VARIABLES | changes).items():
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, value)

    return describe


def test_spawned_ranks_are_one_group_share_the_cores_and_have_the_launchers_variables():
    for number, ((total, rank), threads, variables) in enumerate(spawn(who_is_there, 2, 10, timeout_s=60)):
        assert total.item() == 21
        assert rank == Rank(number, number, 2, torch.device("cpu"), "gloo")
        assert threads == max(1, len(os.sched_getaffinity(0)) // 2)
        assert variables == {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": "2"}
    assert "RANK" not in os.environ


def test_a_world_of_one():
    [(total, rank)] = spawn(add_up, 1, 10, timeout_s=60)
    assert (total.item(), rank.world_size) == (10, 1)
    with joined() as rank:
        assert rank == Rank(0, 0, 1, torch.device("cpu"), "gloo")
        assert add_up(rank, 3)[0].item() == 3
    with pytest.raises(ZeroDivisionError), joined():
        _ = 1 / 0
    assert not dist.is_initialized()


def test_ranks_that_are_alone_for_a_while_are_one_group_again():
    for number, sums in enumerate(spawn(add_up_alone, 2, timeout_s=60)):
        assert len(sums) == 2
        for (mine, own), (together, rank) in sums:
            assert (mine.item(), together.item()) == (10 + number, 21)
            assert own == Rank(0, number, 1, torch.device("cpu"), "gloo")
            assert rank == Rank(number, number, 2, torch.device("cpu"), "gloo")
    with joined() as rank:
        assert [together.item() for _, (together, _) in add_up_alone(rank)] == [10, 10]


@pytest.mark.parametrize(("world_size", "device"), [on_gpus(2)])
def test_ranks_on_gpus_are_alone_for_a_while(world_size, device):
    for number, sums in enumerate(spawn(add_up_alone, world_size, device=device, timeout_s=60)):
        assert [(mine.item(), together.item()) for (mine, _), (together, _) in sums] == [(10 + number, 21)] * 2


def test_a_rank_that_fails_alone_is_named():
    with pytest.raises(RankFailed, match="rank 1 failed:\n(.|\n)*nobody to add to") as caught:
        spawn(fail_alone, 2, timeout_s=60)
    assert isinstance(caught.value.error, ArithmeticError)


@pytest.mark.slow
def test_a_group_that_is_joined_again_waits_as_long_as_before():
    with pytest.raises(RankFailed, match="rank 0 failed:\n(.|\n)*Timed out"):
        spawn(wait_after_being_alone, 2, timeout_s=3, limit_s=60)


def test_a_rank_killed_at_a_step_is_named_and_ends_the_others(tmp_path):
    started = time.monotonic()
    with pytest.raises(RankFailed, match="rank 1 died without a report: SIGKILL") as caught:
        spawn(train_until, 2, "kill", 2, str(tmp_path), timeout_s=60)
    assert (caught.value.rank, caught.value.error) == (1, None)
    assert time.monotonic() - started < 30
    assert all_gone(tmp_path)


def test_an_exception_in_a_backward_hook_is_the_one_that_is_told(tmp_path):
    with pytest.raises(RankFailed, match="rank 1 failed:\nTraceback(.|\n)*a gradient that nobody wants") as caught:
        spawn(train_until, 2, "raise in hook", 1, str(tmp_path), timeout_s=60)
    assert caught.value.rank == 1
    assert isinstance(caught.value.error, ArithmeticError)
    assert all_gone(tmp_path)


@pytest.mark.slow
def test_a_collective_that_a_rank_never_enters_times_out(tmp_path):
    started = time.monotonic()
    with pytest.raises(RankFailed, match="rank 0 failed:\n(.|\n)*Timed out"):
        spawn(hang, 2, str(tmp_path), timeout_s=1)
    assert time.monotonic() - started > 1 + PEER_LOST_HOLD_S
    assert all_gone(tmp_path)


@pytest.mark.slow
def test_a_world_that_takes_too_long_is_killed(tmp_path):
    with pytest.raises(TimeoutError, match="ranks 0, 1 had not finished in time and were killed"):
        spawn(hang, 2, str(tmp_path), timeout_s=60, limit_s=2)
    assert all_gone(tmp_path)


def test_a_result_that_does_not_pickle_is_an_error():
    with pytest.raises(RankFailed, match="failed:\n(.|\n)*cannot pickle"):
        spawn(unpicklable, 1, timeout_s=60)


def test_values_that_differ_are_a_clear_error_on_every_rank():
    expected = [
        "values differ across ranks at index 1: rank 0 has (4,), rank 2 has (5,)",
        "values differ across ranks in number: rank 0 has 3, rank 2 has 4",
        "values differ across ranks: rank 0 has fp32, rank 2 has bf16",
    ]
    assert spawn(compare, 3, timeout_s=60) == [expected] * 3


def wait_for_ranks(folder, within_s=200):
    """Until both ranks have left a note in the folder."""
    deadline = time.monotonic() + within_s
    while len(list(folder.glob("*.json"))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.usefixtures("ctrl_c_is_heard")
def test_ctrl_c_ends_the_ranks(tmp_path):
    def press():
        wait_for_ranks(tmp_path)
        os.kill(os.getpid(), signal.SIGINT)

    finger = threading.Thread(target=press)
    finger.start()
    with pytest.raises(KeyboardInterrupt):
        spawn(hang, 2, str(tmp_path), timeout_s=60)
    finger.join()
    assert all_gone(tmp_path)


@pytest.mark.slow
def test_ranks_end_with_a_parent_that_is_killed(parent):
    process, folder = parent
    wait_for_ranks(folder)
    process.kill()
    process.wait()
    assert all_gone(folder)


def test_nobody_is_in_before_all_are(described, monkeypatch):
    store, others = dist.HashStore(), []
    described(WORLD_SIZE="2", MASTER_PORT="1")
    monkeypatch.setattr(process_group, "_groups", itertools.count(7))
    monkeypatch.setattr(process_group, "launcher_store", lambda timeout: store)
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **kwargs: None)  # this rank's own part is done

    def join_late():
        others.append(1)
        dist.PrefixStore("group 7", store).set("joined 1", "")

    timer = threading.Timer(0.2, join_late)
    timer.start()
    with joined(timeout_s=10):
        assert others
    timer.join()


def test_a_port_in_use_is_named(described):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        described(MASTER_PORT=str(port))
        with (
            pytest.raises(RuntimeError, match=f"rank 0 cannot listen at 127.0.0.1:{port}: the port is in use"),
            joined(timeout_s=5),
        ):
            pass
    assert not dist.is_initialized()


def test_a_rank_that_does_not_come_is_waited_for_until_the_timeout(described):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    described(WORLD_SIZE="2", MASTER_PORT=str(port))
    started = time.monotonic()
    with (
        pytest.raises(RuntimeError, match=f"rank 0 found no store or not all ranks at 127.0.0.1:{port}"),
        joined(timeout_s=1),
    ):
        pass
    assert 1 < time.monotonic() - started < 20


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(({name: None}, f"without {name}: use torchrun") for name in (*VARIABLES, "MASTER_PORT")),
        ({"WORLD_SIZE": "two"}, "must be numbers: invalid literal for int() with base 10: 'two'"),
        ({"RANK": "1"}, "RANK 1, LOCAL_RANK 0 and WORLD_SIZE 1 contradict each other"),
        ({"LOCAL_RANK": "1"}, "RANK 0, LOCAL_RANK 1 and WORLD_SIZE 1 contradict each other"),
    ],
)
def test_variables_that_make_no_sense_are_an_error(described, changes, message):
    described(**{"MASTER_PORT": "29999"} | changes)
    for attempt in (launched_world_size, joined().__enter__):
        with pytest.raises(ValueError) as caught:
            attempt()
        assert message in str(caught.value)


def test_more_ranks_than_gpus(described, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    check_device("cuda", 2)
    message = "3 ranks on this machine need a GPU each, and torch finds 2"
    with pytest.raises(ValueError, match=message):
        spawn(add_up, 3, 10, device="cuda")
    described(RANK="2", LOCAL_RANK="2", WORLD_SIZE="3", MASTER_PORT="29999")
    with pytest.raises(ValueError, match=message), joined("cuda"):
        pass


def test_nccl_without_gpus_or_without_nccl(monkeypatch):
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="needs a GPU for NCCL, and torch finds none here"), joined("cuda"):
        pass
    with pytest.raises(ValueError, match="needs a GPU for NCCL"):
        spawn(add_up, 2, 10, device="cuda")
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    with pytest.raises(ValueError, match="this build of torch has none"):
        check_device("cuda", 1)
    with pytest.raises(ValueError, match="no backend for device 'tpu': known are cpu, cuda"):
        check_device("tpu", 1)


def test_a_batch_that_the_ranks_do_not_divide():
    assert per_rank(12, 4) == 3
    with pytest.raises(ValueError, match="global batch size 10 cannot be divided evenly over 4 ranks"):
        per_rank(10, 4)
    with pytest.raises(ValueError, match="number of heads 0 cannot be divided evenly over 4 ranks"):
        per_rank(0, 4, "number of heads")


def test_a_world_needs_ranks():
    with pytest.raises(ValueError, match="world size must be positive, got 0"):
        spawn(add_up, 0, 1)
