"""Sharded checkpoints: resumed bit for bit, by other ranks and wrappers, after a kill, and never by mistake."""

import json
import os
import signal
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn

from cs336_systems.distributed import FSDP, background_checkpoint, checkpoint
from cs336_systems.distributed.background_checkpoint import BackgroundSaver
from cs336_systems.distributed.checkpoint import complete_checkpoints, load_checkpoint, save_checkpoint
from cs336_systems.distributed.checkpoint_folder import MARKER
from cs336_systems.distributed.process_group import Rank, joined
from cs336_systems.training import AdamW
from tests.clock import Clock

from .checks import RankFailed, on_ranks, spawn
from .fsdp_models import Blocks
from .trainees import KINDS, Trainee


def same_bits(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in right)


def save_while_stepping(rank: Rank, folder):
    """By kind: parameters at the save, whether the same ranks that resume have later ones, and bytes of this rank.

    Training continues while the save waits for the disk, so that what it writes is a copy.
    """
    write, found = background_checkpoint.write, {}
    for kind in KINDS:
        trainee, hold = Trainee(kind), threading.Event()
        background_checkpoint.write = lambda *arguments, hold=hold: hold.wait(60) and write(*arguments)
        with BackgroundSaver(folder / kind, trainee.model, trainee.optimizer) as saver:
            trainee.steps(rank.rank, range(3))
            values = trainee.values()
            assert saver.reserve(2**30) is None
            saver.save(3, {"place": 7})
            assert saver.finished() == []
            trainee.steps(rank.rank, range(3, 6))
            hold.set()
            (saved,) = saver.wait()
            assert (saved.error, saved.path) == (None, folder / kind / "step-00000003")
            assert 0 < saved.stall_seconds <= saved.seconds
        resumed_trainee = resumed(kind, folder / kind)
        resumed_trainee.steps(rank.rank, range(3, 6))
        found[kind] = values, same_bits(resumed_trainee.values(), trainee.values()), saved.n_bytes
    background_checkpoint.write = write
    load_what_does_not_fit(folder)
    refuse_or_fall_back(rank, folder / "refused")
    return found


def resumed(kind, folder):
    trainee = Trainee(kind, seed=1)
    for group in trainee.optimizer.param_groups:
        group["lr"] = 7.0
    assert load_checkpoint(str(folder), trainee.model, trainee.optimizer) == 3
    assert trainee.layers.steps.tolist() == [3, 3]
    return trainee


def resume_under_every_wrapper(rank: Rank, folder):
    """By the kinds that saved and that resume: the values that are loaded."""
    whole = ("ddp, fused", "owned", "scattered")
    pairs = [(one, other) for one in whole for other in whole] + [(kind, kind) for kind in ("fsdp", "fsdp, ours")]
    found = {(saved, kind): resumed(kind, folder / saved) for saved, kind in pairs}
    for trainee in found.values():
        trainee.steps(rank.rank, [3])  # with state of the right devices, dtypes and shapes
    for (saved, _), trainee in found.items():  # and values: moments in another order would show
        same = found[saved, saved].values()
        torch.testing.assert_close(trainee.values(), same, rtol=1e-4, atol=1e-5)
    return {pair: resumed(pair[1], folder / pair[0]).values() for pair in found}


def load_what_does_not_fit(folder):
    """Another model, another optimizer: a sentence that says so, and nothing has changed."""
    other, trainee = FSDP(Blocks()), Trainee("fsdp", seed=1)
    fewer = torch.optim.AdamW(list(trainee.model.parameters())[1:])
    wider = FSDP(nn.Sequential(nn.Linear(6, 2 * 6)))
    save_checkpoint(folder / "wide", FSDP(nn.Sequential(nn.Linear(6, 6))), None, 0)
    for model, optimizer, name, message in (
        (other, None, "fsdp", "buffer/steps is .* there, absent here; .* more"),
        (trainee.model, fewer, "fsdp", "another optimizer"),
        (wider, None, "wide", r"model/0.weight is \(6, 6\) torch.float32 there, \(12, 6\) torch.float32 here"),
    ):
        before = {key: value.clone() for key, value in model.gather_full_params().items()}
        with pytest.raises(ValueError, match=message):
            load_checkpoint(folder / name, model, optimizer)
        assert same_bits(model.gather_full_params(), before)
    load_what_another_optimizer_saved(folder / "optimizers")
    with pytest.raises(ValueError, match="got -1"):
        save_checkpoint(folder / "wide", wider, None, -1)
    with pytest.raises(OSError):
        save_checkpoint(folder / "wide" / "step-00000000" / MARKER, wider, None, 0)


def load_what_another_optimizer_saved(folder):
    """Classes and switches of torch, and our AdamW; nothing has changed."""
    fsdp = FSDP(nn.Linear(4, 2))
    fsdp(torch.ones(1, 4)).sum().backward()
    optimizers = {
        "sgd": torch.optim.SGD(fsdp.parameters(), momentum=0.9),
        "adamw": torch.optim.AdamW(fsdp.parameters()),
        "amsgrad": torch.optim.AdamW(fsdp.parameters(), amsgrad=True),
        "ours": AdamW(fsdp.parameters()),
    }
    for name, optimizer in optimizers.items():
        optimizer.step()
        save_checkpoint(folder / name, fsdp, optimizer, 1)
    for saved, name in (("adamw", "ours"), ("ours", "adamw")):
        assert load_checkpoint(folder / saved, fsdp, optimizers[name]) == 1
        optimizers[name].step()
    before, state = fsdp.gather_full_params(), str(optimizers["adamw"].state_dict())
    for saved in ("sgd", "amsgrad"):
        with pytest.raises(ValueError, match="another optimizer: .*(torch.optim|amsgrad is)"):
            load_checkpoint(folder / saved, fsdp, optimizers["adamw"])
    assert same_bits(fsdp.gather_full_params(), before)
    assert str(optimizers["adamw"].state_dict()) == state


def refuse_or_fall_back(rank: Rank, folder):
    """States that cannot be resharded are refused by every rank; damage that one rank finds is seen by every rank."""
    fsdp = FSDP(nn.Linear(4, 2))
    fsdp(torch.ones(1, 4)).sum().backward()
    fsdp.finish_gradient_synchronization()
    adam = torch.optim.Adam(fsdp.parameters())
    adam.step()
    for state, message in (
        ({"odd": torch.ones(7) if rank.rank else torch.ones(())}, "state odd of weight has shape .7,."),
        ({"a/b": 1}, "state a/b of weight has a slash in its name"),
        ({"odd": torch.ones(1, 4, dtype=torch.complex128)}, "weight/odd is of torch.complex128"),
    ):
        adam.state[fsdp.module.weight] = state
        with pytest.raises(ValueError, match=message):
            save_checkpoint(folder, fsdp, adam, 1)
    with pytest.raises(ValueError, match="the optimizer has a parameter of shape .3,. that the model lacks"):
        save_checkpoint(folder, fsdp, torch.optim.SGD([torch.ones(3)]), 1)
    with pytest.raises(ValueError, match=r"cannot hold place = \{7\}"):
        save_checkpoint(folder / "none", fsdp, None, 1, extra={"place": {7}})
    assert not (folder / "none").exists()
    assert complete_checkpoints(folder) == []
    for step in (1, 2):
        save_checkpoint(folder, fsdp, None, step)
    if rank.rank == 1:
        shard = folder / "step-00000002" / "rank-1.safetensors"
        content = bytearray(shard.read_bytes())
        content[len(content) // 2] ^= 1
        shard.write_bytes(content)
    dist.barrier()
    told = []
    assert checkpoint.resume_checkpoint(folder, fsdp, None, tell=told.append).step == 1
    assert len(told) == (rank.rank == 0)
    assert all("step-00000002: the contents of rank-1.safetensors have changed" in sentence for sentence in told)


def die_while_saving(rank: Rank, folder):
    """Both ranks have written their shards, rank 0 is killed before the directory is whole."""
    trainee = Trainee("fsdp")
    trainee.steps(rank.rank, [0])
    checkpoint.write_index = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    save_checkpoint(folder / "fsdp", trainee.model, trainee.optimizer, 9)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    return folder, on_ranks(save_while_stepping, 2, folder)


@pytest.mark.slow
def test_the_same_ranks_resume_with_the_same_bits_and_each_writes_its_share(saved):
    folder, of_ranks = saved
    for kind in KINDS:
        assert all(found[kind][1] for found in of_ranks)
        sizes = [found[kind][2] for found in of_ranks]
        assert max(sizes) < 0.75 * sum(sizes)
        (path,) = (folder / kind).iterdir()
        assert sorted(file.name for file in path.iterdir()) == [
            *(MARKER, "rank-0.safetensors", "rank-1.safetensors", "tensors.json")
        ]
        marker = json.loads((path / MARKER).read_text())
        assert (marker["step"], marker["extra"], marker["optimizer"][0]["lr"]) == (3, {"place": 7}, 0.05)


def check_buffers_are_those_of_rank_0(rank, folder):
    """Also where another rank has fewer bytes to write, and so would have the buffer's turn."""
    model = nn.Module()
    for number in range(4):
        model.register_buffer(f"count_{number}", torch.full((3,), 10.0 * number + rank.rank))
    model.weight = nn.Parameter(torch.ones(1000))
    save_checkpoint(folder, model, None, 1)
    for buffer in model.buffers():
        buffer.fill_(-1)
    load_checkpoint(folder / "step-00000001", model, None)
    return [buffer.tolist() for buffer in model.buffers()]


def test_buffers_that_differ_between_ranks_are_saved_as_rank_0_has_them(tmp_path):
    expected = [[10.0 * number] * 3 for number in range(4)]
    assert on_ranks(check_buffers_are_those_of_rank_0, 2, tmp_path) == [expected, expected]


@pytest.mark.slow
def test_other_ranks_and_wrappers_read_the_same_values(saved):
    folder, of_ranks = saved
    with joined("cpu") as rank:
        by_one = resume_under_every_wrapper(rank, folder)
    for found in (by_one, *on_ranks(resume_under_every_wrapper, 4, folder)):
        for (saved_kind, kind), values in found.items():
            assert same_bits(values, of_ranks[0][saved_kind][0]), (saved_kind, kind)


@pytest.mark.slow
def test_a_save_that_is_killed_leaves_the_one_before(saved):
    folder, _ = saved
    with pytest.raises(RankFailed):
        spawn(die_while_saving, 2, folder)
    (torn,) = (folder / "fsdp").glob(".step-*")
    assert sorted(file.name for file in torn.iterdir()) == ["rank-0.safetensors", "rank-1.safetensors"]
    assert [path.name for path in complete_checkpoints(folder / "fsdp")] == ["step-00000003"]


@pytest.fixture
def alone():
    with joined("cpu"):
        trainee = Trainee("ddp, fused")
        trainee.steps(0, [0])
        yield trainee


def test_a_save_that_fails_is_told_and_the_next_one_waits_for_it(alone, tmp_path, monkeypatch):
    write, order = background_checkpoint.write, []
    last, waits = threading.Event(), threading.Event()

    class Ticking(Clock):
        """The last save looks at it when it begins to wait."""

        def perf_counter(self):
            self.sleep(1e-3)
            now = self.now
            if last.is_set():
                waits.set()
            return now

    def fails_once(folder, collected, *arguments):
        order.append(collected.marker["step"])
        if len(order) == 2:
            assert waits.wait(60)
            clock.sleep(5)
            order.append("full")
            raise OSError(28, "No space left on device")
        return write(folder, collected, *arguments)

    clock = Ticking()
    monkeypatch.setattr(background_checkpoint, "write", fails_once)
    monkeypatch.setattr(background_checkpoint, "time", clock)
    with BackgroundSaver(tmp_path, alone.model, alone.optimizer) as saver:
        saver.save(2)
        saver.save(3)
        last.set()
        saver.save(4)
        told = saver.wait()
    assert order == [2, 3, "full", 4]
    assert [(one.step, one.error) for one in told] == [(2, None), (3, "[Errno 28] No space left on device"), (4, None)]
    assert 5 < told[2].waited_seconds < told[2].stall_seconds < told[2].seconds < 6
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


class Remembering(nn.Linear):
    def get_extra_state(self):
        return {"steps": 3}


def test_extra_state_is_refused(alone, tmp_path):
    with pytest.raises(ValueError, match="0 is a Remembering, whose extra state checkpoints cannot hold"):
        save_checkpoint(tmp_path, nn.Sequential(Remembering(2, 2)), None, 2)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.gpu
def test_a_gpu_continues_while_its_state_is_written(tmp_path, monkeypatch):
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
