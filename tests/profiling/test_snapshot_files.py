"""Snapshot files hold what was recorded, and only what PyTorch's viewer understands."""

import pickle
import pickletools

from cs336_systems.profiling.memory_profile import write_snapshot
from tests.profiling.snapshots import EventLog

VIEWER_OPCODES = {
    *("PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET"),
    *("NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
    *("SHORT_BINUNICODE", "BINUNICODE", "EMPTY_LIST", "APPEND", "APPENDS", "LIST"),
    *("EMPTY_DICT", "SETITEM", "SETITEMS", "DICT", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
}
"""What the viewer's own unpickler knows (torch/utils/viz/MemoryViz.js), in protocols 2 to 4."""


def small_snapshot():
    log = EventLog()
    log.exists(4096, 2**33)
    log.phase("forward")
    log.alloc(512, 1000, ("/x/cs336_systems/model/ops.py:7 linear",))
    snapshot = log.snapshot([[4096, "parameters", "weight"]])
    snapshot["allocator_settings"] = {"expandable_segments": False, "garbage_collection_threshold": 0.5, "none": None}
    return snapshot


def test_a_snapshot_comes_back_and_the_file_holds_only_what_pytorchs_viewer_understands(tmp_path):
    write_snapshot(path := tmp_path / "folder" / "snapshot.pickle", small_snapshot())
    assert pickle.loads(path.read_bytes()) == small_snapshot()
    operations = list(pickletools.genops(path.read_bytes()))
    assert {operation.name for operation, _, _ in operations} <= VIEWER_OPCODES
    assert next(argument for operation, argument, _ in operations if operation.name == "PROTO") <= 4
