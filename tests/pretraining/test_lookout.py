"""Groups of replicas, with gloo for NCCL: what they know of members that die, and when they give up."""

import os
import signal
import threading
import time
from datetime import timedelta

import psutil
import pytest
import torch
import torch.distributed as dist

from cs336_systems.processes import Died, FreshProcess

pytest.importorskip("torchft")
from cs336_systems.pretraining import torchft_groups


class LookedAfterGloo(torchft_groups.LookedAfter, torchft_groups.Gloo):
    """Stands for a group of NCCL on GPUs: here its own operations would notice a death, too."""


PATIENT_S = 60
"""A time-out of groups that nobody should wait for: half of it is many times what everything else takes."""


def host_store():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def groups_of():
    """Makes groups of a kind, which are aborted in the end."""
    made = []

    def groups_of(n, kind=torchft_groups.Gloo, timeout_s=PATIENT_S):
        made.extend(kind(timedelta(seconds=timeout_s)) for _ in range(n))
        return made

    yield groups_of
    for group in made:
        group.abort()


def together(call, members):
    threads = [threading.Thread(target=call, args=(rank, group)) for rank, group in enumerate(members)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def meet(store, members, quorum):
    address = f"127.0.0.1:{store.port}/{quorum}"
    together(lambda rank, group: group.configure(address, str(rank), rank, len(members), quorum), members)


def sum_of_ones(group):
    work = group.allreduce([ones := torch.ones(600)], dist.AllreduceOptions())
    return work, ones


def written_bytes():
    """Bytes that this process has given to files and connections."""
    return psutil.Process().io_counters().write_chars


def wait_until_written(n_bytes):
    while written_bytes() < n_bytes:
        time.sleep(0.01)


def test_who_waits_for_a_slow_member_notices_that_another_has_gone(groups_of):
    """No message of the member that has gone is waited for; afterwards the others meet in another group at once."""
    store, groups = host_store(), groups_of(3)
    meet(store, groups, 1)
    before = written_bytes()
    works = [sum_of_ones(groups[rank])[0] for rank in (0, 0, 0)]
    wait_until_written(before + 1)  # one has begun; gloo begins the third when one of the others has ended
    groups[2].abort()  # as if its process had died
    began = time.monotonic()
    for work in works:
        with pytest.raises(RuntimeError, match="^a member of the group has gone$"):
            work.wait()
    meet(store, groups[:2], 2)
    works = [sum_of_ones(group) for group in groups[:2]]
    assert [work.wait() and ones.tolist() for work, ones in works] == [[2.0] * 600] * 2
    assert time.monotonic() - began < PATIENT_S / 2


def test_a_collective_that_needs_nothing_of_a_member_that_has_gone_ends_well(groups_of, monkeypatch):
    """Its message comes after a look has found that the other has gone, and before two more have: one may leave once it
    has its own part of the last averages."""
    look = torchft_groups._Connections.look

    def look_and_send(connections):
        look(connections)
        if connections._n_ended == 1:
            # It sends to 1 before it finds that it cannot send to 2.
            groups[0].broadcast([torch.ones(8)], options)

    monkeypatch.setattr(torchft_groups, "_LOOK_S", 1.0)
    monkeypatch.setattr(torchft_groups._Connections, "look", look_and_send)
    store, groups = host_store(), groups_of(3)
    meet(store, groups, 1)
    received, options = torch.zeros(8), dist.BroadcastOptions()
    work = groups[1].broadcast([received], options)
    groups[2].abort()
    assert work.wait() and received.tolist() == [1.0] * 8


_LARGE = 2**24
"""Numbers of a message that fits into no buffer of a connection."""


def stop_while_receiving(connection, address):
    group = torchft_groups.Gloo(timedelta(seconds=10))
    connection.send("here")
    group.configure(address, "1", 1, 2, 1)
    before = written_bytes()
    work = group.broadcast([torch.empty(_LARGE)], dist.BroadcastOptions())
    wait_until_written(before + 1)  # it has told the sender that it may send
    connection.send(os.getpid())
    os.kill(os.getpid(), signal.SIGSTOP)
    work.wait()


def test_a_message_of_which_a_part_has_gone_to_a_process_that_dies_is_given_up():
    """gloo would wait for it until the time-out; and nobody waits for that in freeing the group, but this test."""
    store, group = host_store(), torchft_groups.Gloo(timedelta(seconds=10))
    address = f"127.0.0.1:{store.port}"
    process = FreshProcess(stop_while_receiving, f"{address}/1")
    try:
        assert process.receive() == "here"  # who configures a group does not wait for a process to start
        group.configure(f"{address}/1", "0", 0, 2, 1)
        other = psutil.Process(process.receive())
        while other.status() != psutil.STATUS_STOPPED:
            time.sleep(0.01)
        before = written_bytes()
        work = group.broadcast([torch.ones(_LARGE)], dist.BroadcastOptions())
        wait_until_written(before + 2**16)
    finally:
        process.end()
    with pytest.raises(RuntimeError, match="^a member of the group has gone$"):
        work.wait()
    sent = work.get_future()
    del work
    group.configure(f"{address}/2", "0", 0, 1, 2)
    assert not sent.done()
    group.abort()


def test_a_group_whose_own_operations_notice_nothing_knows_who_has_gone(groups_of):
    """Soon, and aborts itself; not when all members meet in another group."""
    store, groups = host_store(), groups_of(3, LookedAfterGloo)
    meet(store, groups, 1)
    meet(store, groups, 2)
    time.sleep(0.3)
    assert [group.errored() for group in groups] == [None] * 3
    groups[1]._lookout.close()  # as if its process had died
    ends_at = time.monotonic() + PATIENT_S / 2
    while time.monotonic() < ends_at and any(groups[rank]._pg is not None for rank in (0, 2)):
        time.sleep(0.01)
    assert "member 1 of the group has gone" in {str(groups[rank].errored()) for rank in (0, 2)}
    assert [groups[rank]._pg for rank in (0, 2)] == [None, None]  # they have aborted themselves
    meet(store, [groups[0], groups[2]], 3)
    time.sleep(0.2)
    assert [groups[rank].errored() for rank in (0, 2)] == [None, None]


class Unbounded(LookedAfterGloo):
    """Notes that it begins to connect, as NCCL does for as long as it takes."""

    connects = False

    def _create_pg(self, *args, **kwargs):
        self.connects = True
        return super()._create_pg(*args, **kwargs)


@pytest.mark.parametrize("stale", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_member_that_does_not_come_is_given_up_before_anybody_connects(monkeypatch, rank, stale):
    """It died once all had agreed; or the store has addresses of an older group, as a new lighthouse counts anew."""
    monkeypatch.setattr(torchft_groups, "_JOIN_S", 0.1)
    store, group = host_store(), Unbounded(timedelta(seconds=PATIENT_S))
    if stale:
        dist.PrefixStore("1", store).set(f"lookout {1 - rank}", "localhost:9")
    began = time.monotonic()
    with pytest.raises((OSError, RuntimeError)):
        group.configure(f"127.0.0.1:{store.port}/1", str(rank), rank, 2, 1)
    assert time.monotonic() - began < PATIENT_S / 2
    assert not group.connects


def test_a_member_that_dies_while_all_connect_is_known_afterwards(groups_of):
    store, groups = host_store(), groups_of(2, LookedAfterGloo, timeout_s=20)
    connect, errors = groups[0]._create_pg, []

    def connect_slowly(*args, **kwargs):
        made = connect(*args, **kwargs)
        ends_at = time.monotonic() + PATIENT_S
        while groups[1]._lookout is None and time.monotonic() < ends_at:
            time.sleep(0.01)
        groups[1]._lookout.close()  # as if its process had died
        while groups[0]._gone is None and time.monotonic() < ends_at:
            time.sleep(0.01)
        return made

    groups[0]._create_pg = connect_slowly

    def meet(rank, group):
        try:
            group.configure(f"127.0.0.1:{store.port}/1", str(rank), rank, 2, 1)
        except RuntimeError as error:
            errors.append(str(error))

    together(meet, groups)
    assert errors == ["member 1 of the group has gone"]
    assert groups[0]._pg is None


class Stuck(torchft_groups.LookedAfter):
    """A group whose abort never ends."""

    def __init__(self):
        super().__init__(timedelta(seconds=0.1))


def be_stuck(connection):
    torchft_groups._CONNECT_S = 0.4
    torchft_groups.ProcessGroup.abort = lambda *_: time.sleep(60)
    Stuck().abort()
    connection.send("on it goes")


def test_a_process_whose_group_cannot_be_aborted_ends():
    process = FreshProcess(be_stuck)
    try:
        with pytest.raises(Died, match="exit code 1"):
            process.receive()
    finally:
        process.end()


def test_a_timer_of_an_older_group_ends_no_newer_one():
    class Group:
        turn, n_aborts = 1, 0

        def abort(self):
            self.n_aborts += 1

    group = Group()
    timer = torchft_groups._AsOfNow(group)
    timer.abort()
    group.turn += 1
    timer.abort()
    assert group.n_aborts == 1
