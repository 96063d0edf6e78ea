"""Checkpoints that are written meanwhile: what was there when it was asked for, every rank its part, or a sentence."""

import random
import threading
from math import prod

import pytest
import torch

from cs336_systems.distributed import background_checkpoint, checkpoint_folder, optimizer_state, sharded_optimizer
from cs336_systems.distributed.background_checkpoint import BackgroundSaver
from cs336_systems.distributed.checkpoint import complete_checkpoints, load_checkpoint
from cs336_systems.distributed.checkpoint_boxes import Boxes
from cs336_systems.distributed.ddp import FlatDDP
from cs336_systems.distributed.fsdp import FSDP
from cs336_systems.distributed.process_group import joined
from cs336_systems.distributed.sharded_optimizer import REDUCE_SCATTER, ShardedOptimizer
from cs336_systems.distributed.spawn import spawn

ADAMW = {"optimizer_cls": torch.optim.AdamW, "lr": 0.05, "bucket_size_mb": 2e-4}
KINDS = ("fsdp", "ddp", "owned", "scattered")


class Made:
    """A model whose shards begin within rows, its optimizer, and steps on each rank's own data."""

    def __init__(self, kind: str, seed: int = 0) -> None:
        torch.manual_seed(seed)
        layers = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3, bias=False))
        layers[0].weight.data = layers[0].weight.data.t().contiguous().t()  # columns first in memory
        self.model, self.averaged = layers, kind in ("fsdp", "ddp", "owned")
        if kind == "fsdp":
            self.model = FSDP(layers)
        elif self.averaged:
            self.model = FlatDDP(layers)
        if kind in ("owned", "scattered"):
            reduction = {} if kind == "owned" else {"reduce_gradients": REDUCE_SCATTER}
            self.optimizer = ShardedOptimizer(self.model.parameters(), **ADAMW, **reduction)
        else:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)

    def step(self, rank: int, i: int) -> None:
        generator = torch.Generator().manual_seed(10 * i + rank)
        self.model(torch.randn(4, 5, generator=generator)).square().mean().backward()
        if self.averaged:
            self.model.finish_gradient_synchronization()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def values(self) -> list[torch.Tensor]:
        if isinstance(self.model, FSDP):
            return [whole.clone() for whole in self.model.gather_full_params().values()]
        return [parameter.detach().clone() for parameter in self.model.parameters()]


def forbidden(*arguments, **options):
    raise AssertionError("the state of all ranks is gathered")


def save_while_stepping(rank, folder):
    """By kind: whether what was saved goes on as what went on at once did, and this rank's bytes."""
    optimizer_state.whole_state = sharded_optimizer.whole_state = forbidden
    write, found = background_checkpoint.write, {}
    for kind in KINDS:
        made, hold = Made(kind), threading.Event()

        def slowly(*arguments, hold=hold):
            assert hold.wait(60)
            return write(*arguments)

        background_checkpoint.write = slowly
        with BackgroundSaver(folder / kind, made.model, made.optimizer) as saver:
            for i in range(3):
                made.step(rank.rank, i)
            assert saver.reserve(2**30) is None
            saver.save(3, {"place": 7})
            assert saver.finished() == []
            for i in range(3, 6):
                made.step(rank.rank, i)
            hold.set()
            (saved,) = saver.wait()
            assert saved.error is None, saved.error
            assert saved.path == folder / kind / "step-00000003"
            assert 0 < saved.stall_seconds <= saved.seconds
            saver.save(6)
        assert [path.name for path in complete_checkpoints(folder / kind)] == ["step-00000003", "step-00000006"]
        background_checkpoint.write = write
        again = Made(kind, seed=1)
        checkpoint_folder._discard(folder / kind / "step-00000006") if rank.rank == 0 else None
        torch.distributed.barrier()
        assert load_checkpoint(folder / kind, again.model, again.optimizer) == 3
        for i in range(3, 6):
            again.step(rank.rank, i)
        found[kind] = all(map(torch.equal, again.values(), made.values())), saved.n_bytes
    return found


@pytest.mark.slow
def test_what_is_saved_is_what_was_there_and_every_rank_writes_its_share(tmp_path):
    one, other = spawn(save_while_stepping, 2, tmp_path)
    for kind in KINDS:
        assert one[kind][0] and other[kind][0], kind
        both = one[kind][1], other[kind][1]
        assert max(both) < 0.75 * sum(both), (kind, both)


@pytest.fixture
def alone():
    with joined("cpu"):
        made = Made("plain")
        made.step(0, 0)
        yield made


def test_a_save_that_fails_is_told_and_the_next_one_waits_for_it(alone, tmp_path, monkeypatch):
    write, order, hold = background_checkpoint.write, [], threading.Event()

    def fails_once(folder, collected, *arguments):
        order.append(collected.marker["step"])
        if order == [2]:
            return write(folder, collected, *arguments)
        if len(order) == 2:
            assert hold.wait(60)
            order.append("full")
            raise OSError(28, "No space left on device")
        return write(folder, collected, *arguments)

    monkeypatch.setattr(background_checkpoint, "write", fails_once)
    with BackgroundSaver(tmp_path, alone.model, alone.optimizer) as saver:
        saver.save(2)
        saver.save(3)

        def join(join=saver._join):
            threading.Timer(0.2, hold.set).start()
            join()

        monkeypatch.setattr(saver, "_join", join)
        saver.save(4)
        told = saver.wait()
    assert order == [2, 3, "full", 4]
    assert [(saved.step, saved.error) for saved in told] == [
        (2, None),
        (3, "[Errno 28] No space left on device"),
        (4, None),
    ]
    assert told[0].waited_seconds == 0
    assert 0.2 <= told[2].waited_seconds < told[2].stall_seconds < told[2].seconds
    assert told[1].path is None
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["step-00000002", "step-00000004"]


def test_where_host_memory_is_short_a_save_waits_for_the_disk(alone, tmp_path):
    with BackgroundSaver(tmp_path, alone.model, alone.optimizer) as saver:
        assert "bytes of copies do not fit the 100 of host memory" in saver.reserve(100)
        saver.save(1)
        (saved,) = saver.finished()
        assert saved.stall_seconds == saved.seconds
        assert complete_checkpoints(tmp_path) == [saved.path]


def test_a_second_interrupt_waits_for_nothing(alone, tmp_path, monkeypatch):
    hold = threading.Event()
    monkeypatch.setattr(background_checkpoint, "write", lambda *_: hold.wait(60))
    with pytest.raises(KeyboardInterrupt), BackgroundSaver(tmp_path, alone.model, alone.optimizer) as saver:
        saver.save(1)
        raise KeyboardInterrupt
    assert saver.finished() == []
    hold.set()
    assert len(saver.wait()) == 1


def test_what_it_refuses(alone, tmp_path):
    with pytest.raises(ValueError, match="keep_every must be positive, got 0"):
        BackgroundSaver(tmp_path, alone.model, None, keep_every=0)
    with BackgroundSaver(tmp_path, alone.model, None) as saver, pytest.raises(ValueError, match="not be negative"):
        saver.save(-1)


def test_a_stretch_of_elements_is_boxes_whatever_the_layout():
    choose = random.Random(0)
    for _ in range(500):
        shape = [choose.randint(1, 4) for _ in range(choose.randint(0, 4))]
        order = choose.sample(range(len(shape)), len(shape))
        n = prod(shape)
        start, stop = sorted((choose.randint(0, n), choose.randint(0, n)))
        expected = torch.full((n,), -1)
        expected[start:stop] = torch.arange(start, stop)
        whole = expected.view(shape).permute(order)
        boxes = Boxes.of_stretch(whole, start, torch.arange(start, stop)).boxes
        got = torch.full(whole.shape, -1)
        for offsets, box in boxes.items():
            place = got[tuple(slice(o, o + size) for o, size in zip(offsets, box.shape, strict=True))]
            assert (place == -1).all()
            place.copy_(box)
        assert torch.equal(got, whole)
        assert len(boxes) <= max(1, 2 * len(shape) - 1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_goes_on_while_its_state_is_written(tmp_path, monkeypatch):
    write, hold = background_checkpoint.write, threading.Event()
    monkeypatch.setattr(background_checkpoint, "write", lambda *arguments: hold.wait(60) and write(*arguments))
    with joined("cuda"):
        torch.manual_seed(0)
        model, x = torch.nn.Linear(1024, 1024, device="cuda"), torch.randn(8, 1024, device="cuda")
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)

        def step():
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        with BackgroundSaver(tmp_path, model, optimizer) as saver:
            assert saver.reserve(2**30) is None
            saver.save(1)
            assert saver._slab is not None and saver._slab.memory.is_pinned()
            expected = [parameter.detach().clone() for parameter in model.parameters()]
            for _ in range(3):
                step()
            torch.cuda.synchronize()
            hold.set()
            (saved,) = saver.wait()
        assert saved.error is None
        assert load_checkpoint(tmp_path, model, optimizer) == 1
        assert all(map(torch.equal, model.parameters(), expected))
