"""Messages by copies of GPUs, on a driver that is imagined: values, back-pressure, a rank that is gone."""

import os
import random
import sys
import threading
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from cs336_systems.costs.rates import LINK_SHARE, MESSAGE_BYTES_PER_S, Rates
from cs336_systems.distributed.messages import (
    PIECE_BYTES,
    CopiedMessages,
    GroupMessages,
    Mailbox,
    ring_messages,
)
from cs336_systems.distributed.process_group import Rank
from cs336_systems.hardware import hardware_named
from tests.distributed.checks import on_ranks, spawn
from tests.distributed.driver import PATIENCE_S, ImaginedDriver, imagined_stream

PIECE = 64
SMALL = Mailbox(PIECE)
SIZES = (0, 1, PIECE, PIECE + 1, 3 * PIECE, (SMALL.n_pieces + 3) * PIECE + 5)


class Imagined(CopiedMessages):
    """The messages of GPUs, between ranks of CPUs."""

    def __init__(self, rank: Rank, group: dist.ProcessGroup | None = None, mailbox: Mailbox = SMALL) -> None:
        super().__init__(rank, group, mailbox)

    def _make_stream(self):
        return imagined_stream(ImaginedDriver(self.rank.rank))


def messages_of(rank: Rank) -> CopiedMessages:
    return Imagined(rank) if rank.device.type == "cpu" else CopiedMessages(rank, mailbox=SMALL)


def content(source: int, number: int) -> torch.Tensor:
    """A message that no other equals, of no to many pieces."""
    generator = torch.Generator().manual_seed(1000 * source + number)
    n = SIZES[number % len(SIZES)]
    return torch.randint(256, (n,), generator=generator, dtype=torch.uint8, device="cpu")


def check_values(rank: Rank, n_messages: int):
    """Each rank sends to each other; senders run ahead of receivers and the reverse, and memory is written over."""
    messages, pauses = messages_of(rank), random.Random(rank.rank)
    others = [peer for peer in range(rank.world_size) if peer != rank.rank]
    under_way = []
    # Call each kernel once first, for each size, which decides between variants. Loading one below could wait for all
    # streams of this rank, among them a receive whose sender waits in the same way.
    for size in range(len(SIZES)):
        loaded = torch.full_like(content(0, size).to(rank.device), 7)
        assert torch.equal(loaded, loaded.clone().fill_(0)) == (loaded.numel() == 0)
    for number in range(n_messages):
        for peer in others:
            x = content(rank.rank, number).to(rank.device)
            under_way.append((messages.send(x, peer), x))
            if len(under_way) > 3 * len(others):  # what they need is received by then
                sent, x = under_way.pop(0)
                sent.wait()
                x.fill_(0)  # it has left
        if number >= 2:
            for peer in others:
                expected = content(peer, number - 2).to(rank.device)
                into = torch.full_like(expected, 7)
                if pauses.random() < 0.3:
                    time.sleep(2e-3)
                messages.receive(into, peer).wait()
                assert torch.equal(into, expected), (number, peer)
    for number in (n_messages - 2, n_messages - 1):
        for peer in others:
            expected = content(peer, number).to(rank.device)
            into = torch.empty_like(expected)
            messages.receive(into, peer).wait()
            assert torch.equal(into, expected)
    for sent, _ in under_way:
        sent.wait()


@pytest.mark.parametrize("n_ranks", [2, 3])
def test_messages_arrive_whole_and_in_order(n_ranks):
    on_ranks(check_values, n_ranks, 60)


def check_back_pressure(rank: Rank):
    """A sender fills the mailbox and no more, until pieces are taken out; what it counts is what lies there."""
    messages = Imagined(rank)
    x = torch.arange(SMALL.n_pieces + 2, dtype=torch.uint8).repeat_interleave(PIECE)
    if rank.rank == 1:
        sent, ended = messages.send(x, 0), threading.Event()
        threading.Thread(target=lambda: (sent.wait(), ended.set()), daemon=True).start()
        dist.barrier()  # rank 0 has looked
        assert not ended.is_set()
        dist.barrier()  # and taken everything
        assert ended.wait(PATIENCE_S)
        return
    own, until = messages._flags.of_rank[0], time.monotonic() + PATIENCE_S
    while own[1] < SMALL.n_pieces:
        assert time.monotonic() < until
    time.sleep(0.1)  # in which the next piece would come
    assert own.tolist() == [0, SMALL.n_pieces, 0, 0]
    box = messages._boxes.of_rank[0].view(SMALL.n_pieces, PIECE)
    assert sorted(box[:, 0].tolist()) == list(range(SMALL.n_pieces))
    dist.barrier()
    into = torch.empty_like(x)
    messages.receive(into, 1).wait()
    assert torch.equal(into, x)
    dist.barrier()


def test_a_mailbox_is_not_written_over_before_it_is_read():
    on_ranks(check_back_pressure, 2)


@pytest.mark.parametrize("n_messages", [2, 5])
@pytest.mark.parametrize("n_bytes", [1, 2**24, 2**25, 2**25 + 1, 2**26, 3 * 2**26 + 5])
def test_a_mailbox_holds_whole_messages(n_messages, n_bytes):
    mailbox = Mailbox.holding(n_messages, n_bytes)
    assert n_messages * -(-n_bytes // mailbox.piece_bytes) <= mailbox.n_pieces
    assert PIECE_BYTES <= mailbox.piece_bytes < max(PIECE_BYTES + 1, n_bytes)


def waiting(rank: Rank, said):
    """Rank 0 waits for a message that rank 1 never sends, and rank 1 until rank 0 has said so."""
    sys.stderr = (said / str(rank.rank)).open("w")
    messages = messages_of(replace(rank, timeout_s=3))
    into = torch.empty(PIECE, dtype=torch.uint8, device=rank.device)
    if rank.rank == 1:
        messages.send(into, 0).wait()
        while not (said / "0").read_text():
            time.sleep(0.1)
        os._exit(0)
    for _ in range(2):
        messages.receive(into, 1).wait()
    torch.cuda.synchronize()


def check_who_waits_in_vain_ends(said, device):
    ended = spawn(waiting, 2, said, device=device, apart=True)
    assert "exit code 1" in ended[0].failure, ended[0].failure
    assert (said / "0").read_text() == "rank 0 has waited 3 s for a message of rank 1, which has gone or is stuck\n"
    assert (said / "1").read_text() == ""


def test_who_waits_for_a_message_in_vain_ends(tmp_path):
    check_who_waits_in_vain_ends(tmp_path, "cpu")


def check_cpus_send_messages(rank: Rank):
    messages = ring_messages(rank)
    assert type(messages) is GroupMessages
    assert messages.how == "Ranks hand activations on by messages of gloo."
    assert GroupMessages(rank, reason="ranks are on 2 hosts").how.endswith("of gloo, as ranks are on 2 hosts.")


def test_cpus_send_messages():
    on_ranks(check_cpus_send_messages, 2)


def test_the_link_between_gpus_carries_copies():
    h200, rtx = hardware_named("h200"), hardware_named("rtx-4090")
    assert Rates.of(h200).messages == LINK_SHARE * h200.link_bytes_per_s
    assert Rates.of(rtx).messages == LINK_SHARE * rtx.host_link_bytes_per_s
    assert Rates.of(h200, copied_messages=False).messages == MESSAGE_BYTES_PER_S
