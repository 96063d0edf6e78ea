"""Sharded checkpoints: resumed bit for bit, by other numbers of ranks, after a kill in the middle, never by mistake."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from cs336_systems.distributed.checkpoint import MARKER, complete_checkpoints, load_checkpoint, save_checkpoint
from cs336_systems.distributed.fsdp import FSDP
from cs336_systems.distributed.process_group import Rank
from cs336_systems.distributed.spawn import RankFailed, spawn
from cs336_systems.training import AdamW

from .fsdp_models import Blocks, Menagerie

OPTIMIZERS = {
    "torch": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, betas=(0.8, 0.9)),
    "ours": lambda parameters: AdamW(parameters, lr=0.01),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
}


class Remembering(nn.Linear):
    """Keeps an object beside its tensors."""

    remembered = None

    def get_extra_state(self):
        return self.remembered

    def set_extra_state(self, state):
        self.remembered = state


class Model(Menagerie):
    """With a name that looks like a path, and a module that remembers."""

    def __init__(self):
        super().__init__()
        self.by_path = nn.ModuleDict({"in/out": Remembering(1, 1)})

    def forward(self, ids):
        return self.by_path["in/out"](super().forward(ids))


class Trained:
    """A model and its optimizer; every rank sees the same data, so that any number of ranks does the same."""

    def __init__(self, optimizer, seed=0):
        torch.manual_seed(seed)
        self.fsdp = FSDP(Model())
        self.optimizer = OPTIMIZERS[optimizer](self.fsdp.parameters())

    @property
    def remembering(self):
        return self.fsdp.module.by_path["in/out"]

    def step(self):
        self.fsdp(torch.arange(10).view(2, 5)).square().mean().backward()
        self.fsdp.finish_gradient_synchronization()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def values(self):
        return {name: whole.numpy() for name, whole in self.fsdp.gather_full_params().items()}


def save_and_go_on(rank: Rank, folder):
    """Three checkpoints of each optimizer's run, two of them kept; the parameters at the last and a step later."""
    found = {}
    for name in OPTIMIZERS:
        trained = Trained(name)
        assert load_checkpoint(folder / name, trained.fsdp, trained.optimizer) is None
        for step in range(3):
            trained.step()
            with torch.no_grad():
                trained.fsdp.module.shift.fill_(step)
            trained.remembering.remembered = {"rank": rank.rank, "steps": torch.arange(step)}
            save_checkpoint(folder / name, trained.fsdp, trained.optimizer, step)
        at_last = trained.values()
        trained.step()
        found[name] = at_last, trained.values()
    return found


def resume_and_go_on(rank: Rank, folder):
    found = {}
    for name in OPTIMIZERS:
        trained = Trained(name, seed=1)
        trained.optimizer.param_groups[0]["lr"] = 7.0
        assert load_checkpoint(str(folder / name), trained.fsdp, trained.optimizer) == 2
        assert trained.fsdp.module.shift[0] == 2
        assert trained.remembering.remembered["rank"] == 0
        assert trained.remembering.remembered["steps"].tolist() == [0, 1]
        loaded = trained.values()
        trained.step()
        found[name] = loaded, trained.values()
    return found


def load_what_does_not_fit(rank: Rank, folder):
    """Another model, another optimizer; the messages, after a check that nothing has changed."""
    messages = []
    other = FSDP(Blocks())
    trained = Trained("torch", seed=1)
    trained.step()
    fewer = torch.optim.AdamW(list(trained.fsdp.parameters())[1:])
    wider = FSDP(nn.Sequential(nn.Linear(6, 2 * 6)))
    save_checkpoint(folder / "wide", FSDP(nn.Sequential(nn.Linear(6, 6))), None, 0)
    for fsdp, optimizer, name in (
        (other, None, "torch"),
        (trained.fsdp, fewer, "torch"),
        (wider, None, "wide"),
        (wider, torch.optim.SGD(wider.parameters()), "wide"),
    ):
        before = {key: value.clone() for key, value in fsdp.gather_full_params().items()}
        with pytest.raises(ValueError) as caught:
            load_checkpoint(folder / name, fsdp, optimizer)
        messages.append(str(caught.value))
        assert all(torch.equal(value, before[key]) for key, value in fsdp.gather_full_params().items())
    with pytest.raises(ValueError, match="keep_every must be positive, got 0"):
        save_checkpoint(folder / "wide", wider, None, 1, keep_every=0)
    with pytest.raises(ValueError, match="step must not be negative and keep_last be positive, got -1 and 2"):
        save_checkpoint(folder / "wide", wider, None, -1)
    with pytest.raises(OSError):
        save_checkpoint(folder / "wide" / "step-00000000" / MARKER, wider, None, 0)
    return messages


def refuse_or_fall_back(rank: Rank, folder):
    """States that cannot be resharded are refused by every rank; damage that one rank finds is seen by every rank."""
    fsdp = FSDP(nn.Linear(4, 2))
    fsdp(torch.ones(1, 4)).sum().backward()
    fsdp.finish_gradient_synchronization()
    adafactor = torch.optim.Adafactor(fsdp.parameters())
    adafactor.step()
    with pytest.raises(ValueError, match="state row_var of weight has shape .1, 1., its shard .1, 4."):
        save_checkpoint(folder, fsdp, adafactor, 1)  # one row on each rank, so one number, but not the same
    adam = torch.optim.Adam(fsdp.parameters())
    adam.step()
    adam.state[fsdp.module.weight]["odd"] = torch.ones(3 + rank.rank * 4)
    with pytest.raises(ValueError, match="state odd of weight has shape .3,."):
        save_checkpoint(folder, fsdp, adam, 1)
    adam.state[fsdp.module.weight]["odd"] = torch.ones(7) if rank.rank else torch.ones(())
    with pytest.raises(ValueError, match="state odd of weight has shape .7,."):
        save_checkpoint(folder, fsdp, adam, 1)
    adam.state[fsdp.module.weight] = {"a/b": 1}
    with pytest.raises(ValueError, match="state a/b of weight has a slash in its name"):
        save_checkpoint(folder, fsdp, adam, 1)
    with pytest.raises(ValueError, match="the optimizer has a parameter of shape .3,. that the model lacks"):
        save_checkpoint(folder, fsdp, torch.optim.SGD([torch.ones(3)]), 1)
    assert not folder.exists()
    for step in (1, 2):
        save_checkpoint(folder, fsdp, None, step)
    if rank.rank == 1:
        shard = folder / "step-00000002" / "__1_0.distcp"
        content = bytearray(shard.read_bytes())
        content[len(content) // 2] ^= 1
        shard.write_bytes(content)
    dist.barrier()
    if rank.rank == 0:
        with pytest.warns(UserWarning, match="step-00000002: the contents of __1_0.distcp have changed"):
            assert load_checkpoint(folder, fsdp, None) == 1
    else:
        assert load_checkpoint(folder, fsdp, None) == 1


def die_while_saving(rank: Rank, folder):
    """Rank 1 has written its shards, rank 0 is killed before the directory is whole."""
    trained = Trained("torch")
    trained.step()

    def die(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGKILL)

    dcp.FileSystemWriter.finish = die
    save_checkpoint(folder / "torch", trained.fsdp, trained.optimizer, 9)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    return folder, spawn(save_and_go_on, 2, folder, timeout_s=120)


def same_bits(left, right):
    return left.keys() == right.keys() and all((left[name] == right[name]).all() for name in right)


@pytest.mark.slow
def test_the_newest_ones_are_kept_and_say_what_they_hold(saved):
    folder, _ = saved
    assert [path.name for path in complete_checkpoints(folder / "torch")] == ["step-00000001", "step-00000002"]
    assert sorted(path.name for path in (folder / "torch").iterdir()) == ["step-00000001", "step-00000002"]
    marker = json.loads((folder / "torch" / "step-00000002" / MARKER).read_text())
    assert marker["step"] == 2
    assert marker["optimizer"][0]["betas"] == [0.8, 0.9]


@pytest.mark.slow
def test_a_save_that_is_killed_leaves_the_one_before_and_any_number_of_ranks_reads_it(saved):
    folder, _ = saved
    with pytest.raises(RankFailed):
        spawn(die_while_saving, 2, folder, timeout_s=60)
    assert list((folder / "torch").glob(".step-*"))  # torn, under its temporary name
    for path in (folder / "torch" / "step-00000008", folder / "torch" / "step-00000007"):
        _copy(folder / "torch" / "step-00000002", path)
    (folder / "torch" / "step-00000008" / MARKER).unlink()  # killed between the name and the marker
    shard = next((folder / "torch" / "step-00000007").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1])  # cut short by a disk that lied
    assert complete_checkpoints(folder / "torch")[-1].name == "step-00000002"
    replaced = folder / "torch" / ".step-00000002.old"  # killed while saving a step again, before the new one is whole
    (folder / "torch" / "step-00000002").replace(replaced)
    _copy(replaced, folder / "torch" / "step-00000002")
    (folder / "torch" / "step-00000002" / MARKER).unlink()
    for resumed in spawn(resume_and_go_on, 3, folder, timeout_s=120):
        for name, (at_last, after) in saved[1][0].items():
            assert same_bits(resumed[name][0], at_last)
            for key, value in after.items():  # an average over three ranks rounds otherwise
                torch.testing.assert_close(torch.from_numpy(resumed[name][1][key]), torch.from_numpy(value))


@pytest.mark.slow
def test_as_many_ranks_go_on_with_the_same_bits(saved):
    folder, before = saved
    for resumed in spawn(resume_and_go_on, 2, folder, timeout_s=120):
        for name in OPTIMIZERS:
            assert all(map(same_bits, resumed[name], before[0][name]))


@pytest.mark.slow
def test_a_checkpoint_of_another_model_is_refused(saved):
    folder, _ = saved
    for messages in spawn(load_what_does_not_fit, 2, folder, timeout_s=60):
        model, optimizer, shape, none = messages
        assert "is a checkpoint of another model: it lacks model/blocks.0.down.bias, " in model
        assert "is a checkpoint of another optimizer: it holds parameter groups of [" in optimizer
        assert "model/0.weight is (6, 6) torch.float32 there and (12, 6) torch.float32 here" in shape
        assert "another" in none


@pytest.mark.slow
def test_all_ranks_agree_on_what_is_wrong(tmp_path):
    spawn(refuse_or_fall_back, 2, tmp_path / "run", timeout_s=60)


def _copy(source: Path, target: Path) -> None:
    target.mkdir()
    for path in source.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
