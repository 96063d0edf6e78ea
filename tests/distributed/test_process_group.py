"""Joining process groups, and the ways in which that can fail: an error says why."""

import os
import socket
import time

import pytest
import torch
import torch.distributed as dist

from cs336_systems.distributed.process_group import (
    PEER_LOST_HOLD_S,
    SHARE_GPUS,
    Rank,
    check_device,
    joined,
    launched_world_size,
    per_rank,
)
from tests.distributed.checks import RankFailed, free_port, on_gpus, spawn
from tests.distributed.worlds import add_up, add_up_alone, fail_alone, hang, work_together

VARIABLES = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}


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


@pytest.mark.slow
def test_spawned_ranks_are_one_group_and_may_be_alone_for_a_while():
    cpu = torch.device("cpu")
    messages = [
        "values differ across ranks at index 1: rank 0 has (4,), rank 1 has (5,)",
        "values differ across ranks in number: rank 0 has 3, rank 1 has 4",
        "values differ across ranks: rank 0 has fp32, rank 1 has bf16",
    ]
    for number, (sums, threads, variables, alone, said) in enumerate(spawn(work_together, 2)):
        together = (21, Rank(number, number, 2, cpu, "gloo"))
        assert sums == together
        assert alone == [((10 + number, Rank(0, number, 1, cpu, "gloo")), together)] * 2
        assert threads == max(1, len(os.sched_getaffinity(0)) // 2)
        assert variables == {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": "2"}
        assert said == messages
    assert "RANK" not in os.environ


def test_a_process_without_a_launcher_is_a_world_of_one():
    with joined() as rank:
        assert add_up(rank, 3) == (3, Rank(0, 0, 1, torch.device("cpu"), "gloo"))
        assert [total for _, (total, _) in add_up_alone(rank)] == [10, 10]
    with pytest.raises(ZeroDivisionError), joined():
        _ = 1 / 0
    assert not dist.is_initialized()


@pytest.mark.parametrize(("world_size", "device"), [on_gpus(2)])
def test_ranks_on_gpus_are_alone_for_a_while(world_size, device):
    for number, sums in enumerate(spawn(add_up_alone, world_size, device=device)):
        assert [(mine, together) for (mine, _), (together, _) in sums] == [(10 + number, 21)] * 2


def test_a_rank_that_fails_alone_is_the_one_that_is_told():
    with pytest.raises(RankFailed, match="rank 1 failed: (.|\n)*ArithmeticError"):
        spawn(fail_alone, 2)


@pytest.mark.slow
def test_a_collective_that_a_rank_never_enters_times_out():
    started = time.monotonic()
    with pytest.raises(RankFailed, match="rank 0 failed: (.|\n)*Timed out"):
        spawn(hang, 2)
    assert time.monotonic() - started > 3 + PEER_LOST_HOLD_S


def test_a_port_in_use_is_named(described):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        described(MASTER_PORT=str(port))
        message = f"rank 0 cannot listen at 127.0.0.1:{port}: the port is in use"
        with pytest.raises(RuntimeError, match=message), joined(timeout_s=5):
            pass
    assert not dist.is_initialized()


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_waited_for_until_the_timeout(described):
    port = free_port()
    described(WORLD_SIZE="2", MASTER_PORT=str(port))
    message = f"rank 0 found no store or not all ranks at 127.0.0.1:{port}"
    with pytest.raises(RuntimeError, match=message), joined(timeout_s=1):
        pass


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


def test_devices_that_are_not_there_are_refused(monkeypatch):
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for device, message in (("cuda", "3 ranks .* torch finds 2"), ("tpu", "'tpu'")):
        with pytest.raises(ValueError, match=message):
            check_device(device, 3)
    check_device("cuda", 2)
    monkeypatch.setenv(SHARE_GPUS, "1")
    check_device("cuda", 3)


def test_numbers_that_make_no_world_are_refused():
    assert per_rank(12, 4) == 3
    with pytest.raises(ValueError, match="global batch size 10 .* 4 ranks"):
        per_rank(10, 4)
    with pytest.raises(ValueError, match="number of heads 0 .* 4 ranks"):
        per_rank(0, 4, "number of heads")
