"""Exchanges by copies of GPUs, on a driver that is imagined: values, what the host is asked for, and few rows."""

from dataclasses import replace

import torch
import torch.distributed as dist

from cs336_systems.costs.parallelism import step as costs
from cs336_systems.distributed.process_group import Rank
from cs336_systems.distributed.tensor import GroupRanks
from cs336_systems.distributed.tensor_travel import TravellingRanks
from cs336_systems.experiments.mesh import MeshCell
from cs336_systems.experiments.mesh_messages import predicted_messages
from cs336_systems.harness.traffic import Traffic
from cs336_systems.ranks import Parallel

from .checks import checks_of, on_each
from .driver import Imagined
from .test_tensor import CONFIGS, batch, build


def travelling(rank: Rank) -> TravellingRanks:
    """Ranks that copy as on GPUs."""
    ranks = TravellingRanks(dist.group.WORLD, rank.device)
    ranks._exchanges = Imagined(dist.group.WORLD, rank.device)
    return ranks


def check_gradients_have_the_bits_of_messages(rank: Rank):
    """Two blocks; each batch has more rows than the one before, so that slots are made again."""
    for config in CONFIGS[::2]:
        models = [build(config, ranks) for ranks in (TravellingRanks(dist.group.WORLD, rank.device), travelling(rank))]
        for step in range(3):
            ids, targets = batch(config)
            ids, targets = (each.repeat(1 + step, 1) for each in (ids, targets))
            by_messages, by_copies = (model(ids, targets) for model in models)
            assert torch.equal(by_messages, by_copies)
            by_messages.backward()
            by_copies.backward()
            for own, other in zip(*(model.parameters() for model in models), strict=True):
                assert torch.equal(own.grad, other.grad)
                own.grad = other.grad = None


def check_what_the_host_is_asked_for(rank: Rank):
    """Calls of the driver for each exchange; torch's operations are counted by the functions that call them."""
    ranks, n = travelling(rank), rank.world_size
    calls, x = ranks._exchanges.driver.calls, torch.full((4, 6), rank.rank + 1.0)
    like = torch.empty(4 * n, 1)

    def gather(whole):
        arriving = ranks.arriving(x, whole=whole)
        for rows, part in arriving:
            assert part.eq(rows.start // 4 + 1).all()
        if whole:
            arriving.wait()
            assert torch.equal(arriving.whole, torch.arange(1.0, n + 1).repeat_interleave(4)[:, None].expand(-1, 6))
        else:
            assert arriving.parts[0][1] is x

    def sums():
        found = ranks.sums(lambda out, rows: out.fill_(rows.start + rank.rank), like, 6)
        assert found.eq(4 * n * rank.rank + n * (n - 1) / 2).all()

    def counted(exchange, *arguments):
        for _ in range(4):  # after which slots, views and events are there
            exchange(*arguments)
        calls.clear()
        exchange(*arguments)
        assert not calls["events made"]
        return sum(calls[name] for name in ("copy", "batches of flags", "records", "waits")), calls["flags"]

    peers = n - 1
    # The stream of copies waits (2), own rows are offered, flags, and for each peer a copy, a record and a wait.
    assert counted(gather, False) == (3 + 4 * peers, 2 * peers)
    assert counted(gather, True) == (6 + 4 * peers, 2 * peers)  # own rows: a copy, a record and a wait
    # For each peer the stream waits (2), a flag with the next or the first wait, a copy, a record and a wait.
    assert counted(sums) == (7 * peers - 1 - (peers - 1) + peers - 1, 2 * peers)


def check_few_rows_go_by_collectives(rank: Rank):
    ranks = TravellingRanks(dist.group.WORLD, rank.device, copied_from=25)
    few, many, plain = torch.ones(4, 6), torch.ones(5, 5), GroupRanks(dist.group.WORLD)
    n = rank.world_size
    for x, kinds in ((few, ["_allgather_base", "_reduce_scatter_base", "allreduce"]), (many, ["send"] * 3 * (n - 1))):
        like = torch.empty(n * len(x), 1)
        with Traffic() as traffic:
            ranks.arriving(x).wait()
            ranks.sums(lambda out, rows: out.fill_(1.0), like, x.shape[1])
            total = ranks.total([x[0]])
        assert [event.kind for event in traffic.sent if event.kind != "recv"] == kinds
        assert torch.equal(total[0], plain.total([x[0]])[0])


test_on_two_ranks = on_each(2, checks_of(globals()))
test_on_four_ranks = on_each(4, [check_what_the_host_is_asked_for])


def test_messages_of_few_rows_are_predicted(monkeypatch):
    """On GPUs copies are no messages, and what is not copied is."""
    cell = MeshCell(
        size="llama3-8b",
        device="cuda",
        dtype="bf16",
        batch_size=1,
        world_size=2,
        tensor=2,
        context_length=4096,
        keep="products",
    )
    assert cell.parallel == Parallel("none", tensor=2)
    by_copies = replace(cell, tensor_by="copies")
    assert predicted_messages(by_copies, 0) == predicted_messages(cell, 0)
    long, long_by_copies = (replace(each, context_length=8192) for each in (cell, by_copies))
    assert predicted_messages(long_by_copies, 0) < 0.1 * predicted_messages(long, 0)
    monkeypatch.setattr(costs, "COPIED_FROM", 0)
    assert predicted_messages(by_copies, 0) < 0.1 * predicted_messages(cell, 0)
