"""Checkpoints that others made: what is in their files is read, and never run."""

import io
import json
import pickle
from collections import OrderedDict

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from cs336_systems.distributed import checkpoint
from cs336_systems.distributed.checkpoint import load_checkpoint, save_checkpoint
from cs336_systems.distributed.checkpoint_folder import MARKER, _digest, crc32
from cs336_systems.distributed.checkpoint_reading import MetadataReader
from cs336_systems.distributed.process_group import joined
from cs336_systems.distributed.whole_checkpoint import find_checkpoint, load_whole_model

from .test_checkpoint import Remembering


class Runs:
    """Unpickled, it writes a file."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return exec, (f"open({str(self.file)!r}, 'w').close()",)


@pytest.fixture
def rank():
    with joined("cpu") as rank:
        yield rank


@pytest.fixture
def saved(rank, tmp_path):
    """A checkpoint with an optimizer's state, in several dtypes."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2).bfloat16())
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return save_checkpoint(tmp_path / "run", model, optimizer, 1), model, optimizer


def exchange_metadata(path, content):
    """With the marker's digests, as who made the checkpoint could."""
    file = path / ".metadata"
    file.write_bytes(content)
    marker = json.loads((path / MARKER).read_text())
    del marker["crc32"]
    marker["files"][".metadata"] = {"bytes": len(content), "crc32": crc32(file)}
    (path / MARKER).write_text(json.dumps(marker | {"crc32": _digest(marker)}))


def test_metadata_is_what_torch_reads(saved):
    path, *_ = saved
    ours, theirs = (kind(path).read_metadata() for kind in (MetadataReader, dcp.FileSystemReader))
    theirs.storage_meta.load_id = ours.storage_meta.load_id  # each reader's own
    assert ours == theirs


def test_metadata_that_would_run_code_is_refused(saved, tmp_path):
    path, model, optimizer = saved
    written = tmp_path / "written"
    exchange_metadata(path, pickle.dumps(Runs(written)))
    before = [parameter.clone() for parameter in model.parameters()]
    refused = r"\.metadata is not read: it asks for builtins.exec, and describes tensors alone"
    with pytest.raises(ValueError, match=refused):
        load_checkpoint(tmp_path / "run", model, optimizer)
    stored, _ = find_checkpoint(path)
    with pytest.raises(ValueError, match=refused):
        load_whole_model(stored, dict(model.named_parameters()))
    assert not written.exists()
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), before, strict=True))
    pickle.loads(pickle.dumps(Runs(written)))
    assert written.exists()  # so it would have been


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "Ran out of input"),
        (b"no pickle", "invalid load key, 'n'|could not find MARK|unpickling stack underflow"),
        (pickle.dumps({"a": 1}), "it holds dict, which describes no tensors"),
        (pickle.dumps(OrderedDict()), "it asks for collections.OrderedDict"),
        (b"\x80\x04\x8c\x05torch\x8c\x09os.system\x93.", "it asks for torch.os.system"),
        (b"\x80\x04K\x00Q.", "it refers to objects outside the file"),
    ],
)
def test_what_is_no_metadata_is_told_in_a_sentence(saved, content, reason):
    path, *_ = saved
    exchange_metadata(path, content)
    with pytest.raises(ValueError, match=rf"\.metadata is not read: ({reason})"):
        MetadataReader(path).read_metadata()


def test_extra_state_is_plain_data_and_tensors(rank, tmp_path):
    model, other = Remembering(2, 2), Remembering(2, 2)
    model.remembered = {"steps": [1, 2], "mean": torch.ones(3), "name": None}
    save_checkpoint(tmp_path, model, None, 1)
    assert load_checkpoint(tmp_path, other, None) == 1
    assert other.remembered["steps"] == [1, 2]
    assert torch.equal(other.remembered["mean"], torch.ones(3))
    model.remembered = Runs(tmp_path / "written")
    with pytest.raises(ValueError, match=r"extra/ is to be plain data and tensors, and is more: .*exec"):
        save_checkpoint(tmp_path, model, None, 2)
    assert not (tmp_path / "written").exists()


def test_extra_state_that_would_run_code_is_refused_before_anything_changes(rank, tmp_path, monkeypatch):
    def pack_anything(value, name):
        torch.save(value, file := io.BytesIO())
        return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)

    model, other = Remembering(2, 2), Remembering(2, 2)
    model.remembered = Runs(tmp_path / "written")
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "pack", pack_anything)
        save_checkpoint(tmp_path, model, None, 1)
    before = other.weight.detach().clone()
    with pytest.raises(ValueError, match=r"extra/ is to be plain data and tensors, and is more: .*exec"):
        load_checkpoint(tmp_path, other, None)
    assert torch.equal(other.weight, before)
    assert not (tmp_path / "written").exists()
