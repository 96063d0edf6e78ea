"""Checkpoints of layout 2, by torch.distributed.checkpoint: they resume as they did then, and are read, never run.

The fixture was written at commit 49f74a7: two steps of a small model on two ranks under FSDP and under a
``ShardedOptimizer`` that cuts a transposed weight, and on one rank by torch's fused AdamW; ``expected.safetensors``
beside each checkpoint has the parameters two steps later.
"""

import io
import json
import pickle
import tarfile
import zlib
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from cs336_systems.distributed.checkpoint import find_checkpoint, load_checkpoint, load_whole_model
from cs336_systems.distributed.checkpoint_folder import MARKER
from cs336_systems.distributed.process_group import Rank, joined
from cs336_systems.distributed.stretches import read_old_index

from .checks import on_ranks
from .trainees import Trainee

FIXTURE = Path(__file__).parent / "fixtures" / "layout-2.tar.gz"


class Runs:
    """Unpickled, it writes a file."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return exec, (f"open({str(self.file)!r}, 'w').close()",)


class Then(Trainee):
    """As the model was then."""

    bucket_size_mb = 8e-5

    def __init__(self, kind):
        super().__init__({"alone": "ddp, fused"}.get(kind, kind), seed=1, widths=(3, 5, 2), paths=False)


@pytest.fixture
def folder(tmp_path):
    with tarfile.open(FIXTURE) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def assert_resumes(rank: Rank, folder, kinds):
    for kind in kinds:
        then = Then(kind)
        assert load_checkpoint(folder / kind, then.model, then.optimizer) == 2
        assert then.layers.steps.tolist() == [2, 2]
        then.steps(rank.rank, (2, 3))
        for name, expected in load_file(folder / kind / "expected.safetensors").items():
            # Products of small matrices round otherwise on other processors.
            torch.testing.assert_close(then.values()[name], expected, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
def test_two_ranks_resume_as_then(folder):
    on_ranks(assert_resumes, 2, folder, ("fsdp", "scattered"))


def test_one_rank_resumes_as_then(folder):
    with joined("cpu") as rank:
        assert_resumes(rank, folder, ["alone"])
        scattered = Then("scattered")  # which two ranks wrote, in boxes with gaps
        assert load_checkpoint(folder / "scattered", scattered.model, scattered.optimizer) == 2
        stored, skipped = find_checkpoint(folder / "scattered")
        weights = load_whole_model(stored, dict(scattered.layers.named_parameters()))
        assert skipped == {}
        assert all(torch.equal(weights[name], value) for name, value in scattered.values().items())


def exchange(path, name, content):
    """Replace a file, with the digests in the marker, as who made the checkpoint could."""
    (path / name).write_bytes(content)
    marker = json.loads((path / MARKER).read_text())
    del marker["crc32"]
    marker["files"][name] = {"bytes": len(content), "crc32": zlib.crc32(content)}
    (path / MARKER).write_text(json.dumps(marker | {"crc32": zlib.crc32(json.dumps(marker).encode())}))


def test_a_description_that_would_run_code_is_refused(folder):
    written, path = folder / "written", folder / "alone" / "step-00000002"
    exchange(path, ".metadata", pickle.dumps(Runs(written)))
    refused = r"\.metadata is not read: it asks for builtins.exec"
    with joined("cpu"):
        then = Then("alone")
        before = then.values()
        with pytest.raises(ValueError, match=refused):
            load_checkpoint(folder / "alone", then.model, then.optimizer)
        with pytest.raises(ValueError, match=refused):
            load_whole_model(find_checkpoint(path)[0], dict(then.layers.named_parameters()))
    assert not written.exists()
    assert all(torch.equal(value, before[name]) for name, value in then.values().items())
    pickle.loads(pickle.dumps(Runs(written)))
    assert written.exists()  # so it would have been


def test_what_is_no_description_is_told_in_a_sentence(tmp_path):
    for content in (
        *(b"", b"no pickle", pickle.dumps({"a": 1}), pickle.dumps(OrderedDict()), pickle.dumps(Path("x"))),
        *(b"\x80\x04\x8c\x05torch\x8c\x09os.system\x93.", b"\x80\x04K\x00Q."),
    ):
        (tmp_path / ".metadata").write_bytes(content)
        with pytest.raises(ValueError, match=r"\.metadata is not read: "):
            read_old_index(tmp_path, [".metadata"])


def test_a_tensor_that_would_run_code_is_refused(folder):
    """In the place of each tensor's archive, as long as that."""
    path = folder / "alone" / "step-00000002"
    with pytest.raises(ValueError, match="names __0_0.distcp, which is no file of the checkpoint"):
        read_old_index(path, [".metadata"])
    stored = read_old_index(path, ["__0_0.distcp"])
    torch.save(Runs(folder / "written"), file := io.BytesIO())
    (path / "__0_0.distcp").write_bytes(file.getvalue().ljust(2**15, b"\0"))
    for tensor in stored.values():
        with pytest.raises((ValueError, pickle.UnpicklingError, RuntimeError)):
            tensor.read(0, 1)
    assert not (folder / "written").exists()
