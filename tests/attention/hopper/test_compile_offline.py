"""The schedules in use compile for Hopper without a GPU: few spills, wgmmas not serialised, fitting shared memory.

Through the launchers, told of a Hopper device and stopped short of the launch.
"""

import pytest

from tests.attention.offline import ON_HOPPER, report

COMPILE = (
    ON_HOPPER
    + """
import json, re, sys
from cs336_systems.attention.hopper import backward, forward, host

host.current_stream = lambda device: 0
host.counter = lambda device, stream: torch.zeros(1, dtype=torch.int32)
forward.n_multiprocessors = backward.n_multiprocessors = lambda device: 132
name, d_head = sys.argv[1], int(sys.argv[2])
q = torch.zeros(1, 2, 200, d_head, dtype=torch.bfloat16)
if name == "forward":
    forward.launch_forward(q, q, q, True, 0.1)
else:
    ordered = name == "backward in order"
    backward.launch_backward(q, q, q, q, torch.zeros(1, 2, 200), q, q, q, q, True, 0.1, ordered)
kernel = compiled[f"hopper_{name.split()[0]}_kernel"]
metadata = {"shared": kernel.metadata.shared, "warps": kernel.metadata.num_warps}
ptx = kernel.asm["ptx"]
places = dict.fromkeys(re.findall(r"mov\\.b32\\s+(%r\\d+), global_smem;", ptx), 0)
for register, base, offset in re.findall(r"add\\.s32\\s+(%r\\d+), (%r\\d+), (\\d+);", ptx):
    if base in places:
        places[register] = places[base] + int(offset)
metadata["barriers"] = sorted(places[register] for register in re.findall(r"mbarrier\\.init\\S* \\[(%r\\d+)\\]", ptx))
print(json.dumps({"ptx": ptx, "metadata": metadata}))
"""
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "d_head", "most_spilled_bytes"),
    [
        *(("forward", 64, 0), ("forward", 128, 0)),
        *(("backward", 128, 256), ("backward in order", 64, 8), ("backward in order", 128, 512)),
    ],
)
def test_schedule_compiles_for_hopper(kernel: str, d_head: int, most_spilled_bytes: int) -> None:
    found = report(COMPILE, kernel, d_head)
    assert found["spill_stores"] <= most_spilled_bytes
    assert found["wgmma"] > 0
    assert not found["serialised"]
    assert found["warps"] in (12, 16)
    assert found["shared"] <= 227 * 1024
    # Behind all tiles: what a barrier leaves behind would else race with the copies of a tile into the same bytes.
    assert found["barriers"][0] > found["shared"] - 1024
    assert len(found["barriers"]) == len(set(found["barriers"]))
