"""Snapshot files: what is written comes back and suits PyTorch's viewer; the rest is refused and never executed."""

import gzip
import io
import pickle
import pickletools

import pytest
import torch

from cs336_systems.profiling.memory_history import read_snapshot, reconstruct
from cs336_systems.profiling.memory_profile import write_snapshot
from tests.profiling.snapshots import EventLog

VIEWER_OPCODES = {
    *("PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET"),
    *("NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
    *("SHORT_BINUNICODE", "BINUNICODE", "EMPTY_LIST", "APPEND", "APPENDS", "LIST"),
    *("EMPTY_DICT", "SETITEM", "SETITEMS", "DICT", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
}
"""What the viewer's own unpickler knows (torch/utils/viz/MemoryViz.js), in protocols 2 to 4."""

ALLOC = {"action": "alloc", "addr": 1, "size": 1}


def small_snapshot():
    log = EventLog()
    log.exists(4096, 2**33)
    log.phase("forward")
    log.alloc(512, 1000, ("/x/cs336_systems/model/ops.py:7 linear",))
    snapshot = log.snapshot([[4096, "parameters", "weight"]])
    snapshot["allocator_settings"] = {"expandable_segments": False, "garbage_collection_threshold": 0.5, "none": None}
    return snapshot


@pytest.fixture
def path(tmp_path):
    write_snapshot(path := tmp_path / "folder" / "snapshot.pickle", small_snapshot())
    return path


def test_a_snapshot_comes_back_as_it_was_written_compressed_or_not(path):
    assert read_snapshot(path) == small_snapshot()
    path.write_bytes(gzip.compress(path.read_bytes()))
    assert read_snapshot(path) == small_snapshot()


def test_the_file_holds_only_what_pytorchs_viewer_understands(path):
    operations = list(pickletools.genops(path.read_bytes()))
    assert {operation.name for operation, _, _ in operations} <= VIEWER_OPCODES
    assert next(argument for operation, argument, _ in operations if operation.name == "PROTO") <= 4


def test_torn_empty_and_foreign_files_are_named(path):
    plain = path.read_bytes()
    packed = gzip.compress(plain)
    torn = [plain[: int(share * len(plain))] for share in (0.01, 0.3, 0.7, 0.999)]
    torn += [packed[:-40], packed[:7], packed[:30] + bytes(30) + packed[60:]]
    foreign = [b"", b"a,b\n1,2\n", b"\x80\x04.", bytes(64), b"\x80\x04\x8a\xff"]
    for data in torn + foreign:
        path.write_bytes(data)
        with pytest.raises(ValueError, match=r"snapshot.pickle .*memory snapshot"):
            read_snapshot(path)


class Malice:
    """Pickles to a call that leaves a trace on the disk."""

    def __init__(self, victim):
        self.victim = victim

    def __reduce__(self):
        return open, (str(self.victim), "w")


@pytest.mark.parametrize("protocol", [0, 4])
def test_a_pickle_that_calls_something_is_refused_and_not_executed(path, tmp_path, protocol):
    victim = tmp_path / "victim"
    path.write_bytes(pickle.dumps({"device_traces": [Malice(victim)], "segments": []}, protocol=protocol))
    with pytest.raises(ValueError, match="open"):
        read_snapshot(path)
    assert not victim.exists()


def test_tensors_and_references_outside_the_file_are_refused(path):
    path.write_bytes(pickle.dumps({"device_traces": [torch.zeros(2)]}))
    with pytest.raises(ValueError, match="asks for torch"):
        read_snapshot(path)
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer)
    pickler.persistent_id = lambda thing: "elsewhere" if thing == "me" else None
    pickler.dump(["me"])
    path.write_bytes(buffer.getvalue())
    with pytest.raises(ValueError, match="outside the file"):
        read_snapshot(path)


@pytest.mark.parametrize(
    "broken",
    [
        {"segments": []},
        {"device_traces": [[7]], "segments": []},
        {"device_traces": [[{"action": "alloc", "addr": 1}]], "segments": []},
        {"device_traces": [[ALLOC | {"size": -1}]], "segments": []},
        {"device_traces": [[ALLOC | {"time_us": "noon"}]], "segments": []},
        {"device_traces": [[ALLOC | {"frames": ["f"]}]], "segments": []},
        {"device_traces": [[ALLOC]], "segments": [{"address": 1, "blocks": [3]}]},
        {"device_traces": [[ALLOC]], "segments": [], "labels": [[1, "buffers", "b"]]},
        {"device_traces": [[]], "segments": []},
        {"device_traces": [[ALLOC, ALLOC]], "segments": []},
    ],
    ids=str,
)
def test_plain_data_that_is_no_snapshot_is_a_value_error(path, broken):
    path.write_bytes(pickle.dumps(broken))
    with pytest.raises(ValueError):
        reconstruct(read_snapshot(path))
