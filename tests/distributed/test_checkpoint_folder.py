"""A folder of checkpoints: the last written is the newest, nothing foreign or damaged is removed, damage is named."""

import errno
import itertools
import json
import os
import time
import warnings
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import nn

from cs336_systems.distributed.checkpoint import complete_checkpoints, load_checkpoint, save_checkpoint
from cs336_systems.distributed.checkpoint_folder import MARKER
from cs336_systems.distributed.fsdp import FSDP
from cs336_systems.distributed.process_group import Rank, joined
from tests.distributed.checks import spawn
from tests.distributed.disks import Death, Killed, full_disk


class Run:
    """A model in a world of one, whose weights say which save they are of."""

    def __init__(self, folder):
        self.folder = folder
        self.fsdp = FSDP(nn.Linear(3, 2))

    def save(self, step, value=None, keep_last=2):
        with torch.no_grad():
            next(self.fsdp.parameters()).fill_(step if value is None else value)
        return save_checkpoint(self.folder, self.fsdp, None, step, keep_last=keep_last)

    def load(self):
        """The step, after a check that the weights are of it."""
        step = load_checkpoint(self.folder, self.fsdp, None)
        assert step is None or self.value == step
        return step

    @property
    def value(self):
        return next(self.fsdp.parameters()).max().item()

    def names(self):
        return sorted(path.name for path in self.folder.iterdir())


@pytest.fixture(scope="module", autouse=True)
def alone():
    with joined("cpu"):
        yield


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path / "run")


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def test_the_newest_is_what_was_written_last(run, monkeypatch):
    assert run.load() is None
    run.save(900)
    run.save(1000)
    assert run.save(10).is_dir()
    assert run.load() == 10
    assert run.names() == ["step-00000010", "step-00001000"]
    monkeypatch.setattr(time, "time_ns", lambda: 0)  # a clock that was set back
    run.save(20)
    assert run.load() == 20
    assert [path.name for path in complete_checkpoints(run.folder)] == ["step-00000010", "step-00000020"]
    run.save(10)
    assert run.load() == 10
    run.save(100_000_000)
    assert run.load() == 100_000_000
    assert run.names() == ["step-00000010", "step-100000000"]


@pytest.mark.filterwarnings("ignore")  # those that are not matched here
def test_what_is_torn_stays_and_is_told(run):
    path = run.save(3)
    shard = path / "rank-0.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    rest, told = shard.read_bytes(), "step-00000003: rank-0.safetensors has .* bytes"
    with pytest.raises(ValueError, match=f"holds no checkpoint that is whole.*{told}"):
        run.load()
    with pytest.warns(UserWarning, match=told):
        run.save(4, keep_last=1)
    assert shard.read_bytes() == rest
    with pytest.warns(UserWarning, match="step-00000003 is kept as .*step-00000003.old"):
        run.save(3, keep_last=1)
    (aside,) = run.folder.glob(".step-00000003.old-*")
    assert (aside / shard.name).read_bytes() == rest
    with pytest.warns(UserWarning, match="step-00000003.old-.*: rank-0.safetensors has"):
        assert run.load() == 3
    assert run.names() == [aside.name, "step-00000003"]


@pytest.mark.filterwarnings("ignore")  # those that are not matched here
def test_what_others_wrote_stays(run):
    others = {"step-final", "step-00000001.kept", "step-00000002", "notes"}
    for name in others:
        (run.folder / name).mkdir(parents=True)
        (run.folder / name / "precious").write_text(name)
    (run.folder / "step-log.txt").write_text("log")
    (run.folder / "step-00000005").write_text("a file of this very name")
    with pytest.warns(UserWarning, match="step-00000002: it has no complete.json"):
        for step in (3, 4, 5):
            run.save(step, keep_last=1)
        assert run.load() == 5
    assert (run.folder / "step-log.txt").read_text() == "log"
    (aside,) = run.folder.glob(".step-00000005.old-*")
    assert aside.read_text() == "a file of this very name"
    assert all((run.folder / name / "precious").read_text() == name for name in others)
    assert not (run.folder / "step-00000004").exists()
    renamed = (run.folder / "step-00000005").rename(run.folder / "step-00000006")
    with pytest.raises(ValueError, match="step-00000006: it has been renamed, it is of step 5"):
        run.load()
    (renamed / MARKER).write_text(json.dumps({"step": 6, "optimizer": None, "scalars": {}, "files": {}}))
    with pytest.raises(ValueError, match="step-00000006: it is of layout 1"):
        run.load()


def test_a_link_is_removed_once_and_what_it_points_to_stays(run, tmp_path):
    elsewhere = run.save(1).rename(tmp_path / "elsewhere")
    (run.folder / "step-00000001").symlink_to(elsewhere)
    assert run.load() == 1
    for step in (2, 3):
        run.save(step)
    assert (elsewhere / MARKER).exists()
    assert run.names() == ["step-00000002", "step-00000003"]


def test_one_error_in_reading_removes_nothing(run, monkeypatch):
    kept = run.save(1) / MARKER
    read_text = Path.read_text

    def fail(path, *args, **kwargs):
        if path == kept:
            raise OSError(errno.EIO, "Input/output error")
        return read_text(path, *args, **kwargs)

    with monkeypatch.context() as patch, pytest.warns(UserWarning, match="step-00000001: .*Input/output error"):
        patch.setattr(Path, "read_text", fail)
        run.save(2)
        run.save(3)
        assert run.load() == 3
    assert [path.name[-1] for path in complete_checkpoints(run.folder)] == ["1", "2", "3"]


@pytest.mark.parametrize("name", ["rank-0.safetensors", MARKER])
def test_a_flipped_bit_is_not_loaded(run, name):
    run.save(1)
    flip_a_bit(run.save(2) / name)
    reason = f"step-00000002: .*{name}.*(have changed|is damaged)"
    for _ in range(2):
        with pytest.warns(UserWarning, match=reason):
            assert run.load() == 1
    flip_a_bit(run.folder / "step-00000001" / name)
    for _ in range(2):
        with pytest.raises(ValueError, match=reason):
            run.load()


def test_a_disk_that_is_full_is_said_and_not_kept_full(run):
    """Whichever file comes to its end: what is left of it has the name of none, and takes no place."""
    sizes = [file.stat().st_size for file in run.save(1).iterdir()]
    run.save(1)  # so that the one before is gone
    for n_bytes in [0, *(size - 16 for size in sizes)]:  # digests vary in their digits
        with full_disk(n_bytes), pytest.raises(OSError, match=os.strerror(errno.EFBIG)) as failure:
            run.save(2)
        assert "\n" not in str(failure.value)
        assert run.names() == ["step-00000001"]
        assert run.load() == 1
    run.save(2)
    assert run.names() == ["step-00000001", "step-00000002"]


def die_at_every_operation(rank: Rank, folder):
    """Saves that end before their first, second, ... change to the disk; how many of each kind did."""
    death = Death()
    warnings.simplefilter("error")  # nothing that a kill leaves looks like damage
    deaths = {}
    for new_step in (1, 2):
        run = Run(folder / f"step {new_step} after 1")
        for n_operations in itertools.count():
            run.save(1, value=-1, keep_last=1)
            assert run.names() == ["step-00000001"]
            with suppress(Killed, OSError), death.after(n_operations):
                run.save(new_step, value=n_operations, keep_last=1)
                break
            assert load_checkpoint(run.folder, run.fsdp, None) in (1, new_step)
            assert run.value in (-1, n_operations)
        deaths[new_step] = n_operations
    return deaths


@pytest.mark.slow
def test_a_kill_at_any_moment_loses_nothing(tmp_path):
    (deaths,) = spawn(die_at_every_operation, 1, tmp_path)
    assert min(deaths.values()) > 15
