"""Snapshot files: what is written comes back and suits PyTorch's viewer; the rest is refused and never executed."""

import gzip
import io
import pickle
import pickletools

import pytest
import torch

from cs336_systems.profiling.memory_snapshot import (
    Label,
    check_snapshot,
    read_snapshot,
    recording,
    take_snapshot,
    write_snapshot,
)
from tests.profiling.snapshots import EventLog

VIEWER_OPCODES = {
    *("PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET"),
    *("NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
    *("SHORT_BINUNICODE", "BINUNICODE", "EMPTY_LIST", "APPEND", "APPENDS", "LIST"),
    *("EMPTY_DICT", "SETITEM", "SETITEMS", "DICT", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
}
"""What the viewer's own unpickler knows (torch/utils/viz/MemoryViz.js), in protocols 2 to 4."""


EVENT = {"action": "alloc", "addr": 1, "size": 1}


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
    return tmp_path / "folder" / "snapshot.pickle"


def test_a_snapshot_comes_back_as_it_was_written(path):
    write_snapshot(path, small_snapshot())
    assert read_snapshot(path) == small_snapshot()


def test_the_file_holds_only_what_pytorchs_viewer_understands(path):
    write_snapshot(path, small_snapshot())
    operations = list(pickletools.genops(path.read_bytes()))
    assert {operation.name for operation, _, _ in operations} <= VIEWER_OPCODES
    assert next(argument for operation, argument, _ in operations if operation.name == "PROTO") <= 4


def test_a_compressed_snapshot_is_read_and_a_torn_one_refused(path):
    write_snapshot(path, small_snapshot())
    packed = path.with_suffix(".pickle.gz")
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert read_snapshot(packed) == small_snapshot()
    whole = packed.read_bytes()
    for torn in (whole[:-40], whole[:7], whole[:30] + bytes(30) + whole[60:]):
        packed.write_bytes(torn)
        with pytest.raises(ValueError, match="snapshot.pickle.gz cannot be read as a memory snapshot"):
            read_snapshot(packed)


def test_an_empty_file_is_named(path):
    path.parent.mkdir()
    path.touch()
    with pytest.raises(ValueError, match="snapshot.pickle is empty: not a memory snapshot"):
        read_snapshot(path)


@pytest.mark.parametrize("share", [0.01, 0.3, 0.7, 0.999])
def test_a_torn_file_is_refused(path, share):
    write_snapshot(path, small_snapshot())
    data = path.read_bytes()
    path.write_bytes(data[: int(share * len(data))])
    with pytest.raises(ValueError, match="cannot be read as a memory snapshot"):
        read_snapshot(path)


@pytest.mark.parametrize(
    "data",
    [
        b"name,value\n1,2\n",
        b"\x89PNG\r\n\x1a\n",
        b"PK\x03\x04",
        b"\x80\x04.",
        b"\x00" * 64,
        b'{"device_traces": []}',
        b"\x80\xff",
        b"\x80\x04\x8a\xff",
    ],
    ids=["csv", "png", "zip", "nothing", "zeros", "json", "protocol", "torn integer"],
)
def test_foreign_files_are_refused(path, data):
    path.parent.mkdir()
    path.write_bytes(data)
    with pytest.raises(ValueError, match="memory snapshot"):
        read_snapshot(path)


class Malice:
    """Pickles to a call that leaves a trace on the disk."""

    def __init__(self, victim):
        self.victim = victim

    def __reduce__(self):
        return open, (str(self.victim), "w")


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_that_calls_something_is_refused_and_not_executed(path, tmp_path, protocol):
    victim = tmp_path / "victim"
    path.parent.mkdir()
    path.write_bytes(pickle.dumps({"device_traces": [Malice(victim)], "segments": []}, protocol=protocol))
    with pytest.raises(ValueError, match="it asks for .*open, and a snapshot holds only plain data"):
        read_snapshot(path)
    assert not victim.exists()


def test_tensors_and_references_outside_the_file_are_refused(path):
    path.parent.mkdir()
    path.write_bytes(pickle.dumps({"device_traces": [torch.zeros(2)]}))
    with pytest.raises(ValueError, match="it asks for torch"):
        read_snapshot(path)
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer)
    pickler.persistent_id = lambda thing: "elsewhere" if thing == "me" else None
    pickler.dump(["me"])
    path.write_bytes(buffer.getvalue())
    with pytest.raises(ValueError, match="refers to objects outside the file"):
        read_snapshot(path)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ([1, 2], "it holds a list, not a dictionary"),
        ({"segments": []}, "no list 'device_traces'"),
        ({"device_traces": []}, "no list 'segments'"),
        ({"device_traces": [7], "segments": []}, "a device's trace is a int, not a list"),
        ({"device_traces": [[7]], "segments": []}, "an event's action is '7'"),
        ({"device_traces": [[{"action": "explode"}]], "segments": []}, "an event's action is 'explode'"),
        ({"device_traces": [[{"action": "alloc", "addr": 1}]], "segments": []}, "'size' of one event is 'None'"),
        ({"device_traces": [[{"action": "alloc", "addr": 1.5, "size": 1}]], "segments": []}, "'addr' of one event"),
        ({"device_traces": [[{"action": "alloc", "addr": 1, "size": -1}]], "segments": []}, "is '-1'"),
        ({"device_traces": [[EVENT | {"time_us": "noon"}]], "segments": []}, "'time_us' of one event is 'noon'"),
        ({"device_traces": [[EVENT | {"user_metadata": 3}]], "segments": []}, "the metadata of an event is '3'"),
        ({"device_traces": [[EVENT | {"frames": ["f"]}]], "segments": []}, "the frames of an event are"),
        (
            {"device_traces": [], "segments": [{"address": 1, "blocks": [{"size": 1, "requested_size": None}]}]},
            "'None'",
        ),
        ({"device_traces": [], "segments": [{"address": 1}]}, "a segment has no list of blocks"),
        ({"device_traces": [], "segments": [{"blocks": []}]}, "'address' of one segment"),
        ({"device_traces": [], "segments": [{"address": 1, "blocks": [3]}]}, "'size' of one block"),
        ({"device_traces": [], "segments": [], "labels": [["a", "b", "c"]]}, "a label is "),
    ],
)
def test_a_pickle_that_is_no_snapshot_says_what_is_missing(path, broken, message):
    with pytest.raises(ValueError, match=message):
        check_snapshot(broken)
    path.parent.mkdir()
    path.write_bytes(pickle.dumps(broken))
    with pytest.raises(ValueError, match="snapshot.pickle is not a memory snapshot: "):
        read_snapshot(path)


def test_events_without_an_address_are_fine():
    events = [{"action": "oom", "device_free": 7, "size": 9}, {"action": "snapshot", "addr": 0, "size": 0}]
    check_snapshot({"device_traces": [events, []], "segments": []})


def test_recording_needs_cuda_and_room():
    with pytest.raises(ValueError, match="not on 'cpu'"), recording(torch.device("cpu")):
        pass
    with pytest.raises(ValueError, match="max_entries must be positive, got 0"), recording(torch.device("cuda"), 0):
        pass


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_an_allocation_on_a_gpu_is_in_the_snapshot(path):
    device = torch.device("cuda")
    with recording(device):
        block = torch.empty(3 * 2**20, dtype=torch.uint8, device=device)
        snapshot = take_snapshot([Label(block.data_ptr(), "temporaries", "block")])
    write_snapshot(path, snapshot)
    events = read_snapshot(path)["device_traces"][torch.cuda.current_device()]
    made = next(event for event in events if event["action"] == "alloc" and event["addr"] == block.data_ptr())
    assert made["size"] == block.nbytes
    assert any(frame["filename"] == __file__ for frame in made["frames"])
