"""What control groups leave free, imitated."""

import mmap

import psutil
import pytest

from cs336_systems.kernels import host_memory
from cs336_systems.kernels.host_memory import allowed_host_bytes, control_group_headroom

MEMBERSHIP = "5:cpu:/elsewhere\n4:memory:/jobs/7\n0::/jobs/7\n"


def control_group(root, files):
    for name, text in (files | {"membership": MEMBERSHIP}).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return control_group_headroom(root, root / "membership")


def below(folder, files):
    """The same files in a group further down the hierarchy."""
    return {
        name.replace("memory/", f"memory/{folder}/") if "/" in name else f"{folder}/{name}": text
        for name, text in files.items()
    }


def v2(limit, current, stat="anon 10\ninactive_file 280\nactive_file 20\n"):
    return {"memory.max": f"{limit}\n", "memory.current": f"{current}\n", "memory.stat": stat}


def v1(limit, usage, stat="cache 9\ninactive_file 1\ntotal_inactive_file 370\ntotal_active_file 30\n"):
    return {
        "memory/memory.limit_in_bytes": f"{limit}\n",
        "memory/memory.usage_in_bytes": f"{usage}\n",
        "memory/memory.stat": stat,
    }


@pytest.mark.parametrize(
    ("files", "headroom"),
    [
        (v2(5000, 2000), 5000 - 2000 + 300),
        (v2(5000, 2000, stat="anon 10\n"), 3000),
        (v2("max", 2000), None),
        (v1(7000, 1000), 7000 - 1000 + 400),
        (v1(2**63 - mmap.PAGESIZE, 1000), None),
        (v2(5000, 2000) | v1(7000, 1000), 3300),
        (below("jobs/7", v2(5000, 2000)), 3300),
        (below("jobs", v1(7000, 1000)), 6400),
        (v2(5000, 2000) | below("jobs/7", v2(4000, 2500)), 1800),
        (below("jobs/8", v2(5000, 2000)), None),
        ({"memory.current": "2000\n"}, None),
        (v2("rubbish", "rubbish"), None),
        ({}, None),
    ],
    ids=[
        "v2",
        "v2 without cache",
        "v2 unlimited",
        "v1",
        "v1 unlimited",
        "both",
        "own",
        "parent",
        "tightest",
        "sibling",
        "no limit file",
        "unreadable",
        "none",
    ],
)
def test_headroom_of_a_control_group(tmp_path, files, headroom):
    assert control_group(tmp_path, files) == headroom


@pytest.mark.parametrize(("headroom", "expected"), [(None, 10_000), (4_000, 4_000), (50_000, 50_000)])
def test_the_limit_of_the_control_group_is_believed_where_there_is_one(monkeypatch, headroom, expected):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 10_000}))
    monkeypatch.setattr(host_memory, "control_group_headroom", lambda: headroom)
    assert allowed_host_bytes() == expected
